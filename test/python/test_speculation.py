"""--lookup and --draft of infer_pythia: the output is that of a run without them, however it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("safetensors")

import checkpoints as ck  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "infer_pythia"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

OK, USAGE = 0, 2


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {name: folder / f"{name}.bin" for name in ("tiny-llama", "tiny-pythia")}
    for name, path in paths.items():
        ck.convert(ROOT / "models" / name, path)
    return paths


def run(model: Path, *arguments, code: int = OK, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([str(PROGRAM), "--device", "cpu", "--model", str(model), *map(str, arguments)],
                          capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == code, done.stderr
    return done


def drafts_of(model: Path) -> list[list[str]]:
    return [["--lookup", "7"], ["--draft", str(model)]]


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--seed", "3"], ["--stop", "the", "--max-tokens", "90"]])
def test_a_text_is_the_plain_one(models, options):
    for model in models.values():
        asked = ["--prompt", "The hen and the dog and the hen", "--max-tokens", 60, "--ignore-eos", "--json"]
        if "--max-tokens" in options:
            asked[2:4] = []
        plain = json.loads(run(model, *asked, *options).stdout)
        assert "drafts" not in plain
        for drafts in drafts_of(model):
            got = json.loads(run(model, *asked, *options, *drafts).stdout)
            for field in ("prompt_ids", "ids", "text", "finish_reason"):
                assert got[field] == plain[field], (drafts, field)
            counts = got["drafts"]
            assert 0 <= counts["accepted"] <= counts["drafted"]
            # A draft model as dear as the model is only tried now and then.
            if drafts[0] == "--draft" and len(got["ids"]) > 40:
                assert counts["accepted"] > 0 and counts["tokens_per_step"] > 1


def test_a_growing_text_and_a_file_of_requests_are_the_plain_ones(models, tmp_path):
    model = models["tiny-pythia"]
    lines = "The hen\nOnce upon a time\nand the hen\n"
    requests = tmp_path / "in"
    requests.write_text("".join(json.dumps({"id": i, "prompt": f"The hen {i} and the hen {i % 3}", "max_tokens": 20 + i,
                                            "temperature": i % 2 * 0.9, "seed": i, "ignore_eos": True}) + "\n" for i in range(8)))

    def answers(*drafts) -> tuple[str, dict]:
        output = tmp_path / "_".join(["out", *(Path(word).name for word in drafts)])
        done = run(model, "--batch", requests, "--output", output, *drafts)
        assert ("drafted accepted" in done.stderr) == bool(drafts)
        text = run(model, "--interactive", "--max-tokens", 20, "--ignore-eos", *drafts, input=lines).stdout
        return text, {line["id"]: line for line in map(json.loads, output.read_text().splitlines())}

    plain = answers()
    for drafts in drafts_of(model):
        assert answers(*drafts) == plain, drafts


def test_the_statistics_say_what_drafts_brought(models):
    done = run(models["tiny-pythia"], "--prompt", "The hen", "--max-tokens", 30, "--ignore-eos", "--stats", "--draft",
               models["tiny-pythia"])
    assert " tokens a step, " in done.stderr and " drafted accepted" in done.stderr


def test_a_quantised_draft_is_said_to_be_one(models, tmp_path):
    target = tmp_path / "draft.bin"
    ck.convert(ROOT / "models/tiny-pythia", target, "--quantize", "int8")
    requests = tmp_path / "in"
    requests.write_text('{"id": 1, "prompt": "The hen", "max_tokens": 2}\n')
    for words in (["--prompt", "The hen", "--max-tokens", 4], ["--batch", requests, "--output", tmp_path / "out"]):
        log = run(models["tiny-pythia"], *words, "--draft", target).stderr
        [line] = [line for line in log.splitlines() if "draft.bin" in line]
        assert "parameters from f16, weights int8; " in line and " for drafts" in line


def test_a_draft_model_of_another_tokenizer_is_refused(models):
    done = run(models["tiny-pythia"], "--prompt", "The hen", "--draft", models["tiny-llama"], code=USAGE)
    assert "--draft: " in done.stderr and "It needs the tokenizer of" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_benchmark_takes_an_acceptance(models):
    done = run(models["tiny-pythia"], "--bench", "--max-tokens", 60, "--draft", models["tiny-pythia"], "--json", "--debug-inject",
               "accept=0.5")
    counts = json.loads(done.stdout)["drafts"]
    assert 0 < counts["accepted"] < counts["drafted"]
