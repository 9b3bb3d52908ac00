"""infer_pythia as its users meet it: the real binary, on a small random model that these tests write themselves.

WEFT_BIN_DIR says where the binary is; without it the root of the repository.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import tensor_file  # noqa: E402

from train_runs import preload, send  # noqa: E402

PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "infer_pythia"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="infer_pythia is not built")

OK, INTERNAL, USAGE, BAD_FILE, ENVIRONMENT, RESOURCES, NUMERIC = range(7)
C, LAYERS, HEADS, FFN, ROWS, CONTEXT = 32, 2, 4, 64, 272, 96
END_OF_TEXT, TOKENS = 0, 258  # bytes are the tokens 2 to 257
FIELDS = {"prompt_ids", "ids", "text", "finish_reason", "ttft_ms", "itl_ms_p50", "itl_ms_p99", "tokens_per_s",
          "bytes_per_token", "gb_per_s", "device", "decode"}


# ---- the model -------------------------------------------------------------------------------------------------------

def byte_alphabet() -> list[str]:
    """One printable character for each byte, as byte-level BPE writes them (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def tokenizer_json() -> str:
    special = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i, name in enumerate(["<|endoftext|>", "<|padding|>"])]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {"<|endoftext|>": 0, "<|padding|>": 1} | {c: i + 2 for i, c in enumerate(byte_alphabet())}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []}
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
                       "normalizer": {"type": "NFC"}, "pre_tokenizer": byte_level, "post_processor": byte_level,
                       "decoder": byte_level, "model": model})


def model_config(**changes) -> dict:
    rope = {"type": "standard", "theta": 10000.0, "rotary_dim": 2, "factor": 1.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_positions": 0}
    config = {"family": "gpt_neox", "vocab_size": ROWS, "hidden_size": C, "num_layers": LAYERS, "num_heads": HEADS,
              "num_kv_heads": HEADS, "head_dim": C // HEADS, "ffn_size": FFN, "max_positions": CONTEXT,
              "norm_eps": 1e-5, "norm": "layernorm", "rope": rope, "tied_embeddings": False,
              "parallel_residual": True, "attention_bias": True, "tokenizer_vocab": TOKENS,
              "eos_ids": [END_OF_TEXT], "bos_id": None}
    return config | changes


def shapes() -> dict[str, tuple[int, ...]]:
    table = {"gpt_neox.embed_in.weight": (ROWS, C)}
    for i in range(LAYERS):
        layer = f"gpt_neox.layers.{i}."
        for name, shape in {"input_layernorm": (C,), "post_attention_layernorm": (C,),
                            "attention.query_key_value": (3 * C, C), "attention.dense": (C, C),
                            "mlp.dense_h_to_4h": (FFN, C), "mlp.dense_4h_to_h": (C, FFN)}.items():
            table |= {layer + name + ".weight": shape, layer + name + ".bias": shape[:1]}
    return table | {"gpt_neox.final_layer_norm.weight": (C,), "gpt_neox.final_layer_norm.bias": (C,),
                    "embed_out.weight": (ROWS, C)}


def write_model(path: Path, tokenizer: str | None = None, head: np.ndarray | None = None, beside: dict | None = None, **changes) -> Path:
    """A random model. `head` replaces its classifier; its rows of padding are far ahead of every token otherwise. `beside`: of the
    configuration, beside the model's."""
    random = np.random.default_rng(5)
    with tensor_file.Writer(path, "model", {"model": model_config(**changes)} | (beside or {})) as writer:
        for name, shape in shapes().items():
            writer.declare(name, "f32", shape)
        if tokenizer is not None:
            writer.declare("tokenizer.json", "u8", (len(tokenizer.encode()),))
        for name, shape in shapes().items():
            data = random.normal(0, 0.3, shape).astype(np.float32)
            if "norm.weight" in name:
                data += 1
            if name == "gpt_neox.final_layer_norm.bias":
                data += 1
            if name == "embed_out.weight":
                data[TOKENS:] += 3
                data[END_OF_TEXT] -= 3  # random text would end too soon
                data = data if head is None else head
            writer.write(name, data)
        if tokenizer is not None:
            writer.write("tokenizer.json", tokenizer.encode())
    return path


def constant_head(text: bytes) -> np.ndarray:
    """A classifier that prefers the bytes of `text` (one byte: always that one), whatever the context."""
    head = np.zeros((ROWS, C), np.float32)
    for byte in text:
        head[byte + 2] = 1
    return head


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models of infer pythia")  # a path with spaces
    write_model(folder / "small.bin", tokenizer_json())
    write_model(folder / "no_tokenizer.bin")
    return folder


@pytest.fixture(scope="session")
def model(models) -> Path:
    return models / "small.bin"


# ---- running it ------------------------------------------------------------------------------------------------------

def environment(**changes) -> dict[str, str]:
    # One thread: the model is tiny, and the machine may be busy.
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **changes}


def without_echo(arguments) -> list[str]:
    """The prompt is not printed before the text: most tests are about the continuation."""
    words = list(map(str, arguments))
    prompts = any(word.split("=")[0] in ("--prompt", "--prompt-file", "--prompt-ids", "-p") for word in words)
    return words + ["--no-echo"] if prompts else words


def run(*arguments, stdin: bytes = b"", timeout: float = 60, echo: bool = False, **env) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *(map(str, arguments) if echo else without_echo(arguments))], input=stdin,
                          capture_output=True, env=environment(**env), timeout=timeout)


def run_ok(*arguments, **keywords) -> bytes:
    done = run(*arguments, **keywords)
    assert done.returncode == OK, done.stderr.decode()
    return done.stdout


def object_of(*arguments, **keywords) -> dict:
    return json.loads(run_ok(*arguments, "--json", **keywords))


def refused(code: int, *arguments, **keywords) -> str:
    """The error line of a run that must fail with `code`, having printed no result."""
    done = run(*arguments, **keywords)
    stderr = done.stderr.decode()
    assert done.returncode == code, stderr
    assert done.stdout == b""
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and stderr.splitlines()[-1] == errors[0], stderr
    return errors[0]


def prompt(model, *arguments, **keywords) -> dict:
    return object_of("--model", model, "--prompt", "Hello", "--max-tokens", 24, *arguments, **keywords)


# ---- generation ------------------------------------------------------------------------------------------------------

def test_json_is_complete(model):
    result = prompt(model)
    assert set(result) == FIELDS
    assert result["prompt_ids"] == [byte + 2 for byte in b"Hello"]
    assert len(result["ids"]) == 24 and result["finish_reason"] == "length"
    assert all(0 <= i < TOKENS for i in result["ids"]), "a padding row was sampled"
    assert result["text"] == bytes(i - 2 for i in result["ids"] if i > 1).decode("utf-8", "replace")
    for field in ["ttft_ms", "itl_ms_p50", "itl_ms_p99", "tokens_per_s", "gb_per_s"]:
        assert isinstance(result[field], float) and result[field] > 0, field
    assert result["itl_ms_p50"] <= result["itl_ms_p99"]
    assert isinstance(result["bytes_per_token"], int)
    assert math.isclose(result["gb_per_s"], result["bytes_per_token"] * result["tokens_per_s"] / 1e9, rel_tol=1e-9)
    assert (result["device"], result["decode"]) == ("cpu", "reference")


def test_greedy_is_reproducible_and_ignores_the_seed(model):
    assert prompt(model)["ids"] == prompt(model)["ids"] == prompt(model, "--seed", 9)["ids"]


def test_the_seed_decides(model):
    def sampled(seed: int) -> list[int]:
        return prompt(model, "--temperature", 1.5, "--top-k", 200, "--top-p", 0.99, "--seed", seed)["ids"]
    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(0) != prompt(model)["ids"]
    assert prompt(model, "--temperature", 1.5, "--top-k", 1)["ids"] == prompt(model)["ids"]


@pytest.mark.parametrize("narrow, wide", [(["--top-k", 1], ["--top-k", 0]), (["--top-p", 1e-6], ["--top-p", 1]),
                                          (["--min-p", 1], ["--min-p", 0]), (["--temperature", 1e-3], ["--temperature", 3])])
def test_each_filter_alone_leaves_the_likeliest_token(model, narrow, wide):
    """At its narrowest each is greedy, however hot; at its widest it takes nothing away."""
    def sampled(*arguments) -> list[int]:
        hot = [] if "--temperature" in arguments else ["--temperature", 3]
        return prompt(model, *hot, "--seed", 1, *arguments)["ids"]
    greedy = prompt(model)["ids"]
    assert sampled(*narrow) == greedy
    assert sampled(*wide) == sampled() != greedy


def test_text_is_the_text_of_json(model):
    done = run("--model", model, "--prompt", "Hello", "--max-tokens", 24)
    assert done.stdout.decode() == prompt(model)["text"], "a pipe gets the text and nothing else"
    assert re.fullmatch(r"24 tokens, \d+(\.\d)?/s", done.stderr.decode().splitlines()[-1])
    every = run("--model", model, "--prompt", "Hello", "--max-tokens", 24, "--stats").stderr
    assert b"tokens/s" in every and b"first token" in every


def test_the_prompt_comes_before_its_continuation(model, tmp_path):
    text = prompt(model)["text"]
    common = ["--model", model, "--max-tokens", 24]
    (tmp_path / "prompt.txt").write_text("Hello")
    for words in (["--prompt", "Hello"], ["--prompt-file", tmp_path / "prompt.txt"],
                  ["--prompt-ids", ",".join(str(byte + 2) for byte in b"Hello")]):
        assert run_ok(*common, *words, echo=True).decode() == "Hello" + text, words
        assert run_ok(*common, *words, "--no-echo", echo=True).decode() == text, words
    assert json.loads(run_ok(*common, "--prompt", "Hello", "--json", echo=True))["text"] == text
    for other in (["--interactive"], ["--perplexity", "x"], ["--bench"]):
        assert "--no-echo" in refused(USAGE, *common[:2], *other, "--no-echo")


@pytest.mark.parametrize("more, env, dim", [([], {}, True), ([], {"NO_COLOR": "1"}, False), (["--color", "never"], {}, False),
                                            (["--color", "always"], {"NO_COLOR": "1"}, True), ([], {"TERM": "dumb"}, False)])
def test_the_prompt_is_dimmed_on_a_terminal(model, more, env, dim):
    terminal = Terminal("--model", model, "--prompt", "He\x1b[31mllo", "--max-tokens", 4, *more, **{"TERM": "xterm", **env})
    code, output = terminal.finish()
    assert code == OK, output
    assert (b"\x1b[2mHe\\x1b[31mllo\x1b[22m" in output) == dim and b"He\\x1b[31mllo" in output, output
    assert dim or b"\x1b[" not in output, output


def test_special_tokens_are_printed_if_asked_for(tmp_path):
    head = np.zeros((ROWS, C), np.float32)
    head[END_OF_TEXT] = 1
    always = write_model(tmp_path / "end.bin", tokenizer_json(), head)
    words = ["--model", always, "--prompt", "x", "--max-tokens", 3, "--ignore-eos"]
    assert run_ok(*words) == b""
    assert run_ok(*words, "--print-special") == b"<|endoftext|>" * 3
    assert object_of(*words)["text"] == "<|endoftext|>" * 3, "programs get all"
    assert object_of(*words, "--stop", "text|><|end")["finish_reason"] == "stop", "a stop text sees them"
    assert run_ok("--model", always, "--interactive", "--max-tokens", 2, "--ignore-eos", "--print-special",
                  stdin=b"x\n") == b"<|endoftext|>" * 2 + b"\n"
    ids = ["--model", always, "--prompt-ids", f"{ord('a') + 2},{END_OF_TEXT},{ord('b') + 2}", "--max-tokens", 1, "--ignore-eos"]
    assert run_ok(*ids, echo=True) == b"ab"
    assert run_ok(*ids, "--print-special", echo=True) == b"a<|endoftext|>b<|endoftext|>"
    assert "--print-special" in refused(USAGE, "--model", always, "--bench", "--print-special")
    assert "--stats" in refused(USAGE, "--model", always, "--bench", "--stats")


def test_prompts_of_every_kind_agree(model, tmp_path):
    expected = prompt(model)["ids"]
    (tmp_path / "prompt.txt").write_bytes(b"Hello")
    common = ["--model", model, "--max-tokens", 24]
    assert object_of(*common, "--prompt-file", tmp_path / "prompt.txt")["ids"] == expected
    assert object_of(*common, "--prompt-file", "-", stdin=b"Hello")["ids"] == expected
    assert object_of(*common, "--prompt-ids", ",".join(str(byte + 2) for byte in b"Hello"))["ids"] == expected
    assert object_of(*common, "--prompt=Hello", "--device=cpu", "--decode=reference")["ids"] == expected


def test_an_empty_prompt_starts_a_document(model, tmp_path):
    (tmp_path / "empty.txt").touch()
    for arguments in (["--prompt", ""], ["--prompt="], ["--prompt-file", tmp_path / "empty.txt"]):
        assert object_of("--model", model, *arguments, "--max-tokens", 3)["prompt_ids"] == [END_OF_TEXT]


def test_special_tokens_are_text_unless_asked_for(model, tmp_path):
    (tmp_path / "prompt.txt").write_text("<|endoftext|>")
    for prompt in (("--prompt", "<|endoftext|>"), ("--prompt-file", tmp_path / "prompt.txt")):
        as_text = object_of("--model", model, *prompt, "--max-tokens", 1)
        assert as_text["prompt_ids"] == [byte + 2 for byte in b"<|endoftext|>"]
        as_token = object_of("--model", model, *prompt, "--max-tokens", 1, "--special")
        assert as_token["prompt_ids"] == [END_OF_TEXT]


@pytest.mark.parametrize("text", [b"\xff\xfe", b"a\xed\xa0\x80b", b"a\0b", b"\xef\xbb\xbfx", b"a\r\nb", b"\xf0\x9f"])
def test_odd_bytes_have_a_defined_result(model, tmp_path, text):
    (tmp_path / "odd.txt").write_bytes(text)
    result = object_of("--model", model, "--prompt-file", tmp_path / "odd.txt", "--max-tokens", 2)
    assert result["prompt_ids"] == [byte + 2 for byte in text.decode("utf-8", "replace").encode()]


def test_stop_at_the_end_of_text(tmp_path):
    head = np.zeros((ROWS, C), np.float32)
    head[END_OF_TEXT] = 1
    always_ends = write_model(tmp_path / "ends.bin", tokenizer_json(), head)
    result = prompt(always_ends)
    assert (result["ids"], result["text"], result["finish_reason"]) == ([END_OF_TEXT], "", "stop")
    result = prompt(always_ends, "--ignore-eos")
    assert (result["ids"], result["finish_reason"]) == ([END_OF_TEXT] * 24, "length")


def test_stop_text_does_not_leak(tmp_path):
    says_ab = write_model(tmp_path / "ab.bin", tokenizer_json(), constant_head(b"ab"))
    arguments = ["--model", says_ab, "--prompt", "x", "--max-tokens", 60, "--temperature", 1, "--seed", 3]
    whole = object_of(*arguments)["text"]
    assert set(whole) == {"a", "b"}
    for stops in (["abba"], ["bbb", "aaa"], ["baab", "bab"]):
        end = min(whole.index(stop) + len(stop) for stop in stops if stop in whole)
        cut = max((stop for stop in stops if whole[:end].endswith(stop)), key=len)
        options = [part for stop in stops for part in ("--stop", stop)]
        result = object_of(*arguments, *options)
        assert result["text"] == whole[:end - len(cut)] and result["finish_reason"] == "stop"
        assert len(result["ids"]) == end
        assert run_ok(*arguments, *options).decode() == result["text"]


def test_the_context_ends_a_generation(model):
    result = object_of("--model", model, "--prompt", "Hello", "--context", 16, "--max-tokens", 100)
    assert len(result["ids"]) == 16 - 5 and result["finish_reason"] == "length"


def test_without_a_tokenizer_only_ids_work(models):
    bare = models / "no_tokenizer.bin"
    result = object_of("--model", bare, "--prompt-ids", "1,2,3", "--max-tokens", 5)
    assert result["text"] == "" and len(result["ids"]) == 5
    assert max(result["ids"]) < TOKENS, "the rows of padding are ahead, and no token has their ids"
    done = run("--model", bare, "--prompt-ids", "1,2,3", "--max-tokens", 5)
    assert done.stdout.decode() == ",".join(map(str, result["ids"])) and b"no tokenizer" in done.stderr
    for arguments in (["--prompt", "Hello"], ["--interactive"], ["--perplexity", __file__]):
        assert "tokenizer.json" in refused(BAD_FILE, "--model", bare, *arguments)
    assert "stop text" in refused(USAGE, "--model", bare, "--prompt-ids", "1", "--stop", "x")


# ---- perplexity, bench -----------------------------------------------------------------------------------------------

def test_perplexity_of_a_uniform_model_is_its_vocabulary(tmp_path):
    uniform = write_model(tmp_path / "uniform.bin", tokenizer_json(), np.zeros((ROWS, C), np.float32))
    for length in (1, 50, 95, 96, 97, 500):
        (tmp_path / "text.txt").write_bytes(b"a" * length)
        result = object_of("--model", uniform, "--perplexity", tmp_path / "text.txt")
        assert result["tokens"] == result["of_tokens"] == result["bytes"] == length
        assert math.isclose(result["perplexity"], ROWS, rel_tol=1e-5)
        assert math.isclose(result["bits_per_byte"], math.log2(ROWS), rel_tol=1e-5)
        assert (result["window"], result["stride"]) == (CONTEXT, CONTEXT // 2)


def test_divergence_from_another_model(model, tmp_path):
    """From itself none; of a uniform model log V less the entropy, which is none where one id has all probability."""
    text = tmp_path / "text.txt"
    text.write_text("a short text, of some bytes" * 3)
    arguments = ("--perplexity", text, "--context", 20, "--stride", 7)
    same = object_of("--model", model, *arguments, "--against", model)
    assert same["kl_mean"] == same["kl_largest"] == 0 and same["same_top"] == 1
    assert same["mean_nll"] == same["mean_nll_against"] > 0
    uniform = write_model(tmp_path / "uniform.bin", tokenizer_json(), np.zeros((ROWS, C), np.float32))
    sure = write_model(tmp_path / "sure.bin", tokenizer_json(), 100 * constant_head(b"a"))
    apart = object_of("--model", uniform, *arguments, "--against", sure)
    assert apart["kl_mean"] == pytest.approx(math.log(TOKENS), rel=1e-6) == apart["mean_nll"]
    assert apart["tokens"] == object_of("--model", model, *arguments)["tokens"] and apart["same_top"] < 1
    assert object_of("--model", sure, *arguments, "--against", uniform)["kl_mean"] > 10 * apart["kl_mean"]
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    whole = object_of("--model", model, "--perplexity", short, "--against", model)
    assert (whole["tokens"], whole["kl_mean"]) == (len("a few words"), 0), "by default a window is as long as a text that fits"
    lines = run_ok("--model", uniform, *arguments, "--against", sure).decode()
    assert lines.startswith("KL divergence  ") and "same top id" in lines and "of the other" in lines
    assert "--against: only for --perplexity" in refused(2, "--model", model, "--prompt", "a", "--against", model)
    assert "--against: got ''" in refused(2, "--model", model, *arguments, "--against", "")
    fewer = write_model(tmp_path / "fewer.bin", tokenizer_json(), tokenizer_vocab=TOKENS - 1)
    assert "only models of one tokenizer" in refused(3, "--model", model, *arguments, "--against", fewer)
    other = write_model(tmp_path / "other.bin", tokenizer_json().replace("<|padding|>", "<|elsewhere|>"))
    assert "It needs the tokenizer of" in refused(USAGE, "--model", model, *arguments, "--against", other)
    needed = apart["tokens"] + 1  # in one window
    for positions in (needed, needed - 1):
        short = write_model(tmp_path / "short.bin", tokenizer_json(), max_positions=positions)
        words = ("--model", model, "--perplexity", text, "--against", short)
        if positions == needed:
            assert object_of(*words)["tokens"] == apart["tokens"]
        else:
            assert f"--context: got {needed}, expected at most the {positions} positions of --against" in refused(USAGE, *words)


def test_keys_and_values_in_fp8(model, tmp_path):
    """Near those of fp32, the same in every way of generating, and a code a value and a scale a head in memory."""
    fp8 = ("--kv-dtype", "fp8")
    text = tmp_path / "text.txt"
    text.write_text("a short text, of some bytes" * 3)
    plain = object_of("--model", model, "--perplexity", text, "--against", model)
    apart = object_of("--model", model, "--perplexity", text, "--against", model, *fp8)
    assert plain["kl_mean"] == 0 < apart["kl_mean"] < 0.01
    assert apart["mean_nll_against"] == plain["mean_nll"] != apart["mean_nll"]
    ids = prompt(model, *fp8)["ids"]
    for more in (("--lookup", 3), ("--draft", model), ("--context", 40), ("--decode", "reference")):
        assert prompt(model, *fp8, *more)["ids"] == ids, more
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("".join(json.dumps({"id": str(i), "prompt": "Hello"}) + "\n" for i in range(5)))
    run_ok("--model", model, "--batch", requests, "--output", answers, "--max-tokens", 24, *fp8)
    for line in answers.read_text().splitlines():
        assert json.loads(line)["ids"] == ids
    words = ("--model", model, "--bench-batch", "1,4", "--bench-prompt", 20, "--max-tokens", 12)
    one, four = object_of(*words, *fp8)["points"]
    assert four["bytes_per_step"] - one["bytes_per_step"] == 3 * (4 * C + 2 * LAYERS * (C + HEADS) * 26)
    few = ("--kv-memory", "0.07MB")
    assert "enough for 2" in refused(RESOURCES, *words, *few)
    assert len(object_of(*words, *few, *fp8)["points"]) == 2
    several = "--kv-dtype: got fp8, --decode fused reads keys and values of 16 bits in steps of several rows. Use --decode graph"
    assert several in refused(USAGE, "--model", model, "--prompt", "a", "--lookup", 3, "--decode", "fused", *fp8)
    assert several in refused(USAGE, *words, "--decode", "fused", *fp8)
    assert "--kv-dtype: got fp8, --compare is for fp32" in refused(USAGE, "--model", model, "--compare", text, *fp8)
    assert "--kv-dtype" in refused(USAGE, "--model", model, "--prompt", "a", "--kv-dtype", "fp4")


def test_perplexity_depends_on_the_stride_only_by_context(model, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"The quick brown fox. " * 12)
    def score(stride: int) -> dict:
        return object_of("--model", model, "--perplexity", tmp_path / "text.txt", "--stride", stride)
    fine, coarse, finest = score(8), score(95), score(1)
    assert finest["stride"] == 1 and finest["tokens"] == 252 and finest["windows"] == 252 + 1 - CONTEXT + 1
    assert fine["tokens"] == coarse["tokens"] == 252 and fine["windows"] > coarse["windows"] == 3
    text = run_ok("--model", model, "--perplexity", tmp_path / "text.txt", "--stride", 8).decode()
    assert f"{fine['perplexity']:.4f}" in text and "tokens         252 of 252, 252 bytes" in text


def test_perplexity_refuses(model, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "empty" in refused(BAD_FILE, "--model", model, "--perplexity", tmp_path / "empty.txt")
    assert "missing.txt" in refused(BAD_FILE, "--model", model, "--perplexity", tmp_path / "missing.txt")
    assert "not a regular file" in refused(BAD_FILE, "--model", model, "--perplexity", tmp_path)
    assert "from 1 to 95" in refused(USAGE, "--model", model, "--perplexity", __file__, "--stride", 96)
    assert "--stride" in refused(USAGE, "--model", model, "--prompt", "x", "--stride", 5)


def test_compare_with_a_reference_dump(tmp_path):
    golden = ROOT / "test" / "fixtures" / "golden"
    words = ["--device", "cpu", "--model", golden / "neox-hs32-padded.model.bin", "--compare"]
    done = run(*words, golden / "neox-hs32-padded.dump.bin")
    assert done.returncode == OK and b" 0 failed" in done.stdout, done.stderr
    others = [path for path in golden.glob("neox-*.dump.bin") if "padded" not in path.name]
    assert others and all(run(*words, other).returncode in (INTERNAL, BAD_FILE) for other in others)
    original = tensor_file.read(words[3])
    with tensor_file.Writer(tmp_path / "changed.bin", "model", original.config) as writer:
        for name, info in original.tensors.items():
            writer.declare(name, info.dtype, info.shape)
        for name in original.tensors:
            writer.write(name, original.array(name)[::-1 if name == "gpt_neox.final_layer_norm.weight" else 1])
    done = run(*words[:3], tmp_path / "changed.bin", "--compare", golden / "neox-hs32-padded.dump.bin")
    assert done.returncode == INTERNAL and b" 0 failed" not in done.stdout and b" failed" in done.stdout, done.stderr


def test_bench(model):
    result = object_of("--model", model, "--bench", "--max-tokens", 20)
    assert result["tokens"] == 20 and result["prompt_tokens"] == 32
    assert all(result[field] > 0 for field in ["ttft_ms", "itl_ms_p50", "itl_ms_p99", "tokens_per_s", "gb_per_s"])
    table = run_ok("--model", model, "--bench", "--max-tokens", 20).decode().splitlines()
    assert len(table) == 2 and "median ms" in table[0] and "decode 20 tokens" in table[1]
    deep = object_of("--model", model, "--bench", "--max-tokens", 20, "--bench-contexts", "5,60")["contexts"]
    assert [(point["prompt_tokens"], point["tokens"]) for point in deep] == [(5, 64), (60, 35)]
    assert all(point["itl_ms_p50"] > 0 for point in deep)
    for wrong in ("0", "95", "96", "94,95", "1,,2", "x", "5,"):
        assert "--bench-contexts" in refused(USAGE, "--model", model, "--bench", "--bench-contexts", wrong)
    assert "--bench-contexts" in refused(USAGE, "--model", model, "--prompt", "x", "--bench-contexts", "5")
    assert "do not fit" in refused(USAGE, "--model", model, "--bench", "--max-tokens", 65)


def check_speed(point):
    """The mean step is at most the longest, which p99 of less than 100 steps is, and at least half of the median."""
    rate = point["sequences"] * 1e3
    assert rate / point["step_ms_p99"] <= point["decode_tokens_per_s"] * (1 + 1e-9)
    assert point["decode_tokens_per_s"] <= 2 * rate / point["step_ms_p50"]
    assert point["gb_per_s"] == pytest.approx(point["bytes_per_step"] * point["decode_tokens_per_s"] / point["sequences"] / 1e9)


def test_more_sequences_than_rows_of_a_prompt_run_at_once(model):
    """130 on the CPU, where a step has 128 rows if fewer sequences do not ask for more."""
    point = object_of("--model", model, "--bench-batch", "130", "--bench-prompt", 1, "--max-tokens", 2)["points"][0]
    assert point["sequences"] == 130 and point["steps"] == 1, point


def test_bench_batch(model):
    words = ["--model", model, "--bench-batch", "1,4,2", "--bench-prompt", 20, "--max-tokens", 12]
    result = object_of(*words)
    assert (result["prompt_tokens"], result["tokens"], result["device"]) == (20, 12, "cpu")
    assert [point["sequences"] for point in result["points"]] == [1, 4, 2]
    for point in result["points"]:
        assert point["steps"] == 11 and 0 < point["step_ms_p50"] <= point["step_ms_p99"]
        assert point["prefill_tokens_per_s"] > 0
        check_speed(point)
    # The weights once, an embedding row and keys and values of the mean context for each sequence.
    one, four = result["points"][:2]
    assert four["bytes_per_step"] - one["bytes_per_step"] == 3 * 4 * (C + 2 * LAYERS * C * 26)
    table = run_ok(*words, "--temperature", 0.8, "--top-k", 5).decode().splitlines()
    assert len(table) == 5 and "prompts of 20 ids, 12 generated" in table[0] and "of read" in table[1]
    for wrong in ("0", "4097", "1,,2", "x", "5,", ""):
        assert "--bench-batch" in refused(USAGE, "--model", model, "--bench-batch", wrong)
    for most in ("2", "4096"):
        few = ("--bench-batch", most, "--kv-memory", "0.07MB")
        assert "do not fit in the context of 96" in refused(USAGE, "--model", model, *few)
    assert "enough for 2" in refused(RESOURCES, *words, "--kv-memory", "0.07MB")
    assert "not finite" in refused(NUMERIC, *words, "--debug-inject", "nan@token=30")
    assert "--bench-prompt: only for --bench-batch" in refused(USAGE, "--model", model, "--bench", "--bench-prompt", 9)
    short = ("--bench-batch", 8, "--bench-prompt", 40, "--max-tokens", 2, "--prompt-rows", 1)
    assert "8 sequences never ran at the same time" in refused(USAGE, "--model", model, *short)


def test_a_prompt_from_standard_input_has_a_limit(model):
    done = run("--model", model, "--prompt-file", "-", stdin=b"a" * (64 << 20) + b"b")
    assert done.returncode == BAD_FILE and done.stdout == b""
    assert done.stderr.splitlines()[-1].startswith(b"error: standard input: more than the 67108864 bytes")


def test_a_random_model_takes_a_random_draft():
    words = ["--random-model", "pythia-14m", "--max-tokens", 8, "--device", "cpu", "--bench", "--json"]
    done = run(*words, "--draft", "pythia-14m")
    assert done.returncode == OK, done.stderr
    assert b"pythia-14m: 6 layers of 128, 14.07 M parameters from a random generator; 57.3 MB for drafts" in done.stderr
    assert "drafts" in json.loads(done.stdout)
    assert "--draft: got 'pythia-13m'" in refused(USAGE, *words, "--draft", "pythia-13m")


def test_random_models_of_different_vocabularies_draft(tmp_path):
    config = json.loads((ROOT / "models/tiny-llama/config.json").read_text())
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    for file, vocab_size in ((small, 70), (large, 4 * config["vocab_size"])):
        file.write_text(json.dumps({**config, "vocab_size": vocab_size}))
    for model, draft in ((large, small), (small, large)):
        words = ["--random-model", model, "--draft", draft, "--debug-inject", "accept=1", "--max-tokens", 24, "--device", "cpu"]
        drafts = object_of("--bench", *words)["drafts"]
        assert drafts["accepted"] == drafts["drafted"] > 0, drafts


def test_random_models_run_on_the_cpu():
    words = ["--random-model", "pythia-14m", "--max-tokens", 4, "--device", "cpu"]
    assert object_of("--bench", *words)["bytes_per_token"] == 4 * (14_067_712 - 50304 * 128 + 128) + 8 * 6 * 128 * 34
    assert object_of("--bench-batch", "2", "--bench-prompt", 4, *words)["points"][0]["steps"] == 3


def test_a_random_model_takes_the_shape_of_a_config_file(tmp_path):
    config = json.loads((ROOT / "models/tiny-llama/config.json").read_text())
    file = tmp_path / "shape.json"
    file.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    words = ["--max-tokens", 4, "--device", "cpu", "--bench"]
    done = run(*words, "--random-model", file)
    assert done.returncode == OK, done.stderr
    assert f"{file}: 3 layers of {config['hidden_size']}".encode() in done.stderr
    file.write_text(json.dumps({**config, "hidden_size": 0}))
    assert str(file) in refused(BAD_FILE, *words, "--random-model", file)


# ---- refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, parts", [  # one of each kind: options_test.cpp has the limits and combinations of all
    (["--promt", "x"], ["unknown option '--promt'", "did you mean --prompt?"]),
    (["--prompt", "x", "--temperature", "0,7"], ["--temperature: got '0,7'"]),
    (["--prompt", "x", "--decode", "fast"], ["--decode: got 'fast'", "fused"]),
    (["--prompt", "x", "--activations", "fp4"], ["--activations: got 'fp4'", "fp8"]),
    (["--prompt", "x", "--activations", "fp8", "--decode", "fused"], ["--activations: got fp8", "--decode fused", "Use --decode graph"]),
    (["--compare", "x", "--activations", "fp8"], ["--activations: got fp8", "--compare is for fp32"]),
    (["--prompt", "x", "--device", "cpu", "--activations", "fp8"], ["--activations fp8", "weights are floats", "--quantize fp8"]),
    (["--prompt", "x", "--prompt-ids", "1"], ["--prompt, --prompt-ids", "only one"]),
    (["--prompt", "x", "--context", "97"], ["--context: got 97", "96"]),
    (["--prompt-ids", "1,272"], ["--prompt-ids: id 2: got '272'", "from 0 to 271"]),
    (["--prompt", "x" * 96], ["96 tokens", "context of 96", "at most 95"]),
    ([], ["nothing to do", "--prompt", "--compare"]),
])
def test_usage_errors(model, arguments, parts):
    message = refused(USAGE, "--model", model, *arguments)
    for part in parts:
        assert part in message


def test_a_value_is_missing(model):
    done = run("--model", model, "--prompt", "x", "--max-tokens", echo=True)
    assert done.returncode == USAGE and b"--max-tokens: value missing" in done.stderr


def test_a_model_is_described(model, tmp_path):
    """As JSON on stdout, warnings and errors on stderr. A GPU that does not exist is no hindrance."""
    described = json.loads(run_ok("--describe", model, "--device", "cuda"))
    assert described["model"]["max_positions"] == CONTEXT and described["embedding"] == "gpt_neox.embed_in.weight"
    assert [tuple(tensor["shape"]) for tensor in described["tensors"]] == list(shapes().values())
    config = described["hf_config"]
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "hidden_act"}))
    for source in (tmp_path, tmp_path / "config.json"):
        done = run("--describe", source)
        assert json.loads(done.stdout)["model"] == described["model"] | {"tokenizer_vocab": ROWS}
        assert done.stderr.decode() == f"warning: '{tmp_path}/config.json': hidden_act: absent, taken for 'gelu' as transformers does\n"
    assert json.loads(run_ok("--describe", "-", stdin=json.dumps({"config": config}).encode()))["hf_config"] == config
    (tmp_path / "config.json").write_text("{}")
    assert "config.json': model_type: got nothing" in refused(BAD_FILE, "--describe", tmp_path)
    assert "--describe -: not valid JSON" in refused(BAD_FILE, "--describe", "-")


def test_no_model():
    assert "--random-model: got 'pythia-3b'" in refused(USAGE, "--bench", "--random-model", "pythia-3b")
    assert "--model: missing" in refused(USAGE, "--prompt", "x")
    assert "--describe: got --model as well" in refused(USAGE, "--model", "x", "--describe", "y")
    assert "--describe: got ''" in refused(USAGE, "--describe=")
    assert "--random-model: got 'pythia-9b'" in refused(USAGE, "--device", "cpu", "--random-model", "pythia-9b", "--bench")


@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--device=cpu", "--decode=fused"],
                                       ["--device=cpu", "--decode=graph"]])
def test_what_the_machine_lacks_is_an_environment_error(model, arguments):
    if arguments == ["--device", "cuda"] and os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    message = refused(ENVIRONMENT, "--model", model, "--prompt", "x", *arguments)
    assert arguments[-1].split("=")[-1] in message


def test_what_needs_a_gpu_says_so(model):
    bench = ["--device", "cpu", "--bench"]
    for more in (["--bench-layer"], ["--bench-timeline"]):
        assert more[0] in refused(ENVIRONMENT, "--model", model, *bench, *more)
    for dtype in ("fp16", "bf16"):
        message = refused(USAGE, "--model", model, "--device", "cpu", "--prompt", "x", "--dtype", dtype)
        assert f"--dtype: got {dtype}, the CPU computes in fp32 only" in message
    for dtype in ("auto", "fp32"):
        assert prompt(model, "--device", "cpu", "--dtype", dtype)["ids"] == prompt(model)["ids"]


def test_auto_says_what_it_took(model):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    done = run("--model", model, "--prompt", "x", "--max-tokens", 1)
    assert done.returncode == OK and b"running on the CPU: " in done.stderr
    assert b"--device" not in done.stderr, "no advice to do what it does already"
    assert "--device cpu needs no GPU" in refused(ENVIRONMENT, "--model", model, "--prompt", "x", "--device", "cuda")


def test_a_flipped_bit_names_the_tensor(model, tmp_path):
    data = bytearray(model.read_bytes())
    info = tensor_file.read(model).tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    data[info.offset + 100] ^= 1
    (tmp_path / "flipped.bin").write_bytes(data)
    assert "gpt_neox.layers.1.mlp.dense_h_to_4h.weight" in refused(
        BAD_FILE, "--model", tmp_path / "flipped.bin", "--prompt", "x")


def test_weights_that_are_not_finite(tmp_path):
    path = write_model(tmp_path / "nan.bin", tokenizer_json(), np.full((ROWS, C), np.nan, np.float32))
    assert "embed_out.weight" in refused(BAD_FILE, "--model", path, "--prompt", "x")
    overflow = write_model(tmp_path / "inf.bin", tokenizer_json(), np.full((ROWS, C), 3e38, np.float32))
    assert "logit" in refused(NUMERIC, "--model", overflow, "--prompt", "x")


def test_hostile_names_do_not_steer_the_terminal(tmp_path):
    message = refused(BAD_FILE, "--model", tmp_path / "\x1b[31mred\nline", "--prompt", "x")
    assert "\x1b" not in message and "\\x1b[31mred\\x0aline" in message


# ---- output ----------------------------------------------------------------------------------------------------------

def test_help_and_version():
    text = run_ok("--help").decode()
    for name in ["--model", "--prompt-file", "--interactive", "--decode", "--perplexity", "--min-p", "--version"]:
        assert name in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    assert re.fullmatch(r"infer_pythia \S+ \(.+\)\n", run_ok("--version").decode())


def test_a_closed_pipe_is_quiet(model):
    script = '"$@" 2>err.txt | head -c1; echo "${PIPESTATUS[0]}"'
    for arguments in (["--help"], ["--model", str(model), "--prompt", "Hello", "--max-tokens", "90"],
                      ["--model", str(model), "--bench", "--max-tokens", "50"]):
        done = subprocess.run(["bash", "-c", script, "bash", PROGRAM, *arguments], capture_output=True,
                              cwd=model.parent, env=environment(), timeout=60)
        assert done.stdout[1:] == b"0\n", done.stdout
        errors = (model.parent / "err.txt").read_text()
        assert "error" not in errors and "warning" not in errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error(model):
    for arguments in (["--help"], ["--version"], ["--model", model, "--prompt", "x"],
                      ["--model", model, "--prompt", "x", "--json"], ["--model", model, "--perplexity", __file__]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, env=environment(),
                                  timeout=120)
        assert done.returncode == RESOURCES and b"standard output: cannot write: No space left" in done.stderr


def test_a_locale_does_not_change_numbers(model, comma_locale):
    done = run("--model", model, "--prompt", "Hello", "--max-tokens", 5, "--temperature", "0.5", "--json",
               TZ="Asia/Kathmandu", **comma_locale)
    assert done.returncode == OK and set(json.loads(done.stdout)) == FIELDS
    text = run("--model", model, "--prompt", "Hello", "--max-tokens", 5, "--stats", **comma_locale).stderr.decode()
    assert re.search(r"first token \d+\.\d ms", text)


class Terminal:
    """The program with a terminal of its own as stdin, stdout and stderr."""

    def __init__(self, *arguments, columns: int = 80, **env):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.master, self.output = master, b""
        self.process = subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, env=environment(**env))
        os.close(slave)

    def read_until(self, condition, seconds: float = 60) -> bytes:
        end = time.monotonic() + seconds
        while not condition(self.output) and time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    piece = os.read(self.master, 65536)
                except OSError as error:
                    if error.errno != errno.EIO:  # the other side is closed
                        raise
                    break
                if not piece:
                    break
                self.output += piece
        return self.output

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def finish(self) -> tuple[int, bytes]:
        self.read_until(lambda _: False)
        code = self.process.wait(timeout=60)
        os.close(self.master)
        return code, self.output


def test_a_terminal_gets_no_control_characters_from_the_model(tmp_path):
    says_escape = write_model(tmp_path / "escape.bin", tokenizer_json(), constant_head(b"\x1b"))
    arguments = ["--model", says_escape, "--prompt", "x", "--max-tokens", 3]
    code, output = Terminal(*arguments, NO_COLOR="1").finish()
    assert code == OK and b"\x1b" not in output and b"\\x1b\\x1b\\x1b\r\n" in output
    assert run_ok(*arguments) == b"\x1b\x1b\x1b", "a pipe gets what the model said"


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8", "no_such_locale"])
def test_a_terminal_takes_letters_of_every_alphabet(model, locale):
    terminal = Terminal("--model", model, "--interactive", "--max-tokens", 1, LC_ALL=locale)
    terminal.read_until(lambda output: b"> " in output)
    terminal.type("Über été 日本 😀\n".encode())
    output = terminal.read_until(lambda output: output.count(b"> ") > 2 or "😀".encode() in output)
    terminal.type(b"/quit\n")
    terminal.finish()
    assert all(word.encode() in output for word in ("Über", "été", "日本", "😀")), output


# ---- signals, interactive text ---------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def slow_model(tmp_path_factory) -> Path:
    """A model whose text goes on for thousands of tokens."""
    return write_model(tmp_path_factory.mktemp("slow") / "slow.bin", tokenizer_json(), constant_head(b"a"),
                       max_positions=16384)


def start(*arguments, stdin=subprocess.DEVNULL) -> subprocess.Popen:
    return subprocess.Popen([PROGRAM, *without_echo(arguments)], stdin=stdin, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment(), bufsize=0)


def start_in(changes: dict[str, str], *arguments) -> subprocess.Popen:
    return subprocess.Popen([PROGRAM, *without_echo(arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment(**changes), bufsize=0)


def wait_for_message(process: subprocess.Popen, words: bytes) -> None:
    """Reads stderr as far as the line with these words."""
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended without {words}")


def wait_until_it_reads(process: subprocess.Popen) -> None:
    """Until its main thread sleeps: all that is left to it after its last message is to wait for a line."""
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_the_text_and_says_so(slow_model, number, code):
    process = start("--model", slow_model, "--prompt", "x", "--max-tokens", 16000)
    first = process.stdout.read(1)
    process.send_signal(number)
    rest, stderr = process.communicate(timeout=60)
    assert process.returncode == code and b"ended by a signal" in stderr
    assert set(first + rest) == {ord("a")} and len(rest) < 15000


def test_an_interrupted_object_is_whole(slow_model):
    process = start("--model", slow_model, "--prompt", "x", "--max-tokens", 16000, "--json")
    wait_for_message(process, b"context of")  # the last line before the first token
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    result = json.loads(stdout)
    assert set(result) == FIELDS and result["finish_reason"] == "interrupted"
    assert result["text"] == "a" * len(result["ids"]) and 0 < len(result["ids"]) < 15000


def test_interactive_keeps_one_text(model):
    done = run("--model", model, "--interactive", "--max-tokens", 4, "--ignore-eos", stdin=b"Hello\nand\n")
    assert done.returncode == OK, done.stderr
    first = object_of("--model", model, "--prompt", "Hello", "--max-tokens", 4, "--ignore-eos")
    ids = first["prompt_ids"] + first["ids"] + [byte + 2 for byte in b"\nand"]
    second = object_of("--model", model, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", 4, "--ignore-eos")
    assert done.stdout.decode() == first["text"] + "\n" + second["text"] + "\n"


@pytest.mark.parametrize("special", [True, False])
def test_interactive_reads_special_tokens_in_every_line_or_in_none(model, special):
    options = ["--max-tokens", 4, "--ignore-eos", *(["--special"] if special else [])]
    done = run("--model", model, "--interactive", *options, stdin=b"<|padding|>a\n<|padding|>b\n<|padding|>c\n")
    assert done.returncode == OK, done.stderr
    ids, texts = [], []
    for start, end in ((b"", b"a"), (b"\n", b"b"), (b"\n", b"c")):
        name = [1] if special else [byte + 2 for byte in b"<|padding|>"]
        ids += [byte + 2 for byte in start] + name + [byte + 2 for byte in end]
        answer = object_of("--model", model, "--prompt-ids", ",".join(map(str, ids)), *options)
        ids, texts = ids + answer["ids"], [*texts, answer["text"]]
    assert done.stdout.decode() == "".join(text + "\n" for text in texts)


def test_interactive_begins_anew_when_the_context_is_full(model):
    done = run("--model", model, "--interactive", "--context", 12, "--max-tokens", 4, "--ignore-eos",
               stdin=b"Hello\nHello\n" + b"x" * 40 + b"\n")
    first = object_of("--model", model, "--prompt", "Hello", "--context", 12, "--max-tokens", 4, "--ignore-eos")
    assert done.returncode == OK and done.stdout.decode() == (first["text"] + "\n") * 2
    assert b"context of 12 tokens is full" in done.stderr
    assert b"this line has 40 tokens" in done.stderr


@pytest.mark.parametrize("length", range(5))
def test_interactive_takes_what_leaves_a_place_for_an_answer(model, length):
    """After "Hello" and four ids the cache holds 8 positions of 12; a line adds the fourth id, a line feed and itself."""
    line = b"x" * length
    done = run("--model", model, "--interactive", "--context", 12, "--max-tokens", 4, "--ignore-eos", stdin=b"Hello\n" + line + b"\n")
    assert done.returncode == OK, done.stderr
    assert (b"tokens is full" in done.stderr) == (8 + 2 + length >= 12), done.stderr
    alone = run("--model", model, "--interactive", "--context", 12, "--max-tokens", 4, "--ignore-eos", stdin=line + b"\n")
    if b"tokens is full" in done.stderr:
        assert done.stdout.endswith(alone.stdout) and alone.stdout, "the line begins a text of its own"


@pytest.mark.parametrize("length", [11, 12])
def test_interactive_leaves_out_a_line_without_a_place_for_an_answer(model, length):
    done = run("--model", model, "--interactive", "--context", 12, "--max-tokens", 4, "--ignore-eos",
               stdin=b"x" * length + b"\nHello\n")
    assert done.returncode == OK, done.stderr
    assert (f"this line has {length} tokens".encode() in done.stderr) == (length >= 12)
    assert done.stdout.count(b"\n") >= 1


def test_interactive_ends_with_its_input(model):
    assert run_ok("--model", model, "--interactive", stdin=b"") == b""
    assert run("--model", model, "--interactive", "--max-tokens", 2, stdin=b"no newline").returncode == OK


def test_interrupt_stops_the_answer_and_then_the_program(slow_model):
    process = start("--model", slow_model, "--interactive", "--stats", "--max-tokens", 8000, stdin=subprocess.PIPE)

    def read_answer() -> int:
        """Reads the rest of an answer, a run of "a" and its newline; its length."""
        for length in range(8000):
            byte = process.stdout.read(1)
            if byte != b"a":
                assert byte == b"\n", "the program ended inside the answer"
                return length
        raise AssertionError("the answer was not stopped")

    for line in (b"Hello\n", b"again\n"):
        process.stdin.write(line)
        for _ in range(20):
            assert process.stdout.read(1) == b"a", "the answer goes on until it is stopped"
        process.send_signal(signal.SIGINT)
        read_answer()
        wait_for_message(process, b"first token")  # the statistics of the answer
    wait_until_it_reads(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_second_interrupt_does_not_wait_for_the_answer(model):
    process = start("--model", model, "--interactive", "--debug-inject", "hang@token=2", stdin=subprocess.PIPE)
    try:
        process.stdin.write(b"Hello\n")
        wait_for_message(process, b"token 2 never comes")
        send(process, signal.SIGINT)
        assert process.poll() is None, "the first one is for the answer"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130


def test_interactive_terminates_while_waiting(model):
    process = start("--model", model, "--interactive", stdin=subprocess.PIPE)
    wait_for_message(process, b"context of")
    wait_until_it_reads(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_cuts_the_answer_and_is_the_end(slow_model, number):
    process = start("--model", slow_model, "--interactive", "--max-tokens", 8000, stdin=subprocess.PIPE)
    process.stdin.write(b"Hello\nagain\n")
    first = process.stdout.read(1)
    process.send_signal(number)
    rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert re.fullmatch(b"a{1,7999}\n", first + rest), "a line that is whole, and no further answer"


def test_interactive_outlives_its_terminal_under_nohup(model):
    process = subprocess.Popen([PROGRAM, "--model", model, "--interactive", "--max-tokens", "3"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), bufsize=0,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for_message(process, b"context of")
    wait_until_it_reads(process)
    process.send_signal(signal.SIGHUP)
    stdout, _ = process.communicate(b"Hello\n", timeout=60)
    assert process.returncode == OK and stdout.count(b"\n") == 1


# SIGTERM in the last moment before --interactive takes SIGINT over from the handlers of the start.
LATE_TERMINATION = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
int sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  static int interrupts = 0;
  if (number == SIGINT && action && ++interrupts == 2) raise(SIGTERM);
  return ((int (*)(int, const struct sigaction*, struct sigaction*))dlsym(RTLD_NEXT, "sigaction"))(number, action, before);
}
"""


def test_interactive_sees_a_signal_that_came_before_its_first_line(model, tmp_path):
    done = run("--model", model, "--interactive", stdin=b"Hello\n", **preload(tmp_path, LATE_TERMINATION))
    if b"LD_PRELOAD" in done.stderr:
        pytest.skip("this build cannot be preloaded")
    assert done.returncode == 143
    assert done.stdout == b""


def test_interactive_commands(model):
    common = ["--model", model, "--interactive", "--max-tokens", 4, "--ignore-eos"]
    once = run_ok(*common, stdin=b"Hello\n")
    done = run(*common, stdin=b"Hello\n/reset\nHello\n/help\n/quit\nHello\n")
    assert done.returncode == OK and done.stdout == once * 2, "anew after /reset, and nothing after /quit"
    assert b"the text begins anew" in done.stderr
    for words in (b"/reset", b"/help", b"/quit", b"Ctrl-C"):
        assert words in done.stderr.split(b"begins anew")[1]
    for line in (b" /reset\n", b"/usr/bin\n", b"/reset it\n", b"/RESET\n"):
        text = run(*common, stdin=b"Hello\n" + line)
        assert text.stdout.count(b"\n") == 2 and b"begins anew" not in text.stderr, "a line is text unless it is a command"
    assert run(*common, stdin=b"/reset\nHello\n").stdout == once, "before the first line it does nothing"


def test_interactive_on_a_terminal(model):
    terminal = Terminal("--model", model, "--interactive", "--stats", "--max-tokens", 3, NO_COLOR="1", TERM="dumb")
    terminal.read_until(lambda output: output.endswith(b"> "))
    terminal.type(b"Hello\n")
    terminal.read_until(lambda output: output.count(b"> ") == 2)
    terminal.type(b"\x04")  # Ctrl-D: the end of input
    code, output = terminal.finish()
    assert code == OK and b"first token" in output and b"\x1b" not in output
    assert b"Ctrl-D" in output, "it says how to leave"
    quiet = run("--model", model, "--interactive", "--max-tokens", 3, stdin=b"Hello\n")
    assert quiet.returncode == OK and b"first token" not in quiet.stderr and b"Ctrl-D" not in quiet.stderr


def test_a_line_without_end_is_not_kept(model):
    """400 MB in one line, of which --interactive may keep no more than a line may have."""
    process = start("--model", model, "--interactive", "--max-tokens", 2, stdin=subprocess.PIPE)
    wait_for_message(process, b"context of")
    for _ in range(400):
        process.stdin.write(b"x" * 1_000_000)
    process.stdin.write(b"\n")
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[1])
    process.stdin.write(b"y\n")
    process.stdin.close()
    stdout, stderr = process.stdout.read(), process.stderr.read()
    assert process.wait(timeout=60) == OK and stdout.count(b"\n") == 1, stderr
    assert b"more than 1.05 MB: it is left out" in stderr and peak < 200_000, peak


# Every task that has nothing to finish ends at once, however long it would take.
@pytest.mark.parametrize("task", [["--bench", "--max-tokens", 16000, "--bench-contexts", "8000"],
                                  ["--perplexity", "long.txt", "--context", 16000, "--stride", 15999],
                                  ["--prompt-file", "long.txt", "--context", 16000]])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_what_has_no_result_yet(slow_model, tmp_path, task, number, code):
    (tmp_path / "long.txt").write_bytes(b"a" * 15900)
    arguments = [tmp_path / word if word == "long.txt" else word for word in task]
    process = start("--model", slow_model, *arguments)
    wait_for_message(process, b"context of")
    time.sleep(0.1)
    process.send_signal(number)
    begin = time.monotonic()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code and stdout == b"", stderr
    assert time.monotonic() - begin < 2.5, "a second, and what a busy machine adds"


def test_a_signal_cuts_a_window_short(slow_model, tmp_path):
    """The second of two windows of 16,000 tokens: its result covers what was scored before the signal."""
    (tmp_path / "long.txt").write_bytes(b"a" * 31000)
    terminal = Terminal("--model", slow_model, "--perplexity", tmp_path / "long.txt", "--context", 16000, "--stride", 15900,
                        "--threads", 1, TERM="xterm")
    terminal.read_until(lambda output: b"window 1 of 2" in output)
    time.sleep(0.2)
    os.kill(terminal.process.pid, signal.SIGINT)
    begin = time.monotonic()
    code, output = terminal.finish()
    assert code == 130 and b"stopping: the result covers" in output and b"interrupted" in output, output
    tokens = int(re.search(rb"tokens +(\d+) of 31000, 31000 bytes", output)[1])
    assert b"windows        1 of 16000 tokens" in output and 15999 <= tokens < 31000 - 512, output
    assert time.monotonic() - begin < 2, "a piece of 256 tokens, not a window"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cuts_a_divergence_short(slow_model, tmp_path, number, code):
    """The result covers the windows compared so far, and the exit code says that there were more."""
    (tmp_path / "long.txt").write_bytes(b"a" * 60000)
    terminal = Terminal("--model", slow_model, "--perplexity", tmp_path / "long.txt", "--against", slow_model, "--context", 400,
                        "--stride", 50, "--threads", 1, TERM="xterm")
    terminal.read_until(lambda output: b"window 1 of " in output)
    os.kill(terminal.process.pid, number)
    ended, output = terminal.finish()
    assert ended == code and b"stopping: the result covers the tokens compared so far" in output, output
    assert b"KL divergence  " in output, output


@pytest.mark.parametrize("token", [1, 60, 96, 97, 130])
def test_the_loss_of_a_token_is_that_of_the_text(model, tmp_path, token):
    """Windows of 96 tokens overlap by half: a fault at a token is at its only loss that counts."""
    (tmp_path / "text.txt").write_bytes(b"abcdefgh" * 30)
    message = refused(NUMERIC, "--model", model, "--perplexity", tmp_path / "text.txt", "--debug-inject", f"nan@token={token}")
    assert f"the loss of token {token} is not finite" in message


# A small process that starts the program and prints its exit code and greatest resident set, in KiB: that of a child
# begins with the size of the process that forks.
PEAK = """
import os, sys
child = os.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


def test_many_small_json_values_cost_little(tmp_path):
    """33 million arrays fit into the 100 MB that a tokenizer may have; in memory they would take 2 GB."""
    path = write_model(tmp_path / "many.bin", "[" + "[]," * 33_000_000 + "0]")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", PEAK, PROGRAM, "--model", path, "--prompt", "x"],
                          capture_output=True, text=True, timeout=120, env=environment())
    code, kilobytes = map(int, done.stdout.splitlines()[-1].split())
    assert code == BAD_FILE and "more than 5000000 JSON values" in done.stderr, done
    assert kilobytes < 400_000


def test_perplexity_of_what_is_no_text(model, tmp_path):
    (tmp_path / "x").write_bytes(b"abc\0def")
    assert "NUL" in refused(BAD_FILE, "--model", model, "--perplexity", tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xff\xfe" * 50)
    assert "not UTF-8" in refused(BAD_FILE, "--model", model, "--perplexity", tmp_path / "x")
    (tmp_path / "x").write_bytes(b"mostly text" * 5 + b"\xff")
    done = run("--model", model, "--perplexity", tmp_path / "x")
    assert done.returncode == OK and b"warning: " in done.stderr and b"1 of 56 bytes are not UTF-8" in done.stderr


def test_short_options(model):
    assert object_of("-m", model, "-p", "Hello", "-n24")["ids"] == prompt(model)["ids"]
    assert run_ok("-V").startswith(b"infer_pythia ") and run_ok("-h") == run_ok("--help")
    assert b"--debug-inject" not in run_ok("--help") and b"--debug-inject" in run_ok("--help-all")


# ---- descriptors, threads --------------------------------------------------------------------------------------------

def closing(*descriptors: int):
    return lambda: [os.close(descriptor) for descriptor in descriptors]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_descriptors_are_not_given_to_files(model, tmp_path, closed):
    """No file of the program gets the number of a standard descriptor, so that no message lands in it."""
    process = subprocess.Popen([PROGRAM, "--model", model, "--prompt", "Hello", "--debug-inject", "hang@token=1"],
                               env=environment(), preexec_fn=closing(*closed))
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and Path(f"/proc/{process.pid}/wchan").exists():
            if Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S":
                break  # it hangs
            time.sleep(0.01)
        time.sleep(0.5)
        targets = {descriptor: os.readlink(f"/proc/{process.pid}/fd/{descriptor}") for descriptor in closed}
        assert set(targets.values()) == {"/dev/null"}, targets
    finally:
        process.kill()
        process.wait()


def test_a_result_for_a_closed_stdout_is_an_error(model):
    done = subprocess.run([PROGRAM, "--model", model, "--prompt", "Hello"], env=environment(), stderr=subprocess.PIPE,
                          preexec_fn=closing(1))
    assert done.returncode == ENVIRONMENT and b"standard output: cannot write" in done.stderr
    done = subprocess.run([PROGRAM, "--model", model, "--prompt-file", "-"], env=environment(), capture_output=True,
                          preexec_fn=closing(0))
    assert done.returncode == BAD_FILE and b"standard input: cannot read" in done.stderr


def test_threads_are_chosen_and_said(model):
    def said(*arguments, **env) -> str:
        return run("--model", model, "--prompt", "x", *arguments, **env).stderr.decode()
    assert "; 3 threads" in said("--threads", 3)
    assert "; 1 thread\n" in said()
    cores = len(os.sched_getaffinity(0))
    assert f"; {cores} thread" in said(OMP_NUM_THREADS="99999") or cores == 1
    assert prompt(model, "--threads", 3)["ids"] == prompt(model)["ids"]


def test_the_environment_does_not_decide_how_threads_wait(model):
    """With OMP_WAIT_POLICY=active idle threads would spin for minutes; libgomp has read it before main() begins."""
    process = start_in({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "infinite", "OMP_NUM_THREADS": "2", "OMP_DYNAMIC": "true"},
                       "--model", model, "--prompt", "x", "--debug-inject", "hang@token=2")
    try:
        wait_for_message(process, b"never comes")
        names = {entry.split(b"=")[0] for entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")}
        assert names.isdisjoint({b"OMP_WAIT_POLICY", b"GOMP_SPINCOUNT", b"OMP_DYNAMIC"})
        assert Path(f"/proc/{process.pid}/comm").read_text() == "infer_pythia\n", "the name of the program stays"
    finally:
        process.kill()
        process.communicate()
