#!/usr/bin/env python3
"""Turns logs of training runs into a CSV table or into event files of TensorBoard, also while a run goes on.

    .venv/bin/python scripts/export_log.py runs/mine --csv mine.csv
    .venv/bin/python scripts/export_log.py runs/mine runs/second --tensorboard tb --follow
    tensorboard --logdir tb

LOG is a log.jsonl of train_llama or its run directory. Steps that a resumed run computed again replace the earlier ones.
Event files need no TensorBoard to be written. Exit codes: 2 usage, 3 bad input, 4 cannot write, 5 disk full.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO

import needs  # noqa: F401, before the packages

import cli
from run_log import Run, is_number, new_run, read_run
from tensor_file import AtomicFile, FileError, escaped

# Columns, and what TensorBoard calls them.
SERIES = {"loss": "loss/train", "val_loss": "loss/val", "lr": "optimizer/learning_rate", "grad_norm": "optimizer/gradient_norm",
          "reward_accuracy": "rewards/accuracy", "reward_margin": "rewards/margin",
          "tokens_per_s": "speed/tokens_per_second", "dt_ms": "speed/milliseconds_a_step"}
COLUMNS = ("step", "tokens", "time", *SERIES)


# ---- CSV -------------------------------------------------------------------------------------------------------------


def write_csv(run: Run, path: Path) -> None:
    """One row a step; a value that is absent or not finite is an empty field. The file is replaced whole."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for _, record in sorted(run.steps.items()):
        table.writerow([repr(record[name]) if is_number(record.get(name)) else "" for name in COLUMNS])
    with AtomicFile(path) as output:
        output.write(text.getvalue().encode("ascii"))


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), the checksum of the records of event files."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ CRC_TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """A TFRecord: length, its masked checksum, data, its masked checksum."""
    def masked(part: bytes) -> bytes:
        value = crc32c(part)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def event(wall_time: float, step: int, payload: bytes) -> bytes:
    """An Event of tensorboard's event.proto: wall_time = 1, step = 2, then `payload`."""
    return framed(b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + payload)


def scalars(record: dict[str, Any]) -> bytes:
    """Event.summary = 5 with a Value = 1 {tag = 1, simple_value = 2} for each series of the record."""
    values = b"".join(_field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", record[name]))
                      for name, tag in SERIES.items() if is_number(record.get(name)) and abs(record[name]) < 3e38)
    return _field(5, values)


class EventFile:
    """The event file of one run. After a resume an event tells TensorBoard from which step on earlier events are void."""

    def __init__(self, run: Run, directory: Path):
        self.run = run
        self._written: dict[int, dict[str, Any]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        # The name begins with the time, because TensorBoard reads the files of a directory in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{time.monotonic_ns()}.weft"
        self._file: BinaryIO = open(directory / name, "xb")
        self._file.write(event(time.time(), 0, _field(3, b"brain.Event:2")))  # file_version

    def update(self) -> None:
        void = [step for step, record in self._written.items() if self.run.steps.get(step) is not record]
        if void:
            self._file.write(event(time.time(), min(void), _field(7, b"\x08\x01")))  # session_log.status = START
            self._written = {step: record for step, record in self._written.items() if step < min(void)}
        for step in sorted(self.run.steps.keys() - self._written.keys()):
            record = self._written[step] = self.run.steps[step]
            when = record.get("time")
            self._file.write(event(float(when) if when is not None and is_number(when) else 0.0, step, scalars(record)))
        self._file.flush()


# ---- command line -------------------------------------------------------------------------------------------------------


def names_of(runs: list[Run]) -> list[str]:
    """A directory for each run: its label, numbered where it is taken."""
    names: list[str] = []
    for run in runs:
        label = name = run.label.replace("/", "_").lstrip(".") or "run"
        number = len(names)
        while name in names:
            name, number = f"{label}-{number}", number + 1
        names.append(name)
    return names


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="export_log.py")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="log.jsonl or a run directory")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the table to write, of one run")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="the log directory to write a folder a run into")
    parser.add_argument("--follow", type=cli.number_in(0.1, 86400), nargs="?", const=10.0, metavar="SECONDS",
                        help="look for more every SECONDS (10), until Ctrl-C")
    options = parser.parse_args()
    if (options.csv is None) == (options.tensorboard is None):
        parser.error("expected either --csv or --tensorboard")
    if options.csv is not None and len(options.logs) > 1:
        parser.error(f"--csv: got {len(options.logs)} logs, expected one")
    return options


def main() -> int:
    options = arguments()
    runs = [new_run(path) for path in options.logs] if options.follow else [read_run(path) for path in options.logs]
    files = []
    if options.tensorboard is not None:
        if options.tensorboard.is_file():
            raise FileError(cli.USAGE, f"--tensorboard: {escaped(str(options.tensorboard))} is a file, expected a directory")
        files = [EventFile(run, options.tensorboard / name) for run, name in zip(runs, names_of(runs))]

    def write() -> None:
        for file in files:
            file.update()
        if options.csv is not None and runs[0].steps:
            write_csv(runs[0], options.csv)

    if options.follow:
        try:
            while True:
                if any([run.read_more() for run in runs]):
                    write()
                time.sleep(options.follow)
        except KeyboardInterrupt:
            return cli.OK
    write()
    for run in runs:
        print(f"{escaped(run.label)}: {len(run.steps)} steps")
    if options.tensorboard is not None:
        print(f"next        tensorboard --logdir {cli.pasteable(os.fspath(options.tensorboard))}")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
