#!/usr/bin/env python3
"""Writes the default corpus: simple English stories for children, made by the generator in storybook/.

The same seed gives the same bytes on every machine. Story number i depends on the seed and i alone, so a larger
corpus begins with the stories of a smaller one. Needs nothing but the Python standard library.
"""

import argparse
import os
import sys
from pathlib import Path

from command_line import EXIT_DISK, SEPARATOR, Parser, real_number, whole_number
from storybook.plots import tell


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Write train.txt and val.txt, two files of simple stories.",
        epilog=f"Format: ASCII text. Every story is followed by a line that holds only {SEPARATOR} . "
        "Paragraphs within a story are separated by one empty line. A story itself neither begins nor ends with white space.",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR",
                        help="directory to write to; made if absent")
    parser.add_argument("--stories", type=whole_number(1, 10_000_000), default=6000, metavar="N",
                        help="stories in both files together (default 6000)")
    parser.add_argument("--seed", type=whole_number(0, 2**64 - 1), default=1, metavar="S", help="random seed (default 1)")
    parser.add_argument("--val-fraction", type=real_number(0, 1), default=0.05, metavar="F",
                        help="share of the stories, the last ones, in val.txt (default 0.05)")
    return parser.parse_args(arguments)


def split_sizes(stories: int, val_fraction: float) -> tuple[int, int]:
    """Stories for training and for validation; both get at least one where the fraction and the count allow."""
    validation = round(stories * val_fraction)
    if val_fraction > 0 and validation == 0 and stories > 1:
        validation = 1
    validation = min(validation, stories - 1)
    return stories - validation, validation


def write_stories(path: Path, seed: int, first: int, count: int) -> int:
    """Writes stories first … first+count-1 under a temporary name, then renames; returns the bytes written."""
    temporary = path.with_name(path.name + ".tmp")
    show_progress = sys.stderr.isatty()
    try:
        with open(temporary, "w", encoding="ascii", newline="\n") as file:
            for index in range(first, first + count):
                file.write(f"{tell(seed, index)}\n{SEPARATOR}\n")
                if show_progress and (index - first) % 500 == 499:
                    print(f"\r{path.name}: {index - first + 1}/{count}", end="", file=sys.stderr)
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if show_progress:
        print("\r\x1b[K", end="", file=sys.stderr)
    return size


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    training, validation = split_sizes(options.stories, options.val_fraction)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for name, first, count in (("train.txt", 0, training), ("val.txt", training, validation)):
            size = write_stories(options.output / name, options.seed, first, count)
            print(f"{options.output / name}: {count} stories, {size} bytes")
    except OSError as error:
        print(f"error: cannot write to {options.output}: {error.strerror}", file=sys.stderr)
        return EXIT_DISK
    return 0


if __name__ == "__main__":
    sys.exit(main())
