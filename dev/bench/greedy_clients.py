"""Small requests beside greedy clients: their times with infer_pythia --serve, alone and beside a flood of each kind.

    .venv/bin/python dev/bench/greedy_clients.py --model tiny.bin [--program OTHER/infer_pythia]

A small request asks for one token of a short prompt on a connection of its own, 20 times a second at most. The floods:
    large       32 connections, each of which sends prompts of 4 MB, one after the other: too long for the model
    fitting     8 connections, each of which sends prompts that fit, of as many tokens as the model takes
    pipelining  8 connections, each of which sends GET /version without waiting for answers, and reads them
    idle        as many connections as the server takes, without a request
    slow        900 connections, each of which sends a body of 1 MB, a byte a second

Prints a row a flood: how many small requests were answered and how many were not, and p50 and p99 of their times. The server and its
clients share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
CONNECTIONS = 1024  # the default of --max-connections
TIMEOUT = 120


@contextlib.contextmanager
def served(program: Path, model: Path) -> Iterator[int]:
    command = [program, "--model", model, "--device", "cpu", "--threads", "1", "--serve", "127.0.0.1:0"]
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if match := re.search(r"listening on http://.*:(\d+)$", line.strip()):
                port = int(match[1])
            if line.startswith("ready"):
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would hold the server up
        yield port
    finally:
        process.kill()
        process.wait()


def post(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)


# Each of these keeps one part of a flood going until `over` is set.


def prompts(tokens: int) -> Callable[[int, threading.Event], None]:
    body = json.dumps({"prompt": "a" * tokens, "max_tokens": 1}).encode()

    def flood(port: int, over: threading.Event) -> None:
        while not over.is_set():
            post(port, body)
    return flood


def pipelining(port: int, over: threading.Event) -> None:
    while not over.is_set():
        with connect(port) as client:
            client.settimeout(1)

            def send(client: socket.socket = client) -> None:
                with contextlib.suppress(OSError):
                    while not over.is_set():
                        client.sendall(GET * 1000)
            sender = threading.Thread(target=send)
            sender.start()
            with contextlib.suppress(OSError):
                while not over.is_set() and client.recv(1 << 20):
                    pass
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # ends the sender
            sender.join()


def idle(port: int, over: threading.Event) -> None:
    clients = [connect(port) for _ in range(CONNECTIONS)]
    over.wait()
    for client in clients:
        client.close()


def slow(port: int, over: threading.Event) -> None:
    clients = []
    for _ in range(90):
        clients.append(connect(port))
        clients[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    while not over.wait(1):
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(b" ")
    for client in clients:
        client.close()


FLOODS: dict[str, tuple[int, Callable[[int, threading.Event], None]]] = {
    "none": (0, idle), "large": (32, prompts(4_000_000)), "fitting": (8, prompts(400)), "pipelining": (8, pipelining), "idle": (1, idle),
    "slow": (10, slow),
}


def guarded(flood: Callable[[int, threading.Event], None], port: int, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            flood(port, over)


def measure(program: Path, model: Path, name: str, seconds: float, settle: float) -> str:
    parts, flood = FLOODS[name]
    times, failed = [], 0
    with served(program, model) as port:
        over = threading.Event()
        threads = [threading.Thread(target=guarded, args=(flood, port, over), daemon=True) for _ in range(parts)]
        for thread in threads:
            thread.start()
        time.sleep(settle)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                answered = post(port, b'{"prompt": "Hi", "max_tokens": 1}') == 200
            except (OSError, http.client.HTTPException):
                answered = False
            if answered:
                times.append(time.monotonic() - start)
            else:
                failed += 1
            time.sleep(0.05)
        over.set()
    times.sort()
    if not times:
        return f"| {name} | 0 | {failed} | | |"
    p50, p99 = (1000 * times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99))
    return f"| {name} | {len(times)} | {failed} | {p50:.0f} | {p99:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--program", type=Path, default=ROOT / "infer_pythia")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--settle", type=float, default=2, help="seconds from the beginning of a flood; more on a busy machine")
    parser.add_argument("--floods", default=",".join(FLOODS))
    options = parser.parse_args()
    print("| flood | answered | not answered | p50, ms | p99, ms |\n|---|---|---|---|---|")
    for name in options.floods.split(","):
        print(measure(options.program, options.model, name, options.seconds, options.settle), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
