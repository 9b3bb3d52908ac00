"""What tuning costs in quality: the perplexity of held-out answers before and after training all weights, LoRA, and QLoRA beside
weights in each format.

    python3 dev/bench/tuning_quality.py models/tiny-llama chats.jsonl --chat-format models/tiny-llama/chat_format.json

Each way tunes the same model on the same conversations in the same order, for as many epochs, at the learning rate that train_llama
chooses for it. Perplexities are those of `train_llama --eval` on all conversations that --val-fraction holds back: of the answers'
tokens alone. Prints a Markdown table. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMES = ("int8", "int4", "fp8")


class Failed(Exception):
    """A program ended with an error; the message is its last line."""


@dataclass(frozen=True)
class Way:
    name: str
    model: str  # the file in the directory of the run that is tuned, or beside which an adapter is
    adapter: bool


WAYS = [Way("all weights", "base", False), Way("LoRA", "base", True), *(Way(f"QLoRA, {scheme}", scheme, True) for scheme in SCHEMES)]


@dataclass(frozen=True)
class Result:
    before: float  # perplexity
    after: float
    trained: int  # parameters


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or [f"{command[0]}: exit code {done.returncode}"])[-1])
    return done.stdout


def prepare(options: argparse.Namespace, directory: Path) -> None:
    """The model as it is and in each format, and the conversations as shards."""
    for name in ("base", *SCHEMES):
        quantize = [] if name == "base" else ["--quantize", name]
        run(sys.executable, ROOT / "scripts/convert_hf.py", options.model, "-o", directory / f"{name}.bin", *quantize)
    chat_format = ["--chat-format", options.chat_format] if options.chat_format else []
    run(sys.executable, ROOT / "dev/prepare_data.py", "--chat", options.chats, "--model", directory / "base.bin", *chat_format,
        "--val-fraction", options.val_fraction, "-o", directory / "shards")


def measure(options: argparse.Namespace, directory: Path, way: Way) -> Result:
    out = directory / way.name.replace(", ", "-").replace(" ", "-")
    shards = directory / "shards"
    common = [options.binary, "--device", options.device, "--seq-len", options.seq_len, "--val", shards / "val_*.bin"]
    tuned = ["--model", directory / f"{way.model}.bin", *(["--lora-r", options.rank] if way.adapter else [])]

    def perplexity(*files: object) -> float:
        return json.loads(run(*common, *files, "--eval", "--json"))["perplexity"]

    before = perplexity(*tuned)
    run(*common, *tuned, "--train", shards / "train_*.bin", "--out", out, "--epochs", options.epochs, "--val-every", 0,
        "--sample-every", 0, "--save-every", 0, "--seed", options.seed)
    checkpoint = max(out.glob("step_????????"))
    after = perplexity(*tuned, "--adapter", checkpoint / "adapter.bin") if way.adapter else perplexity("--model", checkpoint / "model.bin")
    header = json.loads((out / "log.jsonl").read_text().splitlines()[0])
    return Result(before, after, header.get("trained_parameters", header["parameters"]))


def row(way: Way, result: Result) -> str:
    return f"| {way.name} | {result.trained / 1e6:.2f} M | {result.before:.3f} | {result.after:.3f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory of a model with gated MLPs")
    parser.add_argument("chats", type=Path, help="conversations as prepare_data.py --chat reads them")
    parser.add_argument("--chat-format", help="name or file, where the model has none")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="share of the conversations that is held back (default 0.1)")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--binary", type=Path, default=ROOT / "train_llama", help="default: that of this tree")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory for models and runs (default: a temporary one)")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            directory = options.keep or Path(temporary)
            if options.keep:
                directory.mkdir()
            prepare(options, directory)
            print("| tuned | parameters trained | perplexity before | after |\n|---|---|---|---|")
            for way in WAYS:
                print(row(way, measure(options, directory, way)), flush=True)
    except (Failed, OSError) as error:
        print(f"tuning_quality: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
