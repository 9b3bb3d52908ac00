"""Finding needles in a haystack with keys and values in fp8 beside those of the device's type.

    python3 dev/bench/needle.py --lengths 128 512 2048                                       on a CPU: minutes
    python3 dev/bench/needle.py --lengths 4096 8192 16384 32768 --device cuda --dtype bf16 --batch-tokens 65536 --steps 300 --more-steps 200

Trains a small Llama on documents of random words in which facts lie scattered, each one token that stands for a key and its
value. At the end come the keys, and the model learns to answer each with its value: first in short documents, where a step is
cheap, then with a few steps at each greater length. At the lengths that are asked for it answers new documents with both
--kv-dtype, greedily: prints a Markdown table of right answers by where in the document the needle lies, and how many answers
differ. A model that has not learnt the task says nothing about fp8: unless half of the answers in the device's type are right
at every length (one of 16 is by chance) the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
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
FACTS = 16  # of a document, with different keys, each asked for
ASKED = 4  # of them in a measurement
GROWTH = 4  # from one length of training to the next
DTYPES = ("auto", "fp8")
MUON = 7  # times --lr: the rate of the matrices, which AdamW needs some ten times the steps for
PARTS = 4  # of a document, in which the table counts


class Failed(Exception):
    """A program ended with an error; the message is its last line."""


@dataclass(frozen=True)
class Documents:
    ids: np.ndarray  # [count, length + 1]: START, the haystack, then key and value of each fact
    places: np.ndarray  # [count, FACTS]: of the facts, in the order in which they are asked for


def haystack_end(length: int) -> int:
    return length + 1 - 2 * FACTS


def documents(random: np.random.Generator, length: int, count: int) -> Documents:
    """Each with one fact at a random place of each of FACTS equal parts of its haystack, asked for in a random order."""
    end = haystack_end(length)
    part = (end - 1) // FACTS
    ids = random.integers(FIRST_WORD, VOCABULARY, (count, length + 1), np.uint16)
    ids[:, 0] = START
    starts = np.tile(1 + part * np.arange(FACTS), (count, 1))
    places = random.permuted(starts, axis=1) + random.integers(0, part, (count, FACTS))
    keys = random.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)[:, :FACTS]
    values = random.integers(0, VALUES, (count, FACTS))
    np.put_along_axis(ids, places, (FIRST_FACT + VALUES * keys + values).astype(np.uint16), axis=1)
    ids[:, end::2] = FIRST_KEY + keys
    ids[:, end + 1::2] = FIRST_VALUE + values
    return Documents(ids, places)


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or [f"{command[0]}: exit code {done.returncode}"])[-1])
    return done.stdout


def write_shard(path: Path, random: np.random.Generator, length: int, count: int) -> None:
    learned = np.zeros(length + 1, bool)
    learned[haystack_end(length) + 1::2] = True
    shard = ShardWriter(path, VOCABULARY, 0)
    for ids in documents(random, length, count).ids:
        shard.write_document(ids, learned)
    shard.close()


def model_config(options: argparse.Namespace) -> dict:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
            "intermediate_size": 256, "max_position_embeddings": max(options.lengths) + 1, "rms_norm_eps": 1e-5,
            "rope_theta": options.theta, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": START,
            "eos_token_id": START}


def stages(options: argparse.Namespace) -> list[int]:
    """The lengths to train at: --first, then so many times it, up to the longest that is asked for, and each of these."""
    lengths, length = {options.first, *options.lengths}, options.first
    while (length := GROWTH * length) < max(options.lengths):
        lengths.add(length)
    return sorted(lengths)


def train(options: argparse.Namespace, directory: Path, length: int, model: Path | None) -> Path:
    """The file of a new model, or of `model` trained further at a greater length."""
    began = time.monotonic()
    batch = max(1, options.batch_tokens // length)
    steps, lr = (options.steps, options.lr) if model is None else (options.more_steps, options.more_lr)
    data, out = directory / f"{length}.bin", directory / f"run_{length}"
    write_shard(data, np.random.default_rng((options.seed, length)), length, min(batch * steps, options.documents))
    config = directory / "config.json"
    config.write_text(json.dumps(model_config(options)))
    run(ROOT / "train_llama", *(("--config", config) if model is None else ("--model", model)), "--train", data, "--out", out,
        "--seq-len", length, "--micro-batch", batch, "--steps", steps, "--optimizer", "muon", "--lr", lr, "--muon-lr",
        MUON * lr, "--warmup-steps", steps // 10, "--device", options.device, "--sample-every", 0, "--save-every", 0,
        "--seed", options.seed)
    data.unlink()
    losses = [entry["loss"] for entry in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "loss" in entry]
    print(f"length {length}: {steps} steps of {batch} documents, loss {np.mean(losses[-10:]):.3f}, "
          f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return max(out.glob("step_*/model.bin"))


def answers(options: argparse.Namespace, model: Path, requests: Path, kv_dtype: str) -> list[int]:
    output = run(ROOT / "infer_pythia", "--model", model, "--batch", requests, "--output", "-", "--max-tokens", 1,
                 "--ignore-eos", "--kv-dtype", kv_dtype, "--dtype", options.dtype, "--device", options.device)
    # Not by a reader of JSON: each answer repeats the ids of its prompt, tens of megabytes in all.
    found = [re.match(r'\{"id":"(\d+)",.*"ids":\[(\d+)\]', line) for line in output.splitlines()]
    by_id = {int(each[1]): int(each[2]) for each in found if each}
    return [by_id[i] for i in range(len(found))]


def measure(options: argparse.Namespace, model: Path, directory: Path, length: int) -> bool:
    """Prints the table; whether the task has been learnt."""
    asked = documents(np.random.default_rng((options.seed, length, 1)), length, options.trials)
    end = haystack_end(length)
    requests = directory / "requests.jsonl"
    with requests.open("w") as file:
        for i, ids in enumerate(asked.ids.tolist()):
            haystack = ",".join(map(str, ids[:end]))
            for question in range(ASKED):  # alone behind the haystack, whose keys and values all questions share
                key = ids[end + 2 * question]
                file.write(f'{{"id": "{ASKED * i + question}", "prompt_ids": [{haystack},{key}]}}\n')
    wanted = asked.ids[:, end + 1::2][:, :ASKED].ravel()
    part = asked.places[:, :ASKED].ravel() * PARTS // end
    given = {}
    for kv_dtype in DTYPES:
        began = time.monotonic()
        given[kv_dtype] = np.array(answers(options, model, requests, kv_dtype))
        print(f"length {length}: answers with {kv_dtype}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"| length {length} | " + " | ".join(f"part {i + 1} of {PARTS}" for i in range(PARTS)) + " | all |")
    print("|---" * (PARTS + 2) + "|")
    for kv_dtype, ids in given.items():
        right = ids == wanted
        cells = [f"{100 * right[part == i].mean():.1f} %" if (part == i).any() else "–" for i in range(PARTS)]
        print(f"| {kv_dtype} | " + " | ".join(cells) + f" | {right.sum()} of {wanted.size} |")
    print(f"\nother answers with fp8: {(given['auto'] != given['fp8']).sum()}\n", flush=True)
    return bool((given["auto"] == wanted).mean() >= 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128],
                        help="tokens of the documents that are asked about (default 128)")
    parser.add_argument("--first", type=int, default=128, help="the length to begin with, at least 128 (default 128)")
    parser.add_argument("--steps", type=int, default=200, help="at --first (default 200)")
    parser.add_argument("--more-steps", type=int, default=50, help="at each greater length (default 50)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of a step (default 2048)")
    parser.add_argument("--documents", type=int, default=50_000, help="different ones of a length, at most (default 50000)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate at --first (default 0.003)")
    parser.add_argument("--more-lr", type=float, default=1e-3, help="at each greater length (default 0.001)")
    parser.add_argument("--theta", type=float, default=1e9,
                        help="of RoPE: so large that most pairs hardly turn within a document (default 1e9)")
    parser.add_argument("--trials", type=int, default=100,
                        help=f"documents of a length, each asked about {ASKED} of its facts (default 100)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dtype", default="auto", help="of infer_pythia; a GPU needs bf16 or fp16 beside fp8 (default auto)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path,
                        help="a model that an earlier run has trained for these lengths, in the place of training")
    parser.add_argument("--keep", type=Path, help="copy the trained model to this file")
    options = parser.parse_args()
    if not 128 <= options.first <= min(options.lengths):
        parser.error("--first: expected at least 128 and at most the shortest of --lengths")
    with tempfile.TemporaryDirectory() as name:
        directory, model, learnt = Path(name), options.model, True
        try:
            for length in sorted(options.lengths) if options.model else stages(options):
                if not options.model:
                    model = train(options, directory, length, model)
                if length in options.lengths:
                    learnt &= measure(options, model, directory, length)
            if options.keep:
                options.keep.write_bytes(model.read_bytes())
            return 0 if learnt else 1
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
