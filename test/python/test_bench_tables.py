"""dev/bench/training.py and decode.py: which commands they run, and what becomes of the answers. Nothing is measured here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "dev" / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(request, tmp_path, monkeypatch):
    """A benchmark whose commands are noted and answered by `answer`: a function of the command, its code, stdout and stderr."""
    module = load(request.param)
    module.commands, module.absent = [], set()

    def run(command, **more):
        assert more["cwd"] == tmp_path and more["capture_output"] and more["text"]
        module.commands.append(command)
        return subprocess.CompletedProcess(command, *module.answer(command))

    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name in module.absent else name)

    def main(*words):
        module.commands.clear()
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        return module.main()

    module.call = main
    return module


def option(command, name):
    return command[command.index(name) + 1]


FAILURES = [(3, "", "first\nerror: last line\n", "error: last line"), (-9, "", "", "no output"), (1, "", "\n\n", "no output")]


# ---- training --------------------------------------------------------------------------------------------------------


training = pytest.mark.parametrize("bench", ["training"], indirect=True)


@training
def test_training_commands_are_those_of_the_run(bench, tmp_path):
    bench.answer = lambda command: (0, '{"tokens_per_s": 5.0}\n', "")
    run = bench.Run("llama3.1-8b", 4096, 4, 1, "bf16", recompute="norm", moments="bf16")
    assert bench.weft(run) == bench.weft(run, "fp8") == {"tokens_per_s": 5.0}
    words = [str(tmp_path / "train_llama"), "--device", "cuda", "--bench", "--json", "--config", "llama3.1-8b", "--seq-len", "4096", "--micro-batch", "4",
             "--recompute", "norm", "--moments", "bf16", "--precision"]
    assert bench.commands == [[*words, "bf16"], [*words, "fp8"]]
    bench.commands.clear()
    bench.answer = lambda command: (0, 'warming up\n{"tokens_per_s": 1}\n{"tokens_per_s": 2}\nbye\n', "")
    assert bench.peer(run) == bench.peer(run, "--float8") == {"tokens_per_s": 2}
    words = [sys.executable, str(tmp_path / "dev/bench/train_peer.py"), "--config", "llama3.1-8b", "--precision", "bf16", "--seq-len", "4096",
             "--micro-batch", "1"]
    assert bench.commands == [words, [*words, "--float8"]]


@training
@pytest.mark.parametrize("code, out, err, said", FAILURES)
def test_a_training_run_that_fails_says_why(bench, code, out, err, said):
    bench.answer = lambda command: (code, out, err)
    assert bench.weft(bench.RUNS[0]) == said == bench.peer(bench.RUNS[0])


@training
def test_a_peer_that_is_not_there_or_fails_says_why(bench):
    bench.answer = lambda command: (1, '{"tokens_per_s": 5}\n{"error": "out of memory"}\n', "a warning")
    assert bench.peer(bench.RUNS[0]) == "out of memory"
    bench.answer = lambda command: (0, "nothing\n", "a\nb\n")
    assert bench.peer(bench.RUNS[0]) == "b"
    bench.commands.clear()
    for absent, more, said in (({"torch"}, (), "torch"), ({"torch", "torchao"}, ("--float8",), "torch"), ({"torchao"}, ("--float8",), "torchao")):
        bench.absent = absent
        assert bench.peer(bench.RUNS[0], *more) == f"{said} is not installed" and not bench.commands
    bench.answer = lambda command: (0, "{}", "")
    assert bench.peer(bench.RUNS[0]) == {} and len(bench.commands) == 1, "torchao is for float8 alone"


@training
def test_the_training_table_has_a_row_a_run(bench, tmp_path, capsys):
    def answer(command):
        if option(command, "--config") == "llama3.2-3b":
            return 1, '{"error": "the peer fails"}' if "train_peer.py" in command[1] else "", "weft fails"
        speed = 2000.4 if "train_peer.py" in command[1] else 5001
        return 0, json.dumps({"tokens_per_s": speed, "mfu": None if option(command, "--config") == "d12" else 0.4321}), ""

    bench.answer = answer
    assert bench.call() == 1, "a run of weft failed"
    out, err = capsys.readouterr()
    assert out.splitlines()[2:] == [
        "| d12, T 1024, B 32 | 5,001 | - | 2,000 | fp32 master, B 32 | 2.50 |",
        "| llama3.2-1b, T 2048, B 8 | 5,001 | 43.2 % | 2,000 | fp32 master, B 8 | 2.50 |",
        "| llama3.2-1b, T 2048, B 32 | 5,001 | 43.2 % | 2,000 | fp32 master, B 32 | 2.50 |",
        "| llama3.2-1b, T 8192, B 2 | 5,001 | 43.2 % | 2,000 | pure bf16, B 2 | 2.50 |",
        "| llama3.2-3b, T 2048, B 8 | weft fails | - | the peer fails | pure bf16, B 8 | - |",
        "| llama3.1-8b, T 4096, B 4, bf16 moments | 5,001 | 43.2 % | 2,000 | pure bf16, B 1 | 2.50 |"]
    assert len(err.splitlines()) == 12 and "llama3.1-8b, T 4096, B 4, bf16 moments: peer, B 1: 2,000" in err
    rows = json.loads((tmp_path / "build" / "bench_training.json").read_text())
    assert [row["run"] for row in rows] == [run.name for run in bench.RUNS] and rows[4]["weft"] == "weft fails"
    assert rows[5] == {"run": bench.RUNS[5].name, "weft": {"tokens_per_s": 5001, "mfu": 0.4321}, "peer": {"tokens_per_s": 2000.4, "mfu": 0.4321},
                       "peer_precision": "bf16", "peer_micro_batch": 1}


@training
def test_only_the_chosen_training_runs(bench, tmp_path, capsys):
    bench.answer = lambda command: (0, '{"tokens_per_s": 5, "mfu": 0.5}', "")
    assert bench.call("--only", "llama3.1-8b", "llama3.2-1b", "--no-peer") == 0
    assert [(option(command, "--config"), option(command, "--seq-len")) for command in bench.commands] == [
        ("llama3.2-1b", "2048"), ("llama3.2-1b", "2048"), ("llama3.2-1b", "8192"), ("llama3.1-8b", "4096")]
    assert all(row["peer"] == "not run" for row in json.loads((tmp_path / "build" / "bench_training.json").read_text()))
    assert "| not run | pure bf16, B 1 | - |" in capsys.readouterr().out
    bench.absent = {"torch"}
    assert bench.call("--only", "d12") == 0, "a peer that is missing is no failure"
    with pytest.raises(SystemExit) as end:
        bench.call("--only", "d13")
    assert end.value.code == 2


@training
def test_the_table_of_fp8(bench, tmp_path, capsys):
    speeds = {"bf16": 1000, "fp8": 1500}

    def answer(command):
        if "train_peer.py" in command[1]:
            return 0, '{"tokens_per_s": 600}', ""
        if option(command, "--config") == "llama3.2-3b" and option(command, "--precision") in broken:
            return 1, "", "fails"
        return 0, json.dumps({"tokens_per_s": speeds[option(command, "--precision")]}), ""

    bench.answer, broken = answer, []
    assert bench.call("--fp8") == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| llama3.2-1b, T 2048, B 8 | 1,000 | 1,500 | 1.50 | 600 | fp32 master, B 8 | 2.50 |",
        "| llama3.2-3b, T 2048, B 8 | 1,000 | 1,500 | 1.50 | 600 | pure bf16, B 8 | 2.50 |",
        "| llama3.2-3b, T 2048, B 4 | 1,000 | 1,500 | 1.50 | 600 | pure bf16, B 4 | 2.50 |",
        "| llama3.1-8b, T 4096, B 2, bf16 moments | 1,000 | 1,500 | 1.50 | 600 | pure bf16, B 1 | 2.50 |"]
    assert len(bench.commands) == 12 and all("--float8" in command for command in bench.commands if "train_peer.py" in command[1])
    for precision, row in (("fp8", "| 1,000 | fails | - | not run |"), ("bf16", "| fails | 1,500 | - | not run |")):
        broken[:] = [precision]
        assert bench.call("--fp8", "--no-peer", "--only", "llama3.2-3b", "llama3.1-8b") == 1, "whichever run fails"
        out = capsys.readouterr().out
        assert row in out and len(out.splitlines()) == 5 and len(bench.commands) == 6
    assert not (tmp_path / "build").exists()


# ---- decoding --------------------------------------------------------------------------------------------------------


decode = pytest.mark.parametrize("bench", ["decode"], indirect=True)


def decoded(command):
    """What both sides say: of the peer's graph one context alone, of weft's graph nothing."""
    if "decode_peer.py" in command[1]:
        mode = option(command, "--mode")
        lines = [{"context": 64, "ms": 4.0, **({"prompt_ms": 9.0} if mode == "eager" else {})}, {"context": 1024, "ms": 5.0},
                 {"context": 2000, "error": "too long"} if mode == "graph" else {"context": 2000, "ms": 6.0, "prompt_ms": 90.0}]
        return (1, "", "no compiler\n") if mode == "compile" else (1, "hello\n" + "".join(json.dumps(line) + "\n" for line in lines), "")
    if option(command, "--decode") == "graph":
        return 4, "", "error: no graph\n"
    return 0, json.dumps({"contexts": [{"prompt_tokens": tokens, "itl_ms_p50": ms, "share_of_read_ceiling": 0.9, "ttft_ms": 10 * ms}
                                       for tokens, ms in ((64, 2.0), (1024, 2.5), (2000, 3.0))]}), ""


@decode
def test_decoding_commands_are_those_of_the_model_and_mode(bench, tmp_path):
    bench.answer = decoded
    bench.weft("pythia-1.4b", "fused")
    bench.peer("pythia-1.4b", "eager")
    assert bench.commands == [
        [str(tmp_path / "infer_pythia"), "--device", "cuda", "--dtype", "fp16", "--random-model", "pythia-1.4b", "--decode", "fused", "--bench",
         "--bench-contexts", "64,1024,2000", "--json"],
        [sys.executable, str(tmp_path / "dev/bench/decode_peer.py"), "--model", "pythia-1.4b", "--mode", "eager", "--contexts", "64", "1024", "2000"]]
    bench.absent = {"torch"}
    assert bench.peer("pythia-1.4b", "eager") == "torch is not installed" and len(bench.commands) == 2


@decode
@pytest.mark.parametrize("code, out, err, said", FAILURES)
def test_a_decoding_run_that_fails_says_why(bench, code, out, err, said):
    bench.answer = lambda command: (code, out, err)
    assert bench.weft("pythia-1b", "graph") == said == bench.peer("pythia-1b", "graph")


@decode
def test_the_decoding_table_has_a_row_a_program_and_mode(bench, tmp_path, capsys):
    bench.answer = decoded
    assert bench.call("--only", "pythia-410m", "pythia-12b") == 1, "a way of weft failed"
    out, err = capsys.readouterr()
    assert out.splitlines()[2:] == [line for model in ("pythia-410m", "pythia-12b") for line in (
        f"| {model} | weft fused | 2.000 (90.0 %) | 2.500 (90.0 %) | 3.000 (90.0 %) | 500.0 | 30.00 |",
        f"| {model} | weft graph | error: no graph | | | | |",
        f"| {model} | weft reference | 2.000 (90.0 %) | 2.500 (90.0 %) | 3.000 (90.0 %) | 500.0 | 30.00 |",
        f"| {model} | PyTorch eager | 4.000 | 5.000 | 6.000 | 250.0 | 90.00 |",
        f"| {model} | PyTorch graph | 4.000 | 5.000 |  | 250.0 |  |",
        f"| {model} | PyTorch compile | no compiler | | | | |")]
    assert out.splitlines()[0].count("|") == out.splitlines()[1].count("|") == out.splitlines()[2].count("|") == out.splitlines()[3].count("|")
    assert err.splitlines()[:2] == ["pythia-410m, weft fused: 2.000 (90.0 %) / 2.500 (90.0 %) / 3.000 (90.0 %)",
                                    "pythia-410m, weft graph: error: no graph"] and len(err.splitlines()) == 12
    rows = json.loads((tmp_path / "build" / "bench_decode.json").read_text())
    assert [(row["model"], row["program"], row["mode"]) for row in rows][5:7] == [
        ("pythia-410m", "PyTorch", "compile"), ("pythia-12b", "weft", "fused")] and len(rows) == 12
    assert rows[0]["contexts"]["1024"] == {"ms": 2.5, "share": 0.9, "prompt_ms": 25.0} and "contexts" not in rows[1]


@decode
def test_only_the_chosen_ways_of_decoding(bench, capsys):
    bench.answer = decoded
    assert bench.call("--only", "pythia-2.8b", "--decode", "fused", "reference", "--peer", "compile") == 0, "a peer that fails is no failure"
    assert [option(command, "--mode" if "--mode" in command else "--decode") for command in bench.commands] == ["fused", "reference", "compile"]
    assert bench.call("--no-peer") == 1 and len(bench.commands) == 5 * 3
    assert [option(command, "--random-model") for command in bench.commands[::3]] == bench.MODELS
    for words in (("--only", "pythia-1b"), ("--decode", "eager"), ("--peer", "fused")):
        with pytest.raises(SystemExit) as end:
            bench.call(*words)
        assert end.value.code == 2
    capsys.readouterr()
