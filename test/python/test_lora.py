"""Adapters from end to end: trained by train_llama --lora-r, run by infer_pythia --adapter, exchanged with PEFT's files, merged.

PEFT itself is the witness of a whole run where torch, transformers and peft are installed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from train_runs import GOLDEN, MODEL, ROOT, data_fixture, environment, train, write_shard  # noqa: F401

np = pytest.importorskip("numpy")

import chat_format  # noqa: E402
import checkpoints as ck  # noqa: E402
import export_hf  # noqa: E402
import tensor_file  # noqa: E402
import token_shard  # noqa: E402
from tensor_file import FileError  # noqa: E402

INFER = Path(os.environ.get("WEFT_BIN_DIR", ROOT)).absolute() / "infer_pythia"
ADAPTER = ["--lora-r=3", "--lora-targets=q,v,o,down", "--lora-alpha=4.5", "--lr=0.02", "--steps=8", "--device=cpu"]
STEP = "step_00000008/adapter.bin"
# A GPT-NeoX, whose q, k and v are one matrix, with the parallel residual and without.
PARALLEL, SEQUENTIAL = GOLDEN / "neox-train.model.bin", GOLDEN / "neox-train-sequential-nobias.model.bin"
NEOX = [PARALLEL, SEQUENTIAL]
OF_NEOX = ["--lora-r=3", "--lora-alpha=4.5", "--lr=0.02", "--steps=8", "--device=cpu"]
needs_infer = pytest.mark.skipif(not INFER.exists(), reason=f"{INFER} is not built")
needs_peft = pytest.mark.skipif(not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft")),
                                reason="torch, transformers or peft is not installed")


@pytest.fixture(name="adapter")
def adapter_fixture(data, tmp_path):
    done = train(data, tmp_path / "run", *ADAPTER)
    assert done.returncode == 0, done.stderr
    return tmp_path / "run" / STEP


@pytest.fixture(name="neox_data")
def neox_data_fixture(tmp_path):
    directory = tmp_path / "neox shards"
    directory.mkdir()
    for i, count in enumerate((400, 170)):
        write_shard(directory / f"train_{i}.bin", count, 1000 * i, vocabulary=29)
    write_shard(directory / "val_0.bin", 200, 5000, vocabulary=29)
    return directory


def trained_neox(data, run, model, *more):
    done = train(data, run, f"--model={model}", *OF_NEOX, *more)
    assert done.returncode == 0, done.stderr
    return run / STEP


def infer(*options):
    return subprocess.run([INFER, "--device=cpu", *map(str, options)], capture_output=True, text=True, timeout=120, env=environment())


def greedy(*options):
    done = infer(*options, "--prompt-ids=3,1,4,1,5", "--max-tokens=24", "--temperature=0", "--ignore-eos", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["ids"]


def losses(run):
    return [record["loss"] for record in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if record["type"] == "step"]


def export(*arguments):
    done = ck.run_script("export_hf.py", *arguments)
    assert done.returncode == 0, done.stderr
    return done


def with_chat(source, output, **chat):
    file = tensor_file.read(source)
    with tensor_file.Writer(output, file.kind, file.config | chat) as writer:
        for info in file.tensors.values():
            writer.declare(info.name, info.dtype, info.shape)
        for name in file.tensors:
            writer.write(name, bytes(file.bytes(name)))
    return output


def chat_of(path):
    return {key: value for key, value in tensor_file.read(path).config.items() if key.startswith("chat_")}


def test_a_run_says_what_it_trains(data, tmp_path):
    done = train(data, tmp_path / "run", *ADAPTER)
    log = done.stdout + done.stderr
    assert "frozen parameters (fp32)" in log
    header = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert f"adapter: rank 3, alpha 4.5, targets q,v,o,down, {header['trained_parameters']} parameters; the model is frozen" in log
    file = tensor_file.read(tmp_path / "run" / STEP, expected="LoRA adapter")
    assert header["trained_parameters"] == sum(int(np.prod(info.shape)) for info in file.tensors.values())
    assert file.config["lora"] == {"rank": 3, "alpha": 4.5, "targets": ["q", "v", "o", "down"]}
    assert file.config["base"] == f"{tensor_file.read(MODEL).header_hash:016x}"
    curve = losses(tmp_path / "run")
    assert curve[-1] < curve[0]


def test_resume_is_bit_for_bit(data, adapter, tmp_path):
    assert train(data, tmp_path / "parts", *ADAPTER, "--debug-inject=term@step=3").returncode in (0, 143)
    assert train(data, tmp_path / "parts", *ADAPTER).returncode == 0
    assert (tmp_path / "parts" / STEP).read_bytes() == adapter.read_bytes()


@pytest.mark.parametrize("model", NEOX)
def test_an_adapter_of_a_neox_goes_on_bit_for_bit(neox_data, tmp_path, model):
    more = ("--optimizer=muon", "--recompute=block", "--dropout=0.1", "--lora-dropout=0.2", "--virtual-ranks=2")
    whole = trained_neox(neox_data, tmp_path / "whole", model, *more)
    assert train(neox_data, tmp_path / "parts", f"--model={model}", *OF_NEOX, *more, "--debug-inject=term@step=3").returncode in (0, 143)
    assert trained_neox(neox_data, tmp_path / "parts", model, *more).read_bytes() == whole.read_bytes()
    file = tensor_file.read(whole, expected="LoRA adapter")
    assert file.config["lora"] == {"rank": 3, "alpha": 4.5, "targets": ["qkv", "o", "up", "down"]}


def test_peft_form_of_a_neox_and_back(neox_data, adapter, tmp_path):
    trained = trained_neox(neox_data, tmp_path / "neox", PARALLEL, "--lora-targets=up,qkv")
    export(trained, "-o", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["dense_h_to_4h", "query_key_value"]
    done = ck.run_script("convert_hf.py", tmp_path / "peft", "--base", PARALLEL, "-o", tmp_path / "again.bin")
    assert done.returncode == 0 and "targets qkv,up" in done.stdout + done.stderr, done.stderr
    first, again = (tensor_file.read(path, expected="LoRA adapter") for path in (trained, tmp_path / "again.bin"))
    assert first.config["lora"] == again.config["lora"]
    assert [(info.name, info.hash) for info in first.tensors.values()] == [(info.name, info.hash) for info in again.tensors.values()]
    export(adapter, "-o", tmp_path / "llama")
    for directory, base, words in (("peft", MODEL, "self_attn.q_proj"), ("llama", PARALLEL, "attention.query_key_value")):
        ck.assert_refused(ck.run_script("convert_hf.py", tmp_path / directory, "--base", base, "-o", tmp_path / "x.bin"), 3, words,
                          "Is ", "its base model?", output=tmp_path / "x.bin")


def test_a_merged_model_chats_as_the_adapter_does(adapter, tmp_path):
    """That of the shards, also where the model has none, or another one with a template; without one, the model's."""
    own = {"chat_format": {"version": 1}, "chat_template": "{{ messages }}", "chat_tokens": {"pad_token": "x"}}
    chatting, base = with_chat(adapter, tmp_path / "chatting.bin", chat_format={"version": 2}), with_chat(MODEL, tmp_path / "base.bin", **own)
    for name, model, beside, template in (("one", MODEL, chatting, False), ("both", base, chatting, False), ("other", base, adapter, True)):
        out = tmp_path / name
        export(model, "--adapter", beside, "-o", out)
        assert (out / "chat_template.jinja").exists() == template and (out / "chat_format.json").exists() != template
        assert template or json.loads((out / "chat_format.json").read_text()) == {"version": 2}


@needs_infer
@pytest.mark.parametrize("model", NEOX)
def test_an_adapter_of_a_neox_is_a_merged_model(neox_data, tmp_path, model):
    trained = trained_neox(neox_data, tmp_path / "run", model)
    export(model, "-o", tmp_path / "base")
    ck.convert(tmp_path / "base", tmp_path / "base.bin", "--dtype=fp32")
    export(tmp_path / "base.bin", "--adapter", trained, "-o", tmp_path / "merged")
    ck.convert(tmp_path / "merged", tmp_path / "merged.bin")
    beside = greedy("--model", tmp_path / "base.bin", "--adapter", trained)
    assert beside == greedy("--model", tmp_path / "merged.bin") != greedy("--model", tmp_path / "base.bin")


def test_a_sum_that_does_not_fit_is_refused(tmp_path):
    class Large:
        def merged(self, file, name):
            return np.full(file.at(name).shape, -1e5, np.float32)

    export(MODEL, "-o", tmp_path / "base")
    for dtype, fits in (("fp16", False), ("bf16", True)):
        ck.convert(tmp_path / "base", tmp_path / f"{dtype}.bin", f"--dtype={dtype}")
        file = tensor_file.read(tmp_path / f"{dtype}.bin")
        with nullcontext() if fits else pytest.raises(FileError, match="value is 100000, which does not fit in f16"):
            export_hf.values_of(file, "model.norm.weight", Large())


@needs_infer
def test_an_adapter_is_a_merged_model(adapter, tmp_path):
    """The same ids from an adapter beside its model and from the exported model with the adapter in it. In fp32, which rounds neither."""
    export(MODEL, "-o", tmp_path / "base")
    ck.convert(tmp_path / "base", tmp_path / "base.bin", "--dtype=fp32")
    export(tmp_path / "base.bin", "--adapter", adapter, "-o", tmp_path / "merged")
    ck.convert(tmp_path / "merged", tmp_path / "merged.bin")
    beside, merged = ["--model", tmp_path / "base.bin", "--adapter", adapter], ["--model", tmp_path / "merged.bin"]
    assert greedy(*beside) == greedy(*merged) != greedy("--model", tmp_path / "base.bin")
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"id": "one", "prompt_ids": [3, 1, 4, 1, 5], "max_tokens": 24, "temperature": 0}) + "\n")
    answers = []
    for options in (beside, merged):
        done = infer(*options, "--batch", requests, "--output", tmp_path / "answers.jsonl")
        assert done.returncode == 0, done.stderr
        answers.append([json.loads(line)["ids"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()])
        (tmp_path / "answers.jsonl").unlink()
    assert answers[0] == answers[1] and answers[0][0]


@needs_infer
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_an_adapter_runs_beside_the_quantised_model_that_it_was_trained_beside(data, tmp_path, scheme):
    """QLoRA, then inference and evaluation with the same two files: the loss that training measured."""
    base = tmp_path / "base.bin"
    export(MODEL, "-o", tmp_path / "base")
    ck.convert(tmp_path / "base", base, f"--quantize={scheme}")
    model, seq_len = ["--model", base], 16
    assert train(data, tmp_path / "run", *model, *ADAPTER).returncode == 0
    adapter = ["--adapter", tmp_path / "run" / STEP]

    def evaluated(*options):
        done = train(data, tmp_path / "unused", *model, *options, "--eval", "--json", "--device=cpu", "--val-batches=0")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["val_loss"]

    trained = evaluated(*adapter, *ADAPTER[:3])
    assert evaluated(*adapter) == pytest.approx(trained, rel=1e-6)

    ids = token_shard.TokenShard(data / "val_0.bin").tokens
    windows = [ids[begin:begin + seq_len + 1].tolist() for begin in range(0, len(ids) - 1, seq_len)]
    requests = [{"id": str(i), "prompt_ids": window, "max_tokens": 0, "logprobs": 0, "echo": True} for i, window in enumerate(windows)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))

    def loss(name, *options):
        done = infer(*model, *options, "--batch", tmp_path / "requests.jsonl", "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line)["prompt_logprobs"] for line in (tmp_path / name).read_text().splitlines()]
        assert sum(map(len, answers)) == len(ids) - 1
        return -np.mean([entry["logprob"] for answer in answers for entry in answer]), done.stderr

    beside, log = loss("beside.jsonl", *adapter)
    assert beside == pytest.approx(trained, rel=1e-5) and f"weights {scheme}, with an adapter of rank 3" in log
    alone = loss("alone.jsonl")[0]
    assert alone == pytest.approx(evaluated(), rel=1e-5) and alone != pytest.approx(trained, rel=1e-2)
    done = infer(*model, *adapter, "--decode=fused", "--prompt-ids=1")
    assert done.returncode == 4 and "--decode fused: " in done.stderr


def test_evaluation_measures_the_adapter(data, adapter, tmp_path):
    def loss(*options):
        done = train(data, tmp_path / "unused", "--eval", "--json", "--device=cpu", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["val_loss"]

    assert loss("--adapter", adapter) == pytest.approx(loss("--adapter", adapter, *ADAPTER[:3]), rel=1e-6)
    assert loss("--adapter", adapter) != pytest.approx(loss(), rel=1e-3)


def test_peft_form_and_back(adapter, tmp_path):
    export(adapter, "-o", tmp_path / "peft", "--base-name", "someone/model")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["lora_alpha"] == 4.5 and config["base_model_name_or_path"] == "someone/model"
    assert config["target_modules"] == ["down_proj", "o_proj", "q_proj", "v_proj"]
    done = ck.run_script("convert_hf.py", tmp_path / "peft", "--base", MODEL, "-o", tmp_path / "again.bin")
    assert done.returncode == 0 and f"--adapter {tmp_path}/again.bin --prompt-ids 1,2,3\n" in done.stdout, done.stderr
    first, again = (tensor_file.read(path, expected="LoRA adapter") for path in (adapter, tmp_path / "again.bin"))
    assert first.config["lora"] == again.config["lora"] and first.config["base"] == again.config["base"]
    assert [(info.name, info.hash) for info in first.tensors.values()] == [(info.name, info.hash) for info in again.tensors.values()]
    export(adapter, "-o", tmp_path / "peft", "--force")  # replaces its own kind
    with pytest.raises(AssertionError, match="expected a model file to add it to"):
        export(adapter, "--adapter", adapter, "-o", tmp_path / "other")


def test_the_chat_format_goes_with_pefts_files(adapter, tmp_path):
    """Beside the model's own format its template stays; by hand another one, and none, which leaves the model's."""
    chatml, mistral = (chat_format.to_json(chat_format.NAMED[name]()) for name in ("chatml", "mistral"))
    own = {"chat_format": mistral, "chat_template": "{{ messages }}", "chat_tokens": {"pad_token": "x"}}
    base = with_chat(MODEL, tmp_path / "base.bin", **own)
    for name, chat in (("other", {"chat_format": chatml}), ("own", own), ("none", {})):
        export(with_chat(adapter, tmp_path / f"{name}.bin", **chat), "-o", tmp_path / name)
        assert (tmp_path / name / "chat_format.json").exists() == bool(chat)
        for options, expected in (([], chat), (["--chat-format", "chatml"], {"chat_format": chatml}), (["--chat-format", "none"], {})):
            done = ck.run_script("convert_hf.py", tmp_path / name, "--base", base, "-o", tmp_path / "again.bin", *options)
            assert done.returncode == 0, done.stderr
            assert chat_of(tmp_path / "again.bin") == expected
            assert ("chat format: none" in done.stdout) == ("It chats as its model does" in done.stdout) == (not expected), done.stdout
    (tmp_path / "other" / "chat_format.json").write_text("{}")
    for options, code in (([], 3), (["--chat-format", "alpaca"], 2), (["--chat-option", "x"], 2)):
        done = ck.run_script("convert_hf.py", tmp_path / "other", "--base", base, "-o", tmp_path / "x.bin", *options)
        ck.assert_refused(done, code, options[0] if options else "chat_format.json", output=tmp_path / "x.bin")


def test_an_adapter_of_elsewhere_chats_by_its_template(adapter, tmp_path):
    pytest.importorskip("jinja2")
    export(adapter, "-o", tmp_path / "peft")
    (tmp_path / "peft" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
    done = ck.run_script("convert_hf.py", tmp_path / "peft", "--base", MODEL, "-o", tmp_path / "again.bin")
    assert done.returncode == 0 and "chat format: learned from chat_template.jinja" in done.stdout, done.stderr
    assert sorted(chat_of(tmp_path / "again.bin")) == ["chat_format", "chat_template", "chat_tokens"]


def rewritten(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize("changes, words", [
    ({"peft_type": "IA3"}, ["peft_type", "'IA3'"]),
    ({"use_dora": True}, ["use_dora", "more than plain LoRA"]),
    ({"bias": "all"}, ["bias", "more than plain LoRA"]),
    ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "merge_and_unload"]),
    ({"rank_pattern": {"q_proj": 8}}, ["rank_pattern"]),
    ({"r": 4}, ["got shape [3, ", "expected [4, "]),
    ({"r": 0}, ["r: got 0"]),
    ({"lora_alpha": "x"}, ["lora_alpha"]),
])
def test_what_peft_says_and_weft_does_not_have(adapter, tmp_path, changes, words):
    export(adapter, "-o", tmp_path / "peft")
    done = ck.run_script("convert_hf.py", rewritten(tmp_path / "peft", **changes), "--base", MODEL, "-o", tmp_path / "x.bin")
    ck.assert_refused(done, 3, *words, output=tmp_path / "x.bin")


def test_rank_stabilised_scale(adapter, tmp_path):
    export(adapter, "-o", tmp_path / "peft")
    done = ck.run_script("convert_hf.py", rewritten(tmp_path / "peft", use_rslora=True), "--base", MODEL, "-o", tmp_path / "x.bin")
    assert done.returncode == 0, done.stderr
    assert tensor_file.read(tmp_path / "x.bin").config["lora"]["alpha"] == pytest.approx(4.5 * 3**0.5)


def test_another_base_is_refused(adapter, tmp_path):
    export(adapter, "-o", tmp_path / "peft")
    other = ck.convert(ck.write_checkpoint(tmp_path / "other", ck.LLAMA), tmp_path / "other.bin").path
    ck.assert_refused(ck.run_script("convert_hf.py", tmp_path / "peft", "--base", other, "-o", tmp_path / "x.bin"), 3, "Is this its base model?")
    ck.assert_refused(ck.run_script("convert_hf.py", tmp_path / "peft", "-o", tmp_path / "x.bin"), 2, "--base: needed")
    ck.assert_refused(ck.run_script("convert_hf.py", tmp_path / "other", "--base", MODEL, "-o", tmp_path / "x.bin"), 2, "only for an adapter")
    ck.assert_refused(ck.run_script("convert_hf.py", tmp_path / "peft", "--base", MODEL, "--dtype", "bf16", "-o", tmp_path / "x.bin"), 2,
                      "--dtype: not for an adapter")
    ck.assert_refused(ck.run_script("export_hf.py", other, "--adapter", adapter, "-o", tmp_path / "x"), 3, "Take the model that the adapter was made for")
    if INFER.exists():
        done = infer("--model", other, "--adapter", adapter, "--prompt-ids=1", "--max-tokens=1")
        assert done.returncode == 3 and "got an adapter of a model with" in done.stderr


def test_what_the_program_refuses(data, adapter, tmp_path):
    for options, code, words in (
            (["--lora-r=0", "--lora-alpha=3"], 2, "--lora-alpha: needs --lora-r"),
            (["--lora-r=3", "--model=", "--config=tiny"], 2, "--lora-r: needs --model"),
            (["--lora-r=3", "--lora-targets=q,w"], 2, "--lora-targets: got 'w', expected all, or some of q, k, v, o, gate, up, down, qkv"),
            (["--lora-r=3", "--lora-targets=qkv"], 2, "--lora-targets: got 'qkv', expected all, or some of q, k, v, o, gate, up, down with"),
            (["--lora-r=3", "--lora-targets=q", "--model", PARALLEL], 2, "--lora-targets: got 'q', expected all, or some of qkv, o, up, down with"),
            (["--lora-r=999"], 2, "--lora-r: rank 999 is more than the smaller side of the model's matrix"),
            (["--lora-r=3", "--precision=fp8"], 2, "ffn_size: got 40, --precision fp8 needs a multiple of 16"),
            (["--lora-r=2", "--adapter", adapter], 2, "Give the same to train it further"),
            (["--model", adapter], 3, "this is a LoRA adapter, expected a model")):
        done = train(data, tmp_path / "out", "--device=cpu", *options)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
        assert done.stderr.count("error:") == 1


def test_bench_times_a_frozen_model_from_a_file_or_at_random(data, tmp_path):
    for model in ([], ["--model=", "--config=tiny", "--micro-batch=1", "--batch-tokens=16"]):
        done = train(data, tmp_path / "out", "--device=cpu", "--bench", "--lora-r=3", "--json", *model)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tokens_per_s"] > 0
    done = train(data, tmp_path / "out", "--device=cpu", "--bench", "--lora-r=3")
    assert "TF/s by 4 N_matmul + 6 L q T + 6 N_adapter" in done.stdout, done.stderr


@needs_peft
@pytest.mark.parametrize("model, all_targets", [(MODEL, ("all", "q,v")), *((model, ("all", "qkv", "o,up")) for model in NEOX)])
def test_losses_are_those_of_peft(data, neox_data, tmp_path, model, all_targets):
    data = data if model == MODEL else neox_data
    options = ["--lora-r=3", "--lora-alpha=4.5", "--lora-dropout=0", "--lr=0.01", "--eps=1e-5", "--steps=10", "--device=cpu", "--grad-clip=0.5"]
    for targets in all_targets:
        run = tmp_path / targets
        done = train(data, run, *options, f"--model={model}", f"--lora-targets={targets}")
        assert done.returncode == 0, done.stderr
        done = subprocess.run([sys.executable, ROOT / "scripts" / "train_reference.py", run, "--against", run / "log.jsonl", "--tolerance", "1e-5"],
                              capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in done.stdout.splitlines()]
        ours = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        norms = [record["grad_norm"] for record in ours if record["type"] == "step"]
        assert [record["grad_norm"] for record in records if record.get("type") == "step"] == pytest.approx(norms, rel=1e-4)
        assert norms[-1] > 0


@needs_peft
@needs_infer
@pytest.mark.parametrize("base", [MODEL, *NEOX])
def test_peft_loads_what_was_trained(adapter, neox_data, tmp_path, base):
    """transformers and PEFT, with the exported model and adapter, choose the same ids."""
    import peft
    import torch
    import transformers

    if base != MODEL:
        adapter = trained_neox(neox_data, tmp_path / "neox", base)
    export(base, "-o", tmp_path / "base")
    export(adapter, "-o", tmp_path / "peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert greedy("--model", base, "--adapter", adapter) == out[0, 5:].tolist()
