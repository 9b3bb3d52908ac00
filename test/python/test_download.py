"""dev/download_starter_pack.sh against a hub that misbehaves (stub_hub.py). Needs no network.

Every test looks at the same promises: the exit code, one error line that says what to do, nothing
but whole files under final names, and no trace of the token.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stub_hub import COMMIT, StubHub, git_sha1, sha256  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "download_starter_pack.sh"
TOOLS = ["bash", "curl", "flock", "sha256sum"]
pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"
)

TOKEN = "hf_neverShowThisToken"
REPO = "EleutherAI/pythia-160m"
WEIGHTS = random.Random(7).randbytes(200_001)  # an odd size, larger than a socket buffer's first gulp
CONFIG = b'{"model_type": "gpt_neox"}'
TOKENIZER = b'{"model": {}}'
TEXT_PATH = "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"

OK, USAGE, BAD_CONTENT, ENVIRONMENT, NO_SPACE = 0, 2, 3, 4, 5
LINE_S = 60  # longer than anything here takes on a busy machine


class Box:
    """A working directory, a hub with one good model, and a way to run the script there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hub = StubHub()
        self.script = SCRIPT
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory / "home"),
            "TMPDIR": str(directory),
            "HF_ENDPOINT": self.hub.url,
            "WEFT_TEXT_ENDPOINT": self.hub.url,
            "WEFT_DOWNLOAD_BACKOFF_MS": "10",
            "WEFT_DOWNLOAD_TRIES": "3",
            "NO_PROXY": "*",
            "TERM": "xterm",
        }
        self.add_model(REPO)

    def add_model(self, repo: str, config: bytes = CONFIG, weights: bytes | None = WEIGHTS, revision: str = "main") -> None:
        self.hub.add(repo, "config.json", config, revision)
        self.hub.add(repo, "tokenizer.json", TOKENIZER, revision)
        self.hub.add(repo, "tokenizer_config.json", b"{}", revision)
        if weights is not None:
            self.hub.add(repo, "model.safetensors", weights, revision, large=True)

    def add_sharded(self, repo: str, weight_map: object) -> None:
        self.add_model(repo, weights=None)
        index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        self.hub.add(repo, "model.safetensors.index.json", index)

    def path(self, name: str = "", model: str = "pythia-160m") -> Path:
        return self.directory / "models" / model / name

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.script, *(arguments or ("pythia-160m",))],
            cwd=self.directory,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen) -> subprocess.CompletedProcess:
        out, err = process.communicate(timeout=LINE_S)
        assert TOKEN not in out + err
        assert "\x1b" not in out + err  # not a terminal: no colours; and none from file names
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return self.finish(self.start(*arguments, **environment))

    def succeeds(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        result = self.run(*arguments, **environment)
        assert result.returncode == OK, result.stderr
        assert "error:" not in result.stderr
        return result

    def fails(self, code: int, *words: str, arguments: tuple[str, ...] = (), **environment: str) -> str:
        """Runs, checks code and message, and returns the one error line."""
        result = self.run(*arguments, **environment)
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.returncode == code, result.stderr
        assert len(errors) == 1, result.stderr
        for word in (": got ", "expected ", *words):
            assert word in errors[0]
        assert errors[0].endswith((".", "?")) or "http" in errors[0]  # it ends with what to do
        assert result.stdout == ""
        return errors[0]

    def files(self, model: str = "pythia-160m") -> list[str]:
        found = [p.name for p in self.path(model=model).glob("*") if p.name != ".download.lock"]
        return sorted(found)

    def assert_whole(self) -> None:
        assert self.files() == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        assert self.path("model.safetensors").read_bytes() == WEIGHTS
        assert self.path("config.json").read_bytes() == CONFIG
        assert self.path("tokenizer.json").read_bytes() == TOKENIZER

    def assert_no_weights(self) -> None:
        assert not self.path("model.safetensors").exists()

    def fill_cache(self, root: Path, repo: str = REPO, weights: bytes = WEIGHTS) -> Path:
        """Lays the model out as huggingface_hub does; returns the weights' blob."""
        base = root / ("models--" + repo.replace("/", "--"))
        snapshot = base / "snapshots" / COMMIT
        for directory in (base / "refs", base / "blobs", snapshot):
            directory.mkdir(parents=True)
        (base / "refs" / "main").write_text(COMMIT)
        contents = {
            "config.json": (CONFIG, git_sha1(CONFIG)),
            "tokenizer.json": (TOKENIZER, git_sha1(TOKENIZER)),
            "model.safetensors": (weights, sha256(WEIGHTS)),
        }
        for name, (data, etag) in contents.items():
            (base / "blobs" / etag).write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/{etag}")
        return base / "blobs" / sha256(WEIGHTS)


@pytest.fixture
def box(tmp_path: Path):
    made = Box(tmp_path)
    yield made
    made.hub.close()


# ---- the straight way -----------------------------------------------------------------------------


def test_whole_model_and_next_command(box):
    result = box.succeeds()
    box.assert_whole()
    assert result.stdout == (
        ".venv/bin/python scripts/convert_hf.py models/pythia-160m -o pythia-160m.bin && "
        './infer_pythia --model pythia-160m.bin --prompt "Hello"\n'
    )


def test_llama_gets_a_command_for_the_converter(box):
    """And for the model; the converter says how to go on with the file that it makes: test_next_lines.py runs that."""
    box.add_model("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", config=b'{"model_type": "llama"}')
    result = box.succeeds("TinyLlama-1.1B")  # names may be in any case
    assert ("scripts/convert_hf.py models/tinyllama-1.1b -o tinyllama-1.1b.bin && ./infer_pythia --model tinyllama-1.1b.bin "
            '--prompt "Hello"\n') in result.stdout


def test_any_repository_by_its_name(box):
    box.add_model("some-org/Some_Model.v2")
    box.succeeds("some-org/Some_Model.v2")
    assert box.path("model.safetensors", model="Some_Model.v2").read_bytes() == WEIGHTS


def test_second_run_receives_nothing(box):
    box.succeeds()
    box.hub.requests.clear()
    result = box.succeeds()
    assert box.hub.seen("GET") == []
    assert "already here" in result.stderr
    box.assert_whole()


def test_damaged_file_is_replaced(box):
    box.succeeds()
    damaged = bytearray(WEIGHTS)
    damaged[1000] ^= 1
    box.path("model.safetensors").write_bytes(damaged)
    result = box.succeeds()
    assert "Replacing it" in result.stderr
    box.assert_whole()


def test_revision_is_asked_for_and_kept_apart(box):
    box.add_model(REPO + "-deduped", weights=b"weights of step 3", revision="step3")
    box.succeeds("pythia-160m-deduped", "--revision=step3")
    assert box.path("model.safetensors", model="pythia-160m-deduped-step3").read_bytes() == b"weights of step 3"
    assert box.hub.requests[0].path == f"/{REPO}-deduped/resolve/step3/config.json"


def test_all_files_come_from_the_commit_of_the_first(box):
    box.succeeds()
    assert box.hub.seen("HEAD")[0].path.startswith(f"/{REPO}/resolve/main/")
    assert all(f"/resolve/{COMMIT}/" in request.path for request in box.hub.seen("HEAD")[1:])


def test_dry_run_saves_nothing(box):
    box.add_sharded("org/sharded", {"a": "model-00001-of-00001.safetensors"})
    box.hub.add("org/sharded", "model-00001-of-00001.safetensors", WEIGHTS, large=True)
    result = box.succeeds("pythia-160m", "org/sharded", "--dry-run")
    assert f"{box.hub.url}/{REPO}/resolve/" in result.stdout
    assert "model-00001-of-00001.safetensors" in result.stdout
    assert "200.0KB" in result.stdout and "in all" in result.stdout
    assert list(box.directory.iterdir()) == []


# ---- what servers answer ----------------------------------------------------------------------------


def test_404_of_the_name(box):
    line = box.fails(ENVIRONMENT, "404", "not found", "name", "revision main", arguments=("no-such/model",))
    assert "no-such/model/resolve/main/config.json" in line
    assert box.files(model="model") == []


def test_revision_without_safetensors(box):
    box.add_model("org/old", weights=None)
    box.fails(ENVIRONMENT, "neither model.safetensors nor", "revision", arguments=("org/old",))


@pytest.mark.parametrize("status", [401, 403])
def test_gated_without_token(box, status):
    box.hub.fault("config.json", "status", status=status, headers={"X-Error-Code": "GatedRepo"})
    line = box.fails(ENVIRONMENT, str(status), "licence", "HF_TOKEN", arguments=("llama-3.2-1b",))
    assert f"{box.hub.url}/meta-llama/Llama-3.2-1B" in line
    assert box.files(model="llama-3.2-1b") == []


def test_gated_with_a_token_that_is_refused(box):
    box.hub.fault("config.json", "status", status=403)
    box.fails(ENVIRONMENT, "the token was sent and refused", HF_TOKEN=TOKEN)


def test_401_of_a_name_that_does_not_exist(box):
    box.hub.fault("config.json", "status", status=401, headers={"X-Error-Code": "RepoNotFound"})
    line = box.fails(ENVIRONMENT, "no such public repository", "Check the name", "HF_TOKEN")
    assert "licence" not in line


def test_429_waits_as_asked(box):
    box.hub.fault("model.safetensors", "status", times=1, methods=("GET",), status=429, headers={"Retry-After": "1"})
    start = time.monotonic()
    result = box.succeeds()
    assert time.monotonic() - start >= 1
    assert "HTTP 429" in result.stderr
    box.assert_whole()


def test_429_that_asks_for_an_hour_is_not_waited_for(box):
    box.hub.fault("config.json", "status", status=429, headers={"Retry-After": "3600"})
    box.fails(ENVIRONMENT, "429", "3600 s", "later")


def test_500_once(box):
    box.hub.fault("config.json", "status", times=1, status=408)
    box.hub.fault("tokenizer.json", "status", times=1, status=500)
    box.hub.fault("model.safetensors", "status", times=2, methods=("GET",), status=503)
    box.succeeds()
    box.assert_whole()


def test_500_for_ever(box):
    box.hub.fault("model.safetensors", "status", methods=("GET",), status=500)
    box.fails(ENVIRONMENT, "model.safetensors", "HTTP 500 (3 attempts)", "later")
    assert len(box.hub.seen("GET", "model.safetensors")) == 3
    box.assert_no_weights()


def test_error_page_never_reaches_the_part(box):
    box.hub.fault("model.safetensors", "cut", times=1, methods=("GET",))
    box.hub.fault("model.safetensors", "status", methods=("GET",), status=500)
    box.fails(ENVIRONMENT, "500")
    assert box.path("model.safetensors.part").read_bytes() == WEIGHTS[:100_000]


# ---- hashes and sizes -------------------------------------------------------------------------------


def test_wrong_sha256(box):
    box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, etag=sha256(b"other"))
    box.fails(BAD_CONTENT, f"got sha256 {sha256(WEIGHTS)}", f"expected {sha256(b'other')}")
    box.assert_no_weights()
    assert not any(".part" in name for name in box.files())  # bad content is not continued


def test_server_without_hashes_is_said(box):
    box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, etag="")
    result = box.succeeds()
    assert "model.safetensors: the server names no hash; only the size was checked" in result.stderr
    box.assert_whole()


# ---- lines that break ---------------------------------------------------------------------------------


def test_cut_is_continued(box):
    box.hub.fault("model.safetensors", "cut", times=1, methods=("GET",))
    box.succeeds()
    box.assert_whole()
    ranges = [request.headers.get("range") for request in box.hub.seen("GET", "model.safetensors")]
    assert ranges == [None, "bytes=100000-"]


def test_progress_renews_the_attempts(box):
    box.hub.fault("model.safetensors", "cut", times=6, methods=("GET",))  # twice what is allowed without progress
    box.succeeds()
    box.assert_whole()


def test_cuts_without_progress_end(box):
    box.hub.fault("model.safetensors", "cut_and_ignore_range", methods=("GET",))
    box.hub.faults[0].times = 40  # a guard: an endless loop would come through after these
    box.fails(ENVIRONMENT, "a cut connection", "resumes")
    box.assert_no_weights()


def test_range_answered_with_200(box):
    box.hub.fault("model.safetensors", "cut", times=1, methods=("GET",))
    box.hub.fault("model.safetensors", "ignore_range", methods=("GET",))
    result = box.succeeds()
    assert "cannot resume" in result.stderr
    box.assert_whole()


def test_range_answered_from_elsewhere(box):
    box.hub.fault("model.safetensors", "cut", times=1, methods=("GET",))
    box.hub.fault("model.safetensors", "shift_range", methods=("GET",))
    box.succeeds()
    box.assert_whole()


def test_slow_server_times_out(box):
    box.hub.fault("config.json", "slow", seconds=2.5)
    box.fails(ENVIRONMENT, "network", "no answer for 1 s", HF_HUB_DOWNLOAD_TIMEOUT="1", WEFT_DOWNLOAD_TRIES="1")
    assert box.files() == []


def test_slow_once(box):
    box.hub.fault("model.safetensors", "slow", times=1, methods=("GET",), seconds=2.5)
    result = box.succeeds(HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "no answer for 1 s" in result.stderr
    box.assert_whole()


def test_endpoint_down(box):
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        box.fails(ENVIRONMENT, "no usable network", url, "no connection", "HF_ENDPOINT", HF_ENDPOINT=url)
    assert box.files() == []


def test_host_name_that_does_not_resolve(box):
    too_long = "x" * 64 + ".invalid"  # for DNS: refused without asking a server, which some networks answer themselves
    box.fails(ENVIRONMENT, "no usable network", "does not resolve", HF_ENDPOINT=f"http://{too_long}")


# ---- unfinished files of earlier runs -------------------------------------------------------------------


def leave_part(box: Box, part: bytes) -> None:
    """Makes an honest unfinished download, then puts other bytes into it."""
    box.hub.fault("model.safetensors", "cut", times=1, methods=("GET",))
    box.run(WEFT_DOWNLOAD_TRIES="1")
    assert box.path("model.safetensors.part").stat().st_size == 100_000
    box.path("model.safetensors.part").write_bytes(part)
    box.hub.requests.clear()


def test_part_is_continued(box):
    leave_part(box, WEIGHTS[:150_000])
    box.succeeds()
    box.assert_whole()
    assert [r.headers.get("range") for r in box.hub.seen("GET", "model.safetensors")] == ["bytes=150000-"]


def test_part_of_another_version_is_thrown_away(box):
    leave_part(box, WEIGHTS[:100_000])
    newer = WEIGHTS[::-1]
    box.hub.add(REPO, "model.safetensors", newer, large=True)
    result = box.succeeds()
    assert "another version" in result.stderr
    assert [r.headers.get("range") for r in box.hub.seen("GET", "model.safetensors")] == [None]
    assert box.path("model.safetensors").read_bytes() == newer


def test_part_without_a_record_is_thrown_away(box):
    box.path().mkdir(parents=True)
    box.path("model.safetensors.part").write_bytes(WEIGHTS[:1000])
    box.succeeds()
    assert [r.headers.get("range") for r in box.hub.seen("GET", "model.safetensors")] == [None]
    box.assert_whole()


def test_damaged_part_gets_a_second_chance(box):
    leave_part(box, b"x" * 100_000)
    result = box.succeeds()
    assert "Starting from 0" in result.stderr
    box.assert_whole()


@pytest.mark.parametrize("part", [WEIGHTS, WEIGHTS + b"too much"], ids=["complete", "too long"])
def test_part_that_is_complete_or_too_long(box, part):
    leave_part(box, part)
    box.succeeds()
    box.assert_whole()
    assert len(box.hub.seen("GET", "model.safetensors")) == (0 if part == WEIGHTS else 1)


def test_416_of_a_size_that_was_not_announced(box):
    file = box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True)
    box.hub.fault("model.safetensors", "status", times=-1, methods=("GET",), status=416)
    leave = box.run()
    assert leave.returncode == ENVIRONMENT and "HTTP 416" in leave.stderr
    box.assert_no_weights()
    box.hub.faults.clear()
    assert file.data == WEIGHTS
    box.succeeds()
    box.assert_whole()


# ---- the token ------------------------------------------------------------------------------------------


def authorizations(hub: StubHub) -> set[str | None]:
    return {request.headers.get("authorization") for request in hub.requests}


def test_token_goes_to_the_endpoint(box):
    box.succeeds(HF_TOKEN=TOKEN)
    assert authorizations(box.hub) == {f"Bearer {TOKEN}"}


def test_no_token_no_header(box):
    box.succeeds()
    assert authorizations(box.hub) == {None}


@pytest.mark.parametrize("linked", [True, False], ids=["as the hub does", "without X-Linked headers"])
@pytest.mark.parametrize("hops", [1, 2])
def test_token_is_dropped_on_redirect_to_another_host(box, linked, hops):
    other = StubHub()
    try:
        other.add_path("/blob?signature=1", WEIGHTS, etag=sha256(WEIGHTS))
        other.add_path("/first", WEIGHTS, location="/blob?signature=1")
        target = "/blob?signature=1" if hops == 1 else "/first"
        box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, location=other.url + target, linked=linked)
        box.succeeds(HF_TOKEN=TOKEN)
        box.assert_whole()
        assert authorizations(other) == {None}
        assert authorizations(box.hub) == {f"Bearer {TOKEN}"}
        assert box.hub.seen("GET", "model.safetensors") == []
    finally:
        other.close()


def test_token_is_kept_on_redirect_within_the_endpoint(box):
    box.hub.add_path("/api/cache/config", CONFIG)
    box.hub.add(REPO, "config.json", CONFIG, location="/api/cache/config")
    box.succeeds(HF_TOKEN=TOKEN)
    box.assert_whole()
    assert authorizations(box.hub) == {f"Bearer {TOKEN}"}


def test_redirect_for_ever(box):
    box.hub.add(REPO, "config.json", CONFIG, location=f"/{REPO}/resolve/main/config.json")
    box.fails(ENVIRONMENT, "redirects")


def test_redirect_to_another_protocol(box):
    box.hub.add(REPO, "config.json", CONFIG, location="file:///etc/passwd")
    box.fails(ENVIRONMENT, "redirect to file:///etc/passwd")


def test_expired_signed_address_is_asked_for_again(box):
    other = StubHub()
    try:
        for address in ("/signed-1", "/signed-2"):
            other.add_path(address, WEIGHTS, etag="")
        file = box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, location=other.url + "/signed-1")
        other.fault("/signed-1", "cut", times=1)
        other.fault("/signed-1", "expire", renew=lambda: setattr(file, "location", other.url + "/signed-2"))
        box.succeeds()
        box.assert_whole()
        assert [r.headers.get("range") for r in other.seen("GET", "/signed-2")] == ["bytes=100000-"]
    finally:
        other.close()


def test_token_from_files(box):
    home = box.directory / "hf"
    home.mkdir()
    (home / "token").write_text(TOKEN + "\n")
    box.succeeds(HF_HOME=str(home))
    assert authorizations(box.hub) == {f"Bearer {TOKEN}"}

    box.hub.requests.clear()
    (box.directory / "elsewhere").write_text("hf_elsewhere")
    box.succeeds(HF_HOME=str(home), HF_TOKEN_PATH=str(box.directory / "elsewhere"))
    assert authorizations(box.hub) == {"Bearer hf_elsewhere"}

    box.hub.requests.clear()
    box.succeeds(HF_HOME=str(home), HF_TOKEN="hf_environment")
    assert authorizations(box.hub) == {"Bearer hf_environment"}


@pytest.mark.parametrize("suffix", ["\n", "\nX-Injected: 1", " x", "\t", '"', "\\"])
def test_malformed_token_is_refused_unseen(box, suffix):
    line = box.fails(USAGE, "HF_TOKEN", "got a token with", HF_TOKEN=TOKEN + suffix)
    assert "neverShow" not in line
    assert box.hub.requests == []


def test_malformed_token_file_is_refused_unseen(box):
    path = box.directory / "token"
    path.write_text(f"{TOKEN}\n{TOKEN}\n")
    box.fails(USAGE, str(path), "got a token with", HF_TOKEN_PATH=str(path))


def test_token_is_on_no_command_line_and_in_no_environment(box):
    """A curl in front of the real one writes down what every user of the machine could see."""
    shims = box.directory / "shims"
    shims.mkdir()
    seen = box.directory / "seen"
    (shims / "curl").write_text(f'#!/bin/sh\necho "$@" >>"{seen}"\nenv >>"{seen}"\nexec {shutil.which("curl")} "$@"\n')
    (shims / "curl").chmod(0o755)
    box.succeeds(HF_TOKEN=TOKEN, PATH=f"{shims}:{os.environ['PATH']}")
    assert authorizations(box.hub) == {f"Bearer {TOKEN}"}
    assert "--config -" in seen.read_text()
    assert TOKEN not in seen.read_text()
    for path in box.directory.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


# ---- shards ---------------------------------------------------------------------------------------------


def test_sharded_model(box):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    box.add_sharded(REPO, {"b": names[1], "a": names[0], "c": names[1]})
    del box.hub.files[f"/{REPO}/resolve/main/model.safetensors"]
    del box.hub.files[f"/{REPO}/resolve/{COMMIT}/model.safetensors"]
    for name in names:
        box.hub.add(REPO, name, name.encode() * 100, large=True)
    box.succeeds()
    for name in names:
        assert box.path(name).read_bytes() == name.encode() * 100
    assert "model.safetensors.index.json" in box.files()


def test_missing_shard_shows_before_any_shard_is_received(box):
    box.add_sharded("org/m", {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    box.hub.add("org/m", "model-00001-of-00002.safetensors", WEIGHTS, large=True)
    box.fails(ENVIRONMENT, "model-00002-of-00002.safetensors", "404", arguments=("org/m",))
    assert not list(box.path(model="m").glob("*.safetensors*[!n]"))
    assert box.hub.seen("GET", ".safetensors") == []


@pytest.mark.parametrize(
    "shard",
    ["../evil.safetensors", "/tmp/evil.safetensors", "a/b.safetensors", "..", ".hidden.safetensors", "evil.sh",
     "x.safetensors\n../evil.safetensors", "\x1b[31mx.safetensors", "x" * 300 + ".safetensors",
     "", 5, None, {"file": "x"}, ["x.safetensors"]],
    ids=lambda shard: repr(shard)[:32],
)
def test_hostile_weight_map(box, shard):
    box.add_sharded("org/m", {"good": "model-1.safetensors", "bad\x1b": shard})
    box.hub.add("org/m", "model-1.safetensors", WEIGHTS, large=True)
    box.fails(BAD_CONTENT, "weight_map", "bad", "plain file name", arguments=("org/m", "--out", "deep/models"))
    assert not list(box.directory.rglob("evil*"))
    assert not list(box.directory.rglob("*index.json"))


@pytest.mark.parametrize(
    "index",
    [b"[]", b"{}", b'{"weight_map": {}}', b"not json", b"[" * 100_000, b"\xff\xfe"],
    ids=lambda index: repr(index[:12]),
)
def test_index_that_is_none(box, index):
    box.add_model("org/m", weights=None)
    box.hub.add("org/m", "model.safetensors.index.json", index)
    box.fails(BAD_CONTENT, "model.safetensors.index.json", "expected", arguments=("org/m",))


# ---- the hub's cache, offline ----------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_cache_is_used_without_the_network(box, variable):
    root = box.directory / "cache"
    hub_cache = {"HF_HOME": root / "hub", "HF_HUB_CACHE": root, "XDG_CACHE_HOME": root / "huggingface" / "hub"}[variable]
    blob = box.fill_cache(hub_cache)
    box.succeeds(**{variable: str(root)})
    assert box.hub.requests == []
    assert box.files() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert box.path("model.safetensors").samefile(blob)  # one copy of the weights on the disk
    assert not box.path("config.json").is_symlink()
    box.succeeds(**{variable: str(root)})


def test_damaged_cache_is_passed_over(box):
    blob = box.fill_cache(box.directory / "cache", weights=WEIGHTS[:-1] + b"?")
    result = box.succeeds(HF_HUB_CACHE=str(box.directory / "cache"))
    assert "Passing over the cached file" in result.stderr
    assert box.path("model.safetensors").read_bytes() == WEIGHTS
    assert blob.read_bytes() != WEIGHTS  # the cache belongs to somebody else: it is read only
    assert [r.path for r in box.hub.seen("GET")] == [f"/{REPO}/resolve/{COMMIT}/model.safetensors"]


def test_incomplete_cache_is_completed(box):
    box.fill_cache(box.directory / "cache")
    snapshot = box.directory / "cache" / "models--EleutherAI--pythia-160m" / "snapshots" / COMMIT
    (snapshot / "tokenizer.json").unlink()
    box.succeeds(HF_HUB_CACHE=str(box.directory / "cache"))
    box.assert_whole()
    assert box.hub.seen("GET", "model.safetensors") == []


def test_hostile_ref_of_the_cache_is_not_followed(box):
    box.fill_cache(box.directory / "cache")
    (box.directory / "cache" / "models--EleutherAI--pythia-160m" / "refs" / "main").write_text("../../../secrets")
    (box.directory / "secrets").mkdir()
    (box.directory / "secrets" / "config.json").write_text("secret")
    box.succeeds(HF_HUB_CACHE=str(box.directory / "cache"))
    box.assert_whole()


def test_unwritable_cache_does_not_matter(box):
    box.succeeds(HF_HOME="/proc/nowhere")
    box.assert_whole()


@pytest.mark.parametrize("spelling", ["1", "on", "Yes", "TRUE"])
def test_offline_with_cache(box, spelling):
    box.fill_cache(box.directory / "cache")
    box.succeeds(HF_HUB_CACHE=str(box.directory / "cache"), HF_HUB_OFFLINE=spelling)
    assert box.hub.requests == []


def test_offline_with_nothing(box):
    box.fails(ENVIRONMENT, "HF_HUB_OFFLINE", HF_HUB_OFFLINE="1")
    assert box.hub.requests == []


def test_offline_with_files_already_here(box):
    box.succeeds()
    box.hub.requests.clear()
    result = box.succeeds(HF_HUB_OFFLINE="1")
    assert "not compared" in result.stderr
    assert box.hub.requests == []


def test_offline_text(box):
    box.fails(ENVIRONMENT, "HF_HUB_OFFLINE", arguments=("tinyshakespeare",), HF_HUB_OFFLINE="1")


# ---- interruptions, company, full disks --------------------------------------------------------------------


def start_and_wait_for_half(box):
    """The script, with the first half of the weights in its .part file and curl waiting for the rest."""
    box.hub.fault("model.safetensors", "drip", times=1, methods=("GET",), seconds=LINE_S)
    process = box.start(HF_HUB_DOWNLOAD_TIMEOUT=str(2 * LINE_S))
    assert box.hub.sending.wait(LINE_S)
    part = box.path("model.safetensors.part")
    deadline = time.monotonic() + LINE_S / 2
    while not part.exists() or part.stat().st_size < 90_000:  # sent is not received, and curl writes in blocks
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process, part


def wait_for_message(process, words):
    assert any(words in line for line in process.stderr), f"it ended without {words!r}"


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_in_the_middle(box, sent, code):
    process, part = start_and_wait_for_half(box)
    start = time.monotonic()
    process.send_signal(sent)
    result = box.finish(process)
    assert time.monotonic() - start < LINE_S / 3  # it does not wait for the line
    assert result.returncode == code
    assert "stopped" in result.stderr and "error" not in result.stderr
    box.assert_no_weights()
    received = part.stat().st_size
    assert 90_000 <= received <= 100_000
    assert [p.name for p in box.directory.iterdir()] == ["models"]  # no scratch files stay

    box.succeeds()
    box.assert_whole()
    assert box.hub.seen("GET", "model.safetensors")[-1].headers["range"] == f"bytes={received}-"


def test_signal_between_the_start_of_curl_and_the_note_of_it(box):
    """On a busy machine curl may have half a file before the script knows its number."""
    text = SCRIPT.read_text()
    late = re.sub(r'(>"\$scratch/answer" &\n)(  child=\$!\n)', r'\1  if [[ $* == *model.safetensors.part* ]]; then sleep 3; fi\n\2', text)
    assert late != text
    box.script = box.directory / "late.sh"
    box.script.write_text(late)
    box.script.chmod(0o755)
    process, part = start_and_wait_for_half(box)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    result = box.finish(process)
    assert time.monotonic() - start < LINE_S / 3
    assert result.returncode == 143
    box.script.unlink()
    assert [p.name for p in box.directory.iterdir()] == ["models"]
    received = part.stat().st_size
    time.sleep(0.2)
    assert part.stat().st_size == received  # nobody writes on


def test_kill_leaves_no_half_file(box):
    process, part = start_and_wait_for_half(box)
    process.kill()
    process.wait()
    second = box.start()  # while the curl of the killed run goes on writing: it holds the lock
    wait_for_message(second, "waiting")
    box.assert_no_weights()
    box.hub.go_on.set()
    assert box.finish(second).returncode == OK
    box.assert_whole()


def test_two_at_once(box):
    first, _ = start_and_wait_for_half(box)
    second = box.start()
    wait_for_message(second, "waiting")
    box.hub.go_on.set()
    results = [box.finish(first), box.finish(second)]
    assert [result.returncode for result in results] == [OK, OK], results
    assert len(box.hub.seen("GET", "model.safetensors")) == 1
    box.assert_whole()


def test_disk_too_small_is_seen_before(box):
    """Several shards, each of a plausible size, announce more than any disk has."""
    shards = {f"t{i}": f"model-{i}.safetensors" for i in range(3)}
    box.add_sharded("org/m", shards)
    for name in shards.values():
        box.hub.add("org/m", name, WEIGHTS, large=True, size=400 * 10**12)
    box.fails(NO_SPACE, "free", "1.2PB", "weights of org/m", arguments=("org/m",))
    assert box.hub.seen("GET", ".safetensors") == []


def test_disk_full_while_writing(box):
    """A limit on file sizes makes write() fail as a full disk does."""

    def limit_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = subprocess.Popen(
        [SCRIPT, "pythia-160m"], cwd=box.directory, env=box.environment, preexec_fn=limit_files,
        restore_signals=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    result = box.finish(process)
    assert result.returncode == NO_SPACE, result.stderr
    assert "write error" in result.stderr and "Free space" in result.stderr
    box.assert_no_weights()
    box.succeeds()
    box.assert_whole()


def test_file_over_50_gb_that_is_refused_names_hf_xet(box):
    box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, size=60 * 10**9)
    box.hub.fault("model.safetensors", "status", methods=("GET",), status=400)
    tools = box.directory / "tools"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho header; echo disk 0 0 100000000\n")  # 100 GB, on any machine
    (tools / "df").chmod(0o755)
    box.fails(ENVIRONMENT, "hf_xet", PATH=f"{tools}:{os.environ['PATH']}")


LIMITS = {"config.json": 8 << 20, "tokenizer_config.json": 8 << 20, "tokenizer.json": 100_000_000}


@pytest.mark.parametrize("name, most", LIMITS.items())
@pytest.mark.parametrize("size", [1, 10**40])
def test_more_bytes_than_a_file_of_its_kind_has_are_not_received(box, name, most, size):
    """What the server announces, one byte above the limit and as much as no disk holds."""
    box.hub.add(REPO, name, CONFIG, large=True, size=most + size)
    box.fails(BAD_CONTENT, f"{REPO}/{name}", f"expected at most {most} for this kind of file")
    assert not box.hub.seen("GET", name) and not box.path(f"{name}.part").exists()
    assert box.run("--dry-run", "pythia-160m").returncode == BAD_CONTENT


def test_a_file_may_have_as_many_bytes_as_its_kind(box):
    data = CONFIG + b" " * ((8 << 20) - len(CONFIG))
    box.hub.add(REPO, "config.json", data)
    box.succeeds()
    assert box.path("config.json").read_bytes() == data


def test_weights_larger_than_any_disk_are_refused_before(box):
    box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, size=10**18)
    box.fails(NO_SPACE, "free")
    assert not box.hub.seen("GET", "model.safetensors")


@pytest.mark.parametrize("pieces, accepted", [(8, True), (9, False), (4000, False)])
def test_bytes_that_nobody_announced_are_limited_as_they_come(box, pieces, accepted):
    """A stream of megabytes without a size: up to the limit it is a file, and what is longer ends there."""
    box.hub.add(REPO, "config.json", (CONFIG + b" " * (1 << 20))[:1 << 20])
    box.hub.fault("/config.json", "unannounced", repeat=pieces)  # and not generation_config.json
    if accepted:
        assert "the server names no hash" in box.succeeds().stderr
        assert box.path("config.json").stat().st_size == 8 << 20
    else:
        box.fails(BAD_CONTENT, "got more than 8388608 bytes")
        assert box.files() == []


def test_a_stream_that_does_not_end_where_it_was_announced_to(box):
    """The announcement is that of the answer that redirects, as the hub's; what comes from elsewhere is longer."""
    box.hub.add(REPO, "model.safetensors", WEIGHTS, large=True, size=2 << 20)
    box.hub.fault("model.safetensors", "unannounced", methods=("GET",), repeat=2000)
    box.fails(BAD_CONTENT, "got more than the announced 2097152 bytes")
    assert "model.safetensors.part" not in box.files()


def test_unannounced_bytes_leave_a_tenth_of_the_disk(box):
    tools = box.directory / "tools"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho header; echo disk 0 0 4000\n")  # 4,096,000 bytes
    (tools / "df").chmod(0o755)
    box.hub.fault("model.safetensors", "unannounced", repeat=1000)
    box.fails(BAD_CONTENT, "got more than 3686400 bytes", PATH=f"{tools}:{os.environ['PATH']}")
    box.assert_no_weights()


# ---- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--revison", "x"), ("--revison", "Did you mean --revision?")),
        (("--dryrun",), ("Did you mean --dry-run?",)),
        (("--out",), ("--out: got no value",)),
        (("--out", ""), ("empty",)),
        (("pythia-161m",), ("Did you mean pythia-160m?",)),
        (("llama-3.2-1b-deduped",), ("unknown name",)),
        (("../etc",), ("unknown name",)),
        (("\x1b[31mred",), ("?[31mred", "unknown name")),  # nothing that a terminal would act on
        (("org/..",), ("unknown name",)),
        (("org/a/b",), ("unknown name",)),
        (("pythia-160m", "--revision", "../x"), ("--revision", "expected a branch")),
        (("pythia-160m", "--revision", "a b"), ("--revision",)),
        (("pythia-160m", "nonsense"), ("nonsense",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_usage_errors(box, arguments, words):
    box.fails(USAGE, *words, arguments=arguments)
    assert box.hub.requests == []
    assert list(box.directory.iterdir()) == []


@pytest.mark.parametrize(
    "endpoint",
    ["huggingface.co", "ftp://huggingface.co", "https://", "file:///tmp", "http://a b", "https://x/?q=1"],
)
def test_endpoint_that_is_no_url(box, endpoint):
    box.fails(USAGE, "HF_ENDPOINT", endpoint, "https://", HF_ENDPOINT=endpoint)


def test_endpoint_with_a_password_is_not_repeated(box):
    line = box.fails(USAGE, "HF_ENDPOINT", HF_ENDPOINT="https://user:secret@host")
    assert "secret" not in line


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "abc", "1e3", "99999999999999999999"])
def test_timeout_that_is_no_number(box, value):
    box.fails(USAGE, "HF_HUB_DOWNLOAD_TIMEOUT", value, HF_HUB_DOWNLOAD_TIMEOUT=value)


def test_out_is_a_file(box):
    (box.directory / "models").write_text("not a directory")
    box.fails(USAGE, "models/pythia-160m", "directory", "--out")


def test_missing_curl(box):
    tools = box.directory / "tools"
    tools.mkdir()
    for directory in os.environ["PATH"].split(":"):
        for tool in Path(directory).glob("*") if directory else ():
            if tool.name not in ("curl",) and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    box.fails(ENVIRONMENT, "curl", "PATH", "Install it", PATH=str(tools))


# ---- the text ----------------------------------------------------------------------------------------------


def with_text(box: Box, text: bytes) -> None:
    """Runs a copy of the script that is pinned to another text: the real one is not shipped."""
    source = SCRIPT.read_text()
    pins = {"TEXT_SIZE=1115394": f"TEXT_SIZE={len(text)}",
            "TEXT_SHA256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed": f"TEXT_SHA256={sha256(text)}"}
    for real, other in pins.items():
        assert source.count(real) == 1
        source = source.replace(real, other)
    (box.directory / "bin").mkdir()
    box.script = box.directory / "bin" / "download_starter_pack.sh"
    box.script.write_text(source)
    box.script.chmod(0o755)


def test_text_and_default_pack(box):
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 100
    with_text(box, text)
    box.hub.add_path(TEXT_PATH, text, etag=sha256(b"the etag of this host is not the hash of the content"))
    result = box.finish(subprocess.Popen(
        [box.script], cwd=box.directory, env=box.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert result.returncode == OK, result.stderr
    assert (box.directory / "data" / "tinyshakespeare.txt").read_bytes() == text
    box.assert_whole()
    assert result.stdout.splitlines()[1] == (
        ".venv/bin/python dev/prepare_data.py data/tinyshakespeare.txt "
        "--tokenizer models/pythia-160m/tokenizer.json -o data/mine"
    )
    box.hub.requests.clear()
    box.succeeds("tinyshakespeare")
    assert box.hub.requests == []  # the pin says that it is right


def test_text_that_is_another_one(box):
    box.hub.add_path(TEXT_PATH, b"t" * 1115394)
    box.fails(BAD_CONTENT, "tinyshakespeare.txt", "sha256", "86c4e6aa", arguments=("tinyshakespeare",))
    assert not (box.directory / "data" / "tinyshakespeare.txt").exists()


# ---- the terminal --------------------------------------------------------------------------------------------


# ---- its functions, alone --------------------------------------------------------------------------------------------


def function(box: Box, commands: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Commands after the script's definitions, with a scratch directory, and without its main()."""
    text = SCRIPT.read_text()
    assert text.endswith('\nmain "$@"\n')
    (box.directory / "scratch").mkdir(exist_ok=True)
    script = f"{text.removesuffix(chr(10) + 'main ' + chr(34) + '$@' + chr(34) + chr(10))}\nscratch=scratch repo= dir=.\n{commands}\n"
    return subprocess.run(["bash", "-s", "--", *words], input=script, cwd=box.directory, env={**box.environment, **environment}, capture_output=True,
                          text=True, timeout=LINE_S)


@pytest.mark.parametrize("url, same", [
    ("https://HUB.example/a", True), ("https://hub.example", True), ("https://hub.example?a", True), ("https://hub.example:443/a", False),
    ("http://hub.example/a", False), ("https://hub.example.evil/a", False), ("https://evil/https://hub.example", False), ("https://hub.example#@evil", True),
    ("https://hub.example@evil/a", False), ("https://evil?https://hub.example/", False)])
def test_only_the_same_scheme_host_and_port_is_the_endpoint(box, url, same):
    done = function(box, 'read_settings; if at_endpoint "$1"; then echo yes; fi; token=word; curl_config "$1"', url, HF_ENDPOINT="https://hub.example/mirror/")
    assert done.returncode == 0 and done.stdout.startswith("yes\n") == same == ('header = "Authorization: Bearer word"' in done.stdout), done


@pytest.mark.parametrize("endpoint, token, warned", [
    ("http://hub.example", "word", True), ("http://hub.example", "", False), ("https://hub.example", "word", False), ("http://localhost:80", "word", False),
    ("http://127.0.0.1", "word", False), ("http://[::1]:8", "word", False), ("http://10.0.0.1", "word", True)])
def test_a_token_over_plain_http_is_warned_of(box, endpoint, token, warned):
    done = function(box, 'read_settings; echo "$endpoint $text_endpoint $token"', HF_ENDPOINT=endpoint + "/", HF_TOKEN=token, WEFT_TEXT_ENDPOINT="https://text/")
    assert done.stdout == f"{endpoint} https://text {token}\n" and ("travels unencrypted" in done.stderr) == warned


@pytest.mark.parametrize("content, size, hashed, words", [
    (b"text", "", "", ""), (b"text", "4", "", ""), (b"text", "5", "", "got 4 bytes, expected 5"), (b"", "", "", "got 0 bytes, expected some"),
    (b"", "7", "", "got 0 bytes, expected 7"), (b"text", "4", f"sha256:{sha256(b'text')}", ""), (b"text", "", f"git-sha1:{git_sha1(b'text')}", ""),
    (b"text", "", f"sha256:{sha256(b'x')}", f"got sha256 {sha256(b'text')}, expected {sha256(b'x')}"),
    (b"text", "", f"git-sha1:{git_sha1(b'x')}", f"got git-sha1 {git_sha1(b'text')}, expected"),
    (b" \n\t<HTML>x", "9", "", "web page"), (b"<!doctype HTML><p>", "", "", "web page"), (b"<html", "", "", "web page"), (b"<xml>", "", "", ""),
    (b"\0\0<html>", "", "", "web page"), (b"Version https://git-lfs", "3", "", "git-lfs pointer"), (b"a<html>", "", "", ""), (b" " * 600 + b"<html>", "", "", "")])
def test_what_is_wrong_with_a_file(box, content, size, hashed, words):
    (box.directory / "-file").write_bytes(content)
    done = function(box, 'remote_size=$1 remote_hash=$2; inspect -file; echo "${problem:-well}"', size, hashed)
    assert done.returncode == 0 and done.stderr == "" and (words in done.stdout if words else done.stdout == "well\n"), done


# ---- optional files, several models, dry runs ------------------------------------------------------------------------


def test_files_that_a_model_may_have_are_received(box):
    for name in ("generation_config.json", "special_tokens_map.json", "chat_template.jinja"):
        box.hub.add(REPO, name, name.encode())
    box.succeeds()
    for name in ("generation_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert box.path(name).read_bytes() == name.encode()


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_an_error_of_an_optional_file_is_an_error(box, name):
    """Only one that is not there may be left out."""
    box.hub.fault(name, "status", status=403)
    box.fails(ENVIRONMENT, name, "403")


def test_the_second_model_begins_anew(box):
    """With its own commit, its own cache, its own files; the commands for both come at the end."""
    box.add_model("org/second", config=b'{"model_type": "llama"}', weights=b"other weights", revision="main")
    box.fill_cache(box.directory / "cache")
    result = box.succeeds("pythia-160m", "org/second", HF_HUB_CACHE=str(box.directory / "cache"))
    assert box.path("model.safetensors", model="second").read_bytes() == b"other weights"
    assert box.hub.requests[0].path == "/org/second/resolve/main/config.json"
    assert len(result.stdout.splitlines()) == 2 and "second.bin" in result.stdout.splitlines()[1]
