"""dev/bench/serving.py: what it counts, and a short run against the real program on a small random model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from array import array
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "bench"))
import serving  # noqa: E402

from test_infer_cli import tokenizer_json, write_model  # noqa: E402

PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "infer_pythia"


def answer(due: float, times: list[float], tokens: int, long: bool = False, status: int = 200) -> serving.Answer:
    return serving.Answer(long, due, array("d", times), tokens, status)


def test_figures_count_what_came_in_the_window():
    # Two answers of 4 and 2 ids, each with an event at the end that has no text; of the second one id made no event.
    whole = [answer(9.9, [10.0, 10.5, 11.0, 12.5, 12.5], 4), answer(10.0, [10.2, 10.2], 2)]
    row = serving.figures(whole, 10, 12)
    assert row["tokens_per_s"] == 4 * (6 / 5) / 2  # 4 of the 5 events with text, 6 ids for 5 events
    assert abs(row["ttft_ms_p50"] - 100) < 1e-6 and abs(row["ttft_ms_p99"] - 200) < 1e-6
    assert row["itl_ms_p50"] == row["itl_ms_p99"] == 500
    assert (row["requests"], row["failed"], row["unfinished"]) == (2, 0, 0)
    others = [answer(10, [10.1, 10.1], 1, long=True), answer(10, [], 0, status=429), answer(10, [], 0)]
    row = serving.figures([*whole, *others], 10, 12)
    assert row["tokens_per_s"] == 2.4 and (row["requests"], row["failed"], row["unfinished"]) == (5, 1, 1)
    assert serving.figures([], 10, 12)["itl_ms_p50"] is None


def test_percentiles_are_those_of_infer_pythia():
    """By nearest rank, as in test/cpp/base_test.cpp."""
    ranks = {1: [1, 1, 1, 1, 1], 2: [1, 1, 1, 2, 2], 3: [1, 1, 2, 3, 3], 100: [1, 1, 50, 99, 100], 101: [1, 2, 51, 100, 101]}
    for count, expected in ranks.items():
        values = [1.0 + i * 37 % count for i in range(count)]
        assert [serving.percentile(values, percent) for percent in (0, 1, 50, 99, 100)] == expected, count
    assert serving.percentile([], 50) is None


def test_prompts_share_what_they_should():
    sizes = serving.Sizes(prompt=100, output=7, shared=0.9, seed=1)
    first, second, long = (json.loads(body) for body in (sizes.body(1), sizes.body(2), sizes.body(3, 300, 5)))
    assert first["prompt"][:90] == second["prompt"][:90] and first["prompt"][90:] != second["prompt"][90:]
    assert len(first["prompt"]) == 100 and first["max_tokens"] == 7 and sizes.body(1) == sizes.body(1)
    assert len(long["prompt"]) == 300 and long["max_tokens"] == 5 and long["prompt"][:90] != first["prompt"][:90]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_stream_is_read_however_it_is_cut(size):
    events = [b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n'] * 3
    events += [b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":42}}\n\n', b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    text = head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"

    async def read() -> list[serving.Answer]:
        connection = serving.Connection()
        answers = []
        for _ in range(2):
            connection.answer, connection.rest = serving.Answer(False, 0), b""
            connection.ended = asyncio.get_running_loop().create_future()
            answers.append(connection.answer)
            for i in range(0, len(text), size):
                connection.data_received(text[i:i + size])
            assert connection.ended.done()
        return answers
    for one in asyncio.run(read()):
        assert (one.status, len(one.events), one.tokens) == (200, 3, 42)


def test_a_request_carries_the_key_and_its_length():
    sizes = serving.Sizes(prompt=4, output=7, shared=0.5, seed=1)
    body = sizes.body(1)
    assert {key: value for key, value in json.loads(body).items() if key != "prompt"} == {
        "max_tokens": 7, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    head, sent = sizes.request(body).split(b"\r\n\r\n")
    assert sent == body and head.split(b"\r\n") == [b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json",
                                                    b"Content-Length: %d" % len(body)]
    sizes.key = "secret"
    assert b"\r\nAuthorization: Bearer secret\r\n\r\n" in sizes.request(body)
    other = serving.Sizes(4, 7, 0.5, 2)
    assert json.loads(other.body(1))["prompt"][:2] != json.loads(body)["prompt"][:2], "another seed has other prompts"
    ids = json.loads(serving.Sizes(3000, 7, 0.5, 1).body(1))["prompt"]
    assert min(ids) == serving.FIRST_ID and max(ids) == serving.LAST_ID - 1


def received(*parts: bytes, lost: bool = False):
    """What one request's answer became, and whether its connection was closed."""
    async def read():
        connection, answer = serving.Connection(), serving.Answer(False, 0)
        closed = []
        connection.transport = SimpleNamespace(close=lambda: closed.append(True), write=lambda request: None)
        asking = asyncio.ensure_future(connection.ask(b"request", answer))
        await asyncio.sleep(0)
        for part in parts:
            connection.data_received(part)
        if lost:
            connection.connection_lost(None)
        await asyncio.sleep(0)
        ended = asking.done()
        connection.data_received(b"what comes late is nobody's\n\n")
        asking.cancel()
        return answer, ended, bool(closed), connection.transport is None
    return asyncio.run(read())


EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'


def test_an_answer_ends_with_its_last_event_an_error_or_the_connection():
    head, usage, done = b"HTTP/1.1 200 OK\r\n\r\n", b'data: {"choices":[],"usage":{"completion_tokens":12}}\n\n', b"data: [DONE]\n\n"
    for parts, lost, status, events, tokens, ended, closed in (
            ((head, EVENT, EVENT), False, 200, 2, 0, False, False), ((head, EVENT, usage), False, 200, 1, 12, False, False),
            ((head, EVENT, usage, done, EVENT), False, 200, 1, 12, True, False), ((head, EVENT), True, 200, 1, 0, True, False), ((), True, 0, 0, 0, True, False),
            ((b"HTTP/1.1 429 Too Many", b" Requests\r\n\r\n{}"), False, 429, 0, 0, True, True), ((b"HTTP/1.1 5",), False, 0, 0, 0, False, False),
            ((b"HTTP/1.1 503 No\r\n\r\n" + EVENT,), False, 503, 0, 0, True, True)):
        answer, end, shut, gone = received(*parts, lost=lost)
        assert (answer.status, len(answer.events), answer.tokens, end, shut, gone) == (status, events, tokens, ended, closed, lost), parts


async def against(load: serving.Load, work, status: int = 200):
    """What `work` makes of a load against a server of ours: its answers; the prompts' numbers and max_tokens; connections."""
    asked, connections = [], []

    async def serve(reader, writer):
        connections.append(writer)
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            body = json.loads(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
            asked.append((len(body["prompt"]), body["max_tokens"], tuple(body["prompt"][-6:])))
            writer.write(b"HTTP/1.1 %d X\r\n\r\n" % status + EVENT + b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n')
            if len(asked) == 6:
                load.end = 0
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        load.port = server.sockets[0].getsockname()[1]
        answers = await asyncio.wait_for(work(load), 60)
    return answers, asked, connections


@pytest.mark.parametrize("status", [200, 503])
def test_a_client_asks_again_until_the_end(status):
    """With prompts of its own, `step` numbers apart, on the connection that it has, or a new one after an error."""
    sizes = serving.Sizes(12, 5, 0.0, 1)
    load = serving.Load("127.0.0.1", 0, sizes, clients=1, first_number=40, step=3, end=float("inf"))
    answers, asked, connections = asyncio.run(against(load, serving.closed, status))
    assert len(answers) == len(asked) == 6 and all(one.status == status and not one.long for one in answers)
    assert asked == [(12, 5, tuple(json.loads(sizes.body(number))["prompt"][-6:])) for number in range(40, 58, 3)]
    assert len(connections) == (1 if status == 200 else 6)
    load = serving.Load("127.0.0.1", 0, sizes, clients=4, end=0)
    assert asyncio.run(against(load, serving.closed))[:2] == ([], [])


def test_requests_of_an_open_load_are_sent_whatever_becomes_of_those_before():
    sizes = serving.Sizes(12, 5, 0.0, 1)
    arrivals = [(float(number), number, 30 if number % 3 == 2 else 0) for number in range(6)]
    answers, asked, connections = asyncio.run(against(serving.Load("127.0.0.1", 0, sizes, arrivals=arrivals), serving.arriving))
    assert sorted((one.due, one.long) for one in answers) == [(due, prompt > 0) for due, _, prompt in arrivals]
    assert sorted(asked) == sorted((prompt or 12, serving.LONG_TOKENS if prompt else 5, tuple(json.loads(sizes.body(number, prompt))["prompt"][-6:]))
                                   for _, number, prompt in arrivals)
    assert all(one.status == 200 and one.tokens == 3 for one in answers) and 1 <= len(connections) <= 6
    assert asyncio.run(serving.arriving(serving.Load("127.0.0.1", 0, sizes))) == []


@pytest.mark.parametrize("clients, name", [(0, "arriving"), (1, "closed"), (7, "closed")])
def test_a_load_without_clients_is_an_open_one(monkeypatch, clients, name):
    async def made(load):
        return [load.clients]

    async def other(load):
        raise AssertionError

    monkeypatch.setattr(serving, name, made)
    monkeypatch.setattr(serving, "closed" if name == "arriving" else "arriving", other)
    assert serving.run_load(serving.Load("h", 1, serving.Sizes(1, 1, 0, 1), clients)) == [clients]


class Pool:
    """Takes the loads of all processes, and answers each with one answer."""

    def map(self, run, loads, chunk):
        assert run is serving.run_load and chunk == 1
        self.loads = loads
        return [[answer(load.begin, [load.begin, load.begin], 1)] for load in loads]


@pytest.fixture
def bench(monkeypatch):
    options = SimpleNamespace(prompt=96, output=20, seed=5, key="k", processes=3, warmup=2, seconds=10)
    monkeypatch.setattr(serving.time, "monotonic", lambda: 100.0)
    made = serving.Bench("http://example:8123", options, Pool())
    monkeypatch.setattr(serving, "figures", lambda answers, begin, end: {"answers": len(answers), "window": (begin, end)})
    return made


@pytest.mark.parametrize("clients, parts", [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (4, [2, 1, 1]), (11, [4, 4, 3])])
def test_a_closed_load_is_spread_over_the_processes(bench, clients, parts):
    """No request of one load has the number of another, nor of the load before."""
    sizes = serving.Sizes(96, 20, 0.25, 5, "k")
    for first in (0, 1_000_000):
        row = bench.closed(clients, 0.25)
        assert bench.pool.loads == [serving.Load("example", 8123, sizes, part, first + i, len(parts), 100.5, 112.5) for i, part in enumerate(parts)]
        assert row == {"load": "closed", "clients": clients, "shared": 0.25, "answers": len(parts), "window": (102.5, 112.5)}


def test_an_open_load_comes_at_random_at_its_share_of_the_peak(bench):
    bench.closed(1, 0.0)
    row = bench.open(0.5, 4000.0, 0.75)
    assert row == {"load": "open", "share_of_peak": 0.5, "requests_per_s": 100.0, "shared": 0.75, "answers": 3, "window": (102.5, 112.5)}
    loads = bench.pool.loads
    assert all((load.host, load.port, load.clients, load.sizes) == ("example", 8123, 0, serving.Sizes(96, 20, 0.75, 5, "k")) for load in loads)
    arrivals = sorted(one for load in loads for one in load.arrivals)
    assert 1000 < len(arrivals) < 1400 and 100.5 < arrivals[0][0] < arrivals[-1][0] < 112.5, "12 s of 100 a second"
    assert [number for _, number, _ in arrivals] == list(range(1_000_000, 1_000_000 + len(arrivals))) and not any(long for *_, long in arrivals)
    assert all(load.arrivals == arrivals[i::3] for i, load in enumerate(loads))
    begins = [at for at, *_ in arrivals]
    row = bench.open(0.5, 4000.0, 0.75, long_prompt=2000)
    later = sorted(one for load in bench.pool.loads for one in load.arrivals)
    assert row["load"] == "long" and [at for at, *_ in later] == begins and later[0][1] == arrivals[-1][1] + 1
    assert [i for i, (*_, long) in enumerate(later) if long == 2000] == list(range(9, len(later), 10)) and {long for *_, long in later} == {0, 2000}


@pytest.mark.parametrize("url, host, port", [("http://127.0.0.1:8000", "127.0.0.1", 8000), ("http://example", "example", 80)])
def test_the_address_of_a_server(url, host, port):
    made = serving.Bench(url, SimpleNamespace(), None)
    assert (made.host, made.port, made.url) == (host, port, url)


def test_open_loads_are_shares_of_the_peak_of_their_prefix():
    def row(load, shared, speed, **more):
        return {"load": load, "shared": shared, "tokens_per_s": speed, **more}

    speeds, opened = {(1, 0.0): 10.0, (4, 0.0): 30.0, (8, 0.0): 20.0, (1, 0.9): 50.0, (4, 0.9): 40.0, (8, 0.9): 45.0}, []
    fake = SimpleNamespace(closed=lambda clients, shared: row("closed", shared, speeds.get((clients, shared), 0.0)),
                           open=lambda *words: opened.append(words) or row("open", words[2], 1000.0))
    told = []
    options = SimpleNamespace(prefixes=[0.0, 0.5, 0.9], clients=[1, 4, 8], loads=[0.5, 0.8], long=300)
    rows = serving.run_all(fake, options, told.append)
    assert opened == [(share, peak, shared, *more) for peak, shared in ((30.0, 0.0), (50.0, 0.9)) for share, *more in ((0.5,), (0.8,), (0.5, 300))]
    assert rows == told and len(rows) == 3 * 3 + 6, "where nothing came there is no peak, and the next prefix goes on"
    opened.clear()
    options.long = 0
    serving.run_all(fake, options, told.append)
    assert len(opened) == 4


def test_cells_of_the_table():
    row = {"load": "closed", "clients": 4, "shared": 0.9, "tokens_per_s": 1234.5678, "ttft_ms_p50": 1.0, "ttft_ms_p99": 2.345, "itl_ms_p50": 4.0, "itl_ms_p99": 10.0,
           "requests": 7, "failed": 1, "unfinished": 2}
    assert serving.cells(row) == ["4 clients", "90 %", "1235", "1.00 / 2.35", "4.00 / 10.00", "2.50", "7", "3"]
    row |= {"load": "long", "share_of_peak": 0.95, "itl_ms_p50": None, "itl_ms_p99": None}
    assert serving.cells(row) == ["long, 95 % of the peak", "90 %", "1235", "1.00 / 2.35", "\u2013 / \u2013", "\u2013", "7", "3"]
    assert len(serving.COLUMNS) == len(serving.cells(row))


def test_counters_are_read_with_the_key(monkeypatch):
    text = ("# HELP vllm:num_preemptions_total x\nvllm:num_preemptions_total{model_name=\"a b\"} 3\nweft:steps_total 12\nother_weft:rows_total 4\n"
            "weft:rows_total 1.5e+02\nvllm:generation_tokens_total_more 9\n")
    asked = []

    def urlopen(request, timeout):
        asked.append((request.full_url, dict(request.header_items())))
        return BytesIO(text.encode())

    monkeypatch.setattr(serving.urllib.request, "urlopen", urlopen)
    for key, headers in (("secret", {"Authorization": "Bearer secret"}), ("", {})):
        assert serving.Bench("http://a:1", SimpleNamespace(key=key), None).metrics() == {
            "vllm:num_preemptions_total": 3, "weft:steps_total": 12, "weft:rows_total": 150}
        assert asked.pop() == ("http://a:1/metrics", headers)


def test_a_list_of_numbers_is_within_its_limits():
    parse = serving.numbers(int, 1, 4096)
    assert parse("1,4096,7") == [1, 4096, 7] and serving.numbers(float, 0.01, 2)("0.01,2") == [0.01, 2]
    for text in ("0", "4097", "1,0", "4097,1", "", "1,", "1.5", "x"):
        with pytest.raises(ValueError):
            parse(text)


@pytest.mark.parametrize("words", [("--seconds", 0), ("--seconds", -1), ("--warmup", -0.5), ("--processes", 0), ("--prompt", 0), ("--output", 0), ("--clients", "1,0"),
                                   ("--loads", "3"), ("--prefixes", "1.5"), ("--url", "http://a")])
def test_limits_of_the_options(monkeypatch, capsys, words):
    monkeypatch.setattr(serving, "server", lambda options: pytest.fail("a server starts"))
    monkeypatch.setattr(sys, "argv", ["serving.py", "--model", "m.bin", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        serving.main()
    assert end.value.code == 2 and "usage" in capsys.readouterr().err


def test_a_server_is_started_with_its_options_and_stopped(tmp_path):
    """It is ready when it says so. One that ends before is named with what it said last."""
    binary = tmp_path / "server"
    binary.write_text(f"""#!/bin/sh
trap 'echo stopped >>"{tmp_path}/log"; exit 0' TERM
echo "$@" >"{tmp_path}/log"
[ -e "{tmp_path}/bad" ] && {{ printf 'one\\ntwo\\nthree\\nerror: four\\n' >&2; exit 3; }}
printf 'model\\nlistening on http://127.0.0.1:12345 and more\\nready\\n' >&2
while :; do sleep 0.02; done
""")
    binary.chmod(0o755)
    options = SimpleNamespace(url=None, binary=binary, model=Path("m.bin"), clients=[1, 64, 16], server_options="--device cpu  --threads 1")
    with serving.server(options) as url:
        assert url == "http://127.0.0.1:12345"
    assert (tmp_path / "log").read_text().splitlines() == [
        "--model m.bin --serve 127.0.0.1:0 --max-running 64 --device cpu --threads 1", "stopped"]
    (tmp_path / "bad").touch()
    with pytest.raises(SystemExit, match="(?s)server has ended: two\nthree\nerror: four$"), serving.server(options):
        pass
    with serving.server(SimpleNamespace(url="http://a:1/")) as url:
        assert url == "http://a:1"


@pytest.mark.parametrize("failed, unfinished, code", [(0, 0, 0), (1, 0, 1), (0, 2, 1)])
def test_a_request_that_failed_is_the_exit_code(tmp_path, monkeypatch, capsys, failed, unfinished, code):
    row = {"load": "closed", "clients": 4, "shared": 0.0, "tokens_per_s": 1.0, "ttft_ms_p50": 1.0, "ttft_ms_p99": 2.0, "itl_ms_p50": 4.0, "itl_ms_p99": 8.0,
           "requests": 7}
    rows = [row | {"failed": 0, "unfinished": 0}, row | {"failed": failed, "unfinished": unfinished}, row | {"failed": 0, "unfinished": 0}]
    counters = iter([{"weft:steps_total": 1}, {"weft:steps_total": 2}])
    monkeypatch.setattr(serving, "run_all", lambda bench, options, tell: [tell(one) or one for one in rows])
    monkeypatch.setattr(serving.Bench, "metrics", lambda bench: next(counters))
    monkeypatch.setattr(serving.multiprocessing, "get_context", lambda kind: SimpleNamespace(Pool=nullcontext))
    out = tmp_path / "a" / "b.json"
    monkeypatch.setattr(sys, "argv", ["serving.py", "--url", "http://a:1", "--out", str(out), "--seed", "9", "--server-options=--x", "--seconds", "2"])
    assert serving.main() == code
    result = json.loads(out.read_text())
    assert result["rows"] == rows and result["counters"] == {"weft:steps_total": 2}
    assert result["settings"] == {"prompt": 128, "output": 128, "long": 2000, "seconds": 2.0, "warmup": 3, "processes": result["settings"]["processes"], "seed": 9,
                                  "server_options": "--x"}
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 5 and len(printed.err.splitlines()) == 3 and printed.err.startswith("load: 4 clients, shared: 0 %")


@pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")
def test_a_short_run(tmp_path):
    model = write_model(tmp_path / "small.bin", tokenizer_json(), max_positions=1024)
    words = ["--model", model, "--binary", PROGRAM, "--clients", "1,3", "--prefixes", "0,0.9", "--loads", "0.5", "--seconds", 0.7,
             "--warmup", 0.2, "--prompt", 96, "--output", 12, "--long", 300, "--processes", 2, "--out", tmp_path / "out.json",
             "--server-options", "--device cpu --threads 1"]
    done = subprocess.run([sys.executable, ROOT / "dev/bench/serving.py", *map(str, words)], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    rows = result["rows"]
    assert [(row["load"], row["shared"]) for row in rows] == [(load, shared) for shared in (0, 0.9)
                                                              for load in ("closed", "closed", "open", "long")]
    assert [row.get("clients") for row in rows[:3]] == [1, 3, None]
    for row in rows:
        assert row["failed"] == row["unfinished"] == 0 and row["requests"] > 0, row
    assert all(row["tokens_per_s"] > 0 and row["ttft_ms_p50"] > 0 for row in rows if row["load"] == "closed")
    counters = result["counters"]
    assert counters["vllm:prefix_cache_hits_total"] > 0 and counters["weft:steps_total"] > 0
    table = done.stdout.splitlines()
    assert len(table) == 2 + len(rows) and table[2].startswith("| 1 clients | 0 % |")


def test_a_server_that_is_not_there_is_one_line():
    done = subprocess.run([sys.executable, ROOT / "dev/bench/serving.py", "--url", "http://127.0.0.1:9"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "refused" in done.stderr
