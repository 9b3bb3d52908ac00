"""Ranks as processes: what several of them compute, write and say is what one process does for all of them, and whatever
happens to one of them ends all of them within the time limit, with a line that says which one and why (F27 to F30 in
doc/robustness.md). On the CPU, where a launcher's environment starts them; --gpus starts them in the same way."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import time

import pytest

from train_runs import (MODEL, SECONDS, assert_refused, assert_same_run, checkpoints, children_of, fp8_shape, has_checkpoint,
                        np, preload, records, run_program, start, stat_of, train, wait_for, write_shard)
from train_runs import data_fixture, end_started  # noqa: F401, pytest finds them here

import tensor_file

LIMIT = 3  # seconds, of --comm-timeout


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def torchrun(rank, ranks, port, nodes=1):
    """What torchrun sets; with several nodes each of them has a part of the ranks."""
    local = ranks // nodes
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start_rank(data, out, rank, ranks, port, *options, nodes=1, limit=LIMIT, **keys):
    return start(data, out, "--device", "cpu", "--comm-timeout", limit, *options, env=torchrun(rank, ranks, port, nodes), **keys)


def start_ranks(data, out, ranks, *options, own=None, **keys):
    """`own`: options of one rank more."""
    port = free_port()
    return [start_rank(data, out, rank, ranks, port, *options, *(own or {}).get(rank, ()), **keys) for rank in range(ranks)]


class Ended:
    def __init__(self, process):
        self.stdout, self.stderr = process.communicate(timeout=SECONDS)
        self.returncode = process.returncode
        self.last = self.stderr.splitlines()[-1] if self.stderr else ""


def ends_of(processes):
    return [Ended(process) for process in processes]


def run_ranks(data, out, ranks, *options, **keys):
    return ends_of(start_ranks(data, out, ranks, *options, **keys))


def assert_ended(ends, code, *words, rank=None):
    """Each with the code, and as its last line one error with the words: rank 0 as a program alone does, the others behind
    their number. `rank`: one that has been killed and says nothing."""
    for number, end in enumerate(ends):
        if number == rank:
            continue
        assert end.returncode == code, (number, end.returncode, end.stderr)
        assert end.last.startswith("error: " if number == 0 else f"rank {number}: error: "), end.stderr
        assert end.stderr.count("error: ") == 1, end.stderr
        for word in words:
            assert word in end.last, end.last


def twelve(*options):
    """A step of twelve ranks, which 1, 2, 3, 4 and 6 processes can share."""
    return ["--micro-batch", 1, "--batch-tokens", 192, "--virtual-ranks", 12, "--dropout", 0.1, *options]


# ---- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_ranks_are_one_process(data, tmp_path, shard):
    whole = tmp_path / "whole"
    assert train(data, whole, "--virtual-ranks", 2).returncode == 0
    out = tmp_path / "run"
    ends = run_ranks(data, out, 2, "--shard", shard)
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    assert_same_run(out, whole)
    assert ends[1].stdout == "" and ends[1].stderr == "", "rank 0 speaks for all"
    assert ends[0].stdout.count("\n") == 1 and "on each of 2 ranks" in ends[0].stderr
    assert ("saves: each rank writes its part" in ends[0].stderr) == (shard != "none")
    steps = [record for record in records(out) if record["type"] == "step"]
    assert all(record["tokens_per_s_rank"] == pytest.approx(record["tokens_per_s"] / 2) for record in steps)
    assert records(out)[0]["ranks"] == 2
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["shard"] == shard and settings["virtual-ranks"] == "2"


def test_ranks_in_fp8_are_one_process(data, tmp_path):
    """The history of the scales and the counts of the log are those of all ranks, whichever of them went on from whose checkpoint."""
    fp8 = [*fp8_shape(tmp_path / "shape"), "--precision", "fp8", "--val="]
    whole = tmp_path / "whole"
    assert train(data, whole, *fp8, "--device", "cpu", "--virtual-ranks", 2).returncode == 0
    for shard in ("none", "optimizer", "parameters"):
        out = tmp_path / shard
        for more in (["--debug-inject", "term@step=6"], []):
            ends = run_ranks(data, out, 2, *fp8, "--shard", shard, *more)
            assert [end.returncode for end in ends] == ([143, 143] if more else [0, 0]), ends[0].stderr
        assert_same_run(out, whole)
        counts = [[record["fp8"] for record in records(run) if record["type"] == "step"] for run in (out, whole)]
        assert counts[0] == counts[1]


def test_muon_on_ranks_is_one_process(data, tmp_path):
    muon = ["--optimizer", "muon"]
    whole = tmp_path / "whole"
    assert train(data, whole, *muon, "--virtual-ranks", 2).returncode == 0
    for shard in ("none", "optimizer", "parameters"):
        out = tmp_path / shard
        for more in (["--debug-inject", "term@step=6"], []):
            ends = run_ranks(data, out, 2, *muon, "--shard", shard, *more)
            assert [end.returncode for end in ends] == ([143, 143] if more else [0, 0]), ends[0].stderr
        assert_same_run(out, whole)


def test_any_number_of_processes_goes_on(data, tmp_path):
    """Three steps each, by 1, 2, 3 and 4 processes, in both directions; the C++ tests have every pair."""
    whole = tmp_path / "whole"
    assert train(data, whole, *twelve("--save-every", 3)).returncode == 0
    for order in ([1, 2, 3, 4], [4, 3, 2, 1]):
        out = tmp_path / f"run{order[0]}"
        for number, processes in enumerate(order):
            # --steps may grow, but the learning rate follows it: the run is stopped instead.
            options = twelve("--save-every", 3, *(["--debug-inject", f"term@step={3 * number + 3}"] if number < 3 else []))
            ends = ([train(data, out, *options)] if processes == 1 else run_ranks(data, out, processes, *options))
            assert {end.returncode for end in ends} == {143 if number < 3 else 0}, ends[0].stderr
        assert_same_run(out, whole)


def test_every_launcher_is_understood(data, tmp_path):
    """The variables of Open MPI and of Slurm, which tell no port; the second also tells where the first rank is."""
    job = str(time.time_ns())
    openmpi = lambda rank: {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",  # noqa: E731
                            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": job}
    slurm = lambda rank: {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",  # noqa: E731
                          "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": job}
    whole = tmp_path / "whole"
    assert train(data, whole, "--virtual-ranks", 2).returncode == 0
    for name, variables in (("openmpi", openmpi), ("slurm", slurm)):
        ends = ends_of([start(data, tmp_path / name, "--device", "cpu", "--comm-timeout", LIMIT, env=variables(rank))
                        for rank in range(2)])
        assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
        assert_same_run(tmp_path / name, whole)


def test_two_launches_with_node_ranks_are_one_run(data, tmp_path):
    """As torchrun --nnodes 2 does on two machines: the second one comes later."""
    whole, out, port = tmp_path / "whole", tmp_path / "run", free_port()
    assert train(data, whole, *twelve()).returncode == 0
    first = [start_rank(data, out, rank, 4, port, *twelve(), nodes=2) for rank in (0, 1)]
    time.sleep(0.5)
    second = [start_rank(data, out, rank, 4, port, *twelve(), nodes=2) for rank in (2, 3)]
    ends = ends_of(first + second)
    assert [end.returncode for end in ends] == [0, 0, 0, 0], ends[0].stderr
    assert_same_run(out, whole)


def test_ranks_of_a_machine_share_its_cores(data, tmp_path):
    """As many threads as one process has there, divided by the ranks of this machine and not by those of all."""
    def threads(*options, **keys):
        return re.search(r"  threads +(\d+)", run_ranks(data, tmp_path / "no", 2, "--dry-run", *options, **keys)[0].stdout)[1]

    alone = re.search(r"  threads +(\d+)", train(data, tmp_path / "no", "--dry-run").stdout)[1]
    assert threads(nodes=2) == alone
    assert threads() == str(max(1, int(alone) // 2))
    assert threads("--threads", 3) == "3"


def test_what_several_ranks_do_besides_training(data, tmp_path):
    ends = run_ranks(data, tmp_path / "no", 2, "--bench", "--json")
    assert [end.returncode for end in ends] == [0, 0] and ends[1].stdout == ""
    result = json.loads(ends[0].stdout)
    assert result["ranks"] == 2 and result["tokens_per_s_rank"] == pytest.approx(result["tokens_per_s"] / 2)
    ends = run_ranks(data, tmp_path / "no", 2, "--bench")
    assert "2 ranks: " in ends[0].stdout and "tokens/s each" in ends[0].stdout

    alone = run_program("--model", MODEL, "--val", data / "val_*.bin", "--seq-len", 16, "--eval", "--json", "--device", "cpu")
    ends = run_ranks(data, tmp_path / "no", 3, "--batch-tokens", 96, "--eval", "--json", "--val-batches", 0)
    assert [end.returncode for end in ends] == [0, 0, 0] and ends[1].stdout == ends[2].stdout == ""
    assert json.loads(ends[0].stdout)["tokens"] == json.loads(alone.stdout)["tokens"]
    assert json.loads(ends[0].stdout)["val_loss"] == pytest.approx(json.loads(alone.stdout)["val_loss"], rel=1e-6)

    ends = run_ranks(data, tmp_path / "no", 2, "--dry-run")
    assert [end.returncode for end in ends] == [0, 0] and ends[1].stdout == ""
    assert "memory on cpu, of each of the 2 ranks (--shard optimizer)" in ends[0].stdout
    moments = [line for line in ends[0].stdout.splitlines() if "AdamW moments" in line]
    whole = run_ranks(data, tmp_path / "no", 2, "--dry-run", "--shard", "none")[0].stdout
    assert moments and moments[0] not in whole, "a part of the moments"
    [end] = ends_of([start_rank(data, tmp_path / "no", 0, 2, free_port(), "--print-config")])
    assert end.returncode == 0 and json.loads(end.stdout)["settings"]["virtual-ranks"] == "2", "it waits for nobody"
    [end] = ends_of([start_rank(data, tmp_path / "no", 1, 2, free_port(), "--print-config")])
    assert end.returncode == 0 and end.stdout == ""
    for option in ("--operators", "--compare"):
        words = ["--bench", "--operators"] if option == "--operators" else ["--compare", MODEL]
        for end in run_ranks(data, tmp_path / "no", 2, *words):
            assert end.returncode == 2 and f"{option}: needs one rank" in end.last


def write_large_model(path, rows):
    """MODEL with a vocabulary of `rows`, all zero: most of what training it takes is the state."""
    small = tensor_file.read(MODEL)
    with tensor_file.Writer(path, "model", {"model": small.config["model"] | {"vocab_size": rows}}) as writer:
        shapes = {name: info.shape for name, info in small.tensors.items()}
        shapes |= {name: (rows, shapes[name][1]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        for name, shape in shapes.items():
            writer.declare(name, "f16", shape)
        for name, shape in shapes.items():
            writer.write(name, np.zeros(shape, np.float16))
    return path


def test_the_memory_that_must_fit_is_what_a_rank_will_hold(data, tmp_path):
    """On machines of their own, so that the figure is that of one rank: its part of the state, and with --eval all of it."""
    def small():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    batch = 25_000  # of which the activations alone do not fit
    options = ["--model", write_large_model(tmp_path / "large.bin", 100_000), "--micro-batch", batch]

    def needed(ranks, *more):
        ends = run_ranks(data, tmp_path / "no", ranks, *options, "--batch-tokens", ranks * batch * 16, *more, nodes=ranks, preexec_fn=small)
        assert_ended(ends, 5, "the plan needs ", "CPU has 1.07 GB available")
        [text] = {re.search(r"the plan needs (\S+ \S+) of memory", end.last)[1] for end in ends}
        return text, re.search(r"  total +(\S+ \S+)$", ends[0].stdout, re.M)

    whole, shown = needed(1, "--dry-run")
    assert whole == shown[1]
    for shard in ("optimizer", "parameters"):
        part, shown = needed(2, "--shard", shard, "--dry-run")
        assert part == shown[1] and part != whole
        assert needed(2, "--shard", shard)[0] == needed(2, "--shard", shard, "--bench")[0] == part
        assert needed(2, "--shard", shard, "--eval")[0] == whole
    assert not (tmp_path / "no").exists()


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture(name="whole12")
def whole12_fixture(data, tmp_path):
    assert train(data, tmp_path / "whole12", *twelve()).returncode == 0
    return tmp_path / "whole12"


def assert_goes_on(data, out, whole, ranks=3):
    """The same command finishes the run, to the same bits."""
    ends = run_ranks(data, out, ranks, *twelve())
    assert [end.returncode for end in ends] == [0] * ranks, ends[0].stderr
    assert_same_run(out, whole)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed(data, tmp_path, whole12, killed):
    out = tmp_path / "run"
    begin = time.monotonic()
    ends = run_ranks(data, out, 3, *twelve(), own={killed: ["--debug-inject", "kill@step=10"]})
    assert time.monotonic() - begin < LIMIT, "its connection ends at once"
    assert ends[killed].returncode == -signal.SIGKILL
    assert_ended(ends, 4, f"rank {killed} is gone: its connection was closed", rank=killed)
    # A save that was being written is lost with a rank that wrote it; it began when the one before was complete.
    assert checkpoints(out)[0] == "step_00000004"
    assert_goes_on(data, out, whole12)


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_stopped(data, tmp_path, stopped):
    """SIGSTOP: the others give up after the time limit, and it does as soon as it goes on."""
    out = tmp_path / "run"
    processes = start_ranks(data, out, 3, *twelve(), steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    begin = time.monotonic()
    processes[stopped].send_signal(signal.SIGSTOP)
    others = [process for rank, process in enumerate(processes) if rank != stopped]
    ends = ends_of(others)
    assert LIMIT / 2 < time.monotonic() - begin < 2 * LIMIT + 2
    processes[stopped].send_signal(signal.SIGCONT)
    ends.insert(stopped, Ended(processes[stopped]))
    assert_ended(ends, 4, f"rank {stopped} ", rank=stopped)
    for rank, end in enumerate(ends):
        if rank != stopped:
            assert f"rank {stopped} did not come to " in end.last and f" within {LIMIT} s" in end.last, end.last
    assert ends[stopped].returncode == 4, ends[stopped].stderr
    done = train(data, out, *twelve("--max-minutes", 1e-9, "--resume", "must"), steps=1_000_000)
    assert done.returncode == 0 and "resuming after step" in done.stderr


def test_a_slow_rank_is_waited_for(data, tmp_path, whole12):
    out = tmp_path / "run"
    processes = start_ranks(data, out, 3, *twelve())
    for _ in range(4):
        processes[1].send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        processes[1].send_signal(signal.SIGCONT)
        time.sleep(0.02)
    ends = ends_of(processes)
    assert [end.returncode for end in ends] == [0, 0, 0], ends[0].stderr
    assert_same_run(out, whole12)


def test_a_rank_that_hangs(data, tmp_path):
    out = tmp_path / "run"
    processes = start_ranks(data, out, 3, *twelve(), own={1: ["--debug-inject", "hang@step=6"]})
    ends = ends_of([processes[0], processes[2]])
    for end in ends:
        assert end.returncode == 4 and f"rank 1 did not come to gather() within {LIMIT} s" in end.last, end.stderr
    assert checkpoints(out) == ["step_00000004"], "a save in progress is finished"


@pytest.mark.parametrize("policy", ["abort", "skip"])
def test_a_rank_that_computes_nan(data, tmp_path, policy):
    """One rank's gradient: all of them stop before the update, and save; or skip it together."""
    out = tmp_path / "run"
    ends = run_ranks(data, out, 3, "--batch-tokens", 96, "--on-nan", policy, own={1: ["--debug-inject", "nan@step=6"]})
    if policy == "skip":
        assert [end.returncode for end in ends] == [0, 0, 0], ends[0].stderr
        assert [record["step"] for record in records(out) if record.get("skipped")] == [6]
        return
    assert_ended(ends, 6, "step 6: loss ", "gradient norm nan", "The parameters are those of step 5")
    assert checkpoints(out) == ["step_00000004", "step_00000005"]
    ends = run_ranks(data, out, 3, "--batch-tokens", 96, "--resume", "must")
    assert [end.returncode for end in ends] == [0, 0, 0], ends[0].stderr


@pytest.mark.parametrize("option, value, name", [("--lr", 0.001, "--lr"), ("--seed", 2, "--seed"), ("--val-every", 3, "--val-every"),
                                                ("--shard", "none", "--shard"), ("--on-nan", "skip", "--on-nan")])
def test_a_rank_with_another_option(data, tmp_path, option, value, name):
    ends = run_ranks(data, tmp_path / "run", 3, "--batch-tokens", 96, own={2: [option, value]})
    assert_ended(ends, 4, f"rank 2: {name}: got '{value}', expected ", "as on rank 0")
    assert checkpoints(tmp_path / "run") == []


def test_a_rank_with_other_data(data, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data, other)
    write_shard(other / "train_1.bin", 170, 1001)
    ends = run_ranks(data, tmp_path / "run", 2, own={1: ["--train", other / "train_*.bin"]})
    assert_ended(ends, 4, "rank 1: --train, shard 2: got ", "train_1.bin")
    write_shard(other / "val_0.bin", 150, 2001)
    ends = run_ranks(data, tmp_path / "run", 2, own={1: ["--val", other / "val_*.bin"]})
    assert_ended(ends, 4, "rank 1: --val, shard 1: got ", "val_0.bin")
    (other / "train_2.bin").unlink()
    ends = run_ranks(data, tmp_path / "run", 2, own={1: ["--train", other / "train_*.bin"]})
    assert_ended(ends, 4, "rank 1: --train, number of shards: got '2', expected '3'")
    (other / "train_2.bin").write_text("damaged")
    ends = run_ranks(data, tmp_path / "run", 2, own={1: ["--train", other / "train_*.bin"]})
    assert_ended(ends, 3, "train_2.bin")
    assert "error: rank 1: " in ends[0].last, "rank 0 says whose error it is"


def test_a_rank_of_another_version(data, tmp_path):
    ends = run_ranks(data, tmp_path / "run", 3, "--batch-tokens", 96, own={1: ["--debug-inject", "version@rank=1"]})
    assert_ended(ends, 4, "rank 1: version: got 'another version', expected ")


def test_ranks_that_do_not_fit_together(data, tmp_path):
    port = free_port()
    options = ["--batch-tokens", 192]
    ends = ends_of([start_rank(data, tmp_path / "run", 0, 2, port, *options), start_rank(data, tmp_path / "run", 2, 3, port, *options)])
    assert ends[0].returncode == ends[1].returncode == 4
    assert "rank 2 was started as one of 3 ranks, rank 0 as one of 2" in ends[0].last and ends[0].last[7:] in ends[1].last
    port = free_port()
    ends = ends_of([start_rank(data, tmp_path / "run", rank, 3, port, *options) for rank in (0, 1, 1)])
    assert [end.returncode for end in ends] == [4, 4, 4]
    assert all("rank 1 was started twice" in end.last for end in ends), [end.last for end in ends]


def test_a_rank_that_never_comes(data, tmp_path):
    port = free_port()
    begin = time.monotonic()
    ends = ends_of([start_rank(data, tmp_path / "run", rank, 3, port, "--batch-tokens", 96) for rank in (0, 1)])
    assert time.monotonic() - begin < 2 * LIMIT
    assert_ended(ends, 4, f"rank 2 did not come to the start within {LIMIT} s")
    ends = ends_of([start_rank(data, tmp_path / "run", rank, 3, port, "--batch-tokens", 96) for rank in (1, 2)])
    for end in ends:
        assert end.returncode == 4 and "rank 0 did not come to the start" in end.last and "Connection refused" in end.last, end.last
    assert not (tmp_path / "run").exists(), "nothing is made before all are there"


def test_a_port_that_is_taken(data, tmp_path):
    """By somebody who listens and never answers, or answers as a web server does."""
    for answer in (b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + b"x" * 100):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            processes = [start_rank(data, tmp_path / "run", rank, 2, port) for rank in range(2)]
            taken.settimeout(0.2)
            held = []
            while any(process.poll() is None for process in processes):
                try:
                    held.append(taken.accept()[0])
                    held[-1].sendall(answer)
                except OSError:
                    pass
            ends = ends_of(processes)
        assert [end.returncode for end in ends] == [4, 4]
        assert f"port {port} of '127.0.0.1': cannot listen for the ranks: Address already in use" in ends[0].last
        assert f"rank 0 did not come to the start within {LIMIT} s (port {port} of '127.0.0.1': " in ends[1].last


def knock(port, words):
    try:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
        stranger.sendall(words)
        return stranger
    except OSError:
        return None


def test_strangers_at_the_port_do_no_harm(data, tmp_path, whole12):
    """A port scanner, a browser, somebody who knows the first bytes, and who says nothing: before the ranks are complete."""
    port, out, held = free_port(), tmp_path / "run", []
    first = start_rank(data, out, 0, 3, port, *twelve(), limit=20)
    hello = b"weftrank" + bytes(8) + (1).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"weft".ljust(104, b"\0")
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"weft", hello, hello[:64], b"\0" * 128, b"weftrank" + b"\xff" * 120]
    while not held or held[-1] is None:  # until rank 0 listens
        held.append(knock(port, words[0]))
    held += [knock(port, each) for each in words * 4]
    ends = ends_of([first, *(start_rank(data, out, rank, 3, port, *twelve(), limit=20) for rank in (1, 2))])
    assert [end.returncode for end in ends] == [0, 0, 0], ends[0].stderr
    assert ends[0].stderr.count("is of no rank of this run, and was closed") == 1, "said once"
    assert_same_run(out, whole12)


@pytest.mark.parametrize("to", [[1], [0, 1, 2]])
def test_terminated(data, tmp_path, whole12, to):
    """SIGTERM to one rank, or to all of them as Slurm sends it: all finish the step and save it."""
    out = tmp_path / "run"
    ends = run_ranks(data, out, 3, *twelve(), own={rank: ["--debug-inject", "term@step=6"] for rank in to})
    assert [end.returncode for end in ends] == [143, 143, 143], ends[0].stderr
    assert checkpoints(out) == ["step_00000004", "step_00000006"]
    assert "stopped by Terminated after step 6" in ends[0].stderr
    assert_goes_on(data, out, whole12)


@pytest.mark.parametrize("to", [0, 1])
def test_a_save_may_be_asked_for_at_any_rank(data, tmp_path, to):
    out = tmp_path / "run"
    processes = start_ranks(data, out, 2, "--batch-tokens", 64, "--save-every", 0, steps=1_000_000)
    wait_for(lambda: (out / "log.jsonl").exists() and any(r["type"] == "step" for r in records(out)))
    processes[to].send_signal(signal.SIGUSR1)
    wait_for(lambda: has_checkpoint(out))
    processes[0].send_signal(signal.SIGTERM)
    assert [end.returncode for end in ends_of(processes)] == [143, 143]


def test_terminated_from_outside(data, tmp_path):
    out = tmp_path / "run"
    processes = start_ranks(data, out, 3, *twelve(), steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    for process in processes:
        process.send_signal(signal.SIGTERM)
    ends = ends_of(processes)
    assert [end.returncode for end in ends] == [143, 143, 143], ends[0].stderr
    assert [end.stderr for end in ends[1:]] == ["", ""]


def test_a_full_disk(data, tmp_path, whole12):
    """Of one rank. In between it costs a checkpoint, at the end the run is told; what was saved before goes on."""
    out = tmp_path / "run"
    ends = run_ranks(data, out, 3, *twelve(), own={2: ["--debug-inject", "enospc@save=6000"]})
    assert [end.returncode for end in ends] == [0, 0, 0], ends[0].stderr
    assert "warning: no checkpoint of step 4: rank 2: " in ends[0].stderr and ends[1].stderr == ends[2].stderr == ""
    assert checkpoints(out) == ["step_00000008", "step_00000012"]
    assert_same_run(out, whole12)
    for full in (0, 1):
        out = tmp_path / f"last{full}"
        assert run_ranks(data, out, 3, *twelve("--debug-inject", "term@step=4"))[0].returncode == 143
        ends = run_ranks(data, out, 3, *twelve("--debug-inject", "term@step=6"), own={full: ["--debug-inject", "enospc@save=0"]})
        assert_ended(ends, 5, "the last checkpoint could not be saved: ", "no space left on device")
        assert checkpoints(out) == ["step_00000004"]
    assert_goes_on(data, out, whole12)


def test_killed_anywhere_in_a_save(data, tmp_path, whole12):
    """A rank dies when it has written so many bytes of the second checkpoint, or before one of its syncs and renames: the first
    checkpoint is there, and goes on."""
    first = tmp_path / "first"
    assert run_ranks(data, first, 3, *twelve(), own={0: ["--debug-inject", "term@step=4"]})[0].returncode == 143
    share = sum(path.stat().st_size for path in (first / "step_00000004").iterdir()) // 4  # every rank writes more
    points = [(0, "save=0"), (0, "save=4096"), (0, f"save={share}"), (1, "save=0"), (2, f"save={share}"), (1, "call=1"), (0, "call=3"),
              (0, "call=9"), (0, "call=12")]
    for killed, point in points:
        out = tmp_path / f"run{killed}{point}"
        shutil.copytree(first, out)
        ends = run_ranks(data, out, 3, *twelve("--save-every", 8), own={killed: ["--debug-inject", f"kill@{point}"]})
        assert ends[killed].returncode == -signal.SIGKILL, (killed, point)
        assert_ended(ends, 4, f"rank {killed} is gone", rank=killed)
        # The first rank removes what the others have left.
        assert checkpoints(out) == ["step_00000004", *(["step_00000008.tmp"] if killed == 0 else [])], (killed, point)
        if point in ("save=0", "call=12"):
            assert_goes_on(data, out, whole12, ranks=2)
        else:
            assert train(data, out, *twelve("--max-minutes", 1e-9, "--resume", "must")).returncode == 0


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_while_it_saves(data, tmp_path, stopped):
    """In its last save, for which all wait, too."""
    out = tmp_path / "run"
    processes = start_ranks(data, out, 3, *twelve("--save-every", 12), own={stopped: ["--debug-inject", "stop@save=300"]})
    ends = ends_of([process for rank, process in enumerate(processes) if rank != stopped])
    processes[stopped].send_signal(signal.SIGCONT)
    ends.insert(stopped, Ended(processes[stopped]))
    assert_ended(ends, 4, f"rank {stopped} ", rank=stopped)
    assert ends[stopped].returncode == 4, ends[stopped].stderr
    assert [name for name in checkpoints(out) if not name.endswith(".tmp")] == []


def test_directories_that_the_ranks_do_not_share(data, tmp_path):
    """As on machines that have one each: rank 0 writes for all, to the same bytes."""
    whole, port = tmp_path / "whole", free_port()
    assert train(data, whole, "--virtual-ranks", 2).returncode == 0
    processes = []
    for rank in range(2):
        (tmp_path / f"machine{rank}").mkdir()
        processes.append(start_rank(data, "run", rank, 2, port, cwd=tmp_path / f"machine{rank}"))
    ends = ends_of(processes)
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    assert "saves: rank 0 writes for all, because the ranks do not write one --out: rank 1: " in ends[0].stderr
    assert_same_run(tmp_path / "machine0" / "run", whole)
    assert not (tmp_path / "machine1" / "run").exists()


def test_two_runs_do_not_share_a_directory(data, tmp_path):
    out = tmp_path / "run"
    processes = start_ranks(data, out, 2, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    ends = run_ranks(data, out, 2, steps=1_000_000)
    assert_ended(ends, 4, "another run works here: 'pid ")
    processes[0].send_signal(signal.SIGTERM)
    assert [end.returncode for end in ends_of(processes)] == [143, 143]


# ---- --gpus ----------------------------------------------------------------------------------------------------------


def on_this_machine(ranks, limit=LIMIT):
    """As --gpus does it, on the CPU."""
    return ["--device", "cpu", "--debug-inject", f"ranks@cpu={ranks}", "--comm-timeout", limit]


def runs(pid):
    return stat_of(pid)[:1] not in ([], ["Z"])  # Z: nobody has waited for it


def rank_of(pid):
    variables = open(f"/proc/{pid}/environ", "rb").read().split(b"\0")
    return int(next(variable for variable in variables if variable.startswith(b"RANK="))[5:])


def test_ranks_of_this_machine(data, tmp_path, whole12):
    done = train(data, tmp_path / "run", *twelve(*on_this_machine(3)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "rank 1" not in done.stderr
    assert_same_run(tmp_path / "run", whole12)


def test_ranks_of_this_machine_with_an_error(data, tmp_path):
    done = train(data, tmp_path / "run", *twelve(*on_this_machine(3)), "--debug-inject", "nan@step=6")
    assert done.returncode == 6, done.stderr
    lines = done.stderr.splitlines()
    assert sorted(line.split("error: ")[0] for line in lines if "error: " in line) == ["", "rank 1: ", "rank 2: "]
    assert lines[-1].endswith("ended first, with exit code 6")


@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_of_this_machine_that_is_killed_is_named(data, tmp_path, killed):
    out = tmp_path / "run"
    process = start(data, out, *twelve(*on_this_machine(3)), steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    os.kill(next(pid for pid in children_of(process) if rank_of(pid) == killed), signal.SIGKILL)
    end = Ended(process)
    assert end.returncode == 4 and end.last == f"error: rank {killed} was killed by signal 9 (Killed)", end.stderr
    assert f"rank {killed} is gone: its connection was closed" in end.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_ranks_of_this_machine(data, tmp_path, number, code):
    out = tmp_path / "run"
    process = start(data, out, *twelve(*on_this_machine(3)), steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    process.send_signal(signal.SIGUSR1)
    process.send_signal(number)
    end = Ended(process)
    assert end.returncode == code, end.stderr
    assert "the same command goes on from there" in end.stderr and "error" not in end.stderr


def test_ranks_die_with_who_has_started_them(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, *twelve(*on_this_machine(3)), steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    ranks = children_of(process)
    assert len(ranks) == 3
    process.kill()
    process.wait()
    wait_for(lambda: not any(runs(pid) for pid in ranks))
    assert train(data, out, *twelve("--max-minutes", 1e-9, "--resume", "must"), steps=1_000_000).returncode == 0


@pytest.mark.parametrize("failing", [0, 2])
def test_ranks_that_cannot_be_started(data, tmp_path, failing):
    """fork() fails at the user's limit of processes; the superuser has none."""
    shim = preload(tmp_path, r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

pid_t fork(void) {
  static int calls;
  if (calls++ == atoi(getenv("FAILING"))) {
    errno = EAGAIN;
    return -1;
  }
  const pid_t pid = ((pid_t(*)(void))dlsym(RTLD_NEXT, "fork"))();
  if (pid > 0) {
    FILE* const started = fopen(getenv("STARTED"), "a");
    fprintf(started, "%d\n", (int)pid);
    fclose(started);
  }
  return pid;
}
""")
    started = tmp_path / "started"
    started.touch()
    done = train(data, tmp_path / "run", *twelve(*on_this_machine(3)), steps=1_000_000,
                 env=shim | {"FAILING": str(failing), "STARTED": str(started)})
    pids = started.read_text().split()
    assert len(pids) == failing, done.stderr
    assert_refused(done, 4, f"--gpus: cannot start rank {failing}: {os.strerror(errno.EAGAIN)}")
    wait_for(lambda: not any(runs(pid) for pid in pids))


def test_a_stopped_rank_of_this_machine_is_killed_in_the_end(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, *twelve(*on_this_machine(3, limit=1)), steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    os.kill(next(pid for pid in children_of(process) if rank_of(pid) == 1), signal.SIGSTOP)
    end = Ended(process)
    assert end.returncode == 4 and "rank 1 did not come to " in end.stderr, end.stderr
    assert "warning: rank 1 does not end: it is killed" in end.stderr


def test_gpus_are_refused_where_there_are_none(data, tmp_path):
    assert_refused(train(data, tmp_path / "no", "--gpus", 2, "--device", "cpu"), 2, "--gpus: got 2, but --device cpu", "several_gpus.md")
    assert_refused(train(data, tmp_path / "no", "--gpus", 200, "--batch-tokens", 0), 4, "--gpus: got 200, but ")
    assert_refused(train(data, tmp_path / "no", "--gpus", 3), 2, "--batch-tokens: got 64, expected a multiple of",
                   "--micro-batch x --seq-len = 32, for each of the 3 ranks")
    environment_of_two = torchrun(0, 2, 1)
    assert_refused(train(data, tmp_path / "no", "--gpus", 4, env=environment_of_two), 2, "--gpus: got 4, but a launcher has started 2 ranks")
    assert_refused(train(data, tmp_path / "no", "--virtual-ranks", 3, "--device", "cpu", "--batch-tokens", 96, env=environment_of_two), 2,
                   "--virtual-ranks: got 3, expected a multiple of the 2 ranks")
    assert_refused(train(data, tmp_path / "no", "--comm-timeout", 0), 2, "--comm-timeout")


def test_the_plan_of_gpus_that_are_not_here(data, tmp_path):
    plans = {shard: train(data, tmp_path / "no", "--gpus", 8, "--shard", shard, "--batch-tokens", 0, "--gpu-memory", "80GB", "--dry-run")
             for shard in ("none", "optimizer", "gradients", "parameters")}
    if "built without nvcc" in plans["none"].stderr:
        assert_refused(plans["none"], 4, "--gpu-memory")
        pytest.skip("a build for the CPU alone")
    lines = {shard: dict(re.findall(r"^  (.*?) {2,}(.*)$", done.stdout, re.M)) for shard, done in plans.items()}
    for shard, done in plans.items():
        assert done.returncode == 0 and f"memory on cuda, of each of the 8 ranks (--shard {shard})" in done.stdout, done.stderr
    moments, gradients = "AdamW moments (fp32)", "gradients (fp32)"
    assert lines["none"][moments] not in (lines["optimizer"][moments], lines["gradients"][moments])
    assert lines["none"][gradients] == lines["optimizer"][gradients] != lines["gradients"][gradients] == lines["parameters"][gradients]
    parameters, used = "parameters (bf16)", "parameters of layers in use (bf16)"
    assert lines["none"][parameters] == lines["gradients"][parameters] != lines["parameters"][parameters]
    assert used in lines["parameters"] and used not in lines["gradients"]
    # Two micro-batches of each rank: their sum cannot be divided, but each may be a rank of its own.
    two = ["--gpus", 2, "--batch-tokens", 128, "--gpu-memory", "80GB", "--dry-run"]
    for shard in ("gradients", "parameters"):
        assert_refused(train(data, tmp_path / "no", *two, "--shard", shard), 2,
                       f"--shard: got {shard} with 2 micro-batches a rank and step, expected one. --virtual-ranks 4 makes each")
        assert train(data, tmp_path / "no", *two, "--shard", shard, "--virtual-ranks", 4).returncode == 0
    assert train(data, tmp_path / "no", *two, "--shard", "optimizer").returncode == 0


def test_gradients_are_divided_on_gpus_alone(data, tmp_path):
    for ends in (run_ranks(data, tmp_path / "no", 2, "--shard", "gradients", *more) for more in ([], ["--dry-run"])):
        assert_ended(ends, 2, "--shard: got gradients, which needs a GPU")


def test_divided_parameters(data, tmp_path, whole12):
    """Three processes, of which validation gives one micro-batch to two; stopped between, and gone on with whole parameters. No rank
    could write a sample."""
    out = tmp_path / "run"
    stopped = run_ranks(data, out, 3, *twelve("--shard", "parameters", "--debug-inject", "term@step=6"))
    assert [end.returncode for end in stopped] == [143, 143, 143], stopped[0].stderr
    assert_goes_on(data, out, whole12)
    plans = {shard: run_ranks(data, tmp_path / "no", 2, "--dry-run", "--shard", shard)[0].stdout for shard in ("optimizer", "parameters")}
    lines = {shard: dict(re.findall(r"^  (.*?) {2,}(.*)$", plan, re.M)) for shard, plan in plans.items()}
    used = "parameters of layers in use (fp32)"
    assert used in lines["parameters"] and used not in lines["optimizer"]
    assert lines["parameters"]["parameters (fp32)"] != lines["optimizer"]["parameters (fp32)"]
    for end in run_ranks(data, tmp_path / "no", 2, "--shard", "parameters", "--sample-every", 5):
        assert end.returncode == 2 and "--sample-every: got 5, but with --shard parameters no rank has the parameters" in end.last


def test_a_launcher_of_one_rank_is_none(data, tmp_path, whole12):
    done = train(data, tmp_path / "run", *twelve("--device", "cpu"), env=torchrun(0, 1, 1))
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", whole12)
