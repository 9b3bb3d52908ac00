"""vLLM beside dev/bench/decode.py: random bf16 weights of Llama's and Qwen3's shapes, CUDA graphs and torch.compile.

    python3 dev/bench/vllm_baseline.py --model llama3.1-8b --contexts 64 8192 32768
    python3 dev/bench/vllm_baseline.py --model qwen3-8b --sequences 1 64 128 8x32768

Prints a JSON line a context of one sequence: {"context", "ms" a token, "prompt_ms"}, and a line a number of sequences, with prompts of
128 ids or as many as follow an x: {"sequences", "prompt", "ms" a token, "tokens_per_s"}. A token's time is a 64th of the difference
between requests of 65 tokens and of 1 (median of --repeats), so it holds vLLM's scheduler and sampling, as a user's does; a prompt's
is the least of a request of 1. Of several long prompts vLLM decodes the first while it computes the last ones, so that its last steps
have fewer sequences than are said: the difference is then less than that many steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# Published sizes of Llama 3.1 and 3.2 and of Qwen3 (their config.json), as far as they differ.
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
                         "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "bos_token_id": 151643,
                         "eos_token_id": 151645}
SIZES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                    "tie_word_embeddings": False},
    "llama3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                    "tie_word_embeddings": True},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "tie_word_embeddings": False},
    "qwen3-0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
}
TOKENS = 64


def config(model: str) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
            "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "max_position_embeddings": 131072, "bos_token_id": 128000, "eos_token_id": 128001,
            **SIZES[model]}


def sequences_of(text: str) -> tuple[int, int]:
    """A number of sequences and the ids of each one's prompt."""
    count, _, ids = text.partition("x")
    return int(count), int(ids or 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--mode", choices=["offline"], default="offline")
    parser.add_argument("--contexts", nargs="+", type=int, default=[])
    parser.add_argument("--sequences", nargs="+", type=sequences_of, default=[], metavar="COUNT[xIDS]")
    parser.add_argument("--repeats", type=int, default=3, help="requests for each figure, beside one that warms up")
    options = parser.parse_args()
    if not options.contexts and not options.sequences:
        parser.error("give --contexts or --sequences")
    from vllm import LLM, SamplingParams

    longest = max([*options.contexts, *(ids for _, ids in options.sequences)]) + TOKENS + 1
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config(options.model)))
        llm = LLM(model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest,
                  enable_prefix_caching=False, max_num_seqs=max([8, *(count for count, _ in options.sequences)]))

        def seconds(prompts: list[dict[str, list[int]]], tokens: int) -> float:
            begin = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False),
                         use_tqdm=False)
            return time.perf_counter() - begin

        def measured(count: int, length: int) -> tuple[float, float]:
            """ms a token, ms of the prompts."""
            firsts, tokens = [], []
            for repeat in range(1 + options.repeats):  # the first one warms up
                prompts = [{"prompt_token_ids": [random.randrange(10, 50000) for _ in range(length)]} for _ in range(count)]
                first = seconds(prompts, 1)
                token = (seconds(prompts, 1 + TOKENS) - first) / TOKENS
                if repeat > 0:
                    firsts.append(first)
                    tokens.append(token)
            return 1000 * statistics.median(tokens), 1000 * min(firsts)

        for context in options.contexts:
            ms, prompt_ms = measured(1, context)
            print(json.dumps({"context": context, "ms": ms, "prompt_ms": prompt_ms}), flush=True)
        for count, ids in options.sequences:
            ms, _ = measured(count, ids)
            print(json.dumps({"sequences": count, "prompt": ids, "ms": ms, "tokens_per_s": 1000 * count / ms}), flush=True)


if __name__ == "__main__":
    main()
