"""What both programs share (llmc/app, llmc/base), seen through train_llama: signals, sizes before memory, first messages."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from train_runs import (MODEL, NEOX, PROGRAM, SECONDS, checkpoints, environment, np, records, run_program, send,
                        start, train, wait_for)
from train_runs import data_fixture, end_started  # noqa: F401, pytest finds them here

import tensor_file

INFER = PROGRAM.with_name("infer_pythia")
SECOND = 2.5  # what "within a second" may take on a busy machine


def launch(*options, program=PROGRAM, **env):
    return subprocess.Popen([str(program), *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment(**env))


def ended_within_a_second(process, number):
    process.send_signal(number)
    begin = time.monotonic()
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + number, stderr
    assert time.monotonic() - begin < SECOND
    return stdout, stderr


@pytest.mark.parametrize("program", [PROGRAM, INFER])
def test_no_library_of_cuda_is_loaded_for_the_cpu(program):
    """cuBLASLt alone would take longer to load than a run of these tests computes."""
    if shutil.which("ldd") is None:
        pytest.skip("needs ldd")
    libraries = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    assert "libstdc++" in libraries and "libcu" not in libraries and "libnccl" not in libraries, libraries


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [("--bench", "--config", "d12", "--micro-batch", 4, "--seq-len", 512),
                                     ("--bench", "--config", "tiny", "--batch-tokens", 2048 * 100)])
def test_a_signal_ends_a_benchmark(options, number):
    process = launch("--device", "cpu", *options)
    time.sleep(1)
    assert process.poll() is None, process.communicate()
    stdout, _ = ended_within_a_second(process, number)
    assert stdout == "", "half a benchmark is no result"


def long_dump(path, program):
    """A dump whose one batch computes for minutes."""
    config = {"dump": {"model_sha256": "", "dtype": "f32"}}
    with tensor_file.Writer(path, "reference dump", config) as writer:
        batch, positions = (40_000, 16) if program == PROGRAM else (1_000_000, 8)
        for name in ("input_ids", "labels"):
            writer.declare(name, "i32", (batch, positions))
        for name in ("input_ids", "labels"):
            writer.write(name, np.ones((batch, positions), np.int32))
    return path


@pytest.mark.parametrize("program, model", [(PROGRAM, MODEL), (INFER, NEOX)])
def test_a_signal_ends_a_comparison(tmp_path, program, model):
    dump = long_dump(tmp_path / "dump.bin", program)
    process = launch("--device", "cpu", "--model", model, "--compare", dump, program=program)
    time.sleep(1)
    if process.poll() is not None:
        pytest.skip(f"this machine is too fast or too small: {process.communicate()}")
    ended_within_a_second(process, signal.SIGINT)


@pytest.mark.parametrize("program, model", [(PROGRAM, MODEL), (INFER, NEOX)])
def test_a_dump_of_too_many_positions_is_refused_before_memory_is_taken(tmp_path, program, model):
    dump = tmp_path / "dump.bin"
    with tensor_file.Writer(dump, "reference dump", {"dump": {}}) as writer:
        for name in ("input_ids", "labels"):
            writer.declare(name, "i32", (1, 4_000_000))
        for name in ("input_ids", "labels"):
            writer.write(name, np.zeros((1, 4_000_000), np.int32))
    command = [str(program), "--device", "cpu", "--model", str(model), "--compare", str(dump)]
    with open(tmp_path / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    message = (tmp_path / "stderr").read_text()
    assert process.returncode == 3 and "input_ids: 4000000 positions do not fit in a context of" in message, message
    version = subprocess.Popen([str(program), "--version"], stdout=subprocess.DEVNULL)  # libraries for a GPU are large
    _, status, alone = os.wait4(version.pid, 0)
    version.returncode = os.waitstatus_to_exitcode(status)
    assert usage.ru_maxrss < alone.ru_maxrss + 60_000, "kilobytes; the ids of the dump alone have 16 MB"


# ---- a run: what signals say, the last line, the settings --------------------------------------------------------------

def test_the_first_signal_says_what_happens_and_the_second_what_is_lost(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, "--debug-inject", "hang@step=11", "--save-every", 2)
    wait_for(lambda: (out / "log.jsonl").exists() and any(r.get("step") == 10 for r in records(out)))
    time.sleep(0.3)  # step 11 begins, and hangs
    send(process, signal.SIGINT)
    time.sleep(0.3)  # two within 0.1 s are one
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "finishing step 11, then saving; a second signal stops at once\n" in messages
    # The save of step 10 has waited for that of step 8.
    newest = [record["step"] for record in records(out) if record["type"] == "save"][-1]
    assert newest >= 8
    assert messages.endswith(f"\nstopped at once: steps after the newest checkpoint (step {newest} or later) are lost\n"), messages


def test_the_last_line_names_the_step_of_an_older_validation(data, tmp_path):
    done = train(data, tmp_path / "run", "--debug-inject", "term@step=7")
    assert done.returncode == 143
    assert re.search(r"^step 7  train loss \S+  val loss \d\S+ \(step 5\)  checkpoint ", done.stdout), done.stdout
    done = train(data, tmp_path / "run")
    assert re.search(r"^step 12  train loss \S+  val loss \d\S+  checkpoint ", done.stdout), done.stdout


# ---- what stands in the place of a file --------------------------------------------------------------------------------


# ---- descriptors, threads ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_run_with_closed_descriptors_writes_whole_files(data, tmp_path, closed):
    """Messages must not land in the log or a checkpoint."""
    out = tmp_path / "run"
    process = subprocess.run([str(word) for word in [PROGRAM, "--model", MODEL, "--train", data / "train_*.bin", "--out", out,
                                                     "--steps", 4, "--micro-batch", 2, "--seq-len", 16]],
                             preexec_fn=lambda: [os.close(fd) for fd in closed], env=environment(), timeout=SECONDS)
    assert process.returncode == (4 if 1 in closed else 0), "a result that cannot be written is an error"
    assert checkpoints(out) == ["step_00000004"]
    lines = (out / "log.jsonl").read_text().splitlines()
    assert len(records(out)) == len(lines), "every line of the log is a record"


GROUPS = {INFER: ["Model", "What to do, exactly one of", "Generation", "Many requests at once", "Perplexity", "Benchmark", "Server",
                  "Output", "About", "Example"],
          PROGRAM: ["Model", "Data and output", "Optimisation", "LoRA: train an adapter beside a frozen --model (doc/fine_tuning.md)",
                    "Preferences (doc/fine_tuning.md)", "Execution", "Several GPUs (doc/several_gpus.md)", "Reports", "About", "Example"]}


@pytest.mark.parametrize("program", GROUPS)
def test_help_has_its_groups_in_order(program):
    text = subprocess.run([program, "--help-all"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^(\S.*):$", text, re.M) == GROUPS[program]
    assert "\nExit codes: 0 ok, 1 internal error" in text and re.search(rf"\nExample:\n +(\./)?{program.name} --", text)


def test_help_shows_what_the_program_has():
    """The other list of the same options: what --print-config writes."""
    settings = json.loads(run_program("--config", "tiny", "--device", "cpu", "--print-config").stdout)["settings"]
    shown = set(re.findall(r"^  (?:-\w, )?--([a-z][a-z0-9-]*)", run_program("--help-all").stdout, re.M))
    assert shown == set(settings) | {"help", "help-all", "version"}
