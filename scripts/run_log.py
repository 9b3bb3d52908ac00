"""Reads log.jsonl of training runs, also while they are being written: for plot_log.py and export_log.py."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import cli

MAX_LOG_BYTES = 4 << 30
MAX_STEP = 10**12  # of train_llama's --steps
MAX_NUMBER = 1e300  # larger values are ignored: so sums and differences stay finite


def is_number(value: Any) -> bool:
    """A finite number, of a size that can be computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and abs(value) <= MAX_NUMBER


def is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is broken."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        return None
    # math.isfinite() throws for an integer beyond the range of floats.
    return {key: None if isinstance(value, int) and abs(value) > 2**1000 else value for key, value in record.items()}


@dataclass
class Run:
    """The records of one run by step. Steps that a resumed run computed again replace the earlier ones."""

    path: Path
    label: str
    header: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    broken: int = 0  # number of lines that are no record
    records: int = 0
    _file: BinaryIO | None = None
    _rest: bytes = b""  # the beginning of a line that is not complete yet

    def curve(self, key: str, x_key: str = "step") -> tuple[list[float], list[float]]:
        """x and y of the finite values of `key`, in order of steps."""
        points = [(record[x_key], record[key]) for _, record in sorted(self.steps.items())
                  if is_number(record.get(key)) and is_number(record.get(x_key))]
        return [x for x, _ in points], [y for _, y in points]

    def read_more(self) -> bool:
        """Reads what was appended since the last call. True if at least one complete line was."""
        if self._file is None:
            self._file = open_log(self.path)
        if os.fstat(self._file.fileno()).st_size > MAX_LOG_BYTES:
            cli.bad_file(self.path, "", f"got more than {MAX_LOG_BYTES} bytes, expected at most that of a log")
        gained = self._file.read()
        lines = (self._rest + gained).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._take(line)
        return bool(lines)

    def read_all(self) -> None:
        """Reads the whole log. An incomplete last line counts as broken."""
        self.read_more()
        rest, self._rest = self._rest, b""
        self._take(rest)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        self.records += 1
        record = parse_line(line)
        if record is None:
            if self.records == 1:
                cli.bad_file(self.path, "line 1", "not a record of train_llama's log.jsonl")
            self.broken += 1
        elif record["type"] == "header":
            self.header = record
        elif record["type"] == "resume" and is_step(record.get("step")):
            # The run goes on after this step: records of later steps belong to the state that was lost.
            self.steps = {step: old for step, old in self.steps.items() if step <= record["step"]}
        elif record["type"] == "step" and is_step(record.get("step")):
            self.steps[record["step"]] = record


def open_log(path: Path) -> BinaryIO:
    try:
        # O_NONBLOCK: a FIFO that nobody writes to must not hang us.
        file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except (OSError, ValueError) as error:
        cli.bad_file(path, "", f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        cli.bad_file(path, "", "not a regular file")
    return file


def new_run(path: Path) -> Run:
    """A run, given by its directory or its log. Nothing is read yet."""
    log = path / "log.jsonl" if path.is_dir() else path
    return Run(log, path.resolve().name if path.is_dir() else log.resolve().parent.name or str(path))


def read_run(path: Path) -> Run:
    """Reads a log or the log of a run directory. FileError if it is none or holds no step."""
    run = new_run(path)
    run.read_all()
    if not run.records:
        cli.bad_file(run.path, "", "empty: no step was finished yet")
    if not run.steps:
        cli.bad_file(run.path, "", "holds no finished step")
    return run
