"""One decoded token, or one prompt, under Nsight Compute, operator by operator.

    make profile-infer                                                    a token of pythia-2.8b at context 1000
    python3 dev/bench/profile_decode.py --model pythia-410m --context 64
    python3 dev/bench/profile_decode.py --prompt --context 2048           a prompt of that many ids

infer_pythia --decode reference names each operator by an NVTX range inside one that is called "token N" or "step of N"; ncu
measures the kernels of that range alone, one after another, and here they are added up by operator (dev/bench/ncu.py). So what
overlaps in a real run (a kernel's first loads under the one before) does not overlap here: the sum is more than the time of a
token.
"""

from __future__ import annotations

import argparse
import sys

import ncu
import needs_gpu


def first_pass(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A prompt comes by several times: what stands before its first kernel comes again."""
    first = rows[0]
    again = [int(row["ID"]) for row in rows if row["Kernel Name"] == first["Kernel Name"] and row["ID"] != first["ID"]]
    return [row for row in rows if not again or int(row["ID"]) < min(again)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-2.8b")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--prompt", action="store_true", help="the prompt of --context ids, at most 2048, instead of a token after it")
    # Enough for one prompt of the largest model; a prompt comes by five times.
    parser.add_argument("--kernels", type=int, default=400, help="measure no more than these first ones")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that ncu may take")
    options = parser.parse_args()
    # The warm-up of --bench decodes the first four tokens of a context, so that the sixth comes by once.
    place = f"step of {options.context}" if options.prompt else f"token {options.context + 5}"
    program = [str(ncu.ROOT / "infer_pythia"), "--device", "cuda", "--decode", "reference", "--dtype", options.dtype,
               "--random-model", options.model, "--bench", "--max-tokens", "4", "--bench-contexts", str(options.context)]
    sums = ncu.by_operator(first_pass(ncu.measure(program, place, options.kernels, options.timeout)))
    total = sum(one["time"] for one in sums.values())

    what = f"a prompt of {options.context}" if options.prompt else f"a token at context {options.context + 5}"
    print(f"{options.model} in {options.dtype}, {what}")
    print("| operator | kernels | us | us each | % | read, GB/s | DRAM % | tensor pipe % | occupancy % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in sums.items():
        print(f"| {name} | {one['kernels']:.0f} | {one['time'] * 1e-3:.1f} | {one['time'] * 1e-3 / one['kernels']:.2f} | "
              f"{100 * one['time'] / total:.1f} | {one['read'] / one['time']:.0f} | {one['dram']:.0f} | {one['tensor']:.0f} | "
              f"{one['occupancy']:.0f} |")
    print(f"{sum(one['kernels'] for one in sums.values()):.0f} kernels, {total * 1e-6:.3f} ms")
    return 0


if __name__ == "__main__":
    needs_gpu.by_program(ncu.ROOT / "infer_pythia")
    sys.exit(main())
