"""One planted bug of run.py: a replacement of text that must occur exactly once in its file.

`tests` are the narrowest tests that should turn red:
    unit:FILTER   build/<mode>/unit_tests with this GoogleTest filter
    py:SELECTION  pytest on this file or test of test/python (with the programs built)
    gpu:FILTER    build/<mode>/gpu_tests; only where there is a GPU, and in a build with nvcc
A bug that changes nothing that anyone can observe has no place here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def needs_gpu(self) -> bool:
        return any(test.startswith("gpu:") for test in self.tests)


def unit(*filters: str) -> tuple[str, ...]:
    return tuple(f"unit:{one}" for one in filters)
