"""Finding needles in a haystack with keys and values in fp8 beside those of the device's type.

    python3 dev/bench/needle.py                                                              on a CPU: minutes
    python3 dev/bench/needle.py --length 4096 --steps 3000 --batch 64 --device cuda          and so up to 32768

Trains a small Llama on documents of random words in which facts lie scattered, each one token that stands for a key and its
value. At the end come the keys, and the model learns to answer each with its value. Then it answers new documents of that length with both --kv-dtype, greedily:
prints a Markdown table of right answers by where in the document the needle lies, and how many answers differ. A model that has not learnt the task
says nothing about fp8: unless half of the answers in the device's type are right (one of 16 is by chance) the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from token_shard import ShardWriter  # noqa: E402

START, FIRST_KEY, KEYS, VALUES = 0, 1, 16, 16
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FACT = FIRST_VALUE + VALUES  # of key k and value v: FIRST_FACT + VALUES k + v
FIRST_WORD, VOCABULARY = FIRST_FACT + KEYS * VALUES, 512
FACTS = 8  # of a document, with different keys, each asked for
DTYPES = ("auto", "fp8")
PARTS = 4  # of a document, in which the table counts


class Failed(Exception):
    """A program ended with an error; the message is its last line."""


@dataclass(frozen=True)
class Document:
    ids: np.ndarray  # [length + 1]: START, the haystack, then key and value of each fact
    places: np.ndarray  # of the facts, in the order in which they are asked for


def document(random: np.random.Generator, length: int) -> Document:
    haystack = length + 1 - 2 * FACTS
    ids = random.integers(FIRST_WORD, VOCABULARY, length + 1)
    ids[0] = START
    places = 1 + random.choice(haystack - 1, FACTS, replace=False)
    keys, values = random.choice(KEYS, FACTS, replace=False), random.integers(0, VALUES, FACTS)
    ids[places] = FIRST_FACT + VALUES * keys + values
    ids[haystack::2] = FIRST_KEY + keys
    ids[haystack + 1::2] = FIRST_VALUE + values
    return Document(ids, places)


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or [f"{command[0]}: exit code {done.returncode}"])[-1])
    return done.stdout


def write_shard(path: Path, random: np.random.Generator, length: int, documents: int) -> None:
    learned = np.zeros(length + 1, bool)
    learned[length + 1 - 2 * FACTS + 1::2] = True
    shard = ShardWriter(path, VOCABULARY, 0)
    for _ in range(documents):
        shard.write_document(document(random, length).ids, learned)
    shard.close()


def model_config(length: int) -> dict:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
            "intermediate_size": 256, "max_position_embeddings": length + 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": START, "eos_token_id": START}


def train(options: argparse.Namespace, directory: Path) -> Path:
    """The trained model's file."""
    random = np.random.default_rng(options.seed)
    rows = options.batch * options.steps
    write_shard(directory / "train.bin", random, options.length, min(rows, options.documents))
    write_shard(directory / "val.bin", random, options.length, 64)
    (directory / "config.json").write_text(json.dumps(model_config(options.length)))
    run(ROOT / "train_llama", "--config", directory / "config.json", "--train", directory / "train.bin", "--val",
        directory / "val.bin", "--out", directory / "run", "--seq-len", options.length, "--micro-batch",
        min(options.batch, options.micro_batch), "--batch-tokens", options.batch * options.length, "--steps", options.steps,
        "--lr", options.lr, "--warmup-steps", options.steps // 20, "--device", options.device, "--val-every", options.steps,
        "--sample-every", 0, "--save-every", options.steps, "--seed", options.seed)
    return max((directory / "run").glob("step_*/model.bin"))


def answers(options: argparse.Namespace, model: Path, requests: Path, kv_dtype: str) -> list[int]:
    output = run(ROOT / "infer_pythia", "--model", model, "--batch", requests, "--output", "-", "--max-tokens", 1,
                 "--ignore-eos", "--kv-dtype", kv_dtype, "--device", options.device)
    by_id = {line["id"]: line["ids"][0] for line in map(json.loads, output.splitlines())}
    return [by_id[str(i)] for i in range(len(by_id))]


def measure(options: argparse.Namespace, model: Path, directory: Path) -> bool:
    """Prints the table; whether the task has been learnt."""
    random = np.random.default_rng(options.seed + 1)
    asked = [document(random, options.length) for _ in range(options.trials)]
    prompt_end = options.length + 1 - 2 * FACTS + 1  # behind the first key that is asked for
    requests = directory / "requests.jsonl"
    requests.write_text("".join(json.dumps({"id": str(i), "prompt_ids": each.ids[:prompt_end].tolist()}) + "\n"
                                for i, each in enumerate(asked)))
    wanted = np.array([each.ids[prompt_end] for each in asked])
    part = np.array([int(each.places[0]) * PARTS // options.length for each in asked])
    given = {kv_dtype: np.array(answers(options, model, requests, kv_dtype)) for kv_dtype in DTYPES}
    print(f"| length {options.length} | " + " | ".join(f"part {i + 1} of {PARTS}" for i in range(PARTS)) + " | all |")
    print("|---" * (PARTS + 2) + "|")
    for kv_dtype, ids in given.items():
        right = ids == wanted
        cells = [f"{100 * right[part == i].mean():.1f} %" if (part == i).any() else "–" for i in range(PARTS)]
        print(f"| {kv_dtype} | " + " | ".join(cells) + f" | {right.sum()} of {len(asked)} |")
    print(f"\nother answers with fp8: {(given['auto'] != given['fp8']).sum()}")
    return bool((given["auto"] == wanted).mean() >= 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128, help="tokens of a document, at least 128 (default 128)")
    parser.add_argument("--steps", type=int, default=800, help="of training (default 800)")
    parser.add_argument("--batch", type=int, default=16, help="documents of a step (default 16)")
    parser.add_argument("--micro-batch", type=int, default=32, help="of them at once (default 32)")
    parser.add_argument("--documents", type=int, default=20_000, help="different ones, at most (default 20000)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    parser.add_argument("--trials", type=int, default=400, help="documents that are asked about (default 400)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a model that an earlier run has trained for this length, in the place of training")
    parser.add_argument("--keep", type=Path, help="copy the trained model to this file")
    options = parser.parse_args()
    if options.length < 128:
        parser.error("--length: expected at least 128")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            model = options.model or train(options, directory)
            if options.keep:
                options.keep.write_bytes(model.read_bytes())
            return 0 if measure(options, model, directory) else 1
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
