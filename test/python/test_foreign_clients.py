"""Programs of others against infer_pythia --serve: what they send is taken, and what they make of the answers is right.

Each is skipped where it is not installed: lm_eval (scripts/requirements-clients.txt), aiperf 0.13 (a program on PATH: pip install aiperf into an environment
of its own, because it pins much). OpenAI's client has its tests in test_serve.py and test_chat.py. vLLM's bench client comes with all of vLLM and PyTorch,
guidellm with PyTorch: too large to install for a test."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
pytest.importorskip("safetensors")

import checkpoints as ck  # noqa: E402
from test_infer_cli import END_OF_TEXT, constant_head, tokenizer_json, write_model  # noqa: E402
from test_serve import PROGRAM, ROOT, Server  # noqa: E402

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

TEXT = "Once upon a time there was a hen. She lived in a small house with a cat.\n\nOne day the cat said, \"Let us go to the river!\""


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Starts a server for a converted model, once for each."""
    folder = tmp_path_factory.mktemp("foreign clients")
    with contextlib.ExitStack() as servers:
        @functools.cache
        def one(name: str, *options: str) -> Server:
            ck.convert(ROOT / "models" / name, folder / f"{name}.bin")
            return servers.enter_context(Server(folder / f"{name}.bin", *options))
        yield one


# ---- lm_eval ---------------------------------------------------------------------------------------------------------


def lm_eval_of(server: Server, **arguments: object):
    if any(importlib.util.find_spec(name) is None for name in ("lm_eval", "aiohttp", "tenacity")):
        pytest.skip("lm_eval is not installed: pip install -r scripts/requirements-clients.txt")
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    model = json.loads(server.get("/v1/models")[2])["data"][0]["id"]
    return LocalCompletionsAPI(base_url=f"{server.url}/v1/completions", model=model, **arguments)


def instances(kind: str, *requests: tuple) -> list:
    from lm_eval.api.instance import Instance
    return [Instance(request_type=kind, doc={}, arguments=request, idx=i) for i, request in enumerate(requests)]


def summed(server: Server, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """What lm_eval should find, from an answer that generates nothing."""
    ids = context + continuation
    found = server.complete(prompt=ids, max_tokens=0, logprobs=1, echo=True)["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == len(ids)
    behind = range(len(context), len(ids))
    return sum(found["token_logprobs"][i] for i in behind), all(found["token_logprobs"][i] == max(found["top_logprobs"][i].values()) for i in behind)


@pytest.mark.parametrize("way", [{}, {"tokenized_requests": False}, {"num_concurrent": 4}, {"batch_size": 3}], ids=["ids", "texts", "concurrent", "batch"])
def test_lm_eval_scores(serve, way):
    """With the server's own tokenizer, which "auto" finds, and the log-likelihoods of all tokens of a continuation, the end of the text included. Texts
    only where the tokenizer puts no token in front of them, because lm_eval does not count it, and where names of special tokens are these tokens."""
    texts = "tokenized_requests" in way
    server, begin, end_id, end = (serve("tiny-pythia", "--special"), 0, 0, "<|endoftext|>") if texts else (serve("tiny-llama"), 2040, 2041, "<|end_of_text|>")
    lm = lm_eval_of(server, **way)
    assert (lm.tokenizer_backend, lm.prefix_token_id, lm.eot_token_id) == ("remote", begin, end_id)
    pairs = [(TEXT, " The hen"), (TEXT, " xylophone"), (TEXT, end), (TEXT, " The hen said" + end), ("", TEXT), (TEXT + end, "Once")]
    encoded = [(lm.tok_encode(a) or [lm.prefix_token_id], lm.tok_encode(b)) for a, b in pairs]
    assert encoded[2][1] == [end_id] and encoded[3][1][-1] == end_id and encoded[4][0] == [begin]
    got = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    wanted = [summed(server, *pair) for pair in encoded]
    for (value, greedy), (expected, expected_greedy) in zip(got, wanted, strict=True):
        assert value == pytest.approx(expected, abs=1e-6) and value < 0 and greedy == expected_greedy


def test_lm_eval_rolls_and_generates(serve):
    served = serve("tiny-llama")
    lm = lm_eval_of(served)
    whole = [2040, *lm.tok_encode(TEXT)]
    [rolled] = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (TEXT,)), disable_tqdm=True)
    assert rolled == pytest.approx(summed(served, whole[:1], whole[1:])[0], abs=1e-6)
    texts = lm.generate_until(instances("generate_until", (TEXT, {"until": ["\n"], "max_gen_toks": 12}), (TEXT, {"until": ["."], "max_gen_toks": 30})), disable_tqdm=True)
    for text, stop, most in zip(texts, ("\n", "."), (12, 30), strict=True):
        assert text == served.complete(prompt=lm.tok_encode(TEXT), max_tokens=most, stop=[stop, "<|end_of_text|>"], temperature=0)["choices"][0]["text"] != ""


def test_lm_eval_counts_the_token_before_a_generated_end(tmp_path):
    """A model that always ends the text: where the end had no entry, lm_eval would drop the last token of the continuation, and one of a single token would
    score 0, better than any."""
    head = constant_head(b"a")
    head[END_OF_TEXT] = 3
    with Server(write_model(tmp_path / "ends.bin", tokenizer_json(), head=head)) as server:
        lm = lm_eval_of(server)
        answer = server.complete(prompt="ab", max_tokens=1, temperature=0, logprobs=1)["choices"][0]
        assert (answer["text"], answer["finish_reason"], len(answer["logprobs"]["tokens"])) == ("", "stop", 1)
        pairs = [("b", "a"), ("b", "c"), ("b", "ac")]
        got = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
        wanted = [summed(server, lm.tok_encode(a), lm.tok_encode(b))[0] for a, b in pairs]
        assert [value for value, _ in got] == pytest.approx(wanted, abs=1e-6) and all(value < -0.01 for value, _ in got)
        assert not any(greedy for _, greedy in got)


# ---- aiperf ----------------------------------------------------------------------------------------------------------


def test_aiperf_measures_a_stream(serve, tmp_path):
    program = shutil.which("aiperf")
    if program is None:
        pytest.skip("aiperf is not on PATH: pip install aiperf==0.13.0 into an environment of its own")
    command = [program, "profile", "--model", "tiny-llama", "--url", serve("tiny-llama").url, "--endpoint-type", "completions", "--streaming", "--request-count", "4",
               "--concurrency", "2", "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true",
               "--tokenizer", ROOT / "models/tiny-llama", "--ui-type", "none", "--artifact-dir", tmp_path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [report] = [json.loads(Path(path).read_text()) for path in tmp_path.rglob("profile_export_aiperf.json")]
    assert report["request_count"]["avg"] == 4 and report["output_sequence_length"]["avg"] == 8
    assert 0 < report["time_to_first_token"]["avg"] < 60_000 and math.isfinite(report["inter_token_latency"]["avg"])
