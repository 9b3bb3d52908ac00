"""weft's --precision fp8 in PyTorch: the operands of the blocks' linear layers rounded as llmc/cpu/fp8.cpp rounds them, with the
scales of llmc/model/fp8.cpp. GEMMs of such values compute in the type of the model. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORMATS = {"input": "e4m3", "weight": "e4m3", "gradient": "e5m2"}
KINDS = tuple(FORMATS)
# The octaves between the largest magnitude of the last HISTORY steps and half of the largest number of the format, plus one.
MARGINS = {"input": 1, "weight": 1, "gradient": 6}
HISTORY = 16  # steps
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
MANTISSA, SMALLEST_NORMAL = {"e4m3": 3, "e5m2": 2}, {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
LARGEST_EXPONENT = 126  # of a scale, before the margin of gradients


# ---- rounding --------------------------------------------------------------------------------------------------------


def round_to(x: Tensor, form: str, stochastic: bool = False) -> Tensor:
    """The nearest numbers of the format, ties to even, saturating; finite fp32 numbers only. `stochastic`: up or down, in the
    mean x."""
    limit = LARGEST[form]
    x = x.clamp(-limit, limit)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=SMALLEST_NORMAL[form])
    if stochastic:
        spacing = power.mul_(2.0 ** -MANTISSA[form])
        return torch.floor(x / spacing + torch.rand_like(x)).mul_(spacing).clamp_(-limit, limit)
    # Beside `steps` fp32 has the spacing that the format has at x: the addition rounds.
    steps = power.mul_(1.5 * 2.0 ** (23 - MANTISSA[form]))
    return (x + steps).sub_(steps)


def check_rounding() -> None:
    """Refuses to go on where round_to() is not the conversion that torch has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 16, generator=generator) * torch.exp2(torch.randint(-20, 18, (1 << 16,), generator=generator))
    for form, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        every = every[every.isfinite()].unique()
        values = torch.cat([x, every, (every[1:] + every[:-1]) / 2])
        want = values.clamp(-LARGEST[form], LARGEST[form]).to(dtype).float()
        if not torch.equal(round_to(values, form), want):
            raise AssertionError(f"{form} is not torch's")


def exponent_of(amax: float, form: str, margin: int) -> int:
    """fp8_exponent() of llmc/base/fp8.h, whose margin is 1, with another one."""
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)
    largest = (8 if form == "e4m3" else 15) - 1 - (exponent - 1) - (1 if mantissa > 0.875 else 0)
    return max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, largest)) + 1 - margin


# ---- scales ----------------------------------------------------------------------------------------------------------


class Rounding:
    """Rounds the operands of one model. A tensor's scale follows from its largest magnitudes of the last steps, in the first step
    from the tensor itself.

    `noise`: of inputs and gradients before they are rounded, normal, relative to the root mean square of each row.
    """

    def __init__(self, noise: float = 0, seed: int = 0):
        self.noise, self.counting = noise, True
        self.generator = torch.Generator().manual_seed(seed)
        self.past: dict[tuple[str, str], list[float]] = {}
        self.now: dict[tuple[str, str], float] = {}
        self.current: dict[tuple[str, str], int] = {}  # exponents, in the first step

    def end_step(self) -> None:
        """The parameters have been updated."""
        for slot, amax in self.now.items():
            self.past.setdefault(slot, []).append(amax)
        self.now.clear()
        self.current.clear()

    def see(self, kind: str, name: str, x: Tensor) -> None:
        """Counts amax for the scales of later steps."""
        if self.counting:
            slot = kind, name
            self.now[slot] = max(self.now.get(slot, 0.0), float(x.abs().max()))

    def disturbed(self, x: Tensor) -> Tensor:
        if not self.noise:
            return x
        values = x.float()
        normal = torch.randn(values.shape, generator=self.generator).to(x.device)
        return (values + normal * values.square().mean(-1, keepdim=True).sqrt() * self.noise).to(x.dtype)

    def exponent(self, kind: str, name: str, x: Tensor) -> int:
        slot, form = (kind, name), FORMATS[kind]
        past = self.past.get(slot, [])[-HISTORY:]
        if not past:
            return self.current.setdefault(slot, exponent_of(float(x.abs().max()), form, 1))
        return exponent_of(max(past), form, MARGINS[kind])

    def __call__(self, kind: str, name: str, x: Tensor, product: str, axis: int) -> Tensor:
        """x as an operand of the product ("forward", "input_grad", "weight_grad"), which adds along `axis`: the same in all."""
        scale, form = 2.0 ** self.exponent(kind, name, x), FORMATS[kind]
        return (round_to(x.float() * scale, form) / scale).to(x.dtype)


class RoundedLinear(torch.autograd.Function):
    """x [N, C] by weight [OC, C], all three GEMMs of it with operands from `rounding`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding, name: str) -> Tensor:
        x = rounding.disturbed(x)
        ctx.save_for_backward(x, weight)
        ctx.rounding, ctx.name = rounding, name
        rounding.see("input", name, x)
        rounding.see("weight", name, weight)
        return rounding("input", name, x, "forward", 1) @ rounding("weight", name, weight, "forward", 1).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        rounding, name = ctx.rounding, ctx.name
        dy = rounding.disturbed(gradients[0])
        rounding.see("gradient", name, dy)
        dx = rounding("gradient", name, dy, "input_grad", 1) @ rounding("weight", name, weight, "input_grad", 0)
        dweight = rounding("gradient", name, dy, "weight_grad", 0).T @ rounding("input", name, x, "weight_grad", 0)
        return dx, dweight, None, None


# ---- a model of transformers ------------------------------------------------------------------------------------------


class JoinedLinears:
    """Linear modules of one input, such as q, k and v, as the one linear layer that they are in weft: their weights have one
    scale, and so have the gradients of their outputs."""

    def __init__(self, modules: list[Any], rounding: Rounding, name: str):
        self.modules, self.rounding, self.name = modules, rounding, name
        self.x: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()
        for index, module in enumerate(modules):
            module.forward = self.forward_of(index)

    def forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self.x is not x:  # the first of them computes all
                weight = torch.cat([module.weight for module in self.modules])
                out = RoundedLinear.apply(x.flatten(0, -2), weight, self.rounding, self.name)
                self.x = x
                self.outputs = out.unflatten(0, x.shape[:-1]).split([len(module.weight) for module in self.modules], dim=-1)
            result = self.outputs[index]
            if index == len(self.modules) - 1:
                self.x, self.outputs = None, ()
            return result

        return forward


def round_llama(model: Any, rounding: Rounding) -> None:
    """Rounds the operands of all linear layers in the blocks of a LlamaForCausalLM."""
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, modules in (("qkv", [attention.q_proj, attention.k_proj, attention.v_proj]), ("output", [attention.o_proj]),
                              ("gate_up", [mlp.gate_proj, mlp.up_proj]), ("down", [mlp.down_proj])):
            JoinedLinears(modules, rounding, f"{number}.{name}")
