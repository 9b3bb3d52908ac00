"""One decoded token, or one prompt, under Nsight Compute, operator by operator.

    make profile-infer                                                    a token of pythia-2.8b at context 1000
    python3 dev/bench/profile_decode.py --model pythia-410m --context 64
    python3 dev/bench/profile_decode.py --prompt --context 2048           a prompt of that many ids

infer_pythia --decode reference names each operator by an NVTX range inside one that is called "token N" or "prompt of N"; ncu
measures the kernels of that range alone, one after another, and here they are added up by operator. So what overlaps in a
real run (a kernel's first loads under the one before) does not overlap here: the sum is more than the time of a token.
Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections import defaultdict

from profile_step import NANOSECONDS, ROOT, fail, find_ncu

METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def measure(options: argparse.Namespace) -> list[dict[str, str]]:
    """One row a kernel and metric; the names of kernels are those of the innermost NVTX range."""
    # The warm-up of --bench decodes the first four tokens of a context, so that the sixth comes by once.
    name = f"prompt of {options.context}/" if options.prompt else f"token {options.context + 5}/"
    command = [find_ncu(), "--clock-control", "none", "--cache-control", "none", "--nvtx", "--nvtx-include", name,
               "--print-nvtx-rename", "kernel", "--metrics", ",".join(METRICS), "--csv", "--launch-count",
               str(options.kernels), str(ROOT / "infer_pythia"), "--device", "cuda", "--decode", "reference", "--dtype",
               options.dtype, "--random-model", options.model, "--bench", "--max-tokens", "4", "--bench-contexts",
               str(options.context)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=options.timeout)
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
    kernels: dict[str, dict[str, float]] = defaultdict(dict)
    names = {}
    for row in rows:
        metric = METRICS.get(row["Metric Name"])
        if metric is None:
            continue
        value = float(row["Metric Value"].replace(",", "") or "nan")
        if metric == "time":
            value *= NANOSECONDS[row["Metric Unit"]]
        if metric == "read":
            value *= BYTES[row["Metric Unit"]]
        kernels[row["ID"]][metric] = value
        names[row["ID"]] = row["Kernel Name"]
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for identity, values in kernels.items():
        one = sums[names[identity]]
        one["kernels"] += 1
        one["time"] += values["time"]
        one["read"] += values.get("read", float("nan"))
        for metric in ("dram", "tensor", "occupancy"):
            one[metric] += values.get(metric, float("nan")) * values["time"]
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-2.8b")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--prompt", action="store_true", help="the prompt of --context ids instead of a token after it")
    parser.add_argument("--kernels", type=int, default=1000, help="measure no more than these first ones")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that ncu may take")
    options = parser.parse_args()
    sums = by_operator(measure(options))
    total = sum(one["time"] for one in sums.values())
    what = f"a prompt of {options.context}" if options.prompt else f"a token at context {options.context + 5}"
    print(f"{options.model} in {options.dtype}, {what}")
    print("| operator | kernels | us | us each | % | read, GB/s | DRAM % | tensor pipe % | occupancy % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in sorted(sums.items(), key=lambda item: -item[1]["time"]):
        mean = {metric: one[metric] / one["time"] for metric in ("dram", "tensor", "occupancy")}
        print(f"| {name} | {one['kernels']:.0f} | {one['time'] * 1e-3:.1f} | {one['time'] * 1e-3 / one['kernels']:.2f} | "
              f"{100 * one['time'] / total:.1f} | {one['read'] / one['time']:.0f} | {mean['dram']:.0f} | "
              f"{mean['tensor']:.0f} | {mean['occupancy']:.0f} |")
    print(f"{sum(one['kernels'] for one in sums.values()):.0f} kernels, {total * 1e-6:.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
