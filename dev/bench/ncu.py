"""Nsight Compute as the profiling scripts use it: the kernels of one NVTX range, measured and added up by operator.

The programs name each operator by an NVTX range of its own, and ncu puts the innermost one in front of a kernel's name. Clocks
are left as they are: with ncu's own fixed clock the times would be those of another GPU.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
SHARES = ("dram", "tensor", "occupancy")
UNITS = {"nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9,
         "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "%": 1}


def fail(message: str) -> NoReturn:
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


def measure(program: list[str], nvtx_range: str, kernels: int, timeout: int) -> list[dict[str, str]]:
    """One row a kernel and metric, of the first `kernels` kernels that `program` launches within the range. A kernel's name is
    "operator/function"."""
    # If these metrics need several passes the program runs again for each (on an H200 they need one): saving and restoring
    # gigabytes between two passes of a kernel takes far longer.
    command = [find_ncu(), "--clock-control", "none", "--cache-control", "none", "--replay-mode", "application", "--nvtx",
               "--nvtx-include", nvtx_range + "/", "--print-nvtx-rename", "kernel", "--metrics", ",".join(METRICS), "--csv",
               "--launch-count", str(kernels), *program]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout)
    except subprocess.TimeoutExpired:
        fail(f"ncu: not done after {timeout} seconds. Choose a smaller model or fewer --kernels")
    if "ERR_NVGPUCTRPERM" in result.stdout + result.stderr:
        fail("ncu: no permission to read the GPU's counters. Run as root, or load the driver with "
             "NVreg_RestrictProfilingToAdminUsers=0")
    lines = result.stdout.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if result.returncode or begin is None:
        errors = [line for line in lines + result.stderr.splitlines() if "==ERROR==" in line or line.startswith("error")]
        fail(f"ncu: {(errors or ['it measured no kernel'])[-1]}")
    return list(csv.DictReader(io.StringIO("\n".join(line for line in lines[begin:] if line.startswith('"')))))


def by_operator(rows: list[dict[str, str]]) -> dict[str, dict[str, float]]:
    """For each operator, longest first: kernels, time in ns, bytes read, and the shares, each a mean weighted by time."""
    kernels: dict[str, dict[str, float]] = defaultdict(dict)
    names = {}
    for row in rows:
        if metric := METRICS.get(row["Metric Name"]):
            kernels[row["ID"]][metric] = float(row["Metric Value"].replace(",", "") or "nan") * UNITS[row["Metric Unit"]]
            names[row["ID"]] = row["Kernel Name"].split("/", 1)[0]
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for identity, values in kernels.items():
        one = sums[names[identity]]
        one["kernels"] += 1
        one["time"] += values["time"]
        one["read"] += values["read"]
        for share in SHARES:
            one[share] += values[share] * values["time"]
    for one in sums.values():
        for share in SHARES:
            one[share] /= one["time"]
    return dict(sorted(sums.items(), key=lambda item: -item[1]["time"]))
