#!/usr/bin/env python3
"""What training in fp8 costs, and which part of it costs what: a small Llama trained again and again with other roundings.

    .venv/bin/python dev/data/make_stories.py -o data/stories
    .venv/bin/python dev/prepare_data.py data/stories/train.txt --val data/stories/val.txt --tokenizer models/tiny-llama/tokenizer.json -o data/stories
    python3 dev/accuracy/train_fp8.py --data data/stories -o runs/fp8                     every scheme and seed: hours of a core
    python3 dev/accuracy/train_fp8.py --data data/stories -o runs/fp8 --schemes fp32,fp8 --seeds 1,2

Operands of the linear layers are rounded exactly as llmc/cpu/fp8.cpp rounds them, but with scales, formats, products, layers
and roundings that can be chosen (SCHEMES); GEMMs are in fp32. Runs of one seed have the same initial weights and windows. A run
that results.jsonl has already is not made again. What is printed at the end, for each scheme against the mean of the other runs in
fp32 of the same seed, initial weights as they are and perturbed: one run is no reference, it may be a lucky one.

    lag       by how many steps the smoothed curve is behind
    gap       the same in percent of the loss
    learnt    the gap on --val where both sets of weights are measured in fp32: what the weights have not learnt
    forward   the gap on --val between a set of weights measured with its scheme and in fp32: what rounding costs the measurement

--probe instead compares gradients along one run in fp32: for each scheme how far the gradient of the same tokens and weights is from
that of fp32, over one micro-batch and over all of a step; and what delayed scales with other histories and margins would have
saturated and flushed. Needs torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import needs  # noqa: E402, F401, before the packages
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import cli  # noqa: E402
from fp8_emulation import FORMATS, HISTORY, KINDS, LARGEST, MARGINS, RoundedLinear, Rounding, check_rounding, exponent_of, round_to  # noqa: E402
from curves import LATE, STEEP, behind, largest_gap, mean_cell  # noqa: E402
from train_neox import tokens_of  # noqa: E402

THETA, NORM_EPS, INIT_DEVIATION = 10000.0, 1e-5, 0.02
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
PRODUCTS = ("forward", "input_grad", "weight_grad")
BLOCK = 128


# ---- schemes --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Scheme:
    """What is rounded, and how. An empty format: not in fp8."""

    input: str = FORMATS["input"]
    weight: str = FORMATS["weight"]
    gradient: str = FORMATS["gradient"]
    # delayed: by the last `history` steps; current: by the tensor itself; block: by BLOCK neighbours along the sum, of
    # weights by squares of BLOCK; for which `block` names kinds of tensors, the others stay delayed
    scale: str = "delayed"
    block: tuple[str, ...] = KINDS
    history: int = HISTORY
    margin: int = MARGINS["input"]  # octaves of headroom
    gradient_margin: int = MARGINS["gradient"]  # of delayed scales of gradients
    exact: bool = False  # scales that use the range to its end instead of powers of two
    products: tuple[str, ...] = PRODUCTS
    layers: tuple[int, ...] = ()  # all of them where it is empty
    stochastic: bool = False  # gradients
    from_step: int = 0  # until then in fp32
    bf16: bool = False  # weights, activations and gradients between the layers in bf16, as on a GPU
    perturbed: int = 0  # initial weights x (1 + perturbation n), n normal with this seed
    perturbation: float = 1e-7
    rate: float = 1.0  # of the learning rate

    def form(self, kind: str) -> str:
        return {"input": self.input, "weight": self.weight, "gradient": self.gradient}[kind]

    @property
    def rounds(self) -> bool:
        return any(self.form(kind) for kind in KINDS)


FP8 = Scheme()
FP32 = Scheme("", "", "")
but = dataclasses.replace
SCHEMES = {
    "fp32": FP32, "fp32-1e-7": but(FP32, perturbed=1),
    "fp32-1e-5": but(FP32, perturbed=1, perturbation=1e-5), "fp32-1e-3": but(FP32, perturbed=1, perturbation=1e-3),
    "fp32-1e-3b": but(FP32, perturbed=2, perturbation=1e-3), "fp32-1e-2": but(FP32, perturbed=1, perturbation=1e-2),
    "bf16": but(FP32, bf16=True),
    "fp8": FP8, "fp8-1e-7": but(FP8, perturbed=1), "fp8-1e-3": but(FP8, perturbed=1, perturbation=1e-3), "fp8-bf16": but(FP8, bf16=True),
    "only-input": Scheme("e4m3", "", ""), "only-weight": Scheme("", "e4m3", ""), "only-gradient": Scheme("", "", "e5m2"),
    "only-forward": but(FP8, products=("forward",)), "only-input-grad": but(FP8, products=("input_grad",)),
    "only-weight-grad": but(FP8, products=("weight_grad",)), "no-weight-grad": but(FP8, products=("forward", "input_grad")),
    "gradient-e4m3": but(FP8, gradient="e4m3", gradient_margin=1), "gradient-e4m3-block": but(FP8, gradient="e4m3", scale="block", block=("gradient",)),
    "gradient-stochastic": but(FP8, stochastic=True),
    "current": but(FP8, scale="current", margin=0), "history-1": but(FP8, history=1, gradient_margin=1), "history-1024": but(FP8, history=1024),
    "margin-0": but(FP8, margin=0, gradient_margin=0), "margin-1": but(FP8, gradient_margin=1),
    "margin-3": but(FP8, margin=3, gradient_margin=3), "exact": but(FP8, scale="current", margin=0, exact=True),
    "block": but(FP8, scale="block"), "block-e4m3": but(FP8, scale="block", gradient="e4m3"),
    "block-exact": but(FP8, scale="block", gradient="e4m3", exact=True, margin=0),
    "first-layer": but(FP8, layers=(0,)), "last-layer": but(FP8, layers=(-1,)), "from-50": but(FP8, from_step=50),
    "rate-1.02": but(FP8, rate=1.02), "rate-1.04": but(FP8, rate=1.04), "fp32-rate-0.98": but(FP32, rate=0.98),
}
REFERENCES = ("fp32", "fp32-1e-3", "fp32-1e-2")


class SchemeRounding(Rounding):
    """A scheme at work."""

    def __init__(self, scheme: Scheme, layers: int):
        super().__init__()
        self.scheme, self.layers, self.step = scheme, layers, 0
        self.histograms: dict[tuple[str, str], np.ndarray] | None = None

    def begin_step(self, step: int) -> None:
        self.step = step

    def at_work(self, name: str, product: str) -> bool:
        scheme = self.scheme
        if not scheme.rounds or product not in scheme.products or self.step < scheme.from_step:
            return False
        return not scheme.layers or int(name.split(".")[0]) in [layer % self.layers for layer in scheme.layers]

    def see(self, kind: str, name: str, x: Tensor) -> None:
        """Counts amax, and the histogram where one is wanted."""
        super().see(kind, name, x)
        if self.counting and self.histograms is not None:
            slot = kind, name
            bits = x.detach().contiguous().view(torch.int32).numpy().ravel()
            self.histograms[slot] = self.histograms.get(slot, 0) + np.bincount((bits >> 21) & 1023, minlength=1024)

    def __call__(self, kind: str, name: str, x: Tensor, product: str, axis: int) -> Tensor:
        """x as an operand of the product, which adds along `axis`."""
        scheme, form = self.scheme, self.scheme.form(kind)
        if not form or not self.at_work(name, product):
            return x
        stochastic = scheme.stochastic and kind == "gradient"
        if scheme.scale == "block" and kind in scheme.block:
            scale = self.block_scale(kind, x, form, axis)
        else:
            scale = torch.tensor(self.scale(kind, name, x, form))
        return round_to(x * scale, form, stochastic) / scale

    def scale(self, kind: str, name: str, x: Tensor, form: str) -> float:
        slot, scheme = (kind, name), self.scheme
        past = self.past.get(slot, [])[-scheme.history:]
        if scheme.scale == "current" or not past:
            amax = float(x.abs().max())
            if scheme.exact:
                return LARGEST[form] / 2.0**scheme.margin / amax if amax else 1.0
            return 2.0 ** self.current.setdefault(slot, exponent_of(amax, form, scheme.margin if past else 1))
        return 2.0 ** exponent_of(max(past), form, scheme.gradient_margin if kind == "gradient" else scheme.margin)

    def block_scale(self, kind: str, x: Tensor, form: str, axis: int) -> Tensor:
        amax = x.abs()
        for side in (0, 1) if kind == "weight" else (axis % 2,):
            pieces = amax.split(BLOCK, side)
            amax = torch.cat([piece.amax(side, keepdim=True).expand_as(piece) for piece in pieces], side)
        target = LARGEST[form] / 2.0**self.scheme.margin / amax.clamp_min(2.0**-120)
        return target if self.scheme.exact else torch.exp2(torch.floor(torch.log2(target)))


class ThroughBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].bfloat16().float()


# ---- the model ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int


class Llama(nn.Module):
    """Tied embeddings, no biases. Tokens [B, T] in, logits [B, T, vocabulary] out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, self.head_dim = shape, shape.hidden // shape.heads
        C, kv, F = shape.hidden, shape.kv_heads * self.head_dim, shape.ffn
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, C) * INIT_DEVIATION)
        sizes = {"qkv": (C + 2 * kv, C), "output": (C, C), "gate_up": (2 * F, C), "down": (C, F)}
        last = 1 / math.sqrt(2 * shape.layers)
        self.matrices = nn.ParameterDict({f"{layer}_{name}": nn.Parameter(torch.randn(size) * INIT_DEVIATION * (
            last if name in ("output", "down") else 1)) for layer in range(shape.layers) for name, size in sizes.items()})
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(C)) for _ in range(2 * shape.layers + 1))
        angles = torch.arange(shape.length)[:, None] * THETA ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)

    def forward(self, ids: Tensor, rounding: SchemeRounding) -> Tensor:
        shape, D = self.shape, self.head_dim
        B, T = ids.shape
        narrow = ThroughBf16.apply if rounding.scheme.bf16 else (lambda x: x)

        def linear(x: Tensor, layer: int, name: str) -> Tensor:
            return narrow(RoundedLinear.apply(x, narrow(self.matrices[f"{layer}_{name}"]), rounding, f"{layer}.{name}"))

        def norm(x: Tensor, index: int) -> Tensor:
            return narrow(functional.rms_norm(x, (shape.hidden,), self.norms[index], NORM_EPS))

        x = narrow(self.embedding)[ids].flatten(0, 1)
        for layer in range(shape.layers):
            qkv = linear(norm(x, 2 * layer), layer, "qkv").view(B, T, -1, D).transpose(1, 2)
            q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            group = shape.heads // shape.kv_heads
            k, v = self.rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            mixed = functional.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
            x = narrow(x + linear(narrow(mixed.transpose(1, 2).reshape(B * T, -1)), layer, "output"))
            gate, up = linear(norm(x, 2 * layer + 1), layer, "gate_up").chunk(2, dim=-1)
            x = narrow(x + linear(narrow(functional.silu(gate) * up), layer, "down"))
        return norm(x, 2 * shape.layers) @ narrow(self.embedding).T

    def loss(self, windows: Tensor, rounding: SchemeRounding) -> Tensor:
        return functional.cross_entropy(self(windows[:, :-1], rounding), windows[:, 1:].flatten())


# ---- runs -----------------------------------------------------------------------------------------------------------

class Data:
    def __init__(self, directory: Path, length: int, micro_batch: int):
        self.splits = {}
        for split in ("train", "val"):
            self.splits[split], self.vocabulary, _ = tokens_of(directory, split, "cpu")
        self.length, self.micro_batch = length, micro_batch

    def windows(self, split: str, seed: int) -> Iterator[Tensor]:
        tokens, generator = self.splits[split], torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(tokens) - self.length, (self.micro_batch,), generator=generator)
            yield tokens[starts[:, None] + torch.arange(self.length + 1)].long()


class Trainer:
    """One run: steps of AdamW with a warm-up and a cosine to a tenth."""

    def __init__(self, scheme: Scheme, shape: Shape, data: Data, seed: int, options: argparse.Namespace):
        torch.manual_seed(seed)
        self.scheme, self.options, self.model = scheme, options, Llama(shape)
        if scheme.perturbed:
            generator = torch.Generator().manual_seed(scheme.perturbed)
            for parameter in self.model.parameters():
                parameter.data *= 1 + scheme.perturbation * torch.randn(parameter.shape, generator=generator)
        self.rounding = SchemeRounding(scheme, shape.layers)
        self.windows = data.windows("train", seed)
        groups = [{"params": [p for p in self.model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
                  {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=BETAS, fused=True)
        self.step_index = 0

    def gradients(self, batches: list[Tensor], rounding: SchemeRounding) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.model.loss(batch, rounding) / len(batches)
            loss.backward()
            total += float(loss.detach())
        return total

    def step(self) -> float:
        options = self.options
        self.rounding.begin_step(self.step_index)
        loss = self.gradients([next(self.windows) for _ in range(options.accumulate)], self.rounding)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        passed = self.step_index / options.steps
        rate = options.lr * self.scheme.rate * min((self.step_index + 1) / options.warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * passed)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.rounding.end_step()
        self.step_index += 1
        return loss

    @torch.no_grad()
    def measure(self, data: Data, rounding: SchemeRounding) -> float:
        windows, counting = data.windows("val", 0), rounding.counting
        rounding.counting = False
        loss = sum(float(self.model.loss(next(windows), rounding)) for _ in range(self.options.val_batches))
        rounding.counting = counting
        return loss / self.options.val_batches


def train(name: str, seed: int, shape: Shape, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    trainer, begin = Trainer(SCHEMES[name], shape, data, seed, options), time.process_time()
    plain, losses, val = SchemeRounding(FP32, shape.layers), [], []
    for step in range(1, options.steps + 1):
        losses.append(trainer.step())
        if not math.isfinite(losses[-1]):
            break
        if step % options.val_every == 0:
            measured = trainer.measure(data, plain)
            val.append([step, measured, trainer.measure(data, trainer.rounding) if trainer.scheme.rounds else measured])
    return {"scheme": name, "seed": seed, "setting": setting(options), "losses": losses, "val": val,
            "seconds": round(time.process_time() - begin, 1)}


def setting(options: argparse.Namespace) -> str:
    return (f"{options.layers}x{options.hidden}, ffn {options.ffn}, {options.micro_batch}x{options.accumulate}x{options.length} tokens, "
            f"{options.steps} steps, lr {options.lr}")


# ---- reports --------------------------------------------------------------------------------------------------------

def mean_run(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of those that were finite to the end."""
    runs = [run for run in runs if math.isfinite(run["losses"][-1])]
    if not runs:
        return None
    return {"losses": np.mean([run["losses"] for run in runs], axis=0), "val": np.mean([run["val"] for run in runs], axis=0)}


def report(rows: list[dict[str, Any]], width: int) -> None:
    print("| scheme | runs | lag, steep, steps | gap, steep, % | largest gap, % | lag, late | gap, late, % | learnt, steep / end, % | forward, steep / end, % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in SCHEMES:
        columns: list[list[float]] = [[] for _ in range(9)]
        for row in rows:
            if row["scheme"] != name:
                continue
            base = mean_run([other for other in rows if other["seed"] == row["seed"] and other["scheme"] in REFERENCES and other is not row])
            if base is None:
                continue
            if len(row["losses"]) < len(base["losses"]):
                print(f"| {name} | not finite in step {len(row['losses'])} |")
                continue
            steep, late = (behind(row["losses"], base["losses"], width, part) for part in (STEEP, LATE))
            middle = [i for i, (step, *_) in enumerate(row["val"]) if STEEP[0] <= step / len(row["losses"]) <= STEEP[1]]
            learnt = [100 * (ours[1] / theirs[1] - 1) for ours, theirs in zip(row["val"], base["val"])]
            forward = [100 * (ours[2] / ours[1] - 1) for ours in row["val"]]
            for column, value in zip(columns, (steep[0], steep[1], largest_gap(row["losses"], base["losses"], width), late[0], late[1],
                                               float(np.mean([learnt[i] for i in middle])), learnt[-1],
                                               float(np.mean([forward[i] for i in middle])), forward[-1])):
                column.append(value)
        if columns[0]:
            cell = [mean_cell(column) for column in columns]
            print(f"| {name} | {len(columns[0])} | {cell[0]} | {cell[1]} | {cell[2]} | {cell[3]} | {cell[4]} | {cell[5]} / {cell[6]} | "
                  f"{cell[7]} / {cell[8]} |")


# ---- probes ---------------------------------------------------------------------------------------------------------

def probe(shape: Shape, data: Data, options: argparse.Namespace) -> None:
    """Along a run in fp32: gradients of the schemes, and what delayed scales would have lost."""
    trainer = Trainer(FP32, shape, data, 1, options)
    names = [name for name in options.schemes if SCHEMES[name].rounds or SCHEMES[name].bf16]
    at = sorted({1, 5, 20, 50, 100, 150, 200, 300, options.steps} & set(range(options.steps + 1)))
    tables: dict[str, dict[int, tuple[float, ...]]] = {name: {} for name in names}
    seen: list[dict[tuple[str, str], np.ndarray]] = []
    for step in range(1, options.steps + 1):
        trainer.rounding.histograms = {}
        trainer.step()
        seen.append(trainer.rounding.histograms)
        if step not in at:
            continue
        trainer.rounding.histograms = None
        source = data.windows("train", 77)
        batches = [next(source) for _ in range(options.probe_batches)]
        exact = gradients_of(trainer, batches, SchemeRounding(FP32, shape.layers))
        for name in names:
            rounding = SchemeRounding(SCHEMES[name], shape.layers)
            rounding.step, rounding.counting, rounding.past = 10**9, False, trainer.rounding.past
            got = gradients_of(trainer, batches, rounding)
            whole = [sum(gradients) / len(batches) for gradients in zip(*got)]
            target = [sum(gradients) / len(batches) for gradients in zip(*exact)]
            one = float(np.mean([distance(a, b) for a, b in zip(got, exact)]))
            along = sum(float((a * b).sum()) for a, b in zip(whole, target)) / sum(float((b * b).sum()) for b in target)
            tables[name][step] = one, distance(whole, target), along - 1
    scatter = float(np.mean([distance(a, target) for a in exact]))
    print("| scheme | " + " | ".join(f"step {step}" for step in at) + " |\n|" + "---|" * (len(at) + 1))
    for name in names:
        print(f"| {name} | " + " | ".join("{:.3f}, {:.3f}, {:+.3f}".format(*tables[name][step]) for step in at) + " |")
    print(f"distance of the gradient of one micro-batch from that of all {len(batches)}, fp32, last step: {scatter:.2f}")
    policies(seen)


def gradients_of(trainer: Trainer, batches: list[Tensor], rounding: SchemeRounding) -> list[list[Tensor]]:
    """Of each micro-batch, of the linear layers' weights."""
    every = []
    for batch in batches:
        trainer.gradients([batch], rounding)
        every.append([parameter.grad.clone() for parameter in trainer.model.matrices.values() if parameter.grad is not None])
    trainer.optimizer.zero_grad()
    return every


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(got, want)) / sum(float(b.square().sum()) for b in want))


def policies(seen: list[dict[tuple[str, str], np.ndarray]]) -> None:
    """What each history and margin would have saturated and flushed, from histograms with four bins to an octave."""
    edges = np.arange(1024) / 4 - 127
    largest = {slot: [int(np.flatnonzero(step[slot])[-1]) for step in seen] for slot in seen[0]}
    print("\n| kind, format | history, margin | tensors with saturation, steps 2-60, % | later | worst share of a tensor, 2-60, % | later | flushed, 2-60, % | later |")
    print("|" + "---|" * 8)
    for kind, form in (("input", "e4m3"), ("weight", "e4m3"), ("gradient", "e5m2"), ("gradient", "e4m3")):
        slots = [slot for slot in seen[0] if slot[0] == kind]
        top, bottom = (8, -10) if form == "e4m3" else (15, -17)
        for history in (0, 1, 16, 64, 1024):
            for margin in (0, 1, 2, 4, 6):
                parts: list[list[Any]] = [[0, 0, 0.0, 0, 0], [0, 0, 0.0, 0, 0]]
                for step in range(1, len(seen)):
                    part = parts[step >= 60]
                    for slot in slots:
                        past = largest[slot][step:step + 1] if history == 0 else largest[slot][max(step - history, 0):step]
                        # amax is at most the end of its bin; 1.75 x 2^top is the largest number
                        exponent = top - margin - math.floor((max(past) + 1) / 4 - 127 - 1e-9) - (max(past) % 4 == 3)
                        counts = seen[step][slot]
                        values, zeros = int(counts.sum()), int(counts[0])
                        saturated = int(counts[edges >= top + 0.75 - exponent].sum())
                        part[0] += 1
                        part[1] += saturated > 0
                        part[2] = max(part[2], saturated / values)
                        part[3] += int(counts[1:][edges[1:] < bottom - exponent].sum())
                        part[4] += values - zeros
                cells = [f"{100 * part[1] / max(part[0], 1):.2f}" for part in parts] + [f"{100 * part[2]:.3f}" for part in parts] + [
                    f"{100 * part[3] / max(part[4], 1):.3f}" for part in parts]
                print(f"| {kind}, {form} | {history or 'current'}, {margin} | " + " | ".join(cells) + " |")


# ---- command line ---------------------------------------------------------------------------------------------------

def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="train_fp8.py")
    positive = cli.number_in(1, 2**31, int)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="train_*.bin and val_*.bin")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="results.jsonl is kept there")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="some of: " + ", ".join(SCHEMES))
    parser.add_argument("--seeds", default="1", help="of initial weights and windows, such as 1,2,3")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=128)
    parser.add_argument("--ffn", type=positive, default=384)
    parser.add_argument("--length", type=positive, default=128)
    parser.add_argument("--micro-batch", type=positive, default=8)
    parser.add_argument("--accumulate", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=240)
    parser.add_argument("--warm-up", type=positive, default=30)
    parser.add_argument("--lr", type=cli.number_in(0, 10), default=3e-3)
    parser.add_argument("--val-every", type=positive, default=40)
    parser.add_argument("--val-batches", type=positive, default=8)
    parser.add_argument("--smooth", type=positive, default=15, help="steps of which the mean is compared")
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--probe-batches", type=positive, default=8)
    parser.add_argument("--report", action="store_true", help="no new runs")
    options = parser.parse_args()
    options.schemes = options.schemes.split(",")
    for name in options.schemes:
        if name not in SCHEMES:
            parser.error(f"--schemes: got {cli.shown(name)}, expected some of {', '.join(SCHEMES)}")
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    return options


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    check_rounding()
    data = Data(options.data, options.length, options.micro_batch)
    shape = Shape(options.layers, options.hidden, options.ffn, options.hidden // 32, max(options.hidden // 64, 1), data.vocabulary, options.length)
    if options.probe:
        probe(shape, data, options)
        return cli.OK
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.jsonl"

    def rows() -> list[dict[str, Any]]:
        every = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        return [row for row in every if row["setting"] == setting(options)]

    for seed in options.seeds:
        for name in options.schemes:
            if options.report or any(row["scheme"] == name and row["seed"] == seed for row in rows()):
                continue
            row = train(name, seed, shape, data, options)
            with open(results, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name} {seed}: {len(row['losses'])} steps, loss {np.mean(row['losses'][-15:]):.4f}, {row['seconds']} s", flush=True)
    report(rows(), options.smooth)
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
