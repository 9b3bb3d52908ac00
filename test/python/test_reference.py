"""Reference dumps: the committed goldens against a second implementation in numpy, and dump_reference.py itself.

The numpy model below is in double precision and written from the definition of the two architectures; it needs neither
torch nor transformers. What does need them is skipped without.
"""

import json
import math
import re
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


# ---- both architectures by definition --------------------------------------------------------------------------------


def erf(values):
    return np.vectorize(math.erf, otypes=[float])(values)


def gelu(values):
    return 0.5 * values * (1 + erf(values / math.sqrt(2)))


def gelu_tanh(values):
    return 0.5 * values * (1 + np.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))


def silu(values):
    return values / (1 + np.exp(-values))


def softmax(values):
    exponentials = np.exp(values - values.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def rope_angles(rope, positions):
    """[T, rotary_dim/2]; the frequency of each pair is scaled by its wavelength for llama3, by its place in the head for yarn."""
    frequencies = []
    for pair in range(rope["rotary_dim"] // 2):
        frequency = rope["theta"] ** (-2 * pair / rope["rotary_dim"])
        if rope["type"] == "llama3":
            wavelength, original = 2 * math.pi / frequency, rope["original_max_positions"]
            if wavelength > original / rope["low_freq_factor"]:
                frequency /= rope["factor"]
            elif wavelength >= original / rope["high_freq_factor"]:
                kept = (original / wavelength - rope["low_freq_factor"]) / (
                    rope["high_freq_factor"] - rope["low_freq_factor"])
                frequency = (1 - kept) * frequency / rope["factor"] + kept * frequency
        if rope["type"] == "linear":
            frequency /= rope["factor"]
        if rope["type"] == "yarn":
            begin, end = yarn_ramp(rope)
            slow = min(max((pair - begin) / (end - begin), 0), 1)
            frequency = slow * frequency / rope["factor"] + (1 - slow) * frequency
        frequencies.append(frequency)
    return np.outer(np.arange(positions), frequencies)


def yarn_ramp(rope):
    """The pairs that turn beta_fast and beta_slow times over the original positions: theta^(-2 pair / dim) T = 2 pi turns."""
    ends = [rope["rotary_dim"] / 2 * math.log(rope["original_max_positions"] / (2 * math.pi * turns)) / math.log(rope["theta"])
            for turns in (rope["beta_fast"], rope["beta_slow"])]
    begin, end = (math.floor(ends[0]), math.ceil(ends[1])) if rope["truncate"] else ends
    begin, end = max(begin, 0), min(end, rope["rotary_dim"] - 1)
    return (begin, end) if end != begin else (begin, begin + 0.001)


def rotated(values, angles, scale=1.0):
    """[T, heads, HS] turned in pairs (i, i + rotary_dim/2), which are scaled; the rest of the head passes."""
    half = angles.shape[1]
    result = values.copy()
    for position, row in enumerate(angles):
        a, b = values[position, :, :half], values[position, :, half:2 * half]
        result[position, :, :half] = scale * (a * np.cos(row) - b * np.sin(row))
        result[position, :, half:2 * half] = scale * (b * np.cos(row) + a * np.sin(row))
    return result


def attention(q, k, v, window=0, scale=None):
    """One text: q [T, NH, HS], k and v [T, NKV, HS]; position t sees 0..t, of these the last `window` (0: all); query head h reads
    h / (NH / NKV). `scale`: of scores."""
    length, heads, head_dim = q.shape
    out = np.zeros((length, heads, head_dim))
    for head in range(heads):
        source = head // (heads // k.shape[1])
        scores = q[:, head] @ k[:, source].T * (scale or 1 / math.sqrt(head_dim))
        scores[np.triu_indices(length, 1)] = -np.inf
        if window:
            scores[np.tril_indices(length, -window)] = -np.inf
        out[:, head] = softmax(scores) @ v[:, source]
    return out.reshape(length, heads * head_dim)


def window_of(model, number):
    """Of a layer: the keys that a position sees, 0: all before it. `model`: the object of a model file."""
    return model["windows"][number] if "windows" in model else 0


def rope_of(model, number):
    """Of a layer."""
    if "local_rope_theta" in model and window_of(model, number):
        return {"type": "standard", "theta": model["local_rope_theta"], "rotary_dim": model["head_dim"]}
    return model["rope"]


class NumpyModel:
    """A model file evaluated in double precision."""

    @property
    def gemma(self):
        return self.model["family"] == "gemma3_text"

    def __init__(self, file):
        self.file, self.model = file, file.config["model"]
        self.values = {}

    def weight(self, name):
        return self.file.f32(name).astype(np.float64)

    def linear(self, name, values):
        result = values @ self.weight(f"{name}.weight").T
        return result + self.weight(f"{name}.bias") if f"{name}.bias" in self.file.tensors else result

    def norm(self, name, values):
        if self.model["norm"] == "rmsnorm":
            scale = 1 / np.sqrt((values**2).mean(-1, keepdims=True) + self.model["norm_eps"])
            return values * scale * (self.weight(f"{name}.weight") + (1 if self.gemma else 0))
        centred = values - values.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + self.model["norm_eps"])
        return centred * scale * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")

    def forward(self, ids):
        """Activations of one text by their names in a dump; [T, ...]."""
        llama = self.model["family"] != "gpt_neox"
        x = self.weight("model.embed_tokens.weight" if llama else "gpt_neox.embed_in.weight")[ids]
        x = x * math.sqrt(self.model["hidden_size"]) if self.gemma else x
        self.values = {"embedding": x}
        for number in range(self.model["num_layers"]):
            x = self.llama_layer(number, x) if llama else self.neox_layer(number, x)
        x = self.values["final_norm"] = self.norm("model.norm" if llama else "gpt_neox.final_layer_norm", x)
        head = "model.embed_tokens" if self.model["tied_embeddings"] else "lm_head" if llama else "embed_out"
        self.values["logits"] = x @ self.weight(f"{head}.weight").T
        return self.values

    def attend(self, number, q, k, v):
        heads, rope = (q.shape[0], -1, self.model["head_dim"]), rope_of(self.model, number)
        angles, scale = rope_angles(rope, len(q)), rope.get("attention_factor", 1)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        if number not in self.model.get("nope_layers", []):
            q, k = rotated(q, angles, scale), rotated(k, angles, scale)
        out = attention(q, k, v, window_of(self.model, number), self.model.get("attention_scale"))
        prefix = f"layers.{number}."
        self.values |= {prefix + "q": q, prefix + "k": k, prefix + "v": v, prefix + "attention": out}
        return out

    def llama_layer(self, number, x):
        prefix, name = f"layers.{number}.", f"model.layers.{number}."
        normed = self.values[prefix + "input_norm"] = self.norm(name + "input_layernorm", x)
        q, k, v = (self.linear(f"{name}self_attn.{part}_proj", normed) for part in "qkv")
        if f"{name}self_attn.q_norm.weight" in self.file.tensors:
            q, k = (self.norm(f"{name}self_attn.{part}_norm", values.reshape(len(x), -1, self.model["head_dim"]))
                    for part, values in (("q", q), ("k", k)))
        branch = self.linear(name + "self_attn.o_proj", self.attend(number, q, k, v))
        x = x + (self.norm(name + "post_attention_layernorm", branch) if self.gemma else branch)
        before_mlp = "pre_feedforward_layernorm" if self.gemma else "post_attention_layernorm"
        normed = self.values[prefix + "post_attention_norm"] = self.norm(name + before_mlp, x)
        activation = gelu_tanh if self.gemma else silu
        product = activation(self.linear(name + "mlp.gate_proj", normed)) * self.linear(name + "mlp.up_proj", normed)
        self.values[prefix + "mlp_product"] = product
        branch = self.linear(name + "mlp.down_proj", product)
        self.values[prefix + "residual"] = x + (self.norm(name + "post_feedforward_layernorm", branch) if self.gemma else branch)
        return self.values[prefix + "residual"]

    def neox_layer(self, number, x):
        prefix, name = f"layers.{number}.", f"gpt_neox.layers.{number}."
        normed = self.values[prefix + "input_norm"] = self.norm(name + "input_layernorm", x)
        fused = self.linear(name + "attention.query_key_value", normed)
        fused = fused.reshape(len(x), self.model["num_heads"], 3, self.model["head_dim"])
        branch = self.linear(name + "attention.dense", self.attend(number, *np.moveaxis(fused, 2, 0)))
        middle = x if self.model["parallel_residual"] else x + branch
        normed = self.values[prefix + "post_attention_norm"] = self.norm(name + "post_attention_layernorm", middle)
        activation = gelu_tanh if self.model.get("activation") == "gelu_pytorch_tanh" else gelu
        product = self.values[prefix + "mlp_product"] = activation(self.linear(name + "mlp.dense_h_to_4h", normed))
        self.values[prefix + "residual"] = x + branch + self.linear(name + "mlp.dense_4h_to_h", product)
        return self.values[prefix + "residual"]


def loss_of(logits, labels):
    counted = labels != dump_reference.IGNORED_LABEL
    probabilities = softmax(logits)[counted]
    return -np.log(probabilities[np.arange(counted.sum()), labels[counted]]).mean()


def nearest_e4m3(values):
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), 2.0**-6))) - 3)
    return np.clip(np.round(values / step) * step, -448, 448)  # np.round: ties to even


class Fp8Model(NumpyModel):
    """With both operands of the blocks' linear layers in e4m3, by the definition of doc/precision.md in the first step."""

    JOINED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
              ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))  # each one tensor with one scale

    def __init__(self, file, largest):
        super().__init__(file)
        self.largest, self.seen = largest, {}  # of each input, over all texts

    @staticmethod
    def rounded(values, largest):
        scale = 2.0 ** math.floor(math.log2(448 / 2 / largest))
        return nearest_e4m3(values * scale) / scale

    def linear(self, name, values):
        layer, module = ".".join(name.split(".")[:3]), ".".join(name.split(".")[3:])
        joined = next(names for names in self.JOINED if module in names)
        slot = layer, joined
        self.seen[slot] = max(self.seen.get(slot, 0), np.abs(values).max())
        weights = max(np.abs(self.weight(f"{layer}.{each}.weight")).max() for each in joined)
        return self.rounded(values, self.largest.get(slot, self.seen[slot])) @ self.rounded(
            self.weight(f"{name}.weight"), weights).T


# ---- the committed goldens -------------------------------------------------------------------------------------------


def model_file(name, tmp_path):
    if name in TRAINED:
        if not (ck.ROOT / "models" / name / "model.safetensors").exists():
            pytest.skip(f"models/{name} is not there")
        return ck.convert(ck.ROOT / "models" / name, tmp_path / "model.bin")
    return tensor_file.read(GOLDEN / f"{name}.model.bin", expected="model")


def dump_of(name):
    return tensor_file.read(GOLDEN / f"{name}.dump.bin", expected="reference dump")


def assert_close(name, got, expected, tolerance=TOLERANCE):
    error = np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
    assert error < tolerance, f"{name}: {error:.3g} apart, relative to the largest"


@pytest.mark.parametrize("name", CASES + TRAINED)
def test_golden_forward_matches_numpy(name, tmp_path):
    file, dump = model_file(name, tmp_path), dump_of(name)
    assert hf_config.model_from_json(dump.config["model"], "dump") == hf_config.model_from_json(file.config["model"], "file")
    ids, labels = dump.array("input_ids"), dump.array("labels")
    texts = [dict(NumpyModel(file).forward(row)) for row in ids]
    description = hf_config.model_from_json(file.config["model"], name)
    for activation in dump_reference.activation_names(description):
        expected = np.stack([values[activation] for values in texts])
        assert dump.at(f"act.{activation}").shape == expected.shape
        assert_close(activation, dump.f32(f"act.{activation}"), expected)
    assert_close("loss", dump.f32("loss"), loss_of(np.stack([values["logits"] for values in texts]), labels))


def test_the_golden_in_fp8_matches_numpy():
    """The forward pass. A scale needs the largest of all texts: computed again until it stays."""
    name = make_goldens.FP8_CASE.name
    file, dump = tensor_file.read(GOLDEN / f"{name}.model.bin", expected="model"), dump_of(name)
    largest, seen, texts = None, {}, []
    while largest != seen:
        largest, seen, texts = seen, {}, []
        for row in dump.array("input_ids"):
            model = Fp8Model(file, largest)
            texts.append(dict(model.forward(row)))
            seen = {slot: max(value, seen.get(slot, 0)) for slot, value in model.seen.items()}
    for activation in dump_reference.activation_names(hf_config.model_from_json(file.config["model"], name)):
        assert_close(activation, dump.f32(f"act.{activation}"), np.stack([values[activation] for values in texts]))
    plain = np.stack([NumpyModel(file).forward(row)["logits"] for row in dump.array("input_ids")])
    assert np.abs(dump.f32("act.logits") - plain).max() > 1e-2 * np.abs(plain).max()


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
def test_golden_greedy_text_matches_numpy(name, tmp_path):
    file, dump = model_file(name, tmp_path), dump_of(name)
    prompt, ids = dump.array("greedy.prompt_ids"), dump.array("greedy.ids")
    logits = NumpyModel(file).forward(np.concatenate([prompt, ids]))["logits"]
    chosen = logits[len(prompt) - 1:-1, :file.config["model"]["tokenizer_vocab"]].argmax(-1)
    assert np.array_equal(chosen, ids) and len(ids) >= (64 if name in TRAINED else 16)


@pytest.mark.parametrize("name", CASES + TRAINED)
def test_golden_is_complete(name, tmp_path):
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


def test_gradients_match_finite_differences():
    """Of the loss, along random directions in every tensor of one golden."""
    name = "llama-hs64-gqa3-tied"
    file, dump = tensor_file.read(GOLDEN / f"{name}.model.bin"), dump_of(name)
    ids, labels = dump.array("input_ids"), dump.array("labels")
    random = np.random.default_rng(1)

    def loss(tensor, shift):
        model = NumpyModel(file)
        plain = model.weight
        model.weight = lambda wanted: plain(wanted) + (shift if wanted == tensor else 0)
        return loss_of(np.stack([model.forward(row)["logits"] for row in ids]), labels)

    for tensor in hf_config.model_from_json(file.config["model"], name).tensors:
        gradient = dump.f32(f"grad.{tensor}").astype(np.float64)
        direction = random.standard_normal(gradient.shape) + gradient / np.abs(gradient).max()
        slope = (loss(tensor, 1e-6 * direction) - loss(tensor, -1e-6 * direction)) / 2e-6
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-4, abs=1e-6), tensor


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
    """Checkpoint written by hand with the keys of transformers 4; compared with the numpy model."""
    directory = ck.write_checkpoint(tmp_path / "model", ck.CONFIGS[family] | {"eos_token_id": None})
    file = ck.convert(directory, tmp_path / "model.bin")
    dump = dump_checkpoint(directory, tmp_path / "dump.bin", "--random", "2,11", "--backward", "--adamw-steps", "3",
                           "--greedy", "5", "--half-run", "--lr", "0.01")
    model = hf_config.model_from_json(file.config["model"], "file")
    for row, ids in enumerate(dump.array("input_ids")):
        for activation, expected in NumpyModel(file).forward(ids).items():
            assert_close(activation, dump.f32(f"act.{activation}")[row], expected)
            assert_close(activation, dump.f32(f"act16.{activation}")[row], expected, 0.3)
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
    file = ck.convert(directory, tmp_path / "model.bin")
    options = ["--max-shard-bytes", "3000"] if sharded else []
    assert ck.run_script("export_hf.py", tmp_path / "model.bin", "-o", tmp_path / "exported", *options).returncode == 0
    ids = np.arange(29) * 5 % 37
    logits = []
    for place in (directory, tmp_path / "exported"):
        model = transformers.AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager").eval()
        with torch.no_grad():
            logits.append(model(torch.tensor(ids)[None]).logits[0].numpy())
    assert np.array_equal(logits[0], logits[1])
    assert_close("logits", logits[1], NumpyModel(file).forward(ids)["logits"])


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
