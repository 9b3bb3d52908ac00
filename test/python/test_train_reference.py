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
from conversation_shards import write_conversations, write_pairs  # noqa: E402
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


def write_shards(directory, vocabulary=59, counts=(300, 170, 90), end_of_document=-1):
    """Tokens without a period, so that no two windows are alike."""
    directory.mkdir()
    generator = np.random.default_rng(3)
    for number, count in enumerate(counts):
        writer = token_shard.ShardWriter(directory / f"train_{number}.bin", vocabulary, tokenizer_hash=7, end_of_document_id=end_of_document)
        writer.write(generator.integers(0, vocabulary, count) // generator.integers(1, 5, count))
        writer.close()
    return directory


EPS = 1e-5  # so large that a gradient of rounding noise does not move its parameter by the learning rate


def train(tmp_path, steps=5, model=GOLDEN / "llama-hs64-gqa3-tied.model.bin", **options):
    """A short run of train_llama on random tokens; its directory. `options` replace those here."""
    data = write_shards(tmp_path / "shards")
    start = {"model": model} if model else {} if "config" in options else {"config": "tiny"}
    if "epochs" not in options:
        start["steps"] = steps
    chosen = start | {"train": data / "train_*.bin", "out": tmp_path / "run", "device": "cpu",
                      "micro_batch": 2, "seq_len": 16, "warmup_steps": 1, "lr": 3e-3, "eps": EPS,
                      "save_every": 0} | options
    done = run([PROGRAM, *(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in chosen.items())])
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
    for window, want in ((17, tokens[0][17 * 16:18 * 16 + 1]), (18, tokens[1][:17]), (32, tokens[2][4 * 16:5 * 16 + 1])):
        inputs, labels, _ = windows._of_text(window)
        assert np.array_equal(inputs, want[:-1]) and np.array_equal(labels, want[1:])


# ---- initialisation and schedule -------------------------------------------------------------------------------------


NEOX = {"model_type": "gpt_neox", "hidden_act": "gelu", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": 64, "rotary_pct": 0.25}
GEMMA = {"model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 8}


@needs_program
@pytest.mark.parametrize("shape", [None, NEOX, GEMMA])
def test_initialisation_equals_that_of_weft(tmp_path, shape):
    """A step with learning rate 0 saves the parameters as they were made."""
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    directory = train(tmp_path, steps=1, model=None, lr=0, seed=12345, **({"config": tmp_path / "shape.json"} if shape else {}))
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
    ("llama-hs32-mha", {"steps": 20, "seed": 9}),  # 16-bit weights, more than an epoch
    ("neox-train", {"batch_tokens": 96, "grad_clip": 0.5}),  # parallel residual
    ("neox-train-sequential-nobias", {"weight_decay": 0.3, "schedule": "wsd"}),
    ("gemma3-local", {"batch_tokens": 96, "grad_clip": 0.5}),
    ("gemma3-gqa2-biases", {"weight_decay": 0.3, "schedule": "wsd"})])
def test_losses_equal_those_of_weft(tmp_path, model, options):
    directory = train(tmp_path, model=GOLDEN / f"{model}.model.bin", **options)
    got = verdict(directory, tolerance=1e-6)  # fp32 resolves 1e-7 of a loss
    assert got["passed"] and got["steps"] == options.get("steps", 5), got
    assert got["grad_norm_max_relative"] < 1e-5, got


@needs_program
@needs_torch
@pytest.mark.parametrize("options", [{"batch_tokens": 96, "grad_clip": 0.5}, {"batch_tokens": 64, "grad_clip": 0, "epochs": 1.5},
                                     {"seq_len": 40, "batch_tokens": 160}, {"batch_tokens": 64, "no_pack": True}])
@pytest.mark.parametrize("model", ["llama-hs32-gqa2", "qwen3-gqa2"])
def test_losses_of_conversations_equal_those_of_weft(tmp_path, model, options):
    """In packed rows, with a mask of blocks and position_ids for transformers, and in rows of their own."""
    data = write_conversations(tmp_path / "chats", 43, 7)
    directory = train(tmp_path, model=GOLDEN / f"{model}.model.bin", train=data / "train_*.bin", **options)
    got = verdict(directory, tolerance=1e-6)
    assert got["passed"] and got["grad_norm_max_relative"] < 1e-5, got


@needs_program
@needs_torch
@pytest.mark.parametrize("model, options", [
    ("llama-hs32-gqa2", {"batch_tokens": 96, "grad_clip": 0.5}), ("llama-hs32-gqa2", {"micro_batch": 1, "dpo_beta": 0.5, "seq_len": 40, "lr": 1e-3}),
    ("qwen3-gqa2", {"lora_r": 3, "lr": 0.01}), ("neox-train", {"lr": 1e-3}), ("neox-train", {"lora_r": 3, "lr": 0.01})])
def test_losses_of_preferences_equal_those_of_weft(tmp_path, model, options):
    """DPO from its formula, by autograd, beside the reference that the run began with."""
    if "lora_r" in options:
        pytest.importorskip("peft")
    data = write_pairs(tmp_path / "pairs", 29 if model == "neox-train" else 43, 7)  # the tokens of its tokenizer
    chosen = {"seq_len": 24, "batch_tokens": 48 if "seq_len" not in options else 80} | options
    directory = train(tmp_path, steps=10, model=GOLDEN / f"{model}.model.bin", train=data / "train_*.bin", objective="dpo", **chosen)
    got = verdict(directory, tolerance=1e-5)
    assert got["passed"] and got["grad_norm_max_relative"] < 1e-4, got
    losses = [record["loss"] for record in train_reference.read_losses(directory, 10)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and min(losses) < 0.67


@needs_program
@needs_torch
def test_losses_of_masked_text_equal_those_of_weft(tmp_path):
    data = write_shards(tmp_path / "texts", end_of_document=0)
    directory = train(tmp_path, train=data / "train_*.bin", document_mask=True)
    got = verdict(directory, tolerance=1e-6)
    assert got["passed"] and got["grad_norm_max_relative"] < 1e-5, got
    learned = [record["learned_tokens"] for record in train_reference.read_losses(directory, 5)]
    assert len(set(learned)) > 1 and all(10 < count < 32 for count in learned)


@needs_program
@pytest.mark.parametrize("seq_len", [9, 16, 23])
def test_packed_rows_are_those_of_weft(tmp_path, seq_len):
    """The witness packs for itself: what the run logs of each step is the number of learned labels in its rows."""
    data = write_conversations(tmp_path / "chats", 59, 7)
    directory = train(tmp_path, steps=8, model=GOLDEN / "llama-hs32-gqa2.model.bin", train=data / "train_*.bin", seq_len=seq_len)
    windows = train_reference.Windows(train_reference.read_description(directory), str(data / "train_*.bin"))
    assert len(windows.documents) > 15 and len(windows.rows_of) < 0.9 * len(windows.documents)
    assert sorted(sum(windows.rows_of, [])) == list(range(len(windows.documents)))
    for row, documents in enumerate(windows.rows_of):
        inputs, labels, starts = windows._packed(row)
        parts = [windows.documents[document] for document in documents]
        tokens = np.concatenate([tokens[:-1] for tokens, _ in parts])
        assert inputs[:tokens.size].tolist() == tokens.tolist() and not (labels[tokens.size:] != -100).any()
        assert sum(int(learned[1:].sum()) for _, learned in parts) == (labels != -100).sum()
        begins = np.cumsum([0] + [tokens.size - 1 for tokens, _ in parts])
        assert sorted(set(starts.tolist()) - {seq_len}) == [begin for begin in begins.tolist() if begin < seq_len]
    logged = [record["learned_tokens"] for record in train_reference.read_losses(directory, 8)]
    assert logged == [int((windows.rows(2 * step, 2).labels != -100).sum()) for step in range(8)] and len(set(logged)) > 1


@needs_program
def test_rows_of_conversations_are_those_of_weft(tmp_path):
    """The same with a row for each conversation. One that is too long ends behind an answer."""
    data = write_conversations(tmp_path / "chats", 59, 7)
    directory = train(tmp_path, steps=8, model=GOLDEN / "llama-hs32-gqa2.model.bin", train=data / "train_*.bin", batch_tokens=96,
                      no_pack=True)
    windows = train_reference.Windows(train_reference.read_description(directory), str(data / "train_*.bin"))
    rows = []
    for shard in map(token_shard.TokenShard, sorted(data.iterdir())):
        learned = shard.learned()
        for begin, end in zip(shard.starts, shard.starts[1:]):
            if end - begin > 17:
                end = begin + 17
                while end > begin and not (learned[end - 1] and not learned[end]):
                    end -= 1
            if learned[begin + 1:end].any():
                rows.append((shard.tokens[begin:end], learned[begin + 1:end]))
    assert 20 < len(rows) < 41 and windows.order.count == len(rows)
    for position, window in enumerate(windows.order.windows(0, 50)):
        tokens, learned = rows[int(window)]
        inputs, labels, starts, _ = windows.rows(position, 1)
        want = np.where(learned, tokens[1:].astype(np.int64), -100).tolist() + [-100] * (16 - learned.size)
        assert inputs[0, :learned.size].tolist() == tokens[:-1].tolist() and labels[0].tolist() == want and starts is None
    logged = [record["learned_tokens"] for record in train_reference.read_losses(directory, 8)]
    assert logged == [int((windows.rows(6 * step, 6).labels != -100).sum()) for step in range(8)] and len(set(logged)) > 1


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


# ---- settings, shards and logs, without a program --------------------------------------------------------------------

STORED = {"train": "x", "steps": "5", "micro-batch": "2", "seq-len": "16", "batch-tokens": "64", "lr": "0.1", "min-lr-ratio": "0.2", "warmup-steps": "3",
          "schedule": "wsd", "wsd-decay-fraction": "0.25", "weight-decay": "0.5", "beta1": "0.9", "beta2": "0.95", "eps": "1e-8", "grad-clip": "0",
          "seed": "7", "dropout": "0", "model": ""}
LLAMA = train_reference.read_model(GOLDEN / "llama-hs32-mha.model.bin")[1]


def described(path, changes=None, **more):
    settings = {name: value for name, value in (STORED | (changes or {})).items() if value is not None}
    (path / "config.json").write_text(json.dumps({"settings": settings, "model": LLAMA.to_json()} | more))
    return train_reference.read_description(path)


@pytest.mark.parametrize("changes, expected", [
    ({}, 64), ({"batch-tokens": "0"}, 32), ({"batch-tokens": "32"}, 32), ({"batch-tokens": "0", "virtual-ranks": "1"}, 32),
    ({"batch-tokens": "0", "virtual-ranks": "3"}, 96), ({"batch-tokens": "64", "virtual-ranks": "4"}, 64), ({"steps": "1"}, 64)])
def test_a_batch_of_0_tokens_is_one_window_row_of_each_rank(tmp_path, changes, expected):
    settings = described(tmp_path, changes).settings
    assert settings.batch_tokens == expected and settings.accumulation == expected // 32


@pytest.mark.parametrize("name", STORED)
def test_a_setting_that_is_missing_or_no_text_is_named(tmp_path, name):
    for value in (None, 1):
        with pytest.raises(FileError, match=f"settings.{name}: got .*, expected a setting of train_llama") as refused:
            described(tmp_path, {name: value})
        assert refused.value.code == 3


@pytest.mark.parametrize("changes, more, words", [
    ({"steps": "0"}, {}, "do not fit together"), ({"micro-batch": "0"}, {}, "do not fit together"), ({"seq-len": "-16"}, {}, "do not fit together"),
    ({"batch-tokens": "48"}, {}, "do not fit together"), ({"lr": "inf"}, {}, "settings.lr"), ({"steps": "5.0"}, {}, "settings.steps"),
    ({"optimizer": "muon"}, {}, "settings.optimizer: got 'muon'"), ({"virtual-ranks": "x"}, {}, "settings.virtual-ranks"), ({}, {"settings": []}, "missing: this is no config.json"),
    ({}, {"model": train_reference.read_model(GOLDEN / "neox-tanh-yarn.model.bin")[1].to_json()}, "model.family: got 'gpt_neox'")])
def test_settings_that_are_refused(tmp_path, changes, more, words):
    with pytest.raises(FileError, match=words) as refused:
        described(tmp_path, changes, **more)
    assert refused.value.code == 3
    (tmp_path / "config.json").write_text('{"settings": {}}')
    with pytest.raises(FileError, match="missing: this is no config.json"):
        train_reference.read_description(tmp_path)


def shards_of(tmp_path, **changes):
    """A description of the three shards of write_shards(), 16 tokens a window."""
    directory = write_shards(tmp_path / "shards")
    records = [{"name": path.name, "tokens": token_shard.TokenShard(path).count, "xxh3": train_reference.header_hash(path)}
               for path in sorted(directory.iterdir())]
    return directory, described(tmp_path, changes, train=records)


def test_windows_are_cut_from_each_shard_and_handed_out_in_order(tmp_path):
    directory, description = shards_of(tmp_path)
    (directory / "train_3.bin").mkdir()
    windows = train_reference.Windows(description, str(directory / "train_*.bin"))
    assert windows.first_window.tolist() == [0, 18, 28, 33]
    tokens = [token_shard.TokenShard(directory / f"train_{number}.bin").tokens for number in range(3)]
    every = [piece[begin:begin + 17].tolist() for piece in tokens for begin in range(0, len(piece) - 16, 16)]
    assert len(every) == 33
    order = train_reference.DataOrder(33, 7).windows(0, 70).tolist()
    for begin, number in ((0, 33), (30, 8), (64, 3), (5, 1)):
        rows, want = windows.rows(begin, number), np.array([every[order[begin + row]] for row in range(number)])
        assert rows.inputs.dtype == np.int64 and rows.starts is None
        assert rows.inputs.tolist() == want[:, :-1].tolist() and rows.labels.tolist() == want[:, 1:].tolist()


@pytest.mark.parametrize("counts, lengths", [
    ((9, 9), [9, 9]), ((9, 8), [17]), ((8, 9), [17]), ((1, 1, 2, 5), [9]), ((4, 4, 4, 4, 4, 5), [25]), ((20, 3, 20, 1), [23, 21])])
def test_a_short_shard_is_joined_to_its_neighbour(tmp_path, counts, lengths):
    """As Loader.AShortShardIsJoinedToItsNeighbour of test/cpp/data_loader_test.cpp has it."""
    shards = [token_shard.TokenShard(path) for path in sorted(write_shards(tmp_path / "shards", counts=counts).iterdir())]
    texts = train_reference.joined_texts(shards, 8)
    assert [text.size for text in texts] == lengths
    assert np.concatenate(texts).tolist() == np.concatenate([shard.tokens for shard in shards]).tolist()


def test_shards_of_another_run_and_damaged_ones_are_refused(tmp_path):
    directory, description = shards_of(tmp_path)
    pattern = str(directory / "train_*.bin")
    model = description.model
    for size, words in ((59, None), (58, "vocab_size: got 59, expected at most 58")):
        changed = replace(description, model=replace(model, vocab_size=size))
        if words is None:
            train_reference.Windows(changed, pattern)
        else:
            with pytest.raises(FileError, match=words):
                train_reference.Windows(changed, pattern)
    for length, words in ((89, [0, 3, 4, 5]), (90, [0, 3, 5]), (559, [0, 1]),
                          (560, "train_0.bin.*count: got 560 tokens in all shards, expected more than 560")):
        changed = replace(description, settings=replace(description.settings, seq_len=length))
        if isinstance(words, list):
            assert train_reference.Windows(changed, pattern).first_window.tolist() == words
        else:
            with pytest.raises(FileError, match=words):
                train_reference.Windows(changed, pattern)
    train_reference.Windows(replace(description, shards=[]), str(directory / "train_0.bin"))
    records = description.shards
    for shards in (records[:2], records[::-1], [*records, records[0]], *([*records[:2], records[2] | {key: value}] for key, value in (
            ("name", "train_9.bin"), ("tokens", 91), ("xxh3", "0" * 16)))):
        with pytest.raises(FileError, match="not the shards of the run"):
            train_reference.Windows(replace(description, shards=shards), pattern)
    for number in range(3):
        path = directory / f"train_{number}.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(FileError, match=f"train_{number}.bin"):
            train_reference.Windows(description, pattern)
        path.write_bytes(whole)
    train_reference.Windows(description, pattern)


def test_damage_of_any_parameter_is_found(tmp_path):
    file, model, _ = train_reference.read_model(GOLDEN / "llama-hs32-mha.model.bin")
    whole = Path(file.path).read_bytes()
    for name in model.tensors:
        damaged = bytearray(whole)
        damaged[file.at(name).offset] ^= 1
        (tmp_path / "a.bin").write_bytes(damaged)
        with pytest.raises(FileError, match=name):
            dict(train_reference.file_tensors(tmp_path / "a.bin", model))
    for name, values in train_reference.file_tensors(Path(file.path), model):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, file.f32(name))


@pytest.mark.parametrize("seed, low, high, words", [
    (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (2**64 - 1, 2**64 - 1, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e, "d16cfe09 94fdcceb 5001e420 24126ea1")])
def test_philox_gives_the_published_numbers(seed, low, high, words):
    blocks = np.array([1, low], np.uint64)
    got = train_reference.philox(seed, blocks, high)
    assert " ".join(f"{word:08x}" for word in got[:, 1]) == words
    assert int(train_reference.philox_u64(seed, blocks, high)[1]) == int(got[0, 1]) + (int(got[1, 1]) << 32)


def test_initial_values_do_not_depend_on_the_pieces_in_which_they_are_made(monkeypatch):
    whole = {count: train_reference.normal_values(count, 0.5, 3, 11) for count in (1, 4, 5, 8, 4003)}
    monkeypatch.setattr(train_reference, "INIT_CHUNK", 2)
    for count, values in whole.items():
        assert values.shape == (count,) and values.dtype == np.float32
        np.testing.assert_array_equal(train_reference.normal_values(count, 0.5, 3, 11), values)
        np.testing.assert_array_equal(values, whole[4003][:count])
    assert abs(whole[4003].mean()) < 0.03 and whole[4003].std() == pytest.approx(0.5, rel=0.05)
    for tensor, seed in ((4, 11), (3, 12), (3, 11 + 2**32)):
        assert not np.array_equal(train_reference.normal_values(8, 0.5, tensor, seed), whole[8])


def write_log(path, records):
    path.write_text("".join(json.dumps({"type": "step"} | record) + "\n" for record in records))
    return path


def test_a_log_without_a_step_or_with_a_skipped_one_is_refused(tmp_path):
    good = [{"step": step, "loss": 1.0 + step, "lr": 0.5, "grad_norm": 2.0} for step in (1, 2, 3)]
    log = write_log(tmp_path / "log.jsonl", good)
    assert [record["loss"] for record in train_reference.read_losses(log, 3)] == [2.0, 3.0, 4.0]
    assert len(train_reference.read_losses(tmp_path, 2)) == 2, "the directory of the run"
    for step in range(3):
        for change in ({"skipped": True}, {"loss": None}, {"lr": math.inf}, {"grad_norm": math.nan}, {"loss": "1"}):
            write_log(log, [record | (change if number == step else {}) for number, record in enumerate(good)])
            with pytest.raises(FileError, match=f"step {step + 1}: skipped or not finite"):
                train_reference.read_losses(log, 3)
            assert len(train_reference.read_losses(log, step) if step else []) == step
        write_log(log, good[:step] + good[step + 1:])
        with pytest.raises(FileError, match=f"step {step + 1}: missing"):
            train_reference.read_losses(log, 3)
    write_log(log, [record | {"skipped": False} for record in good])
    assert len(train_reference.read_losses(log, 3)) == 3


def test_each_quantity_is_compared_with_its_own(tmp_path, capsys):
    reference = [{"step": step, "loss": 4.0, "lr": 0.5, "grad_norm": 2.0} for step in (1, 2, 3, 4)]
    changes = {2: {"grad_norm": 1.0}, 3: {"loss": 5.0}, 4: {"loss": 4.5}}
    log = write_log(tmp_path / "log.jsonl", [record | changes.get(record["step"], {}) for record in reference])
    got = train_reference.compare(log, reference, 0.25, 1)
    assert got == {"type": "comparison", "steps": 4, "smooth": 1, "loss_max_relative": 0.25, "loss_step": 3, "loss_got": 5.0, "loss_expected": 4.0,
                   "grad_norm_max_relative": 0.5, "grad_norm_step": 2, "tolerance": 0.25, "passed": True}
    train_reference.report(got)
    assert capsys.readouterr().err == ("passed: 4 steps, largest relative difference of the loss 0.25 at step 3 (5.000000, PyTorch 4.000000), tolerance "
                                       "0.25; of the gradient norm 0.5 at step 2\n")
    assert not train_reference.compare(log, reference, 0.2499, 1)["passed"]
    got = train_reference.compare(log, reference, 0.1, 4)
    assert (got["loss_step"], got["loss_got"], got["loss_expected"], got["smooth"], got["passed"]) == (4, 4.25, 4.0, 4, True)
    assert train_reference.compare(log, reference[:2], 0.0, 1)["passed"]
    train_reference.report(got | {"passed": False})
    assert capsys.readouterr().err.startswith("FAILED: 4 steps, largest relative difference of the loss, median of 4 steps, 0.0625 at step 4")
    for factor, words in ((1 + 0.9e-9, None), (1 + 1.1e-9, "step 4: learning rate: got 0.5, expected 0.5"), (1 - 1.1e-9, "step 4: learning rate")):
        write_log(log, [record | ({"lr": 0.5 * factor} if record["step"] == 4 else {}) for record in reference])
        if words is None:
            assert train_reference.compare(log, reference, 0, 1)["passed"]
        else:
            with pytest.raises(FileError, match=words):
                train_reference.compare(log, reference, 1, 1)
