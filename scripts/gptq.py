"""GPTQ (Frantar et al., ICLR 2023): int4 weights chosen so that the outputs on a calibration text change little.

The model runs over the text in numpy, layer by layer. The inputs X [N, K] of a linear layer give H = X^T X [K, K]. Its
weights are rounded column by column, and the error of a column is compensated by changing the columns to its right. The
scale and zero of a group are searched as for rounding to nearest, on the weights as the columns before have changed them.
The inputs of each layer come from the quantised layers before it. For models of up to a few hundred million parameters:
numpy is slow, and H takes 8 K^2 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import quantization
from cli import bad_file
from hf_config import Model, Rope
from quantization import GROUP, Quantized

SCHEME = "int4"  # its grid is chosen here

DAMPING = 0.01  # this share of H's mean diagonal is added to its diagonal
MAX_TOKENS, MAX_WINDOW = 32_768, 512  # tokens of the calibration text that are used, and tokens of a window
MAX_COLUMNS = 8192
PIECE_ROWS = 256  # rows of a matrix that one thread rounds
BLOCK = 128  # columns of H that one thread adds up

Read = Callable[[str], np.ndarray]  # a tensor of the model by its name, in float32
Quantise = Callable[[list[str], np.ndarray], list[np.ndarray]]


def windows(ids: np.ndarray, model: Model, path: Path) -> np.ndarray:
    """The ids [n] of a text as windows [S, T]. An incomplete last window is left out."""
    length = min(MAX_WINDOW, model.max_positions, len(ids))
    if length < 2:
        bad_file(path, "", f"got {len(ids)} tokens, expected at least 2 to calibrate with")
    count = max(1, min(len(ids), MAX_TOKENS) // length)
    return ids[:count * length].reshape(count, length)


# ---- the model ---------------------------------------------------------------------------------------------------------


def norm(x: np.ndarray, model: Model, read: Read, module: str) -> np.ndarray:
    if model.norm == "rmsnorm":
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(model.norm_eps)) * read(f"{module}.weight")
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(model.norm_eps))
    return scaled * read(f"{module}.weight") + read(f"{module}.bias")


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """theta^(-2i/rotary_dim), then the scaling: of each frequency a part is kept, the rest divided by the factor."""
    frequencies = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    if rope.type == "standard":
        return frequencies
    kept = np.clip(kept_part(frequencies, rope), 0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def kept_part(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    """How much of each frequency is kept, below 0 and above 1 as well: llama3 goes by wavelength, yarn by dimension."""
    if rope.type == "linear":
        return np.zeros_like(frequencies)
    if rope.type == "llama3":
        return (rope.original_max_positions * frequencies / (2 * math.pi) - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor)
    # The dimensions that turn beta_fast and beta_slow times within the original positions
    low, high = (rope.rotary_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
                 for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return 1 - (np.arange(len(frequencies)) - low) / (high - low or 0.001)


def rotate(x: np.ndarray, rope: Rope) -> np.ndarray:
    """RoPE on [T, heads, HS]: dimension i turns with i + rotary_dim/2."""
    half = rope.rotary_dim // 2
    angles = np.arange(len(x))[:, None] * inverse_frequencies(rope)
    cos, sin = ((rope.attention_factor * turn(angles))[:, None].astype(np.float32) for turn in (np.cos, np.sin))
    low, high = x[..., :half], x[..., half:2 * half]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half:]], axis=-1)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> np.ndarray:
    """Causal attention of one window of the text; q [T, NH, HS], k and v [T, NKV, HS]; result [T, NH * HS]. A position sees `window`
    keys, with 0 all before it."""
    length, heads, size = q.shape
    repeat = heads // k.shape[1]
    out = np.empty_like(q)
    hidden = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    if window:
        hidden += np.tril(np.full((length, length), -np.inf, np.float32), -window)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // repeat].T / np.float32(math.sqrt(size)) + hidden
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // repeat]
    return out.reshape(length, heads * size)


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x). numpy has no erf: this one is accurate to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    z = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return x * (1 + np.copysign(1 - series * np.exp(-z * z), x)) / 2


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))) / 2


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {"silu": swiglu, "gelu": gelu, "gelu_pytorch_tanh": gelu_tanh}


class Layers:
    """Computes the model over windows of a text, a layer at a time. quantise(names, X) is called with the names of the weights
    whose input is X [N, K], and returns the matrices to continue with."""

    def __init__(self, model: Model, read: Read, ids: np.ndarray, threads: ThreadPoolExecutor):
        self.model, self.read, self.threads = model, read, threads
        self.shape = ids.shape
        self.x = read(model.embedding)[ids.reshape(-1)]

    def run(self, layer: int, quantise: Quantise) -> None:
        model, prefix = self.model, f"{self.model.embedding.split('.')[0]}.layers.{layer}."

        def linear(part: str, x: np.ndarray) -> list[np.ndarray]:
            """The outputs of the modules of a part, each with its own matrix."""
            names = [name for name in model.tensors if name.startswith(prefix) and name.endswith(".weight")
                     and name.split(".")[-2] in model.linears[part]]
            outputs = [self._multiply(x, weight) for weight in quantise(names, x)]
            biases = [name.removesuffix("weight") + "bias" for name in names]
            return [out + self.read(bias) if bias in model.tensors else out for bias, out in zip(biases, outputs)]

        x = self._norm(self.x, prefix + "input_layernorm")
        qkv = linear("qkv", x)
        if len(qkv) == 1:  # q, k and v of one head after another
            heads = qkv[0].reshape(len(x), -1, 3, model.head_dim)
            qkv = [heads[:, :, index] for index in range(3)]
        q, k, v = (part.reshape(len(x), -1, model.head_dim) for part in qkv)
        if f"{prefix}self_attn.q_norm.weight" in model.tensors:
            q, k = self._norm(q, prefix + "self_attn.q_norm"), self._norm(k, prefix + "self_attn.k_norm")
        attended = self.x + linear("output", self._attention(layer, q, k, v))[0]
        x = self._norm(self.x if model.parallel_residual else attended, prefix + "post_attention_layernorm")
        self.x = attended + linear("down", self._by_window(ACTIVATIONS[model.activation], *linear("up", x)))[0]

    def _multiply(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return self._by_window(lambda rows: rows @ weight.T, x)

    def _by_window(self, function: Callable[..., np.ndarray], *values: np.ndarray) -> np.ndarray:
        """Applies `function` to the rows of each window of `values` [N, ...], on all threads."""
        length = self.shape[1]
        return np.concatenate(list(self.threads.map(lambda begin: function(*(each[begin:begin + length] for each in values)),
                                                    range(0, len(values[0]), length))))

    def _norm(self, x: np.ndarray, module: str) -> np.ndarray:
        return self._by_window(lambda rows: norm(rows, self.model, self.read, module), x)

    def _attention(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Of all windows: q, k, v [N, heads, HS]."""
        model = self.model

        def turned(x: np.ndarray) -> np.ndarray:
            return x if layer in model.nope_layers else rotate(x, model.rope)

        return self._by_window(lambda q, k, v: attend(turned(q), turned(k), v, model.window(layer)), q, k, v)


# ---- rounding ----------------------------------------------------------------------------------------------------------


def inverse_factor(x: np.ndarray, threads: ThreadPoolExecutor) -> np.ndarray:
    """The upper Cholesky factor of H^-1 in float64 [K, K], where H is X^T X with damping. LinAlgError if X is not finite."""
    columns = x.shape[1]
    hessian = np.zeros((columns, columns))

    def add_up(begin: int) -> None:  # this block of columns, from the first row to the diagonal
        end = min(begin + BLOCK, columns)
        for row in range(0, len(x), 1024):  # few enough rows for sums in float32: the damping is 10^4 times their error
            piece = x[row:row + 1024]
            hessian[:end, begin:end] += piece[:, :end].T @ piece[:, begin:end]

    list(threads.map(add_up, range(0, columns, BLOCK)))
    hessian = np.triu(hessian) + np.triu(hessian, 1).T
    diagonal = np.einsum("ii->i", hessian)
    if not np.isfinite(diagonal).all():  # not every LAPACK refuses to factorise it
        raise np.linalg.LinAlgError("not finite")
    diagonal[diagonal == 0] = 1  # an input that is always 0: its weight may be anything
    diagonal += DAMPING * diagonal.mean()
    # H = R R^T with R upper triangular, by Cholesky's factor from the last row up; then H^-1 = (R^-1)^T R^-1.
    return inverse_of_upper(np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1])


def inverse_of_upper(matrix: np.ndarray) -> np.ndarray:
    """The inverse of an upper triangular matrix, by halves: a sixth of the operations of np.linalg.inv()."""
    size = len(matrix)
    if size <= 64:
        return np.triu(np.linalg.inv(matrix))
    half = size // 2
    inverse = np.zeros_like(matrix)
    inverse[:half, :half], inverse[half:, half:] = inverse_of_upper(matrix[:half, :half]), inverse_of_upper(matrix[half:, half:])
    inverse[:half, half:] = -inverse[:half, :half] @ matrix[:half, half:] @ inverse[half:, half:]
    return inverse


def quantize(weights: np.ndarray, factor: np.ndarray) -> Quantized:
    """`weights` [rows, columns] in int4. `factor`: inverse_factor() of their inputs. OverflowError as quantize_rows()."""
    rows, columns = weights.shape
    left = weights.astype(np.float64)
    q = np.empty((columns, rows), np.uint8)
    scales = np.empty((rows, quantization.groups_of(columns)), np.float16)
    zeros = np.empty(scales.shape, np.uint8)
    for group, begin in enumerate(range(0, columns, GROUP)):
        end = min(begin + GROUP, columns)
        nearest = quantization.quantize_rows(left[:, begin:end].astype(np.float32), SCHEME)
        scales[:, group], zeros[:, group] = nearest.scales[:, 0], nearest.zeros[:, 0] if nearest.zeros is not None else 0
        scale, zero = scales[:, group].astype(np.float64), zeros[:, group].astype(np.float64)
        of_group = np.ascontiguousarray(left[:, begin:end].T)  # column by column
        losses = np.empty_like(of_group)
        for column in range(begin, end):
            values = of_group[column - begin]
            chosen = np.clip(np.rint(values / scale) + zero, 0, 15)
            q[column] = chosen
            loss = losses[column - begin] = (values - scale * (chosen - zero)) / factor[column, column]
            of_group[column + 1 - begin:] -= np.outer(factor[column, column + 1:end], loss)
        left[:, end:] -= losses.T @ factor[begin:end, end:]
    pairs = np.ascontiguousarray((q[0::2] | q[1::2] << 4).T)
    result = Quantized(pairs, scales, zeros, 0, 0)
    source = weights.astype(np.float64)
    error = float(((quantization.int4_again(result, columns) - source) ** 2).sum())
    return Quantized(pairs, scales, zeros, error, float((source ** 2).sum()))


class MatrixError(Exception):
    """The matrix `name` cannot be quantised: the cause is OverflowError (quantize()) or LinAlgError (inverse_factor())."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class Calibration:
    """The quantised matrices of a model. chosen(name) says which matrices are quantised; these are finite."""

    def __init__(self, model: Model, read: Read, ids: np.ndarray, chosen: Callable[[str], bool]):
        self.threads = ThreadPoolExecutor(max_workers=quantization.workers())
        self.layers, self.read, self.chosen = Layers(model, read, ids, self.threads), read, chosen
        self.next = 0
        self.found: dict[str, Quantized] = {}

    def take(self, layer: int, name: str) -> Quantized:
        """The quantised matrix `name` of `layer`. Layers have to be asked for in order, each matrix once. MatrixError for the first
        matrix of the layer that cannot be quantised, whichever was asked for."""
        while self.next <= layer:
            self.layers.run(self.next, self._quantise)
            self.next += 1
        return self.found.pop(name)

    def _quantise(self, names: list[str], x: np.ndarray) -> list[np.ndarray]:
        weights = [self.read(name) for name in names]
        if not any(map(self.chosen, names)):
            return weights
        asked = next(filter(self.chosen, names))
        try:
            factor = inverse_factor(x, self.threads)
            for i, asked in enumerate(names):
                if self.chosen(asked):
                    self.found[asked] = self._rounded(weights[i], factor)
                    weights[i] = quantization.int4_again(self.found[asked], weights[i].shape[1])
        except (OverflowError, np.linalg.LinAlgError) as error:
            raise MatrixError(asked) from error
        return weights

    def _rounded(self, weights: np.ndarray, factor: np.ndarray) -> Quantized:
        """quantize() in pieces of rows."""
        pieces = list(self.threads.map(lambda begin: quantize(weights[begin:begin + PIECE_ROWS], factor),
                                       range(0, len(weights), PIECE_ROWS)))
        return Quantized(np.concatenate([piece.q for piece in pieces]), np.concatenate([piece.scales for piece in pieces]),
                         np.concatenate([piece.zeros for piece in pieces if piece.zeros is not None]),
                         sum(piece.error for piece in pieces), sum(piece.square for piece in pieces))
