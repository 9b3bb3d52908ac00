"""dev/bench/tuning_quality.py: a short run on the tiny Llama, and what it says when a program fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)).absolute() / "train_llama"
MODEL = ROOT / "models" / "tiny-llama"

if not PROGRAM.exists():
    pytest.skip(f"{PROGRAM} is not built", allow_module_level=True)


def measure(chats, *more):
    return subprocess.run([sys.executable, ROOT / "dev/bench/tuning_quality.py", MODEL, chats, "--binary", PROGRAM, "--device=cpu", *map(str, more)],
                          capture_output=True, text=True, timeout=600)


@pytest.fixture(name="chats", scope="module")
def chats_fixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("tuning") / "chats.jsonl"
    subprocess.run([sys.executable, ROOT / "dev/data/make_chats.py", "-o", path, "--chats", "60"], check=True)
    return path


def test_each_way_learns_the_answers(chats, tmp_path):
    done = measure(chats, "--chat-format", MODEL / "chat_format.json", "--epochs=1", "--rank=4", "--seq-len=128", "--keep", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    table = {name: (float(trained.split()[0]), float(before), float(after)) for name, trained, before, after in lines[2:]}
    assert list(table) == ["all weights", "LoRA", "QLoRA, int8", "QLoRA, int4", "QLoRA, fp8"]
    assert all(after < before for _, before, after in table.values())
    assert table["LoRA"][1] == table["all weights"][1], "a new adapter changes nothing"
    assert len({before for _, before, _ in table.values()}) == 4, "each format has values of its own"
    assert len({after for _, _, after in table.values()}) == 5
    assert table["LoRA"][0] == table["QLoRA, int4"][0] < table["all weights"][0] / 10
    settings = {name: json.loads((tmp_path / "kept" / name / "config.json").read_text())["settings"] for name in ("all-weights", "LoRA", "QLoRA-int4")}
    assert settings["LoRA"]["lr"] == settings["QLoRA-int4"]["lr"] != settings["all-weights"]["lr"]
    assert settings["QLoRA-int4"]["model"].endswith("int4.bin") and settings["QLoRA-int4"]["lora-r"] == "4"
    assert len({settings[name]["steps"] for name in settings}) == 1


def test_a_program_that_fails_is_named(chats):
    done = measure(chats)
    assert done.returncode == 1 and done.stderr.startswith("tuning_quality: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "chat_format" in done.stderr
