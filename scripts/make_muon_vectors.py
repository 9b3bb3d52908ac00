#!/usr/bin/env python3
"""Writes test/fixtures/operators/muon.bin: ten steps of Muon, for test/cpp/operator_vectors_test.cpp.

    python3 scripts/make_muon_vectors.py         needs numpy; rewrites the file

Everything is computed in float64 and rounded to fp32 once. The update is orthogonalised by its singular values, each of
which goes through the five polynomials of Newton-Schulz, not by products of matrices.
"""

from pathlib import Path

import numpy as np

import tensor_file

OUT = Path(__file__).resolve().parent.parent / "test" / "fixtures" / "operators" / "muon.bin"
SHAPES = {"square": (9, 9), "wide": (11, 37), "tall": (41, 6), "row": (1, 9), "column": (10, 1)}
STEPS, LR, MOMENTUM, WEIGHT_DECAY = 10, 0.05, 0.9, 0.1


def orthogonalize(x: np.ndarray) -> np.ndarray:
    left, values, right = np.linalg.svd(x, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def muon_steps(start: np.ndarray, gradients: np.ndarray, scales: np.ndarray, decay: bool) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and momentum after the steps, as the formula of Jordan et al. (2024) with the scale of Liu et al. (2025)."""
    parameters, momentum = start.astype(np.float64), np.zeros(start.shape)
    for gradient, scale in zip(gradients.astype(np.float64), scales.astype(np.float64), strict=True):
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient * scale
        update = orthogonalize((1 - MOMENTUM) * gradient * scale + MOMENTUM * momentum)
        if decay:
            parameters *= 1 - LR * WEIGHT_DECAY
        parameters -= LR * 0.2 * max(start.shape) ** 0.5 * update
    return parameters, momentum


def main() -> None:
    random = np.random.default_rng(20)
    cases: list[dict] = []
    tensors: dict[str, np.ndarray] = {}
    for name, shape in SHAPES.items():
        for decay in (True, False):
            start = random.standard_normal(shape).astype(np.float32)
            gradients = random.standard_normal((STEPS, *shape)).astype(np.float32)
            scales = random.uniform(0.3, 1, STEPS).astype(np.float32)
            parameters, momentum = muon_steps(start, gradients, scales, decay)
            case = name if decay else f"{name}_no_decay"
            cases.append({"name": case, "rows": shape[0], "columns": shape[1], "steps": STEPS, "decay": decay, "lr": LR,
                          "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY})
            tensors |= {f"{case}.start": start, f"{case}.gradients": gradients, f"{case}.scales": scales,
                        f"{case}.parameters": parameters, f"{case}.momentum": momentum}
    with tensor_file.Writer(OUT, "reference dump", {"operator": "muon", "numpy": np.__version__, "cases": cases}) as writer:
        for tensor, values in tensors.items():
            writer.declare(tensor, "f32", values.shape)
        for tensor, values in tensors.items():
            writer.write(tensor, np.ascontiguousarray(values, dtype=np.float32))


if __name__ == "__main__":
    main()
