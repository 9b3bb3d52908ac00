#!/usr/bin/env python3
"""Proof that the tests can fail: plants the bugs of rows/, one at a time, and wants at least one test red for each.

    make mutants                       all of them
    python3 dev/mutants/run.py [--commit REV] [--only TEXT]... [--report FILE]
    python3 dev/mutants/run.py --check     does every row still apply, and is there each test that it names? Nothing is built

Works in a copy of the tree in build/mutants, never in the tree itself; --commit takes a revision instead of the working
tree. A bug survives if the tests that its row names stay green. Bugs in GPU code are skipped, and counted, where there is no
GPU.

Exit codes: 0 each was found; 1 some survived; 2 a row that does not apply or does not compile, or tests that are red
without any bug.
"""

from __future__ import annotations

import argparse
import ast
import collections
import fnmatch
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import anchor  # noqa: E402
from mutant import Mutant  # noqa: E402
from rows import MUTANTS  # noqa: E402
from tree import ROOT, Unusable, copy_tree  # noqa: E402

HOME = ROOT / "build" / "mutants"
TREE = HOME / "tree"
OUT = TREE / "build" / "release"
TIME_LIMIT = 300  # seconds for one run of tests: a bug may make them hang, and that is red too
PROGRAMS = ("train_llama", "infer_pythia")
LINKED = ("libinfer.a", "libweft.a", "unit_tests", "gpu_tests", *PROGRAMS)


# ---- building and testing --------------------------------------------------------------------------------------------


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True).stdout.startswith(b"GPU")


def make(targets: list[str], gpu: bool) -> subprocess.CompletedProcess:
    # The programs by their links in the root, under which test/python looks for them.
    command = ["make", "ROOMS=", f"-j{os.cpu_count()}", *([] if gpu else ["NVCC="]),
               *(name if name in PROGRAMS else f"build/release/{name}" for name in targets)]
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, errors="replace")


def targets_of(tests: tuple[str, ...]) -> list[str]:
    kinds = {test.split(":")[0] for test in tests}
    return [name for kind, names in (("unit", ["unit_tests"]), ("gpu", ["gpu_tests"]),
                                     ("py", ["train_llama", "infer_pythia", "tokenize", "data_order"])) if kind in kinds
            for name in names]


def run_googletest(program: str, selection: str) -> tuple[int, list[str]]:
    """How many tests ran, and what is red."""
    report = HOME / "report.json"
    report.unlink(missing_ok=True)
    command = [str(OUT / program), f"--gtest_filter={selection}", "--gtest_brief=1", f"--gtest_output=json:{report}"]
    try:
        done = subprocess.run(command, cwd=TREE, capture_output=True, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return 1, [f"{program} {selection}: does not end"]
    if done.returncode not in (0, 1) or not report.exists():  # a crash
        return 1, [f"{program} {selection}: ends with {done.returncode}"]
    tests = [(f"{suite['name']}.{test['name']}", test) for suite in json.loads(report.read_text())["testsuites"]
             for test in suite["testsuite"]]
    ran = [name for name, test in tests if test.get("result") == "COMPLETED"]
    return len(ran), [name for name, test in tests if test.get("failures")]


def run_pytest(selections: list[str]) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no",
               *(f"test/python/{selection}" for selection in selections)]
    try:
        done = subprocess.run(command, cwd=TREE, capture_output=True, timeout=TIME_LIMIT, text=True, errors="replace")
    except subprocess.TimeoutExpired:
        return 1, [f"{' '.join(selections)}: does not end"]
    red = re.findall(r"^(?:FAILED|ERROR) test/python/(\S+)", done.stdout, re.M)
    passed = sum(int(number) for number in re.findall(r"(\d+) passed", done.stdout))
    if done.returncode not in (0, 1, 5):
        red = red or [f"pytest ends with {done.returncode}"]
    return passed + len(red), red


def red_tests(tests: tuple[str, ...]) -> tuple[int, list[str]]:
    """Runs what the row names until something is red; how many tests ran, and what is red."""
    count = 0
    by_kind: dict[str, list[str]] = {}
    for test in tests:
        kind, selection = test.split(":", 1)
        by_kind.setdefault(kind, []).append(selection)
    for kind, selections in by_kind.items():
        if kind == "py":
            ran, red = run_pytest(selections)
        else:
            ran, red = run_googletest("gpu_tests" if kind == "gpu" else "unit_tests", ":".join(selections))
        count += ran
        if red:
            return count, red
    return count, []


def require_green(mutants: list[Mutant], gpu: bool) -> None:
    """Without a bug every named test is green, and every name is that of at least one test."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    built = make(targets_of(tuple(tests)), gpu)
    if built.returncode != 0:
        raise Unusable(f"the tree does not build:\n{built.stdout[-3000:]}{built.stderr[-3000:]}")
    for kind, program in (("unit", "unit_tests"), ("gpu", "gpu_tests")):
        filters = [test.split(":", 1)[1] for test in tests if test.startswith(f"{kind}:")]
        for one in filters:
            listed = subprocess.run([str(OUT / program), f"--gtest_filter={one}", "--gtest_list_tests"], cwd=TREE,
                                    capture_output=True, text=True).stdout
            if "\n  " not in listed:
                raise Unusable(f"{kind}:{one} names no test")
        _, red = run_googletest(program, ":".join(filters)) if filters else (0, [])
        if red:
            raise Unusable(f"red without any bug: {', '.join(red[:5])}")
    for selection in [test.removeprefix("py:") for test in tests if test.startswith("py:")]:
        ran, red = run_pytest([selection])
        if red or ran == 0:
            raise Unusable(f"py:{selection}: {'red without any bug: ' + red[0] if red else 'names no test'}")


# ---- one bug ---------------------------------------------------------------------------------------------------------


def places_of(mutant: Mutant, tree: Path) -> list[anchor.Place]:
    return anchor.find(tree, mutant.room, mutant.anchor, mutant.old)


def where_of(mutant: Mutant) -> str:
    return f"{mutant.room}: {mutant.anchor}"


def with_bug(mutant: Mutant, place: anchor.Place) -> str:
    text = place.file.read_text()
    return text[:place.begin] + mutant.new + text[place.end:]


def problems_of(mutants: list[Mutant], tree: Path) -> list[str]:
    """The rows that do not apply to `tree`, change nothing there or name no test, each with the reason."""
    problems = []
    names: set[str] = set()
    for mutant in mutants:
        places = places_of(mutant, tree)
        if not places and not anchor.texts_of(tree, mutant.room, mutant.anchor):
            problems.append(f"{mutant.name}: there is no {where_of(mutant)}")
        elif len(places) != 1:
            problems.append(f"{mutant.name}: its text occurs {len(places)} times in {where_of(mutant)}, expected once")
        elif places[0].file.suffix == ".py" and not is_python(with_bug(mutant, places[0])):
            problems.append(f"{mutant.name}: what it makes is no Python")
        if mutant.old.split() == mutant.new.split():
            problems.append(f"{mutant.name}: changes nothing")
        if mutant.name in names:
            problems.append(f"{mutant.name}: two rows have this name")
        names.add(mutant.name)
        problems += [f"{mutant.name}: {test}: {why}" for test in mutant.tests if (why := unknown_test(test, tree))]
    return problems


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def unknown_test(test: str, tree: Path) -> str:
    """Why there is no test of a row, by the sources alone; empty if there is one."""
    kind, _, selection = test.partition(":")
    if kind == "py":
        file, *names = selection.split("::")
        path = tree / "test" / "python" / file
        if not path.is_file():
            return "no such file"
        name = names[0].split("[")[0] if names else ""
        return "" if not name or re.search(rf"^def {re.escape(name)}\b", path.read_text(), re.M) else "no such test"
    if kind not in ("unit", "gpu"):
        return "expected unit:, py: or gpu:"
    names = googletest_names(tree / "test" / ("cpp" if kind == "unit" else "gpu"))
    return "" if any(fnmatch.fnmatchcase(name, selection) for name in names) else "no such test"


@functools.lru_cache(maxsize=None)
def googletest_names(folder: Path) -> list[str]:
    """The names under which GoogleTest has the tests of a folder; of those with parameters the first of each prefix."""
    text = "".join(path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in anchor.CPP)
    prefixes = collections.defaultdict(list)
    for prefix, suite in re.findall(r"\bINSTANTIATE_TEST_SUITE_P\(\s*(\w+),\s*(\w+)", text):
        prefixes[suite].append(prefix)
    names = []
    for kind, suite, name in re.findall(r"^(TEST(?:_F|_P)?|TYPED_TEST)\(\s*(\w+),\s*(\w+)\s*\)", text, re.M):
        forms = [f"{prefix}/{suite}.{name}/0" for prefix in prefixes[suite]] if kind == "TEST_P" else [f"{suite}.{name}"]
        names += [f"{suite}/0.{name}"] if kind == "TYPED_TEST" else forms
    return names


def require_applicable(mutants: list[Mutant]) -> None:
    if problems := problems_of(mutants, TREE):
        raise Unusable("\n".join(problems))


def check() -> int:
    """--check: seconds, before hours."""
    problems = problems_of(list(MUTANTS), ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(MUTANTS)} rows, {len(problems)} problems")
    return 2 if problems else 0


def object_of(file: str) -> Path | None:
    """What is compiled from a source file; None for others, such as a header, which is in many objects."""
    if not file.endswith((".cpp", ".cu")):
        return None
    return OUT / Path(file).with_suffix(".main.o" if Path(file).stem in PROGRAMS else ".o")


class Planted:
    """A bug in the copy, with its object file, for the time of a `with`."""

    def __init__(self, mutant: Mutant):
        (self.place,) = places_of(mutant, TREE)
        self.source = self.place.file
        built = object_of(str(self.source.relative_to(TREE)))
        self.object = built if built is not None and built.exists() else None
        self.mutant = mutant

    def __enter__(self) -> None:
        self.text = self.source.read_text()
        self.time = self.source.stat().st_mtime
        if self.object is not None:
            self.object.rename(self.object.with_suffix(".kept"))
        self.source.write_text(with_bug(self.mutant, self.place))

    def __exit__(self, *_: object) -> None:
        """As it was: the object with its time, and nothing linked from the one with the bug. A header keeps the time of now,
        so that the objects that were made from the one with the bug are made again."""
        self.source.write_text(self.text)
        if self.object is not None or self.source.suffix == ".py":  # Python's cache goes by time and size
            os.utime(self.source, (self.time, self.time))
        if self.object is None:
            return
        self.object.with_suffix(".kept").replace(self.object)
        for name in LINKED:
            (OUT / name).unlink(missing_ok=True)


def verdict(mutant: Mutant, gpu: bool) -> str:
    """What found the bug; empty if nothing did."""
    built = make(targets_of(mutant.tests), gpu)
    if built.returncode != 0:
        raise Unusable(f"{mutant.name}: does not compile:\n{built.stderr[-3000:]}")
    _, red = red_tests(mutant.tests)
    return red[0] + (f" and {len(red) - 1} more" if len(red) > 1 else "") if red else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants bugs and wants each to turn a test red.")
    parser.add_argument("--check", action="store_true", help="only say whether every row applies to the working tree")
    parser.add_argument("--commit", help="take this revision instead of the working tree")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="bugs whose name, room or anchor holds TEXT")
    parser.add_argument("--report", type=Path, help="write the table as JSON, after each bug")
    parser.add_argument("--resume", action="store_true", help="leave out what --report already holds")
    options = parser.parse_args()
    if options.check:
        return check()
    chosen = [m for m in MUTANTS if not options.only or any(text in field for text in options.only
                                                            for field in (m.name, m.room, m.anchor))]
    results: list[dict] = json.loads(options.report.read_text()) if options.resume and options.report.exists() else []
    done = {result["name"] for result in results}
    gpu = has_gpu()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `with` that takes the bug out again
    try:
        HOME.mkdir(parents=True, exist_ok=True)
        copy_tree(TREE, options.commit)
        require_applicable(chosen)
        runnable = [m for m in chosen if (gpu or not m.needs_gpu) and m.name not in done]
        require_green(runnable, gpu)
        for mutant in runnable:
            start = time.monotonic()
            with Planted(mutant):
                found = verdict(mutant, gpu)
            results.append({"name": mutant.name, "room": mutant.room, "anchor": mutant.anchor, "found_by": found,
                            "seconds": round(time.monotonic() - start, 1)})
            print(f"{'found   ' if found else 'SURVIVED'}  {mutant.name}  ({where_of(mutant)})  {found}", flush=True)
            if options.report:
                options.report.write_text(json.dumps(results, indent=1) + "\n")
    except Unusable as problem:
        print(f"mutants: {problem}", file=sys.stderr)
        return 2
    skipped = 0 if gpu else sum(mutant.needs_gpu for mutant in chosen)
    survived = sum(not result["found_by"] for result in results)
    if skipped:
        print(f"{skipped} bugs in GPU code were skipped: there is no GPU here")
    print(f"{len(results) - survived} found, {survived} survived, {skipped} skipped")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
