#!/usr/bin/env python3
"""How far the learning curve of one precision is behind that of another, beside how far two runs of one precision are apart.

    python3 dev/accuracy/curves.py -o runs/curves --reference bf16 --precision fp8 --seeds 1,2,3 --steps 400 --micro-batch 8 \\
        --seq-len 1024 -- --config d12 --train 'data/stories/train_*.bin' --val 'data/stories/val_*.bin' --lr 6e-4

trains with train_llama: for each seed one run of the reference, one of the precision, and --shuffled runs of each whose step is cut into
micro-batches of a half, a quarter, ... the size. Those compute the same sums in another order: what lies between them is what any
change of the last bit becomes, and a difference between precisions that is no larger says nothing. What follows `--` goes to
train_llama as it is. A run whose log is complete is not made again. --pytorch 1,2 repeats the reference's runs of these seeds in PyTorch
(scripts/train_reference.py: same weights, same windows, autocast to bf16), on the --device of the runs.

The table has a line a comparison, in the mean over seeds with its standard error; positive is worse than the reference:

    lag     steps by which the smoothed loss of the training is behind, over the steep part (20 to 60 % of the steps) and the last fifth
    gap     the same in percent of the loss
    learnt  the loss on --val of the weights of 25, 50, 75 and 100 % of the steps, measured with the reference's precision, in percent
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import needs  # noqa: E402, F401, before the packages
import numpy as np  # noqa: E402

import cli  # noqa: E402
from run_log import read_run  # noqa: E402

STEEP, LATE = (0.2, 0.6), (0.8, 1.0)  # shares of a run over which lags and gaps are averaged
MEASURED = 4  # times a run's weights are measured


# ---- comparing ------------------------------------------------------------------------------------------------------

def smoothed(losses: Sequence[float], width: int) -> np.ndarray:
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def behind(losses: Sequence[float], reference: Sequence[float], width: int, part: tuple[float, float]) -> tuple[float, float]:
    """Mean lag in steps and mean gap in percent over a part of the run. Positive: worse than the reference."""
    ours, theirs = smoothed(losses, width), smoothed(reference, width)
    lowest = np.minimum.accumulate(theirs)
    lags, gaps = [], []
    for step in range(int(part[0] * len(ours)), int(part[1] * len(ours))):
        at = int(np.searchsorted(-lowest, -ours[step]))  # the first step at which the reference was as low
        if 0 < at < len(lowest) and lowest[at - 1] > lowest[at]:
            lags.append(step - (at - (lowest[at] - ours[step]) / (lowest[at] - lowest[at - 1])))
        gaps.append(100 * (ours[step] / theirs[step] - 1))
    return float(np.mean(lags)) if lags else math.nan, float(np.mean(gaps))


def largest_gap(losses: Sequence[float], reference: Sequence[float], width: int) -> float:
    """In percent, with its sign."""
    ratio = smoothed(losses, width) / smoothed(reference, width) - 1
    return 100 * float(ratio[np.abs(ratio).argmax()])


def mean_cell(values: Sequence[float]) -> str:
    """The mean, with its standard error where there are several."""
    error = f" ± {np.std(values, ddof=1) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.2f}{error}"


# ---- runs of train_llama --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Run:
    precision: str
    seed: int
    shuffled: int  # the micro-batch is 2^-shuffled of the whole one

    @property
    def name(self) -> str:
        return f"{self.precision}-seed{self.seed}-order{self.shuffled}"


PYTORCH = "pytorch"  # as a Run's precision


def call(command: Sequence[object]) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise cli.FileError(cli.INTERNAL, f"{' '.join(map(str, command))}: exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def command_of(run: Run, options: Any, precision: str) -> list[object]:
    cut = ["--micro-batch", options.micro_batch >> run.shuffled, "--seq-len", options.seq_len]
    return [options.program, *options.rest, "--precision", precision, "--seed", run.seed, *cut, "--batch-tokens",
            options.micro_batch * options.seq_len, "--steps", options.steps, "--save-every", max(options.steps // MEASURED, 1), "--keep",
            MEASURED + 1, "--val-every", 0, "--sample-every", 0, "--out", options.output / run.name]


def train(run: Run, options: Any) -> dict[str, Any]:
    """Losses of the steps, and the measurements of the weights."""
    folder, result = options.output / run.name, options.output / f"{run.name}.json"
    if result.exists():
        return json.loads(result.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    row = (repeat_in_pytorch if run.precision == PYTORCH else train_and_measure)(run, options)
    result.write_text(json.dumps(row))
    shutil.rmtree(folder, ignore_errors=True)  # checkpoints are large
    print(f"{run.name}: loss {np.mean(row['losses'][-25:]):.4f}", flush=True)
    return row


def train_and_measure(run: Run, options: Any) -> dict[str, Any]:
    folder = options.output / run.name
    call(command_of(run, options, run.precision))
    steps = [record for _, record in sorted(read_run(folder).steps.items())]
    after = [words for words in zip(options.rest, options.rest[1:]) if words[0] in ("--val", "--val-batches", "--device")]
    chosen = [word for words in after for word in words]
    measured = []
    for checkpoint in sorted(folder.glob("step_*")) if "--val" in chosen else []:
        got = json.loads(call([options.program, "--model", checkpoint / "model.bin", "--precision", options.reference, "--eval", "--json",
                               "--micro-batch", options.micro_batch, "--seq-len", options.seq_len, *chosen]))
        measured.append([int(checkpoint.name.removeprefix("step_")), got["val_loss"]])
    lost: dict[str, dict[str, int]] = {}
    for record in steps:
        for kind, counts in record.get("fp8", {}).items():
            sums = lost.setdefault(kind, {})
            for name, count in counts.items():
                sums[name] = sums.get(name, 0) + count
    return {"losses": [record["loss"] for record in steps], "val": measured, "fp8": lost,
            "saturated_steps": sum(any(kind["saturated"] for kind in record.get("fp8", {}).values()) for record in steps)}


def repeat_in_pytorch(run: Run, options: Any) -> dict[str, Any]:
    """The losses of the reference's run."""
    config = options.output / f"{run.name}.config.json"
    config.write_text(call([*command_of(run, options, options.reference), "--print-config"]))
    device = dict(zip(options.rest, options.rest[1:])).get("--device", "cuda")
    records = call([sys.executable, ROOT / "scripts/train_reference.py", config, "--device", device, "--dtype", "bf16"])
    return {"losses": [json.loads(record)["loss"] for record in records.splitlines()], "val": [], "fp8": {}, "saturated_steps": 0}


def line(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], width: int) -> str:
    """Each pair: a run and its reference."""
    steep = [behind(run["losses"], reference["losses"], width, STEEP) for run, reference in pairs]
    late = [behind(run["losses"], reference["losses"], width, LATE) for run, reference in pairs]
    cells = [mean_cell([lag for lag, _ in steep]), mean_cell([gap for _, gap in steep]), mean_cell([lag for lag, _ in late]),
             mean_cell([gap for _, gap in late])]
    largest = [abs(largest_gap(run["losses"], reference["losses"], width)) for run, reference in pairs]
    cells.append(f"{np.mean(largest):.2f}")
    learnt = [[100 * (ours[1] / theirs[1] - 1) for ours, theirs in zip(run["val"], reference["val"])] for run, reference in pairs]
    cells += [" / ".join(mean_cell(column) for column in zip(*learnt))]
    return f"| {name} | {len(pairs)} | " + " | ".join(cells) + " |"


def table(rows: dict[Run, dict[str, Any]], reference: str, precision: str, width: int) -> str:
    text = ["| | pairs | lag, steep, steps | gap, steep, % | lag, late | gap, late, % | largest gap, % | learnt, % |", "|" + "---|" * 8]
    base = {run.seed: row for run, row in rows.items() if run.precision == reference and run.shuffled == 0}
    whole = {run.seed: row for run, row in rows.items() if run.precision == precision and run.shuffled == 0}
    repeated = {run.seed: row for run, row in rows.items() if run.precision == PYTORCH}
    comparisons = [(f"{name}, sums in another order", [(row, own[run.seed]) for run, row in rows.items() if run.precision == name and run.shuffled])
                   for name, own in ((reference, base), (precision, whole))]
    comparisons.append((f"{reference}, other seeds", [(row, base[min(base)]) for seed, row in base.items() if seed != min(base)]))
    comparisons.append((f"{precision} against {reference}", [(row, base[run.seed]) for run, row in rows.items() if run.precision == precision]))
    comparisons += [(f"{name} against PyTorch's bf16", [(row, repeated[seed]) for seed, row in own.items() if seed in repeated])
                    for name, own in ((reference, base), (precision, whole))]
    return "\n".join(text + [line(name, pairs, width) for name, pairs in comparisons if pairs])


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = cli.Parser(description=__doc__, prog="curves.py")
    positive = cli.number_in(1, 2**31, int)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--reference", default="bf16")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--pytorch", default="", metavar="SEEDS", help="of these also a run in PyTorch; needs torch and transformers")
    parser.add_argument("--shuffled", type=cli.number_in(0, 8, int), default=1, help="runs of another order for each seed")
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--micro-batch", type=positive, default=8)
    parser.add_argument("--seq-len", type=positive, default=1024)
    parser.add_argument("--smooth", type=positive, default=25, help="steps of which the mean is compared")
    parser.add_argument("--program", type=Path, default=ROOT / "train_llama")
    options = parser.parse_args(words[:at])
    options.rest, options.output = words[at + 1:], options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = [Run(precision, int(seed), shuffled) for seed in options.seeds.split(",") for shuffled in range(options.shuffled + 1)
            for precision in (options.reference, options.precision)]
    runs += [Run(PYTORCH, int(seed), 0) for seed in options.pytorch.split(",") if seed]
    rows = {run: train(run, options) for run in runs}
    print(table(rows, options.reference, options.precision, options.smooth))
    for run, row in rows.items():
        if row["fp8"]:
            shares = ", ".join(f"{kind} {counts['saturated'] / counts['values']:.1e} saturated, {100 * counts['flushed'] / counts['values']:.3f} % flushed"
                               for kind, counts in row["fp8"].items())
            print(f"{run.name}: steps with saturation {row['saturated_steps']}; {shares}")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
