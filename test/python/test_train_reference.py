"""train_reference.py: its data order, initialisation and schedule are those of weft, and so are the losses of a run.

The data order is compared with the program build/release/data_order (`make tests`; WEFT_BUILD names another build
directory), whole runs with train_llama (WEFT_BIN_DIR). Training in PyTorch needs torch and transformers.
"""

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import token_shard  # noqa: E402
import train_reference  # noqa: E402
from tensor_file import FileError  # noqa: E402

SCRIPT = ROOT / "scripts" / "train_reference.py"
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)).absolute() / "train_llama"
DATA_ORDER = Path(os.environ.get("WEFT_BUILD", ROOT / "build" / "release")).absolute() / "data_order"
GOLDEN = ROOT / "test" / "fixtures" / "golden"
SECONDS = 300

needs_data_order = pytest.mark.skipif(not DATA_ORDER.exists(), reason=f"{DATA_ORDER} is not built")
needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built")
needs_torch = pytest.mark.skipif(not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
                                 reason="torch or transformers is not installed")


def run(command, **more):
    # One thread: the models are so small that waking a second one costs more than its work.
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=SECONDS,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, **more)


def write_shards(directory, vocabulary=59, counts=(300, 170, 90)):
    """Tokens without a period, so that no two windows are alike."""
    directory.mkdir()
    generator = np.random.default_rng(3)
    for number, count in enumerate(counts):
        writer = token_shard.ShardWriter(directory / f"train_{number}.bin", vocabulary, tokenizer_hash=7)
        writer.write(generator.integers(0, vocabulary, count) // generator.integers(1, 5, count))
        writer.close()
    return directory


EPS = 1e-5  # so large that a gradient of rounding noise does not move its parameter by the learning rate


def train(tmp_path, steps=5, model=GOLDEN / "llama-hs64-gqa3-tied.model.bin", **options):
    """A short run of train_llama on random tokens; its directory. `options` replace those here."""
    data = write_shards(tmp_path / "shards")
    start = {"model": model} if model else {"config": "tiny"}
    chosen = start | {"train": data / "train_*.bin", "out": tmp_path / "run", "device": "cpu", "steps": steps,
                      "micro_batch": 2, "seq_len": 16, "warmup_steps": 1, "lr": 3e-3, "eps": EPS,
                      "save_every": 0} | options
    done = run([PROGRAM, *(f"--{name.replace('_', '-')}={value}" for name, value in chosen.items())])
    assert done.returncode == 0, done.stderr
    return tmp_path / "run"


# ---- the data order --------------------------------------------------------------------------------------------------


@needs_data_order
@pytest.mark.parametrize("count, seed, begin, number", [
    (1, 1, 0, 5), (2, 0, 0, 9), (3, 7, 1, 20), (17, 2**63 - 1, 10, 200), (64, 5, 0, 64), (65, 5, 0, 200),
    (1000, 2**40 + 3, 2500, 1200), (5_000_000_000, 11, 4_999_999_900, 300)])
def test_data_order_equals_that_of_weft(count, seed, begin, number):
    done = run([DATA_ORDER, count, seed, begin, number])
    assert done.returncode == 0, done.stderr
    assert train_reference.DataOrder(count, seed).windows(begin, number).tolist() == list(map(int, done.stdout.split()))


def test_data_order_of_a_known_run():
    """The first two epochs of seed 1 over ten windows, as weft's program printed them."""
    order = train_reference.DataOrder(10, 1).windows(0, 20).tolist()
    assert order == [0, 9, 3, 4, 6, 8, 7, 2, 5, 1, 5, 2, 1, 3, 9, 7, 8, 4, 0, 6]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))


@needs_program
def test_windows_do_not_cross_shards(tmp_path):
    directory = train(tmp_path, steps=1)
    description = train_reference.read_description(directory)
    windows = train_reference.Windows(description, description.settings.train)
    assert windows.first_window.tolist() == [0, 18, 28, 33]  # 299, 169 and 89 tokens with a label, 16 a window
    tokens = [token_shard.TokenShard(path).tokens for path in sorted((tmp_path / "shards").iterdir())]
    assert np.array_equal(windows._window(17), tokens[0][17 * 16:18 * 16 + 1])
    assert np.array_equal(windows._window(18), tokens[1][:17])
    assert np.array_equal(windows._window(32), tokens[2][4 * 16:5 * 16 + 1])


# ---- initialisation and schedule -------------------------------------------------------------------------------------


@needs_program
def test_initialisation_equals_that_of_weft(tmp_path):
    """A step with learning rate 0 saves the parameters as they were made."""
    directory = train(tmp_path, steps=1, model=None, lr=0, seed=12345)
    file, model, _ = train_reference.read_model(directory / "step_00000001" / "model.bin")
    for name, values in train_reference.initial_tensors(model, 12345):
        # log, cos and sin of another library may differ in the last bit, and then the float they round to.
        np.testing.assert_allclose(values, file.f32(name), rtol=2.0**-23, atol=0, err_msg=name)


@needs_program
@pytest.mark.parametrize("options", [
    {"schedule": "cosine", "warmup_steps": 4}, {"schedule": "linear", "min_lr_ratio": 0}, {"schedule": "constant"},
    {"schedule": "wsd", "wsd_decay_fraction": 0.35}, {"warmup_steps": 0}])
def test_schedule_equals_that_of_weft(tmp_path, options):
    directory = train(tmp_path, steps=13, model=GOLDEN / "llama-hs32-mha.model.bin", **options)
    settings = train_reference.read_description(directory).settings
    logged = [record["lr"] for record in train_reference.read_losses(directory, 13)]
    assert [train_reference.learning_rate(settings, step) for step in range(1, 14)] == pytest.approx(logged, rel=1e-12)


SETTINGS = train_reference.Settings(
    model_file="", train="", steps=12, micro_batch=1, seq_len=1, batch_tokens=1, lr=0.4, min_lr_ratio=0.1, warmup_steps=0, schedule="wsd",
    wsd_decay_fraction=0.2, weight_decay=0, beta1=0, beta2=0, eps=1, grad_clip=0, seed=1)


@pytest.mark.parametrize("steps, fraction, decay", [
    (10, 0.2, 2), (10, 0.24, 2), (10, 0.25, 3), (10, 0.26, 3), (13, 0.35, 5), (13, 0.5, 7), (14, 0.25, 4), (10, 0.04, 0), (10, 0.05, 1),
    (10, 0, 0), (10, 1, 8), (10, 0.75, 8), (10, 0.9, 8), (1000, 0.2005, 201), (1000, 0.2004, 200)])
def test_wsd_decays_over_the_nearest_number_of_steps(steps, fraction, decay):
    """As llmc/train/schedule.h has it: half a step counts as one, and the warm-up is never cut."""
    settings = replace(SETTINGS, steps=steps, schedule="wsd", warmup_steps=2, wsd_decay_fraction=fraction)
    rates = [train_reference.learning_rate(settings, step) for step in range(1, steps + 1)]
    shape = [0.04 + 0.36 * (1 - math.sqrt(done / decay)) for done in range(decay)]
    assert rates == pytest.approx([0.2, 0.4, *[0.4] * (steps - decay - 2), *shape], rel=1e-12)


@pytest.mark.parametrize("schedule, shape", [
    ("cosine", lambda done: 0.5 * (1 + math.cos(math.pi * done))), ("linear", lambda done: 1 - done), ("constant", lambda done: 1)])
@pytest.mark.parametrize("warm_up", [0, 1, 4, 12])
def test_a_schedule_begins_after_the_warm_up(schedule, shape, warm_up):
    settings = replace(SETTINGS, schedule=schedule, warmup_steps=warm_up)
    rates = [train_reference.learning_rate(settings, step) for step in range(1, 13)]
    after = [0.04 + 0.36 * shape((step - warm_up) / (12 - warm_up)) for step in range(warm_up, 12)]
    assert rates == pytest.approx([0.4 * (step + 1) / warm_up for step in range(warm_up)] + after, rel=1e-12)


# ---- whole runs ------------------------------------------------------------------------------------------------------


def compare(directory, *options):
    """The program itself."""
    return run([sys.executable, SCRIPT, directory, "--threads", 1, "--against", directory / "log.jsonl", *options])


def repeated(directory):
    """The records of the run in PyTorch, without starting Python again."""
    train_reference.libraries()[0].set_num_threads(1)
    description = train_reference.read_description(directory)
    windows = train_reference.Windows(description, description.settings.train)
    model = train_reference.make_model(description, description.settings.model_file, "cpu")
    trainer = train_reference.Trainer(description, windows, model, "fp32")
    return train_reference.train(trainer, description.settings.steps, io.StringIO())


def verdict(directory, tolerance=1e-4, smooth=1):
    return train_reference.compare(directory / "log.jsonl", repeated(directory), tolerance, smooth)


@needs_program
@needs_torch
@pytest.mark.parametrize("model, options", [
    ("llama-hs64-gqa3-tied", {"batch_tokens": 96, "grad_clip": 0.5}),  # llama3 scaling, tied; clips, accumulates
    ("llama-hs32-gqa2", {"grad_clip": 0, "weight_decay": 0.3, "beta2": 0.99, "schedule": "wsd"}),
    ("llama-hs32-mha", {"steps": 20, "seed": 9})])  # 16-bit weights, more than an epoch
def test_losses_equal_those_of_weft(tmp_path, model, options):
    directory = train(tmp_path, model=GOLDEN / f"{model}.model.bin", **options)
    got = verdict(directory, tolerance=1e-6)  # fp32 resolves 1e-7 of a loss
    assert got["passed"] and got["steps"] == options.get("steps", 5), got
    assert got["grad_norm_max_relative"] < 1e-5, got


@needs_program
@needs_torch
def test_the_program_compares_a_run_from_scratch(tmp_path):
    directory = train(tmp_path, steps=2, model=None)
    done = compare(directory, "--tolerance", 1e-5)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["type"] for record in records] == ["step", "step", "comparison"] and records[-1]["passed"]
    assert done.stderr.startswith("passed: 2 steps")
    done = compare(directory, "--tolerance", 0, "-o", tmp_path / "records.jsonl")
    assert done.returncode == 1 and done.stderr.startswith("FAILED: 2 steps") and not done.stdout
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3


@needs_program
@needs_torch
@pytest.mark.parametrize("setting, value", [("weight-decay", "10"), ("seed", "6"), ("beta1", "0.8"), ("beta2", "0.9"),
                                            ("eps", "0.001"), ("grad-clip", "0.1")])
def test_another_setting_is_another_run(tmp_path, setting, value):
    directory = train(tmp_path, seed=5)
    changed = json.loads((directory / "config.json").read_text())
    changed["settings"][setting] = value
    (directory / "config.json").write_text(json.dumps(changed))
    assert not verdict(directory)["passed"]


@needs_program
@needs_torch
def test_where_the_largest_difference_is(tmp_path):
    directory = train(tmp_path)
    log = directory / "log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["type"] == "step" and record["step"] == 4:
            record["loss"] *= 1.001
    log.write_text("\n".join(map(json.dumps, records)) + "\n")
    got = verdict(directory)
    assert not got["passed"] and got["loss_step"] == 4
    assert got["loss_max_relative"] == pytest.approx(1e-3, rel=0.02)
    assert verdict(directory, tolerance=5e-4, smooth=5)["passed"]


@needs_program
def test_refusals(tmp_path):
    directory = train(tmp_path, steps=2)
    done = compare(directory, "--steps", 3)
    assert done.returncode == 2 and "--steps: got 3, expected at most the 2 of the run" in done.stderr
    description = train_reference.read_description(directory)
    with pytest.raises(FileError, match="no file matches this pattern"):
        train_reference.Windows(description, str(tmp_path / "nothing_*.bin"))
    write_shards(tmp_path / "others", counts=(301, 170, 90))
    with pytest.raises(FileError, match="not the shards of the run"):
        train_reference.Windows(description, str(tmp_path / "others" / "train_*.bin"))
    with pytest.raises(FileError, match="the tensors are not those of the run"):
        dict(train_reference.file_tensors(GOLDEN / "llama-hs32-mha.model.bin", description.model))
    with pytest.raises(FileError, match="step 3: missing"):
        train_reference.read_losses(directory, 3)
    records = [{"step": step, "loss": 1.0, "lr": 0.004, "grad_norm": 1.0} for step in (1, 2)]
    with pytest.raises(FileError, match="The log is not that of these settings"):
        train_reference.compare(directory, records, 1e-4, 1)


@pytest.mark.parametrize("change, words", [
    ({"dropout": "0.1"}, "expected 0"), ({"steps": None}, "settings.steps"), ({"lr": "nan"}, "settings.lr"),
    ({"schedule": "up"}, "settings.schedule"), ({"batch-tokens": "33"}, "do not fit together")])
def test_runs_that_cannot_be_repeated(tmp_path, change, words):
    settings = {"train": "x", "steps": "5", "micro-batch": "2", "seq-len": "16", "batch-tokens": "0", "lr": "0.1",
                "min-lr-ratio": "0.1", "warmup-steps": "2", "schedule": "wsd", "wsd-decay-fraction": "0.2",
                "weight-decay": "0", "beta1": "0.9", "beta2": "0.95", "eps": "1e-8", "grad-clip": "1", "seed": "1",
                "dropout": "0", "model": ""}
    model = train_reference.read_model(GOLDEN / "llama-hs32-mha.model.bin")[1].to_json()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"settings": settings, "model": model}))
    assert train_reference.read_description(path).settings.accumulation == 1
    path.write_text(json.dumps({"settings": settings | {"virtual-ranks": "3"}, "model": model}))
    assert train_reference.read_description(path).settings.accumulation == 3
    path.write_text(json.dumps({"settings": settings | change, "model": model}))
    with pytest.raises(FileError, match=words) as refused:
        train_reference.read_description(path)
    assert refused.value.code == 3
