"""Turns sentence templates into English.

A template is plain text with three marks:
    [one|two|]      one of the alternatives, which may be empty and may nest
    {slot} {slot.form} {Slot}   the value of a slot, one of its forms, or the value with a capital letter;
                    someone the reader has not met yet is introduced ("an old owl") and then called by name ("the owl")
    a(n)            "a" or "an", whichever the next word needs; {a slot} is short for a(n) {slot}
"""

import re
from dataclasses import dataclass

from .random_source import RandomSource

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(a )?(\w+)(?:\.(\w+))?\}")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (\w+)")
_SENTENCE_START = re.compile(r'(^"?|[.!?] "?|\." )([a-z])')
_MAX_DEPTH = 6

_PRONOUNS = {
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself", "child": "boy", "son": "son"},
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself", "child": "girl", "son": "daughter"},
}


@dataclass(frozen=True)
class Person:
    """Someone in a story, human or animal. `name` is how the text calls them, `intro` how they first appear."""

    name: str
    gender: str  # "he" or "she"
    kind: str  # girl, boy, fox, grandmother, ...
    look: str = ""
    intro: str = ""
    trait: str = ""
    habit: str = ""

    def form(self, name: str) -> str:
        lower = name.lower()
        if lower in _PRONOUNS[self.gender]:
            text = _PRONOUNS[self.gender][lower]
            return text.capitalize() if name[0].isupper() else text
        if lower == "the":
            return f"{name} {self.look} {self.kind}".replace("  ", " ")
        return getattr(self, name)


@dataclass(frozen=True)
class Thing:
    """An object: `noun` alone, `adjective` + noun as its full name, and sentences about its use."""

    noun: str
    adjective: str
    use: str  # infinitive clause without "to", with "it" for the object
    joy: str  # a sentence about what the hero likes to do with it

    def form(self, name: str) -> str:
        return getattr(self, name)


Value = str | Person | Thing


class Facts(dict[str, Value]):
    """The slots of one story, and which of its people the reader has met."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()


class TemplateError(Exception):
    """A template names a slot or form that does not exist."""


def _text_of(name: str, form: str | None, facts: Facts) -> str:
    value = facts[name]
    if isinstance(value, str):
        if form:
            raise TemplateError(f"the text slot '{name}' has no form '{form}'")
        return value
    if isinstance(value, Thing):
        return value.form(form) if form else f"{value.adjective} {value.noun}"
    if form is None and name not in facts.met and value.intro:
        form = "intro"
    if form == "intro":
        facts.met.add(name)
    return value.form(form) if form else value.name


def _fill(match: re.Match[str], facts: Facts) -> str:
    article, name, form = match.groups()
    lower = name[0].lower() + name[1:]
    if lower not in facts:
        raise TemplateError(f"no slot named '{name}'")
    text = _text_of(lower, form, facts)
    if name != lower:
        text = text[0].upper() + text[1:]
    return f"a(n) {text}" if article else text


def _article(match: re.Match[str]) -> str:
    letter, word = match.groups()
    lower = word.lower()
    silent_h = lower.startswith(("hour", "honest"))
    consonant_sound = lower.startswith(("one", "use", "unicorn", "uni"))
    vowel = silent_h or (lower[0] in "aeiou" and not consonant_sound)
    return f"{letter}{'n' if vowel else ''} {word}"


def expand_phrase(template: str, facts: Facts, random: RandomSource) -> str:
    """One English phrase for `template`; raises TemplateError when a mark cannot be resolved."""
    text = template
    for _ in range(_MAX_DEPTH):
        while "[" in text:
            text, count = _CHOICE.subn(lambda match: random.pick(match.group(1).split("|")), text)
            if count == 0:
                raise TemplateError(f"unbalanced brackets in: {template}")
        if "{" not in text:
            break
        text = _SLOT.sub(lambda match: _fill(match, facts), text)
    text = _ARTICLE.sub(_article, re.sub(r" {2,}", " ", text).strip())
    text = re.sub(r" ([,.!?])", r"\1", text)
    if re.search(r"[\[\]{}|]|\(n\)", text):
        raise TemplateError(f"marks left in: {text}")
    return text


def expand(template: str, facts: Facts, random: RandomSource) -> str:
    """Whole sentences: a phrase with a capital letter at every sentence start."""
    text = expand_phrase(template, facts, random)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)
