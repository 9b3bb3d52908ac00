"""Shards of conversations for the tests of programs that train on them."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import token_shard  # noqa: E402


def write_pairs(directory, vocabulary, tokenizer_hash, counts=(14, 9)):
    """Pairs of answers of 1 to 10 tokens to prompts of 1 to 6; some do not fit into a row of 24."""
    directory.mkdir()
    generator = np.random.default_rng(9)
    for number, pairs in enumerate(counts):
        writer = token_shard.ShardWriter(directory / f"train_{number}.bin", vocabulary, tokenizer_hash)
        for _ in range(pairs):
            prompt = generator.integers(0, vocabulary, int(generator.integers(1, 7)))
            answers = [generator.integers(0, vocabulary, int(generator.integers(1, 11))) for _ in range(2)]
            writer.write_pair(*((np.concatenate([prompt, answer]), np.arange(prompt.size + answer.size) >= prompt.size) for answer in answers))
        writer.close()
    return directory


def write_conversations(directory, vocabulary, tokenizer_hash):
    """Conversations of 2 to 20 tokens, of which answers of very different lengths are learned; some are longer than a row of 16."""
    directory.mkdir()
    generator = np.random.default_rng(8)
    for number, documents in enumerate((30, 11)):
        writer = token_shard.ShardWriter(directory / f"train_{number}.bin", vocabulary, tokenizer_hash)
        for _ in range(documents):
            length = int(generator.integers(2, 21))
            writer.write_document(generator.integers(0, vocabulary, length), generator.random(length) < generator.choice([0.05, 0.9]))
        writer.close()
    return directory
