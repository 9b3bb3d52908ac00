#!/usr/bin/env python3
"""lm_eval through weft's server against lm_eval with PyTorch, on three tasks made here, request by request.

    python dev/accuracy/lm_eval_tasks.py models/tiny-llama models/tiny-pythia

Needs lm-eval[api], transformers and torch, on a CPU, beside the packages of scripts/requirements.txt, and a built infer_pythia. Each model
is converted and served, and scored as `hf` (fp32) and as `local-completions`, with ids, and with texts where the tokenizer puts no token in front of one: lm_eval
does not count it. Prints a row for each model, way and task:
requests, the largest difference of a log-likelihood, and how many greedy flags and chosen answers differ. Exit code 1 unless all log-likelihoods
agree within 1e-4 and all else is equal.

The tasks are about stories of dev/data/make_stories.py. `ending`: which of four last sentences, each with the end of the text behind it. `stops`: whether a
story is over, which is one token, or goes on with another one. `story`: the log-likelihood of whole stories, from nothing before them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "data"))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from storybook.plots import tell  # noqa: E402

TOLERANCE = 1e-4


def documents(count: int, end: str) -> dict[str, list[dict[str, Any]]]:
    """The documents of each task, of `count` stories. `end`: the name of the token that ends a text."""
    stories = [tell(7, index) for index in range(count)]
    # Without the last sentence, that sentence with the white space before it.
    parts = [re.fullmatch(r"(.*[.!?\"])(\s+[^.!?\"]*[.!?\"]+)", story, re.S) for story in stories]
    split = [(match[1], match[2]) for match in parts if match]
    endings = [last for _, last in split]
    return {
        "ending": [{"text": text, "choices": [endings[(i + k * k) % len(endings)] + end for k in range(4)], "label": 0}
                   for i, (text, _) in enumerate(split)],
        "stops": [{"text": text, "choices": [end, last], "label": label}
                  for text, last in split for text, last, label in ((text, last, 1), (text + last, " Then", 0))],
        "story": [{"text": story + end} for story in stories],
    }


def write_tasks(folder: Path, count: int, end: str) -> list[dict[str, Any]]:
    """Their configurations for lm_eval."""
    tasks = []
    for name, rows in documents(count, end).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task: dict[str, Any] = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}",
                                "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        if name == "story":
            task |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                     "metric_list": [{"metric": "bits_per_byte"}]}
        else:
            task |= {"output_type": "multiple_choice", "doc_to_target": "label", "doc_to_choice": "choices", "target_delimiter": "",
                     "metric_list": [{"metric": "acc"}]}
        tasks.append(task)
    return tasks


def scores(model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """For each task and document the answers to its requests: (log-likelihood, greedy), or the first alone."""
    import lm_eval

    done = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=[dict(task) for task in tasks], bootstrap_iters=0, log_samples=True)
    assert done is not None
    return {name: [[one[0] for one in sample["resps"]] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for name, samples in done["samples"].items()}


def compare(wanted: list[list[Any]], got: list[list[Any]]) -> tuple[int, float, int, int]:
    """Requests, the largest difference, greedy flags that differ, chosen answers that differ."""
    assert [len(one) for one in wanted] == [len(one) for one in got]
    pairs = [(a, b) if isinstance(a, (list, tuple)) else ((a, None), (b, None)) for one, other in zip(wanted, got) for a, b in zip(one, other)]
    farthest = max(abs(float(a[0]) - float(b[0])) for a, b in pairs)
    flags = sum(a[1] is not None and bool(a[1]) != bool(b[1]) for a, b in pairs)

    def chosen(answers: list[Any]) -> int:
        return max(range(len(answers)), key=lambda i: float(answers[i][0]) if isinstance(answers[i], (list, tuple)) else 0.0)
    return len(pairs), farthest, flags, sum(chosen(one) != chosen(other) for one, other in zip(wanted, got))


def puts_token_in_front(url: str) -> bool:
    body = json.dumps({"prompt": ""}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["count"] > 0


def check(source: Path, folder: Path, count: int) -> bool:
    file = folder / f"{source.name}.bin"
    subprocess.run([sys.executable, ROOT / "scripts/convert_hf.py", source, "-o", file], check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen([ROOT / "infer_pythia", "--model", file, "--device", "cpu", "--special", "--serve", "127.0.0.1:0"],
                               stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(line.split()[-1] for line in process.stderr if line.startswith("ready: "))
        end = json.loads((source / "tokenizer_config.json").read_text())["eos_token"]
        length = json.loads((source / "config.json").read_text())["max_position_embeddings"]
        tasks = write_tasks(folder, count, end)
        # Its cache of logits takes a request for one of another context if both have the same ids but for the last.
        wanted = scores("hf", {"pretrained": str(source), "dtype": "float32", "device": "cpu", "add_bos_token": False, "max_length": length,
                               "logits_cache": False}, tasks)
        good = True
        ways = [("ids", True)] if puts_token_in_front(url) else [("ids", True), ("texts", False)]
        for way, tokenized in ways:
            served = {"base_url": f"{url}/v1/completions", "model": source.name, "tokenized_requests": tokenized, "batch_size": 8,
                      "max_length": length}
            for name, answers in scores("local-completions", served, tasks).items():
                requests, farthest, flags, choices = compare(wanted[name], answers)
                good = good and farthest <= TOLERANCE and flags == 0 and choices == 0
                print(f"| {source.name} | {way} | `{name}` | {requests} | {farthest:.1e} | {flags} | {choices} |", flush=True)
        return good
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="lm_eval through weft's server against lm_eval with PyTorch.")
    parser.add_argument("--stories", type=int, default=40, help="of which the tasks are made (default 40)")
    parser.add_argument("models", nargs="+", type=Path, metavar="DIR", help="a Hugging Face directory")
    options = parser.parse_args()
    print("| model | prompts | task | requests | largest difference | greedy flags that differ | choices that differ |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        return 0 if all([check(model, Path(folder), options.stories) for model in options.models]) else 1


if __name__ == "__main__":
    sys.exit(main())
