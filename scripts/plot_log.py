#!/usr/bin/env python3
"""Plots the logs of training runs: loss, gradient norm, learning rate and throughput against the steps.

LOG is a log.jsonl of train_llama or its run directory; several runs share one picture. Steps that a resumed run computed
again count once. An incomplete last line is ignored. The heavy lines of loss and throughput are running medians, which do not
spread a spike over the steps after it. --follow draws again whenever a log has grown, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import bisect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli
from run_log import Run, is_number, new_run, read_run
from tensor_file import ENVIRONMENT, FileError, escaped

SMOOTHING = 50  # the window of the median is this fraction of the run's steps
MAX_LABEL = 60


def smoothed(values: list[float], window: int) -> list[float]:
    """The median of each value and up to window - 1 values before it. A single outlier does not change its neighbours."""
    result: list[float] = []
    sorted_window: list[float] = []
    for i, value in enumerate(values):
        bisect.insort(sorted_window, value)
        if i >= window:
            del sorted_window[bisect.bisect_left(sorted_window, values[i - window])]
        middle, odd = divmod(len(sorted_window), 2)
        result.append(sorted_window[middle] if odd else (sorted_window[middle - 1] + sorted_window[middle]) / 2)
    return result


def human(value: float) -> str:
    """12345678 as 12.3M."""
    value = float(f"{value:.3g}")  # first: 999.6 is 1K
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def plain(value: float) -> str:
    """0.00030000001 as 0.0003: three significant digits, no exponent."""
    return f"{float(f'{value:.3g}'):.12f}".rstrip("0").rstrip(".")


def printable(text: str) -> str:
    """A label that matplotlib draws as it is: without unprintable characters, and with the signs of formulas escaped."""
    clean = os.fsencode(text).decode("utf-8", "replace")
    clean = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in clean)
    clean = clean if len(clean) <= MAX_LABEL else clean[:MAX_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    clean = clean.replace("\\", r"\\").replace("$", r"\$")
    return " " + clean if clean.startswith("_") else clean  # matplotlib leaves labels out that begin with _


def last(run: Run, key: str) -> float | None:
    """The newest value of `key`."""
    values = run.curve(key)[1]
    return values[-1] if values else None


def noted(run: Run, key: str, shown: Callable[[float], str]) -> str:
    """The newest value for the legend; empty if there is none."""
    value = last(run, key)
    return "" if value is None else f" {shown(value)}"


def plot_median(axes: Any, run: Run, key: str, color: str, label: str) -> None:
    """Faint values, and their running median over them."""
    x, y = run.curve(key)
    axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(x, smoothed(y, max(1, len(y) // SMOOTHING)), color=color, label=label)


def plot_loss(axes: Any, runs: list[Run]) -> None:
    def shown(value: float) -> str:
        return f"{value:.4f}"
    for number, run in enumerate(runs):
        color, name = f"C{number % 10}", printable(run.label)
        plot_median(axes, run, "loss", color, f"{name}: train{noted(run, 'loss', shown)}")
        x, y = run.curve("val_loss")
        if x:
            axes.plot(x, y, color=color, linestyle="--", marker="o", markersize=3, label=f"{name}: val{noted(run, 'val_loss', shown)}")
    axes.set(title="loss", ylabel="loss (nats per token)")
    axes.legend(fontsize="small")


def plot_curve(axes: Any, runs: list[Run], key: str, title: str, shown: Callable[[float], str] = plain, median: bool = False,
               logarithmic: bool = False) -> None:
    for number, run in enumerate(runs):
        color, label = f"C{number % 10}", f"{printable(run.label)}{noted(run, key, shown)}"
        if median:
            plot_median(axes, run, key, color, label)
        else:
            axes.plot(*run.curve(key), color=color, linewidth=0.8, label=label)
    axes.set(title=title)
    if logarithmic and any(value > 0 for run in runs for value in run.curve(key)[1]):
        from matplotlib.ticker import LogLocator, NullLocator
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def title_of(runs: list[Run]) -> str:
    """For each run its model, its size, and how far it has come."""
    parts = []
    for run in runs[:3]:
        settings = run.header.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        config = settings.get("config") or settings.get("model") or ""
        size = f"{human(run.header['parameters'])} parameters, " if is_number(run.header.get("parameters")) else ""
        tokens = last(run, "tokens")
        parts.append(f"{printable(run.label)}: {printable(str(config)) + ', ' if config else ''}{size}step {human(max(run.steps))}"
                     + ("" if tokens is None else f", {human(tokens)} tokens"))
    return "\n".join(parts + ([f"and {len(runs) - 3} more"] if len(runs) > 3 else []))


def draw(runs: list[Run], output: Path) -> None:
    """Writes the picture; the ending of the name is its format. The file appears under its name when it is complete."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        raise FileError(ENVIRONMENT, "matplotlib is not installed. Install it with: pip install matplotlib") from None
    figure, axes = pyplot.subplots(2, 2, figsize=(15, 9), constrained_layout=True)
    figure.suptitle(title_of(runs))
    plot_loss(axes[0][0], runs)
    plot_curve(axes[0][1], runs, "grad_norm", "gradient norm", logarithmic=True)
    plot_curve(axes[1][0], runs, "lr", "learning rate")
    plot_curve(axes[1][1], runs, "tokens_per_s", "tokens per second", shown=human, median=True)
    for one in axes.flat:
        one.set_xlabel("step")
        one.grid(alpha=0.3)
        one.locator_params(axis="x", nbins=6)
        one.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
        one.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes[1][1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
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


def follow(runs: list[Run], output: Path, seconds: float) -> None:
    """Draws whenever a log has grown. Returns at Ctrl-C."""
    try:
        while True:
            grown = [run.read_more() for run in runs]
            if any(grown) and all(run.steps for run in runs):
                draw(runs, output)
                print(title_of(runs).replace("\n", "; ").encode("ascii", "backslashreplace").decode(), flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="plot_log.py")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="log.jsonl or a run directory")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PNG", help="the picture to write")
    parser.add_argument("--follow", type=cli.number_in(0.1, 86400), nargs="?", const=10.0, metavar="SECONDS",
                        help="look for more every SECONDS (10) and draw again")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.follow:
        follow([new_run(path) for path in options.logs], options.output, options.follow)
        return cli.OK
    runs = [read_run(path) for path in options.logs]
    warnings = cli.Warnings()
    for run in runs:
        # A run that was killed while it wrote leaves one broken line: no reason to warn.
        if run.broken > 1:
            warnings.add(f"{escaped(run.label)}: {run.broken} lines are no records and were left out")
    draw(runs, options.output)
    for run in runs:
        newest = run.steps[max(run.steps)]
        loss = f"{newest['loss']:.4f}" if is_number(newest.get("loss")) else "not finite"
        print(f"{escaped(run.label)}: {len(run.steps)} steps, the last one {max(run.steps)} with loss {loss}")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
