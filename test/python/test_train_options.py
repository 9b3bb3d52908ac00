"""Options of train_llama by their effect, on the CPU: what each one changes in the state, the log, the plan or the
messages."""

import json
import os
import pty
import re
import select
import subprocess
from pathlib import Path

import pytest

from train_runs import (MODEL, PROGRAM, SECONDS, assert_refused, checkpoints, environment, fp8_shape, losses, make_texts, np, records,
                        run_program, start, state_bytes, train, wait_for)
from train_runs import data_fixture, end_started  # noqa: F401, pytest finds them here

import tensor_file

WITH_CUDA = "CUDA" in run_program("--version").stdout


def ok(done):
    assert done.returncode == 0, done.stderr
    return done


# ---- optimisation ----------------------------------------------------------------------------------------------------

PLAIN = {"--lr": 0.01, "--beta1": 0, "--beta2": 0, "--eps": 1e-20, "--weight-decay": 0, "--grad-clip": 0}


def first_step(data, out, **changes):
    """Parameters, first and second moments after one step from MODEL."""
    options = PLAIN | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    words = [word for option, value in options.items() for word in (option, value)]
    ok(train(data, out, *words, "--schedule", "constant", "--warmup-steps", 0, "--val=", steps=1))
    model = tensor_file.read(out / "step_00000001" / "model.bin")
    state = tensor_file.read(out / "step_00000001" / "state.bin")
    return [{name: file.f32(prefix + name).astype(np.float64) for name in model.tensors}
            for file, prefix in ((model, ""), (state, "moment1."), (state, "moment2."))]


@pytest.mark.parametrize("changes", [
    {}, {"lr": 0.04}, {"beta1": 0.75}, {"beta2": 0.75}, {"eps": 0.01}, {"weight_decay": 0.5}, {"grad_clip": 0.25},
    {"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1, "grad_clip": 1}])
def test_the_first_step_is_that_of_adamw(data, tmp_path, changes):
    """Without decay of the moments they are the gradient and its square; each option then has its place in the formula."""
    initial, gradient, _ = first_step(data, tmp_path / "plain", lr=0)
    parameters, moment1, moment2 = first_step(data, tmp_path / "run", **changes)
    option = {name.lstrip("-").replace("-", "_"): value for name, value in PLAIN.items()} | changes
    norm = np.sqrt(sum(np.sum(values ** 2) for values in gradient.values()))
    assert norm > 1, "every limit above clips"
    scale = min(1, option["grad_clip"] / norm) if option["grad_clip"] > 0 else 1
    for name, values in gradient.items():
        g = scale * values
        np.testing.assert_allclose(moment1[name], (1 - option["beta1"]) * g, rtol=1e-5, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(moment2[name], (1 - option["beta2"]) * g ** 2, rtol=1e-5, atol=1e-12, err_msg=name)
        decay = option["weight_decay"] if g.ndim == 2 else 0
        step = g / (np.abs(g) + option["eps"]) + decay * initial[name]
        np.testing.assert_allclose(parameters[name], initial[name] - option["lr"] * step, rtol=1e-5, atol=1e-6, err_msg=name)


def test_sizes_of_a_step(data, tmp_path):
    """Micro-batches of any size add up to the same step; the tokens of a step and of a sequence make another one."""
    for size in (1, 2, 4):
        ok(train(data, tmp_path / f"micro{size}", "--micro-batch", size, steps=4))
        done = ok(train(data, tmp_path / "no", "--micro-batch", size, "--dry-run", steps=4))
        assert f"a step: 64 tokens = {size} x 16, accumulated {4 // size} time{'s' if size < 4 else ''}" in done.stdout
    want = losses(tmp_path / "micro1")
    for size in (2, 4):
        got = losses(tmp_path / f"micro{size}")
        assert all(got[step] == pytest.approx(want[step], rel=1e-4) for step in want) and len(got) == 4
    ok(train(data, tmp_path / "tokens", "--batch-tokens", 32, steps=4))
    assert [r["tokens"] for r in records(tmp_path / "tokens") if r["type"] == "step"] == [32, 64, 96, 128]
    ok(train(data, tmp_path / "default", "--batch-tokens", 0, "--micro-batch", 3, steps=4))
    assert [r["tokens"] for r in records(tmp_path / "default") if r["type"] == "step"] == [48, 96, 144, 192]
    done = ok(train(data, tmp_path / "length", "--seq-len", 8, steps=4))
    assert "64 tokens = 2 x 8, accumulated 4 times" in done.stderr and " 81 windows of 8, 0.40 epochs" in done.stderr
    assert losses(tmp_path / "length")[1] != want[1]


def test_virtual_ranks_are_a_run_of_their_own(data, tmp_path):
    """Another order of the same sum: the same losses but for rounding, bits of their own that a resume keeps, and one more
    buffer of gradients."""
    def ranks(name, number, steps=8, *more):
        return train(data, tmp_path / str(name), "--virtual-ranks", number, "--micro-batch", 1, "--schedule", "constant", *more,
                     steps=steps)
    done = {number: ok(ranks(number, number)) for number in (1, 2, 4)}
    for number, run in done.items():
        share = f"accumulated {4 // number} time{'s' if number < 4 else ''}" + (f" on each of {number} virtual ranks;" if number > 1 else ";")
        assert share in run.stderr
        assert json.loads((tmp_path / str(number) / "config.json").read_text())["settings"]["virtual-ranks"] == str(number)
        assert losses(tmp_path / str(number))[8] == pytest.approx(losses(tmp_path / "1")[8], rel=1e-4)
    assert len({state_bytes(tmp_path / str(number), 8)[1] for number in (1, 2, 4)}) == 3
    ok(ranks("halves", 2, 4))
    for number in (1, 4):
        assert_refused(ranks("halves", number), 2, "virtual-ranks", "was made with '2'")
    ok(ranks("halves", 2))
    assert losses(tmp_path / "halves") == losses(tmp_path / "2")
    assert state_bytes(tmp_path / "halves", 8)[0] == state_bytes(tmp_path / "2", 8)[0]

    plan = {number: ok(ranks("no", number, 8, "--dry-run")).stdout for number in (1, 2)}
    assert planned(plan[2], "sum of the ranks (fp32)") == planned(plan[1], "gradients (fp32)")
    assert planned(plan[2], "total") > planned(plan[1], "total") and "sum of the ranks" not in plan[1]
    assert "a step: 96 tokens = 2 x 16, accumulated 1 time on each of 3 virtual ranks;" in ok(
        train(data, tmp_path / "no", "--virtual-ranks", 3, "--batch-tokens", 0, "--dry-run")).stdout
    assert_refused(ranks("no", 3), 2, "--virtual-ranks: got 3", "divisor of the 4 micro-batches")
    if WITH_CUDA:
        on_gpu = ok(ranks("no", 2, 8, "--gpu-memory", "80GB", "--dry-run")).stdout
        assert planned(on_gpu, "sum of the ranks (fp32)") == planned(on_gpu, "gradients (fp32)")


def test_dropout_is_for_training_alone(data, tmp_path):
    """Nothing is learned at --lr 0: a mask shows in every step's loss and in no validation."""
    runs = {}
    for dropout in (0, 0.5):
        ok(train(data, tmp_path / str(dropout), "--lr", 0, "--dropout", dropout, "--val-every", 1, steps=4))
        runs[dropout] = [r for r in records(tmp_path / str(dropout)) if r["type"] == "step"]
    assert len(runs[0]) == len(runs[0.5]) == 4
    for without, dropped in zip(runs[0], runs[0.5]):
        assert dropped["loss"] != without["loss"] and dropped["val_loss"] == without["val_loss"]


# ---- the model -------------------------------------------------------------------------------------------------------

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 64,
         "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


@pytest.fixture
def shape(tmp_path):
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(SHAPE))
    return path


def test_norms_are_those_that_were_asked_for(data, tmp_path, shape):
    """LayerNorm takes the mean off and has a bias; a model file has its own kind, and no other."""
    first = {}
    for norm in ("rmsnorm", "layernorm"):
        ok(train(data, tmp_path / norm, "--model=", "--config", shape, "--norm", norm, steps=3))
        model = tmp_path / norm / "step_00000003" / "model.bin"
        biases = [name for name in tensor_file.read(model).tensors if name.endswith("norm.bias")]
        assert tensor_file.read(model).config["model"]["norm"] == norm
        assert len(biases) == (7 if norm == "layernorm" else 0)
        first[norm] = losses(tmp_path / norm)[1][0]
        other = "rmsnorm" if norm == "layernorm" else "layernorm"
        assert_refused(train(data, tmp_path / "x", "--model", model, "--norm", other), 2, "--norm", other, norm)
    assert first["rmsnorm"] != first["layernorm"] and abs(first["layernorm"] - np.log(128)) < 0.2


# ---- execution -------------------------------------------------------------------------------------------------------


def planned(text, line):
    """Bytes of a line of the memory table."""
    number, unit = re.search(rf"^  {re.escape(line)} +(\S+) (\S+)$", text, re.M).groups()
    return float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_recomputation_saves_memory_and_changes_no_bit(data, tmp_path, shape):
    options = ["--model=", "--config", shape, "--device", "cpu"]
    ways = ("none", "norm", "block")
    bytes_of = {}
    for way in ways:
        done = ok(train(data, tmp_path / way, *options, "--recompute", way, steps=4))
        bytes_of[way] = planned(done.stderr, "activations (fp32)")
    assert bytes_of["none"] > bytes_of["norm"] > bytes_of["block"]
    if WITH_CUDA:
        for way in ways:
            done = ok(train(data, tmp_path / "no", *options[:3], "--gpu-memory", "80GB", "--dry-run", "--recompute", way))
            bytes_of[way] = planned(done.stdout, "activations (bf16)")
        assert bytes_of["none"] > bytes_of["norm"] > bytes_of["block"]
    for way in ways[1:]:
        assert losses(tmp_path / way) == losses(tmp_path / "none")
        assert state_bytes(tmp_path / way, 4) == state_bytes(tmp_path / "none", 4)


def test_precision_and_moments_in_the_plan(data, tmp_path):
    """What a GPU would hold, on a machine without one; the CPU has fp32 alone, and takes it by itself."""
    for options in ([], ["--precision", "auto"], ["--precision", "fp32", "--moments", "fp32"]):
        done = ok(train(data, tmp_path / "no", *options, "--device", "cpu", "--dry-run"))
        assert "  parameters (fp32) " in done.stdout and re.search(r"^  precision +fp32$", done.stdout, re.M)
    assert_refused(train(data, tmp_path / "no", "--device", "cpu", "--precision", "bf16"), 2, "--precision", "fp32 and fp8 only")
    assert_refused(train(data, tmp_path / "no", "--device", "cpu", "--moments", "bf16"), 2, "--moments", "needs a GPU")
    if not WITH_CUDA:
        return
    gpu = ["--gpu-memory", "80GB", "--dry-run"]
    for precision, expected in (("auto", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")):
        done = ok(train(data, tmp_path / "no", *gpu, "--precision", precision))
        assert f"  parameters ({expected}) " in done.stdout and f"  activations ({expected}) " in done.stdout
    full = planned(ok(train(data, tmp_path / "no", *gpu, "--moments", "fp32")).stdout, "AdamW moments (fp32)")
    half = planned(ok(train(data, tmp_path / "no", *gpu, "--moments", "bf16")).stdout, "AdamW moments (bf16)")
    assert half == pytest.approx(full / 2, rel=0.01)
    assert_refused(train(data, tmp_path / "no", *gpu, "--moments", "bf16", "--precision", "fp32"), 2, "--moments")


def test_fp8_counts_what_rounding_loses(data, tmp_path):
    """The linear layers of the blocks alone: near fp32, with its own numbers in the log, killed and resumed bit for bit."""
    small = [*fp8_shape(tmp_path / "shape"), "--device", "cpu", "--val="]
    fp8 = [*small, "--precision", "fp8"]
    ok(train(data, tmp_path / "fp32", *small, steps=6))
    ok(train(data, tmp_path / "fp8", *fp8, steps=6))
    want, got = losses(tmp_path / "fp32"), losses(tmp_path / "fp8")
    assert all(1e-6 < abs(got[step][0] / want[step][0] - 1) < 0.05 for step in want)
    steps = [record for record in records(tmp_path / "fp8") if record["type"] == "step"]
    for record in steps:
        assert set(record["fp8"]) == {"input", "weight", "gradient"}
        assert all(0 <= kind["saturated"] <= kind["values"] and 0 <= kind["flushed"] < kind["values"] / 10
                   for kind in record["fp8"].values())
    assert steps[0]["fp8"]["weight"]["saturated"] == 0 and "fp8" not in records(tmp_path / "fp32")[2]
    train(data, tmp_path / "killed", *fp8, "--debug-inject", "kill@step=6", steps=6)
    ok(train(data, tmp_path / "killed", *fp8, steps=6))
    assert losses(tmp_path / "killed") == got
    assert state_bytes(tmp_path / "killed", 6) == state_bytes(tmp_path / "fp8", 6)
    done = ok(train(data, tmp_path / "no", *fp8, "--dry-run"))
    assert "  operands rounded to fp8 (fp32) " in done.stdout
    assert_refused(train(data, tmp_path / "no", *fp8, "--seq-len", 15, "--batch-tokens", 30), 2, "--micro-batch x --seq-len: got 30")
    if WITH_CUDA:
        done = ok(train(data, tmp_path / "no", *small[:3], "--gpu-memory", "80GB", "--dry-run", "--precision", "fp8"))
        assert "  weights and operands (fp8) " in done.stdout and "  activations (bf16) " in done.stdout


def test_threads_are_as_many_as_asked_for(data, tmp_path):
    """Threads of a process that hangs behind its second step."""
    count = {}
    for threads in (1, 3):
        out = tmp_path / str(threads)
        process = start(data, out, "--device", "cpu", "--threads", threads, "--save-every", 0, "--val=", "--debug-inject",
                        "hang@step=3")
        wait_for(lambda out=out: (out / "log.jsonl").exists() and any(r.get("step") == 2 for r in records(out)))
        count[threads] = len(os.listdir(f"/proc/{process.pid}/task"))
        header = records(out)[0]
        assert header["settings"]["threads"] == str(threads)
        process.kill()
        process.wait()
    assert count[3] >= count[1] + 2, "every thread that starts a parallel region has helpers of its own"
    assert losses(tmp_path / "3") == losses(tmp_path / "1"), "the same bits"


def test_the_device_that_was_chosen_is_the_one_of_the_run(data, tmp_path):
    for device in ("cpu", "auto"):
        ok(train(data, tmp_path / device, "--device", device, env={"CUDA_VISIBLE_DEVICES": ""}, steps=2))
        header = records(tmp_path / device)[0]
        assert (header["device"], header["settings"]["device"], header["settings"]["precision"]) == ("cpu", "cpu", "fp32")
    assert losses(tmp_path / "cpu") == losses(tmp_path / "auto")


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_measurements_come_when_asked_for(data, tmp_path):
    for every, steps in ((3, [3, 6, 9, 10]), (0, [10])):
        ok(train(data, tmp_path / str(every), "--val-every", every, steps=10))
        assert [r["step"] for r in records(tmp_path / str(every)) if "val_loss" in r] == steps
    ok(train(data, tmp_path / "two", "--val-batches", 1, "--val-every", 0, steps=10))
    ok(train(data, tmp_path / "all", "--val-batches", 0, "--val-every", 0, steps=10))
    one, some, every = (next(r["val_loss"] for r in records(tmp_path / name) if "val_loss" in r) for name in ("two", "0", "all"))
    assert len({one, some, every}) == 3, "of one micro-batch, of two, of all"


def test_checkpoints_come_when_asked_for(data, tmp_path):
    for every, names in ((5, ["step_00000005", "step_00000010", "step_00000012"]), (0, ["step_00000012"])):
        ok(train(data, tmp_path / str(every), "--save-every", every, "--keep", 9))
        assert checkpoints(tmp_path / str(every)) == names


@pytest.fixture
def texts(tmp_path):
    """Shards with a tokenizer beside them."""
    make_texts(tmp_path / "texts")
    return tmp_path / "texts"


def samples(texts, out, *options):
    """The samples of a run that learns nothing: what they differ by are the choices."""
    ok(train(texts, out, "--config", "tiny", "--model=", "--val=", "--lr", 0, "--batch-tokens", 0, "--micro-batch", 1,
             "--save-every", 0, "--sample-prompt", "Once", *options, steps=6))
    return [(r["step"], r["text"]) for r in records(out) if r["type"] == "sample"]


def test_samples_are_as_long_and_as_random_as_asked_for(texts, tmp_path):
    greedy = samples(texts, tmp_path / "greedy", "--sample-every", 2, "--temperature", 0, "--sample-tokens", 12)
    assert [step for step, _ in greedy] == [2, 4, 6]
    assert len({text for _, text in greedy}) == 1, "the likeliest token of the same parameters"
    shorter = samples(texts, tmp_path / "short", "--sample-every", 5, "--temperature", 0, "--sample-tokens", 3)
    assert [step for step, _ in shorter] == [5, 6]
    long, short = greedy[0][1], shorter[0][1]
    assert short.startswith("Once") and long.startswith(short.rstrip("\ufffd")) and len(long) > len(short) > len("Once")
    hot = samples(texts, tmp_path / "hot", "--sample-every", 2, "--temperature", 100, "--sample-tokens", 12)
    assert len({text for _, text in hot}) == 3 and long not in {text for _, text in hot}
    assert samples(texts, tmp_path / "none", "--sample-every", 0) == []


def test_a_benchmark_measures_the_step_that_was_asked_for(tmp_path):
    words = ["--model", MODEL, "--device", "cpu", "--bench", "--seq-len", 16, "--micro-batch", 2]
    result = json.loads(ok(run_program(*words, "--batch-tokens", 64, "--json", cwd=tmp_path)).stdout)
    assert (result["tokens"], result["seq_len"], result["micro_batch"], result["precision"]) == (64, 16, 2, "fp32")
    assert result["median_ms"] > 0 and result["tokens_per_s"] == pytest.approx(64e3 / result["median_ms"], rel=1e-6)
    assert result["last_loss"] < result["first_loss"], "it trains on the same tokens"
    uniform = tensor_file.read(MODEL)
    with tensor_file.Writer(tmp_path / "uniform.bin", "model", uniform.config) as writer:
        for name, info in uniform.tensors.items():
            writer.declare(name, info.dtype, info.shape)
        for name in uniform.tensors:
            writer.write(name, 0 * uniform.array(name))
    zeros = ok(run_program("--model", tmp_path / "uniform.bin", *words[2:], "--batch-tokens", 64, "--json"))
    assert json.loads(zeros.stdout)["first_loss"] == pytest.approx(np.log(64), rel=1e-6), "of the model's own weights"
    (tmp_path / "uniform.bin").unlink()
    text = ok(run_program(*words, cwd=tmp_path)).stdout
    assert re.match(r"CPU: \d+ tokens/s; a step of 32 tokens in \d+\.\d\d ms ", text) and "on the same random tokens" in text
    assert list(tmp_path.iterdir()) == [], "nothing is saved"
    adapter = ["--config", "tiny:int4", *words[2:], "--lora-r", 4, "--json"]
    result = json.loads(ok(run_program(*adapter, cwd=tmp_path)).stdout)
    assert result["config"] == "tiny:int4" and result["last_loss"] < result["first_loss"]
    assert_refused(run_program("--config", "tiny:int5", *adapter[2:]), 2, "--config", "int5")
    assert_refused(run_program("--config", "tiny:int4", *words[2:]), 2, "--config", "tiny:int4")
    assert_refused(run_program(*words, "--operators"), 2, "--operators", "the clock is the GPU's")
    assert_refused(run_program(*words[:4], "--operators", "--print-config"), 2, "--operators", "--bench")


def in_terminal(*words, **env):
    """What the program writes to a terminal as its stderr."""
    master, slave = pty.openpty()
    process = subprocess.Popen([str(PROGRAM), *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=slave, env={k: v for k, v in environment(**env).items() if k != "NO_COLOR"})
    os.close(slave)
    output = b""
    while select.select([master], [], [], SECONDS)[0]:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        output += piece
    process.wait(timeout=SECONDS)
    os.close(master)
    return output


def test_colour_is_for_terminals_or_on_demand():
    red = b"\x1b[31merror:"
    for color, in_pipe, on_terminal in (("auto", False, True), ("always", True, True), ("never", False, False)):
        words = ["--model", Path("missing.bin"), "--print-config", "--color", color]
        assert (red in run_program(*words).stderr.encode()) == in_pipe, color
        assert (red in in_terminal(*words, TERM="xterm")) == on_terminal, color
