"""vLLM beside dev/bench/decode.py: one sequence, random bf16 weights of Llama's shapes, CUDA graphs and torch.compile.

    python3 dev/bench/vllm_baseline.py --model llama3.1-8b --contexts 64 8192 32768

Prints a JSON line a context: {"context", "ms" a token, median of three requests of 64 tokens, "prompt_ms", the least of three}. A
token's time is the difference between a request of 65 tokens and one of 1, so it holds vLLM's scheduler and sampling, as a user's does.
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

# Published sizes of Llama 3.1 and 3.2 (their config.json), as far as they differ.
SIZES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                    "tie_word_embeddings": False},
    "llama3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                    "tie_word_embeddings": True},
}
TOKENS, REPEATS = 64, 3


def config(model: str) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
            "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "max_position_embeddings": 131072, "bos_token_id": 128000, "eos_token_id": 128001,
            **SIZES[model]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--mode", choices=["offline"], default="offline")
    parser.add_argument("--contexts", nargs="+", type=int, required=True)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config(options.model)))
        llm = LLM(model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=131072,
                  enable_prefix_caching=False, max_num_seqs=8)

        def seconds(ids: list[int], tokens: int) -> float:
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": ids}],
                         SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False), use_tqdm=False)
            return time.perf_counter() - begin

        for context in options.contexts:
            prompts, tokens = [], []
            for _ in range(REPEATS):
                ids = [random.randrange(10, 50000) for _ in range(context)]
                prompts.append(seconds(ids, 1))
                tokens.append((seconds(ids, 1 + TOKENS) - prompts[-1]) / TOKENS)
            print(json.dumps({"context": context, "ms": 1000 * statistics.median(tokens), "prompt_ms": 1000 * min(prompts)}),
                  flush=True)


if __name__ == "__main__":
    main()
