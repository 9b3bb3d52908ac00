"""train_llama with a GPT-NeoX and a Gemma 3: from a config.json and from a converted checkpoint, and back to transformers."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys

import pytest

from train_runs import (GOLDEN, PROGRAM, ROOT, SECONDS, assert_refused, assert_same_run, end_started, environment,  # noqa: F401
                        losses, np, records, train, write_shard, xxhash)

sys.path.insert(0, str(ROOT / "scripts"))
import checkpoints as ck  # noqa: E402
import tensor_file  # noqa: E402

PARALLEL = GOLDEN / "neox-train.model.bin"
SEQUENTIAL = GOLDEN / "neox-train-sequential-nobias.model.bin"
GEMMA = GOLDEN / "gemma3-train.model.bin"
UNTIED = GOLDEN / "gemma3-train-untied.model.bin"
MODELS = [PARALLEL, SEQUENTIAL, GEMMA, UNTIED]
VOCABULARY = 29  # all of them have it
needs_torch = pytest.mark.skipif(not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
                                 reason="torch or transformers is not installed")


@pytest.fixture(name="shards")
def shards_fixture(tmp_path):
    directory = tmp_path / "shards"
    directory.mkdir()
    for number, count in enumerate((400, 170)):
        write_shard(directory / f"train_{number}.bin", count, 1000 * number, vocabulary=VOCABULARY)
    write_shard(directory / "val_0.bin", 200, 5000, vocabulary=VOCABULARY)
    return directory


def ok(done):
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("more", [(), ("--optimizer", "muon", "--recompute", "block", "--dropout", 0.1, "--virtual-ranks", 2)])
def test_a_run_that_goes_on_is_the_whole_one(shards, tmp_path, model, more):
    options = ("--model", model, *more)
    ok(train(shards, tmp_path / "whole", *options))
    got = losses(tmp_path / "whole")
    assert got[12][0] < 0.97 * got[1][0]
    assert train(shards, tmp_path / "run", *options, "--debug-inject", "kill@step=9").returncode == -signal.SIGKILL
    assert "resuming after step" in ok(train(shards, tmp_path / "run", *options)).stderr
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("model", [PARALLEL, GEMMA])
def test_the_sum_of_ranks_recomputation_and_a_plan_are_those_of_any_model(shards, tmp_path, model):
    ok(train(shards, tmp_path / "none", "--model", model))
    for recompute in ("norm", "block"):
        ok(train(shards, tmp_path / recompute, "--model", model, "--recompute", recompute))
        assert_same_run(tmp_path / recompute, tmp_path / "none")
    planned = ok(train(shards, tmp_path / "planned", "--model", model, "--dry-run")).stdout
    assert "activations (fp32)" in planned and not (tmp_path / "planned").exists()


@pytest.mark.parametrize("config, norm, trains", [(ck.GPT_NEOX, "layernorm", "gpt_neox.layers.1.attention.query_key_value.bias"),
                                                  (ck.GEMMA3, "rmsnorm", "model.layers.1.post_feedforward_layernorm.weight")])
def test_a_config_json_is_trained_and_goes_back(shards, tmp_path, config, norm, trains):
    """Its checkpoint exports to a directory that converts to the same model, and --eval measures the loss that the run had."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(config | {"vocab_size": 64}))
    ok(train(shards, tmp_path / "run", "--model=", "--config", shape, "--val-batches", 0))
    assert losses(tmp_path / "run")[12][0] < losses(tmp_path / "run")[1][0]
    model = tmp_path / "run" / "step_00000012" / "model.bin"
    trained = tensor_file.read(model, expected="model")
    assert (trained.config["model"]["family"], trained.config["model"]["norm"]) == (config["model_type"], norm)
    assert 0 < np.abs(trained.f32(trains)).max() < 0.5  # it began at 0
    done = ck.run_script("export_hf.py", model, "-o", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    again = ck.convert(tmp_path / "exported", tmp_path / "again.bin")
    for name, tensor in trained.tensors.items():
        assert again.at(name).hash == tensor.hash
    last = [record["val_loss"] for record in records(tmp_path / "run") if record.get("val_loss") is not None][-1]
    evaluated = ok(train(shards, tmp_path / "none", "--model", tmp_path / "again.bin", "--eval", "--val-batches", 0))
    assert f"{last:.4f}"[:5] in evaluated.stdout, evaluated.stdout
    if norm == "layernorm":
        assert_refused(train(shards, tmp_path / "x", "--model=", "--config", shape, "--norm", "rmsnorm"), 2, "--norm", "layernorm")


def test_an_adapter_of_a_gemma_is_trained_and_measured_in_its_weights(shards, tmp_path):
    options = ("--model", GEMMA, "--lora-r", 2, "--val-batches", 0)
    ok(train(shards, tmp_path / "none", *options))
    ok(train(shards, tmp_path / "block", *options, "--recompute", "block"))
    assert losses(tmp_path / "block") == losses(tmp_path / "none")
    assert losses(tmp_path / "none")[12][0] < losses(tmp_path / "none")[1][0]
    last = [record["val_loss"] for record in records(tmp_path / "none") if record.get("val_loss") is not None][-1]
    adapter = tmp_path / "none" / "step_00000012" / "adapter.bin"
    evaluated = ok(train(shards, tmp_path / "x", "--model", GEMMA, "--adapter", adapter, "--eval", "--val-batches", 0))
    assert f"{last:.4f}"[:5] in evaluated.stdout, evaluated.stdout


def test_samples_are_what_infer_pythia_writes(tmp_path):
    tokenizer = ROOT / "models" / "tiny-pythia" / "tokenizer.json"
    (tmp_path / "texts").mkdir()
    shutil.copy(tokenizer, tmp_path / "texts")
    vocabulary = 64 + max(json.loads(tokenizer.read_text())["model"]["vocab"].values())
    write_shard(tmp_path / "texts" / "train_0.bin", 500, vocabulary=vocabulary, tokenizer_hash=xxhash.xxh3_64_intdigest(tokenizer.read_bytes()))
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(ck.GPT_NEOX | {"vocab_size": vocabulary}))
    ok(train(tmp_path / "texts", tmp_path / "run", "--model=", "--config", shape, "--val=", "--sample-prompt", "Once", "--sample-every", 12,
             "--temperature", 0, "--sample-tokens", 9))
    samples = [record["text"] for record in records(tmp_path / "run") if record["type"] == "sample"]
    model = tmp_path / "run" / "step_00000012" / "model.bin"
    done = subprocess.run([PROGRAM.parent / "infer_pythia", "--device=cpu", f"--model={model}", "--prompt=Once", "--temperature=0",
                           "--max-tokens=9"], capture_output=True, text=True, env=environment(), timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert len(samples) == 1 and samples[0].startswith("Once") and samples[0].strip() == done.stdout.strip()


@needs_torch
@pytest.mark.parametrize("model", MODELS)
def test_transformers_has_the_logits_of_the_trained_model(shards, tmp_path, model):
    import torch
    import transformers

    ok(train(shards, tmp_path / "run", "--model", model))
    trained = tmp_path / "run" / "step_00000012" / "model.bin"
    done = ck.run_script("export_hf.py", trained, "-o", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    ids = torch.arange(18).reshape(2, 9) * 5 % VOCABULARY
    with torch.no_grad():
        want = theirs(ids, labels=ids).loss.item()
    # A dump is what --compare holds against the file.
    dump = ck.run_script("dump_reference.py", tmp_path / "exported", "-o", tmp_path / "dump.bin", "--random", "2,9", "--backward", "--adamw-steps", 3)
    assert dump.returncode == 0 and want > 0, dump.stderr
    done = train(shards, tmp_path / "none", "--model", trained, "--compare", tmp_path / "dump.bin")
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout + done.stderr


def test_what_it_has_not_is_refused_by_name(shards, tmp_path):
    for model, family in ((PARALLEL, "gpt_neox"), (GEMMA, "gemma3_text")):
        assert_refused(train(shards, tmp_path / "x", "--model", model, "--precision", "fp8"), 2, "--precision: got fp8", family)
    assert_refused(train(shards, tmp_path / "x", "--model", GOLDEN / "neox-tanh-yarn.model.bin"), 3, "GELU by tanh")
