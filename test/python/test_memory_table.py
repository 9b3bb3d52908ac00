"""doc/memory.md: its tables are what the planner and the sizes of the models say now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "dev")]
import memory_table as mt  # noqa: E402

PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "train_llama"
PAGE = (ROOT / "doc" / "memory.md").read_text(encoding="utf-8")


def table(name: str) -> list[str]:
    begin, end = mt.between(PAGE, name)
    return PAGE[begin:end].splitlines()


@pytest.fixture(scope="module")
def planner(tmp_path_factory) -> mt.Planner:
    if not PROGRAM.exists():
        pytest.skip("train_llama is not built")
    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    if "CUDA" not in version:
        pytest.skip("train_llama is built without nvcc: it cannot plan for a GPU")
    return mt.Planner(tmp_path_factory.mktemp("planner"))


def test_every_preset_has_its_rows():
    lines = table("training")[2:]
    assert [line.split(" | ")[:3] for line in lines] == [[f"| {row.preset}", str(row.context), row.recompute] for row in mt.rows()]
    assert len(lines) == 21 and all(line.count("|") == 4 + len(mt.GPUS) for line in lines)
    assert {row.vocabulary for row in mt.rows()} == {2048, 50304, 49152, 32000, 128256}


def sequences(cell: str) -> float:
    """A cell as a number: with bf16 moments less than without."""
    if cell == "–":
        return 0
    return int(re.match(r"\d+", cell)[0]) * (0.001 if "(m)" in cell else 1)


def test_more_memory_or_more_recomputation_never_fits_less():
    cells = [[sequences(cell) for cell in line.strip("| ").split(" | ")[3:]] for line in table("training")[2:]]
    for row in cells:
        assert row == sorted(row)
    for none, norm, block in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        assert all(a <= b <= c for a, b, c in zip(none, norm, block, strict=True))


@pytest.mark.parametrize("preset, recompute, gpu", [
    ("d12", "none", "24GB"), ("smollm2-135m", "norm", "80GB"), ("tinyllama-1.1b", "block", "40GB"), ("llama3.2-1b", "none", "24GB"),
    ("llama3.2-1b", "norm", "48GB"), ("llama3.2-3b", "block", "40GB"), ("llama3.2-3b", "none", "24GB"), ("llama3.1-8b", "block", "141GB")])
def test_a_cell_is_what_the_planner_says(planner, preset, recompute, gpu):
    (number, row), = [(i, row) for i, row in enumerate(mt.rows()) if (row.preset, row.recompute) == (preset, recompute)]
    cell = table("training")[2 + number].strip("| ").split(" | ")[3 + mt.GPUS.index(gpu)]
    assert cell == planner.cell(row, gpu), "run dev/memory_table.py --write"


@pytest.mark.parametrize("sizes", [{"training": 1, "pythia": 1}, {"training": 9, "pythia": 2}, {"training": 2, "pythia": 9}, {"pythia": 5, "training": 1}])
def test_tables_of_other_lengths_leave_the_text_around_them(sizes, tmp_path, monkeypatch, capsys):
    def page(**rows):
        table = {name: "".join(f"| {name} {row} |\n" for row in range(rows[name])) for name in ("training", "pythia")}
        return "".join(f"Text.\n\n{mt.BEGIN.format(name)}\n{table[name]}{mt.END}\n\n" for name in table) + "The end: \u2013.\n"

    (tmp_path / "doc").mkdir()
    monkeypatch.setattr(mt, "ROOT", tmp_path)
    monkeypatch.setattr(mt, "tables", lambda planner: {name: [f"| {name} {row} |" for row in range(rows)] for name, rows in sizes.items()})
    (tmp_path / "doc" / "memory.md").write_text(page(training=3, pythia=4), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["memory_table.py", "--write"])
    for _ in range(2):
        assert mt.main() == 0 and (tmp_path / "doc" / "memory.md").read_text(encoding="utf-8") == page(**sizes)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["memory_table.py"])
    assert mt.main() == 0 and (tmp_path / "doc" / "memory.md").read_text(encoding="utf-8") == page(**sizes)
    assert capsys.readouterr().out == "\n".join("".join(f"| {name} {row} |\n" for row in range(rows)) for name, rows in sizes.items())


class Answers(mt.Planner):
    """A planner whose answers are those of `fits`: GPU and moments to sequences."""

    def __init__(self, fits):
        self.fits, self.asked = fits, []

    def run(self, row, gpu, *more):
        self.asked.append((gpu, *more))
        most = self.fits[gpu, "bf16" in more]
        error = f"--micro-batch {most} would fit" if 0 < most < mt.MOST else ""
        return subprocess.CompletedProcess([], 0 if most >= mt.MOST else 5, "", error)


def test_a_cell_says_how_many_fit_and_with_which_moments():
    row = mt.Row("d12", 50304, "norm")
    planner = Answers({("24GB", False): 0, ("24GB", True): 0, ("40GB", False): 0, ("40GB", True): 4, ("48GB", False): 16,
                       ("80GB", False): mt.MOST // 2, ("141GB", False): mt.MOST})
    assert planner.line(row) == "| d12 | 1024 | norm | \u2013 | 4 (m) | 16 | 512 | 1024+ |"
    assert [asked[0] for asked in planner.asked] == ["24GB", "24GB", "40GB", "40GB", "48GB", "80GB", "141GB"]
    assert all(asked[1:3] == ("--micro-batch", str(mt.MOST)) for asked in planner.asked)


def test_the_sizes_of_pythia():
    assert table("pythia") == mt.pythia_table(), "run dev/memory_table.py --write"
    assert "| pythia-2.8b | 2,775 M | 5.55 GB | 0.67 GB | 6.22 GB |" in table("pythia")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A train_llama that notes its words, says on stderr what the file `says` holds and ends with the code in `code`."""
    stub = tmp_path / "bin" / "train_llama"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nd=${0%/bin/*}; echo "$@" >>"$d/words"; cat "$d/says" >&2; exit "$(cat "$d/code")"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("WEFT_BIN_DIR", str(stub.parent))

    def answers(code, says=""):
        (tmp_path / "code").write_text(str(code))
        (tmp_path / "says").write_text(says)
        return mt.Planner(tmp_path)

    return answers


@pytest.mark.parametrize("code, says, most", [(0, "", mt.MOST), (0, "--micro-batch 8 would fit", mt.MOST), (5, "error: --micro-batch 96 would fit\n", 96),
                                              (5, "error: nothing would fit", 0), (5, "", 0)])
def test_the_planner_is_asked_for_the_row(program, tmp_path, code, says, most):
    planner, row = program(code, says), mt.Row("tinyllama-1.1b", 32000, "block")
    assert planner.most(row, "48GB") == most == planner.most(mt.Row("tiny", 2048, "none"), "141GB", "--moments", "bf16")
    assert (tmp_path / "words").read_text().splitlines() == [
        f"--config {preset} --vocab-size {vocabulary} --seq-len {context} --recompute {mode} --train {tmp_path}/train_00000.bin --dry-run "
        f"--gpu-memory {gpu} --micro-batch 1024{more}" for preset, vocabulary, context, mode, gpu, more in (
            ("tinyllama-1.1b", 32000, 2048, "block", "48GB", ""), ("tiny", 2048, 512, "none", "141GB", " --moments bf16"))]
    shard = mt.token_shard.TokenShard(tmp_path / "train_00000.bin")
    shard.verify()
    assert shard.count == 4096 and shard.count > max(row.context for row in mt.rows())


@pytest.mark.parametrize("code", [1, 2, 3, 4, 6])
def test_a_planner_that_cannot_answer_ends_the_table(program, tmp_path, code):
    planner = program(code, "error: no GPU code\n")
    with pytest.raises(mt.FileError, match="^train_llama: error: no GPU code$") as refused:
        planner.cell(mt.rows()[0], "24GB")
    assert refused.value.code == 4
    (tmp_path / "bin" / "train_llama").unlink()
    with pytest.raises(mt.FileError, match="not there. Build it first: make") as refused:
        planner.cell(mt.rows()[0], "24GB")
    assert refused.value.code == 4


def test_the_training_table_has_a_line_a_row_and_a_column_a_gpu():
    planner = Answers({(gpu, moments): 2 << i for i, gpu in enumerate(mt.GPUS) for moments in (False, True)})
    head, rule, *lines = mt.training_table(planner)
    assert head == "| model | context | `--recompute` | 24 GB | 40 GB | 48 GB | 80 GB | 141 GB |" == table("training")[0]
    assert rule == "|---|---|---|---|---|---|---|---|" == table("training")[1]
    assert lines == [f"| {row.preset} | {row.context} | {row.recompute} | 2 | 4 | 8 | 16 | 32 |" for row in mt.rows()]
    assert list(mt.tables(planner)) == ["training", "pythia"]
