"""What `make demo` leaves, served to clients by the commands that it prints and that README.md and doc/serving.md show: run by a
shell as they stand, with fewer steps and stories and a free port in the place of 8000."""

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
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from printed_commands import ROOT, make_checkout  # noqa: E402

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
                     "models/tiny-llama/tokenizer.json", "-o", "data/stories"]):
        subprocess.run([sys.executable, *command], cwd=place, check=True, capture_output=True)
    demo(place, "train")
    return place, demo(place, "infer")


def blocks(document: str) -> list[str]:
    """The indented blocks of a document that have to do with a server of the demo's model, after that many steps."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("step_00000400", f"step_{STEPS:08}")
    found = [re.sub(r"^ {4}", "", block, flags=re.M) for block in re.findall(r"(?:^ {4}.*\n)+", text, re.M)]
    return [block for block in found if "127.0.0.1:8000" in block]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer_to(port: int, story: dict) -> str:
    """Of a request that is not streamed, when the model has been loaded."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(story).encode(),
                                     {"Content-Type": "application/json"})
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["text"]
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > end or getattr(error, "code", 503) != 503:
                raise
            time.sleep(0.1)


def shown(block: str, printed: str) -> str:
    """The text that a client shows."""
    if not block.startswith("curl"):
        return printed
    events = [line[6:] for line in printed.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_the_demo_prints_how_to_serve_its_model(place):
    printed = re.findall(r"^  (\./infer_pythia .*--serve .*)$", place[1], re.M)
    for document in ("README.md", "doc/serving.md"):
        assert blocks(document)[0] == printed[0] + "\n" and len(printed) == 1, document


@pytest.mark.parametrize("document", ["README.md", "doc/serving.md"])
def test_clients_stream_from_the_demos_own_model(place, document):
    server, *clients = blocks(document)
    # The demo's model does not chat; and some blocks are the configurations of proxies.
    clients = [client for client in clients if client.startswith(("curl", INSTALL)) and "/v1/chat/" not in client]
    assert len(clients) == (1 if document == "README.md" else 2)
    assert document == "README.md" or (clients[-1].startswith(INSTALL) and "from openai import OpenAI\n" in clients[-1])
    port = free_port()
    process = subprocess.Popen(["bash", "-c", "exec " + server.replace(":8000", f":{port}")], cwd=place[0],
                               stderr=subprocess.DEVNULL)
    try:
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
            assert shown(block, done.stdout) == expected, block
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
