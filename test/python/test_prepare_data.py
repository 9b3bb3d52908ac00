"""dev/prepare_data.py: documents, splits, shards, and bad input."""

import fcntl
import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import xxhash

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "dev")]
import prepare_data  # noqa: E402
from token_shard import TokenShard  # noqa: E402

END = "<|endoftext|>"
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
TEXT = "Once there was a loom. It had a warp, and it wanted a weft!\nIt waited 123 days.\n"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory) -> Path:
    """A small byte-level BPE of GPT-NeoX's kind, made here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END, "<pad>"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def prepare(tokenizer_path, tmp_path):
    def run(*arguments: object, tokenizer: Path = tokenizer_path) -> subprocess.CompletedProcess:
        command = [sys.executable, ROOT / "dev" / "prepare_data.py", *arguments, "--tokenizer", tokenizer, "-o",
                   tmp_path / "out"]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, encoding="utf-8")

    return run


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def documents_in(directory: Path, split: str, tokenizer_path: Path) -> list[str]:
    """The documents of a split, decoded; every shard is verified."""
    shards = [TokenShard(path) for path in sorted(directory.glob(f"{split}_*.bin"))]
    for shard in shards:
        shard.verify()
        assert shard.tokenizer_hash == xxhash.xxh3_64_intdigest(tokenizer_path.read_bytes())
    ids = np.concatenate([shard.tokens for shard in shards])
    end = shards[0].end_of_document_id
    assert ids[-1] == end
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    return [tokenizer.decode(part.tolist(), skip_special_tokens=False)
            for part in np.split(ids[ids != end], np.flatnonzero(ids == end)[:-1] - np.arange((ids == end).sum() - 1))]


def test_train_and_validation_files(prepare, tokenizer_path, tmp_path):
    train = write(tmp_path / "train.txt", f"\n\n{TEXT}\n{END}\nTwo\r\n\r\nlines\r\n{END}\n\n{END}\nlast, without an end")
    val = write(tmp_path / "val.txt", f"\ufeffvalidation\n{END}\n")
    done = prepare(train, "--val", val)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert documents_in(out, "train", tokenizer_path) == [TEXT.rstrip("\n"), "Two\n\nlines", "last, without an end"]
    assert documents_in(out, "val", tokenizer_path) == ["validation"]
    assert sorted(path.name for path in out.iterdir()) == ["tokenizer.json", "train_00000.bin", "val_00000.bin"]
    assert (out / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()
    assert "./train_llama" in done.stdout and done.stderr == ""  # no progress line in a pipe


def test_special_tokens_in_the_text_are_text(prepare, tokenizer_path, tmp_path):
    text = f"before {END} after <pad>"
    assert prepare(write(tmp_path / "a.txt", text), "--val-fraction", 0).returncode == 0
    shard = TokenShard(tmp_path / "out" / "train_00000.bin")
    assert (shard.tokens == shard.end_of_document_id).sum() == 1
    assert tokenizers.Tokenizer.from_file(str(tokenizer_path)).decode(shard.tokens[:-1].tolist()) == text


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.ndjson.gz"])
def test_jsonl_and_gzip(prepare, tokenizer_path, tmp_path, name):
    lines = [json.dumps({"id": i, "body": f"document {i}\n{END}\nstill {i}"}) for i in range(3)]
    data = "\n".join([*lines, ""]).encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    done = prepare(path, "--jsonl-field", "body", "--val-fraction", 0)
    assert done.returncode == 0, done.stderr
    shard = TokenShard(tmp_path / "out" / "train_00000.bin")
    assert (shard.tokens == shard.end_of_document_id).sum() == 3  # a separator within JSON text separates nothing


def test_the_report_counts_documents_tokens_and_bytes(prepare, tokenizer_path, tmp_path):
    """Bytes of the text, not characters: the figure is compared between tokenizers and languages."""
    texts = ["plain", "\u00e4\u00f6\u00fc \u4e2d\u6587 \U0001f600"]
    done = prepare(write(tmp_path / "a.txt", f"\n{END}\n".join(texts)), "--val-fraction", 0)
    assert done.returncode == 0, done.stderr
    tokens = TokenShard(tmp_path / "out" / "train_00000.bin").count
    size = sum(len(text.encode()) for text in texts)
    assert re.search(rf"^train +2 documents +{tokens} tokens +{size / tokens:.2f} bytes per token +1 shard$", done.stdout, re.M), done.stdout


def test_shards_have_the_size_asked_for(prepare, tokenizer_path, tmp_path):
    path = write(tmp_path / "a.txt", f"\n{END}\n".join(f"{TEXT}{i}" for i in range(5)))
    assert prepare(path, "--val-fraction", 0).returncode == 0
    whole = TokenShard(tmp_path / "out" / "train_00000.bin").tokens.copy()
    assert prepare(path, "--val-fraction", 0, "--shard-tokens", 50).returncode == 0
    parts = [TokenShard(shard).tokens for shard in sorted((tmp_path / "out").glob("train_*.bin"))]
    assert all(part.size == 50 for part in parts[:-1]) and 1 <= parts[-1].size <= 50
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    again = prepare(path, "--val-fraction", 0)  # fewer shards: none of the earlier run may be left
    assert again.returncode == 0 and "removed" in again.stderr
    assert len(list((tmp_path / "out").glob("train_*.bin"))) == 1


def test_the_split_depends_on_number_and_seed_alone(prepare, tokenizer_path, tmp_path):
    texts = [f"story number {i}" for i in range(200)]
    path = write(tmp_path / "a.txt", f"\n{END}\n".join(texts))
    splits = []
    for seed in (0, 0, 1):
        assert prepare(path, "--val-fraction", 0.25, "--seed", seed).returncode == 0
        train, val = (documents_in(tmp_path / "out", name, tokenizer_path) for name in ("train", "val"))
        assert sorted(train + val) == sorted(texts)
        assert 25 <= len(val) <= 75
        assert train == [text for text in texts if text in set(train)]  # in the order of the text
        splits.append(val)
    assert splits[0] == splits[1] != splits[2]


def test_few_documents_are_each_cut_at_their_own_place(prepare, tokenizer_path, tmp_path):
    """Documents of very different lengths, in two files: of each the last part, by its own length, is for validation."""
    texts = ["".join(f"line {i} of play {number}\n" for i in range(lines)) for number, lines in enumerate((400, 40, 100, 800, 20))]
    files = [write(tmp_path / f"{name}.txt", f"{END}\n".join(part)) for name, part in (("a", texts[:2]), ("b", texts[2:]))]
    assert prepare(*files, "--val-fraction", 0.25).returncode == 0
    train, val = (documents_in(tmp_path / "out", name, tokenizer_path) for name in ("train", "val"))
    assert [f"{first}\n{last}\n" for first, last in zip(train, val, strict=True)] == texts
    for text, last in zip(texts, val):
        line = len(text.splitlines()[-1]) + 1
        assert abs(len(last) - 0.25 * len(text)) <= line, text[:20]


@pytest.mark.parametrize("line", [f" {END}", f"{END} ", f"\t{END}", f"{END}{END}", f"{END}.", f"a {END}", END[:-1], END.upper()])
def test_only_the_separator_alone_on_its_line_separates(prepare, tokenizer_path, tmp_path, line):
    text = f"one\n{line}\ntwo"
    done = prepare(write(tmp_path / "a.txt", f"{text}\n{END}\r\nthree\n{END}"), "--val-fraction", 0)
    assert done.returncode == 0, done.stderr
    assert documents_in(tmp_path / "out", "train", tokenizer_path) == [text, "three"]


def test_one_document_is_split_by_position(prepare, tokenizer_path, tmp_path):
    text = "".join(f"line {i} of the play\n" for i in range(1000))
    assert prepare(write(tmp_path / "a.txt", text), "--val-fraction", 0.1).returncode == 0
    train, val = (documents_in(tmp_path / "out", name, tokenizer_path) for name in ("train", "val"))
    assert len(train) == len(val) == 1
    assert train[0] + "\n" + val[0] == text.rstrip("\n")
    assert 0.09 < len(val[0]) / len(text) < 0.11


def test_a_beginning_of_text_token_comes_from_the_tokenizer(prepare, tokenizer_path, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.token_to_id("<pad>"))])
    tokenizer.enable_truncation(3)  # must not apply here
    other = tmp_path / "other.json"
    tokenizer.save(str(other))
    assert prepare(write(tmp_path / "a.txt", f"first document\n{END}\nsecond"), "--val-fraction", 0,
                   tokenizer=other).returncode == 0
    ids = TokenShard(tmp_path / "out" / "train_00000.bin").tokens.tolist()
    pad, end = tokenizer.token_to_id("<pad>"), tokenizer.token_to_id(END)
    assert ids.count(pad) == 2 and ids[0] == pad and ids[ids.index(end) + 1] == pad and len(ids) > 10


@pytest.mark.parametrize("text", [
    TEXT * 3000,
    "".join(f"{TEXT}\n\n  indented {i}\n\t\ttabs   and  spaces \n\n\n" for i in range(2000)),
    "a" * 300_000 + " b" * 100_000,
    "\u91cd\u307f\u3092\u7e54\u308b\u3002\n" * 30_000,
    "caf\u00e9 cafe\u0301 \u0301x 12 34.5 it's they'll\n" * 8_000,
    "x" + " " * 200_000 + "y",
], ids=["prose", "white space", "one word", "no spaces", "combining marks", "spaces"])
@pytest.mark.parametrize("pattern", [None, LLAMA3_PATTERN], ids=["gpt2", "llama3"])
def test_pieces_have_the_tokens_of_the_whole(text, pattern, tokenizer_path, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    if pattern is not None:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = prepare_data.Encoder(tmp_path / "tokenizer.json", None)
    pieces = list(prepare_data.pieces_of(text.splitlines(keepends=True)))
    assert "".join(pieces) == text.strip("\n")
    whole = encoder.encode([text.strip("\n")])[0]
    np.testing.assert_array_equal(np.concatenate(encoder.encode(pieces)), whole)


SENTENCEPIECE_TEXTS = {
    "prose": TEXT * 3000, "spaces": f"{TEXT}\n\n  indented \n\t\ttabs   and  ▁ marks▁ x \n\n\n" * 2000,
    "unknown": "жуж жжж word щ б\n" * 20_000, "one word": "a" * 200_000 + " b" * 100_000,
}


def sentencepiece(name: str) -> dict:
    return json.loads((ROOT / "test" / "fixtures" / "tokenizer" / f"{name}.tokenizer.json").read_text())


def no_added(document: dict) -> None:
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 3]


def no_unknown_merges(document: dict) -> None:
    no_added(document)
    document["model"]["merges"] = [merge for merge in document["model"]["merges"] if "<unk>" not in merge]


def mark_within(document: dict) -> None:
    """A token that goes on behind a space: nothing may be cut."""
    no_added(document)
    document["model"]["vocab"]["e▁"] = len(document["model"]["vocab"])
    document["model"]["merges"].insert(0, ["e", "▁"])


@pytest.mark.parametrize("text", SENTENCEPIECE_TEXTS.values(), ids=SENTENCEPIECE_TEXTS)
@pytest.mark.parametrize("name, change, cut", [
    ("llama2_style", no_added, True), ("mistral_style", no_unknown_merges, True), ("metaspace_style", no_added, True),
    ("llama2_style", lambda document: None, False), ("llama2_style", mark_within, False), ("mistral_style", no_added, False),
], ids=["llama2", "mistral", "metaspace", "added tokens", "a mark within a token", "a mark behind the unknown token"])
def test_pieces_have_the_tokens_of_the_whole_sentencepiece(name, change, cut, text, tmp_path):
    document = sentencepiece(name)
    change(document)
    path = write(tmp_path / "tokenizer.json", json.dumps(document))
    encoder = prepare_data.Encoder(path, None)
    assert (encoder.cut is not None) == cut
    pieces = list(prepare_data.pieces_of(text.splitlines(keepends=True), encoder.cut))
    assert len(pieces) > 1 or not cut or " " not in text[:prepare_data.PIECE_CHARACTERS] or "жуж" in text
    whole = tokenizers.Tokenizer.from_file(str(path)).encode(text.strip("\n"), add_special_tokens=False).ids
    assert np.concatenate(encoder.encode(pieces)).tolist() == whole


def test_what_the_programs_refuse_is_refused(prepare, tokenizer_path, tmp_path):
    document = json.loads(tokenizer_path.read_text()) | {"normalizer": {"type": "Lowercase"}}
    done = prepare(write(tmp_path / "a.txt", "text"), tokenizer=write(tmp_path / "lower.json", json.dumps(document)))
    assert done.returncode == 3 and "normalizer.type: got 'Lowercase', expected" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_tokenizer_model_is_named_with_what_to_do(prepare, tmp_path):
    """A file of SentencePiece or tiktoken in the place of tokenizer.json, or beside where it should be."""
    pieces = b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\n\x0c\n\x03<s>\x15\0\0\0\0\x18\x03" * 5
    for content, words in ((pieces, "a SentencePiece model"), (b"IQ== 0\nIg== 1\nIw== 2\n", "a list of tokens and ranks (tiktoken)")):
        for name in ("tokenizer.model", "tokenizer.json"):
            done = prepare(write(tmp_path / "a.txt", "text"), tokenizer=write(tmp_path / name, content))
            assert done.returncode == 3 and done.stderr.count("\n") == 1
            assert f"{name}': this is {words}, expected tokenizer.json" in done.stderr, done.stderr
            assert "save_pretrained" in done.stderr
            if name == "tokenizer.json":
                (tmp_path / name).unlink()
        done = prepare(write(tmp_path / "a.txt", "text"), tokenizer=tmp_path / "tokenizer.json")
        assert done.returncode == 3 and "no such file" in done.stderr and f"tokenizer.model beside it is {words}." in done.stderr


def test_prose_is_cut_into_pieces_of_bounded_size():
    pieces = list(prepare_data.pieces_of([TEXT * 10_000]))
    assert len(pieces) > 5 and max(map(len, pieces)) <= prepare_data.PIECE_CHARACTERS


@pytest.mark.parametrize("name, content, arguments, code, words", [
    ("absent.txt", None, (), 3, "no such file"),
    ("empty.txt", b"", (), 3, "no text for train"),
    ("latin.txt", b"caf\xe9\n", (), 3, "line 1: got byte 4 of it wrong, expected UTF-8"),
    ("a.jsonl", b'{"text":1}\n', (), 3, "line 1: 'text': got a JSON integer, expected the text"),
    ("a.jsonl", b'{"text":"x"}\n{"txt":"y"}\n', (), 3, "line 2: 'text': got nothing"),
    ("a.jsonl", b'[1]\n', (), 3, "line 1: got a JSON array, expected an object"),
    ("a.jsonl", b'{"text":\n', (), 3, "line 1: not valid JSON"),
    ("a.jsonl", b'{"text":"\\ud800"}\n', (), 3, "half of a surrogate pair"),
    ("a.txt.gz", gzip.compress(b"text" * 5000)[:-9], (), 3, "the gzip data is damaged"),
    ("a.txt", b"x", ("--val-fraction", "0.9"), 2, "expected a number from 0 to 0.5"),
    ("a.txt", b"x", ("--val-fraction", "x"), 2, "expected a number from 0 to 0.5"),
    ("a.txt", b"x", ("--shard-tokens", "0"), 2, "expected an integer from 1"),
    ("a.txt", b"x", ("--eos", "<none>"), 2, "--eos: got '<none>'"),
    ("a.txt", b"x", ("--val", "none.txt"), 3, "'none.txt': no such file"),
    ("a.txt", b"x", ("--val", "none.txt", "--val-fraction", "0.1"), 2, "exclude each other"),
    ("a.txt", b"x", ("--typo",), 2, "--typo"),
])
def test_bad_input_is_one_line_and_its_code(name, content, arguments, code, words, prepare, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    done = prepare(path, *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


@pytest.mark.parametrize("content, words", [
    (b"", "0 bytes"),
    (b"<!DOCTYPE html>", "web page"),
    (b"{}", "model: missing"),
    (b'{"model":{"type":"none"}}', "not accepted by tokenizers"),
    (b'{"a":1,"a":2}', "duplicate key"),
])
def test_bad_tokenizers(content, words, prepare, tmp_path):
    done = prepare(write(tmp_path / "a.txt", "text"), tokenizer=write(tmp_path / "bad.json", content))
    assert done.returncode == 3 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_failed_run_leaves_the_shards_of_the_earlier_one(prepare, tmp_path):
    assert prepare(write(tmp_path / "a.txt", TEXT), "--val-fraction", 0).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    bad = write(tmp_path / "b.txt", TEXT.encode() * 20000 + b"\xff")
    assert prepare(bad, "--val-fraction", 0, "--shard-tokens", 1000).returncode == 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# ---- hostile tokenizers ----------------------------------------------------------------------------------------------


def panicking(tokenizer: dict) -> None:
    """The library finds no entry for a key, and panics in Rust."""
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "special_tokens": {}, "pair": [],
                                   "single": [{"SpecialToken": {"id": "absent", "type_id": 0}},
                                              {"Sequence": {"id": "A", "type_id": 0}}]}


def growing(tokenizer: dict) -> None:
    """Of a piece of text it makes gigabytes."""
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "e"}, "content": "x" * 100_000}]}


def far_id(tokenizer: dict) -> None:
    tokenizer["added_tokens"].append({"id": 2**32 - 1, "content": "far", "single_word": False, "lstrip": False,
                                      "rstrip": False, "normalized": False, "special": True})


@pytest.mark.parametrize("change, words", [(panicking, "not accepted by tokenizers"), (growing, "'Replace' content: got 100000"),
                                           (far_id, "got the id 4294967295")])
def test_hostile_tokenizers_are_refused_in_one_line(change, words, prepare, tokenizer_path, tmp_path):
    tokenizer = json.loads(tokenizer_path.read_text())
    change(tokenizer)
    done = prepare(write(tmp_path / "text.txt", TEXT * 100),
                   tokenizer=write(tmp_path / "hostile.json", json.dumps(tokenizer)))
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr and not (tmp_path / "out").exists()


def test_shards_of_an_earlier_run_go_and_nothing_else_does(tmp_path):
    """A shard's name is a split, five digits or more, and .bin: neither more nor less is one."""
    old = ["train_00000.bin", "train_00007.bin", "train_123456.bin", "val_00001.bin", "val_00002.bin"]
    kept = ["train_00000.bin.bak", "train_00001.bin~", "val_00000.bin.gz", "train_0001.bin", "a_train_00001.bin", "Train_00001.bin",
            "test_00001.bin", "train_00001_bin", "train_00001.binary", "train-00001.bin", "train_0000x.bin", "train_00009.bin\n", "notes.txt"]
    output, staging = tmp_path / "out", tmp_path / "staging"
    for folder, names in ((output, old + kept), (staging, ["train_00000.bin", "val_00001.bin"])):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    splits = [SimpleNamespace(shards=[name]) for name in ("train_00000.bin", "val_00001.bin")]
    assert prepare_data.publish(output, staging, SimpleNamespace(text=b"{}"), splits) == 3
    found = {path.name: path.read_text() for path in output.iterdir()}
    assert found == {name: "out" for name in kept} | {"train_00000.bin": "staging", "val_00001.bin": "staging", "tokenizer.json": "{}"}
    assert not list(staging.iterdir())


def test_what_killed_runs_left_goes_away(prepare, tmp_path):
    """The directory of a run that was killed; not that of one that lives, and nothing that another program made."""
    out = tmp_path / "out"
    killed, alive, foreign = (out / f".incomplete-{name}" for name in ("abcdefgh", "ijklmnop", "qrstuvwx"))
    for folder in (killed, alive, foreign):
        folder.mkdir(parents=True)
        (folder / "train_00000.bin.tmp.1").write_text("x")
    (foreign / "thesis.txt").write_text("years of work")
    holder = os.open(alive, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    done = prepare(write(tmp_path / "text.txt", TEXT), "--val-fraction", 0)
    os.close(holder)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.glob(".incomplete-*")) == [alive.name, foreign.name]


def test_a_terminated_run_leaves_nothing(tokenizer_path, tmp_path):
    fifo_text = write(tmp_path / "text.txt", (TEXT * 20_000))
    process = subprocess.Popen([sys.executable, ROOT / "dev" / "prepare_data.py", fifo_text, "--tokenizer", tokenizer_path,
                                "-o", tmp_path / "out"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("out/.incomplete-*/train*")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (143, 0), errors  # 0: it was done before
    assert process.returncode == 0 or not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out/.incomplete-*"))
