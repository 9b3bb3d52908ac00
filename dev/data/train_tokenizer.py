#!/usr/bin/env python3
"""Trains a BPE tokenizer and writes it as a Hugging Face tokenizer.json.

  neox    as GPT-NeoX-20B and Pythia: NFC, GPT-2 pattern, <|endoftext|> = 0, <|padding|> = 1, runs of 24 … 2 spaces as
          added tokens at the end of the vocabulary, merges written as strings
  llama3  as Llama 3: no normalizer, the Llama 3 pattern, ignore_merges, special tokens at the end of the vocabulary,
          a post-processor that puts <|begin_of_text|> first, merges written as pairs
  sentencepiece
          as Llama 2, TinyLlama and Mistral: <unk>, <s>, </s>, a token for each byte, then pieces of words with ▁ for the
          space in front; characters without a token become bytes, and <s> is put first
"""

import argparse
import json
import os
import sys
from pathlib import Path

from command_line import EXIT_BAD_INPUT, EXIT_DISK, SEPARATOR, InputError, Parser, read_stories, whole_number, write_atomically

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BYTES = 256

NEOX_SPECIAL = ["<|endoftext|>", "<|padding|>"]
SPACE_RUNS = range(24, 1, -1)
LLAMA_BOS, LLAMA_EOS = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA_SPECIAL = [LLAMA_BOS, LLAMA_EOS] + [f"<|reserved_special_token_{i}|>" for i in range(6)]
SENTENCEPIECE_SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bpe_trainer(size: int, special: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )


def check_size(tokenizer: Tokenizer, size: int) -> None:
    if tokenizer.get_vocab_size() != size:
        raise InputError(f"the text yields {tokenizer.get_vocab_size()} tokens, fewer than the {size} asked for: give more text")


def train_neox(stories: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(stories, bpe_trainer(size - len(SPACE_RUNS), NEOX_SPECIAL))
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True, special=False) for count in SPACE_RUNS])
    check_size(tokenizer, size)
    return tokenizer


def train_llama3(stories: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(stories, bpe_trainer(size - len(LLAMA_SPECIAL), []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in LLAMA_SPECIAL])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True),
            processors.TemplateProcessing(
                single=f"{LLAMA_BOS} $A",
                pair=f"{LLAMA_BOS} $A {LLAMA_BOS}:1 $B:1",
                special_tokens=[(LLAMA_BOS, tokenizer.token_to_id(LLAMA_BOS))],
            ),
        ]
    )
    check_size(tokenizer, size)
    return tokenizer


def train_sentencepiece(stories: list[str], size: int) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=SENTENCEPIECE_SPECIAL + [f"<0x{byte:02X}>" for byte in range(BYTES)],
        limit_alphabet=(size - BYTES - len(SENTENCEPIECE_SPECIAL)) // 2,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)  # while training: words end at spaces
    tokenizer.train_from_iterator((line for story in stories for line in story.split("\n") if line), trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:len(SENTENCEPIECE_SPECIAL)]  # bytes are none
    content["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    check_size(tokenizer, size)
    return tokenizer


STYLES = {"neox": train_neox, "llama3": train_llama3, "sentencepiece": train_sentencepiece}


def to_json(tokenizer: Tokenizer, style: str) -> str:
    content = json.loads(tokenizer.to_str())
    if style == "neox":
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    return json.dumps(content, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Train a BPE tokenizer on text files and write tokenizer.json.",
                    epilog=f"Texts are split into documents at {SEPARATOR}.")
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="UTF-8 text file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="tokenizer.json to write")
    parser.add_argument("--style", choices=sorted(STYLES), required=True, help="which family's rules to follow")
    parser.add_argument("--vocab-size", type=whole_number(BYTES + 64, 65536), default=2048, metavar="N",
                        help="tokens in all, special and added ones included (default 2048)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        tokenizer = STYLES[options.style](read_stories(options.texts), options.vocab_size)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output, to_json(tokenizer, options.style))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return EXIT_DISK
    print(f"{options.output}: {tokenizer.get_vocab_size()} tokens, style {options.style}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
