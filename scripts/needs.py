"""Imported by every program for users before it imports packages. So an old Python, a missing package, or Ctrl-C while
packages load gives one line and an exit code, not a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ENVIRONMENT, INTERRUPTED = 4, 130
OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
INSTALLED = ROOT.parts[-2:] == ("share", "weft")  # by make install: scripts and programs are commands


def command(script: str) -> str:
    """How a user starts a script of this tree: weft-convert-hf where weft is installed."""
    return "weft-" + Path(script).stem.replace("_", "-") if INSTALLED else f".venv/bin/python {script}"


def program(name: str) -> str:
    """How a user starts train_llama or infer_pythia."""
    return name if INSTALLED else f"./{name}"


def stop(problem: str, code: int = ENVIRONMENT) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(code)


def in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook for uncaught exceptions. Any other than Ctrl-C and a missing package is a bug and keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        stop("interrupted", INTERRUPTED)
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    in_venv = f"\n{error.name}==" in Path(__file__).with_name("requirements.txt").read_text()
    make_venv = "Run weft-setup" if INSTALLED else f"Run make venv, then .venv/bin/python {sys.argv[0]}"
    stop(f"{error.name}: not installed. " + (make_venv if in_venv else f"Run {sys.executable} -m pip install {error.name}"))


sys.excepthook = in_one_line
if sys.version_info < OLDEST_PYTHON:
    stop(f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, expected 3.11 or later. "
         + ("WEFT_PYTHON= names another" if INSTALLED else f"Run make venv PYTHON=python3.11, then .venv/bin/python {sys.argv[0]}"))
