"""convert_hf.py: what goes through unchanged, and what is refused. B numbers name classes of bad input."""

import errno
import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tracemalloc

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
import cli  # noqa: E402
import convert_hf  # noqa: E402
import hf_config  # noqa: E402
import safetensors_reader  # noqa: E402
import tensor_file  # noqa: E402
from hostile_weights import HOSTILE_FILES  # noqa: E402

FAMILIES = ["llama", "gpt_neox"]
EMBEDDING = {"llama": "model.embed_tokens.weight", "gpt_neox": "gpt_neox.embed_in.weight"}
DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@pytest.fixture
def llama(tmp_path):
    return ck.write_checkpoint(tmp_path / "model", ck.LLAMA)


def refuse(directory, *words, options=()):
    output = directory.parent / "out.bin"
    done = ck.run_script("convert_hf.py", directory, "-o", output, *options)
    ck.assert_refused(done, 3, *words, output=output)
    assert done.seconds < ck.SECONDS
    return done


# ---- hostile weight files --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_weight_file(llama, case):
    data, words = HOSTILE_FILES[case]
    (llama / "model.safetensors").write_bytes(data)
    refuse(llama, "model.safetensors", *words)


def test_every_truncation_is_refused(llama):
    """In-process: a cut anywhere in the header, and one in the data."""
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for size in [*range(0, header, 7), header, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(tensor_file.FileError) as failure:
            convert_hf.open_weights(llama, cli.Warnings())
        assert failure.value.code == cli.BAD_FILE


def test_random_damage_never_crashes(llama):
    """Random bytes of the header are changed: the file is refused in the ordinary way, or still means something."""
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for position in random.integers(0, header, 1 + int(random.integers(3))):
            damaged[position] = int(random.integers(256))
        path.write_bytes(damaged)
        try:
            checkpoint = hf_config.read_checkpoint(llama)
            convert_hf.match_tensors(checkpoint, convert_hf.open_weights(llama, cli.Warnings()), llama, cli.Warnings())
        except tensor_file.FileError as failure:
            assert failure.code == cli.BAD_FILE
            refused += 1
    assert refused > 200


def test_half_of_a_surrogate_pair_anywhere_in_the_config_is_refused(llama):
    """Found by fuzz_convert.py: the text went through to the model file, which is UTF-8."""
    path = llama / "config.json"
    path.write_text(path.read_text().replace('"silu"', '"silu", "unused": ["\\ud800"]'))
    refuse(llama, "config.json", "surrogate pair")


@pytest.mark.parametrize("spell", [str.lower, str.upper, lambda digits: digits[0].upper() + digits[1:], lambda digits: digits[0] + digits[1:].upper()])
def test_every_half_of_a_surrogate_pair_is_refused_however_it_is_spelled(spell):
    def parse(form, *codes):
        return cli.parse_json(form % "".join("\\u" + spell(f"{code:04x}") for code in codes).encode(), "x.json")

    for form in (b'"%s"', b'{"a": [1, "b%sc"]}', b'{"%s": 1}'):
        for halves in (*((code,) for code in range(0xD800, 0xE000, 0x40)), (0xDBFF,), (0xDFFF,), (0xDE00, 0xD83D), (0xD83D, 0xD83D), (0xDE00, 0xDE00)):
            with pytest.raises(tensor_file.FileError, match="half of a surrogate pair"):
                parse(form, *halves)
    for code in (0xD7FF, 0xE000, 0xFDFD):
        assert parse(b'"%s"', code) == chr(code)
    for high, low in ((0xD800, 0xDC00), (0xDBFF, 0xDFFF), (0xD83D, 0xDE00)):
        assert parse(b'"%s"', high, low) == chr(0x10000 + (high - 0xD800 << 10) + low - 0xDC00)


def test_what_turns_the_direction_of_text_is_escaped(llama):
    """Found by fuzz_convert.py, as an unknown value that a message quotes."""
    path = llama / "config.json"
    path.write_text(path.read_text().replace('"silu"', '"\u202e\ufeff"'))
    refuse(llama, "hidden_act", r"\xe2\x80\xae\xef\xbb\xbf")


# ---- weights that do not fit the configuration -----------------------------------------------------------------------


def test_int8_weights_are_refused(tmp_path):  # B24
    weights = ck.weights_of(ck.LLAMA)
    weights["model.norm.weight"] = ("I8", weights["model.norm.weight"])
    refuse(ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights), "model.norm.weight", "I8", "F32, F16, BF16", "original checkpoint")


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16"), ("--quantize", "int8")])
def test_float64_weights_are_rounded_once_to_float32(tmp_path, options):
    weights, random = ck.weights_of(ck.LLAMA), np.random.default_rng(3)
    fine = {name: value.astype(np.float64) + random.uniform(-1e-9, 1e-9, value.shape) for name, value in weights.items()}
    rounded = {name: value.astype(np.float32) for name, value in fine.items()}
    ck.write_safetensors(ck.write_checkpoint(tmp_path / "f64", ck.LLAMA) / "model.safetensors", {k: ("F64", v) for k, v in fine.items()})
    ck.write_checkpoint(tmp_path / "f32", ck.LLAMA, rounded)
    for name in ("f32", "f64"):
        ck.convert(tmp_path / name, tmp_path / f"{name}.bin", *options)
    assert (tmp_path / "f64.bin").read_bytes() == (tmp_path / "f32.bin").read_bytes()
    fine["model.norm.weight"][3] = 1e39
    ck.write_safetensors(tmp_path / "f64" / "model.safetensors", {k: ("F64", v) for k, v in fine.items()})
    refuse(tmp_path / "f64", "model.norm.weight", "does not fit in float32", options=options)
    fine["model.norm.weight"][3] = np.inf
    ck.write_safetensors(tmp_path / "f64" / "model.safetensors", {k: ("F64", v) for k, v in fine.items()})
    assert "NaN or infinity" in ck.run_script("convert_hf.py", tmp_path / "f64", "-o", tmp_path / "inf.bin", *options).stderr


def test_the_largest_rank_is_read(tmp_path):
    (tmp_path / "a").write_bytes(ck.safetensors_bytes({"a": {"dtype": "U8", "shape": [1] * 7 + [3], "data_offsets": [0, 3]}}, bytes(3)))
    assert safetensors_reader.SafetensorsFile(tmp_path / "a").tensors["a"].shape == (1, 1, 1, 1, 1, 1, 1, 3)


BYTES_OF_DTYPES = {1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 2: ("U16", "I16", "F16", "BF16"), 4: ("U32", "I32", "F32"),
                   8: ("U64", "I64", "F64")}


def tensors_of(path, header, data=b""):
    path.write_bytes(ck.safetensors_bytes(header, data))
    return safetensors_reader.SafetensorsFile(path).tensors


def test_every_dtype_of_a_weight_file_has_its_size(tmp_path):
    """Also of tensors that are no parameters: a file with them is read."""
    for size, names in BYTES_OF_DTYPES.items():
        for dtype in names:
            for stored in (1, 2, 4, 8):
                entry = {"dtype": dtype, "shape": [3], "data_offsets": [0, 3 * stored]}
                if stored == size:
                    assert tensors_of(tmp_path / "a", {"a": entry}, bytes(3 * stored))["a"].end == 3 * size
                else:
                    with pytest.raises(tensor_file.FileError, match=f"got {3 * stored} bytes, expected {3 * size} for {dtype}"):
                        tensors_of(tmp_path / "a", {"a": entry}, bytes(3 * stored))


def test_a_weight_file_at_its_limits(tmp_path, monkeypatch):
    byte = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    assert tensors_of(tmp_path / "a", {}) == {}, "10 bytes are a file"
    for name, accepted in (("n" * 255, True), ("\u00e9" * 127 + "n", True), ("n" * 256, False), ("\u00e9" * 128, False), ("", False)):
        if accepted:
            assert list(tensors_of(tmp_path / "a", {name: byte}, bytes(1))) == [name]
        else:
            with pytest.raises(tensor_file.FileError, match="a name that is empty, unprintable or over 255 bytes"):
                tensors_of(tmp_path / "a", {name: byte}, bytes(1))
    monkeypatch.setattr(safetensors_reader, "MAX_TENSORS", 3)
    many = {f"t{i}": byte | {"data_offsets": [i, i + 1]} for i in range(4)}
    three = {name: many[name] for name in list(many)[:3]}
    assert list(tensors_of(tmp_path / "a", {"__metadata__": {"a": "b"}} | three, bytes(3))) == ["t0", "t1", "t2"]
    for header in (many, {"__metadata__": {}} | many):
        with pytest.raises(tensor_file.FileError, match="4 tensors|more than 3 tensors"):
            tensors_of(tmp_path / "a", header, bytes(4))
    monkeypatch.setattr(safetensors_reader, "MAX_HEADER_BYTES", len(json.dumps(three)))
    assert len(tensors_of(tmp_path / "a", three, bytes(3))) == 3
    monkeypatch.setattr(safetensors_reader, "MAX_HEADER_BYTES", len(json.dumps(three)) - 1)
    with pytest.raises(tensor_file.FileError, match="header length"):
        tensors_of(tmp_path / "a", three, bytes(3))


@pytest.mark.parametrize("metadata", [None, [], "x", {"a": "b", "c": 1}, {"a": "b", "c": "d", "e": None}, {"a": {}}])
def test_metadata_are_strings(tmp_path, metadata):
    assert tensors_of(tmp_path / "a", {"__metadata__": {"a": "b", "c": "d"}}) == {}
    with pytest.raises(tensor_file.FileError, match="__metadata__: got something else, expected an object of strings"):
        tensors_of(tmp_path / "a", {"__metadata__": metadata})


@pytest.mark.parametrize("begin", [b"PK\x03\x04", b"\x80\x02"])
def test_a_pickle_under_the_name_of_a_weight_file_says_how_to_save_it_again(llama, begin):
    (llama / "model.safetensors").write_bytes(begin + bytes(60))
    refuse(llama, "PyTorch", "expected a safetensors file", "Save it again with save_pretrained(..., safe_serialization=True)")


@pytest.mark.parametrize("length", [0x0280, 0x018b1f])
def test_a_header_may_have_the_length_that_other_files_begin_with(tmp_path, length):
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(length)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + b"x")
    assert list(safetensors_reader.SafetensorsFile(tmp_path / "model.safetensors").tensors) == ["a"]


def test_the_value_of_an_option_is_given_once(capsys):
    parser = cli.Parser(prog="x")
    parser.add_argument("-o", "--output")
    parser.add_argument("--each", action="append")
    assert parser.parse_args(["-o", "a", "--each", "b", "--each", "c"]).each == ["b", "c"]
    with pytest.raises(SystemExit):
        parser.parse_args(["-o", "a", "--output", "b"])
    assert "argument --output: given 2 times, expected once" in capsys.readouterr().err
    assert parser.parse_args(["-o", "a"]).output == "a"


def test_a_weight_file_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "lost").symlink_to("nowhere")
    for name, words in (("fifo", "not a regular file"), (".", "not a regular file"), ("nothing", "no such file"), ("lost", "no such file")):
        with pytest.raises(tensor_file.FileError, match=words):
            safetensors_reader.SafetensorsFile(tmp_path / name)


def test_empty_tensors_take_no_place(tmp_path):
    """A tensor without elements ends where it begins: before and behind another one, in any order of the header."""
    one, none = np.ones((2,), np.float32), np.zeros((0, 3), np.float32)
    for names in (("empty", "full", "last"), ("full", "empty", "last"), ("full", "last", "empty")):
        path = tmp_path / "x.safetensors"
        ck.write_safetensors(path, {name: none if name == "empty" else one for name in names})
        size = int.from_bytes(path.read_bytes()[:8], "little")
        header, data = json.loads(path.read_bytes()[8:8 + size]), path.read_bytes()[8 + size:]
        for order in (list(names), list(reversed(names))):
            path.write_bytes(ck.safetensors_bytes({name: header[name] for name in order}, data))
            entries = safetensors_reader.SafetensorsFile(path).tensors
            assert {name: entries[name].end - entries[name].begin for name in names} == {"empty": 0, "full": 8, "last": 8}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_tensor_is_named(tmp_path, family):  # B25
    weights = ck.weights_of(ck.CONFIGS[family])
    directory = ck.write_checkpoint(tmp_path / "model", ck.CONFIGS[family])
    checkpoint = hf_config.read_checkpoint(directory)
    found = convert_hf.open_weights(directory, cli.Warnings())
    for name in weights:
        with pytest.raises(tensor_file.FileError, match="missing") as failure:
            rest = {key: value for key, value in found.items() if key != name}
            convert_hf.match_tensors(checkpoint, rest, directory, cli.Warnings())
        assert name in str(failure.value)
    del weights["model.norm.weight" if family == "llama" else "gpt_neox.final_layer_norm.bias"]
    ck.write_safetensors(directory / "model.safetensors", weights)
    refuse(directory, "norm", "missing")


def test_extra_tensors_warn_and_known_buffers_do_not(tmp_path):  # B26
    weights = ck.weights_of(ck.GPT_NEOX)
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention."
        weights |= {prefix + "rotary_emb.inv_freq": np.ones(2, np.float32),
                    prefix + "masked_bias": np.ones((), np.float32),
                    prefix + "bias": ("U8", np.ones((1, 1, 4, 4), np.float32))}
    directory = ck.write_checkpoint(tmp_path / "model", ck.GPT_NEOX, weights)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "a.bin")
    assert done.returncode == 0 and "not part of" not in done.stderr
    write = weights | {"extra.weight": np.ones(3, np.float32)}
    ck.write_checkpoint(directory, ck.GPT_NEOX, write)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "b.bin")
    assert done.returncode == 0 and "'extra.weight' is not part of" in done.stderr
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrong_shape_is_refused(tmp_path, family):  # B27, B28
    config = ck.CONFIGS[family]
    directory = ck.write_checkpoint(tmp_path / "model", config)
    checkpoint = hf_config.read_checkpoint(directory)
    weights = ck.weights_of(config)
    for name, value in weights.items():
        variants = [np.concatenate([value, value[:1]])]
        if value.ndim == 2 and value.shape[0] != value.shape[1]:
            variants.append(value.T)
        for wrong in variants:
            ck.write_safetensors(directory / "model.safetensors", weights | {name: np.ascontiguousarray(wrong)})
            with pytest.raises(tensor_file.FileError) as failure:
                convert_hf.match_tensors(checkpoint, convert_hf.open_weights(directory, cli.Warnings()), directory, cli.Warnings())
            message = str(failure.value)
            assert name in message and tensor_file.shape_text(value.shape) in message
            assert tensor_file.shape_text(wrong.shape) in message
            assert ("transposed" in message) == (wrong.shape == value.shape[::-1] and value.ndim == 2)


# ---- shards ----------------------------------------------------------------------------------------------------------


def split_weights(config):
    weights = ck.weights_of(config)
    names = list(weights)
    return {f"model-0000{part + 1}-of-00002.safetensors": {name: weights[name] for name in names[part::2]}
            for part in range(2)}


def test_shards_equal_one_file(llama, tmp_path):
    whole = ck.convert(llama, tmp_path / "whole.bin")
    ck.write_shards(llama, split_weights(ck.LLAMA))
    parts = ck.convert(llama, tmp_path / "parts.bin")
    assert [t.hash for t in whole.tensors.values()] == [t.hash for t in parts.tensors.values()]


def test_bad_shards_are_refused(llama):
    shards = split_weights(ck.LLAMA)
    (first, one), (second, two) = shards.items()
    ck.write_shards(llama, {first: one, second: two | {"model.norm.weight": np.ones(16, np.float32),
                                                       "model.embed_tokens.weight": np.ones((37, 16), np.float32)}})
    refuse(llama, second, first, "is also in", "other values")  # B14
    ck.write_shards(llama, shards)
    (llama / second).unlink()
    refuse(llama, "index.json", second, "not there")  # B31
    true_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for bad in ("../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x.safetensors", "x.bin",
                "\x1b[2J.safetensors", "9" * 300 + ".safetensors"):
        ck.write_shards(llama, shards, true_map | {"model.norm.weight": bad})
        refuse(llama, "weight_map 'model.norm.weight'")  # B32
    ck.write_shards(llama, shards, true_map | {"model.norm.weight": {"file": first}})
    refuse(llama, "weight_map 'model.norm.weight'", "object")  # B33
    for weight_map in ([], {}, None, "x"):
        (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        refuse(llama, "weight_map")


def test_an_index_that_is_wrong_about_tensors_names_files_all_the_same(llama, tmp_path):
    """As in transformers: what counts is what the files hold. A tensor that no file holds is missing only if the model has it."""
    whole = ck.convert(llama, tmp_path / "whole.bin")
    shards = split_weights(ck.LLAMA)
    (first, one), (second, two) = shards.items()
    true_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    name = next(iter(two))
    twice = {first: one | {name: two[name]}, second: two}  # in both, with the same values
    for files, weight_map in ((shards, true_map | {"ghost.weight": first}), (shards, true_map | {name: first}), (twice, true_map)):
        ck.write_shards(llama, files, weight_map)
        for index in ({"weight_map": weight_map}, {"metadata": None, "weight_map": weight_map}):  # without metadata as well
            (llama / "model.safetensors.index.json").write_text(json.dumps(index))
            file = ck.convert(llama, tmp_path / "shards.bin")
            assert [info.hash for info in file.tensors.values()] == [info.hash for info in whole.tensors.values()]
    ck.write_shards(llama, {first: one, second: {key: value for key, value in two.items() if key != name}}, true_map)
    refuse(llama, name, "missing")


@pytest.mark.parametrize("name, words", [
    ("adapter_model.safetensors", "--base"), ("consolidated.00.safetensors", "save_pretrained"), ("x.gguf", "GGUF"),
    ("model-00001-of-00002.safetensors", "the index"), ("weights.safetensors", "rename it")])
def test_other_files_of_weights_are_named_with_the_way_out(llama, name, words):
    (llama / "model.safetensors").rename(llama / name)
    refuse(llama, "model.safetensors", name, words)


@pytest.mark.parametrize("family, prefix", [("llama", "model."), ("gpt_neox", "gpt_neox.")])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_was_saved_without_its_prefix(tmp_path, family, prefix, tied):
    """LlamaModel and GPTNeoXModel save the tensors of the body alone."""
    config = ck.CONFIGS[family] | {"tie_word_embeddings": tied}
    weights = ck.weights_of(config)
    if tied:
        weights.pop("embed_out.weight", None)
    body = {key.removeprefix(prefix): value for key, value in weights.items()}
    body["layers.0.self_attn.rotary_emb.inv_freq"] = body["layers.1.attention.masked_bias"] = np.ones(2, np.float32)
    whole = ck.convert(ck.write_checkpoint(tmp_path / "whole", config, weights), tmp_path / "whole.bin")
    bare = ck.write_checkpoint(tmp_path / "bare", config | {"architectures": None}, body)
    done = ck.run_script("convert_hf.py", bare, "-o", tmp_path / "bare.bin")
    assert done.returncode == 0 and done.stderr.count("warning") == 1, done.stderr  # of the tokenizer
    file = tensor_file.read(tmp_path / "bare.bin")
    assert [(key, info.hash) for key, info in file.tensors.items()] == [(key, info.hash) for key, info in whole.tensors.items()]
    if not tied:
        body.pop("lm_head.weight" if family == "llama" else "embed_out.weight")
        refuse(ck.write_checkpoint(tmp_path / "headless", config, body), "missing", "tie_word_embeddings is false")


@pytest.mark.parametrize("body, head", [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")])
def test_the_text_model_of_several_modalities(tmp_path, body, head):
    """As transformers 4 and 5 name its tensors. What belongs to images is left out."""
    weights = ck.weights_of(ck.GEMMA3)
    whole = ck.convert(ck.write_checkpoint(tmp_path / "text", ck.GEMMA3, weights), tmp_path / "text.bin")
    beside = {key.replace("model.", body, 1): value for key, value in weights.items()}
    beside |= {f"{head}weight": weights["model.embed_tokens.weight"]}
    beside |= dict.fromkeys(("vision_tower.a.weight", "model.vision_tower.b", "multi_modal_projector.c"), np.ones((2, 2), np.float32))
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": ck.GEMMA3,
              "vision_config": {"hidden_size": 2}}
    done = ck.run_script("convert_hf.py", ck.write_checkpoint(tmp_path / "all", config, beside), "-o", tmp_path / "all.bin")
    assert done.returncode == 0 and done.stderr.count("warning") == 2, done.stderr  # the other one is of the tokenizer
    assert "3 tensors of other modalities than text are left out" in done.stderr
    file = tensor_file.read(tmp_path / "all.bin")
    assert [(key, info.hash) for key, info in file.tensors.items()] == [(key, info.hash) for key, info in whole.tensors.items()]
    assert file.config["model"] == whole.config["model"]
    ck.run_script("export_hf.py", tmp_path / "all.bin", "-o", tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["model_type"] == "gemma3_text" and not {"text_config", "vision_config"} & set(written)


@pytest.mark.parametrize("family", ck.CONFIGS)
def test_a_tied_model_whose_file_has_the_head_alone(tmp_path, family):
    config = ck.CONFIGS[family] | {"tie_word_embeddings": True}
    weights = {key: value for key, value in ck.weights_of(config).items() if key != "embed_out.weight"}
    whole = ck.convert(ck.write_checkpoint(tmp_path / "whole", config, weights), tmp_path / "whole.bin")
    weights["lm_head.weight"] = weights.pop(EMBEDDING[family])
    file = ck.convert(ck.write_checkpoint(tmp_path / "head", config, weights), tmp_path / "head.bin")
    assert [(key, info.hash) for key, info in file.tensors.items()] == [(key, info.hash) for key, info in whole.tensors.items()]


def test_the_name_of_a_shard_may_be_as_long_as_a_file_name(llama):
    """In bytes, which are what the system counts."""
    weights = ck.weights_of(ck.LLAMA)
    for letters, accepted in (("n" * 243, True), ("\u00e9" * 121 + "n", True), ("n" * 244, False), ("\u00e9" * 122, False)):
        name = letters + ".safetensors"
        ck.write_shards(llama, {"x.safetensors": weights}, dict.fromkeys(weights, name))
        if accepted:
            (llama / "x.safetensors").rename(llama / name)
            assert set(convert_hf.open_weights(llama, cli.Warnings())) == set(weights)
        else:
            with pytest.raises(tensor_file.FileError, match="expected the name of a .safetensors file in this directory"):
                convert_hf.open_weights(llama, cli.Warnings())


def test_one_file_goes_before_shards_and_every_tensor_of_a_shard_counts(llama, tmp_path):
    whole = ck.convert(llama, tmp_path / "whole.bin")
    data = (llama / "model.safetensors").read_bytes()
    shards = split_weights(ck.LLAMA | {"rope_theta": 1.0})
    names = {name: shard for shard, tensors in shards.items() for name in tensors}
    del names["model.norm.weight"]  # the index need not list it
    ck.write_shards(llama, {shard: tensors | {f"extra.{i}.{shard}": np.ones(1, np.float32) for i in (1, 2)} for shard, tensors in shards.items()}, names)
    done = ck.run_script("convert_hf.py", llama, "-o", tmp_path / "a.bin")
    assert done.returncode == 0 and done.stderr.count("is not part of a llama model: left out") == 4, done.stderr
    a = tensor_file.read(tmp_path / "a.bin")
    assert [info.hash for info in a.tensors.values()] == [info.hash for info in whole.tensors.values()]
    (llama / "model.safetensors").write_bytes(data)
    for shard in shards:
        (llama / shard).write_bytes(b"damaged")
    ck.convert(llama, tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_an_index_is_not_read_beyond_its_limit(llama):
    ck.write_shards(llama, split_weights(ck.LLAMA))
    with open(llama / "model.safetensors.index.json", "ab") as file:
        file.write(b" " * (8 << 20))
    refuse(llama, "index.json", "got more than 8388608 bytes")


def test_pickled_weights_only(llama):
    (llama / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"):
        (llama / name).write_bytes(b"PK")
        refuse(llama, "pytorch_model.bin", "safetensors first")
        (llama / name).unlink()
    refuse(llama, "model.safetensors", "index.json")


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights(tmp_path, value):  # B34
    weights = ck.weights_of(ck.LLAMA)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = value
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "loose.bin")
    assert done.returncode == 0 and "model.layers.1.mlp.down_proj.weight: holds NaN or infinity" in done.stderr
    done = refuse(directory, "--strict", options=["--strict"])
    assert "model.layers.1.mlp.down_proj.weight" in done.stderr


@pytest.mark.parametrize("options", [[], ["--quantize", "int8"]])
def test_strict_counts_the_tensors_alone(tmp_path, options):
    """Not the warnings that came before: of a tokenizer that is absent, and of a tensor that is no part of the model."""
    weights = ck.weights_of(ck.LLAMA)
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights | {"extra.weight": np.ones(3, np.float32)})
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "strict.bin", "--strict", *options)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 2, done.stderr
    ck.convert(directory, tmp_path / "loose.bin", *options)
    assert (tmp_path / "strict.bin").read_bytes() == (tmp_path / "loose.bin").read_bytes()
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"):
        weights[name][:] = 0
    ck.write_checkpoint(directory, ck.LLAMA, weights | {"extra.weight": np.ones(3, np.float32)})
    refuse(directory, "2 tensors hold", "--strict", options=["--strict", *options])


@pytest.mark.parametrize("row", [0, 20, -1])
def test_each_piece_of_a_tensor_is_watched(tmp_path, monkeypatch, capsys, row):
    """A tensor goes through in pieces: what is wrong in the first, a middle or the last one is found."""
    name = "model.embed_tokens.weight"
    weights = ck.weights_of(ck.LLAMA)
    monkeypatch.setattr(convert_hf, "CHUNK_ELEMENTS", weights[name].shape[1])  # a row

    def convert(dtype):
        directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights)
        checkpoint, warnings = hf_config.read_checkpoint(directory), cli.Warnings()
        _, tensors = convert_hf.match_tensors(checkpoint, convert_hf.open_weights(directory, cli.Warnings()), directory, warnings)
        convert_hf.write_model(tmp_path / "a.bin", checkpoint, tensors, convert_hf.Target(dtype), False, warnings)
        return capsys.readouterr().err

    weights[name][row, 1] = np.nan
    assert f"{name}: holds NaN or infinity" in convert(None)
    weights[name][row, 1] = 1e6
    with pytest.raises(tensor_file.FileError, match="does not fit in f16"):
        convert("f16")
    weights[name][:] = 0
    assert f"{name}: every value is zero" in convert(None)
    weights[name][row, 1] = 1
    assert convert(None) == ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_infinities_stay_whatever_the_dtype(tmp_path, dtype):
    """An infinity that was there is a warning, as without --dtype: only a finite value that becomes one is refused."""
    name = "model.layers.1.mlp.down_proj.weight"
    weights = ck.weights_of(ck.LLAMA)
    weights[name][3, 4:6] = np.inf, -np.inf
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "a.bin", "--dtype", dtype)
    assert done.returncode == 0 and f"{name}: holds NaN or infinity" in done.stderr, done.stderr
    assert tensor_file.read(tmp_path / "a.bin").f32(name)[3, 4:6].tolist() == [np.inf, -np.inf]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [0x7F800001, 0xFFBFFFFF])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_signalling_nan_is_weft_s_warning_alone(tmp_path, bits, dtype):  # numpy warned besides, found by fuzzing
    weights = ck.weights_of(ck.LLAMA)
    weights["model.layers.1.mlp.down_proj.weight"].view(np.uint32)[3, 4] = bits
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "loose.bin", "--dtype", dtype)
    assert done.returncode == 0
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines()), done.stderr
    assert "model.layers.1.mlp.down_proj.weight: holds NaN or infinity" in done.stderr


def test_all_zero_weights(tmp_path):  # B34
    weights = ck.weights_of(ck.GPT_NEOX)
    weights["embed_out.weight"][:] = 0
    weights["gpt_neox.final_layer_norm.bias"][:] = 0
    directory = ck.write_checkpoint(tmp_path / "model", ck.GPT_NEOX, weights)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "loose.bin")
    assert done.returncode == 0 and "embed_out.weight: every value is zero" in done.stderr
    assert "final_layer_norm.bias" not in done.stderr
    refuse(directory, options=["--strict"])


def test_weights_that_a_new_model_has_as_zeros_may_be_zero(tmp_path):
    """Norms of a Gemma multiply by 1 + weight."""
    weights = ck.weights_of(ck.GEMMA3)
    for name, values in weights.items():
        if "norm" in name or "embed" in name:
            values[:] = 0
    done = ck.run_script("convert_hf.py", ck.write_checkpoint(tmp_path / "model", ck.GEMMA3, weights), "-o", tmp_path / "a.bin")
    assert done.returncode == 0 and done.stderr.count("every value is zero") == 1 and "embed_tokens.weight: every" in done.stderr


@pytest.mark.parametrize("error, code", [(errno.ENOSPC, cli.RESOURCES), (errno.EDQUOT, cli.RESOURCES),
                                         (errno.EFBIG, cli.RESOURCES), (errno.EACCES, cli.ENVIRONMENT)])
def test_errors_of_the_system_have_their_codes(error, code, capsys):
    """Those of every script, which ends by cli.run()."""
    def fail():
        raise OSError(error, os.strerror(error), "out.bin")

    with pytest.raises(SystemExit) as end:
        cli.run(fail)
    assert end.value.code == code
    assert capsys.readouterr().err == f"error: 'out.bin': {os.strerror(error)}\n"


@pytest.mark.parametrize("stored", DTYPES)
def test_dtype_that_stays_is_copied_bit_for_bit(tmp_path, stored):
    weights = ck.weights_of(ck.LLAMA)
    weights["model.norm.weight"][:3] = [1e-40, -0.0, 6e-8]  # subnormal and signed zero survive a raw copy
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights, stored)
    name = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}[stored]
    for options in ([], ["--dtype", name]):
        file = ck.convert(directory, tmp_path / "a.bin", *options)
        for tensor, value in weights.items():
            assert file.at(tensor).dtype == DTYPES[stored]
            assert bytes(file.bytes(tensor)) == ck.encode(value, stored)
        file.verify()


def test_every_conversion_rounds_once_through_fp32(tmp_path):
    """Against an independent rounding: the nearest representable value, ties to the even mantissa."""
    values = np.concatenate([np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 60000, 0,
                                         -0.0, 2**-24, 2**-25, 3 * 2**-26, 1e-3]),
                             np.random.default_rng(2).standard_normal(4).astype(np.float32)])
    for stored in DTYPES:
        weights = ck.weights_of(ck.LLAMA) | {"model.norm.weight": values}
        directory = ck.write_checkpoint(tmp_path / stored, ck.LLAMA, weights, stored)
        exact = ck.convert(directory, tmp_path / "exact.bin", "--dtype", "fp32").f32("model.norm.weight")
        for option, mantissa, least in (("bf16", 7, -133), ("fp16", 10, -24)):
            got = ck.convert(directory, tmp_path / "a.bin", "--dtype", option).f32("model.norm.weight")
            assert np.array_equal(got, [round_to(value, mantissa, least) for value in exact])


def round_to(value, mantissa, least_exponent):
    """Round half to even at `mantissa` bits below the leading one, not finer than 2^least_exponent; exact doubles."""
    if value == 0:
        return value
    unit = max(np.frexp(float(value))[1] - 1 - mantissa, least_exponent)
    return float(np.ldexp(np.round(np.ldexp(float(value), -unit)), unit))


def test_overflow_is_refused(tmp_path):
    weights = ck.weights_of(ck.LLAMA)
    weights["model.layers.0.mlp.up_proj.weight"][1, 2] = 65520  # rounds to infinity in fp16
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, weights)
    refuse(directory, "model.layers.0.mlp.up_proj.weight", "65520", "f16", options=["--dtype", "fp16"])
    weights["model.layers.0.mlp.up_proj.weight"][1, 2] = 65519  # the largest that does not
    ck.write_checkpoint(directory, ck.LLAMA, weights)
    ck.convert(directory, tmp_path / "a.bin", "--dtype", "fp16")
    weights["model.layers.0.mlp.up_proj.weight"][1, 2] = np.float32(3.4e38)
    ck.write_checkpoint(directory, ck.LLAMA, weights)
    refuse(directory, "bf16", options=["--dtype", "bf16"])


def test_memory_is_bounded_by_a_piece(tmp_path, monkeypatch):
    """24 MB of weights pass through while 2 MB are held: 24 GB would, too."""
    config = ck.LLAMA | {"vocab_size": 60_000, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
    directory = ck.write_checkpoint(tmp_path / "model", config, dtype="BF16")
    monkeypatch.setattr(convert_hf, "CHUNK_ELEMENTS", 1 << 15)
    checkpoint, warnings = hf_config.read_checkpoint(directory), cli.Warnings()
    _, tensors = convert_hf.match_tensors(checkpoint, convert_hf.open_weights(directory, cli.Warnings()), directory, warnings)
    tracemalloc.start()
    convert_hf.write_model(tmp_path / "a.bin", checkpoint, tensors, convert_hf.Target("f32"), False, warnings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "a.bin").stat().st_size > 20 << 20
    assert peak < 2 << 20


# ---- tied embeddings -------------------------------------------------------------------------------------------------


def test_tied_llama(tmp_path):  # B50
    config = ck.LLAMA | {"tie_word_embeddings": True}
    weights = ck.weights_of(config)
    assert "lm_head.weight" not in weights
    directory = ck.write_checkpoint(tmp_path / "model", config, weights)
    file = ck.convert(directory, tmp_path / "a.bin")
    assert "lm_head.weight" not in file.tensors and file.config["model"]["tied_embeddings"] is True
    same = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    ck.write_checkpoint(directory, config, same)
    assert ck.run_script("convert_hf.py", directory, "-o", tmp_path / "b.bin").returncode == 0
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    same["lm_head.weight"][5, 5] += 1
    ck.write_checkpoint(directory, config, same)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "c.bin")  # as transformers 5: the head is its own
    assert done.returncode == 0 and "lm_head.weight differs" in done.stderr and "tie_word_embeddings" in done.stderr
    file = tensor_file.read(tmp_path / "c.bin")
    assert file.config["model"]["tied_embeddings"] is False
    assert np.array_equal(file.f32("lm_head.weight"), same["lm_head.weight"])
    ck.write_checkpoint(directory, config | {"tie_word_embeddings": False}, weights)
    refuse(directory, "lm_head.weight", "missing", "tie_word_embeddings is false")


def test_a_tied_head_that_differs_in_its_last_value_is_a_head_of_its_own(tmp_path, monkeypatch):
    """Both are read in pieces."""
    monkeypatch.setattr(convert_hf, "CHUNK_ELEMENTS", 100)
    config = ck.LLAMA | {"tie_word_embeddings": True}
    weights = ck.weights_of(config)
    weights["lm_head.weight"] = weights[EMBEDDING["llama"]].copy()
    ck.convert(ck.write_checkpoint(tmp_path / "same", config, weights), tmp_path / "same.bin")
    weights["lm_head.weight"][-1, -1] += 1
    file = ck.convert(ck.write_checkpoint(tmp_path / "other", config, weights), tmp_path / "other.bin")
    assert np.array_equal(file.f32("lm_head.weight"), weights["lm_head.weight"])


@pytest.mark.parametrize("family, name", [("llama", "lm_head.weight"), ("gpt_neox", "embed_out.weight"), ("gpt_neox", "lm_head.weight")])
def test_a_head_beside_a_tied_embedding_under_any_of_its_names(tmp_path, family, name):
    """The same values are taken without a word, others with one; another shape or a dtype that is no float is refused."""
    config = ck.CONFIGS[family] | {"tie_word_embeddings": True}
    weights = {key: value for key, value in ck.weights_of(config).items() if key != "embed_out.weight"}
    embedding = weights[EMBEDDING[family]].astype(np.float16).astype(np.float32)  # as F16 exact
    weights[EMBEDDING[family]] = ("F16", embedding)
    alone = ck.convert(ck.write_checkpoint(tmp_path / "alone", config, weights), tmp_path / "alone.bin")
    directory = ck.write_checkpoint(tmp_path / "model", config, weights | {name: ("F16", embedding)})
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "same.bin")
    assert done.returncode == 0 and done.stderr.count("warning") == 1 and "no tokenizer.json" in done.stderr, done.stderr
    same = tensor_file.read(tmp_path / "same.bin")
    assert [(key, info.hash) for key, info in same.tensors.items()] == [(key, info.hash) for key, info in alone.tensors.items()]
    bits = embedding.astype(np.float16).view(np.uint16).astype(np.uint32) << 16
    for wrong, words in ((("F16", embedding[:-1]), "[36, 16]"), (("F16", embedding[:, :-1]), "[37, 15]"), (("U8", np.ones((37, 16))), "U8")):
        refuse(ck.write_checkpoint(directory, config, weights | {name: wrong}), "model.safetensors", words)
    for other in (("BF16", bits.view(np.float32)), ("F16", embedding + 1)):
        done = ck.run_script("convert_hf.py", ck.write_checkpoint(directory, config, weights | {name: other}), "-o", tmp_path / "other.bin")
        assert done.returncode == 0 and "differs from" in done.stderr, done.stderr
        head = tensor_file.read(tmp_path / "other.bin").f32("lm_head.weight" if family == "llama" else "embed_out.weight")
        assert not np.array_equal(head, embedding)


def test_tied_gpt_neox_becomes_untied(tmp_path):  # B50: weft stores a head of its own for this family
    config = ck.GPT_NEOX | {"tie_word_embeddings": True}
    weights = ck.weights_of(config)
    embedding = weights["gpt_neox.embed_in.weight"]
    del weights["embed_out.weight"]
    directory = ck.write_checkpoint(tmp_path / "model", config, weights)
    file = ck.convert(directory, tmp_path / "a.bin")
    assert file.config["model"]["tied_embeddings"] is False
    assert np.array_equal(file.f32("embed_out.weight"), embedding)
    ck.write_checkpoint(directory, config, weights | {"embed_out.weight": embedding + 1})
    assert np.array_equal(ck.convert(directory, tmp_path / "b.bin").f32("embed_out.weight"), embedding + 1)


def test_gpt_neox_head_under_its_newer_name(tmp_path):
    weights = ck.weights_of(ck.GPT_NEOX)
    whole = ck.write_checkpoint(tmp_path / "old", ck.GPT_NEOX, weights)
    renamed = {("lm_head.weight" if name == "embed_out.weight" else name): value for name, value in weights.items()}
    newer = ck.write_checkpoint(tmp_path / "new", ck.GPT_NEOX, renamed)
    ck.convert(whole, tmp_path / "a.bin")
    ck.convert(newer, tmp_path / "b.bin")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    # Under both names: the published one counts, the other is no part of the model.
    both = weights | {"lm_head.weight": weights["embed_out.weight"] + 1}
    done = ck.run_script("convert_hf.py", ck.write_checkpoint(tmp_path / "both", ck.GPT_NEOX, both), "-o", tmp_path / "c.bin")
    assert done.returncode == 0 and "'lm_head.weight' is not part" in done.stderr, done.stderr
    a, c = (tensor_file.read(tmp_path / name) for name in ("a.bin", "c.bin"))
    assert [info.hash for info in c.tensors.values()] == [info.hash for info in a.tensors.values()]


# ---- config.json, generation_config.json, tokenizer.json -------------------------------------------------------------


HOSTILE_CONFIGS = {
    "absent": (None, ["config.json", "cannot be read"]),
    "empty": (b"", ["0 bytes"]),
    "web page": (b"<html>not found</html>", ["looks like a web page"]),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", ["git-lfs pointer"]),
    "array": (b"[1, 2]", ["config.json", "got a JSON array, expected an object"]),
    "not JSON": (b"{,}", ["not valid JSON"]),
    "not UTF-8": (b'{"a": "\xff"}', ["not UTF-8"]),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), ["UTF-16", "Save it again as UTF-8"]),
    "UTF-16 of other machines": (b"\xfe\xff\0{", ["UTF-16"]),
    "too deep": (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", ["nested deeper than 64"]),
    "far too deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["nested deeper"]),
    "huge": (b'{"a": "' + b"x" * (9 << 20) + b'"}', ["more than", "bytes"]),
}


@pytest.mark.parametrize("case", HOSTILE_CONFIGS)
def test_hostile_config_file(llama, case):
    data, words = HOSTILE_CONFIGS[case]
    path = llama / "config.json"
    path.unlink() if data is None else path.write_bytes(data)
    refuse(llama, *words)


def test_theta_must_be_named_by_someone(tmp_path):  # B44
    config = {key: value for key, value in ck.LLAMA.items() if key != "rope_theta"}
    weights = ck.weights_of(ck.LLAMA)
    directory = ck.write_checkpoint(tmp_path / "model", config, weights)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "default.bin")
    assert done.returncode == 0 and "rope_theta: absent, taken for 10000.0" in done.stderr
    assert tensor_file.read(tmp_path / "default.bin").config["model"]["rope"]["theta"] == 10000
    file = ck.convert(directory, tmp_path / "a.bin", "--rope-theta", "500000")
    assert file.config["model"]["rope"]["theta"] == 500000
    ck.write_checkpoint(directory, ck.LLAMA, weights)
    refuse(directory, "10000", "500000", "disagree", options=["--rope-theta", "500000"])


def test_tokenizer_travels_with_the_model(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(30))
    text = (directory / "tokenizer.json").read_bytes()
    file = ck.convert(directory, tmp_path / "a.bin")
    assert file.at("tokenizer.json").dtype == "u8" and bytes(file.bytes("tokenizer.json")) == text
    assert file.config["model"]["tokenizer_vocab"] == 30
    (directory / "tokenizer.json").unlink()
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "b.bin")
    assert done.returncode == 0 and "warning" in done.stderr and "tokenizer.json" in done.stderr
    file = tensor_file.read(tmp_path / "b.bin")
    assert "tokenizer.json" not in file.tensors and file.config["model"]["tokenizer_vocab"] == 37


def test_a_tokenizer_that_the_programs_refuse_is_refused(tmp_path):
    tokenizer = ck.tokenizer_of(30)
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=tokenizer)
    for change, words in (({"normalizer": {"type": "Lowercase"}}, ("normalizer.type", "'Lowercase'")),
                          ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, ("pre_tokenizer.type", "'BertPreTokenizer'")),
                          ({"decoder": {"type": "WordPiece"}}, ("decoder.type", "'WordPiece'")),
                          ({"model": tokenizer["model"] | {"type": "Unigram"}}, ("model.type", "'Unigram'")),
                          ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": "x"}},
                           ("normalizer.pattern.String", "one character")),
                          ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "xy"}},
                           ("normalizer.content", "one character")),
                          ({"pre_tokenizer": {"type": "Metaspace", "replacement": "__"}},
                           ("pre_tokenizer.replacement", "one character")),
                          ({"decoder": {"type": "Sequence", "decoders": [
                              {"type": "Fuse"}, {"type": "Strip", "content": "", "start": 1, "stop": 0}]}},
                           ("decoder.decoders[1].content", "one character"))):
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer | change))
        refuse(directory, "tokenizer.json", *words)


def test_a_tokenizer_model_is_named_with_what_to_do(tmp_path):
    """A SentencePiece model in the place of tokenizer.json is refused; beside it, the model has no tokenizer and is told why."""
    pieces = b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02" * 5
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    (directory / "tokenizer.model").write_bytes(pieces)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "b.bin")
    assert done.returncode == 0 and "tokenizer.model beside it is a SentencePiece model. Take tokenizer.json" in done.stderr
    (directory / "tokenizer.json").write_bytes(pieces)
    refuse(directory, "tokenizer.json", "this is a SentencePiece model, expected tokenizer.json", "save_pretrained")


def test_tokenizer_larger_than_the_model(tmp_path):  # B82
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(38))
    refuse(directory, "tokenizer.json", "38", "37")
    ck.write_checkpoint(directory, ck.LLAMA, tokenizer=ck.tokenizer_of(37))
    ck.convert(directory, tmp_path / "a.bin")


def test_added_tokens_beyond_the_vocabulary_are_left_out(tmp_path):
    """A pad token, say, for which the embedding was not made longer: transformers runs the model as long as it does not occur."""
    def added(number, content):
        return {"id": number, "content": content, "special": True}

    document = ck.tokenizer_of(36)
    document["added_tokens"] += [added(36, "<a>"), added(37, "<x>"), added(38, "<pad>")]
    document["model"]["vocab"] |= {"<a>": 36, "<x>": 37}  # some tokenizers list them in both places
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=document)
    text = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + text)
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "a.bin")
    assert done.returncode == 0 and done.stderr.count("left out") == 2, done.stderr
    assert "'<x>' has the id 37" in done.stderr and "'<pad>' has the id 38" in done.stderr
    file = tensor_file.read(tmp_path / "a.bin")
    kept = json.loads(bytes(file.bytes("tokenizer.json")))
    assert file.config["model"]["tokenizer_vocab"] == 37
    assert [token["id"] for token in kept["added_tokens"]] == [0, 36] and "<x>" not in kept["model"]["vocab"]
    assert kept["model"]["merges"] == document["model"]["merges"] and kept["decoder"] == document["decoder"]
    document["model"]["vocab"]["y"] = 38  # no added token: a text could have it
    document["added_tokens"].pop()
    ck.write_checkpoint(directory, ck.LLAMA, tokenizer=document)
    refuse(directory, "tokenizer.json", "39 tokens", "vocab_size = 37", "'y' is no added token")


def test_json_files_may_begin_with_a_byte_order_mark(llama, tmp_path):
    """As editors on Windows write them; an export has none, for transformers does not read it."""
    whole = ck.convert(ck.write_checkpoint(tmp_path / "plain", ck.LLAMA, tokenizer=ck.tokenizer_of(30)), tmp_path / "plain.bin")
    directory = ck.write_checkpoint(tmp_path / "marked", ck.LLAMA, tokenizer=ck.tokenizer_of(30))
    ck.write_shards(directory, split_weights(ck.LLAMA))
    (directory / "generation_config.json").write_text("{}")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"):
        (directory / name).write_bytes(b"\xef\xbb\xbf" + (directory / name).read_bytes())
    file = ck.convert(directory, tmp_path / "marked.bin")
    assert file.config == whole.config
    assert [info.hash for info in file.tensors.values()] == [info.hash for info in whole.tensors.values()]


def test_tokenizer_longer_than_the_programs_read(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(37))
    with open(directory / "tokenizer.json", "ab") as file:
        file.write(b" " * 100_000_000)
    refuse(directory, "tokenizer.json", "more than 100000000 bytes")


def test_generation_config_names_the_stop_ids(tmp_path):  # B51
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6, 5], "bos_token_id": None}))
    model = ck.convert(directory, tmp_path / "a.bin").config["model"]
    assert model["eos_ids"] == [5, 6] and model["bos_id"] == 1
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    done = ck.run_script("convert_hf.py", directory, "-o", tmp_path / "b.bin")
    assert done.returncode == 0 and "generation_config.json': eos_token_id: got 99, left out" in done.stderr
    assert tensor_file.read(tmp_path / "b.bin").config["model"]["eos_ids"] == []


# ---- command line ----------------------------------------------------------------------------------------------------


def test_usage_errors(llama, tmp_path):
    for options, words in (
            ([llama], ["-o"]), ([llama, "-o", tmp_path / "x", "--dtype", "fp8"], ["--dtype", "invalid choice: 'fp8'", "bf16"]),
            ([llama, "-o", tmp_path / "x", "--rope-theta", "-1"], ["--rope-theta", "-1"]),
            ([llama, "-o", tmp_path / "x", "--rope-theta", "nan"], ["--rope-theta"]),
            ([llama, "-o", tmp_path / "x", "--rope-theta", "1e400"], ["--rope-theta"]),
            ([llama, "-o", tmp_path / "x", "--stric"], ["--stric"]), ([llama, "-o", tmp_path], ["directory"])):
        ck.assert_refused(ck.run_script("convert_hf.py", *options), 2, *words)
    absent = ck.run_script("convert_hf.py", tmp_path / "nothing", "-o", tmp_path / "x")
    ck.assert_refused(absent, 3, "no such directory")
    ck.assert_refused(ck.run_script("convert_hf.py", llama, "-o", tmp_path / "no" / "x"), 4, "cannot create")


def test_paths_with_spaces_and_escapes(tmp_path):
    directory = ck.write_checkpoint(tmp_path / "a model", ck.LLAMA)
    ck.convert(directory, tmp_path / "out file.bin")
    strange = ck.write_checkpoint(tmp_path / "line\nbreak\x1b[31m", ck.LLAMA)
    (strange / "model.safetensors").write_bytes(b"")
    ck.assert_refused(ck.run_script("convert_hf.py", strange, "-o", tmp_path / "x.bin"), 3, "\\x0a", "\\x1b")


def test_summary_and_next_command(llama, tmp_path):
    done = ck.run_script("convert_hf.py", llama, "-o", tmp_path / "a.bin")
    assert "llama" in done.stdout and "--prompt-ids 1,2,3" in done.stdout, "there is no tokenizer to make shards with"
    assert "%" not in done.stderr
    neox = ck.write_checkpoint(tmp_path / "neox", ck.GPT_NEOX)
    done = ck.run_script("convert_hf.py", neox, "-o", tmp_path / "b.bin")
    assert "./infer_pythia --model" in done.stdout and "5,136" in done.stdout


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_line_that_is_written_again(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    progress = cli.Progress("converting", 800)
    for amount in (100, 3, 4, 93, 600):  # 12.5, 12.9, 13.4, 25 and 100 %
        progress.advance(amount)
    assert terminal.getvalue() == "".join(f"\rconverting {percent:3d}%" for percent in (12, 13, 25, 100))
    progress.finish()
    assert terminal.getvalue().endswith("100%\r" + " " * len("converting 100%") + "\r")
    cli.Progress("nothing to do", 0).advance(0)
    assert terminal.getvalue().endswith("\rnothing to do   0%")
    monkeypatch.setattr("sys.stderr", silent := io.StringIO())
    cli.Progress("converting", 800).advance(800)
    assert silent.getvalue() == ""


def test_full_disk_is_exit_5(llama, tmp_path):
    def small_files():  # writing past 8 KB then fails as a full disk does
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    done = ck.run_program("convert_hf.py", llama, "-o", tmp_path / "a.bin", preexec_fn=small_files)
    ck.assert_refused(done, 5, "a.bin", output=tmp_path / "a.bin")


@pytest.mark.parametrize("spelled", ["{}", "{}/../model", "model", "link"])
def test_no_input_is_overwritten_however_it_is_spelled(tmp_path, monkeypatch, spelled):
    """Each file beside the input stays what it was; an earlier result may stand there and go."""
    model = ck.write_checkpoint(tmp_path / "model", ck.LLAMA, tokenizer=ck.tokenizer_of(9))
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    ck.convert(model, model / "result.bin")
    other = spelled.format(model)
    for source, target in ((model, other), (other, model)):
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            before = (model / name).read_bytes()
            ck.assert_refused(ck.run_script("convert_hf.py", source, "-o", f"{target}/{name}"), 2, "one of the input files")
            assert (model / name).read_bytes() == before
        ck.convert(source, f"{target}/result.bin")


def test_programs_run_on_their_own(llama, tmp_path):
    """From another directory, as processes: success, a bad file, a usage error."""
    done = ck.run_program("convert_hf.py", llama, "-o", tmp_path / "a.bin", cwd="/")
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert ck.run_program("export_hf.py", tmp_path / "a.bin", "-o", tmp_path / "exported").returncode == 0
    (llama / "model.safetensors").write_bytes(HOSTILE_FILES["B12 deep"][0])
    ck.assert_refused(ck.run_program("convert_hf.py", llama, "-o", tmp_path / "b.bin"), 3, "deeper",
                      output=tmp_path / "b.bin")
    ck.assert_refused(ck.run_program("export_hf.py", "--force"), 2, "FILE")


# ---- what every script shares ----------------------------------------------------------------------------------------


def test_warnings_up_to_the_limit_are_all_shown(capsys):
    for count in (0, cli.MAX_WARNINGS - 1, cli.MAX_WARNINGS, cli.MAX_WARNINGS + 1):
        warnings = cli.Warnings()
        for number in range(count):
            warnings.add(f"w{number}")
        warnings.finish()
        lines = [f"warning: w{number}" for number in range(min(count, cli.MAX_WARNINGS))]
        assert capsys.readouterr().err.splitlines() == lines + ["warning: ... and 1 more"] * (count > cli.MAX_WARNINGS)


@pytest.mark.parametrize("stop, code, words", [
    (KeyboardInterrupt(), 130, "error: interrupted\n"), (MemoryError(), 5, "error: out of memory\n"),
    (tensor_file.FileError(cli.USAGE, "--x: wrong"), 2, "error: --x: wrong\n"), (tensor_file.FileError(3, "a: bad"), 3, "error: a: bad\n"),
    (OSError(errno.EIO, "Input/output error"), 4, "error: '': Input/output error\n"),
    (OSError("no number\x1b"), 4, "error: '': 'no number\\x1b'\n")],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "")
def test_every_end_of_a_script_has_its_code(capsys, stop, code, words):
    def main():
        raise stop

    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert (end.value.code, capsys.readouterr()) == (code, ("", words))
    for result, expected in ((None, 0), (0, 0), (1, 1), (3, 3)):
        with pytest.raises(SystemExit) as end:
            cli.run(lambda code=result: code)
        assert end.value.code == expected and capsys.readouterr() == ("", "")


RUN = "import sys; sys.path.insert(0, 'scripts'); import cli; cli.run(lambda: print('{}') or {})"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_no_error_and_that_of_a_full_disk_is(unbuffered):
    """However much of it waits for the end of the script: Python's own attempt as it exits has a code and lines of its own."""
    reader, writer = os.pipe()
    os.close(reader)
    full = "error: '': No space left on device\n"
    for target, result, code, words in ((writer, 0, 0, ""), (os.open("/dev/full", os.O_WRONLY), 0, 5, full),
                                        (os.open("/dev/full", os.O_WRONLY), "cli.bad_file('a', 'b', 'c')", 3, "error: 'a': b: c\n")):
        with open(target, "wb") as out:
            done = subprocess.run([sys.executable, "-c", RUN.format("x", result)], stdout=out, stderr=subprocess.PIPE, text=True,
                                  cwd=ck.ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
        assert (done.returncode, done.stderr) == ((5, full) if unbuffered and code == 3 else (code, words))


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_on_a_full_disk_is_an_error(unbuffered):
    with open("/dev/full", "wb") as out:
        done = subprocess.run([sys.executable, "scripts/convert_hf.py", "--help"], stdout=out, stderr=subprocess.PIPE, text=True,
                              cwd=ck.ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (5, "error: '': No space left on device\n")


def test_letters_that_the_locale_lacks_are_printed_escaped():
    done = subprocess.run([sys.executable, "-c", RUN.format("\\u00e9", 0)], capture_output=True, cwd=ck.ROOT,
                          env=os.environ | {"PYTHONIOENCODING": "ascii:strict"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9\n", b"")


def test_numbers_of_options_at_their_limits():
    for low, high, kind, good, bad in ((0, 5, int, ("0", "5", " 3 "), ("-1", "6", "2.0", "", "x", "nan", "1e0")),
                                       (0.5, 2, float, ("0.5", "2", "1e0"), ("0.49", "2.01", "nan", "inf", "-inf", "x", ""))):
        convert = cli.number_in(low, high, kind)
        for text in good:
            assert convert(text) == kind(text) and type(convert(text)) is kind
        for text in bad:
            name = "an integer" if kind is int else "a number"
            with pytest.raises(cli.argparse.ArgumentTypeError, match=f"^got '{text}', expected {name} from {low:g} to {high:g}$"):
                convert(text)


def test_files_are_read_up_to_their_limit_and_only_if_they_are_files(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert cli.read_bytes(path, 5) == cli.read_bytes(path, 6) == b"12345"
    with pytest.raises(tensor_file.FileError, match="got more than 4 bytes"):
        cli.read_bytes(path, 4)
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(cli.os, "open", lambda path, flags, real=os.open: real(path, flags)
                        if flags & os.O_NONBLOCK else pytest.fail("of a FIFO this waits for a writer"))
    for place, words in ((tmp_path / "fifo", "not a regular file"), ("/dev/null", "not a regular file"), (tmp_path, "not a regular file|cannot be read"),
                         (path / "x", "cannot be read: Not a directory")):
        with pytest.raises(tensor_file.FileError, match=words) as failure:
            cli.read_bytes(place, 5)
        assert failure.value.code == cli.BAD_FILE


def test_json_at_its_limits():
    for depth, form in ((64, '{"a":%s}'), (64, "[%s]")):
        text = form.replace("%s", "1")
        for _ in range(depth - 1):
            text = form % text
        cli.parse_json(text.encode(), "x")
        with pytest.raises(tensor_file.FileError, match="nested deeper than 64 levels"):
            cli.parse_json((form % text).encode(), "x")
    cli.parse_json(b'[{}, {"a": {}}]', "x", max_objects=3)
    with pytest.raises(cli.TooManyObjects):
        cli.parse_json(b'[{}, {"a": {}}]', "x", max_objects=2)
    for text in (b'\n {"a": 1}', b'{"<html>": 1}'):
        assert len(cli.parse_json_object(text, "x")) == 1
    for value, name in (({}, "object"), ([], "array"), ("", "string"), (True, "boolean"), (1, "integer"), (1.0, "number"), (None, "null")):
        assert cli.json_type(value) == name


# ---- what is converted, the programs read ----------------------------------------------------------------------------


def nested(depth):
    value = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def runs(path):
    program = ck.ROOT / "infer_pythia"
    if not program.exists():
        pytest.skip("infer_pythia is not built")
    done = subprocess.run([program, "--model", path, "--prompt-ids", "1,2", "--max-tokens", "1", "--device", "cpu"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_config_as_deep_as_a_model_file_can_hold(tmp_path):
    """config.json is an object within the file's configuration: one level of 64 is taken."""
    model = ck.write_checkpoint(tmp_path / "model", ck.GPT_NEOX | {"extra": nested(62)})
    ck.convert(model, tmp_path / "a.bin")
    runs(tmp_path / "a.bin")
    (model / "config.json").write_text(json.dumps(ck.GPT_NEOX | {"extra": nested(63)}))
    (model / "model.safetensors").unlink()  # it is refused before the weights are looked for
    refuse(model, "config.json", "got JSON nested 64 levels deep, expected at most 63")


@pytest.mark.parametrize("number, accepted", [("9" * 308, True), ("1" + "0" * 308, True), ("2" + "0" * 308, False),
                                              ("-2" + "0" * 308, False), ("1" + "0" * 400, False), ("-" + "9" * 400, False),
                                              ("9" * 5000, False), (str(2**64), True), ("1e308", True)],
                         ids=["308 digits", "10^308", "2*10^308", "-2*10^308", "401 digits", "minus", "5000 digits", "2^64", "1e308"])
def test_numbers_that_the_programs_cannot_read(tmp_path, number, accepted):
    model = ck.write_checkpoint(tmp_path / "model", ck.GPT_NEOX)
    (model / "config.json").write_text(json.dumps(ck.GPT_NEOX | {"extra": 12345678}).replace("12345678", number))
    if accepted:
        ck.convert(model, tmp_path / "a.bin")
        runs(tmp_path / "a.bin")
    else:
        refuse(model, "config.json", "is out of range")


def test_a_config_of_more_values_than_a_model_file_can_hold(tmp_path):
    model = ck.write_checkpoint(tmp_path / "model", ck.GPT_NEOX | {"extra": []})
    room = 1_000_000 - cli.json_extent(convert_hf.file_configuration(hf_config.read_checkpoint(model), model, convert_hf.Target()))[1]
    (model / "config.json").write_text(json.dumps(ck.GPT_NEOX | {"extra": [0] * room}))
    ck.convert(model, tmp_path / "a.bin")
    runs(tmp_path / "a.bin")
    (model / "config.json").write_text(json.dumps(ck.GPT_NEOX | {"extra": [0] * (room + 1)}))
    refuse(model, "config.json", "got 1000001 JSON values, expected at most 1000000")


@pytest.mark.parametrize("value", ["0", "[]", '{"":0}'])
def test_many_small_values_cost_nothing(value):
    """100 MB of them would take gigabytes: refused before memory is taken."""
    data = b'{"model":[' + b",".join([value.encode()] * 11_000_000) + b"]}"
    tracemalloc.start()
    with pytest.raises(tensor_file.FileError, match="more than 5000000 JSON values"):
        cli.parse_json(data, "tokenizer.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_values_are_counted_exactly(monkeypatch):
    monkeypatch.setattr(cli, "MAX_JSON_VALUES", 5)
    assert cli.parse_json(b'{"a": [1, "commas, too"], "b": null}', "x") == {"a": [1, "commas, too"], "b": None}
    with pytest.raises(tensor_file.FileError, match="more than 5 JSON values"):
        cli.parse_json(b'{"a": [1, 2, 3, 4]}', "x")


def test_a_config_that_grows_when_its_numbers_are_written_out(llama):
    text = json.dumps(ck.LLAMA)
    (llama / "config.json").write_text(text[:-1] + ', "extra": [' + ",".join(["1e15"] * 1_000_000) + "]}")
    refuse(llama, "config.json", "bytes with every number written out, expected at most 16777216")


def test_a_config_of_exactly_the_bytes_that_a_model_file_can_hold(llama, monkeypatch):
    checkpoint, target = hf_config.read_checkpoint(llama), convert_hf.Target()
    size = len(tensor_file.configuration_text(convert_hf.file_configuration(checkpoint, llama, target)))
    monkeypatch.setattr(convert_hf, "MAX_CONFIG_BYTES", size)
    convert_hf.file_configuration(checkpoint, llama, target)
    monkeypatch.setattr(convert_hf, "MAX_CONFIG_BYTES", size - 1)
    with pytest.raises(tensor_file.FileError, match=f"got {size} bytes with every number written out, expected at most {size - 1}"):
        convert_hf.file_configuration(checkpoint, llama, target)
