"""Which patterns of Split the programs translate: the grammar of llmc/text/split_pattern.cpp, without the translation.

test/python/test_split_pattern.py compares the verdicts of both.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import NoReturn

MAX_BYTES, MAX_COST, MAX_DEPTH, MAX_REPEAT = 8192, 48_000, 30, 1000
PROPERTY_COST, WORD_COST, CLASS_COST, RANGE_COST, LITERAL_COST, GROUP_COST = 800, 1600, 64, 12, 8, 24
PROPERTIES = {*"LMNPSZ", "Han", "Hiragana", "Katakana", "Hangul",
              *"Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()}
LETTERS, DIGITS, HEXADECIMAL = set(string.ascii_letters), set(string.digits), set(string.hexdigits)


class Problem(ValueError):
    """The pattern is refused."""


@dataclass
class Part:
    """What a part of the pattern matches: the C++ struct of this name says what the fields mean."""

    cost: int = 0
    width: int = 0
    fixed_branches: bool = True
    may_be_empty: bool = True
    is_character: bool = False
    can_repeat: bool = True
    repeat: str = ""  # "", "greedy" or "lazy"


@dataclass
class Set:
    """Characters that a pattern describes one of."""

    cost: int = 0
    ascii: bool = True

    def add(self, other: Set) -> None:
        self.cost += other.cost
        self.ascii = self.ascii and other.ascii


class _Checker:
    def __init__(self, pattern: str):
        self.pattern = pattern
        self.position = 0
        self.depth = 0
        self.before = ""  # the literal just before, where case is ignored

    def check(self) -> None:
        whole = self.alternatives(False, False)
        if not self.at_end():
            self.refuse("no ) without (")
        if whole.cost > MAX_COST:
            raise Problem(f"is too large: {whole.cost}, at most {MAX_COST} are accepted")

    def at_end(self) -> bool:
        return self.position == len(self.pattern)

    def peek(self, ahead: int = 0) -> str:
        return self.pattern[self.position + ahead:self.position + ahead + 1]

    def looks_at(self, text: str) -> bool:
        return self.pattern.startswith(text, self.position)

    def take(self, text: str) -> bool:
        found = self.looks_at(text)
        self.position += len(text) if found else 0
        return found

    def refuse(self, expected: str) -> NoReturn:
        got = self.peek()
        shown = "its end" if not got else got if "!" <= got <= "~" else f"U+{ord(got):04X}"
        raise Problem(f"at character {self.position + 1}: got {shown}, expected {expected}")

    def alternatives(self, ignore_case: bool, behind: bool) -> Part:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse("fewer groups in groups")
        if self.take("(?i)"):  # for the rest of the group, with its other alternatives
            whole = self.alternatives(True, behind)
        else:
            whole = self.sequence(ignore_case, behind)
            whole.fixed_branches = whole.width >= 0
            while self.take("|"):
                self.before = ""
                part = self.sequence(ignore_case, behind)
                whole.cost += part.cost + LITERAL_COST
                whole.may_be_empty = whole.may_be_empty or part.may_be_empty
                whole.fixed_branches = whole.fixed_branches and part.width >= 0
                if whole.width != part.width:
                    whole.width = -1
                whole.repeat = ""
        self.depth -= 1
        return whole

    def sequence(self, ignore_case: bool, behind: bool) -> Part:
        whole, parts = Part(), 0
        while not self.at_end() and self.peek() not in "|)":
            part = self.repeated(self.atom(ignore_case, behind))
            whole.cost += part.cost
            whole.width = -1 if whole.width < 0 or part.width < 0 else whole.width + part.width
            whole.may_be_empty = whole.may_be_empty and part.may_be_empty
            whole.repeat = "" if parts else part.repeat
            parts += 1
        return whole

    def number(self) -> int | None:
        begin, value = self.position, 0
        while self.peek() in DIGITS:
            value = value * 10 + int(self.peek())
            if value > MAX_REPEAT:
                self.refuse(f"a repeat of at most {MAX_REPEAT}")
            self.position += 1
        return None if self.position == begin else value

    def repeated(self, part: Part) -> Part:
        sign = self.peek()
        if not sign or sign not in "*+?{":
            return part
        if not part.can_repeat:
            self.refuse("something to repeat")
        self.before = ""
        self.position += 1
        least: int | None = 1 if sign == "+" else 0
        most = 1 if sign == "?" else None
        if sign == "{":
            least = self.number()
            is_range = self.take(",")
            most = self.number() if is_range else least
            if least is None and most is None:
                self.refuse("numbers within {}, or \\{")
            if self.peek() != "}":
                self.refuse("}")
            if most is not None and most < (least or 0):
                self.refuse("the smaller number first")
            self.position += 1
            if not is_range and self.peek() == "?":
                self.refuse("no ? behind {n}")
        lazy = self.take("?")
        more = not lazy and self.take("+")
        if not self.at_end() and self.peek() in "*+?{":
            self.refuse("one repeat at a time")
        again, low = sign == "{" and more, least or 0
        if (most is None or most > 1 or again) and (part.may_be_empty or again and low == 0):
            self.refuse("no repeat of what may be empty")
        if part.repeat == "lazy" or lazy and part.repeat:
            self.refuse("no repeat of a repeat with ?")
        copies = max(1, low, most or 0)
        cost = GROUP_COST + (part.cost if part.is_character else (part.cost + GROUP_COST) * copies)
        width = part.width * most if part.width >= 0 and most == low and not again else -1
        return Part(cost, width, True, part.may_be_empty or low == 0, False, True,
                    "lazy" if lazy else "" if more and sign != "{" else "greedy")

    def look(self, back: bool, ignore_case: bool, behind: bool) -> Part:
        if behind:
            self.refuse("no look around within a look behind")
        part = self.alternatives(ignore_case, back)
        if back and not part.fixed_branches:
            self.refuse("a look behind of a fixed width")
        if not self.take(")"):
            self.refuse(")")
        return Part(part.cost + GROUP_COST, can_repeat=False)

    def group(self, ignore_case: bool, behind: bool) -> Part:
        self.before = ""
        for begin in ("?=", "?!", "?<=", "?<!"):
            if self.take(begin):
                return self.look("<" in begin, ignore_case, behind)
        atomic = False
        if self.take("?i:"):
            ignore_case = True
        elif self.take("?-i:"):
            ignore_case = False
        elif self.take("?>"):
            atomic = True
        elif not self.take("?:") and self.peek() == "?":
            self.refuse("(?:, (?i:, (?>, (?=, (?!, (?<= or (?<!")
        part = self.alternatives(ignore_case, behind)
        if not self.take(")"):
            self.refuse(")")
        self.before = ""
        part.cost += GROUP_COST
        part.is_character, part.can_repeat = False, True
        if atomic:
            part.repeat = ""
        return part

    def literal(self, character: str, ignore_case: bool) -> Part:
        if ignore_case:
            if character >= "\x80":
                self.refuse("ASCII where case is ignored")
            if (self.before + character).lower() in ("ff", "fi", "fl", "ss", "st"):
                self.refuse("no ff, fi, fl, ss, st where case is ignored")
            self.before = character
        return Part(LITERAL_COST, 1, True, False, True)

    def part_of(self, found: Set, ignore_case: bool) -> Part:
        if ignore_case and not found.ascii:
            self.refuse("ASCII where case is ignored")
        self.before = ""
        return Part(found.cost + CLASS_COST, 1, True, False, True)

    def anchor(self) -> Part | None:
        for one in ("^", "$", "\\A", "\\z", "\\Z"):
            if self.take(one):
                return Part(LITERAL_COST, can_repeat=False)
        if self.take("\\b") or self.take("\\B"):
            return Part(4 * WORD_COST, can_repeat=False)
        return None

    def atom(self, ignore_case: bool, behind: bool) -> Part:
        if self.take("("):
            return self.group(ignore_case, behind)
        if part := self.anchor():
            self.before = ""
            return part
        if self.take("["):
            return self.part_of(self.brackets(), ignore_case)
        if self.take("."):
            return self.part_of(Set(CLASS_COST), False)
        character = self.peek()
        if character in "*+?":
            self.refuse("something to repeat")
        if character == "{":
            self.refuse("\\{")
        if character == "\0":
            self.refuse("no U+0000")
        if character != "\\":
            literal = self.literal(character, ignore_case)
            self.position += 1
            return literal
        if escaped := self.escaped_character():
            return self.literal(escaped, ignore_case)
        return self.part_of(self.escaped_set(), ignore_case)

    def hexadecimal(self, least: int, most: int) -> str:
        begin = self.position
        while self.position - begin < most and self.peek() in HEXADECIMAL:
            self.position += 1
        digits = self.pattern[begin:self.position]
        value = int(digits or "0", 16)
        if len(digits) < least or value == 0 or value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            self.refuse("a character in hexadecimal digits")
        return chr(value)

    def escaped_character(self) -> str:
        """The character of an escape at the position, which then stands behind it; empty if it is none of one character."""
        if self.take("\\x{"):
            value = self.hexadecimal(1, 6)
            if not self.take("}"):
                self.refuse("}")
            return value
        if self.take("\\u"):
            return self.hexadecimal(4, 4)
        if self.take("\\x"):
            value = self.hexadecimal(2, 2)
            if value >= "\x80":
                self.refuse("\\x{...} for what is not ASCII")
            return value
        escaped = self.peek(1)
        names = dict(zip("tnrfvae", "\t\n\r\f\v\a\x1b", strict=True))
        if escaped in names or " " < escaped <= "\x7f" and escaped not in LETTERS | DIGITS:
            self.position += 2
            return names.get(escaped, escaped)
        return ""

    def escaped_set(self) -> Set:
        kind = self.peek(1)
        if kind in ("p", "P"):
            return self.property()
        known = {"s": Set(10 * RANGE_COST), "d": Set(PROPERTY_COST), "h": Set(3 * RANGE_COST), "w": Set(WORD_COST, False)}
        if kind not in LETTERS or kind.lower() not in known:
            self.refuse("an escape that is known (\\s \\d \\w \\h \\p{..} \\b \\A \\z \\Z \\t \\n \\r \\x.. or \\ and a sign)")
        self.position += 2
        return known[kind.lower()]

    def property(self) -> Set:
        self.position += 2
        if not self.take("{"):
            self.refuse("{")
        self.take("^")
        begin = self.position
        while self.peek() in LETTERS:
            self.position += 1
        name = self.pattern[begin:self.position]
        if not self.take("}"):
            self.refuse("}")
        if name not in PROPERTIES:
            self.refuse("a general category such as L or Lu, Han, Hiragana, Katakana or Hangul in the \\p{} before this")
        return Set(PROPERTY_COST, False)

    def member_character(self) -> str:
        if self.peek() == "\\":
            if escaped := self.escaped_character():
                return escaped
            self.refuse("a character")
        if self.at_end() or self.peek() in "\0[]" or self.looks_at("&&"):
            self.refuse("a character")
        self.position += 1
        return self.pattern[self.position - 1]

    def members(self) -> Set:
        whole, some = Set(), False
        while not self.at_end() and self.peek() != "]" and not self.looks_at("&&"):
            if self.looks_at("[:"):
                self.refuse("\\[, or no [:name:]")
            if self.take("["):
                whole.add(self.brackets())
            elif self.peek() == "-" and some and self.peek(1) != "]":
                self.refuse("\\- in the middle of a set")
            elif self.is_set():
                whole.add(self.escaped_set())
            else:
                first = last = self.member_character()
                if self.peek() == "-" and self.peek(1) != "]" and self.pattern[self.position + 1:self.position + 3] != "&&":
                    self.position += 1
                    last = self.member_character()
                    if last < first:
                        self.refuse("a range from the smaller to the larger")
                whole.add(Set(RANGE_COST, last < "\x80"))
            some = True
        if not some:
            self.refuse("a set that is not empty")
        return whole

    def is_set(self) -> bool:
        at = self.position
        found = self.peek() == "\\" and not self.escaped_character()
        self.position = at
        return found

    def brackets(self) -> Set:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse("fewer sets in sets")
        self.take("^")
        whole = self.members()
        while self.take("&&"):
            whole.add(self.members())
            whole.cost += GROUP_COST
        if not self.take("]"):
            self.refuse("]")
        self.depth -= 1
        return whole


def problem_of(pattern: str) -> str:
    """Why the programs refuse this pattern; empty if they accept it."""
    size = len(pattern.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        return f"has {size} bytes, at most {MAX_BYTES} are accepted"
    try:
        _Checker(pattern).check()
    except Problem as problem:
        return str(problem)
    return ""
