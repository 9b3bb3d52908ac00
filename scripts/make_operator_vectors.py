#!/usr/bin/env python3
"""Writes the vectors from PyTorch that the CPU operators are tested with: test/fixtures/operators/NAME.bin, one tensor
file for each operator.

    python3 scripts/make_operator_vectors.py [NAME]...     needs torch and transformers; rewrites these files, or all

Inputs are fp32. PyTorch computes in float64 from them and the results are rounded to fp32 once, so the vectors carry no
rounding of their own. Tensors are named CASE.TENSOR, a gradient CASE.dTENSOR; the configuration lists each case with
its sizes. test/cpp/operator_vectors_test.cpp reads them.
"""

import argparse
from pathlib import Path

import needs  # noqa: F401, before the packages
import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

import tensor_file

OUT = Path(__file__).resolve().parent.parent / "test" / "fixtures" / "operators"


def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    """fp32 random values, held in float64 and ready for a gradient."""
    values = (torch.randn(*shape) * scale + offset).float()
    return values.double().requires_grad_()


class Vectors:
    """The cases of one operator."""

    def __init__(self) -> None:
        self.cases: list[dict] = []
        self.tensors: dict[str, np.ndarray] = {}

    def add(self, name: str, sizes: dict, inputs: dict, outputs: dict, weights: dict | None = None) -> None:
        """Adds a case, with the gradient of sum(output * weight) with respect to every input that requires one.

        `weights` of the outputs (dout of the backward pass) are random if not given; None: the output has no gradient.
        """
        self.cases.append({"name": name, **sizes})
        weights = dict(weights or {})
        total = torch.zeros((), dtype=torch.float64)
        for output, values in outputs.items():
            self.put(f"{name}.{output}", values)
            if not values.requires_grad or weights.get(output, True) is None:
                continue
            if output not in weights:
                weights[output] = normal(*values.shape).detach()
                self.put(f"{name}.d{output}", weights[output])
            total = total + (values * weights[output]).sum()
        if total.requires_grad:
            total.backward()
        for tensor, values in inputs.items():
            self.put(f"{name}.{tensor}", values)
            if values.grad is not None:
                self.put(f"{name}.d{tensor}", values.grad)

    def put(self, name: str, values: torch.Tensor) -> None:
        array = values.detach().numpy()
        self.tensors[name] = array.astype(np.int32 if values.dtype == torch.int64 else np.float32)

    def write(self, operator: str) -> None:
        config = {"operator": operator, "torch": torch.__version__, "cases": self.cases}
        with tensor_file.Writer(OUT / f"{operator}.bin", "reference dump", config) as writer:
            for name, values in self.tensors.items():
                writer.declare(name, "i32" if values.dtype == np.int32 else "f32", values.shape)
            for name, values in self.tensors.items():
                writer.write(name, np.ascontiguousarray(values))


def embedding() -> Vectors:
    vectors = Vectors()
    weight, tokens = normal(11, 10), torch.randint(0, 11, (23,))
    vectors.add("lookup", {"N": 23, "C": 10}, {"weight": weight, "tokens": tokens}, {"out": F.embedding(tokens, weight)})
    return vectors


def matmul() -> Vectors:
    vectors = Vectors()
    for name, rows, columns, outputs, has_bias in (("one_row", 1, 37, 19, True), ("few_rows", 3, 24, 9, False),
                                                   ("many_rows", 41, 33, 21, True), ("no_bias", 16, 64, 32, False)):
        inputs = {"x": normal(rows, columns), "weight": normal(outputs, columns)}
        if has_bias:
            inputs["bias"] = normal(outputs)
        out = F.linear(inputs["x"], inputs["weight"], inputs.get("bias"))
        vectors.add(name, {"N": rows, "C": columns, "OC": outputs}, inputs, {"out": out})
    return vectors


def residual_norm() -> Vectors:
    vectors = Vectors()
    eps = 1e-5
    cases = (("rmsnorm", "rmsnorm", 5, 18, ()), ("rmsnorm_residual", "rmsnorm", 9, 40, ("residual",)),
             ("layernorm_bias", "layernorm", 5, 18, ("bias",)),
             ("layernorm_two", "layernorm", 9, 21, ("residual", "bias", "weight2", "bias2")),
             ("rmsnorm_scales", "rmsnorm", 6, 13, ("residual", "rowscale", "colscale")),
             ("layernorm_scales", "layernorm", 6, 13, ("residual", "bias", "rowscale", "colscale")))
    for name, kind, rows, columns, parts in cases:
        made = {"x": normal(rows, columns), "residual": normal(rows, columns, scale=2, offset=0.5),
                "rowscale": normal(rows).detach(), "colscale": normal(columns),
                "weight": normal(columns, scale=0.3, offset=1), "bias": normal(columns),
                "weight2": normal(columns, scale=0.3, offset=1), "bias2": normal(columns)}
        inputs = {key: made[key] for key in made if key in ("x", "weight", *parts)}
        h = inputs["x"]
        if "rowscale" in parts:
            h = h * inputs["rowscale"][:, None]
        if "colscale" in parts:
            h = h * inputs["colscale"]
        if "residual" in parts:
            h = h + inputs["residual"]

        def norm(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if kind == "rmsnorm":
                return F.rms_norm(h, (columns,), weight, eps)
            return F.layer_norm(h, (columns,), weight, bias, eps)

        outputs = {"residual_out": h * 1, "out": norm(inputs["weight"], inputs.get("bias"))}
        if "weight2" in parts:
            outputs["out2"] = norm(inputs["weight2"], inputs.get("bias2"))
        vectors.add(name, {"kind": kind, "rows": rows, "C": columns, "eps": eps}, inputs, outputs)
    return vectors


def rope() -> Vectors:
    vectors = Vectors()
    for name, head_dim, rotary_dim, apply in (("llama", 16, 16, llama_rope), ("gpt_neox_quarter", 20, 6, neox_rope)):
        batch, tokens, heads, first = 2, 7, 3, 4
        positions = torch.arange(first + tokens).double()
        inv_freq = 1.0 / 100.0 ** (torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        angles = positions[:, None] * inv_freq
        cos, sin = angles.cos().float().double(), angles.sin().float().double()
        both = [torch.cat((table, table), dim=-1)[first:].expand(batch, -1, -1) for table in (cos, sin)]
        x = normal(batch, tokens, heads, head_dim)
        out, _ = apply(x, x, *both, unsqueeze_dim=2)
        sizes = {"B": batch, "T": tokens, "NH": heads, "HS": head_dim, "rotary_dim": rotary_dim, "first": first}
        vectors.add(name, sizes, {"x": x, "cos": cos, "sin": sin}, {"out": out})
    return vectors


def add_attention(vectors: Vectors, name: str, sizes: dict, mask: torch.Tensor) -> None:
    batch, queries, keys, heads, kv_heads, head_dim = (sizes[key] for key in ("B", "TQ", "TK", "NH", "NKV", "HS"))
    q, k, v = (normal(batch, count, n, head_dim) for count, n in
               ((queries, heads), (keys, kv_heads), (keys, kv_heads)))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    scores = heads_first[0] @ heads_first[1].repeat_interleave(heads // kv_heads, 1).transpose(2, 3) / head_dim**0.5
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    vectors.add(name, sizes, {"q": q, "k": k, "v": v}, {"out": out.transpose(1, 2), "lse": lse}, {"lse": None})


def attention() -> Vectors:
    vectors = Vectors()
    for name, batch, queries, keys, heads, kv_heads, head_dim, causal in (
            ("causal", 2, 33, 33, 4, 2, 16, True), ("two_blocks", 1, 70, 70, 3, 1, 8, True),
            ("all_heads", 1, 9, 9, 2, 2, 80, True), ("chunk", 1, 12, 75, 4, 2, 8, True),
            ("decode", 2, 1, 40, 6, 2, 16, True), ("bidirectional", 1, 10, 14, 2, 1, 12, False)):
        mask = torch.ones(queries, keys, dtype=torch.bool)
        if causal:
            mask = mask.tril(diagonal=keys - queries)
        sizes = {"B": batch, "TQ": queries, "TK": keys, "NH": heads, "NKV": kv_heads, "HS": head_dim, "causal": causal}
        add_attention(vectors, name, sizes, mask)
    return vectors


def attention_masks() -> Vectors:
    """Windows and documents: a query sees keys of its own document, and of those at most the last `window`."""
    vectors = Vectors()
    for name, queries, keys, window, lengths in (("window", 7, 13, 5, [13]), ("documents", 13, 13, 4, [5, 1, 1, 6])):
        document = torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)])
        position = torch.arange(keys)
        away = position[keys - queries:, None] - position[None, :]
        mask = (away >= 0) & (away < window) & (document[keys - queries:, None] == document[None, :])
        starts = [int((document == d).nonzero()[0]) for d in document[keys - queries:]]
        sizes = {"B": 1, "TQ": queries, "TK": keys, "NH": 2, "NKV": 1, "HS": 4, "causal": True, "window": window,
                 "document_starts": starts}
        add_attention(vectors, name, sizes, mask)
    return vectors


def swiglu() -> Vectors:
    vectors = Vectors()
    gate_up = normal(7, 2 * 19, scale=2)
    gate, up = gate_up.chunk(2, dim=-1)
    vectors.add("packed", {"N": 7, "F": 19}, {"gate_up": gate_up}, {"out": F.silu(gate) * up})
    return vectors


def gelu() -> Vectors:
    vectors = Vectors()
    x = normal(301, scale=2)
    vectors.add("exact", {"count": 301}, {"x": x}, {"out": F.gelu(x)})
    return vectors


def classifier() -> Vectors:
    vectors = Vectors()
    scale = 0.125
    for name, rows, vocabulary in (("small", 9, 8), ("odd", 6, 1003)):
        logits, labels = normal(rows, vocabulary, scale=3), torch.randint(0, vocabulary, (rows,))
        labels[2] = -100
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        vectors.add(name, {"N": rows, "V": vocabulary, "loss_scale": scale}, {"logits": logits, "labels": labels},
                    {"losses": losses}, {"losses": torch.full((rows,), scale, dtype=torch.float64)})
    return vectors


def adamw() -> Vectors:
    """Ten steps of torch.optim.AdamW after clip_grad_norm_; gradients and scales have one row for each step."""
    vectors = Vectors()
    count, steps, max_norm = 57, 10, 4.0
    for name, weight_decay, decay in (("decay", 0.1, True), ("no_decay", 0.1, False)):
        options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
        start = normal(count).detach()
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([parameter], weight_decay=weight_decay if decay else 0.0, **options)
        gradients = normal(steps, count).detach()
        scales = torch.empty(steps, dtype=torch.float64)
        for step in range(steps):
            parameter.grad = gradients[step].clone()
            scales[step] = min(1.0, max_norm / torch.nn.utils.clip_grad_norm_([parameter], max_norm).item())
            optimizer.step()
        state = optimizer.state[parameter]
        sizes = {"count": count, "steps": steps, "decay": decay, "weight_decay": weight_decay, "lr": options["lr"],
                 "beta1": 0.9, "beta2": 0.95, "eps": options["eps"]}
        vectors.add(name, sizes, {"start": start, "gradients": gradients, "scales": scales},
                    {"parameters": parameter.detach(), "moment1": state["exp_avg"], "moment2": state["exp_avg_sq"]})
    return vectors


# All draw from one sequence of random numbers: one that is new stands last, and the others keep their values.
OPERATORS = (embedding, matmul, residual_norm, rope, attention, swiglu, gelu, classifier, adamw, attention_masks)


def main() -> None:
    names = [make.__name__ for make in OPERATORS]
    parser = argparse.ArgumentParser(description="Writes the vectors of the CPU operators, computed by PyTorch.")
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"of {' '.join(names)}; none: all")
    only = parser.parse_args().only or names
    if unknown := set(only) - set(names):
        parser.error(f"NAME: got {' '.join(sorted(unknown))}, expected some of {' '.join(names)}")
    torch.manual_seed(20)
    OUT.mkdir(parents=True, exist_ok=True)
    for make in OPERATORS:
        vectors = make()
        if make.__name__ in only:
            vectors.write(make.__name__)
    sizes = {path.name: path.stat().st_size for path in sorted(OUT.glob("*.bin"))}
    for name, size in sizes.items():
        print(f"{name:24} {size:8}")
    print(f"{'total':24} {sum(sizes.values()):8}")


if __name__ == "__main__":
    main()
