#!/usr/bin/env python3
"""Fuzzing of the converter: convert_hf.py, whole, in this process, on small Hugging Face directories that are mutated.

    python3 test/python/fuzz_convert.py [--runs N] [--seed S]      a long run; the last line counts what came of it
    python3 test/python/fuzz_convert.py --runs 1 --seed S --keep DIR    one input again, left in DIR

Input number i of seed s depends on s + i alone. test_fuzz_convert.py has the short run of `make test`. What each input
demands: exit code 0 or 3, one printable error line, no exception, no warning that steers a terminal, processor time and
memory that a file of a few kilobytes justifies, no output left by a refusal, and an output that verifies otherwise.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import checkpoints as ck  # noqa: E402
import tensor_file  # noqa: E402

CPU_SECONDS = 1.0
GROWTH = 200 << 20  # of the greatest resident set over a whole run
NUMBERS = (0, 1, -1, 2, 7, 64, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e-320,
           1e300, float("inf"), float("nan"))
TEXTS = ("", "x", "llama", "gpt_neox", "gpt2", "F32", "F16", "BF16", "F64", "I8", "silu", "gelu", "linear", "yarn", "llama3",
         "../x", "/etc/passwd", "a" * 5000, "\x1b[31m", "\u0000", "\ud800", "\u202e", "\U0001f600", "model.safetensors",
         "__metadata__", "NFC", "ByteLevel", "4096")
KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "rotary_pct", "head_dim", "tie_word_embeddings", "attention_bias",
        "num_key_value_heads", "data_offsets", "dtype", "shape", "__metadata__", "factor", "type", "rope_type",
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "eos_token_id", "added_tokens", "vocab")
BITS = (b'{"', b'":', b"},", b"[[[[[[[[", b"]", b"null", b"NaN", b"1e999", b"-", b"\\u0000", b"\\ud800", b"\xff\xfe", b"\x00",
        b"9" * 400, b'"a":1,"a":2', b"\xef\xbb\xbf", b"{" * 80)


# ---- valid directories -----------------------------------------------------------------------------------------------


def llama3() -> dict:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}
    return ck.LLAMA | {"rope_scaling": scaling, "eos_token_id": [2, 3], "tie_word_embeddings": True}


def newer_keys() -> dict:
    config = dict(ck.LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    del config["rope_theta"]
    return config


def tokenizer(number: int) -> dict:
    made = ck.tokenizer_of(20)
    if number % 2:
        made["model"]["vocab"]["t0t1"] = 20
        made["model"]["merges"] = ["t0 t1"] if number == 1 else [["t0", "t1"]]
    return made


def valid_directories() -> list[dict[str, bytes]]:
    """File name -> content, of small models in every form that the converter reads."""
    made = []
    with tempfile.TemporaryDirectory() as place:
        for number, config in enumerate((ck.LLAMA, ck.GPT_NEOX, llama3(), newer_keys())):
            folder = Path(place) / str(number)
            ck.write_checkpoint(folder, config, tokenizer=tokenizer(number))
            if number % 2:
                (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2], "bos_token_id": 1}')
            if number == 3:
                weights = ck.weights_of(config)
                names = list(weights)
                ck.write_shards(folder, {f"model-0000{i + 1}-of-00002.safetensors":
                                         {name: weights[name] for name in names[i::2]} for i in (0, 1)})
            made.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    return made


# ---- mutation --------------------------------------------------------------------------------------------------------


def odd_value(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    return rng.choice((None, True, False, [], {}, [[]], [1, 2], [0, 2**63], {"a": {}}, [[[[[[]]]]]], [None] * 200))


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in items:
        found.append((value, key))
        places(member, found)
    return found


def mutate_json(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        all_places = places(value, [])
        if not all_places or rng.random() < 0.01:
            return odd_value(rng)
        container, key = rng.choice(all_places)
        action = rng.randrange(6)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[rng.choice(KEYS + TEXTS)] = container.pop(key)
        elif action == 2 and isinstance(container, dict):
            container[rng.choice(KEYS)] = odd_value(rng)
        elif action == 3:
            other, other_key = rng.choice(all_places)
            container[key] = copy.deepcopy(other[other_key]) if other is not container[key] else None
        elif action == 4 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
            container[key] = container[key] + rng.choice((-1, 1, 2, 0.5, 100))
        else:
            container[key] = odd_value(rng)
    return value


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        action = rng.randrange(5)
        if action == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif action == 1:
            out[at:at] = rng.choice(BITS)
        elif action == 2:
            del out[at:at + rng.choice((1, 2, 8, 100))]
        elif action == 3:
            out[at:at] = out[at:at + rng.choice((1, 8, 60))]
        else:
            del out[at:]
    return bytes(out)


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def mutate_file(rng: random.Random, name: str, data: bytes) -> bytes:
    if name.endswith(".json"):
        return as_json(mutate_json(rng, json.loads(data))) if rng.random() < 0.7 else mutate_bytes(rng, data)
    length = struct.unpack("<Q", data[:8])[0]
    header, values = data[8:8 + length], data[8 + length:]
    action = rng.randrange(10)
    if action == 0:
        claimed = rng.choice((0, 1, 7, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", claimed) + data[8:]
    if action == 1:
        return mutate_bytes(rng, data)
    if action == 2:
        return data[:8 + length] + mutate_bytes(rng, values)
    new = mutate_bytes(rng, header) if action < 5 else as_json(mutate_json(rng, json.loads(header)))
    return struct.pack("<Q", len(new)) + new + values


# ---- one input -------------------------------------------------------------------------------------------------------


def steers(character: str) -> bool:
    """Controls, format characters, separators of lines and paragraphs: what a message must never hold."""
    return character != "\n" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


class Fuzzer:
    """Runs inputs in `place`, an empty directory."""

    def __init__(self, place: Path):
        self.place, self.valid = place, valid_directories()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.memory = 0

    def write(self, seed: int) -> Path:
        rng = random.Random(seed)
        files = dict(rng.choice(self.valid))
        for name in rng.sample(sorted(files), k=min(len(files), rng.choice((1, 1, 1, 2)))):
            if rng.random() < 0.03:
                del files[name]
            else:
                files[name] = mutate_file(rng, name, files[name])
        folder = self.place / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    def run(self, seed: int) -> None:
        folder, output = self.write(seed), self.place / "out.bin"
        output.unlink(missing_ok=True)
        done = ck.run_script("convert_hf.py", folder, "-o", output)
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert all(line.startswith(("error: ", "warning: ")) for line in lines), done.stderr
        assert not any(steers(character) for character in done.stderr + done.stdout), done.stderr
        assert done.returncode in (0, 3), f"exit code {done.returncode}: {done.stderr}"
        assert len(errors) == (1 if done.returncode else 0), done.stderr
        assert done.seconds < CPU_SECONDS, f"{done.seconds:.1f} s"
        left = {path.name for path in self.place.iterdir()} - {"model"}
        if done.returncode == 0:
            assert left == {"out.bin"}, left
            file = tensor_file.read(output, expected="model")
            for name in file.tensors:
                file.bytes(name)  # verifies its hash
        else:
            assert not left, left
        self.outcomes["converted" if done.returncode == 0 else "refused"] += 1
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.memory = self.memory or memory
        assert memory - self.memory < GROWTH, f"{(memory - self.memory) >> 20} MB more than at the start"


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the converter.")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="work in this directory and leave the last input there")
    options = parser.parse_args()
    shared = Path("/dev/shm")
    place = options.keep or Path(tempfile.mkdtemp(prefix="weft_fuzz_", dir=shared if shared.is_dir() else None))
    place.mkdir(exist_ok=True)
    fuzzer = Fuzzer(place)
    findings = 0
    for seed in range(options.seed, options.seed + options.runs):
        try:
            fuzzer.run(seed)
        except Exception as problem:  # whatever it is, it is a finding
            findings += 1
            print(f"seed {seed}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            if findings == 20:
                break
    if options.keep is None:
        shutil.rmtree(place)
    print(f"{sum(fuzzer.outcomes.values())} inputs of seeds from {options.seed}: {dict(fuzzer.outcomes)}, "
          f"{findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
