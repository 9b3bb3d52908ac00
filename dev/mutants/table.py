"""The planted bugs of run.py: all rows of the modules in rows/, which stand there by room and file; those for a GPU last.

A new row goes to the others of its file (mutant.py says what a row holds); a file that had none gets a heading, in the order
of the alphabet.
"""

from __future__ import annotations

from mutant import Mutant
from rows import app, base, comm, cpu, cuda, dev, file, infer, model, scripts, serve, text, train

ROOMS = (base, file, text, model, cpu, comm, train, infer, serve, app, cuda, scripts, dev)
MUTANTS: list[Mutant] = sorted((row for room in ROOMS for row in room.ROWS), key=lambda row: row.needs_gpu)
