"""Weights in int8, int4 and fp8: quantising a matrix, its tensors in a file, and dequantising it.

The schemes are the formats of llmc/model/formats, and doc/tensor_file.md, "Quantised weights", describes them. A scale covers a
row, or a group of 128 columns. Each is searched: of a few factors by which the range is clipped, the one with the least squared error
is taken. Rounding is to nearest even, and every sum has a fixed order, so the same weights give the same bits on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensor_file import TensorFile, fail, shape_text

GROUP = 128  # columns that share a scale and a zero in a grouped format
E4M3_MAX = 448.0
SMALLEST_SCALE = np.float32(2.0**-126)  # for rows whose weights are so small that their scale would not be a normal number of fp32
PIECE_ELEMENTS = 1 << 18  # quantised at once: few enough that the copies stay in the cache

# The largest weight of a row or group is multiplied by each of these factors, and the result becomes the largest number of
# the scheme. fp8's rounding error is relative and depends on where weights lie between two powers of two: factors above 1
# move them without clipping any.
FACTORS = {"int8": tuple(1 - step / 25 for step in range(8)), "int4": tuple(1 - step / 20 for step in range(11)),
           "fp8": (1.0, *(2 ** (step / 6) for step in (-1, 1, 2, 3, 4, 5)))}

Shape = tuple[int, ...]


def groups_of(columns: int) -> int:
    return -(-columns // GROUP)


def stored_tensors(scheme: str, name: str, shape: Shape) -> list[tuple[str, str, Shape]]:
    """The tensors of a quantised matrix, in the order in which they are stored: name, dtype and shape of each."""
    dtype = FORMATS[scheme].dtype
    if not FORMATS[scheme].grouped:
        return [(name, dtype, shape), (f"{name}.scales", "f32", shape[:1])]
    groups = (shape[0], groups_of(shape[1]))
    return [(name, dtype, shape), (f"{name}.scales", "f16", groups), (f"{name}.zeros", "u8", groups)]


def to_json(scheme: str, head: str) -> dict[str, Any]:
    """The object "quantization" of a model file's configuration. `head`: "none" or the scheme of the head."""
    return {"scheme": scheme, "group": GROUP if FORMATS[scheme].grouped else 0, "head": head}


# ---- e4m3 ------------------------------------------------------------------------------------------------------------


def e4m3_to_f32(bits: np.ndarray) -> np.ndarray:
    """e4m3 bits (uint8) as float32, exactly; 0x7F and 0xFF are NaN."""
    return _E4M3_VALUES[bits]


def _e4m3_values() -> np.ndarray:
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3_VALUES = _e4m3_values()


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Finite float32 rounded to the nearest values of e4m3, ties to even; magnitudes above 448 become 448."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    normal = magnitude >> np.uint32(20)
    normal &= np.uint32(1)
    normal += np.uint32(0x7FFFF)
    normal += magnitude
    normal &= np.uint32(0xFFF00000)  # keeps 3 bits of mantissa
    # Below 2^-6 e4m3 has the multiples of 2^-9. fp32 has this spacing around `spaced`, so the addition rounds.
    spaced = np.float32(1.5 * 2.0 ** (23 - 9))
    small = (np.minimum(magnitude.view(np.float32), np.float32(1)) + spaced) - spaced
    rounded = np.where(magnitude < 0x3C800000, small, np.minimum(normal.view(np.float32), np.float32(E4M3_MAX)))
    return np.copysign(rounded, values)


def f32_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Finite float32 as e4m3 bits (uint8), rounded as round_to_e4m3() does it."""
    rounded = round_to_e4m3(values)
    bits = rounded.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    normal = (magnitude >> np.uint32(20)) - np.uint32(120 << 3)
    small = (np.minimum(np.abs(rounded), 1) * np.float32(512)).astype(np.uint32)
    return (np.where(magnitude < 0x3C800000, small, normal) | bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)


# ---- the formats -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """What q of a format with scales of rows is."""

    largest: float
    nearest: Callable[[np.ndarray], np.ndarray]  # of finite float32, in float32
    encode: Callable[[np.ndarray], np.ndarray]   # the same as it is stored
    decode: Callable[[np.ndarray], np.ndarray]   # in float32


@dataclass(frozen=True)
class Format:
    """As WeightFormat (llmc/model/formats/weight_format.h): test/fixtures/weight_formats.json holds both to one table."""

    dtype: str        # of q
    grouped: bool     # a scale in f16 and a zero in u8 for GROUP columns; else a scale in f32 for each row
    of_head: bool
    numbers: Numbers | None = None  # None: grouped


def _nearest_int8(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), -127, 127)


FORMATS = {
    "int8": Format("i8", False, True, Numbers(127, _nearest_int8, lambda values: _nearest_int8(values).astype(np.int8),
                                              lambda q: q.astype(np.float32))),
    "int4": Format("u4", True, False),
    "fp8": Format("e4m3", False, False, Numbers(E4M3_MAX, round_to_e4m3, f32_to_e4m3, e4m3_to_f32)),
}
SCHEMES = tuple(FORMATS)
SCHEME_OF_DTYPE = {each.dtype: scheme for scheme, each in FORMATS.items()}


# ---- quantising ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """Rows of a quantised matrix, as they are stored. q: [rows, columns] in int8 or uint8; u4: pairs [rows, columns / 2]."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    error: float   # sum of the squared differences from the weights
    square: float  # sum of the squared weights


def quantize_rows(weights: np.ndarray, scheme: str) -> Quantized:
    """Quantises `weights` [rows, columns], finite float32. OverflowError if a scale does not fit in its type."""
    rows, columns = weights.shape
    padded = np.zeros((rows, groups_of(columns), GROUP), dtype=np.float32)
    padded.reshape(rows, -1)[:, :columns] = weights
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        q, scales, zeros, error = _search_groups(padded) if FORMATS[scheme].grouped else _search_rows(padded, scheme)
        square = _sums(padded * padded)
    q = q.reshape(rows, -1)[:, :columns]
    stored = q[:, 0::2] | q[:, 1::2] << 4 if FORMATS[scheme].dtype == "u4" else np.ascontiguousarray(q)
    return Quantized(stored, scales, zeros, float(error.sum(dtype=np.float64)), float(square.sum(dtype=np.float64)))


def _sums(values: np.ndarray) -> np.ndarray:
    """The sums over the last dimension, of GROUP elements, by adding halves: the order does not depend on numpy."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _row_sums(values: np.ndarray) -> np.ndarray:
    """The sums over the last two dimensions, group after group."""
    by_group = _sums(values)
    total = by_group[:, 0].copy()
    for group in range(1, by_group.shape[1]):
        total += by_group[:, group]
    return total


def _search_rows(weights: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray, None, np.ndarray]:
    """A scale for each row of [rows, groups, GROUP]."""
    largest = np.abs(weights).max(axis=(1, 2))
    numbers = FORMATS[scheme].numbers
    assert numbers is not None
    limit = np.float32(numbers.largest)
    best: list[np.ndarray] = []
    for factor in FACTORS[scheme]:
        scales = np.where(largest > 0, np.maximum(largest * np.float32(factor) / limit, SMALLEST_SCALE), np.float32(1))
        difference = numbers.nearest(weights / scales[:, None, None])
        difference *= scales[:, None, None]
        difference -= weights
        difference *= difference
        _keep_best(best, [scales], _row_sums(difference))
    scales, error = best
    if not np.isfinite(scales * limit).all():
        raise OverflowError("scale")
    return numbers.encode(weights / scales[:, None, None]), scales, None, error


def _search_groups(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """int4: a scale and a zero for each group. The range of a group holds 0, which stays exact."""
    low, high = np.minimum(weights.min(axis=2), 0), np.maximum(weights.max(axis=2), 0)
    best: list[np.ndarray] = []
    for factor in FACTORS["int4"]:
        scales, zeros = int4_grid(low * np.float32(factor), high * np.float32(factor))
        difference = int4_nearest(weights, scales, zeros)
        difference *= scales[..., None].astype(np.float32)
        difference -= weights
        difference *= difference
        _keep_best(best, [scales, zeros], _sums(difference))
    scales, zeros, error = best
    if not np.isfinite(scales).all():
        raise OverflowError("scale")
    q = int4_nearest(weights, scales, zeros) + zeros[..., None].astype(np.float32)
    return q.astype(np.uint8), scales, zeros, error


def int4_grid(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale (fp16) and zero (u8) with which 0 to 15 reach from `low` <= 0 to `high` >= 0."""
    with np.errstate(over="ignore", under="ignore"):
        span = (high - low) / np.float32(15)
        scales = np.where(span > 0, np.maximum(span, np.float32(2.0**-24)), np.float32(1)).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(np.uint8)
    return scales, zeros


def int4_nearest(weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The nearest q - zero for `weights` [..., columns] as float32; the last dimension is one group."""
    zero = zeros[..., None].astype(np.float32)
    nearest = weights / scales[..., None].astype(np.float32)
    np.rint(nearest, out=nearest)
    return np.clip(nearest, -zero, 15 - zero, out=nearest)


def _keep_best(best: list[np.ndarray], candidate: list[np.ndarray], error: np.ndarray) -> None:
    """Copies into `best` the rows or groups of `candidate` that have a smaller error. The errors are best[-1]."""
    if not best:
        best.extend([*candidate, error])
        return
    better = error < best[-1]
    for kept, new in zip(best, [*candidate, error]):
        np.copyto(kept, new, where=better)


def workers() -> int:
    """The number of threads to compute with: that of the cores, but at most OMP_NUM_THREADS."""
    cores, limit = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isascii() and limit.isdigit() and int(limit) else cores


def quantize_matrix(rows: Callable[[int, int], np.ndarray], shape: Shape, scheme: str) -> Iterator[Quantized]:
    """Quantises a matrix in pieces of rows, on several threads. rows(first, last) returns these rows in float32."""
    step = max(1, PIECE_ELEMENTS // max(shape[1], 1))
    pieces = [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]
    with ThreadPoolExecutor(max_workers=workers()) as threads:
        yield from threads.map(lambda piece: quantize_rows(rows(*piece), scheme), pieces)


# ---- dequantising --------------------------------------------------------------------------------------------------------


def is_quantized(file: TensorFile, name: str) -> bool:
    return file.at(name).dtype in SCHEME_OF_DTYPE


def dequantized(file: TensorFile, name: str) -> np.ndarray:
    """The weights of a quantised matrix in float32: scale x q; grouped scale x (q - zero), without rounding."""
    info = file.at(name)
    scheme = SCHEME_OF_DTYPE[info.dtype]
    for part, dtype, shape in stored_tensors(scheme, name, info.shape):
        found = file.at(part)
        if (found.dtype, found.shape) != (dtype, shape):
            fail(file.path, f"{part}: got {found.dtype} {shape_text(found.shape)}, expected {dtype} {shape_text(shape)}")
        file.verify_tensor(part)
    zeros = file.array(f"{name}.zeros") if FORMATS[scheme].grouped else None
    return weights_again(Quantized(file.array(name), file.array(f"{name}.scales"), zeros, 0, 0), scheme, info.shape[1])


def weights_again(rows: Quantized, scheme: str, columns: int) -> np.ndarray:
    """The weights of quantised rows, [rows, columns] in float32."""
    numbers = FORMATS[scheme].numbers
    return int4_again(rows, columns) if numbers is None else numbers.decode(rows.q) * rows.scales[:, None]


def int4_again(rows: Quantized, columns: int) -> np.ndarray:
    """The weights of int4 rows, [rows, columns]."""
    assert rows.zeros is not None
    pairs = np.stack([rows.q & 15, rows.q >> 4], axis=-1).reshape(len(rows.q), columns)
    group = np.arange(columns) // GROUP
    zeros = rows.zeros[:, group].astype(np.float32)
    return rows.scales[:, group].astype(np.float32) * (pairs.astype(np.float32) - zeros)
