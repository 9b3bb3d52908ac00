#!/usr/bin/env python3
"""Converts a Hugging Face model directory (Llama, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 3 or GPT-NeoX/Pythia) into one weft model file.

    python3 scripts/convert_hf.py models/pythia-160m -o pythia-160m.bin
    python3 scripts/convert_hf.py models/Llama-3.2-1B -o llama.bin --dtype bf16
    python3 scripts/convert_hf.py models/pythia-2.8b -o pythia-int4.bin --quantize int4 --head int8

Reads config.json, generation_config.json, tokenizer.json, the chat template and model.safetensors (or its shards and index);
checks all of it before anything is written. The chat template becomes a chat format (doc/chat.md). Tensors keep their names, shapes
and, without --dtype and --quantize, their bits. One tensor at most is in memory at a time. --quantize stores the linear layers
in fewer bits (doc/quantisation.md).

    python3 scripts/convert_hf.py lora-directory --base llama.bin -o adapter.bin

makes an adapter file of PEFT's adapter_config.json and adapter_model.safetensors, for --adapter beside that model, with the chat format
of the chat_format.json or the chat template beside them. Exit codes: 2 usage, 3 bad input, 4 cannot write, 5 disk or memory full.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import needs  # before the packages

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # quantising has threads of its own; read when numpy is loaded
import numpy as np

import chat_format
import cli
import gptq
import peft_format
import quantization
import tensor_file
from cli import BAD_FILE, FileError, Warnings, bad_file, json_type, shown
from gptq import Calibration
from hf_config import (MAX_INDEX_BYTES, Checkpoint, Model, Shape, is_ignorable_buffer, parameter_count, read_checkpoint,
                       with_own_head)
from hf_tokenizer import encode, left_out, missing_tokenizer
from safetensors_reader import Entry, SafetensorsFile
from tensor_file import (MAGIC, MAX_CONFIG_BYTES, MAX_CONFIG_VALUES, NUMPY_DTYPES, Writer, configuration_text, escaped, from_f32,
                         shape_text, to_f32, whole_bytes)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Other files that weights come in, and what to do with them.
OTHER_WEIGHTS = {
    "adapter_model.*": "It is an adapter without adapter_config.json: download that too, and name its model file with --base",
    "consolidated*.safetensors": "Its tensors have other names: load it with transformers, then save_pretrained(DIR)",
    "*.gguf": "Get the original checkpoint: a GGUF file cannot be converted",
    "model*.safetensors": "Get the index as well or, if this file is the whole model, rename it",
    "*.safetensors": "If this file is the whole model, rename it",
}
MAX_CALIBRATION_BYTES = 64 << 20
MAX_NAME_BYTES = 255  # of a file: Linux refuses longer names with an error even in exists()
FLOAT_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F64": "f32"}  # safetensors: tensor file
DTYPE_OPTIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
CHUNK_ELEMENTS = 4 << 20
HEADS = {"16": "none"} | {name: name for name, each in quantization.FORMATS.items() if each.of_head}  # --head: in the configuration
PARTS = ("qkv", "output", "up", "down", "head")  # --only
TOKENIZER_TENSOR = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """Where a parameter's values come from."""

    file: SafetensorsFile
    entry: Entry

    @property
    def dtype(self) -> str:
        return FLOAT_DTYPES[self.entry.dtype]

    def chunks(self) -> Iterator[np.ndarray]:
        """The values in pieces, as numpy arrays of `dtype` (bf16: its bits). float64 is rounded to nearest; FileError BAD_FILE for
        a finite value that float32 cannot hold."""
        values = self._values()
        for begin in range(0, values.size, CHUNK_ELEMENTS):
            yield self._narrow(values[begin:begin + CHUNK_ELEMENTS])

    def raw(self) -> Iterator[np.ndarray]:
        """The bytes in pieces."""
        data = self.file.bytes(self.entry)
        for begin in range(0, data.size, CHUNK_ELEMENTS):
            yield data[begin:begin + CHUNK_ELEMENTS]

    def _values(self) -> np.ndarray:
        return self.file.bytes(self.entry).view("<f8" if self.entry.dtype == "F64" else NUMPY_DTYPES[self.dtype])

    def _narrow(self, values: np.ndarray) -> np.ndarray:
        if self.entry.dtype != "F64":
            return values
        with np.errstate(over="ignore"):
            result = values.astype(np.float32)
        if (np.isinf(result) & np.isfinite(values)).any():
            bad_file(self.file.path, self.entry.name, "got a float64 value that does not fit in float32")
        return result

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows of a matrix in float32."""
        return to_f32(self._narrow(self._values().reshape(self.entry.shape)[first:last]), self.dtype)


# ---- finding the tensors ---------------------------------------------------------------------------------------------


def open_weights(directory: Path, warnings: Warnings) -> dict[str, Source]:
    """Every tensor of the checkpoint, from one file or from the shards of an index."""
    if (directory / SINGLE).exists():
        file = SafetensorsFile(directory / SINGLE)
        return {name: Source(file, entry) for name, entry in file.tensors.items()}
    if (directory / INDEX).exists():
        return _open_shards(directory, warnings)
    if list(directory.glob("pytorch_model*.bin")) or list(directory.glob("*.pth")):
        bad_file(directory, SINGLE, "missing, and pytorch_model.bin is a Python pickle, which can run code",
                 "Convert it to safetensors first: load it with transformers, then "
                 "save_pretrained(DIR, safe_serialization=True)")
    for name, advice in OTHER_WEIGHTS.items():
        if found := sorted(path.name for path in directory.glob(name)):
            bad_file(directory, SINGLE, f"got neither this nor {INDEX}, but {shown(found[0])}", advice)
    bad_file(directory, SINGLE, f"got neither this nor {INDEX}", "Download the weights")


def _open_shards(directory: Path, warnings: Warnings) -> dict[str, Source]:
    index_path = directory / INDEX
    weight_map = cli.read_json_object(index_path, MAX_INDEX_BYTES, warnings.add).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        bad_file(index_path, "weight_map", f"got {json_type(weight_map)}, expected an object of tensor and file names")
    for name, shard in weight_map.items():
        _check_shard_name(index_path, name, shard)
    found: dict[str, Source] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).exists():
            bad_file(index_path, "weight_map", f"names {shown(shard)}, which is not there", "Download this shard")
        file = SafetensorsFile(directory / shard)
        for name, entry in file.tensors.items():
            source = Source(file, entry)
            if name in found and not same_bits(source, found[name]):
                bad_file(file.path, f"tensor {shown(name)}", f"is also in {shown(found[name].file.path.name)}, with other values",
                         "One of the two is wrong: remove its file, or correct the index")
            found.setdefault(name, source)
    return found


def same_bits(one: Source, other: Source) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    return one.entry.dtype == other.entry.dtype and one.entry.shape == other.entry.shape and all(
        np.array_equal(a, b) for a, b in zip(one.raw(), other.raw()))


def _check_shard_name(index_path: Path, name: str, shard: object) -> None:
    where = f"weight_map {shown(name)}"
    if not isinstance(shard, str):
        bad_file(index_path, where, f"got {json_type(shard)} {shown(shard)}, expected a file name")
    if ("/" in shard or "\\" in shard or not shard.endswith(".safetensors") or not shard.isprintable()
            or len(shard.encode()) > MAX_NAME_BYTES):
        bad_file(index_path, where, f"got {shown(shard)}, expected the name of a .safetensors file in this directory")


def named_as_expected(found: dict[str, Source], model: Model, directory: Path, warnings: Warnings) -> dict[str, Source]:
    """The tensors under the names of model.tensors. A model that was saved without its head (LlamaModel, GPTNeoXModel) has
    them without the prefix; newer versions of transformers call every head lm_head."""
    prefix, head = model.embedding.split(".")[0] + ".", model.head
    for text in ("language_model.", "model.language_model."):  # of a model of several modalities
        if text + model.embedding in found or text + model.embedding.removeprefix(prefix) in found:
            own = {name.removeprefix(text): source for name, source in found.items()
                   if name.startswith((text, "lm_head."))}
            if left_out := len(found) - len(own):
                warnings.add(f"{escaped(str(directory))}: {left_out} tensors of other modalities than text are left out")
            found = own
    if model.embedding not in found and model.embedding.removeprefix(prefix) in found:
        heads = ("lm_head.", "embed_out.")
        found = {name if name.startswith(heads) else prefix + name: source for name, source in found.items()}
    if head != "lm_head.weight" and head not in found and "lm_head.weight" in found:
        found = {head if name == "lm_head.weight" else name: source for name, source in found.items()}
    return found


def match_tensors(checkpoint: Checkpoint, found: dict[str, Source], directory: Path,
                  warnings: Warnings) -> tuple[Checkpoint, dict[str, Source]]:
    """The parameters of the model in storage order, each with its source; shapes and dtypes checked. The checkpoint has a head of
    its own if the file holds one that differs from the embedding, whatever config.json says: so does transformers 5."""
    model, head = checkpoint.model, checkpoint.model.head
    found = named_as_expected(found, model, directory, warnings)
    if checkpoint.ties_head and _has_other_head(model, found):
        warnings.add(f"{escaped(str(found[head].file.path))}: {head} differs from {model.embedding}: taken as it is, although "
                     "tie_word_embeddings is true in config.json")
        checkpoint = replace(with_own_head(checkpoint), ties_head=False)
        model = checkpoint.model
    expected = model.tensors
    _check_present(expected, found, checkpoint, directory)
    for name in found:
        if name not in expected and name != head and not is_ignorable_buffer(name):
            warnings.add(f"{escaped(str(directory))}: tensor {shown(name)} is not part of a {model.family} model: "
                         "left out")
    return checkpoint, {name: found[name] for name in expected}


def _has_other_head(model: Model, found: dict[str, Source]) -> bool:
    """Whether the file has a head with other values than the embedding."""
    head, embedding = found.get(model.head), found.get(model.embedding)
    if head is None or embedding is None:
        return False
    for name, source in ((model.head, head), (model.embedding, embedding)):
        _check_tensor(name, (model.vocab_size, model.hidden_size), source)
    return not same_bits(head, embedding)


def _check_present(expected: dict[str, Shape], found: dict[str, Source], checkpoint: Checkpoint,
                   directory: Path) -> None:
    head, embedding = checkpoint.model.head, checkpoint.model.embedding
    if checkpoint.ties_head and embedding not in found and head in found:
        found[embedding] = found[head]
    for name, shape in expected.items():
        if name == head and name not in found:
            if checkpoint.ties_head:
                found[head] = found[embedding]
            else:
                bad_file(directory, head, "missing, but tie_word_embeddings is false in config.json",
                         "The checkpoint is incomplete, or tie_word_embeddings should be true")
        if name not in found:
            bad_file(directory, name, f"missing, expected a tensor {shape_text(shape)}",
                     "The checkpoint is incomplete or of another model")
        _check_tensor(name, shape, found[name])


def _check_tensor(name: str, shape: Shape, source: Source) -> None:
    path, entry = source.file.path, source.entry
    if entry.dtype not in FLOAT_DTYPES:
        bad_file(path, name, f"got dtype {entry.dtype}, expected one of {', '.join(FLOAT_DTYPES)}",
                 "Convert the original checkpoint, which is not quantised")
    if entry.shape != shape:
        hint = " (transposed?)" if len(shape) > 1 and entry.shape == shape[::-1] else ""
        bad_file(path, name, f"got shape {shape_text(entry.shape)}{hint}, expected {shape_text(shape)}",
                 "The weights do not belong to this config.json")


# ---- values ----------------------------------------------------------------------------------------------------------


class Conversion:
    """Streams one parameter into its target dtype and watches its values."""

    def __init__(self, model: Model, warnings: Warnings, progress: cli.Progress):
        self.model, self.warnings, self.progress = model, warnings, progress

    def stream(self, name: str, source: Source, dtype: str) -> Iterator[np.ndarray]:
        """The values in `dtype`. FileError BAD_FILE where a finite value does not fit."""
        finite, zero = True, True
        for raw in source.chunks():
            values = to_f32(raw, source.dtype)
            chunk_finite = bool(np.isfinite(values).all())
            # any() only if all values are finite: numpy warns of a signalling NaN.
            finite, zero = finite and chunk_finite, zero and chunk_finite and not values.any()
            if dtype == source.dtype:
                yield raw
            else:
                result = from_f32(values, dtype)
                self._check_overflow(name, source, values, result, dtype)
                yield result
            self.progress.advance(raw.size)
        where = f"{escaped(str(source.file.path))}: {name}"
        if not finite:
            self.warnings.add(f"{where}: holds NaN or infinity")
        if zero and name not in self.model.zeros:
            self.warnings.add(f"{where}: every value is zero")

    @staticmethod
    def _check_overflow(name: str, source: Source, values: np.ndarray, result: np.ndarray, dtype: str) -> None:
        too_large = np.isinf(to_f32(result, dtype)) & np.isfinite(values)
        if too_large.any():
            worst = float(np.abs(values[too_large]).max())
            bad_file(source.file.path, name, f"got a value of {worst:g}, which does not fit in {dtype}",
                     "Convert with --dtype bf16 or fp32")


@dataclass(frozen=True)
class Target:
    """How the parameters are to be stored."""

    dtype: str | None = None   # of the float tensors; None: each as it is
    scheme: str | None = None  # of the linear layers of the blocks; None: they stay floats
    head: str = "none"         # scheme of the head
    only: tuple[str, ...] = () # keys of PARTS: only these are quantised, and stored dequantised in float32. Empty: all

    def scheme_of(self, name: str, shape: Shape, model: Model) -> str | None:
        """The scheme in which a tensor is stored; None for floats."""
        if self.only and not any(name.split(".")[-2] in model.linears[part] for part in self.only):
            return None
        if name == model.head:
            return self.head if self.head != "none" else None
        of_block = any(name.split(".")[-2] in model.linears[part] for part in PARTS if part != "head")
        return self.scheme if of_block and len(shape) == 2 else None

    def stored(self, name: str, source: Source, model: Model) -> list[tuple[str, str, Shape]]:
        """Name, dtype and shape of what is stored of a tensor. FileError BAD_FILE for one that its scheme cannot hold."""
        scheme = self.scheme_of(name, source.entry.shape, model)
        if scheme is None:
            return [(name, self.dtype or source.dtype, source.entry.shape)]
        if not whole_bytes(quantization.FORMATS[scheme].dtype, source.entry.shape):
            bad_file(source.file.path, name, f"got {source.entry.shape[1]} columns, expected an even number for {scheme}",
                     "Use --quantize int8 or fp8")
        return [(name, "f32", source.entry.shape)] if self.only else quantization.stored_tensors(scheme, name, source.entry.shape)


def finite_rows(name: str, source: Source, first: int, last: int) -> np.ndarray:
    """Rows of a matrix in float32. FileError BAD_FILE unless all are finite."""
    rows = source.rows(first, last)
    if not np.isfinite(rows).all():
        bad_file(source.file.path, name, "holds NaN or infinity, which cannot be quantised")
    return rows


class QuantizedConversion:
    """Quantises matrices piece by piece and adds up the squared error. With a `calibration` gptq.SCHEME is chosen by GPTQ."""

    def __init__(self, conversion: Conversion, calibration: Calibration | None, tensors: dict[str, Source]):
        self.conversion, self.calibration, self.tensors = conversion, calibration, tensors
        self.matrices, self.error, self.square = 0, 0.0, 0.0

    def write(self, writer: Writer, name: str, source: Source, scheme: str) -> None:
        """The tensors of the scheme. FileError BAD_FILE for weights that cannot be quantised."""
        pieces: list[quantization.Quantized] = []

        def stream() -> Iterator[np.ndarray]:
            for piece in self._quantized(name, source, scheme):
                pieces.append(replace(piece, q=np.empty(0, np.uint8)))
                yield piece.q

        writer.write(name, stream())
        writer.write(f"{name}.scales", np.concatenate([piece.scales for piece in pieces]))
        if quantization.FORMATS[scheme].grouped:
            writer.write(f"{name}.zeros", np.concatenate([piece.zeros for piece in pieces if piece.zeros is not None]))

    def write_again(self, writer: Writer, name: str, source: Source, scheme: str) -> None:
        """Quantises the matrix and writes it dequantised, as one tensor in float32. FileError as write()."""
        writer.write(name, (quantization.weights_again(piece, scheme, source.entry.shape[1])
                            for piece in self._quantized(name, source, scheme)))

    def _quantized(self, name: str, source: Source, scheme: str) -> Iterator[quantization.Quantized]:
        """The matrix in pieces of rows; adds their errors to the sums."""
        path, square = source.file.path, 0.0
        try:
            for piece in self._pieces(name, source, scheme):
                self.error, square = self.error + piece.error, square + piece.square
                self.conversion.progress.advance(len(piece.q) * source.entry.shape[1])
                yield piece
        except gptq.MatrixError as error:  # of the same layer, and not always this one
            self._refuse(error.name, scheme, error.__cause__)
        except OverflowError as error:
            self._refuse(name, scheme, error)
        if not square:
            self.conversion.warnings.add(f"{escaped(str(path))}: {name}: every value is zero")
        self.matrices, self.square = self.matrices + 1, self.square + square

    def _refuse(self, name: str, scheme: str, error: BaseException | None) -> NoReturn:
        path = self.tensors[name].file.path
        if isinstance(error, np.linalg.LinAlgError):
            bad_file(path, name, "the calibration text gives it inputs that are not finite")
        bad_file(path, name, f"got weights too large for {scheme} and its scales", "Use --quantize int8 or fp8")

    def _pieces(self, name: str, source: Source, scheme: str) -> Iterator[quantization.Quantized]:
        if self.calibration is None or scheme != gptq.SCHEME:
            return quantization.quantize_matrix(lambda first, last: finite_rows(name, source, first, last),
                                                source.entry.shape, scheme)
        return iter([self.calibration.take(int(name.split(".layers.")[1].split(".")[0]), name)])

    def summary(self, target: Target) -> str:
        share = math.sqrt(self.error / self.square) if self.square > 0 else 0.0
        head = f", head {target.head}" if target.head != "none" else ""
        only = f", {' and '.join(target.only)} alone and stored as floats" if target.only else ""
        return f"{self.matrices} matrices to {target.scheme}{head}{only}, {share:.2%} off in the root mean square"


@dataclass(frozen=True)
class Chat:
    """What a model file says of its chats, and what to say of that."""

    said: str
    format: dict[str, Any] | None = None
    source: chat_format.Source | None = None  # that the format was learned from: an export hands it on
    warnings: tuple[str, ...] = ()

    def members(self) -> dict[str, Any]:
        """Of the configuration of the model file."""
        learned = {"chat_template": self.source.template, "chat_tokens": self.source.variables} if self.source else {}
        return ({"chat_format": self.format} if self.format else {}) | learned


def learned_format(directory: Path, source: chat_format.Source, options: list[str]) -> Chat:
    """The chat format that scripts/chat_template.py learns from the directory's template, in a process of its own: a template is a
    program. Where it cannot be learned the text says why."""
    command = [sys.executable, str(Path(__file__).with_name("chat_template.py")), "-o", "-", *options, "--", str(directory)]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    warnings = tuple(line.removeprefix("warning: ") for line in lines if line.startswith("warning: "))
    if done.returncode:
        return Chat("none: " + (lines or ["the process that learns it was ended"])[-1].removeprefix("error: "), warnings=warnings)
    learned = cli.parse_json(done.stdout, "the chat format", max_objects=MAX_CONFIG_VALUES)
    form = chat_format.from_json(learned, "the chat format")
    date = f", with the date {form.date}" if form.date else ""
    said = f"learned from {form.source}, proved on {chat_format.PROOF_CONVERSATIONS} conversations{date}"
    return Chat(said, learned, source, warnings)


def chat_of(directory: Path, choice: str | None, options: list[str]) -> Chat:
    """`choice`: --chat-format. FileError for a bad one."""
    if choice == "none":
        return Chat("none, as --chat-format says")
    if choice in chat_format.NAMED:
        return Chat(f"{choice}, as --chat-format says", chat_format.to_json(chat_format.NAMED[choice]()))
    if choice is not None:
        if not choice.endswith(".json"):
            raise FileError(cli.USAGE, f"--chat-format: got {shown(choice)}, expected {', '.join(chat_format.NAMED)}, none or a .json file")
        return Chat(f"that of {escaped(choice, 300)}", chat_format.to_json(chat_format.read_format(Path(choice))))
    try:
        found = chat_format.read_model(directory)
    except FileError as problem:
        return Chat(f"none: {problem}")
    if found:
        return learned_format(directory, found, options)
    beside = directory / chat_format.FILE
    return Chat("none: the directory has no chat template" + (f". It has a format: --chat-format {cli.pasteable(beside)}" if beside.is_file() else ""))


def chat_of_adapter(directory: Path, base: dict[str, Any], choice: str | None, options: list[str]) -> tuple[Chat, dict[str, Any]]:
    """As chat_of(), with the file that export_hf.py writes, and what the adapter file says of its chats: of the same format all that
    the configuration `base` of its model says, its template too, as training does."""
    beside = directory / chat_format.FILE
    chat = chat_of(directory, str(beside) if choice is None and not options and beside.exists() else choice, options)
    if chat.format is None:
        return replace(chat, said=f"{chat.said}. It chats as its model does"), {}
    if base.get("chat_format") == chat.format:
        return chat, {key: base[key] for key in ("chat_format", "chat_template", "chat_tokens") if key in base}
    return chat, chat.members()


def file_configuration(checkpoint: Checkpoint, source: Path, target: Target, chat: dict[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of the model file, which contains that of `source` (config.json). FileError BAD_FILE if it is too large
    or too deep for the readers of model files. `chat`: Chat.members()."""
    config = {"model": checkpoint.model.to_json(), "made_by": "scripts/convert_hf.py", "hf_config": checkpoint.hf_config}
    if target.scheme is not None and not target.only:
        config["quantization"] = quantization.to_json(target.scheme, target.head)
    config |= chat or {}
    (depth, values), size = cli.json_extent(config), len(configuration_text(config))
    if depth > cli.MAX_JSON_DEPTH:
        bad_file(source, "", f"got JSON nested {depth - 1} levels deep, expected at most "
                 f"{cli.MAX_JSON_DEPTH - 1}: the model file holds it in an object of its own")
    if size > MAX_CONFIG_BYTES:
        bad_file(source, "", f"got {size} bytes with every number written out, expected at most "
                 f"{MAX_CONFIG_BYTES}, which is what a model file can hold of it")
    if values > MAX_CONFIG_VALUES:
        bad_file(source, "", f"got {values} JSON values, expected at most {MAX_CONFIG_VALUES}, which is what a model file can hold")
    return config


def calibration_of(path: Path, checkpoint: Checkpoint, tensors: dict[str, Source], directory: Path, target: Target) -> Calibration:
    """The calibration of --gptq on the text of the file `path`. FileError BAD_FILE if model or text do not allow it."""
    model = checkpoint.model
    widest = max(source.entry.shape[1] for source in tensors.values() if len(source.entry.shape) == 2)
    if widest > gptq.MAX_COLUMNS:
        bad_file(directory, "config.json", f"got a matrix of {widest} columns, expected at most {gptq.MAX_COLUMNS} for --gptq",
                 "Leave --gptq out")
    if model.attention_scale:
        bad_file(directory, "config.json", f"got a model of the family {model.family}, whose blocks --gptq does not compute",
                 "Leave --gptq out")
    try:
        text = cli.read_bytes(path, MAX_CALIBRATION_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        bad_file(path, "", f"not UTF-8 (byte {error.start}), expected a text")
    ids = np.array(encode(checkpoint.tokenizer, text, directory, "--gptq", "Leave --gptq out"), dtype=np.int32)
    if len(ids) and ids.max() >= model.vocab_size:
        bad_file(path, "", f"got id {ids.max()}, expected ids below vocab_size = {model.vocab_size}")

    def chosen(name: str) -> bool:
        return target.scheme_of(name, tensors[name].entry.shape, model) == gptq.SCHEME

    def read(name: str) -> np.ndarray:
        source = tensors[name]
        rows = source.entry.shape[0]
        return finite_rows(name, source, 0, rows) if chosen(name) else source.rows(0, rows)

    return Calibration(model, read, gptq.windows(ids, model, path), chosen)


def write_model(path: Path, checkpoint: Checkpoint, tensors: dict[str, Source], target: Target, strict: bool,
                warnings: Warnings, calibration: Calibration | None = None, chat: dict[str, Any] | None = None) -> str:
    """Writes the model file; nothing is left behind if a value is refused. Returns the summary's line about quantisation."""
    config, model = file_configuration(checkpoint, Path("config.json"), target, chat), checkpoint.model
    progress = cli.Progress("converting", parameter_count(checkpoint.model))
    conversion = Conversion(model, warnings, progress)
    quantized = QuantizedConversion(conversion, calibration, tensors)
    already = warnings.count
    with Writer(path, "model", config) as writer:
        for name, source in tensors.items():
            for stored in target.stored(name, source, model):
                writer.declare(*stored)
        if checkpoint.tokenizer is not None:
            writer.declare(TOKENIZER_TENSOR, "u8", (len(checkpoint.tokenizer),))
        for name, source in tensors.items():
            scheme = target.scheme_of(name, source.entry.shape, model)
            if scheme is None:
                writer.write(name, conversion.stream(name, source, target.dtype or source.dtype))
            else:
                (quantized.write_again if target.only else quantized.write)(writer, name, source, scheme)
        if checkpoint.tokenizer is not None:
            writer.write(TOKENIZER_TENSOR, checkpoint.tokenizer)
        progress.finish()
        if strict and warnings.count > already:
            raise FileError(BAD_FILE, f"{escaped(str(path))}: not written: {warnings.count - already} tensors hold "
                            "NaN, infinity or only zeros. Convert without --strict to take them as they are")
    return quantized.summary(target)


# ---- what the user sees ----------------------------------------------------------------------------------------------


def print_summary(checkpoint: Checkpoint, tensors: dict[str, Source], directory: Path, path: Path,
                  target: Target, quantized: str, chat: Chat) -> None:
    model, rope = checkpoint.model, checkpoint.model.rope
    scaling = "" if rope.type == "standard" else f", {rope.type} x{rope.factor:g}"
    scaling += f" of {rope.original_max_positions}" if rope.original_max_positions else ""
    stored = {part[1] for name, source in tensors.items() for part in target.stored(name, source, model)[:1]}
    tokenizer = f"{model.tokenizer_vocab} tokens" if checkpoint.tokenizer is not None else "none"
    rows = {
        "family": model.family + (" (parallel residual)" if model.parallel_residual else ""),
        "size": f"{model.num_layers} layers, hidden {model.hidden_size}, FFN {model.ffn_size}",
        "heads": f"{model.num_heads} of {model.head_dim}, {model.num_kv_heads} for keys and values",
        "rotary": f"{rope.rotary_dim} of {model.head_dim} dimensions, theta {rope.theta:g}{scaling}",
        "vocabulary": f"{model.vocab_size} rows, tokenizer {tokenizer}" + (", tied" if model.tied_embeddings else ""),
        "parameters": f"{parameter_count(model):,} as {', '.join(sorted(stored))}",
        "file": f"{escaped(str(path))}, {path.stat().st_size:,} bytes",
    }
    if target.scheme is not None:
        rows["quantised"] = quantized
    for label, text in rows.items():
        print(f"{label:12}{text}")
    print(f"chat format: {chat.said}")
    for command in next_commands(checkpoint, directory, path, target, chat.format is not None):
        print(f"next        {command}")


def first_prompt(has_tokenizer: bool, chats: bool, vocab_size: int) -> str:
    """The options with which infer_pythia generates something."""
    few = ",".join(str(number) for number in range(1, min(4, vocab_size)))
    return f"--prompt-ids {few or 0}" if not has_tokenizer else "--chat" if chats else '--prompt "Hello"'


def next_commands(checkpoint: Checkpoint, directory: Path, path: Path, target: Target, chats: bool) -> list[str]:
    """Shell commands that the user may run next: generate text, and fine-tune the model on a text my.txt. A model with a chat format
    chats, and is tuned on conversations. Beside quantised matrices an adapter is trained."""
    model, has_tokenizer = cli.pasteable(path), checkpoint.tokenizer is not None
    chats = chats and has_tokenizer
    commands = [f"{needs.program('infer_pythia')} --model {model} {first_prompt(has_tokenizer, chats, checkpoint.model.vocab_size)}"]
    quantised = target.scheme is not None and not target.only
    if not checkpoint.model.trainable or not has_tokenizer:
        return commands
    tokenizer, data = cli.pasteable(directory / TOKENIZER_TENSOR), cli.unused("data/mine")
    source = f"--chat chats.jsonl --model {model}" if chats else f"my.txt --tokenizer {tokenizer}"
    return commands + [
        f"{needs.command('dev/prepare_data.py')} {source} -o {data}",
        f"{needs.program('train_llama')} --model {model}{' --lora-r 16' * quantised} --train '{data}/train_*.bin' "
        f"--val '{data}/val_*.bin' --out {cli.unused('runs/mine')}"]


def part_list(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"got {shown(name)}, expected names of {', '.join(PARTS)}")
    return names


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="convert_hf.py")
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the model file to write")
    parser.add_argument("--dtype", choices=DTYPE_OPTIONS, help="of the parameters; default: each as it is stored")
    parser.add_argument("--quantize", choices=quantization.SCHEMES, help="the linear layers, to fewer bits; --dtype is then "
                        "that of the other tensors")
    parser.add_argument("--head", choices=HEADS, help="of a quantised model; default: 16, as the embedding. int8 gives a tied model a "
                        "head of its own")
    parser.add_argument("--only", type=part_list, default=(), metavar="LIST", help="to see what it costs: quantise only these, of "
                        f"{','.join(PARTS)}, and store the floats that they mean")
    parser.add_argument("--gptq", type=Path, metavar="TEXT", help="choose the weights of int4 by what they do to the outputs "
                        "on this text (GPTQ)")
    parser.add_argument("--base", type=Path, metavar="FILE", help="of an adapter: the model file that it belongs to")
    parser.add_argument("--rope-theta", type=cli.number_in(1e-6, 1e12), metavar="X",
                        help="base of the rotary embedding, for a config.json that names none")
    parser.add_argument("--chat-format", metavar="NAME|FILE", help="instead of that of the chat template: "
                        f"{', '.join(chat_format.NAMED)}, none, or a .json file that scripts/chat_template.py wrote")
    parser.add_argument("--chat-option", action="append", default=[], metavar="KEY=VALUE",
                        help="a variable of the chat template, such as enable_thinking=false; may be given several times")
    parser.add_argument("--strict", action="store_true", help="refuse NaN, infinity and all-zero tensors")
    return parser.parse_args()


def check_output(path: Path, directory: Path) -> None:
    """Refuses to replace a file of the input directory, unless it is an earlier result."""
    if path.is_dir():
        raise FileError(cli.USAGE, f"--output: {escaped(str(path))} is a directory, expected a file name")
    if path.is_file() and path.parent.resolve() == directory.resolve():
        with open(path, "rb") as file:
            earlier_result = file.read(len(MAGIC)) == MAGIC
        if not earlier_result:
            raise FileError(cli.USAGE, f"--output: {escaped(str(path))} is one of the input files. Choose another name")


def check_chat_options(options: argparse.Namespace) -> list[str]:
    """The options of chat_template.py. FileError for one that it would refuse."""
    if options.chat_option and options.chat_format is not None:
        raise FileError(cli.USAGE, "--chat-option: only without --chat-format")
    for text in options.chat_option:
        chat_format.parse_option(text, lambda problem: FileError(cli.USAGE, f"--chat-option: {problem}"))
    return [f"--chat-option={text}" for text in options.chat_option]


def target_of(options: argparse.Namespace) -> Target:
    if options.head is not None and options.quantize is None:
        raise FileError(cli.USAGE, "--head: only with --quantize")
    if options.gptq is not None and options.quantize != gptq.SCHEME:
        raise FileError(cli.USAGE, f"--gptq: only with --quantize {gptq.SCHEME}")
    if options.only and options.quantize is None:
        raise FileError(cli.USAGE, "--only: only with --quantize")
    head = HEADS[options.head or "16"]
    if ("head" in options.only) != (head != "none") and options.only:
        raise FileError(cli.USAGE, "--only: its head goes with --head int8")
    return Target(DTYPE_OPTIONS.get(options.dtype), options.quantize, head, options.only)


def convert_adapter(options: argparse.Namespace, warnings: Warnings) -> int:
    """The directory is an adapter of PEFT's."""
    for name in ("dtype", "quantize", "head", "only", "gptq", "rope_theta"):
        if getattr(options, name):
            raise FileError(cli.USAGE, f"--{name.replace('_', '-')}: not for an adapter, which is stored as it is")
    if options.base is None:
        raise FileError(cli.USAGE, f"--base: needed, because {escaped(str(options.directory))} is an adapter: the model file that it belongs to")
    base = tensor_file.read(options.base, expected="model")
    chat, members = chat_of_adapter(options.directory, base.config, options.chat_format, check_chat_options(options))
    for one in chat.warnings:
        warnings.add(one)
    said = peft_format.convert(options.directory, base, options.output, members, warnings.add)
    warnings.finish()
    print(f"adapter     {said}")
    print(f"file        {escaped(str(options.output))}, {options.output.stat().st_size:,} bytes")
    print(f"chat format: {chat.said}")
    print(f"next        {needs.program('infer_pythia')} --model {cli.pasteable(options.base)} --adapter {cli.pasteable(options.output)} "
          f"{first_prompt(TOKENIZER_TENSOR in base.tensors, 'chat_format' in base.config | members, base.config['model']['vocab_size'])}")
    return cli.OK


def main() -> int:
    options = arguments()
    check_output(options.output, options.directory)
    warnings = Warnings()
    if peft_format.is_adapter(options.directory):
        return convert_adapter(options, warnings)
    if options.base is not None:
        raise FileError(cli.USAGE, f"--base: only for an adapter, and {escaped(str(options.directory))} has no {peft_format.CONFIG}")
    checkpoint = read_checkpoint(options.directory, options.rope_theta, warnings.add)
    if checkpoint.tokenizer is None:
        why = missing_tokenizer(options.directory)
        warnings.add(f"{escaped(str(options.directory))}: no tokenizer.json: the model will only take and print ids"
                     + (f". {why}" if why else ""))
    else:
        for one in left_out(checkpoint.tokenizer, options.directory / TOKENIZER_TENSOR):
            warnings.add(one)
    target, chat_options = target_of(options), check_chat_options(options)
    if target.head != "none":
        checkpoint = with_own_head(checkpoint)
    chat = chat_of(options.directory, options.chat_format, chat_options)
    for one in chat.warnings:
        warnings.add(one)
    file_configuration(checkpoint, options.directory / "config.json", target, chat.members())  # refused before the weights are read
    found = open_weights(options.directory, warnings)
    checkpoint, tensors = match_tensors(checkpoint, found, options.directory, warnings)
    calibration = calibration_of(options.gptq, checkpoint, tensors, options.directory, target) if options.gptq else None
    quantized = write_model(options.output, checkpoint, tensors, target, options.strict, warnings, calibration, chat.members())
    warnings.finish()
    print_summary(checkpoint, tensors, options.directory, options.output, target, quantized, chat)
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
