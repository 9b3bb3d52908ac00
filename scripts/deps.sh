#!/usr/bin/env bash
# System packages that weft builds with. Called by `make deps`, and by `make`, `make demo` and `make test` where something
# is missing.
#   scripts/deps.sh --check     exit 0 if everything is there; otherwise name what is missing and exit 4
#   scripts/deps.sh             install what is missing with the system's package manager
#   scripts/deps.sh --fuzz      the same, and clang with libFuzzer, which only `make fuzz` needs
#   scripts/deps.sh --browser   the same, and Chromium with its driver, in which the tests of the server's page run
#   scripts/deps.sh --lint      the same, and clang-format, clang-tidy and shellcheck, which only `make lint` needs
set -euo pipefail

# header or program : Debian package : Fedora package
needs=(
  "CLI/CLI.hpp           libcli11-dev          cli11-devel"
  "nlohmann/json.hpp     nlohmann-json3-dev    json-devel"
  "xxhash.h              libxxhash-dev         xxhash-devel"
  "pcre2.h               libpcre2-dev          pcre2-devel"
  "utf8proc.h            libutf8proc-dev       utf8proc-devel"
  "openblas_config.h     libopenblas-openmp-dev openblas-devel"
  "boost/beast.hpp       libboost-dev          boost-devel"  # headers alone: the HTTP of infer_pythia --serve
  "gtest/gtest.h         libgtest-dev          gtest-devel"
)

compiler=${CXX:-g++}
# Not quoted: a compiler may be two words, "ccache g++".
has_header() { echo "#if !__has_include(<$1>)
#error missing
#endif" | $compiler -E -x c++ - >/dev/null 2>&1; }

if [ "${1:-}" = --check ] && ! command -v "${compiler%% *}" >/dev/null; then
  echo "deps: no C++ compiler: $compiler is not there. Install g++, or name one with CXX=" >&2
  exit 4
fi

has_venv() { "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null; }

# clang and its sanitizer runtimes: on some systems the second come as a package of their own.
has_fuzzer() { echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
  "${FUZZ_CXX:-clang++}" -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null; }

missing_debian=() missing_fedora=() missing_names=()
for need in "${needs[@]}"; do
  read -r header debian fedora <<<"$need"
  has_header "$header" || { missing_debian+=("$debian"); missing_fedora+=("$fedora"); missing_names+=("$header"); }
done
has_venv || { missing_debian+=(python3-venv); missing_fedora+=(python3); missing_names+=("python3 venv"); }
command -v curl >/dev/null || { missing_debian+=(curl); missing_fedora+=(curl); missing_names+=(curl); }

# Not needed, so that --check does not miss it: line editing for infer_pythia --interactive.
if [ "${1:-}" != --check ] && ! has_header histedit.h; then
  missing_debian+=(libedit-dev); missing_fedora+=(libedit-devel); missing_names+=(histedit.h)
fi

if [ "${1:-}" = --fuzz ] && ! has_fuzzer; then
  missing_debian+=(clang libclang-rt-dev); missing_fedora+=(clang compiler-rt); missing_names+=(clang++ with libFuzzer)
fi

if [ "${1:-}" = --browser ] && ! { command -v chromium && command -v chromedriver; } >/dev/null; then
  missing_debian+=(chromium chromium-driver); missing_fedora+=(chromium chromedriver); missing_names+=(chromium and chromedriver)
fi

if [ "${1:-}" = --lint ]; then
  for tool in clang-format clang-tidy shellcheck; do
    command -v "$tool" >/dev/null || { missing_debian+=("$tool"); missing_names+=("$tool"); }
  done
  command -v clang-format >/dev/null && command -v clang-tidy >/dev/null || missing_fedora+=(clang-tools-extra)
  command -v shellcheck >/dev/null || missing_fedora+=(ShellCheck)
  # clang-tidy reads omp.h as clang has it.
  ls /usr/lib/llvm-*/lib/clang/*/include/omp.h /usr/lib*/clang/*/include/omp.h >/dev/null 2>&1 || {
    missing_debian+=(libomp-dev); missing_fedora+=(libomp-devel); missing_names+=(omp.h of clang); }
fi

if [ ${#missing_names[@]} -eq 0 ]; then
  [ "${1:-}" = --check ] || echo "deps: everything is installed"
  exit 0
fi

if command -v apt-get >/dev/null; then
  install="apt-get install -y --no-install-recommends ${missing_debian[*]}"
elif command -v dnf >/dev/null; then
  install="dnf install -y ${missing_fedora[*]}"
else
  install="(install with your package manager: ${missing_debian[*]})"
fi

if [ "${1:-}" = --check ]; then
  printf -v list '%s, ' "${missing_names[@]}"
  echo "deps: missing: ${list%, }. Run: make deps   (that is: $install)" >&2
  exit 4
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "deps: not root and no sudo. As root, run: $install" >&2; exit 4; }
  as_root=(sudo)
fi
case "$install" in
  apt-get*)
    echo "deps: $install"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -qq "${missing_debian[@]}" >/dev/null
    ;;
  dnf*) "${as_root[@]}" dnf install -y "${missing_fedora[@]}" ;;
  *) echo "deps: $install" >&2; exit 4 ;;
esac
exec "$0" --check
