"""convert_hf.py --quantize: the grids and their search, the files, and what infer_pythia computes from them."""

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
import convert_hf  # noqa: E402
import dump_reference  # noqa: E402
import gptq  # noqa: E402
import hf_config  # noqa: E402
import quantization  # noqa: E402
import tensor_file  # noqa: E402
from goldens import inference_goldens  # noqa: E402

# One group and a ragged second one along K, three along the FFN; rows that are no multiple of anything.
LLAMA = ck.LLAMA | {"hidden_size": 144, "intermediate_size": 262, "vocab_size": 53}
NEOX = ck.GPT_NEOX | {"hidden_size": 144, "intermediate_size": 262, "vocab_size": 53}
CONFIGS = {"llama": LLAMA, "gpt_neox": NEOX}
HEADS = {"llama": "lm_head.weight", "gpt_neox": "embed_out.weight"}


def e4m3(byte: int) -> float:
    """One value of e4m3 by the definition of the format."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 0x80 else value


def weights_of(file: tensor_file.TensorFile, name: str) -> np.ndarray:
    """The weights of a matrix, quantised or not, without the project's own way back."""
    info = file.at(name)
    raw = np.frombuffer(file.bytes(name), np.uint8)
    if info.dtype in ("f32", "f16", "bf16"):
        return file.f32(name)
    rows, columns = info.shape
    scales = file.array(name + ".scales").astype(np.float32)
    if info.dtype == "i8":
        return raw.astype(np.int8).astype(np.float32).reshape(info.shape) * scales.reshape(rows, 1)
    if info.dtype == "e4m3":
        values = np.array([e4m3(byte) for byte in range(256)], np.float32)
        return np.take(values, raw).reshape(info.shape) * scales.reshape(rows, 1)
    assert info.dtype == "u4"
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    byte = raw[(row * columns + column) // 2]
    q = np.where(column % 2 == 0, byte % 16, byte // 16).astype(np.float32)
    return scales[row, column // 128] * (q - file.array(name + ".zeros")[row, column // 128])


# ---- the table ---------------------------------------------------------------------------------------------------------


def test_the_formats_are_those_of_the_table():
    """WeightFormats.AreThoseOfTheTable of the unit tests holds C++ to the same file."""
    table = json.loads((ck.ROOT / "test/fixtures/weight_formats.json").read_text())
    assert [each["name"] for each in table] == list(quantization.SCHEMES)
    weights = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    for each in table:
        scheme, groups = each["name"], -(-300 // each["group"]) if each["group"] else 0
        scales = (7, groups) if groups else (7,)
        expected = [("w", each["dtype"], (7, 300)), ("w.scales", each["scales"], scales)]
        assert quantization.stored_tensors(scheme, "w", (7, 300)) == expected + [("w.zeros", "u8", scales)] * (groups > 0)
        assert quantization.to_json(scheme, "none")["group"] == each["group"]
        assert (scheme in convert_hf.HEADS) == each["head"]
        rows = quantization.quantize_rows(weights, scheme)
        assert not np.isin(rows.q.view(np.uint8), each["invalid"]).any()


# ---- rounding --------------------------------------------------------------------------------------------------------


def test_e4m3_is_the_nearest_value_and_ties_go_to_even():
    values = np.array([e4m3(byte) for byte in range(127)])
    np.testing.assert_array_equal(quantization.e4m3_to_f32(np.arange(127, dtype=np.uint8)), values.astype(np.float32))
    assert np.isnan(quantization.e4m3_to_f32(np.array([0x7F, 0xFF], np.uint8))).all()
    middle = (values[1:] + values[:-1]) / 2
    random = np.random.default_rng(1)
    x = np.concatenate([values, middle, middle * (1 + 2.0**-20), middle * (1 - 2.0**-20), [449, 464, 1e30, 1e-30],
                        np.exp2(random.uniform(-12, 9, 20_000))]).astype(np.float32)
    x = np.concatenate([x, -x])
    distance = np.abs(np.minimum(np.abs(x).astype(np.float64), 448)[:, None] - values)
    nearest = distance == distance.min(axis=1, keepdims=True)
    nearest[nearest.sum(axis=1) > 1] &= np.arange(127) % 2 == 0
    bits = quantization.f32_to_e4m3(x)
    np.testing.assert_array_equal(bits & 0x7F, nearest.argmax(axis=1))
    np.testing.assert_array_equal(bits >> 7, np.signbit(x))
    np.testing.assert_array_equal(quantization.round_to_e4m3(x), quantization.e4m3_to_f32(bits))


def weights_again(rows: quantization.Quantized, scheme: str, columns: int) -> np.ndarray:
    numbers = quantization.FORMATS[scheme].numbers
    if numbers is not None:
        return numbers.decode(rows.q) * rows.scales[:, None]
    q = np.stack([rows.q & 15, rows.q >> 4], axis=-1).reshape(len(rows.q), -1).astype(np.float32)
    assert rows.zeros is not None
    return (np.repeat(rows.scales.astype(np.float32), 128, axis=1)[:, :columns]
            * (q - np.repeat(rows.zeros, 128, axis=1)[:, :columns]))


@pytest.mark.parametrize("columns", [2, 130, 384])
@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_the_search_takes_the_least_error(scheme, columns, monkeypatch):
    """What is said of the error is true, and no single factor does better on any row."""
    random = np.random.default_rng(2)
    weights = random.standard_t(4, (19, columns)).astype(np.float32) * np.exp2(random.integers(-9, 3, (19, 1))).astype(np.float32)
    weights[3] = 0
    weights[4] = np.abs(weights[4])
    weights[5] = 1e-30

    def error(rows):
        return ((weights_again(rows, scheme, columns).astype(np.float64) - weights) ** 2).sum(axis=1)

    best = quantization.quantize_rows(weights, scheme)
    assert best.error == pytest.approx(error(best).sum(), rel=1e-3)
    assert best.square == pytest.approx((weights.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert (weights_again(best, scheme, columns)[3] == 0).all() and (best.scales > 0).all()
    gains = []
    for factor in quantization.FACTORS[scheme]:
        monkeypatch.setitem(quantization.FACTORS, scheme, (factor,))
        alone = error(quantization.quantize_rows(weights, scheme))
        assert (error(best) <= alone * 1.0001 + 1e-30).all()
        gains.append((error(best) < alone * 0.99).any())
    assert any(gains) or columns == 2


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_weights_on_a_grid_come_back_as_they_are(scheme):
    random = np.random.default_rng(3)
    if scheme == "int4":
        q = random.integers(0, 16, (7, 256))
        q[:, ::128], q[:, 1::128] = 0, 15
        zeros, scales = random.integers(1, 15, (7, 2)), np.float16(random.uniform(0.01, 0.02, (7, 2)))
        weights = np.repeat(scales.astype(np.float32), 128, axis=1) * (q - np.repeat(zeros, 128, axis=1)).astype(np.float32)
    else:
        q = random.integers(-127, 128, (7, 256)) if scheme == "int8" else np.array(
            [e4m3(byte) for byte in random.integers(0, 127, 7 * 256)]).reshape(7, 256)
        q[:, 0] = 127 if scheme == "int8" else 448
        weights = (q * np.exp2(random.integers(-5, 5, (7, 1)))).astype(np.float32)
    rows = quantization.quantize_rows(weights, scheme)
    np.testing.assert_allclose(weights_again(rows, scheme, 256), weights, rtol=1e-6)
    if scheme == "int4":
        np.testing.assert_array_equal(rows.scales, scales)
        np.testing.assert_array_equal(rows.zeros, zeros)


@pytest.mark.parametrize("scheme, limit", [("int8", 127), ("fp8", 448)])
def test_scales_at_both_ends_of_the_range(monkeypatch, scheme, limit):
    tiny, smallest = np.full((2, 6), 1e-25, np.float32), 2.0**-126
    rows = quantization.quantize_rows(tiny, scheme)
    np.testing.assert_array_equal(rows.scales, tiny[:, 0] / np.float32(limit), "no error that can be told apart: the first factor")
    weights = np.float32([[60 * smallest, -smallest, 3 * smallest], [smallest / 4, 0, smallest / 1024]])
    rows = quantization.quantize_rows(weights, scheme)
    assert (rows.scales == np.float32(smallest)).all()
    assert np.abs(weights_again(rows, scheme, 3) - weights).max() <= (smallest / 2 if scheme == "int8" else 2 * smallest)
    largest = np.float32([[3e38, -1e38]])
    assert np.abs(weights_again(quantization.quantize_rows(largest, scheme), scheme, 2) / largest - 1).max() < 0.07
    monkeypatch.setitem(quantization.FACTORS, scheme, (2.0,))
    with pytest.raises(OverflowError):
        quantization.quantize_rows(np.float32([[1, 1], [3e38, 1]]), scheme)


def test_clipped_weights_of_int8_end_at_127_on_both_sides(monkeypatch):
    monkeypatch.setitem(quantization.FACTORS, "int8", (0.5,))
    assert quantization.quantize_rows(np.float32([[-8, 4.1, 1], [-4.03, 8, -4.1]]), "int8").q.tolist() == [[-127, 127, 32], [-127, 127, -127]]


def test_the_grid_of_int4_reaches_both_ends_and_holds_0():
    low, high = np.float32([0, -15, -7, 0, -1e-7, -3, -65504 * 15, 0]), np.float32([15, 0, 8, 0, 0, 0.2, 0, 65504 * 15 + 2e5])
    scales, zeros = quantization.int4_grid(low, high)
    assert scales.dtype == np.float16 and scales.tolist() == [1, 1, 1, 1, 2.0**-24, np.float16(3.2 / 15), 65504, np.inf]
    assert zeros.dtype == np.uint8 and zeros.tolist() == [0, 15, 7, 0, 2, 14, 15, 0]
    nearest = quantization.int4_nearest(np.float32([[-8.4, -7.6, -0.5, 0.5, 1.5, 7.6, 9.4, 0.0]]), np.float16([1]), np.uint8([7]))
    assert nearest.tolist() == [[-7, -7, 0, 0, 2, 8, 8, 0]]
    with pytest.raises(OverflowError):
        quantization.quantize_rows(np.float32([[1, 2], [0, 65504 * 15 * 2.1]]), "int4")


@pytest.mark.parametrize("elements, columns, pieces", [
    (100, 10, [(0, 10), (10, 20), (20, 25)]), (250, 10, [(0, 25)]), (249, 10, [(0, 24), (24, 25)]), (9, 10, [(row, row + 1) for row in range(25)]),
    (109, 10, [(0, 10), (10, 20), (20, 25)])])
@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_a_matrix_is_quantised_in_pieces_of_whole_rows(monkeypatch, elements, columns, pieces, scheme):
    monkeypatch.setattr(quantization, "PIECE_ELEMENTS", elements)
    weights = np.random.default_rng(5).standard_normal((25, columns)).astype(np.float32)
    asked = []
    found = list(quantization.quantize_matrix(lambda *rows: asked.append(rows) or weights[slice(*rows)], weights.shape, scheme))
    assert sorted(asked) == pieces and [len(rows.q) for rows in found] == [last - first for first, last in pieces]
    whole = quantization.quantize_rows(weights, scheme)
    for part in ("q", "scales", *(["zeros"] if scheme == "int4" else [])):
        np.testing.assert_array_equal(np.concatenate([getattr(rows, part) for rows in found]), getattr(whole, part))
    assert (whole.zeros is None) == (scheme != "int4")


# ---- files -----------------------------------------------------------------------------------------------------------


def small_weights(config, seed=0):
    return {name: values / 8 if values.ndim == 2 else values for name, values in ck.weights_of(config, seed).items()}


def converted(folder, family, scheme, *options, dtype="F16", seed=0):
    config = CONFIGS[family]
    weights = small_weights(config, seed)
    source = ck.write_checkpoint(folder / "hf", config, weights, dtype)
    target = folder / f"{family}-{scheme}.bin"
    done = ck.run_script("convert_hf.py", source, "-o", target, *(["--quantize", scheme] if scheme else []), *options)
    assert done.returncode == 0, done.stderr
    return tensor_file.read(target, "model"), done.stdout


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_converted_model_is_near_its_source(tmp_path, family, scheme, monkeypatch):
    monkeypatch.setattr(quantization, "PIECE_ELEMENTS", 10_000)  # several pieces a matrix
    head = ["--head", "int8"] if scheme != "fp8" else []
    floats, _ = converted(tmp_path, family, "")
    packed, text = converted(tmp_path, family, scheme, *head)
    assert f"matrices to {scheme}" in text and "infer_pythia --model" in text
    assert packed.config["quantization"] == {"scheme": scheme, "group": 128 if scheme == "int4" else 0,
                                             "head": "int8" if head else "none"}
    assert "quantization" not in floats.config
    packed.verify()
    seen, error, square = 0, 0.0, 0.0
    for name, info in floats.tensors.items():
        got = packed.at(name)
        assert got.shape == info.shape
        of_layer = ".layers." in name and len(info.shape) == 2
        if not of_layer and not (name == HEADS[family] and head):
            assert (got.dtype, got.hash) == (info.dtype, info.hash), name
            continue
        seen += 1
        own = scheme if of_layer else "int8"
        assert got.dtype == quantization.FORMATS[own].dtype
        want, have = floats.f32(name), weights_of(packed, name)
        np.testing.assert_array_equal(quantization.dequantized(packed, name), have)
        worst = {"int8": 1 / 200, "int4": 1 / 8, "fp8": 1 / 16}[own] * np.abs(want).max()  # clipping included
        error, square = error + ((want - have).astype(np.float64) ** 2).sum(), square + (want.astype(np.float64) ** 2).sum()
        assert np.abs(want - have).max() < 4 * worst
        assert np.sqrt(((want - have) ** 2).mean()) < worst
    assert seen == (14 if family == "llama" else 8) + bool(head)
    share = float(re.search(r"([\d.]+)% off in the root mean square", text)[1])
    assert share == pytest.approx(100 * np.sqrt(error / square), abs=0.0051), "over the matrices of every layer"
    names = [name for name in packed.tensors if name.endswith((".scales", ".zeros"))]
    assert len(names) == seen + (seen - bool(head) if scheme == "int4" else 0)

    first = (tmp_path / f"{family}-{scheme}.bin").read_bytes()
    converted(tmp_path, family, scheme, *head)
    assert (tmp_path / f"{family}-{scheme}.bin").read_bytes() == first


def ids_of(path) -> list[int]:
    done = subprocess.run([ck.ROOT / "infer_pythia", "--device=cpu", f"--model={path}", "--prompt-ids=3,1,4,1,5,9,2,6",
                           "--max-tokens=24", "--temperature=1", "--seed=3", "--ignore-eos", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["ids"]


@pytest.mark.parametrize("model", ["tiny-pythia", "tiny-llama"])
def test_activations_in_fp8_change_a_trained_model_little(tmp_path, model):
    """Against the same file with activations that are not rounded."""
    packed, source = tmp_path / "fp8.bin", ck.ROOT / "models" / model
    assert ck.run_script("convert_hf.py", source, "-o", packed, "--quantize", "fp8").returncode == 0
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. She had a red ball and a dog. One day they went to the park.\n" * 4)
    words = [ck.ROOT / "infer_pythia", "--device=cpu", f"--model={packed}", f"--perplexity={text}", "--context=64", "--json",
             f"--against={packed}"]
    results = [json.loads(subprocess.run([*words, f"--activations={activations}"], capture_output=True, check=True).stdout)
               for activations in ("auto", "fp8")]
    assert results[0]["kl_mean"] == 0 and 0 < results[1]["kl_mean"] < 0.05


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
@pytest.mark.parametrize("family", CONFIGS)
def test_infer_pythia_runs_what_the_file_means(tmp_path, family, scheme):
    """The same ids from a file of floats that holds the quantised weights."""
    packed, _ = converted(tmp_path, family, scheme, "--head", "int8")
    config = {key: value for key, value in packed.config.items() if key != "quantization"}
    names = [name for name in packed.tensors if not name.endswith((".scales", ".zeros"))]
    with tensor_file.Writer(tmp_path / "floats.bin", "model", config) as writer:
        for name in names:
            writer.declare(name, "f32", packed.at(name).shape)
        for name in names:
            writer.write(name, weights_of(packed, name))
    got = ids_of(packed.path)
    assert got == ids_of(tmp_path / "floats.bin") and len(set(got)) > 4


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_reference_dumps_take_the_weights_that_a_file_means(tmp_path, scheme):
    packed, _ = converted(tmp_path, "llama", scheme, "--head", "int8")
    model = ck.model_of(LLAMA)
    found = dict(dump_reference.replaced_weights(tmp_path / f"llama-{scheme}.bin", model))
    assert list(found) == list(model.tensors)
    for name, values in found.items():
        np.testing.assert_array_equal(values, weights_of(packed, name))
    other = ck.model_of(LLAMA | {"rope_theta": 500.0})
    with pytest.raises(tensor_file.FileError, match="differs from the configuration of DIR"):
        next(dump_reference.replaced_weights(tmp_path / f"llama-{scheme}.bin", other))


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_a_tied_head_is_quantised_beside_the_embedding(tmp_path, scheme):
    """As if the checkpoint had stored the embedding a second time, as a head; without --head int8 it stays tied."""
    config = LLAMA | {"tie_word_embeddings": True}
    weights = small_weights(config)
    tied = ck.write_checkpoint(tmp_path / "tied", config, weights)
    twice = ck.write_checkpoint(tmp_path / "twice", LLAMA, weights | {HEADS["llama"]: weights["model.embed_tokens.weight"]})
    files = {}
    for source in (tied, twice):
        for head in ([], ["--head", "int8"]):
            target = tmp_path / f"{source.name}{len(head)}.bin"
            done = ck.run_script("convert_hf.py", source, "-o", target, "--quantize", scheme, *head)
            assert done.returncode == 0, done.stderr
            files[source.name, bool(head)] = tensor_file.read(target, "model")
    assert files["tied", True].config["model"] == files["twice", True].config["model"]
    assert not files["tied", True].config["model"]["tied_embeddings"] and files["tied", False].config["model"]["tied_embeddings"]
    assert {name: info.hash for name, info in files["tied", True].tensors.items()} == {
        name: info.hash for name, info in files["twice", True].tensors.items()}
    assert HEADS["llama"] not in files["tied", False].tensors
    assert ids_of(files["tied", True].path) == ids_of(files["twice", True].path)

    checkpoint = hf_config.read_checkpoint(tied)
    for head in (True, False):
        described = dump_reference.of_weights(checkpoint, files["tied", head].path).model
        assert described.tied_embeddings is not head
        assert dict(dump_reference.replaced_weights(files["tied", head].path, described)).keys() == described.tensors.keys()


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_damage_of_any_part_of_a_quantised_matrix_is_found(tmp_path, scheme):
    packed, _ = converted(tmp_path, "llama", scheme)
    name = "model.layers.1.mlp.down_proj.weight"
    parts = [part for part in packed.tensors if part.startswith(name)]
    assert len(parts) == (3 if scheme == "int4" else 2)
    with open(packed.path, "r+b", buffering=0) as file:
        for part in parts:
            at = packed.at(part).offset + packed.at(part).bytes - 1
            whole = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([whole[0] ^ 1]), at)
            with pytest.raises(tensor_file.FileError, match=f"tensor '{part}': XXH3-64"):
                quantization.dequantized(tensor_file.read(packed.path), name)
            os.pwrite(file.fileno(), whole, at)
    np.testing.assert_array_equal(quantization.dequantized(tensor_file.read(packed.path), name), weights_of(packed, name))


@pytest.mark.parametrize("scheme, part, dtype, shape", [
    ("int8", "scales", "f16", (4,)), ("int8", "scales", "f32", (5,)), ("fp8", "scales", "f32", (4, 1)), ("int4", "scales", "f32", (4, 2)),
    ("int4", "scales", "f16", (4, 1)), ("int4", "zeros", "i8", (4, 2)), ("int4", "zeros", "u8", (2, 4))])
def test_scales_and_zeros_of_another_kind_are_refused(tmp_path, scheme, part, dtype, shape):
    """Of a matrix of 4 rows and 256 columns, which is two groups."""
    stored = {name: (name, kind, sizes) for name, kind, sizes in quantization.stored_tensors(scheme, "w", (4, 256))}
    assert stored[f"w.{part}"][1:] != (dtype, shape)
    stored[f"w.{part}"] = (f"w.{part}", dtype, shape)
    with tensor_file.Writer(tmp_path / "a.bin", "model", {}) as writer:
        for each in stored.values():
            writer.declare(*each)
        for name, kind, sizes in stored.values():
            writer.write(name, bytes(tensor_file.payload_bytes(kind, sizes)))
    with pytest.raises(tensor_file.FileError, match=f"w.{part}: got {dtype} ") as caught:
        quantization.dequantized(tensor_file.read(tmp_path / "a.bin"), "w")
    assert caught.value.code == 3


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, words", [
    (["--head", "int8"], "--head: only with --quantize"),
    (["--head", "16"], "--head: only with --quantize"),
    (["--gptq", "text.txt"], "--gptq: only with --quantize int4"),
    (["--quantize", "int2"], "invalid choice: 'int2'"),
    (["--only", "qkv"], "--only: only with --quantize"),
    (["--quantize", "int8", "--only", ""], "got '', expected names of"),
    (["--quantize", "int8", "--only", "qkv,"], "got '', expected names of"),
    (["--quantize", "int8", "--only", "qkv,neck"], "got 'neck', expected names of qkv, output, up, down, head"),
    (["--quantize", "int8", "--only", "head"], "--only: its head goes with --head int8"),
    (["--quantize", "int8", "--only", "up", "--head", "int8"], "--only: its head goes with --head int8"),
])
def test_usage_errors(tmp_path, options, words):
    source = ck.write_checkpoint(tmp_path / "hf", LLAMA)
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", *options)
    assert done.returncode == 2 and words in done.stderr and not (tmp_path / "a.bin").exists()


@pytest.mark.parametrize("scheme, value, words", [
    ("int8", np.nan, "holds NaN or infinity, which cannot be quantised"),
    ("fp8", np.inf, "holds NaN or infinity, which cannot be quantised"),
    ("int4", 2e6, "got weights too large for int4 and its scales"),
])
def test_weights_that_cannot_be_quantised(tmp_path, scheme, value, words):
    weights = ck.weights_of(LLAMA)
    weights["model.layers.1.mlp.down_proj.weight"][5, 9] = value
    source = ck.write_checkpoint(tmp_path / "hf", LLAMA, weights)
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", scheme)
    assert done.returncode == 3 and "model.layers.1.mlp.down_proj.weight: " + words in done.stderr
    assert not (tmp_path / "a.bin").exists()


def test_int4_needs_pairs_of_columns(tmp_path):
    source = ck.write_checkpoint(tmp_path / "hf", LLAMA | {"intermediate_size": 25})
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", "int4")
    assert done.returncode == 3 and "got 25 columns, expected an even number for int4. Use --quantize int8" in done.stderr
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", "fp8")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family, scheme, parts", [
    ("llama", "int4", "qkv,down"), ("gpt_neox", "fp8", "output"), ("gpt_neox", "int8", "head,qkv")])
def test_a_part_alone_is_stored_as_the_floats_that_it_means(tmp_path, family, scheme, parts):
    head = ["--head", "int8"] if "head" in parts else []
    floats, _ = converted(tmp_path, family, "")
    packed, _ = converted(tmp_path, family, scheme, *head)
    alone, text = converted(tmp_path, family, scheme, *head, "--only", parts)
    modules = {"qkv": ("q_proj", "k_proj", "v_proj", "query_key_value"), "output": ("attention.dense", "o_proj"),
               "up": ("gate_proj", "up_proj"), "down": ("down_proj",), "head": ("embed_out",)}
    chosen = [name for name in floats.tensors if any(each + ".weight" in name for part in parts.split(",") for each in modules[part])]
    assert len(chosen) >= 2 and "quantization" not in alone.config and "alone and stored as floats" in text
    assert set(alone.tensors) == set(floats.tensors)
    for name in alone.tensors:
        if name in chosen:
            assert alone.at(name).dtype == "f32"
            np.testing.assert_array_equal(alone.f32(name), weights_of(packed, name))
        else:
            assert alone.at(name).dtype == floats.at(name).dtype
            np.testing.assert_array_equal(alone.array(name), floats.array(name))


def test_linear_layers_are_known_by_the_description_of_the_family(tmp_path):
    """Not by how most families call their modules."""
    def renamed(name):
        return name.replace("model.layers.", "transformer.h.").replace("_proj", "")

    model = hf_config.read_checkpoint(ck.write_checkpoint(tmp_path / "hf", LLAMA)).model
    other = replace(model, tensors={renamed(name): shape for name, shape in model.tensors.items()},
                    linears={part: [renamed(module) for module in modules] for part, modules in model.linears.items()})
    target = convert_hf.Target(scheme="int8", head="int8")
    schemes = {name: target.scheme_of(name, shape, other) for name, shape in other.tensors.items()}
    assert schemes == {renamed(name): target.scheme_of(name, shape, model) for name, shape in model.tensors.items()}
    assert list(schemes.values()).count("int8") == 2 * 7 + 1


@pytest.mark.parametrize("model, options", [
    ("tiny-pythia", ["int4"]), ("tiny-llama", ["fp8"]),
    ("tiny-llama", ["int8", "--head", "int8"]),  # which its embedding is in the checkpoint
])
def test_pytorch_computes_the_same_from_quantised_weights(tmp_path, model, options):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    directory, file, dump = ck.ROOT / "models" / model, tmp_path / "m.bin", tmp_path / "d.bin"
    assert ck.run_script("convert_hf.py", directory, "-o", file, "--quantize", *options).returncode == 0
    done = ck.run_script("dump_reference.py", directory, "--weights", file, "-o", dump, "--prompt", "Once upon a time", "--greedy", "8")
    assert done.returncode == 0 and "next        ./infer_pythia" in done.stdout, done.stderr
    compared = subprocess.run([ck.ROOT / "infer_pythia", f"--model={file}", f"--compare={dump}", "--device=cpu"], capture_output=True, text=True)
    assert compared.returncode == 0 and " 0 failed" in compared.stdout, compared.stdout


def test_neither_training_nor_export_takes_a_quantised_file(tmp_path):
    packed, _ = converted(tmp_path, "llama", "int4")
    for adapter in ([], ["--adapter", tmp_path / "adapter.bin"]):
        done = ck.run_script("export_hf.py", packed.path, *adapter, "-o", tmp_path / "out")
        assert done.returncode == 3 and "its weights are quantised, and an export needs floats" in done.stderr
        assert ("infer_pythia --adapter runs the adapter beside" in done.stderr) == bool(adapter)
    run = subprocess.run([ck.ROOT / "train_llama", f"--model={packed.path}", "--train=none_*.bin", "--device=cpu",
                          f"--out={tmp_path / 'run'}"], capture_output=True, text=True)
    assert run.returncode == 3 and "its weights are quantised (int4), and training needs floats" in run.stderr


# ---- GPTQ ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in inference_goldens() if not name.startswith("gemma3")])
def test_gptq_runs_the_model_that_pytorch_runs(name):
    path = ck.ROOT / "test" / "fixtures" / "golden" / f"{name}.model.bin"
    file, dump = tensor_file.read(path), tensor_file.read(path.with_name(f"{name}.dump.bin"))
    model = hf_config.model_from_json(file.config["model"], path)
    layers = gptq.Layers(model, file.f32, dump.array("input_ids"), ThreadPoolExecutor(2))
    for layer in range(model.num_layers):
        layers.run(layer, lambda names, _: [file.f32(each) for each in names])
        want = dump.f32(f"act.layers.{layer}.residual").reshape(layers.x.shape)
        assert np.abs(layers.x - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("count, positions, shape", [
    (2, 64, (1, 2)), (63, 64, (1, 63)), (64, 64, (1, 64)), (127, 64, (1, 64)), (128, 64, (2, 64)), (511, 4096, (1, 511)), (512, 4096, (1, 512)),
    (513, 4096, (1, 512)), (1024, 4096, (2, 512)), (32_767, 4096, (63, 512)), (32_768, 4096, (64, 512)), (40_000, 4096, (64, 512)), (40_000, 48, (682, 48))])
def test_the_windows_of_a_calibration_text(tmp_path, count, positions, shape):
    model = replace(ck.model_of(LLAMA), max_positions=positions)
    ids = np.arange(count, dtype=np.int32)
    found = gptq.windows(ids, model, tmp_path / "text.txt")
    assert found.shape == shape and found.ravel().tolist() == list(range(shape[0] * shape[1]))
    for few in (0, 1):
        with pytest.raises(tensor_file.FileError, match=f"text.txt.*got {few} tokens, expected at least 2"):
            gptq.windows(ids[:few], model, tmp_path / "text.txt")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 130, 261])
def test_inputs_that_are_not_finite_have_no_factor(recwarn, value, column):
    x = np.ones((5, 262), np.float32)
    x[3, column] = value
    with np.errstate(all="ignore"), pytest.raises(np.linalg.LinAlgError):
        gptq.inverse_factor(x, ThreadPoolExecutor(2))


@pytest.mark.parametrize("columns", [2, 126, 128, 130, 262])
def test_gptq_moves_the_error_of_each_column_to_those_right_of_it(columns):
    """Against the definition, a column at a time over the whole matrix."""
    random = np.random.default_rng(columns)
    x = random.standard_normal((400, columns)) @ (np.eye(columns) + random.standard_normal((columns, columns)) / 8)
    weights = random.standard_normal((9, columns)).astype(np.float32)
    weights[4] = 0
    factor = gptq.inverse_factor(x.astype(np.float32), ThreadPoolExecutor(2))
    rows, left = gptq.quantize(weights, factor), weights.astype(np.float64)
    for column in range(columns):
        group = column // 128
        if column % 128 == 0:
            nearest = quantization.quantize_rows(left[:, column:column + 128].astype(np.float32), "int4")
            np.testing.assert_array_equal(rows.scales[:, group], nearest.scales[:, 0])
            np.testing.assert_array_equal(rows.zeros[:, group], nearest.zeros[:, 0])
        scale, zero = rows.scales[:, group].astype(float), rows.zeros[:, group].astype(float)
        chosen = np.clip(np.rint(left[:, column] / scale) + zero, 0, 15)
        np.testing.assert_array_equal(rows.q[:, column // 2] >> 4 * (column % 2) & 15, chosen)
        loss = (left[:, column] - scale * (chosen - zero)) / factor[column, column]
        left[:, column + 1:] -= np.outer(loss, factor[column, column + 1:])
    assert rows.square == pytest.approx((weights.astype(np.float64) ** 2).sum(), rel=1e-12)


def test_gptq_moves_the_outputs_less_than_rounding_does():
    random = np.random.default_rng(6)
    x = (random.standard_normal((600, 40)) @ random.standard_normal((40, 262)) + random.standard_normal((600, 262)) / 2).astype(np.float32)
    weights = random.standard_normal((24, 262)).astype(np.float32)
    error = {}
    for name, rows in {"gptq": gptq.quantize(weights, gptq.inverse_factor(x, ThreadPoolExecutor(2))), "nearest": quantization.quantize_rows(weights, "int4")}.items():
        again = quantization.int4_again(rows, 262)
        error[name] = (((again - weights) @ x.T) ** 2).sum()
        assert rows.error == pytest.approx(((again - weights) ** 2).sum(), rel=1e-3)
    assert error["gptq"] < 0.4 * error["nearest"]


@pytest.mark.parametrize("columns, scale", [(40, 1), (262, 1), (40, 2.0**-8)])
def test_the_factor_of_gptq_is_that_of_the_inverse(columns, scale):
    x = np.random.default_rng(7).standard_normal((3000, columns)).astype(np.float32) * np.float32(scale)
    x[:, 3] = 0
    hessian = x.astype(np.float64).T @ x
    hessian[3, 3] = 1
    hessian += np.eye(columns) * gptq.DAMPING * np.diag(hessian).mean()
    factor = gptq.inverse_factor(x, ThreadPoolExecutor(2))
    assert (np.tril(factor, -1) == 0).all() and (np.diag(factor) > 0).all()
    np.testing.assert_allclose(factor.T @ factor @ hessian, np.eye(columns), atol=1e-5)


def test_gptq_rounds_the_chosen_matrices_alone_and_rows_in_pieces(monkeypatch):
    path = ck.ROOT / "test" / "fixtures" / "golden" / "llama-hs64-gqa3-tied.model.bin"
    file = tensor_file.read(path)
    model, ids = hf_config.model_from_json(file.config["model"], path), np.arange(64, dtype=np.int32).reshape(2, 32)

    def found(chosen):
        calibration = gptq.Calibration(model, file.f32, ids, chosen)
        names = [name for name in file.tensors if ".layers." in name and len(file.at(name).shape) == 2 and chosen(name)]
        return {name: calibration.take(int(name.split(".")[2]), name) for name in names}

    everything = found(lambda name: True)
    monkeypatch.setattr(gptq, "PIECE_ROWS", 16)
    for name, rows in found(lambda name: True).items():
        whole = everything[name]
        assert np.mean(rows.q != whole.q) < 0.01, name  # sums of another order may turn a tie
        assert np.mean(rows.scales != whole.scales) < 0.01 and np.mean(rows.zeros != whole.zeros) < 0.01
        assert rows.error == pytest.approx(whole.error, rel=1e-2) and rows.square == pytest.approx(whole.square, rel=1e-12)
        assert rows.square == pytest.approx((file.f32(name).astype(np.float64) ** 2).sum(), rel=1e-12)
    first = found(lambda name: "layers.0.self_attn.q_proj" in name)
    assert list(first) == ["model.layers.0.self_attn.q_proj.weight"]
    assert np.mean(first["model.layers.0.self_attn.q_proj.weight"].q != everything["model.layers.0.self_attn.q_proj.weight"].q) < 0.01


def test_gptq_calibrates_on_what_the_quantised_layers_give():
    path = ck.ROOT / "test" / "fixtures" / "golden" / "llama-hs64-gqa3-tied.model.bin"
    file = tensor_file.read(path)
    model, ids = hf_config.model_from_json(file.config["model"], path), np.arange(64, dtype=np.int32).reshape(2, 32)
    calibration = gptq.Calibration(model, file.f32, ids, lambda name: "v_proj" not in name)
    layers = gptq.Layers(model, file.f32, ids, ThreadPoolExecutor(2))
    plain = gptq.Layers(model, file.f32, ids, ThreadPoolExecutor(2))

    def rounded(names, _):
        return [file.f32(name) if "v_proj" in name else
                quantization.int4_again(calibration.take(layer, name), file.at(name).shape[1]) for name in names]

    for layer in range(model.num_layers):
        layers.run(layer, rounded)
        plain.run(layer, lambda names, _: [file.f32(each) for each in names])
        np.testing.assert_array_equal(calibration.layers.x, layers.x)
        assert np.abs(plain.x - layers.x).max() > 1e-3 * np.abs(layers.x).max()


@pytest.mark.parametrize("poisoned, value, named, words", [
    ("mlp.down_proj", 2e6, "mlp.down_proj", "got weights too large for int4 and its scales. Use --quantize int8 or fp8"),
    ("mlp.up_proj", np.nan, "mlp.up_proj", "holds NaN or infinity, which cannot be quantised"),
    ("post_attention_layernorm", np.nan, "mlp.gate_proj", "the calibration text gives it inputs that are not finite")])
def test_gptq_names_the_matrix_that_it_cannot_quantise(tmp_path, monkeypatch, recwarn, poisoned, value, named, words):
    """A layer is computed as a whole, when the first of its matrices is written."""
    monkeypatch.setattr(convert_hf, "encode", lambda *_: list(range(40)))
    weights = ck.weights_of(LLAMA)
    weights[f"model.layers.1.{poisoned}.weight"].flat[3] = value
    source = ck.write_checkpoint(tmp_path / "hf", LLAMA, weights)
    (tmp_path / "text.txt").write_text("some text")
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", "int4", "--gptq", tmp_path / "text.txt")
    assert done.returncode == 3 and f"hf/model.safetensors': model.layers.1.{named}.weight: {words}" in done.stderr
    assert not recwarn.list and not (tmp_path / "a.bin").exists()


def test_gptq_refuses_blocks_that_it_does_not_compute(tmp_path):
    source = ck.write_checkpoint(tmp_path / "hf", ck.GEMMA3, tokenizer=ck.tokenizer_of(20))
    (tmp_path / "text.txt").write_text("some text")
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", "int4", "--gptq", tmp_path / "text.txt")
    ck.assert_refused(done, 3, "family gemma3_text, whose blocks --gptq does not compute. Leave --gptq out", output=tmp_path / "a.bin")


def test_gptq_is_for_int4_and_needs_a_tokenizer(tmp_path):
    source = ck.write_checkpoint(tmp_path / "hf", LLAMA)
    (tmp_path / "text.txt").write_text("some text")
    options = ["-o", tmp_path / "a.bin", "--gptq", tmp_path / "text.txt"]
    done = ck.run_script("convert_hf.py", source, *options, "--quantize", "int8")
    assert done.returncode == 2 and "--gptq: only with --quantize int4" in done.stderr
    done = ck.run_script("convert_hf.py", source, *options, "--quantize", "int4")
    assert done.returncode == 3 and "tokenizer.json" in done.stderr and not (tmp_path / "a.bin").exists()
    assert "--gptq needs it. Leave --gptq out" in done.stderr


class Calibrated(Exception):
    """What convert_hf.py would calibrate with; ends the run."""


@pytest.mark.parametrize("options, chosen", [
    ([], ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    (["--head", "int8"], ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    (["--only", "up,output"], ("o_proj", "gate_proj", "up_proj"))])
def test_gptq_is_given_the_matrices_of_int4_and_the_whole_text(tmp_path, monkeypatch, options, chosen):
    def calibration(model, read, windows, is_chosen):
        for name in model.tensors:
            if name.split(".")[-2] in chosen and not np.isfinite(weights[name]).all():
                with pytest.raises(tensor_file.FileError, match=f"{name}: holds NaN or infinity"):
                    read(name)
            else:
                np.testing.assert_array_equal(read(name), weights[name])
        raise Calibrated({name for name in weights if is_chosen(name)}, windows)

    monkeypatch.setattr(convert_hf, "Calibration", calibration)
    monkeypatch.setattr(convert_hf, "encode", lambda tokenizer, text, *_: [ord(letter) - ord("A") for letter in text])
    weights = ck.weights_of(ck.LLAMA)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        weights[name][3, 3] = np.inf
    source = ck.write_checkpoint(tmp_path / "hf", ck.LLAMA, weights)
    (tmp_path / "text.txt").write_text("ABCDe" * 20)
    with pytest.raises(Calibrated) as found:
        ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", "int4", "--gptq", tmp_path / "text.txt", *options)
    names, windows = found.value.args
    assert names == {name for name in weights if name.split(".")[-2] in chosen}
    assert windows.tolist() == [([0, 1, 2, 3, 36] * 20)[:64]], "36 is the last id of the model"


@pytest.mark.parametrize("text, words", [
    (b"AB\xff", "not UTF-8 (byte 2), expected a text"), (b"", "got 0 tokens, expected at least 2"),
    (b"A", "got 1 tokens, expected at least 2"),
    (b"ABf", "got id 37, expected ids below vocab_size = 37"), (b"ABfff" * 99, "got id 37"), (None, "cannot be read"),
    (b"A" * 101, "got more than 100 bytes")])
def test_texts_that_gptq_cannot_calibrate_with(tmp_path, monkeypatch, text, words):
    monkeypatch.setattr(convert_hf, "encode", lambda tokenizer, text, *_: [ord(letter) - ord("A") for letter in text])
    if words == "got more than 100 bytes":
        monkeypatch.setattr(convert_hf, "MAX_CALIBRATION_BYTES", 100)
    source = ck.write_checkpoint(tmp_path / "hf", ck.LLAMA)
    if text is not None:
        (tmp_path / "text.txt").write_bytes(text)
    done = ck.run_script("convert_hf.py", source, "-o", tmp_path / "a.bin", "--quantize", "int4", "--gptq", tmp_path / "text.txt")
    ck.assert_refused(done, 3, "text.txt", words, output=tmp_path / "a.bin")


def test_the_widest_matrix_of_gptq(tmp_path, monkeypatch):
    """24 columns: the number of rows, 37, has no limit."""
    monkeypatch.setattr(convert_hf, "encode", lambda *_: list(range(30)))
    source = ck.write_checkpoint(tmp_path / "hf", ck.LLAMA)
    (tmp_path / "text.txt").write_text("some text")
    options = ["-o", tmp_path / "a.bin", "--quantize", "int4", "--gptq", tmp_path / "text.txt"]
    monkeypatch.setattr(gptq, "MAX_COLUMNS", 23)
    done = ck.run_script("convert_hf.py", source, *options)
    ck.assert_refused(done, 3, "config.json: got a matrix of 24 columns, expected at most 23 for --gptq. Leave --gptq out", output=tmp_path / "a.bin")
    monkeypatch.setattr(gptq, "MAX_COLUMNS", 24)
    assert ck.run_script("convert_hf.py", source, *options).returncode == 0
