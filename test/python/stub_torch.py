"""Stands in for torch where it is not installed, so that what is no arithmetic in a script that imports it can be tested.

    with stub_torch.installed():
        ...import the script...

Arrays of numpy are the tensors. Every other name of torch is there, and stands for nothing: it can be called, inherited from and
used as a decorator.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

USERS = ("fp8_emulation", "curves", "train_neox", "train_fp8")  # modules that were loaded with the other torch stay as they are


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        return Nothing


class Nothing(metaclass=_Names):
    def __init__(self, *values: Any, **more: Any):
        pass

    def __call__(self, function: Any = None, *values: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        return Nothing


class Tensor(np.ndarray):
    def abs(self) -> Tensor:
        return np.abs(self)

    def to(self, device: str) -> Tensor:
        return self


def tensor(values: Any) -> Tensor:
    return np.asarray(values).view(Tensor)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = _Module(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    return module


@contextlib.contextmanager
def installed() -> Iterator[None]:
    functional, autograd = _module("torch.nn.functional"), _module("torch.autograd")
    nn = _module("torch.nn", functional=functional)
    torch = _module("torch", nn=nn, autograd=autograd, Tensor=Tensor, from_numpy=tensor, tensor=tensor)
    stubs = {module.__name__: module for module in (torch, nn, functional, autograd)}
    stubs |= {name: _module(name) for name in ("safetensors", "safetensors.numpy")}
    with mock.patch.dict(sys.modules, stubs):
        for name in USERS:
            sys.modules.pop(name, None)
        yield
