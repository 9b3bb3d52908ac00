"""The story generator, the tokenizers trained on its text, and the files of the two tiny models."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "dev" / "data"
MODELS = ROOT / "models"
SEPARATOR = "<|endoftext|>"
sys.path.insert(0, str(DATA))

from storybook import plots  # noqa: E402
from storybook.random_source import philox_block  # noqa: E402


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


# --- the files ---------------------------------------------------------------------------------------------------------


def test_same_bytes_everywhere(tmp_path):
    """Of the whole corpus of the demo; dev/data/README.md has the same sums."""
    result = make(tmp_path)
    assert result.returncode == 0, result.stderr
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("train.txt", "val.txt")}
    assert digests == {
        "train.txt": "84736df51ed04caa4f9266b4556cdba5f3ff44ec0d2475398afdfaf1d434f1ce",
        "val.txt": "5bf51e05ea8bba149d3565e06f5830dec471654d683c4f04811532003d09b8fa",
    }


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


# --- the conversations -------------------------------------------------------------------------------------------------


def chats(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(DATA / "make_chats.py"), "-o", str(path), *arguments], capture_output=True, text=True)


def test_the_same_conversations_everywhere(tmp_path):
    """Those of the demo; dev/data/README.md has the same sum."""
    path = tmp_path / "new" / "chats.jsonl"
    assert chats(path).returncode == 0
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "944b2adb72e0d574cc2a1bdc31913996a1557d3dc65e06a20ea085d08a4ca562" and digest in (DATA / "README.md").read_text()
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert chats(path, "--chats", "0").returncode == 2


# --- the tokenizers and the models -------------------------------------------------------------------------------------

TINY = ["tiny-pythia", "tiny-llama"]


def load_tokenizer(name: str):
    tokenizers = pytest.importorskip("tokenizers", reason="the Python package tokenizers is not installed")
    return tokenizers.Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))


@pytest.mark.parametrize("name", TINY)
def test_tokenizer_round_trip(name, stories):
    tokenizer = load_tokenizer(name)
    encoded = [tokenizer.encode(story).ids for story in stories[:300]]
    assert [tokenizer.decode(ids) for ids in encoded] == stories[:300]
    assert sum(map(len, stories[:300])) / sum(map(len, encoded)) > 3.5  # characters a token
    other = "def f(x):\n        return x  # na\u00efve \u65e5\u672c\u8a9e \U0001f642\n"
    assert tokenizer.decode(tokenizer.encode(other).ids) == other


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
