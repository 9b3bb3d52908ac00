#!/usr/bin/env python3
"""Plots the logs of training runs: loss against step and tokens, learning rate, gradient norm, throughput.

LOG is a log.jsonl of train_llama or its run directory; several runs share one picture. Where a run was resumed, the steps
that were computed again count once. A last line that was cut off is ignored.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cli
from tensor_file import ENVIRONMENT, FileError, escaped

MAX_LOG_BYTES = 4 << 30
SMOOTHING = 50  # a run is smoothed over this share of its steps


@dataclass
class Run:
    """The records of one run by step, without what a resume replaced."""

    label: str
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    broken: int = 0  # lines that are no record

    def curve(self, key: str, x_key: str = "step") -> tuple[list[float], list[float]]:
        """x and y of the finite values of `key`, in order of steps."""
        points = [(record[x_key], record[key]) for _, record in sorted(self.steps.items())
                  if is_number(record.get(key)) and is_number(record.get(x_key))]
        return [x for x, _ in points], [y for _, y in points]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is broken."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("type"), str) else None


def read_run(path: Path) -> Run:
    """Reads a log or the log of a run directory. FileError if it is none or holds no step."""
    log = path / "log.jsonl" if path.is_dir() else path
    run = Run(label=path.resolve().name if path.is_dir() else log.resolve().parent.name or str(path))
    lines = [line for line in cli.read_bytes(log, MAX_LOG_BYTES).split(b"\n") if line.strip()]
    if not lines:
        cli.bad_file(log, "", "empty: no step was finished yet")
    if parse_line(lines[0]) is None:
        cli.bad_file(log, "line 1", "not a record of train_llama's log.jsonl")
    for line in lines:
        record = parse_line(line)
        if record is None:
            run.broken += 1
        elif record["type"] == "resume" and is_step(record.get("step")):
            # What follows begins after this step: later records were lost with the run that wrote them.
            run.steps = {step: old for step, old in run.steps.items() if step <= record["step"]}
        elif record["type"] == "step" and is_step(record.get("step")):
            run.steps[record["step"]] = record
    if not run.steps:
        cli.bad_file(log, "", "holds no finished step")
    return run


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to window - 1 before it."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        result.append(total / min(i + 1, window))
    return result


def plot_loss(axes: Any, runs: list[Run], x_key: str, label: str) -> None:
    for number, run in enumerate(runs):
        color = f"C{number % 10}"
        x, y = run.curve("loss", x_key)
        axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(x, smoothed(y, max(1, len(y) // SMOOTHING)), color=color, label=f"{run.label}: train")
        x, y = run.curve("val_loss", x_key)
        if x:
            axes.plot(x, y, color=color, linestyle="--", marker="o", markersize=3, label=f"{run.label}: val")
    axes.set(title=f"loss against {label}", xlabel=label, ylabel="nats a token")
    axes.locator_params(axis="x", nbins=5)  # numbers of tokens are long
    axes.legend(fontsize="small")


def plot_curve(axes: Any, runs: list[Run], key: str, title: str) -> None:
    for number, run in enumerate(runs):
        x, y = run.curve(key)
        axes.plot(x, y, color=f"C{number % 10}", linewidth=0.8, label=run.label)
    axes.set(title=title, xlabel="step")
    axes.set_ylim(bottom=0)


def draw(runs: list[Run], output: Path) -> None:
    """Writes the picture; the format follows the name's ending. Nothing appears under the name before it is complete."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise FileError(ENVIRONMENT, "matplotlib is not installed. Install it with: pip install matplotlib") from None
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 9), constrained_layout=True)
    plot_loss(axes[0][0], runs, "step", "step")
    plot_loss(axes[0][1], runs, "tokens", "tokens")
    plot_curve(axes[0][2], runs, "lr", "learning rate")
    plot_curve(axes[1][0], runs, "grad_norm", "gradient norm")
    plot_curve(axes[1][1], runs, "tokens_per_s", "tokens a second")
    plot_curve(axes[1][2], runs, "dt_ms", "milliseconds a step")
    for one in axes.flat:
        one.grid(alpha=0.3)
    kind = output.suffix[1:].lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise FileError(cli.USAGE, f"--output: got {escaped(str(output))}, expected a name that ends in .png, .svg or .pdf")
    temporary = output.with_name(f"{output.name}.tmp.{os.getpid()}")
    try:
        figure.savefig(temporary, format=kind, dpi=110)
        os.replace(temporary, output)
    except OSError as error:
        error.filename = str(output)
        raise
    finally:
        temporary.unlink(missing_ok=True)
        pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="plot_log.py")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="log.jsonl or a run directory")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PNG", help="the picture to write")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    runs = [read_run(path) for path in options.logs]
    warnings = cli.Warnings()
    for run in runs:
        # One broken line for each time that the run was killed while it wrote is expected.
        if run.broken > 1:
            warnings.add(f"{escaped(run.label)}: {run.broken} lines are no records and were left out")
    draw(runs, options.output)
    for run in runs:
        last = run.steps[max(run.steps)]
        loss = f"{last['loss']:.4f}" if is_number(last.get("loss")) else "not finite"
        print(f"{escaped(run.label)}: {len(run.steps)} steps, the last one {max(run.steps)} with loss {loss}")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
