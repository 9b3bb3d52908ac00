"""The speed of training steps: train_llama and its PyTorch baseline, in one run on one GPU.

    make bench                                  everything below; or: python3 dev/bench/training.py
    python3 dev/bench/training.py --only d12    one configuration
    python3 dev/bench/training.py --no-baseline     weft alone
    python3 dev/bench/training.py --fp8         --precision fp8 beside bf16, and beside torch.compile with torchao's float8

Both sides train on random tokens with AdamW and clipping; both report the median of a step. The baseline is torch.compile with the
faster of its attention kernels' choice (dev/bench/train_baseline.py); it is left out, and said to be, where torch is missing.
Prints a table and writes build/bench_training.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Run:
    """One configuration, and the precision in which the baseline fits. Both sides take as many sequences at once, since a step
    of AdamW serves them all; but for 8B, of which the baseline keeps every activation."""

    config: str
    seq_len: int
    micro_batch: int
    baseline_micro_batch: int
    baseline_precision: str
    recompute: str = "none"
    moments: str = "fp32"

    @property
    def name(self) -> str:
        note = ", bf16 moments" if self.moments == "bf16" else ""
        return f"{self.config}, T {self.seq_len}, B {self.micro_batch}{note}"


RUNS = [
    Run("d12", 1024, 32, 32, "master"),
    Run("llama3.2-1b", 2048, 8, 8, "master"),
    Run("llama3.2-1b", 2048, 32, 32, "master"),
    Run("qwen3-1.7b", 2048, 8, 8, "master"),
    Run("llama3.2-1b", 8192, 2, 2, "bf16"),
    Run("llama3.2-3b", 2048, 8, 8, "bf16"),
    Run("llama3.1-8b", 4096, 4, 1, "bf16", recompute="norm", moments="bf16"),
]
PRECISIONS = {"master": "fp32 master", "bf16": "pure bf16"}

FP8_RUNS = [
    Run("llama3.2-1b", 2048, 8, 8, "master"),
    Run("llama3.2-3b", 2048, 8, 8, "bf16"),
    Run("llama3.2-3b", 2048, 4, 4, "bf16"),  # fits 80 GB
    Run("llama3.1-8b", 4096, 2, 1, "bf16", recompute="norm", moments="bf16"),
]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def weft(run: Run, precision: str = "bf16") -> dict[str, Any] | str:
    command = [str(ROOT / "train_llama"), "--device", "cuda", "--bench", "--json", "--config", run.config, "--seq-len",
               str(run.seq_len), "--micro-batch", str(run.micro_batch), "--recompute", run.recompute, "--moments", run.moments,
               "--precision", precision]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return json.loads(result.stdout) if result.returncode == 0 else last_line(result.stderr)


def baseline(run: Run, *more: str) -> dict[str, Any] | str:
    for package in ("torch", "torchao") if "--float8" in more else ("torch",):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    command = [sys.executable, str(ROOT / "dev/bench/train_baseline.py"), "--config", run.config, "--precision",
               run.baseline_precision, "--seq-len", str(run.seq_len), "--micro-batch", str(run.baseline_micro_batch), *more]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        if lines:
            return str(json.loads(lines[-1]).get("error"))
        return last_line(result.stderr)
    return json.loads(lines[-1])


def cell(result: dict[str, Any] | str) -> str:
    return result if isinstance(result, str) else f"{result['tokens_per_s']:,.0f}"


def ratio(ours: dict[str, Any] | str, theirs: dict[str, Any] | str) -> str:
    return "-" if isinstance(ours, str) or isinstance(theirs, str) else f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f}"


def fp8(only: list[str] | None, with_baseline: bool) -> int:
    """Prints the table of fp8; 0 if every run of weft gave a figure."""
    print("| configuration | bf16, tokens/s | fp8, tokens/s | ratio | torchao float8, tokens/s | its weights, batch | ratio |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for run in FP8_RUNS:
        if only and run.config not in only:
            continue
        plain, ours = weft(run), weft(run, "fp8")
        theirs = baseline(run, "--float8") if with_baseline else "not run"
        failed = failed or isinstance(plain, str) or isinstance(ours, str)
        print(f"| {run.name} | {cell(plain)} | {cell(ours)} | {ratio(ours, plain)} | {cell(theirs)} | {PRECISIONS[run.baseline_precision]}, "
              f"B {run.baseline_micro_batch} | {ratio(ours, theirs)} |", flush=True)
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted({run.config for run in RUNS}), metavar="NAME")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="the table of fp8 instead")
    options = parser.parse_args()
    if options.fp8:
        return fp8(options.only, not options.no_baseline)
    rows: list[dict[str, Any]] = []
    for run in RUNS:
        if options.only and run.config not in options.only:
            continue
        ours = weft(run)
        print(f"{run.name}: weft {cell(ours)}", file=sys.stderr, flush=True)
        theirs = "not run" if options.no_baseline else baseline(run)
        rows.append({"run": run.name, "weft": ours, "baseline": theirs, "baseline_precision": run.baseline_precision,
                     "baseline_micro_batch": run.baseline_micro_batch})
        print(f"{run.name}: baseline, B {run.baseline_micro_batch}: {cell(theirs)}", file=sys.stderr, flush=True)
    print("| configuration | weft, tokens/s | MFU (causal) | torch.compile, tokens/s | its precision, batch | ratio |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ours, theirs = row["weft"], row["baseline"]
        mfu = "-" if isinstance(ours, str) or ours["mfu"] is None else f"{100 * ours['mfu']:.1f} %"
        precision = f"{PRECISIONS[row['baseline_precision']]}, B {row['baseline_micro_batch']}"
        print(f"| {row['run']} | {cell(ours)} | {mfu} | {cell(theirs)} | {precision} | {ratio(ours, theirs)} |")
    output = ROOT / "build" / "bench_training.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(not isinstance(row["weft"], str) for row in rows) else 1


if __name__ == "__main__":
    import needs_gpu
    needs_gpu.by_program(ROOT / "train_llama")
    sys.exit(main())
