#!/usr/bin/env python3
"""Writes a manual page from what a program's --help prints, so that neither says anything else than the other.

    scripts/make_man.py NAME VERSION COMMAND...     prints the page NAME(1) of `COMMAND... --help`

make install calls it. Packages that a Python script imports need not be there.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

PACKAGES = {"numpy", "safetensors", "tokenizers", "xxhash", "torch", "transformers"}


class Stand:
    """Finds a stand-in for each package: --help computes nothing."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, Stand) if name.partition(".")[0] in PACKAGES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> object:
        return mock.MagicMock(__path__=[], __version__="")

    @staticmethod
    def exec_module(module: object) -> None:
        pass


def help_of(command: list[str]) -> str:
    if not command[0].endswith(".py"):
        return subprocess.run([*command, "--help"], check=True, capture_output=True, text=True).stdout
    sys.meta_path.insert(0, Stand)
    sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = [command[0], "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), mock.patch.dict("os.environ", {"COLUMNS": "80"}):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return text.getvalue()


def roff(text: str) -> str:
    """A line as it stands, whatever it begins with or holds."""
    return "\\&" + text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")


def page(name: str, version: str, text: str) -> str:
    """Sections are the lines without indentation that end in a colon, options the lines in them that begin with dashes."""
    lines = text.rstrip().splitlines()
    paragraphs = [part for part in text.split("\n\n") if part.strip() and not part.startswith("usage:")]
    about = " ".join(paragraphs[0].split()).split(". ")[0].rstrip(".")
    out = [f'.TH "{name}" 1 "" "weft {version}" "weft"', ".SH NAME", f"{name} \\- {roff(about)[2:]}", ".SH DESCRIPTION", ".nf"]
    for line in lines:
        if re.fullmatch(r"\S.*[a-z)]:", line) and not line.startswith("usage"):
            out += [".fi", f'.SH "{line[:-1].upper()}"', ".nf"]
        else:
            out.append(roff(line) if line else "")
    return "\n".join([*out, ".fi", ""])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("make_man: expected NAME VERSION COMMAND...")
    NAME, VERSION, *COMMAND = sys.argv[1:]
    sys.stdout.write(page(NAME, VERSION, help_of(COMMAND)))
