"""Conversations as training data: read from JSON lines, rendered by a chat format, as token ids of which those are marked that a
model learns: its answers, and what ends their turns. dev/prepare_data.py --chat uses it; doc/fine_tuning.md says what it takes.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from chat_format import Answer, ChatFormat, Message, Refused, Segment, answers, known_roles, render
from cli import bad_file, json_type, shown
from tensor_file import escaped

PROMPT = ("prompt", "completion")
INSTRUCTION = ("instruction", "input", "output")


class LeftOut(Exception):
    """A conversation that nothing can be learned from, or that the format does not take; the message says why."""


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of a file, for messages."""

    path: Path
    number: int

    def refuse(self, member: str, got: Any, expected: str, advice: str = "") -> NoReturn:
        bad_file(self.path, f"line {self.number}{f': {member}' if member else ''}", f"got a JSON {json_type(got)}, expected {expected}", advice)


@dataclass
class Example:
    """What is learned from a line: a conversation, or two that answer one prompt, the chosen one and then the rejected one.
    `prompt_answers`: how many answers at the beginning of each belong to the prompt, and are not learned."""

    versions: list[list[Message]]
    prompt_answers: int = 0


def is_pair(value: Any, fields: tuple[str, ...] | None) -> bool:
    return fields is None and isinstance(value, dict) and ("chosen" in value or "rejected" in value)


def example_of(value: Any, fields: tuple[str, ...] | None, line: Line) -> Example:
    """Errors are those of messages_of()."""
    return _pair(value, line) if is_pair(value, fields) else Example([messages_of(value, fields, line)])


def _pair(value: dict[str, Any], line: Line) -> Example:
    """TRL's forms: a prompt and two answers, each a text or messages; or two conversations that begin with the same messages."""
    for name in ("chosen", "rejected"):
        if not isinstance(value.get(name), (str, list)):
            if name not in value:
                bad_file(line.path, f"line {line.number}: {name}", "got nothing, expected the other one of two answers")
            line.refuse(name, value[name], "a text or an array of messages")
    versions = [_messages_or_text(value, name, "assistant", line) for name in ("chosen", "rejected")]
    texts = isinstance(value["chosen"], str) or isinstance(value["rejected"], str)
    if isinstance(value.get("prompt"), list) or texts:  # beside conversations a prompt that is a text is their first message again
        if not isinstance(value.get("prompt"), (str, list)):
            line.refuse("prompt", value.get("prompt"), "a text or an array of messages")
        prompt = _messages_or_text(value, "prompt", "user", line)
    else:
        same = (i for i, (one, other) in enumerate(zip(*versions)) if one != other)
        prompt = versions[0][:next(same, min(map(len, versions)))]
        versions = [version[len(prompt):] for version in versions]
    if not prompt:
        raise LeftOut("chosen and rejected have no prompt in common")
    if versions[0] == versions[1]:
        raise LeftOut("chosen and rejected are the same")
    for version in versions:
        if version and version[0].role != "assistant":
            raise LeftOut("chosen and rejected have other prompts")
        _end_with_an_answer(version)
    return Example([prompt + version for version in versions], sum(message.role == "assistant" for message in prompt))


def _messages_or_text(value: dict[str, Any], name: str, role: str, line: Line) -> list[Message]:
    if isinstance(value[name], str):
        return [Message(role, value[name])]
    return [_message(one, f"{name}[{i}]", line) for i, one in enumerate(value[name])]


def _end_with_an_answer(messages: list[Message]) -> None:
    """Takes away what follows the last answer. LeftOut where there is none, perhaps because it has a role of another name."""
    said = list(messages)
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if any(message.role == "assistant" and message.content.strip() for message in messages):
        return
    try:
        known_roles(said)
    except Refused as refused:
        raise LeftOut(str(refused)) from None
    raise LeftOut("no answer")


def messages_of(value: Any, fields: tuple[str, ...] | None, line: Line) -> list[Message]:
    """The messages up to the last answer. `fields`: the members of questions and the one of the answer, instead of those that are
    known. FileError BAD_FILE for what is no conversation, LeftOut for one without an answer."""
    if not isinstance(value, dict):
        line.refuse("", value, "an object with a conversation")
    if fields is None and "messages" in value:
        messages = _messages(value, line)
    else:
        messages = _question_and_answer(value, fields or _known_fields(value, line), line)
    if not messages:
        raise LeftOut("no messages")
    _end_with_an_answer(messages)
    return messages


def _messages(value: dict[str, Any], line: Line) -> list[Message]:
    if not isinstance(value["messages"], list):
        line.refuse("messages", value["messages"], "an array")
    if value.get("tools"):
        raise LeftOut("tools, which no chat format here has")
    return [_message(one, f"messages[{i}]", line) for i, one in enumerate(value["messages"])]


def _message(value: Any, where: str, line: Line) -> Message:
    if not isinstance(value, dict):
        line.refuse(where, value, "an object with role and content")
    if value.get("tool_calls") or value.get("function_call") or value.get("role") in ("tool", "function"):
        raise LeftOut("tools, which no chat format here has")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str):
        line.refuse(f"{where}.role", role, "a text")
    if isinstance(content, list):  # of parts, as the server takes them
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            line.refuse(f"{where}.content", content, 'a text, or an array of {"type": "text", "text": ...}')
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        line.refuse(f"{where}.content", content, "a text")
    return Message(role, content)


def _refuse_members(value: dict[str, Any], expected: str, advice: str, line: Line) -> NoReturn:
    bad_file(line.path, f"line {line.number}", f"got the members {', '.join(map(shown, list(value)[:8])) or 'of no name'}, expected {expected}",
             advice)


def _known_fields(value: dict[str, Any], line: Line) -> tuple[str, ...]:
    for fields in (PROMPT, INSTRUCTION):
        if fields[0] in value and fields[-1] in value:
            return fields
    _refuse_members(value, "messages, prompt and completion, instruction and output, or chosen and rejected",
                    "--fields names the members of other files", line)


def _question_and_answer(value: dict[str, Any], fields: tuple[str, ...], line: Line) -> list[Message]:
    texts = []
    for name in fields:
        text = value.get(name)
        if text is None and name not in (fields[0], fields[-1]):  # an instruction may have no input
            text = ""
        elif name not in value:
            _refuse_members(value, shown(name), "--fields names the members", line)
        if not isinstance(text, str):
            line.refuse(shown(name), text, "a text")
        texts.append(text)
    return [Message("user", "\n\n".join(text for text in texts[:-1] if text)), Message("assistant", texts[-1])]


# ---- ids -------------------------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """A conversation as it is trained on. `answer_ends`: behind the last token of each answer."""

    turns: int
    ids: np.ndarray
    learned: np.ndarray  # bool, of each id
    answer_ends: list[int]


class StandIns:
    """Gives special tokens of literals names that no content has, so that a tokenizer that takes special tokens for text finds
    those of literals, and those alone, in the whole text: the ids of doc/chat.md."""

    def __init__(self, document: dict[str, Any], form: ChatFormat):
        """`document`: a tokenizer.json."""
        added = document.get("added_tokens") or []
        special = {token["content"]: token for token in added if token.get("special") and token.get("content")}
        names = sorted(special, key=len, reverse=True)  # of those that begin at one place the longest
        word = {name: r"(?<!\w)%s(?!\w)" if special[name].get("single_word") else "%s" for name in names}
        self._names = re.compile("|".join(word[name] % re.escape(name) for name in names) or r"(?!)")
        literals = [part.text for rule in form.rules for part in rule.parts if not part.source]
        used = sorted({name for text in literals for name in self._names.findall(text)})
        nonce = secrets.token_hex(8)
        self._of = {name: f"\U000F0000{nonce}:{number}\U000F0001" for number, name in enumerate(used)}
        self.first = 1 + max([*document["model"]["vocab"].values(), *(token["id"] for token in added)], default=0)
        self._ids = np.array([special[name]["id"] for name in used], dtype=np.uint32)
        self.document = document | {"post_processor": None, "added_tokens": [*added, *(
            special[name] | {"id": self.first + number, "content": self._of[name], "special": False, "single_word": False}
            for number, name in enumerate(used))]}

    def text_of(self, segments: list[Segment]) -> tuple[str, list[int], list[int]]:
        """The text with the stand-ins; and where it is changed, the ends of names before and after that, in order."""
        text, length = "", 0
        before, after = [0], [0]
        for segment in segments:
            done = 0
            for match in self._names.finditer(segment.text) if segment.literal else ():
                text += segment.text[done:match.start()] + self._of[match[0]]
                done = match.end()
                before.append(length + done)
                after.append(len(text))
            text += segment.text[done:]
            length += len(segment.text)
        return text, before, after

    def back(self, ids: np.ndarray) -> np.ndarray:
        """The ids of the special tokens in the place of those of stand-ins."""
        standing = ids >= self.first
        result = ids.copy()
        result[standing] = self._ids[ids[standing] - self.first]
        return result


class Renderer:
    """Makes ids of conversations. `tokenizer`: from StandIns.document, with special tokens taken for text."""

    def __init__(self, form: ChatFormat, ends: list[str], stand_ins: StandIns, tokenizer: Any, learn_all: bool):
        """`ends`: the texts that end a turn. `learn_all`: all answers, not the last one alone."""
        self._form, self._ends, self._stand_ins, self._tokenizer, self._learn_all = form, ends, stand_ins, tokenizer, learn_all

    def encode(self, all_messages: list[list[Message]], prompt_answers: list[int] | None = None) -> list[Conversation | LeftOut]:
        """Each conversation, or why it is left out. `prompt_answers`: of each, how many of its first answers are not learned."""
        results: list[Conversation | LeftOut | None] = []
        rendered = []
        for messages, skipped in zip(all_messages, prompt_answers or [0] * len(all_messages), strict=True):
            try:
                rendered.append((len(messages), render(self._form, messages, False), answers(self._form, messages, self._ends), skipped))
                results.append(None)
            except Refused as refused:
                results.append(LeftOut(str(refused)))
        texts = [self._stand_ins.text_of(segments) for _, segments, _, _ in rendered]
        encodings = self._tokenizer.encode_batch([text for text, _, _ in texts], add_special_tokens=False)
        made = (self._conversation(turns, found, skipped, text, encoding)
                for (turns, _, found, skipped), text, encoding in zip(rendered, texts, encodings, strict=True))
        return [next(made) if result is None else result for result in results]

    def _conversation(self, turns: int, found: list[Answer], skipped: int, text: tuple[str, list[int], list[int]],
                      encoding: Any) -> Conversation:
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        whole, before, after = text
        learned_characters = np.zeros(len(whole) + 1, dtype=bool)
        spans = [(self._moved(one.begin, before, after), self._moved(one.turn_end, before, after)) for one in found]
        for begin, end in spans[skipped:] if self._learn_all else spans[-1:]:
            learned_characters[begin:end] = True
        # A token is learned if it has a character that is. A special token may have taken white space of a content beside it:
        # its own name counts.
        begins, ends = offsets[:, 0].copy(), offsets[:, 1].copy()
        standing = np.flatnonzero(ids >= self._stand_ins.first)
        if standing.size != len(after) - 1:
            raise ValueError("a special token of the chat format is not found in a text")
        ends[standing] = after[1:]
        begins[standing] = ends[standing] - 1
        sums = np.concatenate([[0], np.cumsum(learned_characters)])
        learned = sums[np.maximum(ends, begins + 1)] > sums[begins]
        answer_ends = [int(np.searchsorted(begins, end)) for _, end in spans]
        return Conversation(turns, self._stand_ins.back(ids).astype(np.uint32), learned, answer_ends)

    @staticmethod
    def _moved(at: int, before: list[int], after: list[int]) -> int:
        """A place in the rendered text, which is not within the name of a special token, in that with the stand-ins."""
        i = bisect_right(before, at) - 1
        return after[i] + at - before[i]


def shortened(messages: list[Message], conversation: Conversation, longest: int) -> list[Message]:
    """The messages up to the last answer that ends within `longest` tokens, at least one answer fewer than there are."""
    ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
    count = min(bisect_right(conversation.answer_ends, longest), len(ends) - 1)
    return messages[:ends[count - 1]] if count > 0 else []


def fit(renderer: Renderer, messages: list[Message], conversation: Conversation, longest: int) -> Conversation | None:
    """The conversation without its last turns, so that it has at most `longest` tokens; None if that leaves no answer."""
    while len(conversation.ids) > longest:
        messages = shortened(messages, conversation, longest)
        if not any(message.content.strip() for message in messages if message.role == "assistant"):
            return None
        (cut,) = renderer.encode([messages])
        if isinstance(cut, LeftOut):
            return None
        conversation = cut
    return conversation


# ---- what is said ----------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What became of the conversations."""

    cut: int = 0
    truncated: int = 0
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)  # by reason: how many, and where the first one is

    def leave_out(self, reason: str, line: Line) -> None:
        count, first = self.left_out.get(reason, (0, f"{line.path.name} line {line.number}"))
        self.left_out[reason] = count + 1, first

    def lines(self, longest: int) -> list[str]:
        """What a report says of them. `longest`: the tokens that a conversation may have."""
        said = [f"{self.cut:,} cut behind the last answer that ends within {longest:,} tokens"] if self.cut else []
        said += [f"{self.truncated:,} truncated to {longest:,} tokens"] if self.truncated else []
        return said + [f"left out {count:,}: {reason} (the first: {escaped(first)[1:-1]})"
                       for reason, (count, first) in self.left_out.items()]


def example(conversation: Conversation, decode: Callable[[list[int]], str], colour: bool) -> list[str]:
    """The conversation in stretches of tokens that are learned and such that are not, a line each."""
    borders = [0, *(np.flatnonzero(np.diff(conversation.learned)) + 1).tolist(), len(conversation.ids)]
    lines = []
    for begin, end in zip(borders, borders[1:]):
        learned = bool(conversation.learned[begin])
        text = f"{'learned' if learned else '':<7}  {shown(decode(conversation.ids[begin:end].tolist()))}"
        lines.append(f"\x1b[32m{text}\x1b[0m" if learned and colour else text)
    return lines
