#!/usr/bin/env python3
"""Draws the pictures of README.md from dev/performance/figures.json, and the diagram of the persistent kernel.

    .venv/bin/python dev/pictures/draw.py              # writes doc/pictures/*.svg
    .venv/bin/python dev/pictures/draw.py -o /tmp/new  # elsewhere, to compare

A figure is looked up by page and name. One that is missing or has no value ends the drawing: no picture shows a number that
is not in the file. To be run when figures have changed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kernel import kernel
from svg import Axes, Picture, bars

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b")
STEPS = ("d12, T 1024, B 32", "llama3.2-1b, T 2048, B 8", "llama3.2-1b, T 8192, B 2", "llama3.2-3b, T 2048, B 8",
         "llama3.1-8b, T 4096, B 4")
SEQUENCES = (1, 4, 16, 64, 128)
VLLM, LLAMA_CPP, COMPILE = "vLLM 0.24", "llama.cpp", "torch.compile"


def numeric(text: str) -> float:
    return float(text.replace(",", "").removesuffix(" %"))


class Figures:
    def __init__(self, path: Path) -> None:
        self.rows = {(row["page"], row["name"], row.get("program", "weft")): row for row in json.loads(path.read_text())}

    def row(self, page: str, name: str, program: str = "weft") -> dict[str, Any]:
        return self.rows[page, name, program]

    def value(self, page: str, name: str, program: str = "weft", key: str = "value") -> float:
        return numeric(self.row(page, name, program)[key])

    def batch(self, model: str, program: str) -> list[tuple[int, float]]:
        """(sequences, tokens/s) of the run in which all programs ran on one card."""
        found = [(n, self.rows.get(("batch.md", f"{model}, {n} sequence{'s' * (n > 1)}, beside others", program))) for n in SEQUENCES]
        return [(n, numeric(row["value"])) for n, row in found if row is not None]


def grouped(value: float) -> str:
    return f"{value:,.0f}"


def speed(figures: Figures) -> Picture:
    """One sequence and many, beside other programs."""
    picture = Picture(840, 204, "weft beside vLLM, torch.compile and llama.cpp: milliseconds a token of one sequence, tokens/s of 64")
    fused, graph = (figures.value("fused.md", f"pythia-2.8b, {kind}, context 64") for kind in ("fused", "graph"))
    compiled = figures.value("fused.md", "pythia-2.8b, context 64", COMPILE)
    one = {name: 1000 / figures.batch("pythia-2.8b", name)[0][1] for name in (VLLM, LLAMA_CPP)}
    rows = [("weft, fused", fused, "c0"), ("weft, graph", graph, "c0"), (VLLM, one[VLLM], "c1"), (COMPILE, compiled, "c3"),
            (LLAMA_CPP, one[LLAMA_CPP], "c2")]
    bars(picture, (18, 28), 330, "One sequence: milliseconds a token", "pythia-2.8b, fp16, one H200 · shorter is better",
         [(name, ms, f"{ms:.2f} ms · {1000 / ms:.0f}/s", colour) for name, ms, colour in rows], 4.4)
    many = {name: dict(figures.batch("pythia-2.8b", name))[64] for name in ("weft", VLLM, LLAMA_CPP)}
    bars(picture, (452, 28), 330, "64 sequences: tokens a second", "pythia-2.8b, fp16, one H200 · longer is better",
         [(name, value, grouped(value), colour) for (name, value), colour in zip(many.items(), ("c0", "c1", "c2"))], 25500, 90)
    return picture


def training(figures: Figures) -> Picture:
    """MFU by model. That of torch.compile is weft's divided by the ratio of their tokens/s: the work of a token is the same."""
    picture = Picture(410, 372, "Training: model FLOP utilisation of weft and torch.compile by model")
    picture.text(18, 28, "Training: MFU by model", "t ink")
    picture.text(18, 47, "bf16, one H200, % of 989 TF/s · longer is better", "s soft")
    for i, name in enumerate(STEPS):
        mfu = figures.value("step.md", name, key="mfu")
        peer = mfu / figures.value("step.md", name, key="ratio")
        top = 64 + 60 * i
        picture.text(18, top + 12, name, "s ink")
        for j, (label, value, colour) in enumerate((("weft", mfu, "c0"), (COMPILE, peer, "c3"))):
            y = top + 19 + 17 * j
            picture.box(18, y, 240 * value / 60, 14, colour, ' rx="2"')
            picture.text(24 + 240 * value / 60, y + 11, f"{value:.1f} % {label}", "s b ink" if j == 0 else "s soft")
    return picture


def roofline(figures: Figures) -> Picture:
    """The mark is the time of a plain read of the same bytes."""
    picture = Picture(410, 372, "Decoding one sequence: milliseconds a token beside the roofline, by model")
    picture.text(18, 28, "Decoding: ms a token and the roofline", "t ink")
    picture.text(18, 47, "fused kernel, fp16, context 64, one H200 · shorter is better", "s soft")
    for i, name in enumerate(MODELS):
        row = f"{name}, fused, context 64"
        ms, share = figures.value("fused.md", row), figures.value("fused.md", row, key="share_of_read")
        top = 64 + 53 * i
        picture.text(18, top + 12, name, "s ink")
        picture.box(18, top + 19, 216 * ms / 5.5, 20, "c0", ' rx="2"')
        limit = 18 + 216 * ms / 5.5 * share / 100
        picture.line([(limit, top + 15), (limit, top + 43)], "inkl", 2)
        picture.text(26 + 216 * ms / 5.5, top + 34, f"{ms:.2f} ms · {share:.0f} % of roofline", "s ink")
    picture.line([(24, 337), (24, 355)], "inkl", 2)
    picture.text(34, 351, "roofline: a plain read of the same bytes", "s soft")
    return picture


def batch(figures: Figures) -> Picture:
    picture = Picture(840, 318, "Throughput by the number of sequences, of weft, vLLM and llama.cpp")
    for x, model, types, most in ((70, "pythia-2.8b", "fp16", 32000), (490, "llama3.1-8b", "weft bf16, vLLM fp16", 24000)):
        picture.text(x - 52, 28, f"{model}: tokens/s of all sequences", "t ink")
        picture.text(x - 52, 47, f"{types}, 128 ids in, 128 out, one H200", "s soft")
        axes = Axes(picture, x, 66, 250, 196, (0, len(SEQUENCES) - 1), (0, most))
        axes.frame([(i, str(n)) for i, n in enumerate(SEQUENCES)], [(v, grouped(v)) for v in range(0, most + 1, 8000)],
                   "sequences at once")
        for program, colour in (("weft", "c0"), (VLLM, "c1"), (LLAMA_CPP, "c2")):
            values = figures.batch(model, program)
            if not values:
                continue
            points = [(float(SEQUENCES.index(n)), value) for n, value in values]
            axes.curve(points, colour, dots=True)
            end_x, end_y = axes.place(*points[-1])
            picture.text(end_x + 9, end_y + 4, f"{program}", "s b ink" if colour == "c0" else "s ink")
    return picture


def loss(figures: Figures) -> Picture:
    """Two losses of each step, and how far they are apart."""
    row = figures.row("step.md", "tiny on stories, the loss of every step")
    weft, torch = row["weft"], row["pytorch"]
    steps = len(weft)
    picture = Picture(840, 308, "The training loss of weft over that of PyTorch, and their difference")
    picture.text(18, 28, "One run, trained twice", "t ink")
    picture.text(18, 47, "tiny on generated stories, CPU, fp32", "s soft")
    top = 8
    axes = Axes(picture, 70, 66, 330, 186, (1, steps), (0, top))
    ticks = [(1.0, "1"), *((float(s), str(s)) for s in range(50, steps + 1, 50))]
    axes.frame(ticks, [(v, str(v)) for v in range(0, top + 1, 2)], "step · loss, nats a token")
    axes.curve([(i + 1, value) for i, value in enumerate(torch)], "c1", False, 6, ' stroke-opacity="0.55"')
    axes.curve([(i + 1, value) for i, value in enumerate(weft)], "c0", False, 1.6)
    for y, colour, name, width in ((84, "c1", "PyTorch (wide)", 6), (104, "c0", "weft (thin, on top)", 1.6)):
        picture.line([(250, y), (280, y)], f"{colour}l", width, ' stroke-opacity="0.55"' if colour == "c1" else "")
        picture.text(288, y + 4, name, "s ink")
    apart = [abs(a - b) for a, b in zip(weft, torch)]
    unit = 1e-6
    most = max(apart) / unit
    step = next(s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0) if most / s <= 5)
    most = -(-most // step) * step
    picture.text(448, 28, "How far apart", "t ink")
    picture.text(448, 47, "absolute difference of the two losses, millionths of a nat", "s soft")
    axes = Axes(picture, 490, 66, 320, 186, (1, steps), (0, most))
    axes.frame(ticks, [(step * i, f"{step * i:g}") for i in range(int(most / step) + 1)], "step")
    axes.curve([(i + 1, value / unit) for i, value in enumerate(apart)], "c0", False, 1.2)
    return picture


PICTURES = {"speed": speed, "training": training, "roofline": roofline, "batch": batch, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "doc/pictures", metavar="DIR", help="default: doc/pictures")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    figures = Figures(ROOT / "dev/performance/figures.json")
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(figures).written(), encoding="utf-8")
    (folder / "kernel.svg").write_text(kernel().written(), encoding="utf-8")


if __name__ == "__main__":
    main()
