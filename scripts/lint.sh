#!/usr/bin/env bash
# make lint: everything that reads the code without running it. Exit 0 if nothing was found, 1 if something was, 4 if a tool
# is missing (scripts/deps.sh --lint installs those of the system; make lint itself those of Python).
#   scripts/lint.sh [format] [tidy] [ruff] [mypy] [shell]      default: all
# CXX names the compiler whose headers clang-tidy reads; TIDY_FILES= restricts it to some files.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 4
failures=0

need() { command -v "$1" >/dev/null || { echo "lint: $1 is not installed. Run: scripts/deps.sh --lint" >&2; exit 4; }; }
step() { printf '== %s\n' "$1"; }
check() { "$@" || failures=$((failures + 1)); }

# clang-format moves code from version to version: only the one that formatted the tree can check it.
format() {
  need clang-format
  local version
  version=$(clang-format --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
  if [ "$version" != 14 ]; then
    echo "lint: clang-format is version $version, the tree is formatted by 14: format SKIPPED" >&2
    return
  fi
  step "clang-format"
  check sh -c "git ls-files -z '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -0 clang-format --dry-run -Werror"
}

# Host code alone: clang 14 does not read CUDA 13.
tidy() {
  need clang-tidy
  step "clang-tidy"
  local files
  read -ra files <<<"${TIDY_FILES:-}"
  check .venv/bin/python scripts/run_clang_tidy.py "${files[@]}"
}

ruff() {
  step "ruff"
  check .venv/bin/python -m ruff check --quiet .
}

mypy() {
  step "mypy"
  # Each folder by itself: modules of two folders have the same name, and a script finds its neighbours.
  # test/python has no types: fixtures come by name.
  for folder in scripts dev dev/accuracy dev/data dev/mutants dev/bench dev/pictures test test/fuzz; do
    check env MYPYPATH="scripts:dev/data:$folder" .venv/bin/python -m mypy --no-error-summary "$folder"/*.py
  done
}

shell() {
  need shellcheck
  step "shellcheck"
  check sh -c "git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck"
}

[ $# -gt 0 ] || set -- format ruff mypy shell tidy
for name in "$@"; do
  case $name in
    format | tidy | ruff | mypy | shell) "$name" ;;
    *) echo "lint: got $name, expected format, tidy, ruff, mypy or shell" >&2; exit 2 ;;
  esac
done
[ "$failures" -eq 0 ] || { echo "lint: $failures of the checks failed" >&2; exit 1; }
echo "lint: clean"
