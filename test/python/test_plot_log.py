"""plot_log.py: what it reads from a log, and what it says of files that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import plot_log  # noqa: E402


def step(number, loss=2.0, **more):
    return {"type": "step", "step": number, "tokens": number * 16, "loss": loss, "lr": 1e-3, "grad_norm": 1.0,
            "tokens_per_s": 1000.0, "dt_ms": 16.0, "skipped": False, "time": 1.0, **more}


def write_log(path, records, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def run_script(*arguments):
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run([sys.executable, ROOT / "scripts" / "plot_log.py", *map(str, arguments)], capture_output=True,
                          text=True, timeout=120, env=environment)


def assert_refused(done, code, *words):
    """One error line, the last: before it matplotlib may speak of a font cache that it builds or cannot write."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == code and len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0], done.stderr
    assert all(word in errors[0] for word in words), errors[0]


HEADER = {"type": "header", "version": "x"}


def test_a_resume_replaces_what_came_after_it(tmp_path):
    log = write_log(tmp_path / "run" / "log.jsonl", [
        HEADER, {"type": "resume", "step": 0}, step(1), step(2), step(3, loss=9.0), step(4, loss=9.0),
        HEADER, {"type": "resume", "step": 2}, step(3, loss=1.5)])
    run = plot_log.read_run(log)
    assert run.curve("loss") == ([1, 2, 3], [2.0, 2.0, 1.5])
    assert run.curve("loss", "tokens")[0] == [16, 32, 48]
    assert run.label == "run"
    assert plot_log.read_run(log.parent).steps == run.steps


def test_broken_lines_are_left_out(tmp_path):
    records = [HEADER, step(1)]
    log = write_log(tmp_path / "log.jsonl", records, tail='{"type":"step","step":2,"lo')
    assert sorted(plot_log.read_run(log).steps) == [1]
    log = write_log(tmp_path / "log.jsonl", records, tail='{"type":"st\n' + json.dumps(step(2)) + "\n[1]\n3\n")
    run = plot_log.read_run(log)
    assert sorted(run.steps) == [1, 2] and run.broken == 3


def test_values_that_are_no_numbers_leave_gaps(tmp_path):
    log = write_log(tmp_path / "log.jsonl", [HEADER, step(1), step(2, loss=None), step(3, loss="x"), step(4, loss=True),
                                             step(5, val_loss=3.0)])
    run = plot_log.read_run(log)
    assert run.curve("loss")[0] == [1, 5]
    assert run.curve("val_loss") == ([5], [3.0])


def test_smoothing_is_a_running_mean():
    assert plot_log.smoothed([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert plot_log.smoothed([1, 2], 1) == [1, 2]


def test_draws_several_runs(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        write_log(tmp_path / name / "log.jsonl",
                  [HEADER, *(step(n, loss=8 / n, **({"val_loss": 9 / n} if n % 5 == 0 else {})) for n in range(1, 30))])
    output = tmp_path / "picture with spaces.png"
    done = run_script(tmp_path / "one", tmp_path / "two" / "log.jsonl", "-o", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 10_000
    assert "29 steps" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", output.name, "two"], "nothing is left behind"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"hello\n", b"[1, 2]\n", b"\x00\xff\xfe", b"<html>", b'{"a": 1}\n',
                                     json.dumps(HEADER).encode() + b"\n", b"[" * 100_000])
def test_bad_input_is_one_line(tmp_path, content):
    (tmp_path / "log.jsonl").write_bytes(content)
    done = run_script(tmp_path / "log.jsonl", "-o", tmp_path / "out.png")
    assert_refused(done, 3, "log.jsonl")
    assert not (tmp_path / "out.png").exists()


def test_missing_files_and_options(tmp_path):
    assert_refused(run_script(tmp_path / "none.jsonl", "-o", tmp_path / "out.png"), 3, "none.jsonl")
    assert run_script(tmp_path / "none.jsonl").returncode == 2
    assert run_script("-o", tmp_path / "out.png").returncode == 2
    pytest.importorskip("matplotlib")
    log = write_log(tmp_path / "log.jsonl", [HEADER, step(1)])
    assert_refused(run_script(log, "-o", tmp_path / "out.exe"), 2, ".png")
    assert_refused(run_script(log, "-o", tmp_path / "absent" / "out.png"), 4, "absent/out.png'")
