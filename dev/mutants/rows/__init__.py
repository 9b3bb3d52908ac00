"""The planted bugs: one module for each room of the tree, which says its directory; those that need a GPU last."""

from __future__ import annotations

import dataclasses

from mutant import Mutant
from rows import app, base, comm, cpu, cuda, dev, file, infer, model, scripts, serve, text, train

ROOMS = (base, file, text, model, cpu, comm, train, infer, serve, app, cuda, scripts, dev)
MUTANTS: list[Mutant] = sorted((dataclasses.replace(row, room=room.ROOM) for room in ROOMS for row in room.ROWS),
                               key=lambda row: row.needs_gpu)
