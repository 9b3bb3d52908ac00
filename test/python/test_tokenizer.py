"""The C++ tokenizer against the Hugging Face `tokenizers` library on the published vocabularies of GPT-NeoX and Llama-3, and
on SentencePiece-style ones in many configurations; and against scripts/hf_tokenizer.py on what is accepted.

Needs the program build/release/tokenize (`make tests`; WEFT_BUILD names another build directory), and the published ones
WEFT_SHARED_DATA, a directory with gpt-neox-20b.tokenizer.json and llama3.tokenizer.model (the ranks of Llama-3's tokens).
"""

import base64
import copy
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys

import pytest

tokenizers = pytest.importorskip("tokenizers")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import hf_tokenizer  # noqa: E402
import make_tokenizer_vectors as vectors  # noqa: E402
from tensor_file import FileError  # noqa: E402

DATA = pathlib.Path(os.environ.get("WEFT_SHARED_DATA", "/nonexistent"))
TOKENIZE = pathlib.Path(os.environ.get("WEFT_BUILD", ROOT / "build" / "release")).absolute() / "tokenize"
STRINGS = 20_000

pytestmark = pytest.mark.skipif(not TOKENIZE.exists(), reason=f"{TOKENIZE} is not built")
published = pytest.mark.skipif(not DATA.is_dir(), reason="WEFT_SHARED_DATA names no directory")


def neox(directory):
    return DATA / "gpt-neox-20b.tokenizer.json"


def llama3(directory):
    """tokenizer.json from the ranks: a merge for every way to put a token together, ordered by the token's rank."""
    lines = (DATA / "llama3.tokenizer.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    characters = vectors.alphabet()
    spelled = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [[spelled[a], spelled[b]] for a, b in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    document = vectors.llama3_style_shell()
    document["model"].update(vocab={spelled[token]: rank for token, rank in ranks.items()}, merges=merges)
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(254))]
    document = vectors.with_llama3_specials(document, names)
    path = directory / "llama3.tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def weft(path, strings):
    """(ids, text) of each (flags, bytes); flags as test/cpp/tokenize_main.cpp explains them."""
    payload = b"".join(struct.pack("<BI", flags, len(data)) + data for flags, data in strings)
    done = subprocess.run([TOKENIZE, path], input=payload, stdout=subprocess.PIPE, check=True)
    out, position = done.stdout, 0
    for _ in strings:
        (count,) = struct.unpack_from("<I", out, position)
        ids = list(struct.unpack_from(f"<{count}i", out, position + 4))
        position += 4 + 4 * count
        (length,) = struct.unpack_from("<I", out, position)
        yield ids, out[position + 4 : position + 4 + length].decode("utf-8")
        position += 4 + length


@published
@pytest.mark.parametrize("make", [neox, llama3])
def test_published_vocabulary(make, tmp_path):
    path = make(tmp_path)
    original = tokenizers.Tokenizer.from_file(str(path))
    added = [token["content"] for token in json.loads(path.read_text(encoding="utf-8"))["added_tokens"]]
    rng = random.Random(path.name)
    strings = [(rng.randrange(4), vectors.fuzz_bytes(rng, added)) for _ in range(STRINGS)]
    strings += [(0, vectors.chunk_text(form, chunk).encode()) for form in (0, 1) for chunk in range(vectors.CHUNKS)]
    strings += [(2, text.read_bytes()) for text in sorted(DATA.glob("*.txt"))]
    for (flags, data), (ids, text) in zip(strings, weft(path, strings)):
        assert ids == vectors.expected_ids(original, data, flags), data[:200]
        assert text == original.decode(ids, skip_special_tokens=False), data[:200]


@pytest.mark.parametrize("name", ["neox_style", "llama3_style"])
def test_every_character_between_others_as_the_pinned_library_reads_it(name):
    """Scripts that Unicode has added are where versions of the library part: llmc/text/unicode_ranges.cpp was measured
    against the one that requirements.txt pins."""
    path = ROOT / "test" / "fixtures" / "tokenizer" / f"{name}.tokenizer.json"
    original = tokenizers.Tokenizer.from_file(str(path))
    characters = [chr(code) for code in [*range(0xD800), *range(0xE000, 0x20000), 0x2FA1D, *range(0x31350, 0x323B0, 7)]]
    # Each before a letter and behind one, behind a space, and behind a mark that may be put in order with it.
    texts = [f"a{one}b {one}1 \u0301{one}" for one in characters]
    expected = original.encode_batch(texts, add_special_tokens=False)
    strings = [(0, text.encode()) for text in texts]
    wrong = [f"U+{ord(one):04X}" for one, (ids, _), encoding in zip(characters, weft(path, strings), expected) if ids != encoding.ids]
    assert not wrong, f"tokenizers {tokenizers.__version__}: {len(wrong)} characters, {wrong[:20]}"


def test_the_pinned_library_is_the_one_the_tables_were_measured_against():
    measured = re.search(r"measured against tokenizers ([\d.]+\d)", (ROOT / "llmc" / "text" / "unicode_ranges.h").read_text())
    assert measured is not None
    assert f"tokenizers=={measured[1]} " in (ROOT / "scripts" / "requirements.txt").read_text()


# ---- SentencePiece-style ---------------------------------------------------------------------------------------------


def fixture(name):
    return json.loads((ROOT / "test" / "fixtures" / "tokenizer" / f"{name}.tokenizer.json").read_text(encoding="utf-8"))


STYLES = ["llama2_style", "mistral_style", "metaspace_style"]
STEP = vectors.metaspace_step
SPACE, MARK = vectors.replace_step(" ", "▁"), vectors.replace_step("▁", " ")
PREPEND, BYTES, FUSE = {"type": "Prepend", "prepend": "▁"}, {"type": "ByteFallback"}, {"type": "Fuse"}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


NORMALIZERS = [None, sequence("normalizers", PREPEND, SPACE), SPACE, PREPEND, sequence("normalizers", {"type": "NFC"}, PREPEND, SPACE)]
PRE_TOKENIZERS = [None, *(STEP(scheme, split) for scheme in ("always", "first", "never") for split in (True, False)),
                  {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "str_rep": "▁"},
                  sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, STEP("always", False)),
                  sequence("pretokenizers", STEP("first", True), {"type": "Split", "behavior": "Isolated", "invert": False,
                                                                  "pattern": {"Regex": vectors.LLAMA3_PATTERN}})]
DECODERS = [sequence("decoders", MARK, BYTES, FUSE, vectors.STRIP_SPACE), sequence("decoders", BYTES, FUSE, MARK, vectors.STRIP_SPACE),
            sequence("decoders", MARK, BYTES, FUSE), sequence("decoders", BYTES, STEP("always", True)), STEP("first", False),
            STEP("never", True), sequence("decoders", MARK, FUSE, vectors.STRIP_SPACE | {"start": 3})]


def added(content, **flags):
    return {"id": 0, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": False} | flags


ADDED = [added("<sp>", special=True, lstrip=True), added("<both>", lstrip=True, rstrip=True), added("ba", single_word=True),
         added("▁▁▁"), added("a b"), added("\n\n"), added("<0x41>x"), added("é", special=True, rstrip=True), added(" "),
         added("ba he", normalized=True), added(" x", normalized=True, special=True), added("▁", normalized=True)]


def any_replacement(rng):
    letters = "▁ ae\u0301é<\ufffd"
    return vectors.replace_step(rng.choice(letters), rng.choice(letters))


def any_normalizer(rng):
    """Steps of each kind in any order, some of them in a Sequence of their own."""
    steps = [rng.choice([{"type": "NFC"}, {"type": "Prepend", "prepend": rng.choice(["▁", "e", " a"])}, any_replacement(rng)])
             for _ in range(rng.randrange(1, 5))]
    cut = rng.randrange(len(steps) + 1)
    return sequence("normalizers", *steps[:cut], sequence("normalizers", *steps[cut:]))


def any_decoder(rng):
    """Steps in the order that weft accepts, each with or without replacements in front of it."""
    metaspace = STEP(rng.choice(["always", "first", "never"]), True) | {"replacement": rng.choice("▁▁a\ufffd")}
    strip = vectors.STRIP_SPACE | {"content": rng.choice(" ▁a"), "start": rng.randrange(4)}
    steps = []
    for step in (BYTES, metaspace, FUSE):
        steps += [any_replacement(rng) for _ in range(rng.choice([0, 0, 1, 2]))] + [step] * rng.randrange(2)
    return sequence("decoders", *steps[-7:], *([strip] if FUSE in steps and rng.random() < 0.5 else []))


def configured(rng):
    """One of the vocabularies with every stage and option drawn at random."""
    document = fixture(rng.choice(STYLES))
    model = document["model"]
    model.update(unk_token=rng.choice(["<unk>", "<unk>", None]), fuse_unk=rng.random() < 0.5, byte_fallback=rng.random() < 0.7,
                 ignore_merges=rng.random() < 0.3)
    document.update(normalizer=rng.choice([*NORMALIZERS, *(any_normalizer(rng) for _ in NORMALIZERS)]),
                    pre_tokenizer=rng.choice(PRE_TOKENIZERS),
                    decoder=rng.choice([*DECODERS, *(any_decoder(rng) for _ in DECODERS)]))
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 3]
    for token in rng.sample(ADDED, rng.choice([0, 0, 2, 4])):
        known = model["vocab"].get(token["content"])
        number = 1 + max([*model["vocab"].values(), *(one["id"] for one in document["added_tokens"])])
        document["added_tokens"].append(token | {"id": number if known is None else known})
    return document


def test_sentencepiece_styles_in_many_configurations(tmp_path):
    """Ids and texts, streamed and at once, byte for byte: 150 configurations of three vocabularies."""
    rng, path, compared, configurations = random.Random("sentencepiece"), tmp_path / "t.json", 0, 0
    while configurations < 150:
        document = configured(rng)
        path.write_text(json.dumps(document), encoding="utf-8")
        try:
            hf_tokenizer.tokenizer_vocabulary(path.read_bytes(), path)
        except FileError as problem:
            assert "prepend_scheme" in str(problem) and "normalized" in str(problem)
            continue
        configurations += 1
        original = tokenizers.Tokenizer.from_file(str(path))
        names = vectors.hostile_names(document)
        strings = [(0, b"")] + [(rng.randrange(4), vectors.fuzz_bytes(rng, names)) for _ in range(80)]
        lists = [vectors.random_ids(rng, document) for _ in range(25)]
        strings += [(vectors.IDS | rng.choice([0, vectors.SKIP_SPECIAL]), struct.pack(f"<{len(ids)}i", *ids)) for ids in lists]
        for (flags, data), (ids, text) in zip(strings, weft(path, strings)):
            compared += 1
            if not flags & vectors.IDS:
                assert ids == vectors.expected_ids(original, data, flags), (data[:200], document["normalizer"], document["pre_tokenizer"])
            skipped = bool(flags & vectors.SKIP_SPECIAL)
            assert text == original.decode(ids, skip_special_tokens=skipped), (ids, skipped, document["decoder"])
    assert compared > 15_000


def test_a_sentencepiece_word_of_a_megabyte(tmp_path):
    rng = random.Random("long")
    text = " ".join(vectors.word(rng) for _ in range(40_000)) + " " * 100_000 + "e" * 100_000 + "ж" * 50_000
    path = ROOT / "test" / "fixtures" / "tokenizer" / "llama2_style.tokenizer.json"
    original = tokenizers.Tokenizer.from_file(str(path))
    ((ids, back),) = weft(path, [(2, text.encode())])
    assert ids == original.encode(text).ids and back == original.decode(ids, skip_special_tokens=False)


# ---- what is accepted ------------------------------------------------------------------------------------------------

VALUES = [None, True, False, 0, 1, -1, 2**31, 2**70, 1.5, "", "x", "▁", " ", "▁▁", "BPE", "ByteLevel", "Metaspace", "NFC", "Fuse", "first",
          "never", [], {}, [1], {"type": "NFC"}, {"type": "Fuse"}, BYTES, MARK, SPACE, PREPEND, STEP("first", True), STEP("never", False),
          vectors.STRIP_SPACE, {"String": " "}, {"Regex": vectors.LLAMA3_PATTERN}, {"type": "ByteLevel"}, {"type": "Digits"},
          {"type": "Strip", "content": " ", "start": 1, "stop": 1}, {"type": "WhitespaceSplit"}, "y" * 5000,
          sequence("decoders", MARK, BYTES, FUSE), sequence("pretokenizers", STEP("always", True), STEP("always", True))]


def places(value, path=()):
    """Every place of a document, the long lists of its model by a few members."""
    yield path
    children = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, child in children if len(children) < 20 else [*children[:2], *children[-2:]]:
        yield from places(child, (*path, key))


def changed(document, path, value):
    made = copy.deepcopy(document)
    if not path:
        return value
    *outer, last = path
    node = made
    for key in outer:
        node = node[key]
    node[last] = value
    return made


def accepted_by_programs(path):
    done = subprocess.run([TOKENIZE, path], input=b"", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode in (0, 3) and done.stderr.count(b"\n") == (done.returncode == 3), done.stderr
    return done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", [*STYLES, "neox_style", "llama3_style"])
def test_scripts_and_programs_accept_the_same_tokenizers(name, tmp_path):
    rng, path = random.Random(name), tmp_path / "t.json"
    document = fixture(name)
    all_places, verdicts = list(places(document)), []
    for number in range(150):
        made = changed(document, rng.choice(all_places), rng.choice(VALUES)) if number else document
        path.write_text(json.dumps(made), encoding="utf-8")
        try:
            hf_tokenizer.tokenizer_vocabulary(path.read_bytes(), path)
            here, why = True, ""
        except FileError as problem:
            here, why = False, str(problem)
        there, message = accepted_by_programs(path)
        assert here == there, (why, message)
        verdicts.append(here)
    assert verdicts[0] and 2 < sum(verdicts) < 145
