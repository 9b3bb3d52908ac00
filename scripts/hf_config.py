"""Reads and checks Hugging Face configurations of Llama and GPT-NeoX, and writes them.

Reads the keys of transformers 4 (rope_theta, rope_scaling, rotary_pct, rotary_emb_base, torch_dtype) and of
transformers 5 (rope_parameters, dtype). If both are present they must agree. A size has no default. What else is absent and
changes the arithmetic has the default of transformers, with a warning. Keys that change neither a logit nor an id are ignored.
llmc/train/hf_config.cpp follows the same rules: test/fixtures/hf_config/cases.json is tried on both. Errors are FileError
BAD_FILE and name the file and the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from cli import BYTE_ORDER_MARK, Warn, bad_file, json_type, parse_json_object, read_bytes, read_json_object, shown
from hf_tokenizer import tokenizer_vocabulary
from tensor_file import escaped

LLAMA, GPT_NEOX = "llama", "gpt_neox"
ARCHITECTURES = {LLAMA: "LlamaForCausalLM", GPT_NEOX: "GPTNeoXForCausalLM"}
# The names of transformers' activations (ACT2FN): the name that weft stores, which an export writes as well.
ACTIVATIONS = {
    LLAMA: {"silu": "silu", "swish": "silu"},
    GPT_NEOX: {"gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh",
               "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_python_tanh": "gelu_pytorch_tanh",
               "gelu_accurate": "gelu_pytorch_tanh"},
}
# What transformers takes for a key that is absent and that changes the arithmetic.
DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    GPT_NEOX: {"hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
               "rotary_pct": 0.25},
}
ROPE_TYPES = ("standard", "linear", "llama3", "yarn")  # of a model file; standard is transformers' default

MAX_CONFIG_BYTES = MAX_INDEX_BYTES = 8 << 20  # of config.json; of an index of shards
MAX_TOKENIZER_BYTES = 100_000_000  # what llmc/base/json.h reads

# Upper limits, those of llmc/model/config.cpp.
MAX_VOCAB, MAX_LAYERS, MAX_WIDTH = 1_000_000, 1024, 1 << 20
MAX_HEADS, MAX_HEAD_DIM, MAX_POSITIONS, MAX_EOS_IDS = 1024, 1024, 1 << 24, 64

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
    # yarn alone; files that were written before it was known lack them
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True
    attention_factor: float = 1


@dataclass(frozen=True)
class Model:
    """The `model` object of a tensor file, key for key (doc/tensor_file.md)."""

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
    tokenizer_vocab: int
    rope: Rope
    eos_ids: list[int] = field(default_factory=list)
    bos_id: int | None = None
    mlp_bias: bool = False
    activation: str = ""  # "silu", "gelu", "gelu_pytorch_tanh"; empty: that of the family

    def __post_init__(self) -> None:
        if not self.activation:
            object.__setattr__(self, "activation", "silu" if self.family == LLAMA else "gelu")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a Hugging Face directory, without its weights."""

    model: Model
    hf_config: dict[str, Any]
    tokenizer: bytes | None  # the text of tokenizer.json
    ties_head: bool          # tie_word_embeddings: the checkpoint's head is its embedding


def with_own_head(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with a head beside the embedding that serves as one, so that the head alone can be quantised. Without
    effect where it has one. `ties_head` stays: the checkpoint's head is its embedding still."""
    return replace(checkpoint, model=replace(checkpoint.model, tied_embeddings=False))


# ---- the tensors of a model ------------------------------------------------------------------------------------------


def expected_tensors(model: Model) -> dict[str, Shape]:
    """Every parameter's Hugging Face name and shape, in the order in which weft stores them."""
    return dict(_llama_tensors(model) if model.family == LLAMA else _gpt_neox_tensors(model))


def _norm(name: str, model: Model) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (model.hidden_size,)
    if model.norm == "layernorm":
        yield f"{name}.bias", (model.hidden_size,)


def _llama_tensors(model: Model) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = model.hidden_size, model.ffn_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def linears(prefix: str, bias: bool, **shapes: Shape) -> Iterator[tuple[str, Shape]]:
        """Matrices that are one in weft, and behind them their biases."""
        yield from ((f"{prefix}.{name}_proj.weight", shape) for name, shape in shapes.items())
        if bias:
            yield from ((f"{prefix}.{name}_proj.bias", shape[:1]) for name, shape in shapes.items())

    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        yield from _norm(prefix + "input_layernorm", model)
        yield from linears(prefix + "self_attn", model.attention_bias, q=(q_size, hidden), k=(kv_size, hidden),
                           v=(kv_size, hidden))
        yield from linears(prefix + "self_attn", model.attention_bias, o=(hidden, q_size))
        yield from _norm(prefix + "post_attention_layernorm", model)
        yield from linears(prefix + "mlp", model.mlp_bias, gate=(ffn, hidden), up=(ffn, hidden))
        yield from linears(prefix + "mlp", model.mlp_bias, down=(hidden, ffn))
    yield from _norm("model.norm", model)
    if not model.tied_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)


def _gpt_neox_tensors(model: Model) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = model.hidden_size, model.ffn_size

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (outputs, inputs)
        if bias:
            yield f"{name}.bias", (outputs,)

    yield "gpt_neox.embed_in.weight", (model.vocab_size, hidden)
    for layer in range(model.num_layers):
        prefix = f"gpt_neox.layers.{layer}."
        yield from _norm(prefix + "input_layernorm", model)
        yield from _norm(prefix + "post_attention_layernorm", model)
        yield from linear(prefix + "attention.query_key_value", 3 * hidden, hidden, model.attention_bias)
        yield from linear(prefix + "attention.dense", hidden, hidden, model.attention_bias)
        yield from linear(prefix + "mlp.dense_h_to_4h", ffn, hidden, True)
        yield from linear(prefix + "mlp.dense_4h_to_h", hidden, ffn, True)
    yield from _norm("gpt_neox.final_layer_norm", model)
    yield "embed_out.weight", (model.vocab_size, hidden)


def embedding_name(model: Model) -> str:
    return "model.embed_tokens.weight" if model.family == LLAMA else "gpt_neox.embed_in.weight"


def head_name(model: Model) -> str:
    return "lm_head.weight" if model.family == LLAMA else "embed_out.weight"


def parameter_count(model: Model) -> int:
    """Stored parameters: tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(model).values())


_BUFFER = re.compile(r"(?:.*\.)?(?:rotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)|attention\.(?:bias|masked_bias))")


def is_ignorable_buffer(name: str) -> bool:
    """Whether `name` is a constant that older versions of transformers stored among the weights."""
    return _BUFFER.fullmatch(name) is not None


# ---- config.json -----------------------------------------------------------------------------------------------------


class _Reader:
    """Typed, checked access to one configuration object."""

    def __init__(self, source: object, values: dict[str, Any], prefix: str = "", defaults: dict[str, Any] | None = None,
                 warn: Warn | None = None):
        """defaults: what a key that is absent is taken for; `warn` is told of it."""
        self.source, self.values, self.prefix = source, values, prefix
        self.defaults, self.tell = defaults or {}, warn

    def fail(self, key: str, problem: str, advice: str = "") -> NoReturn:
        bad_file(self.source, self.prefix + key, problem, advice)

    def warn(self, key: str, text: str) -> None:
        if self.tell:
            self.tell(f"{escaped(str(self.source), 300)}: {self.prefix}{key}: {text}")

    def get(self, key: str) -> Any:
        """None where the key is absent or null."""
        return self.values.get(key)

    def found(self, key: str) -> Any:
        """The value of the key, or its default."""
        value = self.get(key)
        if value is None and key in self.defaults:
            value = self.defaults[key]
            self.warn(key, f"absent, taken for {shown(value)} as transformers does")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.found(key)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            got = "nothing" if value is None else _got(value)
            self.fail(key, f"got {got}, expected an integer from {low} to {high}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.found(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < 1e300:
            got = "nothing" if value is None else _got(value)
            self.fail(key, f"got {got}, expected a number above 0")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.fail(key, f"got {_got(value)}, expected true or false")
        return value

    def text(self, key: str) -> str:
        value = self.found(key)
        if not isinstance(value, str):
            self.fail(key, f"got {'nothing' if value is None else _got(value)}, expected a string")
        return value

    def object(self, key: str) -> "_Reader":
        """The nested object `key`; an empty one where it is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            self.fail(key, f"got {_got(value)}, expected an object or null")
        return _Reader(self.source, value or {}, f"{self.prefix}{key}.", warn=self.tell)


def _got(value: Any) -> str:
    return f"{json_type(value)} {shown(value)}"


def _agreed(candidates: list[tuple["_Reader", str]], what: str) -> tuple["_Reader", str] | None:
    """The first of the given keys that is present; None if none is. FileError BAD_FILE if two have different values."""
    present = [(reader, key) for reader, key in candidates if reader.get(key) is not None]
    for reader, key in present[1:]:
        first, first_key = present[0]
        if reader.get(key) != first.get(first_key):
            reader.fail(key, f"got {shown(reader.get(key))}, but {first.prefix}{first_key} is "
                        f"{shown(first.get(first_key))}: they disagree about the {what}",
                        "Remove the wrong one from config.json")
    return present[0] if present else None


def parse_config(config: dict[str, Any], source: object, rope_theta: float | None = None,
                 generation: dict[str, Any] | None = None, tokenizer_vocab: int | None = None,
                 warn: Warn | None = None) -> Model:
    """The model that `config` (a config.json) describes.

    rope_theta: the user's --rope-theta, for a config that has none. generation: generation_config.json, whose token
    ids take precedence. tokenizer_vocab: highest id of the tokenizer + 1; None: the model's own vocabulary. warn: is told what
    is left out or taken for its default.
    """
    family = _family(_Reader(source, config, warn=warn))
    reader = _Reader(source, config, defaults=DEFAULTS[family], warn=warn)
    vocab = reader.integer("vocab_size", 1, MAX_VOCAB)
    hidden = reader.integer("hidden_size", 1, MAX_WIDTH)
    heads = reader.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = _head_dim(reader, family, hidden, heads)
    llama = family == LLAMA
    kv_heads = reader.integer("num_key_value_heads", 1, heads, default=heads) if llama else heads
    if heads % kv_heads:
        reader.fail("num_key_value_heads", f"got {kv_heads}, expected a divisor of num_attention_heads = {heads}")
    _check_weights(reader)
    tokens = _token_ids(reader, _Reader(_sibling(source, "generation_config.json"), generation or {}, warn=warn), vocab)
    max_positions = reader.integer("max_position_embeddings", 1, MAX_POSITIONS)
    return Model(
        family=family, vocab_size=vocab, hidden_size=hidden,
        num_layers=reader.integer("num_hidden_layers", 1, MAX_LAYERS), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, ffn_size=reader.integer("intermediate_size", 1, MAX_WIDTH),
        max_positions=max_positions,
        norm_eps=reader.positive("rms_norm_eps" if llama else "layer_norm_eps"),
        norm="rmsnorm" if llama else "layernorm",
        tied_embeddings=ties_head(config, source) and llama,  # weft stores a head of its own for GPT-NeoX
        parallel_residual=not llama and reader.boolean("use_parallel_residual", True),
        attention_bias=reader.boolean("attention_bias", not llama),
        mlp_bias=llama and reader.boolean("mlp_bias", False), activation=_activation(reader, family),
        tokenizer_vocab=vocab if tokenizer_vocab is None else tokenizer_vocab,
        rope=_rope(reader, family, head_dim, max_positions, rope_theta), eos_ids=tokens[0], bos_id=tokens[1])


def ties_head(config: dict[str, Any], source: object) -> bool:
    """tie_word_embeddings; both families default to false."""
    return _Reader(source, config).boolean("tie_word_embeddings", False)


def _sibling(source: object, name: str) -> object:
    return source.parent / name if isinstance(source, Path) else source


def _family(reader: _Reader) -> str:
    family = reader.text("model_type")
    if family not in ARCHITECTURES:
        reader.fail("model_type", f"got {shown(family)}, expected one of {', '.join(ARCHITECTURES)}",
                    "No other architecture is supported")
    names = reader.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        reader.fail("architectures", f"got {_got(names)}, expected a list of names")
    if names and ARCHITECTURES[family] not in names:
        # A model of the same family with another head, or none: LlamaModel, LLaMAForCausalLM, GPTNeoXForSequenceClassification
        if not any(name.lower().startswith(ARCHITECTURES[family].removesuffix("ForCausalLM").lower()) for name in names):
            reader.fail("architectures", f"got {shown(names)}, expected {ARCHITECTURES[family]}",
                        f"If the model is one all the same, as model_type {shown(family)} says, correct the name in config.json")
        reader.warn("architectures", f"got {shown(names)}, read as {ARCHITECTURES[family]}")
    return family


def _head_dim(reader: _Reader, family: str, hidden: int, heads: int) -> int:
    explicit = reader.get("head_dim")
    if explicit is None or family == GPT_NEOX:
        if hidden % heads:
            reader.fail("hidden_size", f"got {hidden}, expected a multiple of num_attention_heads = {heads}"
                        + (" (head_dim is absent)" if family == LLAMA else ""))
        if not 2 <= hidden // heads <= MAX_HEAD_DIM:
            reader.fail("num_attention_heads", f"got {heads}, which makes heads of {hidden // heads}, expected from 2 "
                        f"to {MAX_HEAD_DIM}")
    if explicit is None:
        return hidden // heads
    head_dim = reader.integer("head_dim", 2, MAX_HEAD_DIM)
    if family == GPT_NEOX and head_dim != hidden // heads:
        reader.fail("head_dim", f"got {head_dim}, expected hidden_size / num_attention_heads = {hidden // heads}")
    return head_dim


def _check_weights(reader: _Reader) -> None:
    if reader.get("quantization_config") is not None:
        reader.fail("quantization_config", "got a quantized model, expected float weights",
                    "Convert the original checkpoint")


def _activation(reader: _Reader, family: str) -> str:
    """The name under which weft stores it."""
    name = reader.text("hidden_act")
    if name not in ACTIVATIONS[family]:
        reader.fail("hidden_act", f"got {shown(name)}, expected one of {', '.join(map(shown, ACTIVATIONS[family]))}",
                    f"No other activation of {family} models is supported")
    return ACTIVATIONS[family][name]


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def _rope(reader: _Reader, family: str, head_dim: int, max_positions: int, user_theta: float | None) -> Rope:
    old, new = reader.object("rope_scaling"), reader.object("rope_parameters")
    for nested in (old, new):
        for key, value in nested.values.items():
            if isinstance(value, dict):
                nested.fail(key, f"got an {json_type(value)}, expected one set of rope parameters for all layers")
    rope_type = _rope_type(reader, old, new)
    plain = Rope("standard", _theta(reader, old, new, family, user_theta), _rotary_dim(reader, old, new, family, head_dim))
    if rope_type == "default":
        return plain
    home = old if old.values else new  # whose name the error about a missing key gives

    def owner(key: str, *others: _Reader) -> _Reader:
        place = _agreed([(nested, key) for nested in (new, old, *others)], f"{rope_type} {key}")
        return place[0] if place else home

    def original_positions() -> int:
        key = "original_max_position_embeddings"
        place = owner(key, reader)
        if place.get(key) is None:
            home.warn(key, f"absent, taken for max_position_embeddings = {max_positions} as transformers does")
            return max_positions
        return place.integer(key, 1, MAX_POSITIONS)

    if rope_type == "yarn":
        return _yarn(plain, owner, original_positions(), max_positions)
    factor = float(owner("factor").positive("factor"))
    if rope_type == "dynamic":
        home.warn("factor", f"left out: dynamic scaling begins behind max_position_embeddings = {max_positions}, where weft ends")
        return plain
    if rope_type == "linear":
        return replace(plain, type="linear", factor=factor)
    low, high = (float(owner(key).positive(key)) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        home.fail("high_freq_factor", f"got {high:g}, expected more than low_freq_factor = {low:g}")
    return replace(plain, type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
                   original_max_positions=original_positions())


def _yarn(plain: Rope, owner: Callable[[str], _Reader], original: int, max_positions: int) -> Rope:
    """YaRN (Peng et al., 2023), with the defaults of transformers. The factor of attention's scores is worked out here, so that
    a model file has it as a number."""

    def given(key: str, default: float | None) -> float:
        return float(owner(key).positive(key, default))

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    factor = given("factor", max_positions / original if original != max_positions else None)
    attention = mscale(1)
    if all(owner(key).get(key) for key in ("mscale", "mscale_all_dim")):  # 0 is none, as in transformers
        attention = mscale(given("mscale", 1)) / mscale(given("mscale_all_dim", 1))
    if plain.theta <= 1:
        owner("rope_theta").fail("rope_theta", f"got {plain.theta:g}, expected more than 1 for yarn")
    fast, slow = (given(key, default) if owner(key).get(key) else default for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if fast < slow:
        owner("beta_fast").fail("beta_fast", f"got {fast:g}, expected at least beta_slow = {slow:g}")
    return replace(plain, type="yarn", factor=factor, original_max_positions=original, beta_fast=fast, beta_slow=slow,
                   truncate=owner("truncate").boolean("truncate", True), attention_factor=given("attention_factor", attention))


def _theta(reader: _Reader, old: _Reader, new: _Reader, family: str, user_theta: float | None) -> float:
    own = [(reader, "rotary_emb_base")] if family == GPT_NEOX else []
    place = _agreed([(reader, "rope_theta"), *own, (new, "rope_theta"), (old, "rope_theta")], "base of the rotary embedding")
    if place is None:
        return reader.positive("rope_theta") if user_theta is None else float(user_theta)
    theta = float(place[0].positive(place[1]))
    if user_theta is not None and user_theta != theta:
        place[0].fail(place[1], f"got {theta:g}, but --rope-theta is {user_theta:g}: they disagree",
                      "Leave --rope-theta away or correct config.json")
    return theta


def _rope_type(reader: _Reader, old: _Reader, new: _Reader) -> str:
    """default, linear, dynamic, llama3 or yarn."""
    known = "default, linear, dynamic, llama3 or yarn"
    for nested in (old, new):
        if nested.values and nested.get("rope_type") is None and nested.get("type") is None:
            if set(nested.values) - {"rope_theta", "partial_rotary_factor"}:
                nested.fail("rope_type", f"got nothing, expected {known}", "Add the type that the model was trained with")
    place = _agreed([(nested, key) for nested in (new, old) for key in ("rope_type", "type")], "rope type")
    rope_type = place[0].text(place[1]) if place else "default"
    if place is not None and rope_type not in known.replace(",", "").split():
        place[0].fail(place[1], f"got {shown(rope_type)}, expected {known}", "No other scaling of positions is supported")
    return rope_type


def _rotary_dim(reader: _Reader, old: _Reader, new: _Reader, family: str, head_dim: int) -> int:
    own = [(reader, "rotary_pct")] if family == GPT_NEOX else []
    place = _agreed([*own, (reader, "partial_rotary_factor"), (new, "partial_rotary_factor"), (old, "partial_rotary_factor")],
                    "rotary fraction")
    if place is None:
        owner, key, fraction = reader, "head_dim", reader.positive("rotary_pct") if family == GPT_NEOX else 1.0
    else:
        owner, key = place
        fraction = owner.positive(key)
        if fraction > 1:
            owner.fail(key, f"got {shown(fraction)}, expected at most 1")
        if family == LLAMA and fraction != 1:
            owner.fail(key, f"got {shown(fraction)}, expected 1", "Llama models rotate whole heads")
    rotary_dim = int(head_dim * fraction)  # truncated, as transformers does
    if rotary_dim < 2 or rotary_dim % 2:
        owner.fail(key, f"got {rotary_dim} rotary dimensions of {head_dim} in a head, expected an even number, "
                   "at least 2")
    return rotary_dim


# ---- token ids -------------------------------------------------------------------------------------------------------


def _token_ids(config: _Reader, generation: _Reader, vocab: int) -> tuple[list[int], int | None]:
    """eos_ids and bos_id: those of the generation config if it has them, otherwise those of the config."""
    owner = generation if generation.get("eos_token_id") is not None else config
    eos = owner.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if len(ids) > MAX_EOS_IDS:
        owner.fail("eos_token_id", f"got {len(ids)} ids, expected at most {MAX_EOS_IDS}")
    ids = [value for value in ids if _is_usable(owner, "eos_token_id", value, vocab)]
    owner = generation if generation.get("bos_token_id") is not None else config
    bos = owner.get("bos_token_id")
    return list(dict.fromkeys(ids)), bos if bos is not None and _is_usable(owner, "bos_token_id", bos, vocab) else None


def _is_usable(owner: _Reader, key: str, value: Any, vocab: int) -> bool:
    """Whether the model knows the token id; one that it cannot know is left out."""
    if type(value) is not int:
        owner.fail(key, f"got {_got(value)}, expected a token id")
    if not 0 <= value < vocab:
        owner.warn(key, f"got {shown(value)}, left out: the model has the ids below vocab_size = {vocab}")
        return False
    return True


# ---- a whole directory -----------------------------------------------------------------------------------------------


def read_checkpoint(directory: Path, rope_theta: float | None = None, warn: Warn | None = None) -> Checkpoint:
    """Configuration and tokenizer of a Hugging Face model directory. `warn` is told what is left out."""
    if not directory.is_dir():
        bad_file(directory, "", "no such directory" if not directory.exists() else "not a directory")
    warn = warn or (lambda _: None)
    config_path, generation_path = directory / "config.json", directory / "generation_config.json"
    config = read_json_object(config_path, MAX_CONFIG_BYTES, warn)
    generation = read_json_object(generation_path, MAX_CONFIG_BYTES, warn) if generation_path.exists() else None
    tokenizer, tokenizer_vocab, tokenizer_path = None, None, directory / "tokenizer.json"
    model = parse_config(config, config_path, rope_theta, generation, None, warn)
    if tokenizer_path.exists():
        tokenizer = read_bytes(tokenizer_path, MAX_TOKENIZER_BYTES).removeprefix(BYTE_ORDER_MARK)
        tokenizer_vocab = tokenizer_vocabulary(tokenizer, tokenizer_path)
        if tokenizer_vocab > model.vocab_size:
            tokenizer = without_tokens_beyond(tokenizer, model.vocab_size, tokenizer_path, warn)
            tokenizer_vocab = tokenizer_vocabulary(tokenizer, tokenizer_path)
        model = replace(model, tokenizer_vocab=tokenizer_vocab)
    return Checkpoint(model, config, tokenizer, ties_head(config, config_path))


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


# ---- back to Hugging Face --------------------------------------------------------------------------------------------


# Of a model and of its rope: what files that were written before it was known lack.
_NEWER_KEYS = {"mlp_bias", "activation", "beta_fast", "beta_slow", "truncate", "attention_factor"}


def model_from_json(value: Any, source: object) -> Model:
    """The Model of a tensor file's `model` object, checked by writing it as a config.json and reading that."""
    names, rope_names = set(Model.__dataclass_fields__), set(Rope.__dataclass_fields__)
    needed, rope_needed = names - _NEWER_KEYS, rope_names - _NEWER_KEYS
    rope = value.get("rope") if isinstance(value, dict) else None
    if not isinstance(rope, dict) or not needed <= set(value) or not rope_needed <= set(rope):
        missing = sorted(needed - set(value)) if isinstance(value, dict) else sorted(needed)
        bad_file(source, "model", f"keys are missing: {', '.join(missing) or 'of rope'}")
    model = Model(**{key: value[key] for key in (names & set(value)) - {"rope"}},
                  rope=Rope(**{key: rope[key] for key in rope_names & set(rope)}))
    if model.family not in ARCHITECTURES or rope["type"] not in ROPE_TYPES:
        bad_file(source, "model", f"got family {shown(model.family)}, rope {shown(rope['type'])}, expected one of "
                 f"{', '.join(ARCHITECTURES)} and one of {', '.join(ROPE_TYPES)}")
    if model.family == LLAMA and model.norm != "rmsnorm":
        bad_file(source, "model.norm", f"got {shown(model.norm)}, expected 'rmsnorm'",
                 "Hugging Face's Llama has no other norm, so this model cannot be exported")
    try:
        config = export_config(model, None, "float32")
    except (ArithmeticError, TypeError, ValueError):
        bad_file(source, "model", "a value has the wrong type or is out of range")
    problems: list[str] = []
    parsed = parse_config(config, source, tokenizer_vocab=model.tokenizer_vocab, warn=problems.append)
    if problems:
        bad_file(source, "model", problems[0])
    if parsed != replace(model, eos_ids=parsed.eos_ids):
        bad_file(source, "model", f"got {shown(value)}, which no Hugging Face configuration describes")
    _Reader(source, value, "model.").integer("tokenizer_vocab", 1, model.vocab_size)
    return parsed


def export_config(model: Model, original: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read alike. Keys of `original` that do not describe the model are kept."""
    scaling = _scaling(model.rope)
    rope: dict[str, Any] = {"rope_type": "default"} | scaling | {"rope_theta": model.rope.theta}
    config = {
        "architectures": [ARCHITECTURES[model.family]], "model_type": model.family,
        "hidden_act": model.activation, "vocab_size": model.vocab_size, "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": model.tied_embeddings, "attention_bias": model.attention_bias,
        "bos_token_id": model.bos_id, "eos_token_id": one_or_all(model.eos_ids), "torch_dtype": dtype, "dtype": dtype,
    }
    kept = {key: value for key, value in (original or {}).items() if key not in _ROPE_KEYS}
    if model.family == LLAMA:
        config |= {"rms_norm_eps": model.norm_eps, "num_key_value_heads": model.num_kv_heads,
                   "head_dim": model.head_dim, "mlp_bias": model.mlp_bias, "rope_theta": model.rope.theta,
                   "rope_scaling": scaling or None, "rope_parameters": rope}
    else:
        fraction = rotary_fraction(model.rope.rotary_dim, model.head_dim)
        rope["partial_rotary_factor"] = fraction
        config |= {"layer_norm_eps": model.norm_eps, "use_parallel_residual": model.parallel_residual,
                   "rotary_pct": fraction, "rotary_emb_base": model.rope.theta, "rope_theta": model.rope.theta,
                   "partial_rotary_factor": fraction, "rope_scaling": scaling or None, "rope_parameters": rope}
        kept.pop("head_dim", None)
    return kept | config


def _scaling(rope: Rope) -> dict[str, Any]:
    """The rope_scaling of a config.json; empty without scaling."""
    if rope.type == "standard":
        return {}
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.type == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate,
                    "attention_factor": rope.attention_factor}
    return scaling


_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_emb_base", "partial_rotary_factor",
              "original_max_position_embeddings", "quantization_config"}


def one_or_all(ids: list[int]) -> int | list[int] | None:
    """eos ids as Hugging Face writes them: null, one id, or a list."""
    return None if not ids else ids[0] if len(ids) == 1 else ids


def rotary_fraction(rotary_dim: int, head_dim: int) -> float:
    """The fraction f for which int(head_dim * f), which is what transformers computes, is rotary_dim."""
    fraction = rotary_dim / head_dim
    return fraction if int(head_dim * fraction) == rotary_dim else math.nextafter(fraction, 1)
