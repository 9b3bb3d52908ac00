"""Small Hugging Face checkpoints for the tests, written byte by byte, and runs of the scripts on them."""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import pathlib
import struct
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import cli  # noqa: E402
import hf_config  # noqa: E402
import tensor_file  # noqa: E402

# Of processor time within which hostile input is refused: it takes 0.1 to 0.6, and a slow and busy machine may take
# several times as long. What this is to find, work that grows with the square of the input, would take minutes.
SECONDS = 5.0

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
}
GPT_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "rotary_pct": 0.25,
    "rotary_emb_base": 10000, "use_parallel_residual": True, "bos_token_id": 0, "eos_token_id": 0,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 8, "sliding_window": 16, "sliding_window_pattern": 2, "bos_token_id": 2, "eos_token_id": 1,
}
CONFIGS = {"llama": LLAMA, "gpt_neox": GPT_NEOX}


def safetensors_bytes(header, data=b"", length=None):
    """A file from its parts: `header` an object or bytes, `length` what the first 8 bytes claim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def encode(values, dtype):
    """float32 values as the bytes of a safetensors dtype."""
    if dtype == "BF16":
        return tensor_file.f32_to_bf16(values).tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "U8": "u1"}[dtype]).tobytes()


def write_safetensors(path, tensors, dtype="F32"):
    """tensors: name -> float32 array, or (dtype, array)."""
    header, pieces, end = {}, [], 0
    for name, value in tensors.items():
        kind, array = value if isinstance(value, tuple) else (dtype, value)
        data = encode(array, kind)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(data)]}
        pieces.append(data)
        end += len(data)
    path.write_bytes(safetensors_bytes(header, b"".join(pieces)))


@functools.cache
def _described(text):
    return hf_config.model_of(hf_config.describe("-", {"config": json.loads(text), "source": "config"}))


def model_of(config):
    """The model that a config describes."""
    return _described(json.dumps(config))


def weights_of(config, seed=0):
    """Random weights of the model that a config describes, name -> float32."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in model_of(config).tensors.items()}


def write_checkpoint(directory, config, weights=None, dtype="F32", tokenizer=None):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", weights_of(config) if weights is None else weights, dtype)
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def write_shards(directory, shards, weight_map=None):
    """shards: file name -> tensors; the index says what the files say unless `weight_map` says otherwise."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    for name, tensors in shards.items():
        write_safetensors(directory / name, tensors)
    true_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": true_map if weight_map is None else weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def tokenizer_of(size, merges=()):
    """A tokenizer.json of `size` tokens t0, t1, ..."""
    vocab = {f"t{number}": number for number in range(size)}
    return {"version": "1.0", "added_tokens": [{"id": 0, "content": "t0"}], "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "vocab": vocab, "merges": list(merges)}}


@dataclasses.dataclass
class Done:
    """What a run left: exit code, texts, and the processor time that it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float = 0.0


def run_script(script, *arguments):
    """main() of a script in this process: 30 times as fast as a new one. An exception it lets through comes out."""
    main = importlib.import_module(script.removesuffix(".py")).main
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, [script, *map(str, arguments)]
    start = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.run(main)
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return Done(code or 0, out.getvalue(), err.getvalue(), time.process_time() - start)


def run_program(script, *arguments, **options):
    """A script as a user runs it: a process of its own."""
    done = subprocess.run([sys.executable, str(SCRIPTS / script), *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, **options)
    return Done(done.returncode, done.stdout, done.stderr)


def convert(directory, output, *options):
    """Converts and expects success; the tensor file."""
    done = run_script("convert_hf.py", directory, "-o", output, *options)
    assert done.returncode == 0, done.stderr
    return tensor_file.read(output, expected="model")


def assert_refused(done, code, *words, output=None):
    """One error line with the words in it, the exit code, no traceback, nothing written."""
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert done.returncode == code, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error: "), done.stderr
    assert all(32 <= ord(character) < 127 for character in errors[0]), errors[0]
    for word in words:
        assert word.lower() in errors[0].lower(), errors[0]
    if output is not None:
        leftovers = [path.name for path in output.parent.iterdir() if path.name.startswith(output.name)]
        assert not leftovers, leftovers
