#!/usr/bin/env python3
"""Trains a GPT-NeoX on token shards and saves it as Hugging Face does, for scripts/convert_hf.py: train_llama trains Llamas only.

    python3 dev/accuracy/train_neox.py --data data/almanac -o models/neox --layers 14 --hidden 768 --heads 12

The tensors have the names of transformers' GPTNeoXForCausalLM. On a GPU bf16 weights compute and fp32 masters take AdamW's
updates; on the CPU everything is fp32. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import needs  # noqa: E402, F401, before the packages
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import cli  # noqa: E402
from token_shard import TokenShard  # noqa: E402

HEAD_DIM, ROTARY_DIM, THETA, NORM_EPS = 64, 16, 10000.0, 1e-5
INIT_DEVIATION = 0.02
BETAS, WEIGHT_DECAY, CLIP, WARM_UP = (0.9, 0.95), 0.1, 1.0, 100
LOG_EVERY = 50
NON_FINITE = 6  # exit code


class Attention(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, 3, HEAD_DIM))  # rows are [head][q, k, v][head_dim]
        q, k, v = (heads[..., index, :].transpose(1, 2) for index in range(3))
        mixed = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.dense(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(x)))


class Layer(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden, NORM_EPS)
        self.post_attention_layernorm = nn.LayerNorm(hidden, NORM_EPS)
        self.attention, self.mlp = Attention(hidden), Mlp(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attention(self.input_layernorm(x), cos, sin) + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, layers: int, hidden: int, rows: int):
        super().__init__()
        self.embed_in = nn.Embedding(rows, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(hidden, NORM_EPS)


class NeoX(nn.Module):
    """Tokens [B, T] in, logits [B, T, rows] out."""

    def __init__(self, layers: int, hidden: int, rows: int, length: int):
        super().__init__()
        self.gpt_neox = Body(layers, hidden, rows)
        self.embed_out = nn.Linear(hidden, rows, bias=False)
        angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
                nn.init.normal_(parameter, std=INIT_DEVIATION / math.sqrt(2 * layers) if last else INIT_DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt_neox.embed_in(ids)
        cos, sin = self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]
        for layer in self.gpt_neox.layers:
            x = layer(x, cos, sin)
        return self.embed_out(self.gpt_neox.final_layer_norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, heads, T, HS]: dimension i of the first ROTARY_DIM turns with i + ROTARY_DIM/2."""
    turning, rest = x.split([ROTARY_DIM, HEAD_DIM - ROTARY_DIM], dim=-1)
    first, second = turning.float().chunk(2, dim=-1)
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest], dim=-1)


def loss_of(model: NeoX, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :-1]).float().flatten(0, 1), windows[:, 1:].flatten())


def tokens_of(directory: Path, split: str, device: str) -> tuple[Tensor, int, int]:
    """All tokens of a split, the size of the vocabulary, and the id that ends a document."""
    shards = [TokenShard(path) for path in sorted(directory.glob(f"{split}_*.bin"))]
    if not shards:
        cli.bad_file(directory, f"{split}_*.bin", "no shards", "Make them with dev/prepare_data.py")
    ids = np.concatenate([shard.tokens for shard in shards]).astype(np.int32)
    return torch.from_numpy(ids).to(device), shards[0].vocab_size, shards[0].end_of_document_id


class Masters:
    """fp32 copies of bf16 parameters, which AdamW updates; where the parameters are fp32, they are their own."""

    def __init__(self, model: NeoX, rate: float):
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(value.detach().float().clone()) for value in self.parameters]
        groups = [{"params": [value for value in self.masters if value.ndim == 2], "weight_decay": WEIGHT_DECAY},
                  {"params": [value for value in self.masters if value.ndim < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=self.masters[0].is_cuda)

    def step(self, rate: float) -> Tensor:
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return norm


def train(model: NeoX, options: argparse.Namespace, tokens: Tensor) -> Masters:
    """The rate falls with the steps or, where that is sooner, with the time of --seconds."""
    masters, begin = Masters(model, options.lr), time.monotonic()
    generator = torch.Generator().manual_seed(options.seed)
    span = torch.arange(options.seq_len + 1, device=tokens.device)
    for step in range(options.steps):
        passed = max(step / options.steps, (time.monotonic() - begin) / options.seconds)
        if passed >= 1:
            break
        rate = options.lr * min((step + 1) / WARM_UP, 0.1 + 0.45 * (1 + math.cos(math.pi * passed)))
        starts = torch.randint(len(tokens) - options.seq_len, (options.micro_batch,), generator=generator)
        loss = loss_of(model, tokens[starts.to(tokens.device)[:, None] + span].long())
        loss.backward()
        masters.step(rate)
        if step % LOG_EVERY == 0:  # reading the loss waits for the GPU, which bounds how far the host runs ahead of it
            value, seconds = float(loss.detach()), time.monotonic() - begin
            done = (step + 1) * options.micro_batch * options.seq_len
            print(f"step {step + 1}/{options.steps}  loss {value:.4f}  {done / seconds:.0f} tok/s  {seconds:.0f} s", flush=True)
            if not math.isfinite(value):
                raise cli.FileError(NON_FINITE, f"the loss of step {step + 1} is {value}")
    return masters


@torch.no_grad()
def validation_loss(model: NeoX, tokens: Tensor, length: int) -> float:
    count = min((len(tokens) - 1) // length, 64)
    windows = torch.stack([tokens[i * length:(i + 1) * length + 1] for i in range(count)]).long()
    return float(torch.stack([loss_of(model, part) for part in windows.split(8)]).mean())


def save(model: NeoX, masters: Masters, options: argparse.Namespace, rows: int, begin_id: int, end_id: int) -> None:
    names = [name for name, _ in model.named_parameters()]
    options.output.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().cpu().half().numpy() for name, value in zip(names, masters.masters)},
              options.output / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": rows, "hidden_size": options.hidden,
        "num_hidden_layers": options.layers, "num_attention_heads": options.hidden // HEAD_DIM, "intermediate_size": 4 * options.hidden,
        "hidden_act": "gelu", "max_position_embeddings": options.seq_len, "use_parallel_residual": True, "attention_bias": True,
        "rotary_pct": ROTARY_DIM / HEAD_DIM, "rotary_emb_base": THETA, "rope_parameters": {
            "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": ROTARY_DIM / HEAD_DIM},
        "layer_norm_eps": NORM_EPS, "tie_word_embeddings": False, "bos_token_id": begin_id, "eos_token_id": end_id,
        "torch_dtype": "float16", "dtype": "float16"}
    (options.output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (options.output / "generation_config.json").write_text(json.dumps({"bos_token_id": begin_id, "eos_token_id": end_id}) + "\n")
    shutil.copyfile(options.data / "tokenizer.json", options.output / "tokenizer.json")


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="train_neox.py")
    positive = cli.number_in(1, 2**31, int)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="train_*.bin, val_*.bin and tokenizer.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the Hugging Face directory to write")
    parser.add_argument("--layers", type=positive, default=14)
    parser.add_argument("--hidden", type=positive, default=768, help=f"a multiple of {HEAD_DIM}, the size of a head")
    parser.add_argument("--seq-len", type=positive, default=1024)
    parser.add_argument("--micro-batch", type=positive, default=32)
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--seconds", type=cli.number_in(1, 1e6), default=1e6, help="end earlier, after this time")
    parser.add_argument("--lr", type=cli.number_in(0, 1), default=1e-3)
    parser.add_argument("--seed", type=cli.number_in(0, 2**31, int), default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.manual_seed(options.seed)
    tokens, vocabulary, end_id = tokens_of(options.data, "train", options.device)
    rows = -(-vocabulary // 128) * 128
    model = NeoX(options.layers, options.hidden, rows, options.seq_len).to(options.device)
    if options.device == "cuda":
        for parameter in model.parameters():  # not the tables of RoPE
            parameter.data = parameter.data.bfloat16()
    print(f"{sum(value.numel() for value in model.parameters()) / 1e6:.1f} M parameters, {len(tokens) / 1e6:.1f} M tokens")
    masters = train(model, options, tokens)
    print(f"val {validation_loss(model, tokens_of(options.data, 'val', options.device)[0], options.seq_len):.4f}")
    save(model, masters, options, rows, int(tokens[0]), end_id)
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
