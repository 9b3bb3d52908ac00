"""Runs tests and prints one table; the last line is `N passed, N failed, N skipped`.

Called by `make test` (--quick: what a user waits for, marked *) and by `make test-all` (everything that this machine can run),
which have built what it needs. Suites:

    unit *      build/release/unit_tests      C++ (GoogleTest)
    bits        build/release/bits            equal bits on CPU kernels compiled for other CPUs, and equal bits among these
    unit asan   build/asan/unit_tests         the same, with the library under AddressSanitizer and UndefinedBehaviorSanitizer, but
                                              for MINUTES
    threads     build/tsan/thread_tests       the threads that read ahead, save and serve, under ThreadSanitizer, but for MINUTES
                                              and what has ONE_THREAD
    runs tsan   test/python/test_train_cli.py whole runs of build/tsan/train_llama, with signals, faults and saves
    python *    test/python                   scripts and whole programs (pytest); of these, QUICK_PYTHON
    headers     make headers                  each header compiles alone
    gpu *       build/release/gpu_tests       kernels against the CPU reference; needs a GPU
    fuzz        test/fuzz                     each target for FUZZ_S seconds, where FUZZ_S is in the environment; 0 skips them

    python3 test/run.py [--quick | --without-cuda | --after-quick FILE] [--save FILE] [--add FILE]
    python3 test/run.py --op WORD PROGRAM     the tests of PROGRAM whose names contain WORD (make test-op)

Suites run beside each other, a file of test/python being one of them: TEST_JOBS at a time (default: half the cores, at least
2), because most of them use one core most of the time; what mostly waits comes on top. What needs the GPU runs alone, at the end.
--without-cuda runs what a build for the CPU alone could answer otherwise than one with GPU code. --save keeps the rows,
--add counts the rows of an earlier run in; so does --after-quick with those of a run with --quick, whose tests are left out unless
GPU code may change the answer. GPU=must in the environment refuses to skip the GPU suite. TEST_UNTIL=T there, in seconds since
1970, is when all has to have ended: what CAN_WAIT begins last, and is skipped, aloud, where too little time is left for it. A suite
that dies, or that runs no test, counts as a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "test-results"
CORES = len(os.sched_getaffinity(0))
OUTPUT = threading.Lock()  # of the failures that are shown
PYTEST_COLLECTED_NOTHING = 5  # its exit code
# Files of test/python that wait for time limits, signals, servers that stall and windows of a benchmark: one of them at a time
# runs beside the others.
WAITING = ("test_faults", "test_ranks", "test_download", "test_serving_bench")
# Seconds that a suite, or a shard of it, takes on a slow machine, of those that a run with an end (TEST_UNTIL) can do without.
CAN_WAIT = {"unit asan": 120, "headers": 240, "fuzz": 420}
# What --quick runs of test/python: files, and which of their tests (as pytest -k).
QUICK_PYTHON = {
    "test_train_cli": "", "test_convert": "", "test_batch": "", "test_tokenizer": "", "test_infer_llama": "",
    "test_export": "", "test_tensor_file": "",
    "test_serve": "stream or alone or chunks or metrics or models or hostile or stop or logprobs or offsets",
}
# Unit tests that it leaves to test-all: those of more than some seconds.
SLOW_UNITS = ("FusedTolerance.*", "*EncodesEveryCodePoint*", "*Soak*", "TokenizerFile.RefusesMoreAddedTokens*",
              "BatchTest.AnAnswerOfMillions*", "Json.NoMoreValues*", "StateTest.AnyOrder*", "*.ARankThatHangsIsNamed*")
# Minutes of arithmetic, or of schedules, under a sanitizer, in code that other tests run there, too.
MINUTES = ("FusedTolerance.*", "*Soak*")
# Long tests, beside those of threads, of what has but one.
ONE_THREAD = ("Engine.RandomSchedules*", "Engine.PagesInFrontOfAWindow*", "Engine.DraftsChangeNoId*")
# Words in the names of tests whose answers may depend on whether the build has GPU code.
OF_THE_BUILD = "device or gpu or build or machine_lacks or auto_says or help_and_version or dry_run_checks"
# Suites share the cores: threads that wait must not keep the others from running.
SHARED = {"OMP_WAIT_POLICY": "passive"}


@dataclass
class Outcome:
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.failed += 1
        self.failures.append(what)


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> int:
    """Runs a command in the repository root with its output in `log`; echoes the log's end if it fails."""
    with log.open("wb") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                              env={**os.environ, **SHARED, **(environment or {})}).returncode
    if code != 0:
        tail = log.read_text(errors="replace").splitlines()[-120:]
        with OUTPUT:
            print("\n".join(tail), flush=True)
    return code


def run_googletest(name: str, program: Path, environment: dict[str, str] | None = None,
                   prefix: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> Outcome:
    outcome = Outcome(name)
    report = RESULTS / f"{name.replace(' ', '-')}.json"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    code = run([*prefix, str(program), "--gtest_brief=1", f"--gtest_output=json:{report}", *arguments], report.with_suffix(".log"), environment)
    outcome.seconds = time.monotonic() - start
    if report.exists():
        for suite in json.loads(report.read_text())["testsuites"]:
            for test in suite["testsuite"]:
                if test.get("failures"):
                    outcome.fail(f"{suite['name']}.{test['name']}")
                elif test.get("result") == "SKIPPED" or test.get("status") == "NOTRUN":
                    outcome.skipped += 1
                else:
                    outcome.passed += 1
    if not report.exists() or (code != 0 and outcome.failed == 0):
        outcome.fail(f"{program.name} ended with exit code {code}")
    return outcome


def run_pytest(name: str = "python", selection: tuple[str, ...] = ("test/python",),
               environment: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> Outcome:
    outcome = Outcome(name)
    report = RESULTS / f"{name.replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    code = run([*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection,
                f"--junitxml={report}"], report.with_suffix(".log"), environment)
    outcome.seconds = time.monotonic() - start
    if report.exists():
        for test in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in test}
            if kinds & {"failure", "error"}:
                outcome.fail(f"{test.get('classname')}.{test.get('name')}")
            elif "skipped" in kinds:
                outcome.skipped += 1
            else:
                outcome.passed += 1
    # A file that skips itself as a whole (the GPU tests on a machine without one) collects nothing, which pytest calls an error.
    ended_well = code == 0 or (code == PYTEST_COLLECTED_NOTHING and outcome.skipped > 0)
    if not report.exists() or (not ended_well and outcome.failed == 0):
        outcome.fail(f"pytest ended with exit code {code}")
    return outcome


def python_files() -> list[Path]:
    """The files of the suite, those that are likely to take longest first: size is a fair guess."""
    return sorted((ROOT / "test" / "python").glob("test_*.py"), key=lambda path: -path.stat().st_size)


def run_python_file(path: Path, words: str = "") -> list[Outcome]:
    return [run_pytest(f"python {path.stem}", (str(path.relative_to(ROOT)), *(("-k", words) if words else ())))]


def run_quick_again() -> list[Outcome]:
    """Of the files that --quick runs whole, what may depend on the build."""
    files = (f"test/python/{name}.py" for name, words in QUICK_PYTHON.items() if not words)
    return [run_pytest("python again", (*files, "-k", OF_THE_BUILD))]


def joined(name: str, parts: list[Outcome]) -> Outcome:
    """One row of several; its seconds are the sum, part of which passed at the same time."""
    whole = Outcome(name)
    for part in parts:
        whole.passed, whole.failed, whole.skipped = (getattr(whole, kind) + getattr(part, kind)
                                                     for kind in ("passed", "failed", "skipped"))
        whole.seconds += part.seconds
        whole.failures += part.failures
    return whole


def no_time_for(name: str) -> bool:
    left = float(os.environ.get("TEST_UNTIL") or "inf") - time.time()
    if left < CAN_WAIT[name]:
        print(f"{name.upper()} SKIPPED: {max(0, left):.0f} seconds are left, and it may take {CAN_WAIT[name]}", flush=True)
    return left < CAN_WAIT[name]


def run_headers(compilers: int = max(1, CORES // 2)) -> Outcome:
    """One test a header; those that only nvcc can compile are skipped without it."""
    outcome = Outcome("headers")
    log = RESULTS / "headers.log"
    make = ["make", "--no-print-directory", f"-j{compilers}", "-k"]
    clean = {"MAKEFLAGS": "", "MAKELEVEL": "0"}  # the jobs of a make above are not handed down to here
    listed = subprocess.run([*make, "list-headers"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **clean})
    kinds = [line.split(" ", 1)[0] for line in listed.stdout.splitlines()]
    if kinds and no_time_for("headers"):
        outcome.skipped = len(kinds)
        return outcome
    start = time.monotonic()
    code = run([*make, "headers"], log, clean)
    outcome.seconds = time.monotonic() - start
    for line in re.findall(r"^header FAILED (.*)$", log.read_text(errors="replace"), re.M):
        outcome.fail(line)
    outcome.skipped = kinds.count("skipped")
    outcome.passed = kinds.count("compiled") - outcome.failed
    if code != 0 and outcome.failed == 0:
        outcome.fail(f"make headers ended with exit code {code}")
    return outcome


def run_without_cuda() -> Outcome:
    """Whole programs, and the build itself, where the answer may depend on whether there is GPU code."""
    return run_pytest("no cuda", ("test/python", "-k", OF_THE_BUILD,
                                  "--ignore=test/python/test_train_gpu.py", "--ignore=test/python/test_infer_gpu.py"))


def all_but(*patterns: str) -> tuple[str, ...]:
    """The arguments of a program whose tests of these names are left out."""
    return (f"--gtest_filter=-{':'.join(patterns)}",)


def run_shards(name: str, program: Path, shards: int, environment: dict[str, str] | None = None, prefix: tuple[str, ...] = (),
               arguments: tuple[str, ...] = ()) -> dict[str, Callable[[], list[Outcome]]]:
    """A program's tests as jobs that run beside each other."""
    def shard(index: int) -> list[Outcome]:
        if name in CAN_WAIT and no_time_for(name):
            listed = subprocess.run([str(program), "--gtest_list_tests", *arguments], capture_output=True, text=True).stdout.count("\n  ")
            return [Outcome(f"{name} {index}", skipped=len(range(index, listed, shards)))]
        part = {**(environment or {}), "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(index)}
        return [run_googletest(f"{name} {index}", program, part, prefix, arguments)]
    return {f"{name} {index}": partial(shard, index) for index in range(shards)}


def tsan_jobs(tsan: Path) -> dict[str, Callable[[], list[Outcome]]]:
    """Any race ends the program with 66. libgomp is not built for the tool, so there is one OpenMP thread; and GCC 12's
    run time does not know the address layouts of newer kernels, so their randomisation is off. A process waits 50 ms at its end
    for races that only show there, not the second that is usual: some tests end hundreds."""
    environment = {"OMP_NUM_THREADS": "1", "WEFT_BIN_DIR": str(tsan), "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 atexit_sleep_ms=50"}
    prefix: tuple[str, ...] = ("setarch", "--addr-no-randomize")
    if shutil.which("setarch") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        prefix = ()
    runs = ("test_a_run_and_what_it_leaves", "test_signals_from_outside", "test_terminated_saves_and_resumes",
            "test_a_failed_save_costs_a_checkpoint", "test_not_finite_numbers_skipped_or_run_again",
            "test_a_shard_replaced_meanwhile")
    jobs = run_shards("threads", tsan / "thread_tests", 2, environment, prefix, all_but(*MINUTES, *ONE_THREAD))
    jobs["runs tsan"] = lambda: [run_pytest("runs tsan", tuple(f"test/python/test_train_cli.py::{name}" for name in runs), environment,
                                            prefix)]
    return jobs


def run_bits(release: Path) -> Outcome:
    """The tests of equal bits on kernels compiled as for other CPUs; and one test for each pair of builds that may differ in no bit."""
    bits = release / "bits"
    has_v3 = {"avx2", "fma", "bmi2", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split())
    builds = ["native-zen", *(["v3", "v3-zen"] if has_v3 else [])]
    whole = joined("bits", [run_googletest(f"bits {build}", bits / build / "tests", {"OMP_NUM_THREADS": "2"}) for build in builds])
    printed = {build: subprocess.run([path / "cpu_bits"], capture_output=True, text=True).stdout
               for build, path in [("native", release), *((build, bits / build) for build in builds)]}
    for one, other in [("native", "native-zen"), *([("v3", "v3-zen")] if has_v3 else [])]:
        differ = [a for a, b in zip(printed[one].splitlines(), printed[other].splitlines(), strict=False) if a != b]
        if not printed[one] or printed[one] != printed[other]:
            whole.fail(f"cpu_bits: {one} and {other} differ: {', '.join(differ) or 'other lines'}")
        else:
            whole.passed += 1
    if not has_v3:
        whole.skipped += 1
    return whole


def run_operator(word: str, program: Path) -> Outcome:
    """The tests of a program whose names contain `word`, whatever the case of its letters."""
    names, suite = [], ""
    for line in subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True).stdout.splitlines():
        if line.startswith("  "):
            names.append(suite + line.split("#")[0].strip())
        else:
            suite = line.split("#")[0].strip()
    chosen = [name for name in names if word.lower() in name.lower()]
    return run_googletest(f"op {word}", program, arguments=(f"--gtest_filter={':'.join(chosen)}",))


def run_gpu(release: Path) -> Outcome:
    program = release / "gpu_tests"
    if program.exists() and subprocess.run([str(program), "--gpu-present"], capture_output=True).returncode == 0:
        return run_googletest("gpu", program)
    outcome = Outcome("gpu")
    if os.environ.get("GPU") == "must":
        outcome.fail("GPU=must, but there is no usable GPU or no GPU build")
    elif not program.exists():  # without nvcc: as many as the files hold, a typed or parametrised test counted once
        outcome.skipped = sum(len(re.findall(r"^(?:TYPED_)?TEST(?:_F|_P)?\(", path.read_text(), re.M))
                              for path in (ROOT / "test" / "gpu").glob("*_test.cpp"))
    else:
        outcome.skipped = subprocess.run([str(program), "--gtest_list_tests"], capture_output=True,
                                         text=True).stdout.count("\n  ")
    return outcome


def run_fuzz(seconds: str) -> Outcome:
    """One test a target. Without clang's libFuzzer they are skipped, aloud."""
    outcome = Outcome("fuzz")
    targets = len(list((ROOT / "test" / "fuzz").glob("*_fuzz.cpp")))
    if seconds == "0" or no_time_for("fuzz"):
        outcome.skipped = targets
        return outcome
    report = RESULTS / "fuzz.json"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, "test/fuzz/run.py", "--seconds", seconds, "--report", str(report)]
    code = run(command, report.with_suffix(".log"))
    outcome.seconds = time.monotonic() - start
    if code == 77:
        outcome.skipped = targets
        print(f"FUZZING SKIPPED: {outcome.skipped} targets were not run, because clang's libFuzzer is not there")
    elif not report.exists():
        outcome.fail(f"test/fuzz/run.py ended with exit code {code}")
    else:
        for result in json.loads(report.read_text()):
            if result["problem"]:
                outcome.fail(f"{result['target']}: {result['problem']}")
            else:
                outcome.passed += 1
    return outcome


def run_jobs(jobs: dict[str, Callable[[], list[Outcome]]]) -> dict[str, list[Outcome]]:
    """Runs them beside each other, begun in their order."""
    at_once = int(os.environ.get("TEST_JOBS") or max(2, CORES // 2))
    with ThreadPoolExecutor(at_once) as pool, ThreadPoolExecutor(1) as beside:
        running = {name: (beside if name in WAITING and at_once > 1 else pool).submit(job) for name, job in jobs.items()}
    return {name: future.result() for name, future in running.items()}


def rows_of(name: str, done: dict[str, list[Outcome]]) -> Outcome:
    """One row of the shards of `name`."""
    return joined(name, [row for job in done if re.fullmatch(rf"{name} \d+", job) for row in done[job]])


def run_quick() -> list[Outcome]:
    release = ROOT / "build" / "release"
    jobs = run_shards("unit", release / "unit_tests", 2, arguments=all_but(*SLOW_UNITS))
    jobs |= {name: partial(lambda name, selection: [run_pytest(f"python {name}", selection)], name,
                           (f"test/python/{name}.py", *(("-k", words) if words else ())))
             for name, words in QUICK_PYTHON.items()}
    done = run_jobs(jobs)
    return [rows_of("unit", done),
            joined("python", [row for name in QUICK_PYTHON for row in done[name]]), run_gpu(release)]


def run_everything(after_quick: bool = False) -> list[Outcome]:
    """The rows, in the order of the table."""
    release, asan = ROOT / "build" / "release", ROOT / "build" / "asan"
    sanitizer = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    rest = (f"--gtest_filter={':'.join(SLOW_UNITS)}",) if after_quick else ()
    files = python_files()
    on_gpu = [path for path in files if "_gpu" in path.stem]
    jobs: dict[str, Callable[[], list[Outcome]]] = {}  # begun in this order: the long ones first, then what can wait
    jobs |= tsan_jobs(ROOT / "build" / "tsan")
    jobs |= {
        "unit": lambda: [run_googletest("unit", release / "unit_tests", arguments=rest)],
        "bits": lambda: [run_bits(release)],
    }
    if after_quick:
        jobs["again"] = run_quick_again
    for path in files:
        words = QUICK_PYTHON.get(path.stem) if after_quick else None
        if path not in on_gpu and words != "":
            jobs[path.stem] = partial(run_python_file, path, f"not ({words}) or {OF_THE_BUILD}" if words else "")
    jobs |= run_shards("unit asan", asan / "unit_tests", 8, sanitizer, arguments=all_but(*MINUTES))
    jobs["headers"] = lambda: [run_headers()]
    if "FUZZ_S" in os.environ:
        jobs["fuzz"] = lambda: [run_fuzz(os.environ["FUZZ_S"])]
    done = run_jobs(jobs)
    python = [done[name][0] for name in ("again", *(path.stem for path in files)) if name in done]
    python += [run_python_file(path)[0] for path in on_gpu]
    return [*done["unit"], *done["bits"], rows_of("unit asan", done), rows_of("threads", done), *done["runs tsan"],
            joined("python", python), *done["headers"], run_gpu(release), *done.get("fuzz", [])]


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs every test that this machine can run.")
    parser.add_argument("--quick", action="store_true", help="what a user waits for")
    parser.add_argument("--op", nargs=2, metavar=("WORD", "PROGRAM"), help="only the tests of PROGRAM whose names contain WORD")
    parser.add_argument("--without-cuda", action="store_true", help="only what may differ in a build for the CPU alone")
    parser.add_argument("--after-quick", type=Path, metavar="FILE", help="what --quick, which saved FILE, left")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the rows as JSON")
    parser.add_argument("--add", type=Path, metavar="FILE", action="append", default=[], help="count the rows of an earlier run in")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if options.op:
        outcomes = [run_operator(options.op[0], Path(options.op[1]).resolve())]
    elif options.without_cuda:
        outcomes = [run_without_cuda(), run_headers(CORES)]
    else:
        outcomes = run_quick() if options.quick else run_everything(options.after_quick is not None)
    may_be_skipped = ("gpu", "fuzz", *(CAN_WAIT if os.environ.get("TEST_UNTIL") else ()))
    for outcome in outcomes:
        if outcome.passed + outcome.failed + (outcome.skipped if outcome.name in may_be_skipped else 0) == 0:
            outcome.fail("no test ran")
    if options.save:
        options.save.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    earlier = [file for file in (options.after_quick, *options.add) if file]
    outcomes = [Outcome(**row) for file in earlier for row in json.loads(file.read_text())] + outcomes
    print(f"\n{'suite':<10} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for outcome in outcomes:
        print(f"{outcome.name:<10} {outcome.passed:>7} {outcome.failed:>7} {outcome.skipped:>8} {outcome.seconds:>8.0f}")
        for what in outcome.failures:
            print(f"  FAILED {what}")
    passed, failed, skipped = (sum(getattr(o, kind) for o in outcomes) for kind in ("passed", "failed", "skipped"))
    print(f"{time.monotonic() - start:.0f} seconds in all")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
