#!/usr/bin/env python3
"""clang-tidy over the host code, as many runs at a time as there are cores; make lint calls it. 1 if it found something.

    .venv/bin/python scripts/run_clang_tidy.py [FILE...]      default: every host file of llmc/ and both programs

Most of a run's time goes into the standard library's headers, so that the files of a folder are read as one source that includes
them all. Files whose private names collide are no one source: those that are known to (APART) are read with another folder's, and
any other such batch is halved until its parts compile. A batch that was clean stays unread until one of its files, a header of
llmc/ or the configuration changes (build/tidy).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLEAN = ROOT / "build" / "tidy"
FOLDERS = ("base", "file", "text", "model", "model/formats", "model/optimizers", "cpu", "train", "infer", "serve", "app", "comm")
APART = ("model/families/*.cpp", "model/optimizers/muon.cpp", "cpu/low_rank.cpp", "cpu/training.cpp", "file/token_shard.cpp")
FLAGS = ["-xc++", "-std=c++20", "-march=native", "-fopenmp", "-I.", "-Ibuild/tidy"]


# Findings in the files that a batch includes count as those in headers do; that it includes .cpp is its purpose.
BATCH = ["--header-filter=llmc/.*", "--checks=-bugprone-suspicious-include"]


def default_batches() -> list[list[str]]:
    def files(pattern: str) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "llmc").glob(pattern))]

    apart = [file for pattern in APART for file in files(pattern)]
    batches = {folder: [file for file in files(f"{folder}/*.cpp") if file not in apart] for folder in FOLDERS}
    for file in apart:  # each to the smallest batch of another room that has none of them yet
        room = file.split("/")[1]
        others = [batch for folder, batch in batches.items() if folder.split("/")[0] != room]
        min(others, key=lambda batch: (len(set(batch) & set(apart)), len(batch))).append(file)
    return sorted(batches.values(), key=len, reverse=True) + [["train_llama.cu"], ["infer_pythia.cu"]]


def fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def findings(batch: list[str]) -> str:
    """What clang-tidy says about the files of a batch; empty if nothing."""
    source, extra = batch[0], []
    if len(batch) > 1:
        text = "".join(f'#include "{file}"\n' for file in batch)
        path = CLEAN / f"batch-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
        path.write_text(text)
        source, extra = str(path.relative_to(ROOT)), BATCH
    done = subprocess.run(["clang-tidy", "--quiet", *extra, source, "--", *FLAGS], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    if len(batch) > 1 and "clang-diagnostic-error" in done.stdout:
        half = len(batch) // 2
        return findings(batch[:half]) + findings(batch[half:])
    return done.stdout or done.stderr or f"{source}: clang-tidy ended with {done.returncode}"


def main() -> int:
    batches = [[file] for file in sys.argv[1:]] or default_batches()
    CLEAN.mkdir(parents=True, exist_ok=True)
    (CLEAN / "version.h").write_text('#define WEFT_VERSION ""\n#define WEFT_BUILD ""\n')
    common = fingerprint([ROOT / ".clang-tidy", Path(__file__), *ROOT.glob("llmc/**/*.h")])

    def check(batch: list[str]) -> str:
        mark = CLEAN / f"{hashlib.sha256(' '.join(batch).encode()).hexdigest()[:16]}.clean"
        state = common + fingerprint([ROOT / file for file in batch])
        if mark.exists() and mark.read_text() == state:
            return ""
        report = findings(batch)
        if not report:
            mark.write_text(state)
        return report

    red = 0
    with ThreadPoolExecutor(int(os.environ.get("TIDY_JOBS") or len(os.sched_getaffinity(0)))) as pool:
        for report in pool.map(check, batches):
            if report:
                red += 1
                print(report, flush=True)
    print(f"clang-tidy: {sum(map(len, batches))} files in {len(batches)} batches, {red} with findings")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
