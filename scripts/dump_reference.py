#!/usr/bin/env python3
"""Writes what PyTorch computes for a Hugging Face model as a reference dump, for --compare and the tests.

    python3 scripts/dump_reference.py models/pythia-160m -o pythia.dump.bin --prompt "Once upon a time" --greedy 32
    python3 scripts/dump_reference.py models/tiny-llama -o llama.dump.bin --random 2,48 --backward --adamw-steps 10
    python3 scripts/dump_reference.py models/tiny-llama -o fp8.dump.bin --random 2,48 --backward --adamw-steps 10 --precision fp8

The tensors are those of doc/tensor_file.md, "Reference dumps". Eager attention, fp32 on the CPU, deterministic, unless
asked otherwise. Queries and keys after RoPE and the attention are computed a second time from their definition, and no
dump is written if the two differ. --greedy stops after an end-of-text id, which is the last one written, and never
takes an id that the tokenizer does not have. --precision fp8 rounds the operands of the linear layers as weft's training does,
and measures how far from such a dump another computation of the same may be. Needs torch and transformers (4.40 or newer). Exit codes: 2 usage, 3 bad
input, 4 torch or transformers missing, 5 disk or memory full.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import needs  # noqa: F401, before the packages
import numpy as np

import cli
import quantization
import tensor_file
from cli import ENVIRONMENT, INTERNAL, USAGE, FileError, bad_file, shown
from gptq import inverse_frequencies
from hf_config import Checkpoint, Model, Rope, model_from_json, read_checkpoint, with_own_head
from hf_tokenizer import encode
from tensor_file import Writer, escaped, shape_text

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100
ROTATE = "apply_rotary_pos_emb"  # the name of RoPE's function in transformers' module of each model
DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
TORCH_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
GROUPS = {"act": ("act.", "act16."), "grad": ("grad.",), "grad16": ("grad16.",),
          "losses": ("adamw.losses", "adamw16.losses"), "adamw": ("adamw.", "adamw16."), "greedy": ("greedy.",)}
# --precision fp8: a value within rounding noise of the middle between two codes may get either, and one code that is another one
# moves all that follows from it. How far that leads is measured: NOISE_RUNS times with normal noise on all that is rounded, of
# NOISE relative to each row, several times what another order of sums in fp32 makes of it.
NOISE, NOISE_RUNS = 2.0**-20, 3
# AdamW's first steps divide a gradient by its own size, so that rounding noise in a tiny gradient moves a parameter by the
# whole learning rate. How far that leads is measured: ULP_RUNS times with every weight moved by one unit in its last place.
ULP_RUNS = 3
FP8_MULTIPLE = 16  # of all widths, and of the ids of a batch
# How much a value may differ from its recomputation, relative to the largest value of the tensor.
RECOMPUTE_TOLERANCE = {"f32": 2e-5, "bf16": 4 * 2.0**-7, "f16": 4 * 2.0**-10}


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of the optimizer steps. Only matrices are decayed; grad_clip limits the global norm."""

    steps: int = 0
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0


@dataclass(frozen=True)
class Fp8:
    """Linear layers with operands in fp8."""

    noise: float = 0  # see fp8_emulation.Rounding
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """What to compute. ids and labels are [B, T]; if greedy_prompt is None, the first row of ids is continued."""

    ids: np.ndarray
    labels: np.ndarray
    dtype: str = "f32"
    half_dtype: str | None = None
    backward: bool = False
    adamw: AdamW | None = None
    greedy: int = 0
    greedy_prompt: np.ndarray | None = None
    device: str = "cpu"
    weights: Path | None = None  # a model file whose weights replace those of the directory
    fp8: Fp8 | None = None
    moved: int | None = None  # the seed by which each weight is moved up or down by one unit in its last place


# ---- the model under the hooks ---------------------------------------------------------------------------------------


def libraries() -> tuple[Any, Any]:
    """torch and transformers; FileError ENVIRONMENT where they are missing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        raise FileError(ENVIRONMENT, f"{shown(error.name or 'torch')}: not installed. Reference dumps need torch and "
                        "transformers: make torch") from None


def replaced_weights(path: Path, description: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter of a model file in float32, quantised matrices dequantised. FileError BAD_FILE for the file of another
    model."""
    file = tensor_file.read(path, "model")
    if model_from_json(file.config.get("model"), path) != description:  # older files lack keys, which then have their defaults
        bad_file(path, "model", "differs from the configuration of DIR", "--weights takes a conversion of that directory")
    for name, shape in description.tensors.items():
        file.verify_tensor(name)
        values = quantization.dequantized(file, name) if quantization.is_quantized(file, name) else file.f32(name)
        if values.shape != shape:
            bad_file(path, name, f"got shape {shape_text(values.shape)}, expected {shape_text(shape)}")
        yield name, values


def of_weights(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint as its conversion has it: with a head of its own if the file has one beside a tied embedding, because it
    is quantised. Unchanged otherwise, and replaced_weights() refuses what differs."""
    own = with_own_head(checkpoint)
    return own if tensor_file.read(path, "model").config.get("model") == own.model.to_json() else checkpoint


def load_model(directory: Path, description: Model, request: Request, dtype: str) -> torch.nn.Module:
    """The model in `dtype`. Loaded in it rather than cast by .to(dtype), which would also round the RoPE frequencies."""
    torch, transformers = libraries()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    key = "torch_dtype" if int(transformers.__version__.split(".")[0]) < 5 else "dtype"
    options = {"attn_implementation": "eager", "local_files_only": True, key: getattr(torch, TORCH_DTYPES[dtype])}
    if request.weights is not None:
        options["tie_word_embeddings"] = description.tied_embeddings
    model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), **options)
    learn_padding(model, description)
    if request.weights is not None:
        parameters = named_parameters(model, description)
        with torch.no_grad():
            for name, values in replaced_weights(request.weights, description):
                parameters[name].copy_(torch.from_numpy(values))
    if request.moved is not None:
        move_by_an_ulp(model, request.moved)
    if request.fp8:
        import fp8_emulation  # needs torch

        fp8_emulation.check_rounding()
        model.fp8_rounding = fp8_emulation.Rounding(request.fp8.noise, request.fp8.seed)
        fp8_emulation.round_llama(model, model.fp8_rounding)
    return model.to(request.device).eval()


def move_by_an_ulp(model: torch.nn.Module, seed: int) -> None:
    """Every parameter to one of its two neighbours, at random."""
    torch, _ = libraries()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).bool()
            towards = torch.where(up, math.inf, -math.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, towards))


@dataclass(frozen=True)
class Parts:
    """The modules whose inputs or outputs are recorded, by their role."""

    embedding: torch.nn.Module
    layers: list[torch.nn.Module]
    final_norm: torch.nn.Module
    attention: Callable[[torch.nn.Module], torch.nn.Module]
    output_projection: Callable[[torch.nn.Module], torch.nn.Module]
    down_projection: Callable[[torch.nn.Module], torch.nn.Module]


def parts_of(model: torch.nn.Module, family: str) -> Parts:
    if family != "gpt_neox":
        base = getattr(model.model, "language_model", model.model)
        return Parts(base.embed_tokens, list(base.layers), base.norm, lambda layer: layer.self_attn,
                     lambda layer: layer.self_attn.o_proj, lambda layer: layer.mlp.down_proj)
    base = model.gpt_neox
    return Parts(base.embed_in, list(base.layers), base.final_layer_norm, lambda layer: layer.attention,
                 lambda layer: layer.attention.dense, lambda layer: layer.mlp.dense_4h_to_h)


def learn_padding(model: torch.nn.Module, description: Model) -> None:
    """So that the embedding of a token learns whatever the token is for: PyTorch leaves out that of config.json's pad_token_id, which
    is 0 in a Gemma 3 whose config.json does not say it."""
    parts_of(model, description.family).embedding.padding_idx = None


class Recorder:
    """Records one forward pass by hooks. `values`: the activations in fp32, by their names in a dump without 'act.'."""

    def __init__(self, model: torch.nn.Module, description: Model):
        self.model, self.description = model, description
        self.parts = parts_of(model, description.family)
        self.values: dict[str, torch.Tensor] = {}
        self.projected: dict[str, torch.Tensor] = {}  # q and k before RoPE
        self.layer = -1
        self._handles: list[Any] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        module = sys.modules[type(self.model).__module__]
        rotate = getattr(module, ROTATE)

        def rotate_and_keep(*arguments: Any, **options: Any) -> Any:
            q, k = rotate(*arguments, **options)
            self._keep_rotated("q", q)
            self._keep_rotated("k", k)
            return q, k

        setattr(module, ROTATE, rotate_and_keep)
        self._attach()
        try:
            yield
        finally:
            setattr(module, ROTATE, rotate)
            for handle in self._handles:
                handle.remove()

    def _attach(self) -> None:
        self._output(self.parts.embedding, "embedding")
        for number, layer in enumerate(self.parts.layers):
            prefix = f"layers.{number}."
            self._handles.append(layer.register_forward_pre_hook(lambda *_, n=number: setattr(self, "layer", n)))
            self._output(layer.input_layernorm, prefix + "input_norm")
            before_mlp = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
            self._output(before_mlp, prefix + "post_attention_norm")
            self._projections(self.parts.attention(layer), prefix)
            self._input(self.parts.output_projection(layer), prefix + "attention")
            self._input(self.parts.down_projection(layer), prefix + "mlp_product")
            self._output(layer, prefix + "residual")
        self._output(self.parts.final_norm, "final_norm")

    def _keep(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value.detach().float().clone()

    def _output(self, module: torch.nn.Module, name: str) -> None:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._keep(name, output[0] if isinstance(output, tuple) else output)

        self._handles.append(module.register_forward_hook(hook))

    def _input(self, module: torch.nn.Module, name: str) -> None:
        self._handles.append(module.register_forward_pre_hook(lambda _module, inputs: self._keep(name, inputs[0])))

    def _projections(self, attention: torch.nn.Module, prefix: str) -> None:
        """q, k and v as projected and, where their heads have norms, normalised: [B, T, heads, HS]."""
        head_dim = self.description.head_dim

        def split(name: str) -> Callable[..., None]:
            def hook(module: Any, _inputs: Any, output: torch.Tensor) -> None:
                if self.description.family == "gemma3_text" and module is getattr(attention, f"{name}_norm", None):
                    output = output.transpose(1, 2)  # it has [B, heads, T, HS]
                self._keep_projected(prefix, name, output.reshape(*output.shape[:2], -1, head_dim))

            return hook

        def split_fused(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            fused = output.unflatten(-1, (-1, 3, head_dim))  # rows are [head][q, k, v][head_dim]
            for index, name in enumerate("qkv"):
                self._keep_projected(prefix, name, fused[..., index, :])

        if self.description.family != "gpt_neox":
            for name in "qkv":
                last = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
                self._handles.append(last.register_forward_hook(split(name)))
        else:
            self._handles.append(attention.query_key_value.register_forward_hook(split_fused))

    def _keep_projected(self, prefix: str, name: str, value: torch.Tensor) -> None:
        rotates = name != "v" and self.layer not in self.description.nope_layers
        target = self.projected if rotates else self.values
        target[prefix + name] = value.detach().float().clone()

    def _keep_rotated(self, name: str, value: torch.Tensor) -> None:
        """Older versions of transformers pass only the rotary dimensions: the rest of the head is taken as projected."""
        name = f"layers.{self.layer}.{name}"
        rotated = value.detach().float().transpose(1, 2)  # [B, T, heads, dims]
        rest = self.projected[name][..., rotated.shape[-1]:]
        self.values[name] = libraries()[0].cat([rotated, rest], dim=-1).contiguous()


# ---- recomputed from the definition ------------------------------------------------------------------------------------------


def rotate(values: torch.Tensor, rope: Rope) -> torch.Tensor:
    """RoPE in the half-split pairing on [B, T, heads, HS]: dimension i turns with i + rotary_dim/2."""
    torch, _ = libraries()
    half = rope.rotary_dim // 2
    frequencies = torch.from_numpy(inverse_frequencies(rope)).float()
    angles = torch.arange(values.shape[1], dtype=torch.float32)[:, None] * frequencies
    cos, sin = ((rope.attention_factor * turned)[:, None].to(values.device) for turned in (angles.cos(), angles.sin()))
    a, b, rest = values[..., :half], values[..., half:2 * half], values[..., 2 * half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """Causal attention; q [B, T, NH, HS], k and v [B, T, NKV, HS]; result [B, T, NH * HS]. A position sees `window` keys, with 0 all
    before it. `scale`: of scores."""
    torch, _ = libraries()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    hidden = every.triu(1) | every.tril(-window) if window else every.triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)


def check_recomputed(recorder: Recorder, dtype: str) -> None:
    """Refuses a recording whose q, k or attention differ from their definition."""
    values, description = recorder.values, recorder.description
    for number in range(description.num_layers):
        prefix = f"layers.{number}."
        for name in "qk" if number not in description.nope_layers else "":
            check_close(prefix + name, values[prefix + name], rotate(recorder.projected[prefix + name], description.rope_of(number)), dtype)
        attention = attend(values[prefix + "q"], values[prefix + "k"], values[prefix + "v"], description.window(number),
                           description.score_scale())
        check_close(prefix + "attention", values[prefix + "attention"], attention, dtype)


def check_close(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    error = float((got - expected).abs().max())
    scale = float(expected.abs().max())
    if got.shape != expected.shape or not error <= RECOMPUTE_TOLERANCE[dtype] * scale:
        raise FileError(INTERNAL, f"{name}: transformers gives another result than the definition: {error:g} apart at "
                        f"a scale of {scale:g}. This version of transformers may compute something else")


# ---- computing -------------------------------------------------------------------------------------------------------


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the labels that are not ignored, in fp32. `labels` are already shifted by one."""
    torch, _ = libraries()
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)


def activations(directory: Path, description: Model, request: Request, dtype: str) -> dict[str, torch.Tensor]:
    """Every activation of one forward pass, and "logits"."""
    torch, _ = libraries()
    model = load_model(directory, description, request, dtype)
    recorder = Recorder(model, description)
    with torch.no_grad(), recorder.listening():
        logits = model(torch.from_numpy(request.ids).long().to(request.device), use_cache=False).logits
    check_recomputed(recorder, dtype)
    recorder.values["logits"] = logits.detach().float().clone()
    return recorder.values


def named_parameters(model: torch.nn.Module, description: Model) -> dict[str, torch.nn.Parameter]:
    """Parameters by the names of the checkpoint, in storage order; a tied head is not named."""
    parameters = dict(model.named_parameters())
    if description.head not in parameters and not description.tied_embeddings:
        parameters[description.head] = parameters.pop("lm_head.weight")  # its name in newer transformers
    return {name: parameters[name] for name in description.tensors}


def loss_of(model: torch.nn.Module, request: Request) -> torch.Tensor:
    torch, _ = libraries()
    ids = torch.from_numpy(request.ids).long().to(request.device)
    labels = torch.from_numpy(request.labels).long().to(request.device)
    return cross_entropy(model(ids, use_cache=False).logits, labels)


def gradients(directory: Path, description: Model, request: Request, dtype: str) -> dict[str, torch.Tensor]:
    model = load_model(directory, description, request, dtype)
    loss_of(model, request).backward()
    return {name: parameter.grad.float() for name, parameter in named_parameters(model, description).items()}


def optimizer_steps(directory: Path, description: Model, request: Request,
                    dtype: str = "f32") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps on one batch. Returns the loss before each step, and the parameters after the last one."""
    torch, _ = libraries()
    settings = request.adamw or AdamW()
    model = load_model(directory, description, request, dtype)
    parameters = named_parameters(model, description)
    matrices = [value for value in parameters.values() if value.ndim >= 2]
    vectors = [value for value in parameters.values() if value.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.eps, foreach=False)
    losses = []
    for _ in range(settings.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, request)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.grad_clip, foreach=False)
        optimizer.step()
        if request.fp8:
            model.fp8_rounding.end_step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in parameters.items()}


def greedy(directory: Path, description: Model, request: Request) -> tuple[np.ndarray, float]:
    """The continuation at temperature 0, and the smallest distance of a chosen id's logit from the second largest one.

    The whole text is computed again for every id: slow, but independent of the K/V caches that the result is to check.
    """
    torch, _ = libraries()
    model = load_model(directory, description, request, request.dtype)
    prompt = request.ids[0] if request.greedy_prompt is None else request.greedy_prompt
    ids, lead = [int(value) for value in prompt], math.inf
    for _ in range(request.greedy):
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=request.device), use_cache=False).logits[0, -1].float()
        best = logits[:description.tokenizer_vocab].topk(min(2, description.tokenizer_vocab))
        lead = min(lead, float(best.values[0] - best.values[-1]))
        ids.append(int(best.indices[0]))
        if ids[-1] in description.eos_ids:
            break
    return np.array(ids[len(prompt):], dtype=np.int32), lead


# ---- the dump --------------------------------------------------------------------------------------------------------


def compute(directory: Path, description: Model, request: Request) -> dict[str, np.ndarray]:
    """Every tensor of the dump by name, in the order of doc/tensor_file.md."""
    torch, _ = libraries()
    tensors: dict[str, Any] = {"input_ids": request.ids, "labels": request.labels}
    values = activations(directory, description, request, request.dtype)
    tensors |= {f"act.{name}": values[name] for name in activation_names(description)}
    if (request.labels != IGNORED_LABEL).any():
        tensors["loss"] = cross_entropy(values["logits"], torch.from_numpy(request.labels).long().to(request.device))
    if request.backward:
        tensors |= {f"grad.{name}": value for name, value in gradients(directory, description, request, request.dtype).items()}
    if request.adamw:
        tensors |= stepped(directory, description, request)
    if request.greedy:
        prompt = request.ids[0] if request.greedy_prompt is None else request.greedy_prompt
        tensors |= {"greedy.prompt_ids": prompt, "greedy.ids": greedy(directory, description, request)[0]}
    if request.half_dtype:
        values = activations(directory, description, request, request.half_dtype)
        tensors |= {f"act16.{name}": values[name] for name in activation_names(description)}
        tensors |= half_training(directory, description, request, request.half_dtype, values["logits"])
    return {name: value if isinstance(value, np.ndarray) else value.detach().cpu().float().numpy()
            for name, value in tensors.items()}


def stepped(directory: Path, description: Model, request: Request) -> dict[str, Any]:
    """The tensors of the optimizer steps."""
    losses, parameters = optimizer_steps(directory, description, request, request.dtype)
    return {"adamw.losses": np.array(losses, dtype=np.float32)} | {f"adamw.param.{name}": value for name, value in parameters.items()}


def ulp_distances(directory: Path, description: Model, request: Request, want: dict[str, np.ndarray]) -> dict[str, float]:
    """How far steps from weights one unit in the last place away lead from `want`, of adamw.*: the farthest of ULP_RUNS. In the
    norms of --compare: parameters in the 2-norm, losses by the largest difference, relative to the largest loss or 1."""
    runs = []
    for seed in range(ULP_RUNS):
        moved = stepped(directory, description, replace(request, moved=seed))
        got = {name: moved[name] if name == "adamw.losses" else moved[name].cpu().float().numpy() for name in want}
        runs.append(relative_distances(got, want))
        if (losses := want.get("adamw.losses")) is not None:
            difference = np.abs(got["adamw.losses"].astype(np.float64) - losses).max()
            runs[-1]["adamw.losses"] = float(difference / max(np.abs(losses).max(), 1))
    return {name: max(run[name] for run in runs) for name in want}


def relative_distances(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """In the 2-norm, of each tensor that a tolerance is derived for."""
    result = {}
    for name in want:
        if name.startswith(("act.", "grad.", "adamw.")):
            a, b = got[name].astype(np.float64), want[name].astype(np.float64)
            size = float(np.linalg.norm(b))
            result[name] = float(np.linalg.norm(a - b)) / size if size else 0.0
    return result


def fp8_noise(directory: Path, description: Model, request: Request,
              tensors: dict[str, np.ndarray]) -> Iterator[dict[str, float]]:
    """What noise on all that is rounded makes of each tensor, NOISE_RUNS times."""
    for seed in range(NOISE_RUNS):
        yield relative_distances(compute(directory, description, replace(request, fp8=Fp8(NOISE, seed))), tensors)


def fp8_distances(directory: Path, description: Model, request: Request,
                  tensors: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """What a tolerance for each of the `tensors` follows from: doc/tensor_file.md, "Reference dumps"."""
    def run(fp8: Fp8 | None, dtype: str) -> dict[str, np.ndarray]:
        return compute(directory, description, replace(request, fp8=fp8, dtype=dtype))

    exact, noisy = run(None, "f32"), list(fp8_noise(directory, description, request, tensors))
    distances = {"noise": {name: max(each[name] for each in noisy) for name in noisy[0]},
                 "rounding": relative_distances(tensors, exact),
                 "bf16": relative_distances(run(request.fp8, "bf16"), tensors),
                 "plain_bf16": relative_distances(run(None, "bf16"), exact)}
    for key in ("bf16", "plain_bf16"):  # torch's optimizer has no fp32 master of a parameter in bf16
        distances[key] = {name: value for name, value in distances[key].items() if not name.startswith("adamw.param.")}
    return distances


def half_training(directory: Path, description: Model, request: Request, half_dtype: str,
                  logits: torch.Tensor) -> dict[str, Any]:
    """Loss, gradients and losses of the optimizer steps in 16 bits, each if the request asks for it in fp32."""
    torch, _ = libraries()
    tensors: dict[str, Any] = {}
    if (request.labels != IGNORED_LABEL).any():
        tensors["loss16"] = cross_entropy(logits, torch.from_numpy(request.labels).long().to(request.device))
    if request.backward:
        values = gradients(directory, description, request, half_dtype)
        tensors |= {f"grad16.{name}": value for name, value in values.items()}
    if request.adamw:
        losses, _ = optimizer_steps(directory, description, request, half_dtype)
        tensors["adamw16.losses"] = np.array(losses, dtype=np.float32)
    return tensors


def activation_names(description: Model) -> list[str]:
    """The activations of a dump, in order, without 'act.'."""
    of_layer = ("input_norm", "q", "k", "v", "attention", "post_attention_norm", "mlp_product", "residual")
    layers = [f"layers.{number}.{name}" for number in range(description.num_layers) for name in of_layer]
    return ["embedding", *layers, "final_norm", "logits"]


def follows_noise(name: str, model: Model) -> bool:
    """Whether a parameter after AdamW's steps is what rounding made of it. Where a head does not rotate, the bias of k adds the same to
    all scores of a query: its gradient is rounding noise, which the steps follow."""
    return model.rope.rotary_dim < model.head_dim and name.startswith("adamw.param.") and name.endswith("query_key_value.bias")


def model_sha256(directory: Path) -> str:
    """The SHA-256 of the bytes of all weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()


def write_dump(path: Path, directory: Path, checkpoint: Checkpoint, request: Request,
               keep: Callable[[str], bool]) -> None:
    """Computes and writes the dump; `keep` says which tensors, beside ids, labels and loss, are written."""
    torch, transformers = libraries()
    if request.weights is not None:
        checkpoint = of_weights(checkpoint, request.weights)
    every = compute(directory, checkpoint.model, request)
    tensors = {name: value for name, value in every.items() if keep(name) and not follows_noise(name, checkpoint.model)}
    dump = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": request.dtype,
            "model_sha256": model_sha256(directory)}
    if request.adamw:
        dump["adamw"] = vars(request.adamw)
        stepped_tensors = {name: value for name, value in tensors.items() if name.startswith("adamw.")}
        if stepped_tensors and not request.fp8:
            dump["ulp"] = ulp_distances(directory, checkpoint.model, request, stepped_tensors)
    if request.half_dtype:
        dump["act16_dtype"] = request.half_dtype
    if request.fp8:
        measured = fp8_distances(directory, checkpoint.model, request, every)
        dump["fp8"] = {key: {name: value for name, value in values.items() if keep(name)} for key, values in measured.items()}
    with Writer(path, "reference dump", {"model": checkpoint.model.to_json(), "dump": dump}) as writer:
        for name, value in tensors.items():
            writer.declare(name, "i32" if value.dtype == np.int32 else "f32", value.shape)
        for name, value in tensors.items():
            writer.write(name, value)


def selection(groups: list[str] | None, layers: list[int] | None) -> Callable[[str], bool]:
    """Which tensors are written: those of `groups` (None: all), and of the layers' activations those of `layers`."""
    def keep(name: str) -> bool:
        optional = any(name.startswith(prefixes) for prefixes in GROUPS.values())
        if optional and groups is not None and not any(name.startswith(GROUPS[group]) for group in groups):
            return False
        parts = name.split(".")
        of_layer = parts[0] in ("act", "act16") and parts[1] == "layers"
        return not of_layer or layers is None or int(parts[2]) in layers

    return keep


# ---- command line ----------------------------------------------------------------------------------------------------


def shifted_labels(ids: np.ndarray) -> np.ndarray:
    """labels[b, t] = ids[b, t + 1]; the last position of each row is ignored."""
    labels = np.full_like(ids, IGNORED_LABEL)
    labels[:, :-1] = ids[:, 1:]
    return labels


def random_batch(model: Model, batch: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels [batch, length] of a seeded random text."""
    text = np.random.default_rng(seed).integers(0, model.tokenizer_vocab, (batch, length + 1), dtype=np.int32)
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def encode_prompt(checkpoint: Checkpoint, prompt: str, directory: Path) -> np.ndarray:
    """The prompt's ids [1, T], as encode() gives them."""
    return np.array([encode(checkpoint.tokenizer, prompt, directory, "--prompt", "Use --ids")], dtype=np.int32)


def integers(low: int, count: int | None = None) -> Callable[[str], list[int]]:
    """An argparse type: integers >= low, separated by commas; exactly `count` of them unless that is None."""
    def convert(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        if not values or min(values) < low or max(values) >= 2**31 or (count or len(values)) != len(values):
            raise argparse.ArgumentTypeError(f"got {shown(text)}, expected {count or 'some'} integers from {low} on, "
                                             "separated by commas")
        return values

    return convert


def group_list(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"got {shown(name)}, expected names of {', '.join(GROUPS)}")
    return names


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="dump_reference.py")
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the dump to write")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--ids", type=integers(0), metavar="1,2,3", help="token ids of one text")
    text.add_argument("--prompt", metavar="TEXT", help="a text, encoded with the model's tokenizer")
    text.add_argument("--random", type=integers(1, 2), metavar="B,T", default=[2, 16], help="random ids (default 2,16)")
    parser.add_argument("--seed", type=cli.number_in(0, 2**63 - 1, int), default=0, help="of --random (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="what PyTorch computes in (default fp32)")
    parser.add_argument("--precision", choices=("fp32", "fp8"), default="fp32", help="fp8: of a Llama, the operands of the "
                        "blocks' linear layers rounded as train_llama --precision fp8 rounds them (default fp32)")
    parser.add_argument("--half-run", choices=("bf16", "fp16"), nargs="?", const="bf16",
                        help="also write the activations of a 16-bit run (act16.*; default bf16)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backward", action="store_true", help="write the gradient of every parameter")
    parser.add_argument("--adamw-steps", type=cli.number_in(0, 10_000, int), default=0, metavar="K",
                        help="take K optimizer steps on the batch")
    parser.add_argument("--lr", type=cli.number_in(0, 10), default=AdamW.learning_rate)
    parser.add_argument("--beta1", type=cli.number_in(0, 0.999999), default=AdamW.beta1)
    parser.add_argument("--beta2", type=cli.number_in(0, 0.999999), default=AdamW.beta2)
    parser.add_argument("--eps", type=cli.number_in(1e-30, 1), default=AdamW.eps)
    parser.add_argument("--weight-decay", type=cli.number_in(0, 10), default=AdamW.weight_decay)
    parser.add_argument("--grad-clip", type=cli.number_in(1e-9, 1e9), default=AdamW.grad_clip)
    parser.add_argument("--weights", type=Path, metavar="FILE", help="compute with the weights of this model file, a "
                        "conversion of DIR: those that a quantised one means")
    parser.add_argument("--greedy", type=cli.number_in(0, 1 << 20, int), default=0, metavar="N",
                        help="continue the first text by up to N ids at temperature 0")
    parser.add_argument("--tensors", type=group_list, metavar="LIST",
                        help=f"write only these groups, of {','.join(GROUPS)} (default: all that is computed)")
    parser.add_argument("--act-layers", type=integers(0), metavar="LIST", help="write activations of these layers only")
    return parser.parse_args()


def check_fp8(options: argparse.Namespace, model: Model, rows: int) -> None:
    """FileError USAGE for what is not in fp8, or has other sizes."""
    if not model.trainable or model.family in ("gpt_neox", "gemma3_text"):
        raise FileError(USAGE, f"--precision: got fp8 for a model of the family {model.family}, expected a Llama")
    for option, given in (("--dtype", options.dtype != "fp32"), ("--half-run", options.half_run), ("--greedy", options.greedy),
                          ("--weights", options.weights)):
        if given:
            raise FileError(USAGE, f"{option}: not with --precision fp8, which trains and has a 16-bit run of its own")
    kv = model.num_kv_heads * model.head_dim
    q = model.num_heads * model.head_dim
    for name, value in (("hidden_size", model.hidden_size), ("num_heads x head_dim", q),
                        ("(num_heads + 2 num_kv_heads) x head_dim", q + 2 * kv), ("ffn_size", model.ffn_size),
                        ("the number of ids", rows)):
        if value % FP8_MULTIPLE:
            raise FileError(USAGE, f"{name}: got {value}, --precision fp8 needs a multiple of {FP8_MULTIPLE}")


def request_of(options: argparse.Namespace, checkpoint: Checkpoint) -> Request:
    model = checkpoint.model
    if options.prompt is not None or options.ids:
        ids = (encode_prompt(checkpoint, options.prompt, options.directory) if options.prompt is not None else
               np.array([options.ids], dtype=np.int32))
        labels = shifted_labels(ids)
    else:
        batch, length = options.random
        ids, labels = random_batch(model, batch, length, options.seed)
    if ids.size == 0:
        raise FileError(USAGE, "--prompt: got a text without tokens, expected at least one")
    if ids.max() >= model.vocab_size:
        raise FileError(USAGE, f"--ids: got {ids.max()}, expected ids below vocab_size = {model.vocab_size}")
    if ids.shape[1] + options.greedy > model.max_positions:
        raise FileError(USAGE, f"--greedy: {ids.shape[1]} + {options.greedy} ids are more than the model's "
                        f"{model.max_positions} positions")
    if options.dtype != "fp32" and (options.adamw_steps or options.backward):
        raise FileError(USAGE, f"--dtype: got {options.dtype}, expected fp32 with --backward and --adamw-steps")
    if (options.adamw_steps or options.backward) and not (labels != IGNORED_LABEL).any():
        raise FileError(USAGE, "--backward: the text has one id and so no label, expected at least two ids")
    if options.precision == "fp8":
        check_fp8(options, model, ids.size)
    adamw = AdamW(options.adamw_steps, options.lr, options.beta1, options.beta2, options.eps, options.weight_decay,
                  options.grad_clip) if options.adamw_steps else None
    return Request(ids, labels, DTYPES[options.dtype], DTYPES.get(options.half_run), options.backward, adamw,
                   options.greedy, device=options.device, weights=options.weights,
                   fp8=Fp8() if options.precision == "fp8" else None)


def main() -> int:
    options = arguments()
    checkpoint = read_checkpoint(options.directory)
    request = request_of(options, checkpoint)
    write_dump(options.output, options.directory, checkpoint, request, selection(options.tensors, options.act_layers))
    print(f"dump        {escaped(str(options.output))}, {options.output.stat().st_size:,} bytes")
    program = "train_llama" if checkpoint.model.trainable and options.weights is None else "infer_pythia"
    precision = " --precision fp8" if request.fp8 else ""
    print(f"next        ./{program} --model FILE{precision} --compare {cli.pasteable(options.output)}")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
