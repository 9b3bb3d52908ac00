#!/usr/bin/env python3
"""Turns text, or conversations, into token shards for train_llama.

    python3 dev/prepare_data.py data/stories/train.txt --val data/stories/val.txt --tokenizer tokenizer.json -o data/stories
    python3 dev/prepare_data.py corpus-*.jsonl.gz --tokenizer tokenizer.json -o data/corpus --val-fraction 0.01
    python3 dev/prepare_data.py --chat chats.jsonl --model model.bin -o data/my-chats

Input is UTF-8 text, whose documents are separated by a line that holds only the separator, or JSON lines, one document
a line; either may be gzip-compressed. Writes train_00000.bin ..., val_00000.bin ... (doc/token_shard.md) and a copy of
the tokenizer, tokenizer.json. They get their names when all are complete; shards of an earlier run are replaced.

Documents: CR LF becomes LF, empty lines at the beginning and the end are dropped, empty documents are left out. Every
document is followed by the end-of-text token. A beginning-of-text token is put before it only if the tokenizer itself
puts one before a text. Special tokens that occur in the text are encoded as plain text, unless --special says otherwise.

Conversations: with --chat each line is a conversation, or a chosen and a rejected one (doc/fine_tuning.md). It is rendered by the model's chat format, or by that of
--chat-format; the shards say which tokens are learned, and where each conversation begins. chat_format.json beside them is that format,
which train_llama gives the model.

Validation: the files of --val, or a share of the documents chosen by a hash of their number and --seed. Where that
would give fewer than ten documents, each document is cut instead and its last part is for validation.

Exit codes: 2 usage, 3 bad input file, 4 cannot write, 5 disk or memory full.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import gzip
import heapq
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import needs  # noqa: E402, before the packages
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import xxhash  # noqa: E402

import chat_format  # noqa: E402
import cli  # noqa: E402
import conversations  # noqa: E402
import tensor_file  # noqa: E402
from cli import Progress, bad_file, shown  # noqa: E402
from conversations import Conversation, Counts, LeftOut, Line  # noqa: E402
from hf_config import MAX_TOKENIZER_BYTES  # noqa: E402
from hf_tokenizer import MAKE_TOKENIZER_JSON, missing_tokenizer, other_kind, tokenizer_vocabulary  # noqa: E402
from tensor_file import AtomicFile, FileError  # noqa: E402
from token_shard import MAX_VOCABULARY, ShardWriter  # noqa: E402

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
PIECE_CHARACTERS = 1 << 16  # documents are encoded in pieces of about this length
BATCH_CHARACTERS = 1 << 20  # pieces that are encoded together
MIN_VALIDATION_DOCUMENTS = 10
SMALLEST_LAST_SHARD = 1 << 18  # fewer tokens at the end of a split, perhaps no whole sequence, go into the shard before
SHARD_NAME = re.compile(r"(train|val)_\d{5,}\.bin")
TERMINATED = 143

# Where a text can be cut without changing its tokens: before a single space between a word and a letter (the space belongs to
# the word behind it); with the pre-tokenizers of GPT-2, GPT-NeoX and Llama 3 also after a single line feed between two
# characters that are not white space.
CUT_AT_SPACE = re.compile(r"(?<=\w)(?= [^\W\d_])")
CUT = re.compile(CUT_AT_SPACE.pattern + r"|(?<=\S\n)(?=\S)")

# The patterns of GPT-2, Llama 3 and Qwen 2.
_PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
KNOWN_PATTERNS = {r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", _PIECES % "{1,3}", _PIECES % ""}


# ---- reading ---------------------------------------------------------------------------------------------------------


def last_cut(text: str, begin: int, end: int, where: re.Pattern[str]) -> int:
    """The last place within (begin, end) where the text can be cut; 0 if there is none."""
    for start in (max(begin + 1, end - 1024), begin + 1):  # nearly always it is close to the end
        cut = 0
        for match in where.finditer(text, start, end):
            cut = match.start()
        if cut:
            return cut
    return 0


class PieceBuffer:
    """Cuts a text that arrives in parts into pieces whose tokens are those of the whole. `cut`: where it may; None: nowhere."""

    def __init__(self, cut: re.Pattern[str] | None) -> None:
        self._cut = cut
        self._parts: list[str] = []
        self._length = 0
        self._wanted = PIECE_CHARACTERS  # grows where no cut is found, so that the search stays linear

    def add(self, part: str) -> Iterator[str]:
        """Takes the next part and yields the pieces that are complete."""
        self._parts.append(part)
        self._length += len(part)
        if self._cut is None or self._length < self._wanted:
            return
        text, begin = "".join(self._parts), 0
        while len(text) - begin >= self._wanted:
            if cut := last_cut(text, begin, begin + self._wanted, self._cut):
                yield text[begin:cut]
                begin, self._wanted = cut, PIECE_CHARACTERS
            else:
                self._wanted *= 2
        self._parts, self._length = [text[begin:]], len(text) - begin

    def finish(self) -> str:
        """What is left, without the line feeds at the end of the document."""
        return "".join(self._parts).rstrip("\n")


def pieces_of(lines: Iterable[str], where: re.Pattern[str] | None = CUT) -> Iterator[str]:
    """A document in pieces, without line feeds at its ends; nothing for an empty document."""
    buffer, begun = PieceBuffer(where), False
    for line in lines:
        if not begun:
            line = line.lstrip("\n")
            begun = bool(line)
        if line:
            yield from buffer.add(line)
    if rest := buffer.finish():
        yield rest


@dataclass(frozen=True)
class Source:
    """A text file and how to read it."""

    path: Path
    jsonl: bool
    json_field: str
    separator: str
    cut: re.Pattern[str] | None

    def values(self, progress: Progress | None = None) -> Iterator[tuple[Line, Any]]:
        """The values of JSON lines."""
        for number, line in enumerate(self.lines(progress), 1):
            if line.strip():
                yield Line(self.path, number), cli.parse_json(line.encode("utf-8"), self.path, f"line {number}")

    def documents(self, progress: Progress | None = None) -> Iterator[Iterator[str]]:
        """The documents, each as an iterator of its pieces, which is used up before the next document is asked for."""
        if self.jsonl:
            for line_of_value, value in self.values(progress):
                yield pieces_of([self._text_of(value, line_of_value.number)], self.cut)
            return
        lines = self.lines(progress)
        for line in lines:  # the first line of a document
            yield pieces_of(self._until_separator(line, lines), self.cut)

    def _until_separator(self, line: str | None, lines: Iterator[str]) -> Iterator[str]:
        while line is not None and line.rstrip("\n") != self.separator:
            yield line
            line = next(lines, None)

    def _text_of(self, value: Any, number: int) -> str:
        where = f"line {number}"
        if not isinstance(value, dict):
            bad_file(self.path, where, f"got a JSON {cli.json_type(value)}, expected an object")
        text = value.get(self.json_field)
        if not isinstance(text, str):
            got = f"a JSON {cli.json_type(text)}" if self.json_field in value else "nothing"
            bad_file(self.path, f"{where}: {shown(self.json_field)}", f"got {got}, expected the text",
                     "--jsonl-field names the member that holds it")
        if any("\ud800" <= character <= "\udfff" for character in text):
            bad_file(self.path, where, "got half of a surrogate pair, expected Unicode text")
        return text.replace("\r\n", "\n")

    def lines(self, progress: Progress | None = None) -> Iterator[str]:
        """Lines with LF at their end. No more than one is in memory."""
        number = 0
        try:
            with open(self.path, "rb") as raw:
                compressed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                done = 0
                for line in gzip.GzipFile(fileobj=raw) if compressed else raw:
                    number += 1
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield text[:-2] + "\n" if text.endswith("\r\n") else text
                    if progress is not None and number % 256 == 0:
                        progress.advance(raw.tell() - done)
                        done = raw.tell()
        except UnicodeDecodeError as problem:
            bad_file(self.path, f"line {number}", f"got byte {problem.start + 1} of it wrong, expected UTF-8",
                     "Convert the text to UTF-8")
        except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
            bad_file(self.path, f"line {number + 1}", f"the gzip data is damaged: {shown(str(problem))}",
                     "Get the file again")
        except OSError as problem:
            bad_file(self.path, "", f"cannot be read: {problem.strerror}")


def open_sources(paths: list[Path], options: argparse.Namespace, cut: re.Pattern[str] | None) -> list[Source]:
    sources = []
    for path in paths:
        if not path.is_file():
            bad_file(path, "", "not a file" if path.exists() else "no such file")
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        jsonl = options.format == "jsonl" or options.format == "auto" and plain.suffix in (".jsonl", ".ndjson")
        sources.append(Source(path, jsonl, options.jsonl_field, options.document_separator, cut))
    return sources


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


MAX_REPLACEMENT = 64  # bytes that a normalizer may put for one match: a text does not grow without bounds


@contextlib.contextmanager
def library_speaks_through_us(path: Path) -> Iterator[None]:
    """Turns what the tokenizers library raises into our error. Its panics are no Exception, and print to stderr besides."""
    sys.stderr.flush()
    with contextlib.ExitStack() as restore:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        restore.callback(os.close, kept)
        restore.callback(os.dup2, kept, 2)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        try:
            yield
        except BaseException as problem:
            if isinstance(problem, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            bad_file(path, "", f"not accepted by tokenizers {tokenizers.__version__}: {shown(str(problem))}")


def check_tokenizer(tokenizer: dict[str, Any], path: Path) -> None:
    """Refuses what costs the library memory or time out of proportion to the file."""
    model = tokenizer["model"]
    vocab, added = model.get("vocab"), tokenizer.get("added_tokens")
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()),
           *(token.get("id") for token in (added if isinstance(added, list) else ()) if isinstance(token, dict))]
    for number in ids:
        if type(number) is int and not 0 <= number < MAX_VOCABULARY:
            bad_file(path, "vocabulary", f"got the id {number}, expected ids from 0 to {MAX_VOCABULARY - 1}")
    level: list[Any] = [tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")]
    while level:
        for node in level:
            for key in ("content", "prepend", "replacement") if isinstance(node, dict) else ():
                if isinstance(node.get(key), str) and len(node[key].encode("utf-8", "surrogatepass")) > MAX_REPLACEMENT:
                    bad_file(path, f"{shown(node.get('type'))} {key}", f"got {len(node[key])} characters, expected at most "
                             f"{MAX_REPLACEMENT} bytes")
        level = [child for node in level if isinstance(node, (dict, list))
                 for child in (node.values() if isinstance(node, dict) else node)]


def tokenizer_from(text: str, special: bool = False) -> tokenizers.Tokenizer:
    """`special`: names of special tokens in a text are these tokens; otherwise they are text."""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not special
    return tokenizer


def steps_of(stage: Any, children: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if stage is None:
        return []
    return [step for child in stage[children] for step in steps_of(child, children)] if stage["type"] == "Sequence" else [stage]


def without_prepend(normalizer: Any) -> Any:
    steps = steps_of(normalizer, "normalizers")
    rest = [step for step in steps if step["type"] != "Prepend"]
    return normalizer if rest == steps else {"type": "Sequence", "normalizers": rest}


def is_known_split(step: dict[str, Any]) -> bool:
    """Whether it is one of those that never join what the cuts part."""
    return (step["type"] == "Split" and step["pattern"].get("Regex") in KNOWN_PATTERNS and step.get("behavior") == "Isolated"
            and not step.get("invert"))


def safe_cut(tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """Where a document may be cut without a change of its tokens; None: nowhere, and documents are encoded whole."""
    normalizers = steps_of(tokenizer.get("normalizer"), "normalizers")
    steps = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    known = [step for step in steps if step["type"] in ("ByteLevel", "Metaspace", "Digits") or is_known_split(step)]
    if known != steps or any(step["type"] not in ("NFC", "Prepend", "Replace") for step in normalizers):
        return None
    if steps and steps[-1]["type"] == "ByteLevel":
        splits = steps[-1].get("use_regex") is not False or any(step["type"] == "Split" for step in steps)
        if not splits or any(step["type"] != "NFC" for step in normalizers):
            return None
        return CUT_AT_SPACE if steps[-1].get("add_prefix_space") is not False else CUT
    return CUT_AT_SPACE if words_begin_at_spaces(tokenizer, normalizers, steps) else None


def words_begin_at_spaces(tokenizer: dict[str, Any], normalizers: list[dict[str, Any]], steps: list[dict[str, Any]]) -> bool:
    """Of a SentencePiece-style tokenizer: whether no token can reach across the cut before a single space."""
    model, mark = tokenizer["model"], " "
    for step in normalizers:
        if step["type"] == "Replace":
            mark = step["content"] if step["pattern"]["String"] == mark else mark
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    if metaspace is not None and mark == " ":
        mark = metaspace["replacement"]
    others = [step for step in normalizers if step["type"] == "Replace" and step["pattern"]["String"] != " "]
    if re.match(r"\w", mark) or mark not in model["vocab"] or any(step["content"] == mark for step in others):
        return False
    if any(step["type"] == "Split" for step in steps):
        return False
    if model.get("ignore_merges") and (metaspace is None or metaspace.get("split") is False):
        return False  # a piece may read as a token that the whole does not
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    if any(mark in "".join(merge).lstrip(mark) for merge in merges):
        return False
    prepends = any(step["type"] == "Prepend" for step in normalizers)
    return not any(" " in token["content"] or mark in token["content"] or token.get("lstrip") or token.get("rstrip")
                   or prepends and token.get("normalized", not token.get("special")) for token in tokenizer.get("added_tokens") or [])


def cuts_no_special_token(tokenizer: dict[str, Any]) -> bool:
    """Whether no special token is found otherwise in the pieces of a text than in the whole."""
    special = [token for token in tokenizer.get("added_tokens") or [] if token.get("special")]
    return not any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") or re.search(r"\s", token["content"])
                   for token in special)


def read_tokenizer(path: Path) -> bytes:
    """The text of a tokenizer.json."""
    if not path.exists() and (why := missing_tokenizer(path.parent)):
        bad_file(path, "", "no such file", why)
    text = cli.read_bytes(path, MAX_TOKENIZER_BYTES)
    if kind := other_kind(text):
        bad_file(path, "", f"this is {kind}, expected tokenizer.json", MAKE_TOKENIZER_JSON)
    return text


class Encoder:
    """A tokenizer.json, and what it takes to make documents of token ids with it."""

    def __init__(self, path: Path, end_of_text: str | None, text: bytes | None = None, chat: bool = False, special: bool = False):
        """`text`: that of the tokenizer.json in the model file `path`. `chat`: no document ends by an end-of-text token."""
        self.path = path
        self.text = read_tokenizer(path) if text is None else text
        self.parsed = parsed = cli.parse_json_object(self.text, path)
        if not isinstance(parsed.get("model"), dict):
            bad_file(path, "model", "missing", "A tokenizer.json of the Hugging Face tokenizers library is needed")
        check_tokenizer(parsed, path)
        with library_speaks_through_us(path):
            self._tokenizer = tokenizer_from(self.text.decode("utf-8"), special)
        self.hash = xxhash.xxh3_64_intdigest(self.text)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 1 <= self.vocab_size <= MAX_VOCABULARY:
            bad_file(path, "vocabulary", f"got {self.vocab_size} tokens, expected 1 to {MAX_VOCABULARY}")
        self.end_of_text = -1 if chat else self._find_end_of_text(end_of_text)
        self.prefix = self._find_prefix()
        tokenizer_vocabulary(self.text, path)
        self.cut = safe_cut(parsed) if not special or cuts_no_special_token(parsed) else None
        # Of the later pieces of a document, which begin with a space: without what is put in front of a text.
        rest = parsed | {"normalizer": without_prepend(parsed.get("normalizer"))}
        self._rest = self._tokenizer if rest == parsed else tokenizer_from(json.dumps(rest), special)

    def _find_end_of_text(self, wanted: str | None) -> int:
        for token in [wanted] if wanted is not None else END_OF_TEXT:
            if (number := self._tokenizer.token_to_id(token)) is not None:
                return number
        if wanted is not None:
            raise FileError(cli.USAGE, f"--eos: got {shown(wanted)}, expected a token of {shown(str(self.path))}")
        bad_file(self.path, "vocabulary", f"has none of {', '.join(END_OF_TEXT)}", "Name the end-of-text token by --eos")

    def _find_prefix(self) -> np.ndarray:
        """The ids that the tokenizer's post-processor puts before a text: a beginning-of-text token, or nothing."""
        with library_speaks_through_us(self.path):
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            full = self._tokenizer.encode("a", add_special_tokens=True).ids
        begin = next((i for i in range(len(full)) if full[i:i + len(plain)] == plain), 0)
        return np.array(full[:begin], dtype=np.uint32)

    def tokens(self, ids: list[int]) -> list[str]:
        """The spelling of those ids that are tokens."""
        return [token for token in map(self._tokenizer.id_to_token, ids) if token]

    def decode(self, ids: list[int]) -> str:
        with library_speaks_through_us(self.path):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode(self, texts: list[str], begins: list[bool] | None = None) -> list[np.ndarray]:
        """The ids of each text. `begins`: whether it begins a document; without it they are the pieces of one document."""
        begins = [i == 0 for i in range(len(texts))] if begins is None else begins
        ids: list[np.ndarray] = [np.array([], dtype=np.uint32)] * len(texts)
        same = self._rest is self._tokenizer
        for tokenizer, first in [(self._tokenizer, True)] + ([] if same else [(self._rest, False)]):
            chosen = [i for i, begin in enumerate(begins) if same or begin == first]
            with library_speaks_through_us(self.path):
                encodings = tokenizer.encode_batch_fast([texts[i] for i in chosen], add_special_tokens=False)
            for i, encoding in zip(chosen, encodings, strict=True):
                ids[i] = np.array(encoding.ids, dtype=np.uint32)
        return ids


# ---- writing ---------------------------------------------------------------------------------------------------------


def row_tokens(versions: list[Conversation]) -> int:
    """How much of a row of train_llama they take: the last token of each is no input."""
    return sum(one.ids.size - 1 for one in versions)


@dataclass
class Split:
    """The shards of "train" or "val", written one after the other."""

    name: str
    directory: Path
    encoder: Encoder
    shard_tokens: int
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    turns: int = 0    # of conversations, and their learned tokens and lengths
    learned: int = 0
    lengths: list[int] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    _writer: ShardWriter | None = None
    _held: list[np.ndarray] = field(default_factory=list)  # behind a full shard, too few for one of their own
    _held_tokens: int = 0

    def _open_writer(self) -> ShardWriter:
        if self._writer is None:
            self.shards.append(f"{self.name}_{len(self.shards):05d}.bin")
            self._writer = ShardWriter(self.directory / self.shards[-1], self.encoder.vocab_size, self.encoder.hash,
                                       self.encoder.end_of_text)
        return self._writer

    def write_conversation(self, versions: list[Conversation]) -> None:
        """A conversation, or a pair of them. They are not cut: a shard ends with the one that fills it."""
        self.documents += 1
        self.tokens += sum(one.ids.size for one in versions)
        self.turns += sum(one.turns for one in versions)
        self.learned += sum(int(one.learned.sum()) for one in versions)
        self.lengths.append(row_tokens(versions) + 1)
        writer = self._open_writer()
        documents = [(one.ids, one.learned) for one in versions]
        if len(documents) == 2:
            writer.write_pair(*documents)
        else:
            writer.write_document(*documents[0])
        if writer.count >= self.shard_tokens:
            writer.close()
            self._writer = None

    def write(self, ids: np.ndarray) -> None:
        self.tokens += ids.size
        while ids.size:
            writer = self._open_writer()
            taken = ids[:self.shard_tokens - writer.count]
            writer.write(taken)
            ids = ids[taken.size:]
            if ids.size:  # the shard is full
                self._held.append(ids)
                self._held_tokens += ids.size
                if self._held_tokens < min(self.shard_tokens, SMALLEST_LAST_SHARD):
                    return
                ids, self._held, self._held_tokens = np.concatenate(self._held), [], 0
                writer.close()
                self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            for ids in self._held:
                self._writer.write(ids)
            self._writer.close()


@dataclass
class Piece:
    """A part of a document on its way to a split."""

    split: Split
    text: str
    first: bool
    last: bool = False


class Pipeline:
    """Collects pieces and encodes them in batches, in order."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self._batch: list[Piece] = []
        self._characters = 0

    def add_document(self, split: Split, pieces: Iterable[str]) -> None:
        piece = None
        for text in pieces:
            if piece is not None:
                self._add(piece)
            piece = Piece(split, text, first=piece is None)
        if piece is not None:
            piece.last = True
            split.documents += 1
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        self._batch.append(piece)
        self._characters += len(piece.text)
        if self._characters >= BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        batch, self._batch, self._characters = self._batch, [], 0
        ids_of_batch = self.encoder.encode([piece.text for piece in batch], [piece.first for piece in batch])
        for piece, ids in zip(batch, ids_of_batch, strict=True):
            if piece.first:
                piece.split.write(self.encoder.prefix)
            piece.split.write(ids)
            if piece.last:
                piece.split.write(np.array([self.encoder.end_of_text], dtype=np.uint32))
            piece.split.text_bytes += len(piece.text.encode("utf-8"))


# ---- training and validation -----------------------------------------------------------------------------------------


def is_for_validation(index: int, seed: int, fraction: float) -> bool:
    """Depends on the document's number and the seed alone."""
    return xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), seed) < fraction * 2.0**64


def cut_at(pieces: Iterator[str], position: int, where: re.Pattern[str] | None) -> tuple[Iterator[str], Iterator[str]]:
    """The text before and after the first line end at or after `position`; the first part is to be used up first."""
    rest: list[str] = []

    def before() -> Iterator[str]:
        left = position
        for piece in pieces:
            if len(piece) <= left:
                left -= len(piece)
                yield piece
                continue
            end = piece.find("\n", left)
            cut = left if end < 0 else end
            rest.append(piece[cut:])
            if cut:
                yield piece[:cut]
            return

    return before(), pieces_of(chain(rest, pieces), where)


def lengths_if_few(sources: list[Source], fraction: float) -> list[int] | None:
    """Characters of each document, or None once there are enough documents to choose whole ones for validation."""
    lengths: list[int] = []
    for source in sources:
        for pieces in source.documents():
            lengths.append(sum(map(len, pieces)))
            if sum(1 for length in lengths if length) * fraction >= MIN_VALIDATION_DOCUMENTS:
                return None
    return lengths


def add_with_split(sources: list[Source], pipeline: Pipeline, train: Split, val: Split, options: argparse.Namespace,
                   progress: Progress) -> None:
    """Divides the documents between training and validation."""
    fraction = options.val_fraction
    lengths = lengths_if_few(sources, fraction) if fraction > 0 else None
    index = 0
    for source in sources:
        for pieces in source.documents(progress):
            if lengths is not None:
                before, after = cut_at(pieces, round(lengths[index] * (1 - fraction)), source.cut)
                pipeline.add_document(train, before)
                pipeline.add_document(val, after)
            else:
                chosen = is_for_validation(index, options.seed, fraction)
                pipeline.add_document(val if chosen else train, pieces)
            index += 1


# ---- conversations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelParts:
    """What a model file says of texts."""

    tokenizer: bytes
    chat_format: Any        # as JSON, or None
    end_ids: list[int]      # of tokens that end an answer
    positions: int
    quantised: bool


def parts_of_model(path: Path) -> ModelParts:
    file = tensor_file.read(path, expected="model")
    if "tokenizer.json" not in file.tensors:
        bad_file(path, "tokenizer.json", "missing: the model was converted without one", "Give it by --tokenizer")
    file.verify_tensor("tokenizer.json")
    model = file.config.get("model")
    ends, positions = (model.get("eos_ids"), model.get("max_positions")) if isinstance(model, dict) else (None, None)
    if not isinstance(ends, list) or not all(type(one) is int and 0 <= one < MAX_VOCABULARY for one in ends):
        bad_file(path, "model.eos_ids", f"got {shown(ends)}, expected a list of ids")
    if type(positions) is not int or not 1 <= positions <= MAX_SEQ_LEN:
        bad_file(path, "model.max_positions", f"got {shown(positions)}, expected 1 to {MAX_SEQ_LEN}")
    return ModelParts(bytes(file.bytes("tokenizer.json")), file.config.get("chat_format"), ends, positions, "quantization" in file.config)


def chosen_format(choice: str | None, stored: Any, path: Path) -> tuple[chat_format.ChatFormat, Any]:
    """That of --chat-format, or that which the file `path` has; and as JSON."""
    if choice in chat_format.NAMED:
        form = chat_format.NAMED[choice]()
    elif choice is not None:
        if not choice.endswith(".json"):
            raise FileError(cli.USAGE, f"--chat-format: got {shown(choice)}, expected {', '.join(chat_format.NAMED)} or a .json file")
        form = chat_format.read_format(Path(choice))
    elif stored is None:
        bad_file(path, "chat_format", "missing: the model has no chat format", "Convert it with its chat template, or name one by "
                 "--chat-format")
    else:
        return chat_format.from_json(stored, f"{path}: chat_format"), stored
    return form, chat_format.to_json(form)


UNITS = {False: "conversations", True: "pairs"}  # of lines, by whether they are pairs


class ChatPipeline:
    """Reads conversations, encodes them in batches, in order, and counts what is left out."""

    def __init__(self, encoder: Encoder, form: chat_format.ChatFormat, form_as_json: Any, ends: list[str], options: argparse.Namespace):
        self.counts = Counts()
        self.form_as_json = form_as_json
        self.first: tuple[Line, list[Conversation]] | None = None  # of those that are written
        self.pairs: bool | None = None  # whether lines are pairs; None before the first one
        self._encoder, self._options = encoder, options
        stand_ins = conversations.StandIns(encoder.parsed, form)
        with library_speaks_through_us(encoder.path):
            tokenizer = tokenizer_from(json.dumps(stand_ins.document))
        self._renderer = conversations.Renderer(form, ends, stand_ins, tokenizer, options.learn == "all")
        self._batch: list[tuple[Split, Line, conversations.Example]] = []
        self._characters = 0

    def add(self, split: Split, line: Line, value: Any) -> None:
        pair = conversations.is_pair(value, self._options.fields)
        if self.pairs not in (None, pair):
            bad_file(line.path, f"line {line.number}", f"got {UNITS[pair]}, in a file of {UNITS[not pair]}", "Prepare each kind by itself")
        self.pairs = pair
        try:
            example = conversations.example_of(value, self._options.fields, line)
        except LeftOut as why:
            return self.counts.leave_out(str(why), line)
        self._batch.append((split, line, example))
        self._characters += sum(len(message.content) for messages in example.versions for message in messages)
        if self._characters >= BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        batch, self._batch, self._characters = self._batch, [], 0
        with library_speaks_through_us(self._encoder.path):
            found = iter(self._renderer.encode([messages for _, _, example in batch for messages in example.versions],
                                               [example.prompt_answers for _, _, example in batch for _ in example.versions]))
        for split, line, example in batch:
            versions: list[Conversation] = []
            refused = None
            for version in islice(found, len(example.versions)):
                if isinstance(version, LeftOut):
                    refused = refused or version
                else:
                    versions.append(version)
            if refused is not None:
                self.counts.leave_out(str(refused), line)
            elif fitting := self._fitting(example, versions, line):
                self.first = self.first or (line, fitting)
                split.write_conversation(fitting)

    def _fitting(self, example: conversations.Example, versions: list[Conversation], line: Line) -> list[Conversation]:
        """What of them fits into --seq-len: of a conversation as many tokens as it allows, of a pair both or nothing."""
        longest = self._options.seq_len + 1
        if row_tokens(versions) < longest:
            return versions
        if len(versions) == 2:
            self.counts.leave_out(f"chosen and rejected do not fit into {longest - 1:,} tokens together", line)
            return []
        conversation = versions[0]
        if self._options.truncate:
            cut = Conversation(conversation.turns, conversation.ids[:longest], conversation.learned[:longest], [])
            fitting = cut if cut.learned[1:].any() else None
            self.counts.truncated += fitting is not None
        else:
            with library_speaks_through_us(self._encoder.path):
                fitting = conversations.fit(self._renderer, example.versions[0], conversation, longest)
            self.counts.cut += fitting is not None
        if fitting is None:
            self.counts.leave_out(f"no answer within {longest:,} tokens", line)
            return []
        return [fitting]


def prepare_chat(options: argparse.Namespace, model: ModelParts | None, staging: Path) -> tuple[Encoder, list[Split], ChatPipeline]:
    """Writes all shards of conversations into `staging`."""
    form, form_as_json = chosen_format(options.chat_format, model and model.chat_format, options.model or options.tokenizer)
    options.seq_len = options.seq_len or (model.positions if model else MAX_SEQ_LEN)
    encoder = Encoder(options.model or options.tokenizer, None, model.tokenizer if model else None, chat=True)
    pipeline = ChatPipeline(encoder, form, form_as_json, [*form.end, *encoder.tokens(model.end_ids if model else [])], options)
    sources, val_sources = (open_sources(paths, options, None) for paths in (options.text, options.val or []))
    train, val = (Split(name, staging, encoder, options.shard_tokens) for name in ("train", "val"))
    chosen: set[int] = set()
    if options.val_fraction > 0:
        count = sum(1 for source in sources for line in source.lines() if line.strip())
        chosen = chosen_for_validation(count, options.seed, options.val_fraction)
    progress = Progress("encoding", sum(source.path.stat().st_size for source in sources + val_sources))
    number = 0
    for group, of_val in ((sources, False), (val_sources, True)):
        for source in group:
            for line, value in source.values(progress):
                pipeline.add(val if of_val or number in chosen else train, line, value)
                number += not of_val
    pipeline.flush()
    progress.finish()
    finish_splits(train, val, options, UNITS[bool(pipeline.pairs)][:-1], "".join(f"; {said}" for said in pipeline.counts.lines(options.seq_len + 1)))
    return encoder, [split for split in (train, val) if split.tokens], pipeline


def chosen_for_validation(count: int, seed: int, fraction: float) -> set[int]:
    """At least one of several conversations, by their numbers and the seed alone."""
    if count < 2:
        return set()
    return set(heapq.nsmallest(max(1, round(count * fraction)), range(count), lambda i: xxhash.xxh3_64_intdigest(i.to_bytes(8, "little"), seed)))


def beginning(path: Path, model: ModelParts | None, splits: list[Split], encoder: Encoder) -> str:
    """What train_llama begins with: a model, beside whose quantised matrices only an adapter is trained, or a preset."""
    if model is None:
        return f"--config {preset_for(splits[0].tokens, encoder.vocab_size)}"
    return f"--model {cli.pasteable(path)}" + " --lora-r 16" * model.quantised


def report_chat(options: argparse.Namespace, model: ModelParts | None, encoder: Encoder, splits: list[Split], pipeline: ChatPipeline) -> None:
    for split in splits:
        unit = UNITS[bool(pipeline.pairs)]
        one_or_more = (unit[:-1] if split.documents == 1 else unit).ljust(len(unit))
        print(f"{split.name:<5} {split.documents:>10,} {one_or_more} {split.turns:>10,} turns {split.tokens:>14,} tokens "
              f"{100 * split.learned / split.tokens:5.1f} % learned   {shards_text(split)}")
    lengths = np.sort(np.concatenate([split.lengths for split in splits]))
    shares = ", ".join(f"{share} % up to {lengths[(len(lengths) - 1) * share // 100]:,}" for share in (50, 90, 99))
    print(f"lengths: {shares}, longest {lengths[-1]:,} tokens")
    for said in pipeline.counts.lines(options.seq_len + 1):
        print(said)
    if pipeline.first is not None:
        line, versions = pipeline.first
        colour = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        print(f"\n{tensor_file.escaped(line.path.name)[1:-1]} line {line.number}:")
        for said in chain.from_iterable(conversations.example(one, encoder.decode, colour) for one in versions):
            print(f"  {said}")
    begins = beginning(options.model, model, splits, encoder)
    seq_len = min(options.seq_len, -(-(int(lengths[-1]) - 1) // 64) * 64)
    few = " --micro-batch 1" if splits[0].tokens < DEFAULT_MICRO_BATCH * seq_len else ""  # a step would read its rows several times
    print(f"\nNext:\n  {needs.program('train_llama')} {begins} {shard_arguments(options.output, splits)} --seq-len {seq_len} "
          f"--epochs 2{few} --out {cli.unused('runs/mine')}{' --objective dpo' if pipeline.pairs else ''}")


# ---- the whole -------------------------------------------------------------------------------------------------------


STAGING = ".incomplete-"


@contextlib.contextmanager
def staging_directory(output: Path) -> Iterator[Path]:
    """A directory in `output` that goes away with this process's work, however it ends; those of runs that were killed are
    removed on the way. A lock says that a run lives."""
    for left in output.glob(f"{STAGING}????????"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if all(SHARD_NAME.match(name) for name in os.listdir(left)):
                    shutil.rmtree(left)
            finally:
                os.close(descriptor)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=output))
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def prepare(options: argparse.Namespace, model: ModelParts | None, staging: Path) -> tuple[Encoder, list[Split]]:
    """Writes all shards into `staging`."""
    encoder = Encoder(options.model or options.tokenizer, options.eos, model.tokenizer if model else None, special=options.special)
    sources, val_sources = (open_sources(paths, options, encoder.cut) for paths in (options.text, options.val or []))
    train, val = (Split(name, staging, encoder, options.shard_tokens) for name in ("train", "val"))
    pipeline = Pipeline(encoder)
    progress = Progress("encoding", sum(source.path.stat().st_size for source in sources + val_sources))
    if options.val:
        for split, group in ((train, sources), (val, val_sources)):
            for source in group:
                for pieces in source.documents(progress):
                    pipeline.add_document(split, pieces)
    else:
        add_with_split(sources, pipeline, train, val, options, progress)
    pipeline.flush()
    progress.finish()
    finish_splits(train, val, options, "document")
    return encoder, [split for split in (train, val) if split.tokens]


def finish_splits(train: Split, val: Split, options: argparse.Namespace, unit: str, why: str = "") -> None:
    """Closes the shards. FileError BAD_FILE for a split without text; `why` there is none."""
    for split, group in ((train, options.text), (val, options.val or [])):
        split.close()
        if split.tokens < 2 and (group or options.val_fraction > 0):
            bad_file(", ".join(map(str, group or options.text)), "", f"no text for {split.name}, expected at least one "
                     f"{unit}{why}", "Give more text" if group else "Give more text, or --val-fraction 0")


def publish(output: Path, staging: Path, encoder: Encoder, splits: list[Split], form: Any = None) -> int:
    """Moves the finished shards to their names; returns how many shards of an earlier run had no successor. `form`: the chat format of
    conversations, as JSON."""
    new = {name for split in splits for name in split.shards}
    for name in sorted(new):
        os.replace(staging / name, output / name)
    old = [path for path in output.iterdir() if SHARD_NAME.fullmatch(path.name) and path.name not in new]
    for path in old:
        path.unlink()
    if form is None:
        (output / "chat_format.json").unlink(missing_ok=True)
    else:
        text = json.dumps(form).encode()
        with AtomicFile(output / "chat_format.json", len(text)) as file:
            file.write(text)
    with AtomicFile(output / "tokenizer.json", len(encoder.text)) as file:  # its sync of the directory covers the renames
        file.write(encoder.text)
    return len(old)


def shards_text(split: Split) -> str:
    return f"{len(split.shards)} shard" + ("s" if len(split.shards) > 1 else "")


def shard_arguments(output: Path, splits: list[Split]) -> str:
    return " ".join(f"--{split.name} {cli.pasteable(glob.escape(str(output / split.name)) + '_*.bin')}" for split in splits)


def report(options: argparse.Namespace, model: ModelParts | None, encoder: Encoder, splits: list[Split]) -> None:
    for split in splits:
        print(f"{split.name:<5} {split.documents:>10,} documents {split.tokens:>14,} tokens "
              f"{split.text_bytes / split.tokens:5.2f} bytes per token   {shards_text(split)}")
    print(f"vocabulary {encoder.vocab_size:,}, end of text {encoder.end_of_text}")
    arguments = shard_arguments(options.output, splits)
    begins = beginning(options.model, model, splits, encoder)
    if splits[0].tokens <= DEFAULT_SEQ_LEN:  # of less there is no sequence
        arguments += f" --seq-len {splits[0].tokens - 1}"
    train = needs.program("train_llama")
    print(f"\nNext:\n  {train} {begins} {arguments} --out {cli.unused('runs/mine')}")
    if not model:
        print(f"(a new model; to tune one with this tokenizer: --model FILE in the place of {begins})")


DEFAULT_MICRO_BATCH, DEFAULT_SEQ_LEN, MAX_SEQ_LEN = 8, 256, 1 << 24  # of train_llama


# The presets of train_llama, smaller models first: parameters of the layers, and for each token of the vocabulary.
PRESETS = {"tiny": (1_574_592, 192), "d12": (75_516_672, 768), "smollm2-135m": (106_203_456, 576),
           "tinyllama-1.1b": (968_976_384, 4096), "llama3.2-1b": (973_146_112, 2048), "llama3.2-3b": (2_818_747_392, 3072),
           "llama3.1-8b": (6_979_588_096, 8192)}
# Twenty tokens for a parameter (Hoffmann et al., 2022), of which the text read four times makes up for all but five
# (Muennighoff et al., 2023).
TOKENS_PER_PARAMETER = 5


def preset_for(tokens: int, vocabulary: int) -> str:
    """The largest preset that so many tokens of text can train; the smallest where none can be."""
    fitting = [name for name, (layers, width) in PRESETS.items()
               if TOKENS_PER_PARAMETER * (layers + width * vocabulary) <= tokens]
    return fitting[-1] if fitting else "tiny"


def parse_arguments() -> argparse.Namespace:
    parser = cli.Parser(prog="prepare_data.py", description=__doc__)
    parser.add_argument("text", nargs="+", type=Path, metavar="TEXT", help="text or JSON lines, also .gz")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json")
    vocabulary.add_argument("--model", type=Path, metavar="FILE", help="or the model file to be trained: it has its tokenizer, and its "
                            "chat format")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="made if absent")
    parser.add_argument("--val", nargs="+", type=Path, metavar="FILE", help="files of validation text")
    parser.add_argument("--val-fraction", type=cli.number_in(0, 0.5), metavar="F",
                        help="share of the text for validation where --val is absent (default 0.05)")
    parser.add_argument("--seed", type=cli.number_in(0, 2**64 - 1, int), default=0, metavar="S",
                        help="of the choice of validation documents (default 0)")
    parser.add_argument("--shard-tokens", type=cli.number_in(1, 2**40, int), default=100_000_000, metavar="N",
                        help="tokens of a shard; the last one has more or fewer (default 100000000)")
    parser.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto",
                        help="auto goes by the name: .jsonl and .ndjson are JSON lines")
    parser.add_argument("--jsonl-field", default="text", metavar="NAME", help="member with the text (default text)")
    parser.add_argument("--document-separator", default="<|endoftext|>", metavar="LINE",
                        help="the line between documents of a text file (default <|endoftext|>)")
    parser.add_argument("--eos", metavar="TOKEN", help=f"end-of-text token (default: {', '.join(END_OF_TEXT)})")
    parser.add_argument("--special", action="store_true", help="names of special tokens in a text become these tokens: for text that "
                        "something else has rendered")
    chat = parser.add_argument_group("conversations")
    chat.add_argument("--chat", action="store_true", help="each line is a conversation in JSON: messages; prompt and completion; or "
                      "instruction, input and output; or a pair of them: prompt, chosen and rejected")
    chat.add_argument("--chat-format", metavar="NAME|FILE", help="chatml, llama3, mistral, gemma or a .json file (default: that of --model)")
    chat.add_argument("--fields", metavar="NAME,...", help="members of a line: those of the question, joined by an empty line, and "
                      "last that of the answer")
    chat.add_argument("--learn", choices=("all", "last"), help="which answers are learned (default all)")
    chat.add_argument("--seq-len", type=cli.number_in(1, MAX_SEQ_LEN, int), metavar="T", help="that of train_llama: longer conversations "
                      "are cut behind an answer (default: the positions of --model)")
    chat.add_argument("--truncate", action="store_true", help="longer conversations are cut at T + 1 tokens, also within an answer")
    options = parser.parse_args()
    check_chat_options(parser, options)
    if options.val and options.val_fraction is not None:
        parser.error("--val and --val-fraction exclude each other")
    options.val_fraction = 0.0 if options.val else 0.05 if options.val_fraction is None else options.val_fraction
    return options


def check_chat_options(parser: cli.Parser, options: argparse.Namespace) -> None:
    given = [f"--{name.replace('_', '-')}" for name in ("chat_format", "fields", "learn", "seq_len", "truncate") if getattr(options, name)]
    if not options.chat and given:
        parser.error(f"{given[0]}: only with --chat")
    if options.chat and (options.special or options.eos or options.format == "text"):
        parser.error("--chat excludes --special, --eos and --format text: the chat format says how a conversation is written")
    if options.chat and options.tokenizer and not options.chat_format:
        parser.error("--chat with --tokenizer: --chat-format is needed, or --model in the place of --tokenizer")
    options.format = "jsonl" if options.chat else options.format
    options.fields = tuple(options.fields.split(",")) if options.fields else None
    if options.fields and (len(options.fields) < 2 or not all(options.fields)):
        parser.error(f"--fields: got {shown(','.join(options.fields))}, expected at least two names with commas between them")
    options.learn = options.learn or "all"


def main() -> None:
    options = parse_arguments()
    existed = options.output.exists()
    options.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # through the end of the staging directory
    try:
        with staging_directory(options.output) as staging:
            model, pipeline = parts_of_model(options.model) if options.model else None, None
            if options.chat:
                encoder, splits, pipeline = prepare_chat(options, model, staging)
            else:
                encoder, splits = prepare(options, model, staging)
            replaced = publish(options.output, staging, encoder, splits, pipeline and pipeline.form_as_json)
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # it holds the result
                options.output.rmdir()
    if replaced:
        print(f"removed {replaced} shard{'s' if replaced > 1 else ''} of an earlier run", file=sys.stderr)
    if pipeline is not None:
        report_chat(options, model, encoder, splits, pipeline)
    else:
        report(options, model, encoder, splits)


if __name__ == "__main__":
    cli.run(main)
