"""infer_pythia on a GPU: the trained tiny Pythia against transformers in every way of decoding and every storage type, the
trained tiny Llama, many requests at once, refusals, signals. Skipped without a GPU."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "infer_pythia"
sys.path.insert(0, str(ROOT / "scripts"))
import tensor_file  # noqa: E402
from goldens import CPU_ALONE, GOLDENS, inference_goldens  # noqa: E402

GOLDEN = GOLDENS / "tiny-pythia.dump.bin"

OK, INTERNAL, USAGE, BAD_FILE, ENVIRONMENT, RESOURCES = range(6)

TEXT = ("Once upon a time, on a farm at the end of a long road, there lived a stubborn young boy named Robin. His best "
        "friend was a helpful girl named Carla. One windy day, Robin lost his golden bell. \"Let us look for it,\" said "
        "Carla. They looked behind the barn, under the old oak tree, and in the pumpkin field. At last they found it in "
        "the milkmaid's basket.\n") * 4
# transformers in fp32: exp of the mean loss of TEXT behind <|endoftext|>, one window.
TEXT_PERPLEXITY = 79.770388


def run(*arguments, timeout: float = 120, **env) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=timeout, env={**os.environ, **env})


def usable() -> str:
    """Why these tests cannot run; empty if they can."""
    if not PROGRAM.exists():
        return "infer_pythia is not built"
    if not Path("/dev/nvidia0").exists():
        return "no GPU"
    done = run("--device", "cuda", "--random-model", "pythia-14m", "--bench", "--max-tokens", 4)
    return "" if done.returncode == OK else done.stderr.decode().strip().splitlines()[-1]


if reason := usable():
    pytest.skip(reason, allow_module_level=True)


def modes(dtype: str) -> list[str]:
    """The ways of decoding that this GPU has."""
    done = run("--device", "cuda", "--random-model", "pythia-14m", "--bench", "--max-tokens", 4, "--dtype", dtype,
               "--decode", "fused")
    return ["reference", "graph"] + (["fused"] if done.returncode == OK else [])


def converted(name: str, folder: Path) -> Path:
    target = folder / "model.bin"
    subprocess.run([sys.executable, ROOT / "scripts/convert_hf.py", ROOT / "models" / name, "-o", target], check=True,
                   capture_output=True)
    return target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return converted("tiny-pythia", tmp_path_factory.mktemp("pythia"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return converted("tiny-llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def golden() -> dict[str, list[int]]:
    content = tensor_file.read(GOLDEN)
    return {name: content.array(name).ravel().tolist() for name in ("greedy.prompt_ids", "greedy.ids")}


def object_of(*arguments, **keywords) -> dict:
    done = run("--device", "cuda", *arguments, "--json", **keywords)
    assert done.returncode == OK, done.stderr.decode()
    return json.loads(done.stdout)


def refused(code: int, *arguments, **keywords) -> str:
    done = run(*arguments, **keywords)
    assert done.returncode == code and done.stdout == b"", done.stderr.decode()
    errors = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


# ---- against transformers --------------------------------------------------------------------------------------------

def test_every_tensor_of_a_prompt_is_that_of_pytorch(tiny):
    for decode in ("reference", "graph"):
        done = run("--device", "cuda", "--decode", decode, "--model", tiny, "--compare", GOLDEN)
        assert done.returncode == OK, done.stdout.decode()
        assert b"0 failed" in done.stdout and b"act.layers.5.residual" in done.stdout and b"greedy.ids" in done.stdout


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])  # bf16 rounds the model itself: another text
def test_greedy_text_is_that_of_transformers(tiny, golden, dtype):
    prompt = ",".join(map(str, golden["greedy.prompt_ids"]))
    want = golden["greedy.ids"]
    for decode in modes(dtype):
        result = object_of("--model", tiny, "--prompt-ids", prompt, "--max-tokens", len(want), "--ignore-eos", "--dtype",
                           dtype, "--decode", decode)
        assert (result["device"], result["decode"]) == ("cuda", decode)
        assert result["ids"] == want, decode


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_perplexity_is_that_of_pytorch(tiny, tmp_path, dtype):
    (tmp_path / "text.txt").write_text(TEXT)
    result = object_of("--model", tiny, "--perplexity", tmp_path / "text.txt", "--dtype", dtype)
    # bf16 holds the weights of this fp16 model to 2^-9 of themselves only.
    assert abs(result["perplexity"] / TEXT_PERPLEXITY - 1) < (3e-2 if dtype == "bf16" else 1e-3)


# ---- one text, many ways ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sampling", [[], ["--temperature", 0.8, "--seed", 3],
                                      ["--temperature", 1.1, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.02, "--seed", 4]])
def test_the_text_does_not_depend_on_the_way_of_decoding(tiny, sampling):
    common = ["--model", tiny, "--prompt", "Once upon a time", "--max-tokens", 100, *sampling]
    texts = {decode: object_of(*common, "--decode", decode)["text"] for decode in modes("fp16")}
    assert texts["graph"] == texts["reference"]
    if "fused" in texts and not sampling:
        assert texts["fused"] == texts["graph"]
    for decode, text in texts.items():
        assert object_of(*common, "--decode", decode)["text"] == text, "not reproducible"
        done = run("--device", "cuda", *common, "--decode", decode, "--no-echo")
        assert done.returncode == OK and done.stdout.decode() == text


@pytest.mark.parametrize("sampling", [[], ["--temperature", 0.8, "--seed", 3], ["--stop", "the"]])
def test_a_draft_in_the_fused_kernel_gives_the_plain_text(tiny, sampling):
    words = ["--model", tiny, "--prompt", "Once upon a time", "--max-tokens", 100, *sampling]
    plain = object_of(*words, "--decode", "graph")
    fused = "fused" in modes("fp16")
    for decode in ("auto", "graph"):  # where it is given, the draft model is decoded in the same way
        drafted = object_of(*words, "--draft", tiny, "--decode", decode)
        for field in ("ids", "text", "finish_reason"):
            assert drafted[field] == plain[field], (decode, field)
        assert drafted["drafts"]["accepted"] > 0 or len(plain["ids"]) < 4
        log = run("--device", "cuda", *words, "--draft", tiny, "--decode", decode).stderr.decode()
        assert ("for drafts, decode fused" in log) == (fused and decode == "auto")


def test_auto_takes_the_gpu_and_says_how(tiny):
    done = run("--model", tiny, "--prompt", "Once", "--max-tokens", 2)
    assert done.returncode == OK
    stderr = done.stderr.decode()
    assert "running on " in stderr and "in f16, decode " in stderr and "every hash right" in stderr
    automatic = object_of("--model", tiny, "--prompt", "Once", "--max-tokens", 2)["decode"]
    assert automatic == modes("fp16")[-1]
    if automatic == "graph":
        assert "not fused: " in stderr
    fp32 = run("--model", tiny, "--prompt", "Once", "--max-tokens", 2, "--dtype", "fp32").stderr.decode()
    assert "decode graph, not fused: " in fp32 and "fp32" in fp32


@pytest.mark.parametrize("name", ["pythia-14m", "llama"])
def test_bench_batch_has_every_figure(llama, name):
    words = ["--bench-batch", "1,16,3", "--bench-prompt", 32, "--max-tokens", 24]
    words += ["--model", llama] if name == "llama" else ["--random-model", name]
    for decode in ("graph", "reference"):
        result = object_of(*words, "--decode", decode)
        assert (result["prompt_tokens"], result["tokens"], result["device"], result["decode"]) == (32, 24, "cuda", decode)
        assert [point["sequences"] for point in result["points"]] == [1, 16, 3]
        for point in result["points"]:
            assert point["steps"] == 23 and 0 < point["step_ms_p50"] <= point["step_ms_p99"]
            assert point["prefill_tokens_per_s"] > 0
            # The mean step is at most the longest, which p99 of less than 100 steps is, and at least half of the median.
            rate = point["sequences"] * 1e3
            assert rate / point["step_ms_p99"] <= point["decode_tokens_per_s"] * (1 + 1e-9)
            assert point["decode_tokens_per_s"] <= 2 * rate / point["step_ms_p50"]
            assert point["gb_per_s"] == pytest.approx(
                point["bytes_per_step"] * point["decode_tokens_per_s"] / point["sequences"] / 1e9)
            assert point["share_of_read_ceiling"] == pytest.approx(point["gb_per_s"] / result["read_ceiling_gb_per_s"])
        one, many, few = (point["bytes_per_step"] for point in result["points"])
        assert many - one == pytest.approx(15 / 2 * (few - one))  # the weights once, the rest for each sequence
    half, single = (object_of(*words, "--dtype", dtype)["points"][0]["bytes_per_step"] for dtype in ("bf16", "fp32"))
    assert single == pytest.approx(2 * half, rel=0.02)
    table = run("--device", "cuda", *words).stdout.decode().splitlines()
    assert len(table) == 6 and "prompts of 32 ids, 24 generated" in table[0] and "a plain read reaches" in table[-1]
    assert "enough for" in refused(RESOURCES, "--device", "cuda", *words, "--kv-memory", "0.5MB")


STORED = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


@pytest.mark.parametrize("dtype", ["auto", "fp16", "bf16", "fp32"])
def test_weights_are_stored_as_asked_for(tiny, dtype):
    """auto: as the file has them, fp16. A token of fp32 reads twice the bytes; bf16 has other scores than fp16."""
    words = ["--model", tiny, "--prompt", "Once", "--max-tokens", 4, "--ignore-eos", "--decode", "graph"]
    done = run("--device", "cuda", *words, "--dtype", dtype)
    assert done.returncode == OK, done.stderr.decode()
    assert f" in {STORED.get(dtype, 'f16')}, decode graph" in done.stderr.decode()
    half, asked = (object_of(*words, "--dtype", name)["bytes_per_token"] for name in ("fp16", dtype))
    assert asked == pytest.approx(2 * half if dtype == "fp32" else half, rel=0.02)


def test_bf16_rounds_the_weights_of_an_fp16_file(tiny, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    scores = {dtype: object_of("--model", tiny, "--perplexity", tmp_path / "text.txt", "--dtype", dtype)["perplexity"]
              for dtype in ("auto", "fp16", "bf16", "fp32")}
    assert scores["auto"] == scores["fp16"]
    assert len(set(scores.values())) == 3, scores


# ---- Llama -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [name for name in inference_goldens() if name not in CPU_ALONE])
def test_every_shape_matches_pytorch(name):
    for decode in ("reference", "graph"):
        done = run("--device", "cuda", "--decode", decode, "--model", GOLDENS / f"{name}.model.bin", "--compare",
                   GOLDENS / f"{name}.dump.bin")
        assert done.returncode == OK and b", 0 failed" in done.stdout, done.stdout.decode() + done.stderr.decode()


@pytest.mark.parametrize("name", CPU_ALONE)
def test_what_the_gpu_does_not_compute_is_refused_by_name(name):
    assert CPU_ALONE[name] in refused(USAGE, "--device", "cuda", "--model", GOLDENS / f"{name}.model.bin", "--prompt-ids", "1",
                                      "--max-tokens", 2)


def test_the_llama_that_comes_with_weft_matches_pytorch(llama):
    done = run("--device", "cuda", "--model", llama, "--compare", GOLDENS / "tiny-llama.dump.bin")
    assert done.returncode == OK and b"greedy.ids" in done.stdout and b", 0 failed" in done.stdout, done.stdout.decode()


@pytest.mark.parametrize("sampling", [[], ["--temperature", 0.8, "--seed", 3, "--top-k", 50, "--top-p", 0.95]])
def test_a_llama_writes_the_same_text_every_time(llama, sampling):
    common = ["--model", llama, "--prompt", "Once upon a time", "--max-tokens", 100, *sampling]
    best = modes("fp16")[-1]
    results = {decode: object_of(*common, "--decode", decode) for decode in ("reference", "graph", best)}
    assert all(result["decode"] == decode for decode, result in results.items())
    assert results["graph"]["text"] == results["reference"]["text"] and len(results[best]["ids"]) > 50
    done = run("--device", "cuda", *common, "--decode", best, "--no-echo")
    assert done.returncode == OK and done.stdout.decode() == results[best]["text"]
    automatic = run("--device", "cuda", *common, "--no-echo")  # narrow models are faster so
    assert "decode graph, not fused: " in automatic.stderr.decode()
    assert automatic.stdout.decode() == results["graph"]["text"]
    fp32, cpu = (object_of(*common, "--dtype", "fp32")["ids"],
                 json.loads(run("--device", "cpu", *common, "--json").stdout)["ids"])
    assert fp32[:20] == cpu[:20]
    if not sampling:  # else rounding may draw another id
        assert results[best]["ids"][:20] == cpu[:20]


def test_a_llama_in_every_task(llama, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    cpu = json.loads(run("--device", "cpu", "--model", llama, "--perplexity", tmp_path / "text.txt", "--json").stdout)
    for dtype, tolerance in (("fp32", 1e-4), ("fp16", 1e-3), ("bf16", 3e-2)):
        result = object_of("--model", llama, "--perplexity", tmp_path / "text.txt", "--dtype", dtype)
        assert result["tokens"] == cpu["tokens"]
        assert abs(math.log(result["perplexity"] / cpu["perplexity"])) < tolerance, dtype
    for decode in ("graph", modes("fp16")[-1]):
        bench = object_of("--model", llama, "--bench", "--max-tokens", 16, "--decode", decode)
        assert bench["decode"] == decode and bench["gb_per_s"] > 0
    done = subprocess.run([PROGRAM, "--device", "cuda", "--model", llama, "--interactive", "--max-tokens", "12",
                           "--ignore-eos"], input=b"Once upon\na time\n", capture_output=True, timeout=120)
    first = object_of("--model", llama, "--prompt", "Once upon", "--max-tokens", 12, "--ignore-eos")
    assert done.returncode == OK and done.stdout.decode().startswith(first["text"] + "\n"), done.stderr


def test_what_a_llama_has_not(llama):
    common = ["--device", "cuda", "--model", llama]
    assert "--bench-layer: " in refused(USAGE, *common, "--bench", "--bench-layer")
    assert "--bench-timeline" in refused(ENVIRONMENT, *common, "--bench", "--bench-timeline", "--decode", "graph")


def test_a_layer_alone_is_measured_in_the_fused_kernel():
    words = ["--device", "cuda", "--random-model", "pythia-14m", "--bench", "--bench-layer"]
    assert "only the fused kernel" in refused(ENVIRONMENT, *words, "--decode", "graph")
    if "fused" in modes("fp16"):
        done = run(*words, "--json")
        assert done.returncode == OK and 0 < json.loads(done.stdout)["layer_ms"] < 1, done.stderr.decode()


# ---- many requests at once -------------------------------------------------------------------------------------------

def requests_of(count: int, **more) -> list[dict]:
    words = ["The hen", "Once upon a time there was a fox", "A", "The dog saw the cat and", "Every day the hen"]
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9}]
    return [{"id": i, "prompt": words[i % 5], "seed": i, **kinds[i % 3], **more} for i in range(count)]


def batch(model: Path, folder: Path, requests: list[dict], *options) -> dict:
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    done = run("--device", "cuda", "--model", model, "--batch", folder / "in.jsonl", "--output", folder / "out.jsonl",
               *options)
    assert done.returncode == OK, done.stderr.decode()
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {answer["id"]: answer for answer in answers}


def test_answers_of_a_batch_do_not_depend_on_each_other(tiny, llama, tmp_path):
    requests = requests_of(24, max_tokens=40, ignore_eos=True, logprobs=3)
    for model in (tiny, llama):
        folder = tmp_path / model.parent.name
        folder.mkdir()
        want = batch(model, folder / "alone", requests, "--max-running", 1)
        assert len(want) == len(requests)
        for i, options in enumerate([["--max-running", 24], ["--max-running", 24, "--kv-memory", "0.4MB"],
                                     ["--decode", "reference"]]):
            assert batch(model, folder / str(i), requests, *options) == want, options
        alone = object_of("--model", model, "--prompt", "The hen", "--max-tokens", 40, "--ignore-eos", "--seed", 0,
                          "--decode", "graph")
        assert want[0]["ids"] == alone["ids"], "one text alone has the same model"


def test_kv_memory_beyond_the_gpu_says_what_would_fit(llama, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": 1, "prompt": "x"}) + "\n")
    words = ["--device", "cuda", "--model", llama, "--batch", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    message = refused(RESOURCES, *words, "--kv-memory", "100TB")
    assert "the plan needs" in message and "--kv-memory " in message and "would fit" in message
    assert "--decode fused" in refused(ENVIRONMENT, *words, "--decode", "fused")


def test_the_server_answers_as_the_batch_does(tiny, llama, tmp_path):
    for model in (tiny, llama):
        request = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 5, "temperature": 0.9, "ignore_eos": True}
        want = batch(model, tmp_path / model.parent.name, [{"id": 0, **request}])[0]["text"]
        process = subprocess.Popen([PROGRAM, "--device", "cuda", "--model", model, "--serve", "127.0.0.1:0"],
                                   stderr=subprocess.PIPE)
        try:
            while not (match := re.search(rb"listening on (http://\S+)", line := process.stderr.readline())):
                assert line, "it ended before it listened"
            url = match[1].decode()
            until = time.monotonic() + 60
            while True:
                try:
                    asked = urllib.request.Request(url + "/v1/completions", json.dumps(request).encode(),
                                                   {"Content-Type": "application/json"})
                    answer = json.loads(urllib.request.urlopen(asked, timeout=60).read())
                    break
                except urllib.error.HTTPError as error:  # 503 while the model is being loaded
                    assert error.code == 503 and time.monotonic() < until
                    time.sleep(0.2)
            assert answer["choices"][0]["text"] == want
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()
            process.wait(30)
            process.stderr.close()


# ---- refusals --------------------------------------------------------------------------------------------------------

def test_no_visible_gpu(tiny):
    common = ["--model", tiny, "--prompt", "Once", "--max-tokens", 2]
    assert "no GPU" in refused(ENVIRONMENT, "--device", "cuda", *common, CUDA_VISIBLE_DEVICES="")
    for decode in ("fused", "graph"):
        assert decode in refused(ENVIRONMENT, "--decode", decode, *common, CUDA_VISIBLE_DEVICES="")
    done = run(*common, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == OK and b"running on the CPU: " in done.stderr


def test_a_plan_that_cannot_fit_is_refused_with_what_would(tmp_path, tiny):
    """The tiny Pythia with its layers repeated to 96, made for 16 million positions: a cache of 1.6 TB in fp32."""
    content = tensor_file.read(tiny)
    layers = content.config["model"]["num_layers"]
    config = content.config | {"model": content.config["model"] | {"max_positions": 1 << 24, "num_layers": 96}}
    prefix = "gpt_neox.layers."
    names = [(name, name) for name in content.tensors if not name.startswith(prefix)]
    for i in range(96):
        own = f"{prefix}{i % layers}."
        names += [(f"{prefix}{i}." + name.removeprefix(own), name) for name in content.tensors if name.startswith(own)]
    path = tmp_path / "endless.bin"
    with tensor_file.Writer(path, "model", config) as writer:
        for name, source in names:
            writer.declare(name, content.tensors[source].dtype, content.tensors[source].shape)
        for name, source in names:
            writer.write(name, content.bytes(source))
    done = run("--device", "cuda", "--model", path, "--prompt", "Once", "--max-tokens", 2)
    assert done.returncode == OK, "the cache is as long as needed, not as the file says: " + done.stderr.decode()
    message = refused(RESOURCES, "--device", "cuda", "--model", path, "--prompt", "Once", "--context", 1 << 24,
                      "--dtype", "fp32")
    assert "the plan needs" in message and "--context " in message and "would fit" in message


def test_a_flipped_bit_names_the_tensor(tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    name = "gpt_neox.layers.3.mlp.dense_h_to_4h.weight"
    data[tensor_file.read(tiny).tensors[name].offset + 1000] ^= 1
    (tmp_path / "flipped.bin").write_bytes(data)
    assert name in refused(BAD_FILE, "--device", "cuda", "--model", tmp_path / "flipped.bin", "--prompt", "x")


def test_usage(tiny):
    assert "--compare is for fp32" in refused(USAGE, "--device", "cuda", "--model", tiny, "--compare", GOLDEN, "--dtype",
                                              "fp16")
    assert "fp32" in refused(ENVIRONMENT, "--device", "cuda", "--model", tiny, "--prompt", "x", "--decode", "fused",
                             "--dtype", "fp32")
    assert "pythia-12b" in refused(USAGE, "--device", "cuda", "--bench", "--random-model", "pythia-13b")
    assert "context of 8" in refused(USAGE, "--device", "cuda", "--model", tiny, "--prompt-ids", "1,2,3,4,5,6,7,8",
                                     "--context", 8)


# ---- signals ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_text(tiny, number, code):
    for decode in modes("fp16"):
        process = subprocess.Popen([PROGRAM, "--device", "cuda", "--model", tiny, "--prompt", "Once", "--max-tokens", "500",
                                    "--ignore-eos", "--json", "--decode", decode], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        while b"context of" not in (line := process.stderr.readline()):
            assert line, "it ended before the first token"
        time.sleep(0.01)
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=60)
        result = json.loads(stdout)
        if result["finish_reason"] == "length":
            continue  # it was faster than the signal
        assert process.returncode == code and result["finish_reason"] == "interrupted" and len(result["ids"]) < 500


def test_interactive_goes_on_from_its_own_text(tiny):
    for decode in modes("fp16"):
        done = subprocess.run([PROGRAM, "--device", "cuda", "--model", tiny, "--interactive", "--stats", "--max-tokens", "12",
                               "--ignore-eos", "--decode", decode], input=b"Once upon\na time\n", capture_output=True,
                              timeout=120)
        assert done.returncode == OK, done.stderr
        first = object_of("--model", tiny, "--prompt", "Once upon", "--max-tokens", 12, "--ignore-eos", "--decode", decode)
        assert done.stdout.decode().startswith(first["text"] + "\n")
        assert done.stderr.count(b"first token") == 2
