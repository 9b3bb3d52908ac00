"""Shards of conversations for the tests of programs that train on them."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import token_shard  # noqa: E402


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
