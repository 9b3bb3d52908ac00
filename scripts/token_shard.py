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

# Versions: tokens alone; with the documents' starts and what of them is learned; the same, of documents that are pairs.
PLAIN, OF_DOCUMENTS, OF_PAIRS = 1, 2, 3
HEADER_BYTES = 256
HEADER = struct.Struct("<8sIIQQQqQQ")
HASHED_BYTES = 56  # of the header
DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u2"), 5: np.dtype("<u4")}  # the dtype numbers of tensor files
MAX_VOCABULARY = 1_000_000


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The narrowest token dtype that holds every id."""
    return DTYPES[4] if vocab_size <= 65536 else DTYPES[5]


class TokenShard:
    """A validated shard. `tokens` is a read-only view of the file; verify() checks its hash and every id.

    `starts`: of each document its first token, and the end of the last one, i64; None in a shard without documents. `of_pairs`:
    documents are pairs of answers to one prompt, the chosen one and then the rejected one.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._data = map_file(self.path)
        header = _read_header(self.path, self._data)
        _, version, dtype, self.count, self.vocab_size, self.tokenizer_hash, number, self._hash, _ = header
        self.end_of_document_id = number if version == PLAIN else -1
        self.tokens = np.frombuffer(self._data, dtype=DTYPES[dtype], offset=HEADER_BYTES, count=self.count)
        self.starts = None if version == PLAIN else self._read_starts(number)
        self.of_pairs = version == OF_PAIRS

    def _read_starts(self, documents: int) -> np.ndarray:
        starts = np.frombuffer(self._data, dtype="<u8", offset=HEADER_BYTES + self.tokens.nbytes, count=documents)
        least = np.concatenate([np.zeros(1, np.uint64), starts[:-1] + np.uint64(1)])
        most = np.where(np.arange(documents) == 0, np.uint64(0), np.uint64(self.count - 1))
        bad = np.flatnonzero((starts < least) | (starts > most))
        if bad.size:
            i = int(bad[0])
            fail(self.path, f"document {i}: begins at token {starts[i]}, expected {least[i]} to {most[i]}. "
                            "The shard is damaged: get or make it again")
        return np.append(starts, np.uint64(self.count)).astype(np.int64)

    def learned(self) -> np.ndarray:
        """Whether each token is learned, bool [count]. Every one in a shard without documents."""
        if self.starts is None:
            return np.ones(self.count, dtype=bool)
        at = HEADER_BYTES + self.tokens.nbytes + 8 * (self.starts.size - 1)
        bits = np.frombuffer(self._data, dtype=np.uint8, offset=at)
        return np.unpackbits(bits, count=self.count, bitorder="little").astype(bool)

    def verify(self) -> None:
        bad = np.flatnonzero(self.tokens >= self.vocab_size)
        if bad.size:
            fail(self.path, f"token {bad[0]}: got id {self.tokens[bad[0]]}, expected at most {self.vocab_size - 1}. "
                            "The shard is damaged: get or make it again")
        got = xxhash.xxh3_64_intdigest(memoryview(self._data)[HEADER_BYTES:])
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
    if version not in (PLAIN, OF_DOCUMENTS, OF_PAIRS):
        fail(path, f"version: got {version}, expected {PLAIN} to {OF_PAIRS}. "
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
    _, version, dtype, count, vocab_size, _, number, _, _ = header
    if dtype not in DTYPES:
        fail(path, f"dtype: got {dtype}, expected 4 (u16) or 5 (u32)")
    limit = 65536 if dtype == 4 else MAX_VOCABULARY
    if not 1 <= vocab_size <= limit:
        fail(path, f"vocab_size: got {vocab_size}, expected 1 to {limit} for {'u16' if dtype == 4 else 'u32'}")
    if version == PLAIN and not -1 <= number < vocab_size:
        fail(path, f"end_of_document_id: got {number}, expected -1 to {vocab_size - 1}")
    if count == 0:
        fail(path, "count: got 0, expected at least one token")
    if version != PLAIN and not 1 <= number <= count:
        fail(path, f"documents: got {number}, expected 1 to {count}")
    if version == OF_PAIRS and number % 2:
        fail(path, f"documents: got {number}, expected an even number: they are pairs")
    expected = HEADER_BYTES + count * DTYPES[dtype].itemsize
    if version != PLAIN:
        expected += 8 * number + (count + 7) // 8
    if expected >= 1 << 64:
        fail(path, "count: size overflows 64 bits")
    if expected > size:
        fail(path, f"truncated: got {size} bytes, expected {expected} for {count} tokens. Get or make the shard again")
    if expected < size:
        fail(path, f"count: got {size} bytes, expected {expected} for {count} tokens: {size - expected} too many. "
                   "Get or make the shard again")


class ShardWriter:
    """Appends token ids, or whole documents. close() writes the header and publishes the file, which does not exist under its
    name before."""

    def __init__(self, path: str | os.PathLike[str], vocab_size: int, tokenizer_hash: int, end_of_document_id: int = -1):
        if not 1 <= vocab_size <= MAX_VOCABULARY or not -1 <= end_of_document_id < vocab_size:
            raise ValueError(f"vocabulary of {vocab_size}, end of document {end_of_document_id}")
        self.dtype = dtype_for(vocab_size)
        self.vocab_size, self.tokenizer_hash, self.end_of_document_id = vocab_size, tokenizer_hash, end_of_document_id
        self.count = 0
        self._hasher = xxhash.xxh3_64()
        self._starts: list[int] = []
        self._learned: list[np.ndarray] = []  # of each document
        self._in_pairs = 0  # documents that write_pair() has written
        self._file = AtomicFile(path)
        self._file.write(bytes(HEADER_BYTES))

    def write(self, ids: np.ndarray) -> None:
        """Appends ids of any integer dtype. ValueError if one is outside the vocabulary."""
        if ids.size == 0:
            return
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"an id of {ids.min()} to {ids.max()} is outside the vocabulary of {self.vocab_size}")
        self._append(np.ascontiguousarray(ids, dtype=self.dtype))
        self.count += ids.size

    def _append(self, values: np.ndarray) -> None:
        self._hasher.update(values.data)
        self._file.write(values)

    def write_document(self, ids: np.ndarray, learned: np.ndarray) -> None:
        """Appends a document, and for each of its ids whether it is learned. Not in one shard with write()."""
        if not 0 < ids.size == learned.size:
            raise ValueError(f"{ids.size} ids of a document, {learned.size} marks")
        self._starts.append(self.count)
        self._learned.append(learned.astype(bool))
        self.write(ids)

    def write_pair(self, chosen: tuple[np.ndarray, np.ndarray], rejected: tuple[np.ndarray, np.ndarray]) -> None:
        """Appends two answers to one prompt, each as write_document() takes it. A shard has pairs alone or none."""
        self._in_pairs += 2
        self.write_document(*chosen)
        self.write_document(*rejected)

    def close(self) -> None:
        if self.count == 0:
            self.discard()
            raise ValueError("a shard without tokens")
        if self._starts and sum(map(len, self._learned)) != self.count:
            self.discard()
            raise ValueError("tokens that are part of no document")
        if self._in_pairs not in (0, len(self._starts)):
            self.discard()
            raise ValueError("documents beside pairs")
        dtype = next(number for number, dtype in DTYPES.items() if dtype == self.dtype)
        version, number = PLAIN, self.end_of_document_id
        if self._starts:
            version, number = OF_PAIRS if self._in_pairs else OF_DOCUMENTS, len(self._starts)
            self._append(np.array(self._starts, dtype="<u8"))
            self._append(np.packbits(np.concatenate(self._learned), bitorder="little"))
        header = bytearray(HEADER.pack(SHARD_MAGIC, version, dtype, self.count, self.vocab_size, self.tokenizer_hash,
                                       number, self._hasher.intdigest(), 0))
        struct.pack_into("<Q", header, HASHED_BYTES, xxhash.xxh3_64_intdigest(bytes(header[:HASHED_BYTES])))
        self._file.rewrite(0, header)
        self._file.publish()

    def discard(self) -> None:
        self._file.discard()
