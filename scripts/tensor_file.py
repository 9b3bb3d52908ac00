#!/usr/bin/env python3
"""Reads and writes tensor files (.bin): weft's flat container for models, training state and reference dumps.

doc/tensor_file.md describes the layout; llmc/file/tensor_file.cpp is the same in C++. Both check everything that a file
says, and report errors in the same words.

    python3 scripts/tensor_file.py FILE            lists the configuration and the tensors
    python3 scripts/tensor_file.py --verify FILE   reads everything and compares the hashes
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import mmap
import os
import stat
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from needs import ENVIRONMENT, INSTALLED, command  # before the packages
import numpy as np
import xxhash

MAGIC = b"\x89WEFT\r\n\x1a"
SHARD_MAGIC = b"\x89WTOK\r\n\x1a"
VERSION = 1
BYTE_ORDER = 0x01020304
KINDS = {1: "model", 2: "training state", 3: "reference dump", 4: "LoRA adapter"}
FAMILIES = {0: None, 1: "llama", 2: "gpt_neox"}
OTHER_FAMILY = 3  # one that came later: the configuration names it
DTYPES = ("f32", "f16", "bf16", "u8", "u16", "u32", "i32", "i64", "i8", "u4", "e4m3")  # by their number
NUMPY_DTYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4",
                "i64": "<i8", "i8": "i1", "u4": "u1", "e4m3": "u1"}  # bits for bf16 and e4m3, which numpy lacks; u4: pairs

HEADER_PAGE = 4096
TENSOR_ALIGNMENT = 256
MAX_TENSORS = 65536
MAX_NAME = 255
MAX_RANK = 8
MAX_CONFIG_BYTES = 16 << 20
MAX_CONFIG_VALUES = 1_000_000  # JSON values: the programs refuse more
MAX_JSON_DEPTH = 64

HEADER = struct.Struct("<8sIIIIQQQQQQ")
RECORD = struct.Struct("<256sII8QQQQ")
HEADER_HASH_AT = 64
CHUNK = 16 << 20

BAD_FILE, RESOURCES = 3, 5  # exit codes, beside those of needs


class FileError(Exception):
    """A file that cannot be used or written: one line for the user, and the exit code that goes with it."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


# Control characters, and invisible ones that change the order or look of the text around them (llmc/base/error.cpp).
STEERING = ((0x00, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x61C, 0x61C), (0x180E, 0x180E), (0x200B, 0x200F), (0x2028, 0x202E),
            (0x2060, 0x206F), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F))


def escaped(text: str | bytes, limit: int = 120) -> str:
    """`text` in quotes with everything that could steer a terminal escaped.

    Of more than `limit` bytes the first third of `limit` and the last two thirds are shown, with "..." between them.
    """
    raw = text if isinstance(text, bytes) else os.fsencode(text)
    if len(raw) <= limit:
        return f"'{_escaped_part(raw, len(raw))[0]}'"
    head, end = _escaped_part(raw, limit // 3)
    aim = begin = len(raw) - (limit - limit // 3)
    while begin < len(raw) and begin < aim + 3 and raw[begin] & 0xC0 == 0x80:  # not in the middle of a character
        begin += 1
    return f"'{head}...{_escaped_part(raw[max(begin, end):], limit)[0]}'"


def _escaped_part(raw: bytes, limit: int) -> tuple[str, int]:
    """Escapes the characters that begin before byte `limit`. Also returns where the last one ends."""
    out, at = [], 0
    for char in raw[:limit + 4].decode("utf-8", "surrogateescape"):
        if at >= limit:
            break
        code = ord(char)
        bad = 0xDC80 <= code <= 0xDCFF
        encoded = bytes([code - 0xDC00]) if bad else char.encode("utf-8")
        at += len(encoded)
        if bad or any(first <= code <= last for first, last in STEERING):
            out.append("".join(f"\\x{byte:02x}" for byte in encoded))
        else:
            out.append("\\" + char if char in "'\\" else char)
    return "".join(out), at


def fail(path: str, message: str) -> None:
    raise FileError(BAD_FILE, f"{escaped(path)}: {message}")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) as float32, exactly."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 as bf16 bits (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
    out = np.empty(bits.size, dtype=np.uint16)
    for begin in range(0, bits.size, 1 << 16):  # pieces that stay in the cache
        piece = bits[begin:begin + (1 << 16)]
        rounded = piece >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += piece
        rounded >>= 16
        out[begin:begin + piece.size] = rounded
        nan = np.isnan(piece.view(np.float32))
        if nan.any():
            out[begin:begin + piece.size][nan] = (piece[nan] >> 16) | 0x40
    return out.reshape(np.shape(values))


def from_f32(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 in the file's `dtype` (bf16: its bits), rounded to nearest even; too large becomes infinite."""
    if dtype == "bf16":
        return f32_to_bf16(values)
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_DTYPES[dtype], copy=False)


def to_f32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values of the file's `dtype` as float32, exactly."""
    return bf16_to_f32(values) if dtype == "bf16" else values.astype(np.float32, copy=False)


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


# ---- what a file is --------------------------------------------------------------------------------------------------


JSON = "JSON text"


def describe(head: bytes, size: int) -> tuple[str, str]:
    """The kind of a file that does not begin with the expected magic, and what to do about it (either may be empty)."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    converter = command("scripts/convert_hf.py") if INSTALLED else "scripts/convert_hf.py"
    convert = f"convert it with {converter}"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer", "fetch the file itself with 'git lfs pull'"
    if head.startswith(MAGIC):
        return "a tensor file", ""
    if head.startswith(SHARD_MAGIC):
        return "a token shard", ""
    if head[:8] in (MAGIC[::-1], SHARD_MAGIC[::-1]):
        return "written in the other byte order", "make it again on a little-endian machine"
    if head[:1] == b"\x89" and head[1:5] in (b"WEFT", b"WTOK") or head[:5] in (b"\tWEFT", b"\tWTOK"):
        return "damaged by a text-mode copy", "copy it again in binary mode"
    # in front of the magics of two bytes: it begins with the length of its header, any number
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "a safetensors file", convert
    if head.startswith(b"\x1f\x8b"):
        return "gzip-compressed", "unpack it with gunzip"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive or a PyTorch checkpoint", convert
    if head.startswith(b"\x80\x02"):
        return "a Python pickle or an old PyTorch checkpoint", convert
    if head.startswith(b"GGUF"):
        return "a GGUF file", f"convert the original Hugging Face checkpoint with {converter}"
    if text[:1] == b"<":
        return "something that looks like a web page", "the download failed: get it again"
    if text.startswith(b'{"error'):
        return "JSON text that looks like a web page's error message", "if it was downloaded, get it again"
    if text[:1] in (b"{", b"["):
        return JSON, ""
    return "", ""


def check_magic(path: str, head: bytes, size: int, magic: bytes, wanted: str) -> None:
    """Refuses a file that does not begin with `magic`; the message names its kind if that is known."""
    if size == 0:
        fail(path, f"0 bytes, expected {wanted}. Download failed? get it again")
    if head.startswith(magic) or magic.startswith(head):
        return
    what, todo = describe(head, size)
    if what == JSON and magic == SHARD_MAGIC:  # the tokenizer beside the shards, which are given by a pattern
        todo = "name the shards alone, as 'train_*.bin' does"
    if what:
        fail(path, f"magic: this is {what}, expected {wanted}" + (f". {todo}" if todo else ""))
    fail(path, f"magic: got {escaped(head[:8])}, expected {escaped(magic)}: not {wanted}")


def map_file(path: str) -> mmap.mmap | bytes:
    """The bytes of a regular file, mapped; b"" for an empty one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as problem:
        fail(path, f"cannot open: {getattr(problem, 'strerror', None) or problem}")
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            fail(path, "this is a directory, not a regular file" if stat.S_ISDIR(info.st_mode) else "not a regular file")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) if info.st_size else b""
    finally:
        os.close(fd)


# ---- files that appear when they are complete ------------------------------------------------------------------------


class AtomicFile:
    """Writes "<path>.tmp.<pid>" and gives it its name in publish(): reserve, write, sync, rename, sync the directory."""

    def __init__(self, path: str | os.PathLike[str], expected_bytes: int = 0):
        self.path = os.fspath(path)
        self.size = 0
        self._temporary = f"{self.path}.tmp.{os.getpid()}"
        self._refuse_other_kinds()
        self._fd = self._attempt("create", self._create)
        if expected_bytes:
            self._attempt("reserve space", lambda: self._reserve(expected_bytes))

    def _refuse_other_kinds(self) -> None:
        """A device, a pipe or a link would be replaced by the file."""
        try:
            mode = os.lstat(self.path).st_mode
        except (OSError, ValueError):
            return  # there is none, or creating the file says what is wrong
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
            raise FileError(ENVIRONMENT, f"{escaped(self.path)}: is {kind}, expected the name of a file to write. Choose another name")

    def _create(self) -> int:
        with contextlib.suppress(FileNotFoundError):  # left by a dead process with this number, or a link, which must not be followed
            os.unlink(self._temporary)
        return os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def _reserve(self, expected_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, expected_bytes)
        except OSError as problem:  # this file system cannot reserve space
            if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def _attempt(self, action: str, work):
        try:
            return work()
        except OSError as problem:
            self.discard()
            full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise FileError(RESOURCES if full else ENVIRONMENT,
                            f"{escaped(self.path)}: cannot {action}: {problem.strerror}") from problem

    def write(self, data) -> None:
        self.rewrite(self.size, data)
        self.size += memoryview(data).nbytes

    def rewrite(self, offset: int, data) -> None:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while len(view):
            written = self._attempt("write", lambda view=view, offset=offset: os.pwrite(self._fd, view, offset))
            view, offset = view[written:], offset + written

    def publish(self) -> None:
        try:
            self._attempt("truncate", lambda: os.ftruncate(self._fd, self.size))
            self._attempt("sync", lambda: os.fsync(self._fd))
        except KeyboardInterrupt:  # fsync can take minutes
            self.discard()
            raise
        fd, self._fd = self._fd, -1
        try:
            self._attempt("close", lambda: os.close(fd))
            self._attempt("rename the finished file", lambda: os.rename(self._temporary, self.path))
        except FileError:
            os.unlink(self._temporary)
            raise
        self._attempt("sync the directory", self._sync_directory)

    def _sync_directory(self) -> None:
        fd = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as problem:  # this file system cannot sync directories
            if problem.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    def discard(self) -> None:
        """Removes the temporary file. A file that has the name stays as it is. Does nothing after publish()."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)
            os.unlink(self._temporary)

    def __enter__(self) -> "AtomicFile":
        return self

    def __exit__(self, kind, value, trace) -> None:
        self.publish() if kind is None else self.discard()


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's record in the table. An empty shape is a scalar."""

    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]
    offset: int = 0  # from the start of the file
    bytes: int = 0
    hash: int = 0  # XXH3-64 of the data

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def whole_bytes(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether each row of the tensor is a whole number of bytes: u4 packs two elements of a row into one byte."""
    return dtype != "u4" or (len(shape) > 0 and shape[-1] % 2 == 0)


def array_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a numpy array with the tensor's data; for u4 that of its pairs."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "u4" else shape


def payload_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """The bytes of a tensor. None if the product of the sizes that are not zero, in bytes, reaches 2^63."""
    shape = tuple(shape)
    size = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    if math.prod(n for n in shape if n) * size >= 1 << 63:
        return None
    return math.prod(shape) // 2 if dtype == "u4" else math.prod(shape) * size


def model_family(config: dict[str, Any]) -> Any:
    """config["model"]["family"], or None."""
    model = config.get("model")
    return model.get("family") if isinstance(model, dict) else None


class TensorFile:
    """A validated tensor file: its configuration and table are checked, its data is read on demand."""

    def __init__(self, path: str, data: mmap.mmap | bytes, kind: str, config: dict[str, Any], tensors: dict[str, TensorInfo],
                 data_offset: int):
        self.path, self.kind, self.config, self.tensors = path, kind, config, tensors
        self._data, self._data_offset = data, data_offset

    @property
    def header_hash(self) -> int:
        """Stands for the content of the whole file: the table has the hash of every tensor."""
        return int(HEADER.unpack_from(self._data)[-1])

    def at(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            fail(self.path, f"tensor {escaped(name)}: missing")
        return self.tensors[name]

    def bytes(self, name: str) -> memoryview:
        """The bytes of a tensor. Does not verify their hash."""
        info = self.at(name)
        return memoryview(self._data)[info.offset:info.offset + info.bytes]

    def array(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the file; bf16 and e4m3 as their bits, u4 as its pairs [..., columns / 2]."""
        info = self.at(name)
        return np.frombuffer(self.bytes(name), dtype=NUMPY_DTYPES[info.dtype]).reshape(array_shape(info.dtype, info.shape))

    def f32(self, name: str) -> np.ndarray:
        """A float tensor (f32, f16, bf16) as float32."""
        info = self.at(name)
        if info.dtype not in ("f32", "f16", "bf16"):
            fail(self.path, f"tensor {escaped(name)}: dtype: got {info.dtype}, expected f32, f16 or bf16")
        values = self.array(name)
        return bf16_to_f32(values) if info.dtype == "bf16" else values.astype(np.float32)

    def verify_tensor(self, name: str) -> None:
        """Reads a tensor and compares its hash."""
        info = self.at(name)
        got = xxhash.xxh3_64_intdigest(self.bytes(name))
        if got != info.hash:
            fail(self.path, f"tensor {escaped(name)}: XXH3-64: got {got:016x}, expected {info.hash:016x}. "
                            "The data is damaged: get or make the file again")

    def verify(self) -> None:
        """Verifies every tensor, and that the gaps between them are zero: afterwards every byte of the file is verified."""
        end = self._data_offset
        for info in self.tensors.values():
            check_zero(self.path, self._data, end, info.offset, "data section")
            self.verify_tensor(info.name)
            end = info.offset + info.bytes


def check_zero(path: str, data, begin: int, end: int, where: str) -> None:
    if any(data[begin:end]):
        fail(path, f"{where}: padding is not zero. The file is damaged: get or make it again")


def read(path: str | os.PathLike[str], expected: str | None = None) -> TensorFile:
    """Opens a tensor file and checks header, configuration and table. `expected`: the kind that the caller needs."""
    path = os.fspath(path)
    data = map_file(path)
    kind, family, config_bytes, count, table_offset, data_offset = _read_header(path, data)
    if KINDS.get(kind) is None:
        fail(path, f"kind: got {kind}, expected 1 (model), 2 (training state), 3 (reference dump) or 4 (LoRA adapter)")
    if expected is not None and KINDS[kind] != expected:
        fail(path, f"kind: this is a {KINDS[kind]}, expected a {expected}")
    config = parse_config(path, data[HEADER_PAGE:HEADER_PAGE + config_bytes])
    _check_family(path, family, config)
    check_zero(path, data, HEADER.size, HEADER_PAGE, "header page")
    check_zero(path, data, HEADER_PAGE + config_bytes, table_offset, "configuration")
    check_zero(path, data, table_offset + count * RECORD.size, data_offset, "tensor table")
    tensors = _read_table(path, data, count, table_offset, data_offset)
    return TensorFile(path, data, KINDS[kind], config, tensors, data_offset)


def _read_header(path: str, data) -> tuple[int, int, int, int, int, int]:
    """Checks the header, in an order in which the first message is the most helpful one."""
    size = len(data)
    check_magic(path, data[:64], size, MAGIC, "a tensor file")
    if size < HEADER_PAGE:
        fail(path, f"truncated: got {size} bytes, expected at least {HEADER_PAGE}. Get or make the file again")
    (_, version, byte_order, kind, family, file_bytes, config_bytes, count, table_offset, data_offset,
     header_hash) = HEADER.unpack_from(data)
    if byte_order != BYTE_ORDER:
        swapped = byte_order == 0x04030201
        fail(path, f"byte_order: got {byte_order:#010x}, expected {BYTE_ORDER:#010x}. "
             + ("It was made on a big-endian machine" if swapped else "The file is damaged: get or make it again"))
    if version != VERSION:
        fail(path, f"version: got {version}, expected {VERSION}. "
             + ("It was made by a newer tool: update weft" if version else "The file is damaged: get or make it again"))
    if file_bytes > size:
        fail(path, f"truncated: got {size} bytes, expected {file_bytes}. Get or make the file again")
    if file_bytes < size:
        fail(path, f"file_bytes: got {size} bytes, expected {file_bytes}: {size - file_bytes} too many. "
                   "Get or make the file again")
    _check_layout(path, size, config_bytes, count, table_offset, data_offset)
    page = bytearray(data[:HEADER_PAGE])
    page[HEADER_HASH_AT:HEADER_HASH_AT + 8] = bytes(8)
    hasher = xxhash.xxh3_64(page)
    hasher.update(memoryview(data)[HEADER_PAGE:data_offset])
    if hasher.intdigest() != header_hash:
        fail(path, f"header_hash: got {hasher.intdigest():016x}, expected {header_hash:016x}. "
                   "The header is damaged: get or make the file again")
    return kind, family, config_bytes, count, table_offset, data_offset


def _check_layout(path: str, size: int, config_bytes: int, count: int, table_offset: int, data_offset: int) -> None:
    if config_bytes > MAX_CONFIG_BYTES:
        fail(path, f"config_bytes: got {config_bytes}, expected at most {MAX_CONFIG_BYTES}")
    if count > MAX_TENSORS:
        fail(path, f"tensor_count: got {count}, expected at most {MAX_TENSORS}")
    table_expected = align_up(HEADER_PAGE + config_bytes, 8)
    if table_offset != table_expected:
        fail(path, f"table_offset: got {table_offset}, expected {table_expected}")
    data_expected = align_up(table_expected + count * RECORD.size, HEADER_PAGE)
    if data_offset != data_expected:
        fail(path, f"data_offset: got {data_offset}, expected {data_expected}")
    if data_offset > size:
        fail(path, f"data_offset: got {data_offset}, expected at most the file's {size} bytes")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise FileError(BAD_FILE, f"JSON key {escaped(key.encode('utf-8', 'replace'))} occurs twice in one object")
            seen.add(key)
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text}")
    return value


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def parse_config(path: str, raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        fail(path, "configuration: expected a JSON object")
    try:
        config = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_float=_finite,
                            parse_constant=_finite)
        json.dumps(config, ensure_ascii=False).encode("utf-8")  # refuses lone surrogates
    except FileError as problem:
        fail(path, f"configuration: {problem}")
    except RecursionError:
        fail(path, f"configuration: JSON nested deeper than {MAX_JSON_DEPTH} levels")
    except ValueError as problem:
        fail(path, f"configuration: not valid JSON: {escaped(str(problem), 200)}")
    if _depth(config) > MAX_JSON_DEPTH:
        fail(path, f"configuration: JSON nested deeper than {MAX_JSON_DEPTH} levels")
    return config


def family_number(family: Any) -> int | None:
    """The header's number of model_family(); None if that is no name."""
    if family is not None and not isinstance(family, str):
        return None
    return next((number for number, name in FAMILIES.items() if name == family), OTHER_FAMILY)


def _check_family(path: str, family: int, config: dict[str, Any]) -> None:
    if family not in FAMILIES and family != OTHER_FAMILY:
        fail(path, f"family: got {family}, expected 0 (none), 1 (llama), 2 (gpt_neox) or 3 (another)")
    named = model_family(config)
    if family_number(named) != family:
        fail(path, f"family: got {FAMILIES.get(family, 'another') or 'none'}, expected the configuration's model.family, "
             + ("none" if named is None else escaped(named if isinstance(named, str) else json.dumps(named))))


def _read_table(path: str, data, count: int, table_offset: int, data_offset: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    end = data_offset
    for index in range(count):
        info = _read_record(path, index, RECORD.unpack_from(data, table_offset + index * RECORD.size))
        where = f"tensor {escaped(info.name)}"
        if info.name in tensors:
            fail(path, f"{where}: the name occurs twice")
        expected = align_up(end, TENSOR_ALIGNMENT)
        if info.offset != expected:
            fail(path, f"{where}: offset: got {info.offset}, expected {expected}")
        end = info.offset + info.bytes
        if end > len(data):
            fail(path, f"{where}: ends at byte {end}, but the file has {len(data)}")
        tensors[info.name] = info
    if end != len(data):
        fail(path, f"file_bytes: got {len(data)}, expected {end}, the end of the last tensor")
    return tensors


def _read_record(path: str, index: int, record: tuple) -> TensorInfo:
    raw, dtype, rank, *sizes, offset, size, digest = record
    name = raw.rstrip(b"\0")
    if not valid_name(name) or len(name) > MAX_NAME:
        fail(path, f"tensor {index}: name: got {escaped(name)}, expected 1 to 255 bytes of UTF-8 without control "
                   "characters, padded with zeros")
    where = f"tensor {escaped(name)}"
    if dtype >= len(DTYPES):
        fail(path, f"{where}: dtype: got {dtype}, expected 0 to {len(DTYPES) - 1}")
    if rank > MAX_RANK:
        fail(path, f"{where}: rank: got {rank}, expected at most {MAX_RANK}")
    shape = tuple(sizes[:rank])
    for size_of_dimension in shape:
        if size_of_dimension >= 1 << 63:
            fail(path, f"{where}: shape: got {size_of_dimension}, expected sizes below 2^63")
    if any(sizes[rank:]):
        fail(path, f"{where}: shape: sizes past the rank are not zero")
    if not whole_bytes(DTYPES[dtype], shape):
        fail(path, f"{where}: shape: got {shape_text(shape)}, expected an even last size for {DTYPES[dtype]}")
    expected = payload_bytes(DTYPES[dtype], shape)
    if expected is None:
        fail(path, f"{where}: shape: the product of {shape_text(shape)} does not fit in 63 bits")
    if size != expected:
        fail(path, f"{where}: bytes: got {size}, expected {expected} for {DTYPES[dtype]} {shape_text(shape)}")
    return TensorInfo(name.decode("utf-8"), DTYPES[dtype], shape, offset, size, digest)


def valid_name(name: bytes) -> bool:
    """UTF-8 without C0 and C1 control characters, not empty."""
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(text) and not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in text)


# ---- writing ---------------------------------------------------------------------------------------------------------


def configuration_text(config: dict[str, Any]) -> bytes:
    """A configuration as stored in a tensor file: compact and sorted like that of the C++ writer, so that the same content
    gives the same bytes."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


class Writer:
    """Writes a tensor file: declare() every tensor, write() each in that order, close() publishes.

    As a context manager it publishes at the end of the block; after an exception nothing is left behind and whatever
    stood under `path` is untouched. A mistake of the caller is a ValueError, a problem of the disk a FileError.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, config: dict[str, Any]):
        if kind not in KINDS.values():
            raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS.values())}")
        number = family_number(model_family(config))
        if number is None:
            raise ValueError(f"model.family {model_family(config)!r}: expected a name")
        self.path, self.kind = os.fspath(path), kind
        self.tensors: list[TensorInfo] = []
        self._family = number
        self._config = configuration_text(config)
        if len(self._config) > MAX_CONFIG_BYTES:
            raise ValueError(f"configuration of {len(self._config)} bytes: at most {MAX_CONFIG_BYTES} are accepted")
        self._names: set[str] = set()
        self._file: AtomicFile | None = None
        self._next = 0

    def declare(self, name: str, dtype: str, shape: Iterable[int]) -> None:
        shape = tuple(int(size) for size in shape)
        encoded = name.encode("utf-8")
        if self._file is not None:
            raise ValueError(f"{name}: declared after the first write")
        if not valid_name(encoded) or len(encoded) > MAX_NAME or name in self._names:
            raise ValueError(f"{name!r}: a tensor name is unique, 1 to {MAX_NAME} bytes, without control characters")
        if (dtype not in DTYPES or len(shape) > MAX_RANK or any(size < 0 for size in shape)
                or not whole_bytes(dtype, shape)):
            raise ValueError(f"{name}: {dtype} {shape_text(shape)}: not a dtype and shape of a tensor file")
        size = payload_bytes(dtype, shape)
        if size is None or len(self.tensors) == MAX_TENSORS:
            raise ValueError(f"{name}: {dtype} {shape_text(shape)}: too large, or too many tensors")
        self._names.add(name)
        self.tensors.append(TensorInfo(name, dtype, shape, bytes=size))

    def write(self, name: str, data: np.ndarray | bytes | memoryview | Iterable[Any]) -> None:
        """The data of the next declared tensor: an array of its dtype and shape (as TensorFile.array() gives it), its bytes,
        or an iterable of arrays or byte strings that together are its bytes."""
        file = self._begin()
        if self._next == len(self.tensors) or self.tensors[self._next].name != name:
            raise ValueError(f"{name}: not the next declared tensor")
        info = self.tensors[self._next]
        if isinstance(data, np.ndarray) and data.shape != array_shape(info.dtype, info.shape):
            raise ValueError(f"{name}: got shape {shape_text(data.shape)}, declared {shape_text(info.shape)} {info.dtype}")
        self._pad_to(file, info.offset)
        pieces = [data] if isinstance(data, (np.ndarray, np.generic, bytes, bytearray, memoryview)) else data
        hasher, written = xxhash.xxh3_64(), 0
        for piece in pieces:
            for chunk in self._chunks(info, piece):
                written += len(chunk)
                if written > info.bytes:
                    raise ValueError(f"{name}: more than the declared {info.bytes} bytes")
                hasher.update(chunk)
                file.write(chunk)
        if written != info.bytes:
            raise ValueError(f"{name}: got {written} bytes, declared {info.bytes}")
        self.tensors[self._next] = replace(info, hash=hasher.intdigest())
        self._next += 1

    @staticmethod
    def _chunks(info: TensorInfo, piece: Any) -> Iterable[memoryview]:
        if isinstance(piece, (np.ndarray, np.generic)):
            wanted = np.dtype(NUMPY_DTYPES[info.dtype])
            if piece.dtype != wanted:
                raise ValueError(f"{info.name}: got {piece.dtype}, expected {wanted} for {info.dtype}")
            piece = np.ascontiguousarray(piece, dtype=wanted).reshape(-1).view(np.uint8)
        view = memoryview(piece)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        for begin in range(0, len(view), CHUNK):
            yield view[begin:begin + CHUNK]

    def _begin(self) -> AtomicFile:
        """At the first call computes the layout, after which no tensor can be declared, and reserves the file's space."""
        if self._file is not None:
            return self._file
        self._table_offset = align_up(HEADER_PAGE + len(self._config), 8)
        self._data_offset = align_up(self._table_offset + len(self.tensors) * RECORD.size, HEADER_PAGE)
        end = self._data_offset
        for index, info in enumerate(self.tensors):
            offset = align_up(end, TENSOR_ALIGNMENT)
            self.tensors[index] = replace(info, offset=offset)
            end = offset + info.bytes
        if end >= 1 << 63:
            raise ValueError(f"{self.path}: {end} bytes are too large for a file")
        self._file_bytes = end
        self._file = AtomicFile(self.path, expected_bytes=end)
        self._pad_to(self._file, self._data_offset)
        return self._file

    @staticmethod
    def _pad_to(file: AtomicFile, offset: int) -> None:
        while file.size < offset:
            file.write(bytes(min(CHUNK, offset - file.size)))

    def _header(self) -> bytearray:
        head = bytearray(self._data_offset)
        kind = next(number for number, name in KINDS.items() if name == self.kind)
        HEADER.pack_into(head, 0, MAGIC, VERSION, BYTE_ORDER, kind, self._family, self._file_bytes, len(self._config),
                         len(self.tensors), self._table_offset, self._data_offset, 0)
        head[HEADER_PAGE:HEADER_PAGE + len(self._config)] = self._config
        for index, info in enumerate(self.tensors):
            sizes = info.shape + (0,) * (MAX_RANK - len(info.shape))
            RECORD.pack_into(head, self._table_offset + index * RECORD.size, info.name.encode("utf-8"),
                             DTYPES.index(info.dtype), len(info.shape), *sizes, info.offset, info.bytes, info.hash)
        struct.pack_into("<Q", head, HEADER_HASH_AT, xxhash.xxh3_64_intdigest(bytes(head)))
        return head

    def close(self) -> None:
        """Publishes the file. Every declared tensor must have been written."""
        file = self._begin()
        if self._next != len(self.tensors):
            self.discard()
            raise ValueError(f"{self.tensors[self._next].name}: declared but not written")
        file.rewrite(0, self._header())
        file.publish()

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, value, trace) -> None:
        self.close() if kind is None else self.discard()


# ---- command line ----------------------------------------------------------------------------------------------------


def list_file(file: TensorFile, out) -> None:
    total = sum(info.bytes for info in file.tensors.values())
    print(f"{file.kind}, {len(file.tensors)} tensors, {total:,} bytes of data", file=out)
    print(json.dumps(file.config, indent=2, sort_keys=True), file=out)
    width = max((len(escaped(name)) for name in file.tensors), default=0)
    for info in file.tensors.values():
        print(f"{escaped(info.name, 300):<{width}}  {info.dtype:<4}  {shape_text(info.shape):<18}  "
              f"{info.offset:>14,}  {info.hash:016x}", file=out)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tensor_file.py", description="Lists or verifies a tensor file (.bin).")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--verify", action="store_true", help="read all data and compare the hashes")
    options = parser.parse_args(arguments)
    try:
        file = read(options.file)
        if options.verify:
            file.verify()
            print(f"{escaped(options.file)}: {file.kind}, {len(file.tensors)} tensors, all hashes match")
        else:
            list_file(file, sys.stdout)
        sys.stdout.flush()
    except FileError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.code
    except BrokenPipeError:  # for example with "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
