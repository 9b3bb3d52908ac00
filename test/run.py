"""Runs every test that this machine can run and prints one table; the last line is `N passed, N failed, N skipped`.

Called by `make test`, which has built what it needs. Suites:

    unit        build/release/unit_tests      C++ (GoogleTest)
    unit asan   build/asan/unit_tests         the same under AddressSanitizer and UndefinedBehaviorSanitizer
    threads     build/tsan/thread_tests       the threads that read ahead and save, under ThreadSanitizer
    runs tsan   test/python/test_train_cli.py whole runs of build/tsan/train_llama, with signals, faults and saves
    python      test/python                   scripts and whole programs (pytest)
    gpu         build/release/gpu_tests       kernels against the CPU reference; needs a GPU
    fuzz        test/fuzz                     each target for FUZZ_S seconds, where FUZZ_S is in the environment

GPU=must in the environment refuses to skip the GPU suite. A suite that dies, or that runs no test, counts as a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "test-results"


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
                              env={**os.environ, **(environment or {})}).returncode
    if code != 0:
        tail = log.read_text(errors="replace").splitlines()[-120:]
        print("\n".join(tail), flush=True)
    return code


def run_googletest(name: str, program: Path, environment: dict[str, str] | None = None,
                   prefix: tuple[str, ...] = ()) -> Outcome:
    outcome = Outcome(name)
    report = RESULTS / f"{name.replace(' ', '-')}.json"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    code = run([*prefix, str(program), "--gtest_brief=1", f"--gtest_output=json:{report}"], report.with_suffix(".log"), environment)
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
    if not report.exists() or (code != 0 and outcome.failed == 0):
        outcome.fail(f"pytest ended with exit code {code}")
    return outcome


def run_threads(tsan: Path) -> list[Outcome]:
    """Any race ends the program with 66. libgomp is not built for the tool, so there is one OpenMP thread; and GCC 12's
    run time does not know the address layouts of newer kernels, so their randomisation is off."""
    environment = {"OMP_NUM_THREADS": "1", "WEFT_BIN_DIR": str(tsan), "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    prefix = ("setarch", "--addr-no-randomize")
    if shutil.which("setarch") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        prefix = ()
    runs = ("test_a_run_and_what_it_leaves", "test_signals_from_outside", "test_terminated_saves_and_resumes",
            "test_a_failed_save_costs_a_checkpoint", "test_not_finite_numbers_skipped_or_run_again",
            "test_a_shard_replaced_meanwhile")
    return [run_googletest("threads", tsan / "thread_tests", environment, prefix),
            run_pytest("runs tsan", tuple(f"test/python/test_train_cli.py::{name}" for name in runs), environment, prefix)]


def run_gpu(release: Path) -> Outcome:
    program = release / "gpu_tests"
    if program.exists() and subprocess.run([str(program), "--gpu-present"], capture_output=True).returncode == 0:
        return run_googletest("gpu", program)
    outcome = Outcome("gpu")
    if os.environ.get("GPU") == "must":
        outcome.fail("GPU=must, but there is no usable GPU or no GPU build")
    elif program.exists():
        outcome.skipped = subprocess.run([str(program), "--gtest_list_tests"], capture_output=True,
                                         text=True).stdout.count("\n  ")
    return outcome


def run_fuzz(seconds: str) -> Outcome:
    """One test a target. Without clang's libFuzzer they are skipped, aloud."""
    outcome = Outcome("fuzz")
    report = RESULTS / "fuzz.json"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, "test/fuzz/run.py", "--seconds", seconds, "--report", str(report)]
    code = run(command, report.with_suffix(".log"))
    outcome.seconds = time.monotonic() - start
    if code == 77:
        outcome.skipped = len(list((ROOT / "test" / "fuzz").glob("*_fuzz.cpp")))
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


def main() -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    release, asan = ROOT / "build" / "release", ROOT / "build" / "asan"
    sanitizer = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    outcomes = [
        run_googletest("unit", release / "unit_tests"),
        run_googletest("unit asan", asan / "unit_tests", sanitizer),
        *run_threads(ROOT / "build" / "tsan"),
        run_pytest(),
        run_gpu(release),
    ]
    if os.environ.get("FUZZ_S", "0") != "0":
        outcomes.append(run_fuzz(os.environ["FUZZ_S"]))
    for outcome in outcomes:
        if outcome.name not in ("gpu", "fuzz") and outcome.passed + outcome.failed == 0:
            outcome.fail("no test ran")
    print(f"\n{'suite':<10} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for outcome in outcomes:
        print(f"{outcome.name:<10} {outcome.passed:>7} {outcome.failed:>7} {outcome.skipped:>8} {outcome.seconds:>8.0f}")
        for what in outcome.failures:
            print(f"  FAILED {what}")
    passed, failed, skipped = (sum(getattr(o, kind) for o in outcomes) for kind in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
