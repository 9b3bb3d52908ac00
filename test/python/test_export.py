"""export_hf.py: convert, export, convert is the identity; nothing is destroyed; what cannot be exported is refused."""

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
import export_hf  # noqa: E402
import hf_config  # noqa: E402
import tensor_file  # noqa: E402

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
ROUND_TRIPS = {
    "llama": ck.LLAMA,
    "llama tied, llama3": ck.LLAMA | {"tie_word_embeddings": True, "rope_scaling": LLAMA3, "eos_token_id": [2, 3]},
    "llama, explicit head_dim": ck.LLAMA | {"head_dim": 10, "num_key_value_heads": 1, "eos_token_id": None},
    "gemma3_text": ck.GEMMA3,
    "gpt_neox": ck.GPT_NEOX,
    "gpt_neox sequential, no bias": ck.GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False,
                                                   "rotary_pct": 1.0, "rotary_emb_base": 12345},
}


def export(file, output, *options):
    done = ck.run_script("export_hf.py", file, "-o", output, *options)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_convert_export_convert_is_the_identity(tmp_path, case):
    config = ROUND_TRIPS[case] | {"some_key": "kept", "torch_dtype": "bfloat16"}
    directory = ck.write_checkpoint(tmp_path / "model", config, dtype="BF16", tokenizer=ck.tokenizer_of(20))
    first = ck.convert(directory, tmp_path / "first.bin")
    second = ck.convert(export(tmp_path / "first.bin", tmp_path / "exported"), tmp_path / "second.bin")
    assert first.config["model"] == second.config["model"]
    assert list(first.tensors.values()) != [] and first.config["hf_config"] == config
    for name, tensor in first.tensors.items():
        assert second.at(name).hash == tensor.hash and second.at(name).dtype == tensor.dtype
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert written["some_key"] == "kept" and written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("config", [ck.LLAMA, ck.GEMMA3, ck.LLAMA | {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}])
def test_export_without_a_hugging_face_origin(tmp_path, config):
    """A model that was trained: its file has no hf_config. No default of transformers names a token that the vocabulary has not."""
    directory = ck.write_checkpoint(tmp_path / "model", config)
    first = ck.convert(directory, tmp_path / "first.bin")
    with tensor_file.Writer(tmp_path / "scratch.bin", "model", {"model": first.config["model"]}) as writer:
        for name, tensor in first.tensors.items():
            writer.declare(name, tensor.dtype, tensor.shape)
        for name in first.tensors:
            writer.write(name, bytes(first.bytes(name)))
    second = ck.convert(export(tmp_path / "scratch.bin", tmp_path / "exported"), tmp_path / "second.bin")
    assert second.config["model"] == first.config["model"]
    if config["model_type"] == "smollm3":
        assert json.loads((tmp_path / "exported" / "config.json").read_text())["pad_token_id"] is None


def test_model_wins_over_the_original_config(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    first = ck.convert(directory, tmp_path / "first.bin")
    stale = first.config["hf_config"] | {"rope_theta": 1.0, "vocab_size": 5, "rope_parameters": {"rope_theta": 2.0}, "key": 1}
    out = export(rewritten(tmp_path / "stale.bin", first, first.config | {"hf_config": stale}), tmp_path / "exported")
    config = json.loads((out / "config.json").read_text())
    assert ck.model_of(config) == ck.model_of(ck.LLAMA) and config["key"] == 1


def test_export_in_shards(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.GPT_NEOX)
    first = ck.convert(directory, tmp_path / "first.bin")
    exported = export(tmp_path / "first.bin", tmp_path / "exported", "--max-shard-bytes", "4000")
    shards = sorted(path.name for path in exported.glob("*.safetensors"))
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert len(shards) > 3 and sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(t.bytes for t in first.tensors.values())
    for shard in shards:  # so that tensors can be mapped: readers of the format take headers of other lengths as well
        assert int.from_bytes((exported / shard).read_bytes()[:8], "little") % 8 == 0, "the data starts on a multiple of 8"
    second = ck.convert(exported, tmp_path / "second.bin")
    assert [t.hash for t in first.tensors.values()] == [t.hash for t in second.tensors.values()]
    export(tmp_path / "first.bin", exported, "--force")
    assert [path.name for path in exported.glob("model*")] == ["model.safetensors"], "shards are parts of an export"


def test_safetensors_library_reads_the_export(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    weights = ck.weights_of(ck.LLAMA)
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights)
    ck.convert(directory, tmp_path / "first.bin")
    read = safetensors.load_file(export(tmp_path / "first.bin", tmp_path / "exported") / "model.safetensors")
    assert set(read) == set(weights) and all(np.array_equal(read[name], weights[name]) for name in weights)


def test_export_never_destroys(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(9))
    ck.convert(directory, tmp_path / "first.bin")
    exported = export(tmp_path / "first.bin", tmp_path / "exported")
    before = (exported / "model.safetensors").stat().st_ino
    ck.assert_refused(ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", exported), 2, "exists", "--force")
    assert (exported / "model.safetensors").stat().st_ino == before
    export(tmp_path / "first.bin", exported, "--force")
    assert (exported / "model.safetensors").stat().st_ino != before
    (exported / "thesis.txt").write_text("years of work")
    ck.assert_refused(ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", exported, "--force"), 2, "thesis.txt")
    assert (exported / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "first.bin", "model"]


def test_an_export_that_cannot_get_its_name_leaves_the_earlier_one(tmp_path, monkeypatch):
    for name in ("exported", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    rename = export_hf.os.rename

    def second_fails(source, target):
        if source == tmp_path / "new":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(export_hf.os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output error"):
        export_hf.publish(tmp_path / "new", tmp_path / "exported")
    assert (tmp_path / "exported" / "config.json").read_text() == "exported"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "new"]


def test_force_where_the_name_with_old_is_taken(tmp_path):
    """What stands under DIR.old is the user's."""
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    ck.convert(directory, tmp_path / "first.bin")
    exported = export(tmp_path / "first.bin", tmp_path / "exported")
    (tmp_path / "exported.old").mkdir()
    (tmp_path / "exported.old" / "thesis.txt").write_text("years of work")
    before = (exported / "model.safetensors").stat().st_ino
    export(tmp_path / "first.bin", exported, "--force")
    assert (exported / "model.safetensors").stat().st_ino != before
    assert (tmp_path / "exported.old" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "exported.old", "first.bin", "model"]


def damaged_models(first):
    """Model files that cannot be exported, as (why, model object, tensors left out)."""
    model = first.config["model"]
    rope = model["rope"]
    yield "input_layernorm.bias is missing", model | {"norm": "layernorm"}, ()
    yield "missing", model, ("model.norm.weight",)
    yield "hidden_size", model | {"hidden_size": "16"}, ()
    yield "got", model | {"head_dim": 5}, ()
    yield "got", model | {"rope": rope | {"rotary_dim": 2}}, ()
    yield "rope", model | {"rope": rope | {"type": "yarn"}}, ()
    yield "rope: missing", {key: value for key, value in model.items() if key != "rope"}, ()
    yield "tokenizer_vocab", model | {"tokenizer_vocab": 99}, ()
    yield "model", model | {"eos_ids": 7}, ()
    yield "model", model | {"num_heads": 0, "head_dim": 0}, ()


def test_models_that_cannot_be_exported(tmp_path):
    first = ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    for words, model, left_out in damaged_models(first):
        names = [name for name in first.tensors if name not in left_out]
        with tensor_file.Writer(tmp_path / "bad.bin", "model", {"model": model}) as writer:
            for name in names:
                writer.declare(name, first.at(name).dtype, first.at(name).shape)
            for name in names:
                writer.write(name, bytes(first.bytes(name)))
        done = ck.run_script("export_hf.py", tmp_path / "bad.bin", "-o", tmp_path / "exported")
        ck.assert_refused(done, 3, "bad.bin", words, output=tmp_path / "exported")


def test_damaged_file_leaves_no_export(tmp_path):
    first = ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    data = bytearray((tmp_path / "first.bin").read_bytes())
    data[first.at("lm_head.weight").offset + 5] ^= 4
    (tmp_path / "first.bin").write_bytes(data)
    done = ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", tmp_path / "exported")
    ck.assert_refused(done, 3, "lm_head.weight", "damaged", output=tmp_path / "exported")
    with tensor_file.Writer(tmp_path / "dump.bin", "reference dump", {"model": first.config["model"]}):
        pass
    done = ck.run_script("export_hf.py", tmp_path / "dump.bin", "-o", tmp_path / "exported")
    ck.assert_refused(done, 3, "reference dump", output=tmp_path / "exported")


def rewritten(path, first, config=None, **tensors):
    """A copy of a model file with another configuration, or with tensors of other (dtype, shape, bytes)."""
    parts = {name: (info.dtype, info.shape, bytes(first.bytes(name))) for name, info in first.tensors.items()} | tensors
    with tensor_file.Writer(path, "model", first.config if config is None else config) as writer:
        for name, (dtype, shape, _) in parts.items():
            writer.declare(name, dtype, shape)
        for name, (_, _, data) in parts.items():
            writer.write(name, data)
    return path


@pytest.mark.parametrize("tensors, config, words", [
    ({"model.norm.weight": ("i32", (16,), bytes(64))}, {}, ("model.norm.weight", "got dtype i32, expected f32, f16 or bf16")),
    ({"model.norm.weight": ("e4m3", (16,), bytes(16))}, {}, ("model.norm.weight", "got dtype e4m3")),
    ({"model.norm.weight": ("f32", (4, 4), bytes(64))}, {}, ("model.norm.weight", "got shape [4, 4]")),
    ({"lm_head.weight": ("f16", (37, 15), bytes(1110))}, {}, ("lm_head.weight", "got shape [37, 15]")),
    ({"tokenizer.json": ("u8", (12,), b'{"model":{}}')}, {}, ("model.type",)),
    ({}, {"quantization": {}}, ("quantised", "export the file it was converted from"))])
def test_a_file_with_one_thing_that_is_no_float_model_is_refused(tmp_path, tensors, config, words):
    first = ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    bad = rewritten(tmp_path / "bad.bin", first, first.config | config, **tensors)
    done = ck.run_script("export_hf.py", bad, "-o", tmp_path / "exported")
    ck.assert_refused(done, 3, "bad.bin", *words, output=tmp_path / "exported")


@pytest.mark.parametrize("original", [None, [], ["a"], "text", 7])
def test_an_origin_that_is_no_object_is_none(tmp_path, original):
    first = ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    file = rewritten(tmp_path / "a.bin", first, first.config | {"hf_config": original})
    written = json.loads((export(file, tmp_path / "exported") / "config.json").read_text())
    assert ck.model_of(written) == ck.model_of(ck.LLAMA)


@pytest.mark.parametrize("options", [[], ["--max-shard-bytes", "4000"]])
def test_damage_of_any_tensor_is_found(tmp_path, options):
    """In one file or in shards: each tensor is verified, and so is the tokenizer."""
    first = ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(9)), tmp_path / "first.bin")
    with open(tmp_path / "first.bin", "r+b", buffering=0) as file:
        for name, tensor in list(first.tensors.items())[::5 if options else 1]:
            at = tensor.offset + tensor.bytes - 1
            whole = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([whole[0] ^ 1]), at)
            done = ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", tmp_path / "exported", *options)
            ck.assert_refused(done, 3, name, "damaged", output=tmp_path / "exported")
            os.pwrite(file.fileno(), whole, at)
    export(tmp_path / "first.bin", tmp_path / "exported", *options)


def test_shard_plan():
    class File:
        def at(self, name):
            return tensor_file.TensorInfo(name, "u8", (), bytes=int(name))

    assert export_hf.plan_shards(File(), ["4", "4", "2", "20", "1"], 10) == [["4", "4", "2"], ["20"], ["1"]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_names_of_one_and_of_several_files(tmp_path, count):
    """Each file begins with the format that transformers asks for; the index names each tensor's file from two files on."""
    first = ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    names = list(hf_config.model_from_json(first.config["model"], "file").tensors)
    limit = next(limit for limit in range(40000, 0, -8) if len(export_hf.plan_shards(first, names, limit)) == count)
    done = ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", tmp_path / "exported", "--max-shard-bytes", limit)
    line = done.stdout.splitlines()[0].split(maxsplit=1)
    assert line == ["exported", f"{len(names)} tensors in {count} file{'' if count == 1 else 's'} to '{tmp_path / 'exported'}'"]
    files = ["model.safetensors"] if count == 1 else [
        f"model-0000{number + 1}-of-0000{count}.safetensors" for number in range(count)]
    assert sorted(path.name for path in (tmp_path / "exported").glob("*.safetensors")) == files
    weight_map = {}
    for name in files:
        data = (tmp_path / "exported" / name).read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        assert header.pop("__metadata__") == {"format": "pt"}
        weight_map |= dict.fromkeys(header, name)
    index = tmp_path / "exported" / "model.safetensors.index.json"
    assert index.exists() == (count > 1) and list(weight_map) == names
    assert count == 1 or json.loads(index.read_text())["weight_map"] == weight_map


def test_the_limit_of_a_file_is_5_gib_or_a_number_of_bytes(monkeypatch, capsys):
    for options, want in ([], 5 << 30), (["--max-shard-bytes", "1"], 1), (["--max-shard-bytes", str(1 << 50)], 1 << 50):
        monkeypatch.setattr(sys, "argv", ["export_hf.py", "a.bin", "-o", "out", *options])
        assert export_hf.arguments().max_shard_bytes == want
    for value in ("0", "-1", str((1 << 50) + 1), "1.5", "nan", ""):
        ck.assert_refused(ck.run_script("export_hf.py", "a.bin", "-o", "out", f"--max-shard-bytes={value}"), 2,
                          "--max-shard-bytes")


@pytest.mark.parametrize("dtype, written", [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_each_dtype_is_named_in_config_json_and_in_the_shard(tmp_path, dtype, written):
    """config.json names the dtype of the embedding, whatever the other tensors have."""
    weights = {name: (dtype if "embed_tokens" in name else "F16", value) for name, value in ck.weights_of(ck.LLAMA).items()}
    ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights), tmp_path / "first.bin")
    exported = export(tmp_path / "first.bin", tmp_path / "exported")
    config = json.loads((exported / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == written
    data = (exported / "model.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    assert {name: header[name]["dtype"] for name in weights} == {name: kind for name, (kind, _) in weights.items()}


def test_keys_of_the_origin_in_any_letters_are_kept(tmp_path):
    ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA | {"gr\u00fc\u00dfe": "\u91cd\u307f"}), tmp_path / "first.bin")
    text = (export(tmp_path / "first.bin", tmp_path / "exported") / "config.json").read_bytes()
    assert text.isascii() and json.loads(text)["gr\u00fc\u00dfe"] == "\u91cd\u307f"


@pytest.mark.parametrize("config, warns", [
    (ck.LLAMA, False), (ck.LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}, True),
    (ck.LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6}, True),
    (ck.LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10}, False), (ck.GPT_NEOX, False)])
def test_heads_that_transformers_5_refuses_are_a_warning(tmp_path, config, warns):
    ck.convert(ck.write_checkpoint(tmp_path / "model", config), tmp_path / "first.bin")
    done = ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", tmp_path / "exported")
    assert done.returncode == 0 and done.stderr.count("\n") == warns, done.stderr
    assert not warns or "hidden_size 16 is not a multiple of num_heads 3" in done.stderr


# ---- the directory ---------------------------------------------------------------------------------------------------


def put(path, text="the user's"):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


TARGETS = {  # what stands under the name, and what the error says where --force does not replace it
    "an empty directory": (lambda out: out.mkdir(), None),
    "all files of exports": (lambda out: [put(out / name) for name in (
        "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")], None),
    "a file": (lambda out: put(out), "is not a directory"),
    "a link that leads nowhere": (lambda out: out.symlink_to("nowhere"), "is not a directory"),
    "a link to an export": (lambda out: [put(out.parent / "real" / "config.json"), out.symlink_to("real")],
                            "is not a directory"),
    "a FIFO": (lambda out: os.mkfifo(out), "is not a directory"),
    "a file beside those of an export": (lambda out: [put(out / "config.json"), put(out / "zz.txt")], "'zz.txt'"),
    "a file that begins like a shard": (lambda out: put(out / "model-notes.txt"), "'model-notes.txt'"),
    "a file that ends like a shard": (lambda out: put(out / "adapter.safetensors"), "'adapter.safetensors'"),
    "a directory with the name of a file": (lambda out: (out / "config.json").mkdir(parents=True), "'config.json'"),
    "a directory with the name of a shard": (lambda out: (out / "model-1.safetensors").mkdir(parents=True), "'model-1.saf"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_force_replaces_an_export_and_nothing_else(tmp_path, case):
    make, words = TARGETS[case]
    out = tmp_path / "out"
    make(out)
    with pytest.raises(tensor_file.FileError, match="exists. Choose another, or add --force") as caught:
        export_hf.check_target(out, force=False)
    assert caught.value.code == 2
    if words is None:
        return export_hf.check_target(out, force=True)
    with pytest.raises(tensor_file.FileError, match=words) as caught:
        export_hf.check_target(out, force=True)
    assert caught.value.code == 2


def test_a_target_that_is_refused_is_refused_before_the_model_is_read(tmp_path):
    (tmp_path / "out").mkdir()
    ck.assert_refused(ck.run_script("export_hf.py", tmp_path / "none.bin", "-o", tmp_path / "out"), 2, "exists")


def test_the_earlier_export_stays_on_its_file_system_until_it_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    put(tmp_path / "out" / "config.json", "old")
    put(tmp_path / "new" / "config.json", "new")
    export_hf.publish(tmp_path / "new", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "new" and list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("output, where", [
    ("absent/../out", "out"), (".", "."), ("out/", "out"), ("./out", "out"), ("my out's", "my out's")])
def test_each_spelling_of_the_directory(tmp_path, monkeypatch, output, where):
    ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    done = ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", output, "--force")
    assert done.returncode == 0 and (here / where / "model.safetensors").exists(), done.stderr
    spelt = Path(output)
    assert done.stdout.splitlines()[1:] == [
        f"next        .venv/bin/python scripts/convert_hf.py {shlex.quote(str(spelt))} -o again.bin",
        f"or          transformers.AutoModelForCausalLM.from_pretrained({str(spelt)!r})"]
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
def test_whatever_ends_an_export_leaves_nothing(tmp_path, monkeypatch, error):
    def fails(*arguments):
        raise error

    ck.convert(ck.write_checkpoint(tmp_path / "model", ck.LLAMA), tmp_path / "first.bin")
    monkeypatch.setattr(export_hf, "write_shard", fails)
    done = ck.run_script("export_hf.py", tmp_path / "first.bin", "-o", tmp_path / "exported")
    ck.assert_refused(done, 130 if error is KeyboardInterrupt else 5, output=tmp_path / "exported")


# ---- fields with several values, each value on the whole way ----------------------------------------------------------


def round_trip(tmp_path, config, generation=None):
    """The model object of the file, the exported config.json and generation_config.json."""
    directory = ck.write_checkpoint(tmp_path / "model", config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    model = ck.convert(directory, tmp_path / "a.bin").config["model"]
    out = export(tmp_path / "a.bin", tmp_path / "exported")
    again = ck.convert(out, tmp_path / "b.bin").config["model"]
    assert again == model
    return model, *(json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json"))


@pytest.mark.parametrize("where", ["config", "generation"])
@pytest.mark.parametrize("given, ids, written", [
    (None, [], None), (3, [3], 3), ([3], [3], 3), ([3, 1], [3, 1], [3, 1]), ([3, 1, 3], [3, 1], [3, 1]),
    ([], [], None), (list(range(36, 0, -1)), list(range(36, 0, -1)), list(range(36, 0, -1)))])
def test_stop_ids_of_every_form(tmp_path, where, given, ids, written):
    config = ck.LLAMA | {"eos_token_id": given if where == "config" else None}
    model, exported, generation = round_trip(tmp_path, config, {"eos_token_id": given} if where == "generation" else None)
    assert model["eos_ids"] == ids
    assert exported["eos_token_id"] == written and generation["eos_token_id"] == written


@pytest.mark.parametrize("bos", [None, 0, 36])
def test_begin_ids(tmp_path, bos):
    model, exported, generation = round_trip(tmp_path, ck.LLAMA | {"bos_token_id": bos})
    assert model["bos_id"] == exported["bos_token_id"] == generation["bos_token_id"] == bos


@pytest.mark.parametrize("bos, eos, names", [
    (0, 2, {"bos_token": "t0", "eos_token": "t2"}),
    (20, 21, {"bos_token": "<s>", "eos_token": "</s>"}),  # added tokens alone have these ids
    (2, [21, 2], {"bos_token": "t2", "eos_token": "</s>"}),
    (None, 20, {"eos_token": "<s>"}),
    (36, None, {}),  # a row of the embedding beyond the tokenizer: no name
    (None, 36, {}),
    (None, [36, 2], {}),
])
def test_special_tokens_are_named_from_the_vocabulary_and_the_added_tokens(tmp_path, bos, eos, names):
    tokenizer = ck.tokenizer_of(20)
    tokenizer["added_tokens"] += [{"id": 20, "content": "<s>", "special": True}, {"id": 21, "content": "</s>", "special": True}]
    config = ck.LLAMA | {"bos_token_id": bos, "eos_token_id": eos}
    ck.convert(ck.write_checkpoint(tmp_path / "model", config, tokenizer=tokenizer), tmp_path / "a.bin")
    out = export(tmp_path / "a.bin", tmp_path / "exported")
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert {key: value for key, value in written.items() if key.endswith("_token")} == names
    assert {key: value for key, value in written.items() if not key.endswith("_token")} == {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "clean_up_tokenization_spaces": False}


@pytest.mark.parametrize("added", ["absent", None, []])
def test_special_tokens_of_a_tokenizer_without_added_tokens(added):
    tokenizer = ck.tokenizer_of(9) | {"added_tokens": added}
    if added == "absent":
        del tokenizer["added_tokens"]
    written = export_hf.tokenizer_config(ck.model_of(ck.LLAMA), json.dumps(tokenizer).encode())
    assert (written["bos_token"], written["eos_token"]) == ("t1", "t2")
