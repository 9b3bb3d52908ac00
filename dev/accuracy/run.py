#!/usr/bin/env python3
"""What fewer bits cost: trains a Llama and a GPT-NeoX on a generated corpus, quantises them, and compares them with 16 bits.

    .venv/bin/python dev/accuracy/run.py runs/accuracy                             everything: about 8 minutes on an H200
    .venv/bin/python dev/accuracy/run.py runs/accuracy llama evaluate-llama report   some stages
    .venv/bin/python dev/accuracy/run.py /tmp/dry --size dry --device cpu          a dry run on a CPU

Stages: corpus (text, tokenizer, shards); llama, llama-small (train_llama); neox, neox-small (train_neox.py, which needs torch);
evaluate-llama, evaluate-neox (scripts/convert_hf.py and infer_pythia --perplexity --against); cpu (some rows again on the CPU);
drafts (infer_pythia --draft, the small models for the large ones); report (tables as Markdown). What a stage has made is not made
again, so the same command goes on where it stopped. results.jsonl has a line for each measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import needs  # noqa: E402, F401, before the packages

import cli  # noqa: E402

STAGES = ("corpus", "llama", "evaluate-llama", "neox", "evaluate-neox", "cpu", "llama-small", "neox-small", "drafts", "report")
SEPARATOR = "\n<|endoftext|>\n"  # of the corpus
BETWEEN = "<|end_of_text|><|begin_of_text|>"  # tokens, as between the documents of a shard
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    ffn: int = 0       # of a Llama; a GPT-NeoX has 4 x hidden
    kv_heads: int = 0  # of a Llama
    steps: int = 0


@dataclass(frozen=True)
class Size:
    """One scale of the whole experiment."""

    documents: int
    vocabulary: int
    length: int       # of a training window and of the windows that are measured
    micro_batch: int
    held: int         # documents for the schemes
    part_held: int    # documents for the parts
    both_held: int    # documents for both devices
    calibration: int  # documents for GPTQ
    part_calibration: int  # and for GPTQ of a part
    prompts: int      # for drafts
    models: dict[str, Shape] = field(default_factory=dict)


SIZES = {
    "full": Size(320_000, 8192, 1024, 32, 380, 150, 12, 160, 64, 16, {
        "llama": Shape(16, 768, 2048, 4, 800), "neox": Shape(14, 768, steps=700),
        "llama-small": Shape(8, 384, 1024, 2, 700), "neox-small": Shape(6, 384, steps=500)}),
    "dry": Size(300, 1024, 128, 4, 4, 2, 2, 20, 10, 3, {
        "llama": Shape(2, 128, 256, 1, 12), "neox": Shape(2, 128, steps=12),
        "llama-small": Shape(1, 64, 128, 1, 8), "neox-small": Shape(1, 64, steps=8)}),
}


@dataclass(frozen=True)
class Variant:
    """One way to quantise: options of convert_hf.py. `part`: alone, stored as floats and compared in fp32."""

    scheme: str  # int8, fp8, int4, or int4 GPTQ
    part: str = ""
    head: bool = False

    @property
    def key(self) -> str:
        return "-".join([self.scheme.replace(" ", "-"), *([self.part] if self.part else []), *(["head8"] if self.head else [])])

    def options(self, calibration: Path) -> list[str]:
        chosen = ["--quantize", self.scheme.split()[0]]
        return (chosen + (["--gptq", str(calibration)] if "GPTQ" in self.scheme else [])
                + (["--head", "int8"] if self.head else []) + (["--only", self.part] if self.part else []))


SCHEMES = ("int8", "fp8", "int4", "int4 GPTQ")
PARTS = ("qkv", "output", "up", "down")
# What matters most first.
VARIANTS = ([Variant("int4 GPTQ"), Variant("int8"), Variant("int4"), Variant("fp8"), Variant("int8", head=True)]
            + [Variant(scheme, part) for scheme in ("int4", "int8", "fp8", "int4 GPTQ") for part in PARTS]
            + [Variant("int8", "head", head=True), Variant("int4 GPTQ", head=True)])
ON_BOTH = (Variant("int8"), Variant("fp8"), Variant("int4"), Variant("int4 GPTQ"))


class Run:
    def __init__(self, options: argparse.Namespace):
        self.options, self.work, self.size = options, options.work, SIZES[options.size]
        self.work.mkdir(parents=True, exist_ok=True)
        self.results = self.work / "results.jsonl"
        self.lock = threading.Lock()

    # ---- what stages share

    def call(self, command: Sequence[object], log: str, threads: int = 0) -> str:
        """Runs a command from the root; its stdout. What it says goes to a log."""
        environment = dict(os.environ)
        if threads:
            environment |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        with open(self.work / f"{log}.log", "ab") as errors:
            errors.write(("$ " + " ".join(map(str, command)) + "\n").encode())
            errors.flush()
            done = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, env=environment)
            errors.write(done.stdout)
        if done.returncode:
            tail = (self.work / f"{log}.log").read_text(errors="replace")[-2000:]
            raise cli.FileError(cli.INTERNAL, f"{log}: exit code {done.returncode}:\n{tail}")
        return done.stdout.decode()

    def script(self, name: str, *arguments: object, log: str, threads: int = 0) -> str:
        return self.call([sys.executable, ROOT / name, *arguments], log, threads)

    def measured(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.exists() else []

    def has(self, **keys: str) -> bool:
        return any(all(row.get(key) == value for key, value in keys.items()) for row in self.measured())

    def add(self, row: dict[str, Any]) -> None:
        with self.lock, open(self.results, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def text(self, name: str, source: str, count: int) -> Path:
        """The first `count` documents of a text of the corpus, with the tokens between them that the shards have."""
        path = self.work / name
        if not path.exists():
            with open(self.work / "corpus" / source) as file:
                path.write_text(BETWEEN.join(file.read(4000 * (count + 1)).split(SEPARATOR)[:count]))
        return path

    @property
    def device(self) -> list[str]:
        return ["--device", self.options.device] if self.options.device else []

    # ---- stages

    def corpus(self) -> None:
        folder = self.work / "corpus"
        if (folder / "train_00000.bin").exists():
            return
        self.script("dev/data/make_almanac.py", "-o", folder, "--documents", self.size.documents, "--held", self.size.held,
                    "--val", max(self.size.documents // 500, 20), log="corpus")
        # A tenth of the text has every word; documents of the beginning are as good as any.
        sample = self.work / "tokenizer.txt"
        with open(folder / "train.txt") as file:
            sample.write_text(file.read(max(self.size.documents * 50, 300_000)))
        self.script("dev/train_tokenizer.py", sample, "--vocab-size", self.size.vocabulary, "-o", self.work / "tokenizer.json", log="corpus")
        print(self.script("dev/prepare_data.py", folder / "train.txt", "--val", folder / "val.txt", "--tokenizer",
                          self.work / "tokenizer.json", "-o", folder, log="corpus").splitlines()[0])

    def train_llama(self, name: str) -> None:
        shape, folder, run = self.size.models[name], self.work / name, self.work / f"{name}-run"
        if folder.exists():
            return
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.size.vocabulary,
                  "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
                  "num_attention_heads": shape.hidden // 64, "num_key_value_heads": shape.kv_heads, "head_dim": 64,
                  "max_position_embeddings": self.size.length, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
                  "tie_word_embeddings": False}
        path = self.work / f"{name}.json"
        path.write_text(json.dumps(config))
        shards = self.work / "corpus"
        begin = time.monotonic()
        self.call(["./train_llama", "--config", path, "--train", shards / "train_*.bin", "--val", shards / "val_*.bin", "--out", run,
                   "--steps", shape.steps, "--micro-batch", self.size.micro_batch, "--seq-len", self.size.length, "--lr", "1e-3",
                   "--warmup-steps", min(100, shape.steps // 4), "--save-every", 0, "--sample-every", 0, "--val-every", 0,
                   "--max-minutes", self.options.train_seconds / 60, *self.device], name)
        self.trained(name, begin, run / "log.jsonl")
        model = sorted(run.glob("step_*/model.bin"))[-1]
        self.script("scripts/export_hf.py", model, "-o", folder, log=name)

    def train_neox(self, name: str) -> None:
        shape, folder = self.size.models[name], self.work / name
        if folder.exists():
            return
        begin = time.monotonic()
        self.script("dev/accuracy/train_neox.py", "--data", self.work / "corpus", "-o", folder, "--layers", shape.layers, "--hidden",
                    shape.hidden, "--seq-len", self.size.length, "--micro-batch", self.size.micro_batch, "--steps", shape.steps,
                    "--seconds", self.options.train_seconds, *self.device, log=name)
        self.trained(name, begin, self.work / f"{name}.log")

    def trained(self, name: str, begin: float, log: Path) -> None:
        print(f"{name}: {time.monotonic() - begin:.0f} s; {log.read_text(errors='replace').strip().splitlines()[-1][:300]}", flush=True)

    def converted(self, model: str, name: str, *options: object, threads: int = 0) -> Path:
        path = self.work / f"{model}-{name}.bin"
        if not path.exists():
            self.script("scripts/convert_hf.py", self.work / model, "-o", path, *options, log=f"convert-{model}-{name}", threads=threads)
        return path

    def base(self, model: str) -> Path:
        """In 16 bits: bf16 of train_llama's fp32 masters, fp16 of train_neox.py's."""
        return self.converted(model, "16", "--dtype", "bf16" if model.startswith("llama") else "fp16")

    def evaluate(self, model: str) -> None:
        self.base(model)
        texts = {False: self.text("held.txt", "held.txt", self.size.held), True: self.text("part.txt", "held.txt", self.size.part_held)}
        calibrations = {False: self.calibration(), True: self.text("calibration-part.txt", "train.txt", self.size.part_calibration)}
        left = [each for each in VARIANTS if not self.has(model=model, key=each.key, text=texts[bool(each.part)].name)]
        with ThreadPoolExecutor(self.options.jobs) as pool:
            for done in [pool.submit(self.measure, model, each, calibrations[bool(each.part)], texts[bool(each.part)], self.options.device)
                         for each in left]:
                done.result()

    def calibration(self) -> Path:
        return self.text("calibration.txt", "train.txt", self.size.calibration)

    def measure(self, model: str, variant: Variant, calibration: Path, text: Path, device: str) -> None:
        begin, threads = time.monotonic(), CORES if text.name == "both.txt" else max(1, 5 * CORES // (4 * self.options.jobs))
        file = self.converted(model, variant.key, "--dtype", "bf16" if model.startswith("llama") else "fp16",
                              *variant.options(calibration), threads=threads)
        converted = time.monotonic() - begin
        precise = ["--dtype", "fp32"] if variant.part and device != "cpu" else []
        answer = json.loads(self.call(
            ["./infer_pythia", "--model", file, "--perplexity", text, "--special", "--context", self.size.length, "--stride",
             self.size.length * 3 // 4, "--against", self.base(model), "--json", *precise, *(["--device", device] if device else [])],
            f"measure-{model}-{variant.key}", threads))
        self.add({"model": model, "key": variant.key, "scheme": variant.scheme, "part": variant.part, "head": variant.head,
                  "text": text.name, "device_option": device, "bytes": file.stat().st_size, "convert_seconds": round(converted, 1),
                  "seconds": round(time.monotonic() - begin - converted, 1), **answer})
        if variant not in ON_BOTH:
            file.unlink()

    def cpu(self) -> None:
        """The schemes on both devices, on a short text. The CPU computes in fp32, the GPU in the 16 bits of the file."""
        calibration, text = self.calibration(), self.text("both.txt", "held.txt", self.size.both_held)
        for model in self.trained_models():
            for variant in ON_BOTH:
                for device in dict.fromkeys(("cpu", self.options.device)):
                    if not self.has(model=model, key=variant.key, text=text.name, device_option=device):
                        self.measure(model, variant, calibration, text, device)

    def drafts(self) -> None:
        """The small model drafts for the large one; each prompt is the first third of a held document, one sequence at a time."""
        documents = self.text("held.txt", "held.txt", self.size.held).read_text().split(BETWEEN)[:self.size.prompts]
        requests = self.work / "prompts.jsonl"
        requests.write_text("".join(json.dumps({"id": i, "prompt": document[:len(document) // 3], "max_tokens": self.size.length // 8}) + "\n"
                                    for i, document in enumerate(documents)))
        for model in self.trained_models("-small"):
            for key, extra in (("plain", []), ("draft", ["--draft", self.base(f"{model}-small")]), ("lookup", ["--lookup", "5"])):
                if self.has(model=model, key=key):
                    continue
                answers, log = self.work / f"answers-{model}-{key}.jsonl", f"drafts-{model}-{key}"
                answers.unlink(missing_ok=True)
                self.call(["./infer_pythia", "--model", self.base(model), "--batch", requests, "--output", answers, "--max-running", 1, *extra,
                           *self.device], log)
                said = [line for line in (self.work / f"{log}.log").read_text(errors="replace").splitlines() if line.startswith("answered")]
                ids = [answer.get("ids") for answer in map(json.loads, answers.read_text().splitlines())]
                self.add({"model": model, "key": key, "prompts": len(ids), "report": said[-1], "ids": ids})

    def trained_models(self, also: str = "") -> list[str]:
        return [model for model in ("llama", "neox") if (self.work / model).exists() and (self.work / (model + also)).exists()]

    def report(self) -> None:
        text = tables(self.measured())
        (self.work / "report.md").write_text(text)
        print(text)

    def stage(self, name: str) -> None:
        begin = time.monotonic()
        kind, _, rest = name.partition("-")
        if kind == "evaluate":
            self.evaluate(rest)
        elif kind in ("llama", "neox"):
            (self.train_llama if kind == "llama" else self.train_neox)(name)
        else:
            getattr(self, name)()
        print(f"== {name}: {time.monotonic() - begin:.1f} s", flush=True)


# ---- tables ----------------------------------------------------------------------------------------------------------


def change(row: dict[str, Any]) -> str:
    """Of the perplexity, in percent, with its standard error."""
    difference, error = row["mean_nll"] - row["mean_nll_against"], row["nll_difference_standard_error"]
    return f"{100 * math.expm1(difference):+.2f} ± {100 * math.exp(difference) * error:.2f} %"


def tables(rows: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for model in ("llama", "neox"):
        whole = [row for row in rows if row["model"] == model and row.get("text") == "held.txt"]
        if whole:
            lines += [f"### {model}: {whole[0]['tokens']:,} tokens, {whole[0]['device']}, 16 bits: perplexity "
                      f"{math.exp(whole[0]['mean_nll_against']):.4f}", "",
                      "| | perplexity | change | divergence | same top token | file, MB | converted in |", "|---|---|---|---|---|---|---|"]
            for row in sorted(whole, key=lambda row: (SCHEMES.index(row["scheme"]), row["head"])):
                lines.append(f"| {row['scheme']}{', head int8' if row['head'] else ''} | {math.exp(row['mean_nll']):.4f} | {change(row)} | "
                             f"{row['kl_mean']:.6f} | {100 * row['same_top']:.2f} % | {row['bytes'] / 1e6:.1f} | {row['convert_seconds']:.0f} s |")
            lines.append("")
        both = [row for row in rows if row["model"] == model and row.get("text") == "both.txt"]
        for row in both:
            lines.append(f"{model}, {row['key']}, {row['device']}: {row['tokens']} tokens, perplexity {math.exp(row['mean_nll']):.5f}, of 16 bits "
                         f"{math.exp(row['mean_nll_against']):.5f}, divergence {row['kl_mean']:.6f}")
        alone = {(row["scheme"], row["part"]): row for row in rows if row["model"] == model and row.get("part")}
        if alone:
            lines += [f"### {model}: a part alone, change of the perplexity and divergence", "",
                      "| | " + " | ".join((*PARTS, "head")) + " |", "|---" * (len(PARTS) + 2) + "|"]
            for scheme in SCHEMES:
                cells = [
                    f"{change(alone[scheme, part])}, {alone[scheme, part]['kl_mean']:.6f}" if (scheme, part) in alone else ""
                    for part in (*PARTS, "head")]
                lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
            lines.append("")
        drafted = {row["key"]: row for row in rows if row["model"] == model and "ids" in row}
        for key, row in drafted.items():
            same = sum(a == b for a, b in zip(row["ids"], drafted["plain"]["ids"])) if "plain" in drafted else 0
            lines.append(f"{model}, {key}: {same} of {row['prompts']} texts as without; {row['report']}")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="run.py")
    parser.add_argument("work", type=Path, metavar="DIR", help="where everything is made")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--size", choices=SIZES, default="full", help="dry: models of two layers that learn nothing")
    parser.add_argument("--jobs", type=cli.number_in(1, 64, int), default=max(1, CORES // 3), metavar="N",
                        help="measurements at the same time (default: one for 3 cores)")
    parser.add_argument("--train-seconds", type=cli.number_in(1, 1e6), default=300, metavar="X", help="most of each training (default 300)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: the GPU where there is one")
    options = parser.parse_args()
    for name in options.stages:
        if name not in STAGES:
            parser.error(f"got {name}, expected stages of {', '.join(STAGES)}")
    options.stages, options.work = options.stages or list(STAGES), options.work.resolve()
    return options


def main() -> int:
    options = arguments()
    run = Run(options)
    for name in options.stages:
        run.stage(name)
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
