"""hf_config.py: what it asks infer_pythia --describe, and what it makes of the answer. What a config.json means is tested in
test/cpp/hf_config_test.cpp."""

import itertools
import json
import pathlib

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
import cli  # noqa: E402
import hf_config  # noqa: E402
import hf_tokenizer  # noqa: E402
import tensor_file  # noqa: E402


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


# ---- asking the program ----------------------------------------------------------------------------------------------


def test_a_model_has_what_the_scripts_use():
    model = ck.model_of(ck.LLAMA | {"tie_word_embeddings": True})
    assert list(model.tensors.items())[:2] == [("model.embed_tokens.weight", (37, 16)), ("model.layers.0.input_layernorm.weight", (16,))]
    assert list(model.tensors)[-1] == "model.norm.weight" and model.trainable
    assert model.linears == {"qkv": ["q_proj", "k_proj", "v_proj"], "output": ["o_proj"], "up": ["gate_proj", "up_proj"],
                             "down": ["down_proj"], "head": ["lm_head"]}
    assert hf_config.parameter_count(model) == 37 * 16 + 16 + 2 * (2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)
    own = hf_config.with_own_head(hf_config.Checkpoint(model, {}, None, True))
    assert not own.model.tied_embeddings and own.ties_head
    assert list(own.model.tensors.items())[-1] == ("lm_head.weight", (37, 16))
    neox = ck.model_of(ck.GPT_NEOX)
    assert (neox.embedding, neox.head, neox.trainable) == ("gpt_neox.embed_in.weight", "embed_out.weight", True)
    assert hf_config.model_from_json(json.loads(json.dumps(neox.to_json())), "file") == neox


def test_numbers_of_a_rope_have_the_types_that_files_have_always_had():
    """The same bytes of a model file: what a scaling does not use is an integer."""
    scalings = {
        "standard": ({}, '"factor": 1, "low_freq_factor": 1, "high_freq_factor": 1'),
        "llama3": ({"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32},
                   '"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0'),
        "yarn": ({"factor": 4, "original_max_position_embeddings": 16}, '"beta_fast": 32.0, "beta_slow": 1.0')}
    for name, (scaling, want) in scalings.items():
        config = ck.LLAMA | ({"rope_scaling": {"rope_type": name, **scaling}} if scaling else {})
        assert want in json.dumps(ck.model_of(config).to_json()["rope"])


def test_a_refusal_comes_with_its_line_and_its_code(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    (directory / "config.json").write_text(json.dumps(ck.LLAMA | {"hidden_act": "gelu"}))
    with pytest.raises(tensor_file.FileError) as failure:
        hf_config.read_checkpoint(directory)
    assert failure.value.code == cli.BAD_FILE
    assert str(failure.value) == (f"'{directory}/config.json': hidden_act: got 'gelu', expected one of 'silu', 'swish'. "
                                  "No other activation of this family is supported")
    for value in (None, [], {}, ck.model_of(ck.LLAMA).to_json() | {"tokenizer_vocab": 38}):
        with pytest.raises(tensor_file.FileError, match="'file': model") as failure:
            hf_config.model_from_json(value, "file")
        assert failure.value.code == cli.BAD_FILE


def test_warnings_name_the_file_that_they_are_about(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", without(ck.LLAMA, "rope_theta") | {"bos_token_id": 99})
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 37]}')
    warnings = []
    model = hf_config.read_checkpoint(directory, warn=warnings.append).model
    assert (model.eos_ids, model.bos_id, model.rope.theta) == ([3], None, 10000)
    for warning, words in zip(warnings, ("config.json': rope_theta: absent", "generation_config.json': eos_token_id: got 37",
                                         "config.json': bos_token_id: got 99"), strict=True):
        assert words in warning
    assert hf_config.read_checkpoint(directory, 77.0).model.rope.theta == 77


def test_a_directory_of_any_name(tmp_path):
    for name in ("\u00e4 'quoted'", b"\xff".decode("utf-8", "surrogateescape")):
        directory = ck.write_checkpoint(tmp_path / name, ck.LLAMA)
        assert hf_config.read_checkpoint(directory).model == ck.model_of(ck.LLAMA)
        (directory / "config.json").write_text("{}")
        with pytest.raises(tensor_file.FileError, match="model_type: got nothing"):
            hf_config.read_checkpoint(directory)


def test_a_program_that_is_not_there_or_ends_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_config, "PROGRAM", tmp_path / "infer_pythia")
    with pytest.raises(tensor_file.FileError, match="infer_pythia': No such file or directory. Run make") as failure:
        hf_config.describe("x")
    assert failure.value.code == tensor_file.ENVIRONMENT
    for end, code in (("exit 5", 5), ("kill -9 $$", cli.INTERNAL)):
        (tmp_path / "infer_pythia").write_text(f"#!/bin/sh\n{end}\n")
        (tmp_path / "infer_pythia").chmod(0o755)
        with pytest.raises(tensor_file.FileError, match="ended without a message") as failure:
            hf_config.describe("x")
        assert failure.value.code == code


def test_a_model_without_a_config_of_hugging_face_is_not_exported():
    model = hf_config.model_from_json(ck.model_of(ck.LLAMA).to_json() | {"norm": "layernorm"}, "file")
    with pytest.raises(tensor_file.FileError, match="'file': model.norm: got 'layernorm'.*cannot be exported"):
        hf_config.exported_config(model, "file")
    whole = ck.model_of(ck.LLAMA)
    assert ck.model_of(hf_config.exported_config(whole, "file")) == whole


def test_buffers_that_are_no_parameters():
    for name in ("gpt_neox.layers.3.attention.rotary_emb.inv_freq", "gpt_neox.layers.0.attention.bias",
                 "gpt_neox.layers.0.attention.masked_bias", "model.layers.1.self_attn.rotary_emb.inv_freq",
                 "rotary_emb.inv_freq"):
        assert hf_config.is_ignorable_buffer(name)
    for name in ("gpt_neox.layers.0.attention.dense.bias", "model.norm.weight", "xattention.bias", "attention.bias.x"):
        assert not hf_config.is_ignorable_buffer(name)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def vocabulary(tokenizer):
    return hf_tokenizer.tokenizer_vocabulary(json.dumps(tokenizer).encode(), pathlib.Path("tokenizer.json"))


def test_tokenizer_vocabulary():  # B74 to B78
    document = ck.tokenizer_of(4)
    assert vocabulary(document) == 4
    document["model"]["vocab"] |= {"t0t1": 4, "t1t2": 5}
    document["model"]["merges"] = ["t0 t1", ["t1", "t2"]]  # both spellings
    assert vocabulary(document) == 6
    document["added_tokens"] = [{"id": 6, "content": "<|end|>"}]
    assert vocabulary(document) == 7
    for change, words in (
            ({"merges": ["t0 x"]}, "'x'"), ({"merges": ["t2 t3"]}, "t2t3"), ({"merges": ["t0"]}, "merges"),
            ({"merges": [["t0", 1]]}, "merges"), ({"vocab": {"a": 0, "b": 0}}, "id 0 belongs to both 'a' and 'b'"),
            ({"vocab": {"a": 0, "b": 2}}, "no token has the id 1"), ({"vocab": {"a": 2**31}}, "got 2147483648, expected a token id"),
            ({"vocab": {"a": -1}}, "got -1, expected a token id"), ({"vocab": {"a": "0"}}, "got '0', expected a token id"),
            ({"vocab": {"a": True}}, "got true, expected a token id"), ({"vocab": [["a", 0.5]]}, "got no object"),
            ({"vocab": {}}, "no tokens"), ({"vocab": None}, "got no object"), ({"type": "Unigram"}, "'Unigram', expected \"BPE\""),
            ({"unk_token": "<unk>"}, "model.unk_token")):
        bad = {"model": ck.tokenizer_of(4)["model"] | {"merges": []} | change, "decoder": {"type": "Fuse"}}
        with pytest.raises(tensor_file.FileError, match="tokenizer.json") as failure:
            vocabulary(bad)
        assert words in str(failure.value), str(failure.value)
    model = {"vocab": {"a": 0}}
    for bad in ({"model": model, "added_tokens": [5]}, {"model": model, "added_tokens": {"a": 1}}, {"model": 3}, {}):
        with pytest.raises(tensor_file.FileError, match="tokenizer.json"):
            vocabulary(bad)


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_in_front_of_the_first_piece_beside_added_tokens(normalizer, scheme):
    """Refused where there is a normalizer and any of the added tokens is normalized, whichever it is."""
    plain, normalized = ({"normalized": False}, {"special": True}), ({"normalized": True, "special": True}, {})
    document = ck.tokenizer_of(4) | {"normalizer": normalizer, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme}}
    for flags in itertools.product([*plain, *normalized], repeat=3):
        document["added_tokens"] = [{"id": 4 + i, "content": f"<{i}>", **each} for i, each in enumerate(flags)]
        if normalizer == {"type": "NFC"} and scheme == "first" and any(each in normalized for each in flags):
            with pytest.raises(tensor_file.FileError, match="prepend_scheme.*beside a normalizer and added tokens that are normalized"):
                vocabulary(document)
        else:
            assert vocabulary(document) == 7


# ---- a directory -----------------------------------------------------------------------------------------------------


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, words in (("nothing", "no such directory"), ("file", "not a directory")):
        with pytest.raises(tensor_file.FileError, match=words) as failure:
            hf_config.read_checkpoint(tmp_path / name)
        assert failure.value.code == cli.BAD_FILE


@pytest.mark.parametrize("name, limit", [("config.json", 8 << 20), ("generation_config.json", 8 << 20), ("tokenizer.json", 100_000_000)])
def test_each_file_of_a_directory_is_read_up_to_its_limit(tmp_path, monkeypatch, name, limit):
    """And only if it is a file, whichever of them it is."""
    asked = {}
    monkeypatch.setattr(cli, "read_bytes", lambda path, most: (asked.setdefault(path.name, most), path.read_bytes())[1])
    monkeypatch.setattr(hf_config, "read_bytes", cli.read_bytes)
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(9))
    (directory / "generation_config.json").write_text("{}")
    hf_config.read_checkpoint(directory)
    assert asked[name] == limit
    monkeypatch.undo()
    (directory / name).unlink()
    (directory / name).mkdir()
    with pytest.raises(tensor_file.FileError, match=f"{name}.*(not a regular file|cannot be read)"):
        hf_config.read_checkpoint(directory)
