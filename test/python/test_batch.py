"""infer_pythia --batch: a file of requests, answered as each would be alone; stopped, killed, and run again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("safetensors")

import checkpoints as ck  # noqa: E402
from test_infer_cli import tokenizer_json, write_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "infer_pythia"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

OK, USAGE, BAD_FILE, ENVIRONMENT, RESOURCES, FAILED_LINES, INTERRUPTED = 0, 2, 3, 4, 5, 7, 130


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-pythia"])
def model(request, tmp_path_factory) -> Path:
    """A small model of each family, with its tokenizer."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.bin"
    ck.convert(ROOT / "models" / request.param, path)
    return path


def command(model: Path, *arguments) -> list[str]:
    return [str(PROGRAM), "--device", "cpu", "--model", str(model), *map(str, arguments)]


def run(model: Path, *arguments, code: int = OK, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(command(model, *arguments), capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == code, done.stderr
    return done


def write_requests(path: Path, requests: list[dict]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def answers(path: Path) -> dict:
    """By id; each line is whole, and no id has two."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({json.dumps(line["id"]) for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def stories(count: int, **more) -> list[dict]:
    words = ["The hen", "Once upon a time there was a fox", "A", "The dog saw the cat and", "Every day the hen"]
    return [{"id": i, "prompt": words[i % 5], "seed": i, **more} for i in range(count)]


def test_every_answer_is_that_of_the_prompt_alone(model, tmp_path):
    requests = stories(12, max_tokens=16, ignore_eos=True)
    for i, request in enumerate(requests):
        request |= [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9}][i % 3]
    for max_running in [1, 8]:
        output = tmp_path / f"{max_running}.jsonl"
        run(model, "--batch", write_requests(tmp_path / "in", requests), "--output", output, "--max-running", max_running)
        got = answers(output)
        assert len(got) == len(requests)
        for request in requests:
            options = [word for name in ["temperature", "top_k", "top_p", "seed"] if name in request
                       for word in ["--" + name.replace("_", "-"), request[name]]]
            alone = json.loads(run(model, "--prompt", request["prompt"], "--max-tokens", 16, "--ignore-eos", "--json",
                                   *options).stdout)
            for field in ["prompt_ids", "ids", "text", "finish_reason"]:
                assert got[request["id"]][field] == alone[field], (request, field)


def test_options_of_the_command_line_are_the_defaults(model, tmp_path):
    requests = write_requests(tmp_path / "in", [{"id": "a", "prompt": "The hen"},
                                                {"id": "b", "prompt": "The hen", "max_tokens": 3}])
    run(model, "--batch", requests, "--output", tmp_path / "out", "--max-tokens", 7, "--ignore-eos")
    got = answers(tmp_path / "out")
    assert (len(got["a"]["ids"]), len(got["b"]["ids"])) == (7, 3)
    assert got["b"]["ids"] == got["a"]["ids"][:3]


def test_each_option_is_the_default_of_a_request_as_of_a_prompt(tmp_path):
    """Each changes the answer, to that of --prompt."""
    model = write_model(tmp_path / "model.bin", tokenizer_json(), eos_ids=list(range(40)))  # a text ends soon, unless...
    prompt = "<|endoftext|>Once"
    requests = write_requests(tmp_path / "in", [{"id": "a", "prompt": prompt}])

    def answer(*options):
        (tmp_path / "out").unlink(missing_ok=True)
        run(model, "--batch", requests, "--output", tmp_path / "out", "--max-tokens", 60, *options)
        alone = json.loads(run(model, "--prompt", prompt, "--json", "--max-tokens", 60, *options).stdout)
        fields = ["prompt_ids", "ids", "text", "finish_reason"]
        got = answers(tmp_path / "out")["a"]
        assert [got[field] for field in fields] == [alone[field] for field in fields], options
        return alone

    sampled = ["--temperature", 2, "--seed", 3]
    text = answer(*sampled, "--ignore-eos")["text"]
    cases = [[], ["--special"], ["--temperature", 2], sampled, [*sampled, "--ignore-eos"], [*sampled, "--ignore-eos", "--stop", text[9:11]],
             *([*sampled, "--ignore-eos", *one] for one in (["--top-k", 2], ["--top-p", 0.3], ["--min-p", 0.3]))]
    given = [answer(*case) for case in cases]
    for i, case in enumerate(cases):
        assert all(given[i]["prompt_ids"] + given[i]["ids"] != other["prompt_ids"] + other["ids"] for other in given[:i]), case
    assert given[5]["finish_reason"] == "stop"


def test_stdin_and_stdout(model):
    text = json.dumps({"id": 1, "prompt": "The hen", "max_tokens": 4, "ignore_eos": True}) + "\nbad\n"
    done = run(model, "--batch", "-", "--output", "-", input=text, code=FAILED_LINES)
    lines = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["finish_reason"])
    assert [line["finish_reason"] for line in lines] == ["error", "length"]
    assert "answered 1 request, 1 with an error" in done.stderr


def test_a_killed_run_goes_on_where_it_was(model, tmp_path):
    requests = write_requests(tmp_path / "in", stories(40, max_tokens=40, ignore_eos=True))
    run(model, "--batch", requests, "--output", tmp_path / "whole")
    expected = answers(tmp_path / "whole")
    for sign in [signal.SIGKILL, signal.SIGINT]:
        output = tmp_path / f"out-{sign}"
        process = subprocess.Popen(command(model, "--batch", "-", "--output", output, "--max-running", 4),
                                   stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # Half of the requests, and the end of the input does not come: something is left to do when the signal comes.
        process.stdin.write("".join(requests.read_text().splitlines(keepends=True)[:20]))
        process.stdin.flush()
        until = time.monotonic() + 60
        while time.monotonic() < until and (not output.exists() or output.read_text().count("\n") < 3):
            time.sleep(0.005)
        process.send_signal(sign)
        process.stdin.close()
        assert process.wait(timeout=60) == (-sign if sign == signal.SIGKILL else INTERRUPTED), process.stderr.read()
        process.stderr.close()
        before = output.read_text()
        assert 3 <= before.count("\n") <= 20
        if sign == signal.SIGINT:
            assert before.endswith("\n")
        run(model, "--batch", requests, "--output", output)
        assert answers(output) == expected
        assert output.read_text().startswith(before[:before.rindex("\n") + 1])


def test_another_request_under_an_answered_id(model, tmp_path):
    run(model, "--batch", write_requests(tmp_path / "in", stories(2)), "--output", tmp_path / "out", "--max-tokens", 4)
    before = (tmp_path / "out").read_text()
    done = run(model, "--batch", tmp_path / "in", "--output", tmp_path / "out", "--max-tokens", 5, code=BAD_FILE)
    assert "line 1: id '0'" in done.stderr and (tmp_path / "out").read_text() == before


def test_memory_of_keys_and_values(model, tmp_path):
    requests = stories(6, max_tokens=60, ignore_eos=True)
    run(model, "--batch", write_requests(tmp_path / "in", requests), "--output", tmp_path / "roomy")
    # Seven pages of 32 positions, where each of the sequences fills three: they displace each other, which changes no id.
    small = run(model, "--batch", tmp_path / "in", "--output", tmp_path / "none", "--kv-memory", "0.001MB", code=RESOURCES)
    pages, unit = re.search(r"at least the ([0-9.]+) (KB|MB) of 2 pages of 32 positions", small.stderr).groups()
    memory = f"{float(pages) * (1e-3 if unit == 'KB' else 1) * 3.6}MB"
    done = run(model, "--batch", tmp_path / "in", "--output", tmp_path / "tight", "--kv-memory", memory)
    assert answers(tmp_path / "tight") == answers(tmp_path / "roomy"), done.stderr
    assert int(re.search(r"(\d+) preemptions", done.stderr)[1]) > 0, done.stderr
    long = [{"id": "long", "prompt": "The hen " * 60, "max_tokens": 1000}]
    run(model, "--batch", write_requests(tmp_path / "in", long), "--output", tmp_path / "long", "--kv-memory", memory,
        code=FAILED_LINES)
    error = answers(tmp_path / "long")["long"]["error"]
    assert "needs memory for the keys and values of" in error and "there is memory for 224" in error


def test_what_is_refused(model, tmp_path):
    requests = write_requests(tmp_path / "in", stories(1))
    out = tmp_path / "out"

    def refused(code: int, *arguments) -> str:
        return run(model, *arguments, code=code).stderr.splitlines()[-1]

    assert "--output: missing" in refused(USAGE, "--batch", requests)
    assert "--output: only for --batch" in refused(USAGE, "--prompt", "x", "--output", out)
    assert "--max-running: only for --batch" in refused(USAGE, "--prompt", "x", "--max-running", 3)
    assert "--kv-memory: got '3'" in refused(USAGE, "--batch", requests, "--output", out, "--kv-memory", "3")
    assert "--json: does not go with --batch" in refused(USAGE, "--batch", requests, "--output", out, "--json")
    assert "--context: not for --batch" in refused(USAGE, "--batch", requests, "--output", out, "--context", 8)
    assert "cannot open" in refused(BAD_FILE, "--batch", tmp_path / "none", "--output", out)
    assert "directory" in refused(BAD_FILE, "--batch", tmp_path, "--output", out)
    assert "the file of --batch itself" in refused(USAGE, "--batch", requests, "--output", requests)
    copy = tmp_path / "copy"
    copy.write_text(requests.read_text().strip())  # a whole request, where a killed run would leave half an answer
    assert "not an answer" in refused(BAD_FILE, "--batch", requests, "--output", copy)
    assert copy.read_text() + "\n" == requests.read_text() == json.dumps(stories(1)[0]) + "\n"
    assert not out.exists() or out.read_text() == ""


@pytest.mark.parametrize("take_away", ["remove", "rename", "replace", "remove the directory", "empty"])
def test_an_output_that_is_taken_away_is_an_error(model, tmp_path, take_away):
    """Answers that nobody finds are no success. The input stays open, so the run cannot be over before."""
    folder = tmp_path / "folder"
    folder.mkdir()
    output = folder / "out"
    process = subprocess.Popen(command(model, "--batch", "-", "--output", output), stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    first, second = stories(2, max_tokens=4)
    process.stdin.write(json.dumps(first) + "\n")
    process.stdin.flush()
    until = time.monotonic() + 60
    while time.monotonic() < until and (not output.exists() or not output.read_text()):
        time.sleep(0.005)
    match take_away:
        case "remove":
            output.unlink()
        case "rename":
            output.rename(tmp_path / "other")
        case "replace":
            (tmp_path / "other").write_text(output.read_text())
            (tmp_path / "other").rename(output)
        case "remove the directory":
            output.unlink()
            folder.rmdir()
        case "empty":
            os.truncate(output, 0)
    _, said = process.communicate(json.dumps(second) + "\n", timeout=60)
    assert process.returncode == ENVIRONMENT, said
    assert "--output: " in said.splitlines()[-1] and "while the batch ran" in said.splitlines()[-1]
    assert "answered 2 requests" not in said


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_numeric_fault_is_the_error_of_one_request(model, tmp_path):
    requests = write_requests(tmp_path / "in", stories(6, max_tokens=20, ignore_eos=True))
    run(model, "--batch", requests, "--output", tmp_path / "whole")
    run(model, "--batch", requests, "--output", tmp_path / "out", "--debug-inject", "nan@token=50",
        code=FAILED_LINES)
    whole, got = answers(tmp_path / "whole"), answers(tmp_path / "out")
    failed = [i for i in got if got[i]["finish_reason"] == "error"]
    assert len(failed) == 1 and got.keys() == whole.keys()
    one = got[failed[0]]
    assert "not finite" in one["error"] and one["line"] == failed[0] + 1
    assert 0 < len(one["ids"]) < 20 and one["ids"] == whole[failed[0]]["ids"][:len(one["ids"])]
    assert all(got[i] == whole[i] for i in got if i != failed[0])
    run(model, "--batch", requests, "--output", tmp_path / "out")  # an answer with an error is tried again
    assert answers(tmp_path / "out") == whole


@pytest.mark.parametrize("spec, code", [("kill@token=30", -signal.SIGKILL), ("io-error@load", BAD_FILE), ("term@token=30", 143)])
def test_other_faults_end_a_batch_as_they_end_a_prompt(model, spec, code, tmp_path):
    requests = write_requests(tmp_path / "in", stories(6, max_tokens=20, ignore_eos=True))
    run(model, "--batch", requests, "--output", tmp_path / "out", "--debug-inject", spec, code=code)
    run(model, "--batch", requests, "--output", tmp_path / "out")
    assert len(answers(tmp_path / "out")) == 6
