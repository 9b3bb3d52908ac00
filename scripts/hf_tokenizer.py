"""Checks a tokenizer.json by the rules of the programs (llmc/text/tokenizer_json.cpp and tokenizer_stages.cpp).

test/python/test_tokenizer.py changes tokenizers in hundreds of ways and compares the verdicts of both. doc/tokenizers.md
lists what is accepted. Errors are FileError BAD_FILE and name the file and the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import split_pattern
from cli import bad_file, escaped, parse_json_object, shown

MAX_VOCABULARY, MAX_TOKEN_BYTES, MAX_ADDED_BYTES = 1_000_000, 4096, 16 << 20
MAX_STEPS, MAX_PREPEND_BYTES, MAX_SPLIT_BYTES, MAX_STRIPPED = 8, 64, 256, 1 << 20

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
BEHAVIORS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class Node:
    """A value of the document, with its path for error messages."""

    def __init__(self, value: Any, path: str, source: Path):
        self.value, self.path, self.source = value, path, source

    def __getitem__(self, key: str) -> Node:
        """A member; one that is absent reads as null."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return Node(self.value.get(key), f"{self.path}.{key}" if self.path else key, self.source)

    def entry(self, key: str) -> Node:
        """A member whose key is data, such as a token: the path shows it in quotes."""
        return Node(self[key].value, f"{self.path}[{shown(key)}]", self.source)

    def items(self) -> Iterator[Node]:
        for index, value in enumerate(self.list()):
            yield Node(value, f"{self.path}[{index}]", self.source)

    @property
    def is_null(self) -> bool:
        return self.value is None

    def list(self) -> list[Any]:
        if not isinstance(self.value, list):
            self.refuse("a list")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse("a string")
        return self.value

    def character(self) -> str:
        if len(self.text()) != 1:
            self.refuse("one character")
        return self.text()

    def flag(self, absent: bool) -> bool:
        if self.value is not None and not isinstance(self.value, bool):
            self.refuse("true or false")
        return absent if self.value is None else self.value

    def integer(self, low: int, high: int, what: str) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.refuse(f"a {what} from {low} to {high}")
        return self.value

    def token_id(self) -> int:
        return self.integer(0, MAX_VOCABULARY - 1, "token id")

    def refuse(self, expected: str) -> NoReturn:
        bad_file(self.source, self.path, f"got {shown(self.value)}, expected {expected}")

    def problem(self, what: str) -> NoReturn:
        bad_file(self.source, self.path, what)


def utf8_size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def byte_alphabet() -> list[str]:
    """The characters of byte-level tokens, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def is_byte_level(root: Node) -> bool:
    """True if the tokens are spelled in the byte alphabet: the pre-tokenizer or the decoder is of the type ByteLevel."""
    def holds(node: Any) -> bool:
        if not isinstance(node, dict):
            return False
        children = node.get("pretokenizers")
        return node.get("type") == "ByteLevel" or (
            node.get("type") == "Sequence" and isinstance(children, list) and any(map(holds, children)))

    return holds(root["decoder"].value) or holds(root["pre_tokenizer"].value)


class _Reader:
    def __init__(self, root: Node):
        self.root = root
        self.byte_level = is_byte_level(root)
        self.vocabulary: dict[str, int] = {}
        self.tokens: dict[int, str] = {}  # with the added tokens
        self.added_normalized = False
        self.normalizers = 0
        self.steps: list[str] = []  # types of the pre-tokenizers
        self.decoders: list[str] = []
        self.has_bos = False

    def read(self) -> int:
        model = self.root["model"]
        if model["type"].text() != "BPE":
            model["type"].refuse('"BPE"')
        self.read_options(model)
        self.read_vocabulary(model["vocab"])
        self.read_merges(model["merges"])
        if not self.root["added_tokens"].is_null:
            self.read_added_tokens(self.root["added_tokens"])
        if self.byte_level:
            self.check_bytes(model["vocab"])
        self.read_normalizer(self.root["normalizer"])
        self.read_pre_tokenizers(self.root["pre_tokenizer"])
        self.read_post_processor(self.root["post_processor"])
        self.read_decoder(self.root["decoder"])
        return len(self.tokens)

    # ---- the model

    def read_options(self, model: Node) -> None:
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            value = model[name].value
            if not (value is None or value is False or value == "" or type(value) in (int, float) and value == 0):
                model[name].refuse("null (this option is not supported)")
        for name in ("fuse_unk", "ignore_merges"):
            model[name].flag(False)

    def add_token(self, content: str, number: int, where: Node) -> None:
        if not content:
            where.problem("got an empty token")
        if utf8_size(content) > MAX_TOKEN_BYTES:
            where.problem(f"got a token of {utf8_size(content)} bytes, at most {MAX_TOKEN_BYTES} are accepted")
        if number in self.tokens:
            where.problem(f"id {number} belongs to both {shown(self.tokens[number])} and {shown(content)}")
        self.tokens[number] = content

    def check_ids(self, where: Node) -> None:
        if not self.tokens:
            where.problem("got no tokens")
        if len(self.tokens) != max(self.tokens) + 1:
            hole = next(number for number in range(len(self.tokens)) if number not in self.tokens)
            where.problem(f"no token has the id {hole}, but ids go up to {max(self.tokens)}; expected ids without holes")

    def read_vocabulary(self, vocab: Node) -> None:
        if not isinstance(vocab.value, dict):
            vocab.problem("got no object, expected the tokens and their ids")
        if len(vocab.value) > MAX_VOCABULARY:
            vocab.problem(f"got {len(vocab.value)} tokens, at most {MAX_VOCABULARY} are accepted")
        for content, number in vocab.value.items():
            if type(number) is not int or not 0 <= number < MAX_VOCABULARY:
                vocab.entry(content).token_id()
            self.add_token(content, number, vocab)
        self.vocabulary = vocab.value
        self.check_ids(vocab)
        unknown = self.root["model"]["unk_token"]
        if not self.byte_level:
            self.root["model"]["byte_fallback"].flag(False)
            if not unknown.is_null and unknown.text() not in self.vocabulary:
                unknown.refuse("a token of model.vocab, or null")

    def read_merges(self, merges: Node) -> None:
        if len(merges.list()) > 8 * MAX_VOCABULARY:
            merges.problem(f"got {len(merges.list())} merges")
        for index, merge in enumerate(merges.value):
            if isinstance(merge, str) and merge.startswith("#version"):
                continue  # left over from merges.txt
            parts = merge.split(" ") if isinstance(merge, str) else merge
            node = Node(merge, f"{merges.path}[{index}]", merges.source)
            if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
                node.refuse('"left right" or ["left", "right"]')
            for token in (*parts, parts[0] + parts[1]):
                if token not in self.vocabulary:
                    node.problem(f"token {shown(token)} is not in the vocabulary")

    def read_added_tokens(self, added: Node) -> None:
        seen, size = set(), 0
        for node in added.items():
            content, number = node["content"].text(), node["id"].token_id()
            special = node["special"].flag(False)
            self.added_normalized |= node["normalized"].flag(not special)
            for name in ("lstrip", "rstrip", "single_word"):
                node[name].flag(False)
            size += utf8_size(content)
            if size > MAX_ADDED_BYTES:
                added.problem(f"got more than {MAX_ADDED_BYTES} bytes of added tokens, at most that many are accepted")
            if content in seen:
                node["content"].refuse("each added token once")
            seen.add(content)
            if content not in self.vocabulary:
                self.add_token(content, number, node)
                if number != len(self.tokens) - 1:
                    node["id"].refuse(f"{len(self.tokens) - 1}: ids without holes, added tokens in the order of their ids")
            elif self.vocabulary[content] != number:
                node["id"].refuse(f"{self.vocabulary[content]}, its id in the vocabulary")

    def check_bytes(self, vocab: Node) -> None:
        for byte, character in enumerate(byte_alphabet()):
            if character not in self.vocabulary and not 0xC0 <= byte <= 0xC1 and byte < 0xF5:
                vocab.problem(f"no token for the byte 0x{byte:02X} ({shown(character)})")

    # ---- the stages around it

    @staticmethod
    def read_replacement(node: Node) -> None:
        node["pattern"]["String"].character()
        node["content"].character()

    def read_normalizer(self, node: Node) -> None:
        if node.is_null:
            return
        kind = node["type"].text()
        if kind == "Sequence":
            for one in node["normalizers"].items():
                self.read_normalizer(one)
            return
        self.normalizers += 1
        if self.normalizers > MAX_STEPS:
            node.problem(f"got more than {MAX_STEPS} normalizers")
        if kind == "Prepend":
            size = utf8_size(node["prepend"].text())
            if not 1 <= size <= MAX_PREPEND_BYTES:
                node["prepend"].problem(f"got {size} bytes, expected 1 to {MAX_PREPEND_BYTES}")
        elif kind == "Replace":
            self.read_replacement(node)
        elif kind not in NORMAL_FORMS:
            node["type"].refuse('"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Sequence" or null')

    def read_pre_tokenizers(self, node: Node) -> None:
        if self.byte_level or not node.is_null:
            self.read_pre_tokenizer(node)
        if self.byte_level and "ByteLevel" not in self.steps:
            node.refuse("ByteLevel as the last pre-tokenizer")

    def read_pre_tokenizer(self, node: Node) -> None:
        kind = "" if node.is_null else node["type"].text()
        if "ByteLevel" in self.steps:
            node.refuse("ByteLevel as the last pre-tokenizer")
        if len(self.steps) >= MAX_STEPS:
            node.problem(f"got more than {MAX_STEPS} pre-tokenizers")
        if kind == "Sequence":
            for one in node["pretokenizers"].items():
                self.read_pre_tokenizer(one)
            return
        if kind == "ByteLevel" and self.byte_level:
            node["use_regex"].flag(True)
            node["add_prefix_space"].flag(True)
        elif kind == "Split":
            self.read_split(node)
        elif kind == "Digits":
            node["individual_digits"].flag(False)
        elif kind == "Punctuation":
            if not node["behavior"].is_null:
                self.read_behavior(node["behavior"])
        elif kind == "Metaspace" and not self.byte_level:
            self.read_metaspace_step(node)
        elif kind != "WhitespaceSplit" and self.byte_level:
            node["type"].refuse('"ByteLevel", "Split", "Digits", "Punctuation", "WhitespaceSplit" or "Sequence" (the decoder is ByteLevel)')
        elif kind != "WhitespaceSplit":
            node["type"].refuse('"Metaspace", "ByteLevel", "Split", "Digits", "Punctuation", "WhitespaceSplit", "Sequence" or null')
        self.steps.append(kind)

    @staticmethod
    def read_behavior(node: Node) -> None:
        if node.text() not in BEHAVIORS:
            node.refuse('"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext" or "Contiguous"')

    def read_split(self, node: Node) -> None:
        regex, text = node["pattern"]["Regex"], node["pattern"]["String"]
        if regex.is_null:
            if utf8_size(text.text()) > MAX_SPLIT_BYTES:
                text.problem(f"got {utf8_size(text.text())} bytes, at most {MAX_SPLIT_BYTES} are accepted")
        elif problem := split_pattern.problem_of(regex.text()):
            regex.problem(f"{problem}. Write it otherwise, or use the model without its tokenizer.json, by ids")
        self.read_behavior(node["behavior"])
        node["invert"].flag(False)

    @staticmethod
    def read_metaspace(node: Node) -> str:
        node["replacement"].character()
        scheme = "always" if node["prepend_scheme"].is_null else node["prepend_scheme"].text()
        if scheme not in ("always", "first", "never"):
            node["prepend_scheme"].refuse('"always", "first" or "never"')
        if not node["add_prefix_space"].flag(True) and scheme != "never":
            node["add_prefix_space"].refuse('true, or "prepend_scheme": "never" beside it')
        node["split"].flag(True)
        return scheme

    def read_metaspace_step(self, node: Node) -> None:
        first = self.read_metaspace(node) == "first"
        if "Metaspace" in self.steps:
            node.problem("got a second Metaspace, expected one")
        if first and self.steps:
            node["prepend_scheme"].refuse('"first" in the first pre-tokenizer alone')
        if first and self.normalizers and self.added_normalized:
            node["prepend_scheme"].refuse('"always" or "never" beside a normalizer and added tokens that are normalized')

    def read_post_processor(self, node: Node) -> None:
        if node.is_null:
            return
        kind = node["type"].text()
        if kind == "Sequence":
            for one in node["processors"].items():
                self.read_post_processor(one)
        elif kind == "TemplateProcessing":
            self.read_template(node)
        elif kind != "ByteLevel":
            node["type"].refuse('"ByteLevel", "TemplateProcessing", "Sequence" or null')

    def read_template(self, node: Node) -> None:
        single = node["single"]
        parts = list(single.items())
        if self.has_bos or not 1 <= len(parts) <= 2 or parts[-1]["Sequence"].is_null:
            single.refuse("at most one token, in front of the text")
        if len(parts) == 1:
            return
        name = parts[0]["SpecialToken"]["id"].text()
        ids = node["special_tokens"].entry(name)["ids"]
        if len(ids.list()) != 1:
            ids.refuse("one id")
        if next(ids.items()).token_id() >= len(self.tokens):
            ids.refuse("an id of the vocabulary")
        self.has_bos = True

    def read_decoder(self, node: Node) -> None:
        if self.byte_level:
            if node["type"].text() != "ByteLevel":
                node["type"].refuse('"ByteLevel"')
            return
        if node.is_null:
            node.refuse("a decoder (without one the tokens of a text are printed with spaces between them)")
        self.read_decoder_step(node)

    def read_decoder_step(self, node: Node) -> None:
        kind = node["type"].text()
        if kind == "Sequence":
            for one in node["decoders"].items():
                self.read_decoder_step(one)
            return
        if len(self.decoders) >= MAX_STEPS:
            node.problem(f"got more than {MAX_STEPS} decoders")
        if "Strip" in self.decoders:
            node["type"].refuse("Strip as the last decoder")
        if kind == "Replace":
            self.read_replacement(node)
        elif kind == "ByteFallback":
            if {"ByteFallback", "Fuse", "Metaspace"} & set(self.decoders):
                node["type"].refuse("one ByteFallback, before Fuse and Metaspace")
        elif kind == "Metaspace":
            if {"Fuse", "Metaspace"} & set(self.decoders):
                node["type"].refuse("one Metaspace, before Fuse")
            self.read_metaspace(node)
        elif kind == "Strip":
            self.read_strip(node)
        elif kind != "Fuse":
            node["type"].refuse('"Replace", "ByteFallback", "Metaspace", "Fuse", "Strip", "Sequence" or "ByteLevel"')
        self.decoders.append(kind)

    def read_strip(self, node: Node) -> None:
        if "Fuse" not in self.decoders:
            node["type"].refuse("Fuse before Strip")
        if type(node["stop"].value) is not int or node["stop"].value != 0:
            node["stop"].refuse("0")
        node["content"].character()
        node["start"].integer(0, MAX_STRIPPED, "number")


# ---- files of other kinds --------------------------------------------------------------------------------------------


def other_kind(data: bytes) -> str:
    """The kind of tokenizer that a file of another format (tokenizer.model) has, for a message; empty if it is not known."""
    if len(data) > 4 and data[0] == data[2] == 0x0A and data[4 + data[3]:5 + data[3]] == b"\x15":
        return "a SentencePiece model"  # a protobuf: a piece, in it a text and, of type 0x15, its score
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data[:8192]):
        return "a list of tokens and ranks (tiktoken)"
    return ""


MAKE_TOKENIZER_JSON = (
    "Take tokenizer.json from the model's page, or make it where transformers, sentencepiece and tiktoken are installed: "
    "transformers.AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')")


def missing_tokenizer(directory: Path) -> str:
    """For a directory without tokenizer.json: which other tokenizer it has and what to do. Empty if it has none."""
    path = directory / "tokenizer.model"
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        kind = other_kind(file.read(8192))
    return f"tokenizer.model beside it is {kind or 'of another format'}. {MAKE_TOKENIZER_JSON}"


def tokenizer_vocabulary(text: bytes, source: Path) -> int:
    """Checks all of a tokenizer.json. Returns its highest token id + 1."""
    if kind := other_kind(text):
        bad_file(source, "", f"this is {kind}, expected tokenizer.json", MAKE_TOKENIZER_JSON)
    return _Reader(Node(parse_json_object(text, source), "", source)).read()


def left_out(text: bytes, source: Path) -> list[str]:
    """What a tokenizer.json asks for that weft does not do, as warnings. None of it changes the ids of a text by itself."""
    parsed = parse_json_object(text, source)
    return [f"{escaped(str(source))}: {name}: left out: {instead}" for name, instead in (
        ("truncation", "a text keeps all of its tokens"), ("padding", "no tokens are added to a text")) if parsed.get(name) is not None]


def encode(tokenizer: bytes | None, text: str, directory: Path, option: str, instead: str) -> list[int]:
    """The ids of a text, with the special tokens that the tokenizer's post-processor adds. FileError BAD_FILE if `tokenizer` is
    None; the message says that `option` needs one, and gives the advice `instead`."""
    if tokenizer is None:
        bad_file(directory / "tokenizer.json", "", f"no such file, but {option} needs it", instead)
    from tokenizers import Tokenizer

    try:
        original = Tokenizer.from_str(tokenizer.decode("utf-8"))
        original.no_truncation()
        original.no_padding()
        return list(original.encode(text).ids)
    except Exception as error:  # the library raises plain Exception
        bad_file(directory / "tokenizer.json", "", f"the tokenizers library refuses it: {escaped(str(error))[1:-1]}")
