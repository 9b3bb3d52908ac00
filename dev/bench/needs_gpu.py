"""What the benchmarks say, in one line and with exit code 4, where PyTorch, the GPU code of the programs or a GPU is missing.

To be imported before torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ENVIRONMENT = 4
INSTALL = {"torch": "make torch", "transformers": "make torch"}


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(ENVIRONMENT)


def in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook for uncaught exceptions: any but a missing package is a bug and keeps its traceback."""
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    name = (error.name or "").partition(".")[0]
    fail(f"{name}: not installed, and this benchmark needs it. Run {INSTALL.get(name, 'make venv')}, then .venv/bin/python "
         f"{sys.argv[0]}")


sys.excepthook = in_one_line


def by_program(path: Path) -> None:
    """The program is there, has GPU code and finds a GPU. --help needs none of it."""
    if {"-h", "--help"} & set(sys.argv):
        return
    if not path.exists():
        fail(f"{path.name}: not built, and this benchmark runs it. Run make")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    if "CUDA" not in version:
        fail(f"{path.name}: built without nvcc, and this benchmark runs on a GPU. Install the CUDA toolkit, then make")
    try:
        gpus = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        gpus = ""
    if not gpus.startswith("GPU "):
        fail("no GPU found (nvidia-smi lists none), and this benchmark runs on one. See make doctor")


def by_torch(available: bool) -> None:
    """torch.cuda.is_available()."""
    if not available:
        fail("PyTorch finds no GPU, and this benchmark runs on one. See make doctor")
