"""A directory in which commands run as they are printed: the paths in them lead to this tree."""

import os
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ.get("WEFT_BIN_DIR", ROOT))


def make_checkout(place: Path, folders: tuple[str, ...]) -> Path:
    """Fills the empty directory `place`: `folders` of this tree, the two programs, and .venv/bin/python."""
    for name in folders:
        (place / name).symlink_to(ROOT / name)
    for name in ("train_llama", "infer_pythia"):
        if not (PROGRAMS / name).exists():
            pytest.skip(f"{name} is not built")
        (place / name).symlink_to(PROGRAMS / name)
    (place / ".venv" / "bin").mkdir(parents=True)
    python = place / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return place
