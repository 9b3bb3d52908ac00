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


# ---- training --------------------------------------------------------------------------------------------------------


training = pytest.mark.parametrize("bench", ["training"], indirect=True)


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
