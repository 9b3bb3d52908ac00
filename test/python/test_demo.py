"""What `make demo` leaves: a model tuned on conversations, which chats in the terminal, on the page and with OpenAI's client, and is
served by the commands that the demo prints and that README.md and doc/serving.md show. They are run by a shell as they stand,
with fewer steps and stories and a free port in the place of 8000. What a model of so few steps says does not matter here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from printed_commands import ROOT, make_checkout  # noqa: E402
from test_serve import browser, fill, until  # noqa: E402, F401

sys.path.insert(0, str(ROOT / "scripts"))
from token_shard import TokenShard  # noqa: E402

STEPS = 3
INSTALL = ".venv/bin/python -m pip install -r scripts/requirements-serve.txt\n"


def demo(place: Path, part: str) -> str:
    done = subprocess.run(["scripts/run_demo.sh", part], cwd=place, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "DEMO_TRAIN_OPTIONS": f"--steps {STEPS}"})
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, str]:
    """A directory like a checkout after `make demo`, with few stories, and what the demo printed last."""
    place = make_checkout(tmp_path_factory.mktemp("checkout"), ("scripts", "dev", "models"))
    for command in (["dev/data/make_stories.py", "-o", "data/stories", "--stories", "250"],
                    ["dev/prepare_data.py", "data/stories/train.txt", "--val", "data/stories/val.txt", "--tokenizer",
                     "models/tiny-llama/tokenizer.json", "-o", "data/stories"],
                    ["dev/data/make_chats.py", "-o", "data/chats/chats.jsonl", "--chats", "100"],
                    ["dev/prepare_data.py", "--chat", "data/chats/chats.jsonl", "--tokenizer", "models/tiny-llama/tokenizer.json", "--chat-format",
                     "models/tiny-llama/chat_format.json", "-o", "data/chats"]):
        subprocess.run([sys.executable, *command], cwd=place, check=True, capture_output=True)
    for part in ("train", "infer"):
        demo(place, part)
    return place, demo(place, "chat")


def blocks(document: str) -> list[str]:
    """The indented blocks of a document that have to do with a server of the demo's model, after that many steps."""
    text = (ROOT / document).read_text(encoding="utf-8")
    text = re.sub(r"step_\d{8}", f"step_{STEPS:08}", text)
    found = [re.sub(r"^ {4}", "", block, flags=re.M) for block in re.findall(r"(?:^ {4}.*\n)+", text, re.M)]
    return [block for block in found if "127.0.0.1:8000" in block]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer_to(port: int, story: dict) -> str:
    """Of a request that is not streamed, when the model has been loaded."""
    return post(port, "/v1/completions", story)["choices"][0]["text"]


def post(port: int, path: str, body: dict) -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > end or getattr(error, "code", 503) != 503:
                raise
            time.sleep(0.1)


def shown(block: str, printed: str) -> str:
    """The text that a client shows."""
    if not block.startswith("curl"):
        return printed
    events = [line[6:] for line in printed.splitlines() if line.startswith("data: {")]
    if not events:
        return json.loads(printed)["choices"][0]["message"]["content"]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_the_demo_prints_how_to_serve_its_model(place):
    printed = re.findall(r"^  (\./infer_pythia .*--serve .*)$", place[1], re.M)
    for document in ("README.md", "doc/serving.md"):
        assert blocks(document)[0] == printed[0] + "\n" and len(printed) == 1, document


def test_the_page_on_chats_begins_with_the_chat_that_the_demo_prints(place):
    command, = re.findall(r"^  (\./infer_pythia .*--chat .*)$", place[1], re.M)
    text = re.sub(r"step_\d{8}", f"step_{STEPS:08}", (ROOT / "doc/chat.md").read_text(encoding="utf-8"))
    assert re.findall(r"^ {4}(.*)$", text, re.M)[0] == command


@contextmanager
def served(place: Path, command: str) -> Iterator[int]:
    """The port of the server that the command starts."""
    port = free_port()
    process = subprocess.Popen(["bash", "-c", "exec " + command.replace(":8000", f":{port}")], cwd=place, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


@pytest.mark.parametrize("document", ["README.md", "doc/serving.md"])
def test_clients_stream_from_the_demos_own_model(place, document):
    server, *clients = blocks(document)
    clients = [client for client in clients if client.startswith(("curl", INSTALL))]  # some blocks are configurations of proxies
    assert len(clients) == (1 if document == "README.md" else 3)
    assert document == "README.md" or (clients[1].startswith(INSTALL) and "from openai import OpenAI\n" in clients[1])
    with served(place[0], server) as port:
        story = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 120, "temperature": 0.7, "seed": 7}
        expected = answer_to(port, story)
        assert len(expected) > 100
        for block in clients:
            if block.startswith(INSTALL) and importlib.util.find_spec("openai") is None:
                pytest.skip("pip install -r scripts/requirements-serve.txt")
            if block.startswith("curl") and shutil.which("curl") is None:
                continue
            command = block.removeprefix(INSTALL).replace(":8000", f":{port}")  # it is installed
            done = subprocess.run(["bash", "-ec", command], cwd=place[0], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, (block, done.stderr)
            if "/v1/chat/" in block:  # without a seed
                assert shown(block, done.stdout)
            else:
                assert shown(block, done.stdout) == expected, block


# ---- the chat --------------------------------------------------------------------------------------------------------

QUESTION = "Tell me a story about Mia, a curious girl who lived by the sea."
SERVE = f"./infer_pythia --model runs/demo-chat/step_{STEPS:08}/model.bin --served-name demo --serve 127.0.0.1:8000"


def test_the_demo_prints_a_turn_of_the_chat_that_its_next_command_begins(place):
    """By temperature, seed and question alone."""
    printed = re.search(r"\n== chat: one turn\n> (.*)\n((?:.|\n)*?)\n\n== next", place[1])
    command, = re.findall(r"^  (\./infer_pythia .*--chat .*)$", place[1], re.M)
    assert printed and printed[1] == QUESTION
    done = subprocess.run(["bash", "-c", command + " --seed 1"], cwd=place[0], input=QUESTION + "\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == printed[2] + "\n", done


def test_the_prompt_is_that_of_the_conversations_it_was_tuned_on(place):
    """The checkpoint has the chat format of its shards: the server makes of the same messages the ids that were trained on."""
    with open(place[0] / "data/chats/chats.jsonl", encoding="utf-8") as file:
        conversations = [json.loads(line)["messages"] for line in file]
    shards = [TokenShard(path) for path in sorted((place[0] / "data/chats").glob("*.bin"))]
    trained = {tuple(shard.tokens[begin:end].tolist()) for shard in shards for begin, end in zip(shard.starts, shard.starts[1:])}
    assert len(conversations) == 100
    with served(place[0], SERVE) as port:
        asked = [tuple(post(port, "/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]) for messages in conversations]
    assert set(asked) == trained


def test_the_openai_client_chats_with_the_demos_model(place):
    openai = pytest.importorskip("openai")
    with served(place[0], SERVE) as port:
        asked = [{"role": "user", "content": QUESTION}]
        body = {"model": "demo", "messages": asked, "max_tokens": 40, "temperature": 0.7, "seed": 1}
        expected = post(port, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        events = client.chat.completions.create(**body, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == expected
        after = [*asked, {"role": "assistant", "content": expected}, {"role": "user", "content": "And then?"}]
        assert client.chat.completions.create(**body | {"messages": after}).choices[0].finish_reason in ("stop", "length")


def test_the_page_chats_with_the_demos_model(place, browser):  # noqa: F811
    def turns() -> list[list[str]]:
        return browser.run("return Array.from(document.querySelectorAll('.turn'), one => [one.className, one.textContent])")

    with served(place[0], SERVE) as port:
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20, "temperature": 0}
        expected = post(port, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        browser.call("POST", "/url", {"url": f"http://127.0.0.1:{port}/"})
        until(lambda: browser.run("return document.getElementById('tab_chat') !== null"))
        browser.run("document.getElementById('tab_chat').click()")
        fill(browser, prompt=QUESTION, max_tokens=20, temperature=0)
        browser.run("document.getElementById('go').click()")
        until(lambda: "ended by" in browser.run("return document.getElementById('state').textContent"))
        assert turns() == [["turn user", QUESTION], ["turn assistant", expected]]
