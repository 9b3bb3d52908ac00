"""The C++ tokenizer against the Hugging Face `tokenizers` library on the published vocabularies of GPT-NeoX and Llama-3.

Needs the program build/release/tokenize (`make tests`; WEFT_BUILD names another build directory), and the published ones
WEFT_SHARED_DATA, a directory with gpt-neox-20b.tokenizer.json and llama3.tokenizer.model (the ranks of Llama-3's tokens).
"""

import base64
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
import make_tokenizer_vectors as vectors  # noqa: E402

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
    """(ids, text) of each (flags, bytes)."""
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
