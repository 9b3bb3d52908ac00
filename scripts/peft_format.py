"""LoRA adapters in PEFT's form: a directory with adapter_config.json and adapter_model.safetensors, and weft's adapter files.

Both call a matrix by its module and lora_A or lora_B; PEFT puts "base_model.model." in front. An adapter file has the configuration
of the model it belongs to and that model's header hash (llmc/model/lora.h, doc/tensor_file.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cli
import tensor_file
from cli import bad_file, json_type, shown
from safetensors_reader import SafetensorsFile
from tensor_file import TensorFile, Writer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 8 << 20
LLAMA_TARGETS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
                 "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
NEOX_TARGETS = {"qkv": "attention.query_key_value", "o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
FLOAT_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Members of adapter_config.json that change what an adapter computes, and the values with which it is plain LoRA.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,), "modules_to_save": (None, []), "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}), "lora_bias": (False,), "trainable_token_indices": (None, {}), "layer_replication": (None,),
    "use_qalora": (False,), "alora_invocation_tokens": (None, []), "target_parameters": (None, [])}


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).exists()


def targets_of(family: str) -> dict[str, str]:
    """The module of a block that each target of an adapter is, in the order of llmc/model/lora.cpp."""
    return NEOX_TARGETS if family == "gpt_neox" else LLAMA_TARGETS


def modules(family: str, num_layers: int, targets: list[str]) -> list[str]:
    """The modules that an adapter has a part for, in the order of its file."""
    layers = "gpt_neox.layers" if family == "gpt_neox" else "model.layers"
    of_family = targets_of(family)
    return [f"{layers}.{layer}.{of_family[target]}" for layer in range(num_layers) for target in targets]


def target_modules(family: str, targets: list[str]) -> list[str]:
    """These targets as PEFT names them."""
    return sorted(targets_of(family)[target].split(".")[1] for target in targets)


def names_of(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


# ---- from PEFT -------------------------------------------------------------------------------------------------------


def read_config(directory: Path, warn: Callable[[str], None]) -> tuple[int, float]:
    """The rank and alpha of a PEFT directory. FileError BAD_FILE for what is not plain LoRA."""
    path = directory / CONFIG
    config = cli.read_json_object(path, MAX_CONFIG_BYTES, warn)
    if config.get("peft_type") != "LORA":
        bad_file(path, "peft_type", f"got {shown(config.get('peft_type'))}, expected 'LORA'")
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            bad_file(path, key, f"got {shown(config[key])}, expected {shown(plain[0])}: this is more than plain LoRA",
                     "Merge it into its base model with PEFT (merge_and_unload()), and convert that")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= 65536:
        bad_file(path, "r", f"got {shown(rank)}, expected a whole number from 1 to 65536")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        bad_file(path, "lora_alpha", f"got {shown(alpha)}, expected a number")
    rooted = config.get("use_rslora", False)
    if not isinstance(rooted, bool):
        bad_file(path, "use_rslora", f"got {json_type(rooted)}, expected true or false")
    return rank, float(alpha) * (math.sqrt(rank) if rooted else 1)  # rank-stabilised LoRA scales by alpha / sqrt(r)


def convert(directory: Path, model: TensorFile, output: Path, chat: dict[str, Any], warn: Callable[[str], None]) -> str:
    """Writes the adapter file of a PEFT directory for a model. `chat`: what its configuration says of chats. Returns what it has, in words."""
    rank, alpha = read_config(directory, warn)
    base = tensor_file.escaped(str(model.path))
    weights = SafetensorsFile(directory / WEIGHTS)
    found = {name.removeprefix(PREFIX): entry for name, entry in weights.tensors.items()}
    family, num_layers = model.config["model"]["family"], model.config["model"]["num_layers"]
    targets = [target for target, module in targets_of(family).items() if any(f".{module}.lora_" in name for name in found)]
    if not targets:
        bad_file(weights.path, "", f"got no tensor of {', '.join(targets_of(family).values())}, the modules of a {family}",
                 f"Is {base} its base model?")
    expected = {name: shape for module in modules(family, num_layers, targets)
                for name, shape in zip(names_of(module), shapes(model, module, rank))}
    for name in found:
        if name not in expected:
            bad_file(weights.path, shown(name), f"is no part of an adapter for {base}",
                     "Is this its base model? Embeddings and heads cannot be adapted")
    config = {"model": model.config["model"], "lora": {"rank": rank, "alpha": alpha, "targets": targets},
              "base": f"{model.header_hash:016x}", "made_by": "scripts/convert_hf.py"} | chat
    with Writer(output, "LoRA adapter", config) as writer:
        for name, shape in expected.items():
            if name not in found:
                bad_file(weights.path, name, f"missing, expected a tensor {tensor_file.shape_text(shape)}",
                         "An adapter has parts for all layers of a model")
            entry = found[name]
            if entry.dtype not in FLOAT_DTYPES:
                bad_file(weights.path, name, f"got dtype {entry.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
            if entry.shape != shape:
                bad_file(weights.path, name, f"got shape {tensor_file.shape_text(entry.shape)}, expected "
                         f"{tensor_file.shape_text(shape)} beside {base}", "Is this its base model?")
            writer.declare(name, FLOAT_DTYPES[entry.dtype], shape)
        for name in expected:
            dtype = FLOAT_DTYPES[found[name].dtype]
            writer.write(name, weights.bytes(found[name]).view(tensor_file.NUMPY_DTYPES[dtype]).reshape(found[name].shape))
    return f"rank {rank}, alpha {alpha:g}, targets {','.join(targets)}"


def shapes(model: TensorFile, module: str, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and B beside the matrix of a module."""
    rows, columns = model.at(f"{module}.weight").shape
    return (rank, columns), (rows, rank)


# ---- to PEFT, and into a model ---------------------------------------------------------------------------------------


class Adapter:
    """An adapter file."""

    def __init__(self, path: Path):
        self.file = tensor_file.read(path, expected="LoRA adapter")
        self.path = path
        lora = self.file.config.get("lora")
        self.family = self.file.config["model"]["family"]
        if (not isinstance(lora, dict) or not isinstance(lora.get("rank"), int) or not isinstance(lora.get("alpha"), (int, float))
                or not isinstance(lora.get("targets"), list) or not all(target in targets_of(self.family) for target in lora["targets"])):
            bad_file(path, "lora", f"got {shown(lora)}, expected rank, alpha and targets of {', '.join(targets_of(self.family))}")
        self.rank, self.alpha, self.targets = lora["rank"], float(lora["alpha"]), lora["targets"]
        self.modules = modules(self.family, self.file.config["model"]["num_layers"], self.targets)

    def peft_config(self, base: str | None) -> dict[str, Any]:
        return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": self.rank,
                "lora_alpha": self.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
                "init_lora_weights": True, "target_modules": target_modules(self.family, self.targets),
                "use_rslora": False, "use_dora": False}

    def tensors(self) -> Iterator[tuple[str, str]]:
        """The name in PEFT's file of each tensor, and its name."""
        for module in self.modules:
            for name in names_of(module):
                yield PREFIX + name, name

    def check_base(self, model: TensorFile) -> None:
        """FileError BAD_FILE unless the model has the matrices that the adapter has parts for."""
        for module in self.modules:
            if f"{module}.weight" not in model.tensors:
                bad_file(self.path, module, f"is not in {tensor_file.escaped(model.path)}", "Take the model that the adapter was made for")
            for name, shape in zip(names_of(module), shapes(model, module, self.rank)):
                if self.file.at(name).shape != shape:
                    bad_file(self.path, name, f"got shape {tensor_file.shape_text(self.file.at(name).shape)}, expected "
                             f"{tensor_file.shape_text(shape)} beside {tensor_file.escaped(model.path)}",
                             "Take the model that the adapter was made for")

    def merged(self, model: TensorFile, name: str) -> np.ndarray | None:
        """The values in float32 of a tensor of the model with the adapter in it; None where it has no part for it."""
        module = name.removesuffix(".weight")
        if module not in self.modules:
            return None
        down, up = names_of(module)
        for part in (down, up):
            self.file.verify_tensor(part)
        scale = np.float32(self.alpha / self.rank)
        return model.f32(name) + (scale * self.file.f32(up)) @ self.file.f32(down)
