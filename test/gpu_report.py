"""Runs the GPU tests and keeps the evidence; or says whether the evidence is older than the code it speaks of.

    python3 test/gpu_report.py               run build/release/gpu_tests, write test/reports/gpu_<name>.json; 1 on failure
    python3 test/gpu_report.py --shards 4    the same in four processes at once: most of the time is the CPU reference's
    python3 test/gpu_report.py --again       only those that its report of this GPU has not as passed; the report keeps the others, and
                                             says in "first_run" when they ran
    python3 test/gpu_report.py --check       compare the newest report's source hash with the tree (exit 0 either way)
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "test" / "reports"
PROGRAM = ROOT / "build" / "release" / "gpu_tests"
SOURCES = ("llmc/cuda/**/*", "test/gpu/**/*")


def source_hash() -> str:
    """sha256 over the names and contents, without white space, of everything that runs on the GPU, and of its tests."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in SOURCES for p in ROOT.glob(pattern) if p.is_file()}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + b"".join(path.read_bytes().split()) + b"\0")
    return digest.hexdigest()


def gpu_facts() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    name, driver = (part.strip() for part in subprocess.check_output(query, text=True).split(","))
    return {"gpu": name, "driver": driver}


def test_names() -> list[str]:
    """Suite.Test, as --gtest_filter takes them."""
    names, suite = [], ""
    for line in subprocess.check_output([str(PROGRAM), "--gtest_list_tests"], text=True, cwd=ROOT).splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  "):
            names.append(suite + name)
        elif name.endswith("."):
            suite = name
    return names


def shards_of(names: list[str], count: int) -> list[list[str]]:
    """All tests, the longest first and each to the shard that has the least to do, by the times of the last reports."""
    seconds = {test["name"]: float(test["seconds"]) for path in REPORTS.glob("gpu_*.json")
               for test in json.loads(path.read_text())["tests"]}
    shards: list[list[str]] = [[] for _ in range(count)]
    load = [0.0] * count
    for name in sorted(names, key=lambda name: -seconds.get(name, 1.0)):
        least = load.index(min(load))
        shards[least].append(name)
        load[least] += seconds.get(name, 1.0)
    return [shard for shard in shards if shard]


def last_lines(log: Path) -> str:
    """Of a process that did not end: the test that it is in."""
    begun = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("[ RUN")]
    return begun[-1] if begun else "before its first test"


def tests_of_log(log: Path) -> list[dict]:
    """The tests that a process had done when it was ended, as its JSON would have them."""
    done = re.findall(r"^\[ *(OK|FAILED|SKIPPED) *\] (\w\S*\.\w+)[^\n]* \((\d+) ms\)$", log.read_text(errors="replace"), re.M)
    tests = []
    for outcome, name, milliseconds in done:
        suite, test = name.rsplit(".", 1)
        tests.append({"suite": suite, "name": test, "time": f"{int(milliseconds) / 1000}s",
                      "result": "SKIPPED" if outcome == "SKIPPED" else "COMPLETED", **({"failures": [name]} if outcome == "FAILED" else {})})
    return tests


def run_shards(tests: list[str], count: int, limit: float) -> tuple[bool, list[dict]]:
    """Whether every process ended well within `limit` seconds, and the tests that they have done."""
    build = ROOT / "build"
    processes = []
    for index, names in enumerate(shards_of(tests, count)):
        output, log = build / f"gpu_tests_{index}.json", build / f"gpu_tests_{index}.log"
        output.unlink(missing_ok=True)
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))} if count > 1 else {}
        command = [str(PROGRAM), f"--gtest_filter={':'.join(names)}", f"--gtest_output=json:{output}"]
        with log.open("w") as stdout:
            processes.append((subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.STDOUT,
                                               env={**os.environ, **threads}), output, log))
    end = time.monotonic() + limit
    ended_well, done = True, []
    for process, output, log in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"not done after {limit:.0f} s: {last_lines(log)}")
        if process.returncode != 0:
            ended_well = False
            print("\n".join(line for line in log.read_text(errors="replace").splitlines() if "FAILED" in line or
                            "Failure" in line) or f"{log.name}: ended with {process.returncode}, {last_lines(log)}")
        if output.exists():
            done += [dict(test, suite=suite["name"]) for suite in json.loads(output.read_text())["testsuites"]
                     for test in suite["testsuite"]]
        else:
            ended_well = False
            done += tests_of_log(log)
    return ended_well, done


def report_text(report: dict[str, Any]) -> str:
    """JSON with a line for each test; one without a result has passed."""
    facts = json.dumps({key: value for key, value in report.items() if key != "tests"}, indent=1).removesuffix("\n}")
    tests = ",\n".join(json.dumps(test, separators=(",", ":")) for test in report["tests"])
    return f'{facts},\n "tests": [\n{tests}\n ]\n}}\n'


def line_of(test: dict) -> dict[str, str]:
    """What the report says of a test of GoogleTest's JSON."""
    failed, skipped = bool(test.get("failures")), test.get("result") == "SKIPPED"
    return {"name": f"{test['suite']}.{test['name']}", **({"result": "failed" if failed else "skipped"} if failed or skipped else {}),
            "seconds": test["time"].rstrip("s"), **{k: v for k, v in test.items() if k.startswith("metric_")}}


def run_tests(shards: int, limit: float, again: bool) -> int:
    REPORTS.mkdir(exist_ok=True)
    facts, names = gpu_facts(), test_names()
    path = REPORTS / f"gpu_{''.join(c if c.isalnum() else '_' for c in facts['gpu'].lower())}.json"
    earlier = json.loads(path.read_text()) if again else {"tests": []}
    kept = [test for test in earlier["tests"] if "result" not in test and test["name"] in names]
    wanted = sorted(set(names) - {test["name"] for test in kept})
    ended_well, done = run_shards(wanted, shards, limit)
    lines = [line_of(test) for test in done]
    not_run = len(set(wanted) - {line["name"] for line in lines})
    results = Counter(line.get("result", "passed") for line in kept + lines)
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **facts,
        "nvcc": subprocess.run("nvcc --version | sed -n 's/.*release //p'", shell=True, text=True,
                               capture_output=True).stdout.strip(),
        "source_sha256": source_hash(),
        **({"first_run": earlier.get("first_run", earlier["date"])} if again else {}),
        **{result: results[result] for result in ("passed", "failed", "skipped")},
        "not_run": not_run,
        "tests": kept + lines,
    }
    path.write_text(report_text(report))
    print(f"{report['passed']} passed, {report['failed']} failed, {report['skipped']} skipped" +
          (f", {not_run} not run before the limit" if not_run else ""))
    return 0 if ended_well and lines and not results["failed"] else 1


def check() -> int:
    reports = [json.loads(path.read_text()) for path in REPORTS.glob("gpu_*.json")]
    if not reports:
        print("GPU REPORT: none in test/reports: nothing shows that the kernels of this tree work")
        return 0
    newest = max(reports, key=lambda report: report["date"])
    where = f"{newest['gpu']}, {newest['date']}: {newest['passed']} passed, {newest['failed']} failed"
    fresh = newest["source_sha256"] == source_hash()
    print(f"GPU REPORT: {where}" if fresh else f"GPU REPORT IS OLDER THAN THE KERNELS ({where}): run test/gpu_report.py")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the newest report fits this tree")
    parser.add_argument("--again", action="store_true", help="only the tests that this GPU's report has not as passed")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="processes at once (default 1)")
    parser.add_argument("--limit", type=float, default=1800, metavar="S",
                        help="seconds after which what still runs is ended and named (default 1800)")
    options = parser.parse_args()
    if options.shards < 1:
        parser.error(f"--shards: got {options.shards}, expected 1 or more")
    sys.exit(check() if options.check else run_tests(options.shards, options.limit, options.again))
