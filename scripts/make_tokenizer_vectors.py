#!/usr/bin/env python3
"""Makes the tokenizer fixtures: small tokenizer.json files, and texts with the ids that Hugging Face's `tokenizers` gives.

    python3 scripts/make_tokenizer_vectors.py [-o test/fixtures/tokenizer]

For each NAME in neox_style, llama3_style, options, llama2_style, mistral_style, metaspace_style and gemma3_style: NAME.tokenizer.json and
NAME.vectors.bin (little endian):

    "WTOKVEC1"
    u32 count, then for each string: u8 flags (1: special tokens allowed, 2: add BOS), u32 length, bytes, u32 count, u16 ids
    u32 forms, u32 chunks, then for each form and chunk: u64 FNV-1a of the ids (as u16) of chunk_text(form, chunk)

The chunks hold every code point, between characters that make its class and its combining class visible. Strings may be
invalid UTF-8; the ids are those of bytes.decode("utf-8", errors="replace"). The last four also have NAME.texts.bin, the
texts that lists of ids decode to:

    "WTOKTXT1"
    u32 count, then for each list of ids: u8 flags (8: special tokens left out), u32 count, u16 ids, u32 length, UTF-8
"""

import argparse
import json
import pathlib
import random
import struct

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHUNK = 256
CHUNKS = 0x110000 // CHUNK
FORMS = 3
ALLOW_SPECIAL, ADD_BOS, IDS, SKIP_SPECIAL = 1, 2, 4, 8  # the last two: test/cpp/tokenize_main.cpp

SYLLABLES = {
    "latin": "ba be bi do du fa ga he in an er on st tion the and ing ck sh qu ou ea ly".split(),
    "accents": "é è ü ö ñ ça ße å ø œ".split(),
    "cyrillic": "ко на то ра во ст ен ов пр ни".split(),
    "greek": "κα τη ος αν εν ρι μο".split(),
    "arabic": "ال من في ها كت".split(),
    "devanagari": "का ने है में की से".split(),
    "thai": "กา ที่ นี้ ไม่".split(),
    "han": "中 国 人 大 小 天 上 下 日 月".split(),
    "kana": "か き の は ア ト ス ン".split(),
    "hangul": "가 나 다 한 글 은".split(),
    "emoji": ["😀", "👍🏽", "👩‍👩‍👧", "🇩🇪", "❤️", "🧑🏿‍🚀"],
}
WHITESPACE = [" ", "  ", "    ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085",
              "\x0b", "\x0c", "\u1680", "\u200b", "\u180e", "\u202f", "\x1c", "\ufeff"]
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["...", "->", "==", "//", "–", "—", "“", "”", "¿", "§", "€", "·"]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'lL", "'ſ", "'ſt", "’s", "'r", "''s"]
NUMBERS = ["1", "12", "123", "1234", "1234567890", "3.14", "1,000", "٣٤", "१२३", "Ⅻ", "½", "²", "①", "𝟘𝟙", "〇"]
MARKS = ["\u0301", "\u0300", "\u0323", "\u0327", "\u0334", "\u0345", "\u093c", "\u3099", "\u0f71", "\u05b0", "\u1161",
         "\u11a8", "\u0338", "\u1df6", "\u0c3c", "\U00016ff0", "\u0338\u0301", "\u200d", "\ufe0f"]
COMPOSABLE = ["a", "e", "o", "A", "\u212b", "\u2126", "\u1100", "\uac00", "\u0344", "\u0958", "\ufb1d", "\u1e9b", "<",
              "\U0001d15e", "\u0b47\u0b56", "\U00011935\U00011930", "\u09c7\u09be", "ǖ", "\u01d6\u0323"]
CODE = ["def f(x):\n    return x * 2\n", "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n}", "x  =  y ;", "        pass\n",
        "<div class=\"a\">\r\n</div>", "#include <stdio.h>", "if(a&&b||!c){}", "SELECT * FROM t WHERE a='b';", "\t\t\t}\n"]


def code_point(rng):
    """A random code point from all planes, more often from the densely used ones; never a surrogate."""
    while True:
        limit = rng.choice([0x80, 0x250, 0x800, 0x3100, 0x10000, 0x20000, 0x110000])
        value = rng.randrange(limit)
        if not 0xD800 <= value < 0xE000:
            return chr(value)


def word(rng, script=None):
    syllables = SYLLABLES[script or rng.choice(list(SYLLABLES))]
    return "".join(rng.choice(syllables) for _ in range(rng.randint(1, 4)))


def training_text(rng, lines=6000):
    for _ in range(lines):
        script = rng.choice(["latin"] * 6 + list(SYLLABLES))
        words = [word(rng, script) for _ in range(rng.randint(3, 12))]
        if rng.random() < 0.3:
            words.insert(rng.randrange(len(words)), rng.choice(NUMBERS + CONTRACTIONS + PUNCTUATION))
        yield rng.choice(["", "", "  ", "\t", "\n\n"]) + " ".join(words) + rng.choice([".", "!", "\n", "'s", "123", "  "])


def fuzz_string(rng, added):
    """A string made of a random mix of sources. `added`: the contents of the added tokens."""
    sources = [
        lambda: word(rng), lambda: rng.choice(WHITESPACE), lambda: rng.choice(WHITESPACE) * rng.randint(1, 30),
        lambda: rng.choice(PUNCTUATION), lambda: word(rng) + rng.choice(CONTRACTIONS), lambda: rng.choice(NUMBERS),
        lambda: rng.choice(COMPOSABLE) + "".join(rng.choice(MARKS) for _ in range(rng.randint(0, 4))),
        lambda: code_point(rng), lambda: "".join(code_point(rng) for _ in range(rng.randint(1, 6))),
        lambda: rng.choice(CODE), lambda: rng.choice(added), lambda: rng.choice(added)[: rng.randint(1, 8)],
        lambda: " " + word(rng), lambda: word(rng, "latin").upper(), lambda: "\0", lambda: rng.choice("abc 1'") * rng.randint(1, 40),
    ]
    favourites = rng.sample(sources, rng.randint(1, 5))
    return "".join(rng.choice(favourites)() for _ in range(rng.randint(1, 9)))


def fuzz_bytes(rng, added):
    """A fuzz_string() in UTF-8; one in six is damaged."""
    data = bytearray(fuzz_string(rng, added).encode())
    if rng.random() < 1 / 6:
        for _ in range(rng.randint(1, 5)):
            position = rng.randrange(len(data) + 1)
            damage = rng.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\xf0\x9f\x98",
                                 b"\xc3", bytes([rng.randrange(256)]), b"\xf8\x88"])
            data[position : position + rng.randint(0, 1)] = damage
    return bytes(data)


def chunk_text(form, chunk):
    """Every code point of the chunk: in a row; before a letter, a digit, a mark and spaces; between combining marks."""
    points = [c for c in range(chunk * CHUNK, (chunk + 1) * CHUNK) if not 0xD800 <= c < 0xE000]
    if form == 0:
        return "".join(map(chr, points))
    if form == 1:
        return "".join(f"{chr(c)}a {chr(c)}1 {chr(c)}! {chr(c)}  " for c in points)
    return "".join(f"e{chr(c)}\u0334x\u0345{chr(c)}y{chr(c)}\u0301\u0323" for c in points)


def alphabet():
    """The characters of the byte alphabet, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(hidden)) for b in range(256)]


def add_class_probes(document):
    """Adds merges of each continuation byte with 'a', '1', '!' and ' ' before all others. So the ids show which characters the
    pre-tokenizer leaves in one piece with a letter, a digit, a mark or a space."""
    characters = alphabet()
    model = document["model"]
    probes = []
    for byte in range(0x80, 0xC0):
        for other in "a1! ":
            pair = [characters[byte], characters[ord(other)]]
            probes.append(pair)
            model["vocab"].setdefault("".join(pair), len(model["vocab"]))
    known = {tuple(pair) for pair in probes}
    model["merges"] = probes + [pair for pair in model["merges"] if tuple(pair) not in known]


def trained(pre_tokenizer, normalizer, seed):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(training_text(random.Random(seed)), trainer)
    document = json.loads(tokenizer.to_str())
    add_class_probes(document)
    return document


def with_added(document, tokens):
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_tokens(tokens)
    return json.loads(tokenizer.to_str())


def neox_style():
    document = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC(), seed=1)
    document["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [AddedToken(name, special=True, normalized=False) for name in ("<|endoftext|>", "<|padding|>")]
    spaces = [AddedToken(" " * count, special=False, normalized=True) for count in range(24, 1, -1)]
    document = with_added(document, special + spaces)
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]  # the older spelling
    return document


def llama3_pre_tokenizer():
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def llama3_style_shell():
    """A tokenizer of Llama-3's kind with an empty vocabulary."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = llama3_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return json.loads(tokenizer.to_str())


def with_llama3_specials(document, names):
    """The special tokens `names`, of which the first is put in front of every text."""
    document = with_added(document, [AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = Tokenizer.from_str(json.dumps(document))
    template = processors.TemplateProcessing(
        single=f"{names[0]} $A", pair=f"{names[0]} $A {names[0]}:1 $B:1",
        special_tokens=[(names[0], tokenizer.token_to_id(names[0]))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return json.loads(tokenizer.to_str())


def llama3_style():
    document = trained(llama3_pre_tokenizer(), None, seed=2)
    # Leaves tokens that no merges produce, so that ignore_merges makes a difference.
    rng = random.Random(3)
    dropped = set(rng.sample(range(600, len(document["model"]["merges"])), 60))
    document["model"]["merges"] = [pair for i, pair in enumerate(document["model"]["merges"]) if i not in dropped]
    document["model"]["ignore_merges"] = True
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return with_llama3_specials(document, names)


def options():
    """Options that neither family uses: prefix space, Digits, every option of an added token."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    document = trained(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=True)]),
                       normalizers.Sequence([normalizers.NFC()]), seed=4)
    tokens = [
        AddedToken("<left>", special=False, lstrip=True, normalized=False),
        AddedToken("<right>", special=True, rstrip=True, normalized=False),
        AddedToken("<both>", special=True, lstrip=True, rstrip=True, normalized=True),
        AddedToken("cafe\u0301", special=False, normalized=True),
        AddedToken("nai\u0308f", special=False, normalized=False),
        AddedToken("ba", special=False, single_word=True, normalized=True),
        AddedToken("<|", special=False, normalized=False),
        AddedToken("<|long|>", special=True, normalized=False),
        AddedToken("|>", special=False, normalized=False),
        AddedToken("<|long|>er", special=False, normalized=False),
        AddedToken("    ", special=False, normalized=True),
    ]
    return with_added(document, tokens)


# ---- SentencePiece-style ---------------------------------------------------------------------------------------------


def sentencepiece_vocabulary(seed, size, fallback, alphabet):
    """A model like Llama 2's: <unk>, <s>, </s>, tokens of the bytes in `fallback`, then pieces of words with their ▁.
    `alphabet`: the number of characters that have tokens of their own."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=alphabet,
                                  special_tokens=special + [f"<0x{byte:02X}>" for byte in fallback])
    tokenizer.train_from_iterator(training_text(random.Random(seed), lines=2000), trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in special]
    document["pre_tokenizer"] = None
    return document


def with_bos(document, name="<s>"):
    number = document["model"]["vocab"][name]
    document["post_processor"] = {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}}}
    return document


def replace_step(character, content):
    return {"type": "Replace", "pattern": {"String": character}, "content": content}


STRIP_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace_step(scheme, split):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def llama2_style():
    """As in Llama 2, TinyLlama and Mistral 7B: normalizers put ▁ before the text and in place of spaces; all bytes have
    tokens."""
    document = sentencepiece_vocabulary(5, 800, range(256), 90)
    document["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, replace_step(" ", "▁")]}
    document["decoder"] = {"type": "Sequence", "decoders": [
        replace_step("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP_SPACE]}
    return with_added(with_bos(document), [AddedToken("<|user|>", special=True, rstrip=True, normalized=False),
                                           AddedToken("<tab>", special=False, normalized=True)])


def mistral_style():
    """As newer conversions write it: no normalizer, and a Metaspace that puts ▁ before the first piece only. Some bytes have no
    token, so that unknown tokens and byte tokens meet; the unknown token has a merge; the decoders are in the other order."""
    document = sentencepiece_vocabulary(6, 600, [byte for byte in range(256) if byte % 5], 60)
    model = document["model"]
    for left, right in (("<unk>", "<unk>"), ("<unk>", "▁")):
        model["vocab"][left + right] = len(model["vocab"])
        model["merges"].append([left, right])
    model["fuse_unk"] = False
    document["pre_tokenizer"] = metaspace_step("first", False)
    document["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "ByteFallback"}, {"type": "Fuse"}, replace_step("▁", " "), STRIP_SPACE]}
    return with_added(with_bos(document), [AddedToken("[INST]", special=True, normalized=False),
                                           AddedToken("ba", special=False, single_word=True, normalized=True)])


def metaspace_style():
    """Words are cut at ▁ and looked up whole first; no byte fallback; runs of digits are pieces; the decoder is Metaspace."""
    document = sentencepiece_vocabulary(7, 500, [], 70)
    rng = random.Random(8)
    merges = document["model"]["merges"]
    dropped = set(rng.sample(range(len(merges) // 2, len(merges)), 40))  # so that ignore_merges makes a difference
    document["model"]["merges"] = [pair for i, pair in enumerate(merges) if i not in dropped]
    document["model"].update(ignore_merges=True, byte_fallback=False, fuse_unk=True)
    document["normalizer"] = {"type": "NFC"}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        metaspace_step("always", True), {"type": "Digits", "individual_digits": False}]}
    document["decoder"] = metaspace_step("always", True)
    return with_added(document, [AddedToken("<left>", special=False, lstrip=True, normalized=False),
                                 AddedToken("cafe\u0301", special=True, normalized=True)])


def gemma3_style():
    """No ▁ before the text, pieces that end behind a space, which the normalizer has already replaced, and no Strip."""
    document = sentencepiece_vocabulary(9, 700, range(256), 80)
    document["normalizer"] = replace_step(" ", "▁")
    document["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    document["decoder"] = {"type": "Sequence", "decoders": [replace_step("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return with_added(with_bos(document), [AddedToken("<start_of_turn>", special=True, normalized=False),
                                           AddedToken("\n\n", special=False, normalized=False),
                                           AddedToken("▁▁", special=False, normalized=False)])


def hostile_names(document):
    """The contents of added tokens, and strings that look like a token or like ▁."""
    added = [token["content"] for token in document["added_tokens"]]
    return added + ["▁", "▁▁", "<0x41>", "<0x0A>", "<0xe2>", "<unk>", "\xe2\x96", "ABC", "Ж▁", " ▁ ", "  "]


def random_ids(rng, document):
    """Random ids, with runs of byte tokens that are valid UTF-8 and runs that are not."""
    vocab = document["model"]["vocab"]
    last = max([*vocab.values(), *(token["id"] for token in document["added_tokens"])])
    byte_ids = [number for token, number in vocab.items() if token.startswith("<0x")] or [0]
    ids = []
    for _ in range(rng.randint(0, 10)):
        kind = rng.randrange(3)
        if kind == 0:
            ids.append(rng.randint(0, last))
        elif kind == 1:
            ids += [vocab.get(f"<0x{byte:02X}>", 0) for byte in rng.choice(["é", "▁", "中", "😀", " ", "\n", "▁▁"]).encode()]
        else:
            ids += rng.choices(byte_ids, k=rng.randint(1, 4))
    return ids


def decoded_vectors(document, count, seed):
    rng = random.Random(seed + " texts")
    tokenizer = Tokenizer.from_str(json.dumps(document))
    out = [b"WTOKTXT1", struct.pack("<I", count)]
    for index in range(count):
        ids, flags = random_ids(rng, document) if index else [], rng.choice([0, SKIP_SPECIAL])
        text = tokenizer.decode(ids, skip_special_tokens=bool(flags)).encode()
        out.append(struct.pack(f"<BI{len(ids)}HI", flags, len(ids), *ids, len(text)) + text)
    return b"".join(out)


def fnv1a(ids):
    value = 0xCBF29CE484222325
    for byte in struct.pack(f"<{len(ids)}H", *ids):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def expected_ids(tokenizer, data, flags):
    tokenizer.encode_special_tokens = not flags & ALLOW_SPECIAL
    text = data.decode("utf-8", errors="replace")
    return tokenizer.encode(text, add_special_tokens=bool(flags & ADD_BOS)).ids


def vectors(document, count, seed, forms, names):
    """`names`: strings that the texts shall contain, such as the contents of added tokens."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_str(json.dumps(document))
    out = [b"WTOKVEC1", struct.pack("<I", count)]
    for index in range(count):
        data = fuzz_bytes(rng, names) if index else b""
        flags = rng.randrange(4)
        ids = expected_ids(tokenizer, data, flags)
        out.append(struct.pack("<BI", flags, len(data)) + data + struct.pack(f"<I{len(ids)}H", len(ids), *ids))
    out.append(struct.pack("<II", forms, CHUNKS))
    for form in range(forms):
        for chunk in range(CHUNKS):
            ids = expected_ids(tokenizer, chunk_text(form, chunk).encode(), 0)
            out.append(struct.pack("<Q", fnv1a(ids)))
    return b"".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path, default=pathlib.Path("test/fixtures/tokenizer"))
    directory = parser.parse_args().output
    directory.mkdir(parents=True, exist_ok=True)
    for make, count, forms in ((neox_style, 5500, FORMS), (llama3_style, 5500, FORMS), (options, 1000, FORMS),
                               (llama2_style, 700, 1), (mistral_style, 700, 1), (metaspace_style, 700, 1),
                               (gemma3_style, 700, 1)):
        document = make()
        name, sentencepiece = make.__name__, make in (llama2_style, mistral_style, metaspace_style, gemma3_style)
        text = json.dumps(document, ensure_ascii=False)
        (directory / f"{name}.tokenizer.json").write_text(text + "\n", encoding="utf-8")
        names = hostile_names(document) if sentencepiece else [token["content"] for token in document["added_tokens"]]
        data = vectors(document, count, name, forms, names)
        (directory / f"{name}.vectors.bin").write_bytes(data)
        if sentencepiece:
            (directory / f"{name}.texts.bin").write_bytes(decoded_vectors(document, count, name))
        print(f"{name}: {count} strings, {forms * CHUNKS} chunks of all code points, {len(data)} bytes")


if __name__ == "__main__":
    main()
