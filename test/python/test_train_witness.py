"""What no golden covers, because transformers has no such Llama: a training step with --norm layernorm, an odd head size
and a partial rotation, against the numpy model of test_reference.py and central differences of its loss."""

from types import SimpleNamespace

import pytest

from test_reference import NumpyModel, dump_reference, loss_of, np, tensor_file
from train_runs import run_program

MODEL = {"family": "llama", "vocab_size": 5, "hidden_size": 5, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "head_dim": 5, "ffn_size": 3, "max_positions": 16, "norm_eps": 1e-5, "tied_embeddings": False,
         "parallel_residual": False, "attention_bias": False, "tokenizer_vocab": 5, "eos_ids": [], "bos_id": None,
         "rope": {"type": "llama3", "theta": 100.0, "rotary_dim": 4, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_positions": 24}}
C, F, V, Q, KV = 5, 3, 5, 20, 10


def parameters(norm, tied):
    def norm_of(name):
        return {name + ".weight": (C,)} | ({name + ".bias": (C,)} if norm == "layernorm" else {})
    shapes = {"model.embed_tokens.weight": (V, C)}
    for layer in range(MODEL["num_layers"]):
        prefix = f"model.layers.{layer}."
        linear = {"self_attn.q_proj": (Q, C), "self_attn.k_proj": (KV, C), "self_attn.v_proj": (KV, C),
                  "self_attn.o_proj": (C, Q), "mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F)}
        shapes |= norm_of(prefix + "input_layernorm") | norm_of(prefix + "post_attention_layernorm")
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in linear.items()}
    shapes |= norm_of("model.norm") | ({} if tied else {"lm_head.weight": (V, C)})
    random = np.random.default_rng(3)
    return {name: (random.normal(0, 0.4, shape) + name.endswith("norm.weight")).astype(np.float32)
            for name, shape in shapes.items()}


class DoubleModel(NumpyModel):
    def __init__(self, model, weights):
        self.file, self.model, self.values = SimpleNamespace(tensors=weights), model, {}

    def weight(self, name):
        return self.file.tensors[name]


def gradient(loss, values):
    """Central differences."""
    result, step = np.zeros_like(values), 1e-5
    for index in np.ndindex(values.shape):
        middle = values[index]
        for side in (step, -step):
            values[index] = middle + side
            result[index] += loss() / (2 * side)
        values[index] = middle
    return result


@pytest.mark.parametrize("norm, tied", [("layernorm", False), ("rmsnorm", True)])
def test_a_training_step_is_the_derivative_of_its_loss(tmp_path, norm, tied):
    model, stored = MODEL | {"norm": norm, "tied_embeddings": tied}, parameters(norm, tied)
    with tensor_file.Writer(tmp_path / "model.bin", "model", {"model": model}) as writer:
        for name, values in stored.items():
            writer.declare(name, "f32", values.shape)
        for name, values in stored.items():
            writer.write(name, values)
    random = np.random.default_rng(4)
    ids, labels = random.integers(0, V, (2, 1, 9), dtype=np.int32)
    labels[:, ::3] = dump_reference.IGNORED_LABEL
    weights = {name: values.astype(np.float64) for name, values in stored.items()}

    def loss():
        return loss_of(DoubleModel(model, weights).forward(ids[0])["logits"], labels[0])

    dump = {"input_ids": ids, "labels": labels, "loss": np.array([loss()], np.float32)}
    dump |= {f"grad.{name}": gradient(loss, values).astype(np.float32) for name, values in weights.items()}
    with tensor_file.Writer(tmp_path / "dump.bin", "reference dump", {"dump": {}}) as writer:
        for name, values in dump.items():
            writer.declare(name, "i32" if values.dtype == np.int32 else "f32", values.shape)
        for name, values in dump.items():
            writer.write(name, values)
    done = run_program("--device", "cpu", "--model", tmp_path / "model.bin", "--compare", tmp_path / "dump.bin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(weights) + 1} tensors, 0 failed" in done.stdout
