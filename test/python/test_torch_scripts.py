"""dump_reference.py, train_reference.py and fp8_emulation.py without torch: stub_torch.py stands in for it, and the models are those of
numpy in test_reference.py, as modules that can be hooked."""

import importlib
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from test_reference import CASES, GOLDEN, NumpyModel, assert_close, attention, dump_of, gelu, gelu_tanh, np, rope_angles, rope_of, rotated, silu, tensor_file, window_of
from test_train_reference import SETTINGS

import checkpoints as ck
import cli
import dump_reference
import hf_config
import stub_torch
import train_reference
from stub_torch import tensor


@pytest.fixture
def torch():
    with stub_torch.installed():
        sys.modules["torch"].use_deterministic_algorithms = lambda _: None
        yield sys.modules["torch"]


@pytest.fixture
def fp8(torch):
    yield importlib.import_module("fp8_emulation")
    sys.modules.pop("fp8_emulation")


# ---- models of numpy with hooks --------------------------------------------------------------------------------------


class Module:
    def __init__(self, forward=None, **children):
        self.forward, self.before, self.after = forward, {}, {}
        vars(self).update(children)

    def register_forward_pre_hook(self, hook):
        return self._hook(self.before, hook)

    def register_forward_hook(self, hook):
        return self._hook(self.after, hook)

    def _hook(self, hooks, hook):
        hooks[hook] = hook
        return SimpleNamespace(remove=lambda: hooks.pop(hook))

    def __call__(self, *inputs, **options):
        assert not any(options.values())
        for hook in self.before.values():
            hook(self, inputs)
        output = self.forward(*inputs)
        for hook in self.after.values():
            hook(self, inputs, output)
        return output

    def modules(self):
        return [self, *(each for child in vars(self).values() for one in (child if isinstance(child, list) else [child])
                        if isinstance(one, Module) for each in one.modules())]


def apply_rotary_pos_emb(q, k, angles, scale=1.0):
    """As in transformers: [B, heads, T, dims]."""
    return [tensor([rotated(row.swapaxes(0, 1), angles, scale).swapaxes(0, 1) for row in np.array(values)]) for values in (q, k)]


class Hooked(Module):
    """A golden as a model of transformers: a Llama with today's interface, a GPT-NeoX with that of old versions."""

    def __init__(self, file):
        super().__init__(self.compute)
        self.numpy = NumpyModel(file)
        self.llama, self.description = file.config["model"]["family"] != "gpt_neox", file.config["model"]
        layers = [self.layer(number) for number in range(self.description["num_layers"])]
        embed, end = ("model.embed_tokens", "model.norm") if self.llama else ("gpt_neox.embed_in", "gpt_neox.final_layer_norm")
        scale = math.sqrt(self.description["hidden_size"]) if self.numpy.gemma else 1
        embed, end = Module(lambda ids, name=f"{embed}.weight": tensor(self.numpy.weight(name)[ids] * scale)), self.norm(end)
        self.model = Module(embed_tokens=embed, layers=layers, norm=end)
        self.gpt_neox = Module(embed_in=embed, layers=layers, final_layer_norm=end)

    def linear(self, name):
        return Module(lambda x: tensor(self.numpy.linear(name, x)))

    def norm(self, name):
        return Module(lambda x: tensor(self.numpy.norm(name, x)))

    def layer(self, number):
        name = f"{'model' if self.llama else 'gpt_neox'}.layers.{number}."
        names = ([*(f"self_attn.{each}_proj" for each in "qkvo"), *(f"mlp.{each}_proj" for each in ("gate", "up", "down"))] if self.llama
                 else ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"])
        parts = {each.split(".")[1]: self.linear(name + each) for each in names}
        parts |= {each: self.norm(f"{name}self_attn.{each}") for each in ("q_norm", "k_norm")
                  if f"{name}self_attn.{each}.weight" in self.numpy.file.tensors}
        first, second = self.norm(name + "input_layernorm"), self.norm(name + "post_attention_layernorm")
        layer = Module(input_layernorm=first, post_attention_layernorm=second)
        if self.numpy.gemma:
            before_mlp, after_mlp = (self.norm(f"{name}{each}_feedforward_layernorm") for each in ("pre", "post"))
            layer.pre_feedforward_layernorm = before_mlp
        layer.self_attn = layer.attention = layer.mlp = Module(**parts)

        def gemma(x):
            normed = first(x)
            q, k, v = (parts[f"{each}_proj"](normed).unflatten(-1, (-1, self.description["head_dim"])) for each in "qkv")
            q, k = (parts[f"{each}_norm"](values.transpose(1, 2)).transpose(1, 2) for each, values in (("q", q), ("k", k)))
            x = x + second(parts["o_proj"](self.attend(number, *(values.flatten(-2) for values in (q, k, v)))))
            normed = before_mlp(x)
            return x + after_mlp(parts["down_proj"](tensor(gelu_tanh(parts["gate_proj"](normed)) * parts["up_proj"](normed))))

        def llama(x):
            normed = first(x)
            qkv = {each: parts[f"{each}_proj"](normed) for each in "qkv"}
            if "q_norm" in parts:
                heads = (-1, self.description["head_dim"])
                qkv |= {each: parts[f"{each}_norm"](qkv[each].unflatten(-1, heads)).flatten(-2) for each in "qk"}
            x = x + parts["o_proj"](self.attend(number, *qkv.values()))
            normed = second(x)
            return x + parts["down_proj"](tensor(silu(parts["gate_proj"](normed)) * parts["up_proj"](normed)))

        def neox(x):
            fused = parts["query_key_value"](first(x)).unflatten(-1, (-1, 3, self.description["head_dim"]))
            branch = parts["dense"](self.attend(number, *(fused[..., each, :].flatten(-2) for each in range(3))))
            normed = second(x if self.description["parallel_residual"] else x + branch)
            activation = gelu_tanh if self.description.get("activation") == "gelu_pytorch_tanh" else gelu
            return x + branch + parts["dense_4h_to_h"](tensor(activation(parts["dense_h_to_4h"](normed)))), None

        layer.forward = gemma if self.numpy.gemma else llama if self.llama else neox
        return layer

    def attend(self, number, *qkv):
        q, k, v = (values.unflatten(-1, (-1, self.description["head_dim"])).transpose(1, 2) for values in qkv)
        rope = rope_of(self.description, number)
        size = rope["rotary_dim"] if not self.llama else None
        if number not in self.description.get("nope_layers", []):
            turned = apply_rotary_pos_emb(q[..., :size], k[..., :size], rope_angles(rope, q.shape[2]), rope.get("attention_factor", 1))
            q, k = (np.concatenate([new, old[..., size or new.shape[-1]:]], axis=-1) for new, old in zip(turned, (q, k)))
        window = window_of(self.description, number)
        scale = self.description.get("attention_scale")
        return tensor([attention(*(values.swapaxes(0, 1) for values in row), window, scale) for row in zip(*map(np.array, (q, k, v)))])

    def compute(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
            x = x if self.llama else x[0]
        head = "model.embed_tokens" if self.description["tied_embeddings"] else "lm_head" if self.llama else "embed_out"
        return SimpleNamespace(logits=tensor(self.model.norm(x) @ self.numpy.weight(f"{head}.weight").T))


def golden(name):
    file, dump = tensor_file.read(GOLDEN / f"{name}.model.bin", expected="model"), dump_of(name)
    return Hooked(file), hf_config.model_from_json(file.config["model"], name), dump


def request_for(dump, **more):
    return dump_reference.Request(dump.array("input_ids"), dump.array("labels"), **more)


@pytest.mark.parametrize("name", CASES)
def test_what_the_hooks_record_is_the_golden(torch, monkeypatch, name):
    model, description, dump = golden(name)
    monkeypatch.setattr(dump_reference, "load_model", lambda *_: model)
    found = dump_reference.compute(Path(), description, request_for(dump))
    activations = [f"act.{each}" for each in dump_reference.activation_names(description)]
    assert list(found) == ["input_ids", "labels", *activations, "loss"]
    for activation in [*activations, "loss"]:
        assert found[activation].shape == dump.at(activation).shape and found[activation].dtype == np.float32
        assert_close(activation, found[activation], dump.f32(activation))
    assert apply_rotary_pos_emb.__name__ == "apply_rotary_pos_emb" and not any(each.before or each.after for each in model.modules())


@pytest.mark.parametrize("part, words", [("q", "layers.1.q"), ("k", "layers.1.k"), ("attention", "layers.1.attention")])
def test_whatever_differs_from_its_definition_is_refused(torch, part, words):
    """In the second layer, in one value."""
    model, description, dump = golden("llama-hs32-gqa2")
    recorder = dump_reference.Recorder(model, description)
    with recorder.listening():
        model(dump.array("input_ids"))
    dump_reference.check_recomputed(recorder, "f32")
    recorder.values[f"layers.1.{part}"].flat[-1] += 0.1
    with pytest.raises(cli.FileError, match=f"{words}: transformers gives another result") as refused:
        dump_reference.check_recomputed(recorder, "f32")
    assert refused.value.code == cli.INTERNAL


@pytest.mark.parametrize("dtype, limit", [("f32", 2e-5), ("bf16", 4 * 2.0**-7), ("f16", 4 * 2.0**-10)])
def test_a_recomputed_value_may_be_off_by_its_share_of_the_largest(torch, dtype, limit):
    want = tensor([[0.0, -8.0], [1.0, 2.0]])
    for sign in (1, -1):
        dump_reference.check_close("q", want + tensor([[0, 0], [sign * 7.9 * limit, 0]]), want, dtype)
        with pytest.raises(cli.FileError, match="q: "):
            dump_reference.check_close("q", want + tensor([[0, 0], [sign * 8.1 * limit, 0]]), want, dtype)
    for got, wanted in ((want * math.nan, want), (want + math.inf, want), (want[:1], want[:1].repeat(2, 0))):
        with pytest.raises(cli.FileError, match="q: "):
            dump_reference.check_close("q", got, wanted, dtype)
    dump_reference.check_close("q", want * 0, want * 0, dtype)


# ---- the continuation ------------------------------------------------------------------------------------------------


class Successor:
    """After id n comes n + 1; padding beyond `vocabulary` has the largest logits, and id n leads by 1 + n / 8."""

    def __init__(self, vocabulary):
        self.vocabulary, self.seen = vocabulary, []

    def __call__(self, ids, use_cache):
        assert not use_cache
        self.seen.append(ids.tolist())
        logits = np.zeros((*ids.shape, self.vocabulary + 2))
        for row, position in np.ndindex(ids.shape):
            following = (ids[row, position] + 1) % self.vocabulary
            logits[row, position, following] = 1 + following / 8
        logits[..., self.vocabulary:] = 100
        return SimpleNamespace(logits=tensor(logits))


@pytest.mark.parametrize("ends, count, expected", [
    ((), 4, [4, 5, 6, 7]), ((6,), 4, [4, 5, 6]), ((9, 6), 4, [4, 5, 6]), ((6, 9), 4, [4, 5, 6]), ((0, 9, 5), 4, [4, 5]), ((4,), 4, [4]),
    ((3,), 4, [4, 5, 6, 7]), ((7,), 4, [4, 5, 6, 7]), ((), 8, [4, 5, 6, 7, 8, 9, 0, 1]), ((), 1, [4])])
@pytest.mark.parametrize("prompt", [None, [1, 3]])
def test_a_continuation_ends_with_any_end_id_and_has_no_padding(torch, monkeypatch, ends, count, expected, prompt):
    model = Successor(10)
    monkeypatch.setattr(dump_reference, "load_model", lambda *_: model)
    description = replace(ck.model_of(ck.LLAMA), eos_ids=ends, tokenizer_vocab=10)
    ids = np.int32([[9, 2, 3] if prompt is None else [7, 7, 7], [5, 5, 5]])
    request = dump_reference.Request(ids, ids, greedy=count, greedy_prompt=None if prompt is None else np.int32(prompt))
    found, lead = dump_reference.greedy(Path(), description, request)
    assert found.tolist() == expected and found.dtype == np.int32
    first = prompt or [9, 2, 3]
    assert model.seen == [[first + expected[:number]] for number in range(len(expected))]
    assert lead == 1 + min(expected) / 8


# ---- the loss --------------------------------------------------------------------------------------------------------


def test_ignored_labels_have_no_loss_and_labels_are_shifted_already(torch):
    logits = np.log([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], [[0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]]])
    model = lambda ids, use_cache: SimpleNamespace(logits=tensor(logits))
    for labels, probabilities in (([[0, 1], [2, 0]], [0.5, 0.8, 0.6, 1 / 3]), ([[-100, 1], [2, -100]], [0.8, 0.6]), ([[-100, -100], [-100, 2]], [1 / 3])):
        request = dump_reference.Request(np.int32([[0, 0], [0, 0]]), np.int32(labels))
        assert float(dump_reference.loss_of(model, request)) == pytest.approx(-np.log(probabilities).mean(), rel=1e-6)


# ---- train_reference.py: its steps -----------------------------------------------------------------------------------


class Optimizer:
    """Steps by the sign alone, and keeps what it was given."""

    def __init__(self, groups, log, **options):
        self.param_groups, self.log, self.options = groups, log, options
        log.append(self)

    def zero_grad(self, set_to_none):
        assert set_to_none
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self):
        self.log.append([(group.get("lr"), [parameter.grad.copy() for parameter in group["params"]]) for group in self.param_groups])


class Loss:
    """A sum with a gradient."""

    def __init__(self, value, backward):
        self.value, self.run = value, backward

    def __truediv__(self, count):
        return Loss(self.value / count, lambda scale: self.run(scale / count))

    def detach(self):
        return tensor(np.array(self.value))

    def backward(self):
        self.run(1.0)


class Bigram:
    """Logits of the next id from a matrix, and a vector that only scales its gradient: enough to follow what a step does."""

    def __init__(self, torch):
        self.parameter = {"matrix": tensor(np.zeros((8, 8), np.float32)), "vector": tensor(np.ones(8, np.float32))}
        self.batches = []
        torch.nn.functional.cross_entropy = self.cross_entropy

    def parameters(self):
        return iter(self.parameter.values())

    def __call__(self, tokens, use_cache):  # no mask and no positions: its rows are single documents
        assert not use_cache
        self.batches.append(tokens.tolist())
        return SimpleNamespace(logits=tensor(np.array(self.parameter["matrix"])[np.array(tokens)].astype(np.float16)))

    def cross_entropy(self, logits, labels, reduction):
        assert reduction == "sum" and logits.dtype == np.float32
        counted = np.array(labels) != -100
        ids, labels = np.concatenate(self.batches[-1])[counted], np.array(labels)[counted]
        probabilities = np.array(logits.softmax(-1))[counted]

        def backward(scale):
            gradient = np.zeros((8, 8), np.float32)
            np.add.at(gradient, ids, scale * (np.array(probabilities) - np.eye(8)[np.array(labels)]))
            for name, values in (("matrix", gradient), ("vector", 3 * gradient.sum(0))):
                old = self.parameter[name].grad
                self.parameter[name].grad = tensor(values if old is None else old + values)

        return Loss(float(-np.log(probabilities[np.arange(len(ids)), np.array(labels)]).sum()), backward)


def gradients_of(batches, labels):
    """The mean gradient of a uniform Bigram over all micro-batches of a step."""
    ids, labels = np.concatenate([np.ravel(each) for each in batches]), np.ravel(labels)
    matrix = np.zeros((8, 8))
    for one, label in zip(ids, labels):
        matrix[one] += (1 / 8 - np.eye(8)[label]) / len(ids)
    return matrix, 3 * matrix.sum(0)


STEP = replace(SETTINGS, steps=4, micro_batch=2, seq_len=4, batch_tokens=24, lr=0.5, warmup_steps=2, schedule="linear", weight_decay=0.25,
               beta1=0.75, beta2=0.5, eps=1e-3)


class Ids:
    """Windows whose content follows from their position in the run. `learned`: whether all labels count."""

    def __init__(self, all_learned):
        self.all_learned = all_learned

    def learned(self, begin, number):
        return None if self.all_learned else np.array([[(begin + row) % 3 == at or at == 3 for at in range(4)] for row in range(number)])

    def batch(self, begin, number):
        return np.array([[(begin + row) * (at + 1) % 8 for at in range(5)] for row in range(number)])

    def rows(self, begin, number):
        ids, learned = self.batch(begin, number), self.learned(begin, number)
        return train_reference.Rows(ids[:, :-1], ids[:, 1:] if learned is None else np.where(learned, ids[:, 1:], -100), None, [])


@pytest.fixture
def trainer(torch, monkeypatch):
    """A Trainer, the record of its optimizer and model. It never moves: each step has the gradient of a uniform model."""
    clipped = []

    def clip(parameters, limit, norm):  # torch's: scales by at most 1
        clipped.append((limit, norm))
        for parameter in parameters:
            parameter.grad = tensor(parameter.grad * min(1.0, limit / (float(norm) + 1e-6)))

    def make(all_learned=True, **more):
        log = []
        torch.optim = SimpleNamespace(AdamW=lambda groups, **options: Optimizer(groups, log, **options))
        torch.nn.utils = SimpleNamespace(clip_grads_with_norm_=clip)
        model = Bigram(torch)
        settings = replace(STEP, **more)
        return train_reference.Trainer(SimpleNamespace(settings=settings), Ids(all_learned), model, "fp32"), log, model

    yield make


@pytest.mark.parametrize("limit", [0.0, 0.125, 0.5, 100.0])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_has_the_gradient_of_all_its_windows_and_clips_at_the_limit_but_for_0(trainer, limit, accumulation):
    trainer, log, model = trainer(grad_clip=limit, batch_tokens=8 * accumulation)
    records = [trainer.step() for _ in range(4)]
    optimizer, *steps = log
    assert optimizer.options == {"lr": 0.5, "betas": (0.75, 0.5), "eps": 1e-3}
    assert [(group["weight_decay"], [each.ndim for each in group["params"]]) for group in optimizer.param_groups] == [(0.25, [2]), (0.0, [1])]
    norms = []
    for number, step in enumerate(steps):
        windows = Ids(True).batch(number * 2 * accumulation, 2 * accumulation)
        seen = model.batches[number * accumulation:(number + 1) * accumulation]
        assert np.concatenate(seen).tolist() == windows[:, :-1].tolist() and [len(each) for each in seen] == [2] * accumulation
        want = gradients_of(seen, windows[:, 1:])
        norms.append(math.sqrt(sum((each**2).sum() for each in want)))
        for (rate, (got,)), gradient in zip(step, want):
            scale = min(1.0, limit / norms[-1]) if limit else 1.0
            np.testing.assert_allclose(got, gradient * scale, rtol=1e-4, atol=1e-7)
            assert rate == records[number]["lr"]
    assert min(norms) > 0.125 and max(norms) < 100 and (limit != 0.5 or min(norms) < 0.5 or max(norms) > 0.5)
    assert [record["lr"] for record in records] == pytest.approx([0.25, 0.5, 0.5, 0.275])
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-6), "before it is clipped"
    assert [record["loss"] for record in records] == pytest.approx([math.log(8)] * 4, rel=1e-6)
    assert [(record["type"], record["step"]) for record in records] == [("step", step) for step in (1, 2, 3, 4)]
    assert trainer.steps_done == 4


def test_a_step_of_conversations_is_the_mean_over_all_of_its_learned_labels(trainer):
    """Not a mean of the micro-batches' means: these have other numbers of learned labels."""
    trainer, log, model = trainer(all_learned=False, batch_tokens=24, micro_batch=1, grad_clip=0.0)
    records = [trainer.step() for _ in range(2)]
    for number, step in enumerate(log[1:]):
        ids, learned = Ids(False).batch(number * 6, 6), Ids(False).learned(number * 6, 6)
        want = gradients_of([ids[:, :-1][learned]], ids[:, 1:][learned])
        for (_, (got,)), gradient in zip(step, want):
            np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-7)
        assert records[number]["loss"] == pytest.approx(math.log(8), rel=1e-6)


def test_the_norm_is_that_of_all_gradients_together_in_double(torch):
    gradients = [np.full((2, 3), 2.0), np.full(4, 1.0), np.full((1, 1), 1e-5), np.full(1, 1e25)]
    model = lambda *chosen: SimpleNamespace(parameters=lambda: [SimpleNamespace(requires_grad=True, grad=tensor(gradients[each].astype(np.float32))) for each in chosen])
    assert float(train_reference.gradient_norm(model(0, 1))) == pytest.approx(math.sqrt(28), rel=1e-12)
    assert float(train_reference.gradient_norm(model(2))) == pytest.approx(1e-5, rel=1e-7)
    assert float(train_reference.gradient_norm(model(3, 0))) == pytest.approx(1e25, rel=1e-7), "its square is beyond fp32"


@pytest.mark.parametrize("from_file", [False, True])
def test_the_model_begins_as_the_run_did(torch, monkeypatch, from_file):
    file = tensor_file.read(GOLDEN / "llama-hs64-gqa3-tied.model.bin")
    model, config = hf_config.model_from_json(file.config["model"], "file"), []
    parameters, done = {name: tensor(np.zeros(shape, np.float32)) for name, shape in model.tensors.items()}, []
    embedding = SimpleNamespace(padding_idx=0)
    built = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding, layers=[], norm=None), named_parameters=parameters.items, to=lambda device: done.append(device) or built, train=lambda: done.append("train") or built)
    transformers = sys.modules["transformers"]
    for_model = SimpleNamespace(for_model=lambda **options: config.append(options))
    monkeypatch.setattr(transformers, "AutoConfig", for_model, raising=False)
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", SimpleNamespace(from_config=lambda _: built), raising=False)
    description = SimpleNamespace(model=model, settings=replace(SETTINGS, seed=6), adapter=None)
    assert train_reference.make_model(description, str(file.path) if from_file else "", "cuda") is built and done == ["cuda", "train"]
    assert embedding.padding_idx is None
    assert config == [model.hf_config | {"torch_dtype": "float32", "dtype": "float32", "attn_implementation": "sdpa"}]
    want = {name: file.f32(name) for name in parameters} if from_file else dict(train_reference.initial_tensors(model, 6))
    for name, values in parameters.items():
        np.testing.assert_array_equal(values, want[name])


# ---- train_reference.py: the program ---------------------------------------------------------------------------------


@pytest.fixture
def repeat(torch, monkeypatch, tmp_path):
    """main() with a Trainer that gives the losses 1, 1/2, ...; the log has the run's. Returns what was made of the options, too."""
    made = SimpleNamespace()
    description = SimpleNamespace(adapter=None, settings=replace(SETTINGS, steps=4, train="its/*.bin", model_file="its.bin", schedule="constant"))
    record = lambda step, loss: {"type": "step", "step": step, "loss": loss, "lr": 0.4, "grad_norm": 2.0}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{cli.json.dumps(record(step, 1.01 / step if step == 3 else 1 / step))}\n" for step in (1, 2, 3, 4)))
    numbers = itertools.count(1)

    class Trainer:
        def __init__(self, *values):
            made.trainer = values[1:]

        def step(self):
            return (lambda step: record(step, 1 / step))(next(numbers))

    monkeypatch.setattr(train_reference, "read_description", lambda run: description if run == Path("run") else None)
    monkeypatch.setattr(train_reference, "Windows", lambda _, pattern: setattr(made, "pattern", pattern))
    monkeypatch.setattr(train_reference, "make_model", lambda _, file, device: setattr(made, "model", (file, device)))
    monkeypatch.setattr(train_reference, "Trainer", Trainer)
    torch.set_num_threads = lambda number: setattr(made, "threads", number)
    torch.cuda = SimpleNamespace(is_available=lambda: made.gpu)
    torch.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)))

    def run(*options, gpu=True):
        nonlocal numbers
        numbers = itertools.count(1)
        vars(made).clear()
        made.gpu = gpu
        done = ck.run_script("train_reference.py", "run", *options)
        done.lines, done.made = [cli.json.loads(line) for line in done.stdout.splitlines()], made
        return done

    run.log = log
    return run


@pytest.mark.parametrize("options, steps, verdict", [
    ([], 4, None), (["--steps", 2], 2, None), (["--steps", 4], 4, None), (["--steps", 2, "--against"], 2, (True, 0.0)),
    (["--against"], 4, (False, 0.01)), (["--tolerance", "0.0101", "--against"], 4, (True, 0.01)), (["--smooth", 3, "--against"], 4, (False, 0.01)),
    (["--tolerance", "0.0041", "--smooth", 4, "--against"], 4, (True, 0.004))])
@pytest.mark.parametrize("to_file", [False, True])
def test_a_comparison_is_one_more_record_and_decides_the_exit_code(repeat, tmp_path, options, steps, verdict, to_file):
    more = [*options, *([repeat.log] if verdict else []), *(["-o", tmp_path / "out.jsonl"] if to_file else [])]
    done = repeat(*more)
    assert not to_file or not done.stdout
    records = [cli.json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] if to_file else done.lines
    assert [record.get("step") for record in records if record["type"] == "step"] == list(range(1, steps + 1))
    assert done.returncode == (0 if not verdict or verdict[0] else 1)
    assert len(records) == steps + bool(verdict)
    if verdict:
        assert records[-1]["type"] == "comparison" and records[-1]["passed"] is verdict[0] and records[-1]["steps"] == steps
        assert records[-1]["loss_max_relative"] == pytest.approx(verdict[1], rel=1e-9)
        assert done.stderr.startswith("passed: " if verdict[0] else "FAILED: ")
    else:
        assert not done.stderr


# ---- fp8_emulation.py ------------------------------------------------------------------------------------------------


def numbers_of(form):
    """All numbers >= 0 of the format, in order, by its definition."""
    mantissa, bias, largest = {"e4m3": (3, 7, 448), "e5m2": (2, 15, 57344)}[form]
    every = [part * 2.0**(1 - bias - mantissa) for part in range(1 << mantissa)]
    every += [(1 + part / (1 << mantissa)) * 2.0**(exponent - bias) for exponent in range(1, 32) for part in range(1 << mantissa)]
    return np.array([value for value in every if value <= largest])


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_rounding_takes_the_nearest_number_and_of_two_the_even_one(fp8, form):
    every = numbers_of(form)
    assert len(every) == (127 if form == "e4m3" else 124) and fp8.LARGEST[form] == every[-1]
    middle = (every[1:] + every[:-1]) / 2
    even = np.where(np.arange(len(middle)) % 2 == 0, every[:-1], every[1:])
    for values, want in ((every, every), (middle, even), (middle * (1 + 2.0**-20), every[1:]), (middle * (1 - 2.0**-20), every[:-1]),
                         (np.array([every[-1] * 1.01, 1e30, 3e38]), every[[-1] * 3])):
        for sign in (1, -1):
            x = tensor((sign * values).astype(np.float32))
            np.testing.assert_array_equal(fp8.round_to(x, form), sign * want)
            np.testing.assert_array_equal(x, (sign * values).astype(np.float32))


def test_an_operand_is_rounded_at_its_scale(fp8):
    rounding = fp8.Rounding()
    x = tensor(np.float64([[3.0, 0.013], [-0.0171, 100.0]]))
    for kind, form, exponent in (("input", "e4m3", 1), ("weight", "e4m3", 1), ("gradient", "e5m2", 8)):
        every = numbers_of(form)
        got = rounding(kind, "a", x, "forward", 1)
        want = [[math.copysign(every[np.abs(every - abs(value) * 2**exponent).argmin()], value) / 2**exponent for value in row] for row in x]
        assert got.dtype == x.dtype and got.tolist() == want and rounding.current == {("input", "a"): 1} | (
            {("weight", "a"): 1} if kind != "input" else {}) | ({("gradient", "a"): 8} if kind == "gradient" else {})


class Factors:
    """A rounding that multiplies by another prime for each operand, and keeps what it saw."""

    PRIMES = {("input", "forward"): 2, ("weight", "forward"): 3, ("gradient", "input_grad"): 5, ("weight", "input_grad"): 7,
              ("gradient", "weight_grad"): 11, ("input", "weight_grad"): 13}
    AXES = {("input", "forward"): 1, ("weight", "forward"): 1, ("gradient", "input_grad"): 1, ("weight", "input_grad"): 0,
            ("gradient", "weight_grad"): 0, ("input", "weight_grad"): 0}

    def __init__(self):
        self.seen = []

    def disturbed(self, x):
        return x + 1

    def see(self, kind, name, x):
        self.seen.append((kind, name, x.tolist()))

    def __call__(self, kind, name, x, product, axis):
        assert (name, axis) == ("3.qkv", self.AXES[kind, product])
        return x * self.PRIMES[kind, product]


def test_each_product_has_its_own_operands(fp8):
    x, weight, dy = (tensor(np.array(values, float)) for values in ([[1, 2], [3, 4], [5, 7]], [[1, -1], [2, 5]], [[1, 0], [2, 1], [0, 3]]))
    context, rounding = SimpleNamespace(), Factors()
    context.save_for_backward = lambda *values: setattr(context, "saved_tensors", values)
    np.testing.assert_array_equal(fp8.RoundedLinear.forward(context, x, weight, rounding, "3.qkv"), 6 * (x + 1) @ weight.T)
    assert rounding.seen == [("input", "3.qkv", (x + 1).tolist()), ("weight", "3.qkv", weight.tolist())]
    dx, dweight, *nothing = fp8.RoundedLinear.backward(context, dy)
    np.testing.assert_array_equal(dx, 35 * (dy + 1) @ weight)
    np.testing.assert_array_equal(dweight, 143 * (dy + 1).T @ (x + 1))
    assert nothing == [None, None] and rounding.seen[2:] == [("gradient", "3.qkv", (dy + 1).tolist())]
