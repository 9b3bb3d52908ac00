"""infer_pythia --serve behind nginx and Caddy, with the configurations of doc/serving.md and TLS. Each is skipped where the
program, or openssl, is missing (Debian: nginx-light, caddy, openssl)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

from test_infer_cli import tokenizer_json, write_model  # noqa: E402
from test_serve import CONTEXT, LONG, PROGRAM, ROOT, Server, receive, request, until  # noqa: E402

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

HOST = "weft.example.org"
PROXIES = {"nginx": "nginx", "caddy": "caddyfile"}  # the language of its configuration


def documented(proxy: str) -> str:
    """The configuration as doc/serving.md has it."""
    blocks = re.findall(rf"^```{PROXIES[proxy]}\n(.*?)^```$", (ROOT / "doc/serving.md").read_text(), re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def write_configuration(proxy: str, folder: Path, port: int, upstream: int) -> list[str]:
    """The documented one with ports and paths of this test. Returns the command that runs it."""
    text = replaced(documented(proxy), ("127.0.0.1:8000", f"127.0.0.1:{upstream}"))
    if proxy == "nginx":
        text = replaced(text, ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"), ("/etc/ssl/weft.pem", str(folder / "weft.pem")),
                        ("/etc/ssl/weft.key", str(folder / "weft.key")))
        files = "".join(f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = (f"pid {folder}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{files}{text}}}\n")
        command = ["nginx", "-p", str(folder), "-c", str(folder / "proxy.conf"), "-g", "daemon off;"]
        if os.getuid() == 0:
            text = "user root;\n" + text
    else:
        text = replaced(text, (f"{HOST} {{\n", f"https://{HOST}:{port} {{\nbind 127.0.0.1\ntls {folder}/weft.pem {folder}/weft.key\n"))
        text = "{\nadmin off\nauto_https off\nstorage file_system " + str(folder) + "\n}\n" + text
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "proxy.conf")]
    (folder / "proxy.conf").write_text(text)
    return command


class Proxy:
    """One of them, in front of `server`."""

    def __init__(self, name: str, folder: Path, server: Server):
        for program in (name, "openssl"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}", "-addext",
                        f"subjectAltName=DNS:{HOST}", "-keyout", folder / "weft.key", "-out", folder / "weft.pem"],
                       check=True, capture_output=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.host = f"{HOST}:{self.port}"
        self.tls = ssl.create_default_context(cafile=folder / "weft.pem")
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(write_configuration(name, folder, self.port, server.port), stdout=self.log, stderr=self.log,
                                        env={**os.environ, "HOME": str(folder)})
        until(lambda: self.ask("GET /health").startswith(b"HTTP/1.1 200") or self.process.poll() is not None)
        assert self.process.poll() is None, (folder / "log").read_text()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

    def open(self, data: bytes) -> ssl.SSLSocket:
        client = self.tls.wrap_socket(socket.create_connection(("127.0.0.1", self.port), timeout=60), server_hostname=HOST)
        client.sendall(data)
        return client

    def ask(self, line: str, *fields: str, host: str = "") -> bytes:
        head = [f"{line} HTTP/1.1", f"Host: {host or self.host}", "Connection: close", *fields]
        with contextlib.suppress(ConnectionRefusedError), self.open("\r\n".join(head).encode() + b"\r\n\r\n") as client:
            return receive(client)
        return b""

    def begin(self, **body: object) -> ssl.SSLSocket:
        """A request whose answer is not read yet."""
        return self.open(replaced(request(json.dumps(body).encode()).decode(), ("localhost", self.host)).encode())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("proxied models") / "small.bin", tokenizer_json(), max_positions=CONTEXT)


@pytest.mark.parametrize("name", PROXIES)
def test_clients_behind_a_proxy(model, tmp_path, name):
    with Server(model, "--allowed-host", HOST, "--log-requests") as server, Proxy(name, tmp_path, server) as proxy:
        # The page may use its own server, through the proxy, and pages of other sites may not.
        assert b"</html>" in proxy.ask("GET /")
        assert proxy.ask("GET /version", f"Origin: https://{proxy.host}").startswith(b"HTTP/1.1 200")
        assert proxy.ask("GET /version", "Origin: https://other.example").startswith(b"HTTP/1.1 403")
        assert b'"status":"ok"' in proxy.ask("GET /health", "X-Request-Id: through-a-proxy")
        until(lambda: any("id=through-a-proxy method=GET" in line for line in server.lines))
        assert server.get("/health", Host="other.example")[0] == 403
        # As large as the server takes them, and no proxy says 413 before it.
        with proxy.begin(prompt="a" * 3_000_000, max_tokens=1) as client:
            assert b"context_length_exceeded" in receive(client, b"context_length_exceeded")
        # Who leaves ends the request, before the answer and within it.
        for stream, status in ((False, 499), (True, 200)):
            with proxy.begin(**LONG, n=64, stream=stream) as client:
                if stream:
                    receive(client, b"data: ")
                until(lambda: server.metric("vllm:num_requests_running") == 64)
            until(lambda: server.metric("vllm:num_requests_running") == 0)
            until(lambda: any(f"status={status} prompt_tokens=1 " in line for line in server.lines))  # noqa: B023
            line = next(line for line in server.lines if f"status={status} prompt_tokens=1 " in line)
            assert line.endswith("finish=abort") and 0 < int(re.search(r"completion_tokens=(\d+)", line)[1]) < 64 * LONG["max_tokens"]


@pytest.mark.parametrize("name", PROXIES)
def test_events_are_passed_on_as_they_come(model, tmp_path, name):
    """The server hangs before its 6th token. All that a proxy collected would never come."""
    with Server(model, "--allowed-host", HOST, "--debug-inject", "hang@token=6") as server, Proxy(name, tmp_path, server) as proxy:
        with proxy.begin(**LONG, stream=True) as client:
            text = b""
            while text.count(b"data: {") < 4:
                text += receive(client, b"\n\n")
            client.settimeout(1.5)
            with pytest.raises(TimeoutError):  # a client that waits is left in peace
                while client.recv(65536):
                    pass
        server.process.kill()
        server.process.wait(30)
