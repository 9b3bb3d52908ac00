"""One training step under Nsight Compute, operator by operator.

    make profile                                           llama3.2-1b, T 2048, micro-batch 8
    python3 dev/bench/profile_step.py --config d12 --seq-len 1024 --micro-batch 32

train_llama names each operator by an NVTX range inside one that is called "timed step"; ncu measures the kernels of that
range alone, one after another, and here they are added up by operator (dev/bench/ncu.py). DRAM, tensor pipe and occupancy are
means over an operator's kernels, weighted by their time. The floor is train_llama's own (--bench --operators): the longer of
the bytes and the flops that the operator cannot do without, over the copy bandwidth and the square product that it measures
beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import ncu
import needs_gpu


def training(options: argparse.Namespace) -> list[str]:
    return [str(ncu.ROOT / "train_llama"), "--device", "cuda", "--bench", "--operators", "--json", "--config", options.config,
            "--seq-len", str(options.seq_len), "--micro-batch", str(options.micro_batch), "--recompute", options.recompute]


def operators(options: argparse.Namespace) -> dict:
    """What the program says of its operators: calls, flops, bytes, floor."""
    result = subprocess.run(training(options), capture_output=True, text=True, cwd=ncu.ROOT)
    if result.returncode:
        ncu.fail((result.stderr.strip().splitlines() or ["train_llama failed"])[-1].removeprefix("error: "))
    return json.loads(result.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3.2-1b")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--kernels", type=int, default=4000, help="measure no more than these first ones of the step")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that ncu may take")
    options = parser.parse_args()
    table = operators(options)
    floors = {row["name"]: row["floor_ms"] for row in table["operators"]}
    begin = time.monotonic()
    # ncu would launch the nodes of the warm-up's graphs one by one.
    sums = ncu.by_operator(ncu.measure(training(options) + ["--no-graph"], "timed step", options.kernels, options.timeout))
    seconds = time.monotonic() - begin
    total = sum(one["time"] for one in sums.values())

    print(f"{table['device']}, {options.config}, {options.micro_batch} x {options.seq_len}, {table['precision']}; floor: copy "
          f"{table['copy_bytes_per_s'] * 1e-9:.0f} GB/s, square product {table['square_flops_per_s'] * 1e-12:.0f} TF/s")
    print("| operator | kernels | us | % of step | DRAM % | tensor pipe % | occupancy % | floor share % |")
    print("|---|---|---|---|---|---|---|---|")
    for name, one in sums.items():
        floor = f"{1e8 * floors[name] / one['time']:.0f}" if name in floors else "-"
        print(f"| {name} | {one['kernels']:.0f} | {one['time'] * 1e-3:.1f} | {100 * one['time'] / total:.1f} | "
              f"{one['dram']:.0f} | {one['tensor']:.0f} | {one['occupancy']:.0f} | {floor} |")
    print(f"{sum(one['kernels'] for one in sums.values()):.0f} kernels, {total * 1e-6:.2f} ms; the step by events "
          f"{table['step_ms']:.2f} ms; ncu took {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    needs_gpu.by_program(ncu.ROOT / "train_llama")
    sys.exit(main())
