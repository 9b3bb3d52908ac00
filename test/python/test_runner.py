"""test/run.py itself: what counts as passed, failed and skipped."""

from __future__ import annotations

import sys
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
