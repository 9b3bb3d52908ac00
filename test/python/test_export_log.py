"""export_log.py: the table and the event files of runs, whole and while they grow."""

import csv
import importlib
import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
export_log = importlib.import_module("export_log")
Run = export_log.Run
SCRIPT = ROOT / "scripts" / "export_log.py"
HEADER = {"type": "header", "version": "x"}


def step(number, **more):
    return {"type": "step", "step": number, "tokens": 16 * number, "loss": 2.5, "lr": 0.001, "grad_norm": 1.5,
            "tokens_per_s": 1000.0, "dt_ms": 16.0, "time": 1700000000.0 + number, **more}


def write_log(folder, records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def fields(data):
    """(number, value) of a protobuf message, by wire type."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        if key & 7 == 0:
            value, at = read_varint(data, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            size, at = read_varint(data, at)
            value, at = data[at:at + size], at + size
        yield key >> 3, value


def bitwise_crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 * (value & 1)
    return value ^ 0xFFFFFFFF


def events(folder):
    """The events of a folder's files, decoded: (wall time, step, {tag: value} or another field)."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = struct.unpack_from("<Q", data, at)[0]
            for begin, length in ((at, 8), (at + 12, size)):
                crc = bitwise_crc32c(data[begin:begin + length])
                masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
                assert struct.unpack_from("<I", data, begin + length)[0] == masked
            event = dict(fields(data[at + 12:at + 12 + size]))
            what = event.get(3) or event.get(7)
            if 5 in event:
                pairs = [dict(fields(value)) for number, value in fields(event[5]) if number == 1]
                what = {pair[1].decode(): pair[2] for pair in pairs}
            found.append((event[1], event[2], what))
            at += 16 + size
    return found


def test_the_checksum_is_castagnoli():
    assert export_log.crc32c(b"123456789") == 0xE3069283 == bitwise_crc32c(b"123456789")


def test_a_table(tmp_path):
    run = write_log(tmp_path / "run", [HEADER, step(1), step(2, val_loss=3.25), step(3, loss=None, grad_norm="x"),
                                       {"type": "resume", "step": 2}, step(3, loss=0.1)])
    done = run_script(run, "--csv", tmp_path / "out.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3"] and [row["loss"] for row in rows] == ["2.5", "2.5", "0.1"]
    assert rows[1]["val_loss"] == "3.25" and rows[0]["val_loss"] == "" and rows[2]["grad_norm"] == "1.5"


def test_event_files(tmp_path):
    runs = [write_log(tmp_path / name / "run", [HEADER, step(1), step(300, val_loss=3.25, loss=1e39)]) for name in "ab"]
    done = run_script(*runs, "--tensorboard", tmp_path / "t b")
    assert done.returncode == 0 and "tensorboard --logdir '" in done.stdout, done
    assert sorted(path.name for path in (tmp_path / "t b").iterdir()) == ["run", "run-1"]
    version, first, second = events(tmp_path / "t b" / "run")
    assert version[2] == b"brain.Event:2"
    assert first[:2] == (1700000001.0, 1) and second[:2] == (1700000300.0, 300)
    assert first[2] == pytest.approx({"loss/train": 2.5, "optimizer/learning_rate": 0.001, "optimizer/gradient_norm": 1.5,
                                      "speed/tokens_per_second": 1000.0, "speed/milliseconds_a_step": 16.0})
    assert second[2]["loss/val"] == 3.25 and "loss/train" not in second[2], "no float holds it"


def test_the_second_export_adds_a_file(tmp_path, monkeypatch):
    """TensorBoard reads the files of a folder in the order of their names: the later one comes last, whatever the monotonic
    clock says."""
    run = Run(Path("x"), "x", steps={1: step(1)})
    for now, ticks in ((999, 7), (1700000000.9, 5), (1700000001.2, 3)):
        monkeypatch.setattr(export_log, "time", SimpleNamespace(time=lambda now=now: now,
                                                                monotonic_ns=lambda ticks=ticks: ticks))
        export_log.EventFile(run, tmp_path / "a" / "b").update()
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        f"events.out.tfevents.{name}.weft" for name in ("0000000999.7", "1700000000.5", "1700000001.3")]
    assert [found[:2] for found in events(tmp_path / "a" / "b")[1::2]] == [(1700000001.0, 1)] * 3


def test_steps_after_the_first_that_is_void_are_written_again(tmp_path):
    """A step that is gone counts at once, and the records that stood behind it are void for TensorBoard as well."""
    run = Run(Path("x"), "x", steps={number: step(number) for number in range(1, 6)})
    file = export_log.EventFile(run, tmp_path)
    changes = [({}, [1, 2, 3, 4, 5]), ({}, []), ({3: step(3)}, [-3, 3, 4, 5]), ({4: None, 5: None}, [-4]), ({}, []),
               ({4: step(4)}, [4]), ({2: None}, [-2, 3, 4]), ({7: step(7), 6: step(6)}, [6, 7])]
    seen = 1
    for change, written in changes:
        run.steps = {number: record for number, record in (run.steps | change).items() if record is not None}
        file.update()
        new = events(tmp_path)[seen:]
        seen += len(new)
        assert [-number if values == b"\x08\x01" else number for _, number, values in new] == written, "-n: void from n on"


def test_following_a_run_that_is_resumed(tmp_path):
    run = write_log(tmp_path / "run", [HEADER, *(step(number, loss=9.0) for number in range(1, 6))])
    process = subprocess.Popen([sys.executable, SCRIPT, run, "--tensorboard", tmp_path / "tb", "--follow", "0.1"],
                               stderr=subprocess.PIPE, text=True)

    def wait_for(count):
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            if (tmp_path / "tb" / "run").exists() and len(found := events(tmp_path / "tb" / "run")) >= count:
                return found
            time.sleep(0.05)
        raise AssertionError("nothing more was written")

    assert len(wait_for(6)) == 6
    with (run / "log.jsonl").open("a") as log:
        log.write("".join(json.dumps(record) + "\n" for record in ({"type": "resume", "step": 2}, step(3, loss=1.0), step(4))))
    found = wait_for(9)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert found[6][1:] == (3, b"\x08\x01"), "from step 3 on the earlier events are void"
    assert [(number, values["loss/train"]) for _, number, values in found[7:]] == [(3, 1.0), (4, 2.5)]


@pytest.mark.parametrize("options, code, words", [
    ((), 2, "either --csv or --tensorboard"), (("--csv", "a.csv", "--tensorboard", "tb"), 2, "either"),
    (("second", "--csv", "a.csv"), 2, "got 2 logs, expected one"), (("--csv", "none/a.csv"), 4, "none/a.csv"),
    (("--tensorboard", "file"), 2, "is a file")])
def test_usage(tmp_path, monkeypatch, options, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    done = run_script(write_log(tmp_path / "run", [HEADER, step(1)]), *options)
    assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_bad_log_is_one_line(tmp_path):
    (tmp_path / "log.jsonl").write_text("hello\n")
    done = run_script(tmp_path, "--csv", tmp_path / "a.csv")
    assert done.returncode == 3 and "log.jsonl" in done.stderr and not (tmp_path / "a.csv").exists()
