"""Penalties, biases, bad words, min_tokens and stop_token_ids, wherever they can be asked for: POST /v1/completions and
/v1/chat/completions, --batch and the command line. The witness of what is added to a logit are the log-probabilities,
which are those of the model."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints  # noqa: E402, F401 (scripts/ becomes importable)
from test_chat import ASK, CHAT, chat_format, model, post, prompt_ids, shared_server_holds_nothing  # noqa: E402, F401
from test_infer_cli import PROGRAM  # noqa: E402
from test_serve import Server  # noqa: E402

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

USAGE = 2
END = 0  # the end of a text
EVERY = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.25, "logit_bias": {"34": 1.5, "70": -100},
         "bad_words": ["e", "ab"], "min_tokens": 4, "stop_token_ids": [33, 34]}


@pytest.fixture(scope="module")
def server(model):  # noqa: F811
    with Server(model) as one:
        yield one


def byte_id(text: str) -> int:
    return text.encode()[0] + 2


def batch(model: Path, tmp_path: Path, requests: list[dict], *options: object) -> list[dict]:  # noqa: F811
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i} | request) + "\n" for i, request in enumerate(requests)))
    output.unlink(missing_ok=True)
    subprocess.run([str(word) for word in (PROGRAM, "--model", model, "--device", "cpu", "--batch", source, "--output", output, *options)],
                   check=True, capture_output=True, timeout=120)
    return sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda answer: answer["id"])


def alone(model: Path, *options: object) -> dict:  # noqa: F811
    command = [str(word) for word in (PROGRAM, "--model", model, "--device", "cpu", "--json", *options)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)


def test_what_is_chosen_is_the_likeliest_after_what_is_added(model, tmp_path):  # noqa: F811
    """At temperature 0. The other likely ids stand with the chosen one, all with the model's log-probabilities."""
    rules = [{"presence_penalty": 2}, {"presence_penalty": -2}, {"frequency_penalty": 1.5}, {"frequency_penalty": 0.25, "presence_penalty": 0.5},
             {"logit_bias": {"50": 9, "60": 8, "83": -9}}, {"logit_bias": {"50": 15}, "frequency_penalty": 2}, {}]
    common = {"prompt": "Once upon", "max_tokens": 40, "ignore_eos": True, "logprobs": 20, "temperature": 0}
    answers = batch(model, tmp_path, [common | one for one in rules])
    changed = 0
    for one, answer in zip(rules, answers):
        bias = {int(token): value for token, value in one.get("logit_bias", {}).items()}
        before: list[int] = []
        for step in answer["logprobs"]:
            def adjusted(token: int, logprob: float) -> float:
                times = before.count(token)
                return (logprob + bias.get(token, 0) - one.get("frequency_penalty", 0) * times
                        - (one.get("presence_penalty", 0) if times else 0))
            best = max(adjusted(token, logprob) for token, logprob in step["top"])
            assert adjusted(step["id"], step["logprob"]) >= best - 1e-3, (one, before)
            changed += step["id"] != step["top"][0][0]
            before.append(step["id"])
        assert before == answer["ids"] and len(before) == 40
    assert changed > 60
    assert len({tuple(answer["ids"]) for answer in answers}) == len(rules)


def test_a_factor_counts_the_prompt(model, tmp_path):  # noqa: F811
    """Penalties for what was generated see no difference between prompts that lead to the same logits; a factor does: the
    likeliest first token is one of the prompt, or not."""
    plain = {"prompt_ids": [20, 21, 22], "max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    likeliest = batch(model, tmp_path, [plain])[0]["logprobs"][0]["top"][0][0]
    # Attention sees it in any case, so the same prompt without a factor says which token would come.
    prompt = plain | {"prompt_ids": [likeliest, 21, 22]}
    first, penalised, boosted, others = batch(model, tmp_path, [prompt, prompt | {"repetition_penalty": 1e6}, prompt | {"repetition_penalty": 1e-6},
                                                                prompt | {"presence_penalty": 2, "frequency_penalty": 2}])
    assert others["ids"] == first["ids"]
    in_prompt = set(prompt["prompt_ids"])
    assert (penalised["ids"][0] in in_prompt) != (boosted["ids"][0] in in_prompt) or penalised["ids"] != boosted["ids"]
    assert penalised["logprobs"][0]["top"] == first["logprobs"][0]["top"]


def test_tokens_that_end_a_text(server):
    whole = server.complete(prompt="Once", max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    last = next(i for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i] and not token.startswith("bytes:"))
    stop = post(server, "/tokenize", {"prompt": tokens[last], "add_special_tokens": False})["tokens"]
    assert len(stop) == 1
    for ignore_eos in (True, False):
        answer = server.complete(prompt="Once", max_tokens=40, temperature=0, ignore_eos=ignore_eos, stop_token_ids=stop, logprobs=0)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["text"] == whole["text"][:whole["logprobs"]["text_offset"][last]]
        assert answer["usage"]["completion_tokens"] == last + 1 and choice["logprobs"]["tokens"] == tokens[:last + 1]
    later = server.complete(prompt="Once", max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=stop, min_tokens=last + 5)
    assert later["usage"]["completion_tokens"] > last + 5


def test_nothing_ends_a_text_before_min_tokens(server):
    ends = {"prompt": "Once", "max_tokens": 20, "temperature": 0, "logit_bias": {str(END): 100}}
    for least in (0, 1, 7, 19, 20):
        answer = server.complete(**ends, min_tokens=least)
        assert answer["usage"]["completion_tokens"] == min(least + 1, 20)
        assert answer["choices"][0]["finish_reason"] == ("stop" if least < 20 else "length")
    # A stop text that these tokens complete does not count.
    free = {"prompt": "Once", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "logit_bias": {str(byte_id("z")): 100}}
    assert server.complete(**free, stop="zz")["choices"][0]["text"] == ""
    assert server.complete(**free, stop="zz", min_tokens=9)["choices"][0]["text"] == "z" * 8  # the tenth completes one
    whole = server.complete(**free, stop="zz", min_tokens=30)["choices"][0]
    assert whole["text"] == "z" * 30 and whole["finish_reason"] == "length"


def test_bad_words_are_never_completed(server):
    body = {"prompt": "Once", "max_tokens": 60, "seed": 3, "ignore_eos": True, "temperature": 8, "top_k": 4,
            "logit_bias": {str(byte_id(c)): 100 for c in " xyz"}}
    def text(**more: object) -> str:
        return server.complete(**body, **more)["choices"][0]["text"]
    assert set(text()) == set(" xyz")
    assert "x" not in text(bad_words=["x"])
    assert "x" not in text(bad_words=["  x"])  # white space in front does not count
    some = text(bad_words=["xy", "zz"])
    assert set(some) == set(" xyz") and not any(word in some for word in ("xy", "zz"))
    assert "z" not in server.complete(prompt="z", max_tokens=20, temperature=0, logit_bias={str(byte_id("z")): 100}, bad_words=["z"])["choices"][0]["text"]


def test_a_request_with_rules_among_others_is_the_same(server):
    bodies = [{"prompt": "x" * (1 + 7 * i), "max_tokens": 40, "seed": i, "logprobs": 2, "n": 1 + i % 2} | (EVERY if i % 3 else {}) for i in range(12)]
    apart = [server.complete(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: server.complete(**body)["choices"], bodies * 2))
    assert together == apart * 2
    assert len({json.dumps(choice["text"]) for choices in apart for choice in choices}) > 12
    # Each of n counts for itself.
    one = server.complete(**bodies[1] | {"n": 1, "seed": bodies[1]["seed"] + 1})["choices"][0]
    assert apart[1][1] == one | {"index": 1}


def test_every_door_leads_to_the_same_text(server, model, tmp_path):  # noqa: F811
    """A chat is the completion of its prompt, and both are what the command line and a batch give, also with drafts."""
    common = EVERY | {"max_tokens": 40, "seed": 5, "temperature": 0.9}
    ids = prompt_ids(("user", "Once upon"))
    said = post(server, CHAT, {"messages": ASK, **common})["choices"][0]
    completed = server.complete(prompt=ids, **common)["choices"][0]
    assert said["message"]["content"] == completed["text"] and said["finish_reason"] == completed["finish_reason"]
    assert server.complete(prompt=ids, max_tokens=40, seed=5, temperature=0.9)["choices"][0]["text"] != completed["text"]
    answer = batch(model, tmp_path, [{"prompt_ids": ids} | common])[0]
    assert answer["text"] == completed["text"] and answer["finish_reason"] == completed["finish_reason"]
    options = ["--max-tokens", 40, "--seed", 5, "--temperature", 0.9]
    for name, value in EVERY.items():
        option = "--" + name.replace("_", "-")
        if name == "bad_words":
            options += [word for one in value for word in (option, one)]
        elif name == "stop_token_ids":
            options += [option, ",".join(map(str, value))]
        else:
            options += [option, json.dumps(value)]
    given = ["--prompt-ids", ",".join(map(str, ids)), *options]
    for drafts in ([], ["--lookup", 5], ["--draft", model]):
        got = alone(model, *given, *drafts)
        assert got["ids"] == answer["ids"] and got["text"] == answer["text"], drafts
    # The options are a batch's defaults, each of them.
    assert batch(model, tmp_path, [{"prompt_ids": ids}], *options)[0]["ids"] == answer["ids"]
    for i in range(0, len(options) - 1, 2):
        if options[i] in ("--logit-bias", "--min-tokens", "--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
            assert batch(model, tmp_path, [{"prompt_ids": ids}], *options[:i], *options[i + 2:])[0]["request"] != answer["request"]


REFUSED = [
    ("presence_penalty", 2.1), ("presence_penalty", "1"), ("frequency_penalty", -2.1), ("frequency_penalty", True), ("repetition_penalty", 0),
    ("repetition_penalty", -1), ("logit_bias", {"5": 100.1}), ("logit_bias", {"5": "1"}), ("logit_bias", {"five": 1}), ("logit_bias", {"-5": 1}),
    ("logit_bias", {"100000": 1}), ("logit_bias", [[5, 1]]), ("logit_bias", {str(i): 1 for i in range(1025)}), ("bad_words", "x"), ("bad_words", [5]),
    ("bad_words", [""]), ("bad_words", ["x"] * 257), ("bad_words", ["x" * 1025]), ("min_tokens", -1), ("min_tokens", 1.5), ("min_tokens", 17),
    ("stop_token_ids", 5), ("stop_token_ids", ["5"]), ("stop_token_ids", [-1]), ("stop_token_ids", [100000]), ("stop_token_ids", [5] * 129),
]


@pytest.mark.parametrize("name, value", REFUSED, ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:30])
def test_values_that_are_refused(server, name, value):
    for path, asked in (("/v1/completions", {"prompt": "a"}), (CHAT, {"messages": ASK})):
        error = post(server, path, asked | {"max_tokens": 16, name: value}, 400)["error"]
        assert error["param"] == name and error["message"].startswith(name + ": ") and "\n" not in error["message"]


def test_values_that_ask_for_nothing(server):
    for nothing in (None, "neutral"):
        neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "min_tokens": 0, "stop_token_ids": []}
        fields = {name: None if nothing is None else value for name, value in neutral.items()}
        body = {"prompt": "a", "max_tokens": 12, "seed": 1}
        assert server.complete(**body, **fields)["choices"] == server.complete(**body)["choices"]


@pytest.mark.parametrize("options, words", [
    (["--repetition-penalty", 0], "--repetition-penalty: got 0"), (["--stop", ""], "--stop: got '', expected at least"), (["--presence-penalty", 3], "--presence-penalty"), (["--logit-bias", "{"], "--logit-bias"),
    (["--logit-bias", '{"5": 101}'], "logit_bias: 5: got '101'"), (["--logit-bias", '{"5000": 1}'], "logit_bias: got id 5000"), (["--bad-words", " "], "bad_words"),
    (["--min-tokens", 129], "--min-tokens: got 129"), (["--stop-token-ids", "5,x"], "--stop-token-ids: id 2"), (["--stop-token-ids", ""], "--stop-token-ids")])
def test_options_that_are_refused(model, options, words):  # noqa: F811
    done = subprocess.run([str(word) for word in (PROGRAM, "--model", model, "--device", "cpu", "--prompt", "a", *options)], capture_output=True, text=True)
    assert done.returncode == USAGE and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_with_the_client_of_openai(server):
    openai = pytest.importorskip("openai", reason="pip install -r scripts/requirements-serve.txt")
    standard = {name: EVERY[name] for name in ("presence_penalty", "frequency_penalty", "logit_bias")}
    extra = {name: value for name, value in EVERY.items() if name not in standard}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body = {"max_tokens": 20, "seed": 2}
        answer = client.completions.create(model="small", prompt="Once", **body, **standard, extra_body=extra)
        assert answer.choices[0].text == server.complete(prompt="Once", **body, **EVERY)["choices"][0]["text"]
        said = client.chat.completions.create(model="small", messages=ASK, **body, **standard, extra_body=extra)
        assert said.choices[0].message.content == post(server, CHAT, {"messages": ASK, **body, **EVERY})["choices"][0]["message"]["content"]
        with pytest.raises(openai.BadRequestError, match="presence_penalty: got '3.0'") as caught:
            client.completions.create(model="small", prompt="a", presence_penalty=3.0)
        assert caught.value.param == "presence_penalty"
