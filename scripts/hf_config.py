"""Models as infer_pythia --describe shows them. The program alone interprets a config.json; here the files of a directory are
read, and the program's warnings and its error are passed on.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import needs
from cli import BYTE_ORDER_MARK, INTERNAL, Warn, bad_file, parse_json_object, read_bytes, read_json_object, shown
from hf_tokenizer import tokenizer_vocabulary
from tensor_file import ENVIRONMENT, FileError, escaped

MAX_CONFIG_BYTES = MAX_INDEX_BYTES = 8 << 20  # of config.json; of an index of shards
MAX_TOKENIZER_BYTES = 100_000_000  # what llmc/base/json.h reads
PROGRAM = needs.ROOT.parents[1] / "bin/infer_pythia" if needs.INSTALLED else needs.ROOT / "infer_pythia"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the `rope` object of a tensor file's model."""

    type: str
    theta: float
    rotary_dim: int
    factor: float = 1
    low_freq_factor: float = 1
    high_freq_factor: float = 1
    original_max_positions: int = 0
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True
    attention_factor: float = 1


# What each scaling uses. The rest stays at its default, an integer: so its text in a model file has always been.
SCALING = {"standard": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
           "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")}


@dataclass(frozen=True)
class Model:
    """The `model` object of a tensor file, key for key (doc/tensor_file.md), and what the program says beside it."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    norm_eps: float
    norm: str
    tied_embeddings: bool
    parallel_residual: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str
    tokenizer_vocab: int
    rope: Rope
    eos_ids: list[int]
    bos_id: int | None
    # Not in the file:
    tensors: dict[str, Shape]  # every parameter, in the order in which weft stores them
    zeros: frozenset[str]      # those that are zeros in a new model
    embedding: str             # the names of two of them; a tied head is no parameter
    head: str
    linears: dict[str, list[str]]  # last parts of the modules' names: "qkv", "output", "up", "down", "head"
    trainable: bool
    hf_config: dict[str, Any] | None = field(compare=False)  # a config.json for it
    problem: str = field(compare=False)                      # why there is none
    # In the file if there are some:
    windows: list[int] = field(default_factory=list)
    nope_layers: list[int] = field(default_factory=list)
    local_rope_theta: float = 0
    attention_scale: float = 0

    def to_json(self) -> dict[str, Any]:
        beside = ["tensors", "zeros", "embedding", "head", "linears", "trainable", "hf_config", "problem"]
        beside += [key for key in ("windows", "nope_layers", "local_rope_theta", "attention_scale") if not getattr(self, key)]
        return {key: value for key, value in asdict(self).items() if key not in beside}

    def window(self, layer: int) -> int:
        """The keys that a position sees, its own included; 0: all before it."""
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope:
        local = self.local_rope_theta and self.window(layer)
        return Rope("standard", self.local_rope_theta, self.rope.rotary_dim) if local else self.rope

    def score_scale(self) -> float:
        return self.attention_scale or 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a Hugging Face directory, without its weights."""

    model: Model
    hf_config: dict[str, Any]  # as it is in the directory
    tokenizer: bytes | None  # the text of tokenizer.json
    ties_head: bool          # the checkpoint's head is its embedding


def with_own_head(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with a head beside the embedding that serves as one, so that the head alone can be quantised. Without
    effect where it has one. `ties_head` stays: the checkpoint's head is its embedding still."""
    model = checkpoint.model
    tensors = model.tensors | {model.head: model.tensors[model.embedding]}
    return replace(checkpoint, model=replace(model, tied_embeddings=False, tensors=tensors))


def parameter_count(model: Model) -> int:
    """Stored parameters: tied embeddings count once."""
    return sum(math.prod(shape) for shape in model.tensors.values())


_BUFFER = re.compile(r"(?:.*\.)?(?:rotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)|attention\.(?:bias|masked_bias))")


def is_ignorable_buffer(name: str) -> bool:
    """Whether `name` is a constant that older versions of transformers stored among the weights."""
    return _BUFFER.fullmatch(name) is not None


# ---- asking the program ----------------------------------------------------------------------------------------------


def describe(path: object, request: dict[str, Any] | None = None, warn: Warn | None = None) -> dict[str, Any]:
    """What infer_pythia --describe prints of a path, or of a request on its stdin ("-"). FileError with its error."""
    text = "" if request is None else json.dumps(request)
    try:
        done = subprocess.run([PROGRAM, f"--describe={path}", "--color=never"], input=text.encode(), capture_output=True)
    except OSError as error:
        raise FileError(ENVIRONMENT, f"{escaped(str(PROGRAM), 300)}: {error.strerror}. Run make, which builds it") from None
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    for line in lines:
        if warn and line.startswith("warning: "):
            warn(line.removeprefix("warning: "))
    if done.returncode:
        code = done.returncode if done.returncode > 0 else INTERNAL
        raise FileError(code, (lines or ["infer_pythia ended without a message"])[-1].removeprefix("error: "))
    described: dict[str, Any] = json.loads(done.stdout)
    return described


def model_of(described: dict[str, Any]) -> Model:
    values, head = described["model"], described["head"]
    rope = values["rope"]
    kept = ("type", "theta", "rotary_dim", "original_max_positions", *SCALING[rope["type"]])
    return Model(**(values | {"rope": Rope(**{key: rope[key] for key in kept})}),
                 tensors={tensor["name"]: tuple(tensor["shape"]) for tensor in described["tensors"]},
                 zeros=frozenset(tensor["name"] for tensor in described["tensors"] if tensor["begins_as_zeros"]),
                 embedding=described["embedding"], head=head, linears=described["linears"] | {"head": [head.split(".")[-2]]},
                 trainable=described["trainable"], hf_config=described["hf_config"], problem=described.get("problem", ""))


def _name(path: object) -> str:
    """As JSON can hold it."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def model_from_json(value: Any, source: object) -> Model:
    """The Model of a tensor file's `model` object."""
    return model_of(describe("-", {"model": value, "source": _name(source)}))


def exported_config(model: Model, source: object) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read alike. FileError BAD_FILE if none describes the model."""
    if model.hf_config is None:
        bad_file(source, "", model.problem, "So it cannot be exported")
    return model.hf_config


# ---- a whole directory -----------------------------------------------------------------------------------------------


def read_checkpoint(directory: Path, rope_theta: float | None = None, warn: Warn | None = None) -> Checkpoint:
    """Configuration and tokenizer of a Hugging Face model directory. `warn` is told what is left out. rope_theta: the user's
    --rope-theta, for a config.json that has none."""
    if not directory.is_dir():
        bad_file(directory, "", "no such directory" if not directory.exists() else "not a directory")
    warn = warn or (lambda _: None)
    config_path, generation_path = directory / "config.json", directory / "generation_config.json"
    config = read_json_object(config_path, MAX_CONFIG_BYTES, warn)
    request: dict[str, Any] = {"config": config, "source": _name(config_path), "generation_source": _name(generation_path)}
    if generation_path.exists():
        request["generation"] = read_json_object(generation_path, MAX_CONFIG_BYTES, warn)
    if rope_theta is not None:
        request["rope_theta"] = rope_theta
    described = describe("-", request, warn)
    model, tokenizer, tokenizer_path = model_of(described), None, directory / "tokenizer.json"
    if tokenizer_path.exists():
        tokenizer = read_bytes(tokenizer_path, MAX_TOKENIZER_BYTES).removeprefix(BYTE_ORDER_MARK)
        tokenizer_vocab = tokenizer_vocabulary(tokenizer, tokenizer_path)
        if tokenizer_vocab > model.vocab_size:
            tokenizer = without_tokens_beyond(tokenizer, model.vocab_size, tokenizer_path, warn)
            tokenizer_vocab = tokenizer_vocabulary(tokenizer, tokenizer_path)
        model = replace(model, tokenizer_vocab=tokenizer_vocab)
    return Checkpoint(model, config, tokenizer, described["ties_head"])


def without_tokens_beyond(tokenizer: bytes, vocab: int, path: Path, warn: Warn) -> bytes:
    """The tokenizer.json without the added tokens that the model's embedding has no row for: tokens that were added for padding
    or chat, and that the model never sees. FileError BAD_FILE if a token of the vocabulary itself is among them."""
    document = parse_json_object(tokenizer, path)
    added = document.get("added_tokens") or []
    beyond = {token["content"]: token["id"] for token in added if token["id"] >= vocab}
    ids = document["model"]["vocab"]
    normal = [content for content, number in ids.items() if number >= vocab and content not in beyond]
    if normal:
        bad_file(path, "model.vocab", f"got {max(ids.values()) + 1} tokens, expected at most the model's vocab_size = {vocab}",
                 f"The tokenizer belongs to another model: {shown(normal[0])} is no added token, so it cannot be left out")
    document["added_tokens"] = [token for token in added if token["content"] not in beyond]
    document["model"]["vocab"] = {content: number for content, number in ids.items() if content not in beyond}
    for content, number in beyond.items():
        warn(f"{escaped(str(path), 300)}: added_tokens: {shown(content)} has the id {number}, left out: the model has the ids "
             f"below vocab_size = {vocab}")
    return json.dumps(document, ensure_ascii=False).encode()
