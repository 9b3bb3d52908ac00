"""Two GPUs, a process each, as --gpus 2 starts them: what they compute is what one GPU computes for both, by every way in which
values move between them and every division of the state; one that dies ends the other. The CPU's ranks have their tests in
test_ranks.py, single operators and the model by threads in test/gpu/ranks_test.cpp."""

import os
import shutil
import signal
import subprocess

import pytest

from train_runs import assert_same_run, checkpoints, children_of, fp8_shape, has_checkpoint, run_program, start, train, wait_for
from train_runs import data_fixture, end_started  # noqa: F401, pytest finds them here


def gpus():
    if shutil.which("nvidia-smi") is None or "CUDA" not in run_program("--version").stdout:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


pytestmark = pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")


@pytest.fixture(name="whole")
def whole_fixture(data, tmp_path):
    """Both ranks on one GPU."""
    done = train(data, tmp_path / "whole", "--device", "cuda", "--virtual-ranks", 2, "--dropout", 0.1)
    assert done.returncode == 0, done.stderr
    return tmp_path / "whole"


@pytest.mark.parametrize("exchange", ["", "nccl", "host"])
def test_two_gpus_are_one(data, tmp_path, whole, exchange):
    for shard in ("none", "optimizer", "gradients", "parameters"):
        out = tmp_path / shard
        done = train(data, out, "--gpus", 2, "--shard", shard, "--dropout", 0.1, env={"WEFT_EXCHANGE": exchange} if exchange else {})
        assert done.returncode == 0, done.stderr
        assert_same_run(out, whole)


def test_two_gpus_are_one_in_fp8(data, tmp_path):
    fp8 = [*fp8_shape(tmp_path / "shape"), "--precision", "fp8"]
    whole = tmp_path / "whole"
    done = train(data, whole, *fp8, "--device", "cuda", "--virtual-ranks", 2)
    assert done.returncode == 0, done.stderr
    for shard in ("none", "optimizer", "gradients", "parameters"):
        out = tmp_path / shard
        for more in (["--debug-inject", "term@step=6"], []):
            done = train(data, out, *fp8, "--gpus", 2, "--shard", shard, *more)
            assert done.returncode == (143 if more else 0), done.stderr
        assert_same_run(out, whole)


def test_two_gpus_are_one_with_muon(data, tmp_path):
    muon = ["--optimizer", "muon", "--dropout", 0.1]
    whole = tmp_path / "whole"
    done = train(data, whole, *muon, "--device", "cuda", "--virtual-ranks", 2)
    assert done.returncode == 0, done.stderr
    for shard in ("none", "optimizer", "gradients", "parameters"):
        out = tmp_path / shard
        for more in (["--debug-inject", "term@step=6"], []):
            done = train(data, out, *muon, "--gpus", 2, "--shard", shard, *more)
            assert done.returncode == (143 if more else 0), done.stderr
        assert_same_run(out, whole)


def test_one_gpu_goes_on_where_two_stopped_and_back(data, tmp_path, whole):
    """The run is stopped after a third and after two thirds."""
    for first, second in ((["--gpus", 2], ["--device", "cuda"]), (["--device", "cuda"], ["--gpus", 2])):
        out = tmp_path / first[0].strip("-")
        for options, stop in ((first, 4), (second, 8), (first, None)):
            inject = ["--debug-inject", f"term@step={stop}"] if stop else []
            done = train(data, out, *options, "--virtual-ranks", 2, "--dropout", 0.1, *inject)
            assert done.returncode == (143 if stop else 0), done.stderr
        assert_same_run(out, whole)


def test_a_gpus_process_that_is_killed_ends_the_other(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, "--gpus", 2, "--comm-timeout", 10, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out) and len(children_of(process)) == 2)
    os.kill(children_of(process)[-1], signal.SIGKILL)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 4, stderr
    assert "was killed by signal 9" in stderr.splitlines()[-1], stderr
    assert checkpoints(out)
