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


def assert_same(path, original, strings):
    """Ids of each string, and their text, as the library's tokenizer gives them."""
    for (flags, data), (ids, text) in zip(strings, weft(path, strings)):
        assert ids == vectors.expected_ids(original, data, flags), data[:200]
        assert text == original.decode(ids, skip_special_tokens=False), data[:200]


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
    assert_same(path, original, strings)


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


def fixture(name):
    return json.loads((ROOT / "test" / "fixtures" / "tokenizer" / f"{name}.tokenizer.json").read_text(encoding="utf-8"))


def added(content, **flags):
    return {"id": 0, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": False} | flags


# ---- the families' -----------------------------------------------------------------------------------------------------

# As published with Qwen 2.5 and 3, Mistral Nemo and Small (tekken), and SmolLM 1 and 2. SmolLM 3 has that of Llama 3.
QWEN_PATTERN = vectors.LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*steps, use_regex=False):
    return {"type": "Sequence", "pretokenizers": [
        *steps, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}]}


def isolated(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
FAMILY_STYLES = {
    "qwen": ({"type": "NFC"}, byte_level(isolated(QWEN_PATTERN)), QWEN_TOKENS),
    "tekken": (None, byte_level(isolated(TEKKEN_PATTERN)), ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]),
    "smollm": (None, byte_level({"type": "Digits", "individual_digits": True}, use_regex=True), ["<|im_start|>", "<|im_end|>", "<repo_name>"]),
}


@pytest.mark.parametrize("style", FAMILY_STYLES)
def test_byte_level_tokenizers_of_the_families(style, tmp_path):
    normalizer, pre_tokenizer, names = FAMILY_STYLES[style]
    document = fixture("llama3_style")
    first = max(document["model"]["vocab"].values()) + 1
    document.update(normalizer=normalizer, pre_tokenizer=pre_tokenizer, added_tokens=[
        added(name, special="call" not in name and "think" not in name) | {"id": first + index} for index, name in enumerate(names)],
        post_processor=None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    original, rng = tokenizers.Tokenizer.from_file(str(path)), random.Random(style)
    strings = [(rng.choice([0, 1]), vectors.fuzz_bytes(rng, names)) for _ in range(10_000)]
    assert_same(path, original, strings)


# ---- SentencePiece-style ---------------------------------------------------------------------------------------------


STYLES = ["llama2_style", "mistral_style", "metaspace_style", "gemma3_style"]
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


def test_a_tokenizer_of_gemma(tmp_path):
    document = fixture("llama2_style")
    document["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>", ignore_merges=False)
    document.update(normalizer=SPACE, decoder=sequence("decoders", MARK, BYTES, FUSE),
                    pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False})
    names = ["<start_of_turn>", "<end_of_turn>", "<unused0>", "\n\n", "\n\n\n", "\t\t", "▁▁", "<table>"]
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 3]
    known = document["model"]["vocab"] | {token["content"]: token["id"] for token in document["added_tokens"]}
    for name in names:
        known.setdefault(name, max(known.values()) + 1)
        document["added_tokens"].append(added(name, special="turn" in name) | {"id": known[name]})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    original, rng = tokenizers.Tokenizer.from_file(str(path)), random.Random("gemma")
    strings = [(rng.choice([0, 1]), vectors.fuzz_bytes(rng, names)) for _ in range(10_000)]
    assert_same(path, original, strings)


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


# ---- each limit from both sides, and each rule on the second of two ---------------------------------------------------

NEOX, LLAMA2, META = "neox_style", "llama2_style", "metaspace_style"
REFUSED, TAKEN = False, True
END = {NEOX: 1 + max([*fixture(NEOX)["model"]["vocab"].values(), *(token["id"] for token in fixture(NEOX)["added_tokens"])]),
       LLAMA2: len(fixture(LLAMA2)["model"]["vocab"]), META: len(fixture(META)["model"]["vocab"])}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": vectors.LLAMA3_PATTERN}}
DIGITS, BYTE_LEVEL = {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
STRIP = vectors.STRIP_SPACE


def stage(name, *steps):
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders", "post_processor": "processors"}[name]
    return {name: sequence(key, *steps)}


def with_model(**changes):
    return {"model": changes}


def with_tokens(*contents, first=END[LLAMA2]):
    """As entries of the vocabulary of llama2_style."""
    return {"vocab": {content: first + i for i, content in enumerate(contents)}}


def with_added(*tokens, style=LLAMA2):
    return {"added": [added(token) | {"id": END[style] + i} if isinstance(token, str) else token for i, token in enumerate(tokens)]}


def template(*ids, tokens=("<s>",), behind=()):
    parts = [{"SpecialToken": {"id": name, "type_id": 0}} for name in tokens]
    return {"type": "TemplateProcessing", "single": [*parts, {"Sequence": {"id": "A", "type_id": 0}}, *behind], "pair": [],
            "special_tokens": {name: {"id": name, "ids": list(ids), "tokens": [name]} for name in tokens}}


def made(style, change):
    """The fixture with a change, and without its added tokens behind the vocabulary."""
    document = fixture(style)
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < END[style]]
    for key, value in change.items():
        if key == "model":
            document["model"].update(value)
        elif key == "vocab":
            document["model"]["vocab"].update(value)
        elif key == "added":
            document["added_tokens"] += value
        else:
            document[key] = value
    return document


E = "\u00e9"
RULES = {
    "tokens of the vocabulary": (LLAMA2, [
        (with_tokens("y" * 4096), TAKEN), (with_tokens(E * 2048), TAKEN), (with_tokens("y" * 4097), REFUSED),
        (with_tokens(E * 2048 + "y"), REFUSED),
        (with_tokens(E * 4096), REFUSED), (with_tokens("\u2581" * 1366), REFUSED), (with_tokens("\U0001f600" * 1024), TAKEN),
        (with_tokens("fine", "\U0001f600" * 1025), REFUSED), (with_tokens(""), REFUSED),
        (with_tokens("one", first=END[LLAMA2] + 1), REFUSED),
        (with_tokens("one", first=END[LLAMA2] - 1), REFUSED)]),
    "added tokens": (LLAMA2, [
        (with_added("y" * 4096), TAKEN), (with_added(E * 2048), TAKEN), (with_added("y" * 4097), REFUSED), (with_added(E * 2049), REFUSED),
        (with_added("fine", E * 3000), REFUSED), (with_added(""), REFUSED), (with_added("one", "two", "three"), TAKEN),
        (with_added("one", "two", "one"), REFUSED),
        ({"added": [added("one") | {"id": END[LLAMA2] + 1}, added("two") | {"id": END[LLAMA2]}]}, REFUSED),
        ({"added": [added("one") | {"id": END[LLAMA2]}, added("two") | {"id": END[LLAMA2]}]}, REFUSED),
        ({"added_tokens": [added("<s>") | {"id": 1}]}, TAKEN),
        ({"added_tokens": [added("<s>") | {"id": 2}]}, REFUSED), ({"added_tokens": [added("<s>") | {"id": END[LLAMA2]}]}, REFUSED),
        ({"added_tokens": None}, TAKEN),
        *((with_added("one", added("two", **{flag: value}) | {"id": END[LLAMA2] + 1}), verdict)
          for flag in ("special", "normalized", "lstrip", "rstrip", "single_word") for value, verdict in ((None, TAKEN), (True, TAKEN), (0, REFUSED), ("", REFUSED)))]),
    "options of the model": (LLAMA2, [
        *((with_model(**{name: value}), verdict) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
          for value, verdict in ((None, TAKEN), (0, TAKEN), (0.0, TAKEN), ("", TAKEN), (False, TAKEN), (True, REFUSED), (0.1, REFUSED), (1, REFUSED), ("##", REFUSED), ([], REFUSED))),
        *((with_model(**{name: value}), verdict) for name in ("fuse_unk", "ignore_merges", "byte_fallback")
          for value, verdict in ((None, TAKEN), (True, TAKEN), (False, TAKEN), (0, REFUSED), ("", REFUSED))),
        (with_model(unk_token=None), TAKEN), (with_model(unk_token="nowhere"), REFUSED), (with_model(unk_token=""), REFUSED),
        (with_model(unk_token="new") | with_added("new"), REFUSED), (with_model(unk_token="new") | with_tokens("new"), TAKEN),
        *(({name: value}, TAKEN) for name in ("truncation", "padding")
          for value in (None, {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}))]),
    "options of a byte-level model": (NEOX, [
        *((with_model(**change), TAKEN) for change in ({"unk_token": None}, {"unk_token": "<|endoftext|>"}, {"unk_token": "nowhere"},
                                                       {"byte_fallback": True}, {"byte_fallback": False})),
        (stage("pre_tokenizer", BYTE_LEVEL), TAKEN), (stage("pre_tokenizer", SPLIT, DIGITS, BYTE_LEVEL), TAKEN),
        (stage("pre_tokenizer", SPLIT), REFUSED),
        (stage("pre_tokenizer", BYTE_LEVEL, SPLIT), REFUSED), (stage("pre_tokenizer", BYTE_LEVEL, BYTE_LEVEL), REFUSED),
        ({"pre_tokenizer": None}, REFUSED),
        (stage("pre_tokenizer"), REFUSED), (stage("pre_tokenizer", STEP("always", True), BYTE_LEVEL), REFUSED),
        (stage("pre_tokenizer", *[SPLIT] * 7, BYTE_LEVEL), TAKEN), (stage("pre_tokenizer", *[SPLIT] * 8, BYTE_LEVEL), REFUSED),
        *((stage("pre_tokenizer", SPLIT, SPLIT | {"invert": value}, BYTE_LEVEL), verdict)
          for value, verdict in ((True, TAKEN), (False, TAKEN), (None, TAKEN), (1, REFUSED))),
        *((stage("pre_tokenizer", step | {"behavior": value}, BYTE_LEVEL), verdict) for step in (SPLIT, {"type": "Punctuation"})
          for value, verdict in ((*((name, TAKEN) for name in hf_tokenizer.BEHAVIORS), ("isolated", REFUSED), ("", REFUSED), (1, REFUSED)))),
        (stage("pre_tokenizer", {"type": "Punctuation"}, {"type": "WhitespaceSplit"}, BYTE_LEVEL), TAKEN),
        (stage("pre_tokenizer", SPLIT | {"behavior": None}, BYTE_LEVEL), REFUSED),
        *((stage("pre_tokenizer", SPLIT | {"pattern": pattern}, BYTE_LEVEL), verdict) for pattern, verdict in (
            ({"String": " "}, TAKEN), ({"String": ""}, TAKEN), ({"String": "y" * 256}, TAKEN), ({"String": "y" * 257}, REFUSED),
            ({"String": E * 128}, TAKEN), ({"String": E * 129}, REFUSED), ({"Regex": "a"}, TAKEN), ({"Regex": ""}, TAKEN),
            ({"Regex": "("}, REFUSED), ({"Regex": 1}, REFUSED), ({"String": 1}, REFUSED), ({}, REFUSED), (" ", REFUSED))),
        (stage("decoder", {"type": "ByteLevel"}), REFUSED),
        ({"decoder": {"type": "Fuse"}}, REFUSED), ({"decoder": None}, REFUSED),
        *((stage("pre_tokenizer", BYTE_LEVEL | {name: value}), verdict) for name in ("use_regex", "add_prefix_space")
          for value, verdict in ((None, TAKEN), (True, TAKEN), (False, TAKEN), (1, REFUSED)))]),
    "normalizers": (LLAMA2, [
        (stage("normalizer", *[SPACE] * 8), TAKEN), (stage("normalizer", *[SPACE] * 9), REFUSED),
        (stage("normalizer", *[{"type": "NFC"}] * 9), REFUSED),
        (stage("normalizer", sequence("normalizers", *[PREPEND] * 4), sequence("normalizers", *[PREPEND] * 4)), TAKEN),
        (stage("normalizer", sequence("normalizers", *[PREPEND] * 4), sequence("normalizers", *[PREPEND] * 5)), REFUSED),
        *(({"normalizer": PREPEND | {"prepend": text}}, verdict) for text, verdict in (
            ("y" * 64, TAKEN), ("y" * 65, REFUSED), (E * 32, TAKEN), (E * 33, REFUSED), ("", REFUSED), ("\u2581" * 21, TAKEN),
            ("\u2581" * 22, REFUSED), (None, REFUSED))),
        (stage("normalizer", SPACE, SPACE | {"content": "xy"}), REFUSED), *((stage("normalizer", SPACE, {"type": form}), TAKEN) for form in hf_tokenizer.NORMAL_FORMS),
        (stage("normalizer", SPACE, {"type": "nfkc"}), REFUSED)]),
    "pre-tokenizers": (LLAMA2, [
        ({"pre_tokenizer": None}, TAKEN), (stage("pre_tokenizer"), TAKEN), (stage("pre_tokenizer", *[DIGITS] * 8), TAKEN),
        (stage("pre_tokenizer", *[DIGITS] * 9), REFUSED),
        (stage("pre_tokenizer", STEP("always", True), DIGITS), TAKEN),
        (stage("pre_tokenizer", STEP("first", True), DIGITS) | {"normalizer": None}, TAKEN),
        (stage("pre_tokenizer", DIGITS, STEP("first", True)) | {"normalizer": None}, REFUSED),
        (stage("pre_tokenizer", DIGITS, STEP("always", True)), TAKEN),
        (stage("pre_tokenizer", DIGITS, STEP("always", True), STEP("always", True)), REFUSED),
        (stage("pre_tokenizer", STEP("never", True), DIGITS, STEP("never", True)), REFUSED),
        (stage("pre_tokenizer", DIGITS | {"individual_digits": 1}), REFUSED), (stage("pre_tokenizer", STEP("last", True)), REFUSED)]),
    "post-processors": (LLAMA2, [
        ({"post_processor": None}, TAKEN), ({"post_processor": template(1)}, TAKEN), ({"post_processor": template(END[LLAMA2] - 1)}, TAKEN),
        ({"post_processor": template(END[LLAMA2])}, REFUSED), ({"post_processor": template(END[LLAMA2])} | with_added("one"), TAKEN),
        ({"post_processor": template(END[LLAMA2] + 1)} | with_added("one"), REFUSED), ({"post_processor": template(-1)}, REFUSED),
        ({"post_processor": template()}, REFUSED),
        ({"post_processor": template(1, 1)}, REFUSED), ({"post_processor": template(tokens=())}, TAKEN),
        ({"post_processor": template(1, tokens=("<s>", "</s>"))}, REFUSED),
        ({"post_processor": template(tokens=(), behind=[{"SpecialToken": {"id": "<s>", "type_id": 0}}])}, REFUSED),
        ({"post_processor": template(1) | {"single": []}}, REFUSED), ({"post_processor": template(1) | {"special_tokens": {}}}, REFUSED),
        (stage("post_processor", {"type": "ByteLevel"}, template(1)), TAKEN), (stage("post_processor", template(1), template(1)), REFUSED),
        (stage("post_processor", template(1), {"type": "ByteLevel"}), TAKEN), ({"post_processor": {"type": "BertProcessing"}}, REFUSED)]),
    "decoders": (LLAMA2, [
        (stage("decoder", *[MARK] * 8), TAKEN), (stage("decoder", *[MARK] * 9), REFUSED), (stage("decoder", *[FUSE] * 8), TAKEN),
        (stage("decoder", *[FUSE] * 9), REFUSED),
        (stage("decoder", *[MARK] * 6, FUSE, STRIP), TAKEN), (stage("decoder", *[MARK] * 7, FUSE, STRIP), REFUSED),
        ({"decoder": None}, REFUSED), (stage("decoder"), TAKEN),
        *((stage("decoder", *steps), verdict) for steps, verdict in (
            ((BYTES, FUSE), TAKEN), ((FUSE, BYTES), REFUSED), ((BYTES, BYTES), REFUSED), ((STEP("always", True), BYTES), REFUSED),
            ((BYTES, STEP("always", True)), TAKEN),
            ((STEP("always", True), FUSE), TAKEN), ((FUSE, STEP("always", True)), REFUSED),
            ((STEP("always", True), MARK, STEP("never", True)), REFUSED),
            ((FUSE, STRIP), TAKEN), ((STRIP,), REFUSED), ((BYTES, STRIP), REFUSED), ((FUSE, STRIP, MARK), REFUSED),
            ((FUSE, STRIP, STRIP), REFUSED),
            ((FUSE, STRIP, FUSE), REFUSED), ((sequence("decoders", FUSE, STRIP), MARK), REFUSED), ((FUSE, MARK, STRIP), TAKEN))),
        *((stage("decoder", FUSE, STRIP | change), verdict) for change, verdict in (
            ({"start": 0}, TAKEN), ({"start": 1 << 20}, TAKEN), ({"start": (1 << 20) + 1}, REFUSED), ({"start": -1}, REFUSED),
            ({"start": None}, REFUSED), ({"start": True}, REFUSED),
            ({"stop": 1}, REFUSED), ({"stop": False}, REFUSED), ({"stop": None}, REFUSED), ({"content": ""}, REFUSED),
            ({"content": "ab"}, REFUSED), ({"content": E}, TAKEN)))]),
    "Metaspace": (META, [
        *((stage("pre_tokenizer", STEP("always", True) | change), verdict) for change, verdict in (
            ({"replacement": "__"}, REFUSED), ({"replacement": ""}, REFUSED), ({"replacement": "_"}, TAKEN), ({"split": None}, TAKEN),
            ({"split": 1}, REFUSED),
            ({"prepend_scheme": None}, TAKEN), ({"prepend_scheme": None, "add_prefix_space": False}, REFUSED),
            ({"prepend_scheme": "never", "add_prefix_space": False}, TAKEN),
            ({"prepend_scheme": "always", "add_prefix_space": False}, REFUSED),
            ({"prepend_scheme": "always", "add_prefix_space": True}, TAKEN)))]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_tokenizers_from_both_sides(name, tmp_path):
    """The verdict of the table is that of the scripts and of the programs."""
    style, rows = RULES[name]
    path, wrong = tmp_path / "t.json", []
    for change, verdict in rows:
        path.write_text(json.dumps(made(style, change)), encoding="utf-8")
        try:
            count = hf_tokenizer.tokenizer_vocabulary(path.read_bytes(), path)
            here, why = True, f"{count} tokens"
        except FileError as problem:
            here, why = False, str(problem)
        there, message = accepted_by_programs(path)
        if (here, there) != (verdict, verdict):
            wrong.append(f"{verdict} {here} {there}: {json.dumps(change)[:160]} {why[-200:]} {message[-200:]}")
    assert not wrong, "\n".join(wrong)


def test_what_is_left_out_is_said(tmp_path):
    path, document = tmp_path / "t.json", fixture(NEOX)
    assert hf_tokenizer.left_out(json.dumps(document).encode(), path) == []
    document.update(truncation={"max_length": 4}, padding={"strategy": "BatchLongest"})
    first, second = hf_tokenizer.left_out(json.dumps(document).encode(), path)
    assert first.endswith("truncation: left out: a text keeps all of its tokens")
    assert second.endswith("padding: left out: no tokens are added to a text")


def test_a_repeated_merge_has_the_rank_of_its_last_place(tmp_path):
    path, model = tmp_path / "t.json", {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}}
    for merges in (["a b", "b c"], ["a b", "b c", "a b"], ["#version: 0.2", "b c", "a b"]):
        path.write_text(json.dumps({"version": "1.0", "model": model | {"merges": merges}, "decoder": FUSE}), encoding="utf-8")
        assert hf_tokenizer.tokenizer_vocabulary(path.read_bytes(), path) == 5
        ((ids, _),) = weft(path, [(0, b"abc")])
        assert ids == tokenizers.Tokenizer.from_file(str(path)).encode("abc").ids


def test_every_byte_that_utf8_has_needs_a_token(tmp_path):
    document, spelled = fixture(NEOX), vectors.alphabet()
    assert hf_tokenizer.byte_alphabet() == [spelled[byte] for byte in range(256)]
    reader = hf_tokenizer._Reader(hf_tokenizer.Node(document, "", tmp_path))
    for byte in range(256):
        reader.vocabulary = {token: number for token, number in document["model"]["vocab"].items() if token != spelled[byte]}
        if byte in (0xC0, 0xC1) or byte > 0xF4:
            reader.check_bytes(reader.root["model"]["vocab"])
        else:
            with pytest.raises(FileError, match=f"no token for the byte 0x{byte:02X}"):
                reader.check_bytes(reader.root["model"]["vocab"])


def test_the_bytes_of_all_added_tokens_have_a_limit(monkeypatch, tmp_path):
    document = made(LLAMA2, {"added": [added(content) | {"id": END[LLAMA2] + i} for i, content in enumerate(("one", E * 4, "three"))]})
    size = sum(len(token["content"].encode()) for token in document["added_tokens"])
    data = json.dumps(document).encode()
    monkeypatch.setattr(hf_tokenizer, "MAX_ADDED_BYTES", size)
    assert hf_tokenizer.tokenizer_vocabulary(data, tmp_path) == END[LLAMA2] + 3
    monkeypatch.setattr(hf_tokenizer, "MAX_ADDED_BYTES", size - 1)
    with pytest.raises(FileError, match=f"got more than {size - 1} bytes of added tokens"):
        hf_tokenizer.tokenizer_vocabulary(data, tmp_path)


def test_vocabularies_and_merges_have_limits(monkeypatch, tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3}, "merges": []}

    def verdict(**changes):
        document = {"model": model | changes, "decoder": {"type": "Fuse"}}
        return hf_tokenizer.tokenizer_vocabulary(json.dumps(document).encode(), tmp_path)

    monkeypatch.setattr(hf_tokenizer, "MAX_VOCABULARY", 4)
    assert verdict() == verdict(merges=["a b", "ab a"]) == verdict(merges=["#version: 0.2", "a b"]) == verdict(merges=["a b"] * 32) == 4
    for changes, words in (({"vocab": model["vocab"] | {"c": 4}}, "got 5 tokens, at most 4 are accepted"),
                           ({"vocab": {"a": 4}}, "got 4, expected a token id from 0 to 3"), ({"merges": ["a b"] * 33}, "got 33 merges"),
                           ({"merges": ["a b a"]}, "expected \"left right\"")):
        with pytest.raises(FileError) as refusal:
            verdict(**changes)
        assert words in str(refusal.value), str(refusal.value)


# ---- files of other kinds, and ids of a text ----------------------------------------------------------------------------


@pytest.mark.parametrize("data, kind", [
    (b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "a SentencePiece model"), (b"\n\x09\n\x00\x15\0\0\0\0", "a SentencePiece model"),
    (b"\n\x0e\n\x05<unk>\x16\0\0\0", ""), (b"\n\x0e\x0b\x05<unk>\x15\0", ""), (b"\n\x0e\n\x05", ""), (b"\n\n\n\n{}", ""), (b"", ""),
    (b"{}", ""),
    (b"IQ== 0\n", "a list of tokens and ranks (tiktoken)"), (b"IQ== 0\r\nIg== 1\r\n", "a list of tokens and ranks (tiktoken)"),
    (b"a+/9 12\n", "a list of tokens and ranks (tiktoken)"), (b"IQ==\n", ""), (b"IQ== x\n", ""), (b"I-== 0\n", "")])
def test_other_kinds_of_tokenizers_are_named(data, kind, tmp_path):
    assert hf_tokenizer.other_kind(data) == kind
    assert hf_tokenizer.missing_tokenizer(tmp_path) == ""
    (tmp_path / "tokenizer.model").write_bytes(data)
    assert hf_tokenizer.missing_tokenizer(tmp_path).startswith(f"tokenizer.model beside it is {kind or 'of another format'}. Take tokenizer.json")
    if kind:
        with pytest.raises(FileError, match=re.escape(f"this is {kind}, expected tokenizer.json. Take")):
            hf_tokenizer.tokenizer_vocabulary(data, tmp_path / "tokenizer.json")


def test_a_directory_in_the_place_of_a_tokenizer_model_is_none(tmp_path):
    (tmp_path / "tokenizer.model").mkdir()
    assert hf_tokenizer.missing_tokenizer(tmp_path) == ""


def test_ids_of_a_text_have_what_the_post_processor_adds(tmp_path):
    document = made(LLAMA2, {"post_processor": template(1)})
    data = json.dumps(document).encode()
    plain = tokenizers.Tokenizer.from_str(data.decode()).encode("he ba", add_special_tokens=False).ids
    assert hf_tokenizer.encode(data, "he ba", tmp_path, "--x", "") == [1, *plain]
    for tokenizer, words in ((None, "tokenizer.json': no such file, but --x needs it. Leave --x out"), (b"{}", "the tokenizers library refuses it: ")):
        with pytest.raises(FileError, match=re.escape(words)):
            hf_tokenizer.encode(tokenizer, "he", tmp_path, "--x", "Leave --x out")
