"""Bad input as one table: what it is, how it is made, which program reads it, and how that program must refuse it.

The numbers B01 to B98 are those of doc/robustness.md, which says where the cases that are not here are tested.
test_hostile.py runs the table. Each case works in an empty directory of its own, next to `base`, which holds small
valid files of every kind.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import checkpoints
import tensor_file
import token_shard
from hostile_weights import HOSTILE_FILES

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "test" / "fixtures" / "golden"
BASE = Path("../base")  # as seen from the directory of a case
MODEL, LLAMA = BASE / "neox.bin", BASE / "llama.bin"
STATE = BASE / "run" / "step_00000004" / "state.bin"
STEPS = 4
OK, INTERNAL, USAGE, BAD_FILE, ENVIRONMENT, RESOURCES = range(6)

Make = Callable[[Path], list[Any]]
Edit = Callable[[bytearray], Any]


@dataclass(frozen=True)
class Case:
    """`make` fills the directory it is given and returns the command line. Every word must be in the error line; where the
    code is OK, in what stderr says."""

    name: str
    make: Make
    code: int
    words: tuple[str, ...]
    without_rights: bool = field(default=False, kw_only=True)  # run by a user who may not read the input


# ---- the valid files -------------------------------------------------------------------------------------------------


def write_shard(path: Path, ids: np.ndarray, vocabulary: int = 64, tokenizer_hash: int = 7) -> Path:
    writer = token_shard.ShardWriter(path, vocabulary, tokenizer_hash)
    writer.write(ids)
    writer.close()
    return path


def make_base(base: Path) -> None:
    """Everything but the finished run, which needs the program."""
    base.mkdir()
    for name, golden in (("neox", "neox-hs32-padded"), ("llama", "llama-hs32-mha"), ("tanh", "neox-tanh-yarn")):
        shutil.copy(GOLDEN / f"{golden}.model.bin", base / f"{name}.bin")
        shutil.copy(GOLDEN / f"{golden}.dump.bin", base / f"{name}.dump.bin")
    (base / "data").mkdir()
    for name, count in (("train_0", 400), ("train_1", 200), ("val_0", 100)):
        write_shard(base / "data" / f"{name}.bin", np.arange(count) * 7 % 64)
    tokenizer = bytes(tensor_file.read(base / "neox.bin").bytes("tokenizer.json"))
    (base / "tokenizer.json").write_bytes(tokenizer)
    (base / "text.txt").write_text("Once upon a time.\n")
    checkpoints.write_checkpoint(base / "hf", checkpoints.LLAMA)
    for scheme in ("int8", "int4", "fp8"):
        done = checkpoints.run_script("convert_hf.py", base / "hf", "-o", base / f"{scheme}.bin", "--quantize", scheme)
        assert done.returncode == OK, done.stderr


def train_options(**changes: Any) -> list[Any]:
    """A run of train_llama on the base files; None leaves an option out."""
    options = {"model": LLAMA, "train": BASE / "data" / "train_*.bin", "val": BASE / "data" / "val_*.bin", "out": "run",
               "steps": STEPS, "micro_batch": 2, "seq_len": 16, "save_every": 2, "warmup_steps": 1, "device": "cpu"}
    chosen = options | changes
    return ["train_llama", *(f"--{name.replace('_', '-')}={value}" for name, value in chosen.items() if value is not None)]


def compare_options(dump: Path | str) -> list[Any]:
    return ["train_llama", "--device=cpu", f"--model={LLAMA}", f"--compare={dump}"]


def infer_options(model: Path | str = MODEL, *more: Any) -> list[Any]:
    return ["infer_pythia", "--device=cpu", f"--model={model}", *(more or ("--prompt-ids=1,2", "--max-tokens=1"))]


# ---- edits of files --------------------------------------------------------------------------------------------------

FIELDS = {"version": (8, "<I"), "byte_order": (12, "<I"), "kind": (16, "<I"), "family": (20, "<I"),
          "file_bytes": (24, "<Q"), "config_bytes": (32, "<Q"), "tensor_count": (40, "<Q"), "table_offset": (48, "<Q"),
          "data_offset": (56, "<Q"), "header_hash": (64, "<Q")}
RECORD_FIELDS = {"name": (0, "256s"), "dtype": (256, "<I"), "rank": (260, "<I"), "size0": (264, "<Q"),
                 "size1": (272, "<Q"), "size7": (320, "<Q"), "offset": (328, "<Q"), "bytes": (336, "<Q")}
SHARD_FIELDS = {"version": (8, "<I"), "dtype": (12, "<I"), "count": (16, "<Q"), "vocab_size": (24, "<Q"),
                "end_of_document_id": (40, "<q"), "data_hash": (48, "<Q"), "header_hash": (56, "<Q")}


def get(data: bytes, name: str) -> int:
    at, kind = FIELDS[name]
    return struct.unpack_from(kind, data, at)[0]


def seal(data: bytearray, data_offset: int) -> None:
    """Makes the header hash right, as an attacker would: what is wrong must be found without its help."""
    struct.pack_into("<Q", data, 64, 0)
    struct.pack_into("<Q", data, 64, xxhash.xxh3_64_intdigest(bytes(data[:data_offset])))


def header(sealed: bool = True, **changes: int) -> Edit:
    """Fields of the header page; the hash is made right again."""
    def edit(data: bytearray) -> None:
        data_offset = get(data, "data_offset")
        for name, value in changes.items():
            struct.pack_into(FIELDS[name][1], data, FIELDS[name][0], value)
        if sealed:
            seal(data, data_offset)
    return edit


def record(index: int, **changes: Any) -> Edit:
    """Fields of one record of the tensor table."""
    def edit(data: bytearray) -> None:
        at = get(data, "table_offset") + index * tensor_file.RECORD.size
        for name, value in changes.items():
            struct.pack_into(RECORD_FIELDS[name][1], data, at + RECORD_FIELDS[name][0], value)
        seal(data, get(data, "data_offset"))
    return edit


def byte(at: int, value: int = 1) -> Edit:
    """One byte of the part before the data, behind the end where `at` is negative."""
    def edit(data: bytearray) -> None:
        data[at if at >= 0 else get(data, "data_offset") + at] = value
        seal(data, get(data, "data_offset"))
    return edit


def shard_header(**changes: int) -> Edit:
    def edit(data: bytearray) -> None:
        for name, value in changes.items():
            struct.pack_into(SHARD_FIELDS[name][1], data, SHARD_FIELDS[name][0], value)
        if "header_hash" not in changes:
            struct.pack_into("<Q", data, 56, xxhash.xxh3_64_intdigest(bytes(data[:56])))
    return edit


def shard_token(index: int, value: int) -> Edit:
    """A token of a u16 shard, with every hash made right."""
    def edit(data: bytearray) -> None:
        struct.pack_into("<H", data, 256 + 2 * index, value)
        shard_header(data_hash=xxhash.xxh3_64_intdigest(bytes(data[256:])))(data)
    return edit


def text_mode_copy(data: bytearray) -> bytes:
    return bytes(data).replace(b"\r\n", b"\n")


def damaged(source: Path, target: Path, edit: Edit) -> None:
    data = bytearray(source.read_bytes())
    result = edit(data)
    target.write_bytes(data if result is None else result)


def raw_config(text: bytes) -> Edit:
    """A model file without tensors whose configuration is any text."""
    def edit(data: bytearray) -> bytearray:
        table = tensor_file.align_up(4096 + len(text), 8)
        end = tensor_file.align_up(table, 4096)
        new = bytearray(end)
        new[:72], new[4096:4096 + len(text)] = data[:72], text
        header(False, family=0, file_bytes=end, config_bytes=len(text), tensor_count=0, table_offset=table,
               data_offset=end)(new)
        seal(new, end)
        return new
    return edit


Tensors = dict[str, np.ndarray | bytes]


def rewrite(source: Path, target: Path, change: Callable[[dict, Tensors], Any], kind: str | None = None) -> None:
    """A file with the content of `source` after change(configuration, tensors): every hash and offset right."""
    old = tensor_file.read(source)
    config, tensors = json.loads(json.dumps(old.config)), {name: old.array(name) for name in old.tensors}
    change(config, tensors)
    own = ("bf16", "u4", "e4m3")  # no types of numpy: who changes such a tensor keeps its type
    names = {np.dtype(code): name for name, code in tensor_file.NUMPY_DTYPES.items() if name not in own}
    with tensor_file.Writer(target, kind or old.kind, config) as writer:
        for name, value in tensors.items():
            dtype, shape = names[np.asarray(value).dtype], np.shape(value)
            if name in old.tensors and old.at(name).dtype in ("u4", "e4m3") and np.asarray(value).dtype == np.uint8:
                dtype = old.at(name).dtype
                shape = (*shape[:-1], 2 * shape[-1]) if dtype == "u4" else shape
            writer.declare(name, dtype, shape)
        for name, value in tensors.items():
            writer.write(name, np.asarray(value))


def text_tensor(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


# ---- model files -----------------------------------------------------------------------------------------------------


def model_bytes(name: str, edit: Edit, *words: str, code: int = BAD_FILE) -> Case:
    def make(here: Path) -> list[Any]:
        damaged(here / MODEL, here / "hostile.bin", edit)
        return infer_options("hostile.bin")
    return Case(name, make, code, ("hostile.bin", *words))


def model_content(name: str, change: Callable[[dict, Tensors], Any], *words: str, code: int = BAD_FILE,
                  source: Path = MODEL, command: Make | None = None) -> Case:
    def make(here: Path) -> list[Any]:
        rewrite(here / source, here / "hostile.bin", change)
        return command(here) if command else infer_options("hostile.bin")
    return Case(name, make, code, ("hostile.bin", *words) if code == BAD_FILE else words)


def model_value(name: str, value: Any, *words: str, number: str = "model") -> Case:
    """A key of the model's configuration, or of its `rope`."""
    def change(config: dict, _: Tensors) -> None:
        place = config["model"]["rope"] if name in config["model"]["rope"] else config["model"]
        assert name in place
        place[name] = value
    return model_content(f"{number} {name} {json.dumps(value)[:24]}", change, *(words or (name,)))


def newer_value(name: str, value: Any) -> Case:
    """A key of the model's configuration that the file of these cases is too old to have."""
    def change(config: dict, _: Tensors) -> None:
        assert name not in config["model"]
        config["model"][name] = value
    return model_content(f"model {name} {json.dumps(value)}", change, name)


def without(*keys: str) -> Callable[[dict, Tensors], None]:
    def change(config: dict, _: Tensors) -> None:
        place = config
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
    return change


EMBEDDING = "gpt_neox.embed_in.weight"


def set_tensor(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict, Tensors], None]:
    def change(_: dict, tensors: Tensors) -> None:
        tensors[name] = value(np.array(tensors.get(name)))
    return change


def with_nan(values: np.ndarray) -> np.ndarray:
    values.reshape(-1)[7] = np.nan
    return values


QUANTIZED = "model.layers.1.mlp.down_proj.weight"


def with_value(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[7] = value
        return values
    return change


def quantized_content(name: str, scheme: str, change: Callable[[dict, Tensors], Any], *words: str) -> Case:
    return model_content(f"{scheme}: {name}", change, *words, source=BASE / f"{scheme}.bin")


def quantization_value(key: str, value: Any) -> Callable[[dict, Tensors], None]:
    return lambda config, _: config["quantization"].update({key: value})


def rename_tensor(old: str, new: str) -> Edit:
    """Another name in the table, hash and all: the file stays valid."""
    def edit(data: bytearray) -> None:
        at = bytes(data).index(old.encode() + b"\0")
        data[at:at + 256] = new.encode().ljust(256, b"\0")
        seal(data, get(data, "data_offset"))
    return edit


def sparse_tokenizer(here: Path) -> list[Any]:
    """A tokenizer of 6 GB, right in every field, in a file that takes no more room on the disk than before."""
    data, size = bytearray((here / MODEL).read_bytes()), 6_000_000_000
    at = get(data, "table_offset") + (get(data, "tensor_count") - 1) * 352
    assert data[at:at + 15] == b"tokenizer.json\0", "the last tensor"
    end = len(data) - struct.unpack_from("<Q", data, at + 336)[0] + size
    for place in (at + 264, at + 336):  # shape and bytes
        struct.pack_into("<Q", data, place, size)
    struct.pack_into("<Q", data, 24, end)
    seal(data, get(data, "data_offset"))
    (here / "hostile.bin").write_bytes(data)
    os.truncate(here / "hostile.bin", end)
    return infer_options("hostile.bin")


def last_byte(data: bytearray) -> None:
    data[-1] ^= 1


MODEL_FILES = [
    model_bytes("B01 no bytes", lambda data: b"", "0 bytes", "download failed"),
    model_bytes("B02 seven bytes", lambda data: data[:7], "truncated", "got 7 bytes"),
    model_bytes("B02 magic alone", lambda data: data[:8], "truncated", "got 8 bytes"),
    model_bytes("B07 git-lfs pointer", lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                "git-lfs pointer", "git lfs pull"),
    model_bytes("B08 web page", lambda data: b"<!DOCTYPE html><html>404</html>", "looks like a web page"),
    model_bytes("B08 error message", lambda data: b'{"error":"Repository not found"}', "error message"),
    model_bytes("other formats: gzip", lambda data: b"\x1f\x8b\x08" + bytes(500), "gzip"),
    model_bytes("other formats: PyTorch", lambda data: b"PK\x03\x04" + bytes(500), "PyTorch", "convert_hf.py"),
    model_bytes("other formats: pickle", lambda data: b"\x80\x02\x8a" + bytes(500), "pickle"),
    model_bytes("other formats: GGUF", lambda data: b"GGUF" + bytes(500), "GGUF", "convert_hf.py"),
    model_bytes("other formats: safetensors", lambda data: checkpoints.safetensors_bytes({}), "safetensors",
                "convert_hf.py"),
    model_bytes("other formats: control characters", lambda data: b"\x1b]0;title\x07" * 40, "magic", "\\x1b"),
    model_bytes("B52 wrong magic", lambda data: b"\x89WEFX" + data[5:], "magic"),
    model_bytes("B52 copied as text", text_mode_copy, "magic", "text-mode copy"),
    model_bytes("B53 magic in the other byte order", lambda data: data[7::-1] + data[8:], "magic", "byte order"),
    model_bytes("B53 byte_order swapped", header(byte_order=0x04030201), "byte_order", "big-endian"),
    model_bytes("B53 byte_order nonsense", header(byte_order=7), "byte_order"),
    model_bytes("B54 version 0", header(version=0), "version: got 0", "damaged"),
    model_bytes("B55 version 2", header(version=2), "version: got 2", "newer tool"),
    model_bytes("B55 version 2^32 - 1", header(version=2**32 - 1), "version", "newer tool"),
    Case("a tokenizer of 6 GB in a sparse file", sparse_tokenizer, BAD_FILE,
         ("hostile.bin", "tokenizer.json", "at most 100000000")),
    model_bytes("B57 cut in the last tensor", lambda data: data[:-1], "truncated"),
    model_bytes("B57 cut to the header page", lambda data: data[:4096], "truncated"),
    model_bytes("B57 as long as claimed, but zeros", lambda data: data[:5000] + bytes(len(data) - 5000), "header_hash"),
    model_bytes("B58 a byte too many", lambda data: data + b"\0", "file_bytes", "1 too many"),
    model_bytes("B58 a claimed byte too many",
                lambda data: [header(file_bytes=len(data) + 1)(data), bytes(data) + b"\0"][1], "file_bytes"),
    model_bytes("B59 header damaged", header(False, kind=9), "header_hash"),
    model_bytes("B60 data damaged", last_byte, "XXH3-64", "tokenizer.json"),
    model_bytes("B61 tensors overlap", record(1, offset=12288), "offset", "input_layernorm"),
    model_bytes("B61 tensor not aligned", record(0, offset=12289), "offset"),
    model_bytes("B61 tensor past the end", record(0, offset=2**40), "offset"),
    model_bytes("B61 offset wraps around", record(0, offset=2**64 - 256), "offset"),
    model_bytes("kind 0", header(kind=0), "kind: got 0"),
    model_bytes("kind 5", header(kind=5), "kind: got 5"),
    model_bytes("kind of an adapter", header(kind=4), "kind", "LoRA adapter", "expected a model"),
    model_bytes("family 4", header(family=4), "family: got 4"),
    model_bytes("family 3 of a gpt_neox", header(family=3), "family: got another", "gpt_neox"),
    model_bytes("family of another model", header(family=1), "family: got llama"),
    model_bytes("config_bytes 2^64 - 1", header(config_bytes=2**64 - 1), "config_bytes"),
    model_bytes("config_bytes over the limit", header(config_bytes=(16 << 20) + 1), "config_bytes"),
    model_bytes("config_bytes beyond the file", header(config_bytes=16 << 20), "table_offset"),
    model_bytes("tensor_count 2^64 - 1", header(tensor_count=2**64 - 1), "tensor_count"),
    model_bytes("tensor_count over the limit", header(tensor_count=65_537), "tensor_count"),
    model_bytes("tensor_count beyond the file", header(tensor_count=65_536), "data_offset"),
    model_bytes("table_offset 0", header(table_offset=0), "table_offset"),
    model_bytes("data_offset 2^63", header(data_offset=2**63), "data_offset"),
    model_bytes("rank 9", record(0, rank=9), "rank: got 9"),
    model_bytes("rank 2^32 - 1", record(0, rank=2**32 - 1), "rank"),
    model_bytes("dtype 11", record(0, dtype=11), "dtype: got 11"),
    model_bytes("B20 shape overflows", record(0, size0=2**62, size1=2**62), "shape", "63 bits"),
    model_bytes("B20 size of 2^64 - 1", record(0, size0=2**64 - 1), "shape"),
    model_bytes("B20 exabytes", record(0, size0=2**40, size1=2**20, bytes=2**61), "ends at byte"),
    model_bytes("B21 bytes and shape differ", record(0, size0=271), "bytes"),
    model_bytes("B22 sizes past the rank", record(0, size7=1), "past the rank"),
    model_bytes("no name", record(0, name=b""), "tensor 0: name"),
    model_bytes("name that is not UTF-8", record(0, name=b"\xff\xfe"), "name", "\\xff"),
    model_bytes("name with an escape sequence", record(0, name=b"\x1b[31m"), "name", "\\x1b"),
    model_bytes("name without its end", record(0, name=b"n" * 256), "name"),
    model_bytes("B13 name twice", rename_tensor("gpt_neox.final_layer_norm.bias", EMBEDDING), EMBEDDING, "twice"),
    model_bytes("gap in the header page", byte(80), "header page", "padding"),
    model_bytes("gap after the table", byte(-1), "tensor table", "padding"),
    model_bytes("B10 configuration is no JSON", raw_config(b"{nonsense}"), "configuration", "not valid JSON"),
    model_bytes("B09 configuration is not UTF-8", raw_config(b'{"\xff":1}'), "configuration", "not valid JSON"),
    model_bytes("B11 configuration with a space", raw_config(b' {"a":1}'), "configuration", "object"),
    model_bytes("B12 configuration nested", raw_config(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), "deeper"),
    model_bytes("B12 objects nested", raw_config(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), "deeper"),
    model_bytes("B12 a megabyte of brackets", raw_config(b'{"a":' + b"[" * 1_000_000), "deeper"),
    model_bytes("B13 key twice", raw_config(b'{"a":1,"a":2}'), "configuration", "'a'", "twice"),
    model_bytes("configuration is empty", raw_config(b""), "configuration", "object"),
    model_bytes("configuration is {}", raw_config(b"{}"), "model", "missing"),
    model_bytes("model is a list", raw_config(b'{"model":[]}'), "model", "object"),
    model_bytes("number out of range", raw_config(b'{"a":1e400}'), "configuration", "not valid JSON"),
    model_bytes("family that is no text", raw_config(b'{"model":{"family":{"a":1}}}'), "family"),
    model_bytes("a hundred thousand objects", raw_config(b'{"a":[' + b"{}," * 100_000 + b"1]}"), "model", "missing"),
    model_value("hidden_size", "64", number="B36"),
    model_value("hidden_size", 64.5, number="B36"),
    model_value("hidden_size", 0, number="B37"),
    model_value("hidden_size", -64, number="B22"),
    model_value("hidden_size", 1e30, number="B22"),
    model_value("hidden_size", 2**64 - 1, number="B22"),
    model_value("num_heads", 0, number="B37"),
    model_value("num_heads", 1024, "gpt_neox", "heads", number="B38"),
    model_value("num_kv_heads", 3, number="B39"),
    model_value("head_dim", 31, "gpt_neox", "head_dim", number="B38"),
    model_value("num_layers", 2**31, number="B48"),
    model_value("num_layers", 1024, "tensors", "1024 layers", number="B48"),
    model_value("num_layers", 4, "missing", number="B25"),
    model_value("vocab_size", 0, number="B49"),
    model_value("vocab_size", 10**9, number="B49"),
    model_value("vocab_size", 1_000_000, "shape", number="B49"),
    model_value("ffn_size", True),
    model_value("max_positions", 0),
    model_value("max_positions", 2**40),
    model_value("norm_eps", 0),
    model_value("norm_eps", None),
    model_value("norm", "batchnorm"),
    model_bytes("B40 family gpt2", raw_config(b'{"model":{"family":"gpt2"}}'), "family", "'gpt2'"),
    model_content("B35 family missing", without("model", "family"), "family"),
    model_value("tied_embeddings", 1),
    model_value("tied_embeddings", True, "untied"),
    model_value("tokenizer_vocab", 273),
    model_value("eos_ids", {"a": 1}, number="B51"),
    model_value("eos_ids", list(range(65)), number="B51"),
    model_value("eos_ids", [272], number="B51"),
    model_value("bos_id", -1),
    model_value("theta", 0, number="B44"),
    model_value("theta", "10000", number="B44"),
    model_value("rotary_dim", 7, number="B47"),
    model_value("rotary_dim", 34, number="B47"),
    model_value("type", "longrope", number="B42"),
    model_value("type", "yarn", "beta_fast: missing", number="B43"),
    newer_value("mlp_bias", True),
    newer_value("activation", "silu"),
    newer_value("activation", "relu"),
    model_value("type", "llama3", "llama3", number="B43"),
    model_content("B35 hidden_size missing", without("model", "hidden_size"), "hidden_size: missing"),
    model_content("B44 rope missing", without("model", "rope"), "rope: missing"),
    model_content("B25 tensor missing", lambda _, tensors: tensors.pop("embed_out.weight"), "embed_out.weight",
                  "missing"),
    model_content("B26 unknown tensor", lambda _, tensors: tensors.update(extra=np.zeros(3, "<f4")), "'extra'",
                  "does not belong"),
    model_content("B27 rows missing", set_tensor(EMBEDDING, lambda values: values[:100]), EMBEDDING, "[100, 64]",
                  "[272, 64]"),
    model_content("B28 transposed", set_tensor(EMBEDDING, lambda values: values.T.copy()), EMBEDDING, "[64, 272]"),
    model_content("B24 parameters of another dtype", set_tensor(EMBEDDING, lambda values: values.astype("<i4")),
                  EMBEDDING, "dtype", "i32", "bf16"),
    model_content("B34 not a number", set_tensor(EMBEDDING, with_nan), EMBEDDING, "not finite"),
    quantized_content("-128", "int8", set_tensor(QUANTIZED, with_value(-128)), QUANTIZED, "element 7", "-127 to 127"),
    quantized_content("NaN", "fp8", set_tensor(QUANTIZED, with_value(0xFF)), QUANTIZED, "element 7", "not NaN"),
    quantized_content("scale NaN", "int8", set_tensor(QUANTIZED + ".scales", with_nan), "above 0"),
    quantized_content("scale 0", "int4", set_tensor(QUANTIZED + ".scales", with_value(0)), "above 0"),
    quantized_content("scale below 0", "fp8", set_tensor(QUANTIZED + ".scales", with_value(-1)), "above 0"),
    quantized_content("zero 16", "int4", set_tensor(QUANTIZED + ".zeros", with_value(16)), "0 to 15"),
    quantized_content("scales missing", "int4", lambda _, tensors: tensors.pop(QUANTIZED + ".scales"), ".scales", "missing"),
    quantized_content("zeros missing", "int4", lambda _, tensors: tensors.pop(QUANTIZED + ".zeros"), ".zeros", "missing"),
    quantized_content("scales of another dtype", "int8",
                      set_tensor(QUANTIZED + ".scales", lambda values: values.astype("<f2")), "got dtype f16, expected f32"),
    quantized_content("fewer scales", "int8", set_tensor(QUANTIZED + ".scales", lambda values: values[:3]), "shape [3]"),
    quantized_content("floats under a scheme", "int8", set_tensor(QUANTIZED, lambda values: values.astype("<f4")),
                      "got dtype f32, expected i8"),
    quantized_content("a scheme of tomorrow", "int4", quantization_value("scheme", "int2"), "scheme: got 'int2'"),
    quantized_content("another group", "int4", quantization_value("group", 64), "group: got 64, expected 128"),
    quantized_content("another scheme", "int8", quantization_value("scheme", "fp8"), "got dtype i8, expected e4m3"),
    quantized_content("an int8 head", "fp8", quantization_value("head", "int8"), "got dtype f32, expected i8"),
    quantized_content("no object", "int8", lambda config, _: config.update(quantization=[]), "expected an object"),
    quantized_content("nothing said", "int8", lambda config, _: config.pop("quantization"), "got dtype i8, expected f32"),
]


# ---- files in each other's place -------------------------------------------------------------------------------------

KINDS = {"a Llama": LLAMA, "a Pythia": MODEL, "a Pythia by tanh": BASE / "tanh.bin", "a training state": STATE, "a dump": BASE / "llama.dump.bin",
         "a shard": BASE / "data" / "train_0.bin", "JSON": BASE / "tokenizer.json",
         "safetensors": BASE / "hf" / "model.safetensors"}
SAYS = {"a Llama": "llama", "a Pythia": "gpt_neox", "a Pythia by tanh": "gpt_neox", "a training state": "training state", "a dump": "reference dump",
        "a shard": "token shard", "JSON": "JSON", "safetensors": "safetensors"}
PLACES: dict[str, tuple[Callable[[Any], list[Any]], str]] = {  # name -> command with the file in that place, who fits
    "infer_pythia --model": (infer_options, "a Pythia or a Llama or a Pythia by tanh"),
    "infer_pythia --compare": (lambda path: infer_options(MODEL, f"--compare={path}"), "a dump"),
    "train_llama --model": (lambda path: train_options(model=path), "a Pythia or a Llama"),
    "train_llama --compare": (lambda path: compare_options(path), "a dump"),
    "train_llama --train": (lambda path: train_options(train=path), "a shard"),
    "train_llama --val": (lambda path: train_options(val=path), "a shard"),
}


def cross_pair(kind: str, place: str) -> Case:
    command, _ = PLACES[place]
    models = ("a Llama", "a Pythia", "a Pythia by tanh")
    number = "B62" if kind in models and place.endswith("--model") else "B63"
    expected = SAYS[kind] if number == "B62" or kind not in models else (
        "tensor file" if "shard" in PLACES[place][1] else "model")
    if "shard" in PLACES[place][1] and kind in ("a training state", "a dump"):
        expected = "tensor file"
    return Case(f"{number} {kind} as {place}", lambda here: command(KINDS[kind]), BAD_FILE,
                (KINDS[kind].name, expected))


def tokenizer_place(kind: str) -> Case:
    return Case(f"B63 {kind} as train_llama --tokenizer", lambda here: train_options(tokenizer=KINDS[kind]), BAD_FILE,
                (KINDS[kind].name,))


CROSS_PAIRS = [cross_pair(kind, place) for place, (_, fits) in PLACES.items() for kind in KINDS
               if kind not in fits.split(" or ")]
CROSS_PAIRS += [tokenizer_place(kind) for kind in KINDS]


# ---- things that are no files ----------------------------------------------------------------------------------------


def symlink_loop(here: Path) -> str:
    (here / "loop").symlink_to("pool")
    (here / "pool").symlink_to("loop")
    return "loop"


def fifo(here: Path) -> str:
    os.mkfifo(here / "fifo")
    return "fifo"


def directory(here: Path) -> str:
    (here / "folder").mkdir()
    return "folder"


def unreadable(here: Path) -> str:
    (here / "secret").write_bytes(b"x")
    (here / "secret").chmod(0)
    return "secret"


def endless(here: Path) -> str:
    (here / "endless").symlink_to("/dev/zero")
    return "endless"


THINGS: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "nothing": (lambda here: "nothing", ("nothing", "No such file")),
    "a directory": (directory, ("folder", "not a regular file")),
    "a FIFO": (fifo, ("fifo", "not a regular file")),
    "/dev/null": (lambda here: "/dev/null", ("/dev/null", "not a regular file")),
    "/dev/zero": (endless, ("endless", "not a regular file")),
    "a symlink loop": (symlink_loop, ("loop", "symbolic links")),
    "a file without rights": (unreadable, ("secret", "Permission denied")),
    "a path of 5,000 characters": (lambda here: "long/" * 1000, ("long/long", "File name too long")),
    "a name that steers terminals": (lambda here: "\x1b[31mred\n", ("\\x1b[31mred\\x0a", "No such file")),
}
FILE_PLACES: dict[str, Callable[[Any], list[Any]]] = {
    "infer_pythia --model": infer_options,
    "infer_pythia --prompt-file": lambda path: infer_options(MODEL, f"--prompt-file={path}"),
    "infer_pythia --perplexity": lambda path: infer_options(MODEL, f"--perplexity={path}"),
    "infer_pythia --compare": lambda path: infer_options(MODEL, f"--compare={path}"),
    "train_llama --model": lambda path: train_options(model=path),
    "train_llama --tokenizer": lambda path: train_options(tokenizer=path),
    "train_llama --compare": lambda path: compare_options(path),
    "train_llama --train": lambda path: train_options(train=path),
}


def no_file(thing: str, place: str) -> Case:
    make, words = THINGS[thing]
    if place == "train_llama --train":  # a pattern: what is no file does not match it
        words = (words[0], "no file matches")
    if thing == "a file without rights" and place == "train_llama --train":
        words = ("secret", "Permission denied")
    return Case(f"B97 {thing} as {place}", lambda here: FILE_PLACES[place](make(here)), BAD_FILE, words,
                without_rights=thing == "a file without rights")


NO_FILES = [no_file(thing, place) for place in FILE_PLACES for thing in THINGS]


# ---- token shards ----------------------------------------------------------------------------------------------------


def shard(name: str, edit: Edit, *words: str, code: int = BAD_FILE, **options: Any) -> Case:
    def make(here: Path) -> list[Any]:
        damaged(here / BASE / "data" / "train_0.bin", here / "hostile.bin", edit)
        return train_options(train="hostile.bin", val=None, **options)
    return Case(name, make, code, ("hostile.bin", *words))


def new_shard(name: str, count: int, vocabulary: int, *words: str, code: int) -> Case:
    def make(here: Path) -> list[Any]:
        write_shard(here / "hostile.bin", np.arange(count) % 30, vocabulary)
        return train_options(train="hostile.bin")
    return Case(name, make, code, ("hostile.bin", *words))


def pattern_without_match(here: Path) -> list[Any]:
    return train_options(train="absent/train_*.bin")


def own_link(here: Path) -> str:
    (here / "tokenizer.json").symlink_to("tokenizer.json")
    return "tokenizer.json"


def beside(name: str, make_tokenizer: Callable[[Path], str], *words: str) -> Case:
    """Shards with something called tokenizer.json in their directory."""
    def make(here: Path) -> list[Any]:
        shutil.copy(here / BASE / "data" / "train_0.bin", here / "train_0.bin")
        (here / make_tokenizer(here)).rename(here / "tokenizer.json")
        return train_options(train="./train_0.bin", val=None)
    return Case(name, make, BAD_FILE, ("tokenizer.json", *words))


SHARDS = [
    shard("B01 shard of no bytes", lambda data: b"", "0 bytes"),
    shard("B07 shard is a git-lfs pointer", lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
    shard("B08 shard is a web page", lambda data: b"<html>", "web page"),
    shard("B52 shard with a wrong magic", lambda data: b"\x89WTOX" + data[5:], "magic"),
    shard("B52 shard copied as text", text_mode_copy, "magic", "text-mode"),
    shard("B53 shard in the other byte order", lambda data: data[7::-1] + data[8:], "magic", "byte order"),
    shard("B54 shard of version 0", shard_header(version=0), "version: got 0"),
    shard("B55 shard of version 4", shard_header(version=4), "version: got 4", "newer tool"),
    shard("B55 shard of text that claims documents", shard_header(version=2, end_of_document_id=3), "truncated", "400 tokens"),
    shard("B55 shard of text that claims more documents than tokens", shard_header(version=2, end_of_document_id=2**62), "documents: got"),
    shard("B64 count beyond the file", shard_header(count=401), "truncated", "401 tokens"),
    shard("B64 count of 2^63", shard_header(count=2**63), "count", "overflow"),
    shard("B64 count of 2^64 - 1", shard_header(count=2**64 - 1), "count"),
    shard("B65 count below the file", shard_header(count=399), "count", "2 too many"),
    shard("B66 no tokens", lambda data: [shard_header(count=0)(data), bytes(data[:256])][1], "count: got 0"),
    new_shard("B67 shorter than a sequence", 16, 64, "16 tokens", "--seq-len", code=BAD_FILE),
    shard("B68 id outside the vocabulary", shard_token(300, 64), "token 300", "got id 64", "at most 63"),
    shard("B68 id 65535", shard_token(0, 65535), "token 0", "65535"),
    shard("B59 shard with a damaged header", shard_header(header_hash=1), "header_hash"),
    shard("B60 shard with damaged tokens", last_byte, "token 399"),
    shard("B60 shard with another valid token", lambda data: data.__setitem__(300, data[300] ^ 1), "data_hash"),
    shard("dtype f32", shard_header(dtype=0), "dtype: got 0"),
    shard("u16 called u32", shard_header(dtype=5), "truncated", "400 tokens"),
    shard("vocabulary 0", shard_header(vocab_size=0), "vocab_size"),
    shard("vocabulary too large for u16", shard_header(vocab_size=65_537), "vocab_size", "u16"),
    shard("end of document outside the vocabulary", shard_header(end_of_document_id=64), "end_of_document_id"),
    shard("end of document -2", shard_header(end_of_document_id=-2), "end_of_document_id"),
    shard("gap in the header", lambda data: data.__setitem__(200, 1), "header: padding"),
    new_shard("B69 vocabulary of another model, u16", 100, 50_304, "--train", "50304", code=USAGE),
    new_shard("B69 vocabulary of another model, u32", 100, 128_256, "--train", "128256", code=USAGE),
    Case("B69 shards of two tokenizers",
         lambda here: [write_shard(here / "hostile.bin", np.arange(100) % 30, 64, 8),
                       train_options(val="hostile.bin")][1], BAD_FILE, ("--val", "hostile.bin", "another tokenizer")),
    Case("B70 no shard matches", pattern_without_match, BAD_FILE, ("absent/train_*.bin", "no file matches")),
    beside("a tokenizer beside the shards that is a symlink to itself", own_link, "symbolic links"),
    beside("a tokenizer beside the shards that is a FIFO", fifo, "not a regular file"),
    beside("a tokenizer beside the shards that is none", lambda here: str(shutil.copy(here / MODEL, here / "copy")),
           "another tokenizer"),
    Case("B70 an empty pattern", lambda here: train_options(train=""), USAGE, ("--train",)),
]


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer(name: str, change: Callable[[dict], Any], *words: str, code: int = BAD_FILE) -> Case:
    """The tokenizer inside a model file; `change` edits it, or returns its whole text."""
    def make(here: Path) -> list[Any]:
        document = json.loads((here / BASE / "tokenizer.json").read_bytes())
        result = change(document)
        text = result if isinstance(result, bytes) else json.dumps(document).encode()
        rewrite(here / MODEL, here / "hostile.bin",
                lambda _, tensors: tensors.update({"tokenizer.json": text_tensor(text)}))
        return infer_options("hostile.bin", "--prompt=Hello", "--max-tokens=1")
    return Case(name, make, code, ("hostile.bin", "tokenizer.json", *words))


def vocabulary(document: dict) -> dict[str, int]:
    return document["model"]["vocab"]


def first_word(document: dict) -> str:
    """A token that is no special token."""
    return next(token for token, number in vocabulary(document).items() if number > 2)


TOKENIZERS = [
    tokenizer("tokenizer of no bytes", lambda _: b"", "not valid JSON"),
    tokenizer("B10 tokenizer is no JSON", lambda _: b"<html>", "not valid JSON"),
    tokenizer("B09 tokenizer is not UTF-8", lambda _: b'{"model":"\xff"}', "not valid JSON"),
    tokenizer("B12 tokenizer nested", lambda _: b"[" * 10_000, "deeper"),
    tokenizer("tokenizer is a list", lambda _: b"[]", "object"),
    tokenizer("tokenizer is {}", lambda _: b"{}", "model"),
    tokenizer("B75 merge of an unknown token", lambda doc: doc["model"].update(merges=["a \u0416"]), "merges", "not in"),
    tokenizer("B75 merge without a space", lambda doc: doc["model"].update(merges=["ab"]), "merges"),
    tokenizer("B75 merge of three", lambda doc: doc["model"].update(merges=[["a", "b", "c"]]), "merges"),
    tokenizer("B75 merges are text", lambda doc: doc["model"].update(merges="a b"), "merges", "list"),
    tokenizer("B76 id twice", lambda doc: vocabulary(doc).update({first_word(doc): 5, "\u0416": 5}), "id 5"),
    tokenizer("B77 hole in the ids", lambda doc: vocabulary(doc).update({"\u0416": 270}), "without holes"),
    tokenizer("B78 id of 2^31", lambda doc: vocabulary(doc).update({"\u0416": 2**31}), str(2**31)),
    tokenizer("B78 id of -1", lambda doc: vocabulary(doc).update({"\u0416": -1}), "-1"),
    tokenizer("B78 id of 1e30", lambda doc: vocabulary(doc).update({"\u0416": 1e30}), "1e+30"),
    tokenizer("B78 id is text", lambda doc: vocabulary(doc).update({"\u0416": "7"}), "token id"),
    tokenizer("B79 merges at random", lambda doc: doc["model"].update(dropout=0.5), "model.dropout"),
    tokenizer("B80 a byte without a token", lambda doc: [vocabulary(doc).update({"\u0416": vocabulary(doc).pop("a")}),
                                                         doc["model"].update(merges=[])][0], "0x61"),
    tokenizer("B81 normalizer", lambda doc: doc.update(normalizer={"type": "Lowercase"}), "normalizer", "Lowercase"),
    tokenizer("B81 pre-tokenizer", lambda doc: doc.update(pre_tokenizer={"type": "Metaspace"}), "pre_tokenizer",
              "Metaspace"),
    tokenizer("B81 pattern", lambda doc: doc.update(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "(a)\\1"}, "behavior": "Isolated", "invert": False}), "pattern"),
    tokenizer("B81 decoder", lambda doc: doc.update(decoder={"type": "WordPiece"}), "decoder", "WordPiece"),
    tokenizer("B81 model", lambda doc: doc["model"].update(type="Unigram"), "model.type", "Unigram"),
    tokenizer("B81 a chain of normalizers", lambda doc: doc.update(normalizer=[]), "normalizer", "object"),
    tokenizer("added token without an id", lambda doc: doc.update(added_tokens=[{"content": "x"}]), "added_tokens[0].id"),
    tokenizer("added token beyond the ids", lambda doc: doc["added_tokens"].append({"id": 999_999, "content": "\u0416"}),
              "without holes"),
    tokenizer("added tokens are no objects", lambda doc: doc.update(added_tokens=[1, 2]), "added_tokens[0]"),
    tokenizer("added token twice", lambda doc: doc["added_tokens"].append(doc["added_tokens"][0]), "once"),
    tokenizer("B82 more tokens than the model", lambda doc: vocabulary(doc).update(
        {"<|endoftext|>": 256} | {chr(0x416 + i): 257 + i for i in range(16)}), "273 tokens", "272"),
    model_content("tokenizer that is no text", lambda _, tensors: tensors.update(
        {"tokenizer.json": np.zeros((2, 3), "<f4")}), "tokenizer.json", "u8"),
]


# ---- reference dumps -------------------------------------------------------------------------------------------------


def dump(name: str, change: Callable[[dict, Tensors], Any], *words: str, family: str = "llama", code: int = BAD_FILE,
         edit: Edit | None = None) -> Case:
    """A dump of other content, compared; `edit` changes its bytes afterwards."""
    def command(here: Path) -> list[Any]:
        if edit is not None:
            damaged(here / "hostile.bin", here / "hostile.bin", edit)
        if family == "llama":
            return compare_options("hostile.bin")
        return infer_options(MODEL, "--compare=hostile.bin")
    return model_content(name, change, *words, code=code, source=BASE / f"{family}.dump.bin", command=command)


def ids(values: Any) -> np.ndarray:
    return np.array(values, "<i4")


def set_adamw(**values: Any) -> Callable[[dict, Tensors], None]:
    def change(config: dict, _: Tensors) -> None:
        config["dump"]["adamw"].update(values)
    return change


def both_inputs(shape: tuple[int, ...]) -> Callable[[dict, Tensors], None]:
    def change(_: dict, tensors: Tensors) -> None:
        tensors.update(input_ids=np.zeros(shape, "<i4"), labels=np.zeros(shape, "<i4"))
    return change


DUMPS = [
    case
    for family in ("llama", "neox")
    for case in [
        dump(f"{family} dump without inputs", lambda _, t: t.pop("input_ids"), "input_ids", "missing", family=family),
        dump(f"{family} dump without labels", lambda _, t: t.pop("labels"), "labels", "missing", family=family),
        dump(f"{family} dump with flat inputs", both_inputs((30,)), "input_ids", "[B, T]", family=family),
        dump(f"{family} dump without rows", both_inputs((0, 15)), "input_ids", family=family),
        dump(f"{family} dump without columns", both_inputs((2, 0)), "input_ids", family=family),
        dump(f"{family} dump of 2^61 empty rows", both_inputs((0, 0)), "input_ids", family=family,
             edit=lambda data: [record(i, size0=2**61)(data) for i in (0, 1)] and None),
        dump(f"{family} dump of empty rows of 2^61", both_inputs((0, 0)), "input_ids", family=family,
             edit=lambda data: [record(i, size1=2**61)(data) for i in (0, 1)] and None),
        dump(f"{family} dump of long sequences", both_inputs((1, 5000)), "input_ids", "5000", family=family),
        dump(f"B68 {family} dump with an id outside", set_tensor("input_ids", lambda v: ids(v) + 5000), "input_ids",
             "vocabulary", family=family),
        dump(f"B68 {family} dump with a label outside", set_tensor("labels", lambda v: ids(v) * 0 - 1), "labels",
             "vocabulary", family=family),
        dump(f"{family} dump that counts no label", set_tensor("labels", lambda v: ids(v) * 0 - 100), "labels",
             family=family),
        dump(f"{family} dump with inputs of another dtype", set_tensor("input_ids", lambda v: v.astype("<i8")),
             "input_ids", "i64", family=family),
        dump(f"{family} dump with activations of another dtype",
             set_tensor("act.logits", lambda v: v.astype("<i4")), "act.logits", "i32", family=family),
        dump(f"{family} dump of an unknown activation",
             lambda _, t: t.update({"act.layers.99.q": np.zeros(4, "<f4")}), "1 failed", family=family, code=INTERNAL),
    ]
] + [
    dump("llama dump that says that it is in fp8", lambda config, _: config["dump"].update(fp8=[]), "dump.fp8", "--precision fp8"),
    dump("llama dump of an unknown gradient", lambda _, t: t.update({"grad.nothing": np.zeros(4, "<f4")}), "1 failed",
         code=INTERNAL),
    dump("llama dump of a parameter that is none", lambda _, t: t.update({"adamw.param.x": np.zeros(4, "<f4")}),
         "1 failed", code=INTERNAL),
    dump("llama dump of a gradient of another shape",
         set_tensor("grad.model.norm.weight", lambda v: v[:3]), "1 failed", code=INTERNAL),
    dump("llama dump of steps without settings", without("dump", "adamw"), "adamw"),
    dump("llama dump without its description", without("dump"), "dump"),
    dump("llama dump of no steps", set_adamw(steps=0), "steps"),
    dump("llama dump of 10^18 steps", set_adamw(steps=10**18), "steps"),
    dump("llama dump of more steps than losses", set_adamw(steps=100_000), "steps"),
    dump("llama dump of a rate that is text", set_adamw(learning_rate="fast"), "learning_rate"),
    dump("neox dump of text of another dtype", set_tensor("greedy.ids", lambda v: v.astype("<f4")), "greedy.ids", "f32",
         family="neox"),
    dump("neox dump of text without a prompt", set_tensor("greedy.prompt_ids", lambda v: v[:0]), "greedy",
         family="neox"),
    dump("neox dump of text beyond the context", set_tensor("greedy.ids", lambda v: np.zeros(500, "<i4")), "greedy",
         family="neox"),
    dump("neox dump with a prompt outside", set_tensor("greedy.prompt_ids", lambda v: ids(v) * 0 - 5), "greedy.prompt_ids",
         "vocabulary", family="neox"),
]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def copy_run(here: Path) -> Path:
    """The finished run with its newest checkpoint alone; that checkpoint."""
    shutil.copytree(here / BASE / "run", here / "run")
    for other in (here / "run").glob("step_*"):
        if other.name != f"step_{STEPS:08d}":
            shutil.rmtree(other)
    return here / "run" / f"step_{STEPS:08d}"


def checkpoint(name: str, change: Callable[[Path], Any], *words: str, code: int = BAD_FILE, **options: Any) -> Case:
    """A run that must go on from a checkpoint that `change` has spoilt."""
    def make(here: Path) -> list[Any]:
        change(copy_run(here))
        return train_options(**({"resume": "must"} | options))
    return Case(name, make, code, words)


def edit_json(path: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def manifest(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    return lambda step: edit_json(step / "manifest.json", change)


def forge(step: Path, change: Callable[[dict, Tensors], Any], name: str = "state.bin") -> None:
    """Other content in a file of a checkpoint, with a manifest that agrees with it in every hash."""
    rewrite(step / name, step / "new.bin", change)
    (step / "new.bin").replace(step / name)
    file = tensor_file.read(step / name)
    training = file.config.get("training", {})

    def describe(value: dict) -> None:
        value.update({key: training[key] for key in ("step", "updates", "windows") if key in training})
        entry = next(entry for entry in value["files"] if entry["name"] == name)
        entry["bytes"] = (step / name).stat().st_size
        entry["tensors"] = [{"name": tensor.name, "bytes": tensor.bytes, "xxh3": f"{tensor.hash:016x}"}
                            for tensor in file.tensors.values()]
    edit_json(step / "manifest.json", describe)


def forged(**values: Any) -> Callable[[Path], None]:
    return lambda step: forge(step, lambda config, _: config["training"].update(values))


def set_state(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda step: forge(step, set_tensor(name, value))


def far_future(step: Path) -> None:
    """A checkpoint of step 10^15 - 1 that is right in itself."""
    number = 10**15 - 1
    forge(step, lambda config, _: [config["training"].update(step=number, updates=number),
                                   config["run"].update(steps=1)])
    step.rename(step.with_name(f"step_{number}"))


def replace_by(make: Callable[[Path], str], name: str) -> Callable[[Path], None]:
    """Something that is no file in the place of a file of the checkpoint."""
    def change(step: Path) -> None:
        (step / name).unlink()
        (step / make(step)).rename(step / name)
    return change


def self_link(step: Path) -> None:
    shutil.rmtree(step)
    step.symlink_to(step.name)


def step_is_a_file(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("x")


def put_there(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else in the place of a file of the run directory."""
    def change(step: Path) -> None:
        (step.parent / name).unlink()
        make(step.parent / name)
    return change


MOMENT = "moment1.model.norm.weight"
CHECKPOINTS = [
    checkpoint("B89 manifest missing", lambda step: (step / "manifest.json").unlink(), "manifest.json", "No such file"),
    checkpoint("B89 manifest empty", lambda step: (step / "manifest.json").write_text(""), "manifest.json", "JSON"),
    checkpoint("B89 manifest is a list", lambda step: (step / "manifest.json").write_text("[]"), "manifest.json", "files"),
    checkpoint("B89 manifest nested", lambda step: (step / "manifest.json").write_text("[" * 10_000), "deeper"),
    checkpoint("B89 manifest is a FIFO", replace_by(fifo, "manifest.json"), "manifest.json", "not a regular file"),
    checkpoint("B90 file absent", lambda step: (step / "state.bin").unlink(), "state.bin", "No such file"),
    checkpoint("B90 another file listed", manifest(lambda m: m["files"][0].update(name="other.bin")), "other.bin"),
    checkpoint("B90 a path listed", manifest(lambda m: m["files"][0].update(name="../model.bin")), "../model.bin"),
    checkpoint("B90 files are numbers", manifest(lambda m: m.update(files=[1, 2])), "files"),
    checkpoint("B90 tensors are numbers", manifest(lambda m: m["files"][1].update(tensors=[1])), "tensors"),
    checkpoint("B90 bytes are text", manifest(lambda m: m["files"][1].update(bytes="1")), "bytes"),
    checkpoint("B91 another world size", manifest(lambda m: m.update(world_size=8)), "world_size"),
    checkpoint("B92 another configuration", manifest(lambda m: m.update(config_hash="0" * 16)), "config_hash"),
    checkpoint("B92 other settings", lambda step: None, "--lr", code=USAGE, lr=0.5),
    checkpoint("B92 fewer steps", lambda step: None, "--steps", code=USAGE, steps=STEPS - 1),
    checkpoint("B92 another model", lambda step: None, "--config or --model", code=USAGE, model=None, config="tiny"),
    checkpoint("B71 one of the shards is missing", lambda step: None, "--train", "now 1 shard", "then 2",
               train=BASE / "data" / "train_0.bin"),
    checkpoint("B72 shards of other content", lambda step: [
        write_shard(step.parents[1] / f"train_{i}.bin", np.arange(count) * 5 % 64) for i, count in ((0, 400), (1, 200))],
        "--train", "shard 1", "other content", train="./train_*.bin"),
    checkpoint("B93 a save that was interrupted", lambda step: (step.parent / "step_00000009.tmp").mkdir(), "removing",
               "step_00000009.tmp", code=OK),
    checkpoint("B94 NaN in the optimizer", set_state(MOMENT, with_nan), MOMENT, "not finite"),
    checkpoint("moment of another shape", set_state(MOMENT, lambda values: values[:5]), MOMENT, "shape"),
    checkpoint("moment missing", lambda step: forge(step, lambda _, tensors: tensors.pop(MOMENT)), MOMENT, "missing"),
    checkpoint("moment of another dtype", set_state(MOMENT, lambda values: values.astype("<i4")), MOMENT, "dtype"),
    checkpoint("B95 step is a file", step_is_a_file, "step_00000004", "not a directory"),
    checkpoint("B95 step is a symlink loop", self_link, "step_00000004", "symbolic links"),
    checkpoint("B95 step beyond 64 bits", lambda step: step.rename(step.with_name("step_" + "9" * 20)), "none of its"),
    checkpoint("B95 step renamed", lambda step: step.rename(step.with_name("step_00000009")), "step", "4", "9"),
    checkpoint("B95 negative step", lambda step: step.rename(step.with_name("step_-0000001")), "none of its"),
    checkpoint("no checkpoint at all", shutil.rmtree, "holds no checkpoint"),
    checkpoint("step beyond its run", far_future, "step", "999999999999999"),
    checkpoint("observations without end", lambda step: forge(
        step, lambda config, _: config["training"]["spikes"].update(observed=2**63 - 1)), "observed"),
    checkpoint("windows without end", forged(windows=2**63 - 1), "windows"),
    checkpoint("micro-steps without end", forged(micro_steps=2**63 - 1), "micro_steps"),
    checkpoint("steps without end", forged(step=2**63 - 1), "step"),
    checkpoint("skipped steps without end", forged(skipped=2**63 - 1), "skipped"),
    checkpoint("the log is a link", put_there("log.jsonl", lambda path: path.symlink_to("../elsewhere")), "symbolic link",
               "without a log", code=OK),
    checkpoint("the log is a FIFO", put_there("log.jsonl", os.mkfifo), "regular file", "without a log", code=OK),
    checkpoint("the lock is a FIFO", put_there("lock", os.mkfifo), "--out", "lock", "regular file", code=USAGE),
    checkpoint("the lock is a link", put_there("lock", lambda path: path.symlink_to("../elsewhere")), "--out", "lock",
               "symbolic link", code=USAGE),
    checkpoint("began from another model", lambda step: forge(
        step, lambda config, _: config["run"].update(began_from="0" * 16)), "--model", "began from", code=USAGE),
    checkpoint("the beginning is a number", lambda step: forge(
        step, lambda config, _: config["run"].update(began_from=7)), "began_from"),
    checkpoint("the best is a list", forged(best=[]), "best"),
    checkpoint("the best is a later step", forged(best={"step": STEPS + 1, "val_loss": 1}), "step"),
    checkpoint("variance below zero", lambda step: forge(
        step, lambda config, _: config["training"]["spikes"].update(loss_variance=-1)), "spikes", "variance"),
    checkpoint("step below zero in the state", forged(step=-1), "step"),
    checkpoint("more updates than steps", forged(updates=STEPS + 1), "updates"),
    checkpoint("windows are text", forged(windows="4"), "windows"),
    checkpoint("loss is text", forged(loss="nan"), "loss"),
    checkpoint("spikes missing", lambda step: forge(step, without("training", "spikes")), "spikes"),
    checkpoint("state without its run", lambda step: forge(step, without("run")), "run"),
    checkpoint("settings are a list", lambda step: forge(step, lambda c, _: c["run"].update(settings=[])), "settings"),
    checkpoint("state of another model",
               lambda step: forge(step, lambda c, _: c["model"].update(norm_eps=0.5)), "model"),
    checkpoint("data are a number", lambda step: forge(step, lambda c, _: c["run"].update(data=7)), "--train"),
    checkpoint("a state as model", lambda step: shutil.copy(step / "state.bin", step / "model.bin"), "kind",
               "training state"),
    checkpoint("a Pythia by tanh as model", lambda step: shutil.copy(step / "../.." / KINDS["a Pythia by tanh"], step / "model.bin"), "gpt_neox"),
]


# ---- command line ----------------------------------------------------------------------------------------------------


def train_usage(arguments: str, *words: str) -> Case:
    return Case(f"B96 train_llama {arguments[:40]}", lambda here: [*train_options(), *arguments.split()], USAGE, words)


def infer_usage(arguments: str, *words: str) -> Case:
    return Case(f"B96 infer_pythia {arguments[:40]}", lambda here: [*infer_options(), *arguments.split()], USAGE, words)


def output(name: str, out: Callable[[Path], Any], *words: str, without_rights: bool = False) -> Case:
    return Case(f"B97 --out {name}", lambda here: train_options(out=out(here)), USAGE, ("--out", *words),
                without_rights=without_rights)


def not_writable(here: Path) -> str:
    (here / "locked").mkdir(mode=0o555)
    return "locked/run"


def a_file(here: Path) -> str:
    (here / "file").write_text("x")
    return "file"


COMMAND_LINES = [
    train_usage("--learning-rate 1", "--learning-rate"),
    train_usage("--microbatch 3", "--microbatch", "did you mean --micro-batch"),
    train_usage("--lr", "--lr", "value missing"),
    train_usage("--lr abc", "--lr", "'abc'", "0 to 10"),
    train_usage("--lr 1e400", "--lr", "'1e400'"),
    train_usage("--lr nan", "--lr", "'nan'"),
    train_usage("--lr 0x1p3", "--lr", "'0x1p3'"),
    train_usage("--lr 1 --lr 2", "--lr", "2 times"),
    train_usage("--eps 0", "--eps", "'0'"),
    train_usage("--keep 1", "--keep", "'1'", "2"),
    train_usage("--seed -1", "--seed", "'-1'"),
    train_usage("--seed 9223372036854775808", "--seed", "9223372036854775808"),
    train_usage("--batch-tokens 33", "--batch-tokens", "33", "32"),
    train_usage("--virtual-ranks 0", "--virtual-ranks", "'0'"),
    train_usage("--virtual-ranks 3 --batch-tokens 128", "--virtual-ranks", "got 3", "divisor"),
    train_usage("--val-every 5x", "--val-every", "'5x'"),
    train_usage("--config tiny", "--config", "--model"),
    train_usage("--schedule cosin", "--schedule", "'cosin'", "cosine"),
    train_usage("--debug-inject nan@step=", "--debug-inject", "nan@step=N"),
    train_usage("--dry-run=yes", "--dry-run"),
    train_usage("stray", "'stray'"),
    train_usage("--vocab-size 64", "--vocab-size", "--config"),
    train_usage("--eval --bench", "only one"),
    train_usage("--gpu-memory 1GB", "--gpu-memory", "--dry-run"),
    infer_usage("--promt x", "'--promt'", "did you mean --prompt"),
    infer_usage("--top-p 1.5", "--top-p", "'1.5'", "0 to 1"),
    infer_usage("--temperature -1", "--temperature", "'-1'"),
    infer_usage("--prompt-ids 3", "--prompt-ids", "2 times"),
    infer_usage("--bench", "--prompt-ids", "--bench", "only one"),
    infer_usage("--context 97", "--context", "97", "96"),
    infer_usage("--context 1", "context of 1"),
    infer_usage("--stride 3", "--stride", "--perplexity"),
    Case("B96 an id outside the vocabulary", lambda here: infer_options(MODEL, "--prompt-ids=1,272"), USAGE,
         ("--prompt-ids", "'272'", "271")),
    Case("B96 an id of 2^32", lambda here: infer_options(MODEL, "--prompt-ids=4294967296"), USAGE, ("--prompt-ids",)),
    Case("B96 an empty prompt", lambda here: infer_options(MODEL, "--prompt-ids="), USAGE, ("--prompt-ids",)),
    Case("B96 no option at all", lambda here: ["train_llama"], USAGE, ("--config", "--model")),
    output("is where the shards are", lambda here: BASE / "data", "input files"),
    output("is where the model is", lambda here: BASE, "input files"),
    output("is a file", a_file, "file"),
    output("is below a file", lambda here: a_file(here) + "/run", "file/run"),
    output("is a symlink loop", symlink_loop, "loop"),
    output("has 5,000 characters", lambda here: "long/" * 1000, "long/long"),
    output("has a name too long", lambda here: "x" * 300, "xxx"),
    output("may not be written", not_writable, "locked/run", "Permission denied", without_rights=True),
    output("is /dev/null", lambda here: "/dev/null", "/dev/null"),
]


# ---- text ------------------------------------------------------------------------------------------------------------


def prompt_text(name: str, text: bytes, *words: str, code: int = USAGE) -> Case:
    def make(here: Path) -> list[Any]:
        (here / "text.txt").write_bytes(text)
        return infer_options(MODEL, "--prompt-file=text.txt")
    return Case(name, make, code, words)


TEXTS = [
    prompt_text("B84 a word of a megabyte", b"a" * 1_000_000, "prompt", "tokens", "context of 96"),
    prompt_text("B85 a million spaces", b" " * 1_000_000, "prompt", "tokens", "context of 96"),
    prompt_text("B83 a million bytes that are not UTF-8", b"\xff" * 1_000_000, "prompt", "tokens"),
    prompt_text("B86 special tokens by the thousand", b"<|endoftext|>" * 20_000, "prompt", "tokens"),
    prompt_text("B88 a prompt longer than the context", b"a b c " * 100, "prompt", "context of 96", "at most 95"),
    Case("empty text to score", lambda here: [(here / "empty").touch(), infer_options(MODEL, "--perplexity=empty")][1],
         BAD_FILE, ("empty",)),
]


# ---- scripts ---------------------------------------------------------------------------------------------------------


def convert(name: str, change: Callable[[Path], Any], *words: str, code: int = BAD_FILE, **keys: Any) -> Case:
    """convert_hf.py on a copy of a valid Hugging Face directory that `change` has spoilt."""
    def make(here: Path) -> list[Any]:
        shutil.copytree(here / BASE / "hf", here / "hf")
        change(here / "hf")
        return ["convert_hf.py", "hf", "-o", keys.get("output", "out.bin")]
    return Case(name, make, code, words)


def in_place_of(name: str, make: Callable[[Path], str]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / make(folder)).rename(folder / name)
    return change


def copy_over(name: str, kind: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(folder.parent / KINDS[kind], folder / name)


SCRIPTS = [
    case
    for name in ("config.json", "model.safetensors", "tokenizer.json")
    for case in [
        convert(f"B97 convert_hf.py: {name} is a FIFO", in_place_of(name, fifo), name, "not a regular file"),
        convert(f"B97 convert_hf.py: {name} is a directory", in_place_of(name, directory), name),
        convert(f"B97 convert_hf.py: {name} is /dev/zero", in_place_of(name, endless), name),
    ]
] + [
    convert("B63 convert_hf.py: a model file as weights", copy_over("model.safetensors", "a Llama"), "model.safetensors"),
    convert("B63 convert_hf.py: a shard as weights", copy_over("model.safetensors", "a shard"), "model.safetensors"),
    convert("B63 convert_hf.py: a shard as config.json", copy_over("config.json", "a shard"), "config.json",
            "token shard"),
    convert("B63 convert_hf.py: weights as tokenizer.json", copy_over("tokenizer.json", "safetensors"), "tokenizer.json"),
    convert("B97 convert_hf.py: output is an input", lambda folder: None, "--output", code=USAGE,
            output="hf/model.safetensors"),
    convert("B97 convert_hf.py: output is config.json", lambda folder: None, "--output", code=USAGE,
            output="hf/config.json"),
    convert("B97 convert_hf.py: output below a file", lambda folder: None, "config.json/out.bin", code=ENVIRONMENT,
            output="hf/config.json/out.bin"),
    convert("B97 convert_hf.py: output of 5,000 characters", lambda folder: None, "long/long", code=ENVIRONMENT,
            output="long/" * 1000),
    Case("B97 convert_hf.py: no directory", lambda here: ["convert_hf.py", "absent", "-o", "out.bin"], BAD_FILE,
         ("absent", "no such directory")),
    Case("B63 export_hf.py: a shard", lambda here: ["export_hf.py", KINDS["a shard"], "-o", "out"], BAD_FILE,
         ("train_0.bin", "token shard")),
    Case("B63 export_hf.py: a training state", lambda here: ["export_hf.py", STATE, "-o", "out"], BAD_FILE,
         ("state.bin", "training state")),
    Case("B97 export_hf.py: a FIFO", lambda here: ["export_hf.py", fifo(here), "-o", "out"], BAD_FILE,
         ("fifo", "not a regular file")),
    Case("B63 tensor_file.py: a shard", lambda here: ["tensor_file.py", KINDS["a shard"]], BAD_FILE,
         ("train_0.bin", "token shard")),
    Case("B97 tensor_file.py: a FIFO", lambda here: ["tensor_file.py", fifo(here)], BAD_FILE,
         ("fifo", "not a regular file")),
    Case("B97 prepare_data.py: a FIFO", lambda here: [
        "prepare_data.py", fifo(here), "--tokenizer", BASE / "tokenizer.json", "-o", "out"], BAD_FILE,
         ("fifo", "not a file")),
    Case("B97 prepare_data.py: tokenizer is a FIFO", lambda here: [
        "prepare_data.py", BASE / "text.txt", "--tokenizer", fifo(here), "-o", "out"], BAD_FILE,
         ("fifo", "not a regular file")),
    Case("B97 plot_log.py: a FIFO", lambda here: ["plot_log.py", fifo(here), "-o", "out.png"], BAD_FILE,
         ("fifo", "not a regular file")),
]


# ---- Hugging Face directories ----------------------------------------------------------------------------------------


def weights_file(name: str) -> Case:
    content, words = HOSTILE_FILES[name]
    number, what = name.split(" ", 1) if name.startswith("B") else ("", name)
    return convert(f"{number} convert_hf.py: {what}".strip(),
                   lambda folder: (folder / "model.safetensors").write_bytes(content), "model.safetensors", *words)


def weights(name: str, change: Callable[[dict[str, Any]], Any], *words: str, code: int = BAD_FILE) -> Case:
    """Other tensors than the configuration asks for."""
    def spoil(folder: Path) -> None:
        tensors = checkpoints.weights_of(checkpoints.LLAMA)
        change(tensors)
        checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    return convert(name, spoil, *words, code=code)


def shards(name: str, change: Callable[[Path, dict[str, Any]], Any], *words: str) -> Case:
    """The weights in two files with an index that `change` edits, or the files beside it."""
    def spoil(folder: Path) -> None:
        tensors = checkpoints.weights_of(checkpoints.LLAMA)
        names = list(tensors)
        parts = {f"model-{i}.safetensors": {key: tensors[key] for key in names[i::2]} for i in (0, 1)}
        checkpoints.write_shards(folder, parts)
        index = folder / "model.safetensors.index.json"
        value = json.loads(index.read_text())
        change(folder, value["weight_map"])
        index.write_text(json.dumps(value))
    return convert(name, spoil, *words)


def config(name: str, changes: dict[str, Any], *words: str, base: dict[str, Any] = checkpoints.LLAMA,
           without_keys: tuple[str, ...] = (), code: int = BAD_FILE) -> Case:
    def spoil(folder: Path) -> None:
        value = {key: member for key, member in (base | changes).items() if key not in without_keys}
        checkpoints.write_checkpoint(folder, base)
        (folder / "config.json").write_text(json.dumps(value))
    return convert(name, spoil, *(("config.json", *words) if code == BAD_FILE else words), code=code)


def hub_tokenizer(name: str, change: Callable[[dict], Any], *words: str, code: int = BAD_FILE) -> Case:
    def spoil(folder: Path) -> None:
        value = checkpoints.tokenizer_of(20)
        change(value)
        (folder / "tokenizer.json").write_text(json.dumps(value))
    return convert(name, spoil, *words, code=code)


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
NEOX_HF = checkpoints.GPT_NEOX

HUB = [
    *map(weights_file, HOSTILE_FILES),
    weights("B24 convert_hf.py: F64 weights that no F32 holds", lambda w: w.update({NORM: ("F64", w[NORM].astype("<f8") * 1e300)}), NORM,
            "float32"),
    weights("B24 convert_hf.py: I8 weights", lambda w: w.update({NORM: ("I8", w[NORM])}), NORM, "I8", "BF16"),
    weights("B25 convert_hf.py: tensor missing", lambda w: w.pop(UP), UP, "missing"),
    weights("B26 convert_hf.py: unknown tensor", lambda w: w.update(extra=np.ones(3, "<f4")), "'extra'", "left out", code=OK),
    weights("B26 convert_hf.py: known buffer", lambda w: w.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, "<f4")}), code=OK),
    weights("B27 convert_hf.py: wrong shape", lambda w: w.update({NORM: np.ones(17, "<f4")}), NORM, "[17]", "[16]"),
    weights("B28 convert_hf.py: transposed", lambda w: w.update({UP: w[UP].T.copy()}), UP, "transposed"),
    weights("B34 convert_hf.py: not a number", lambda w: w.update({NORM: with_nan(w[NORM])}), NORM, "NaN", code=OK),
    weights("B34 convert_hf.py: all zero", lambda w: w.update({NORM: w[NORM] * 0}), NORM, "zero", code=OK),
    shards("B14 convert_hf.py: a tensor in two files", lambda folder, names: checkpoints.write_safetensors(
        folder / "model-0.safetensors", {name: values + 1 for name, values in checkpoints.weights_of(checkpoints.LLAMA).items()}),
           "model-1.safetensors", "is also in", "with other values"),
    shards("B31 convert_hf.py: a file missing", lambda folder, names: (folder / "model-1.safetensors").unlink(),
           "index.json", "model-1.safetensors", "not there"),
    shards("B32 convert_hf.py: a path upwards", lambda folder, names: names.update({NORM: "../model-1.safetensors"}),
           "weight_map", NORM, "../model-1"),
    shards("B32 convert_hf.py: an absolute path", lambda folder, names: names.update({NORM: "/dev/zero.safetensors"}),
           "weight_map", "/dev/zero"),
    shards("B33 convert_hf.py: a name that is an object", lambda folder, names: names.update({NORM: {"a": 1}}),
           "weight_map", NORM, "object"),
    config("B35 convert_hf.py: hidden_size missing", {}, "hidden_size", "nothing", without_keys=("hidden_size",)),
    config("B36 convert_hf.py: hidden_size is text", {"hidden_size": "4096"}, "hidden_size", "'4096'"),
    config("B37 convert_hf.py: no heads", {"num_attention_heads": 0}, "num_attention_heads"),
    config("B38 convert_hf.py: heads do not divide", {"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size",
           "multiple"),
    config("B39 convert_hf.py: K/V heads do not divide", {"num_key_value_heads": 3}, "num_key_value_heads", "divisor"),
    config("B40 convert_hf.py: gpt2", {"model_type": "gpt2"}, "model_type", "'gpt2'", "gpt_neox"),
    config("B40 convert_hf.py: mixtral", {"model_type": "mixtral"}, "model_type", "'mixtral'", "llama"),
    config("B41 convert_hf.py: another GELU", {"hidden_act": "quick_gelu"}, "hidden_act", "'quick_gelu'", "'gelu'", base=NEOX_HF),
    *(config(f"B42 convert_hf.py: {kind}", {"rope_scaling": {"rope_type": kind, "factor": 2.0}}, "rope_scaling", kind,
             "llama3") for kind in ("longrope", "su", "mrope")),
    config("B42 convert_hf.py: yarn without a base", {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta"),
    *(config(f"B43 convert_hf.py: llama3 without {key}", {"rope_scaling": {k: LLAMA3[k] for k in LLAMA3 if k != key}}, key)
      for key in LLAMA3 if key != "rope_type" and key != "original_max_position_embeddings"),
    config("B44 convert_hf.py: no theta", {}, "rope_theta: absent, taken for 10000.0", without_keys=("rope_theta",), code=OK),
    config("B45 convert_hf.py: newer keys alone", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
           without_keys=("rope_theta",), code=OK),
    config("B46 convert_hf.py: old and new theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "10000",
           "500000", "disagree"),
    config("B47 convert_hf.py: odd rotary dimensions", {"rotary_pct": 0.4}, "rotary_pct", "even", base=NEOX_HF),
    config("B47 convert_hf.py: more than a head", {"rotary_pct": 1.5}, "rotary_pct", "at most 1", base=NEOX_HF),
    config("B48 convert_hf.py: 2^31 layers", {"num_hidden_layers": 2**31}, "num_hidden_layers", "1024"),
    config("B49 convert_hf.py: no vocabulary", {"vocab_size": 0}, "vocab_size"),
    config("B49 convert_hf.py: 10^9 tokens", {"vocab_size": 10**9}, "vocab_size", "1000000"),
    convert("B50 convert_hf.py: tied, but a head that differs", lambda folder: edit_json(
        folder / "config.json", lambda value: value.update(tie_word_embeddings=True)), "lm_head.weight differs", code=OK),
    weights("B50 convert_hf.py: untied, but no head", lambda w: w.pop("lm_head.weight"), "lm_head.weight", "missing",
            "tie_word_embeddings"),
    config("B51 convert_hf.py: a list of end ids", {"eos_token_id": [2, 3]}, code=OK),
    config("half of a surrogate pair in config.json", {"unused": ["\ud800"]}, "surrogate pair"),
    config("a message with turned text", {"hidden_act": "\u202egelu"}, "hidden_act", "\\xe2\\x80\\xae"),
    hub_tokenizer("B74 convert_hf.py: merges as pairs", lambda doc: [doc["model"]["vocab"].update(t0t1=20),
                  doc["model"].update(merges=[["t0", "t1"]])], code=OK),
    hub_tokenizer("B75 convert_hf.py: merge of an unknown token", lambda doc: doc["model"].update(merges=["t0 t1"]),
                  "tokenizer.json", "merges", "'t0t1'"),
    hub_tokenizer("B76 convert_hf.py: id twice", lambda doc: doc["model"]["vocab"].update(x=5), "tokenizer.json", "'x'"),
    hub_tokenizer("B77 convert_hf.py: hole in the ids", lambda doc: doc["model"]["vocab"].update(x=25), "without holes"),
    hub_tokenizer("B78 convert_hf.py: id of 2^31", lambda doc: doc["model"]["vocab"].update(x=2**31), str(2**31)),
    hub_tokenizer("B82 convert_hf.py: more tokens than the model", lambda doc: doc["model"]["vocab"].update(
        {f"t{i}": i for i in range(20, 40)}), "tokenizer.json", "40", "37"),
]


# ---- what may be said, and what must work -----------------------------------------------------------------------------

OTHERS = [
    Case("B87 an empty prompt, for a model without an end token",
         lambda here: infer_options(MODEL, "--prompt=", "--max-tokens=1"), USAGE, ("the prompt is empty",)),
    Case("B86 names of special tokens in a prompt",
         lambda here: infer_options(MODEL, "--prompt=<|endoftext|>", "--special", "--max-tokens=1"), OK, ()),
    Case("B97 a path with spaces and a line end",
         lambda here: [shutil.copy(here / MODEL, here / "my model\n.bin"), infer_options("my model\n.bin")][1], OK, ()),
    Case("B82 fewer tokens than the model", lambda here: infer_options(MODEL, "--prompt=Hello", "--max-tokens=1"), OK, ()),
]

CASES = [*MODEL_FILES, *CROSS_PAIRS, *NO_FILES, *SHARDS, *TOKENIZERS, *DUMPS, *CHECKPOINTS, *COMMAND_LINES, *TEXTS, *SCRIPTS,
         *HUB, *OTHERS]
# Numbers without a row here, and why.
ELSEWHERE = {
    "B56": "every byte of a header: the loop of test_hostile.py, and tensor_file_test.cpp",
    "B73": "a shard that is replaced while a run reads it: test_train_cli.py, data_loader_test.cpp",
    "B98": "the downloader, which needs a server: test_download.py",
}
