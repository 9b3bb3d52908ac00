#!/usr/bin/env python3
"""Looks for host code that no unit test watches: makes changes by machine, each behind a switch in one build, and lists those
that no test notices.

    .venv/bin/python -m pip install -r scripts/requirements-sweep.txt
    .venv/bin/python dev/mutants/sweep.py [--files GLOB]... [--changes N] [--seed S] [--seconds T] [--report FILE]

A change negates a condition, drops an operand of && or ||, leaves out a statement, moves a bound by one, exchanges + and -,
or adds one to a number. Each unit test runs once alone, which tells what it reaches; then each change runs with the tests
that reach it, the cheapest and most specific first, until one is red or --seconds of tests are spent. Works in a copy in
build/sweep, each test in a process namespace of its own, for a changed program may send signals to anybody. --files chooses
among the sources of llmc/ without the kernels; a thousand changes take about ten minutes on two cores, after seven for the
build and for each test alone.

What lives has to be read: most of it makes no difference that anyone could see, such as memory that is not reserved or a
check behind another check; some of it only tests of whole programs find. The rest is what this is for: it gets a test.

Exit codes: 0 the changes were judged, whatever lived; 2 they could not be.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from changes import MOST, Change, in_file, write  # noqa: E402
from tree import ROOT, Unusable, copy_tree  # noqa: E402

HOME = ROOT / "build" / "sweep"
TREE = HOME / "tree"
REACHED = HOME / "reached"
TESTS = "build/release/unit_tests"
# The compiler's own headers, which the package libclang does not bring: those of clang-tidy, of make lint.
HEADERS = "/usr/lib/llvm-*/lib/clang/*/include"
NAMESPACE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
LIMITS = ["prlimit", "--fsize=4000000000", "--as=12000000000"]
START_SECONDS = 0.05  # of a test program, with nothing to do


# ---- the changed build -----------------------------------------------------------------------------------------------


def sources(patterns: list[str]) -> list[str]:
    names = subprocess.run(["git", "ls-files", "llmc"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    host = [name for name in names if name.endswith((".cpp", ".h")) and not name.startswith(("llmc/cpu/", "llmc/cuda/"))]
    return [name for name in host if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def find(files: list[str]) -> list[Change]:
    """All changes of `files` in the copy. A header is read with the first source that includes it."""
    import clang.cindex

    headers = sorted(Path("/").glob(HEADERS.removeprefix("/")))
    if not headers:
        raise Unusable(f"no {HEADERS}: scripts/deps.sh --lint installs them")
    words = ["-x", "c++", "-std=c++20", "-fopenmp", f"-I{TREE}", "-isystem", str(headers[-1])]
    left = {str(TREE / name): name for name in files}
    index, changes = clang.cindex.Index.create(), []
    for file in sorted(files, key=lambda name: name.endswith(".h")):
        if str(TREE / file) not in left:
            continue
        declarations = collections.defaultdict(list)
        for cursor in index.parse(str(TREE / file), args=words).cursor.get_children():
            if cursor.location.file is not None and cursor.location.file.name in left:
                declarations[cursor.location.file.name].append(cursor)
        for path in {str(TREE / file), *declarations}:
            name = left.pop(path)
            changes += [change for cursor in declarations[path] for change in in_file(TREE, name, cursor)]
    return list(dict.fromkeys(changes))


def build() -> None:
    command = ["make", f"-j{os.cpu_count()}", "NVCC=", "MODE_FLAGS_release=-O1", "tests"]
    done = subprocess.run(command, cwd=TREE, env={**os.environ, "CXXFLAGS": "-w"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unusable(f"the changed tree does not build:\n{done.stderr[-3000:]}")


# ---- tests -----------------------------------------------------------------------------------------------------------


def run(tests: list[str], seconds: float, **variables: str) -> str:
    """Why tests are red; empty if they are green."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(HOME / "tmp"), **variables}
    command = [*NAMESPACE, *LIMITS, f"./{TESTS}", "--gtest_fail_fast", f"--gtest_filter={':'.join(tests)}"]
    try:
        done = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, errors="replace",
                              timeout=seconds)
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode == 0:
        return ""
    red = [line.split("] ", 1)[1] for line in done.stdout.splitlines() if line.startswith("[  FAILED  ] ")]
    return red[0] if red else f"ends with {done.returncode}"


class Tests:
    """The unit tests, and what each of them reaches."""

    def __init__(self, jobs: int):
        listed = subprocess.run([f"./{TESTS}", "--gtest_list_tests"], cwd=TREE, capture_output=True, text=True, check=True)
        suite, names = "", []
        for line in listed.stdout.splitlines():
            if line.startswith("  "):
                names.append(suite + line.split()[0])
            else:
                suite = line.split("#")[0].strip()
        shutil.rmtree(REACHED, ignore_errors=True)
        REACHED.mkdir(parents=True)
        self.seconds: dict[str, float] = {}
        self.reached: dict[str, int] = {}  # how many changes
        self.of_change: dict[int, list[str]] = collections.defaultdict(list)
        self.red: list[str] = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for name, why in zip(names, pool.map(self._alone, names)):
                if why:
                    self.red.append(name)
                    continue
                log = REACHED / name.replace("/", "%")
                numbers = [n for n, byte in enumerate(log.read_bytes()) if byte] if log.exists() else []
                self.reached[name] = len(numbers)
                for number in numbers:
                    self.of_change[number].append(name)

    def _alone(self, name: str) -> str:
        start = time.monotonic()
        why = run([name], 120, WEFT_PLANTED_LOG=str(REACHED / name.replace("/", "%")))
        self.seconds[name] = max(0.001, time.monotonic() - start - START_SECONDS)
        return why

    def verdict(self, number: int, seconds: float) -> str:
        """The test that finds a change; empty if none does in `seconds` of tests."""
        tests = sorted(self.of_change[number], key=lambda name: self.reached[name] * (0.02 + self.seconds[name]))
        spent, first = 0.0, True
        while tests and spent < seconds:
            batch: list[str] = []
            cost = 0.0
            while tests and len(batch) < 300 and (not batch or cost < (seconds / 15 if first else seconds - spent)):
                batch.append(tests.pop(0))
                cost += self.seconds[batch[-1]]
            if why := run(batch, 10 + 5 * cost, WEFT_PLANTED=str(number)):
                return why
            spent, first = spent + cost, False
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Changes host code by machine and lists what no unit test notices.")
    parser.add_argument("--files", action="append", default=[], metavar="GLOB", help="as 'llmc/infer/*.cpp'; default: all")
    parser.add_argument("--changes", type=int, default=1000, help="how many, drawn at random (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--seconds", type=float, default=5, help="of tests for each change (default 5)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tests at once (default: one a core)")
    parser.add_argument("--report", type=Path, help="write all verdicts as JSON")
    options = parser.parse_args()
    try:
        if subprocess.run([*NAMESPACE, *LIMITS, "true"], capture_output=True).returncode != 0:
            raise Unusable("no process namespaces here (unshare --pid): a changed program could signal any process")
        (HOME / "tmp").mkdir(parents=True, exist_ok=True)
        copy_tree(TREE, None)
        found = find(sources(options.files))
        random.Random(options.seed).shuffle(found)
        changes = dict(enumerate(found[:min(options.changes, MOST - 1)], 1))
        if not changes:
            raise Unusable("--files: nothing to change in them")
        write(TREE, changes)
        print(f"{len(changes)} of {len(found)} changes; building", flush=True)
        build()
        tests = Tests(options.jobs)
        if tests.red:
            print(f"red without any change, and left out: {', '.join(tests.red)}")
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            verdicts = dict(zip(changes, pool.map(
                lambda number: tests.verdict(number, options.seconds) if tests.of_change[number] else "", changes)))
    except Unusable as problem:
        print(f"sweep: {problem}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as problem:
        print(f"sweep: {problem}: .venv/bin/python -m pip install -r scripts/requirements-sweep.txt", file=sys.stderr)
        return 2
    alive = [number for number in changes if not verdicts[number]]
    for number in sorted(alive, key=lambda n: (changes[n].file, changes[n].line)):
        change, how = changes[number], "lived" if tests.of_change[number] else "not run"
        print(f"{change.file}:{change.line}: {how}: {change.kind}: {change.code[:160]}")
    unreached = sum(not tests.of_change[number] for number in alive)
    print(f"{len(changes) - len(alive)} found, {len(alive) - unreached} lived, {unreached} in code that no unit test runs")
    if options.report:
        rows = [{"file": c.file, "line": c.line, "kind": c.kind, "code": c.code, "found_by": verdicts[n],
                 "tests": len(tests.of_change[n])} for n, c in changes.items()]
        options.report.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
