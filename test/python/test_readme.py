"""README.md: short, its commands and files exist, and its pictures are drawn from the committed figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = ROOT / "dev/performance/figures.json"
sys.path.insert(0, str(ROOT / "dev/pictures"))

import draw  # noqa: E402


def linked(text: str) -> list[str]:
    return [link for link in re.findall(r'\]\(([^)#\s]+)|src="([^"]+)"', text) for link in link if link and "://" not in link]


def test_it_has_at_most_800_words():
    assert len(README.split()) <= 800


def test_every_linked_file_and_picture_exists():
    found = linked(README)
    assert len(found) > 15 and [link for link in found if not (ROOT / link).exists()] == []
    assert linked("[a](doc/moon.md) ![b](c.svg) <img src=\"d.svg\"> [e](https://f)") == ["doc/moon.md", "c.svg", "d.svg"]


def test_every_command_exists():
    """Programs, scripts and targets of the indented blocks; test_documents.py looks at their options."""
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [line for block in re.findall(r"(?:^ {4}.*\n)+", README, re.M) for line in block.splitlines()]
    made = [target for line in commands for target in re.findall(r"\bmake ([a-z][\w-]*)", line)]
    assert {"demo", "test"} <= set(made) <= targets, set(made) - targets
    run = [path for line in commands for path in re.findall(r"^ {4}(?:\.venv/bin/python )?((?:\./|scripts/|dev/)\S+)", line)]
    assert len(run) > 6
    assert [path for path in run if path not in ("./train_llama", "./infer_pythia") and not (ROOT / path).is_file()] == []


def test_every_folder_of_the_tree_exists():
    names = [name for line in re.findall(r"^ {4}(llmc/\w+(?:, \w+)*) ", README, re.M) for name in line.split(", ")]
    assert len(names) > 8
    assert [name for name in names if not (ROOT / name).is_dir() and not (ROOT / "llmc" / name).is_dir()] == []


def test_its_numbers_are_current_figures():
    """The two of the first screen, and the ratio between them."""
    figures = draw.Figures(FIGURES)
    many = {program: dict(figures.batch("pythia-2.8b", program))[64] for program in ("weft", draw.VLLM)}
    one = figures.row("fused.md", "pythia-2.8b, fused, context 64")
    words = " ".join(README.split())
    assert f"at {many['weft']:,.0f} tokens/s, {many['weft'] / many[draw.VLLM]:.1f} times vLLM" in words
    assert f"{float(one['value']):.2f} ms a token, {draw.numeric(one['share_of_read']):.0f} % of the roofline" in words


def drawn(folder: Path) -> dict[str, bytes]:
    subprocess.run([sys.executable, ROOT / "dev/pictures/draw.py", "-o", folder], check=True)
    return {path.name: path.read_bytes() for path in folder.glob("*.svg")}


def test_the_pictures_are_those_of_the_figures(tmp_path):
    """If a figure has changed: .venv/bin/python dev/pictures/draw.py"""
    assert drawn(tmp_path) == {path.name: path.read_bytes() for path in (ROOT / "doc/pictures").glob("*.svg")}


def test_a_picture_shows_a_changed_figure_and_needs_each(tmp_path):
    rows = json.loads(FIGURES.read_text())
    named = [row for row in rows if row["name"] == "pythia-2.8b, fused, context 64"]
    assert len(named) == 1
    before = draw.speed(draw.Figures(FIGURES)).written()
    named[0]["value"] = "1.500"
    (tmp_path / "changed.json").write_text(json.dumps(rows))
    after = draw.speed(draw.Figures(tmp_path / "changed.json")).written()
    assert "1.28 ms" in before and "1.28 ms" not in after and "1.50 ms · 667/s" in after
    rows.remove(named[0])
    (tmp_path / "without.json").write_text(json.dumps(rows))
    with pytest.raises(KeyError):
        draw.speed(draw.Figures(tmp_path / "without.json"))


def test_the_loss_picture_is_of_two_runs_that_agree():
    row = draw.Figures(FIGURES).row("step.md", "tiny on stories, the loss of every step")
    assert len(row["weft"]) == len(row["pytorch"]) >= 100
    assert max(abs(a - b) for a, b in zip(row["weft"], row["pytorch"])) < 1e-4
    assert row["weft"][-1] < row["weft"][0] / 2


def test_pictures_are_small():
    assert [path.name for path in (ROOT / "doc/pictures").iterdir() if path.stat().st_size > 100_000] == []


def test_the_index_lists_every_document():
    index = (ROOT / "doc/README.md").read_text(encoding="utf-8")
    documents = sorted(path.name for path in (ROOT / "doc").glob("*.md") if path.name != "README.md")
    assert [name for name in documents if f"({name})" not in index] == []
