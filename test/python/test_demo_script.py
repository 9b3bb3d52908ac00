"""scripts/run_demo.sh: which commands it runs, where there are only stubs. What they do for real is in test_demo.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORIES = ".venv/bin/python dev/data/make_stories.py -o data/stories"
SHARDS = ("python dev/prepare_data.py data/stories/train.txt --val data/stories/val.txt --tokenizer models/tiny-llama/tokenizer.json "
          "-o data/stories")
CHATS = ["python dev/data/make_chats.py -o data/chats/chats.jsonl",
         "python dev/prepare_data.py --chat data/chats/chats.jsonl --tokenizer models/tiny-llama/tokenizer.json --chat-format "
         "models/tiny-llama/chat_format.json -o data/chats"]
PLOT = "python scripts/plot_log.py runs/demo -o runs/demo/loss.png"


@pytest.fixture
def demo(tmp_path):
    """Runs it from another directory; its result and what was started. The command that `fails` names fails."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "run_demo.sh", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in (".venv/bin/python", "train_llama", "infer_pythia"):
        (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/} $*" >>started\nfor word in $FAILS; do case "$*" in *"$word"*) exit 9;; esac; done\n')
        (tmp_path / name).chmod(0o755)

    def run(*words, **variables):
        (tmp_path / "started").write_text("")
        outside = {name: value for name, value in os.environ.items() if not name.startswith("DEMO_")}
        done = subprocess.run([tmp_path / "scripts" / "run_demo.sh", *words], cwd="/", capture_output=True, text=True, env={**outside, **variables})
        return done, (tmp_path / "started").read_text().splitlines()

    return run


def training(minutes="3", *more):
    return " ".join(["train_llama --config tiny --train data/stories/train_*.bin --val data/stories/val_*.bin --out runs/demo --max-minutes", minutes, *more])


def tuning(model, *options):
    return " ".join([f"train_llama --model runs/demo/{model}/model.bin --train data/chats/train_*.bin --val data/chats/val_*.bin --out runs/demo-chat "
                     "--max-minutes 1", *options])


def test_a_corpus_that_is_there_is_not_made_again_and_the_run_before_goes(demo, tmp_path):
    done, started = demo("train")
    assert done.returncode == 0 and started == [STORIES.removeprefix(".venv/bin/"), SHARDS, training(), PLOT], done
    (tmp_path / "data" / "stories").mkdir(parents=True)
    (tmp_path / "data" / "stories" / "train.txt").touch()
    assert demo("train")[1][:2] == [STORIES.removeprefix(".venv/bin/"), SHARDS], "the text alone is no corpus"
    (tmp_path / "data" / "stories" / "train_00000.bin").touch()
    (tmp_path / "runs" / "demo" / "step_00000400").mkdir(parents=True)
    for kept in ("other", "demo-longer"):
        (tmp_path / "runs" / kept).mkdir()
    done, started = demo("train", DEMO_MINUTES="7", DEMO_TRAIN_OPTIONS="--steps 3  --lr 1")
    assert done.returncode == 0 and started == [training("7", "--steps 3 --lr 1"), PLOT]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"other", "demo-longer"}


@pytest.mark.parametrize("part, fails, left", [("train", "make_stories", 1), ("train", "prepare_data", 2), ("train", "--config", 3), ("train", "plot_log", 4),
                                               ("infer", "convert_hf", 1), ("infer", "--prompt", 2), ("chat", "make_chats", 1), ("chat", "prepare_data", 2),
                                               ("chat", "--model", 3), ("chat", "--temperature", 4)])
def test_a_command_that_fails_ends_it(demo, part, fails, left):
    done, started = demo(part, FAILS=fails)
    assert done.returncode == 9 and len(started) == left and fails in started[-1]


def test_the_newest_checkpoint_is_tuned_and_the_newest_of_these_chats(demo, tmp_path):
    runs = tmp_path / "runs"
    for name in ("step_00000200", "step_00000999", "step_00001000", "step_00000400", "step_1", "step_99999999x", "loss.png"):
        (runs / "demo" / name).mkdir(parents=True)
    assert demo("infer")[1] == ["python scripts/convert_hf.py models/tiny-pythia -o runs/demo/tiny-pythia.bin",
                                "infer_pythia --model runs/demo/tiny-pythia.bin --prompt Once upon a time --max-tokens 160 --temperature 0.7 --seed 1"]
    (runs / "demo-chat" / "step_00000070").mkdir(parents=True)
    (tmp_path / "train_llama").write_text((tmp_path / "train_llama").read_text() + "mkdir -p runs/demo-chat/step_00000030 runs/demo-chat/step_00000060\n")
    done, started = demo("chat")
    assert started == [*CHATS, tuning("step_00001000", "--steps 60 --seq-len 320 --lr 1e-3"),
                       "infer_pythia --model runs/demo-chat/step_00000060/model.bin --chat --temperature 0.5 --seed 1"]
    assert done.returncode == 0 and "  ./infer_pythia --model runs/demo-chat/step_00000060/model.bin --served-name demo --serve 127.0.0.1:8000\n" in done.stdout
    assert "  ./infer_pythia --model runs/demo-chat/step_00000060/model.bin --chat --temperature 0.5\n" in done.stdout
    more = "  ./train_llama --config tiny --train 'data/stories/train_*.bin' --val 'data/stories/val_*.bin' --out runs/demo-longer --steps 800"
    assert more + "\n" in done.stdout
    assert "  .venv/bin/python dev/prepare_data.py my.txt --tokenizer models/tiny-llama/tokenizer.json -o data/mine\n" in done.stdout
    assert ("  ./train_llama --config tiny --train 'data/mine/train_*.bin' --val 'data/mine/val_*.bin' --out runs/mine\n"
            in done.stdout)
    (tmp_path / "data" / "chats").mkdir(parents=True)
    (tmp_path / "data" / "chats" / "train_00000.bin").touch()
    # What stands there already is not proposed again.
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "data" / "mine-2").mkdir()
    said = demo("chat")[0].stdout
    assert "-o data/mine-3\n" in said and "--train 'data/mine-3/train_*.bin' --val 'data/mine-3/val_*.bin' --out runs/mine-3\n" in said
    # What is given for the first training is for both; it goes on with the options that it began with.
    for given, kept, tuned in (("--steps 3  --lr 1 --seq-len 64", " --lr 1 --seq-len 64", "--steps 3 --lr 1 --seq-len 64"),
                               ("--lr 1 --steps=12", " --lr 1", "--seq-len 320 --lr 1 --steps=12"), ("--steps 4", "", "--seq-len 320 --lr 1e-3 --steps 4")):
        done, started = demo("chat", DEMO_TRAIN_OPTIONS=given)
        assert more + kept + "\n" in done.stdout, done.stdout
        assert started[0] == tuning("step_00001000", tuned)
