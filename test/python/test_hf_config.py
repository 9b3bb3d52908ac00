"""hf_config.py: configs of transformers 4 and 5, the published sizes, what is refused (B35 to B51, B74 to B82)."""

import dataclasses
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

SOURCE = pathlib.Path("model") / "config.json"


def parse(config, **options):
    return hf_config.parse_config(config, SOURCE, **options)


def refused(config, *words, **options):
    with pytest.raises(tensor_file.FileError) as failure:
        parse(config, **options)
    assert failure.value.code == cli.BAD_FILE
    for word in ("config.json", *words):
        assert word in str(failure.value), str(failure.value)
    return str(failure.value)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


# ---- the published sizes ---------------------------------------------------------------------------------------------

# layers, hidden, heads, rotary dimensions, vocabulary rows, parameters
PYTHIA = {
    "14m": (6, 128, 4, 8, 50304, 14_067_712), "31m": (6, 256, 8, 8, 50304, 30_494_720),
    "70m": (6, 512, 8, 16, 50304, 70_426_624), "160m": (12, 768, 12, 16, 50304, 162_322_944),
    "410m": (24, 1024, 16, 16, 50304, 405_334_016), "1b": (16, 2048, 8, 64, 50304, 1_011_781_632),
    "1.4b": (24, 2048, 16, 32, 50304, 1_414_647_808), "2.8b": (32, 2560, 32, 20, 50304, 2_775_208_960),
    "6.9b": (32, 4096, 32, 32, 50432, 6_857_302_016), "12b": (36, 5120, 40, 32, 50688, 11_846_072_320),
}
# layers, hidden, heads, K/V heads, FFN, vocabulary, tied, theta, scaling factor, positions, parameters
LLAMA = {
    "3.2-1b": (16, 2048, 32, 8, 8192, 128256, True, 500000.0, 32, 131072, 1_235_814_400),
    "3.2-3b": (28, 3072, 24, 8, 8192, 128256, True, 500000.0, 32, 131072, 3_212_749_824),
    "3.1-8b": (32, 4096, 32, 8, 14336, 128256, False, 500000.0, 8, 131072, 8_030_261_248),
    "2-7b": (32, 4096, 32, 32, 11008, 32000, False, 10000.0, 0, 4096, 6_738_415_616),
    "tiny-1.1b": (22, 2048, 32, 4, 5632, 32000, False, 10000.0, 0, 2048, 1_100_048_384),
    "smollm2-135m": (30, 576, 9, 3, 1536, 49152, True, 100000.0, 0, 8192, 134_515_008),
}


def scaling_of(factor):
    return {"rope_type": "llama3", "factor": float(factor), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_sizes(size):
    layers, hidden, heads, rotary, vocab, parameters = PYTHIA[size]
    config = ck.GPT_NEOX | {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
                            "intermediate_size": 4 * hidden, "vocab_size": vocab, "max_position_embeddings": 2048,
                            "torch_dtype": "float16", "rotary_pct": 0.25}
    model = parse(config, tokenizer_vocab=50277)
    assert hf_config.parameter_count(model) == parameters
    assert parameters == layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + 2 * vocab * hidden
    assert (model.rope.rotary_dim, model.head_dim, model.num_kv_heads) == (rotary, hidden // heads, heads)
    assert model.tokenizer_vocab == 50277 and model.vocab_size == vocab and not model.tied_embeddings
    newer = without(config, "rotary_pct", "rotary_emb_base", "torch_dtype") | {
        "dtype": "float16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}}
    assert parse(newer, tokenizer_vocab=50277) == model


@pytest.mark.parametrize("size", LLAMA)
def test_llama_sizes(size):
    layers, hidden, heads, kv_heads, ffn, vocab, tied, theta, factor, positions, parameters = LLAMA[size]
    config = ck.LLAMA | {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
                         "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
                         "tie_word_embeddings": tied, "rope_theta": theta, "max_position_embeddings": positions,
                         "rope_scaling": scaling_of(factor) if factor else None}
    model = parse(config)
    assert hf_config.parameter_count(model) == parameters
    assert model.rope == hf_config.Rope(*(("llama3", theta, hidden // heads, factor, 1, 4, 8192) if factor else
                                          ("standard", theta, hidden // heads, 1, 1, 1, 0)))
    scaling = scaling_of(factor) if factor else {"rope_type": "default"}
    newer = without(config, "rope_theta", "rope_scaling") | {"rope_parameters": scaling | {"rope_theta": theta}}
    assert parse(newer) == model


def test_names_and_order_of_the_tensors():
    names = list(hf_config.expected_tensors(parse(ck.LLAMA)))
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert names[1:10] == [f"model.layers.0.{part}.weight" for part in (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    names = list(hf_config.expected_tensors(parse(ck.GPT_NEOX | {"attention_bias": False})))
    assert names[1:11] == ["gpt_neox.layers.0." + part for part in (
        "input_layernorm.weight", "input_layernorm.bias", "post_attention_layernorm.weight",
        "post_attention_layernorm.bias", "attention.query_key_value.weight", "attention.dense.weight",
        "mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias")]
    assert len(names) == 1 + 2 * 10 + 2 + 1


def test_buffers_that_are_no_parameters():
    for name in ("gpt_neox.layers.3.attention.rotary_emb.inv_freq", "gpt_neox.layers.0.attention.bias",
                 "gpt_neox.layers.0.attention.masked_bias", "model.layers.1.self_attn.rotary_emb.inv_freq",
                 "rotary_emb.inv_freq"):
        assert hf_config.is_ignorable_buffer(name)
    for name in ("gpt_neox.layers.0.attention.dense.bias", "model.norm.weight", "xattention.bias", "attention.bias.x"):
        assert not hf_config.is_ignorable_buffer(name)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ck.CONFIGS)
def test_every_needed_key_is_missed(family):  # B35
    needed = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    for key in ck.CONFIGS[family]:
        for config in (without(ck.CONFIGS[family], key), ck.CONFIGS[family] | {key: None}):
            if key in needed:
                refused(config, key, "got nothing")
            else:
                parse(config)


@pytest.mark.parametrize("family", ck.CONFIGS)
def test_every_wrong_type_is_refused(family):  # B36
    for key, value in ck.CONFIGS[family].items():
        if key in ("architectures", "eos_token_id", "bos_token_id"):
            continue
        for wrong in (["4096"], {"a": 1}, "4096", 5 if isinstance(value, (str, bool)) else True):
            refused(ck.CONFIGS[family] | {key: wrong}, key)


def test_sizes_out_of_range():  # B37, B48, B49
    for key, values in {
            "num_attention_heads": (0, -4, 2000, 3), "num_hidden_layers": (0, 2**31, 1025), "hidden_size": (0, 2**40),
            "vocab_size": (0, 10**9, 10**30), "intermediate_size": (0, 2**21), "num_key_value_heads": (0, 5, -1),
            "max_position_embeddings": (0, 2**32), "head_dim": (0, 1, 5000), "rms_norm_eps": (0, -1e-5),
            "rope_theta": (0, -1)}.items():
        for value in values:
            refused(ck.LLAMA | {key: value}, str(value) if key != "num_attention_heads" else "")


# key: family, least and greatest value, what it takes beside it
LIMITS = {
    "vocab_size": ("llama", 1, 1_000_000, {}), "hidden_size": ("llama", 1, 1 << 20, {"head_dim": 4}),
    "num_hidden_layers": ("llama", 1, 1024, {}), "num_attention_heads": ("llama", 1, 1024, {"num_key_value_heads": None, "head_dim": 4}),
    "num_key_value_heads": ("llama", 1, 4, {}), "head_dim": ("llama", 2, 1024, {}), "intermediate_size": ("llama", 1, 1 << 20, {}),
    "max_position_embeddings": ("gpt_neox", 1, 1 << 24, {}),
}


@pytest.mark.parametrize("key", LIMITS)
def test_sizes_at_their_limits(key):
    family, low, high, beside = LIMITS[key]
    config = ck.CONFIGS[family] | {"bos_token_id": None, "eos_token_id": None} | beside
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
             "intermediate_size": "ffn_size", "max_position_embeddings": "max_positions"}
    for value in (low, high):
        assert getattr(parse(config | {key: value}), names.get(key, key)) == value
    for value in (low - 1, high + 1):
        refused(config | {key: value}, key, f"got integer {value}, expected an integer from {low} to {high}")


def test_sizes_of_heads_that_follow_from_others_have_the_same_limits():
    for config in (ck.LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1}, ck.GPT_NEOX | {"num_attention_heads": 1, "rotary_pct": 1.0}):
        for size in (2, 1024):
            assert parse(config | {"hidden_size": size}).head_dim == size
        for size in (1, 1025, 1026):
            refused(config | {"hidden_size": size}, f"num_attention_heads: got 1, which makes heads of {size}, expected from 2 to 1024")
    assert parse(ck.GPT_NEOX | {"head_dim": 8}) == parse(ck.GPT_NEOX)


def test_positive_numbers_at_their_limits():
    for value in (1, 5e-324, 9.9e299):
        assert parse(ck.LLAMA | {"rms_norm_eps": value}).norm_eps == parse(ck.GPT_NEOX | {"layer_norm_eps": value}).norm_eps == value
    for value in (0, 0.0, 1e300, 10**301):
        refused(ck.LLAMA | {"rms_norm_eps": value}, "rms_norm_eps", "expected a number above 0")
        refused(ck.GPT_NEOX | {"layer_norm_eps": value}, "layer_norm_eps", "expected a number above 0")


def test_heads_that_do_not_divide():  # B38, B39
    refused(ck.LLAMA | {"hidden_size": 18}, "hidden_size", "18", "head_dim is absent")
    assert parse(ck.LLAMA | {"hidden_size": 18, "head_dim": 6}).head_dim == 6
    refused(ck.GPT_NEOX | {"hidden_size": 17}, "hidden_size", "17")
    refused(ck.GPT_NEOX | {"head_dim": 4}, "head_dim", "4")
    refused(ck.LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads", "3", "divisor")
    assert parse(without(ck.LLAMA, "num_key_value_heads")).num_kv_heads == 4


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def test_theta_has_no_silent_default():  # B44
    for family, key in (("llama", "rope_theta"), ("gpt_neox", "rotary_emb_base")):
        config = without(ck.CONFIGS[family], key)
        for absent in (config, config | {"rope_parameters": {"rope_type": "default"}}):
            warnings = []
            assert parse(absent, warn=warnings.append).rope.theta == 10000
            assert ["config.json" in warning and "rope_theta: absent" in warning for warning in warnings] == [True]
        assert parse(config, rope_theta=77.0).rope.theta == 77
        refused(ck.CONFIGS[family], "10000", "77", rope_theta=77.0)
        assert parse(ck.CONFIGS[family], rope_theta=10000.0) == parse(ck.CONFIGS[family])  # both say the same


def test_newer_keys_alone_are_enough():  # B45
    newer = without(ck.LLAMA, "rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert parse(newer) == parse(ck.LLAMA)
    for place in ({"rope_parameters": {"rope_theta": 10000, "partial_rotary_factor": 0.5, "rope_type": "default"}},
                  {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "partial_rotary_factor": 0.5},
                  {"rope_theta": 10000, "partial_rotary_factor": 0.5}, {"rotary_emb_base": 10000, "rotary_pct": 0.5}):
        assert parse(without(ck.GPT_NEOX, "rotary_pct", "rotary_emb_base") | place) == parse(
            ck.GPT_NEOX | {"rotary_pct": 0.5})


def test_old_and_new_keys_that_disagree():  # B46
    def new(**values):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | values}

    parse(ck.LLAMA | new())
    refused(ck.LLAMA | new(rope_theta=500000.0), "10000", "500000", "disagree")
    refused(ck.GPT_NEOX | {"rope_theta": 25000}, "10000", "25000")
    refused(ck.GPT_NEOX | new(partial_rotary_factor=0.5), "0.25", "0.5", "disagree")
    refused(ck.GPT_NEOX | {"partial_rotary_factor": 1.0}, "0.25", "1.0")
    refused(ck.LLAMA | new() | {"rope_scaling": scaling_of(8)}, "llama3", "default", "disagree")
    refused(ck.LLAMA | {"rope_scaling": scaling_of(8) | {"type": "default"}}, "llama3", "default")
    refused(ck.LLAMA | {"rope_scaling": scaling_of(8), **new(**scaling_of(32))}, "8.0", "32.0")
    refused(ck.LLAMA | {"rope_scaling": scaling_of(8), "original_max_position_embeddings": 4096}, "8192", "4096")


def places_of(key, value, *names):
    """The places of a value in a config: under each name at the top, and in rope_parameters and rope_scaling."""
    yield from ((name, value) for name in names)
    yield from ((outer, {key: value, "rope_type": "default"}) for outer in ("rope_parameters", "rope_scaling"))


@pytest.mark.parametrize("key, names, same, other", [
    ("rope_theta", ("rope_theta", "rotary_emb_base"), 10000.0, 20000.0),
    ("partial_rotary_factor", ("rotary_pct", "partial_rotary_factor"), 0.5, 0.25)])
def test_a_value_in_several_places_is_one_value(key, names, same, other):
    """Any number of places may agree, and any one of them may be the one that does not."""
    base = without(ck.GPT_NEOX, *names)
    agreeing, differing = (dict(places_of(key, value, *names)) for value in (same, other))
    want = parse(base | {names[0]: same})
    for count in range(2, len(agreeing) + 1):
        for chosen in itertools.combinations(agreeing, count):
            whole = base | {place: agreeing[place] for place in chosen}
            assert parse(whole) == want
            for place in chosen:
                refused(whole | {place: differing[place]}, f"{same:g}"[:4], f"{other:g}"[:4], "disagree")


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_type", "type"])
def test_scaling_in_two_places_is_one_scaling(key):
    both = {"rope_scaling": scaling_of(8) | {"type": "llama3"}, "rope_parameters": scaling_of(8) | {"type": "llama3"},
            "original_max_position_embeddings": 8192}
    assert parse(ck.LLAMA | both) == parse(ck.LLAMA | {"rope_scaling": scaling_of(8)})
    for place in ("rope_scaling", "rope_parameters"):
        value = "default" if key.endswith("type") else 2 * both[place][key]
        refused(ck.LLAMA | both | {place: both[place] | {key: value}}, key, "disagree")
    if key == "original_max_position_embeddings":
        refused(ck.LLAMA | both | {key: 4096}, key, "disagree")


@pytest.mark.parametrize("owner", ["rope_scaling", "rope_parameters", None])
def test_original_positions_in_any_place_and_at_their_limits(owner):
    """rope_scaling and rope_parameters may hold them, or config.json itself beside them."""
    key = "original_max_position_embeddings"
    for value, accepted in ((1, True), (1 << 24, True), (0, False), ((1 << 24) + 1, False)):
        scaling = {name: without(scaling_of(8), key) | ({key: value} if name == owner else {})
                   for name in ("rope_scaling", "rope_parameters") if name == owner or owner is None}
        config = ck.LLAMA | scaling | ({key: value} if owner is None else {})
        if accepted:
            assert parse(config).rope.original_max_positions == value
        else:
            refused(config, f"{owner}.{key}" if owner else key, f"got integer {value}, expected an integer from 1 to 16777216")


@pytest.mark.parametrize("owner", ["rope_scaling", "rope_parameters"])
def test_parameters_that_need_no_type_and_those_that_do(owner):
    config = without(ck.GPT_NEOX, "rotary_emb_base", "rotary_pct") | {"rope_theta": 10000, "rotary_pct": 0.25}
    for harmless in ({"rope_theta": 10000}, {"partial_rotary_factor": 0.25}, {"rope_theta": 10000, "partial_rotary_factor": 0.25}, {}):
        assert parse(config | {owner: harmless}) == parse(ck.GPT_NEOX)
        for given in ({"factor": 2.0}, {"low_freq_factor": None}):
            refused(config | {owner: harmless | given}, f"{owner}.rope_type", "got nothing, expected default, linear")
    for name in ("rope_type", "type"):
        assert parse(config | {owner: {name: "default", "factor": 2.0}}) == parse(ck.GPT_NEOX)


def test_rotary_dimensions():  # B47: heads of 8
    for fraction, rotary in ((0.25, 2), (0.5, 4), (1.0, 8), (1, 8), (0.3, 2)):
        assert parse(ck.GPT_NEOX | {"rotary_pct": fraction}).rope.rotary_dim == rotary
    for fraction, rotary in ((0.36, 2), (0.62, 4)):  # 2.88 and 4.96: truncated, as transformers does it
        assert parse(ck.GPT_NEOX | {"rotary_pct": fraction}).rope.rotary_dim == rotary
    refused(ck.GPT_NEOX | {"rotary_pct": 0.99}, "rotary_pct", "7")
    for fraction in (0.375, 0.1, 1.5, 0, -0.25, 1e300, 1e301):
        refused(ck.GPT_NEOX | {"rotary_pct": fraction}, "rotary_pct")
    refused(ck.LLAMA | {"head_dim": 5}, "head_dim", "5", "even")


# ---- token ids -------------------------------------------------------------------------------------------------------


def test_stop_ids():  # B51
    for value, ids in ((None, []), (3, [3]), ([3, 4, 3], [3, 4]), ([], [])):
        assert parse(ck.LLAMA | {"eos_token_id": value}).eos_ids == ids
    assert parse(ck.LLAMA | {"bos_token_id": None}).bos_id is None
    assert parse(ck.LLAMA, generation={"eos_token_id": [7, 8]}).eos_ids == [7, 8]
    assert parse(ck.LLAMA, generation={"bos_token_id": 9}).bos_id == 9
    for wrong in ("2", [1, "2"], [True], 1.5, list(range(30)) * 3):
        refused(ck.LLAMA | {"eos_token_id": wrong}, "eos_token_id")
    for wrong in ("2", [1]):
        refused(ck.LLAMA | {"bos_token_id": wrong}, "bos_token_id")


def test_ids_at_the_end_of_the_vocabulary_and_of_their_list():
    many = [index % 37 for index in range(64)]
    assert parse(ck.LLAMA | {"eos_token_id": many}).eos_ids == list(range(37))
    refused(ck.LLAMA | {"eos_token_id": [*many, 0]}, "eos_token_id: got 65 ids, expected at most 64")
    for key, field in (("eos_token_id", "eos_ids"), ("bos_token_id", "bos_id")):
        for number in (0, 36):
            want = [number] if key == "eos_token_id" else number
            assert getattr(parse(ck.LLAMA | {key: number}), field) == want
            assert getattr(parse(ck.LLAMA, generation={key: number}), field) == want, "0 is an id"
        for wrong in (True, 2.0):
            refused(ck.LLAMA | {key: wrong}, f"config.json': {key}", "expected a token id")
            refused(ck.LLAMA, f"generation_config.json': {key}", "expected a token id", generation={key: wrong})
        for beyond in (37, -1):  # no model makes it, so it changes nothing
            warnings, want = [], [] if key == "eos_token_id" else None
            assert getattr(parse(ck.LLAMA | {key: beyond}, warn=warnings.append), field) == want
            assert getattr(parse(ck.LLAMA, generation={key: beyond}, warn=warnings.append), field) == want
            for file, warning in zip(("config.json", "generation_config.json"), warnings, strict=True):
                assert f"{file}': {key}: got {beyond}, left out" in warning
    assert parse(ck.LLAMA, generation={"eos_token_id": []}).eos_ids == [], "it says that there is none"
    assert parse(ck.LLAMA | {"eos_token_id": [1, 37, 2]}).eos_ids == [1, 2]


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


# ---- sizes that nobody tried -----------------------------------------------------------------------------------------


def random_config(random):
    """A valid configuration of either family, in the style of transformers 4, 5 or both; and its rope in the other."""
    llama = bool(random.integers(2))
    heads = int(random.integers(1, 17))
    head_dim = 2 * int(random.integers(4, 65))
    hidden = int(random.integers(1, 300)) if llama else heads * head_dim
    theta = float(random.choice([10000.0, 500000.0, 1234.5]))
    config = (ck.LLAMA if llama else ck.GPT_NEOX) | {
        "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": int(random.integers(1, 9)),
        "intermediate_size": int(random.integers(1, 500)), "vocab_size": int(random.integers(3, 5000)),
        "tie_word_embeddings": bool(random.integers(2)), "eos_token_id": None, "bos_token_id": None}
    old, new = {}, {"rope_type": "default", "rope_theta": theta}
    if llama:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        config |= {"head_dim": head_dim, "num_key_value_heads": int(random.choice(divisors))}
        old = {"rope_theta": theta}
        if random.integers(2):
            old["rope_scaling"] = scaling_of(random.integers(2, 40))
            new = old["rope_scaling"] | {"rope_theta": theta}
    else:
        rotary = 2 * int(random.integers(1, head_dim // 2 + 1))
        fraction = hf_config.rotary_fraction(rotary, head_dim)
        assert int(head_dim * fraction) == rotary
        config |= {"use_parallel_residual": bool(random.integers(2)), "attention_bias": bool(random.integers(2))}
        old = {"rotary_emb_base": theta, "rotary_pct": fraction}
        new["partial_rotary_factor"] = fraction
    config = without(config, "rope_theta", "rotary_emb_base", "rotary_pct")
    return config | old, config | {"rope_parameters": new}, config | old | {"rope_parameters": new}


def closed_form(model):
    """Parameters of a model by its sizes, independent of the tensor table."""
    hidden, ffn, layers = model.hidden_size, model.ffn_size, model.num_layers
    if model.family == "llama":
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        layer = 2 * hidden * (q + kv) + 3 * hidden * ffn + 2 * hidden
        return layers * layer + hidden + model.vocab_size * hidden * (1 if model.tied_embeddings else 2)
    bias = 4 * hidden if model.attention_bias else 0
    layer = 4 * hidden**2 + bias + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return layers * layer + 2 * hidden + 2 * model.vocab_size * hidden


def test_random_sizes_survive_every_style():
    random = np.random.default_rng(20)
    for _ in range(300):
        old, new, both = random_config(random)
        model = parse(old)
        assert parse(new) == model and parse(both) == model
        assert hf_config.parameter_count(model) == closed_form(model)
        exported = hf_config.export_config(model, old, "float32")
        assert parse(exported) == model
        assert parse(hf_config.export_config(model, None, "float32")) == model
        assert hf_config.model_from_json(json.loads(json.dumps(model.to_json())), "file") == model


# ---- back from a tensor file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, words", [
    ({"family": "gpt2"}, "got family 'gpt2'"), ({"rope": {"type": "longrope"}}, "rope 'longrope'"), ({"rope": {"theta": None}}, "rope_theta"),
    ({"norm": "layernorm"}, "model.norm: got 'layernorm', expected 'rmsnorm'"), ({"norm_eps": "1"}, "rms_norm_eps"),
    ({"attention_bias": 1}, "attention_bias"), ({"activation": "gelu"}, "hidden_act"), ({"parallel_residual": True}, "which no Hugging Face configuration describes"),
    ({"rope": {"rotary_dim": 2}}, "which no Hugging Face configuration describes"), ({"bos_id": 37}, "bos_token_id"),
    ({"eos_ids": [2, 37]}, "eos_token_id"),
    ({"tokenizer_vocab": 0}, "model.tokenizer_vocab: got integer 0, expected an integer from 1 to 37"),
    ({"tokenizer_vocab": 38}, "model.tokenizer_vocab: got integer 38, expected an integer from 1 to 37"),
    ({"tokenizer_vocab": True}, "tokenizer_vocab")])
def test_models_that_no_config_describes(changes, words):
    value = parse(ck.LLAMA).to_json()
    for key, change in changes.items():
        value[key] = value[key] | change if isinstance(change, dict) else change
    with pytest.raises(tensor_file.FileError) as failure:
        hf_config.model_from_json(value, "file")
    assert failure.value.code == cli.BAD_FILE and words in str(failure.value), str(failure.value)


def test_every_key_of_a_model_is_needed():
    whole = parse(ck.LLAMA, tokenizer_vocab=37).to_json()
    assert hf_config.model_from_json(whole, "file") == parse(ck.LLAMA)
    assert hf_config.model_from_json(whole | {"tokenizer_vocab": 1, "extra": 1}, "file").tokenizer_vocab == 1
    newer = {"mlp_bias", "activation", "beta_fast", "beta_slow", "truncate", "attention_factor"}  # younger than the format
    older = without(whole, *newer) | {"rope": without(whole["rope"], *newer)}
    assert hf_config.model_from_json(older, "file") == parse(ck.LLAMA)
    bad = [without(whole, key) for key in whole if key not in newer]
    bad += [whole | {"rope": without(whole["rope"], key)} for key in whole["rope"] if key not in newer]
    for value in (*bad, None, [], "model", whole | {"rope": None}):
        with pytest.raises(tensor_file.FileError, match="model: keys are missing") as failure:
            hf_config.model_from_json(value, "file")
        assert failure.value.code == cli.BAD_FILE


@pytest.mark.parametrize("family", ck.CONFIGS)
def test_what_an_export_keeps_of_the_original_and_what_it_does_not(family):
    """The model's own keys win; stale ones that would change it go; the others stay."""
    model = parse(ck.CONFIGS[family])
    alone = hf_config.export_config(model, None, "bfloat16")
    stale = {key: "stale" for key in alone} | {"rope_scaling": {"factor": 2.0}, "quantization_config": {"bits": 4}, "head_dim": 64,
                                               "original_max_position_embeddings": 5, "rotary_pct": 0.5, "rotary_emb_base": 3,
                                               "partial_rotary_factor": 0.5}
    assert hf_config.export_config(model, stale | {"some_key": [1]}, "bfloat16") == alone | {"some_key": [1]}
    assert parse(alone) == model and alone["dtype"] == alone["torch_dtype"] == "bfloat16"
    for ids, written in (([], None), ([0], 0), ([5], 5), ([5, 6, 7], [5, 6, 7])):
        assert hf_config.export_config(dataclasses.replace(model, eos_ids=ids), None, "float32")["eos_token_id"] == written


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


# ---- vectors that llmc/train/hf_config.cpp is tried on as well (test/cpp/hf_config_test.cpp) --------------------------

VECTORS = json.loads((ck.ROOT / "test" / "fixtures" / "hf_config" / "cases.json").read_text())


def vector_text(case):
    """The config.json of a vector: its base, changed; before it any text, in it any members that JSON may not have."""
    config = without(VECTORS["bases"][case["family"]] | case.get("set", {}), *case.get("remove", ()))
    text = json.dumps(config)
    return case.get("before", "") + "{" + case.get("members", "") + text[1:]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['family']}: {case['name']}")
def test_vectors(case):
    warnings = []
    try:
        config = cli.parse_json_object(vector_text(case).encode(), SOURCE, warnings.append)
        model = parse(config, warn=warnings.append).to_json()
    except tensor_file.FileError as failure:
        assert "refused" in case, failure
        assert failure.code == cli.BAD_FILE and all(word in str(failure) for word in case["refused"]), failure
        return
    assert "refused" not in case
    for path, want in case["model"].items():
        got = model
        for key in path.split("."):
            got = got[key]
        assert got == pytest.approx(want, rel=1e-15) and type(got) is type(want) or type(want) is int and got == want, path
    assert len(warnings) == len(case["warns"]), warnings
    for warning, word in zip(warnings, case["warns"]):
        assert "config.json" in warning and word in warning
    written = hf_config.export_config(parse(config), config, "float32")
    assert parse(written, warn=pytest.fail).to_json() == model, "the export describes the same model, without a warning"
