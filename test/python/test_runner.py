"""test/run.py itself: what counts as passed, failed and skipped."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test"))
import run as runner  # noqa: E402


@pytest.mark.parametrize(("body", "passed", "failed", "skipped"), [
    ("def test_one(): pass", 1, 0, 0),
    ("import pytest\npytest.skip('no GPU', allow_module_level=True)", 0, 0, 1),  # pytest: nothing collected, exit code 5
    ("x = 1", 0, 1, 0),  # a file that lost its tests
    ("def test_one(): assert False", 0, 1, 0),
    ("def broken(:", 0, 1, 0),
])
def test_a_file_of_tests(tmp_path, monkeypatch, body, passed, failed, skipped):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    file = tmp_path / "test_sample.py"
    file.write_text(body + "\n")
    outcome = runner.run_pytest("sample", (str(file),))
    assert (outcome.passed, outcome.failed, outcome.skipped) == (passed, failed, skipped), outcome.failures


def test_what_there_is_no_time_for_is_counted_as_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setenv("TEST_UNTIL", str(time.time() + min(runner.CAN_WAIT.values()) - 1))
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nprintf 'Suite.\\n  One\\n  Two\\n  Three\\n'\n")
    program.chmod(0o755)
    shards = [job()[0] for job in runner.run_shards("unit asan", program, 2).values()]
    fuzz, headers = runner.run_fuzz("3"), runner.run_headers()
    assert [one.skipped for one in shards] == [2, 1] and fuzz.skipped > 10 and headers.skipped > 300
    assert all(one.passed == one.failed == 0 for one in (*shards, fuzz, headers))
    said = capsys.readouterr().out
    assert all(f"{name.upper()} SKIPPED: " in said for name in runner.CAN_WAIT)
