"""What busy cores cost infer_pythia: its --bench or --bench-batch with as many busy loops as cores beside it, and without.

    .venv/bin/python dev/bench/busy_host.py [--loops N] [--turns 3] -- \\
        build/release/infer_pythia --bench --decode graph --random-model pythia-2.8b

Everything behind `--` is the command; it gets --json. It runs without and with the loops in turns, which are processes of normal
priority. Prints tokens/s of each turn, their medians, and what is lost. With --most-lost P the exit code is 1 where more than P percent are
lost anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def rates(command: list[str]) -> dict[str, float]:
    """tokens/s by what was measured."""
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]}: exit code {done.returncode}")
    measured = json.loads(done.stdout)
    if "points" in measured:
        return {f"{point['sequences']} sequence{'s' * (point['sequences'] != 1)}": point["decode_tokens_per_s"] for point in measured["points"]}
    if "tokens_per_s" not in measured:
        sys.exit(f"{command[0]}: its output has no tokens/s. Give it --bench or --bench-batch")
    return {"1 sequence": measured["tokens_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=len(os.sched_getaffinity(0)), help="busy loops (as many as cores)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--most-lost", type=float, metavar="P", help="percent")
    parser.add_argument("command", nargs="+", help="infer_pythia with --bench or --bench-batch")
    arguments = parser.parse_args()
    if arguments.loops < 1 or arguments.turns < 1:
        parser.error("--loops and --turns: expected at least 1")
    idle: dict[str, list[float]] = {}
    loaded: dict[str, list[float]] = {}
    for turn in range(arguments.turns):
        for loops, found in ((0, idle), (arguments.loops, loaded)):
            with busy(loops):
                for name, rate in rates(arguments.command).items():
                    found.setdefault(name, []).append(rate)
                    print(f"turn {turn + 1}, {loops} busy loops, {name}: {rate:.1f} tokens/s", flush=True)
    too_much = False
    for name, without in idle.items():
        before, beside = statistics.median(without), statistics.median(loaded[name])
        lost = 100 * (1 - beside / before)
        too_much = too_much or (arguments.most_lost is not None and lost > arguments.most_lost)
        print(f"{name}: {before:.1f} tokens/s, {beside:.1f} beside {arguments.loops} busy loops: {lost:.1f} % lost")
    sys.exit(1 if too_much else 0)


if __name__ == "__main__":
    main()
