"""Learning from preferences from end to end: train_llama --objective dpo on shards of pairs. PyTorch as the witness of its losses is in
test_train_reference.py."""

import json
import shutil
import subprocess

import pytest

from train_runs import GOLDEN, MODEL, SEED, VOCABULARY, arguments, data_fixture, environment, train  # noqa: F401

from conversation_shards import write_pairs

WORDS = ["--objective=dpo", "--device=cpu", "--seq-len=24", "--batch-tokens=96", "--steps=10", "--save-every=4", "--val-every=5", "--val-batches=0"]


def dpo(*more):
    """Options of a run; those in `more` replace others."""
    given = {str(option).split("=")[0] for option in more}
    return [*(word for word in WORDS if word.split("=")[0] not in given), *more]


def pairs_in(directory, vocabulary=VOCABULARY):
    """Pairs to train on, and some of them to measure on."""
    write_pairs(directory, vocabulary, SEED)
    shutil.copy(directory / "train_1.bin", directory / "val_0.bin")
    return directory


@pytest.fixture(name="pairs")
def pairs_fixture(tmp_path):
    return pairs_in(tmp_path / "pairs")


def finished(*arguments, **more):
    done = train(*arguments, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def steps(run):
    return [record for record in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if record["type"] == "step"]


def model(run, step=10, name="model.bin"):
    return (run / f"step_{step:08d}" / name).read_bytes()


NEOX = GOLDEN / "neox-train.model.bin"


@pytest.mark.parametrize("model, vocabulary, more", [(MODEL, VOCABULARY, []), (NEOX, 29, []), (NEOX, 29, ["--lora-r=8", "--lora-alpha=64"])])
def test_a_run_prefers_what_was_chosen(tmp_path, model, vocabulary, more):
    pairs = pairs_in(tmp_path / "pairs", vocabulary)
    said = finished(pairs, tmp_path / "run", *dpo("--lr=0.01", f"--model={model}", *more))
    assert "pairs in" in said and "left out" in said and "computing log p of" in said
    curve = steps(tmp_path / "run")
    assert curve[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and curve[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert curve[-1]["val_loss"] < 0.6 and curve[-1]["val_reward_accuracy"] > 0.8 and curve[-1]["val_reward_margin"] > 0
    assert curve[0]["pairs"] >= 4 and "learned_tokens" not in curve[0] and curve[-1]["val_pairs"] == 9
    assert f"loss {curve[-1]['loss']:.4f}  accuracy {100 * curve[-1]['reward_accuracy']:.1f} %  margin" in said


@pytest.mark.parametrize("more", [[], ["--lora-r=3"]])
def test_resume_is_bit_for_bit(pairs, tmp_path, more):
    """Also with the reference computed again, because its file is gone or damaged: always that of the beginning."""
    name = "adapter.bin" if more else "model.bin"
    finished(pairs, tmp_path / "whole", *dpo(*more))
    said = {}
    for kind in ("kept", "gone", "damaged"):
        run = tmp_path / kind
        assert train(pairs, run, *dpo(*more, "--debug-inject=term@step=6")).returncode in (0, 143)
        reference = run / "reference.bin"
        content = reference.read_bytes()
        if kind == "gone":
            reference.unlink()
        elif kind == "damaged":
            reference.write_bytes(content[:-3] + b"abc")
        said[kind] = finished(pairs, run, *dpo(*more))
        assert reference.read_bytes() == content
        assert model(run, name=name) == model(tmp_path / "whole", name=name)
    assert [text.count("computing log p of") for text in said.values()] == [0, 1, 1]
    assert "The reference is computed again" in said["damaged"] and "The reference is computed again" not in said["gone"]


def test_another_validation_is_compared_with_the_same_beginning(pairs, tmp_path):
    finished(pairs, tmp_path / "whole", *dpo())
    assert train(pairs, tmp_path / "run", *dpo("--debug-inject=term@step=6")).returncode in (0, 143)
    shutil.copy(pairs / "train_0.bin", pairs / "val_0.bin")
    finished(pairs, tmp_path / "run", *dpo())
    assert model(tmp_path / "run") == model(tmp_path / "whole")
    assert steps(tmp_path / "run")[-1]["val_pairs"] != steps(tmp_path / "whole")[-1]["val_pairs"]


def test_ranks_recomputation_and_micro_batches(pairs, tmp_path):
    """Ranks are virtual ranks, bit for bit, with sharded parameters too; recomputation changes no bit."""
    virtual = ["--virtual-ranks=2", "--micro-batch=1"]
    finished(pairs, tmp_path / "virtual", *dpo(*virtual))
    for name, more in (("ranks", ["--debug-inject=ranks@cpu=2", *virtual]), ("sharded", ["--debug-inject=ranks@cpu=2", "--shard=parameters", *virtual]),
                       ("again", ["--recompute=block", *virtual])):
        finished(pairs, tmp_path / name, *dpo(*more))
        assert model(tmp_path / name) == model(tmp_path / "virtual"), name
        got, expected = ([{key: one[key] for key in ("loss", "pairs", "reward_accuracy", "reward_margin", "grad_norm")}
                          for one in steps(tmp_path / run)] for run in (name, "virtual"))
        assert got == expected
    finished(pairs, tmp_path / "one", *dpo("--micro-batch=4"))
    assert [one["loss"] for one in steps(tmp_path / "one")] == pytest.approx([one["loss"] for one in steps(tmp_path / "virtual")], rel=1e-5)


def test_beta_and_reference_are_part_of_a_run(pairs, tmp_path):
    finished(pairs, tmp_path / "run", *dpo("--steps=4"))
    for options, words in ((["--dpo-beta=0.2"], "--dpo-beta"), (["--objective=cross-entropy"], "--train")):
        done = train(pairs, tmp_path / "run", *dpo(*options))
        assert done.returncode == 2 and words in done.stderr, done.stderr
    finished(pairs, tmp_path / "beta", *dpo("--steps=4", "--dpo-beta=0.2"))
    assert model(tmp_path / "run", 4) != model(tmp_path / "beta", 4)


def test_the_default_learning_rate_is_a_tenth(pairs, data, tmp_path):
    rates = []
    for shards, more in ((data, ["--device=cpu"]), (pairs, dpo())):
        words = arguments(shards, tmp_path / "run", *more, "--print-config")
        at = words.index("--lr")
        done = subprocess.run(words[:at] + words[at + 2:], capture_output=True, text=True, timeout=60, env=environment())
        rates.append(json.loads(done.stdout)["settings"]["lr"])
    assert rates == ["3e-04", "3e-05"], "as they are typed"


def test_what_the_program_refuses(pairs, data, tmp_path):
    for shards, options, code, words in (
            (pairs, ["--device=cpu"], 2, "holds pairs of answers, which --objective dpo trains on and measures"),
            (pairs, ["--device=cpu", "--eval"], 2, "--val: "),
            (data, dpo(), 2, "holds plain text, and --objective dpo needs pairs of answers"),
            (pairs, dpo("--seq-len=1", "--batch-tokens=8"), 3, "pairs 23 have more than --seq-len 1 tokens"),
            (pairs, ["--dpo-beta=0.2"], 2, "--dpo-beta: only with --objective dpo"),
            (pairs, dpo("--model=", "--config=tiny"), 2, "--objective: dpo needs --model"),
            (pairs, dpo("--eval"), 2, "--objective: dpo is for training alone"),
            (pairs, dpo("--bench"), 2, "--objective: dpo is for training alone"),
            (pairs, dpo("--no-pack"), 2, "--no-pack: with --objective dpo"),
            (pairs, dpo("--precision=fp8"), 2, "--precision: got fp8"),
            (pairs, dpo("--dropout=0.1"), 2, "--dropout: got 0.1, with --objective dpo there is none"),
            (pairs, dpo("--lora-r=2", "--lora-dropout=0.5"), 2, "--lora-dropout: got 0.5"),
            (pairs, dpo("--dpo-beta=0"), 2, "--dpo-beta")):
        done = train(shards, tmp_path / "out", *options)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
        assert done.stderr.count("error:") == 1
    shutil.copy(data / "train_0.bin", pairs / "train_9.bin")
    done = train(pairs, tmp_path / "out", *dpo())
    assert done.returncode == 3 and "holds plain text, and" in done.stderr and "pairs of answers. Train on one kind" in done.stderr
