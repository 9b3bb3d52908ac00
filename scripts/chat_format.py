"""Chat formats as data (doc/chat.md): what a model file carries instead of a chat template. Parses a format, and renders
conversations with it into segments: literals of the format, and pieces of the messages. scripts/chat_template.py learns a format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cli
from cli import bad_file, json_type, shown

VERSION = 1
FILE = "chat_format.json"  # beside shards, and exported weights
ROLES = ("system", "user", "assistant")
START, END, GENERATION = "start", "end", "generation"  # beside the roles: before the first message; after the last one
FEATURES = ("kind", "zone", "last", "system", "generation", "previous_kind")
ZONES = ("before", "last_user", "after")
PLAIN, ABSENT, NONE = "plain", "absent", "none"  # kinds: of most contents; of messages that are left out; of no system message
TESTS = ("empty", "blank", "contains", "starts", "ends", "gone")  # of a kind
CUTS = ("after_last", "after_first", "before_first", "before_last")
STRIPS = ("strip", "lstrip", "rstrip")
STEPS = {name: (2, 2) for name in (*CUTS, "delete")} | {name: (1, 2) for name in STRIPS} | {"remove": (3, 3)}  # least and most members

PROOF_CONVERSATIONS = 300  # that a learned format and its template render alike
MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES = 1 << 20, 100_000_000
MAX_FORMAT_BYTES = 1 << 20
MAX_TEXT_BYTES = 64 << 10   # of a literal, a marker, a message to the user
MAX_RULES, MAX_KINDS, MAX_PARTS, MAX_STEPS = 4096, 64, 16, 8
MAX_MESSAGES = 4096


class Refused(Exception):
    """The format does not take this conversation; the message says why."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation. Special tokens are looked for in literals alone."""

    text: str
    literal: bool


@dataclass(frozen=True)
class Answer:
    """What a model writes of an assistant message: characters `begin` to `end` of the rendered conversation, and up to `turn_end`
    what ends its turn."""

    begin: int
    end: int
    turn_end: int


@dataclass(frozen=True)
class Part:
    """A literal (`source` empty), or what `steps` make of a content: of this message, or of the system message."""

    text: str = ""
    source: str = ""                       # "content" | "system"
    steps: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Rule:
    """What is printed from the end of the previous content to the end of this one, where all of `when` holds."""

    previous: str
    role: str
    when: dict[str, Any]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Kind:
    """Contents of a role that all of `tests` hold for: they get the name `name` in rules (absent: the message is left out), or
    are refused."""

    role: str
    tests: dict[str, Any]
    name: str = ""
    refuse: str = ""


@dataclass
class ChatFormat:
    order: str = "any"  # "alternate": an optional system message, then user and assistant in turn
    kinds: list[Kind] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    refusals: list[Rule] = field(default_factory=list)  # of pairs without a rule; `parts` is one literal, the message
    thoughts: tuple[str, str] | None = None             # what begins and ends thoughts in an answer
    end: list[str] = field(default_factory=list)        # special tokens that end an answer
    source: str = ""                                    # for people
    options: dict[str, Any] = field(default_factory=dict)
    date: str = ""                                      # that the literals hold, if the template asked for one


# ---- rendering -------------------------------------------------------------------------------------------------------


def apply_steps(text: str, steps: tuple[tuple[str, ...], ...]) -> str:
    """Step after step. A marker that `text` lacks changes nothing."""
    for name, *rest in steps:
        if name in STRIPS:
            text = getattr(text, name)(*rest)
        elif name == "delete":
            text = text.replace(rest[0], "")
        elif name == "remove":
            text = _without_spans(text, *rest)
        elif rest[0] in text:
            cut = text.index(rest[0]) if name.endswith("first") else text.rindex(rest[0])
            text = text[cut + len(rest[0]):] if name.startswith("after") else text[:cut]
    return text


def _without_spans(text: str, begin: str, end: str) -> str:
    """Every piece between two `end` without what follows its first `begin`."""
    return "".join(piece.split(begin)[0] for piece in text.split(end))


def matches(tests: dict[str, Any], content: str) -> bool:
    checks: dict[str, Callable[[Any], bool]] = {
        "empty": lambda _: not content, "blank": lambda _: not content.strip(), "contains": content.__contains__,
        "starts": content.startswith, "ends": content.endswith, "gone": lambda steps: not apply_steps(content, steps)}
    return all(checks[name](value) for name, value in tests.items())


def kind_of(form: ChatFormat, message: Message) -> str:
    """The name of the message's kind. Refused if its content is refused."""
    for kind in form.kinds:
        if kind.role == message.role and matches(kind.tests, message.content):
            if kind.refuse:
                raise Refused(kind.refuse)
            return kind.name
    return PLAIN


def check_order(roles: list[str]) -> None:
    rest = roles[1:] if roles[0] == "system" else roles
    if not rest or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(rest)):
        raise Refused("after an optional system message, roles must alternate user/assistant, beginning with user")


def features(roles: list[str], kinds: list[str], i: int, generation: bool) -> dict[str, Any]:
    """Of message i; of the tail where i is the number of messages."""
    user = max((j for j, role in enumerate(roles) if role == "user"), default=-1)
    return {"kind": kinds[i] if i < len(kinds) else PLAIN, "zone": ZONES[(i >= user) + (i > user)], "last": i >= len(roles) - 1,
            "system": kinds[0] if roles[0] == "system" else NONE, "generation": generation, "previous_kind": kinds[i - 1] if i else PLAIN}


def find_rule(form: ChatFormat, previous: str, role: str, found: dict[str, Any]) -> Rule:
    for rule in form.rules:
        if (rule.previous, rule.role) == (previous, role) and all(found[name] == value for name, value in rule.when.items()):
            return rule
    for refusal in form.refusals:
        if (refusal.previous, refusal.role) == (previous, role):
            raise Refused(refusal.parts[0].text)
    if role in (END, GENERATION):
        raise Refused(f"the conversation cannot end with a {previous} message here")
    raise Refused(f"the chat format takes no {role} message {'first' if previous == START else f'after {previous}'} here")


def known_roles(messages: list[Message]) -> list[Message]:
    """The messages, those of a developer as the system's. Refused for another role."""
    messages = [Message("system", m.content) if m.role == "developer" else m for m in messages]
    if unknown := [m.role for m in messages if m.role not in ROLES]:
        raise Refused(f"got the role {shown(unknown[0])}, expected {', '.join(ROLES)}")
    return messages


def with_kinds(form: ChatFormat, messages: list[Message]) -> tuple[list[Message], list[str]]:
    """The messages that are printed, and the kind of each. Refused if the format does not take them."""
    if len(messages) > MAX_MESSAGES:
        raise Refused(f"got {len(messages)} messages, expected at most {MAX_MESSAGES}")
    messages = known_roles(messages)
    kinds = [kind_of(form, message) for message in messages]
    messages = [message for message, kind in zip(messages, kinds) if kind != ABSENT]
    kinds = [kind for kind in kinds if kind != ABSENT]
    roles = [message.role for message in messages]
    if not messages:
        raise Refused("got no message, expected at least one that is not empty")
    if form.order == "alternate":
        check_order(roles)
    return messages, kinds


def printed(form: ChatFormat, messages: list[Message], kinds: list[str], generation: bool, tail: bool = True,
            used: list[Rule] | None = None) -> Iterator[list[Segment]]:
    """What is printed of each message, and in the end of the tail, as render() has it."""
    roles = [message.role for message in messages]
    path = [*roles, GENERATION if generation else END] if tail else roles
    for i, (previous, role) in enumerate(zip([START, *roles], path)):
        rule = find_rule(form, previous, role, features(roles, kinds, i, generation))
        if used is not None:
            used.append(rule)
        yield segments_of(rule, messages, i)


def segments_of(rule: Rule, messages: list[Message], i: int) -> list[Segment]:
    """What the rule prints of message i."""
    texts = [part.text if not part.source else apply_steps(messages[i if part.source == "content" else 0].content, part.steps)
             for part in rule.parts]
    return [Segment(text, not part.source) for text, part in zip(texts, rule.parts)]


def render(form: ChatFormat, messages: list[Message], generation: bool, tail: bool = True, used: list[Rule] | None = None) -> list[Segment]:
    """The conversation as segments. `generation`: with the prompt for an answer. Without `tail` the last message stays open, so
    that an answer continues it. `used` gets the rules. Refused if the format does not take it."""
    kept, kinds = with_kinds(form, messages)
    return [segment for segments in printed(form, kept, kinds, generation, tail, used) for segment in segments if segment.text]


def joined(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def answers(form: ChatFormat, messages: list[Message], ends: list[str]) -> list[Answer]:
    """Where the answers are in what render() makes of the conversation. An answer begins behind the prompt with which one asks a
    model for it: so it has what the format itself writes there, such as empty thoughts. Where the format prints another text than
    that prompt, it begins with the content. The first of `ends` in the literals behind it ends its turn."""
    kept, kinds = with_kinds(form, messages)
    text = ""
    contents: list[int] = []  # where each begins
    spans: list[tuple[int, int]] = []
    for i, segments in enumerate(printed(form, kept, kinds, False)):
        if i < len(kept) and kept[i].role == "assistant":
            own = [number for number, segment in enumerate(segments) if not segment.literal] or [len(segments)]
            head = joined(segments[:own[0]])
            prompt = prompt_after(form, kept[:i], kinds[:i])
            begin = len(prompt) if prompt is not None and head.startswith(prompt) else len(head)
            spans.append((len(text) + begin, len(text) + len(joined(segments[:own[-1] + 1]))))
        for segment in segments:
            contents += [len(text)] * (not segment.literal and segment.text != "")
            text += segment.text
    found = []
    for begin, end in spans:
        behind = text[end:min((at for at in contents if at >= end), default=len(text))]
        turn_ends = [(behind.index(one), -len(one)) for one in ends if one in behind]
        at, length = min(turn_ends, default=(0, 0))
        found.append(Answer(begin, end, end + at - length))
    return found


def prompt_after(form: ChatFormat, messages: list[Message], kinds: list[str]) -> str | None:
    """What is printed behind `messages` to ask for an answer; None if the format does not ask there."""
    roles = [message.role for message in messages]
    try:
        rule = find_rule(form, roles[-1], GENERATION, features(roles, kinds, len(roles), True)) if roles else None
    except Refused:
        rule = None
    return None if rule is None else joined(segments_of(rule, messages, 0))


def render_text(form: ChatFormat, messages: list[Message], generation: bool, used: list[Rule] | None = None) -> str:
    return joined(render(form, messages, generation, used=used))


# ---- JSON ------------------------------------------------------------------------------------------------------------


def to_json(form: ChatFormat) -> dict[str, Any]:
    def steps(value: Any) -> Any:
        return [list(step) for step in value]

    def part(value: Part) -> Any:
        return {"from": value.source, "steps": steps(value.steps)} if value.source else value.text

    def tests(kind: Kind) -> dict[str, Any]:
        return {name: steps(value) if name == "gone" else value for name, value in kind.tests.items()}

    result: dict[str, Any] = {"version": VERSION, "order": form.order, "rules": [
        {"previous": rule.previous, "role": rule.role, "parts": [part(one) for one in rule.parts]}
        | ({"when": rule.when} if rule.when else {}) for rule in form.rules]}
    result["kinds"] = [{"role": kind.role, "tests": tests(kind)} | ({"refuse": kind.refuse} if kind.refuse else {"kind": kind.name})
                       for kind in form.kinds]
    result["refusals"] = [{"previous": one.previous, "role": one.role, "message": one.parts[0].text} for one in form.refusals]
    result["end"] = form.end
    if form.thoughts:
        result["thoughts"] = {"begin": form.thoughts[0], "end": form.thoughts[1]}
    result |= {key: value for key, value in (("source", form.source), ("options", form.options), ("date", form.date)) if value}
    return result


class _Reader:
    """Checks the members of a format. Every problem is FileError BAD_FILE with the member's name."""

    def __init__(self, source: object):
        self.source = source

    def refuse(self, where: str, got: Any, expected: str) -> None:
        bad_file(self.source, where, f"got {json_type(got)} {shown(got)}, expected {expected}")

    def object(self, value: Any, where: str, required: set[str], optional: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
        if not isinstance(value, dict):
            self.refuse(where, value, "an object")
        for key in required - value.keys():
            bad_file(self.source, f"{where}.{key}".lstrip("."), "missing")
        for key in value.keys() - required - optional:
            bad_file(self.source, where, f"got the member {shown(key)}, expected {', '.join(sorted(required | optional))}")
        return value

    def list(self, value: Any, where: str, most: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            self.refuse(where, value, f"an array of at most {most}")
        return value

    def text(self, value: Any, where: str, least: int = 0) -> str:
        if not isinstance(value, str) or not least <= len(value.encode()) <= MAX_TEXT_BYTES:
            self.refuse(where, value, f"a text of {least} to {MAX_TEXT_BYTES} bytes")
        return value

    def one_of(self, value: Any, where: str, names: tuple[Any, ...]) -> Any:
        if not any(type(value) is type(name) and value == name for name in names):
            self.refuse(where, value, " or ".join(json.dumps(name) for name in names))
        return value

    def part(self, value: Any, where: str) -> Part:
        if isinstance(value, str):
            return Part(self.text(value, where, 1))
        self.object(value, where, {"from", "steps"})
        return Part(source=self.one_of(value["from"], f"{where}.from", ("content", "system")),
                    steps=self.steps(value["steps"], f"{where}.steps"))

    def steps(self, value: Any, where: str) -> tuple[tuple[str, ...], ...]:
        return tuple(self.step(step, f"{where}[{i}]") for i, step in enumerate(self.list(value, where, MAX_STEPS)))

    def step(self, value: Any, where: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            self.refuse(where, value, "an array that begins with the name of a step")
        least, most = STEPS[self.one_of(value[0], where, tuple(STEPS))]
        if not least <= len(value) <= most:
            self.refuse(where, value, f"{least} to {most} members")
        for text in value[1:]:
            self.text(text, where, 1)
        return tuple(value)

    def when(self, value: Any, where: str, kinds: tuple[str, ...]) -> dict[str, Any]:
        self.object(value, where, set(), set(FEATURES))
        names = {"kind": kinds, "previous_kind": kinds, "system": (NONE, *kinds), "zone": ZONES}
        for name, one in value.items():
            self.one_of(one, f"{where}.{name}", names.get(name, (False, True)))
        return value

    def kind(self, value: Any, where: str) -> Kind:
        self.object(value, where, {"role", "tests"}, {"kind", "refuse"})
        if ("kind" in value) == ("refuse" in value):
            bad_file(self.source, where, "expected either kind or refuse")
        tests = self.object(value["tests"], f"{where}.tests", set(), set(TESTS))
        if not tests:
            self.refuse(f"{where}.tests", tests, "at least one test")
        for name, one in tests.items():
            if name in ("empty", "blank"):
                self.one_of(one, f"{where}.tests.{name}", (True,))
            elif name == "gone":
                tests = tests | {name: self.steps(one, f"{where}.tests.{name}")}
            else:
                self.text(one, f"{where}.tests.{name}", 1)
        role = self.one_of(value["role"], f"{where}.role", ROLES)
        if "refuse" in value:
            return Kind(role, tests, refuse=self.text(value["refuse"], f"{where}.refuse", 1))
        name = self.text(value["kind"], f"{where}.kind", 1)
        if name == NONE:
            self.refuse(f"{where}.kind", name, "another name")
        if name == ABSENT and role != "system":
            self.refuse(f"{where}.kind", name, "absent for the role system alone")
        return Kind(role, tests, name)

    def rule(self, value: Any, where: str, kinds: tuple[str, ...]) -> Rule:
        self.object(value, where, {"previous", "role", "parts"}, {"when"})
        parts = self.list(value["parts"], f"{where}.parts", MAX_PARTS)
        rule = Rule(*self.pair(value, where), self.when(value.get("when", {}), f"{where}.when", kinds),
                    tuple(self.part(one, f"{where}.parts[{i}]") for i, one in enumerate(parts)))
        if any(part.source == "content" for part in rule.parts) and rule.role in (END, GENERATION):
            bad_file(self.source, f"{where}.parts", f"got a content, but {rule.role} is no message")
        if any(part.source == "system" for part in rule.parts) and rule.when.get("system", NONE) == NONE:
            bad_file(self.source, f"{where}.parts", "got the system message, expected a kind of it in when.system")
        return rule

    def pair(self, value: dict[str, Any], where: str) -> tuple[str, str]:
        return (self.one_of(value["previous"], f"{where}.previous", (START, *ROLES)),
                self.one_of(value["role"], f"{where}.role", (*ROLES, END, GENERATION)))

    def refusal(self, value: Any, where: str) -> Rule:
        self.object(value, where, {"previous", "role", "message"})
        return Rule(*self.pair(value, where), {}, (Part(self.text(value["message"], f"{where}.message", 1)),))


def from_json(value: Any, source: object) -> ChatFormat:
    """The format of a JSON value. FileError BAD_FILE with the member that is wrong."""
    read = _Reader(source)
    read.object(value, "", {"version", "order", "rules", "kinds", "refusals", "end"}, {"thoughts", "source", "options", "date"})
    read.one_of(value["version"], "version", (VERSION,))
    kinds = [read.kind(one, f"kinds[{i}]") for i, one in enumerate(read.list(value["kinds"], "kinds", MAX_KINDS))]
    names = tuple(dict.fromkeys([PLAIN, *(kind.name for kind in kinds if kind.name not in ("", ABSENT))]))
    rules = [read.rule(one, f"rules[{i}]", names) for i, one in enumerate(read.list(value["rules"], "rules", MAX_RULES))]
    refusals = [read.refusal(one, f"refusals[{i}]") for i, one in enumerate(read.list(value["refusals"], "refusals", MAX_RULES))]
    thoughts = None
    if "thoughts" in value:
        marks = read.object(value["thoughts"], "thoughts", {"begin", "end"})
        thoughts = read.text(marks["begin"], "thoughts.begin", 1), read.text(marks["end"], "thoughts.end", 1)
    if not isinstance(value.get("options", {}), dict):
        read.refuse("options", value["options"], "an object")
    return ChatFormat(read.one_of(value["order"], "order", ("any", "alternate")), kinds, rules, refusals, thoughts,
                      [read.text(one, f"end[{i}]", 1) for i, one in enumerate(read.list(value["end"], "end", 64))],
                      read.text(value.get("source", ""), "source"), value.get("options", {}), read.text(value.get("date", ""), "date"))


def read_format(path: Path) -> ChatFormat:
    """The format in a JSON file. FileError BAD_FILE for anything else."""
    return from_json(cli.read_json_object(path, MAX_FORMAT_BYTES), path)


def parse_option(text: str, error: Callable[[str], Exception]) -> tuple[str, Any]:
    """KEY=VALUE of --chat-option: a value that is JSON is that, any other a text. Raises `error` of anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier() or key in ("messages", "add_generation_prompt"):
        raise error(f"got {shown(text)}, expected KEY=VALUE with the name of a variable of the chat template")
    try:
        return key, cli.parse_json(value.encode("utf-8", "replace"), "--chat-option")
    except cli.FileError:
        return key, value


# ---- the template of a model -----------------------------------------------------------------------------------------


@dataclass
class Source:
    """What the files beside a model's weights say about its chats."""

    template: str
    source: str                                                          # where the template was
    variables: dict[str, Any] = field(default_factory=dict)              # bos_token and so on
    added: dict[str, bool] = field(default_factory=dict)                 # added tokens of tokenizer.json; whether each is special


def read_model(path: Path) -> Source | None:
    """The template of a model's directory, or of a file; None for a directory without one. FileError BAD_FILE for a damaged file."""
    if path.is_file():
        return Source(_read_template(path), path.name)
    config_path, jinja_path, tokenizer_path = path / "tokenizer_config.json", path / "chat_template.jinja", path / "tokenizer.json"
    config = cli.read_json_object(config_path, MAX_TEMPLATE_BYTES * 16, lambda _: None) if config_path.exists() else {}
    template = _read_template(jinja_path) if jinja_path.exists() else _named_default(config.get("chat_template"), config_path)
    if template is None:
        return None
    map_path = path / "special_tokens_map.json"  # transformers reads it where tokenizer_config.json is of before added_tokens_decoder
    older = cli.read_json_object(map_path, MAX_TEMPLATE_BYTES, lambda _: None) if map_path.exists() and "added_tokens_decoder" not in config else {}
    variables = {}
    for key, value in (config | older).items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            variables[key] = text
    added: dict[str, bool] = {}
    if tokenizer_path.exists():
        tokens = cli.read_json_object(tokenizer_path, MAX_TOKENIZER_BYTES).get("added_tokens") or []
        added = {token["content"]: bool(token.get("special")) for token in tokens if isinstance(token, dict) and token.get("content")}
    return Source(template, "chat_template.jinja" if jinja_path.exists() else "chat_template", variables, added)


def _read_template(path: Path) -> str:
    try:
        return cli.read_bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        bad_file(path, "", f"not UTF-8 (byte {error.start}), expected a template")


def _named_default(value: Any, source: Path) -> str | None:
    """A chat_template: a text, or a list of named ones, of which `default` is taken."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
        if value is None and named:
            bad_file(source, "chat_template", f"got templates named {', '.join(shown(name) for name in named)}, expected one named default")
    if value is not None and not isinstance(value, str):
        bad_file(source, "chat_template", f"got {cli.json_type(value)}, expected a text or a list of named ones")
    if value and len(value.encode()) > MAX_TEMPLATE_BYTES:
        bad_file(source, "chat_template", f"got {len(value.encode())} bytes, expected at most {MAX_TEMPLATE_BYTES}")
    return value or None


# ---- formats by name -------------------------------------------------------------------------------------------------


def _turns(turns: dict[str, tuple[str, str]], answer: str, end: str, begin: str = "", trim: bool = False) -> ChatFormat:
    """Every message between the two literals of its role; an answer begins with `answer`."""
    content = Part(source="content", steps=(("strip",),) if trim else ())
    rules = []
    for previous in (START, *turns):
        before = begin if previous == START else turns[previous][1]
        rules += [Rule(previous, role, {}, (Part(before + opening), content)) for role, (opening, _) in turns.items()]
        if previous != START:
            rules += [Rule(previous, END, {}, (Part(before),)), Rule(previous, GENERATION, {}, (Part(before + answer),))]
    return ChatFormat(rules=rules, end=[end])


def _chatml() -> ChatFormat:
    return _turns({role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ROLES}, "<|im_start|>assistant\n", "<|im_end|>")


def _llama3() -> ChatFormat:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return _turns({role: (head.format(role), "<|eot_id|>") for role in ROLES}, head.format("assistant"), "<|eot_id|>",
                  "<|begin_of_text|>", trim=True)


def _gemma() -> ChatFormat:
    form = _turns({role: (f"<start_of_turn>{name}\n", "<end_of_turn>\n") for role, name in (("user", "user"), ("assistant", "model"))},
                  "<start_of_turn>model\n", "<end_of_turn>", "<bos>", trim=True)
    form.order = "alternate"
    form.refusals = [Rule(START, "system", {}, (Part("this chat format has no system messages"),))]
    return form


def _mistral() -> ChatFormat:
    content = Part(source="content")
    rules = [Rule(START, "system", {}, (Part("<s>[INST] "), content)), Rule(START, "user", {}, (Part("<s>[INST] "), content)),
             Rule("system", "user", {}, (Part("\n\n"), content)), Rule("user", "assistant", {}, (Part(" [/INST] "), content)),
             Rule("assistant", "user", {}, (Part("</s>[INST] "), content)), Rule("assistant", END, {}, (Part("</s>"),)),
             Rule("user", END, {}, (Part(" [/INST]"),)), Rule("user", GENERATION, {}, (Part(" [/INST]"),))]
    return ChatFormat("alternate", rules=rules, end=["</s>"])


NAMED = {"chatml": _chatml, "llama3": _llama3, "mistral": _mistral, "gemma": _gemma}
