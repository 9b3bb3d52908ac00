"""The story generator, the tokenizers trained on its text, and the files of the two tiny models."""

import hashlib
import json
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "dev" / "data"
MODELS = ROOT / "models"
SEPARATOR = "<|endoftext|>"
sys.path.insert(0, str(DATA))

from storybook import language, plots  # noqa: E402
from storybook.random_source import RandomSource, philox_block  # noqa: E402
from storybook.story import Story  # noqa: E402


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DATA / "make_stories.py"), "-o", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def split(text: str) -> list[str]:
    parts = text.split(f"\n{SEPARATOR}\n")
    if parts.pop() != "":
        raise ValueError("the file does not end with a separator line")
    return parts


@pytest.fixture(scope="module")
def stories() -> list[str]:
    return [plots.tell(1, index) for index in range(1500)]


# --- the random source -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counter, key, expected",
    [  # the known answers published with Random123 for philox4x32 with 10 rounds
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox_block(counter, key) == expected


def test_streams_differ_and_repeat():
    def draw(seed: int, stream: int) -> list[int]:
        source = RandomSource(seed, stream)
        return [source.below(1000) for _ in range(20)]

    assert draw(1, 2) == draw(1, 2)
    assert len({tuple(draw(*pair)) for pair in ((1, 2), (2, 1), (1, 3), (1 << 40, 2), (1, 1 << 40))}) == 5


# --- the template language ---------------------------------------------------------------------------------------------


def test_articles_and_introductions():
    facts = language.Facts()
    facts["owl"] = language.Person("the owl", "she", "owl", "old", "a(n) old owl")
    facts["fruit"] = "apple"
    text = language.expand("{Owl} sat there. {owl.He} saw {a fruit}. {owl} ate it.", facts, RandomSource(1, 1))
    assert text == "An old owl sat there. She saw an apple. The owl ate it."


@pytest.mark.parametrize("template", ["{nobody} left.", "One [two|three.", "A } brace.", "{fruit.colour}"])
def test_unresolved_marks_are_refused(template):
    facts = language.Facts()
    facts["fruit"] = "apple"
    with pytest.raises(language.TemplateError):
        language.expand(template, facts, RandomSource(1, 1))


# --- the files ---------------------------------------------------------------------------------------------------------


def test_same_bytes_everywhere(tmp_path):
    result = make(tmp_path, "--stories", "20", "--val-fraction", "0.1")
    assert result.returncode == 0, result.stderr
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("train.txt", "val.txt")}
    assert digests == {
        "train.txt": "0b875ff4ec355180a5db0c71afcdfc1684c935e92bc655b09aef3ef9a6beae75",
        "val.txt": "f0286a9fd5ce1363f6e4e8451cad93df40ebffdd0c62fdf75fd71428d95666d7",
    }


def test_a_larger_corpus_begins_with_the_smaller(tmp_path):
    for name, count in (("small", "10"), ("large", "30")):
        assert make(tmp_path / name, "--stories", count, "--val-fraction", "0", "--seed", "7").returncode == 0
    small, large = ((tmp_path / name / "train.txt").read_bytes() for name in ("small", "large"))
    assert large.startswith(small) and len(large) > 2 * len(small)


def test_separator_and_split(tmp_path, stories):
    assert make(tmp_path, "--stories", "40", "--val-fraction", "0.25").returncode == 0
    training, validation = (split((tmp_path / name).read_text("ascii")) for name in ("train.txt", "val.txt"))
    assert training == stories[:30] and validation == stories[30:40]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "arguments",
    [["--stories", "0"], ["--stories", "many"], ["--seed", "-1"], ["--val-fraction", "1"], ["--val-fraction", "nan"], ["--speed", "1"]],
)
def test_bad_usage_is_one_line_and_code_2(tmp_path, arguments):
    result = make(tmp_path / "out", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unwritable_output_is_code_5(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = make(tmp_path / "file" / "below", "--stories", "2")
    assert result.returncode == 5
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


# --- the text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(plots.PLOTS)))
def test_every_plot_in_many_worlds(number):
    function, seasons = plots.PLOTS[number]
    for index in range(60):
        story = Story(RandomSource(11, 1000 * number + index), seasons)
        function(story)
        words = len(story.text().split())
        assert 80 <= words <= 260, f"{function.__name__} has {words} words"


MISTAKES = {
    "template mark": r"[{}\[\]|<>]|\(n\)",
    "double space": r"  ",
    "space at a line end": r"^ | $",
    "space before punctuation": r" [,.!?;:]",
    "article before a vowel": r"\b[Aa] [aeiouAEIOU]",
    "article before a consonant": r"\b[Aa]n [^aeiouAEIOU]",
    "two articles": r"\b(a|an|the) (a|an|the)\b",
    "doubled word": r"\b(\w+) \1\b",
    "sentence without capital": r"[.!?] [a-z]",
    "paragraph without capital": r"^[a-z]",
    "pronoun as possessive": r"\b([Hh]e|[Ss]he|[Hh]im|[Tt]hem)'s\b",
    "wrong case": r"\b(with|to|for|at|from) (he|she|they)\b",
    "verb form": r"\b([Hh]e|[Ss]he|[Ii]t) (were|have|are)\b|\b[Tt]hey (was|is|has)\b",
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_no_mistakes_in_the_text(stories, name):
    pattern = re.compile(f".{{0,20}}(?:{MISTAKES[name]}).{{0,10}}", re.MULTILINE)
    hits = Counter(match.group(0) for story in stories for match in pattern.finditer(story))
    assert not hits, hits.most_common(3)


def test_quotes_come_in_pairs(stories):
    odd = [paragraph for story in stories for paragraph in story.split("\n\n") if paragraph.count('"') % 2]
    assert not odd, odd[0]


def test_plain_ascii_paragraphs(stories):
    for story in stories:
        assert re.fullmatch(r"[ -~]+(\n\n[ -~]+)+", story), story
        assert story[-1] in '.!?"'


def test_pronouns_follow_the_hero():
    """Every pronoun form of the hero agrees with the hero's gender."""
    for index in range(200):
        story = Story(RandomSource(5, index))
        hero = story.slots["hero"]
        story.say("{hero.He} hid {hero.himself}, and {elder} [saw|found] {hero.him} and {hero.his} {thing}.")
        expected = {"he": ("He hid himself", " him and his "), "she": ("She hid herself", " her and her ")}[hero.gender]
        assert all(part in story.text() for part in expected)


def test_hero_and_friend_can_be_told_apart():
    for index in range(500):
        slots = Story(RandomSource(6, index)).slots
        hero, friend = slots["hero"], slots["friend"]
        assert hero.name != friend.name and hero.kind != friend.kind
        assert slots["helper"].kind != slots["helper2"].kind
        assert len({slots["spot"], slots["spot2"], slots["spot3"]}) == 3 and slots["place"] != slots["place2"]


def test_lost_thing_is_found_where_the_helper_saw_it():
    for index in range(100):
        story = Story(RandomSource(8, index))
        plots.lost_thing(story)
        thing = story.slots["thing"]
        text = story.text()
        assert text.count(story.slots["spot3"]) >= 1 and text.count(thing.noun) >= 4


def test_variety(stories):
    sentences = [part for story in stories for part in re.split(r'(?<=[.!?]) (?=["A-Z])|\n\n', story)]
    words = {word for story in stories for word in re.findall(r"[a-z']+", story.lower())}
    assert len(set(stories)) == len(stories)
    assert len({story[:200] for story in stories}) > 0.99 * len(stories)
    assert len(set(sentences)) > 0.55 * len(sentences)
    assert len(words) > 1500
    assert len(plots.PLOTS) >= 12


def test_val_stories_are_not_training_stories():
    training = {plots.tell(1, index) for index in range(3000)}
    assert not training & {plots.tell(1, index) for index in range(5700, 6000)}


# --- the tokenizers and the models -------------------------------------------------------------------------------------

TINY = ["tiny-pythia", "tiny-llama"]


def load_tokenizer(name: str):
    tokenizers = pytest.importorskip("tokenizers", reason="the Python package tokenizers is not installed")
    return tokenizers.Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))


def read_json(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def safetensors_header(path: Path) -> tuple[dict, int]:
    """The table of tensors, and the bytes of data that follow it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, len(content) - 8 - length


@pytest.mark.parametrize("name", TINY)
def test_tokenizer_round_trip(name, stories):
    tokenizer = load_tokenizer(name)
    encoded = [tokenizer.encode(story).ids for story in stories[:300]]
    assert [tokenizer.decode(ids) for ids in encoded] == stories[:300]
    assert sum(map(len, stories[:300])) / sum(map(len, encoded)) > 3.5  # characters a token
    other = "def f(x):\n        return x  # na\u00efve \u65e5\u672c\u8a9e \U0001f642\n"
    assert tokenizer.decode(tokenizer.encode(other).ids) == other


def test_neox_style():
    tokenizer = load_tokenizer("tiny-pythia")
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.encode("<|endoftext|><|padding|>").ids == [0, 1]
    for count in range(2, 25):
        assert tokenizer.encode(" " * count).ids == [2049 - count]
    assert tokenizer.encode("Hello").ids[0] != 0  # nothing is put in front
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids  # NFC
    model = read_json(MODELS / "tiny-pythia" / "tokenizer.json")["model"]
    assert isinstance(model["merges"][0], str) and not model["ignore_merges"]


def test_llama3_style():
    tokenizer = load_tokenizer("tiny-llama")
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.encode("Hello").ids[0] == tokenizer.token_to_id("<|begin_of_text|>") == 2040
    assert tokenizer.token_to_id("<|end_of_text|>") == 2041
    assert tokenizer.encode("e\u0301").ids != tokenizer.encode("\u00e9").ids  # no normalizer
    model = read_json(MODELS / "tiny-llama" / "tokenizer.json")["model"]
    assert isinstance(model["merges"][0], list) and model["ignore_merges"]


def test_pythia_config_and_weights():
    config = read_json(MODELS / "tiny-pythia" / "config.json")
    assert config["model_type"] == "gpt_neox" and config["use_parallel_residual"] and not config["tie_word_embeddings"]
    assert config["rope_parameters"]["partial_rotary_factor"] == config["rotary_pct"] == 0.25
    assert config["rope_parameters"]["rope_theta"] == config["rotary_emb_base"] == 10000
    layers, width, rows = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    assert rows == 2176  # 2048 tokens and 128 unused rows
    header, size = safetensors_header(MODELS / "tiny-pythia" / "model.safetensors")
    assert {tensor["dtype"] for tensor in header.values()} == {"F16"}
    assert size == 2 * (layers * (12 * width**2 + 13 * width) + 2 * width + 2 * rows * width)


def test_llama_config_and_weights():
    config = read_json(MODELS / "tiny-llama" / "config.json")
    rope = config["rope_parameters"]
    assert config["model_type"] == "llama" and config["tie_word_embeddings"]
    assert config["num_attention_heads"] == 3 * config["num_key_value_heads"]
    assert rope["rope_type"] == "llama3" and rope["original_max_position_embeddings"] < config["max_position_embeddings"]
    assert rope == config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    header, size = safetensors_header(MODELS / "tiny-llama" / "model.safetensors")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"} and "lm_head.weight" not in header
    width, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * width * width + 2 * width * kv + 3 * width * ffn + 2 * width
    assert size == 2 * (config["vocab_size"] * width + layers * layer + width)


def test_models_stay_small():
    assert sum(path.stat().st_size for name in TINY for path in (MODELS / name).iterdir()) < 8_000_000


def test_tokenizer_trainer_is_deterministic(tmp_path, stories):
    pytest.importorskip("tokenizers", reason="the Python package tokenizers is not installed")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{story}\n{SEPARATOR}\n" for story in stories[:150]), "ascii")
    for style in ("neox", "llama3"):
        outputs = [tmp_path / f"{style}{run}.json" for run in (1, 2)]
        for output in outputs:
            command = [sys.executable, str(DATA / "train_tokenizer.py"), str(text), "-o", str(output), "--style", style]
            result = subprocess.run([*command, "--vocab-size", "600"], capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
        assert outputs[0].read_bytes() == outputs[1].read_bytes()


@pytest.mark.parametrize(
    "content, arguments, code",
    [(b"", [], 3), (b"\xff\xfe", [], 3), (None, [], 3), (b"a short text", ["--vocab-size", "600"], 3), (b"text", ["--vocab-size", "9"], 2)],
)
def test_tokenizer_trainer_refuses(tmp_path, content, arguments, code):
    pytest.importorskip("tokenizers", reason="the Python package tokenizers is not installed")
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    command = [sys.executable, str(DATA / "train_tokenizer.py"), str(text), "-o", str(tmp_path / "t.json"), "--style", "neox"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert result.returncode == code
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "t.json").exists()
