#!/usr/bin/env python3
"""Writes a corpus that a model of 100 million parameters does not learn by heart: documents about a world of coined names.

    python3 dev/data/make_almanac.py -o data/almanac --documents 200000

Bills, letters, timetables, tables, conversations, biographies and other kinds (almanac/pages.py). Some facts are met in many
documents, others can only be read in one; sums are right. The same seed gives the same bytes on every machine and for any
number of processes. Needs nothing but the Python standard library.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from almanac.pages import write_page
from command_line import EXIT_DISK, SEPARATOR, Parser, whole_number, write_atomically

PIECE = 2000  # documents that a process writes at once


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Write train.txt, val.txt and held.txt.",
                    epilog=f"ASCII text; every document is followed by a line that holds only {SEPARATOR}.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="directory to write to; made if absent")
    parser.add_argument("--documents", type=whole_number(1, 100_000_000), default=200_000, metavar="N",
                        help="in train.txt (default 200000)")
    parser.add_argument("--val", type=whole_number(1, 1_000_000), default=1000, metavar="N", help="in val.txt (default 1000)")
    parser.add_argument("--held", type=whole_number(1, 1_000_000), default=600, metavar="N", help="in held.txt (default 600)")
    parser.add_argument("--seed", type=whole_number(0, 2**64 - 1), default=1, metavar="S", help="random seed (default 1)")
    parser.add_argument("--processes", type=whole_number(1, 1024), default=len(os.sched_getaffinity(0)), metavar="N",
                        help="that write (default: one a core)")
    return parser.parse_args(arguments)


def documents(seed: int, first: int, count: int) -> str:
    return "".join(f"{write_page(seed, index)}\n{SEPARATOR}\n" for index in range(first, first + count))


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    # What is measured on comes first, so that a larger corpus has the same val.txt and held.txt.
    parts = (("held.txt", 0, options.held), ("val.txt", 1_000_000, options.val), ("train.txt", 2_000_000, options.documents))
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(options.processes) as pool:
            for name, begin, count in parts:
                firsts = range(begin, begin + count, PIECE)
                sizes = [min(PIECE, begin + count - first) for first in firsts]
                text = "".join(pool.map(documents, [options.seed] * len(sizes), firsts, sizes))
                write_atomically(options.output / name, text)
                print(f"{options.output / name}: {count} documents, {len(text)} bytes")
    except OSError as error:
        print(f"error: cannot write to {options.output}: {error.strerror}", file=sys.stderr)
        return EXIT_DISK
    return 0


if __name__ == "__main__":
    sys.exit(main())
