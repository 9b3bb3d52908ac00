"""What the programs of this directory share: one-line errors, exit codes, ranges, files that appear whole or not at all."""

import argparse
import os
from pathlib import Path
from typing import Callable, NoReturn

SEPARATOR = "<|endoftext|>"  # the line after every story

EXIT_BAD_INPUT = 3
EXIT_DISK = 5


class InputError(Exception):
    """An input file cannot be used."""


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number between {low} and {high}")
        return int(text)

    return parse


def real_number(low: float, high: float) -> Callable[[str], float]:
    """Accepts low <= value < high."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number in [{low:g}, {high:g})")
        return value

    return parse


def read_stories(paths: list[Path]) -> list[str]:
    """The stories of all files, without the separators and the line ends around them."""
    stories: list[str] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None
        stories += [story.strip("\n") for story in text.split(SEPARATOR) if story.strip()]
    if not stories:
        raise InputError(f"no text in {', '.join(str(path) for path in paths)}")
    return stories


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
