"""How long small requests take beside large ones: p50 and p99 of a request for one token, alone and beside a flood.

    python3 dev/bench/small_requests.py --model demo.bin --large 0,1,4

Of the flood each client asks for --n completions of --tokens tokens, again and again. One client asks for one token at a time for
--seconds. Prints a table: the small requests' times, and what the large ones got meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 600  # seconds


def ask(url: str, **body: object) -> None:
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        response.read()


def generated(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=TIMEOUT) as response:
        return float(re.search(r"^vllm:generation_tokens_total\S* (\S+)$", response.read().decode(), re.M)[1])  # type: ignore[index]


class Flood:
    """So many clients with large requests."""

    def __init__(self, url: str, clients: int, n: int, tokens: int):
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(url, n, tokens, i), daemon=True) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def run(self, url: str, n: int, tokens: int, seed: int) -> None:
        while not self.over.is_set():
            try:
                ask(url, prompt="The hen", n=n, max_tokens=tokens, ignore_eos=True, seed=seed)
            except (OSError, urllib.error.URLError):  # the server has ended
                return


def measure(url: str, seconds: float) -> tuple[list[float], float]:
    """Milliseconds of the small requests, and tokens that were generated in a second, theirs left out."""
    times: list[float] = []
    begin, before = time.monotonic(), generated(url)
    while (start := time.monotonic()) - begin < seconds or not times:
        ask(url, prompt=f"A small one, {len(times)}", max_tokens=1)
        times.append(1e3 * (time.monotonic() - start))
        time.sleep(0.05)
    others = generated(url) - before - len(times)
    return sorted(times), others / (time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--binary", type=Path, default=ROOT / "infer_pythia", help="default: that of this tree")
    parser.add_argument("--large", default="0,1,4", help="clients with large requests, of each row")
    parser.add_argument("--n", type=int, default=128, help="completions of a large request")
    parser.add_argument("--tokens", type=int, default=400, help="of each of them")
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    print("| large clients | small requests | p50, ms | p99, ms | tokens/s of the others |\n|---|---|---|---|---|")
    for clients in map(int, options.large.split(",")):
        command = [options.binary, "--device", "cpu", "--model", options.model, "--serve", "127.0.0.1:0"]
        process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        try:
            url = ""
            for line in process.stderr or []:
                url = line.split()[-1] if "listening on" in line else url
                if line.startswith("ready"):
                    break
            ask(url, prompt="The hen", max_tokens=1)
            flood = Flood(url, clients, options.n, options.tokens)
            if clients:
                time.sleep(2)
            times, rate = measure(url, options.seconds)
            flood.over.set()
            p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(0.99 * len(times)))]
            print(f"| {clients} | {len(times)} | {p50:,.1f} | {p99:,.1f} | {rate:,.0f} |", flush=True)
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
