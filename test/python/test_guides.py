"""The commands of the guides in doc/, run one after the other by a shell as they stand, with fewer steps and a small text."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("tokenizers")

from printed_commands import PROGRAMS, ROOT, make_checkout  # noqa: E402

GUIDES = ("own_tokenizer", "evaluation", "fine_tuning", "memory")  # in the order in which one uses what another made
STEPS = 50  # a run of the guides, divided by this
NOT_RUN = {"memory": "plans for a GPU, and writes doc/memory.md: test_memory_table.py"}


def blocks(guide: str) -> list[str]:
    """Indented commands; those of one block belong together, as a shell reads them."""
    text = (ROOT / "doc" / f"{guide}.md").read_text(encoding="utf-8")
    return [re.sub(r"^ {4}", "", block, flags=re.M) for block in re.findall(r"(?:^ {4}.*\n)+", text, re.M)]


def shorter(block: str) -> str:
    """The same commands with a fiftieth of the steps. Those that count epochs, of a few lines, are as long as they are."""
    block = re.sub(r"(--(?:steps|sample-every|save-every|val-every|warmup-steps)) (\d+)", lambda m: f"{m[1]} {int(m[2]) // STEPS}", block)
    return re.sub(r"(?<!runs/chat/)(?<!runs/lora/)step_(\d{8})", lambda m: f"step_{max(int(m[1]) // STEPS, 1):08}", block)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory like a checkout, with a text of one's own."""
    place = make_checkout(tmp_path_factory.mktemp("checkout"), ("scripts", "dev", "models", "test", "doc"))
    subprocess.run([sys.executable, ROOT / "dev/data/make_stories.py", "-o", place / "stories", "--stories", "250"], check=True,
                   capture_output=True)
    (place / "stories" / "train.txt").rename(place / "my.txt")
    conversations, pairs = re.findall(r"^```json\n(.*?)^```", (ROOT / "doc/fine_tuning.md").read_text(encoding="utf-8"), re.M | re.S)
    (place / "chats.jsonl").write_text(conversations, encoding="utf-8")
    (place / "pairs.jsonl").write_text(pairs, encoding="utf-8")
    return place


def test_the_commands_of_the_guides_work(place):
    if not all((PROGRAMS / name).exists() for name in ("train_llama", "infer_pythia")):
        pytest.skip("the programs are not built")
    ran = answers = 0
    for guide in GUIDES:
        for block in blocks(guide) if guide not in NOT_RUN else ():
            if "plot_log.py" in block and subprocess.run([sys.executable, "-c", "import matplotlib"], capture_output=True).returncode:
                continue
            done = subprocess.run(["bash", "-ec", shorter(block)], cwd=place, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (guide, block, done.stdout, done.stderr)
            if "Who lives in the hut?" in block:
                assert done.stdout.endswith("An old fox.\n"), "what the guide says, of all weights and of an adapter"
                answers += 1
            ran += 1
    assert ran >= 15 and answers == 2
    assert (place / "exported" / "tokenizer.json").exists() and (place / "tuned" / "model.safetensors").exists()
    assert {path.name for path in (place / "runs" / "own").glob("step_*")} >= {"step_00000003", "step_00000004"}
    assert {path.name for path in (place / "runs" / "chat").glob("step_*")} == {"step_00000020"}, "two conversations in one row, twenty times"


def test_steps_are_fewer_everywhere():
    """A run that kept all of its steps would take minutes."""
    long = [command for guide in GUIDES if guide not in NOT_RUN for command in map(shlex.split, re.findall(
        r"^\./train_llama .*--out.*$", "\n".join(map(shorter, blocks(guide))), re.M))
            if "--epochs" not in command and int(command[command.index("--steps") + 1]) > 4]
    assert not long
