"""Where a row's text is: the definitions of a file by name, found in its text alone.

C++ is read by its braces: what stands before one at the level of a file, a namespace or a class says what it opens. Comments,
texts, characters and lines of the preprocessor are blanks to it. A function within a function belongs to the outer one.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

CPP = (".cpp", ".h", ".cu", ".cuh")


@dataclasses.dataclass(frozen=True)
class Definition:
    name: str  # with the classes around it, A::f, but without namespaces
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Place:
    file: Path
    begin: int
    end: int


# ---- C++ -------------------------------------------------------------------------------------------------------------

_NO_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'
                      |^[ \t]*\#(?:\\\n|[^\n])*""", re.S | re.M | re.X)
_MARK = re.compile("[(){};]")
_BRACE = re.compile("[{}]")
_CLASS = re.compile(r"(?:class|struct|union|enum(?:\s+class)?)\b(?:\s+alignas\([^()]*\))?\s+(\w+)")
_NAME = re.compile(r"""((?:\w+\s*(?:<[^()]*>)?\s*::\s*)*                             # A<T>::
                        (?:operator\s*(?:\(\s*\)|[^\s\w(]+|[\w\s:*&]+)|~?\w+))\s*  # operator(), operator==, f
                       (?:<[^()]*>)?\s*\(""", re.X)
_MEMBERS = re.compile(r"\)[^()]*(?<!:):(?!:)")  # a constructor's list of members
_NO_NAMES = {"alignas", "decltype", "explicit", "noexcept", "requires", "__attribute__", "__launch_bounds__",
             "__cluster_dims__"}


def blanked(text: str) -> str:
    """The text with blanks for all that is no code, of equal length and lines."""
    return _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def _without_template(header: str) -> str:
    header = re.sub(r"^(?:\s*(?:public|private|protected)\s*:)+", "", header).strip()
    while header.startswith("template"):
        depth = 0
        for i, c in enumerate(header):
            depth += (c == "<") - (c == ">" and header[i - 1] != "-")
            if c == ">" and depth == 0:
                header = header[i + 1:].strip()
                break
        else:
            break
    return header


def _function(header: str) -> str:
    """The name of the function that a header begins; empty if it begins none."""
    for match in _NAME.finditer(header):
        name = re.sub(r"\s+|<[^()]*>(?=\s*::)", "", match.group(1))
        if name in _NO_NAMES:
            continue
        return "" if re.search(r"(?<!operator)=", header[:match.start(1)]) else name
    return ""


def _cpp(text: str) -> Iterator[Definition]:
    code = blanked(text)
    scopes: list[tuple[str, str, int]] = []  # kind, name and begin of what is open
    begin = depth = 0  # of the header; of parentheses within it
    i = -1
    while (mark := _MARK.search(code, i + 1)) is not None:
        i, c = mark.start(), mark.group()
        if c in "()":
            depth += 1 if c == "(" else -1
        elif c == ";" and depth == 0:
            begin = i + 1
        elif c == "{":
            header = code[begin:i]
            start = begin + len(header) - len(header.lstrip())
            words = _without_template(header)
            kind, name = "other", ""
            if depth == 0 and re.match(r"(?:inline\s+)?namespace\b|extern\s*$", words):
                kind = "namespace"
            elif depth == 0 and (of_class := _CLASS.match(words)):
                kind, name = "class", of_class.group(1)
            elif depth == 0 and not (_MEMBERS.search(words) and re.search(r"[\w>]\s*$", words)):
                name = _function(words)
                kind = "function" if name else "other"
            if kind in ("namespace", "class"):
                scopes.append((kind, name, start))
                begin = i + 1
            else:
                end = _behind(code, i)
                if kind == "function":
                    yield Definition("::".join([*(one for _, one, _ in scopes if one), name]), start, end)
                    begin = end
                i = end - 1  # what follows other braces, as those of a member's first value, belongs to the same header
        elif c == "}" and scopes:
            kind, name, start = scopes.pop()
            if kind == "class":
                yield Definition("::".join([*(one for _, one, _ in scopes if one), name]), start, i + 1)
            begin = i + 1


def _behind(code: str, brace: int) -> int:
    depth = 0
    for match in _BRACE.finditer(code, brace):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.end()
    return len(code)


# ---- Python ----------------------------------------------------------------------------------------------------------


def _python(text: str) -> Iterator[Definition]:
    lines = [0]
    for line in text.split("\n"):
        lines.append(lines[-1] + len(line) + 1)

    def within(node: ast.AST, outer: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{outer}::{child.name}" if outer else child.name
                yield Definition(name, lines[child.lineno - 1], lines[child.end_lineno or child.lineno])
            yield from within(child, name)

    yield from within(ast.parse(text), "")


# ---- anchors ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _read(file: Path, changed: int) -> tuple[str, tuple[Definition, ...]]:
    text = file.read_text()
    return text, tuple(_cpp(text) if file.suffix in CPP else _python(text) if file.suffix == ".py" else ())


def read(file: Path) -> tuple[str, tuple[Definition, ...]]:
    return _read(file, file.stat().st_mtime_ns)


def files_of(tree: Path, room: str) -> list[Path]:
    """A room is a directory with all below it; the tree's own files are the room "."."""
    found = (tree / room).iterdir() if room == "." else (tree / room).rglob("*")
    return sorted(path for path in found if path.suffix in (*CPP, ".py", ".sh"))


def texts_of(tree: Path, room: str, anchor: str) -> list[Place]:
    """The definitions of that name in a room. An anchor with a dot is a file's name, for what no definition holds."""
    places = []
    for file in files_of(tree, room):
        if "." in anchor:
            places += [Place(file, 0, len(read(file)[0]))] if file.name == anchor else []
        elif anchor.rsplit("::", 1)[-1] in read(file)[0]:
            places += [Place(file, one.begin, one.end) for one in read(file)[1]
                       if f"::{one.name}".endswith(f"::{anchor}")]
    return places


def find(tree: Path, room: str, anchor: str, old: str) -> list[Place]:
    """Where the definitions of that name hold `old`; a run of white space is as good as any other."""
    pattern = re.compile(r"\s+".join(re.escape(word) for word in old.split()))
    found = {Place(place.file, match.start(), match.end()) for place in texts_of(tree, room, anchor) if old.strip()
             for match in pattern.finditer(read(place.file)[0], place.begin, place.end)}
    return sorted(found, key=lambda place: (place.file, place.begin))
