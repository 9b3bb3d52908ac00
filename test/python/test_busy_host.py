"""dev/bench/busy_host.py: a short run on a small random model, and what it counts as lost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

from test_infer_cli import write_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)).absolute() / "infer_pythia"


def measure(*words):
    return subprocess.run([sys.executable, ROOT / "dev/bench/busy_host.py", *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built")
@pytest.mark.parametrize("task", [("--bench",), ("--bench-batch", "1,2", "--bench-prompt", 8)])
def test_measures_with_and_without_loops(tmp_path, task):
    done = measure("--loops", 1, "--turns", 2, "--", PROGRAM, "--model", write_model(tmp_path / "small.bin", max_positions=256),
                   "--device", "cpu", "--threads", 1, "--max-tokens", 16, *task)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["1 sequence"] if task == ("--bench",) else ["1 sequence", "2 sequences"]
    assert [line.split(":")[0] for line in lines if line.startswith("turn")] == [
        f"turn {turn}, {loops} busy loops, {name}" for turn in (1, 2) for loops in (0, 1) for name in names]
    assert [line.split(":")[0] for line in lines if not line.startswith("turn")] == names
    assert all(re.search(r"[1-9][0-9.]* tokens/s, [0-9.]+ beside 1 busy loops: -?[0-9.]+ % lost$", line) for line in lines[-len(names):])


def test_more_loss_than_allowed_is_an_exit_code(tmp_path):
    calls = tmp_path / "calls"
    command = tmp_path / "falling.py"
    command.write_text(f"""import json, pathlib
calls = pathlib.Path({str(calls)!r})
done = len(calls.read_text()) if calls.exists() else 0
calls.write_text("x" * (done + 1))
print(json.dumps({{"tokens_per_s": [100.0, 96.0][done % 2]}}))
""")
    for most, code in ((3, 1), (5, 0)):
        done = measure("--loops", 1, "--turns", 2, "--most-lost", most, "--", sys.executable, command)
        assert done.returncode == code, done.stderr
        assert done.stdout.splitlines()[-1] == "1 sequence: 100.0 tokens/s, 96.0 beside 1 busy loops: 4.0 % lost"


@pytest.mark.parametrize(("printed", "code", "named"), [(json.dumps({"ids": []}), 0, "--bench"), ("", 3, "exit code 3")])
def test_a_command_that_measures_nothing_is_named(tmp_path, printed, code, named):
    command = tmp_path / "other.py"
    command.write_text(f"print({printed!r})\nraise SystemExit({code})\n")
    done = measure("--loops", 1, "--turns", 1, "--", sys.executable, command)
    assert done.returncode == 1 and named in done.stderr and done.stderr.count("\n") == 1
