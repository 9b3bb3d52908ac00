"""export_hf.py: convert, export, convert is the identity; nothing is destroyed; what cannot be exported is refused."""

import json
import os

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


def test_export_without_a_hugging_face_origin(tmp_path):
    """A model that was trained from scratch: its file has no hf_config."""
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    first = ck.convert(directory, tmp_path / "first.bin")
    with tensor_file.Writer(tmp_path / "scratch.bin", "model", {"model": first.config["model"]}) as writer:
        for name, tensor in first.tensors.items():
            writer.declare(name, tensor.dtype, tensor.shape)
        for name in first.tensors:
            writer.write(name, bytes(first.bytes(name)))
    second = ck.convert(export(tmp_path / "scratch.bin", tmp_path / "exported"), tmp_path / "second.bin")
    assert second.config["model"] == first.config["model"]


def test_model_wins_over_the_original_config(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    first = ck.convert(directory, tmp_path / "first.bin")
    stale = first.config["hf_config"] | {"rope_theta": 1.0, "vocab_size": 5, "rope_parameters": {"rope_theta": 2.0}}
    config = hf_config.export_config(hf_config.model_from_json(first.config["model"], "file"), stale, "float32")
    assert hf_config.parse_config(config, "config") == hf_config.parse_config(ck.LLAMA, "config")


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
    yield "model.norm", model | {"norm": "layernorm"}, ()
    yield "missing", model, ("model.norm.weight",)
    yield "hidden_size", model | {"hidden_size": "16"}, ()
    yield "got", model | {"head_dim": 5}, ()
    yield "got", model | {"rope": rope | {"rotary_dim": 2}}, ()
    yield "rope", model | {"rope": rope | {"type": "yarn"}}, ()
    yield "keys are missing", {key: value for key, value in model.items() if key != "rope"}, ()
    yield "keys are missing: bos_id", {key: value for key, value in model.items() if key != "bos_id"}, ()
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


# ---- fields with several values, each value on the whole way ----------------------------------------------------------


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}


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
])
def test_special_tokens_are_named_from_the_vocabulary_and_the_added_tokens(tmp_path, bos, eos, names):
    tokenizer = ck.tokenizer_of(20)
    tokenizer["added_tokens"] += [{"id": 20, "content": "<s>", "special": True}, {"id": 21, "content": "</s>", "special": True}]
    config = ck.LLAMA | {"bos_token_id": bos, "eos_token_id": eos}
    ck.convert(ck.write_checkpoint(tmp_path / "model", config, tokenizer=tokenizer), tmp_path / "a.bin")
    out = export(tmp_path / "a.bin", tmp_path / "exported")
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert {key: value for key, value in written.items() if key.endswith("_token")} == names
    assert written["model_max_length"] == config["max_position_embeddings"]


@pytest.mark.parametrize("key, name, value", [
    ("factor", "factor", 32.0), ("factor", "factor", 2), ("low_freq_factor", "low_freq_factor", 0.5),
    ("high_freq_factor", "high_freq_factor", 7.25), ("original_max_position_embeddings", "original_max_positions", 48)])
@pytest.mark.parametrize("home", ["rope_scaling", "rope_parameters"])
def test_each_number_of_the_scaling(tmp_path, home, key, name, value):
    scaling = SCALING | {key: value} | ({"rope_theta": 10000.0} if home == "rope_parameters" else {})
    model, exported, _ = round_trip(tmp_path, ck.LLAMA | {home: scaling})
    assert model["rope"]["type"] == "llama3" and model["rope"][name] == value
    assert exported["rope_scaling"][key] == value and exported["rope_parameters"][key] == value


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_in_every_form(tmp_path, scaling):
    model, exported, _ = round_trip(tmp_path, ck.LLAMA | {"rope_scaling": scaling})
    assert model["rope"]["type"] == "standard" and exported["rope_scaling"] is None
    assert exported["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize("key, values, name", [
    ("tie_word_embeddings", (True, False), "tied_embeddings"), ("rms_norm_eps", (1e-6, 1e-5), "norm_eps"),
    ("rope_theta", (500000.0, 1234.5), None), ("num_key_value_heads", (1, 2, 4), "num_kv_heads"),
    ("max_position_embeddings", (1, 131072), "max_positions")])
def test_each_value_of_a_field(tmp_path, key, values, name):
    for number, value in enumerate(values):
        model, exported, _ = round_trip(tmp_path / str(number), ck.LLAMA | {key: value})
        assert exported[key] == value and (model[name] if name else model["rope"]["theta"]) == value


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_each_value_of_gpt_neox(tmp_path, parallel, fraction):
    model, exported, _ = round_trip(tmp_path, ck.GPT_NEOX | {"use_parallel_residual": parallel, "rotary_pct": fraction})
    assert model["parallel_residual"] is parallel is exported["use_parallel_residual"]
    assert model["rope"]["rotary_dim"] == 8 * fraction and exported["rotary_pct"] == fraction
