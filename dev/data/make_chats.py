#!/usr/bin/env python3
"""Writes small conversations about the stories of make_stories.py, for dev/prepare_data.py --chat.

A user asks for a story about somebody, how it goes on and ends, who it is about; the assistant answers in the words of the
story. Conversation number i is about story number i of the same seed, and is the same on every machine. Needs nothing but the
Python standard library.
"""

import argparse
import json
import sys
from pathlib import Path

from command_line import EXIT_DISK, Parser, whole_number, write_atomically
from storybook.language import expand
from storybook.plots import make_story
from storybook.random_source import RandomSource

FIRST_STREAM = 1 << 63  # behind the streams of the stories themselves

SYSTEM = "You tell [short|little] stories."
ASK = ("[Please tell|Tell] me a story about {hero}, a(n) {hero.trait} {hero.kind} who lived {home}.",
       "[Please tell|Tell] me a story about a(n) {hero.trait} {hero.kind} named {hero}.",
       "Can you tell me a story about {hero} the {hero.kind}?",
       "[I would like|I want] a story about {hero}, who lived {home}.",
       "[Please tell|Tell] me a story about {hero} and {place}.")
GO_ON = "[What happened then?|What happened next?|And then?|Go on.]"
ENDING = "[How does it end?|How did it end?|Tell me the ending.]"
# What can be asked about every story, with the answer.
QUESTIONS = (("Who [is|was] the story about?", "It was about {hero}, a(n) {hero.trait} {hero.kind}."),
             ("Where did {hero} live?", "{hero} lived {home}."))


def converse(seed: int, index: int) -> list[dict[str, str]]:
    """Conversation number `index` of the seed, as messages."""
    random, story = RandomSource(seed, FIRST_STREAM + index), make_story(seed, index)
    paragraphs = story.paragraphs()

    def said(template: str) -> str:
        return expand(template, story.slots, random)

    asks = [ask for ask in ASK if "{place}" not in ask or str(story.slots["place"]) in story.text()]
    texts = [said(random.pick(asks)), paragraphs[0]]
    if random.chance(20):
        texts += map(said, random.pick(QUESTIONS))
    if random.chance(70):
        for paragraph in paragraphs[1:-1]:
            texts += [said(GO_ON), paragraph]
    texts += [said(ENDING), paragraphs[-1]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": said(SYSTEM)}, *messages] if random.chance(10) else messages


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Write conversations about generated stories.",
                    epilog='Format: JSON lines, {"messages": [{"role": ..., "content": ...}, ...]}.')
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write; its directory is made if absent")
    parser.add_argument("--chats", type=whole_number(1, 10_000_000), default=3000, metavar="N", help="conversations (default 3000)")
    parser.add_argument("--seed", type=whole_number(0, 2**64 - 1), default=1, metavar="S", help="that of the stories (default 1)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    lines = [json.dumps({"messages": converse(options.seed, index)}) + "\n" for index in range(options.chats)]
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output, "".join(lines))
    except OSError as error:
        print(f"error: cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return EXIT_DISK
    print(f"{options.output}: {options.chats} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
