#!/usr/bin/env python3
"""Prints the tables of doc/memory.md: which model train_llama's planner fits into which GPU, and what a Pythia takes.

    .venv/bin/python dev/memory_table.py            # print them
    .venv/bin/python dev/memory_table.py --write    # write them into doc/memory.md

Each cell of the first table is one `train_llama --dry-run --gpu-memory SIZE`, which needs no GPU, but a train_llama that was
built with nvcc: WEFT_BIN_DIR says where it is, by default the root of the repository. Exit codes: 2 usage, 4 train_llama has no
GPU code or is not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from needs import ENVIRONMENT  # noqa: E402, before the packages

import numpy as np  # noqa: E402

import cli  # noqa: E402
import token_shard  # noqa: E402
from tensor_file import FileError  # noqa: E402

GPUS = ("24GB", "40GB", "48GB", "80GB", "141GB")
RECOMPUTE = ("none", "norm", "block")
CONTEXTS = {"tiny": 512, "d12": 1024}  # of the other presets: 2048
MOST = 1024  # sequences at once, a power of two: the planner then answers with the largest one that fits
BEGIN, END = "<!-- dev/memory_table.py: {} -->", "<!-- end -->"


@dataclass(frozen=True)
class Row:
    preset: str
    vocabulary: int
    recompute: str

    @property
    def context(self) -> int:
        return CONTEXTS.get(self.preset, 2048)


def presets(model_type: str) -> list[tuple[str, int, int, int]]:
    """Name, layers, hidden size and rows of the embedding of this type's presets."""
    text = (ROOT / "llmc" / "model" / "presets.cpp").read_text(encoding="utf-8")
    found = re.findall(rf'\{{"([\w.-]+)", "{model_type}", (\d+), (\d+), (?:\d+, ){{4}}(\d+), ', text)
    return [(name, *map(int, numbers)) for name, *numbers in found]


def rows() -> list[Row]:
    """Every Llama of the presets in every mode."""
    return [Row(name, vocabulary, mode) for name, _, _, vocabulary in presets("llama") for mode in RECOMPUTE]


class Planner:
    """Asks train_llama. Its shard holds no text: a plan depends on the model and the batch alone."""

    def __init__(self, directory: Path):
        self.program = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "train_llama"
        self.shard = directory / "train_00000.bin"
        writer = token_shard.ShardWriter(self.shard, 256, 1)
        writer.write(np.zeros(4096, np.uint16))
        writer.close()

    def run(self, row: Row, gpu: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [self.program, "--config", row.preset, "--vocab-size", row.vocabulary, "--seq-len", row.context,
                   "--recompute", row.recompute, "--train", self.shard, "--dry-run", "--gpu-memory", gpu, *more]
        if not self.program.exists():
            raise FileError(ENVIRONMENT, f"{self.program}: not there. Build it first: make")
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode not in (0, 5):
            raise FileError(ENVIRONMENT, f"train_llama: {done.stderr.strip()}")
        return done

    def most(self, row: Row, gpu: str, *more: str) -> int:
        """The most sequences at once that fit, a power of two; 0: not even one."""
        done = self.run(row, gpu, "--micro-batch", str(MOST), *more)
        if done.returncode == 0:
            return MOST
        fits = re.search(r"--micro-batch (\d+) would fit", done.stderr)
        return int(fits[1]) if fits else 0

    def cell(self, row: Row, gpu: str) -> str:
        if sequences := self.most(row, gpu):
            return f"{sequences}" if sequences < MOST else f"{MOST}+"
        sequences = self.most(row, gpu, "--moments", "bf16")
        return f"{sequences} (m)" if sequences else "–"

    def line(self, row: Row) -> str:
        cells = [self.cell(row, gpu) for gpu in GPUS]
        return f"| {row.preset} | {row.context} | {row.recompute} | " + " | ".join(cells) + " |"


def training_table(planner: Planner) -> list[str]:
    head = "| model | context | `--recompute` | " + " | ".join(gpu.replace("GB", " GB") for gpu in GPUS) + " |"
    return [head, "|---" * (3 + len(GPUS)) + "|", *(planner.line(row) for row in rows())]


def pythia_table() -> list[str]:
    """Parameters: two embeddings, in a layer 12 C^2 and 13 C of norms and biases."""
    lines = ["| model | parameters | weights, fp16 | cache of 2,048, fp16 | both |", "|---|---|---|---|---|"]
    for name, layers, hidden, vocabulary in presets("gpt_neox"):
        parameters = 2 * vocabulary * hidden + layers * (12 * hidden * hidden + 13 * hidden) + 2 * hidden
        weights, cache = 2 * parameters / 1e9, 2 * 2 * layers * hidden * 2048 / 1e9
        lines.append(f"| {name} | {parameters / 1e6:,.0f} M | {weights:.2f} GB | {cache:.2f} GB | {weights + cache:.2f} GB |")
    return lines


def tables(planner: Planner) -> dict[str, list[str]]:
    return {"training": training_table(planner), "pythia": pythia_table()}


def between(text: str, name: str) -> tuple[int, int]:
    """Where the table `name` of doc/memory.md begins and ends."""
    begin = text.index(BEGIN.format(name)) + len(BEGIN.format(name)) + 1
    return begin, text.index(END, begin)


def main() -> int:
    parser = cli.Parser(prog="memory_table.py", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into doc/memory.md")
    options = parser.parse_args()
    page = ROOT / "doc" / "memory.md"
    with tempfile.TemporaryDirectory() as directory:
        found = tables(Planner(Path(directory)))
    if not options.write:
        print("\n\n".join("\n".join(lines) for lines in found.values()))
        return 0
    text = page.read_text(encoding="utf-8")
    for name, lines in found.items():
        begin, end = between(text, name)
        text = text[:begin] + "\n".join(lines) + "\n" + text[end:]
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    cli.run(main)
