"""Shared by the scripts: one-line errors, exit codes, strict JSON, warnings, a progress line."""

from __future__ import annotations

import argparse
import errno
import io
import json
import math
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any, NoReturn

from needs import INTERRUPTED
from tensor_file import BAD_FILE, ENVIRONMENT, RESOURCES, FileError, describe, escaped

OK, INTERNAL, USAGE = 0, 1, 2  # exit codes, beside those of needs and tensor_file

MAX_JSON_DEPTH = 64
MAX_WARNINGS = 20
AGAIN = "Download the file again"


def shown(value: object) -> str:
    """`value` for a message: a string in quotes, anything else as JSON; escaped and shortened in both cases.

    Text that comes from a file or from the user reaches the terminal only through here or through escaped().
    """
    text = value if isinstance(value, (str, bytes)) else json_text(value)
    quoted = escaped(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    return quoted if isinstance(value, (str, bytes)) else quoted[1:-1]


def pasteable(path: str | os.PathLike[str]) -> str:
    """A path as one word of a shell command that is safe to paste: quoted if it needs quotes, and with escaped bytes
    ($'...') if it holds characters that a terminal cannot show."""
    text = os.fspath(path)
    if text.startswith("-"):
        text = "./" + text  # not an option
    try:
        text.encode(sys.stdout.encoding or "utf-8")
        shows = text.isprintable() and escaped(text, len(text) * 4) == f"'{text}'"
    except UnicodeEncodeError:
        shows = False
    if shows or text.isascii() and text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(chr(byte) if 0x20 <= byte < 0x7F and byte not in b"'\\" else f"\\x{byte:02x}"
                          for byte in os.fsencode(text)) + "'"


def unused(path: str) -> str:
    """`path`, or the first of path-2, path-3, ... that does not exist: for a command that begins something new there."""
    return next(name for name in chain([path], (f"{path}-{number}" for number in count(2))) if not os.path.lexists(name))


def json_text(value: object) -> str:
    """`value` as JSON where it is JSON, as Python otherwise."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def bad_file(source: object, field: str, problem: str, advice: str = "") -> NoReturn:
    """Raises the error of a bad input file. `problem` reads 'got X, expected Y'."""
    place = f"{escaped(str(source), 300)}: " + (f"{field}: " if field else "")
    raise FileError(BAD_FILE, place + problem + (f". {advice}" if advice else ""))


class Warnings:
    """Prints warnings to stderr; after MAX_WARNINGS only counts them."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, message: str) -> None:
        self.count += 1
        if self.count <= MAX_WARNINGS:
            print(f"warning: {message}", file=sys.stderr)

    def finish(self) -> None:
        if self.count > MAX_WARNINGS:
            print(f"warning: ... and {self.count - MAX_WARNINGS} more", file=sys.stderr)


class Progress:
    """One line on stderr that is rewritten as work advances; silent unless stderr is a terminal."""

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done, self.shown = label, max(total, 1), 0, -1
        self.active = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def advance(self, amount: int) -> None:
        self.done += amount
        percent = self.done * 100 // self.total
        if self.active and percent != self.shown:
            self.shown = percent
            print(f"\r{self.label} {percent:3d}%", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self.active and self.shown >= 0:
            print("\r" + " " * (len(self.label) + 5) + "\r", end="", file=sys.stderr, flush=True)


class TooManyObjects(Exception):
    """A JSON text holds more objects than its reader allows."""


class JsonProblem(ValueError):
    """Something that json accepts and parse_json() refuses; the message is already escaped."""


Warn = Callable[[str], None]  # takes one line of text


def _object_hook(max_objects: int, repeated: Warn) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Builds the objects of a JSON text. `repeated` is called with a key that occurs twice; if it returns, the last one counts."""
    seen = 0

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal seen
        seen += 1
        if seen > max_objects:
            raise TooManyObjects
        result = dict(pairs)
        if len(result) != len(pairs):
            names: set[str] = set()
            for name, _ in pairs:
                if name in names:
                    repeated(name)
                names.add(name)
        return result

    return build


def _no_constant(text: str) -> NoReturn:
    raise JsonProblem(f"{text} is not JSON")


def _no_repetition(name: str) -> NoReturn:
    raise JsonProblem(f"duplicate key {shown(name)}")


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonProblem(f"number {shown(text)[1:-1]} is out of range")
    return value


LONG_INTEGER = 300  # an integer of so many characters is always within the range of a double


def _integer(text: str) -> int:
    """An integer. The programs read one of more than 64 bits as a double, so the range of a double is the limit here too."""
    if len(text) > LONG_INTEGER and not math.isfinite(float(text)):
        raise JsonProblem(f"integer {shown(text)[1:-1]} is out of range")
    return int(text)


def json_extent(value: Any) -> tuple[int, int]:
    """The depth of nested arrays and objects, and the number of values in all."""
    deepest, values, level = 0, 1, [value] if isinstance(value, (dict, list)) else []
    while level:
        deepest += 1
        values += sum(map(len, level))
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)
                 if isinstance(child, (dict, list))]
    return deepest, values


SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that may be half of a pair


MAX_JSON_VALUES = 5_000_000  # the limit of the programs: a value takes at least two bytes of text, but up to 100 bytes of memory


def parse_json(data: bytes, source: object, field: str = "", max_objects: int = 10_000_000, warn: Warn | None = None) -> Any:
    """Strict JSON: UTF-8, unique keys, finite numbers, depth <= MAX_JSON_DEPTH. FileError BAD_FILE otherwise.

    With `warn` the text may be what Python's json reads: of a repeated key the last value counts, and NaN and Infinity are null;
    `warn` is told of each. More than `max_objects` objects raise TooManyObjects, so that the caller can say what they are.
    """
    where = f"{escaped(str(source), 300)}: "

    def repeated(name: str) -> None:
        warn(f"{where}key {shown(name)} occurs twice: the last one counts") if warn else _no_repetition(name)

    def constant(text: str) -> None:
        warn(f"{where}{text} is read as null") if warn else _no_constant(text)

    too_many = f"more than {MAX_JSON_VALUES} JSON values are not accepted"
    # A cheap check before json.loads() takes memory. Commas and brackets inside strings count too, hence twice the limit.
    if data.count(b",") + 2 * data.count(b"[") + 2 * data.count(b"{") > 2 * MAX_JSON_VALUES:
        bad_file(source, field, too_many)
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object_hook(max_objects, repeated), parse_constant=constant,
                           parse_float=_finite_number, parse_int=_integer)
        if SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        bad_file(source, field, "not valid JSON: got half of a surrogate pair, expected Unicode text")
    except UnicodeDecodeError as error:
        bad_file(source, field, f"not UTF-8 (byte {error.start})", AGAIN)
    except RecursionError:
        bad_file(source, field, f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
    except JsonProblem as error:
        bad_file(source, field, f"not valid JSON: {error}", AGAIN)
    except json.JSONDecodeError as error:
        bad_file(source, field, f"not valid JSON: {error.msg} (character {error.pos + 1})", AGAIN)
    except ValueError as error:
        bad_file(source, field, f"not valid JSON: {escaped(str(error))[1:-1]}", AGAIN)
    depth, values = json_extent(value)
    if depth > MAX_JSON_DEPTH:
        bad_file(source, field, f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
    if values > MAX_JSON_VALUES:
        bad_file(source, field, too_many)
    return value


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file, at most `limit` bytes. FileError BAD_FILE if it is absent, unreadable or longer."""
    try:
        # O_NONBLOCK: a FIFO that nobody writes to must not hang us.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                bad_file(path, "", "not a regular file")
            data = file.read(limit + 1)
    except OSError as error:
        bad_file(path, "", f"cannot be read: {error.strerror}")
    if len(data) > limit:
        bad_file(path, "", f"got more than {limit} bytes, expected at most that for this kind of file")
    return data


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse_json_object(data: bytes, path: Path, warn: Warn | None = None) -> dict[str, Any]:
    """The JSON object `data`, read from `path`; a byte order mark before it is skipped. FileError BAD_FILE for anything else, by
    what it is. `warn` as in parse_json()."""
    if not data:
        bad_file(path, "", "0 bytes: download failed?", AGAIN)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        bad_file(path, "", "this is UTF-16 text, expected UTF-8", "Save it again as UTF-8")
    data = data.removeprefix(BYTE_ORDER_MARK)
    what, todo = describe(data[:64], len(data))
    if what and data.lstrip()[:1] not in (b"{", b"["):
        bad_file(path, "", f"this is {what}, expected JSON", todo)
    value = parse_json(data, path, warn=warn)
    if not isinstance(value, dict):
        bad_file(path, "", f"got a JSON {json_type(value)}, expected an object")
    return value


def read_json_object(path: Path, limit: int, warn: Warn | None = None) -> dict[str, Any]:
    """The JSON object in the file `path` of at most `limit` bytes. FileError BAD_FILE for anything else. `warn` as in parse_json()."""
    return parse_json_object(read_bytes(path, limit), path, warn)


def json_type(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


class _StoreOnce(argparse._StoreAction):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        assert isinstance(parser, Parser)
        if option_string is not None and self.dest in parser.given:
            parser.error(f"argument {option_string}: given 2 times, expected once")
        parser.given.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """argparse whose errors have the form of every other error and exit code 2, and which takes the value of an option once."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.given: set[str] = set()
        self.register("action", None, _StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given.clear()
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse ends without asking whether it was written

    def error(self, message: str) -> NoReturn:
        text = escaped(message, 400)[1:-1].replace("\\'", "'")  # argparse has quoted what was given
        print(f"error: {text}. See {self.prog} --help.", file=sys.stderr)
        sys.exit(USAGE)


def number_in(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """An argparse type: a number of `kind` within [low, high]."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            name = "an integer" if kind is int else "a number"
            limits = [f"{int(limit)}" if limit == int(limit) else f"{limit:g}" for limit in (low, high)]
            raise argparse.ArgumentTypeError(f"got {shown(text)}, expected {name} from {limits[0]} to {limits[1]}")
        return value

    return convert


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits. A FileError becomes one line and its exit code; a full disk or memory is RESOURCES."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name with letters that the locale lacks is printed escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main() or OK
        sys.stdout.flush()
    except FileError as problem:
        code = problem.code
        print(f"error: {problem}", file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("error: interrupted", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output went away: no message can reach it
        code = OK
    except MemoryError:
        code = RESOURCES
        print("error: out of memory", file=sys.stderr)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        code = RESOURCES if full else ENVIRONMENT
        print(f"error: {escaped(str(error.filename or ''), 300)}: {error.strerror or escaped(str(error))}",
              file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more as it exits, and take another exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
