"""Reads safetensors files from any source: all of the header is checked before a tensor is read.

Layout: u64 little-endian header length, that many bytes of JSON, then the tensors' data. The rules are those of the
safetensors specification: header at most 100,000,000 bytes and starting with '{', unique names, and data offsets that
cover the rest of the file from 0 on with neither hole nor overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cli import AGAIN, TooManyObjects, bad_file, json_type, parse_json, shown
from tensor_file import describe

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 255
MAX_RANK = 8
METADATA_KEY = "__metadata__"

DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
               "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file; its data are bytes [begin, end) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A validated safetensors file. FileError BAD_FILE names the file and the field at fault."""

    def __init__(self, path: Path):
        self.path = path
        size = _file_size(path)
        header, self.data_start = _read_header(path, size)
        self.tensors = _entries(path, header)
        _check_coverage(path, list(self.tensors.values()), size - self.data_start)
        self._bytes: np.ndarray | None = None

    def bytes(self, entry: Entry) -> np.ndarray:
        """The data of a tensor as u8. The file is mapped, so nothing is read before it is used."""
        if self._bytes is None:
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        return self._bytes[self.data_start + entry.begin:self.data_start + entry.end]


def _file_size(path: Path) -> int:
    try:
        if not path.is_file():
            bad_file(path, "", "no such file" if not path.exists() else "not a regular file")
        return path.stat().st_size
    except OSError as error:
        bad_file(path, "", f"cannot be read: {error.strerror}")


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header object and where the data begins."""
    with open(path, "rb") as file:
        head = file.read(512)
        _refuse_other_kinds(path, head, size)
        length = int.from_bytes(head[:8], "little")
        if length == 0:
            bad_file(path, "header length", "got 0, expected at least 2", AGAIN)
        if length > MAX_HEADER_BYTES:
            bad_file(path, "header length", f"got {length}, expected at most {MAX_HEADER_BYTES}",
                     "This is not a safetensors file, or it is damaged")
        if length > size - 8:
            bad_file(path, "header length", f"got {length}, expected at most {size - 8} (the rest of the file)", AGAIN)
        if head[8:9] != b"{":
            bad_file(path, "header", f"got {shown(head[8:9])} as first character, expected '{{'", AGAIN)
        file.seek(8)
        text = file.read(length)
    try:
        header = parse_json(text, path, "header", max_objects=MAX_TENSORS + 2)
    except TooManyObjects:
        bad_file(path, "header", f"got more than {MAX_TENSORS} tensors, expected at most that")
    return header, 8 + length


def _refuse_other_kinds(path: Path, head: bytes, size: int) -> None:
    if size == 0:
        bad_file(path, "", "0 bytes: download failed?", AGAIN)
    what, todo = describe(head, size)
    if what and what != "a safetensors file":
        pickled = head.startswith((b"PK", b"\x80"))
        bad_file(path, "", f"this is {what}, expected a safetensors file",
                 "Save it again with save_pretrained(..., safe_serialization=True)" if pickled else todo)
    if size < 10:
        bad_file(path, "", f"got {size} bytes, expected a safetensors file of at least 10", AGAIN)


def _entries(path: Path, header: dict[str, Any]) -> dict[str, Entry]:
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        bad_file(path, METADATA_KEY, "got something else, expected an object of strings")
    if len(header) > MAX_TENSORS:
        bad_file(path, "header", f"got {len(header)} tensors, expected at most {MAX_TENSORS}")
    return {name: _entry(path, name, value) for name, value in header.items()}


def _entry(path: Path, name: str, value: Any) -> Entry:
    where = f"tensor {shown(name)}"
    if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES or not name.isprintable():
        bad_file(path, where, f"got a name that is empty, unprintable or over {MAX_NAME_BYTES} bytes")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        bad_file(path, where, f"got {json_type(value)} {shown(value)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        bad_file(path, where, f"dtype: got {shown(dtype)}, expected one of {', '.join(DTYPE_BYTES)}")
    if not _sizes(shape) or len(shape) > MAX_RANK:
        bad_file(path, where, f"shape: got {shown(shape)}, expected at most {MAX_RANK} sizes from 0 to 2^63-1")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        bad_file(path, where, f"data_offsets: got {shown(offsets)}, expected [begin, end] with begin <= end", AGAIN)
    expected = DTYPE_BYTES[dtype]
    for size in shape:
        expected *= size  # Python integers do not overflow
    if offsets[1] - offsets[0] != expected:
        bad_file(path, where, f"data_offsets: got {offsets[1] - offsets[0]} bytes, expected {shown(expected)} for "
                 f"{dtype} {shown(shape)}", AGAIN)
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_coverage(path: Path, entries: list[Entry], data_bytes: int) -> None:
    position, previous = 0, "the start of the data"
    for entry in sorted(entries, key=lambda item: (item.begin, item.end)):
        where = f"tensor {shown(entry.name)}"
        if entry.end > data_bytes:
            bad_file(path, where, f"ends at byte {entry.end} of the data, expected at most {data_bytes}: the file is "
                     "cut short", AGAIN)
        if entry.begin != position:
            relation = "overlaps" if entry.begin < position else "leaves a hole after"
            bad_file(path, where, f"begins at byte {entry.begin}, expected {position}: it {relation} {previous}", AGAIN)
        position, previous = entry.end, shown(entry.name)
    if position != data_bytes:
        bad_file(path, "data", f"got {data_bytes - position} bytes after the last tensor, expected none", AGAIN)
