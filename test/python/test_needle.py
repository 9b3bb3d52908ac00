"""dev/bench/needle.py: every question has its answer in the haystack, the answers alone are learned, and a run ends with a table."""

from __future__ import annotations

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
        ids = needle.document(np.random.default_rng(3), length).ids
        end = length + 1 - 2 * needle.FACTS
        assert ids.size == length + 1 and ids.max() < needle.VOCABULARY and ids[0] == needle.START
        assert (ids[1:end] >= needle.FIRST_FACT).all()
        facts = ids[:end][(ids[:end] >= needle.FIRST_FACT) & (ids[:end] < needle.FIRST_WORD)] - needle.FIRST_FACT
        answers = {needle.FIRST_KEY + int(fact) // needle.VALUES: needle.FIRST_VALUE + int(fact) % needle.VALUES for fact in facts}
        questions = ids[end:].reshape(-1, 2)
        assert len(answers) == needle.FACTS and {int(key): int(value) for key, value in questions} == answers
        needle.write_shard(tmp_path / "shard.bin", np.random.default_rng(3), length, 2)
        shard = TokenShard(tmp_path / "shard.bin")
        assert (shard.tokens[:length + 1] == ids).all()
        learned = np.flatnonzero(shard.learned()[:length + 1])
        assert (ids[learned] == questions[:, 1]).all()


@pytest.mark.skipif(not (ROOT / "train_llama").exists() or not (ROOT / "infer_pythia").exists(), reason="not built")
def test_a_model_that_has_learnt_nothing_is_no_witness():
    done = subprocess.run([sys.executable, ROOT / "dev" / "bench" / "needle.py", "--length", "128", "--steps", "2", "--batch", "2",
                           "--trials", "5", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| length 128 | part 1 of 4 |") and lines[2].startswith("| auto |") and lines[3].startswith("| fp8 |")
    assert lines[3].endswith(" of 5 |") and lines[5].startswith("other answers with fp8: ")
