#!/usr/bin/env python3
"""The baseline of train_llama: a Llama training step in PyTorch, as fast as its compiler makes it.

    python3 dev/bench/train_baseline.py                                  all configurations, one JSON line each
    python3 dev/bench/train_baseline.py --config llama3.2-1b --precision bf16 --attention cudnn
    python3 dev/bench/train_baseline.py --config smoke --device cpu --no-compile
    python3 dev/bench/train_baseline.py --config llama3.2-1b --precision master --float8
    torchrun --nproc-per-node 2 dev/bench/train_baseline.py --config llama3.2-1b --precision master

A step is forward, backward, clipping to norm 1 and AdamW on one micro-batch of random tokens: torch.compile, scaled dot
product attention on grouped heads, fused AdamW, q, k, v and gate, up as one product each. Two precisions: "master"
keeps weights and moments in fp32 and computes in bf16 by autocast, "bf16" keeps all of them in bf16. The residual
stream is bf16 in both, the loss fp32. --float8 adds torchao: linear layers of the blocks in fp8, one scale a tensor, from
its largest value at that time; the head stays as it is. ms is the median over --steps, after --warmup steps that compile and settle the
clock.

Under torchrun each process has a GPU and a micro-batch, and FSDP2 shards fp32 weights, moments and gradients: compiled
layer by layer, bf16 weights gathered once a step and kept until the backward pass, gradients reduced in fp32.
tokens_per_s is that of all GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import needs_gpu  # before torch, which may be missing
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK_TFLOPS = 989.4  # dense bf16 of an H100 or H200 SXM
FORMULA = "(6 N + 6 L NH HS T) tokens/s / peak: N weights of matrix products, head included; causal attention"
NORM_EPS = 1e-5
INIT_DEVIATION = 0.02
ATTENTION = {"auto": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Shape:
    """One configuration and the batch it is measured on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    theta: float
    micro_batch: int
    seq_len: int
    precisions: tuple[str, ...] = ("master", "bf16")
    head_norm: bool = False  # of queries and keys, as Qwen3 has it

    @property
    def matmul_weights(self) -> int:
        """Weights that every token is multiplied with; the embedding is a look-up, the head is not."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocab

    @property
    def flops_per_token(self) -> int:
        return 6 * self.matmul_weights + 6 * self.layers * self.heads * self.head_dim * self.seq_len


SHAPES = {
    "d12": Shape(12, 768, 12, 4, 64, 2048, 50304, True, 5e5, 32, 1024),
    "llama3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, True, 5e5, 8, 2048),
    "llama3.2-3b": Shape(28, 3072, 24, 8, 128, 8192, 128256, True, 5e5, 4, 2048, ("bf16",)),
    "llama3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, False, 5e5, 1, 4096, ("bf16",)),
    "qwen3-1.7b": Shape(28, 2048, 16, 8, 128, 6144, 151936, True, 1e6, 8, 2048, head_norm=True),
    "smoke": Shape(2, 64, 4, 2, 16, 96, 256, True, 1e4, 2, 32),
}


# ---- the model -------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, 1, HS/2] in fp32."""
    frequencies = shape.theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.arange(shape.seq_len).float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, T, heads, HS]: dimension i turns with i + HS/2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.widths = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, sum(self.widths) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = [RMSNorm(shape.head_dim) if shape.head_norm else nn.Identity() for _ in "qk"]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.widths, dim=2)
        q, k, v = (part.transpose(1, 2) for part in (turn(self.q_norm(q), cos, sin), turn(self.k_norm(k), cos, sin), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(shape.hidden), Attention(shape)
        self.ffn_norm, self.ffn = RMSNorm(shape.hidden), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens and labels [B, T] in, the mean loss out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INIT_DEVIATION)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shard(model: Llama, compiled: bool) -> None:
    """FSDP2 over all processes, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # since PyTorch 2.6

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    if compiled:
        model.loss = torch.compile(model.loss)  # type: ignore[method-assign]
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)


def to_float8(model: Llama) -> None:
    """Linear layers of the blocks in fp8 by torchao, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"),
                               module_filter_fn=lambda _, name: name.startswith("layers."))


def processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


# ---- measuring -------------------------------------------------------------------------------------------------------


def make_step(shape: Shape, precision: str, options: argparse.Namespace) -> tuple[Callable[[], Tensor], int]:
    """A function that does one step and returns its loss, and the number of parameters."""
    device = options.device
    with torch.device(device):
        model = Llama(shape)
        cos, sin = rope_tables(shape)
        ids = torch.randint(0, shape.vocab, (shape.micro_batch, shape.seq_len + 1))
    if precision == "bf16":
        model.to(torch.bfloat16)
    if options.float8:
        to_float8(model)
    several = processes() > 1
    if several:
        shard(model, not options.no_compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = model if options.no_compile or several else torch.compile(model, mode=options.compile_mode)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    backend = ATTENTION[options.attention]

    def precision_context() -> AbstractContextManager:
        cast = precision == "master" and not several  # FSDP's policy casts by itself
        return torch.autocast(device, dtype=torch.bfloat16) if cast else nullcontext()

    def step() -> Tensor:
        with precision_context(), sdpa_kernel(backend) if backend else nullcontext():
            loss = run(tokens, labels, cos, sin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, sum(parameter.numel() for parameter in model.parameters())


def timed(step: Callable[[], Tensor], device: str) -> float:
    """Milliseconds of one step."""
    if device == "cpu":
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(name: str, shape: Shape, precision: str, options: argparse.Namespace) -> dict[str, object]:
    on_gpu = options.device == "cuda"
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    step, parameters = make_step(shape, precision, options)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    losses = [step() for _ in range(options.warmup)]
    first, last = float(losses[0]), float(losses[-1])  # waits for the GPU
    settling = time.monotonic() - began
    times = [timed(step, options.device) for _ in range(options.steps)]
    median = statistics.median(times)
    tokens_per_s = processes() * shape.micro_batch * shape.seq_len / median * 1000
    tflops = tokens_per_s / processes() * shape.flops_per_token / 1e12
    return {"program": "PyTorch", "config": name, "precision": precision, "float8": options.float8, "gpus": processes(),
            "micro_batch": shape.micro_batch, "seq_len": shape.seq_len, "parameters": parameters,
            "tokens_per_s": round(tokens_per_s, 1), "ms": round(median, 3),
            "ms_min": round(min(times), 3), "ms_max": round(max(times), 3),
            "steps": options.steps, "tflops": round(tflops, 2), "mfu": round(tflops / options.peak_tflops, 4),
            "mfu_formula": FORMULA, "peak_tflops": options.peak_tflops,
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
            "warmup_s": round(settling, 1), "first_loss": round(first, 4), "last_warmup_loss": round(last, 4),
            "attention": options.attention, "compiled": not options.no_compile, "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu"}


# ---- the program -----------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", choices=list(SHAPES), metavar="NAME",
                        help=f"of {', '.join(SHAPES)}; default: all but smoke")
    parser.add_argument("--precision", choices=("master", "bf16"), help="default: those that fit on one H200")
    parser.add_argument("--float8", action="store_true", help="linear layers of the blocks in fp8; needs torchao and one process")
    parser.add_argument("--micro-batch", type=positive, metavar="B", help="sequences (default: the configuration's)")
    parser.add_argument("--seq-len", type=positive, metavar="T", help="tokens of a sequence")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="steps that are timed (default: 20)")
    parser.add_argument("--warmup", type=positive, default=5, metavar="N", help="steps before them (default: 5)")
    parser.add_argument("--attention", choices=list(ATTENTION), default="auto", help="kernel of the attention")
    parser.add_argument("--compile-mode", default="default", metavar="MODE", help="mode of torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="eager PyTorch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, metavar="X",
                        help=f"what mfu is a share of (default: {PEAK_TFLOPS}, dense bf16 of an H200)")
    return parser.parse_args()


def shape_of(name: str, options: argparse.Namespace) -> Shape:
    fields = dict(vars(SHAPES[name]))
    for key in ("micro_batch", "seq_len"):
        fields[key] = getattr(options, key) or fields[key]
    return Shape(**fields)


def main() -> int:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        needs_gpu.fail("--device cuda: PyTorch finds no GPU. Use --device cpu")
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
        if options.precision != "master" or options.float8:
            print("error: several processes: only --precision master without --float8 is measured", file=sys.stderr)
            return 2
    failed = False
    for name in options.config or [name for name in SHAPES if name != "smoke"]:
        shape = shape_of(name, options)
        for precision in [options.precision] if options.precision else shape.precisions:
            try:
                result = measure(name, shape, precision, options)
            except RuntimeError as error:  # out of memory, or no such attention kernel: the others still count
                failed = True
                result = {"program": "PyTorch", "config": name, "precision": precision,
                          "error": str(error).strip().splitlines()[0][:200]}
            if rank == 0:
                print(json.dumps(result), flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.exit(main())
