"""dev/bench/needle.py: every question has its answer in the haystack, the answers alone are learned, a model goes on from length to
length, and each length that is asked for has a table."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "bench"))
import needle  # noqa: E402

from token_shard import TokenShard  # noqa: E402


def test_each_question_is_about_a_fact_of_the_haystack(tmp_path):
    for length in (128, 1000):
        made = needle.documents(np.random.default_rng(3), length, 2)
        ids, end = made.ids[1], needle.haystack_end(length)
        assert ids.size == length + 1 and ids.max() < needle.VOCABULARY and ids[0] == needle.START
        assert (ids[1:end] >= needle.FIRST_FACT).all()
        keys = [(int(ids[place]) - needle.FIRST_FACT) // needle.VALUES for place in made.places[1]]
        assert keys == (ids[end::2] - needle.FIRST_KEY).tolist()
        facts = ids[:end][(ids[:end] >= needle.FIRST_FACT) & (ids[:end] < needle.FIRST_WORD)] - needle.FIRST_FACT
        answers = {needle.FIRST_KEY + int(fact) // needle.VALUES: needle.FIRST_VALUE + int(fact) % needle.VALUES for fact in facts}
        questions = ids[end:].reshape(-1, 2)
        assert len(answers) == needle.FACTS and {int(key): int(value) for key, value in questions} == answers
        needle.write_shard(tmp_path / "shard.bin", np.random.default_rng(3), length, 2)
        shard = TokenShard(tmp_path / "shard.bin")
        assert (shard.tokens == made.ids.ravel()).all()
        learned = np.flatnonzero(shard.learned()[length + 1:])
        assert (ids[learned] == questions[:, 1]).all()


def test_lengths_of_training_grow_to_those_that_are_asked_for():
    def stages(first, *lengths):
        return needle.stages(argparse.Namespace(first=first, lengths=lengths))

    assert stages(128, 128) == [128]
    assert stages(128, 8192, 4096) == [128, 512, 2048, 4096, 8192]
    assert stages(256, 4096) == [256, 1024, 4096]


@pytest.mark.skipif(not (ROOT / "train_llama").exists() or not (ROOT / "infer_pythia").exists(), reason="not built")
def test_a_model_that_has_learnt_nothing_is_no_witness(tmp_path):
    def run(*options):
        return subprocess.run([sys.executable, ROOT / "dev" / "bench" / "needle.py", "--lengths", "256", "128", "--trials", "2",
                               "--device", "cpu", *options], capture_output=True, text=True)

    done = run("--steps", "2", "--more-steps", "1", "--batch-tokens", "512", "--keep", tmp_path / "model.bin")
    assert done.returncode == 1, done.stderr
    said = [line.split(", ")[0] for line in done.stderr.splitlines()]
    assert said == ["length 128: 2 steps of 4 documents", "length 128: answers with auto", "length 128: answers with fp8",
                    "length 256: 1 steps of 2 documents", "length 256: answers with auto", "length 256: answers with fp8"]
    lines = done.stdout.splitlines()
    for table, length in ((lines[:7], 128), (lines[7:], 256)):
        assert table[0].startswith(f"| length {length} | part 1 of 4 |")
        assert table[2].startswith("| auto |") and table[3].startswith("| fp8 |") and table[3].endswith(" of 8 |")
        assert table[5].startswith("other answers with fp8: ")
    again = run("--model", tmp_path / "model.bin")
    assert "steps of" not in again.stderr and again.stdout.splitlines()[7:] == lines[7:]
