#!/usr/bin/env python3
"""Learns chat formats (doc/chat.md) from the chat templates of Hugging Face models, and proves them.

    python3 scripts/chat_template.py models/Llama-3.2-1B-Instruct -o format.json
    python3 scripts/chat_template.py a.jinja b.jinja --chat-option enable_thinking=false

A directory is that of a model: chat_template.jinja, or chat_template in tokenizer_config.json. Templates are rendered by Jinja2,
in its sandbox and with the settings of transformers; time and memory are limited. A format is taken only if it renders 300
random conversations as the template does, byte for byte. One line for each. Exit codes: 2 usage, 3 a template cannot be
learned, 4 Jinja2 is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import needs  # noqa: F401  before the packages

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox

import cli
from chat_format import (ABSENT, END, FEATURES, GENERATION, PLAIN, PROOF_CONVERSATIONS, ROLES, START, ChatFormat, Kind, Message, Part, Refused, Rule,
                         apply_steps, features, from_json, kind_of, parse_option, read_model, render_text, to_json)
from cli import FileError, escaped, shown

MAX_SECONDS, MAX_MEMORY_BYTES = 120, 4 << 30  # of the process that runs a template
MAX_OUTPUT = 4 << 20  # characters of one rendered conversation
MAX_SLOTS = 2   # pieces of one content in a rule
MAX_PLACES = 8  # in which markers are tried
MORE = 6        # times PROOF_CONVERSATIONS, until every rule of a format was needed
MAX_MARKERS = 40
CASES = ("lower", "upper", "title", "capitalize", "casefold")
Steps = tuple[tuple[str, ...], ...]


class NotLearned(Exception):
    """No format of the kind that doc/chat.md describes does what the template does; the message says where."""


# ---- the template itself, as transformers renders it -----------------------------------------------------------------


class Raised(Exception):
    """What the template says in raise_exception(), or what Jinja2 says of it."""

    def __init__(self, message: str, by_template: bool):
        super().__init__(message)
        self.by_template = by_template


class TemplateRaised(jinja2.TemplateError):
    """raise_exception() in a template."""


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %} of transformers marks answers for training, and prints its inside."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRaised(str(message))


def telling(values: Iterable[Any]) -> Iterator[str]:
    """Those of a template's constants that may tell one content from another: texts, but the names of roles."""
    return (value for value in values if isinstance(value, str) and value.strip() and value not in ROLES)


class ChatTemplate:
    """A template with its variables. `now` is the date that strftime_now() gives it."""

    def __init__(self, text: str, variables: dict[str, Any], now: datetime.datetime):
        self.asked_date = False
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationBlock])
        environment.filters["tojson"] = _tojson

        def strftime_now(form: str) -> str:
            self.asked_date = True
            return now.strftime(form)

        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        try:
            self.syntax = environment.parse(text)
            self.template = environment.from_string(text)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise NotLearned(f"Jinja2 refuses it: {shown(str(error))}, line {getattr(error, 'lineno', 0)}") from None
        self.variables = variables

    def render(self, messages: list[Message], generation: bool) -> str:
        """Raised if the template refuses the conversation or fails on it."""
        values = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self.template.render(messages=values, add_generation_prompt=generation, **self.variables)
        except TemplateRaised as error:
            raise Raised(str(error), True) from None
        except Exception as error:  # whatever a template may do
            raise Raised(f"{type(error).__name__}: {error}", False) from None
        if len(text) > MAX_OUTPUT:
            raise NotLearned(f"a short conversation renders as {len(text)} characters, expected at most {MAX_OUTPUT}")
        return text

    def markers(self) -> list[str]:
        """The texts that the template looks for in other texts: those of `in`, of the methods of texts, and of `replace`; in every
        usual case where the other text is brought to one."""
        values = {node.target.name: node.node.value for node in self.syntax.find_all(nodes.Assign)
                  if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Const)}

        def texts(expressions: Iterable[nodes.Node], changes: Iterable[Callable[[str], str]] = (str,)) -> Iterator[str]:
            for node in expressions:
                value = values.get(node.name) if isinstance(node, nodes.Name) else getattr(node, "value", None)
                yield from (change(text) for text in telling([value]) for change in changes)

        found: list[str] = []
        for call in self.syntax.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in (
                    "split", "rsplit", "startswith", "endswith", "replace", "partition", "rpartition", "find", "rfind", "index", "count"):
                found += texts(call.args)
        for applied in self.syntax.find_all(nodes.Filter):
            if applied.name == "replace":
                found += texts(applied.args)
        for compare in self.syntax.find_all(nodes.Compare):
            if any(operand.op in ("in", "notin") for operand in compare.ops):
                cased = (any(applied.name in CASES for applied in compare.find_all(nodes.Filter)) or
                         any(method.attr in CASES for method in compare.find_all(nodes.Getattr)))
                found += texts([compare.expr], (str.lower, str.capitalize, str.title, str.upper) if cased else (str,))
        return list(dict.fromkeys(found))[:MAX_MARKERS]

    def words(self) -> list[str]:
        """The texts that the template compares others with."""
        compared = [side for compare in self.syntax.find_all(nodes.Compare) for operand in compare.ops if operand.op in ("eq", "ne")
                    for side in (compare.expr, operand.expr)]
        return list(dict.fromkeys(telling(side.value for side in compared if isinstance(side, nodes.Const))))[:MAX_MARKERS]

    def affixes(self) -> list[tuple[str, str]]:
        """Pairs of texts that the template looks for at the beginning and at the end of others."""
        found: dict[str, list[str]] = {"startswith": [], "endswith": []}
        for call in self.syntax.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in found:
                found[call.node.attr] += [one.value for one in call.args if isinstance(one, nodes.Const) and isinstance(one.value, str)]
        return list(dict.fromkeys(product(found["startswith"], found["endswith"])))[:MAX_MARKERS]


# ---- learning: literals ----------------------------------------------------------------------------------------------


def mark(i: int, label: str = "x") -> str:
    """A content, or a piece of one, that is found again in what a template prints, in capitals as well."""
    return f"\u2983{i}.{ord(label)}\u2984"


@dataclass(frozen=True)
class Trial:
    """A conversation to learn from: the kind of every message, and its text in pieces between markers of the kind."""

    roles: tuple[str, ...]
    kinds: tuple[str, ...]
    generation: bool


@dataclass(frozen=True)
class Pieces:
    """A kind of contents while it is learned: sentinels with the markers between them. `joints` has one text fewer. `lead`: the
    markers of an empty thought before the only sentinel."""

    labels: tuple[str, ...] = ("x",)
    joints: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()

    def text(self, i: int) -> str:
        return "".join((*self.lead, *(mark(i, label) + joint for label, joint in zip(self.labels, (*self.joints, "")))))


@dataclass(frozen=True)
class Slot:
    """A content, or the pieces [first, last] of one, in what a template prints; `gaps`: without the markers between them."""

    source: str
    first: int
    last: int
    gaps: bool = False


Skeleton = tuple[Any, ...]  # texts and Slots


def sequences(order: str) -> list[tuple[tuple[str, ...], bool]]:
    """Roles of conversations, and whether the prompt for an answer follows."""
    if order == "alternate":
        found = [(*first, *(("user", "assistant")[i % 2] for i in range(n))) for first in ((), ("system",)) for n in range(1, 8)]
    else:
        found = [roles for n in range(1, 5) for roles in product(ROLES, repeat=n)]
    return [(roles, generation) for roles in found for generation in (False, True) if not (generation and roles[-1] == "assistant")]


class Learner:
    """Learns the rules of one template for one order of roles."""

    def __init__(self, template: ChatTemplate, order: str, markers: list[str], refuse_marked: frozenset[str]):
        self.template, self.order, self.markers = template, order, markers
        self.refuse_marked = refuse_marked                            # roles whose contents with a marker are refused
        self.pieces: dict[tuple[str, str], Pieces] = {}               # by role and kind
        self.kinds: list[Kind] = []
        self.refusals: dict[tuple[str, str], str] = {}
        self.moved = False
        self.sequences = sequences(order)
        self.parts_found: dict[Any, tuple[Part, ...]] = {}
        self.probes: dict[tuple[str, str], list[str]] = {}            # by role and kind; without: probes()
        self.rendered: dict[Any, str | Raised] = {}
        self.chunks_found: dict[Any, list[Skeleton]] = {}

    def render(self, messages: list[Message], generation: bool) -> str:
        """What the template prints, each conversation once. Raised as ChatTemplate.render()."""
        key = (tuple(messages), generation)
        if key not in self.rendered:
            try:
                self.rendered[key] = self.template.render(messages, generation)
            except Raised as error:
                self.rendered[key] = error
        result = self.rendered[key]
        if isinstance(result, Raised):
            raise result
        return result

    def pieces_of(self, trial: Trial, m: int) -> Pieces:
        return self.pieces.get((trial.roles[m], trial.kinds[m]), Pieces())

    # -- rendering trials

    def messages(self, trial: Trial) -> list[Message]:
        return [Message(role, self.pieces_of(trial, i).text(i)) for i, role in enumerate(trial.roles)]

    def chunks(self, trial: Trial) -> list[Skeleton]:
        """What is printed for each message and for the tail: each ends with its content, except for the tail."""
        key = (tuple(self.messages(trial)), trial.generation, self.moved)
        if key not in self.chunks_found:
            self.chunks_found[key] = self.cut(trial)
        return self.chunks_found[key]

    def cut(self, trial: Trial) -> list[Skeleton]:
        output = self.render(self.messages(trial), trial.generation)
        found: list[tuple[int, int, int, str]] = []
        for i, role in enumerate(trial.roles):
            for number, label in enumerate(self.pieces_of(trial, i).labels):
                text = mark(i, label)
                if output.count(text) > 1:
                    raise NotLearned(f"the content of a {role} message is printed {output.count(text)} times")
                if text in output:
                    found.append((output.index(text), i, number, text))
        result: list[list[Any]] = [[] for _ in range(len(trial.roles) + 1)]
        pending: list[Any] = []
        position, current = 0, -1
        for at, i, number, text in sorted(found):
            foreign = self.moved and i == 0 and trial.roles[0] == "system"
            if not foreign and i < current:
                raise NotLearned(f"the content of a {trial.roles[i]} message comes after that of a later {trial.roles[current]} message")
            current = current if foreign else i
            pending += [output[position:at]] if at > position else []
            pending.append(Slot("system" if foreign else "content", number, number))
            if not foreign:
                result[i] += pending
                pending = []
            position = at + len(text)
        result[-1] = pending + ([output[position:]] if position < len(output) else [])
        self.give_back(trial, result)
        return [tuple(chunk) for chunk in result]

    def give_back(self, trial: Trial, chunks: list[list[Any]]) -> None:
        """A message of which nothing is found gets what stands before its successor, but for what always stands there."""
        plain = Trial(trial.roles, (PLAIN,) * len(trial.roles), trial.generation)
        for i, kind in enumerate(trial.kinds):
            if kind == PLAIN or chunks[i] or not chunks[i + 1] or not isinstance(text := chunks[i + 1][0], str):
                continue
            usual = self.chunks(plain)[i + 1]
            lead = usual[0] if usual and isinstance(usual[0], str) else ""
            if text.endswith(lead) and text != lead:
                chunks[i] = [text.removesuffix(lead)]
                chunks[i + 1] = [*([lead] if lead else []), *chunks[i + 1][1:]]

    def variants(self, trial: Trial, chunk: Skeleton, i: int) -> list[Skeleton]:
        """The chunk, and before it the chunk with those slots joined that are printed with the marker, or with nothing, between."""
        result: list[Any] = []
        for one in chunk:
            result.append(one)
            while len(result) > 1 and isinstance(last := result[-1], Slot):
                text, before = (result[-2], result[-3]) if isinstance(result[-2], str) and len(result) > 2 else ("", result[-2])
                if not isinstance(before, Slot) or before.source != last.source:
                    break
                joints = self.pieces_of(trial, 0 if last.source == "system" else i).joints
                if text and (before.gaps or before.last + 1 != last.first or joints[before.last] != text):
                    break
                result[-3 if text else -2:] = [Slot(last.source, before.first, last.last, not text)]
        return list(dict.fromkeys((tuple(result), chunk)))

    # -- the order of contents and what is refused

    def trials(self) -> list[Trial]:
        """All conversations of plain contents, and those with one message of another kind."""
        found = []
        for roles, generation in self.sequences:
            plain = [PLAIN] * len(roles)
            found.append(Trial(roles, tuple(plain), generation))
            for (role, kind) in self.pieces:
                found += [Trial(roles, (*plain[:i], kind, *plain[i + 1:]), generation) for i in range(len(roles)) if roles[i] == role]
        return found

    def survey(self) -> list[Trial]:
        """The plain trials that the template takes. Remembers why it refuses a pair of roles, and whether it moves the system's text."""
        taken, refused = [], []
        for trial in self.trials():
            try:
                output = self.render(self.messages(trial), trial.generation)
            except Raised as error:
                refused.append((trial, error))
                continue
            taken.append(trial)
            if trial.roles[0] == "system" and len(trial.roles) > 1 and 0 <= output.find(mark(1)) < output.find(mark(0)):
                self.moved = True
        pairs = {pair for trial in taken for pair in self.pairs(trial)}
        for trial, why in refused:
            if new := [pair for pair in self.pairs(trial) if pair not in pairs]:
                self.refusals.setdefault(new[0], str(why) if why.by_template else f"the chat template fails: {why}")
        if not any("user" in trial.roles for trial in taken):
            raise NotLearned("it takes no conversation that begins with a user: " + shown(str(refused[0][1]) if refused else ""))
        return taken

    @staticmethod
    def pairs(trial: Trial) -> list[tuple[str, str]]:
        return list(zip((START, *trial.roles), (*trial.roles, GENERATION if trial.generation else END)))

    def full_key(self, trial: Trial, i: int) -> tuple[Any, ...]:
        """The pair of roles and all features of message i, or of the tail."""
        values = features(list(trial.roles), list(trial.kinds), i, trial.generation)
        return (*self.pairs(trial)[i], *(values[name] for name in FEATURES))

    # -- steps: what happens to a content

    def place(self, trial: Trial, chunks: list[Skeleton], m: int) -> int | None:
        """The chunk that message m is printed in."""
        source = "system" if self.moved and m == 0 and trial.roles[0] == "system" else "content"
        if source == "content":
            return m if any(isinstance(one, Slot) and one.source == "content" for one in chunks[m]) else None
        return next((i for i, chunk in enumerate(chunks) if any(isinstance(one, Slot) and one.source == "system" for one in chunk)), None)

    def printed(self, trial: Trial, chunk: Skeleton, i: int) -> str:
        """A chunk with sentinels in its slots."""
        def slot_text(slot: Slot) -> str:
            m = 0 if slot.source == "system" else i
            pieces = self.pieces_of(trial, m)
            joints = (*pieces.joints, "")
            numbers = range(slot.first, slot.last + 1)
            return "".join(mark(m, pieces.labels[n]) + (joints[n] if n < slot.last and not slot.gaps else "") for n in numbers)

        return "".join(one if isinstance(one, str) else slot_text(one) for one in chunk)

    def wanted(self, trial: Trial, chunks: list[Skeleton], m: int, content: str) -> str:
        """What the template prints in the chunk of message m if its content is `content`."""
        where = self.place(trial, chunks, m)
        assert where is not None
        texts = [self.printed(trial, chunk, i) for i, chunk in enumerate(chunks)]
        before, after = "".join(texts[:where]), "".join(texts[where + 1:])
        messages = self.messages(trial)
        messages[m] = Message(trial.roles[m], content)
        try:
            output = self.render(messages, trial.generation)
        except Raised as error:
            raise NotLearned(f"it refuses the {trial.roles[m]} message {shown(content)}: {shown(str(error))}") from None
        if not (output.startswith(before) and output.endswith(after) and len(output) >= len(before) + len(after)):
            raise NotLearned(f"the {trial.roles[m]} message {shown(content)} changes what is printed of others")
        return output[len(before):len(output) - len(after)]

    def steps_of(self, trial: Trial, chunks: list[Skeleton], m: int) -> tuple[Skeleton, tuple[Steps, ...]]:
        """The steps of the slots of message m, in order, that give what the template prints for probes; and the chunk they belong to."""
        where = self.place(trial, chunks, m)
        assert where is not None
        source, pieces = "system" if where != m else "content", self.pieces_of(trial, m)
        contents = self.probes.get((trial.roles[m], trial.kinds[m]), probes(pieces))
        want, reached, problem = [self.wanted(trial, chunks, m, content) for content in contents], -1, ""
        for chunk in self.variants(trial, chunks[where], where):
            slots = [one for one in chunk if isinstance(one, Slot) and one.source == source]
            if len(slots) > MAX_SLOTS:
                continue
            fixed = [None if one in slots else self.printed(trial, (one,), where) for one in chunk]
            for chosen in product(*(candidates(slot, pieces) for slot in slots)):
                failing = next((n for n, content in enumerate(contents) if self._assembled(fixed, chosen, content) != want[n]), None)
                if failing is None:
                    return chunk, chosen
                if failing > reached:
                    reached, problem = failing, f": of {shown(contents[failing])} it prints {shown(want[failing])}"
        raise NotLearned(f"no rule for a message of the role {trial.roles[m]}{problem}")

    @staticmethod
    def _assembled(fixed: list[str | None], chosen: tuple[Steps, ...], content: str) -> str:
        steps = iter(chosen)
        return "".join(apply_steps(content, next(steps)) if text is None else text for text in fixed)

    # -- rules

    def learn(self) -> ChatFormat:
        self.survey()
        self.find_kinds()
        table: dict[tuple[Any, ...], tuple[Part, ...]] = {}
        for trial in self.survey():
            chunks = self.chunks(trial)
            for i in range(len(chunks)):
                key, parts = self.full_key(trial, i), self.parts(trial, chunks, i)
                if table.setdefault(key, parts) != parts:
                    raise NotLearned(f"what is printed between a {key[0]} and a {key[1]} message depends on more than its place: "
                                     f"{shown(parts_text(table[key]))} or {shown(parts_text(parts))}")
        pairs: dict[tuple[str, str], None] = dict.fromkeys((key[0], key[1]) for key in table)
        rules = [rule for pair in pairs for rule in smallest_rules(pair, {k[2:]: v for k, v in table.items() if k[:2] == pair})]
        refusals = [Rule(*pair, {}, (Part(text or "the chat template refuses this"),)) for pair, text in self.refusals.items() if pair not in pairs]
        return ChatFormat(self.order, self.kinds, rules, refusals)

    def parts(self, trial: Trial, chunks: list[Skeleton], i: int) -> tuple[Part, ...]:
        """A chunk with the steps of its slots."""
        key = (self.full_key(trial, i), chunks[i], trial.roles[0], trial.kinds[0] if self.moved else "")
        if key not in self.parts_found:
            chunk, steps = chunks[i], {}
            for source in dict.fromkeys(one.source for one in chunk if isinstance(one, Slot)):
                found, chosen = self.steps_of(trial, chunks, 0 if source == "system" else i)
                steps[source] = iter(chosen)
                chunk = found if len(steps) == 1 else chunk
            self.parts_found[key] = tuple(Part(one) if isinstance(one, str) else Part(source=one.source, steps=next(steps[one.source]))
                                          for one in chunk)
        return self.parts_found[key]

    # -- kinds: contents that are not printed as others are

    def find_kinds(self) -> None:
        plain = [trial for trial in self.survey()]
        seen: dict[tuple[Any, ...], tuple[Trial, int]] = {}
        for trial in plain:
            for i in range(len(trial.roles)):
                seen.setdefault(self.full_key(trial, i), (trial, i))
        places = list(seen.values())
        for role in ROLES:
            here = [(trial, i) for trial, i in places if trial.roles[i] == role]
            if here:
                self.find_empty(role, here)
                self.find_marked(role, here)

    def as_plain(self, trial: Trial, i: int, content: str) -> bool:
        """Whether the template prints `content` as message i by the steps of plain contents."""
        chunks = self.chunks(trial)
        where = self.place(trial, chunks, i)
        messages = self.messages(trial)
        messages[i] = Message(trial.roles[i], content)
        try:
            output = self.render(messages, trial.generation)
        except Raised:
            return False
        texts = [self.printed(trial, chunk, j) for j, chunk in enumerate(chunks)]
        if where is None:
            return output == "".join(texts)
        parts = self.parts(trial, chunks, where)
        source = "system" if where != i else "content"
        texts[where] = "".join(apply_steps(content, part.steps) if part.source == source else
                               mark(where if part.source == "content" else 0) if part.source else part.text for part in parts)
        return output == "".join(texts)

    def find_empty(self, role: str, places: list[tuple[Trial, int]]) -> None:
        for tests, contents in (({"blank": True}, ["", " ", "\n \t\n"]), ({"empty": True}, [""])):
            if all(self.as_plain(trial, i, content) for trial, i in places for content in contents[-1:]):
                continue
            if all(self.as_plain(trial, i, content) for trial, i in places for content in contents):
                continue
            if role == "system" and all(self.as_absent(trial, i, content) for trial, i in places if len(trial.roles) > 1 for content in contents):
                self.kinds.append(Kind(role, tests, ABSENT))
            else:
                name = "blank" if "blank" in tests else "empty"
                self.kinds.append(Kind(role, tests, name))
                self.pieces[role, name] = Pieces((), ())
            return

    def as_absent(self, trial: Trial, i: int, content: str) -> bool:
        messages = self.messages(trial)
        rest = messages[:i] + messages[i + 1:]
        messages[i] = Message(trial.roles[i], content)
        results: list[str | None] = []
        for conversation in (messages, rest):
            try:
                results.append(self.render(conversation, trial.generation))
            except Raised:
                results.append(None)
        return results[0] == results[1]

    def find_marked(self, role: str, places: list[tuple[Trial, int]]) -> None:
        """Looks at a few places, the shortest conversations first; the proof looks at all of them."""
        few = places[:MAX_PLACES]
        alone = [m for m in self.markers if not self.all_plain(few, [f"a {m} b", f"{m}\nb", f"a{m}", m, f"a{m}b{m}c"])]
        for end in alone:
            self.add_marked(role, end, places)
        for first, last in self.template.affixes():
            if not {first, last} & {*alone} and not self.all_plain(few, [f"{first}a{last}", f"{first}\na\n{last}"]):
                self.kinds.append(Kind(role, {"starts": first, "ends": last},
                                       refuse=f"a {role} message from {first} to {last} has a meaning of its own in this chat format"))

    def all_plain(self, places: list[tuple[Trial, int]], contents: list[str]) -> bool:
        return all(self.as_plain(trial, i, content) for trial, i in places for content in contents)

    def add_marked(self, role: str, end: str, places: list[tuple[Trial, int]]) -> None:
        """Kinds for contents with the marker `end`, if their rules can be learned; otherwise such contents are refused. If it has to
        be, those are refused of which nothing is left."""
        name, what = f"with {end}", f"in a message of the role {role} has a meaning of its own in this chat format"
        earlier = {kind.tests.get("contains") for kind in self.kinds if kind.role == role}
        others = [marker for marker in self.markers if marker != end and marker not in earlier]
        if role not in self.refuse_marked:
            for begin in (*others, ""):
                left = [(), (("after_last", end), ("strip",)), (*((("delete", begin),) if begin else ()), ("delete", end), ("strip",))]
                for steps in left:
                    pieces = Pieces(("p", "r", "a"), (begin, end)) if begin else Pieces(("r", "a"), (end,))
                    contents = [one for one in probes(pieces, others) if not steps or apply_steps(one, steps)]
                    refusal = [Kind(role, {"contains": end, "gone": steps}, refuse=f"nothing but {end} {what}")] if steps else []
                    for learned in (self.learn_marked, self.learn_thoughts):
                        self.pieces[role, name] = pieces
                        if kinds := learned(role, name, contents, places):
                            self.kinds += refusal + kinds
                            return
                        self.forget(role, name)
        self.kinds.append(Kind(role, {"contains": end}, refuse=self.raised_for(places, f"a{end}b") or f"a text with {end} {what}"))

    def learn_marked(self, role: str, name: str, contents: list[str], places: list[tuple[Trial, int]]) -> list[Kind]:
        """The kind for contents that contain the marker; none if its rules cannot be learned."""
        self.probes[role, name] = contents
        learned = self.learnable(role, name, places)
        return [Kind(role, {"contains": self.pieces[role, name].joints[-1]}, name)] if learned else []

    def learn_thoughts(self, role: str, name: str, contents: list[str], places: list[tuple[Trial, int]]) -> list[Kind]:
        """As learn_marked(), with a kind of its own for contents whose thoughts are empty."""
        pieces, bare = self.pieces[role, name], f"{name} alone"
        begin, end = pieces.joints if len(pieces.joints) == 2 else ("", pieces.joints[0])
        self.probes[role, name] = [one for one in contents if one.split(end)[0].split(begin or end)[-1].strip()]
        thoughts: list[Steps] = []
        if self.learnable(role, name, places):
            for trial, i in places:
                marked, chunks = self.marked(trial, i, name)
                if self.place(marked, chunks, i) == i:
                    chunk, steps = self.steps_of(marked, chunks, i)
                    slots = [one for one in chunk if isinstance(one, Slot) and one.source == "content"]
                    thoughts += [step for slot, step in zip(slots, steps) if slot.last == len(pieces.labels) - 2]
        newlines = [tuple(("strip", "\n") if step == ("strip",) else step for step in steps) for steps in thoughts]  # of a test before the trim
        for gone in dict.fromkeys((*thoughts, *newlines)):
            self.forget(role, name)
            self.pieces[role, name], self.pieces[role, bare] = pieces, Pieces(("a",), lead=(begin, end))
            self.probes[role, name] = [one for one in contents if apply_steps(one, gone)]
            self.probes[role, bare] = [one for one in contents if not apply_steps(one, gone)]
            if self.learnable(role, name, places) and self.learnable(role, bare, places):
                return [Kind(role, {"contains": end, "gone": gone}, bare), Kind(role, {"contains": end}, name)]
        return []

    def forget(self, role: str, name: str) -> None:
        """Forgets the kind `name` and the one for its empty thoughts."""
        for one in (name, f"{name} alone"):
            self.pieces.pop((role, one), None)
            self.probes.pop((role, one), None)
            self.parts_found = {key: parts for key, parts in self.parts_found.items() if key[0][1] != role or one not in key[0]}

    def marked(self, trial: Trial, i: int, name: str) -> tuple[Trial, list[Skeleton]]:
        marked = Trial(trial.roles, (*trial.kinds[:i], name, *trial.kinds[i + 1:]), trial.generation)
        return marked, self.chunks(marked)

    def learnable(self, role: str, name: str, places: list[tuple[Trial, int]]) -> bool:
        try:
            for trial, i in places:
                marked, chunks = self.marked(trial, i, name)
                where = self.place(marked, chunks, i)
                if where is not None:
                    self.parts(marked, chunks, where)
        except (NotLearned, Raised):
            return False
        return True

    def raised_for(self, places: list[tuple[Trial, int]], content: str) -> str:
        """What the template says when it refuses `content`; empty if it takes it anywhere."""
        said = ""
        for trial, i in places:
            messages = self.messages(trial)
            messages[i] = Message(trial.roles[i], content)
            try:
                self.render(messages, trial.generation)
                return ""
            except Raised as error:
                said = str(error) if error.by_template else said
        return said


def parts_text(parts: tuple[Part, ...]) -> str:
    return "".join(part.text or "[...]" for part in parts)


def smallest_rules(pair: tuple[str, str], table: dict[tuple[Any, ...], tuple[Part, ...]]) -> list[Rule]:
    """The rules of a pair of roles, by as few features as tell them apart."""
    for subset in chain.from_iterable(combinations(range(len(FEATURES)), n) for n in range(len(FEATURES) + 1)):
        by: dict[tuple[Any, ...], tuple[Part, ...]] = {}
        system = FEATURES.index("system")
        if any(part.source == "system" for parts in table.values() for part in parts) and system not in subset:
            continue
        if all(by.setdefault(tuple(key[n] for n in subset), parts) == parts for key, parts in table.items()):
            return [Rule(*pair, {FEATURES[n]: value for n, value in zip(subset, values)}, parts) for values, parts in by.items()]
    raise AssertionError("all features tell all keys apart")


STRIP_STEPS: list[Steps] = [(), (("strip",),), (("lstrip",),), (("rstrip",),), (("strip", "\n"),), (("lstrip", "\n"),), (("rstrip", "\n"),)]


def candidates(slot: Slot, pieces: Pieces) -> list[Steps]:
    """What a template may have done to a content to print the pieces of `slot`, the simplest first."""
    first, last = slot.first == 0, slot.last == len(pieces.labels) - 1
    if slot.gaps:
        deleted = [tuple(("delete", joint) for joint in some) for some in (pieces.joints, pieces.joints[::-1], pieces.joints[-1:])]
        starts = ([(("remove", *pieces.joints),)] if len(pieces.joints) == 2 else []) + deleted
        return [start + strip for start in starts for strip in STRIP_STEPS] if first and last else []
    if pieces.lead:
        return [((cut, pieces.lead[-1]), *strip) for cut in ("after_last", "after_first") for strip in STRIP_STEPS] + STRIP_STEPS
    if first and last:
        return STRIP_STEPS
    heads: list[Steps] = [()] if last else [((cut, pieces.joints[slot.last]),) for cut in ("before_first", "before_last")]
    tails: list[Steps] = [()] if first else [((cut, pieces.joints[slot.first - 1]),) for cut in ("after_last", "after_first")]
    middle = [()] if last or first else STRIP_STEPS
    return sorted((head + between + tail + strip for head in heads for between in middle for tail in tails for strip in STRIP_STEPS), key=len)


def probes(pieces: Pieces, others: Sequence[str] = ()) -> list[str]:
    """Contents that tell the candidates apart. `others`: markers beside those of the pieces."""
    if not pieces.joints:
        return ["\n \t\n a \n b \t\n \n", " \na\n ", "\n\na\n\n", "\u00a0a\u3000", "  a", "a  ", "\x1ca\x1f\u200b", "a"] if pieces.labels else []
    end, begin = pieces.joints[-1], pieces.joints[0] if len(pieces.joints) > 1 else ""
    return [f"{begin}\n \nr\n \n{end}\n \na\n \n", f" \np \n{begin} \n r \n {end} \n a \n ", f"r\n\n{end}\n\na", f"{begin}\n\n{end}\n\na\n",
            f"{begin}r{end}\n", f"\n{begin}q{begin} r\n{end} a{end} b \n", f"{end}a{end}", f"x {end}y{begin}z{end} w", f"{end}{begin}",
            f"\n\n{begin}\n\nr \n\n{end} \n\na", f"p\n{begin}r{end}a\n\n", f"{begin}\n{end} \t\na\n\t\n ", f"{end} a\t", f"{begin}{end}\na\n\n",
            f" {begin} {end} a", f"{end}r{begin}a", *(f"{other}r{end}a{other}b" for other in others)]


# ---- proof -----------------------------------------------------------------------------------------------------------

SPECIAL_NAMES = ("<|im_end|>", "<|im_start|>", "<s>", "</s>", "[INST]", "<|eot_id|>", "<|endoftext|>", "<think>", "</think>", "<end_of_turn>")
PIECES = ("Hello", "a b", " hi ", "\n", "\n\n", "line\n", "  ", "\t", "\u00fcn\u00ef \U0001f600 \u4f60\u597d", "{{ x }}", "{% if a %}", "{# c #}", '"q"', "\\n", "'", "<b>&amp;",
          "\u00a0", "\u2003z", "\r\n", "\u200b", "system", "user:")


def random_content(random: Random, markers: list[str], words: list[str]) -> str:
    if random.random() < 0.06:
        return random.choice(("", " ", "\n"))
    if words and random.random() < 0.03:
        return random.choice(words) + random.choice(("", *PIECES))
    if markers and random.random() < 0.04:
        return random.choice(markers) + random.choice(PIECES) + random.choice(markers)
    special = [*SPECIAL_NAMES, *markers]
    return "".join(random.choice(special) if random.random() < 0.15 else random.choice(PIECES) for _ in range(random.randrange(1, 7)))


def random_conversation(random: Random, markers: list[str], words: list[str], order: str) -> tuple[list[Message], bool]:
    turns = random.randrange(1, 9) if random.random() < 0.97 else random.randrange(9, 33)
    roles = [role for role in ("system",) if random.random() < 0.5] + [("user", "assistant")[i % 2] for i in range(turns)]
    if order == "any" and random.random() < 0.3:
        roles = [random.choice(ROLES) for _ in range(random.randrange(1, 7))]
    generation = roles[-1] != "assistant" and random.random() < 0.7
    return [Message(role, random_content(random, markers, words)) for role in roles], generation


@dataclass
class Proof:
    equal: int = 0    # conversations that both render, to the same text
    refused: int = 0  # that both refuse
    narrow: int = 0   # that the format alone refuses
    unused: list[Rule] = field(default_factory=list)  # rules that no conversation needed


def prove(template: ChatTemplate, form: ChatFormat, markers: list[str], count: int = PROOF_CONVERSATIONS, seed: int = 1) -> Proof:
    """Compares `count` random conversations that the format takes, and up to MORE times as many until each rule was needed.
    NotLearned for the first that differs, or if it takes few."""
    random, proof, unused, words = Random(seed), Proof(), {id(rule): rule for rule in form.rules}, template.words()
    while proof.equal < count or unused and proof.equal < MORE * count:
        messages, generation = random_conversation(random, markers, words, form.order)
        used: list[Rule] = []
        got: str | None
        try:
            got = render_text(form, messages, generation, used)
        except Refused:
            got = None
        try:
            want = template.render(messages, generation)
        except Raised:
            want = None
        if got is None and want is not None and unforeseen(form, messages):
            raise NotLearned(f"no rule for {conversation_text(messages, generation)}")
        if got is not None and got != want:
            raise NotLearned(f"{conversation_text(messages, generation)} differs: " + difference(got, want))
        if got is not None:
            for rule in used:
                unused.pop(id(rule), None)
        proof.equal += got is not None
        proof.refused += got is None and want is None
        proof.narrow += got is None and want is not None
        if proof.refused + proof.narrow > 20 * count + proof.equal:
            raise NotLearned(f"it takes {proof.equal} of {proof.equal + proof.refused + proof.narrow} conversations")
    proof.unused = list(unused.values())
    return proof


def unforeseen(form: ChatFormat, messages: list[Message]) -> bool:
    """Whether the format refuses a conversation for the lack of a rule, not because it says so."""
    try:
        for message in messages:
            kind_of(form, message)
    except Refused:
        return False
    roles = [m.role for m in messages if kind_of(form, m) != ABSENT]
    return bool(roles) and form.order == "any"


def conversation_text(messages: list[Message], generation: bool) -> str:
    shortened = "; ".join(f"{m.role} {shown(m.content)}" for m in messages)
    return f"the conversation [{shortened}{'; answer' if generation else ''}]"


def difference(got: str, want: str | None) -> str:
    if want is None:
        return "the template refuses it"
    at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
    return f"at {at} got {shown(got[at:at + 24])}, expected {shown(want[at:at + 24])}"


# ---- from a template to a format -------------------------------------------------------------------------------------

# Orders of roles, and whether contents with markers are refused unlearned.
ATTEMPTS: list[tuple[str, frozenset[str]]] = [("any", frozenset()), ("alternate", frozenset()), ("any", frozenset(ROLES)),
                                              ("alternate", frozenset(ROLES))]


def working_template(text: str, variables: dict[str, Any], now: datetime.datetime) -> ChatTemplate:
    """The template with tools and documents None, as transformers passes them, or without them if only that works."""
    template = ChatTemplate(text, {"tools": None, "documents": None} | variables, now)
    try:
        template.render([Message("user", "a")], True)
    except Raised as error:
        without = ChatTemplate(text, variables, now)
        try:
            without.render([Message("user", "a")], True)
        except Raised:
            raise NotLearned(f"it takes no conversation: {shown(str(error))}") from None
        return without
    return template


def learn(text: str, variables: dict[str, Any], now: datetime.datetime) -> tuple[ChatFormat, Proof]:
    """The format of a template, proved; of several the one that refuses the fewest conversations. NotLearned with what is in the
    way, for the order of roles that templates document."""
    template = working_template(text, variables, now)
    markers, problem = template.markers(), ""
    found: list[tuple[ChatFormat, Proof]] = []
    for order, refuse_marked in ATTEMPTS:
        if refuse_marked and found:
            break
        try:
            form = Learner(template, order, markers, refuse_marked).learn()
            form = from_json(to_json(form), "the learned format")
            found.append((form, prove(template, form, markers)))
        except (NotLearned, Raised, FileError) as error:
            problem = str(error)
            continue
        if not found[-1][1].narrow:
            break
    if not found:
        raise NotLearned(problem)
    form, proof = min(found, key=lambda one: one[1].narrow / (one[1].equal + one[1].narrow))
    form.rules = [rule for rule in form.rules if rule not in proof.unused]  # nothing proves them
    form.date = now.date().isoformat() if template.asked_date else ""
    return form, proof


# ---- the template of a model -----------------------------------------------------------------------------------------


THOUGHTS = re.compile(r"</([\w:]*think\w*)>|\[/(THINK)\]|<\|END_(THINKING)\|>")


def thoughts_of(template: str) -> tuple[str, str] | None:
    """What a template marks thoughts with: the first pair of which both occur."""
    for found in THOUGHTS.finditer(template):
        name = found[1] or found[2] or found[3]
        begin = f"<{name}>" if found[1] else f"[{name}]" if found[2] else f"<|START_{name}|>"
        if begin in template:
            return begin, found[0]
    return None


def end_tokens(form: ChatFormat, tokens: Iterable[str]) -> list[str]:
    """The tokens that follow an answer in the format."""
    after = [rule.parts[0].text for rule in form.rules if rule.previous == "assistant" and rule.parts]
    longest = [max((token for token in tokens if text.startswith(token)), key=len, default="") for text in after]
    return [token for token in dict.fromkeys(longest) if token]


def unprotected(form: ChatFormat, added: dict[str, bool]) -> list[str]:
    """Tokens that mark turns although tokenizer.json does not call them special: a message that names one gets its id."""
    literals = "".join(part.text for rule in form.rules if rule.role not in ("assistant", GENERATION) for part in rule.parts)
    return [token for token, special in added.items() if not special and token.strip() and (token in form.end or token in literals)]


def learn_model(path: Path, options: dict[str, Any]) -> tuple[ChatFormat, Proof, list[str]] | None:
    """The format of a model's directory or of a template file, proved, with warnings; None without a template. NotLearned, FileError."""
    model = read_model(path)
    if model is None:
        return None
    form, proof = learn(model.template, model.variables | options, datetime.datetime.now())
    form.thoughts, form.source, form.options = thoughts_of(model.template), model.source, options
    form.end = end_tokens(form, [*model.added, *model.variables.values()])
    return form, proof, [f"the token {shown(token)} of the chat format is not special in tokenizer.json: a message that names it gets its id"
                         for token in unprotected(form, model.added)]


def option(text: str) -> tuple[str, Any]:
    """argparse's type of --chat-option."""
    return parse_option(text, argparse.ArgumentTypeError)


def limit_resources() -> None:
    """A template is a program that somebody else wrote: it may not take the machine."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGXCPU, out_of_time)


def out_of_time(number: int, frame: Any) -> NoReturn:
    print(f"error: a chat template took {MAX_SECONDS} s and was not learned", file=sys.stderr, flush=True)
    os._exit(cli.BAD_FILE)


def main() -> int:
    parser = cli.Parser(description=__doc__, prog="chat_template.py")
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a model's directory, or a template")
    parser.add_argument("--chat-option", type=option, action="append", default=[], metavar="KEY=VALUE", help="a variable of the templates")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the format of the only PATH; - is stdout")
    options = parser.parse_args()
    if options.output and len(options.paths) > 1:
        raise FileError(cli.USAGE, f"--output: got {len(options.paths)} paths, expected one")
    learned, to_stdout = 0, options.output == Path("-")
    limit_resources()
    for path in options.paths:
        try:
            result = learn_model(path, dict(options.chat_option))
        except NotLearned as problem:
            bad_file_line(path, str(problem))
            continue
        if result is None:
            bad_file_line(path, "it has no chat template")
            continue
        form, proof, warnings = result
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        learned += 1
        text = json.dumps(to_json(form), ensure_ascii=False, indent=None if to_stdout else 1)
        if to_stdout:
            print(text)
            continue
        if options.output:
            options.output.write_text(text + "\n")
        print(f"{escaped(str(path), 300)}: learned from {form.source}, proved on {proof.equal} conversations"
              + (f"; {proof.narrow} more were refused that the template takes" if proof.narrow else ""))
    if len(options.paths) > 1:
        print(f"{learned} of {len(options.paths)} learned")
    return cli.OK if learned == len(options.paths) else cli.BAD_FILE


def bad_file_line(path: Path, problem: str) -> None:
    print(f"error: {escaped(str(path), 300)}: chat template not learned: {problem}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
