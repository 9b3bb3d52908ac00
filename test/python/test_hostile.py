"""Runs the table of bad input (hostile_cases.py) through the real programs, built with ASan and UBSan.

WEFT_ASAN_BIN_DIR says where they are; without it build/asan (`make programs MODE=asan NVCC=`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import hostile_cases as hc  # noqa: E402

PROGRAMS = Path(os.environ.get("WEFT_ASAN_BIN_DIR", hc.ROOT / "build" / "asan")).absolute()
SCRIPTS = {name: hc.ROOT / ("dev" if name == "prepare_data.py" else "scripts") / name for name in (
    "convert_hf.py", "export_hf.py", "tensor_file.py", "prepare_data.py", "plot_log.py")}
# Bad input is refused within a second. The sanitized programs are built with -O1 and check every access: on valid
# input they take about four times the processor time of the release build.
CPU_SECONDS = 4.0
WALL_SECONDS = 60.0  # only ends what hangs: the machine may be busy
MEMORY = 300 << 20  # the sanitizers' own, the libraries', and no allocation that the small files do not justify
NOBODY = 65534

for program in ("train_llama", "infer_pythia"):
    if not (PROGRAMS / program).exists():
        pytest.skip(f"{PROGRAMS / program} is not built", allow_module_level=True)


@dataclass
class Done:
    code: int
    stdout: str
    stderr: str
    cpu_seconds: float
    memory: int  # greatest resident set, bytes


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
            "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8",
            # What was freed is not kept for long: it would count as memory.
            "ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=8:malloc_context_size=5:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1"}


def command_line(arguments: list[Any]) -> list[str]:
    first, *rest = map(str, arguments)
    program = [sys.executable, str(SCRIPTS[first])] if first in SCRIPTS else [str(PROGRAMS / first)]
    return [*program, *rest]


# The kernel counts the memory of the process that forks into that of its child. So a small process starts the program
# and reports on the descriptor that is its first argument: exit code, processor time, greatest resident set in KiB. The
# second argument is the user to become, if any.
LAUNCHER = """
import os, sys
child = os.fork()
if child == 0:
    if sys.argv[2]:
        os.setgroups([])
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
_, status, usage = os.wait4(child, 0)
report = f"{os.waitstatus_to_exitcode(status)} {usage.ru_utime + usage.ru_stime} {usage.ru_maxrss}"
os.write(int(sys.argv[1]), report.encode())
"""


def run(arguments: list[Any], here: Path, user: int | None = None) -> Done:
    """Runs a program with `here` as working directory and measures it."""
    reader, writer = os.pipe()
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(writer), "" if user is None else str(user)]
    process = subprocess.Popen([*launcher, *command_line(arguments)], cwd=here, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), pass_fds=[writer],
                               start_new_session=True)
    os.close(writer)
    try:
        out, err = process.communicate(timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        os.close(reader)
        pytest.fail(f"it hangs: {arguments}")
    with open(reader, "rb") as report:
        code, seconds, kilobytes = report.read().split()
    texts = [text.decode("utf-8", "backslashreplace") for text in (out, err)]
    return Done(int(code), *texts, float(seconds), int(kilobytes) * 1024)


def listing(here: Path) -> dict[str, tuple[int, int]]:
    """Every entry below `here` with its type and size."""
    return {str(path.relative_to(here)): (path.lstat().st_mode, 0 if path.is_dir() else path.lstat().st_size)
            for path in sorted(here.rglob("*"))}


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Valid files in `base`, and place for the cases; other users may look into it."""
    root = Path(tempfile.mkdtemp(prefix="weft_hostile_"))
    root.chmod(0o755)
    hc.make_base(root / "base")
    done = run(hc.train_options(out="run"), root / "base")
    assert done.code == hc.OK, done.stderr
    yield root
    shutil.rmtree(root)


def assert_one_error(done: Done, case: hc.Case) -> None:
    """The exit code, one error line at the end with every word in it (none at all where the code is OK), and nothing of a
    crash."""
    report = f"exit code {done.code}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    assert not re.search(r"Sanitizer|runtime error:|Traceback|internal error", done.stderr), report
    assert done.code == case.code, report
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if case.code == hc.OK:
        assert not errors, report
        errors = [" ".join(lines)]
    elif case.code == hc.INTERNAL:  # a comparison that failed is a result
        errors = done.stdout.splitlines()[-1:]
    else:
        assert len(errors) == 1 and lines[-1] == errors[0], report
    assert all(character.isprintable() for line in lines for character in line), report
    for word in case.words:
        assert word.lower() in errors[0].lower(), f"{word!r} is not in the message\n{report}"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in hc.CASES])
def test_bad_input_is_refused(room, case):
    here = room / "case"
    here.mkdir()
    try:
        arguments = case.make(here)
        before = listing(here)
        user = NOBODY if case.without_rights and os.geteuid() == 0 else None
        if user is not None and run(["train_llama", "--version"], here, user).code != hc.OK:
            pytest.skip("other users cannot reach the programs, and root may read everything")
        done = run(arguments, here, user)
        assert_one_error(done, case)
        assert done.cpu_seconds < CPU_SECONDS and done.memory < MEMORY, done
        if case.code != hc.OK:
            assert listing(here) == before, "something was left behind"
    finally:
        for folder in here.rglob("*"):
            if folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o755)
        shutil.rmtree(here)


def test_names_are_unique():
    names = [case.name for case in hc.CASES]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}


def test_every_number_has_a_row():
    rows = {name[:3] for name in (case.name for case in hc.CASES) if re.match(r"B\d\d", name)}
    assert rows | hc.ELSEWHERE.keys() == {f"B{number:02}" for number in range(1, 99)}
    assert not rows & hc.ELSEWHERE.keys()


# ---- every place in a header, sampled: test/cpp/tensor_file_test.cpp and token_shard_test.cpp try them all ------------


@pytest.mark.parametrize("step", [37])
def test_headers_cut_and_flipped(room, step):
    """Whole programs on files that are cut, or differ in one bit, at every `step`th byte of the header part."""
    for source, arguments in ((hc.MODEL, hc.infer_options("hostile.bin")),
                              (hc.BASE / "data" / "train_0.bin", hc.train_options(train="hostile.bin"))):
        here = room / "case"
        here.mkdir()
        data = (here / source).read_bytes()
        end = 80 if source == hc.MODEL else 64  # the fields; the rest of the page is zero
        cuts = [data[:at] for at in range(1, end, step)]
        flips = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1:] for at in range(0, end, step)]
        for content in cuts + flips:
            (here / "hostile.bin").write_bytes(content)
            assert_one_error(run(arguments, here), hc.Case("", lambda here: [], hc.BAD_FILE, ("hostile.bin",)))
        shutil.rmtree(here)
