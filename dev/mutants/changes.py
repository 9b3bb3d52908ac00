"""Changes of C++ code that a machine can think of, each behind a switch of its own (sweep.py).

A change is a pair of texts around a piece of code, so that any number of them can be nested in one file. Which piece is a
condition, an operand or a statement says libclang.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# What PLANTED(n) and the functions below mean in the changed code. In constant expressions nothing is changed.
HEADER = """#pragma once
#include <type_traits>

namespace planted {
extern int chosen;              // the number of the change that is switched on, of WEFT_PLANTED
extern unsigned char* reached;  // a byte for each: set where a change is; WEFT_PLANTED_LOG=FILE keeps them
inline bool hit(int n) {
  reached[n] = 1;
  return n == chosen;
}
}  // namespace planted

constexpr bool PLANTED(int n) { return std::is_constant_evaluated() ? false : planted::hit(n); }

namespace planted {
template <class A, class B>
constexpr bool less(int n, const A& a, const B& b) { return PLANTED(n) ? a <= b : a < b; }
template <class A, class B>
constexpr bool less_equal(int n, const A& a, const B& b) { return PLANTED(n) ? a < b : a <= b; }
template <class A, class B>
constexpr bool greater(int n, const A& a, const B& b) { return PLANTED(n) ? a >= b : a > b; }
template <class A, class B>
constexpr bool greater_equal(int n, const A& a, const B& b) { return PLANTED(n) ? a > b : a >= b; }
template <class A, class B>
constexpr bool numbers = std::is_arithmetic_v<std::remove_cvref_t<A>> && std::is_arithmetic_v<std::remove_cvref_t<B>>;
template <class A, class B>
constexpr auto plus(int n, A&& a, B&& b) {
  if constexpr (numbers<A, B>) {
    if (PLANTED(n)) return a - b;
  }
  return a + b;
}
template <class A, class B>
constexpr auto minus(int n, A&& a, B&& b) {
  if constexpr (numbers<A, B>) {
    if (PLANTED(n)) return a + b;
  }
  return a - b;
}
template <class A>
constexpr A number(int n, A a) { return PLANTED(n) ? a + 1 : a; }
}  // namespace planted
"""

SOURCE = """#include "llmc/base/planted.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace planted {

static unsigned char own[1 << 16];
int chosen = 0;
unsigned char* reached = own;

// Before all other code. A shared mapping, so that children and processes that are killed leave what they reached, too.
__attribute__((constructor(101))) static void begin() {
  if (const char* text = std::getenv("WEFT_PLANTED")) chosen = std::atoi(text);
  const char* file = std::getenv("WEFT_PLANTED_LOG");
  const int fd = file == nullptr ? -1 : ::open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return;
  if (::ftruncate(fd, sizeof own) == 0) {
    void* map = ::mmap(nullptr, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) reached = static_cast<unsigned char*>(map);
  }
  ::close(fd);
}

}  // namespace planted
"""

MOST = 1 << 16  # numbers that SOURCE has room for, with 0 for no change

NOT = ("(PLANTED(%d) != static_cast<bool>(", "))")
WITHOUT_OPERAND = {b"&&": ("(PLANTED(%d) || static_cast<bool>(", "))"), b"||": ("(!PLANTED(%d) && static_cast<bool>(", "))")}
FUNCTIONS = {b"<": "less", b"<=": "less_equal", b">": "greater", b">=": "greater_equal", b"+": "plus", b"-": "minus"}


@dataclasses.dataclass(frozen=True)
class Change:
    file: str
    line: int
    kind: str  # "negated", "operand dropped", "left out", "bound", "sign" or "number"
    begin: int  # bytes of the file that `before` and `after` enclose
    end: int
    before: str  # has a place for the change's number
    after: str
    operator: tuple[int, int] | None  # place and length of an operator that becomes a comma
    code: str  # what a reader is shown


# ---- finding ---------------------------------------------------------------------------------------------------------


def in_file(root: Path, file: str, cursor: Any) -> Iterator[Change]:
    """The changes of `file` below one of its declarations."""
    text = (root / file).read_bytes()
    yield from _Finder(str(root / file), file, text).changes(cursor, False)


class _Finder:
    def __init__(self, path: str, file: str, text: bytes):
        import clang.cindex

        self.kinds = clang.cindex.CursorKind
        self.boolean = clang.cindex.TypeKind.BOOL
        self.path, self.file, self.text = path, file, text

    def change(self, kind: str, cursor: Any, around: tuple[str, str], shown: Any = None,
               operator: tuple[int, int] | None = None, empty: bool = False) -> Change:
        begin, end = _span(cursor)
        first, last = _span(shown or cursor)
        code = " ".join(self.text[first:last].decode(errors="replace").split())
        return Change(self.file, cursor.extent.start.line, kind, begin, begin if empty else end, *around, operator, code)

    def changes(self, cursor: Any, counts: bool) -> Iterator[Change]:
        """`counts`: the cursor is of the three parts in the parentheses of a for, whose form OpenMP prescribes."""
        children = list(cursor.get_children())
        yield from self.at(cursor, children, counts)
        for i, child in enumerate(children):
            place = child.location.file
            if place is not None and place.name != self.path:
                continue
            within = counts and cursor.kind not in (self.kinds.COMPOUND_STMT, self.kinds.LAMBDA_EXPR)
            yield from self.changes(child, i < len(children) - 1 if cursor.kind == self.kinds.FOR_STMT else within)

    def at(self, cursor: Any, children: list[Any], counts: bool) -> Iterator[Change]:
        kinds = self.kinds
        if cursor.kind == kinds.IF_STMT and children and children[0].kind.is_expression():
            if not self.text[_span(cursor)[0]:].startswith(b"if constexpr"):
                yield self.change("negated", children[0], NOT)
        elif cursor.kind == kinds.CONDITIONAL_OPERATOR:
            yield self.change("negated", children[0], NOT, shown=cursor)
        elif cursor.kind == kinds.RETURN_STMT and children and children[0].type.kind == self.boolean:
            yield self.change("negated", children[0], NOT, shown=cursor)
        elif cursor.kind == kinds.CXX_BOOL_LITERAL_EXPR and self.text[slice(*_span(cursor))] in (b"true", b"false"):
            yield dataclasses.replace(self.change("negated", cursor, NOT), code=self.line_of(cursor))
        elif cursor.kind == kinds.INTEGER_LITERAL and not counts and self.text[slice(*_span(cursor))][:1].isdigit():
            number = self.change("number", cursor, ("planted::number(%d, ", ")"))
            yield dataclasses.replace(number, code=f"{number.code} in: {self.line_of(cursor)}")
        elif cursor.kind == kinds.BINARY_OPERATOR and len(children) == 2:
            yield from self.at_operator(cursor, children[0], children[1], counts)
        elif cursor.kind == kinds.COMPOUND_STMT:
            for statement in children:
                if self.may_be_left_out(statement):
                    yield self.change("left out", statement, ("if (!PLANTED(%d)) ", ""), empty=True)

    def at_operator(self, cursor: Any, left: Any, right: Any, counts: bool) -> Iterator[Change]:
        between = self.text[_span(left)[1]:_span(right)[0]]
        operator = between.strip()
        if operator in WITHOUT_OPERAND:
            for operand in (left, right):
                change = self.change("operand dropped", operand, WITHOUT_OPERAND[operator])
                yield dataclasses.replace(change, code=f"{change.code} of: {self.change('', cursor, NOT).code}")
        elif operator in FUNCTIONS and not counts:
            place = (_span(left)[1] + between.index(operator), len(operator))
            yield self.change("sign" if operator in b"+-" else "bound", cursor,
                              (f"planted::{FUNCTIONS[operator]}(%d, ", ")"), operator=place)

    def may_be_left_out(self, statement: Any) -> bool:
        kinds, text = self.kinds, self.text[slice(*_span(statement))]
        while statement.kind == kinds.UNEXPOSED_EXPR and len(list(statement.get_children())) == 1:
            (statement,) = statement.get_children()
        calls = (kinds.CALL_EXPR, kinds.COMPOUND_ASSIGNMENT_OPERATOR, kinds.UNARY_OPERATOR)
        return statement.kind in calls or (statement.kind == kinds.BINARY_OPERATOR and b"=" in text)

    def line_of(self, cursor: Any) -> str:
        return self.text.splitlines()[cursor.extent.start.line - 1].decode(errors="replace").strip()


def _span(cursor: Any) -> tuple[int, int]:
    return cursor.extent.start.offset, cursor.extent.end.offset


# ---- writing ---------------------------------------------------------------------------------------------------------


def with_switches(text: bytes, changes: Iterable[tuple[int, Change]]) -> bytes:
    """The text of a file with its changes behind their numbers."""
    pieces: list[tuple[tuple[int, int, int, int], bytes, int]] = []  # order, text, bytes of the file that it replaces
    for number, change in changes:
        length = change.end - change.begin
        # At one place the ends come first, of the inner pieces first; then the beginnings, of the outer ones first. A
        # statement's switch is outside of all.
        outer = -len(text) - 1 if length == 0 else -length
        pieces.append(((change.begin, 1, outer, number), (change.before % number).encode(), 0))
        if change.after:
            pieces.append(((change.end, 0, length, -number), change.after.encode(), 0))
        if change.operator is not None:
            pieces.append(((change.operator[0], 2, 0, 0), b",", change.operator[1]))
    out, done = [], 0
    for (place, *_), inserted, replaced in sorted(pieces):
        out += [text[done:place], inserted]
        done = place + replaced
    changed = b"".join([*out, text[done:]])
    include = b'#include "llmc/base/planted.h"\n'
    once = changed.find(b"#pragma once\n")
    begin = 0 if once < 0 else once + len(b"#pragma once\n")
    return changed[:begin] + include + changed[begin:]


def write(root: Path, changes: dict[int, Change]) -> None:
    """Writes the switches into the tree at `root`, whose files are as they were when the changes were found."""
    of_file: dict[str, list[tuple[int, Change]]] = collections.defaultdict(list)
    for number, change in changes.items():
        of_file[change.file].append((number, change))
    for file, own in of_file.items():
        (root / file).write_bytes(with_switches((root / file).read_bytes(), own))
    (root / "llmc/base/planted.h").write_text(HEADER)
    (root / "llmc/base/planted.cpp").write_text(SOURCE)
