"""Reads and writes token shards: training text as token ids. The layout is doc/token_shard.md.

llmc/file/token_shard.cpp is the reader in C++; it reports errors in the same words.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import xxhash

from tensor_file import SHARD_MAGIC, AtomicFile, check_magic, fail, map_file

VERSION = 1
HEADER_BYTES = 256
HEADER = struct.Struct("<8sIIQQQqQQ")
HASHED_BYTES = 56  # of the header
DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u2"), 5: np.dtype("<u4")}  # the dtype numbers of tensor files
MAX_VOCABULARY = 1_000_000


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The narrowest token dtype that holds every id."""
    return DTYPES[4] if vocab_size <= 65536 else DTYPES[5]


class TokenShard:
    """A validated shard. `tokens` is a read-only view of the file; verify() checks its hash and every id."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        data = map_file(self.path)
        header = _read_header(self.path, data)
        _, _, dtype, self.count, self.vocab_size, self.tokenizer_hash, self.end_of_document_id, self._hash, _ = header
        self.tokens = np.frombuffer(data, dtype=DTYPES[dtype], offset=HEADER_BYTES)

    def verify(self) -> None:
        bad = np.flatnonzero(self.tokens >= self.vocab_size)
        if bad.size:
            fail(self.path, f"token {bad[0]}: got id {self.tokens[bad[0]]}, expected at most {self.vocab_size - 1}. "
                            "The shard is damaged: get or make it again")
        got = xxhash.xxh3_64_intdigest(self.tokens.data)
        if got != self._hash:
            fail(self.path, f"data_hash: got {got:016x}, expected {self._hash:016x}. "
                            "The tokens are damaged: get or make the shard again")


def _read_header(path: str, data) -> tuple:
    size = len(data)
    check_magic(path, data[:64], size, SHARD_MAGIC, "a token shard")
    if size < HEADER_BYTES:
        fail(path, f"truncated: got {size} bytes, expected at least {HEADER_BYTES}. Get or make the shard again")
    header = HEADER.unpack_from(data)
    version, header_hash = header[1], header[-1]
    if version != VERSION:
        fail(path, f"version: got {version}, expected {VERSION}. "
             + ("It was made by a newer tool: update weft" if version else "The shard is damaged: get or make it again"))
    got = xxhash.xxh3_64_intdigest(data[:HASHED_BYTES])
    if got != header_hash:
        fail(path, f"header_hash: got {got:016x}, expected {header_hash:016x}. "
                   "The header is damaged: get or make the shard again")
    if any(data[HEADER.size:HEADER_BYTES]):
        fail(path, "header: padding is not zero. The shard is damaged: get or make it again")
    _check_fields(path, size, header)
    return header


def _check_fields(path: str, size: int, header: tuple) -> None:
    _, _, dtype, count, vocab_size, _, end_of_document_id, _, _ = header
    if dtype not in DTYPES:
        fail(path, f"dtype: got {dtype}, expected 4 (u16) or 5 (u32)")
    limit = 65536 if dtype == 4 else MAX_VOCABULARY
    if not 1 <= vocab_size <= limit:
        fail(path, f"vocab_size: got {vocab_size}, expected 1 to {limit} for {'u16' if dtype == 4 else 'u32'}")
    if not -1 <= end_of_document_id < vocab_size:
        fail(path, f"end_of_document_id: got {end_of_document_id}, expected -1 to {vocab_size - 1}")
    if count == 0:
        fail(path, "count: got 0, expected at least one token")
    if count * DTYPES[dtype].itemsize >= 1 << 64 or count * DTYPES[dtype].itemsize + HEADER_BYTES >= 1 << 64:
        fail(path, "count: size overflows 64 bits")
    expected = HEADER_BYTES + count * DTYPES[dtype].itemsize
    if expected > size:
        fail(path, f"truncated: got {size} bytes, expected {expected} for {count} tokens. Get or make the shard again")
    if expected < size:
        fail(path, f"count: got {size} bytes, expected {expected} for {count} tokens: {size - expected} too many. "
                   "Get or make the shard again")


class ShardWriter:
    """Appends token ids. close() writes the header and publishes the file, which does not exist under its name before."""

    def __init__(self, path: str | os.PathLike[str], vocab_size: int, tokenizer_hash: int, end_of_document_id: int = -1):
        if not 1 <= vocab_size <= MAX_VOCABULARY or not -1 <= end_of_document_id < vocab_size:
            raise ValueError(f"vocabulary of {vocab_size}, end of document {end_of_document_id}")
        self.dtype = dtype_for(vocab_size)
        self.vocab_size, self.tokenizer_hash, self.end_of_document_id = vocab_size, tokenizer_hash, end_of_document_id
        self.count = 0
        self._hasher = xxhash.xxh3_64()
        self._file = AtomicFile(path)
        self._file.write(bytes(HEADER_BYTES))

    def write(self, ids: np.ndarray) -> None:
        """Appends ids of any integer dtype. ValueError if one is outside the vocabulary."""
        if ids.size == 0:
            return
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"an id of {ids.min()} to {ids.max()} is outside the vocabulary of {self.vocab_size}")
        tokens = np.ascontiguousarray(ids, dtype=self.dtype)
        self._hasher.update(tokens.data)
        self._file.write(tokens)
        self.count += tokens.size

    def close(self) -> None:
        if self.count == 0:
            self.discard()
            raise ValueError("a shard without tokens")
        dtype = next(number for number, dtype in DTYPES.items() if dtype == self.dtype)
        header = bytearray(HEADER.pack(SHARD_MAGIC, VERSION, dtype, self.count, self.vocab_size, self.tokenizer_hash,
                                       self.end_of_document_id, self._hasher.intdigest(), 0))
        struct.pack_into("<Q", header, HASHED_BYTES, xxhash.xxh3_64_intdigest(bytes(header[:HASHED_BYTES])))
        self._file.rewrite(0, header)
        self._file.publish()

    def discard(self) -> None:
        self._file.discard()
