#!/usr/bin/env python3
"""Takes the screenshot of the server's page for README.md: doc/pictures/page.png.

    .venv/bin/python scripts/convert_hf.py models/tiny-llama -o runs/tiny-llama.bin
    .venv/bin/python dev/pictures/screenshot.py runs/tiny-llama.bin

Starts ./infer_pythia --serve on a free port, opens its page in headless Chromium (scripts/deps.sh --browser installs it),
generates a story with a fixed seed, and writes a picture of the whole page. The picture depends on Chromium and the fonts of the
machine, so no test compares its bytes.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 840
STORY = {"prompt": "Once upon a time", "max_tokens": 110, "temperature": 0.8, "seed": 7}
SECONDS = 120  # for each of the waits


def until(ready: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if value := ready():
                return value
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"error: {what}: not within {SECONDS} s")


def call(port: int, method: str, path: str, body: object = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    value = json.loads(connection.getresponse().read())["value"]
    connection.close()
    if isinstance(value, dict) and "error" in value:
        sys.exit(f"error: chromedriver: {value['message']}")
    return value


def photograph(driver: int, page: str) -> bytes:
    options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                        "--blink-settings=preferredColorScheme=1", f"--window-size={WIDTH},800"]}
    session = "/session/" + call(driver, "POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})["sessionId"]

    def run(script: str) -> Any:
        return call(driver, "POST", session + "/execute/sync", {"script": script, "args": []})

    try:
        call(driver, "POST", session + "/url", {"url": page})
        for name, value in STORY.items():
            run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(str(value))}")
        run("document.getElementById('go').click()")
        until(lambda: "ended by" in run("return document.getElementById('state').textContent"), "the story")
        run("document.getElementById('state').textContent = ''")  # the speed of the machine that takes the picture
        whole = {"x": 0, "y": 0, "width": WIDTH, "height": run("return Math.ceil(document.body.getBoundingClientRect().bottom) + 16"), "scale": 1}
        shot = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True, "clip": whole}}
        return base64.b64decode(call(driver, "POST", session + "/goog/cdp/execute", shot)["data"])
    finally:
        call(driver, "DELETE", session)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model file with a tokenizer")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "doc/pictures/page.png", metavar="FILE")
    options = parser.parse_args()
    chromedriver = shutil.which("chromedriver")
    if chromedriver is None or shutil.which("chromium") is None:
        sys.exit("error: chromium and chromedriver: not installed. Run scripts/deps.sh --browser")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([ROOT / "infer_pythia", "--model", options.model, "--serve", "127.0.0.1:0"],
                              stderr=subprocess.PIPE, text=True)
    driver = subprocess.Popen([chromedriver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = None
        for line in server.stderr or ():
            if address := re.search(r"listening on (http://\S+)", line):
                break
        if address is None:
            sys.exit("error: infer_pythia ended before it listened")
        until(lambda: call(port, "GET", "/status")["ready"], "chromedriver")
        options.output.write_bytes(photograph(port, address[1] + "/"))
    finally:
        for process in (driver, server):
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
