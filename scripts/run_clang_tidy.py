#!/usr/bin/env python3
"""clang-tidy over the host code, as many files at a time as there are cores; make lint calls it. 1 if it found something.

    .venv/bin/python scripts/run_clang_tidy.py [FILE...]      default: every host file of llmc/ and both programs

A file that was clean stays unread until it, a header of llmc/ or the configuration changes (build/tidy).
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
FOLDERS = ("base", "file", "text", "model", "cpu", "train", "infer", "serve", "app")
FLAGS = ["-xc++", "-std=c++20", "-march=native", "-fopenmp", "-I.", "-Ibuild/tidy"]


def host_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / "llmc" / folder).glob("*.cpp"))
            ] + ["train_llama.cu", "infer_pythia.cu"]


def fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main() -> int:
    files = sys.argv[1:] or host_files()
    CLEAN.mkdir(parents=True, exist_ok=True)
    (CLEAN / "version.h").write_text('#define WEFT_VERSION ""\n#define WEFT_BUILD ""\n')
    common = fingerprint([ROOT / ".clang-tidy", Path(__file__), *ROOT.glob("llmc/*/*.h")])

    def check(file: str) -> str:
        """What clang-tidy says; empty if nothing."""
        mark = CLEAN / (file.replace("/", "-") + ".clean")
        state = common + fingerprint([ROOT / file])
        if mark.exists() and mark.read_text() == state:
            return ""
        done = subprocess.run(["clang-tidy", "--quiet", file, "--", *FLAGS], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            return done.stdout or done.stderr or f"{file}: clang-tidy ended with {done.returncode}"
        mark.write_text(state)
        return ""

    red = 0
    with ThreadPoolExecutor(int(os.environ.get("TIDY_JOBS") or len(os.sched_getaffinity(0)))) as pool:
        for report in pool.map(check, files):
            if report:
                red += 1
                print(report, flush=True)
    print(f"clang-tidy: {len(files)} files, {red} with findings")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
