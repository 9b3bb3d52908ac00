"""infer_pythia --serve as its clients meet it: the real program on a small random model, over sockets of this machine.

WEFT_BIN_DIR says where the program is; without it the root of the repository. The tests with OpenAI's own client need the
package openai (scripts/requirements-serve.txt), that of the page chromium and chromedriver (scripts/deps.sh --browser);
they are skipped where that is missing."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
from test_infer_cli import LAYERS, C, tokenizer_json, write_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "infer_pythia"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

USAGE, BAD_FILE, ENVIRONMENT = 2, 3, 4
CONTEXT = 1024
# What clients take of the server's limits.
HELD = ("weft:body_bytes", "weft:unsent_bytes", "weft:requests_to_read", "weft:completions", "weft:answers", "weft:answer_values",
        "vllm:num_requests_running", "vllm:num_requests_waiting", "weft:kv_pages_in_use")
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 0}  # takes a while


class Server:
    """The program, started and ready."""

    def __init__(self, model: Path, *options: object, address: str = "127.0.0.1:0", **environment: str):
        command = [PROGRAM, "--model", model, "--device", "cpu", "--serve", address, *options]
        clean = {name: value for name, value in os.environ.items() if name != "WEFT_API_KEY"}
        self.process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**clean, "OMP_NUM_THREADS": "1", **environment})
        self.lines: list[str] = []
        self.fields: dict[str, str] = {}  # of requests that look what the server holds
        self.told = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.told.wait(60), self.lines
        match = re.search(r"listening on http://(.*):(\d+)$", "\n".join(self.lines), re.M)
        assert match, self.lines
        self.host, self.port = match[1].strip("[]"), int(match[2])
        self.url = f"http://{match[1]}:{self.port}"
        until(lambda: self.get("/health")[0] == 200)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.decode().rstrip("\n"))
            if "listening on" in self.lines[-1]:
                self.told.set()
        self.told.set()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, error: type | None, *_) -> None:
        try:
            if error is None and self.process.poll() is None and self.get("/health")[0] == 200:
                self.nothing_is_held()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.end()

    def nothing_is_held(self) -> None:
        """The server and its engine hold nothing for clients that have gone. Every test of a server ends with it."""
        held: dict[str, float] = {}

        def nothing() -> bool:
            text = self.get("/metrics", **self.fields)[2].decode()
            found = {name: re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.M) for name in HELD}
            held.update({name: float(match[1]) for name, match in found.items() if match})
            return len(held) == len(HELD) and not any(held.values())
        end = time.monotonic() + 30
        while not nothing():
            assert time.monotonic() < end, held
            time.sleep(0.05)

    def end(self) -> None:
        self.process.wait(30)
        self.reader.join(30)
        self.process.stderr.close()
        self.process.stdout.close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict, bytes]:
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            json_type = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, data, {**json_type, **{k.replace("_", "-"): v for k, v in headers.items()}})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, dict, bytes]:
        return self.ask("GET", path, **headers)

    def complete(self, **body: object) -> dict:
        status, _, text = self.ask("POST", "/v1/completions", body)
        assert status == 200, text
        return json.loads(text)

    def refuse(self, status: int, body: object, **headers: str) -> dict:
        got, _, text = self.ask("POST", "/v1/completions", body, **headers)
        assert got == status, text
        return json.loads(text)["error"]

    def stream(self, **body: object) -> list[dict]:
        """The events of a stream, without the last one."""
        status, headers, text = self.ask("POST", "/v1/completions", {**body, "stream": True})
        assert status == 200 and headers["Content-Type"] == "text/event-stream", text
        events = text.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
        return [json.loads(event[6:]) for event in events[:-2]]

    def open(self, body: dict, receive_buffer: int = 0) -> socket.socket:
        """A request whose answer is not read yet."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        client = socket.socket(family)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(60)
        client.connect((self.host, self.port))
        client.sendall(request(json.dumps(body).encode()))
        return client

    def metric(self, name: str) -> float:
        text = self.get("/metrics")[2].decode()
        return float(re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)[1])


def request(body: bytes, *fields: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json",
             f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.02)


def receive(client: socket.socket, end: bytes = b"") -> bytes:
    """What comes until the server closes the connection, or until `end`."""
    text = b""
    while not end or end not in text:
        try:
            piece = client.recv(65536)
        except ConnectionResetError:
            break
        if not piece:
            break
        text += piece
    return text


def joined(events: list[dict]) -> dict[int, dict]:
    """The choices of a stream as one answer would have them."""
    choices: dict[int, dict] = {}
    for event in events:
        for choice in event["choices"]:
            one = choices.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None,
                                                       "finish_reason": None})
            one["text"] += choice["text"]
            if choice["logprobs"] is not None:
                one["logprobs"] = one["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    one["logprobs"][key] += values
            assert one["finish_reason"] is None
            one["finish_reason"] = choice["finish_reason"]
    return choices


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("served models") / "small.bin", tokenizer_json(), max_positions=CONTEXT)


@pytest.fixture(scope="module")
def server(model):
    with Server(model) as one:
        yield one
        assert one.process.poll() is None  # no request has ended it


@pytest.fixture(autouse=True)
def shared_server_holds_nothing(request):
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").nothing_is_held()


# ---- what it answers -------------------------------------------------------------------------------------------------


def test_it_says_where_it_listens_and_warns_only_where_others_can_use_it(model, server):
    assert not any("other machines" in line for line in server.lines), server.lines
    for key, warnings in (({}, 1), ({"WEFT_API_KEY": "s3cret"}, 0)):
        with Server(model, address="0.0.0.0:0", **key) as other:
            assert other.stop() == 143  # all that it has to say is said
            other.reader.join(30)
            found = [line for line in other.lines if line.startswith("warning: other machines can use this server")]
            assert len(found) == warnings, other.lines


def test_every_answer_is_counted_by_its_status(server):
    def answered(code: int) -> float:
        return sum(float(n) for n in re.findall(rf'^weft:http_responses_total{{.*code="{code}"}} (\S+)$',
                                                server.get("/metrics")[2].decode(), re.M))

    before = answered(200)
    assert answered(200) == before + 1  # the first question
    server.stream(prompt="a", max_tokens=2)
    assert answered(200) == before + 3
    server.complete(prompt="a", max_tokens=2)
    assert answered(200) == before + 5
    bad = answered(400)
    server.refuse(400, {"prompt": 5})
    assert answered(400) == bad + 1


def test_small_answers(server):
    assert server.get("/health")[::2] == (200, b'{"status":"ok"}')
    assert json.loads(server.get("/version")[2])["version"].startswith((ROOT / "VERSION").read_text().strip())
    models = json.loads(server.get("/v1/models")[2])
    assert [one["id"] for one in models["data"]] == ["small"] and models["data"][0]["max_model_len"] == CONTEXT
    status, headers, _ = server.ask("HEAD", "/health")
    assert status == 200 and "Access-Control-Allow-Origin" not in headers


def test_a_served_name_loses_its_last_suffix_alone(model, tmp_path):
    path = tmp_path / "pythia-1.4b.bin"
    path.symlink_to(model)
    with Server(path) as server:
        assert [one["id"] for one in json.loads(server.get("/v1/models")[2])["data"]] == ["pythia-1.4b"]


def test_greedy_text_is_that_of_the_command_line(server, model):
    command = [PROGRAM, "--model", model, "--device", "cpu", "--prompt", "Once upon", "--max-tokens", "40", "--json"]
    alone = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    answer = server.complete(prompt="Once upon", max_tokens=40, temperature=0)
    assert answer["choices"][0]["text"] == alone["text"]
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": len(alone["ids"]),
                               "total_tokens": 9 + len(alone["ids"])}
    assert answer["object"] == "text_completion" and answer["model"] == "small" and answer["id"].startswith("cmpl-")
    by_ids = server.complete(prompt=alone["prompt_ids"], max_tokens=40, temperature=0)
    assert by_ids["choices"] == answer["choices"] and by_ids["id"] != answer["id"]


@pytest.mark.parametrize("body", [
    {"prompt": "Once", "max_tokens": 30},
    {"prompt": ["Once", "b", ""], "max_tokens": 12, "n": 2},
    {"prompt": [[5, 6, 7], [8]], "max_tokens": 9, "logprobs": 3},
    {"prompt": "Once", "max_tokens": 20, "logprobs": 0, "echo": True, "n": 3},
    {"prompt": "Once", "max_tokens": 0, "logprobs": 2, "echo": True},
    {"prompt": "Once", "max_tokens": 60, "top_k": 5, "stop": ["e", "\u00e9", "xyz"], "logprobs": 1},
    {"prompt": "Once", "max_tokens": 15, "top_p": 0.5, "min_p": 0.01, "temperature": 2, "echo": True},
], ids=lambda body: ",".join(body))
def test_a_stream_is_the_whole_answer_in_pieces(server, body):
    whole = server.complete(**body, seed=7)
    events = server.stream(**body, seed=7, stream_options={"include_usage": True})
    assert [choice for _, choice in sorted(joined(events).items())] == whole["choices"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1]) and len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in server.stream(**body, seed=7))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-pythia"])
def test_a_converted_model_of_each_family(name, tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / f"{name}.bin"
    ck.convert(ROOT / "models" / name, path)
    command = [PROGRAM, "--model", path, "--device", "cpu", "--prompt", "The hen", "--max-tokens", "24", "--temperature", "0.9",
               "--seed", "3", "--json"]
    alone = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    body = {"prompt": "The hen", "max_tokens": 24, "temperature": 0.9, "seed": 3, "logprobs": 2}
    with Server(path) as server:
        whole = server.complete(**body)
        assert whole["model"] == name and whole["choices"][0]["text"] == alone["text"]
        assert joined(server.stream(**body))[0] == whole["choices"][0]
        echoed = server.complete(**body, echo=True)["choices"][0]
        text, logprobs = echoed["text"], echoed["logprobs"]
        assert text == "The hen" + alone["text"]
        # Each token stands where its offset says; that which begins a document is none of the text.
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
            assert text.startswith(token, offset) or offset == 0 or token.startswith("bytes:"), (token, offset)
        assert server.stop() == 143


def test_the_seed_decides(server):
    def texts(**body):
        return [choice["text"] for choice in server.complete(prompt="Once", max_tokens=24, **body)["choices"]]
    assert texts(seed=3) == texts(seed=3) != texts(seed=4)
    assert texts(seed=3, n=3)[0] == texts(seed=3)[0] and len(set(texts(seed=3, n=3))) == 3
    assert len({texts()[0] for _ in range(4)}) == 4  # without one it is random
    assert len(set(texts(temperature=0, n=2))) == 1


def test_a_request_among_others_is_the_same(server):
    bodies = [{"prompt": "x" * (1 + 7 * i), "max_tokens": 40, "seed": i, "logprobs": 2} for i in range(12)]
    alone = [server.complete(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: server.complete(**body)["choices"], bodies * 2))
    assert together == alone * 2


def test_log_probabilities_of_a_text_are_those_of_its_generation(server):
    made = server.complete(prompt=[5, 6, 7], max_tokens=20, seed=1, logprobs=4, ignore_eos=True)["choices"][0]
    tokens = made["logprobs"]["tokens"]
    # One byte is one token here, its id is the byte's number in the alphabet; so the text's ids come back from the text
    # where it is UTF-8 throughout. Elsewhere the ids are those of the bytes that the tokens name.
    ids = [5, 6, 7] + [(int(token[8:], 16) if token.startswith("bytes:") else ord(token)) for token in tokens]
    alphabet = {id_: byte for byte, id_ in byte_ids().items()}
    assert len(tokens) == 20 and len(alphabet) == 256
    ids = ids[:3] + [byte_ids()[byte] for byte in ids[3:]]
    scored = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=4)["choices"][0]["logprobs"]
    assert scored["tokens"][3:] == tokens
    assert scored["token_logprobs"][3:] == made["logprobs"]["token_logprobs"]
    assert scored["top_logprobs"][3:] == made["logprobs"]["top_logprobs"]
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
    assert all(len(top) in (4, 5) and value <= 0 for top, value in zip(scored["top_logprobs"][1:], scored["token_logprobs"][1:]))


def test_tokens_stand_where_their_offsets_say(server):
    """Of bytes at random, few of which are UTF-8: each token that is text is in the text at its offset, and the others point at
    what has become of them."""
    for seed in range(6):
        body = {"prompt": [5, 200, 6], "max_tokens": 150, "seed": seed, "temperature": 3, "logprobs": 0, "ignore_eos": True}
        for more in ({}, {"echo": True}, {"stop": ["a", "\ufffdb"]}):
            choice = server.complete(**body, **more)["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
            offsets = logprobs["text_offset"]
            assert offsets == sorted(offsets) and "\ufffd" in text
            for token, offset in zip(logprobs["tokens"], offsets):
                cut = "stop" in more and token.startswith(text[offset:])  # a stop text has begun within the token
                assert offset <= len(text) and (text.startswith(token, offset) or token.startswith("bytes:") or cut), (token, offset)
            assert joined(server.stream(**body, **more))[0] == choice


def byte_ids() -> dict[int, int]:
    vocab = json.loads(tokenizer_json())["model"]["vocab"]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: vocab[chr(byte if byte in printable else 256 + others.index(byte))] for byte in range(256)}


def test_a_stop_text_does_not_leak(server):
    whole = server.complete(prompt="Once", max_tokens=60, seed=5, ignore_eos=True)["choices"][0]["text"]
    stop = whole[20:23]
    assert stop
    answer = server.complete(prompt="Once", max_tokens=60, seed=5, ignore_eos=True, stop=stop, logprobs=0)
    cut = answer["choices"][0]
    assert cut["text"] == whole[:whole.index(stop)] and cut["finish_reason"] == "stop"
    # Its tokens have their entries, as every token that counts, and no text.
    assert all(len(values) == answer["usage"]["completion_tokens"] for values in cut["logprobs"].values())
    assert cut["logprobs"]["text_offset"][-1] == len(cut["text"])


def test_a_long_prompt_is_refused_with_the_number_that_fits(server):
    assert server.complete(prompt="x" * (CONTEXT - 1), max_tokens=5)["usage"]["completion_tokens"] >= 1
    error = server.refuse(400, {"prompt": "x" * CONTEXT, "max_tokens": 5})
    assert str(CONTEXT - 1) in error["message"] and error["param"] == "prompt"


@pytest.mark.parametrize("body, param", [
    (b"", None), (b"{", None), (b"[]", None), (b"[" * 100_000, None), (b'{"a":' * 50_000, None), ({}, "prompt"),
    ({"prompt": [2**31]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": "a", "n": 2**31}, "n"),
    ({"prompt": "a", "n": -1}, "n"), ({"prompt": "a", "max_tokens": -(2**63)}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2**64}, "max_tokens"), ({"prompt": "a", "logprobs": 10**9}, "logprobs"),
    ({"prompt": "a", "temperature": -1}, "temperature"), ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"), ({"prompt": ["a"] * 1025}, "prompt"), ({"prompt": ["a"] * 1000, "n": 128}, "n"),
    (b'{"prompt": "\xff"}', None), (b'{"prompt": "a", "prompt": "b"}', None),
])
def test_a_bad_request_names_its_field_and_stops_nobody(server, body, param):
    error = server.refuse(400, body)
    assert error["param"] == param and error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert server.complete(prompt="a", max_tokens=1)["choices"]


def test_other_paths_methods_types_and_models(server):
    for method, path, body, status in [("GET", "/nothing", None, 404), ("GET", "/../etc/passwd", None, 404),
                                       ("POST", "/health", {}, 405), ("GET", "/v1/completions", None, 405),
                                       ("DELETE", "/v1/models", None, 405), ("PUT", "/v1/completions", None, 405),
                                       ("POST", "/v1/completions", {"model": "other", "prompt": "a"}, 404)]:
        got, headers, text = server.ask(method, path, body)
        assert got == status and json.loads(text)["error"]["message"], (method, path)
        assert headers.get("Allow") == (None if status != 405 else "OPTIONS, POST" if path == "/v1/completions" else "GET, HEAD, OPTIONS")
    good = {"prompt": "a", "max_tokens": 1}
    assert "application/json" in server.refuse(415, good, Content_Type="text/plain")["message"]
    assert "not decompressed" in server.refuse(415, good, Content_Encoding="gzip")["message"]


def test_latencies_do_not_overlap(server):
    """From the arrival to the first token, and from each to the next: together no more than until the end."""
    def sums():
        return [server.metric(f"vllm:{name}_seconds_sum") for name in (
            "time_to_first_token", "inter_token_latency", "e2e_request_latency")]

    before = sums()
    assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 30, "ignore_eos": True})[0] == 200
    first, between, whole = [after - earlier for after, earlier in zip(sums(), before)]
    assert 0 < first and 0 < between and first + between <= whole * 1.0001, (first, between, whole)


def test_pages_of_other_sites_are_kept_out(server):
    good = {"prompt": "a", "max_tokens": 1}
    assert "evil.example" in server.refuse(403, good, Host="evil.example")["message"]
    assert "evil.example" in server.refuse(403, good, Origin="http://evil.example")["message"]
    server.refuse(403, good, Origin="null")
    for host in ("localhost:1", f"127.0.0.1:{server.port}", "[::1]"):
        assert server.ask("POST", "/v1/completions", good, Host=host, Origin=f"http://{host}")[0] == 200
    # Behind a proxy that speaks TLS.
    assert server.ask("POST", "/v1/completions", good, Host="localhost", Origin="https://localhost")[0] == 200


# ---- hostile HTTP ----------------------------------------------------------------------------------------------------

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("data, status", [
    (b"\x16\x03\x01\x00\xf4 hello over TLS\r\n\r\n", 400),
    (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", 400),
    (CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n", 400),
    (CHUNKED + b"ffffffffffffffff\r\nhello\r\n", 413),
    (CHUNKED + b"fffffffffffffffff\r\nhello\r\n", 400),
    (CHUNKED + b"100000\r\n" + b" " * (1 << 20) + b"\r\n" + (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 4 + b"0\r\n\r\n", 413),
    (CHUNKED + b"5;" + b"x" * 1_000_000 + b"\r\nhello\r\n0\r\n\r\n", 400),
    (POST + b"Content-Length: -1\r\n\r\n", 400),
    (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
    (POST + b"Content-Length: 2147483648\r\n\r\n", 413),
    (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", 400),
    (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (POST + b"Transfer-Encoding: gzip\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", 431),
    (b"GET /health HTTP/1.1\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
    (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"a" * 1_000_000, 431),
    (b"GET /health HTTP/3.0\r\n\r\n", 400),
], ids=lambda value: str(value)[:60] if isinstance(value, bytes) else "")
def test_hostile_http_is_refused(server, data, status):
    with socket.create_connection((server.host, server.port), timeout=30) as client:
        try:
            client.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer has come before the end
        answer = receive(client)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]
    assert server.get("/health")[0] == 200


def test_a_large_prompt_costs_no_more_than_its_body(server):
    error = server.refuse(400, {"prompt": "a" * 3_000_000})
    assert "its 3000000 bytes are at least" in error["message"] and "takes at most" in error["message"], error
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    status, headers, _ = server.ask("POST", "/v1/completions", b" " * (5 << 20))
    assert status == 413 and headers["Connection"] == "close"


# ---- clients that go away, or do not read ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server, stream):
    before = server.metric("vllm:generation_tokens_total")
    client = server.open({**LONG, "n": 8, "stream": stream})
    until(lambda: server.metric("vllm:num_requests_running") == 8)
    assert server.metric("weft:kv_pages_in_use") > 0
    client.close()
    until(lambda: server.metric("vllm:num_requests_running") == 0 and server.metric("weft:kv_pages_in_use") == 0, 10)
    assert server.metric("vllm:generation_tokens_total") - before < 8 * 900


def test_a_slow_reader_is_cut_off_and_holds_nobody_up(model):
    with Server(model, "--write-seconds", "60") as server:
        client = server.open({**LONG, "n": 64, "logprobs": 20, "stream": True}, receive_buffer=4096)
        until(lambda: server.metric("vllm:generation_tokens_total") > 0)  # it may have been cut off already
        others = 0
        while server.metric("weft:streams_cut_off_total") == 0:
            assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] >= 1
            others += 1
            assert others < 2000
        until(lambda: server.metric("vllm:num_requests_running") == 0 and server.metric("weft:kv_pages_in_use") == 0)
        client.close()


def test_a_client_that_takes_nothing_is_closed_in_time(model):
    with Server(model, "--write-seconds", "0.5") as server:
        client = server.open({**LONG, "n": 16, "logprobs": 20, "max_tokens": 400}, receive_buffer=4096)
        until(lambda: server.metric("vllm:generation_tokens_total") > 0)
        until(lambda: server.metric("vllm:num_requests_running") == 0, 60)
        until(lambda: server.metric("weft:connections") == 1, 20)  # that of the question
        client.close()


def test_slow_and_idle_clients_are_closed(model):
    with Server(model, "--read-seconds", "0.5", "--idle-seconds", "1", "--max-connections", "3") as server:
        for data, least, most in [(b"POST /v1/comp", 0.3, 10), (POST + b"Content-Length: 10\r\n\r\n{", 0.3, 10), (b"", 0.7, 10)]:
            start = time.monotonic()
            with socket.create_connection((server.host, server.port), timeout=30) as client:
                client.sendall(data)
                assert receive(client) == b""
            assert least < time.monotonic() - start < most
        clients = [socket.create_connection((server.host, server.port), timeout=30) for _ in range(3)]
        for client in clients:
            client.sendall(b"POST /v1/comp")  # not idle: idle ones would be displaced
        until(lambda: receive(socket.create_connection((server.host, server.port), timeout=30)) == b"")  # one too many
        for client in clients:
            client.close()

        def refused_one() -> bool:
            try:
                return server.metric("weft:connections_refused_total") >= 1
            except (OSError, http.client.HTTPException):
                return False  # the server has not seen yet that they are closed
        until(refused_one)


def test_a_pipelining_client_gets_every_answer_and_leaves_no_line_in_the_log(model):
    with Server(model) as server:
        lines, count = len(server.lines), 3000
        with socket.create_connection((server.host, server.port), timeout=60) as client:
            sender = threading.Thread(target=client.sendall, args=(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * count,))
            sender.start()
            text = b""
            while text.count(b"HTTP/1.1 200 ") < count:
                piece = client.recv(1 << 20)
                assert piece, text.count(b"HTTP/1.1 200 ")
                text += piece
            sender.join()
        for _ in range(20):  # and who leaves in the middle
            with socket.create_connection((server.host, server.port), timeout=60) as client:
                client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        server.nothing_is_held()
        assert server.lines[lines:] == []


# ---- the log ----------------------------------------------------------------------------------------------------------


def test_each_request_has_its_line_in_the_log(model):
    def line_of(name: str) -> dict[str, str]:
        """The fields of the one line about the request of this id, when it is there."""
        def found() -> list[str]:
            return [line for line in server.lines if line.startswith(f"request id={name} ")]
        until(found)
        assert len(found()) == 1, found()
        return dict(re.findall(r"(\w+)=('(?:\\.|[^'])*'|\S*)", found()[0]))

    def ask(name: str, body: object, path: str = "/v1/completions") -> tuple[int, bytes]:
        status, headers, text = server.ask("POST", path, body, X_Request_Id=name)
        assert headers["X-Request-Id"] == name
        return status, text

    with Server(model, "--log-requests", "--max-body", "2000") as server:
        prompt = "x" * 100
        status, text = ask("whole", {"prompt": prompt, "max_tokens": 9, "ignore_eos": True})
        assert status == 200 and json.loads(text)["id"] == "cmpl-whole"
        line = line_of("whole")
        assert line | {"first_ms": "", "token_ms": ""} == {
            "id": "whole", "method": "POST", "path": "'/v1/completions'", "status": "200", "prompt_tokens": "100", "cached_tokens": "0",
            "completion_tokens": "9", "first_ms": "", "token_ms": "", "finish": "length"}
        assert float(line["first_ms"]) > 0 and float(line["token_ms"]) > 0
        # The same prompt again, streamed, with two choices: found in the cache once.
        status, text = ask("streamed", {"prompt": prompt, "max_tokens": 5, "n": 2, "ignore_eos": True, "stream": True,
                                        "stream_options": {"include_usage": True}})
        usage = json.loads(text.decode().split("\n\n")[-3][6:])["usage"]
        line = line_of("streamed")
        assert [line["prompt_tokens"], line["completion_tokens"]] == [str(usage["prompt_tokens"]), str(usage["completion_tokens"])] == ["100", "10"]
        assert 0 < int(line["cached_tokens"]) < 100
        ask("one", {"prompt": "a", "max_tokens": 1, "ignore_eos": True})
        assert line_of("one")["token_ms"] == "-" and float(line_of("one")["first_ms"]) > 0
        assert ask("scored", {"prompt": "a", "max_tokens": 0, "echo": True})[0] == 200
        assert [line_of("scored")[field] for field in ("completion_tokens", "first_ms", "token_ms")] == ["0", "-", "-"]
        # What is refused, by an endpoint and before one, and what generates nothing.
        for name, status, body, path in (("wrong", 400, {"prompt": 5}, "/v1/completions"), ("large", 413, {"prompt": "a" * 2000}, "/v1/completions"),
                                         ("nowhere", 404, {}, "/no\twhere%20at=all"), ("ids", 200, {"prompt": "a"}, "/tokenize")):
            assert ask(name, body, path.replace("\t", "%09"))[0] == status
            assert "prompt_tokens" not in line_of(name) and line_of(name)["status"] == str(status)
        assert line_of("nowhere")["path"] == r"'/no\x09where at=all'"
        assert server.get("/health", X_Request_Id="get")[0] == 200 and line_of("get")["method"] == "GET"
        assert server.get("/health", X_Request_Id="host", Host="other.example")[0] == 403 and line_of("host")["status"] == "403"
        # Whose client leaves, with nothing and within the stream.
        for name, more, status in (("left", {}, "499"), ("left-stream", {"stream": True}, "200")):
            with socket.create_connection((server.host, server.port), timeout=60) as client:
                client.sendall(request(json.dumps({**LONG, "n": 64, **more}).encode(), f"X-Request-Id: {name}"))
                if more:
                    receive(client, b"data: ")
                until(lambda: server.metric("vllm:num_requests_running") == 64)
            line = line_of(name)
            assert (line["status"], line["finish"], line["prompt_tokens"]) == (status, "abort", "1")
            assert 0 < int(line["completion_tokens"]) < 64 * LONG["max_tokens"]
        # One that has no sane id gets one, and no part of its own is in the log.
        status, headers, _ = server.get("/health", X_Request_Id="a b=c")
        assert line_of(headers["X-Request-Id"])["path"] == "'/health'" and not any("a b=c" in line for line in server.lines)
        assert not any(prompt in line for line in server.lines)
    with Server(model) as quiet:
        quiet.complete(prompt="a", max_tokens=1)
        assert not any("request" in line for line in quiet.lines)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_answers_429_and_goes_on(model):
    with Server(model, "--max-queue", "0") as server:
        running = int(re.search(r"at most (\d+) completions", server.refuse(400, {"prompt": ["a"] * 100, "n": 128})["message"])[1])
        client = server.open({**LONG, "prompt": ["a"] * running})
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        status, headers, text = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 429 and headers["Retry-After"] == "1", text
        assert json.loads(text)["error"]["type"] == "rate_limit_error"
        client.close()
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.complete(prompt="a", max_tokens=1)["choices"]
        assert server.metric('weft:http_responses_total{.*code="429"}') >= 1


def test_a_request_has_its_time(model):
    with Server(model, "--request-seconds", "0.2") as server:
        choice = server.complete(**{**LONG, "n": 64})["choices"][0]
        assert choice["finish_reason"] == "abort"
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        until(lambda: server.complete(prompt="a", max_tokens=1)["choices"][0]["finish_reason"] == "length")  # in time
        until(lambda: server.metric("weft:kv_pages_in_use") == 0)


def test_the_body_is_limited_as_asked_for(model):
    with Server(model, "--max-body", "200", "--served-name", "a name") as server:
        assert server.complete(model="a name", prompt="a", max_tokens=1)["model"] == "a name"
        assert "200 bytes" in server.refuse(413, {"prompt": "a" * 200})["message"]
    with Server(model, "--max-body", "300000000") as server:  # there is memory for such bodies
        with socket.create_connection((server.host, server.port), timeout=30) as client:
            client.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 300000000\r\n\r\n")
            assert receive(client, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")


@pytest.mark.parametrize("how", ["file", "environment"])
def test_a_key_is_asked_for(model, tmp_path, how):
    (tmp_path / "key").write_text("s3cret\n")
    options = ["--api-key-file", tmp_path / "key"] if how == "file" else []
    environment = {"WEFT_API_KEY": "other"} if how == "file" else {"WEFT_API_KEY": "s3cret"}
    with Server(model, *options, **environment) as server:
        server.fields = {"Authorization": "Bearer s3cret"}
        good = {"prompt": "a", "max_tokens": 1}
        for value in ("", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3crets", "Basic s3cret", "s3cret", "Bearer other"):
            status, headers, text = server.ask("POST", "/v1/completions", good, Authorization=value)
            assert status == 401 and headers["WWW-Authenticate"] == "Bearer", value
            assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert server.ask("POST", "/v1/completions", good, Authorization="bearer s3cret")[0] == 200
        assert server.get("/metrics")[0] == server.get("/v1/models")[0] == 401
        with socket.create_connection((server.host, server.port), timeout=30) as client:
            client.sendall(POST + b"Content-Length: 4000000\r\n\r\n")  # and no body: it is not waited for
            assert receive(client).startswith(b"HTTP/1.1 401 ")
        assert server.get("/health")[0] == server.get("/")[0] == 200
        assert not any("s3cret" in line for line in server.lines)


# ---- start and stop --------------------------------------------------------------------------------------------------


def test_ipv6_and_names(model):
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    with Server(model, address="[::1]:0") as server:
        assert server.url.startswith("http://[::1]:") and server.get("/health")[0] == 200
    with Server(model, address="localhost:0") as server:
        assert server.get("/health")[0] == 200


def test_it_answers_to_the_address_at_which_it_listens(model):
    with Server(model, address="127.0.0.2:0") as server:
        assert server.url.startswith("http://127.0.0.2:")
        for host, status in (("127.0.0.2", 200), (f"127.0.0.2:{server.port}", 200), ("localhost", 200), ("127.0.0.3", 403)):
            assert server.ask("GET", "/health", Host=host)[0] == status, host


def test_it_answers_to_allowed_hosts_and_no_others(model):
    with Server(model, "--allowed-host", "Weft.example", "--allowed-host", "other.example") as server:
        for host, status in (("weft.example", 200), ("other.example:8443", 200), ("localhost", 200), ("third.example", 403)):
            assert server.get("/health", Host=host)[0] == status, host
    for address, status in (("127.0.0.1:0", 403), ("0.0.0.0:0", 200)):  # without such a list
        with Server(model, address=address, WEFT_API_KEY="k") as server:
            server.fields = {"Authorization": "Bearer k"}
            assert server.get("/health", Host="weft.example")[0] == status, address


@pytest.mark.parametrize("options, code, words", [
    (["--serve", "127.0.0.1:0", "--allowed-host", "https://a"], USAGE, "--allowed-host: got 'https://a', expected the name of a host"),
    (["--serve", "8000"], USAGE, "expected HOST:PORT"),
    (["--serve", "localhost:99999"], USAGE, "expected HOST:PORT"),
    (["--serve", "192.0.2.1:0"], ENVIRONMENT, "cannot listen on"),
    (["--serve", ""], USAGE, "--serve: got '', expected a value"),
    (["--serve", "127.0.0.1:0", "--temperature", "1"], USAGE, "--temperature: not for --serve"),
    (["--serve", "127.0.0.1:0", "--json"], USAGE, "--json: does not go with --serve"),
    (["--serve", "127.0.0.1:0", "--prompt", "a"], USAGE, "only one of them"),
    (["--prompt", "a", "--drain-seconds", "1"], USAGE, "--drain-seconds: only for --serve"),
    (["--prompt", "a", "--max-queue", "1"], USAGE, "--max-queue: only for --serve"),
    (["--serve", "127.0.0.1:0", "--api-key-file", "/nowhere"], BAD_FILE, "/nowhere"),
    (["--serve", "127.0.0.1:0", "--api-key-file", "/dev/null"], BAD_FILE, "/dev/null"),
])
def test_what_it_does_not_start_with(model, options, code, words):
    done = subprocess.run([PROGRAM, "--model", model, "--device", "cpu", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and words in done.stderr and done.stderr.count("error: ") == 1, done.stderr


def test_a_port_in_use_is_an_environment_error(model, server):
    done = subprocess.run([PROGRAM, "--model", model, "--device", "cpu", "--serve", f"127.0.0.1:{server.port}"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == ENVIRONMENT and "in use" in done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_signal_lets_requests_finish(model, number, code):
    choices = 64
    with Server(model, "--drain-seconds", "300") as server:
        # As many as run at once, each of 900 steps: seconds of work for what is asked meanwhile, and nothing waits for a time.
        # That the server has heard the signal shows in what it answers.
        client = server.open({**LONG, "n": choices})
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        waiting = socket.create_connection((server.host, server.port), timeout=60)
        asking = server.connect()
        server.process.send_signal(number)

        def health() -> tuple[int, dict]:
            asking.request("GET", "/health")
            answer = asking.getresponse()
            return answer.status, json.loads(answer.read())
        until(lambda: health() == (503, {"status": "draining"}))
        asking.close()
        waiting.sendall(request(b'{"prompt": "a"}', "Connection: close"))
        refused = receive(waiting)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in refused
        waiting.close()
        assert any("stopping" in line for line in server.lines)
        answer = receive(client)
        client.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        choices = json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * len(choices)
        assert server.process.wait(60) == code


def test_what_is_not_finished_in_time_is_told_so(model):
    with Server(model, "--drain-seconds", "0.2") as server:
        client = server.open({**LONG, "n": 64, "stream": True})
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(receive, client)
            assert server.stop() == 143
            text = reading.result()
        client.close()
        assert text.count(b'"finish_reason":"abort"') > 0 and text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_has_the_time_of_the_drain_to_read_its_answer(model):
    with Server(model, "--drain-seconds", "60") as server:
        client = server.open({**LONG, "n": 16, "logprobs": 20, "max_tokens": 200}, receive_buffer=4096)  # 2 MB
        until(lambda: server.metric("vllm:generation_tokens_total") > 0)
        server.process.send_signal(signal.SIGTERM)

        def stopped() -> bool:
            try:
                return server.metric("vllm:num_requests_running") < 0
            except (OSError, http.client.HTTPException):
                return True  # the last completion has ended: no connection is accepted
        until(stopped, 60)
        time.sleep(3)
        answer = receive(client)
        client.close()
        assert len(json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"]) == 16
        assert server.process.wait(60) == 143


def test_a_second_signal_leaves_at_once(model):
    with Server(model) as server:
        client = server.open({**LONG, "n": 64})
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("stopping" in line for line in server.lines))
        time.sleep(0.3)
        start = time.monotonic()
        assert server.stop() == 143 and time.monotonic() - start < 5
        client.close()


def test_an_idle_server_stops_at_once(model):
    with Server(model) as server:
        start = time.monotonic()
        assert server.stop(signal.SIGINT) == 130 and time.monotonic() - start < 5


def test_prompt_rows_beside_others_are_limited(model):
    """The second prompt has 400 ids: of one a step, the first completion has ended before it is through."""
    steps = []
    for rows in ("1", "128"):
        with Server(model, "--prompt-rows", rows) as server:
            server.complete(prompt=["x", "x" * 400], max_tokens=300, ignore_eos=True)
            steps.append(server.metric("weft:steps_total"))
    assert steps[0] > 550 and steps[1] < 450, steps


def test_what_the_engine_was_asked_for_reaches_it(model, server):
    """The options that --serve has in common with --batch, on a path of its own in the program."""
    with Server(model, "--kv-memory", "1MB", "--max-running", 3, "--lookup", 4, "--special") as other:
        assert other.metric("weft:kv_pages") == 1_000_000 // (2 * 32 * LAYERS * C * 4)  # keys and values of 32 positions
        drafted = "vllm:spec_decode_num_draft_tokens_total"
        with other.open({**LONG, "n": 100}):
            until(lambda: other.metric("vllm:num_requests_running") == 3 and other.metric("vllm:num_requests_waiting") > 64)
            until(lambda: other.metric(drafted) > 0)  # of a text that repeats itself, which takes some steps
        until(lambda: other.metric("vllm:num_requests_running") + other.metric("vllm:num_requests_waiting") == 0)
        assert server.metric(drafted) == 0
        prompt = {"prompt": "<|endoftext|>a", "max_tokens": 1}
        assert other.complete(**prompt)["usage"]["prompt_tokens"] == 2
        assert server.complete(**prompt)["usage"]["prompt_tokens"] == len(prompt["prompt"])
    with Server(model, "--max-running", 3) as other:
        assert other.metric("weft:kv_pages") == 3 * CONTEXT // 32


# ---- a mixture -------------------------------------------------------------------------------------------------------


SOAK = int(os.environ.get("SOAK_REQUESTS", "300"))  # dev/bench/README.md: the long one


def leave(client: socket.socket, chance: random.Random) -> None:
    """As clients leave: they close, they reset, or they close their side alone."""
    kind = chance.randrange(3)
    if kind == 1:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif kind == 2:
        client.shutdown(socket.SHUT_WR)
        receive(client)


def random_request(server: Server, number: int) -> str:
    """Says what became of it."""
    chance = random.Random(number)
    prompts = ["x" * chance.randrange(1, 300), "once upon a time " * 20 + str(number % 7), [5, 6, 7] * chance.randrange(1, 100)]
    body = {"prompt": chance.choice(prompts), "max_tokens": chance.choice([chance.randrange(1, 60), 150]), "seed": number,
            "n": chance.randrange(1, 4), "stream": chance.random() < 0.5, "logprobs": chance.choice([None, 2]),
            "echo": chance.random() < 0.2, "stop": chance.choice([None, "e", ["a", "\n"]]),
            "ignore_eos": chance.random() < 0.5, "temperature": chance.choice([0, 1])}
    if chance.random() < 0.05:
        body |= chance.choice([{"prompt": "x" * 2 * CONTEXT}, {"n": -1}, {"stop": [""]}, {"prompt": [10**9]}])
        server.refuse(400, body)
        return "refused"
    with server.open(body) as client:
        client.settimeout(60 if SOAK <= 300 else 600)  # a long one runs beside other work
        if chance.random() < 0.4:
            time.sleep(chance.random() * 0.05)
            leave(client, chance)
            return "left"
        text = receive(client, b"data: [DONE]" if body["stream"] else b'"total_tokens"')
        assert text.startswith(b"HTTP/1.1 200 "), text[:200]
    return "answered"


def test_many_random_requests_leave_nothing_behind(model):
    # Few pages: sequences are preempted.
    with Server(model, "--kv-memory", "0.7MB", "--max-running", 24) as server:
        process = Path(f"/proc/{server.process.pid}")
        def resident() -> int:
            return int(re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())[1])
        before = len(list((process / "fd").iterdir()))
        memory = []
        with ThreadPoolExecutor(16) as pool:
            for first in range(0, SOAK, max(1, SOAK // 10)):
                numbers = range(first, min(SOAK, first + max(1, SOAK // 10)))
                outcomes = list(pool.map(lambda number: random_request(server, number), numbers))
                assert outcomes.count("answered") > 0 and outcomes.count("left") > 0
                until(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0)
                assert server.metric("weft:kv_pages_in_use") == 0
                until(lambda: len(list((process / "fd").iterdir())) <= before + 2)
                memory.append(resident())
        print(f"resident after each tenth of {SOAK}: {memory} kB; {server.metric('vllm:generation_tokens_total'):.0f} ids, "
              f"{server.metric('vllm:num_preemptions_total'):.0f} preemptions")
        assert server.metric('vllm:request_success_total{.*"error"}') == 0
        assert server.metric('vllm:request_success_total{.*"abort"}') > 0 and server.metric("vllm:num_preemptions_total") > 0
        half = len(memory) // 2
        assert SOAK < 5000 or max(memory[half:]) < 1.05 * max(memory[:half]), memory
        assert server.stop() == 143


# ---- clients of others -----------------------------------------------------------------------------------------------


def test_curl(server):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    body = '{"prompt": "Once", "max_tokens": 5, "temperature": 0, "stream": true}'
    done = subprocess.run(["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body],
                          capture_output=True, text=True, timeout=60, check=True)
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in done.stdout.splitlines()
                   if line.startswith("data: {"))
    assert text == server.complete(prompt="Once", max_tokens=5, temperature=0)["choices"][0]["text"]
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai", reason="pip install -r scripts/requirements-serve.txt")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_the_client_of_openai_completes(client, server):
    answer = client.completions.create(model="small", prompt="Once", max_tokens=8, temperature=0, logprobs=2, n=2)
    raw = server.complete(prompt="Once", max_tokens=8, temperature=0, logprobs=2, n=2)
    assert [choice.text for choice in answer.choices] == [choice["text"] for choice in raw["choices"]]
    assert answer.choices[0].logprobs.token_logprobs == raw["choices"][0]["logprobs"]["token_logprobs"]
    assert answer.usage.total_tokens == raw["usage"]["total_tokens"] and answer.choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["small"]


def test_the_client_of_openai_streams(client):
    whole = client.completions.create(model="small", prompt=["Once", "b"], max_tokens=12, seed=3)
    texts = {0: "", 1: ""}
    usage = None
    for event in client.completions.create(model="small", prompt=["Once", "b"], max_tokens=12, seed=3, stream=True,
                                           stream_options={"include_usage": True}, extra_body={"top_k": 0}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices] and usage == whole.usage


def test_the_client_of_openai_understands_refusals(client):
    import openai
    with pytest.raises(openai.BadRequestError, match="temperature: got '-1'") as caught:
        client.completions.create(model="small", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="model"):
        client.completions.create(model="gpt", prompt="a")


def test_the_client_of_openai_may_leave_a_stream(client, server):
    with client.completions.create(model="small", prompt="a", max_tokens=900, stream=True, n=8,
                                   extra_body={"ignore_eos": True}) as events:
        next(iter(events))
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("weft:kv_pages_in_use") == 0


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(server):
    status, headers, body = server.get("/")
    page = body.decode()
    nonce = re.search(r'<script nonce="(\w{32})">', page)[1]
    policy = headers["Content-Security-Policy"]
    assert status == 200 and policy.startswith(f"default-src 'none'; script-src 'nonce-{nonce}'") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"https?://|\bsrc=|@import|innerHTML|\son\w+=|\sstyle=", page)
    assert page.count("<script") == 1 and re.search(rf'<style nonce="{nonce}">', page)
    assert nonce not in server.get("/")[2].decode()


class Browser:
    """Headless Chromium, through the WebDriver protocol of chromedriver."""

    def __init__(self) -> None:
        driver = shutil.which("chromedriver")
        if driver is None or shutil.which("chromium") is None:
            pytest.skip("needs chromium and chromedriver: scripts/deps.sh --browser")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen([driver, f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._ready, 60)
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}
        chosen = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}}
        self.session = ""
        self.session = self.call("POST", "", chosen)["sessionId"]

    def _ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("GET", "/status")
            return json.loads(connection.getresponse().read())["value"]["ready"]
        except OSError:
            return False

    def call(self, method: str, path: str, body: object = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = None if body is None else json.dumps(body)
        connection.request(method, f"/session{'/' + self.session if self.session else ''}{path}", data,
                           {"Content-Type": "application/json"})
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def run(self, script: str):
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def close(self) -> None:
        if self.session:
            self.call("DELETE", "")
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def browser():
    one = Browser()
    yield one
    one.close()


def fill(browser: Browser, **values: object) -> None:
    for name, value in values.items():
        browser.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(str(value))}")


def test_the_page_in_a_browser(server, browser):
    browser.call("POST", "/url", {"url": server.url + "/"})
    until(lambda: "running" in browser.run("return document.getElementById('load').textContent"))
    assert browser.run("return document.getElementById('model').textContent") == "small"
    # Markup in a prompt stays text.
    prompt = "<img src=x onerror='document.title=1'><b>Once</b>"
    fill(browser, prompt=prompt, max_tokens=20, temperature=1, seed=9)
    browser.run("document.getElementById('go').click()")
    until(lambda: "ended by" in browser.run("return document.getElementById('state').textContent"))
    wanted = server.complete(prompt=prompt, max_tokens=20, temperature=1, seed=9, logprobs=5)["choices"][0]
    assert browser.run("return document.getElementById('text').textContent") == prompt + wanted["text"]
    assert browser.run("return document.querySelectorAll('#text img, #text b').length") == 0
    assert browser.run("return document.title") == "weft"
    spans = browser.run("return Array.from(document.querySelectorAll('#text .token'), s => [s.textContent, s.dataset.p, "
                        "s.title.split('\\n').length, s.style.backgroundColor])")
    assert len(spans) == len(wanted["logprobs"]["tokens"]) and "".join(span[0] for span in spans) == wanted["text"]
    for span, logprob in zip(spans, wanted["logprobs"]["token_logprobs"]):
        assert abs(float(span[1]) - 2.718281828 ** logprob) < 1e-3 and span[2] >= 5 and span[3].startswith("rgba")
    errors = [line for line in browser.call("POST", "/se/log", {"type": "browser"}) if line["level"] == "SEVERE"]
    assert errors == []


def test_the_controls_of_the_page(server, browser):
    browser.call("POST", "/url", {"url": server.url + "/"})
    heights = browser.run("document.getElementById('options').open = true; return Array.from(document.querySelectorAll('button, "
                          "#options input'), one => one.getBoundingClientRect().height)")
    assert len(heights) == 11 and set(heights) == {36}, "buttons and inputs have one height"
    colours = browser.run("return ['go', 'halt'].map(id => getComputedStyle(document.getElementById(id)).backgroundColor)")
    assert colours[0] != colours[1], "one button is the primary one"
    assert browser.run("document.getElementById('options').open = false; return document.getElementById('top_k').checkVisibility()") is False
    assert browser.run("return document.getElementById('key').checkVisibility()") is False, "this server asks for no key"
    assert "0 %" in browser.run("return document.getElementById('legend').textContent")
    # Ctrl-Enter in the prompt; Enter alone is a new line.
    fill(browser, prompt="Once", max_tokens=12, temperature=1, seed=9)
    press = ("const one = new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true, %s});"
             "return document.getElementById('prompt').dispatchEvent(one)")
    assert browser.run(press % "ctrlKey: false") is True and browser.run("return document.getElementById('state').textContent") == ""
    assert browser.run(press % "ctrlKey: true") is False
    until(lambda: "ended by" in browser.run("return document.getElementById('state').textContent"))
    # A click shows the alternatives of a token, another one or Escape hides them.
    wanted = server.complete(prompt="Once", max_tokens=12, temperature=1, seed=9, logprobs=5)["choices"][0]["logprobs"]
    rows = "return Array.from(document.querySelectorAll('#alternatives li'), row => [row.textContent, row.className])"
    for number in (0, 7):
        browser.run(f"document.querySelectorAll('#text .token')[{number}].click()")
        shown = browser.run(rows)
        top = sorted(wanted["top_logprobs"][number].items(), key=lambda one: -one[1])
        assert [row[0] for row in shown] == [f"{json.dumps(token, ensure_ascii=False)}{100 * 2.718281828459045 ** logprob:.1f} %"
                                             for token, logprob in top]
        assert [row[1] for row in shown] == ["chosen" if token == wanted["tokens"][number] else "" for token, _ in top]
        assert browser.run("return document.querySelectorAll('#text .token.chosen').length") == 1
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.run(rows) == []
    browser.run("document.querySelectorAll('#text .token')[3].click()")
    browser.run("document.querySelectorAll('#text .token')[3].click()")
    assert browser.run(rows) == []


def test_the_page_asks_for_a_key_after_it_was_refused(model, tmp_path, browser):
    (tmp_path / "key").write_text("opensesame\n")
    with Server(model, "--api-key-file", tmp_path / "key") as server:
        server.fields = {"Authorization": "Bearer opensesame"}
        browser.call("POST", "/url", {"url": server.url + "/"})
        fill(browser, prompt="Once", max_tokens=4)
        browser.run("document.getElementById('go').click()")
        until(lambda: browser.run("return document.getElementById('state').className") == "error")
        until(lambda: browser.run("return document.getElementById('key').checkVisibility()"))
        fill(browser, key="opensesame")
        browser.run("document.getElementById('go').click()")
        until(lambda: "ended by" in browser.run("return document.getElementById('state').textContent"))
        until(lambda: "running" in browser.run("return document.getElementById('load').textContent"))


def test_the_page_stops_and_says_what_is_wrong(server, browser, tmp_path):
    endless = 100_000  # tokens take minutes: the answer is under way when the click arrives
    with Server(write_model(tmp_path / "endless.bin", tokenizer_json(), max_positions=endless)) as other:
        browser.call("POST", "/url", {"url": other.url + "/"})
        browser.run("document.getElementById('max_tokens').removeAttribute('max')")
        fill(browser, prompt="a", max_tokens=endless - 10, temperature=0)
        browser.run("document.getElementById('go').click()")
        until(lambda: browser.run("return document.querySelectorAll('#text .token').length") > 3)
        browser.run("document.getElementById('halt').click()")
        until(lambda: browser.run("return document.getElementById('state').textContent") == "stopped")
        until(lambda: other.metric("vllm:num_requests_running") == 0)
        assert other.metric("vllm:generation_tokens_total") < endless - 10
        browser.call("POST", "/url", {"url": "about:blank"})
    browser.call("POST", "/url", {"url": server.url + "/"})
    fill(browser, prompt="x" * (CONTEXT + 5))
    browser.run("document.getElementById('go').click()")
    until(lambda: str(CONTEXT - 1) in browser.run("return document.getElementById('state').textContent"))
    assert "error" in browser.run("return document.getElementById('state').className")
