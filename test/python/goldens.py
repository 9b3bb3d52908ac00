"""The dumps of PyTorch under test/fixtures/golden and the models beside them."""

from __future__ import annotations

from pathlib import Path

GOLDENS = Path(__file__).resolve().parents[1] / "fixtures" / "golden"


# What infer_pythia does not compute on the GPU, and a part of what it says.
CPU_ALONE = {"qwen2-mha": "head_dim: got 16", "neox-train": "head_dim: got 12", "neox-train-sequential-nobias": "head_dim: got 8", "neox-tanh-linear": "activation: ", "neox-tanh-yarn": "activation: ",
             "gemma3-train": "head_dim: got 6", "gemma3-train-untied": "head_dim: got 4"}


def inference_goldens(family: str = "") -> list[str]:
    """Names of the goldens of a family that have a model and are for infer_pythia: those in fp8 are for training only."""
    names = (path.name.removesuffix(".dump.bin") for path in GOLDENS.glob(f"{family}*.dump.bin"))
    return sorted(name for name in names if (GOLDENS / f"{name}.model.bin").exists() and not name.endswith("-fp8"))
