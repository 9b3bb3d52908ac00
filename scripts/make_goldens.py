#!/usr/bin/env python3
"""Makes the golden models and dumps of test/fixtures/golden: small random models, and what PyTorch computes for them.

    python3 scripts/make_goldens.py

For each case NAME.model.bin is the converted model and NAME.dump.bin the reference dump. Between them the cases cover
head dimensions 32, 64, 80, 128 and 256, grouped heads, sliding windows, layers without RoPE, tied and untied embeddings,
llama3 scaling, odd vocabularies, rotary fractions, parallel and sequential residuals, absent biases, padded vocabularies and
16-bit weights. Of GPT-NeoX and of Gemma 3 the cases called train have gradients, some of them optimizer steps, and the others are larger. Weights are drawn so that mistakes become visible: norms far from 1, biases far from 0, attention far from uniform. Dumps of the two
trained models under models/ are made too if those exist. Needs torch and transformers 5.
"""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import cli
from cli import ENVIRONMENT, INTERNAL, FileError, Warnings
from convert_hf import Target, match_tensors, open_weights, write_model
from dump_reference import (IGNORED_LABEL, AdamW, Fp8, Request, compute, encode_prompt, fp8_noise, greedy, libraries, optimizer_steps,
                            random_batch, selection, shifted_labels, write_dump)
from hf_config import Checkpoint, read_checkpoint
from tensor_file import escaped

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "test" / "fixtures" / "golden"
OPTIMIZER = AdamW(steps=10, learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=1.0)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
# Greedy ids can only be compared if the two largest logits are never closer than this; otherwise another seed is tried.
LEAST_LEAD = 2e-3
# Parameters after optimizer steps can only be compared if no gradient is so small that rounding decides its sign. The
# largest difference between fp32 and fp64, relative to each tensor's largest value.
LARGEST_DRIFT = 2e-6
GREEDY_IDS = 20
# Of the golden in fp8: steps so large that inputs grow beyond the range that their scales have.
FP8_OPTIMIZER = AdamW(steps=3, learning_rate=0.2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=1.0)
# No value of it is so near to the middle between two codes that noise decides which one it gets: otherwise another seed is
# tried. Then noise is not much more behind the model than before it; one code that is another makes 1e-3 of it.
LARGEST_NOISE = 5e-5
PADDED_ROWS = 15


@dataclass(frozen=True)
class Case:
    """One random model. `config` are keys of transformers' configuration."""

    name: str
    family: str
    config: dict[str, Any]
    rope: dict[str, Any]
    length: int                      # T
    dtype: str = "float32"           # of the stored weights
    seed: int = 0
    groups: list[str] = field(default_factory=lambda: ["act", "grad", "grad16", "losses", "adamw", "greedy"])
    greedy: int = GREEDY_IDS         # ids of the greedy text
    tokenizer: bool = False          # with a byte tokenizer and PADDED_ROWS rows of padding


def llama(name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, tied: bool,
          theta: float, length: int, scaling: dict[str, Any] | None = None, layers: int = 2, eps: float = 1e-5,
          biases: tuple[str, ...] = (), keys: dict[str, Any] | None = None, **options: Any) -> Case:
    config = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "head_dim": head_dim, "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tied,
              "num_hidden_layers": layers, "rms_norm_eps": eps, "max_position_embeddings": 96}
    config |= {key: True for key in biases} | (keys or {})
    return Case(f"llama-{name}", "llama", config, (scaling or {"rope_type": "default"}) | {"rope_theta": theta}, length,
                **options)


def of_family(family: str, name: str, *sizes: Any, **options: Any) -> Case:
    """A case of another family whose configuration has a Llama's keys."""
    case = llama(name, *sizes, **options)
    return replace(case, name=f"{family}-{name}", family=family)


def gemma3(name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, length: int,
           keys: dict[str, Any], tied: bool = True, scaling: dict[str, Any] | None = None, **options: Any) -> Case:
    runs: dict[str, Any] = {"groups": ["act", "losses", "greedy"], "greedy": 64}
    case = llama(name, hidden, heads, kv_heads, head_dim, ffn, vocab, tied, 50000.0, length, scaling, eps=1e-6,
                 keys={"pad_token_id": None} | keys, **(runs | options))
    rope = {"full_attention": case.rope, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    return replace(case, name=f"gemma3-{name}", family="gemma3_text", rope=rope)


def neox(name: str, hidden: int, heads: int, ffn: int, vocab: int, rotary: float, parallel: bool, bias: bool,
         theta: float, length: int, scaling: dict[str, Any] | None = None, layers: int = 2, eps: float = 1e-5,
         activation: str = "gelu", **options: Any) -> Case:
    config = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": ffn, "vocab_size": vocab,
              "use_parallel_residual": parallel, "attention_bias": bias, "num_hidden_layers": layers,
              "layer_norm_eps": eps, "max_position_embeddings": 96, "hidden_act": activation, "tie_word_embeddings": False}
    rope = (scaling or {"rope_type": "default"}) | {"rope_theta": theta, "partial_rotary_factor": rotary}
    return Case(f"neox-{name}", "gpt_neox", config, rope, length, **({"groups": ["act", "greedy"]} | options))


LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
YARN_FREE = YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.5, "mscale_all_dim": 0.5}
NO_PARAMETERS = ["act", "grad", "grad16", "losses", "greedy"]
# Where not all of a head rotates, the gradients of biases of k are rounding noise, which AdamW's steps follow.
NO_HALF = ["act", "grad", "losses", "greedy"]
CASES = [
    llama("hs32-gqa2", 32, 4, 2, 32, 48, 97, False, 10000.0, 13),
    llama("hs64-gqa3-tied", 24, 3, 1, 64, 40, 83, True, 500000.0, 14, LLAMA3),
    llama("hs80-gqa4", 16, 4, 1, 80, 36, 61, False, 100000.0, 12, layers=1, eps=1e-3, groups=NO_PARAMETERS),
    llama("hs128-mha-tied", 16, 2, 2, 128, 24, 67, True, 10000.0, 13, LLAMA3, layers=1, eps=1e-6, groups=NO_PARAMETERS),
    llama("hs256-mqa", 16, 2, 1, 256, 24, 59, False, 500000.0, 14, LLAMA3, layers=1, groups=NO_PARAMETERS),
    llama("hs32-mha", 64, 2, 2, 32, 40, 64, False, 10000.0, 15, layers=1, dtype="bfloat16", groups=NO_PARAMETERS),
    llama("linear", 16, 2, 1, 32, 24, 53, False, 10000.0, 13, LINEAR, layers=1, groups=NO_PARAMETERS),
    llama("yarn-biases", 32, 2, 1, 32, 40, 61, False, 500.0, 13, YARN, biases=("attention_bias", "mlp_bias")),
    llama("yarn-attention-bias", 16, 2, 2, 32, 24, 47, True, 500.0, 13, YARN_FREE, layers=1, biases=("attention_bias",),
          groups=NO_PARAMETERS),
    llama("mlp-bias", 16, 2, 1, 32, 24, 43, False, 10000.0, 13, layers=1, biases=("mlp_bias",), groups=NO_PARAMETERS),
    of_family("mistral", "gqa2", 8, 4, 2, 32, 24, 47, False, 10000.0, 9, keys={"sliding_window": None}, layers=1,
              groups=NO_PARAMETERS),
    of_family("mistral", "window", 8, 2, 1, 32, 24, 47, False, 10000.0, 11, keys={"sliding_window": 5}, layers=1,
              groups=NO_PARAMETERS),
    of_family("qwen2", "gqa3-tied", 16, 3, 1, 32, 24, 43, True, 1e6, 11, layers=1, groups=NO_PARAMETERS),
    of_family("qwen2", "mha", 16, 2, 2, 16, 24, 47, False, 1e6, 12, eps=1e-6, groups=NO_PARAMETERS),
    of_family("qwen3", "gqa2", 8, 4, 2, 32, 16, 43, False, 1e6, 9, eps=1e-6),
    of_family("qwen3", "biases-tied", 16, 2, 1, 32, 24, 43, True, 1e6, 13, layers=1, biases=("attention_bias",),
              groups=NO_PARAMETERS),
    of_family("smollm3", "window-tied", 8, 2, 1, 32, 24, 43, True, 5000.0, 11, eps=1e-6,
              keys={"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 4, "pad_token_id": None},
              groups=NO_PARAMETERS),
    gemma3("local", 24, 3, 1, 32, 40, 83, 14, keys={"sliding_window": 5, "query_pre_attn_scalar": 20,
                                                    "layer_types": ["sliding_attention", "full_attention"]}),
    gemma3("gqa2-biases", 16, 4, 2, 64, 24, 61, 12, tied=False, scaling=LINEAR, dtype="bfloat16",
           keys={"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64, "attention_bias": True}),
    gemma3("train", 8, 2, 1, 6, 10, 29, 7, dtype="float16", groups=NO_HALF, greedy=GREEDY_IDS,
           keys={"sliding_window": 3, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    gemma3("train-untied", 8, 2, 2, 4, 6, 31, 8, tied=False, dtype="float16", layers=1, groups=[*NO_HALF, "adamw"],
           greedy=GREEDY_IDS, keys={"sliding_window": 3, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"], "attention_bias": True}),
    gemma3("train-hs32", 8, 2, 1, 32, 16, 43, 11, groups=NO_PARAMETERS, greedy=GREEDY_IDS,
           keys={"sliding_window": 4, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    neox("tanh-linear", 64, 2, 64, 41, 0.5, True, True, 10000.0, 13, LINEAR, layers=1, activation="gelu_fast", dtype="float16"),
    neox("tanh-yarn", 64, 2, 64, 41, 1.0, False, True, 500.0, 13, YARN, layers=1, activation="gelu_new", dtype="float16"),
    neox("hs32-padded", 64, 2, 96, 256 + 1 + PADDED_ROWS, 0.25, True, True, 10000.0, 13, tokenizer=True,
         dtype="float16"),
    neox("hs32-sequential-nobias", 96, 3, 64, 71, 0.5, False, False, 25000.0, 17, dtype="float16"),
    neox("hs64-sequential", 64, 1, 80, 53, 1.0, False, True, 10000.0, 12, eps=1e-3, dtype="bfloat16"),
    neox("hs80-nobias", 80, 1, 100, 101, 0.25, True, False, 10000.0, 14, dtype="bfloat16"),
    neox("hs128", 128, 1, 72, 47, 0.25, True, True, 10000.0, 14, layers=1, dtype="float16"),
    neox("hs256", 256, 1, 40, 31, 0.25, True, True, 10000.0, 12, layers=1, dtype="float16"),
    neox("train", 24, 2, 20, 61, 0.5, True, True, 10000.0, 9, dtype="float16", groups=NO_HALF),
    neox("train-sequential-nobias", 24, 3, 20, 59, 0.25, False, False, 25000.0, 10, layers=1, dtype="float16", groups=[*NO_HALF, "adamw"]),
]


def draw_weights(model: Any, padded_rows: int) -> None:
    """Draws every parameter: matrices keep the scale of their input, norm weights are not 1 and biases not 0.

    The head's padding rows are larger than all others, so a sampler that does not leave them out picks them.
    """
    torch, _ = libraries()
    gemma = model.config.model_type == "gemma3_text"  # scales the embedding, and adds 1 to the weights of norms
    embedding_scale = 0.7 / math.sqrt(model.config.hidden_size) if gemma else 0.7
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, dtype=torch.float32)
            if parameter.ndim == 2 and "embed" in name and "embed_out" not in name:
                parameter.copy_(noise * embedding_scale)
            elif parameter.ndim == 2:
                parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[1])))
            elif name.endswith(".bias"):
                parameter.copy_(noise * 0.2)
            else:
                parameter.copy_((0 if gemma else 1) + noise * 0.3)
        if padded_rows:
            model.get_output_embeddings().weight[-padded_rows:] *= 4


def make_checkpoint(case: Case, directory: Path) -> None:
    """The case as a Hugging Face directory."""
    torch, transformers = libraries()
    torch.manual_seed(case.seed)
    config = transformers.AutoConfig.for_model(case.family, **case.config, rope_parameters=dict(case.rope), bos_token_id=None,
                                               eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(model, PADDED_ROWS if case.tokenizer else 0)
    model.to(getattr(torch, case.dtype)).save_pretrained(directory)
    if case.tokenizer:
        (directory / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")


def byte_tokenizer() -> str:
    """A tokenizer of the 256 bytes and one special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer.to_str()


def batch(checkpoint: Checkpoint, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Two random texts. Some labels are ignored: single ones, several in a row, and the last one."""
    ids, labels = random_batch(checkpoint.model, 2, case.length, case.seed)
    labels[0, 3] = labels[1, 5:8] = labels[1, -1] = IGNORED_LABEL
    return ids, labels


def convert(directory: Path, checkpoint: Checkpoint, path: Path) -> None:
    warnings = Warnings()
    checkpoint, tensors = match_tensors(checkpoint, open_weights(directory, warnings), directory, warnings)
    write_model(path, checkpoint, tensors, Target(), True, warnings)
    if warnings.count:
        raise FileError(INTERNAL, f"{escaped(str(path))}: the conversion of a golden model warns")


def drift(directory: Path, checkpoint: Checkpoint, request: Request) -> float:
    """The largest difference of a parameter after the optimizer steps in fp32 and in fp64, relative to its tensor's largest."""
    _, single = optimizer_steps(directory, checkpoint.model, request)
    _, double = optimizer_steps(directory, checkpoint.model, request, "f64")
    return max(float((single[name].double() - double[name]).abs().max() / double[name].abs().max()) for name in double)


def write_case(case: Case, output: Path, directory: Path, checkpoint: Checkpoint, request: Request) -> None:
    model, dump = output / f"{case.name}.model.bin", output / f"{case.name}.dump.bin"
    convert(directory, checkpoint, model)
    write_dump(dump, directory, checkpoint, request, selection(case.groups, None))
    report(model, dump)


def make_case(case: Case, output: Path) -> None:
    """Writes model and dump of one case, with the first seed whose results do not depend on rounding."""
    for seed in range(case.seed, case.seed + 1000):
        with tempfile.TemporaryDirectory() as name:
            directory, tried = Path(name), replace(case, seed=seed)
            make_checkpoint(tried, directory)
            checkpoint = read_checkpoint(directory)
            ids, labels = batch(checkpoint, tried)
            trains = "grad" in case.groups
            request = Request(ids, labels, half_dtype="bf16" if "grad16" in case.groups else None, backward=trains,
                              adamw=OPTIMIZER if trains else None, greedy=case.greedy)
            continuation, lead = greedy(directory, checkpoint.model, request)
            if lead < LEAST_LEAD or len(set(continuation.tolist())) < 8:
                continue
            if "adamw" in case.groups and drift(directory, checkpoint, request) > LARGEST_DRIFT:
                continue
            write_case(case, output, directory, checkpoint, request)
            return
    raise FileError(INTERNAL, f"{case.name}: no seed gives clear results")


# The seed is the first that is taken.
FP8_CASE = llama("fp8", 32, 2, 1, 32, 48, 48, False, 10000.0, 8, dtype="bfloat16", seed=19,
                 groups=["act", "grad", "losses", "adamw"])


def make_fp8(output: Path) -> None:
    """Writes the model and the dump that train_llama --precision fp8 is compared with."""
    for seed in range(FP8_CASE.seed, FP8_CASE.seed + 10_000):
        with tempfile.TemporaryDirectory() as name:
            directory, case = Path(name), replace(FP8_CASE, seed=seed)
            make_checkpoint(case, directory)
            checkpoint = read_checkpoint(directory)
            request = Request(*batch(checkpoint, case), backward=True, adamw=FP8_OPTIMIZER, fp8=Fp8())
            tensors = compute(directory, checkpoint.model, request)
            noisy = fp8_noise(directory, checkpoint.model, request, tensors)
            if any(max(distances.values()) > LARGEST_NOISE for distances in noisy):
                continue
            write_case(case, output, directory, checkpoint, request)
            return
    raise FileError(INTERNAL, f"{FP8_CASE.name}: no seed keeps clear of the middles between codes")


STORY = "Once upon a time there was a little"
LONG_PROMPT_IDS = 48


def make_trained(name: str, output: Path) -> None:
    """The dump of a trained model under models/; skipped with a message where it is absent."""
    directory = ROOT / "models" / name
    if not (directory / "model.safetensors").exists():
        print(f"{name}: not there yet, skipped")
        return
    checkpoint = read_checkpoint(directory)
    prompt = encode_prompt(checkpoint, STORY, directory)
    story_request = Request(prompt, shifted_labels(prompt), greedy=64 + LONG_PROMPT_IDS)
    continuation, lead = greedy(directory, checkpoint.model, story_request)
    text = np.concatenate([prompt[0], continuation])[None, :LONG_PROMPT_IDS].astype(np.int32)
    trains = checkpoint.model.family == "llama"  # of the other there are losses of a run (test_train_reference.py)
    request = Request(text, shifted_labels(text), half_dtype="bf16" if trains else "f16", backward=trains,
                      adamw=OPTIMIZER if trains else None, greedy=80, greedy_prompt=prompt[0])
    path = output / f"{name}.dump.bin"
    keep, last = selection(["act", "grad", "losses", "greedy"], None), checkpoint.model.num_layers - 1

    def keep_outer(tensor: str) -> bool:
        """Of the gradients those of the first and the last layer alone: a gradient has the size of its weight."""
        layer = re.match(r"grad\d*\..*\.layers\.(\d+)\.", tensor)
        return keep(tensor) and (layer is None or int(layer[1]) in (0, last))

    write_dump(path, directory, checkpoint, request, keep_outer)
    print(f"{name}: {len(continuation)} greedy ids, smallest lead {lead:.4f}")
    report(path)


def report(*paths: Path) -> None:
    print("  ".join(f"{path.name} {path.stat().st_size:,}" for path in paths), flush=True)


def main() -> int:
    parser = cli.Parser(description=__doc__, prog="make_goldens.py")
    parser.add_argument("-o", "--output", type=Path, default=GOLDEN, metavar="DIR",
                        help="default: test/fixtures/golden")
    names = [*(case.name for case in CASES), FP8_CASE.name, "tiny-llama", "tiny-pythia"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"make only these, of {' '.join(names)}")
    options = parser.parse_args()
    torch, transformers = libraries()
    if int(transformers.__version__.split(".")[0]) < 5:
        raise FileError(ENVIRONMENT, f"transformers: got {transformers.__version__}, expected 5 or newer to make goldens")
    torch.set_num_threads(1)  # so that the order of sums, and with it the last bits, does not depend on the number of cores
    options.output.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if case.name in options.only:
            make_case(case, options.output)
    if FP8_CASE.name in options.only:
        make_fp8(options.output)
    for name in ("tiny-llama", "tiny-pythia"):
        if name in options.only:
            make_trained(name, options.output)
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
