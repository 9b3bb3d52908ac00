"""The speed of infer_pythia --serve as its clients see it: output tokens/s, time to the first token, time between tokens.

    python3 dev/bench/serving.py --model pythia-2.8b.bin                      starts the server and stops it
    python3 dev/bench/serving.py --url http://127.0.0.1:8000                  a server that runs already
    python3 dev/bench/serving.py --model chats.bin --chat                     what chats cost beside completions

Loads, each with prompts that share nothing and with prompts that share 90 % of their ids (--prefixes):
    closed   so many clients, each of which asks again when it has its answer
    open     requests come at random (Poisson), at 50, 80 and 95 % of the peak of the closed loads
    long     as open at 50 %, and every tenth request is a prompt of 2,000 ids: what the others see of it

With --chat there are closed loads alone: for each number of clients in turns completions of ids, completions of text, chats, and the same
backwards. The ids are those that POST /tokenize makes of a chat's messages, the text is theirs, so that all three compute the same; only
the first word tells a load's conversations from those of another, which keeps them
out of its prefix cache. A server of --url needs --special then.

Prompts are random ids, answers are streams that do not end early. A figure counts what comes in --seconds after --warmup. The
times between tokens are those between events; ids that complete no character make no event. Clients are spread over
--processes. Prints a table and writes build/bench_serving.json. Exit code 1 if a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent.parent
FIRST_ID, LAST_ID = 10, 249  # of random prompts: every vocabulary has them
LONG_TOKENS = 16  # generated after a long prompt
LONG_EVERY = 10  # requests
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KINDS = {"completions of ids": COMPLETIONS, "completions of text": COMPLETIONS, "chats": CHATS}  # loads of --chat
WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from or one had by but not what all were we when".split()
DRAIN_SECONDS = 60  # for the answers to the last requests of an open load


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass
class Sizes:
    prompt: int
    output: int
    shared: float  # share of a prompt's ids that all prompts begin with
    seed: int
    key: str = ""

    def body(self, number: int, prompt: int = 0, output: int = 0) -> bytes:
        """Request `number`; other sizes than usual: a long prompt, which shares nothing."""
        count = prompt or self.prompt
        common = 0 if prompt else int(self.shared * count)
        ids = random.Random(self.seed).choices(range(FIRST_ID, LAST_ID), k=common)
        ids += random.Random(f"{self.seed}, {number}").choices(range(FIRST_ID, LAST_ID), k=count - common)
        return self.generating(output or self.output, prompt=ids)

    @staticmethod
    def generating(output: int, **prompt: Any) -> bytes:
        return json.dumps({**prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True,
                           "stream_options": {"include_usage": True}}).encode()

    def messages(self, number: int, load: int) -> list[dict[str, str]]:
        """Conversation `number` of a load: a message of `prompt` words."""
        words = random.Random(f"{self.seed}, chat {number}").choices(WORDS, k=self.prompt - 1)
        return [{"role": "user", "content": " ".join([str(load), *words])}]

    def request(self, body: bytes, path: str = COMPLETIONS) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
                 f"Content-Length: {len(body)}", *([f"Authorization: Bearer {self.key}"] if self.key else [])]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Answer:
    long: bool
    due: float  # when it was to be sent
    events: array = field(default_factory=lambda: array("d"))  # when text came
    tokens: int = 0
    status: int = 0  # 0: the connection broke


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self) -> None:
        self.rest = b""
        self.answer: Answer | None = None
        self.ended: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None
        self._end()

    async def ask(self, request: bytes, answer: Answer) -> None:
        self.answer, self.ended, self.rest = answer, asyncio.get_running_loop().create_future(), b""
        assert self.transport is not None
        self.transport.write(request)
        await self.ended

    def _end(self) -> None:
        self.answer = None
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer = self.answer
        if answer is None:  # the end of the answer before
            return
        pieces = (self.rest + data).split(b"\n\n")
        self.rest = pieces.pop()
        if answer.status == 0:
            if (head := re.search(rb"HTTP/1\.1 (\d+) ", pieces[0] if pieces else self.rest)) is None:
                return
            answer.status = int(head[1])
        if answer.status != 200:  # one line of JSON; the next request has a connection of its own
            if self.transport is not None:
                self.transport.close()
            return self._end()
        for piece in pieces:
            if b'"choices":[{' in piece and b'"role":' not in piece:  # a chat's role comes with its first token
                answer.events.append(now)
            elif usage := re.search(rb'"completion_tokens":(\d+)', piece):
                answer.tokens = int(usage[1])
            elif piece.endswith(b"data: [DONE]"):
                return self._end()


# ---- loads -----------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """The part of a load that one process makes. Times are of time.monotonic(), which all processes share."""

    host: str
    port: int
    sizes: Sizes
    clients: int = 0  # closed
    first_number: int = 0  # of its requests; the next one is `step` further
    step: int = 1
    begin: float = 0
    end: float = 0  # no request begins later
    requests: list[bytes] = field(default_factory=list)  # closed: these in turn, in the place of those of `sizes`
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)  # open: time, number, ids of a long prompt or 0


async def connect(load: Load) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, load.host, load.port)
    return protocol


async def closed(load: Load) -> list[Answer]:
    answers: list[Answer] = []
    number = load.first_number

    async def client() -> None:
        nonlocal number
        connection = await connect(load)
        await asyncio.sleep(max(0, load.begin - time.monotonic()))
        while time.monotonic() < load.end:
            request = load.requests[number % len(load.requests)] if load.requests else load.sizes.request(load.sizes.body(number))
            number += load.step
            if connection.transport is None:
                connection = await connect(load)
            answers.append(Answer(False, time.monotonic()))
            await connection.ask(request, answers[-1])
        if connection.transport is not None:
            connection.transport.close()

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return answers


async def arriving(load: Load) -> list[Answer]:
    idle: list[Connection] = []
    answers: list[Answer] = []

    async def one(due: float, number: int, long_prompt: int) -> None:
        request = load.sizes.request(load.sizes.body(number, long_prompt, LONG_TOKENS if long_prompt else 0))
        answers.append(answer := Answer(long_prompt > 0, due))
        connection = idle.pop() if idle else await connect(load)
        if connection.transport is None:
            connection = await connect(load)
        await connection.ask(request, answer)
        if connection.transport is not None:
            idle.append(connection)

    tasks = []
    for due, number, long_prompt in load.arrivals:
        await asyncio.sleep(max(0, due - time.monotonic()))
        tasks.append(asyncio.create_task(one(due, number, long_prompt)))
    if tasks:
        await asyncio.wait(tasks, timeout=DRAIN_SECONDS)
    return answers


def run_load(load: Load) -> list[Answer]:
    return asyncio.run(closed(load) if load.clients > 0 else arriving(load))


# ---- figures ---------------------------------------------------------------------------------------------------------


def percentile(values: list[float], percent: float) -> float | None:
    """By nearest rank, as llmc/base/percentile.h has it."""
    if not values:
        return None
    rank = math.ceil(percent * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]


def figures(answers: list[Answer], begin: float, end: float) -> dict[str, Any]:
    """Of what came between two times. Tokens are counted by the events, and these by what the answers that are whole had."""
    gaps, first, events = [], [], 0
    for answer in answers:
        times = answer.events[:-1] if answer.tokens else answer.events  # the last event says why it ended
        if answer.long:
            continue
        for i, at in enumerate(times):
            if begin <= at < end:
                events += 1
                if i == 0:
                    first.append(at - answer.due)
                else:
                    gaps.append(at - times[i - 1])
    whole = [answer for answer in answers if answer.tokens and not answer.long]
    shown = sum(len(answer.events) - 1 for answer in whole)
    tokens = events * sum(answer.tokens for answer in whole) / shown if shown else 0.0
    def ms(values: list[float], percent: float) -> float | None:
        value = percentile(values, percent)
        return None if value is None else 1000 * value
    return {"tokens_per_s": tokens / (end - begin), "ttft_ms_p50": ms(first, 50), "ttft_ms_p99": ms(first, 99),
            "itl_ms_p50": ms(gaps, 50), "itl_ms_p99": ms(gaps, 99), "requests": len(answers),
            "failed": sum(answer.status != 200 for answer in answers),
            "unfinished": sum(answer.status == 200 and answer.tokens == 0 for answer in answers)}


class Bench:
    def __init__(self, url: str, options: argparse.Namespace, pool: Any):
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.host, self.port, self.url = parts.hostname, parts.port or 80, url
        self.options, self.pool = options, pool
        self.number = 0  # of the next request: no prompt comes twice
        self.chat_loads = 0

    def sizes(self, shared: float) -> Sizes:
        return Sizes(self.options.prompt, self.options.output, shared, self.options.seed, self.options.key)

    def _numbers(self, count: int) -> int:
        self.number += count
        return self.number - count

    def closed(self, clients: int, shared: float, requests: list[bytes] | None = None) -> dict[str, Any]:
        options = self.options
        processes = min(options.processes, clients)
        begin = time.monotonic() + 0.5
        window = (begin + options.warmup, begin + options.warmup + options.seconds)
        first = self._numbers(1_000_000)
        loads = [Load(self.host, self.port, self.sizes(shared), clients // processes + (i < clients % processes),
                      first + i, processes, begin, window[1], requests or []) for i in range(processes)]
        answers = [answer for part in self.pool.map(run_load, loads, 1) for answer in part]
        return {"load": "closed", "clients": clients, "shared": shared, **figures(answers, *window)}

    def chats(self, clients: int, kind: str) -> dict[str, Any]:
        """A closed load of chats, or of completions of the same ids or text."""
        sizes, count = self.sizes(0), self.options.conversations
        if self.chat_loads == 0:
            self._check_text(sizes.messages(0, 0))
        self.chat_loads += 1
        requests = []
        for number in range(count):
            prompt: dict[str, Any] = {"messages": sizes.messages(number, self.chat_loads)}
            if KINDS[kind] == COMPLETIONS:
                ids = json.loads(self.ask("/tokenize", prompt))["tokens"]
                prompt = {"prompt": ids} if kind == "completions of ids" else self._text(ids)
            requests.append(sizes.request(sizes.generating(sizes.output, **prompt), KINDS[kind]))
        row = {**self.closed(clients, 0, requests), "kind": kind}
        if row["requests"] > count:
            sys.exit(f"--conversations: got {count}, but there were {row['requests']} requests: prompts would be found in the prefix cache")
        return row

    def _text(self, ids: list[int]) -> dict[str, Any]:
        return {"prompt": json.loads(self.ask("/detokenize", {"tokens": ids}))["prompt"]}

    def _check_text(self, messages: list[dict[str, str]]) -> None:
        ids = json.loads(self.ask("/tokenize", {"messages": messages}))["tokens"]
        counted = json.loads(self.ask(COMPLETIONS, {**self._text(ids), "max_tokens": 1}))["usage"]["prompt_tokens"]
        if counted != len(ids):
            sys.exit(f"--chat: the text of messages has {counted} ids, expected {len(ids)}: the server needs --special")

    def ask(self, path: str, body: Any = None) -> str:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.options.key}"} if self.options.key else {})
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
            return answer.read().decode()

    def open(self, share: float, peak: float, shared: float, long_prompt: int = 0) -> dict[str, Any]:
        """At `share` of the peak, in tokens/s."""
        options = self.options
        rate = share * peak / options.output
        chance = random.Random(f"{options.seed}, {share}, {shared}")
        begin = time.monotonic() + 0.5
        window = (begin + options.warmup, begin + options.warmup + options.seconds)
        arrivals: list[tuple[float, int, int]] = []
        at = begin
        while (at := at + chance.expovariate(rate)) < window[1]:
            count = len(arrivals)
            arrivals.append((at, self._numbers(1), long_prompt if count % LONG_EVERY == LONG_EVERY - 1 else 0))
        processes = options.processes
        loads = [Load(self.host, self.port, self.sizes(shared), arrivals=arrivals[i::processes]) for i in range(processes)]
        answers = [answer for part in self.pool.map(run_load, loads, 1) for answer in part]
        return {"load": "long" if long_prompt else "open", "share_of_peak": share, "requests_per_s": rate, "shared": shared,
                **figures(answers, *window)}

    def metrics(self) -> dict[str, float]:
        text = self.ask("/metrics")
        names = ["vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
                 "weft:steps_total", "weft:rows_total", "weft:streams_cut_off_total", "vllm:generation_tokens_total"]
        found = {name: re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M) for name in names}
        return {name: float(match[1]) for name, match in found.items() if match}


# ---- the table -------------------------------------------------------------------------------------------------------


COLUMNS = ["load", "shared", "output tokens/s", "TTFT p50 / p99 ms", "between tokens p50 / p99 ms", "p99 / p50", "requests",
           "failed"]


def cells(row: dict[str, Any]) -> list[str]:
    def pair(name: str) -> str:
        values = [row[f"{name}_p50"], row[f"{name}_p99"]]
        return " / ".join("–" if value is None else f"{value:.2f}" for value in values)
    name = f"{row['clients']} clients{', ' + row['kind'] if 'kind' in row else ''}" if row["load"] == "closed" else f"{row['load']}, {100 * row['share_of_peak']:.0f} % of the peak"
    ratio = f"{row['itl_ms_p99'] / row['itl_ms_p50']:.2f}" if row["itl_ms_p50"] else "–"
    return [name, f"{100 * row['shared']:.0f} %", f"{row['tokens_per_s']:.0f}", pair("ttft_ms"), pair("itl_ms"), ratio,
            str(row["requests"]), str(row["failed"] + row["unfinished"])]


def run_all(bench: Bench, options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        tell(row)

    for clients in options.clients if options.chat else ():
        for kind in (*KINDS, *reversed(KINDS)):
            add(bench.chats(clients, kind))
    for shared in () if options.chat else options.prefixes:
        for clients in options.clients:
            add(bench.closed(clients, shared))
        peak = max(row["tokens_per_s"] for row in rows if row["shared"] == shared)
        if peak == 0:
            continue
        for share in options.loads:
            add(bench.open(share, peak, shared))
        if options.long > 0:
            add(bench.open(0.5, peak, shared, options.long))
    return rows


# ---- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The address of a server that is ready."""
    if options.url:
        yield options.url.rstrip("/")
        return
    command = [str(options.binary), "--model", str(options.model), "--serve", "127.0.0.1:0", "--max-running",
               str(max(options.clients)), *(["--special"] if options.chat else []), *options.server_options.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url, lines = "", []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"listening on (http://\S+)", line):
                url = match[1]
            if line.startswith("ready"):
                break
        else:
            sys.exit(f"{command[0]} has ended: {''.join(lines[-3:]).strip()}")
        yield url
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def numbers(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        values = [kind(word) for word in text.split(",")]
        if not all(low <= value <= high for value in values):
            raise ValueError
        return values
    parse.__name__ = f"list of numbers from {low} to {high}"
    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help="of a server that runs")
    target.add_argument("--model", type=Path, help="model file of the server that this starts")
    parser.add_argument("--binary", type=Path, default=ROOT / "infer_pythia", help="default: that of this tree")
    parser.add_argument("--server-options", default="", help="further options of the server, as '--device cuda --dtype fp16'")
    parser.add_argument("--key", default=os.environ.get("WEFT_API_KEY", ""), help="default: that of WEFT_API_KEY")
    parser.add_argument("--clients", type=numbers(int, 1, 4096), default=[1, 4, 16, 64, 128, 256], help="of the closed loads")
    parser.add_argument("--loads", type=numbers(float, 0.01, 2), default=[0.5, 0.8, 0.95], help="shares of the peak")
    parser.add_argument("--prefixes", type=numbers(float, 0, 1), default=[0.0, 0.9], help="shares of a prompt that all have")
    parser.add_argument("--prompt", type=int, default=128, help="ids of a prompt")
    parser.add_argument("--output", type=int, default=128, help="ids generated after it")
    parser.add_argument("--chat", action="store_true", help="chats beside completions; --prompt counts words")
    parser.add_argument("--conversations", type=int, default=1000, help="of a load of --chat: at least as many as it has requests")
    parser.add_argument("--long", type=int, default=2000, help="ids of a long prompt; 0: without this load")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--warmup", type=float, default=3, help="seconds before them")
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench_serving.json")
    options = parser.parse_args()
    if min(options.prompt, options.output, options.processes, options.conversations) < 1 or options.seconds <= 0 or options.warmup < 0:
        parser.error("--prompt, --output, --processes, --conversations and --seconds: expected more than 0")

    def tell(row: dict[str, Any]) -> None:
        print(", ".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, cells(row))), file=sys.stderr, flush=True)

    try:
        with server(options) as url, multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            bench = Bench(url, options, pool)
            pool.map(time.sleep, [0.1] * options.processes, 1)  # until its processes are there: the first load does not wait for them
            bench.metrics()  # so that a server that cannot be reached is noticed before the first load
            rows = run_all(bench, options, tell)
            counters = bench.metrics()
    except OSError as error:
        sys.exit(f"{options.url or options.binary}: {error}")
    print("\n".join("| " + " | ".join(line) + " |" for line in [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in ("prompt", "output", "long", "seconds", "warmup", "processes", "seed", "chat",
                                                          "server_options")}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows, "counters": counters}, indent=1) + "\n")
    return 1 if any(row["failed"] + row["unfinished"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
