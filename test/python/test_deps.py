"""scripts/deps.sh: what is missing, and what it is called where, on machines that are made of stubs. Nothing is installed here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# header: its packages of Debian and of Fedora
HEADERS = {"CLI/CLI.hpp": ("libcli11-dev", "cli11-devel"), "nlohmann/json.hpp": ("nlohmann-json3-dev", "json-devel"), "xxhash.h": ("libxxhash-dev", "xxhash-devel"),
           "pcre2.h": ("libpcre2-dev", "pcre2-devel"), "utf8proc.h": ("libutf8proc-dev", "utf8proc-devel"),
           "openblas_config.h": ("libopenblas-openmp-dev", "openblas-devel"), "boost/beast.hpp": ("libboost-dev", "boost-devel"),
           "gtest/gtest.h": ("libgtest-dev", "gtest-devel")}
OPTIONAL = {"histedit.h": ("libedit-dev", "libedit-devel")}
ALL = [*HEADERS, *OPTIONAL]
NOTE = 'echo "${0##*/} $*" >>"$NOTES"'
FUZZER = 'case "$*" in "-fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null") while read -r line; do :; done;; *) exit 1;; esac'
MACHINE = {"python3": '[ "$*" = "-c import ensurepip, venv" ]', "curl": "", "id": "echo 0", "apt-get": NOTE, "ls": "", "clang++": FUZZER, "chromium": "",
           "chromedriver": "", "clang-format": "", "clang-tidy": "", "shellcheck": ""}


def compiler(headers):
    """Preprocesses what includes these headers alone."""
    asks = "\n".join(f'*"__has_include(<{header}>)"*) exit 0;;' for header in headers)
    return f'[ "$*" = "-E -x c++ -" ] || exit 1\ntext=$(while read -r line; do echo "$line"; done)\ncase "$text" in {asks} esac\nexit 1'


@pytest.fixture
def deps(tmp_path):
    """Runs the script where nothing but these commands is there; its result, and what the package manager was told."""
    commands = tmp_path / "bin"
    commands.mkdir()
    script = tmp_path / "deps.sh"
    shutil.copy(ROOT / "scripts" / "deps.sh", script)
    notes = tmp_path / "notes"

    def run(*words, headers=ALL, machine=None, **variables):
        for path in commands.iterdir():
            path.unlink()
        for tool in ("bash", "env"):
            (commands / tool).symlink_to(shutil.which(tool))
        for name, text in (MACHINE | {"g++": compiler(headers)} | (machine or {})).items():
            if text is not None:
                (commands / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
                (commands / name).chmod(0o755)
        notes.write_text("")
        outside = {name: value for name, value in os.environ.items() if name not in ("CXX", "FUZZ_CXX", "PYTHON")}
        done = subprocess.run([script, *words], capture_output=True, text=True, timeout=60,
                              env={**outside, "PATH": str(commands), "NOTES": str(notes), **variables})
        return done, notes.read_text().splitlines()

    return run


def missing(done, *names):
    assert done.returncode == 4 and not done.stdout, done
    found = re.fullmatch(r"deps: missing: (.*)\. Run: make deps   \(that is: (.*)\)\n", done.stderr)
    assert found and found[1].split(", ") == list(names), done
    return found[2]


@pytest.mark.parametrize("machine, name, debian, fedora", [
    ({"python3": "exit 1"}, "python3 venv", "python3-venv", "python3"), ({"python3": None}, "python3 venv", "python3-venv", "python3"),
    ({"curl": None}, "curl", "curl", "curl")])
def test_programs_that_are_needed(deps, machine, name, debian, fedora):
    assert missing(deps("--check", machine=machine)[0], name).endswith(f" {debian}")
    assert missing(deps("--check", machine={**machine, "apt-get": None, "dnf": ""})[0], name) == f"dnf install -y {fedora}"


def test_a_check_names_everything_at_once_and_installs_nothing(deps):
    done, told = deps("--check", headers=["xxhash.h"], machine={"curl": None})
    command = missing(done, *[name for name in HEADERS if name != "xxhash.h"], "curl")
    assert command.split()[4:] == [debian for name, (debian, _) in HEADERS.items() if name != "xxhash.h"] + ["curl"] and not told
    done, told = deps("--check", headers=HEADERS, machine={"clang++": None, "chromium": None, "clang-tidy": None, "ls": "exit 2"})
    assert (done.returncode, done.stdout, done.stderr, told) == (0, "", "", []), "what only some commands need is not missed"
    done, told = deps("--check", machine={"g++": None})
    assert done.returncode == 4 and done.stderr == "deps: no C++ compiler: g++ is not there. Install g++, or name one with CXX=\n"


def test_commands_under_other_names(deps):
    others = {"g++": None, "python3": None, "ccache": f'[ "$1" = g++-14 ] || exit 1; shift; {compiler(HEADERS)}', "python3.11": MACHINE["python3"]}
    done, _ = deps("--check", machine=others, CXX="ccache g++-14", PYTHON="python3.11")
    assert done.returncode == 0, done
    done, _ = deps("--check", CXX="ccache g++-14")
    assert done.returncode == 4 and "ccache g++-14 is not there" in done.stderr
    done, told = deps("--fuzz", machine={"clang++": None, "clang-19": FUZZER}, FUZZ_CXX="clang-19")
    assert done.stdout == "deps: everything is installed\n" and not told


def test_packages_are_installed_as_root_and_then_looked_for_again(deps):
    """By sudo where the user is another; what is still missing then is an error."""
    rest = [name for name in ALL if name != "pcre2.h"]
    done, told = deps(headers=rest)
    assert done.returncode == 4 and "missing: pcre2.h." in done.stderr and len(told) == 2
    sudo = f'{NOTE}; exec "$@"'
    done, told = deps(headers=rest, machine={"id": '[ "$*" = -u ] && echo 1000', "sudo": sudo})
    assert told == ["sudo apt-get update -qq", "apt-get update -qq",
                    "sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -qq libpcre2-dev",
                    "apt-get install -y --no-install-recommends -qq libpcre2-dev"]
    done, told = deps(headers=rest, machine={"id": "echo 1000"})
    assert done.returncode == 4 and not told and done.stderr == (
        "deps: not root and no sudo. As root, run: apt-get install -y --no-install-recommends libpcre2-dev\n")
    done, told = deps(headers=rest, machine={"apt-get": None})
    assert done.returncode == 4 and done.stderr == "deps: (install with your package manager: libpcre2-dev)\n"
    done, told = deps(headers=rest, machine={"apt-get": "exit 100"})
    assert done.returncode == 100, "a package manager that fails ends it"
    done, told = deps(headers=rest, machine={"apt-get": None, "dnf": NOTE, "id": "echo 1000", "sudo": sudo})
    assert told == ["sudo dnf install -y pcre2-devel", "dnf install -y pcre2-devel"]
