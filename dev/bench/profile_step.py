"""One training step under Nsight Compute, operator by operator.

    make profile                                           llama3.2-1b, T 2048, micro-batch 8
    python3 dev/bench/profile.py --config d12 --seq-len 1024 --micro-batch 32

train_llama names each operator by an NVTX range inside one that is called "timed step"; ncu measures the kernels of that
range alone and here they are added up by operator. DRAM, tensor pipe and occupancy are means over an operator's kernels,
weighted by their time. The floor is train_llama's own (--bench --operators): the longer of the bytes and the flops that the
operator cannot do without, over the copy bandwidth and the square product that it measures beside them. Clocks are left as
they are: with ncu's own fixed clock the times would be those of another GPU.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
NANOSECONDS = {"nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(4)


def find_ncu() -> str:
    found = shutil.which("ncu")
    for directory in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if not found and directory and (Path(directory) / "bin" / "ncu").exists():
            found = str(Path(directory) / "bin" / "ncu")
    if not found:
        fail("ncu: not found. Install Nsight Compute (it is part of the CUDA toolkit), or set CUDA_HOME")
    return found


def training(options: argparse.Namespace) -> list[str]:
    return [str(ROOT / "train_llama"), "--device", "cuda", "--bench", "--operators", "--json", "--config", options.config,
            "--seq-len", str(options.seq_len), "--micro-batch", str(options.micro_batch), "--recompute", options.recompute]


def operators(options: argparse.Namespace) -> dict:
    """What the program says of its operators: calls, flops, bytes, floor."""
    result = subprocess.run(training(options), capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        fail((result.stderr.strip().splitlines() or ["train_llama failed"])[-1].removeprefix("error: "))
    return json.loads(result.stdout)


def measure(ncu: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """One row a kernel and metric. The names of kernels are those of the innermost NVTX range: the operators."""
    # The program runs again for each pass: saving and restoring gigabytes between two passes of a kernel takes far longer.
    command = [ncu, "--clock-control", "none", "--cache-control", "none", "--replay-mode", "application", "--nvtx",
               "--nvtx-include", "timed step/", "--print-nvtx-rename", "kernel", "--metrics", ",".join(METRICS), "--csv", "--launch-count",
               str(options.kernels), *training(options)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        fail(f"ncu: not done after {options.timeout} seconds. Choose a smaller --config or fewer --kernels")
    if "ERR_NVGPUCTRPERM" in result.stdout + result.stderr:
        fail("ncu: no permission to read the GPU's counters. Run as root, or load the driver with "
             "NVreg_RestrictProfilingToAdminUsers=0")
    lines = result.stdout.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if result.returncode or begin is None:
        errors = [line for line in lines + result.stderr.splitlines() if "==ERROR==" in line or line.startswith("error")]
        fail(f"ncu: {(errors or ['it measured no kernel'])[-1]}")
    return list(csv.DictReader(io.StringIO("\n".join(line for line in lines[begin:] if line.startswith('"')))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3.2-1b")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--kernels", type=int, default=4000, help="measure no more than these first ones of the step")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that ncu may take")
    options = parser.parse_args()
    ncu = find_ncu()
    table = operators(options)
    floors = {row["name"]: row for row in table["operators"]}

    kernels: dict[str, dict[str, float]] = defaultdict(dict)
    names = {}
    for row in measure(ncu, options):
        value = float(row["Metric Value"].replace(",", "") or "nan")
        metric = METRICS.get(row["Metric Name"])
        if metric == "time":
            value *= NANOSECONDS[row["Metric Unit"]]
        if metric:
            kernels[row["ID"]][metric] = value
            names[row["ID"]] = row["Kernel Name"]
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for identity, values in kernels.items():
        one = sums[names[identity]]
        one["kernels"] += 1
        one["time"] += values["time"]
        for metric in ("dram", "tensor", "occupancy"):
            one[metric] += values.get(metric, float("nan")) * values["time"]
    total = sum(one["time"] for one in sums.values())

    print(f"{table['device']}, {options.config}, {options.micro_batch} x {options.seq_len}, {table['precision']}; floor: copy "
          f"{table['copy_bytes_per_s'] * 1e-9:.0f} GB/s, square product {table['square_flops_per_s'] * 1e-12:.0f} TF/s")
    print("| operator | kernels | us | % of step | DRAM % | tensor pipe % | occupancy % | floor share % |")
    print("|---|---|---|---|---|---|---|---|")
    for name, one in sorted(sums.items(), key=lambda item: -item[1]["time"]):
        mean = {metric: one[metric] / one["time"] for metric in ("dram", "tensor", "occupancy")}
        floor = f"{1e8 * floors[name]['floor_ms'] / one['time']:.0f}" if name in floors else "-"
        print(f"| {name} | {one['kernels']:.0f} | {one['time'] * 1e-3:.1f} | {100 * one['time'] / total:.1f} | "
              f"{mean['dram']:.0f} | {mean['tensor']:.0f} | {mean['occupancy']:.0f} | {floor} |")
    print(f"{len(kernels)} kernels, {total * 1e-6:.2f} ms; the step by events {table['step_ms']:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
