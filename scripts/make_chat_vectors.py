#!/usr/bin/env python3
"""Writes test/fixtures/chat/vectors.json: chat formats, conversations, and what scripts/chat_format.py renders of them.

    python3 scripts/make_chat_vectors.py

The C++ renderer must give the same segments and refuse the same conversations (test/cpp/chat_format_test.cpp).
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import needs  # before the packages

import chat_format as cf
import cli
from chat_format import END, GENERATION, ROLES, START, ZONES, ChatFormat, Kind, Message, Part, Refused, Rule

PIECES = ("a", " b ", "\n", "\t", "\u00a0", "\u3000", "\x1c", "\u200b", "\u00fc\U0001f600", "<think>", "</think>", "|", "/fast", "<|im_end|>", "")
CASES = 30


def every_feature() -> ChatFormat:
    """Prints all features of each message, and has kinds of every test."""
    values: dict[str, tuple[Any, ...]] = {"kind": ("plain", "blank", "thought", "quoted"), "zone": ZONES, "last": (False, True),
                                          "system": ("none", "plain", "blank"), "generation": (False, True),
                                          "previous_kind": ("plain", "blank", "thought", "quoted")}
    kinds = [Kind("system", {"empty": True}, "absent"), Kind("system", {"contains": "|"}, refuse="no | in a system message"),
             Kind("user", {"starts": "|", "ends": "|"}, "quoted"), *(Kind(role, {"blank": True}, "blank") for role in ROLES),
             Kind("assistant", {"contains": "</think>", "gone": (("before_first", "</think>"), ("strip",))}, "blank"),
             Kind("assistant", {"contains": "</think>"}, "thought")]
    rules = []
    for number, previous in enumerate((START, *ROLES)):
        for place, role in enumerate((*ROLES, END, GENERATION)):
            name = list(values)[(number * 5 + place) % len(values)]
            for value in values[name][:-1] if (previous, role) == ("system", "system") else values[name]:
                content = [Part(source="content")] if role in ROLES else []
                rules.append(Rule(previous, role, {name: value}, (Part(f"<{name} {value}>"), *content)))
    refusal = Rule("system", "system", {}, (Part("one system message is enough"),))
    return ChatFormat("any", kinds, rules, [refusal], ("<think>", "</think>"), ["<|im_end|>"])


def every_step() -> ChatFormat:
    """Prints a content after each of many steps, and the system message before the last user's."""
    steps = [(("strip",),), (("lstrip",),), (("rstrip",),), (("strip", "\n\u00fc"),), (("after_first", "|"),), (("after_last", "|"),),
             (("before_first", "|"), ("rstrip", " ")), (("before_last", "|"),), (("delete", "/fast"), ("strip",)),
             (("remove", "<think>", "</think>"), ("lstrip", "\n")), (("before_first", "</think>"), ("after_last", "<think>"))]
    parts = tuple(part for step in steps for part in (Part("["), Part(source="content", steps=step)))
    rules = [Rule(START, "system", {}, ()), Rule(START, "user", {"system": "none"}, parts[:16])]
    for previous in ("system", "assistant"):
        rules += [Rule(previous, "user", {"zone": "last_user", "system": "plain"}, (Part(source="system", steps=(("rstrip",),)), *parts[:14])),
                  Rule(previous, "user", {"zone": "before"}, parts[8:]), Rule(previous, "user", {"system": "none"}, parts[8:])]
    rules += [Rule("user", "assistant", {}, parts[6:]), Rule("user", GENERATION, {}, (Part("<a>"),)), Rule("assistant", END, {}, (Part("<e>"),))]
    return ChatFormat("alternate", rules=rules, end=["<e>"])


def case(form: ChatFormat, random: Random) -> dict[str, Any]:
    roles = [role for role in ("system",) if random.random() < 0.5] + [("user", "assistant")[i % 2] for i in range(random.randrange(1, 6))]
    if random.random() < 0.3:
        roles = [random.choice((*ROLES, "developer", "tool")) for _ in range(random.randrange(5))]
    messages = [Message(role, "".join(random.choice(PIECES) for _ in range(random.randrange(7)))) for role in roles]
    tail = random.random() < 0.8
    generation = tail and random.random() < 0.5
    result = {"messages": [[m.role, m.content] for m in messages], "generation": generation, "tail": tail}
    try:
        return result | {"segments": [[s.text, s.literal] for s in cf.render(form, messages, generation, tail)]}
    except Refused:
        return result | {"refused": True}


def vectors() -> list[dict[str, Any]]:
    made = [every_feature(), every_step(), *(make() for make in cf.NAMED.values())]
    formats = [cf.from_json(cf.to_json(form), "a format of the vectors") for form in made]
    return [{"format": cf.to_json(form), "cases": [case(form, Random(1000 * number + i)) for i in range(CASES)]}
            for number, form in enumerate(formats)]


def main() -> int:
    path = needs.ROOT / "test/fixtures/chat/vectors.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(vectors(), ensure_ascii=False, separators=(",", ":")).replace('{"format"', '\n{"format"').replace('{"messages"', '\n{"messages"') + "\n")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
