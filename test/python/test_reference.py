"""Reference dumps: what the committed goldens hold, and dump_reference.py itself, which is skipped without torch and transformers."""

import json
import re
import subprocess
from dataclasses import replace

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
import cli  # noqa: E402
import dump_reference  # noqa: E402
import hf_config  # noqa: E402
import make_goldens  # noqa: E402
import tensor_file  # noqa: E402

GOLDEN = ck.ROOT / "test" / "fixtures" / "golden"
CASES = [case.name for case in make_goldens.CASES]
TRAINED = ["tiny-llama", "tiny-pythia"]
TOLERANCE = 1e-5  # of each tensor's largest value


# ---- the committed goldens -------------------------------------------------------------------------------------------


def assert_close(name, got, expected, tolerance=TOLERANCE):
    error = np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
    assert error < tolerance, f"{name}: {error:.3g} apart, relative to the largest"


def dump_of(name):
    return tensor_file.read(GOLDEN / f"{name}.dump.bin", expected="reference dump")


def test_the_golden_in_fp8_is_complete():
    dump = dump_of(make_goldens.FP8_CASE.name)
    dump.verify()
    model = hf_config.model_from_json(dump.config["model"], "dump")
    measured = {f"act.{name}" for name in dump_reference.activation_names(model)} | {"adamw.losses"}
    measured |= {prefix + name for prefix in ("grad.", "adamw.param.") for name in model.tensors}
    assert set(dump.tensors) == measured | {"input_ids", "labels", "loss"}
    distances = dump.config["dump"]["fp8"]
    assert set(distances["noise"]) == set(distances["rounding"]) == measured
    in_bf16 = {name for name in measured if not name.startswith("adamw.param.")}
    assert set(distances["bf16"]) == set(distances["plain_bf16"]) == in_bf16
    assert max(distances["noise"].values()) < make_goldens.LARGEST_NOISE
    # What rounding makes of the linear layers' outputs is some percent, and all that follows has its part of it.
    assert all(0.01 < distances["rounding"][name] < 0.6 for name in in_bf16 - {"act.embedding", "act.layers.0.input_norm"})
    assert dump.config["dump"]["adamw"] == vars(make_goldens.FP8_OPTIMIZER)


@pytest.mark.parametrize("name", CASES + TRAINED)
def test_golden_is_complete(name):
    dump = dump_of(name)
    dump.verify()
    model = hf_config.model_from_json(dump.config["model"], name)
    settings = dump.config["dump"]
    expected = {"input_ids", "labels", "loss", "greedy.prompt_ids", "greedy.ids"}
    expected |= {f"act.{activation}" for activation in dump_reference.activation_names(model)}
    if "act16_dtype" in settings:
        expected |= {f"act16.{activation}" for activation in dump_reference.activation_names(model)}
    trains = "adamw" in settings
    assert model.trainable if trains else model.family in ("gpt_neox", "gemma3_text")
    if trains and "act16_dtype" in settings:
        expected |= {"loss16", "adamw16.losses"}
        expected |= {f"grad16.{tensor}" for tensor in model.tensors if name not in TRAINED}
    if trains:
        layer = {tensor: re.search(r"\.layers\.(\d+)\.", tensor) for tensor in model.tensors}
        outer = [tensor for tensor, number in layer.items() if number is None or int(number[1]) in (0, model.num_layers - 1)]
        expected |= {"adamw.losses"} | {f"grad.{tensor}" for tensor in (outer if name in TRAINED else model.tensors)}
    stepped = {f"adamw.param.{tensor}" for tensor in model.tensors}
    assert set(dump.tensors) - stepped == expected
    assert not stepped & set(dump.tensors) or stepped < set(dump.tensors)
    for tensor, shape in model.tensors.items():
        for prefix in ("grad.", "adamw.param."):
            assert prefix + tensor not in dump.tensors or dump.at(prefix + tensor).shape == shape
    assert {"torch", "transformers", "model_sha256", "dtype"} <= set(settings) and settings["dtype"] == "f32"
    if trains:
        assert settings["adamw"] == {"steps": 10, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
                                     "weight_decay": 0.1, "grad_clip": 1.0}
        losses = dump.f32("adamw.losses")
        assert losses.shape == (10,) and losses[-1] < losses[0]
        assert losses[0] == pytest.approx(float(dump.f32("loss")), rel=1e-6)


def test_goldens_cover_what_they_claim():
    models = [hf_config.model_from_json(dump_of(name).config["model"], name) for name in CASES]
    for family in ("llama", "gpt_neox"):
        assert {32, 64, 80, 128, 256} <= {model.head_dim for model in models if model.family == family}
    llamas = [model for model in models if model.family == "llama"]
    neoxes = [model for model in models if model.family == "gpt_neox"]
    assert {model.num_heads // model.num_kv_heads for model in llamas} == {1, 2, 3, 4}
    assert {model.tied_embeddings for model in llamas} == {True, False}
    assert {model.rope.type for model in llamas} == {"standard", "linear", "llama3", "yarn"}
    assert {model.rope.rotary_dim / model.head_dim for model in neoxes} == {0.25, 0.5, 1.0}
    assert {(model.parallel_residual, model.attention_bias) for model in neoxes} == {
        (True, True), (True, False), (False, True), (False, False)}
    assert any(model.tokenizer_vocab < model.vocab_size for model in neoxes)
    assert any(model.num_heads * model.head_dim != model.hidden_size for model in llamas)
    assert sum(path.stat().st_size for path in GOLDEN.glob("*-hs*.bin")) < 8e6


def test_padding_would_win_if_it_were_sampled():
    dump = dump_of("neox-hs32-padded")
    logits, vocab = dump.f32("act.logits"), dump.config["model"]["tokenizer_vocab"]
    assert (logits.argmax(-1) >= vocab).mean() > 0.3


def test_optimizer_steps_of_a_vector_and_a_matrix():
    """The first step by hand: parameters move by the learning rate against the gradient's sign, matrices also decay."""
    name = "llama-hs32-gqa2"
    file, dump = tensor_file.read(GOLDEN / f"{name}.model.bin"), dump_of(name)
    for tensor, decays in (("model.norm.weight", False), ("lm_head.weight", True)):
        before, after = file.f32(tensor), dump.f32(f"adamw.param.{tensor}")
        decayed = before * (1 - 1e-3 * 0.1) ** 10 if decays else before
        assert np.abs(after - decayed).max() < 10.5e-3 and np.abs(after - before).max() > 1e-3


# ---- the script ------------------------------------------------------------------------------------------------------


def test_missing_libraries_are_exit_4(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    done = ck.run_script("dump_reference.py", directory, "-o", tmp_path / "d.bin")
    ck.assert_refused(done, 4, "torch", "not installed", output=tmp_path / "d.bin")


def test_shifted_labels():
    assert dump_reference.shifted_labels(np.int32([[5, 6, 7]])).tolist() == [[6, 7, -100]]
    model = ck.model_of(ck.LLAMA)
    ids, labels = dump_reference.random_batch(model, 2, 9, 4)
    assert np.array_equal(ids[:, 1:], labels[:, :-1]) and ids.max() < 37
    assert not np.array_equal(ids, dump_reference.random_batch(model, 2, 9, 5)[0])
    # The rows of padding have no tokens: their ids are in no text.
    padded = replace(model, tokenizer_vocab=3)
    for values in dump_reference.random_batch(padded, 4, 100, 6):
        assert set(values.flatten().tolist()) == {0, 1, 2}


def test_every_tensor_is_of_its_group_and_of_its_layer():
    """--tensors and --act-layers. The layers are those of both runs' activations, and of nothing else."""
    layers = [f"{kind}.layers.{layer}.{name}" for kind in ("act", "act16") for layer in (0, 1, 10) for name in ("residual", "attention.q")]
    losses, weight = ["adamw.losses", "adamw16.losses"], "model.layers.1.mlp.up_proj.weight"
    others = {"act": ["act.embedding", "act.logits", "act16.logits"], "greedy": ["greedy.ids"], "grad": [f"grad.{weight}"], "grad16": [f"grad16.{weight}"],
              "losses": losses, "adamw": [*losses, f"adamw.param.{weight}", f"adamw16.param.{weight}"]}
    of_no_group = ["input_ids", "labels", "loss"]
    names = [*layers, *{name for group in others.values() for name in group}, *of_no_group]
    assert set(others) == set(dump_reference.GROUPS)
    for group, members in others.items():
        kept = set(filter(dump_reference.selection([group], None), names))
        assert kept == {*members, *(layers if group == "act" else []), *of_no_group}
    assert list(filter(dump_reference.selection(None, None), names)) == names
    assert list(filter(dump_reference.selection([], None), names)) == of_no_group
    for chosen in ([0], [1], [10], [1, 10], []):
        dropped = set(names) - set(filter(dump_reference.selection(None, chosen), names))
        assert dropped == {name for name in layers if int(name.split(".")[2]) not in chosen}


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


def dump_checkpoint(directory, output, *options):
    done = ck.run_script("dump_reference.py", directory, "-o", output, *options)
    assert done.returncode == 0, done.stderr
    return tensor_file.read(output, expected="reference dump")


@pytest.mark.parametrize("family", ck.CONFIGS)
def test_dump_of_an_old_style_checkpoint(torch, tmp_path, family):
    """Checkpoint written by hand with the keys of transformers 4; infer_pythia computes the same."""
    directory = ck.write_checkpoint(tmp_path / "model", ck.CONFIGS[family] | {"eos_token_id": None})
    file = ck.convert(directory, tmp_path / "model.bin")
    dump = dump_checkpoint(directory, tmp_path / "dump.bin", "--random", "2,11", "--backward", "--adamw-steps", "3",
                           "--greedy", "5", "--half-run", "--lr", "0.01")
    model = hf_config.model_from_json(file.config["model"], "file")
    compared = subprocess.run([ck.ROOT / "infer_pythia", f"--model={file.path}", f"--compare={dump.path}", "--device=cpu"], capture_output=True, text=True)
    assert compared.returncode == 0 and " 0 failed" in compared.stdout, compared.stdout + compared.stderr
    for activation in dump_reference.activation_names(model):
        assert_close(activation, dump.f32(f"act16.{activation}"), dump.f32(f"act.{activation}"), 0.3)
    assert not np.array_equal(dump.f32("act16.logits"), dump.f32("act.logits"))
    stepped = {tensor: shape for tensor, shape in model.tensors.items() if not tensor.endswith("query_key_value.bias")}
    for tensor, shape in model.tensors.items():
        assert dump.at(f"grad.{tensor}").shape == shape
        assert f"adamw.param.{tensor}" not in dump.tensors if tensor not in stepped else dump.at(f"adamw.param.{tensor}").shape == shape
    assert dump.at("greedy.ids").shape == (5,) and dump.config["dump"]["adamw"]["learning_rate"] == 0.01
    assert dump.config["dump"]["ulp"].keys() == {"adamw.losses"} | {f"adamw.param.{tensor}" for tensor in stepped}
    assert all(0 <= distance < 1e-3 for distance in dump.config["dump"]["ulp"].values())


def test_each_weight_is_moved_to_a_neighbour(torch):
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 30)
    before = [value.detach().clone().numpy() for value in model.parameters()]
    dump_reference.move_by_an_ulp(model, 3)
    after = [value.detach().numpy().copy() for value in model.parameters()]
    for old, new in zip(before, after, strict=True):
        up, down = np.nextafter(old, np.float32(np.inf)), np.nextafter(old, np.float32(-np.inf))
        assert np.all((new == up) | (new == down)) and np.any(new == up) and np.any(new == down)
    dump_reference.move_by_an_ulp(model, 4)
    assert any(np.any(value.detach().numpy() != old) for value, old in zip(model.parameters(), before, strict=True))


def test_selection_of_tensors(torch, tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA | {"eos_token_id": None})
    whole = dump_checkpoint(directory, tmp_path / "a.bin", "--ids", "1,2,3", "--backward", "--adamw-steps", "2")
    few = dump_checkpoint(directory, tmp_path / "b.bin", "--ids", "1,2,3", "--backward", "--adamw-steps", "2",
                          "--tensors", "act,losses", "--act-layers", "1")
    assert {name for name in whole.tensors if name.startswith(("grad.", "adamw.param.", "act.layers.0."))} == set(
        whole.tensors) - set(few.tensors)
    assert all(few.at(name).hash == whole.at(name).hash for name in few.tensors)


def test_same_request_same_bytes(torch, tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    for name in ("a.bin", "b.bin"):
        dump_checkpoint(directory, tmp_path / name, "--random", "2,9", "--seed", "3", "--adamw-steps", "2")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_greedy_stops_after_an_end_id(torch, tmp_path):
    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA | {"eos_token_id": None})
    free = dump_checkpoint(directory, tmp_path / "a.bin", "--ids", "1,2,3", "--greedy", "12").array("greedy.ids")
    end = int(free[4])
    ck.write_checkpoint(directory, ck.LLAMA | {"eos_token_id": [end]})
    stopped = dump_checkpoint(directory, tmp_path / "b.bin", "--ids", "1,2,3", "--greedy", "12").array("greedy.ids")
    assert np.array_equal(stopped, free[:free.tolist().index(end) + 1])


def test_a_transformers_that_computes_otherwise_is_caught(torch, tmp_path, monkeypatch):
    from transformers.models.llama import modeling_llama

    directory = ck.write_checkpoint(tmp_path / "model", ck.LLAMA)
    plain = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -plain(x))
    done = ck.run_script("dump_reference.py", directory, "-o", tmp_path / "d.bin")
    ck.assert_refused(done, cli.INTERNAL, "layers.0.q", "another result", output=tmp_path / "d.bin")


EXPORTS = {
    "llama": ck.LLAMA, "llama3, tied": ck.LLAMA | {
        "tie_word_embeddings": True, "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}},
    "llama, explicit head_dim": ck.LLAMA | {"head_dim": 8, "num_key_value_heads": 1},
    "gpt_neox": ck.GPT_NEOX,
    "gpt_neox, sequential": ck.GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5,
                                           "rotary_emb_base": 25000},
}


@pytest.mark.parametrize("case", EXPORTS)
@pytest.mark.parametrize("sharded", [False, True])
def test_transformers_loads_the_export_with_the_same_logits(torch, tmp_path, case, sharded):
    import transformers

    directory = ck.write_checkpoint(tmp_path / "model", EXPORTS[case])
    ck.convert(directory, tmp_path / "model.bin")
    options = ["--max-shard-bytes", "3000"] if sharded else []
    assert ck.run_script("export_hf.py", tmp_path / "model.bin", "-o", tmp_path / "exported", *options).returncode == 0
    ids = np.arange(29) * 5 % 37
    logits = []
    for place in (directory, tmp_path / "exported"):
        model = transformers.AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager").eval()
        with torch.no_grad():
            logits.append(model(torch.tensor(ids)[None]).logits[0].numpy())
    assert np.array_equal(logits[0], logits[1])


def test_exported_tokenizer_loads(torch, tmp_path):
    import transformers

    name = "neox-hs32-padded"
    assert ck.run_script("export_hf.py", GOLDEN / f"{name}.model.bin", "-o", tmp_path / "exported").returncode == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer("Hi, weft<|endoftext|>")["input_ids"]
    assert len(ids) == 9 and ids[-1] == 256 and tokenizer.decode(ids[:8]) == "Hi, weft"
    assert json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"] is None


@pytest.mark.parametrize("name", ["llama-hs256-mqa", "neox-hs32-padded", "llama-fp8"])
def test_goldens_can_be_made_again(torch, tmp_path, name):
    """A case from its seed: the same ids and, but for the last bits of another torch, the same numbers."""
    pytest.importorskip("transformers", minversion="5")
    done = ck.run_script("make_goldens.py", "-o", tmp_path, "--only", name)
    assert done.returncode == 0, done.stderr
    again, committed = tensor_file.read(tmp_path / f"{name}.dump.bin"), dump_of(name)
    assert set(again.tensors) == set(committed.tensors)
    for tensor, info in committed.tensors.items():
        if info.dtype == "i32":
            assert np.array_equal(again.array(tensor), committed.array(tensor))
        else:
            assert_close(tensor, again.f32(tensor), committed.f32(tensor).astype(np.float64))
