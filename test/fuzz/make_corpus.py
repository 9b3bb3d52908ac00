#!/usr/bin/env python3
"""Writes the seed corpora of the fuzz targets, test/fuzz/corpus/<target>/<name>, and beside them <target>.dict with the
words that the seeds have in common with their formats. Always the same bytes.

    python3 test/fuzz/make_corpus.py

A seed shows a target one thing that it reads without an error, or nearly so; the fuzzer finds the rest. The formats are
those of the comments at the top of each target.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).resolve().parent / "corpus"
LIMIT = 150_000  # bytes, all seeds together
F32, F16, BF16, U8, U16, U32, I32, I64, I8, U4, E4M3 = range(11)
MODEL, STATE, DUMP = 1, 2, 3
NONE, LLAMA, NEOX = range(3)


def described(kind: int, family: int, config: object, tensors: list[tuple[str, int, tuple[int, ...]]],
              changes: tuple[tuple[int, bytes], ...] = (), flags: int = 0) -> bytes:
    """A tensor file as tensor_bytes.h describes it."""
    text = config if isinstance(config, bytes) else json.dumps(config, separators=(",", ":")).encode()
    out = struct.pack("<BBBH", flags, kind, family, len(text)) + text + bytes([len(tensors)])
    for name, dtype, shape in tensors:
        out += bytes([len(name)]) + name.encode() + bytes([dtype, len(shape)]) + struct.pack(f"<{len(shape)}H", *shape)
    out += struct.pack("<BB", 77, len(changes))
    for where, value in changes:
        out += struct.pack("<HB", where, len(value)) + value
    return out


# ---- the smallest models ----------------------------------------------------------------------------------------------


def model_config(family: str, **changes: object) -> dict:
    rope = {"type": "standard", "theta": 10000.0, "rotary_dim": 2, "factor": 1.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_positions": 0}
    config = {"family": family, "vocab_size": 3, "hidden_size": 2, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1,
              "head_dim": 2, "ffn_size": 1, "max_positions": 8, "norm_eps": 1e-5,
              "norm": "rmsnorm" if family == "llama" else "layernorm", "rope": rope, "tied_embeddings": False,
              "parallel_residual": family == "gpt_neox", "attention_bias": family == "gpt_neox", "tokenizer_vocab": 3,
              "eos_ids": [], "bos_id": None}
    return config | changes


def llama_tensors(prefix: str = "", dtype: int = F32) -> list[tuple[str, int, tuple[int, ...]]]:
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (3, 2), layer + "input_layernorm.weight": (2,),
              layer + "self_attn.q_proj.weight": (2, 2), layer + "self_attn.k_proj.weight": (2, 2),
              layer + "self_attn.v_proj.weight": (2, 2), layer + "self_attn.o_proj.weight": (2, 2),
              layer + "post_attention_layernorm.weight": (2,), layer + "mlp.gate_proj.weight": (1, 2),
              layer + "mlp.up_proj.weight": (1, 2), layer + "mlp.down_proj.weight": (2, 1), "model.norm.weight": (2,),
              "lm_head.weight": (3, 2)}
    return [(prefix + name, dtype, shape) for name, shape in shapes.items()]


def neox_tensors(dtype: int = BF16) -> list[tuple[str, int, tuple[int, ...]]]:
    layer = "gpt_neox.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (3, 2)}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes |= {f"{layer}{norm}.weight": (2,), f"{layer}{norm}.bias": (2,)}
    for name, shape in (("attention.query_key_value", (6, 2)), ("attention.dense", (2, 2)),
                        ("mlp.dense_h_to_4h", (1, 2)), ("mlp.dense_4h_to_h", (2, 1))):
        shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    shapes |= {"gpt_neox.final_layer_norm.weight": (2,), "gpt_neox.final_layer_norm.bias": (2,),
               "embed_out.weight": (3, 2)}
    return [(name, dtype, shape) for name, shape in shapes.items()]


def quantized(family: str, scheme: str, head: str = "none", **model: Any) -> bytes:
    """A model whose linear layers, of two or four columns, are quantised."""
    q = {"int8": I8, "int4": U4, "fp8": E4M3}[scheme]
    tensors: list[tuple[str, int, tuple[int, ...]]] = []
    for name, dtype, shape in llama_tensors() if family == "llama" else neox_tensors():
        shape = tuple(2 if size == 1 else size for size in shape)
        is_head = name in ("lm_head.weight", "embed_out.weight") and head == "int8"
        if not is_head and (len(shape) < 2 or "layers" not in name):
            tensors.append((name, dtype, shape))
        elif scheme == "int4" and not is_head:
            tensors += [(name, U4, shape), (name + ".scales", F16, (shape[0], 1)), (name + ".zeros", U8, (shape[0], 1))]
        else:
            tensors += [(name, I8 if is_head else q, shape), (name + ".scales", F32, shape[:1])]
    config = {"model": model_config(family, ffn_size=2, **model),
              "quantization": {"scheme": scheme, "group": 128 if scheme == "int4" else 0, "head": head}}
    return described(MODEL, LLAMA if family == "llama" else NEOX, config, tensors)


def llama_model(**changes: Any) -> bytes:
    return described(MODEL, LLAMA, {"model": model_config("llama"), "made_by": "seed"}, llama_tensors(), **changes)


def state(**changes: object) -> bytes:
    training = {"step": 4, "updates": 4, "windows": 8, "micro_steps": 4, "skipped": 0, "transient": 0, "loss": 1.5,
                "val_loss": None, "spikes": {"observed": 4, "mean": 1.0, "variance": 0.25}} | changes
    run = {"settings": {"lr": 0.5, "seed": 1}, "steps": 8, "data": [{"tokens": 9}], "device": "cpu", "version": "seed",
           "world_size": 1}
    return described(STATE, LLAMA, {"model": model_config("llama"), "run": run, "training": training},
                     llama_tensors("moment1.") + llama_tensors("moment2."))


# ---- one function a target, name -> bytes -----------------------------------------------------------------------------


def tensor_file() -> dict[str, bytes]:
    scalar = [("a", F32, ()), ("b", U8, (3,)), ("empty", F16, (0, 4)), ("long", I64, (2, 1, 1, 1, 1, 1, 1, 2))]
    fixture = (ROOT / "test/fixtures/tensor_file/edge.bin").read_bytes()
    seeds = {
        "llama": llama_model(),
        "neox": described(MODEL, NEOX, {"model": model_config("gpt_neox")}, neox_tensors()),
        "tokenizer": described(MODEL, LLAMA, {"model": model_config("llama")},
                               [*llama_tensors(dtype=F16), ("tokenizer.json", U8, (40,))]),
        "tied": described(MODEL, LLAMA, {"model": model_config("llama", tied_embeddings=True)}, llama_tensors()[:-1]),
        "llama-int4": quantized("llama", "int4"),
        "llama-int8": quantized("llama", "int8", "int8"),
        "neox-fp8": quantized("gpt_neox", "fp8"),
        "odd-u4": described(DUMP, NONE, {}, [("a", U4, (2, 3))]),
        "state": state(),
        "dump": described(DUMP, NONE, {"dump": {}}, scalar),
        "none": described(DUMP, NONE, {}, []),
        "rank-9": described(DUMP, NONE, {}, scalar, ((4096 + 8 + 260, b"\x09"),)),
        "kind-7": described(7, 9, {}, scalar),
        "past-end": described(DUMP, NONE, {}, scalar, ((4096 + 8 + 328, b"\xff" * 8),)),
        "cut": described(DUMP, NONE, {}, [("large", F32, (999, 999))]),
        "bad-hash": described(DUMP, NONE, {}, scalar, flags=6),
        "whole-file": b"\1" + fixture,
        "lfs": b"\3version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "web": b"\3<!DOCTYPE html>",
        "zip": b"\3PK\x03\x04",
        "gguf": b"\3GGUF" + bytes(20),
        "safetensors": b"\3" + struct.pack("<Q", 2) + b"{}",
    }
    dumps = ("dump", "none", "rank-9", "past-end", "cut", "bad-hash", "whole-file")
    asked = {"neox": 3, "neox-fp8": 3, "odd-u4": 2, "state": 1} | dict.fromkeys(dumps, 2)
    return {name: bytes([asked.get(name, 0)]) + seed for name, seed in seeds.items()}


def token_shard() -> dict[str, bytes]:
    def shard(dtype: int, ids: list[int], vocabulary: int = 64, end: int = 0, count: int | None = None,
              version: int = 1, flags: int = 0) -> bytes:
        head = b"\x89WTOK\r\n\x1a" + struct.pack("<IIQQQqQQ", version, dtype, len(ids) if count is None else count,
                                                  vocabulary, 7, end, 0, 0)
        return bytes([flags]) + head.ljust(256, b"\0") + struct.pack(f"<{len(ids)}{'H' if dtype == U16 else 'I'}", *ids)

    def documents(starts: list[int], learned: bytes, flags: int = 0) -> bytes:
        return shard(U16, list(range(40)), end=len(starts), version=2, flags=flags) + struct.pack(f"<{len(starts)}Q", *starts) + learned
    return {
        "documents": documents([0, 3, 39], b"\1\2\3\4\5"), "documents-order": documents([0, 39, 3], bytes(5)),
        "documents-late": documents([1], bytes(5)), "documents-cut": documents([0, 7], bytes(4)), "documents-far": documents([0, 2**63], bytes(5)),
        "u16": shard(U16, list(range(40))), "u32": shard(U32, list(range(40)), 128_256),
        "no-end": shard(U16, [1, 2, 3], end=-1), "id-64": shard(U16, [1, 64, 3]),
        "id-2-31": shard(U32, [1, 2**31, 3], 1_000_000), "one-token": shard(U16, [5]),
        "count-large": shard(U16, [5], count=2**63), "count-0": shard(U16, [], count=0),
        "version-3": shard(U16, [5], version=3), "bad-hash": shard(U16, [5], flags=3),
        "tensor-file": b"\3\x89WEFT\r\n\x1a" + bytes(60),
    }


def model_config_seeds() -> dict[str, bytes]:
    llama3 = {"type": "llama3", "theta": 500000.0, "rotary_dim": 2, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_positions": 8192}
    configs = {"llama": model_config("llama"), "neox": model_config("gpt_neox"),
               "llama3": model_config("llama", rope=llama3, eos_ids=[0, 1], bos_id=2, num_heads=4, num_kv_heads=2),
               "largest": model_config("llama", vocab_size=1_000_000, tokenizer_vocab=1_000_000, hidden_size=2**20,
                                       ffn_size=2**20, num_layers=1024, num_heads=1024, head_dim=1024,
                                       max_positions=2**24)}
    seeds = {name: json.dumps(config).encode() for name, config in configs.items()}
    return seeds | {"nested": b"[" * 70 + b"]" * 70, "twice": b'{"a":1,"a":2}',
                    "numbers": b"[1e400,-0,1E5,0.1,-7,18446744073709551615]", "not-utf8": b'["\xff"]',
                    "escapes": rb'{"\u00e9\ud83d\ude00":"\n\\\""}', "half-pair": rb'["\ud83d"]'}


def sentencepiece(name: str) -> bytes:
    """A fixture with so small a vocabulary that the fuzzer can hold on to it."""
    document = json.loads((ROOT / "test/fixtures/tokenizer" / f"{name}.tokenizer.json").read_text())
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a", "<0x41>"]
    document["model"].update(vocab={token: number for number, token in enumerate(tokens)}, merges=[["\u2581", "a"]])
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 3]
    return b"\1" + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def tokenizer_json() -> dict[str, bytes]:
    def seed(*, vocab: str = "", flags: int = 0, **changes: object) -> bytes:
        document = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                    "post_processor": None, "decoder": {"type": "ByteLevel"},
                    "model": {"type": "BPE", "vocab": "V", "merges": []}} | changes
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return bytes([flags]) + text.replace('"V"', "{@" + vocab + "}").encode()
    merges = {"type": "BPE", "vocab": "V", "merges": ["a b", ["ab", "c"]]}
    end = {"id": 243, "content": "<|end|>", "special": True, "normalized": False, "lstrip": True, "rstrip": True,
           "single_word": True}
    llama3 = (ROOT / "test/fixtures/tokenizer/llama3_style.tokenizer.json").read_text()
    pattern = json.loads(llama3)["pre_tokenizer"]["pretokenizers"][0]
    single = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "smallest": seed(),
        "merges": seed(vocab=',"ab":243,"abc":244', model=merges),
        "ignore-merges": seed(vocab=',"ab":243,"abc":244', model=merges | {"ignore_merges": True}),
        "added": seed(added_tokens=[end, {"id": 244, "content": "  "}]),
        "nfc": seed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
        "split": seed(pre_tokenizer={"type": "Sequence", "pretokenizers": [
            pattern, {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": False}]}),
        "bos": seed(added_tokens=[end], post_processor={"type": "Sequence", "processors": [
            {"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": single, "pair": [],
                                    "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [243], "tokens": []}}}]}),
        "id-2-31": seed(vocab=',"x":2147483648'), "hole": seed(vocab=',"xx":999'), "twice": seed(vocab=',"xx":0'),
        "unknown-merge": seed(model={"type": "BPE", "vocab": "V", "merges": ["q q"]}),
        "unigram": seed(model={"type": "Unigram", "vocab": "V", "merges": []}),
        "as-it-is": b"\1{}", "list": b"\1[]",
        **{name.removesuffix("_style"): sentencepiece(name) for name in ("llama2_style", "mistral_style", "metaspace_style")},
    }


def encode() -> dict[str, bytes]:
    texts = {"english": "It's 1234 o'clock; don't   they'LL?\r\n\n", "special": "a <|endoftext|> b<|begin_of_text|>",
             "marks": "e\u0301e\u0300\u0323\u1100\u1161\u11a8 \u212b", "scripts": "Привет 世界 \U0001f600\u200d\U0001f525 ١٢٣",
             "spaces": "  \t \u00a0\u3000   x    ", "long": "ab" * 60}
    seeds = {f"{name}-{flags}": bytes([flags]) + text.encode() for name, text in texts.items() for flags in (3, 4, 11, 15, 19, 23)}
    return seeds | {"not-utf8": b"\4\xff\xc0\xaf\xed\xa0\x80\xf0\x9f\x98", "nul": b"\4a\0b", "bom": b"\0\xef\xbb\xbfx"}


def checkpoint() -> dict[str, bytes]:
    manifest = json.dumps({"format": "weft checkpoint", "format_version": 1, "step": 4, "updates": 4, "windows": 8,
                           "settings_hash": "0" * 16, "config_hash": "0" * 16, "world_size": 1,
                           "files": [{"name": "model.bin"}, {"name": "state.bin"}]}).encode()

    def seed(text: bytes = manifest, model: bytes = llama_model(), training: bytes = state(), flags: int = 0) -> bytes:
        return struct.pack("<BH", flags, len(text)) + text + model + training
    return {
        "whole": seed(), "as-it-is": seed(flags=1), "list": seed(b"[]"), "no-files": seed(b"{}"),
        "step-5": seed(training=state(step=5, updates=5)), "updates": seed(training=state(updates=5)),
        "far": seed(training=state(windows=2**62)), "text": seed(training=state(loss="nan")),
        "spikes": seed(training=state(spikes={"observed": 2**63 - 1, "mean": 1e300, "variance": -1.0})),
        "levels": seed(training=state(spikes={"observed": 4, "quiet": 2, "loss_mean": 2.0, "loss_variance": 0.25,
                                              "log_norm_mean": 0.5, "log_norm_variance": 0.25})),
        "neox": seed(model=described(MODEL, NEOX, {"model": model_config("gpt_neox")}, neox_tensors())),
    }


def options() -> dict[str, bytes]:
    lines = {
        "kinds": (0, "--text=x", "--choice", "alpha", "--count=7", "--wide", "-9223372036854775808", "--share", "1e-3",
                  "--positive=1e308", "--flag", "--list=a", "--list", "--b"),
        "typo": (0, "--cuont", "3"), "missing": (0, "--text"), "twice": (0, "--count=1", "--count=2"),
        "flag-value": (0, "--flag=1"), "dashes": (0, "--", "--text"), "help": (0, "--help"), "numbers": (0, "--share=0x1"),
        "ids": (1, "1,2,999"), "id-range": (1, "1000"), "ids-odd": (1, "1,,2"),
        "faults": (1, "nan@step=3", "enospc@save=0", "io-error@save=18446744073709551615"),
    }
    return {name: bytes([int(line[0])]) + "\n".join(map(str, line[1:])).encode() for name, line in lines.items()}


def train_options() -> dict[str, bytes]:
    lines = {
        "train": ("--config=tiny", "--train=*.bin", "--out=run", "--steps=10", "--lr=1e-3"),
        "bench": ("--config", "d12", "--bench", "--json"),
        "wsd": ("--config=tiny", "--print-config", "--schedule=wsd", "--wsd-decay-fraction=0.5", "--steps=7"),
        "inject": ("--model=m", "--dry-run", "--train=x", "--debug-inject=kill@save=4096"),
        "batch": ("--config=tiny", "--print-config", "--batch-tokens=2049"), "both": ("--model=m", "--config=tiny"),
    }
    return {name: "\n".join(words).encode() for name, words in lines.items()}


def infer_options() -> dict[str, bytes]:
    lines = {
        "prompt": ("--model=m", "--prompt", "Once", "--max-tokens=8", "--temperature=0.7", "--top-p=0.9", "--stop=.", "--json"),
        "short": ("-m", "m", "-px", "-n16"), "interactive": ("-mm", "--interactive", "--stats", "--ignore-eos"),
        "perplexity": ("--model=m", "--perplexity=text", "--stride=64", "--context=128"),
        "bench": ("--model=m", "--bench", "--bench-contexts=5,60", "--decode=fused"),
        "random": ("--bench", "--random-model=pythia-70m", "--bench-layer"),
        "bench_batch": ("--random-model=pythia-70m", "--bench-batch=1,4,16", "--bench-prompt=64", "--kv-memory=8GB"),
        "compare": ("--model=m", "--compare=dump", "--dtype=fp16"),
        "serve": ("--model=m", "--serve", "[::1]:8000", "--max-queue=4", "--drain-seconds=0.5", "--api-key-file=k"),
        "batch": ("--model=m", "--batch=in", "--output=out", "--kv-memory=8GB", "--max-running=3"),
        "inject": ("--model=m", "--prompt-ids=1,2", "--debug-inject=nan@token=3"), "two": ("--model=m", "--prompt=", "--bench"),
    }
    return {name: "\n".join(words).encode() for name, words in lines.items()}


def completions_request() -> dict[str, bytes]:
    bodies: dict[str, object] = {
        "text": {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 7, "temperature": 0.5, "user": "me"},
        "texts": {"prompt": ["a", "b\u00e9"], "n": 2, "stop": ["x", "yz"], "seed": 11, "top_p": 0.9},
        "ids": {"prompt": [5, 6, 7], "logprobs": 5, "echo": True, "max_tokens": 0},
        "lists": {"prompt": [[5], [6, 7]], "top_k": 4, "min_p": 0.1, "ignore_eos": True, "stop": "x"},
        "stream": {"prompt": "", "stream": True, "stream_options": {"include_usage": True}, "best_of": 1},
        "neutral": {"prompt": "a", "suffix": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
                    "response_format": {"type": "text"}, "n": None},
        "refused": {"prompt": "a", "presence_penalty": 0.5, "n": 129}, "hints": {"prompt": "a", "cache_prompt": True, "seed": -1},
        "foreign": {"prompt": "a", "grammar": "x", "mirostat": 2, "n_predict": 5},
        "deep": {"prompt": [[[[[[[[1]]]]]]]]}, "numbers": {"prompt": [-1, 4294967296, 1.5]},
    }
    return {name: b"\0" + json.dumps(body).encode() for name, body in bodies.items()}


def chat_request() -> dict[str, bytes]:
    user = {"role": "user", "content": "Tell me a story."}
    answer: dict[str, object] = {"role": "assistant", "content": "<think>hm</think>\nOnce", "reasoning_content": "hm", "refusal": None, "tool_calls": []}
    parts = {"role": "developer", "name": "me", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "<|endoftext|>"}]}
    bodies: dict[str, tuple[int, object]] = {
        "chat": (0, {"model": "tiny", "messages": [user], "max_completion_tokens": 7, "temperature": 0.5, "user": "me"}),
        "turns": (0, {"messages": [parts, user, answer, user], "logprobs": True, "top_logprobs": 3, "n": 2, "stop": ["x"], "seed": -7}),
        "open": (0, {"messages": [user, answer], "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}),
        "stream": (0, {"messages": [user], "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        "tools": (0, {"messages": [user], "tools": [], "tool_choice": "none", "response_format": {"type": "json_object"}}),
        "image": (0, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        "refused": (0, {"messages": [{"role": "user", "content": "!"}, {"role": "tool", "content": "", "tool_call_id": "1"}]}),
        "empty": (0, {"messages": [{"role": "system", "content": ""}]}), "none": (4, {"messages": [user]}),
        "tokenize": (1, {"prompt": "a<|endoftext|>b", "add_special_tokens": False, "return_token_strs": True}),
        "tokenize-chat": (1, {"messages": [parts, user], "add_generation_prompt": False}),
        "detokenize": (2, {"tokens": [0, 5, 6, 70]}), "detokenize-none": (2, {"tokens": []}), "large-id": (2, {"tokens": [2**31, -1, 1e3]}),
    }
    return {name: bytes([flags]) + json.dumps(body).encode() for name, (flags, body) in bodies.items()}


def chat_format() -> dict[str, bytes]:
    """The formats of the vectors, with a few of their rules, and conversations."""
    seeds = {}
    for number, vector in enumerate(json.loads((ROOT / "test/fixtures/chat/vectors.json").read_text())):
        form = vector["format"]
        while len(text := json.dumps(form, separators=(",", ":")).encode()) > 1500:
            form["rules"] = form["rules"][::2]
        messages = b"".join(b"\0" + content.encode() for content in ("Be brief.", " Hi<|endoftext|>\n", "<think>a</think> b", ""))
        seeds[f"vector-{number}"] = bytes([number]) + text + messages
    chatml = {"version": 1, "order": "any", "kinds": [{"role": "system", "tests": {"empty": True}, "kind": "absent"}], "refusals": [], "end": ["<|im_end|>"],
              "thoughts": {"begin": "<think>", "end": "</think>"},
              "rules": [{"previous": before, "role": role, "parts": [f"<|endoftext|>{role}\n", {"from": "content", "steps": [["strip"]]}, "<|im_end|>\n"]}
                        for before in ("start", "system", "user", "assistant") for role in ("system", "user", "assistant")]
              + [{"previous": "user", "role": "generation", "parts": ["assistant\n<think>"]}, {"previous": "assistant", "role": "end", "parts": []}]}
    text = json.dumps(chatml, separators=(",", ":")).encode()
    for flags in (4, 5, 6):
        seeds[f"chatml-{flags}"] = bytes([flags]) + text + b"\0 Be brief.\0Hi\0<think>a</think>b\0more"
    kind = {"role": "user", "tests": {"starts": "a", "ends": "b", "contains": "c", "blank": True, "gone": [["before_last", "x"]]}, "refuse": "no"}
    steps = [["lstrip", "x"], ["rstrip"], ["after_first", "a"], ["after_last", "a"], ["before_first", "b"], ["delete", "c"], ["remove", "<", ">"]]
    rest = chatml | {"kinds": [kind], "order": "alternate", "rules": [
        {"previous": "start", "role": "user", "when": {"zone": "after", "last": False, "generation": True, "kind": "plain",
                                                       "previous_kind": "plain", "system": "none"}, "parts": [{"from": "content", "steps": steps}]}]}
    return seeds | {"rest": b"\1" + json.dumps(rest, separators=(",", ":")).encode() + b"\0b<xac>"}


# What no seed holds.
MORE_WORDS = {"options": ("--help", "--version", "1e400", "nan"), "train_options": (
    "--precision", "--on-nan", "--recompute", "--batch-tokens", "--seq-len", "--micro-batch", "--warmup-steps",
    "--max-minutes", "--compare", "--val", "--resume", "nan@step=", "io-error@save="),
    "infer_options": ("--prompt-file", "--special", "--seed", "--top-k", "--min-p", "--device", "--color", "--threads",
                      "--bench-timeline", "--allowed-host", "--log-requests", "--debug-inject", "hang@token=", "io-error@load"),
    "completions_request": ("1e999", "18446744073709551615", "-9223372036854775808", "\\ud800", "repetition_penalty",
                            "use_beam_search", "min_tokens", "stop_token_ids", "guided_json"),
    "chat_request": ("1e999", "\\ud800", "reasoning", "function_call", "annotations", "echo", "chat_template_kwargs"),
    "encode": ("'s", "'LL", "\r\n", "<|endoftext|>", "\u0301", "\u1100", "\u00a0", "\u200d", "\ufeff")}


def request_target() -> dict[str, bytes]:
    targets = ("GET /v1/models/a%2Fb?c=d", "GET http://localhost:8000/health", "OPTIONS *", "CONNECT a:443", "GET HTTPS://[::1]:1?x", "GET /%zz#a")
    return {str(i): target.replace(" ", "\0", 1).encode() for i, target in enumerate(targets)}


def dictionary(target: str, seeds: dict[str, bytes]) -> str:
    """libFuzzer's format: a quoted word a line, bytes as \\xNN."""
    words = {word for seed in seeds.values() for word in re.findall(rb"[A-Za-z_][A-Za-z0-9_.-]{2,}", seed)}
    words = {word for word in words if len(word) < 30} | {word.encode() for word in MORE_WORDS.get(target, ())}
    quoted = ("".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in word) for word in words)
    return "".join(f'"{word}"\n' for word in sorted(quoted))


def main() -> int:
    targets = {"tensor_file": tensor_file, "token_shard": token_shard, "model_config": model_config_seeds,
               "tokenizer_json": tokenizer_json, "encode": encode, "checkpoint": checkpoint, "options": options,
               "train_options": train_options, "infer_options": infer_options, "completions_request": completions_request,
               "request_target": request_target, "chat_request": chat_request, "chat_format": chat_format}
    shutil.rmtree(CORPUS, ignore_errors=True)
    total = 0
    for target, make in targets.items():
        (CORPUS / target).mkdir(parents=True)
        seeds = make()
        (CORPUS / f"{target}.dict").write_text(dictionary(target, seeds))
        for name, content in seeds.items():
            (CORPUS / target / name).write_bytes(content)
            total += len(content)
    print(f"{total} bytes in {sum(1 for _ in CORPUS.glob('*/*'))} seeds")
    return 0 if total <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
