"""How much of a training step the GPU works, or what each kernel adds to a step of inference: the time line of the kernels, as CUPTI
records it.

    python3 dev/bench/timeline.py [--config d12 --seq-len 1024 --micro-batch 32] [--precision fp8] [--gpus N [--shard parameters]]
                                  [--no-graph]
    python3 dev/bench/timeline.py --inference="--random-model llama3.1-8b --bench-batch 64 --max-tokens 96"
    python3 dev/bench/timeline.py --inference="--random-model llama3.1-8b --bench --bench-contexts 8192,32768"

Runs train_llama --bench, takes the last steps (from one gradient norm to the next) of each of its processes and prints the
share of their time in which at least one kernel, copy or fill ran, the largest gaps with what stands before and behind them,
and the kernels by time; with several GPUs also how long nothing ran but copies and the sum of the ranks: what they cost
beside the passes. Kernels keep their lengths while they are recorded; the host gets slower, so that gaps it causes look longer, not
shorter.

With --inference it runs infer_pythia with these options and shows what each kernel adds to a decoded step or to a prompt. Work is
cut at the rests of --bench; where kernels sample often between two of them, their steps are shown, and otherwise the whole. Kernels
overlap: what one adds is the time from the end of the one before to its own.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import NoReturn

import needs_gpu

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 10
REST_NS = 20_000_000  # well below the 200 ms that --bench rests before a measurement
Work = tuple[int, int, str]  # begin and end in nanoseconds, name


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(4)


def find_cupti() -> Path:
    """libcupti of the toolkit, or the one that PyTorch brings."""
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/extras/CUPTI/lib64", "/usr/local/cuda/lib64",
              "/usr/local/cuda/targets/*/lib"]
    for package in ("nvidia", "torch"):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            places += [place + "/cuda_cupti/lib", place + "/cu13/lib", place + "/lib"]
    for place in places:
        for found in sorted(glob.glob(place + "/libcupti.so*")):
            return Path(found)
    fail("libcupti: not found in the CUDA toolkit (extras/CUPTI) nor beside PyTorch")


def record(command: list[str]) -> list[list[Work]]:
    """The time line of each process of the command that used a GPU."""
    cupti = find_cupti()
    with tempfile.TemporaryDirectory() as scratch:
        library, lines = Path(scratch) / "timeline.so", Path(scratch) / "timeline.txt"
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        subprocess.run(["g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{home}/include", f"-I{home}/extras/CUPTI/include",
                        str(ROOT / "dev/bench/timeline.cpp"), str(cupti), f"-Wl,-rpath,{cupti.parent}", "-o", str(library)],
                       check=True)
        result = subprocess.run(command, text=True, cwd=ROOT,
                                env={**os.environ, "LD_PRELOAD": str(library), "TIMELINE_OUT": str(lines)})
        files = sorted(lines.parent.glob(lines.name + ".*"))
        if result.returncode:
            fail(f"{Path(command[0]).name} ended with {result.returncode}")
        processes = ((line.split(" ", 2) for line in file.read_text().splitlines()) for file in files)
        work = [sorted((int(begin), int(end), name) for begin, end, name in rows) for rows in processes]
        work = [rows for rows in work if rows]  # the process that starts the ranks may ask the driver for its GPUs, too
        if not work:
            fail(f"{len(files)} processes opened a time line, none wrote to it: {cupti} has recorded nothing")
        return work


def covered(work: list[Work]) -> int:
    """Nanoseconds in which at least one of the pieces of work ran; they are sorted."""
    total = at = 0
    for begin, end, _ in work:
        total += max(0, end - max(begin, at))
        at = max(at, end)
    return total


def short(name: str) -> str:
    """A mangled name by its kernel, or else by its longest word. In front of an identifier stands its length."""
    found = [name[digits.end():digits.end() + int(length)] for digits in re.finditer(r"\d+", name)
             for length in (digits.group()[-2:], digits.group()[-1:])]
    kernels = [identifier for identifier in found if re.fullmatch(r"[a-z][a-z0-9_]*_kernel", identifier)]
    if kernels:
        return kernels[-1]
    words = re.findall(r"[A-Za-z][A-Za-z0-9_]{3,}", re.sub(r"\d+", lambda n: " " if len(n.group()) < 3 else n.group(), name))
    return max(words, key=len, default=name)[:44]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="d12")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--shard", default="optimizer")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--inference", metavar="OPTIONS", help="of infer_pythia, which runs in the place of train_llama")
    options = parser.parse_args()
    needs_gpu.by_program(ROOT / ("train_llama" if options.inference is None else "infer_pythia"))
    if options.inference is not None:
        for work in record([str(ROOT / "infer_pythia"), "--device", "cuda", *shlex.split(options.inference)]):
            show_inference(work)
        return 0
    command = [str(ROOT / "train_llama"), "--device", "cuda", "--bench", "--config", options.config, "--seq-len",
               str(options.seq_len), "--micro-batch", str(options.micro_batch), "--precision", options.precision]
    command += ["--gpus", str(options.gpus), "--shard", options.shard] if options.gpus > 1 else []
    for work in record(command + (["--no-graph"] if options.no_graph else [])):
        show(work, options)
    return 0


def steps_of(work: list[Work]) -> list[list[Work]]:
    """The steps of decoding, from one kernel that samples to the next (both), of the most frequent number of launches."""
    ends = [place for place, (_, _, name) in enumerate(work) if "sample_kernel" in name]
    steps = [work[before:end + 1] for before, end in zip(ends, ends[1:])]
    launches = Counter(len(step) for step in steps)
    return [step for step in steps if len(step) == launches.most_common(1)[0][0]]


def runs_of(work: list[Work]) -> list[list[Work]]:
    """What lies between two rests."""
    runs: list[list[Work]] = []
    busy_until = -REST_NS
    for one in work:
        if one[0] - busy_until > REST_NS:
            runs.append([])
        runs[-1].append(one)
        busy_until = max(busy_until, one[1])
    return runs


def show_added(title: str, steps: list[list[Work]]) -> None:
    """A line for each kernel: launches a step, microseconds that each adds to what ended before, and its own. The first
    piece of work of a step is what came before it."""
    added: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for step in steps:
        first, *work = sorted(step, key=lambda one: one[1])
        at = first[1]
        for begin, end, name in work:
            for place, value in enumerate((1, end - at, end - begin)):
                added[short(name)][place] += value
            at = end
    total = sum(time for _, time, _ in added.values()) / len(steps)
    print(f"{title}: {total * 1e-6:.3f} ms")
    for name, (count, time, length) in sorted(added.items(), key=lambda item: -item[1][1])[:12]:
        print(f"  {time / len(steps) * 1e-3:10.1f} us  {count / len(steps):6.1f} x {time / count * 1e-3:9.2f} us added, "
              f"{length / count * 1e-3:9.2f} us itself  {name}")


def show_inference(work: list[Work]) -> None:
    shown = 0
    for run in runs_of(work):
        steps = steps_of(run)
        if len(steps) >= STEPS:
            show_added(f"{len(steps)} steps of {len(steps[0]) - 1} launches", steps)
        elif len(run) > 2 * STEPS:
            show_added(f"between two rests, {len(run)} launches", [run])
        else:
            continue
        shown += 1
    if shown == 0:
        fail("the time line holds neither steps nor a prompt")


def show(work: list[Work], options: argparse.Namespace) -> None:
    ends = [end for _, end, name in work if "gradient_norm_kernel" in name][-STEPS - 1:]
    if len(ends) < STEPS + 1:
        fail("the time line holds fewer steps than expected")
    work = [row for row in work if ends[0] <= row[0] and row[1] <= ends[-1]]

    busy, at, before, gaps = 0, ends[0], "the last step", []
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for begin, end, name in work:
        if begin > at:
            gaps.append((begin - at, before, name))
        busy += max(0, end - max(begin, at))
        if end > at:
            at, before = end, name
        sums[short(name)][0] += 1
        sums[short(name)][1] += end - begin
    span = ends[-1] - ends[0]
    print(f"{options.config}, {options.precision}, {options.micro_batch} x {options.seq_len}{', single launches' if options.no_graph else ''}: "
          f"{span / STEPS * 1e-6:.3f} ms a step, {len(work) / STEPS:.0f} launches, GPU busy {100 * busy / span:.2f} %")
    if options.gpus > 1:
        passes = [row for row in work if not row[2].startswith("copy") and "add_ranks" not in row[2] and "nccl" not in row[2]]
        print(f"  nothing but copies and sums, or nothing: {(span - covered(passes)) / STEPS * 1e-6:.3f} ms a step")
    gaps.sort(reverse=True)
    for length, before, behind in gaps[:2 * STEPS:STEPS // 2]:
        print(f"  gap of {length * 1e-3:.1f} us between {short(before)} and {short(behind)}")
    small = [gap[0] for gap in gaps if gap[0] < 5000]
    print(f"  gaps below 5 us: {len(small) / STEPS:.0f} a step, {sum(small) / STEPS * 1e-3:.0f} us together")
    for name, (count, time) in sorted(sums.items(), key=lambda item: -item[1][1])[:12]:
        print(f"  {100 * time / span:5.2f} %  {count / STEPS:5.1f} x {time / count * 1e-3:8.1f} us  {name}")


if __name__ == "__main__":
    sys.exit(main())
