"""dev/train_tokenizer.py: what it hands to the trainers, and what it says. Tokenizers that it makes are used in test_next_lines.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "dev")]
import train_tokenizer  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs it in an empty directory with trainers that only note what they get."""
    seen = []

    def trainer(style):
        def train(stories, size):
            seen.append((style, stories, size))
            return SimpleNamespace(get_vocab_size=lambda: 4321)
        return train

    kinds = SimpleNamespace(STYLES={style: trainer(style) for style in ("neox", "llama3", "sentencepiece")},
                            to_json=lambda tokenizer, style: f"{style}: \u00e4\n")

    def main(*words):
        monkeypatch.setattr(train_tokenizer, "styles", lambda: kinds)
        monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *map(str, words)])
        return train_tokenizer.main(), seen

    monkeypatch.chdir(tmp_path)
    return main


@pytest.mark.parametrize("words, style, size", [
    ((), "llama3", 2048), (("--style", "sentencepiece", "--vocab-size", 320), "sentencepiece", 320), (("--vocab-size", 1_000_000), "llama3", 1_000_000)])
def test_all_texts_go_to_the_trainer_of_the_style(run, capsys, words, style, size):
    for name, text in (("a.txt", "one\n<|endoftext|>\n\ntwo\n"), ("b c.txt", "three")):
        Path(name).write_text(text)
    assert run("a.txt", "b c.txt", "-o", "my own.json", *words) == (0, [(style, ["one", "two", "three"], size)])
    assert Path("my own.json").read_bytes() == f"{style}: \u00e4\n".encode()
    assert capsys.readouterr().out == (
        "'my own.json': 4,321 tokens\n"
        "next        .venv/bin/python dev/prepare_data.py a.txt 'b c.txt' --tokenizer 'my own.json' -o data/mine\n")
    assert sorted(path.name for path in Path(".").iterdir()) == ["a.txt", "b c.txt", "my own.json"]


@pytest.mark.parametrize("output", ["there", "none/out.json", "link.json"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(run, output):
    Path("a.txt").write_text("text")
    Path("there").mkdir()
    Path("link.json").symlink_to("elsewhere.json")
    seen = run("a.txt", "-o", "out.json")[1]
    with pytest.raises(train_tokenizer.FileError, match=output) as refused:
        run("a.txt", "-o", output)
    assert refused.value.code == 4 and len(seen) == 1
    assert sorted(path.name for path in Path(".").iterdir()) == ["a.txt", "link.json", "out.json", "there"]


@pytest.mark.parametrize("words, code", [
    (("none.txt",), 3), (("good.txt", "none.txt"), 3), (("empty.txt",), 3), (("good.txt", "latin.txt"), 3), ((".",), 3)])
def test_a_text_that_cannot_be_used_leaves_no_tokenizer(run, words, code):
    for name, text in (("good.txt", b"text"), ("empty.txt", b"\n<|endoftext|>\n \n"), ("latin.txt", b"caf\xe9")):
        Path(name).write_bytes(text)
    with pytest.raises(train_tokenizer.FileError, match=words[-1]) as refused:
        run(*words, "-o", "out.json")
    assert refused.value.code == code and not Path("out.json").exists()


@pytest.mark.parametrize("words", [("--vocab-size", 319), ("--vocab-size", 1_000_001), ("--vocab-size", "2e3"), ("--style", "neox"), ("--size", 400)])
def test_limits_of_the_options(run, capsys, words):
    Path("a.txt").write_text("text")
    with pytest.raises(SystemExit) as end:
        run("a.txt", "-o", "out.json", *words)
    assert end.value.code == 2 and not Path("out.json").exists() and capsys.readouterr().err.count("\n") == 1


def test_the_styles_are_those_of_the_projects_own_tokenizers():
    assert set(train_tokenizer.styles().STYLES) == {"neox", "llama3", "sentencepiece"}
