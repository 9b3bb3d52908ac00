"""plot_log.py: what it reads from a log, and what it says of files that are none."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import plot_log  # noqa: E402
import run_log  # noqa: E402
from tensor_file import ENVIRONMENT, FileError  # noqa: E402


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


@pytest.mark.parametrize("size", [15, 50, 200, 1000])
def test_a_log_that_grows_by_pieces_of_lines_is_read_as_the_whole(tmp_path, size):
    records = [HEADER, step(1), step(2, loss=9.0), {"type": "resume", "step": 1}, step(2), step(3, val_loss=3.0), step(4)]
    whole = write_log(tmp_path / "whole" / "log.jsonl", records, tail="[1]\n")
    data, log = whole.read_bytes(), write_log(tmp_path / "log.jsonl", [])
    run = plot_log.new_run(log)
    assert not run.read_more()
    with log.open("ab", buffering=0) as file:
        for begin in range(0, len(data), size):
            file.write(data[begin:begin + size])
            assert run.read_more() == (b"\n" in data[begin:begin + size])
            assert not run.read_more(), "nothing was added"
            assert (run.records, run.broken) == (data[:begin + size].count(b"\n"), data[:begin + size].count(b"[1]\n"))
    want = plot_log.read_run(whole)
    assert (run.steps, run.header, run.broken, run.records) == (want.steps, want.header, 1, len(records) + 1)
    run.read_all()
    assert run.broken == 1, "nothing is left of the last line"


def test_the_last_line_is_read_where_the_log_is_whole(tmp_path):
    """With or without a line end; of a line that is cut one is broken. Lines of blanks are none."""
    for tail, steps, broken, records in (("", [1], 0, 2), (json.dumps(step(2)), [1, 2], 0, 3),
                                         ('{"type":"step","st', [1], 1, 3),
                                         (" \n\t\r\n\n", [1], 0, 2), ("{}\n", [1], 1, 3),
                                         ('{"type":7}\n{"type":null}\n', [1], 2, 4)):
        run = plot_log.read_run(write_log(tmp_path / "log.jsonl", [HEADER, step(1)], tail=tail))
        assert (sorted(run.steps), run.broken, run.records) == (steps, broken, records)
        run.read_all()
        assert (run.broken, run.records) == (broken, records), "no line is taken twice"


def test_a_log_has_a_size_limit_whenever_it_is_read(tmp_path, monkeypatch):
    log = write_log(tmp_path / "log.jsonl", [HEADER, step(1)])
    monkeypatch.setattr(run_log, "MAX_LOG_BYTES", log.stat().st_size)
    run = plot_log.read_run(log)
    with log.open("a") as file:
        file.write("\n")
    for read in (run.read_more, lambda: plot_log.read_run(log)):
        with pytest.raises(FileError, match="log.jsonl': got more than [0-9]+ bytes") as caught:
            read()
        assert caught.value.code == 3


@pytest.mark.parametrize("make, words", [
    (os.mkfifo, "not a regular file"), (lambda path: path.symlink_to("/dev/null"), "not a regular file"),
    (lambda path: path.symlink_to(path), "cannot be read: Too many levels"),
    (lambda path: path.mkdir(), "cannot be read|not a regular file"),
    (lambda path: None, "cannot be read: No such file")])
def test_a_log_that_is_no_file_is_refused_and_nothing_waits(tmp_path, nothing_hangs, make, words):
    make(tmp_path / "log.jsonl")
    with pytest.raises(FileError, match=f"log.jsonl': ({words})") as caught:
        plot_log.read_run(tmp_path)
    assert caught.value.code == 3
    with pytest.raises(FileError, match="cannot be read: embedded null"):
        run_log.open_log(Path("a\0b"))


@pytest.mark.parametrize("content, words", [("", "empty: no step was finished yet"),
                                            ("\n \n", "empty: no step was finished yet"),
                                            (json.dumps(HEADER) + "\n", "holds no finished step"),
                                            (json.dumps(step(-1)) + "\n", "holds no finished step"),
                                            ("[1]", "line 1: not a record")])
def test_a_log_without_a_step_says_why(tmp_path, content, words):
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(FileError, match=words):
        plot_log.read_run(tmp_path)


def test_values_that_are_no_numbers_leave_gaps(tmp_path):
    log = write_log(tmp_path / "log.jsonl", [HEADER, step(1), step(2, loss=None), step(3, loss="x"), step(4, loss=True),
                                             step(5, val_loss=3.0)])
    run = plot_log.read_run(log)
    assert run.curve("loss")[0] == [1, 5]
    assert run.curve("val_loss") == ([5], [3.0])


def run_of(label="run", header=HEADER, *records):
    return run_log.Run(Path("x"), label, header, {record["step"]: record for record in records or (step(3),)})


def figure_of(monkeypatch, runs, output):
    """What draw() shows, as matplotlib has it."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)
    plot_log.draw(runs, output)
    return shown[0]


def test_what_the_picture_says(monkeypatch, tmp_path):
    log = write_log(tmp_path / "a run" / "log.jsonl", [HEADER | {"parameters": 1967808, "settings": {"config": "tiny"}},
                    *(step(n, loss=8 / n, grad_norm=240.0 if n == 15 else 1.0, val_loss=3.0) for n in range(1, 31))])
    figure = figure_of(monkeypatch, [plot_log.read_run(log)], tmp_path / "a.png")
    assert figure.get_suptitle() == "a run: tiny, 1.97M parameters, step 30, 480 tokens"
    axes = {one.get_title(): one for one in figure.axes}
    assert sorted(axes) == ["gradient norm", "learning rate", "loss", "tokens per second"], "no panel twice"
    assert axes["gradient norm"].get_yscale() == "log" and axes["loss"].get_yscale() == "linear"
    legend = [text.get_text() for text in axes["loss"].get_legend().get_texts()]
    assert legend == ["a run: train 0.2667", "a run: val 3.0000"]


def test_without_matplotlib_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FileError, match="matplotlib is not installed") as caught:
        plot_log.draw([run_of()], tmp_path / "a.png")
    assert caught.value.code == ENVIRONMENT


def test_follow_draws_again_and_ends_at_ctrl_c(tmp_path):
    pytest.importorskip("matplotlib")
    log, other = (write_log(tmp_path / name / "log.jsonl", [HEADER, step(1)]) for name in ("run", "idle"))
    output = tmp_path / "out.png"
    process = subprocess.Popen([sys.executable, str(ROOT / "scripts" / "plot_log.py"), str(log.parent), str(other.parent),
                                "-o", str(output), "--follow", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ends_in_time = threading.Timer(60, process.kill)  # and readline() with it
    ends_in_time.start()
    assert "step 1" in process.stdout.readline()
    before = output.stat().st_mtime_ns
    with log.open("a") as file:
        file.write(json.dumps(step(2)))  # half a line is not taken
        file.flush()
        time.sleep(0.3)
        file.write("\n")
    line = process.stdout.readline()  # one log of the two has grown
    assert "step 2" in line and "idle: " in line and output.stat().st_mtime_ns > before, line
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    ends_in_time.cancel()
    assert process.returncode == 0 and "Traceback" not in errors, errors


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
