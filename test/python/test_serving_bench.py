"""dev/bench/serving.py: what it counts, and a short run against the real program on a small random model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "bench"))
import serving  # noqa: E402

from test_chat import chat_format  # noqa: E402
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


def test_the_role_of_a_chat_is_no_token():
    events = ['{"choices":[{"delta":{"role":"assistant","content":""}}]}', '{"choices":[{"delta":{"content":"a"}}]}',
              '{"choices":[{"delta":{},"finish_reason":"length"}]}', '{"choices":[],"usage":{"completion_tokens":1}}', "[DONE]"]
    connection = serving.Connection()
    connection.answer = read = serving.Answer(False, 0)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + "".join(f"data: {event}\n\n" for event in events).encode())
    assert (len(read.events), read.tokens) == (2, 1)


@pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")
def test_chats_beside_completions(tmp_path):
    """In turns, and no load finds a prompt in the cache."""
    model = write_model(tmp_path / "small.bin", tokenizer_json(), beside={"chat_format": chat_format()}, max_positions=1024)
    words = ["--model", model, "--binary", PROGRAM, "--chat", "--clients", "2", "--seconds", 1, "--warmup", 0.2, "--prompt", 30, "--output", 12,
             "--processes", 1, "--out", tmp_path / "out.json", "--server-options", "--device cpu --threads 1"]

    def run(*more):
        return subprocess.run([sys.executable, ROOT / "dev/bench/serving.py", *map(str, words), *map(str, more)], capture_output=True, text=True, timeout=120)

    done = run()
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    kinds = ["completions of ids", "completions of text", "chats", "chats", "completions of text", "completions of ids"]
    assert [row["kind"] for row in result["rows"]] == kinds
    assert all(row["tokens_per_s"] > 0 and row["ttft_ms_p50"] > 0 and row["failed"] == row["unfinished"] == 0 for row in result["rows"])
    assert result["counters"]["vllm:prefix_cache_hits_total"] == 0
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]] == [f"2 clients, {kind}" for kind in kinds]
    done = run("--conversations", 1)
    assert done.returncode == 1 and "--conversations: got 1" in done.stderr


def test_a_server_that_is_not_there_is_one_line():
    done = subprocess.run([sys.executable, ROOT / "dev/bench/serving.py", "--url", "http://127.0.0.1:9"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "refused" in done.stderr
