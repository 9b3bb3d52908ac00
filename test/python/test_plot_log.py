"""plot_log.py: what it reads from a log, and what it says of files that are none."""

import json
import math
import os
import signal
import statistics
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


def test_steps_that_train_llama_can_have_are_taken_and_no_others(tmp_path):
    """The header is that of the last start, and a number that is beyond all floats is none, whatever its sign."""
    huge = 10**400
    wrong = [-1, 10**12 + 1, True, 1.0, "1", None, huge, -huge]
    log = write_log(tmp_path / "log.jsonl", [HEADER, *(step(0) | {"step": number} for number in wrong), step(0), step(10**12), step(7, loss=-huge, lr=huge),
                                             *({"type": "resume", "step": number} for number in wrong), HEADER | {"version": "y"}])
    run = plot_log.read_run(log)
    assert sorted(run.steps) == [0, 7, 10**12] and run.header["version"] == "y" and run.broken == 0
    assert run.steps[7]["loss"] is None and run.steps[7]["lr"] is None and run.curve("loss")[0] == [0, 10**12]


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


def test_broken_lines_are_counted_where_there_are_several(tmp_path, monkeypatch, capsys):
    """One is what a killed run leaves."""
    monkeypatch.setattr(plot_log, "draw", lambda runs, output: None)
    for count in (0, 1, 2, 3):
        log = write_log(tmp_path / "log.jsonl", [HEADER, step(1)], tail="[1]\n" * count)
        monkeypatch.setattr(sys, "argv", ["plot_log.py", str(log), "-o", "x.png"])
        assert plot_log.main() == 0
        assert (f": {count} lines are no records" in capsys.readouterr().err) == (count > 1)


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


def test_numbers_that_can_be_computed_with():
    for value, wanted in ((0, True), (-1.5, True), (1e300, True), (-1e300, True), (10**300 * 2, False), (1.1e300, False),
                          (-1.1e300, False), (True, False), (False, False), (None, False), ("1", False),
                          (float("nan"), False), (float("inf"), False)):
        assert run_log.is_number(value) is wanted, value


def test_a_curve_is_in_the_order_of_the_steps_and_has_both_numbers(tmp_path):
    run = plot_log.read_run(write_log(tmp_path / "log.jsonl", [HEADER, step(3, loss=1.0), step(1), step(2, tokens=None),
                                                               step(0, loss=0)]))
    assert run.curve("loss") == ([0, 1, 2, 3], [0, 2.0, 2.0, 1.0])
    assert run.curve("loss", "tokens") == ([0, 16, 48], [0, 2.0, 1.0])
    assert run.curve("none") == ([], [])


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


def test_a_run_has_the_name_of_its_directory_however_it_is_given(tmp_path, monkeypatch):
    write_log(tmp_path / "run" / "log.jsonl", [])
    write_log(tmp_path / "run" / "part" / "log.jsonl", [])
    (tmp_path / "linked").symlink_to("run")
    (tmp_path / "a.jsonl").symlink_to("run/log.jsonl")
    monkeypatch.chdir(tmp_path / "run" / "part")
    for given, label in ((tmp_path / "run", "run"), (tmp_path / "run" / "log.jsonl", "run"), ("..", "run"), (".", "part"),
                         ("log.jsonl", "part"),
                         ("../log.jsonl", "run"), (tmp_path / "linked", "run"), (tmp_path / "linked" / "log.jsonl", "run"),
                         (tmp_path / "a.jsonl", "run"), ("/none.jsonl", "/none.jsonl"), ("/none/log.jsonl", "none")):
        run = run_log.new_run(Path(given))
        assert run.label == label and run.path == (Path(given) / "log.jsonl" if Path(given).is_dir() else Path(given)), given


def test_values_that_are_no_numbers_leave_gaps(tmp_path):
    log = write_log(tmp_path / "log.jsonl", [HEADER, step(1), step(2, loss=None), step(3, loss="x"), step(4, loss=True),
                                             step(5, val_loss=3.0)])
    run = plot_log.read_run(log)
    assert run.curve("loss")[0] == [1, 5]
    assert run.curve("val_loss") == ([5], [3.0])


def test_smoothing_is_a_running_median():
    assert plot_log.smoothed([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert plot_log.smoothed([1, 2], 1) == [1, 2]
    assert plot_log.smoothed([2.0] * 10 + [900.0] + [2.0] * 10, 5) == [2.0] * 21, "a spike leaves nothing beside itself"
    values = [((i * 7919) % 101) / 3 for i in range(300)]
    assert plot_log.smoothed(values, 7) == [statistics.median(values[max(0, i - 6):i + 1]) for i in range(300)]


def test_units_for_people():
    assert [plot_log.human(x) for x in (0.5, 12, 999, 1000, 12345678, 3.2e9, 1e13)] == [
        "0.5", "12", "999", "1K", "12.3M", "3.2B", "10T"]
    assert [plot_log.human(sign * x) for sign in (1, -1) for x in (1e3, 1e6, 1e9, 1e12)] == ["1K", "1M", "1B", "1T", "-1K", "-1M", "-1B", "-1T"]
    assert [plot_log.human(x) for x in (999.4, 999.6, 999499, 999500, 999_999_999, -999.6, 0)] == ["999", "1K", "999K", "1M", "1B", "-1K", "0"]


@pytest.mark.parametrize("label, shown", [
    ("run", "run"), ("", ""), ("gr\u00fc\u00dfe \u91cd", "gr\u00fc\u00dfe \u91cd"), ("_a_", " _a_"), ("$x^{", r"\$x^{"),
    ("\\$", r"\\\$"),
    (os.fsdecode(b"a\xff"), "a\ufffd"), ("a\nb\u202e", "a\ufffdb\ufffd"), ("x" * 60, "x" * 60), ("x" * 61, "x" * 59 + "\u2026"),
    ("\u00fc" * 60, "\u00fc" * 60), ("$" * 61, r"\$" * 59 + "\u2026"), ("_" * 61, " " + "_" * 59 + "\u2026")])
def test_labels_as_matplotlib_draws_them(label, shown):
    assert plot_log.printable(label) == shown


def run_of(label="run", header=HEADER, *records):
    return run_log.Run(Path("x"), label, header, {record["step"]: record for record in records or (step(3),)})


@pytest.mark.parametrize("header, more, title", [
    ({}, {}, "r: step 3, 48 tokens"), ({"settings": None}, {}, "r: step 3, 48 tokens"),
    ({"settings": ["config"]}, {}, "r: step 3, 48 tokens"),
    ({"settings": {"config": "$c", "model": "m"}}, {}, r"r: \$c, step 3, 48 tokens"),
    ({"settings": {"model": "m"}}, {}, "r: m, step 3, 48 tokens"),
    ({"settings": {"config": "", "model": "m"}}, {}, "r: m, step 3, 48 tokens"),
    ({"settings": {"config": 7}}, {}, "r: 7, step 3, 48 tokens"),
    ({"parameters": "1"}, {}, "r: step 3, 48 tokens"), ({"parameters": 1500}, {}, "r: 1.5K parameters, step 3, 48 tokens"),
    ({"parameters": 0}, {}, "r: 0 parameters, step 3, 48 tokens"), ({}, {"tokens": None}, "r: step 3"),
    ({}, {"tokens": 0}, "r: step 3, 0 tokens"),
    ({}, {"step": 12345}, "r: step 12.3K, 48 tokens")])
def test_the_title_says_what_is_known_of_a_run(header, more, title):
    assert plot_log.title_of([run_of("r", header, step(3, tokens=48) | more)]) == title


def test_the_title_names_three_runs_and_counts_the_others():
    runs = [run_of(f"r{number}") for number in range(6)]
    lines = [f"r{number}: step 3, 48 tokens" for number in range(3)]
    for count, rest in ((1, []), (2, []), (3, []), (4, ["and 1 more"]), (6, ["and 3 more"])):
        assert plot_log.title_of(runs[:count]).split("\n") == lines[:count] + rest


def test_the_newest_value_for_the_legend():
    run = run_of("r", HEADER, step(1, lr=1e-3), step(2, lr=0.0, loss=1234567.0), step(3, lr=None, loss=None, grad_norm=None))
    assert [plot_log.noted(run, key, "{:.3f}".format) for key in ("lr", "loss", "grad_norm", "val_loss")] == [
        " 0.000", " 1234567.000", " 1.000", ""]
    assert plot_log.last(run, "loss") == 1234567.0


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


def test_each_run_has_its_own_lines(monkeypatch, tmp_path):
    """Colour, values and legend; the loss as it is and smoothed; the validation loss where there is at least one value."""
    runs = [run_of("one", HEADER, *(step(n, loss=float(n % 7), lr=1e-3 * n, grad_norm=0.0,
                                         tokens_per_s=2000.0 - n % 7) for n in range(200))),
            run_of("_two", HEADER, step(1, loss=4.0, val_loss=5.0, grad_norm=-1.0, tokens_per_s=1234.0)),
            run_of("three", HEADER, step(1, loss=None, grad_norm=2.0))]
    figure = figure_of(monkeypatch, runs, tmp_path / "a.PNG")
    assert figure.get_suptitle() == plot_log.title_of(runs)
    axes = {one.get_title(): one for one in figure.axes}
    lines = {title: [(line.get_color(), line.get_linestyle(), list(line.get_ydata())) for line in one.get_lines()]
             for title, one in axes.items()}
    loss = [float(n % 7) for n in range(200)]
    assert lines["loss"] == [("C0", "-", loss), ("C0", "-", plot_log.smoothed(loss, 4)), ("C1", "-", [4.0]), ("C1", "-", [4.0]),
                             ("C1", "--", [5.0]),
                             ("C2", "-", []), ("C2", "-", [])]
    assert lines["learning rate"] == [("C0", "-", [1e-3 * n for n in range(200)]), ("C1", "-", [1e-3]), ("C2", "-", [1e-3])]
    assert lines["gradient norm"] == [("C0", "-", [0.0] * 200), ("C1", "-", [-1.0]), ("C2", "-", [2.0])]
    speed = [2000.0 - n % 7 for n in range(200)]
    assert lines["tokens per second"] == [("C0", "-", speed), ("C0", "-", plot_log.smoothed(speed, 4)), ("C1", "-", [1234.0]),
                                          ("C1", "-", [1234.0]), ("C2", "-", [1000.0]), ("C2", "-", [1000.0])]
    faint = {title: [line.get_alpha() for line in one.get_lines()] for title, one in axes.items()}
    assert faint["tokens per second"][:2] == faint["loss"][:2] == [0.25, None]
    legends = {title: [text.get_text() for text in one.get_legend().get_texts()] for title, one in axes.items()}
    assert legends == {"loss": ["one: train 3.0000", " _two: train 4.0000", " _two: val 5.0000", "three: train"],
                       "learning rate": ["one 0.199", " _two 0.001", "three 0.001"],
                       "gradient norm": ["one 0", " _two -1", "three 2"],
                       "tokens per second": ["one 2K", " _two 1.23K", "three 1K"]}
    assert {title: one.get_yscale() for title, one in axes.items()} == dict.fromkeys(axes, "linear") | {"gradient norm": "log"}
    assert axes["learning rate"].get_ylim()[0] == axes["tokens per second"].get_ylim()[0] == 0
    assert {one.get_xlabel() for one in figure.axes} == {"step"} and axes["loss"].get_ylabel() == "loss (nats per token)"
    for axis in (axes["tokens per second"].yaxis, *(one.xaxis for one in figure.axes)):
        assert axis.get_major_formatter()(12345, 0) == "12.3K"
    for title, value, text in (("loss", 2.5, "2.5"), ("learning rate", 0.0003, "0.0003"), ("learning rate", 1e-5, "0.00001"),
                               ("learning rate", 0.0, "0"), ("gradient norm", 20000.0, "20000"), ("gradient norm", 0.05, "0.05")):
        assert axes[title].yaxis.get_major_formatter()(value, 0) == text
    assert [one.yaxis.get_offset_text().get_text() for one in figure.axes] == [""] * 4
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_gradients_of_zero_have_a_linear_axis():
    for values, scale in (([0.0, 0.0], "linear"), ([-1.0], "linear"), ([], "linear"), ([0.0, 1.0], "log")):
        axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
        runs = [run_of("run", HEADER, *(step(number, grad_norm=value) for number, value in enumerate(some)))
                for some in ([0.0], values or [None])]
        plot_log.plot_curve(axes, runs, "grad_norm", "gradient norm", logarithmic=True)
        assert axes.get_yscale() == scale and (scale == "log" or axes.get_ylim()[0] == 0)
        assert scale == "linear" or math.isnan(axes.yaxis.get_transform().transform([-1.0])[0]), "a gap, not a line down to it"


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    pyplot = pytest.importorskip("matplotlib.pyplot")
    (tmp_path / "a.png").write_text("old")
    before = pyplot.get_fignums()

    for writes, error in ((True, OSError(28, "No space left on device", "a.png.tmp")),
                          (False, OSError(13, "Permission denied")),
                          (True, ValueError("too large")), (False, KeyboardInterrupt())):
        def fails(self, path, writes=writes, error=error, **options):
            if writes:
                Path(path).write_text("half")
            raise error

        monkeypatch.setattr(figure, "savefig", fails)
        with pytest.raises(type(error)):
            plot_log.draw([run_of()], tmp_path / "a.png")
        assert not isinstance(error, OSError) or error.filename == str(tmp_path / "a.png")
        assert (tmp_path / "a.png").read_text() == "old" and list(tmp_path.iterdir()) == [tmp_path / "a.png"]
    assert pyplot.get_fignums() == before, "no picture is kept"


def test_without_matplotlib_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FileError, match="matplotlib is not installed") as caught:
        plot_log.draw([run_of()], tmp_path / "a.png")
    assert caught.value.code == ENVIRONMENT


def test_follow_draws_when_each_log_has_a_step_and_one_has_more(tmp_path, monkeypatch, capsys):
    one, two = (write_log(tmp_path / name / "log.jsonl", [HEADER]) for name in ("one", "\u91cd"))
    drawn = []

    def append(log, *records):
        with log.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    pauses = iter([lambda: append(two, step(1)), lambda: append(one, step(5)),
                   lambda: [append(one, step(6)), append(two, step(2))],
                   lambda: None, lambda: append(two, step(3)), lambda: None])

    def sleep(seconds):
        assert seconds == 7
        drawn.append(None)
        action = next(pauses, None)
        if action is None:
            raise KeyboardInterrupt
        action()

    monkeypatch.setattr(plot_log.time, "sleep", sleep)
    monkeypatch.setattr(plot_log, "draw", lambda runs, output: drawn.append([max(run.steps) for run in runs]))
    monkeypatch.setattr(sys, "argv", ["plot_log.py", str(one.parent), str(two), "-o", "a.png", "--follow", "7"])
    assert plot_log.main() == 0
    assert drawn == [None, None, [5, 1], None, [6, 2], None, None, [6, 3], None, None]
    assert capsys.readouterr().out.splitlines()[-1] == r"one: step 6, 96 tokens; \u91cd: step 3, 48 tokens"


def test_what_it_says_of_each_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot_log, "draw", lambda runs, output: None)
    logs = [write_log(tmp_path / name / "log.jsonl", records, tail=tail) for name, records, tail in (
        ("one", [HEADER, step(4, loss=0), step(2)], ""), ("two", [HEADER, step(1), step(9, loss=None)], "[1]\n[2]\n"),
        ("three", [HEADER, step(1, loss=True)], ""))]
    monkeypatch.setattr(sys, "argv", ["plot_log.py", *map(str, logs), "-o", "a.png"])
    assert plot_log.main() == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["'one': 2 steps, the last one 4 with loss 0.0000",
                                     "'two': 2 steps, the last one 9 with loss not finite",
                                     "'three': 1 steps, the last one 1 with loss not finite"]
    assert said.err == "warning: 'two': 2 lines are no records and were left out\n"


@pytest.mark.parametrize("name", ["$x^{", "$$", r"\frac{1}{0}", "_hidden", os.fsdecode(b"\xff\xfe"), "line\nbreak", "\u202egnp",
                                  "x" * 250, "%s{}", "\U0001f600"])
def test_names_that_are_no_formula(tmp_path, name):
    pytest.importorskip("matplotlib")
    write_log(tmp_path / name / "log.jsonl", [HEADER, step(1), step(2)])
    done = run_script(tmp_path / name, "-o", tmp_path / "out.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("key", ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"])
def test_absurd_numbers_leave_a_picture(tmp_path, key):
    """Of a log that was tampered with or damaged, between steps that are sound."""
    numbers = ["1e308", "-1e308", "1e-320", "9" * 400, "1" + "0" * 30, "-1", "1e999", "NaN", "Infinity", str(10**12)]
    lines = [json.dumps(step(3 + i) | {key: 123454321}).replace("123454321", number) for i, number in enumerate(numbers)]
    path = write_log(tmp_path / "log.jsonl", [HEADER, step(1), step(2)], tail="\n".join(lines) + "\n")
    done = run_script(path, "-o", tmp_path / "out.png")
    assert done.returncode == 0 and done.stderr.count("\n") <= 1, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


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
