"""The speed of decoding at batch 1: infer_pythia and its baselines, in one run on one GPU.

    make bench                                             with the training benchmark; or: python3 dev/bench/decode.py
    python3 dev/bench/decode.py --only pythia-2.8b         one size
    python3 dev/bench/decode.py --no-baseline --decode fused   weft alone, one way of decoding

All sides run random weights and decode 64 tokens greedily after each prompt; the median of a token is reported. Pythias in fp16
after prompts of 64 to 2,000 ids, beside PyTorch; Llamas in bf16 after prompts of 64 to 131,000, beside vLLM. "of read" is the
share of what a plain read reaches on this GPU, measured by infer_pythia in the same run; bytes are weights and K/V cache. A
baseline is left out, and said to be, where torch or vLLM is missing. Prints tables and writes build/bench_decode.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Table:
    models: list[str]
    dtype: str
    contexts: list[int]
    decodes: list[str]
    peer: str
    package: str  # of the peer
    program: str
    baselines: list[str]


TABLES = [
    Table(["pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b"], "fp16", [64, 1024, 2000],
          ["fused", "graph", "reference"], "PyTorch", "torch", "decode_baseline.py", ["eager", "graph", "compile"]),
    # 64 tokens more fit into Llama 3.1's 131,072 positions
    Table(["llama3.1-8b", "llama3.2-1b"], "bf16", [64, 8192, 32768, 131000], ["auto", "fused", "graph"], "vLLM",
          "vllm", "vllm_baseline.py", ["offline"]),
]
MODELS = [model for table in TABLES for model in table.models]
DECODES = ["auto", "fused", "graph", "reference"]
BASELINES = [name for table in TABLES for name in table.baselines]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def weft(table: Table, model: str, decode: str) -> dict[str, Any] | str:
    command = [str(ROOT / "infer_pythia"), "--device", "cuda", "--dtype", table.dtype, "--random-model", model, "--decode",
               decode, "--bench", "--bench-contexts", ",".join(map(str, table.contexts)), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return json.loads(result.stdout) if result.returncode == 0 else last_line(result.stderr)


def baseline(table: Table, model: str, mode: str) -> dict[int, dict[str, Any]] | str:
    """By context."""
    if importlib.util.find_spec(table.package) is None:
        return f"{table.peer} is not installed"
    command = [sys.executable, str(ROOT / "dev/bench" / table.program), "--model", model, "--mode", mode, "--contexts",
               *map(str, table.contexts)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return last_line(result.stderr)
    return {line["context"]: line for line in lines}


def tell(row: dict[str, Any]) -> None:
    """A row as soon as it is there: the table comes minutes later."""
    what = " / ".join(cell(row, context, "ms") for context in row["contexts"]) if "contexts" in row else row["result"]
    print(f"{row['model']}, {row['program']} {row['mode']}: {what}", file=sys.stderr, flush=True)


def rows_of(table: Table, model: str, decodes: list[str], baselines: list[str]) -> list[dict[str, Any]]:
    """One row a program and mode: what there is to say of each context, or why there is nothing."""
    rows: list[dict[str, Any]] = []
    for decode in decodes:
        result = weft(table, model, decode)
        row: dict[str, Any] = {"model": model, "program": "weft", "mode": decode, "result": result}
        if not isinstance(result, str):
            row["contexts"] = {point["prompt_tokens"]: {"ms": point["itl_ms_p50"],
                                                        "share": point["share_of_read_ceiling"],
                                                        "prompt_ms": point["ttft_ms"]}
                               for point in result["contexts"]}
        rows.append(row)
        tell(row)
    for mode in baselines:
        theirs = baseline(table, model, mode)
        row = {"model": model, "program": table.peer, "mode": mode, "result": theirs}
        if not isinstance(theirs, str):
            row["contexts"] = {context: {"ms": point["ms"], "prompt_ms": point.get("prompt_ms")}
                               for context, point in theirs.items() if "error" not in point}
        rows.append(row)
        tell(row)
    return rows


def cell(row: dict[str, Any], context: int, what: str) -> str:
    point = row["contexts"].get(context, {})
    value = point.get(what)
    if value is None:
        return ""
    if what != "ms":
        return f"{value:.2f}"
    share = f" ({100 * point['share']:.1f} %)" if "share" in point else ""
    return f"{value:.3f}{share}"


def printed(contexts: list[int], rows: list[dict[str, Any]]) -> str:
    lines = ["| model | program | " + " | ".join(f"ms a token at {c} (of read)" for c in contexts) + " | " +
             " | ".join(f"prompt of {c}, ms" for c in contexts[1:]) + " |", "|---" * (2 * len(contexts) + 1) + "|"]
    for row in rows:
        name = f"{row['program']} {row['mode']}"
        if "contexts" not in row:
            lines.append(f"| {row['model']} | {name} | {row['result']} |" + " |" * (2 * len(contexts) - 2))
            continue
        cells = [cell(row, c, "ms") for c in contexts] + [cell(row, c, "prompt_ms") for c in contexts[1:]]
        lines.append(f"| {row['model']} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, metavar="NAME", default=MODELS, help=", ".join(MODELS))
    parser.add_argument("--decode", nargs="+", choices=DECODES, default=DECODES)
    parser.add_argument("--baseline", nargs="+", choices=BASELINES, default=BASELINES)
    parser.add_argument("--no-baseline", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for table in TABLES:
        own: list[dict[str, Any]] = []
        for model in (m for m in table.models if m in options.only):
            own += rows_of(table, model, [d for d in table.decodes if d in options.decode],
                           [] if options.no_baseline else [b for b in table.baselines if b in options.baseline])
        if own:
            print(printed(table.contexts, own), end="\n\n")
        rows += own
    target = ROOT / "build/bench_decode.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any("contexts" not in row for row in rows if row["program"] == "weft") else 0


if __name__ == "__main__":
    import needs_gpu
    needs_gpu.by_program(ROOT / "infer_pythia")
    sys.exit(main())
