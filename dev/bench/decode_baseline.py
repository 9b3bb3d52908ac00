"""The baseline of infer_pythia: GPT-NeoX at batch 1 in PyTorch, random weights, a static K/V cache.

    python3 dev/bench/decode_baseline.py --model pythia-2.8b                      every mode, contexts 64, 1024, 2000
    python3 dev/bench/decode_baseline.py --model pythia-410m --mode compile --contexts 64

Modes: eager; graph, one step of eager captured in a CUDA graph; compile, torch.compile with mode reduce-overhead (which
captures graphs itself). A step is what infer_pythia's is: embedding, all layers, head, greedy choice, and the next
position, all on the GPU. The cache of each measurement is no longer than it must be (the context and the tokens decoded,
rounded up to 64), which favours the baseline: a graph that served every context would always read the longest.

Prints one JSON object a measurement: ms of a token (median and p99 of CUDA events around each step), tokens/s, and for
eager the ms of the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Callable

import needs_gpu  # before torch, which may be missing
import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 64  # decoded and timed at each context
WARM_UP = 8


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    vocab: int = 50304

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "smoke": Shape(2, 64, 2, 512),
    "pythia-70m": Shape(6, 512, 8),
    "pythia-160m": Shape(12, 768, 12),
    "pythia-410m": Shape(24, 1024, 16),
    "pythia-1b": Shape(16, 2048, 8),
    "pythia-1.4b": Shape(24, 2048, 16),
    "pythia-2.8b": Shape(32, 2560, 32),
    "pythia-6.9b": Shape(32, 4096, 32, 50432),
    "pythia-12b": Shape(36, 5120, 40, 50688),
}
MODES = ("eager", "graph", "compile")


class Layer(nn.Module):
    """One layer with the parallel residual: x + attention(norm1(x)) + mlp(norm2(x))."""

    def __init__(self, shape: Shape, positions: int):
        super().__init__()
        c = shape.hidden
        self.heads, self.rotary = shape.heads, shape.head_dim // 4
        self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.qkv, self.dense = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, shape.heads, positions, shape.head_dim), persistent=False)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turning, rest = x[..., :self.rotary], x[..., self.rotary:]
        low, high = turning.chunk(2, dim=-1)
        return torch.cat((turning * cos + torch.cat((-high, low), dim=-1) * sin, rest), dim=-1)

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, c = x.shape
        packed = self.qkv(self.norm1(x)).view(batch, tokens, self.heads, -1).transpose(1, 2)
        q, k, v = packed.chunk(3, dim=-1)
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        if mask is None:  # a prompt in an empty cache
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        attended = self.dense(attended.transpose(1, 2).reshape(batch, tokens, c))
        return x + attended + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, shape: Shape, positions: int):
        super().__init__()
        self.positions = positions
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, positions) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        rotary = shape.head_dim // 4
        frequency = 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
        angle = torch.outer(torch.arange(positions).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("all_positions", torch.arange(positions), persistent=False)

    def forward(self, ids: Tensor, position: Tensor, prompt: bool) -> Tensor:
        x = self.embedding(ids)
        cos, sin = self.cos[position].to(x.dtype), self.sin[position].to(x.dtype)
        mask = None if prompt else (self.all_positions <= position[-1])[None, None, None]
        for layer in self.layers:
            x = layer(x, position, cos, sin, mask)
        return self.head(self.norm(x[:, -1:]))


class Decoder:
    """A model, a token and its position, on the device. The position stays where it is: what a step costs does not depend
    on whether the next one follows it."""

    def __init__(self, shape: Shape, context: int, dtype: torch.dtype):
        positions = -(-(context + TOKENS) // 64) * 64
        with torch.device("cuda"):
            self.model = Model(shape, positions)
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)
            self.model.to(dtype).eval()
            self.prompt_ids = torch.randint(0, shape.vocab, (1, context))
            self.prompt_positions = torch.arange(context)
            self.ids = torch.zeros(1, 1, dtype=torch.long)
            self.position = torch.full((1,), context)

    def prompt(self) -> Tensor:
        return self.model(self.prompt_ids, self.prompt_positions, True).argmax(-1)

    def step(self, ids: Tensor, position: Tensor) -> Tensor:
        return self.model(ids, position, False).argmax(-1)


def make_step(decoder: Decoder, mode: str) -> Callable[[], Tensor | None]:
    if mode == "compile":
        compiled = torch.compile(decoder.step, mode="reduce-overhead", fullgraph=True)
        return lambda: compiled(decoder.ids, decoder.position)
    if mode == "eager":
        return lambda: decoder.step(decoder.ids, decoder.position)
    stream = torch.cuda.Stream()  # a capture wants its work to have run once on another stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decoder.step(decoder.ids, decoder.position)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(decoder.ids, decoder.position)
    return graph.replay


def timed(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(name: str, mode: str, context: int, dtype: torch.dtype) -> dict[str, object]:
    torch.manual_seed(0)
    torch.compiler.reset()
    decoder = Decoder(SHAPES[name], context, dtype)
    decoder.prompt()
    result: dict[str, object] = {"program": "PyTorch " + torch.__version__, "model": name, "mode": mode,
                                 "context": context}
    if mode == "eager":
        result["prompt_ms"] = round(statistics.median(timed(decoder.prompt) for _ in range(5)), 4)
    step = make_step(decoder, mode)
    for _ in range(WARM_UP):
        step()
    times = sorted(timed(step) for _ in range(TOKENS))
    median = statistics.median(times)
    result |= {"ms": round(median, 4), "ms_p99": round(times[-1], 4), "tokens_per_s": round(1000 / median, 1)}
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=list(SHAPES), metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024, 2000], metavar="N")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    options = parser.parse_args()
    needs_gpu.by_torch(torch.cuda.is_available())
    return options


def main() -> int:
    options = arguments()
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU", file=sys.stderr)
        return 4
    failed = False
    for mode in options.mode:
        for context in options.contexts:
            try:
                with torch.no_grad():
                    result = measure(options.model, mode, context, getattr(torch, options.dtype))
            except RuntimeError as error:  # out of memory, say: the others still count
                failed = True
                result = {"program": "PyTorch", "model": options.model, "mode": mode, "context": context,
                          "error": str(error).strip().splitlines()[0][:200]}
            print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
