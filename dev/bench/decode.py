"""The speed of decoding at batch 1: infer_pythia and its PyTorch baseline, in one run on one GPU.

    make bench                                             with the training benchmark; or: python3 dev/bench/decode.py
    python3 dev/bench/decode.py --only pythia-2.8b         one size
    python3 dev/bench/decode.py --no-baseline --decode fused   weft alone, one way of decoding

Both sides run random fp16 weights of the Pythia shapes, decode 64 tokens greedily after prompts of 64, 1,024 and 2,000 ids,
and report the median of a token. "of read" is the share of what a plain read reaches on this GPU, measured by infer_pythia
in the same run; bytes are weights and K/V cache. The baseline is left out, and said to be, where torch is missing. Prints tables
and writes build/bench_decode.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ["pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b"]
CONTEXTS = [64, 1024, 2000]
DECODES = ["fused", "graph", "reference"]
BASELINES = ["eager", "graph", "compile"]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def weft(model: str, decode: str) -> dict[str, Any] | str:
    command = [str(ROOT / "infer_pythia"), "--device", "cuda", "--dtype", "fp16", "--random-model", model, "--decode",
               decode, "--bench", "--bench-contexts", ",".join(map(str, CONTEXTS)), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return json.loads(result.stdout) if result.returncode == 0 else last_line(result.stderr)


def baseline(model: str, mode: str) -> dict[int, dict[str, Any]] | str:
    """By context."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    command = [sys.executable, str(ROOT / "dev/bench/decode_baseline.py"), "--model", model, "--mode", mode, "--contexts",
               *map(str, CONTEXTS)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return last_line(result.stderr)
    return {line["context"]: line for line in lines}


def tell(row: dict[str, Any]) -> None:
    """A row as soon as it is there: the table comes minutes later."""
    what = " / ".join(cell(row, context, "ms") for context in CONTEXTS) if "contexts" in row else row["result"]
    print(f"{row['model']}, {row['program']} {row['mode']}: {what}", file=sys.stderr, flush=True)


def rows_of(model: str, decodes: list[str], baselines: list[str]) -> list[dict[str, Any]]:
    """One row a program and mode: what there is to say of each context, or why there is nothing."""
    rows: list[dict[str, Any]] = []
    for decode in decodes:
        result = weft(model, decode)
        row: dict[str, Any] = {"model": model, "program": "weft", "mode": decode, "result": result}
        if not isinstance(result, str):
            row["contexts"] = {point["prompt_tokens"]: {"ms": point["itl_ms_p50"],
                                                        "share": point["share_of_read_ceiling"],
                                                        "prompt_ms": point["ttft_ms"]}
                               for point in result["contexts"]}
        rows.append(row)
        tell(row)
    for mode in baselines:
        theirs = baseline(model, mode)
        row = {"model": model, "program": "PyTorch", "mode": mode, "result": theirs}
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


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | program | " + " | ".join(f"ms a token at {c} (of read)" for c in CONTEXTS) + " | tokens/s at "
             f"{CONTEXTS[0]} | prompt of {CONTEXTS[-1]}, ms |", "|---" * (len(CONTEXTS) + 4) + "|"]
    for row in rows:
        name = f"{row['program']} {row['mode']}"
        if "contexts" not in row:
            lines.append(f"| {row['model']} | {name} | {row['result']} |" + " |" * (len(CONTEXTS) + 1))
            continue
        first = row["contexts"].get(CONTEXTS[0])
        speed = f"{1000 / first['ms']:.1f}" if first else ""
        cells = [cell(row, c, "ms") for c in CONTEXTS] + [speed, cell(row, CONTEXTS[-1], "prompt_ms")]
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
    for model in options.only:
        rows += rows_of(model, options.decode, [] if options.no_baseline else options.baseline)
    print(table(rows))
    target = ROOT / "build/bench_decode.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any("contexts" not in row for row in rows if row["program"] == "weft") else 0


if __name__ == "__main__":
    import needs_gpu
    needs_gpu.by_program(ROOT / "infer_pythia")
    sys.exit(main())
