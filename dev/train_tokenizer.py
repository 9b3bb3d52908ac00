#!/usr/bin/env python3
"""Trains a BPE tokenizer on one's own text and writes it as tokenizer.json, for dev/prepare_data.py and train_llama.

    .venv/bin/python dev/train_tokenizer.py my.txt --vocab-size 2048 -o tokenizer.json

It is byte-level and of Llama 3's kind: its pattern, its special tokens. With --style sentencepiece it is of the kind of Llama 2,
TinyLlama and Mistral: pieces of words with their space in front, and tokens of bytes for rare characters. Either encodes any
text. Documents are divided by lines that hold only <|endoftext|>. A model of train_llama needs a row for each token: --config tiny has 2048. Exit codes: 2 usage, 3 bad input
file, 4 cannot write, 5 disk or memory full.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "dev" / "data")]
import needs  # noqa: E402, before the packages

os.environ["TOKENIZERS_PARALLELISM"] = "true"
import command_line  # noqa: E402

import cli  # noqa: E402
from tensor_file import BAD_FILE, AtomicFile, FileError  # noqa: E402

LEAST, MOST = 256 + 64, 1_000_000  # every byte, the special tokens, some merges


def styles() -> Any:
    """dev/data/train_tokenizer.py, which trains the project's own tokenizers and has this file's name."""
    spec = importlib.util.spec_from_file_location("tokenizer_styles", ROOT / "dev" / "data" / "train_tokenizer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments() -> argparse.Namespace:
    parser = cli.Parser(prog="train_tokenizer.py", description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="UTF-8 text")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument("--vocab-size", type=cli.number_in(LEAST, MOST, int), default=2048, metavar="N",
                        help=f"tokens in all, from {LEAST} (default 2048)")
    parser.add_argument("--style", choices=("llama3", "sentencepiece"), default="llama3", help="its kind (default llama3)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    with AtomicFile(options.output) as output:  # before the work, so that a name that cannot be written is refused at once
        try:
            kinds = styles()
            tokenizer = kinds.STYLES[options.style](command_line.read_stories(options.texts), options.vocab_size)
        except command_line.InputError as problem:
            raise FileError(BAD_FILE, str(problem)) from None
        output.write(kinds.to_json(tokenizer, options.style).encode("utf-8"))
    print(f"{cli.shown(str(options.output))}: {tokenizer.get_vocab_size():,} tokens")
    texts = " ".join(cli.pasteable(path) for path in options.texts)
    print(f"next        {needs.command('dev/prepare_data.py')} {texts} --tokenizer {cli.pasteable(options.output)} -o data/mine")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
