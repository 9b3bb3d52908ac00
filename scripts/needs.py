"""Imported by every program for users before it imports packages. So an old Python, a missing package, or Ctrl-C while
packages load gives one line and an exit code, not a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ENVIRONMENT, INTERRUPTED = 4, 130
OLDEST_PYTHON = (3, 11)


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
    stop(f"{error.name}: not installed. " + (f"Run make venv, then .venv/bin/python {sys.argv[0]}" if in_venv else
                                             f"Run {sys.executable} -m pip install {error.name}"))


sys.excepthook = in_one_line
if sys.version_info < OLDEST_PYTHON:
    stop(f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, expected 3.11 or later. Run make venv "
         f"PYTHON=python3.11, then .venv/bin/python {sys.argv[0]}")
