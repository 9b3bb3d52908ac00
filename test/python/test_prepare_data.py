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
    assert all(part.size == 50 for part in parts[:-1]) and 50 <= parts[-1].size < 100
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    again = prepare(path, "--val-fraction", 0)  # fewer shards: none of the earlier run may be left
    assert again.returncode == 0 and "removed" in again.stderr
    assert len(list((tmp_path / "out").glob("train_*.bin"))) == 1


@pytest.mark.parametrize("smallest", [1 << 18, 5])
def test_no_shard_is_shorter_than_a_sequence_may_be(smallest, tokenizer_path, tmp_path, monkeypatch):
    """What is left over behind the last full shard goes into it, unless it is enough for a shard of its own."""
    monkeypatch.setattr(prepare_data, "SMALLEST_LAST_SHARD", smallest)
    encoder, whole = prepare_data.Encoder(tokenizer_path, None), np.arange(200) % 50
    for size in (1, 2, 7, 19, 20, 21, 24, 25, 39, 40, 41, 44, 45, 59, 60):
        for piece in (1, 3, 20, 47, 200):
            split = prepare_data.Split("train", tmp_path, encoder, 20)
            for begin in range(0, size, piece):
                split.write(whole[begin:min(begin + piece, size)])
            split.close()
            parts = [TokenShard(tmp_path / name).tokens for name in split.shards]
            assert np.concatenate(parts).tolist() == whole[:size].tolist()
            full, rest = divmod(size, 20)
            own = rest >= min(20, smallest) or full == 0
            assert [part.size for part in parts] == [20] * (full if own and rest else full - 1) + [rest if own and rest else 20 + rest], (size, piece)


def test_a_text_shorter_than_a_sequence_is_trained_in_shorter_ones(prepare, tokenizer_path, tmp_path):
    for words, fits in ((1, True), (1000, False)):
        done = prepare(write(tmp_path / "a.txt", "word " * words), "--val-fraction", 0)
        count = TokenShard(tmp_path / "out" / "train_00000.bin").count
        assert (count <= prepare_data.DEFAULT_SEQ_LEN) == fits
        assert (f" --seq-len {count - 1}" in done.stdout) == fits and ("--seq-len" in done.stdout) == fits


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
def test_only_the_separator_alone_on_its_line_separates(tmp_path, line):
    text = f"one\n{line}\ntwo"
    assert texts_of(source(write(tmp_path / "a.txt", f"{text}\n{END}\r\nthree\n{END}"))) == [text, "three"]


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


@pytest.mark.parametrize("text, name, change, cut", [
    *((text, *each, True) for text in SENTENCEPIECE_TEXTS for each in (
        ("llama2_style", no_added), ("mistral_style", no_unknown_merges), ("metaspace_style", no_added))),
    *(("unknown", *each, False) for each in (
        ("llama2_style", lambda document: None), ("llama2_style", mark_within), ("mistral_style", no_added)))])
def test_pieces_have_the_tokens_of_the_whole_sentencepiece(text, name, change, cut, tmp_path):
    text = SENTENCEPIECE_TEXTS[text]
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
        done = prepare(write(tmp_path / "a.txt", "text"), tokenizer=write(tmp_path / "tokenizer.model", content))
        assert done.returncode == 3 and done.stderr.count("\n") == 1
        assert f"tokenizer.model': this is {words}, expected tokenizer.json" in done.stderr, done.stderr
        assert "save_pretrained" in done.stderr
        done = prepare(write(tmp_path / "a.txt", "text"), tokenizer=tmp_path / "tokenizer.json")
        assert done.returncode == 3 and "no such file" in done.stderr and f"tokenizer.model beside it is {words}." in done.stderr


def test_prose_is_cut_into_pieces_of_bounded_size():
    pieces = list(prepare_data.pieces_of([TEXT * 10_000]))
    assert len(pieces) > 5 and max(map(len, pieces)) <= prepare_data.PIECE_CHARACTERS


@pytest.mark.parametrize("name, content, arguments, code, words", [
    ("absent.txt", None, (), 3, "no such file"),
    ("empty.txt", b"", (), 3, "no text for train"),
    ("latin.txt", b"caf\xe9\n", (), 3, "line 1: got byte 4 of it wrong, expected UTF-8"),
    ("a.jsonl", b'{"text":"x"}\n{"txt":"y"}\n', (), 3, "line 2: 'text': got nothing"),
    ("a.txt.gz", gzip.compress(b"text" * 5000, mtime=0)[:-9], (), 3, "the gzip data is damaged"),
    ("a.txt", b"x", ("--val-fraction", "x"), 2, "expected a number from 0 to 0.5"),
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


# ---- the parts, without a process ------------------------------------------------------------------------------------


def source(path: Path, **changes) -> prepare_data.Source:
    return prepare_data.Source(**{"path": path, "jsonl": False, "json_field": "text", "separator": END, "cut": prepare_data.CUT} | changes)


def texts_of(of: prepare_data.Source) -> list[str]:
    return ["".join(pieces) for pieces in of.documents()]


def options(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"format": "auto", "jsonl_field": "text", "document_separator": END, "seed": 0, "val_fraction": 0.05} | changes)


@pytest.mark.parametrize("full, empty, fraction, whole", [
    (9, 0, 1.0, False), (10, 0, 1.0, True), (9, 400, 1.0, False), (10, 400, 1.0, True), (19, 400, 0.5, False), (20, 400, 0.5, True), (21, 0, 0.5, True)])
def test_documents_are_chosen_whole_where_ten_that_hold_text_can_be_expected(full, empty, fraction, whole, tmp_path):
    """In all files together; empty documents before, between and behind do not count, but have their length in the list."""
    texts = ["", *(f"text {number}" for number in range(full))]
    texts[5:5] = [""] * empty
    first, second = (write(tmp_path / name, "".join(f"{text}\n{END}\n" for text in part)) for name, part in (("a", texts[:-4]), ("b", texts[-4:])))
    found = prepare_data.lengths_if_few([source(first), source(second)], fraction)
    assert found == (None if whole else [len(text) for text in texts])


@pytest.mark.parametrize("fraction", [0, 0.25])
def test_each_document_goes_to_one_split_by_its_own_number(fraction, tmp_path):
    """Numbers go on from file to file; without a share for validation nothing is chosen, and nothing is cut."""
    texts = [f"story {number}" for number in range(100)]
    files = [write(tmp_path / name, f"\n{END}\n".join(part)) for name, part in (("a", texts[:30]), ("b", texts[30:]))]
    got = []
    pipeline = SimpleNamespace(add_document=lambda split, pieces: got.append((split, "".join(pieces))))
    prepare_data.add_with_split([source(file) for file in files], pipeline, "train", "val", options(val_fraction=fraction, seed=7), None)
    assert got == [("val" if prepare_data.is_for_validation(number, 7, fraction) else "train", text) for number, text in enumerate(texts)]
    assert ("val" in dict(got)) == (fraction > 0)


@pytest.mark.parametrize("position, before, after", [
    (0, "one", "two\n\nthree"), (1, "one", "two\n\nthree"), (3, "one", "two\n\nthree"), (4, "one\ntwo", "three"), (7, "one\ntwo", "three"),
    (8, "one\ntwo\n", "three"), (9, "one\ntwo\n\n", "three"), (10, "one\ntwo\n\nt", "hree"), (14, "one\ntwo\n\nthree", "")])
@pytest.mark.parametrize("pieces", [["one\ntwo\n\nthree"], ["one\ntwo\n\n", "three"]])
def test_a_document_is_cut_at_the_line_end_from_there_on(position, before, after, pieces):
    first, last = prepare_data.cut_at(iter(pieces), position, prepare_data.CUT)
    assert ("".join(first), "".join(last)) == (before, after)


def test_an_encoded_document_begins_and_ends_once():
    """However many pieces it has and batches are made of them; what is empty is none; texts of several splits keep apart."""
    batches = []

    class Split:
        def __init__(self):
            self.documents, self.text_bytes, self.ids = 0, 0, []

        def write(self, ids):
            self.ids += ids.tolist()

    def encode(texts, begins):
        batches.append(list(zip(texts, begins)))
        return [np.array([len(text)], dtype=np.uint32) for text in texts]

    encoder = SimpleNamespace(encode=encode, prefix=np.array([1_000_001, 1_000_002], dtype=np.uint32), end_of_text=1_000_003)
    pipeline, train, val = prepare_data.Pipeline(encoder), Split(), Split()
    half = "x" * (prepare_data.BATCH_CHARACTERS // 2)
    for split, pieces in ((train, ["ab", "c", half]), (val, []), (val, ["\u4e2d"]), (train, [half, "d"]), (val, ["ef", "ghi"])):
        pipeline.add_document(split, iter(pieces))
    pipeline.flush()
    begin, end = [1_000_001, 1_000_002], [1_000_003]
    assert train.ids == [*begin, 2, 1, len(half), *end, *begin, len(half), 1, *end] and train.documents == 2
    assert val.ids == [*begin, 1, *end, *begin, 2, 3, *end] and val.documents == 2
    assert train.text_bytes == 4 + 2 * len(half) and val.text_bytes == 8
    assert [begins for batch in batches for _, begins in batch] == [True, False, False, True, True, False, True, False]
    assert len(batches) == 2 and [text[:1] for text, _ in batches[0]] == ["a", "c", "x", "\u4e2d", "x"]


def test_a_piece_that_cannot_be_cut_leaves_the_next_ones_small():
    """The search for a cut reaches further only as long as none is found."""
    long = "a" * (3 * prepare_data.PIECE_CHARACTERS)
    pieces = list(prepare_data.pieces_of([long, *[" word"] * 100_000]))
    assert "".join(pieces) == long + " word" * 100_000
    assert len(pieces[0]) >= len(long) and all(len(piece) <= prepare_data.PIECE_CHARACTERS for piece in pieces[1:]) and len(pieces) > 7
    assert list(prepare_data.pieces_of([long, *[" word"] * 100_000], None)) == [long + " word" * 100_000]


@pytest.mark.parametrize("name, form, jsonl", [
    ("a.txt", "auto", False), ("a.jsonl", "auto", True), ("a.ndjson", "auto", True), ("a.jsonl.gz", "auto", True), ("a.json", "auto", False),
    ("a.jsonl.txt", "auto", False), ("jsonl", "auto", False), ("a.gz", "auto", False), ("a.jsonl", "text", False), ("a.ndjson.gz", "text", False),
    ("a.txt", "jsonl", True), ("a", "jsonl", True)])
def test_the_format_is_that_of_the_option_or_of_the_name(name, form, jsonl, tmp_path):
    path = write(tmp_path / name, '{"body": "one"}\n---\n' if not jsonl else '{"body": "one"}\n')
    chosen = options(format=form, jsonl_field="body", document_separator="---")
    (made,) = prepare_data.open_sources([path], chosen, prepare_data.CUT_AT_SPACE)
    assert made == source(path, jsonl=jsonl, json_field="body", separator="---", cut=prepare_data.CUT_AT_SPACE)
    assert texts_of(made) == ["one" if jsonl else '{"body": "one"}']


def test_every_text_is_a_file(tmp_path):
    good, fifo = write(tmp_path / "good", "text"), tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to(good)
    assert len(prepare_data.open_sources([good, tmp_path / "link"], options(), None)) == 2
    for bad, words in ((fifo, "not a file"), (tmp_path, "not a file"), (tmp_path / "none", "no such file")):
        with pytest.raises(prepare_data.FileError, match=f"{bad.name}.*{words}") as refused:
            prepare_data.open_sources([good, bad], options(), None)
        assert refused.value.code == 3


@pytest.mark.parametrize("content, documents", [
    (b"a\r\nb\r\n", ["a\nb"]), (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a\n\ufeffb"]), (b"a\rb\x0bc\x85", None), (b"a\rb\x0bc\xc2\x85d", ["a\rb\x0bc\x85d"]),
    (b"\n \n\na\n\n", [" \n\na"]), (f"{END}\n{END}\r\n\n{END}\nb".encode(), ["", "", "", "b"]), (b"", []), (b"\n", [""]), (b"a\r\n\r\n", ["a"])])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda content: gzip.compress(content[:3]) + gzip.compress(content[3:])],
                         ids=["plain", "gzip", "gzip in two parts"])
def test_lines_and_documents_of_a_text(content, documents, pack, tmp_path):
    """Whether it is compressed says its beginning and not its name."""
    for name in ("a.txt", "a.gz"):
        made = source(write(tmp_path / name, pack(content)))
        if documents is not None:
            assert texts_of(made) == documents
        else:
            with pytest.raises(prepare_data.FileError, match="line 1: got byte 6 of it wrong"):
                texts_of(made)


@pytest.mark.parametrize("lines, expected", [
    (['{"text": "a\\r\\nb\\rc"}', "", "  ", '{"text": "\\n\\nd\\n"}'], ["a\nb\rc", "d"]),
    (['{"text": "\\ud83d\\ude00", "more": 1}'], ["\U0001f600"]), (['{"text": ""}', '{"text": "a"}'], ["", "a"]),
    (['{"text": "\\ud7ff\\ue000"}'], ["\ud7ff\ue000"]),
    (['{"text": "a"}', "", '{"text": "\\udfff"}'], "line 3: not valid JSON: got half of a surrogate pair"), (['{"text": "\\ude00\\ud83d"}'], "line 1: not valid JSON: got half"),
    (['{"text": "\\udbff"}'], "line 1: not valid JSON: got half"), (['{"text": null}'], "line 1: 'text': got a JSON null"),
    (['{"text": "a"}', "", "\t", '{"Text": "a"}'], "line 4: 'text': got nothing, expected the text. --jsonl-field"),
    (['{"text": ["a"]}'], "got a JSON array"), (['"text"'], "got a JSON string, expected an object"), (['{"text": 1}'], "line 1: 'text': got a JSON integer"),
    (['[1]'], "line 1: got a JSON array, expected an object"), (['{"text":'], "line 1: not valid JSON")])
def test_documents_of_json_lines(lines, expected, tmp_path):
    made = source(write(tmp_path / "a.jsonl", "\n".join(lines) + "\n"), jsonl=True)
    if isinstance(expected, list):
        assert texts_of(made) == expected
    else:
        with pytest.raises(prepare_data.FileError, match=re.escape(expected)):
            texts_of(made)


def test_damage_is_said_of_its_line(tmp_path):
    damaged = gzip.compress(b"".join(os.urandom(40).hex().encode() + b"\n" for _ in range(9000)))
    with pytest.raises(prepare_data.FileError, match=r"line [1-9]\d{2,}: the gzip data is damaged.*Get the file again"):
        texts_of(source(write(tmp_path / "a.gz", damaged[:len(damaged) // 2])))
    with pytest.raises(prepare_data.FileError, match=r"line 3: got byte 2 of it wrong, expected UTF-8"):
        texts_of(source(write(tmp_path / "b.txt", b"one\n\nt\xffo\n")))


# ---- what is read from a tokenizer -----------------------------------------------------------------------------------


def changed(tokenizer_path: Path, tmp_path: Path, *tokens: str, single: str = "", **members) -> Path:
    """The tokenizer with further tokens, and a post-processor with this template."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_special_tokens(list(tokens))
    if single:
        special = [(word, tokenizer.token_to_id(word)) for word in single.split() if not word.startswith("$")]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    return write(tmp_path / "changed.json", json.dumps(json.loads(tokenizer.to_str()) | members))


@pytest.mark.parametrize("tokens, wanted, found", [
    ((), None, END), (("</s>", "<|end_of_text|>"), None, END), (("</s>", "<|end_of_text|>"), "</s>", "</s>"), ((), "<pad>", "<pad>"), ((), "a", "a"),
    ((), "", None), ((), "</s>", None)])
def test_the_end_of_text_is_the_one_named_or_the_first_known(tokens, wanted, found, tokenizer_path, tmp_path):
    path = changed(tokenizer_path, tmp_path, *tokens)
    if found is None:
        with pytest.raises(prepare_data.FileError, match="--eos: got") as refused:
            prepare_data.Encoder(path, wanted)
        assert refused.value.code == 2
    else:
        assert prepare_data.Encoder(path, wanted).end_of_text == tokenizers.Tokenizer.from_file(str(path)).token_to_id(found)


@pytest.mark.parametrize("names, found", [(("</s>", "<|end_of_text|>"), "<|end_of_text|>"), (("</s>",), "</s>"), ((), None)])
def test_ends_of_text_are_known_by_these_names_in_this_order(names, found, tokenizer_path, tmp_path):
    path = changed(tokenizer_path, tmp_path, *names)
    write(path, path.read_text().replace(END, "<other>"))
    if found is None:
        with pytest.raises(prepare_data.FileError, match="has none of .*Name the end-of-text token by --eos"):
            prepare_data.Encoder(path, None)
    else:
        assert prepare_data.Encoder(path, None).end_of_text == tokenizers.Tokenizer.from_file(str(path)).token_to_id(found)


@pytest.mark.parametrize("single, prefix", [("$A", []), ("<pad> $A", ["<pad>"]), (f"{END} $A", [END])])
def test_only_what_the_tokenizer_puts_before_a_text_is_its_prefix(single, prefix, tokenizer_path, tmp_path):
    encoder = prepare_data.Encoder(changed(tokenizer_path, tmp_path, single=single), None)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    assert encoder.prefix.tolist() == [tokenizer.token_to_id(token) for token in prefix]


LIMIT, MOST = prepare_data.MAX_REPLACEMENT, prepare_data.MAX_VOCABULARY


@pytest.mark.parametrize("change, words", [
    ({"model": {"vocab": {"a": MOST - 1, "b": 0}}}, None), ({"model": {"vocab": {"a": 0, "b": MOST}}}, f"got the id {MOST}"),
    ({"model": {"vocab": {"a": -1}}}, "got the id -1"), ({"model": {"vocab": [["a", -1.5]]}}, None),
    ({"added_tokens": [{"id": 0}, {"id": MOST - 1}]}, None), ({"added_tokens": [{"id": 0}, {"id": MOST}]}, f"got the id {MOST}"),
    ({"added_tokens": None}, None), ({"added_tokens": [5, {"content": "x"}]}, None),
    *(({stage: {"type": "T", key: "x" * LIMIT}}, None) for stage in ("normalizer", "pre_tokenizer") for key in ("content", "prepend", "replacement")),
    *(({stage: {"type": "T", key: "x" * (LIMIT + 1)}}, f"'T' {key}: got {LIMIT + 1} characters")
      for stage in ("normalizer", "pre_tokenizer") for key in ("content", "prepend", "replacement")),
    ({"normalizer": {"type": "T", "content": "\u4e2d" * (LIMIT // 3)}}, None), ({"normalizer": {"type": "T", "content": "\u4e2d" * (LIMIT // 3 + 1)}}, "T"),
    ({"normalizer": {"type": "S", "normalizers": [{"type": "A"}, {"type": "S", "normalizers": [{"type": "B", "content": "x" * 99}]}]}}, "'B' content"),
    ({"pre_tokenizer": {"type": "S", "pretokenizers": [{"type": "A"}, {"type": "B", "replacement": "x" * 99}]}}, "'B' replacement"),
    ({"decoder": {"type": "T", "content": "x" * 99}, "normalizer": {"type": "T", "other": "x" * 99}}, None)])
def test_limits_of_what_a_tokenizer_may_hold(change, words):
    tokenizer = {"model": {"vocab": {"a": 0}}} | change
    if words is None:
        return prepare_data.check_tokenizer(tokenizer, Path("t.json"))
    with pytest.raises(prepare_data.FileError, match=re.escape(words)) as refused:
        prepare_data.check_tokenizer(tokenizer, Path("t.json"))
    assert refused.value.code == 3


BYTES, NFC = {"type": "ByteLevel", "add_prefix_space": False}, {"type": "NFC"}
SPLIT = {"type": "Split", "pattern": {"Regex": min(prepare_data.KNOWN_PATTERNS)}, "behavior": "Isolated", "invert": False}
NO_REGEX = BYTES | {"use_regex": False}


def sequence(kind: str, *steps: dict) -> dict:
    return {"type": "Sequence", kind: list(steps)}


@pytest.mark.parametrize("normalizer, pre_tokenizer, cut", [
    (None, BYTES, prepare_data.CUT), (NFC, BYTES, prepare_data.CUT), (sequence("normalizers", NFC, NFC), BYTES, prepare_data.CUT),
    ({"type": "NFKC"}, BYTES, None), (sequence("normalizers", NFC, {"type": "Prepend", "prepend": "x"}), BYTES, None),
    (None, BYTES | {"add_prefix_space": True}, prepare_data.CUT_AT_SPACE), (None, {"type": "ByteLevel"}, prepare_data.CUT_AT_SPACE),
    (None, BYTES | {"use_regex": True}, prepare_data.CUT), (None, BYTES | {"use_regex": False}, None),
    (None, sequence("pretokenizers", SPLIT, BYTES | {"use_regex": False}), prepare_data.CUT),
    *((None, sequence("pretokenizers", SPLIT | change, NO_REGEX), None) for change in (
        {"pattern": {"Regex": r"\w+ \w+"}}, {"pattern": {"String": " "}}, {"behavior": "MergedWithNext"}, {"invert": True})),
    (None, sequence("pretokenizers", {"type": "Punctuation"}, BYTES), None), ({"type": "NFD"}, BYTES, None),
    (None, sequence("pretokenizers", {"type": "Digits"}, BYTES | {"use_regex": False}), None),
    (None, sequence("pretokenizers", {"type": "Digits"}, sequence("pretokenizers", SPLIT, BYTES | {"use_regex": False})), prepare_data.CUT)])
def test_where_a_text_of_a_byte_level_tokenizer_may_be_cut(normalizer, pre_tokenizer, cut):
    model = {"vocab": {}, "merges": []}
    assert prepare_data.safe_cut({"model": model, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}) is cut


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
PLAIN = {"id": 3, "content": "<x>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize("change, cut", [
    ({}, True), ({"normalizer": REPLACE}, True), ({"normalizer": None}, False), ({"normalizer": None, "pre_tokenizer": METASPACE}, True),
    ({"normalizer": None, "pre_tokenizer": METASPACE | {"replacement": "_"}}, False), ({"normalizer": REPLACE | {"content": "w"}}, False),
    ({"normalizer": REPLACE | {"content": "."}}, False), ({"normalizer": sequence("normalizers", REPLACE, {**REPLACE, "pattern": {"String": "x"}})}, False),
    ({"normalizer": sequence("normalizers", REPLACE, {**REPLACE, "pattern": {"String": "x"}, "content": "y"})}, True),
    ({"pre_tokenizer": SPLIT}, False), ({"merges": ["a b", "\u2581 ab"]}, True), ({"merges": ["a b", "a \u2581"]}, False),
    ({"merges": [["a", "b"], ["\u2581", "\u2581"], ["\u2581\u2581", "a"]]}, True), ({"merges": [["\u2581a", "\u2581b"]]}, False),
    ({"ignore_merges": True}, False), ({"ignore_merges": True, "normalizer": None, "pre_tokenizer": METASPACE}, False),
    ({"ignore_merges": True, "normalizer": None, "pre_tokenizer": METASPACE | {"split": True}}, True),
    ({"added_tokens": [PLAIN]}, True), ({"added_tokens": [PLAIN, PLAIN | {"content": "<x y>"}]}, False),
    ({"added_tokens": [PLAIN | {"content": "<\u2581>"}]}, False), ({"added_tokens": [PLAIN | {"lstrip": True}]}, False),
    ({"added_tokens": [PLAIN | {"rstrip": True}]}, False), ({"added_tokens": [PLAIN | {"normalized": True}]}, False),
    ({"normalizer": REPLACE, "added_tokens": [PLAIN | {"normalized": True}]}, True), ({"added_tokens": None}, True),
    ({"added_tokens": [{"content": "<x>", "special": True}]}, True), ({"added_tokens": [{"content": "<x>", "special": False}]}, False)])
def test_where_a_text_of_a_sentencepiece_tokenizer_may_be_cut(change, cut):
    model = {"vocab": {"\u2581": 0, "a": 1, "w": 2}, "merges": ["a b"]} | {key: change[key] for key in change if key in ("merges", "ignore_merges")}
    tokenizer = {"model": model, "normalizer": sequence("normalizers", PREPEND, REPLACE), "pre_tokenizer": None, "added_tokens": []}
    assert (prepare_data.safe_cut(tokenizer | change) is prepare_data.CUT_AT_SPACE) == cut


# ---- the command line ------------------------------------------------------------------------------------------------


def parsed(monkeypatch, *words: object):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, words), "--tokenizer", "t.json", "-o", "out"])
    return prepare_data.parse_arguments()


def test_defaults_and_limits_of_the_options(monkeypatch, capsys):
    plain = parsed(monkeypatch, "a", "b")
    assert (plain.text, plain.val, plain.val_fraction, plain.seed, plain.shard_tokens) == ([Path("a"), Path("b")], None, 0.05, 0, 100_000_000)
    assert (plain.format, plain.jsonl_field, plain.document_separator, plain.eos) == ("auto", "text", END, None)
    assert parsed(monkeypatch, "a", "--val", "b", "c").val_fraction == 0.0 and parsed(monkeypatch, "a", "--val", "b", "c").val == [Path("b"), Path("c")]
    for name, good, bad in (("--val-fraction", (0, 0.5), (-0.001, 0.501, "nan")), ("--seed", (0, 2**64 - 1), (-1, 2**64, 0.5)),
                            ("--shard-tokens", (1, 2**40), (0, 2**40 + 1))):
        for value in good:
            assert getattr(parsed(monkeypatch, "a", name, value), name[2:].replace("-", "_")) == value
        for value in bad:
            with pytest.raises(SystemExit) as end:
                parsed(monkeypatch, "a", f"{name}={value}")
            assert end.value.code == 2
    capsys.readouterr()


def test_what_was_there_before_a_run_that_fails_is_there_after_it(prepare, tmp_path):
    """An empty directory as well; one that the run made goes away."""
    empty = write(tmp_path / "empty.txt", f"\n{END}\n\n")
    text = write(tmp_path / "a.txt", "text")
    for existed in (False, True):
        if existed:
            (tmp_path / "out").mkdir()
        for words, what in ((("--val", empty), "empty.txt': no text for val, expected at least one document. Give more text"),
                            ((), "a.txt': no text for val, expected at least one document. Give more text, or --val-fraction 0")):
            done = prepare(text, *words)
            assert done.returncode == 3 and done.stderr.endswith(f"{what}\n") and done.stderr.count("\n") == 1, done.stderr
        assert (tmp_path / "out").exists() == existed
