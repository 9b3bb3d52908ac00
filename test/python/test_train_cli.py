"""train_llama as its users meet it: options, exit codes, one-line errors, run directories, signals, kills and resume."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest

from train_runs import (GOLDEN, MODEL, SECONDS, SEED, VOCABULARY, arguments, assert_refused, assert_same_run, checkpoints, environment,
                        has_checkpoint, losses, make_texts, np, preload, records, run_program, start, state_bytes, token_shard, train, wait_for,
                        write_shard, xxhash)
from train_runs import data_fixture, end_started, whole_fixture  # noqa: F401, pytest finds them here

import tensor_file
from conversation_shards import write_conversations


# ---- command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, words", [  # one of each kind: options_test.cpp has the limits and combinations of all
    (["--microbatch", "3"], ["--microbatch", "--micro-batch"]),
    (["--lr", "abc"], ["--lr", "'abc'", "10"]),
    (["--config", "huge"], ["--config", "tiny", "llama3.2-1b"]),
    (["--seq-len", "600"], ["--seq-len", "512"]),
    (["--precision", "bf16", "--device", "cpu"], ["--precision"]),
    (["--keep-best"], ["--keep-best", "--val"]),
    (["--optimizer", "none"], ["--optimizer", "adamw", "muon"]),
    (["--muon-lr", "0.1"], ["--muon-lr", "--optimizer muon"]),
    (["--gpu-memory", "80", "--dry-run"], ["--gpu-memory", "80GB"]),
    (["--vocab-size", "63", "--seq-len", "16"], ["--vocab-size", "64"]),
    (["--steps", "1000000000000", "--micro-batch", "1000000"], ["--steps", "tokens"]),
])
def test_usage_errors_name_option_and_range(data, tmp_path, options, words):
    config = [] if "--config" in options else ["--config", "tiny"]
    done = run_program(*config, "--train", data / "train_*.bin", "--out", tmp_path / "run", *options)
    assert_refused(done, 2, *words)
    assert not (tmp_path / "run").exists()


def test_help_and_version(tmp_path):
    done = run_program("--help")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("--config", "--grad-clip", "default 2", "--help-all", "Exit codes"):
        assert word in done.stdout
    assert "--debug-inject" not in done.stdout and "nan@step=N" in run_program("--help-all").stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    done = run_program("--version")
    assert done.returncode == 0 and done.stdout.startswith("train_llama ")


def settings_of(*options):
    done = run_program("--device", "cpu", "--print-config", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["settings"]


@pytest.mark.parametrize("config, rate", [("tiny", 3e-3), ("llama3.1-8b", 1.2e-4)])
def test_the_learning_rate_follows_the_size_of_the_model(config, rate):
    assert float(settings_of("--config", config)["lr"]) == rate
    assert float(settings_of("--config", config, "--lr", 0)["lr"]) == 0, "an --lr that is given counts"


def test_weights_that_are_there_get_a_tenth_of_the_learning_rate(data, tmp_path):
    assert float(settings_of("--model", MODEL, "--seq-len", 16)["lr"]) == 3e-4
    assert train(data, tmp_path / "run", "--lr", "3e-4", steps=2).returncode == 0
    command = arguments(data, tmp_path / "run", steps=3)
    place = command.index("--lr")
    del command[place:place + 2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment())
    assert done.returncode == 0 and "resuming after step 2 of 3" in done.stderr, done.stderr
    assert records(tmp_path / "run")[0]["settings"]["lr"] == "3e-04"
    header = [record for record in records(tmp_path / "run") if record["type"] == "header"][-1]
    assert float(header["settings"]["lr"]) == 3e-4, "the rate that the run has, not a placeholder"


def test_the_header_of_the_log_names_the_shards_of_each_option(data, tmp_path):
    assert train(data, tmp_path / "run", steps=2).returncode == 0
    header = records(tmp_path / "run")[0]
    for option in ("train", "val"):
        shards = sorted(data.glob(f"{option}_*.bin"))
        assert shards and [shard["name"] for shard in header[option]] == [shard.name for shard in shards]
        for entry, shard in zip(header[option], shards):
            assert entry["tokens"] == (shard.stat().st_size - 256) // 2
            assert entry["xxh3"] == f"{xxhash.xxh3_64_intdigest(shard.read_bytes()[:256]):016x}"


@pytest.mark.skipif("CUDA" in run_program("--version").stdout and shutil.which("nvidia-smi") is not None,
                    reason="this machine may have a GPU")
def test_a_gpu_that_is_not_there_is_exit_4(data, tmp_path):
    assert_refused(train(data, tmp_path / "run", "--device", "cuda"), 4, "--device cuda", "--device cpu needs no GPU")
    planned = train(data, tmp_path / "run", "--device", "cuda", "--dry-run")
    if "CUDA" in run_program("--version").stdout:
        assert planned.returncode == 0 and "memory on cuda" in planned.stdout
    else:
        assert_refused(planned, 4, "--device cuda", "built without nvcc")
    done = train(data, tmp_path / "run")
    assert done.returncode == 0 and "running on the CPU: " in done.stderr and "--device" not in done.stderr


def test_dry_run_checks_everything_and_writes_nothing(data, tmp_path):
    done = train(data, tmp_path / "run", "--dry-run")
    assert done.returncode == 0, done.stderr
    for word in ("lr ", "parameters", "64 tokens = 2 x 16, accumulated 2 times", "3 shards", "saves: in the background"):
        assert word in done.stdout
    assert not (tmp_path / "run").exists()
    assert "\n  LoRA, rank 16, targets all " in done.stdout
    done = train(data, tmp_path / "run", "--dry-run", "--lora-r", 3, "--lora-targets", "q,v")
    table = done.stdout[done.stdout.index("what fits in "):].splitlines()[1:6]
    ways = ["all weights", "LoRA, rank 3, targets q,v", *(f"QLoRA, the same beside {name}" for name in ("int8", "int4", "fp8"))]
    assert [re.split(" {2,}", line.strip())[0] for line in table] == ways and all(line.endswith("  fits") for line in table)
    planned = re.search(r"\n  total +(.+)", done.stdout)[1]
    assert re.split(" {2,}", table[1].strip())[1] == planned, "the row of the run is its plan"
    # A plan of 8 billion parameters, in no time and with no memory; whether it fits is up to the machine.
    begin = time.monotonic()
    done = run_program("--config", "llama3.1-8b", "--train", data / "train_*.bin", "--dry-run", "--seq-len", 16,
                       "--vocab-size", 128256)
    assert "8030.26 M parameters" in done.stdout and "memory on " in done.stdout
    assert done.stdout.count("\n  QLoRA, the same beside ") == 3, "what fits is said of what does not fit, too"
    if done.returncode != 0:
        assert_refused(done, 5, "the plan needs", "available")
    assert time.monotonic() - begin < 20
    # One flipped bit, anywhere in the tokens.
    shard = data / "train_0.bin"
    raw = bytearray(shard.read_bytes())
    raw[301] ^= 1
    shard.write_bytes(raw)
    assert_refused(train(data, tmp_path / "run", "--dry-run"), 3, "train_0.bin")


def test_a_dry_run_says_what_does_not_fit(data, tmp_path):
    """Of this machine, made small by a limit, and of a GPU that is only named."""
    def small():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    options = ["--config", "d12", "--train", data / "train_*.bin", "--dry-run", "--vocab-size", 50304, "--seq-len", 64]
    done = run_program(*options, "--device", "cpu", "--micro-batch", 64)
    assert done.returncode == 0 or "would fit" in done.stderr, done.stderr
    done = run_program(*options, "--device", "cpu", preexec_fn=small)
    assert_refused(done, 5, "the plan needs", "CPU has", "Not even --micro-batch 1 fits")
    assert "memory on cpu" in done.stdout, "the plan is shown all the same"
    if "CUDA" not in run_program("--version").stdout:
        assert_refused(run_program(*options, "--gpu-memory", "80GB"), 4, "--gpu-memory: this program was built without nvcc",
                       "a GPU is not needed")
        return
    assert run_program(*options, "--gpu-memory", "80GB").returncode == 0
    assert run_program(*options, "--gpu-memory", "74.5GiB").returncode == 0
    assert_refused(run_program(*options, "--gpu-memory", "1GB"), 5, "a GPU with 1GB has 1.0", "--micro-batch 1")
    done = run_program(*options, "--gpu-memory", "8GB", "--micro-batch", 512)
    assert_refused(done, 5, "a GPU with 8GB", "would fit")
    fits = re.search(r"--micro-batch (\d+) would fit", done.stderr)[1]
    assert run_program(*options, "--gpu-memory", "8GB", "--micro-batch", fits, "--batch-tokens", 512 * 64).returncode == 0


def test_a_plan_beyond_memory_is_exit_5_before_anything_is_written(data, tmp_path):
    done = run_program("--config", "llama3.1-8b", "--train", data / "train_*.bin", "--out", tmp_path / "run", "--seq-len",
                       16, "--micro-batch", 1_000_000)
    assert_refused(done, 5, "memory")
    assert not (tmp_path / "run").exists()
    # The advice is one that can be followed: --batch-tokens is a multiple of it.
    done = run_program("--config", "tiny", "--train", data / "train_*.bin", "--out", tmp_path / "run", "--seq-len", 64,
                       "--micro-batch", 999_999, "--batch-tokens", 999_999 * 64)
    assert_refused(done, 5, "would fit")
    assert 999_999 % int(re.search(r"--micro-batch (\d+) would fit", done.stderr)[1]) == 0


def test_the_advice_for_virtual_ranks_divides_the_share_of_one(data, tmp_path):
    share = 999_983  # a prime: 1 divides it, 2 only the sequences of both
    options = ["--config", "tiny", "--train", data / "train_*.bin", "--out", tmp_path / "run", "--seq-len", 64,
               "--virtual-ranks", 2, "--batch-tokens", 2 * share * 64]
    assert_refused(run_program(*options, "--micro-batch", share), 5, "--micro-batch 1 would fit")
    done = run_program(*options, "--micro-batch", 1, "--dry-run")
    assert done.returncode == 0, done.stderr


# ---- input files -----------------------------------------------------------------------------------------------------


def test_shards_that_do_not_fit(data, tmp_path):
    out = tmp_path / "run"
    assert_refused(train(data, out, "--train", data / "none_*.bin"), 3, "none_")
    assert_refused(train(data, out, "--train", MODEL), 3, "llama-hs32-mha.model.bin")
    write_shard(data / "short.bin", 16)
    assert_refused(train(data, out, "--train", data / "short.bin"), 3, "short.bin", "17")
    write_shard(data / "large.bin", 100, vocabulary=60_000)
    assert_refused(train(data, out, "--train", data / "large.bin"), 2, "--train", "60000")
    write_shard(data / "other.bin", 100, tokenizer_hash=8)
    assert_refused(train(data, out, "--val", data / "other.bin"), 3, "--val", "other.bin", "tokenizer")
    (data / "tokenizer.json").write_text("{}")
    assert_refused(train(data, out), 3, "--train", "tokenizer")
    assert_refused(train(data, out, "--model", data / "train_0.bin"), 3, "train_0.bin")
    assert_refused(train(data, out, "--model", GOLDEN / "neox-tanh-yarn.model.bin"), 3, "infer_pythia")
    assert not out.exists()


def test_output_directories_that_cannot_be_one(data, tmp_path):
    (tmp_path / "file").write_text("x")
    assert_refused(train(data, tmp_path / "file"), 2, "--out")
    assert_refused(train(data, tmp_path / "file" / "run"), 2, "--out")
    assert_refused(train(data, data), 2, "--out", "input")
    apart, models = tmp_path / "validation", tmp_path / "models"  # each of the directories that are read counts
    for directory in (apart, models):
        directory.mkdir()
    shutil.copy(data / "val_0.bin", apart)
    shutil.copy(MODEL, models / "model.bin")
    assert_refused(train(data, apart, "--val", apart / "val_*.bin"), 2, "--out", "input")
    assert_refused(train(data, models, "--model", models / "model.bin"), 2, "--out", "input")
    assert [path.name for directory in (apart, models) for path in directory.iterdir()] == ["val_0.bin", "model.bin"]
    assert_refused(train(data, "x" * 5000), 2, "--out")


def test_compare_with_a_reference_dump(tmp_path):
    dump = MODEL.with_name(MODEL.name.replace(".model.", ".dump."))
    done = run_program("--model", MODEL, "--compare", dump)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout
    other = MODEL.with_name("llama-hs32-gqa2.dump.bin")
    assert run_program("--model", MODEL, "--compare", other).returncode not in (0, -signal.SIGSEGV)
    original = tensor_file.read(MODEL)
    with tensor_file.Writer(tmp_path / "changed.bin", "model", original.config) as writer:
        for name, info in original.tensors.items():
            writer.declare(name, info.dtype, info.shape)
        for name in original.tensors:
            writer.write(name, original.array(name)[::-1 if name == "model.norm.weight" else 1])
    done = run_program("--device", "cpu", "--model", tmp_path / "changed.bin", "--compare", dump)
    assert done.returncode == 1 and " 0 failed" not in done.stdout and " failed" in done.stdout, done.stderr


def test_compare_with_a_reference_dump_in_fp8():
    """A dump in fp8 is for --precision fp8, and no other dump is."""
    model = MODEL.with_name("llama-fp8.model.bin")
    dump, plain = (path.with_name(path.name.replace(".model.", ".dump.")) for path in (model, MODEL))
    done = run_program("--device", "cpu", "--model", model, "--precision", "fp8", "--compare", dump)
    assert done.returncode == 0 and " 0 failed (in the 2-norm" in done.stdout, done.stdout + done.stderr
    rows = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines()[1:-1])}
    assert {"act.layers.1.mlp_product", "grad.lm_head.weight", "adamw.losses", "adamw.param.lm_head.weight"} <= set(rows)
    assert all(float(relative) <= float(allowed) <= 2e-4 for _, relative, allowed, *_ in rows.values())
    assert_refused(run_program("--device", "cpu", "--model", model, "--compare", dump), 3, "dump.fp8", "--precision fp8")
    done = run_program("--device", "cpu", "--model", model, "--precision", "fp8", "--compare", plain)
    assert_refused(done, 3, "dump.fp8: missing", "dump_reference.py --precision fp8")


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_and_what_it_leaves(data, tmp_path):
    out = tmp_path / "a run\nwith strange name"
    done = train(data, out)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"step 12  train loss \d\.\d{4}  val loss \d\.\d{4}  checkpoint '.*step_00000012'\n", done.stdout)
    assert "\033" not in done.stderr and "\r" not in done.stderr, "no terminal, no escapes"
    assert f" holds no checkpoint: starting from step 1 with '{MODEL}'\n" in done.stderr
    assert checkpoints(out) == ["step_00000008", "step_00000012"]
    log = records(out)
    assert [r["type"] for r in log[:2]] == ["header", "resume"]
    assert log[0]["settings"]["lr"] == "0.003" and log[0]["model"]["hidden_size"] and log[0]["host"]["cpus"] >= 1
    steps = [r for r in log if r["type"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert [r["step"] for r in steps if "val_loss" in r] == [5, 10, 12]
    assert all(r["tokens"] == r["step"] * 64 and r["dt_ms"] > 0 and not r["skipped"] for r in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert json.loads((out / "config.json").read_text())["settings"]["steps"] == "12"
    assert (out / "lock").read_text() == ""


def test_the_same_seed_gives_the_same_bits_and_another_does_not(data, tmp_path):
    for name, more in (("one", []), ("two", []), ("other", ["--seed", 2])):
        assert train(data, tmp_path / name, *more).returncode == 0
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert state_bytes(tmp_path / "one", 12) == state_bytes(tmp_path / "two", 12)
    assert losses(tmp_path / "one") != losses(tmp_path / "other")


def test_a_checkpoint_is_a_model(data, tmp_path):
    assert train(data, tmp_path / "one").returncode == 0
    model = tmp_path / "one" / "step_00000012" / "model.bin"
    done = train(data, tmp_path / "two", "--model", model)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two")[1][0] < losses(tmp_path / "one")[3][0], "it goes on from what was learned"


def test_names_that_are_no_text(data, tmp_path):
    """Names of files are bytes: what stands in JSON has U+FFFD in the place of those that are not UTF-8."""
    odd = os.fsdecode(b"\xff")
    (data / "train_0.bin").rename(data / f"train_{odd}.bin")
    for steps in (12, 16):
        done = train(data, tmp_path / f"run{odd}", "--sample-prompt", "two\nlines", steps=steps)
        assert done.returncode == 0, done.stderr
    assert "resuming after step 12" in done.stderr and "  sample-prompt        'two\\x0alines'\n" in done.stderr
    model = shutil.copy(MODEL, tmp_path / f"model{odd}.bin")
    done = run_program("--model", model, "--bench", "--json", "--seq-len", 16, "--micro-batch", 1)
    assert json.loads(done.stdout)["config"].endswith("model\ufffd.bin"), done.stderr
    done = run_program("--config", "tiny", "--out", f"run{odd}", "--print-config")
    assert json.loads(done.stdout)["settings"]["out"] == "run\ufffd", done.stderr


def test_from_scratch_with_a_sample(tmp_path):
    """--config, initial parameters, the tokenizer beside the shards, and a sample; the model file carries the tokenizer."""
    data = tmp_path / "data"
    tokenizer = make_texts(data)
    done = train(data, tmp_path / "run", "--config", "tiny", "--model=", "--val=", "--sample-every", 3,
                 "--sample-tokens", 5, "--sample-prompt", "Once", steps=3)
    assert done.returncode == 0, done.stderr
    assert "sample: Once" in done.stderr and "  train: 1 shard, " in done.stderr
    assert "holds no checkpoint: starting from step 1 with new parameters\n" in done.stderr
    assert done.stderr.count("no validation data") == 1
    assert re.fullmatch(r"step 3  train loss \d\.\d{4}  checkpoint '.*step_00000003'\n", done.stdout), done.stdout
    log = records(tmp_path / "run")
    assert [r["text"][:4] for r in log if r["type"] == "sample"] == ["Once"]
    assert abs(losses(tmp_path / "run")[1][0] - np.log(2048)) < 0.2
    assert tokenizer.read_bytes() in (tmp_path / "run" / "step_00000003" / "model.bin").read_bytes()
    # The plan counts the decoder that writes samples.
    if "CUDA" in run_program("--version").stdout:
        for every in (3, 0):
            planned = train(data, tmp_path / "no", "--config", "tiny", "--model=", "--val=", "--device", "cuda",
                            "--sample-every", every, "--dry-run")
            assert planned.returncode == 0, planned.stderr
            assert ("workspace of samples" in planned.stdout) == (every > 0)


def test_the_vocabulary_of_a_new_model_is_that_of_its_shards(data, tmp_path):
    scratch = ["--config", "tiny", "--model="]
    done = train(data, tmp_path / "run", *scratch, steps=2)
    assert done.returncode == 0 and "vocabulary 128 for 64 ids (padded to a multiple of 128; --vocab-size)" in done.stderr
    model = records(tmp_path / "run")[0]["model"]
    assert (model["vocab_size"], model["tokenizer_vocab"]) == (128, 64)
    done = train(data, tmp_path / "given", *scratch, "--vocab-size", 64, steps=2)
    assert done.returncode == 0 and "vocabulary 64, " in done.stderr
    assert abs(losses(tmp_path / "given")[1][0] - np.log(64)) < 0.2
    # A run that began with another one, as those of older versions, goes on with it.
    assert_refused(train(data, tmp_path / "given", *scratch, "--schedule", "constant", steps=4), 2, "vocab_size",
                   "--vocab-size '64' is the same model")
    assert_refused(train(data, tmp_path / "x", "--vocab-size", 64), 2, "--vocab-size", "--config")
    # The same number, given or not, is the same model.
    for path in (data / "large_0.bin", data / "large_1.bin"):
        write_shard(path, 200, vocabulary=256)
    large = [*scratch, "--train", data / "large_*.bin", "--val="]
    assert train(data, tmp_path / "one", *large, steps=2).returncode == 0
    assert train(data, tmp_path / "two", *large, "--vocab-size", 256, steps=2).returncode == 0
    assert state_bytes(tmp_path / "one", 2) == state_bytes(tmp_path / "two", 2)


HF_CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 64,
             "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


def test_a_shape_from_a_hugging_face_config(data, tmp_path):
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(HF_CONFIG))
    scratch = ["--model=", "--config", config]
    done = train(data, tmp_path / "run", *scratch)
    assert done.returncode == 0, done.stderr
    assert "model: 3 layers of 48, 4 heads on 2, vocabulary 128 for 64 ids" in done.stderr
    first = losses(tmp_path / "run")
    assert abs(first[1][0] - np.log(128)) < 0.2 and first[12][0] < first[1][0]
    assert train(data, tmp_path / "run", *scratch, "--schedule", "cosine").returncode == 0, "it resumes"
    # Another shape under the same name is another model.
    config.write_text(json.dumps(HF_CONFIG | {"num_hidden_layers": 2}))
    assert_refused(train(data, tmp_path / "run", *scratch), 2, "num_layers")
    config.write_text(json.dumps(HF_CONFIG | {"hidden_act": "gelu"}))
    assert_refused(train(data, tmp_path / "x", *scratch), 3, "shape.json", "hidden_act", "silu")
    config.write_text("{")
    assert_refused(train(data, tmp_path / "x", *scratch), 3, "shape.json", "JSON")
    assert_refused(train(data, tmp_path / "x", "--model=", "--config", tmp_path / "none.json"), 3, "none.json")
    with open(config, "wb") as file:  # 6 GB that cost nothing on the disk
        file.truncate(6_000_000_000)
    assert_refused(train(data, tmp_path / "x", *scratch), 3, "shape.json", "at most 8388608")


def test_a_checkpoint_is_measured_and_nothing_is_written(data, tmp_path):
    assert train(data, tmp_path / "run", "--val-batches", 0).returncode == 0
    expected = [r["val_loss"] for r in records(tmp_path / "run") if "val_loss" in r][-1]
    assert {r["val_tokens"] for r in records(tmp_path / "run") if "val_loss" in r} == {199}
    model = tmp_path / "run" / "step_00000012" / "model.bin"
    before = sorted(tmp_path.rglob("*"))
    words = ["--eval", "--model", model, "--val", data / "val_*.bin", "--seq-len", 16, "--micro-batch", 2]
    done = run_program(*words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["val_loss"] == expected and (result["tokens"], result["of_tokens"]) == (199, 200)
    assert abs(result["perplexity"] - np.exp(expected)) < 1e-9
    done = run_program(*words)
    assert done.returncode == 0 and done.stdout.startswith(f"val loss {expected:.4f}  perplexity ")
    done = run_program(*words, "--json", "--val-batches", 2)
    assert json.loads(done.stdout)["tokens"] == 4 * 16
    for batches in (7, 8, 1000):  # all there are, and more
        done = run_program(*words, "--json", "--val-batches", batches)
        assert json.loads(done.stdout) == result, batches
    assert sorted(tmp_path.rglob("*")) == before
    assert_refused(run_program("--eval", "--model", model), 2, "--eval", "--val")
    larger = write_shard(tmp_path / "larger.bin", 100, vocabulary=65)
    assert_refused(run_program("--eval", "--model", model, "--val", larger, "--seq-len", 16), 2, "--val", "a vocabulary of 65")
    assert_refused(run_program("--eval", "--config", "tiny", "--val", data / "val_*.bin"), 2, "--eval", "--model")
    write_shard(data / "large.bin", 100, vocabulary=60_000)
    assert_refused(run_program(*words[:4], data / "large.bin", "--seq-len", 16), 2, "--val", "60000")


@pytest.mark.parametrize("counts", [(400, 5), (5, 400), (6, 5, 4, 3, 2, 1), (17, 16)])
def test_short_shards_train_go_on_and_are_measured(data, tmp_path, counts):
    """First, last, and several that hold a sequence together; the validation text is shorter than a sequence."""
    for path in data.glob("*.bin"):
        path.unlink()
    for number, count in enumerate(counts):
        write_shard(data / f"train_{number}.bin", count, 1000 * number)
    write_shard(data / "val_0.bin", 9, 5000)
    done = train(data, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert {r["val_tokens"] for r in records(tmp_path / "whole") if "val_loss" in r} == {8}
    assert train(data, tmp_path / "parts", "--debug-inject", "term@step=5").returncode == 143
    assert train(data, tmp_path / "parts").returncode == 0
    ends = [(tmp_path / name / "step_00000012" / "model.bin").read_bytes() for name in ("whole", "parts")]
    assert ends[0] == ends[1] and losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_the_best_checkpoint_is_kept(data, tmp_path):
    """A learning rate that soon makes it worse: the lowest loss comes early and stays."""
    out = tmp_path / "run"
    options = ["--keep-best", "--val-every", 1, "--save-every", 2, "--val-batches", 0, "--schedule", "constant", "--lr", 1.0,
               "--warmup-steps", 0]
    done = train(data, out, *options)
    assert done.returncode == 0, done.stderr
    measured = {r["step"]: r["val_loss"] for r in records(out) if "val_loss" in r}
    best = min(measured, key=measured.get)
    assert best < 10, measured
    assert checkpoints(out) == [f"step_{best:08d}", "step_00000010", "step_00000012"]
    assert f"lowest loss on --val: {measured[best]:.4f} after step {best}, kept in " in done.stderr
    model = out / f"step_{best:08d}" / "model.bin"
    again = run_program("--eval", "--json", "--model", model, "--val", data / "val_*.bin", "--seq-len", 16, "--micro-batch", 2)
    assert json.loads(again.stdout)["val_loss"] == measured[best]


def test_numbers_do_not_follow_the_locale(data, tmp_path, comma_locale):
    done = train(data, tmp_path / "de", "--lr", "0.0015", env=comma_locale)
    assert done.returncode == 0 and re.match(r"step 12  train loss \d\.\d{4}  val", done.stdout), done.stdout
    assert train(data, tmp_path / "c", "--lr", "0.0015").returncode == 0
    assert losses(tmp_path / "de") == losses(tmp_path / "c")
    assert_refused(train(data, tmp_path / "x", "--lr", "0,0015", env=comma_locale), 2, "--lr")


# ---- interruption and resume -----------------------------------------------------------------------------------------


def test_steps_added_later_keep_the_warm_up(data, tmp_path):
    """By default a quarter of the steps that the run began with; an option that was given is compared instead."""
    out = tmp_path / "run"

    def run(steps, *more):
        words = arguments(data, out, "--lr", 0.001, "--schedule", "constant", *more, steps=steps)
        default = words.index("--warmup-steps")  # a word of the tests' own
        return run_program(*words[1:default], *words[default if more else default + 2:])

    def rates():
        return [rate for _, (_, _, rate) in sorted(losses(out).items())]
    done = run(8)
    assert done.returncode == 0, done.stderr
    assert rates() == [0.0005] + 7 * [0.001]
    done = run(16)
    assert done.returncode == 0, done.stderr
    assert rates() == [0.0005] + 15 * [0.001]
    assert json.loads((out / "config.json").read_text())["settings"]["warmup-steps"] == "2"
    given = run(16, "--warmup-steps", 4)
    assert_refused(given, 2, "--warmup-steps: got '4'", "made with '2'")


def test_terminated_saves_and_resumes(data, tmp_path, whole):
    out = tmp_path / "run"
    done = train(data, out, "--debug-inject", "term@step=6")
    assert done.returncode == 143, done.stderr
    assert "step 6 " in done.stdout and checkpoints(out) == ["step_00000004", "step_00000006"]
    assert train(data, out).returncode == 0
    assert_same_run(out, whole)


@pytest.mark.parametrize("sent, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_signals_from_outside(data, tmp_path, sent, code):
    out = tmp_path / "run"
    process = start(data, out, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    process.send_signal(sent)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == code
    last = max(losses(out))
    assert f"step_{last:08d}" in checkpoints(out), messages
    assert "the same command goes on" in messages


@pytest.mark.parametrize("step", [1, 4, 5, 8, 9, 12])
def test_killed_at_a_step_and_resumed_bit_for_bit(data, tmp_path, whole, step):
    out = tmp_path / "run"
    assert train(data, out, "--debug-inject", f"kill@step={step}").returncode == -signal.SIGKILL
    done = train(data, out)
    assert done.returncode == 0, done.stderr
    assert "its lock is taken over" in done.stderr
    resumed = "resuming after step" in done.stderr
    assert not resumed or step > 4
    assert resumed or step <= 8, "the checkpoint of step 4 is complete before that of step 8 begins"
    assert_same_run(out, whole)


def test_muon_goes_on_bit_for_bit_and_only_with_itself(data, tmp_path):
    muon = ["--optimizer", "muon", "--muon-lr", 0.02, "--muon-momentum", 0.9]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert train(data, whole, *muon).returncode == 0
    assert train(data, out, *muon, "--debug-inject", "term@step=6").returncode == 143
    assert_refused(train(data, out), 2, "--optimizer: got adamw", "was made with muon")
    assert_refused(train(data, out, *muon[:2]), 2, "--muon-lr: got", "0.02")
    done = train(data, out, *muon)
    assert done.returncode == 0 and "resuming after step 6" in done.stderr, done.stderr
    assert "momentum, AdamW moments (fp32)" in done.stderr
    assert_same_run(out, whole)
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["optimizer"] == "muon" and settings["muon-lr"] == "0.02"
    assert records(out)[0]["settings"]["optimizer"] == "muon"
    assert losses(out)[12][0] < losses(out)[1][0], "it learns"
    assert train(data, tmp_path / "adamw").returncode == 0
    assert losses(out) != losses(tmp_path / "adamw")
    assert_refused(train(data, tmp_path / "adamw", *muon), 2, "--optimizer: got muon", "was made with adamw")


def test_killed_while_saving_and_resumed_bit_for_bit(data, tmp_path, whole):
    first = tmp_path / "first"
    assert train(data, first, "--debug-inject", "term@step=4").returncode == 143
    size = sum(path.stat().st_size for path in (first / "step_00000004").iterdir())
    for byte in (0, 5000, size // 3, size // 2, size - 100):
        out = tmp_path / f"run{byte}"
        shutil.copytree(first, out)
        assert train(data, out, "--debug-inject", f"kill@save={byte}").returncode == -signal.SIGKILL
        assert checkpoints(out) == ["step_00000004", "step_00000008.tmp"]
        done = train(data, out)
        assert done.returncode == 0 and "resuming after step 4" in done.stderr, done.stderr
        assert_same_run(out, whole)


def test_killed_from_outside_many_times(data, tmp_path):
    """kill -9 at moments that nobody chose, until the run is through."""
    assert train(data, tmp_path / "whole", steps=60).returncode == 0
    out = tmp_path / "run"
    for attempt in range(100):
        process = start(data, out, steps=60)
        try:
            process.communicate(timeout=0.01 * 1.1**attempt)  # the first is before the first step, on any machine
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    assert process.returncode == 0 and attempt > 0
    assert_same_run(out, tmp_path / "whole", 60)


def test_more_steps_are_an_extension_other_changes_are_refused(data, tmp_path):
    out = tmp_path / "run"
    constant = ["--schedule", "constant"]
    assert train(data, out, *constant, steps=6).returncode == 0
    assert_refused(train(data, out, *constant, "--lr", 0.1, steps=12), 2, "--lr")
    assert_refused(train(data, out, *constant, "--batch-tokens", 32, steps=12), 2, "--batch-tokens")
    assert_refused(train(data, out, *constant, "--seed", 3, steps=12), 2, "--seed")
    assert_refused(train(data, out, "--schedule", "linear", steps=12), 2, "--schedule")
    assert_refused(train(data, out, *constant, steps=5), 2, "--steps")
    assert_refused(train(data, out, *constant, "--resume", "never", steps=12), 2, "--resume never")
    write_shard(data / "train_3.bin", 100)
    assert_refused(train(data, out, *constant, steps=12), 3, "--train", "shards")
    (data / "train_3.bin").unlink()
    assert train(data, out, *constant, steps=12).returncode == 0
    assert train(data, tmp_path / "whole", *constant).returncode == 0
    assert_same_run(out, tmp_path / "whole")


def test_damaged_checkpoints(data, tmp_path):
    out = tmp_path / "run"
    assert train(data, out).returncode == 0
    newest = out / "step_00000012" / "state.bin"
    raw = bytearray(newest.read_bytes())
    raw[-5] ^= 0x10
    newest.write_bytes(raw)
    assert_refused(train(data, out, "--resume", "must"), 3, "step_00000012")
    done = train(data, out)
    assert done.returncode == 0 and "warning: skipping a damaged checkpoint" in done.stderr
    assert "resuming after step 8" in done.stderr
    for path in out.glob("step_*/model.bin"):
        os.truncate(path, 5000)
    before = (out / "log.jsonl").read_bytes()
    assert_refused(train(data, out), 3, "none of its")
    assert (out / "log.jsonl").read_bytes() == before, "a refused start leaves no trace"


def test_must_needs_a_checkpoint(data, tmp_path):
    assert_refused(train(data, tmp_path / "run", "--resume", "must"), 3, "no checkpoint")


def test_two_runs_do_not_share_a_directory(data, tmp_path):
    out = tmp_path / "run"
    first = start(data, out, "--debug-inject", "hang@step=3")
    wait_for(lambda: (out / "log.jsonl").exists())
    assert_refused(train(data, out), 4, f"pid {first.pid} on ")
    first.kill()
    first.wait()
    assert train(data, out).returncode == 0


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_not_finite_numbers_stop_before_the_update(data, tmp_path, whole):
    out = tmp_path / "run"
    done = train(data, out, "--debug-inject", "nan@step=7")
    assert_refused(done, 6, "step 7", "model.embed_tokens.weight[")
    assert "step_00000006" in checkpoints(out), "the state before the bad step is saved"
    assert train(data, out).returncode == 0
    assert_same_run(out, whole)


def test_not_finite_numbers_skipped_or_run_again(data, tmp_path, whole):
    done = train(data, tmp_path / "rerun", "--debug-inject", "nan@step=7", "--on-nan", "rerun")
    assert done.returncode == 0 and "transient" in done.stderr
    assert losses(tmp_path / "rerun") == losses(whole)
    done = train(data, tmp_path / "skip", "--debug-inject", "nan@step=7", "--on-nan", "skip")
    assert done.returncode == 0 and "skipped" in done.stderr
    skipped = [r["step"] for r in records(tmp_path / "skip") if r["type"] == "step" and r["skipped"]]
    assert skipped == [7]
    done = train(data, tmp_path / "skip", "--on-nan", "skip", steps=14)
    assert done.returncode == 0 and "resuming after step 12 of 14" in done.stderr
    starts = [(r["step"], r["tokens"]) for r in records(tmp_path / "skip") if r["type"] == "resume"]
    assert starts == [(0, 0), (12, 12 * 64)], "the tokens of a step that was skipped have been read too"


def test_a_learning_rate_that_blows_up_is_found(data, tmp_path):
    done = train(data, tmp_path / "run", "--lr", 10, "--grad-clip", 0, "--weight-decay", 0, "--schedule", "constant",
                 steps=400)
    assert done.returncode in (0, 6), "either it survives with finite numbers or it is stopped"
    assert losses(tmp_path / "run")
    for step, (loss, *_) in losses(tmp_path / "run").items():
        assert loss is not None and np.isfinite(loss), step


@pytest.mark.parametrize("fault", ["enospc@save=5000", "io-error@save=0"])
def test_a_failed_save_costs_a_checkpoint(data, tmp_path, whole, fault):
    out = tmp_path / "run"
    done = train(data, out, "--debug-inject", fault)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: no checkpoint of step 4: ")]
    assert len(warnings) == 1 and warnings[0].endswith(". Training goes on"), done.stderr
    assert not list(out.glob("*.tmp"))
    assert_same_run(out, whole)


def test_a_failed_last_save_is_exit_5(data, tmp_path):
    out = tmp_path / "run"
    assert train(data, out, "--schedule", "constant", steps=4).returncode == 0
    done = train(data, out, "--schedule", "constant", "--save-every", 0, "--debug-inject", "enospc@save=100", steps=6)
    assert_refused(done, 5, "last checkpoint")
    assert checkpoints(out) == ["step_00000004"]


def test_memory_that_runs_out_in_a_step_is_exit_5(data, tmp_path, whole):
    out = tmp_path / "run"
    assert_refused(train(data, out, "--debug-inject", "memory@step=7"), 5, "memory")
    assert checkpoints(out) == ["step_00000004"]
    assert train(data, out).returncode == 0
    assert_same_run(out, whole)


def test_a_configuration_that_cannot_be_written_is_a_warning(data, tmp_path):
    (tmp_path / "run" / "config.json").mkdir(parents=True)
    done = train(data, tmp_path / "run", steps=2)
    assert done.returncode == 0 and checkpoints(tmp_path / "run") == ["step_00000002"], done.stderr
    assert len(re.findall(r"^warning: .*config\.json", done.stderr, re.M)) == 1, done.stderr


def test_a_log_that_cannot_be_written_is_one_warning(data, tmp_path):
    out = tmp_path / "run"
    done = train(data, out, "--debug-inject", "enospc@log=3")
    assert done.returncode == 0
    assert done.stderr.count("warning") == 1 and "log.jsonl" in done.stderr and "No space left" in done.stderr
    assert max(losses(out)) == 2


# ---- what others put into a run directory ----------------------------------------------------------------------------

NAMES = ["log.jsonl", "lock", "config.json", "matmul_plans.txt", "step_00000004", "step_00000004.tmp",
         "step_00000004.replaced.tmp"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "fifo", "link to a directory"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_written_through_a_run_directory(data, tmp_path, name, kind):
    """A link or a FIFO under each name that a run uses: what it points to stays as it is, and nothing waits for ever."""
    out, victim, elsewhere = tmp_path / "run", tmp_path / "victim", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    victim.write_text("precious")
    (elsewhere / "model.bin").write_text("precious")
    path = out / name
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "new")
    elif kind == "hard link":
        os.link(victim, path)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere)
    done = train(data, out)
    assert victim.read_text() == "precious" and (elsewhere / "model.bin").read_text() == "precious"
    assert not (tmp_path / "new").exists() and sorted(os.listdir(elsewhere)) == ["model.bin"]
    if name == "lock":
        assert_refused(done, 2, "--out", "lock", "Remove it")
    elif name == "step_00000004":  # something without a whole checkpoint is not silently started over
        assert_refused(done, 3, "none of its 1 checkpoints")
        assert os.path.lexists(path)
    else:
        assert done.returncode == 0, done.stderr
        assert "step_00000012" in checkpoints(out)
        assert ("without a log" in done.stderr) == (name == "log.jsonl")
        assert ("no checkpoint of step 4" in done.stderr) == (name == "step_00000004.tmp")
        if name.startswith("step_"):
            assert os.path.lexists(path), "what weft did not make it does not remove"


def test_a_log_that_nobody_reads_does_not_hold_a_signal_up(data, tmp_path):
    """A FIFO under the name of the log: the run starts, and SIGTERM ends it."""
    out = tmp_path / "run"
    out.mkdir()
    os.mkfifo(out / "log.jsonl")
    process = start(data, out, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 143


def test_only_what_a_save_left_is_removed_and_only_after_the_checks(data, tmp_path):
    out = tmp_path / "run"
    mine = [out / name / "thesis.txt" for name in ("step_mine.tmp", "step_7.tmp", "step_00000007.tmp", "step_00000008.x.tmp")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("precious")
    left = out / "step_00000009.tmp" / "model.bin"
    left.parent.mkdir()
    left.write_text("half")
    assert_refused(train(data, out, "--resume", "never"), 2, "not empty")
    assert_refused(train(data, out, "--resume", "must"), 3, "no checkpoint")
    assert left.exists() and all(path.exists() for path in mine)
    assert train(data, out).returncode == 0
    assert not left.parent.exists() and all(path.exists() for path in mine)


def test_another_model_is_refused_on_resume(data, tmp_path):
    """Its weights would be read and not used: the checkpoint has those that are trained."""
    out = tmp_path / "run"
    assert train(data, out, "--schedule", "constant", steps=4).returncode == 0
    trained = out / "step_00000004" / "model.bin"  # the same shape, other weights
    assert_refused(train(data, out, "--schedule", "constant", "--model", trained, steps=6), 2, "--model", "began from")
    copy = shutil.copy(MODEL, tmp_path / "another name.bin")  # the same content is the same model
    done = train(data, out, "--schedule", "constant", "--model", copy, steps=6)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_that_was_removed_is_what_a_resume_asks_for(tmp_path):
    data = tmp_path / "data"
    tokenizer = make_texts(data)
    options = ["--config", "tiny", "--model=", "--val=", "--sample-every", 0, "--schedule", "constant"]
    assert train(data, tmp_path / "run", *options, steps=2).returncode == 0
    (data / "tokenizer.json").unlink()
    assert_refused(train(data, tmp_path / "run", *options, steps=4), 2, "--tokenizer", "was made with a tokenizer")
    done = train(data, tmp_path / "run", *options, "--tokenizer", tokenizer, steps=4)
    assert done.returncode == 0, done.stderr


def test_a_moment_that_becomes_infinite_is_exit_6_and_leaves_nothing(data, tmp_path):
    for name, step, last in (("last", 12, 8), ("between", 5, 4)):
        out = tmp_path / name
        done = train(data, out, "--debug-inject", f"inf@moment={step}")
        assert_refused(done, 6, "moment2.", "is inf", f"step_{last:08d}")
        assert checkpoints(out)[-1] == f"step_{last:08d}", "nothing of the save that was refused stays"
        assert train(data, out).returncode == 0


def test_a_shard_replaced_meanwhile(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    write_shard(data / "train_0.bin", 400, 77)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 3, messages
    assert "train_0.bin" in messages.splitlines()[-1]
    assert f"step_{max(losses(out)):08d}" in checkpoints(out), "what was computed is saved"


def test_closed_pipes_do_not_kill_a_run(data, tmp_path):
    out = tmp_path / "run"
    reader, writer = os.pipe()
    process = subprocess.Popen(arguments(data, out), stdout=writer, stderr=writer, env=environment())
    os.close(writer)
    os.close(reader)
    assert process.wait(timeout=SECONDS) == 0
    assert max(losses(out)) == 12 and "step_00000012" in checkpoints(out)


def test_time_limit(data, tmp_path):
    out = tmp_path / "run"
    done = train(data, out, "--max-minutes", 0.02, steps=1_000_000)
    assert done.returncode == 0 and "--max-minutes" in done.stderr
    assert f"step_{max(losses(out)):08d}" in checkpoints(out)
    times = [record["time"] for record in records(out)]
    assert 1.1 < times[-1] - times[0] < 60, "0.02 minutes, and what the last step and the save take"


# Writes what a save asks of the kernel, in order, to $CALLS.
CALL_RECORDER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void note(const char* call, const char* a, const char* b) {
  FILE* file = fopen(getenv("CALLS"), "a");
  if (file) { fprintf(file, "%s %s %s\n", call, a, b); fclose(file); }
}
int fsync(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  path[n > 0 ? n : 0] = 0;
  note("fsync", path, "");
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int rename(const char* from, const char* to) {
  note("rename", from, to);
  return ((int (*)(const char*, const char*))dlsym(RTLD_NEXT, "rename"))(from, to);
}
"""


def test_a_save_syncs_before_it_renames(data, tmp_path):
    """A power cut cannot be tested; the order of calls that survives one can."""
    calls = tmp_path / "calls"
    shim = preload(tmp_path, CALL_RECORDER)
    done = train(data, tmp_path / "run", "--save-every", 0, env=shim | {"CALLS": str(calls)}, steps=3)
    if "LD_PRELOAD" in done.stderr:
        pytest.skip("this build cannot be preloaded")
    run = str(tmp_path / "run")
    step, lines = f"{run}/step_00000003", [line.split() for line in calls.read_text().splitlines()]
    lines = [line for line in lines if "step_" in line[1] or line[1] == run]
    lines = lines[next(i for i, line in enumerate(lines) if "step_" in line[1]):]
    published = lines.index(["rename", f"{step}.tmp", step])
    for name in ("model.bin", "state.bin", "manifest.json"):
        synced = next(i for i, line in enumerate(lines) if line[0] == "fsync" and f"/{name}.tmp" in line[1])
        named = next(i for i, line in enumerate(lines) if line[0] == "rename" and line[2] == f"{step}.tmp/{name}")
        assert synced < named < published, name
    assert lines[published - 1] == ["fsync", f"{step}.tmp"], "the directory, before it gets its name"
    assert lines[published + 1] == ["fsync", run], "the name, before anything builds on it"
    manifest = [line for line in lines if line[0] == "rename"]
    assert manifest[-2][2].endswith("manifest.json"), "the manifest comes last"


def test_kept_checkpoints(data, tmp_path):
    out = tmp_path / "run"
    assert train(data, out, "--save-every", 2, "--keep", 3).returncode == 0
    assert checkpoints(out) == ["step_00000008", "step_00000010", "step_00000012"]


def test_a_run_on_conversations(tmp_path):
    """Epochs, what the start says of the rows, the learned tokens of each step, and the bits of a resumed run."""
    chats = write_conversations(tmp_path / "chats", VOCABULARY, SEED)
    lengths = np.concatenate([np.diff(token_shard.TokenShard(path).starts) for path in sorted(chats.iterdir())])

    def run(out, *length):
        command = arguments(chats, out, "--train", chats / "train_*.bin", "--val", chats / "train_1.bin", "--batch-tokens", 128,
                            "--device", "cpu", "--schedule", "constant", *length)
        if "--epochs" in length:
            del command[command.index("--steps"):command.index("--steps") + 2]
        return subprocess.run(command, capture_output=True, text=True, env=environment())

    done = run(tmp_path / "whole", "--epochs", 2)
    assert done.returncode == 0, done.stderr
    (conversations, rows, full), = re.findall(r"train: 2 shards, \d+ tokens, (\d+) conversations in (\d+) rows of 16 \((\d+)\.\d % full, "
                                              r"\d+\.\d % of the attention of whole rows\), \d+\.\d % of the rows learned", done.stderr)
    assert int(rows) < int(conversations) and 70 < int(full) <= 100
    (cut, left_out), = re.findall(r"train: 2 .*, (\d+) longer ones cut behind an answer, (\d+) longer ones left out", done.stderr)
    assert int(cut) + int(left_out) == (lengths > 17).sum()
    steps = math.ceil(2 * int(rows) / 8)
    assert list(losses(tmp_path / "whole")) == list(range(1, steps + 1))
    learned = [record["learned_tokens"] for record in records(tmp_path / "whole") if record["type"] == "step"]
    assert len(set(learned)) > 1 and all(0 < one < 128 for one in learned)
    assert run(tmp_path / "parts", "--steps", 4).returncode == 0 and run(tmp_path / "parts", "--epochs", 2).returncode == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert state_bytes(tmp_path / "parts", steps) == state_bytes(tmp_path / "whole", steps)
    assert_refused(run(tmp_path / "parts", "--epochs", 2, "--no-pack"), 2, "--'no-pack': got nothing, but", "was made with 'false'")
    assert "--epochs 2 became" not in done.stderr
    assert_refused(run(tmp_path / "parts", "--epochs", 1), 2, "--epochs: got ", " steps, but ", "belongs to a run of")
    done = run(tmp_path / "rounded", "--epochs", 0.01, "--warmup-steps", 1, "--dry-run")  # of one row, in a step of eight
    assert done.returncode == 0 and (f", {8 / int(rows):.2f} epochs\n  --epochs 0.01 became {8 / int(rows):.2f}: the run has 1 step, of 8 sequences "
                                     "each. A smaller --micro-batch, or --batch-tokens, comes closer\n") in done.stdout, done
    done = run(tmp_path / "single", "--epochs", 2, "--no-pack")
    (single,) = re.findall(r"train: 2 shards, \d+ tokens, (\d+) conversations in rows of 16", done.stderr)
    assert done.returncode == 0 and single == conversations
    assert list(losses(tmp_path / "single")) == list(range(1, math.ceil(2 * int(single) / 8) + 1))
    assert_refused(run(tmp_path / "single", "--epochs", 2), 2, "--no-pack: got 'false', but", "was made with nothing")
    measured = [run_program("--model", MODEL, "--val", chats / "train_1.bin", "--seq-len", 16, "--eval", "--json", "--device", "cpu", *more)
                for more in ((), ("--no-pack",))]
    packed, apart = (json.loads(done.stdout) for done in measured)
    assert packed["val_loss"] == pytest.approx(apart["val_loss"], rel=1e-6)
    assert [packed[key] for key in ("conversations", "cut", "left_out", "tokens")] == [apart[key] for key in ("conversations", "cut", "left_out", "tokens")]
    done = run_program("--model", MODEL, "--val", chats / "train_1.bin", "--seq-len", 16, "--eval", "--device", "cpu")
    assert done.returncode == 0 and re.search(r"perplexity [0-9.]+  (\d+) of \1 learned tokens \(all\) of \d+ conversations in rows of 16", done.stdout), done
    write_shard(chats / "train_2.bin", 100)
    assert_refused(run(tmp_path / "mixed", "--epochs", 2), 3, "train_2.bin", "holds plain text")


def test_a_run_on_documents_of_a_text(tmp_path):
    """Windows are the same with --document-mask and without, and one label fewer is learned for each document that ends in them."""
    texts = tmp_path / "texts"
    texts.mkdir()
    generator = np.random.default_rng(2)
    for name, end in (("train_0", 3), ("other_0", -1)):
        writer = token_shard.ShardWriter(texts / f"{name}.bin", VOCABULARY, SEED, end)
        writer.write(np.where(generator.random(600) < 0.1, 3, generator.integers(4, VOCABULARY, 600)))
        writer.close()

    def run(out, shards, *more):
        return subprocess.run(arguments(texts, out, "--train", texts / shards, "--val", texts / shards, "--device", "cpu", *more),
                              capture_output=True, text=True, env=environment())

    done = run(tmp_path / "masked", "train_0.bin", "--document-mask", "--val-batches", 0)
    assert done.returncode == 0 and "tokens, 37 windows of 16, each document for itself, " in done.stderr, done
    ends = int((token_shard.TokenShard(texts / "train_0.bin").tokens[:-1] == 3).sum())
    steps = [record for record in records(tmp_path / "masked") if record["type"] == "step"]
    assert all(0 < record["learned_tokens"] < 64 for record in steps) and steps[-1]["val_tokens"] == 599 - ends
    done = run_program("--model", MODEL, "--val", texts / "train_0.bin", "--seq-len", 16, "--eval", "--document-mask", "--device", "cpu")
    assert done.returncode == 0 and f"  {599 - ends} of 600 tokens (all but the first of each document) in windows of 16\n" in done.stdout, done
    assert run(tmp_path / "plain", "train_0.bin").returncode == 0
    assert losses(tmp_path / "plain")[1] != losses(tmp_path / "masked")[1]
    assert_refused(run(tmp_path / "masked", "train_0.bin"), 2, "--'document-mask': got nothing, but", "was made with 'true'")
    assert_refused(run(tmp_path / "none", "other_0.bin", "--document-mask"), 3, "other_0.bin", "does not say where documents end")
    assert_refused(run_program("--config", "tiny", "--bench", "--document-mask"), 2, "--document-mask: not for --bench")
