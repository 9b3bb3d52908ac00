"""doc/memory.md: its tables are what the planner and the sizes of the models say now."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("preset, recompute, gpu", [
    ("d12", "none", "24GB"), ("smollm2-135m", "norm", "80GB"), ("tinyllama-1.1b", "block", "40GB"), ("llama3.2-1b", "none", "24GB"),
    ("llama3.2-1b", "norm", "48GB"), ("llama3.2-3b", "block", "40GB"), ("llama3.2-3b", "none", "24GB"), ("llama3.1-8b", "block", "141GB")])
def test_a_cell_is_what_the_planner_says(planner, preset, recompute, gpu):
    (number, row), = [(i, row) for i, row in enumerate(mt.rows()) if (row.preset, row.recompute) == (preset, recompute)]
    cell = table("training")[2 + number].strip("| ").split(" | ")[3 + mt.GPUS.index(gpu)]
    assert cell == planner.cell(row, gpu), "run dev/memory_table.py --write"


def test_the_sizes_of_pythia():
    assert table("pythia") == mt.pythia_table(), "run dev/memory_table.py --write"
    assert "| pythia-2.8b | 2,775 M | 5.55 GB | 0.67 GB | 6.22 GB |" in table("pythia")
