"""GPU code and the default stream, for which weft's own streams do not wait."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"\b(cudaMemcpy|cudaMemset)\(((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*)\)")


def early(text: str) -> list[str]:
    """Calls in the default stream that may return before their bytes are in place, and that nothing waits for: cudaMemset,
    and cudaMemcpy from host memory that is not page-locked."""
    found = []
    for call in CALL.finditer(text):
        statements = text[call.end():].split(";")
        waits = len(statements) > 1 and "cudaDeviceSynchronize()" in statements[1]
        if "cudaMemcpyDeviceToHost" not in call[2] and not waits:
            found.append(call[0])
    return found


def test_nothing_is_written_behind_the_streams_backs():
    files = [path for suffix in ("cu", "cuh", "h", "cpp") for path in (ROOT / "llmc").rglob(f"*.{suffix}")]
    assert len(files) > 100
    calls = {str(path.relative_to(ROOT)): early(path.read_text()) for path in files}
    assert {path: found for path, found in calls.items() if found} == {}


@pytest.mark.parametrize("text, count", [
    ("check(cudaMemcpy(at(role), values, count * sizeof(float), cudaMemcpyHostToDevice), name); next();", 1),
    ("cudaMemset(a, 0, n); run();", 1),
    ("check(cudaMemset(a->at<S>(0), 0, n), name); check(cudaDeviceSynchronize(), name);", 0),
    ("cudaMemcpy(to, from(b), n, cudaMemcpyDeviceToHost);", 0),
    ("cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, stream);", 0),
])
def test_what_is_found(text, count):
    assert len(early(text)) == count
