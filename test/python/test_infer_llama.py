"""infer_pythia on Llama models: PyTorch's dumps, the Llama that comes with weft, and a checkpoint as a run leaves it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("safetensors")
import checkpoints as ck  # noqa: E402
from goldens import GOLDENS, inference_goldens  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("WEFT_BIN_DIR", ROOT))
PROGRAM, TRAIN = BIN / "infer_pythia", BIN / "train_llama"
pytestmark = pytest.mark.skipif(not PROGRAM.exists() or not TRAIN.exists(), reason="the programs are not built")

OK, USAGE, BAD_FILE = 0, 2, 3


def run(program, *arguments, code=OK, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "tiny-llama.bin"
    ck.convert(ROOT / "models/tiny-llama", path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, str]:
    """The model file of a short run, and what the run printed."""
    home = tmp_path_factory.mktemp("run")
    (home / "text.txt").write_text("The hen saw the fox. The fox saw the hen. All of them ran home.\n" * 400)
    run(sys.executable, ROOT / "dev/prepare_data.py", home / "text.txt", "--tokenizer",
        ROOT / "models/tiny-llama/tokenizer.json", "-o", home / "data")
    done = run(TRAIN, "--config", "tiny", "--device", "cpu", "--train", home / "data/train_*.bin", "--val",
               home / "data/val_*.bin", "--out", home / "run", "--steps", 30, "--seq-len", 64, "--micro-batch", 4,
               "--batch-tokens", 256, "--sample-every", 30, "--sample-prompt", "The hen", "--lr", "3e-3")
    return home / "run" / "step_00000030" / "model.bin", done.stdout + done.stderr


@pytest.mark.parametrize("name", inference_goldens())
def test_every_shape_matches_pytorch(name):
    done = run(PROGRAM, "--device", "cpu", "--model", GOLDENS / f"{name}.model.bin", "--compare",
               GOLDENS / f"{name}.dump.bin")
    assert re.search(r"[1-9]\d* tensors, 0 failed", done.stdout), done.stdout


def test_a_dump_in_fp8_is_for_training():
    done = run(PROGRAM, "--device", "cpu", "--model", GOLDENS / "llama-fp8.model.bin", "--compare",
               GOLDENS / "llama-fp8.dump.bin", code=BAD_FILE)
    assert "dump.fp8: this dump is in fp8" in done.stderr and "train_llama --precision fp8" in done.stderr


def test_the_llama_that_comes_with_weft_matches_pytorch(tiny_llama):
    done = run(PROGRAM, "--device", "cpu", "--model", tiny_llama, "--compare", GOLDENS / "tiny-llama.dump.bin")
    assert "greedy.ids" in done.stdout and ", 0 failed" in done.stdout, done.stdout


def test_prompt_and_json(tiny_llama):
    options = ("--device", "cpu", "--model", tiny_llama, "--prompt", "Once upon a time", "-n", 20)
    text = run(PROGRAM, *options, "--no-echo").stdout
    answer = json.loads(run(PROGRAM, *options, "--json").stdout)
    assert answer["text"].strip() == text.strip() and len(answer["ids"]) == 20
    assert answer["device"] == "cpu" and answer["decode"] == "reference" and answer["bytes_per_token"] > 0
    sampled = [json.loads(run(PROGRAM, *options, "--json", "--temperature", 1, "--seed", seed).stdout)["ids"]
               for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_interactive_and_bench(tiny_llama):
    done = run(PROGRAM, "--device", "cpu", "--model", tiny_llama, "--interactive", "-n", 8, input="Once upon\na time\n")
    assert len(done.stdout.split()) > 8
    assert "decode" in run(PROGRAM, "--device", "cpu", "--model", tiny_llama, "--bench", "-n", 4).stdout


BEGIN = 2040  # <|begin_of_text|>, which the tokenizer puts in front of every text


def answer_in_a_batch(options: tuple, home: Path, request: dict) -> dict:
    (home / "in.jsonl").write_text(json.dumps(request) + "\n")
    run(PROGRAM, *options, "--batch", home / "in.jsonl", "--output", home / "out.jsonl")
    return json.loads((home / "out.jsonl").read_text())


def test_a_prompt_begins_with_the_token_that_begins_a_text(tiny_llama, tmp_path):
    options = ("--device", "cpu", "--model", tiny_llama, "-n", 6, "--ignore-eos")
    ids = {text: json.loads(run(PROGRAM, *options, "--prompt", text, "--json").stdout)["prompt_ids"]
           for text in ("Once upon", "\na time")}
    for text, found in ids.items():
        assert found[0] == BEGIN and len(found) > 1 and BEGIN not in found[1:], text
    assert answer_in_a_batch(options, tmp_path, {"id": 1, "prompt": "Once upon"})["prompt_ids"] == ids["Once upon"]
    # An interactive text begins once: what follows is added to it.
    texts, context = [], []
    for added in (ids["Once upon"], ids["\na time"][1:]):
        context += added
        answer = json.loads(run(PROGRAM, *options, "--prompt-ids", ",".join(map(str, context)), "--json").stdout)
        context += answer["ids"]
        texts.append(answer["text"] + "\n")
    assert run(PROGRAM, *options, "--interactive", input="Once upon\na time\n").stdout == "".join(texts)


def test_a_scored_text_begins_once(tiny_llama, tmp_path):
    options = ("--device", "cpu", "--model", tiny_llama)
    text = "Once upon a time"
    (tmp_path / "text.txt").write_text(text)
    prompt = json.loads(run(PROGRAM, *options, "--prompt", text, "-n", 1, "--json").stdout)["prompt_ids"]
    scored = json.loads(run(PROGRAM, *options, "--perplexity", tmp_path / "text.txt", "--json").stdout)
    assert scored["tokens"] == len(prompt) - 1, "every token of the text after the one that begins it"
    answer = answer_in_a_batch(options, tmp_path, {"id": 1, "prompt_ids": prompt, "max_tokens": 1, "echo": True, "logprobs": 0})
    logprobs = [one["logprob"] for one in answer["prompt_logprobs"]]
    assert len(logprobs) == len(prompt) - 1
    assert math.log(scored["perplexity"]) == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-4)


def test_a_checkpoint_runs_as_it_is(checkpoint, tmp_path):
    model, log = checkpoint
    done = run(PROGRAM, "--device", "cpu", "--model", model, "--prompt", "The hen", "-n", 12, "--no-echo")
    assert "hen" in done.stdout or "fox" in done.stdout, done.stdout
    # Its perplexity on the text that it has learned is about what the run says of its loss.
    text = tmp_path / "text.txt"
    text.write_text("The hen saw the fox. The fox saw the hen. All of them ran home.\n" * 20)
    result = json.loads(run(PROGRAM, "--device", "cpu", "--model", model, "--perplexity", text, "--json").stdout)
    loss = float(re.findall(r"val(?:idation)? loss (\d+\.\d+)", log)[-1])
    assert abs(math.log(result["perplexity"]) - loss) < 0.5, (result, loss)
