#!/usr/bin/env python3
"""Builds the fuzz targets and runs each for a while: make fuzz FUZZ_S=60.

    python3 test/fuzz/run.py [--seconds N | --runs N] [--report FILE] [TARGET...]

What a target has learnt stays in build/fuzz/corpus/<target>, so that the next run goes on from there. An input that makes
a target fail is left in build/fuzz/findings. Exit codes: 0 no finding, 1 a finding or a target that does not build, 77 no
clang with libFuzzer here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT / "test" / "fuzz" / "corpus"
BUILD = ROOT / "build" / "fuzz"
NO_FUZZER = 77
TARGETS = sorted(path.name.removesuffix("_fuzz.cpp") for path in (ROOT / "test" / "fuzz").glob("*_fuzz.cpp"))
# A reader may allocate what its file justifies; these files are of a few kilobytes.
LIMITS = ["-max_len=2048", "-timeout=5", "-malloc_limit_mb=64", "-rss_limit_mb=1024"]


def fuzzer_works(compiler: str) -> bool:
    program = "#include <cstddef>\nextern \"C\" int LLVMFuzzerTestOneInput(const unsigned char*, std::size_t) { return 0; }"
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o", f"{folder}/probe"]
        try:
            return subprocess.run(command, input=program.encode(), capture_output=True).returncode == 0
        except OSError:
            return False


def run(target: str, length: str) -> dict:
    """One target for the time or number of executions that `length` says; "problem" is empty if it found nothing."""
    corpus, findings = BUILD / "corpus" / target, BUILD / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    command = [BUILD / target, length, *LIMITS, "-entropic=0", "-close_fd_mask=1",
               "-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={findings}/{target}-",
               f"-dict={SEEDS / target}.dict", corpus, SEEDS / target]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=8:malloc_context_size=5"}
    start = time.monotonic()
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, stderr=subprocess.PIPE,
                          stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    text = done.stderr.decode("utf-8", "replace")
    executions = re.findall(r"number_of_executed_units: (\d+)", text) or re.findall(r"^#(\d+)", text, re.M) or ["0"]
    coverage = re.findall(r" cov: (\d+)", text) or ["0"]
    problem = ""
    if done.returncode != 0 or int(executions[-1]) == 0:
        lines = [line for line in text.splitlines() if re.search(r"ERROR|SUMMARY|not true|runtime error|Test unit", line)]
        problem = "; ".join(lines[:4]) or f"exit code {done.returncode}: {text[-500:]}"
    return {"target": target, "executions": int(executions[-1]), "coverage": int(coverage[-1]),
            "seconds": round(seconds, 1), "problem": problem}


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds and runs the fuzz targets.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--runs", type=int, help="executions of each target, instead of --seconds")
    parser.add_argument("--report", type=Path, help="write the results as JSON")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    chosen = options.targets or TARGETS
    if unknown := set(chosen) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    compiler = os.environ.get("FUZZ_CXX", "clang++")
    if not fuzzer_works(compiler):
        print(f"fuzz: {compiler} cannot build with -fsanitize=fuzzer,address,undefined. Install clang and its runtime: "
              "scripts/deps.sh --fuzz", file=sys.stderr)
        return NO_FUZZER
    build = ["make", "-f", "test/fuzz/fuzz.mk", f"-j{os.cpu_count()}", f"FUZZ_CXX={compiler}",
             *(f"build/fuzz/{target}" for target in chosen)]
    if subprocess.run(build, cwd=ROOT).returncode != 0:
        return 1
    print(f"{'target':<16} {'executions':>12} {'per second':>11} {'coverage':>9}  finding", flush=True)
    results = []
    for target in chosen:
        result = run(target, f"-runs={options.runs}" if options.runs else f"-max_total_time={options.seconds}")
        results.append(result)
        print(f"{target:<16} {result['executions']:>12,} {result['executions'] / max(result['seconds'], 0.1):>11,.0f} "
              f"{result['coverage']:>9,}  {result['problem'] or 'none'}", flush=True)
    if options.report:
        options.report.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(result["problem"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
