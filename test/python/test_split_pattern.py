"""Split, Punctuation, WhitespaceSplit and the normal forms against the `tokenizers` library, and scripts/split_pattern.py against
the programs on what is accepted.

The vocabulary has a merge for every two bytes, in random order: pieces that are cut elsewhere have other ids. Needs the program
build/release/tokenize (`make tests`; WEFT_BUILD names another build directory).
"""

import functools
import itertools
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

import pytest

tokenizers = pytest.importorskip("tokenizers")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import make_tokenizer_vectors as vectors  # noqa: E402
import split_pattern  # noqa: E402

TOKENIZE = pathlib.Path(os.environ.get("WEFT_BUILD", ROOT / "build" / "release")).absolute() / "tokenize"
pytestmark = pytest.mark.skipif(not TOKENIZE.exists(), reason=f"{TOKENIZE} is not built")

CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
NO_HAN = "&&[^\\p{Han}]]"
PATTERNS = {
    "words by case, with short forms": rf"{CASED}*{LOWER}+{SHORT}?|{CASED}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}|{REST}",
    "words by case": rf"{CASED}*{LOWER}+|{CASED}+{LOWER}*|\p{{N}}|{REST}",
    "possessive": SHORT + r"|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "symbols": SYMBOLS + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "without Han": rf"[\p{{Han}}]+|{CASED[:-1]}{NO_HAN}*{LOWER[:-1]}{NO_HAN}+{SHORT}?|\p{{N}}{{1,3}}|{REST}",
    "ideographs": "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", "scripts": r"\p{Hiragana}+|\p{Katakana}+|\p{Hangul}+",
    "word characters": r"\w+|[^\w\s]+", "in brackets": r"[\w]+|[\W\d]", "boundaries": r"\b", "no boundaries": r"\B", "case": r"'(?i:[sdmt]|ll|ve|re)",
    "not these in either case": "(?i:[^sk])", "behind": r"(?<=\p{N})\p{L}|(?<!a|bb)\s", "lines": "^.*$", "ends": r"\s+\Z|\A |\z",
    "marks": r"\p{Mn}+|[^\p{Mc}x]", "not letters": r"[\P{L}a]+", "hexadecimal": r"\h+\H|\D\S", "ahead": r"(?!\p{Lu})\p{L}+(?=\d)",
    "atomic": r"(?>\s+)x|a{,2}b{2,}", "groups": r"(?:ab|[cd]{1,2}e)+f?|x*?y", "nothing": "", "perhaps nothing": "x?", "escapes": r"\x41|\x{e9}|\u0301|\t|\.",
}
BEHAVIORS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern if isinstance(pattern, dict) else {"Regex": pattern}, "behavior": behavior, "invert": invert}


@functools.cache
def every_pair():
    """The vocabulary, and its merges in random order."""
    characters = vectors.alphabet()
    pairs = [[a, b] for a in characters for b in characters]
    vocab = {token: number for number, token in enumerate([*characters, *("".join(pair) for pair in pairs)])}
    random.Random(1).shuffle(pairs)
    return vocab, pairs


def document(*steps, normalizer=None):
    vocab, pairs = every_pair()
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, last]}, "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": pairs}}


def with_pairs_of(texts, tokenizer):
    """The same with merges of what stands side by side in `texts` alone. No other can apply, and reading all of them takes most of
    the time of a small comparison."""
    characters = vectors.alphabet()
    present = {(characters[a], characters[b]) for a, b in {pair for text in texts for pair in itertools.pairwise(text.encode())}}
    merges = [pair for pair in tokenizer["model"]["merges"] if tuple(pair) in present]
    tokens = [token for token in tokenizer["model"]["vocab"] if len(token) == 1] + ["".join(pair) for pair in merges]
    return {**tokenizer, "model": {**tokenizer["model"], "merges": merges, "vocab": {token: number for number, token in enumerate(tokens)}}}


def run(path, strings):
    payload = b"".join(struct.pack("<BI", 0, len(data)) + data for data in strings)
    return subprocess.run([TOKENIZE, path], input=payload, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)


def compare(path, tokenizer, strings):
    """Ids of the programs against those of the library. Of bytes that are not UTF-8: those of U+FFFD in their place."""
    texts = [data.decode("utf-8", "replace") for data in strings]
    if tokenizer["normalizer"] is None:
        tokenizer = with_pairs_of(texts, tokenizer)
    written = json.dumps(tokenizer)
    path.write_text(written, encoding="utf-8")
    original = tokenizers.Tokenizer.from_str(written)
    done = run(path, strings)
    assert done.returncode == 0, done.stderr
    position = 0
    for text, encoding in zip(texts, original.encode_batch(texts, add_special_tokens=False)):
        (count,) = struct.unpack_from("<I", done.stdout, position)
        ids = list(struct.unpack_from(f"<{count}i", done.stdout, position + 4))
        position += 4 + 4 * count
        position += 4 + struct.unpack_from("<I", done.stdout, position)[0]
        assert ids == encoding.ids, text[:200]


def fuzzed(seed, count):
    rng = random.Random(seed)
    return [vectors.fuzz_bytes(rng, ["'LL", "12345", "aab ", "\r\n \n", "\u212a\u017f", "a.["]) for _ in range(count)]


def every_character():
    """All planes that have characters, and a sixteenth of the others: the library takes a minute for those."""
    chunks = [chunk for chunk in range(vectors.CHUNKS) if chunk * vectors.CHUNK >> 16 in (0, 1, 2, 3, 14) or chunk % 16 == 0]
    return [vectors.chunk_text(form, chunk).encode() for form in (0, 1) for chunk in chunks]


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, tmp_path):
    compare(tmp_path / "t.json", document(split(PATTERNS[name])), fuzzed(name, 500))


@pytest.mark.parametrize("name", ["words by case", "scripts", "marks"])
def test_patterns_on_every_character(name, tmp_path):
    compare(tmp_path / "t.json", document(split(PATTERNS[name])), every_character())


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_behaviors(behavior, tmp_path):
    for invert in (False, True):
        for pattern in ("[0-9][0-9][0-9]", "", "x?", r"\s", {"String": " "}, {"String": "a.["}, {"String": ""}):
            compare(tmp_path / "t.json", document(split(pattern, behavior, invert)), fuzzed(behavior, 100))
    compare(tmp_path / "t.json", document({"type": "Punctuation", "behavior": behavior}), fuzzed("punctuation", 500))


def test_other_steps_and_several_of_them(tmp_path):
    three = split(r"\p{N}{1,3}"), split(PATTERNS["ideographs"]), split(PATTERNS["symbols"] + r"|\s+")
    punctuation, digits = {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "Digits", "individual_digits": False}
    for steps in (three, (punctuation, digits, split("[0-9][0-9][0-9]")), ({"type": "WhitespaceSplit"}, digits), ({"type": "Punctuation"},)):
        compare(tmp_path / "t.json", document(*steps), fuzzed(len(steps), 1000))
    # In short words: of a text that nothing splits the library takes quadratic time.
    numbers = [number for number in range(0x20000) if not 0xD800 <= number < 0xE000]
    words = [" ".join(f"x{chr(number)}y" for number in numbers[i:i + 64]).encode() for i in range(0, len(numbers), 64)]
    compare(tmp_path / "t.json", document({"type": "WhitespaceSplit"}, {"type": "Punctuation"}), words)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normal_forms(form, tmp_path):
    rng = random.Random(form)
    marks = "".join(map(chr, [*range(0x300, 0x340), 0x3099, 0x1161, 0x11A8, 0x0F71, 0x0F72]))
    others = "aeo\u00a8\u1112\u30c6\ufb01\uff76\u32ff\ufdfa" + "".join(map(chr, [*range(0xA0, 0x400), *range(0x2000, 0x3400), *range(0xF900, 0xFB00)]))
    texts = ["".join(rng.choice(rng.choice([marks, others])) for _ in range(rng.randrange(1, 9))) for _ in range(5000)]
    texts += ["".join(rng.choice(marks) for _ in range(rng.randrange(12))) + chr(rng.randrange(0x20, 0xD800)) for _ in range(5000)]
    compare(tmp_path / "t.json", document(normalizer={"type": form}), [text.encode() for text in texts] + fuzzed(form, 3000))
    if form in ("NFKC", "NFD"):  # one that composes and one that does not, with and without compatibility
        compare(tmp_path / "t.json", document(normalizer={"type": form}), every_character())


def any_pattern(rng, depth=0):
    """Mostly a pattern, of the parts that weft knows and of some that it refuses."""
    atoms = ["a", "b", "é", " ", "\\s", "\\S", "\\d", "\\w", "\\p{L}", "\\P{Lu}", "\\p{^N}", "[ab]", "[^a\\s]", "[a-z&&[^b]]", "[\\p{L}\\d]", ".", "^", "$",
             "\\b", "(?i:k)", "'(?i:S)", "\\n", "\\x41", "-", "\\-", "]", "(?=a)", "(?!\\s)", "(?<=b)", "(?<! )"]
    odd = ["{", "(", ")", "[", "\\1", "\\G", "(?i)", "(?m:a)", "[[:alpha:]]", "[a-", "a**", "\\p{C}", "\\", "(?i:\\w)", "(?<=a+)"]
    parts = []
    for _ in range(rng.randrange(1, 4)):
        part = rng.choice(odd) if rng.random() < 0.02 else rng.choice(atoms)
        if depth < 2 and rng.random() < 0.3:
            part = rng.choice(["(?:%s)", "(%s)", "(?>%s)", "(?=%s)"]) % any_pattern(rng, depth + 1)
        parts.append(part + rng.choice(["", "", "", "+", "*", "?", "+?", "*?", "??", "++", "*+", "{2}", "{1,2}", "{,2}", "{2,}", "{1,2}?", "{1,2}+"]))
    return "".join(parts) + ("|" + any_pattern(rng, depth + 1) if depth < 2 and rng.random() < 0.3 else "")


def test_random_patterns_are_refused_alike_or_split_as_in_the_library(tmp_path):
    """Each accepted one on 100 strings of the characters that patterns tell apart."""
    rng, path, accepted = random.Random("patterns"), tmp_path / "t.json", 0
    whole = document()
    small = {character: number for character, number in whole["model"]["vocab"].items() if len(character) == 1}
    for a in "abkA1 '-\n" + "é":
        for b in "abkA1 '-\n":
            for left in [vectors.alphabet()[byte] for byte in a.encode()]:
                small.setdefault(left + vectors.alphabet()[ord(b)], len(small))
    whole["model"].update(vocab=small, merges=[[token[0], token[1]] for token in small if len(token) == 2])
    for _ in range(300):
        pattern = any_pattern(rng)
        whole["pre_tokenizer"]["pretokenizers"][0:-1] = [split(pattern, rng.choice(BEHAVIORS), rng.random() < 0.3)]
        path.write_text(json.dumps(whole), encoding="utf-8")
        problem, done = split_pattern.problem_of(pattern), run(path, [])
        assert (done.returncode, problem != "") in ((0, False), (3, True)), (pattern, problem, done.stderr)
        if problem:
            assert problem in done.stderr.decode(), (problem, done.stderr)
            continue
        strings = ["".join(rng.choice("aabkA1é '-\n\u212a\u017f") for _ in range(rng.randrange(12))).encode() for _ in range(100)]
        try:
            tokenizers.Tokenizer.from_str(json.dumps(whole))
        except Exception:  # Oniguruma has rules of its own for what looks behind
            continue
        accepted += 1
        compare(path, whole, strings)
    assert 100 < accepted < 300


@pytest.mark.parametrize("pattern, text", [
    ("(a+)+$", "a" * 50 + "!"), ("(?:a|a)+$", "a" * 50 + "!"), ("(?:a+b?)+[cd]", "a" * 500), ("(?:a{1,3})+[bc]", "a" * 300),
    (r"(?:\p{L}+\s?)+$", "ab " * 30 + "1"), ("(a+)+$", ("a" * 17 + "!") * 2000)], ids=lambda value: value[:20])
def test_a_text_that_would_take_too_long_is_one_line(pattern, text, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document(split(pattern))), encoding="utf-8")
    done = run(path, [text.encode()])  # within its time limit, of what would take years
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"takes too long at byte" in done.stderr, done.stderr


def test_the_largest_patterns():
    for size, fine in ((6000, True), (6001, False)):
        assert (split_pattern.problem_of("a" * size) == "") == fine
    for depth, fine in ((29, True), (30, False)):
        assert (split_pattern.problem_of("(" * depth + "a" + ")" * depth) == "") == fine
        assert (split_pattern.problem_of("[" * depth + "a" + "]" * depth) == "") == fine
    assert split_pattern.problem_of("é" * 4097) == "has 8194 bytes, at most 8192 are accepted"
    assert split_pattern.problem_of("(?:ab){100}|a{1000}b{1000}") == "" != split_pattern.problem_of("a{1001}")
