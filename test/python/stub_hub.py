"""A Hugging Face hub on 127.0.0.1 that misbehaves on demand.

It serves files under the hub's addresses (/ORG/NAME/resolve/REVISION/FILE) with the headers the
download script relies on: ETag with git's blob sha1 for small files, X-Linked-Etag and X-Linked-Size
with the sha256 for large ones, X-Repo-Commit, and Range. Faults are attached to file names.

    hub = StubHub()
    hub.add("org/name", "config.json", b"{}")
    hub.fault("config.json", "status", times=1, status=503)
    ...
    hub.close()
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class File:
    data: bytes
    large: bool = False  # announced by X-Linked-*, as the hub does for LFS files
    etag: str | None = None  # None: the right one; "": no etag at all
    size: int | None = None  # announced size, if it is to be wrong
    location: str | None = None  # answer with a redirect to here
    linked: bool = True  # whether that redirect carries X-Linked-*

    def headers(self) -> dict[str, str]:
        etag = self.etag
        if etag is None:
            etag = sha256(self.data) if self.large else git_sha1(self.data)
        headers = {"X-Repo-Commit": COMMIT}
        if self.large and self.linked:
            headers["X-Linked-Size"] = str(len(self.data) if self.size is None else self.size)
            if etag:
                headers["X-Linked-Etag"] = f'"{etag}"'
        elif etag:
            headers["ETag"] = f'"{etag}"'
        return headers


@dataclass
class Fault:
    name: str  # end of the path it applies to
    kind: str
    times: int  # how many requests it spoils; negative: all
    methods: tuple[str, ...]
    options: dict = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case


class StubHub:
    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.sending = threading.Event()  # set when a "drip" has sent its first half
        self.go_on = threading.Event()  # ends its wait
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo: str, name: str, data: bytes, revision: str = "main", **options) -> File:
        """Adds a file of a repository, at the revision and at the commit it stands for."""
        file = File(data, **options)
        for at in (revision, COMMIT):
            self.files[f"/{repo}/resolve/{at}/{name}"] = file
        return file

    def add_path(self, path: str, data: bytes, **options) -> File:
        self.files[path] = File(data, **options)
        return self.files[path]

    def fault(self, name: str, kind: str, times: int = -1, methods: tuple[str, ...] = ("HEAD", "GET"), **options) -> None:
        """Spoils the next `times` requests whose path ends in `name`. Kinds are the fault_* methods below."""
        self.faults.append(Fault(name, kind, times, methods, options))

    def seen(self, method: str, name: str = "") -> list[Request]:
        with self.lock:
            return [r for r in self.requests if r.method == method and r.path.endswith(name)]

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times != 0 and method in fault.methods and path.endswith(fault.name):
                    fault.times -= 1
                    return fault
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        return type("BoundHandler", (Handler,), {"hub": self})


class Handler(BaseHTTPRequestHandler):
    hub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, self.path, headers))
        fault = self.hub.take_fault(self.command, self.path)
        file = self.hub.files.get(self.path)
        try:
            if fault:
                spoil: Callable = getattr(self, f"fault_{fault.kind}")
                spoil(file, **fault.options)
            elif file is None:
                self.reply(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
            elif file.location:
                self.reply(302, b"Found", {**file.headers(), "Location": file.location})
            else:
                self.serve(file)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def reply(self, status: int, body: bytes, headers: dict[str, str], send: int | None = None) -> None:
        """Answers; with `send` only that many bytes of the body follow, then the connection is cut."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if send is None else body[:send])
        if send is not None:
            self.wfile.flush()
            self.close_connection = True

    def offset(self) -> int:
        return int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))

    def serve(self, file: File, send: int | None = None, shift: int = 0) -> None:
        """Answers as a good server does, Range included. `shift` makes it lie about where it starts."""
        start = self.offset()
        size = len(file.data)
        if start == 0:
            self.reply(200, file.data, file.headers(), send)
        elif start >= size:
            self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
        else:
            start += shift
            span = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
            self.reply(206, file.data[start:], {**file.headers(), **span}, send)

    # ---- the faults ----

    def fault_status(self, file: File | None, status: int, headers: dict[str, str] | None = None) -> None:
        self.reply(status, b"<html>an error page</html>", headers or {})

    def fault_expire(self, file: File, renew: Callable[[], None]) -> None:
        """Refuses as an outdated signed address does; asked again, the hub would name a new one."""
        renew()
        self.reply(403, b"Request has expired", {})

    def fault_html(self, file: File | None) -> None:
        """What a login page in between answers to everything."""
        self.reply(200, b"\n<!DOCTYPE html><html><body>Please log in</body></html>", {"Content-Type": "text/html"})

    def fault_cut(self, file: File, share: float = 0.5) -> None:
        """Sends a share of what is left, then drops the connection."""
        self.serve(file, send=int((len(file.data) - self.offset()) * share))

    def fault_cut_and_ignore_range(self, file: File) -> None:
        self.reply(200, file.data, file.headers(), send=len(file.data) // 2)

    def fault_ignore_range(self, file: File) -> None:
        self.reply(200, file.data, file.headers())

    def fault_shift_range(self, file: File) -> None:
        self.serve(file, shift=-1 if self.offset() else 0)

    def fault_slow(self, file: File, seconds: float) -> None:
        time.sleep(seconds)
        self.serve(file)

    def fault_unannounced(self, file: File, repeat: int = 1) -> None:
        """Says nothing about size and hash, and sends the data so many times: an end without end, nearly."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.command == "GET":
            for _ in range(repeat):
                self.wfile.write(file.data)

    def fault_drip(self, file: File, seconds: float) -> None:
        """Sends one half, waits so long or until it may go on, sends the other: time to be interrupted in the middle."""
        half = len(file.data) // 2
        self.send_response(200)
        for name, value in {"Content-Length": str(len(file.data)), **file.headers()}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(file.data[:half])
        self.wfile.flush()
        self.hub.sending.set()
        self.hub.go_on.wait(seconds)
        self.wfile.write(file.data[half:])
