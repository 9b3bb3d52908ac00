"""Stands in for torch where it is not installed, so that a script that imports it can be tested.

    with stub_torch.installed():
        ...import the script...

Arrays of numpy are the tensors, with those operations that scripts/ uses, but no gradients. Every other name of torch is there, and
stands for nothing: it can be called, inherited from and used as a decorator.
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
    device: Any = types.SimpleNamespace(type="cpu")
    grad: Any = None
    requires_grad: Any = True
    abs, cos, sin, sqrt, square = ((lambda self, function=function: function(self)) for function in (np.abs, np.cos, np.sin, np.sqrt, np.square))
    split: Any = lambda self, sizes, dim: np.split(self, np.cumsum(sizes)[:-1], dim)
    double, float, long = (lambda self, kind=kind: self.astype(kind) for kind in (np.float64, np.float32, np.int64))
    detach = cpu = lambda self: self
    clone = contiguous = lambda self: self.copy()
    numpy = lambda self: np.array(self)

    def to(self, target: Any) -> Any:
        return self.astype(target) if isinstance(target, (type, np.dtype)) else self

    def transpose(self, *axes: Any) -> Any:  # torch takes the two that change places
        return self.swapaxes(*axes) if len(axes) == 2 else super().transpose(*axes)

    def flatten(self, first: Any = 0, last: int = -1) -> Any:
        last %= self.ndim
        return self.reshape(*self.shape[:first], -1, *self.shape[last + 1:])

    def unflatten(self, axis: int, sizes: Any) -> Any:
        axis %= self.ndim
        return self.reshape(*self.shape[:axis], *sizes, *self.shape[axis + 1:])

    def mean(self, *values: Any, keepdim: bool = False, **more: Any) -> Any:
        return super().mean(*values, **{"keepdims": keepdim} | more)

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        return np.clip(self, min, max)

    def clamp_(self, min: Any = None, max: Any = None) -> Tensor:
        return np.clip(self, min, max, out=self)

    def copy_(self, values: Any) -> None:
        assert self.shape == values.shape
        self[...] = values

    def mul_(self, other: Any) -> Tensor:
        return np.multiply(self, other, out=self)

    def sub_(self, other: Any) -> Tensor:
        return np.subtract(self, other, out=self)

    def triu(self, diagonal: int) -> Any:
        return np.triu(self, diagonal)

    def tril(self, diagonal: int) -> Any:
        return np.tril(self, diagonal)

    def masked_fill(self, mask: Any, value: Any) -> Any:
        return tensor(np.where(mask, value, self))

    def softmax(self, dim: int) -> Any:
        exponentials = np.exp(self - self.max(axis=dim, keepdims=True))
        return exponentials / exponentials.sum(axis=dim, keepdims=True)

    def repeat_interleave(self, times: int, dim: int) -> Any:
        return self.repeat(times, dim)

    def topk(self, count: int) -> Any:
        assert count <= len(self), "as torch has it"
        indices = np.argsort(-np.array(self), kind="stable")[:count]
        return types.SimpleNamespace(values=self[indices], indices=indices)


def tensor(values: Any, **_: Any) -> Tensor:
    return np.asarray(values).view(Tensor)


class NoGradients(contextlib.ContextDecorator):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def _new(function: Any) -> Any:
    return lambda *values, dtype=np.float32, **_: tensor(function(*values).astype(dtype))


def _cross_entropy(logits: Any, labels: Any, ignore_index: int = -100, reduction: str = "mean") -> Any:
    logits, labels = np.array(logits), np.array(labels)
    logits, labels = logits[labels != ignore_index], labels[labels != ignore_index]
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    losses = -np.log(exponentials[np.arange(len(labels)), labels] / exponentials.sum(axis=-1))
    return tensor(losses.mean() if reduction == "mean" else losses.sum())


FUNCTIONS = {
    "Tensor": Tensor, "from_numpy": tensor, "tensor": tensor, "arange": _new(np.arange), "ones": _new(np.ones), "zeros": _new(np.zeros),
    "cat": lambda values, dim=0: tensor(np.concatenate(values, dim)), "stack": lambda values: tensor(np.stack(values)),
    "einsum": lambda *values: tensor(np.einsum(*values)), "floor": np.floor, "float32": np.float32, "float64": np.float64,
    "bfloat16": np.float16, "float16": np.float16, "int32": np.int32, "bool": np.bool_, "no_grad": NoGradients}


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
    functional, autograd = _module("torch.nn.functional", cross_entropy=_cross_entropy), _module("torch.autograd")
    nn = _module("torch.nn", functional=functional)
    norm = lambda values, dtype=None: tensor(np.linalg.norm(values.astype(dtype or values.dtype)))
    torch = _module("torch", nn=nn, autograd=autograd, linalg=_module("torch.linalg", vector_norm=norm), **FUNCTIONS)
    stubs = {module.__name__: module for module in (torch, nn, functional, autograd)}
    stubs |= {name: _module(name) for name in ("safetensors", "safetensors.numpy", "transformers")}
    with mock.patch.dict(sys.modules, stubs):
        for name in USERS:
            sys.modules.pop(name, None)
        yield
