"""One planted bug of run.py: a replacement of text that must occur exactly once in the definition that it names.

`anchor` is the name of a function, of a member (A::f) or of a class, wherever it stands in the room of the row's module; of
overloads one alone may hold the text. White space of `old` is any white space. An anchor with a dot is the name of a file,
for text outside of definitions and for shell scripts.

`tests` are the narrowest tests that should turn red:
    unit(FILTER)   build/<mode>/unit_tests with this GoogleTest filter
    py(SELECTION)  pytest on this file or test of test/python (with the programs built)
    gpu(FILTER)    build/<mode>/gpu_tests; only where there is a GPU, and in a build with nvcc
A bug that changes nothing that anyone can observe has no place here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    anchor: str
    old: str
    new: str
    tests: tuple[str, ...]
    room: str = ""  # the directory that its module says

    @property
    def needs_gpu(self) -> bool:
        return any(test.startswith("gpu:") for test in self.tests)


def unit(*filters: str) -> tuple[str, ...]:
    return tuple(f"unit:{one}" for one in filters)


def gpu(*filters: str) -> tuple[str, ...]:
    return tuple(f"gpu:{one}" for one in filters)


def py(*selections: str) -> tuple[str, ...]:
    return tuple(f"py:{one}" for one in selections)
