"""The corpus of dev/data/make_almanac.py, the driver of dev/accuracy, and how it compares learning curves."""

import hashlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev" / "data"), str(ROOT / "scripts")]

from almanac import pages, world  # noqa: E402

stub_torch = pytest.importorskip("stub_torch")  # it needs numpy

PAGES = [pages.write_page(1, index) for index in range(400)]


def make(directory: Path, *options: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "dev/data/make_almanac.py"), "-o", str(directory), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_text_is_that_of_the_seed_whoever_writes_it(tmp_path, monkeypatch):
    make(tmp_path / "one", "--documents", "30", "--val", "4", "--held", "5", "--processes", "1")
    make(tmp_path / "two", "--documents", "40", "--val", "4", "--held", "5", "--processes", "2")
    for name in ("val.txt", "held.txt"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "two" / "train.txt").read_bytes().startswith((tmp_path / "one" / "train.txt").read_bytes())
    assert (tmp_path / "one" / "held.txt").read_text() == "".join(f"{page}\n<|endoftext|>\n" for page in PAGES[:5])
    assert pages.write_page(2, 0) != PAGES[0]
    assert hashlib.sha256("\n".join(PAGES[:50]).encode()).hexdigest() == HASH


HASH = "a1fb161c7c4073121bdbb68a537b0d93f087e468d63c8e50eea289eb6e9934dc"  # of 50 documents


def test_every_kind_is_written_and_no_mark_is_left():
    text = "\n".join(PAGES)
    assert text.isascii() and not re.search(r"[\[\]{}]|\(n\)|  | \.|<\|", text)
    for words in ("Q: ", "Total: ", "Where is the", "The coachman is", "Dear ", " x ", "steps north", " | trade | ", "let ", "Council of",
                  "plays the", "They had two children", "So what ", "miles", "Once"):
        assert words in text, words
    assert len(set(PAGES)) == len(PAGES)


def test_sums_are_right():
    bills = [page for page in PAGES if "\nTotal: " in page]
    assert len(bills) > 5
    for bill in bills:
        total = 0
        for count, price, amount, together in re.findall(r"^\d+\. (\d+) .* at (\d+) crowns: (\d+) crowns, together (\d+)$", bill, re.M):
            total += int(amount)
            assert int(count) * int(price) == int(amount) and int(together) == total
        assert f"\nTotal: {total} crowns\n" in bill
    for left, sign, right, result in re.findall(r"(\d+) ([+x-]) (\d+) = (\d+)", "\n".join(PAGES)):
        assert {"+": int(left) + int(right), "-": int(left) - int(right), "x": int(left) * int(right)}[sign] == int(result)


def test_what_is_known_of_the_world_is_the_same_everywhere():
    known = {town.name: town for town in world.world_of(1).towns}
    assert len(known) == world.TOWNS
    found = [(name, craft) for page in PAGES for name, craft in re.findall(r"Q: What is (\w+) known for\?\nA: For its (\w+)\.", page)]
    assert len(found) > 10 and all(known[name].craft == craft for name, craft in found)


# ---- the driver ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver():
    pytest.importorskip("numpy")
    spec = importlib.util.spec_from_file_location("accuracy_run", ROOT / "dev/accuracy/run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_variants_cover_every_scheme_and_part_once(driver):
    keys = [variant.key for variant in driver.VARIANTS]
    assert len(set(keys)) == len(keys) == 6 + 4 * 4 + 1
    assert driver.Variant("int4 GPTQ", "up").options(Path("c.txt")) == ["--quantize", "int4", "--gptq", "c.txt", "--only", "up"]
    assert driver.Variant("int8", "head", head=True).options(Path("c.txt")) == ["--quantize", "int8", "--head", "int8", "--only", "head"]


def test_tables(driver):
    row = {"model": "llama", "key": "int8", "scheme": "int8", "part": "", "head": False, "text": "held.txt", "tokens": 1000, "device": "a GPU",
           "mean_nll": 1.01, "mean_nll_against": 1.0, "nll_difference_standard_error": 0.001, "kl_mean": 0.0123456, "same_top": 0.98,
           "bytes": 12_300_000, "convert_seconds": 4.2}
    text = driver.tables([row, row | {"part": "qkv", "text": "part.txt", "mean_nll": 1.0}])
    assert "| int8 | 2.7456 | +1.01 ± 0.10 % | 0.012346 | 98.00 % | 12.3 | 4 s |" in text
    assert "| int8 | +0.00 ± 0.10 %, 0.012346 |" in text and "perplexity 2.7183" in text


def test_what_is_measured_already_is_not_measured_again(driver, tmp_path, monkeypatch):
    options = driver.argparse.Namespace(work=tmp_path, size="dry", jobs=2, device="cpu", train_seconds=1)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "held.txt").write_text(driver.SEPARATOR.join(["one", "two", "three", ""]))
    run = driver.Run(options)
    assert run.text("a.txt", "held.txt", 2).read_text() == "one<|end_of_text|><|begin_of_text|>two"
    run.add({"model": "llama", "key": "int8"})
    (tmp_path / "corpus" / "train.txt").write_text("text")
    done = []
    monkeypatch.setattr(run, "base", lambda model: tmp_path)
    monkeypatch.setattr(run, "measure", lambda model, variant, *rest: done.append(variant.key))
    run.evaluate("llama")
    assert len(done) == len(driver.VARIANTS) - 1 and "int8" not in done
    assert json.loads(run.results.read_text()) == {"model": "llama", "key": "int8"}


def test_every_device_is_measured_once(driver, tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    for name in ("held.txt", "train.txt"):
        (tmp_path / "corpus" / name).write_text("text")
    for model in ("llama", "neox"):
        (tmp_path / model).mkdir()

    def measured(device):
        """What the stage measures, of which the first is there already when it is called again."""
        run, done = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", device=device)), []

        def measure(model, variant, calibration, text, device):
            done.append((model, variant.key, device))
            run.add({"model": model, "key": variant.key, "text": text.name, "device_option": device})

        monkeypatch.setattr(run, "measure", measure)
        run.stage("cpu")
        return done

    keys = [variant.key for variant in driver.ON_BOTH]
    everything = [(model, key, device) for model in ("llama", "neox") for key in keys for device in ("cpu", "cuda")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
        {"model": "llama", "key": "int8", "text": "held.txt", "device_option": "cpu"},
        {"model": "llama", "key": "fp8", "text": "both.txt", "device_option": "cuda"})))
    assert measured("cuda") == [one for one in everything if one != ("llama", "fp8", "cuda")]
    assert measured("cuda") == [] == measured("cpu")
    assert measured("") == [(model, key, "") for model in ("llama", "neox") for key in keys]
    (tmp_path / "results.jsonl").unlink()
    assert measured("cpu") == [(model, key, "cpu") for model in ("llama", "neox") for key in keys]


@pytest.mark.parametrize("model, dtype", [("llama", "bf16"), ("neox-small", "fp16")])
@pytest.mark.parametrize("device", ["cpu", "cuda", ""])
@pytest.mark.parametrize("scheme, part", [("int8", ""), ("int4 GPTQ", "up")])
def test_a_variant_is_made_measured_against_16_bits_and_removed(driver, tmp_path, monkeypatch, model, dtype, device, scheme, part):
    run, commands = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", jobs=2, device=device)), []

    def call(command, log, threads=0):
        commands.append(list(map(str, command)))
        if "-o" in commands[-1]:
            Path(commands[-1][commands[-1].index("-o") + 1]).write_bytes(bytes(77))
        return json.dumps({"mean_nll": 2.5})

    monkeypatch.setattr(run, "call", call)
    variant = driver.Variant(scheme, part)
    run.measure(model, variant, Path("calibration.txt"), tmp_path / "held.txt", device)
    made, base, measured = commands
    file, against = tmp_path / f"{model}-{variant.key}.bin", tmp_path / f"{model}-16.bin"
    assert made[2:] == [str(tmp_path / model), "-o", str(file), "--dtype", dtype, *variant.options(Path("calibration.txt"))]
    assert base[2:] == [str(tmp_path / model), "-o", str(against), "--dtype", dtype]
    assert measured == ["./infer_pythia", "--model", str(file), "--perplexity", str(tmp_path / "held.txt"), "--special", "--context", "128", "--stride", "96",
                        "--against", str(against), "--json", *(["--dtype", "fp32"] if part and device != "cpu" else []),
                        *(["--device", device] if device else [])]
    (row,) = run.measured()
    assert {key: row[key] for key in ("model", "key", "scheme", "part", "head", "text", "device_option", "bytes", "mean_nll")} == {
        "model": model, "key": variant.key, "scheme": scheme, "part": part, "head": False, "text": "held.txt", "device_option": device, "bytes": 77,
        "mean_nll": 2.5}
    assert file.exists() == (variant in driver.ON_BOTH) and against.exists(), "what is measured on both devices is needed again"


def test_each_way_to_draft_is_run_once(driver, tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "held.txt").write_text(driver.SEPARATOR.join(["abcdef", "ghi", "jkl", "mno", ""]))
    for name in ("llama", "llama-small", "neox"):
        (tmp_path / name).mkdir()
    run, commands = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", device="cpu")), []

    def call(command, log, threads=0):
        commands.append(command)
        requests, answers = (command[command.index(option) + 1] for option in ("--batch", "--output"))
        answers.write_text("".join(json.dumps({"ids": [len(json.loads(line)["prompt"])]}) + "\n" for line in requests.read_text().splitlines()))
        (tmp_path / f"{log}.log").write_text(f"answered before\nanswered {log}\nthe end\n")

    monkeypatch.setattr(run, "base", lambda model: f"{model}.bin")
    monkeypatch.setattr(run, "call", call)
    run.add({"model": "llama", "key": "plain"})
    run.add({"model": "neox", "key": "draft"})
    run.drafts()
    assert [command[command.index("--max-running") + 2:] for command in commands] == [
        ["--draft", "llama-small.bin", "--device", "cpu"], ["--lookup", "5", "--device", "cpu"]]
    assert run.measured()[2:] == [{"model": "llama", "key": key, "prompts": 3, "report": f"answered drafts-llama-{key}", "ids": [[2], [1], [1]]}
                                  for key in ("draft", "lookup")]


# ---- learning curves -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curves():
    pytest.importorskip("numpy")
    spec = importlib.util.spec_from_file_location("accuracy_curves", ROOT / "dev/accuracy/curves.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_curve_that_is_three_steps_late_lags_by_three_steps(curves):
    reference = [8 * 0.99**step for step in range(300)]
    late = [8 * 0.99**(step - 3) for step in range(300)]
    for part in (curves.STEEP, curves.LATE):
        lag, gap = curves.behind(late, reference, 25, part)
        assert lag == pytest.approx(3, abs=0.01) and gap == pytest.approx(100 * (0.99**-3 - 1))
        lag, gap = curves.behind(reference[2:] + reference[-2:], reference, 25, curves.STEEP)
        assert lag == pytest.approx(-2, abs=0.01) and gap == pytest.approx(100 * (0.99**2 - 1))
    worse = list(reference)
    worse[100:130] = [1.1 * loss for loss in worse[100:130]]
    assert curves.largest_gap(worse, reference, 25) == pytest.approx(10, abs=0.01)
    assert curves.largest_gap(reference, worse, 25) < -9


@pytest.fixture
def curve_options(tmp_path):
    return SimpleNamespace(output=tmp_path, steps=9, micro_batch=8, seq_len=16, program="train_llama", reference="bf16",
                           rest=["--config", "tiny", "--val", "v_*.bin", "--device", "cpu", "--val-batches", "3", "--lr", "1"])


def test_a_run_is_what_its_log_and_its_checkpoints_say(curves, curve_options, tmp_path, monkeypatch):
    """Losses in the order of the steps, counts of all steps by kind, and the steps in which anything was saturated."""
    def counts(**saturated):
        return {kind: {"values": 10, "saturated": number, "flushed": 1} for kind, number in saturated.items()}

    lost = [counts(input=0, gradient=0), counts(input=3, gradient=5), counts(input=0, gradient=1), counts(input=1), {}]
    commands = []

    def call(command):
        commands.append(list(map(str, command)))
        if "--eval" in command:
            return json.dumps({"val_loss": float(len(commands))})
        folder = Path(command[command.index("--out") + 1])
        for step in (4, 2):
            (folder / f"step_{step:08d}").mkdir(parents=True)
        records = [{"type": "step", "step": step, "loss": 10.0 - step, "fp8": lost[step - 1]} for step in (1, 3, 2, 4)]
        records.append({"type": "step", "step": 5, "loss": 5.0})
        (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    monkeypatch.setattr(curves, "call", call)
    run = curves.Run("fp8", 7, 2)
    row = curves.train(run, curve_options)
    assert row == {"losses": [9.0, 8.0, 7.0, 6.0, 5.0], "val": [[2, 2.0], [4, 3.0]], "saturated_steps": 3, "fp8": {
        "input": {"values": 40, "saturated": 4, "flushed": 4}, "gradient": {"values": 30, "saturated": 6, "flushed": 3}}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8-seed7-order2.json"], "the checkpoints go"
    options = dict(zip(commands[0][len(curve_options.rest) + 1::2], commands[0][len(curve_options.rest) + 2::2]))
    assert (options["--micro-batch"], options["--batch-tokens"], options["--seed"], options["--precision"]) == ("2", "128", "7", "fp8")
    assert (options["--save-every"], options["--keep"], options["--steps"]) == ("2", str(curves.MEASURED + 1), "9")
    for command, step in zip(commands[1:], (2, 4), strict=True):
        assert command[1:5] == ["--model", str(tmp_path / run.name / f"step_{step:08d}" / "model.bin"), "--precision", "bf16"]
        assert command[-6:] == ["--val", "v_*.bin", "--device", "cpu", "--val-batches", "3"]
    assert curves.train(run, curve_options) == row and len(commands) == 3, "what is complete is not made again"
    curve_options.rest = ["--config", "tiny"]
    assert curves.train(curves.Run("bf16", 7, 0), curve_options)["val"] == [] and len(commands) == 4, "without --val nothing is measured"


def test_curves_are_compared_with_those_of_the_same_seed(curves):
    def row(by):
        losses = [by * 4 * 0.99**step for step in range(200)]
        return {"losses": losses, "val": [[100, losses[99]], [200, losses[199]]], "fp8": {}, "saturated_steps": 0}

    rows = {curves.Run("bf16", 1, 0): row(1.0), curves.Run("bf16", 1, 1): row(1.01), curves.Run("fp8", 1, 0): row(1.02),
            curves.Run("bf16", 2, 0): row(2.0), curves.Run("bf16", 2, 1): row(2.02), curves.Run("fp8", 2, 0): row(2.0)}
    order, seeds, fp8 = (line.split(" | ") for line in curves.table(rows, "bf16", "fp8", 25).splitlines()[2:])
    assert (order[0], order[1], order[3]) == ("| bf16, sums in another order", "2", "+1.00 ± 0.00")
    assert (seeds[0], seeds[1], seeds[3]) == ("| bf16, other seeds", "1", "+100.00")
    assert (fp8[0], fp8[1], fp8[3], fp8[-1]) == ("| fp8 against bf16", "2", "+1.00 ± 1.00", "+1.00 ± 1.00 / +1.00 ± 1.00 |")


# ---- scripts that need torch, without it: what is no arithmetic ------------------------------------------------------


@pytest.fixture(scope="module")
def train_fp8():
    pytest.importorskip("xxhash")
    with pytest.MonkeyPatch.context() as patch, stub_torch.installed():
        patch.syspath_prepend(ROOT / "dev" / "accuracy")
        yield importlib.import_module("train_fp8")


def tensor(*values):
    return stub_torch.tensor([float(value) for value in values])


def test_the_largest_magnitude_of_a_step_is_that_of_all_its_sightings(train_fp8):
    for rounding in (train_fp8.Rounding(), train_fp8.SchemeRounding(train_fp8.FP8, 2)):
        for values in ((1, -2), (-7, 3), (0.5,), (6, 1)):
            rounding.see("input", "0.qkv", tensor(*values))
        rounding.see("input", "1.qkv", tensor(-0.25))
        rounding.see("gradient", "0.qkv", tensor(0, 0))
        rounding.counting = False
        rounding.see("input", "0.qkv", tensor(100))
        rounding.counting = True
        rounding.end_step()
        rounding.see("input", "0.qkv", tensor(3))
        rounding.end_step()
        assert rounding.past == {("input", "0.qkv"): [7.0, 3.0], ("input", "1.qkv"): [0.25], ("gradient", "0.qkv"): [0.0]}


def test_a_scale_follows_from_the_last_steps(train_fp8):
    """In the first step from the first tensor itself, and the same until the step ends."""
    for kind in train_fp8.KINDS:
        rounding, form = train_fp8.Rounding(), train_fp8.FORMATS[kind]
        exponent = lambda amax, margin: train_fp8.exponent_of(amax, form, margin)
        assert rounding.exponent(kind, "a", tensor(-3, 1)) == exponent(3, 1) == rounding.exponent(kind, "a", tensor(300))
        assert rounding.exponent(kind, "b", tensor(0.1)) == exponent(0.1, 1)
        for step in range(train_fp8.HISTORY + 1):
            rounding.see(kind, "a", tensor(1000 if step == 0 else 20 if step == 1 else 3))
            rounding.end_step()
            assert not rounding.current and not rounding.now
            largest = 1000 if step < train_fp8.HISTORY else 20
            assert rounding.exponent(kind, "a", tensor(1e6)) == exponent(largest, train_fp8.MARGINS[kind]), step


@pytest.mark.parametrize("form, largest", [("e4m3", 448), ("e5m2", 57344)])
def test_the_largest_power_that_leaves_the_margin(train_fp8, form, largest):
    """With margin 1 the largest magnitude becomes at most half of the format's largest number, and more than a quarter."""
    assert train_fp8.exponent_of(0, form, 1) == 0
    for amax in (1e-30, 0.1, 0.9375, 1, 1.5, 1.75, 1.7500001, 1.999, 2, 3.5, 3.6, largest, 2 * largest, 1e30):
        exponent = train_fp8.exponent_of(amax, form, 1)
        assert largest / 4 < amax * 2.0**exponent <= largest / 2
        assert train_fp8.exponent_of(amax, form, 6) == exponent - 5
    assert train_fp8.exponent_of(1e-45, form, 1) == 126 and train_fp8.exponent_of(1e-45, form, 6) == 121


def test_layers_products_and_steps_of_a_scheme(train_fp8):
    def at_work(scheme, layers=3, step=10**9):
        rounding = train_fp8.SchemeRounding(scheme, layers)
        rounding.begin_step(step)
        return {(layer, product) for layer in range(layers) for product in train_fp8.PRODUCTS if rounding.at_work(f"{layer}.gate_up", product)}

    but, fp8, schemes = train_fp8.but, train_fp8.FP8, train_fp8.SCHEMES
    every = {(layer, product) for layer in range(3) for product in train_fp8.PRODUCTS}
    assert at_work(fp8) == every and not at_work(train_fp8.FP32) and not at_work(schemes["bf16"])
    for layers, chosen in (((0,), {0}), ((-1,), {2}), ((0, -1), {0, 2}), ((-3,), {0}), ((1, 2), {1, 2}), ((-2,), {1})):
        assert at_work(but(fp8, layers=layers)) == {one for one in every if one[0] in chosen}
    assert {layer for layer, _ in at_work(schemes["last-layer"], layers=12)} == {11}
    assert {layer for layer, _ in at_work(schemes["first-layer"], layers=12)} == {0}
    for product in train_fp8.PRODUCTS:
        assert at_work(schemes[f"only-{product.replace('_', '-')}"]) == {one for one in every if one[1] == product}
    assert {product for _, product in at_work(schemes["no-weight-grad"])} == {"forward", "input_grad"}
    assert [bool(at_work(schemes["from-50"], step=step)) for step in (0, 49, 50, 51)] == [False, False, True, True]
    for kind in train_fp8.KINDS:
        assert schemes[f"only-{kind}"].form(kind) == train_fp8.FORMATS[kind]
        assert at_work(schemes[f"only-{kind}"]) == every and [each for each in train_fp8.KINDS if schemes[f"only-{kind}"].form(each)] == [kind]


def test_a_report_compares_with_the_mean_of_the_other_runs_of_the_seed(train_fp8, capsys):
    def row(scheme, seed, by, forward=1.0, steps=100):
        losses = [by * 4 * 0.99**step for step in range(steps)]
        val = [[step, losses[step - 1], forward * losses[step - 1]] for step in (50, 100) if step <= steps]
        return {"scheme": scheme, "seed": seed, "losses": losses, "val": val}

    rows = [row("fp32", 1, 0.99), row("fp32-1e-3", 1, 1.01), row("fp8", 1, 1.02, 1.03), row("fp32", 2, 2.0), row("fp8", 2, 2.0, 1.01),
            row("bf16", 1, 1.0, steps=40), row("fp8", 3, 1.0), row("fp32-1e-2", 2, 2.0, steps=7) | {"losses": [math.nan]}]
    train_fp8.report(rows, 15)
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["bf16"] == ["not finite in step 40"] and "fp32-1e-7" not in lines
    assert lines["fp8"][0] == "2", "a seed without a run in fp32 has nothing to be compared with"
    assert (lines["fp8"][2], lines["fp8"][3], lines["fp8"][5]) == ("+1.00 ± 1.00",) * 3
    assert lines["fp8"][6:] == ["+1.00 ± 1.00 / +1.00 ± 1.00", "+2.00 ± 1.00 / +2.00 ± 1.00"]
    assert lines["fp32"][0] == "1" and lines["fp32"][2] == f"{100 * (0.99 / 1.01 - 1):+.2f}", "not with itself"
    assert lines["fp32-1e-3"][2] == f"{100 * (1.01 / 0.99 - 1):+.2f}"


def test_all_shards_of_a_split_are_its_tokens_in_order(train_fp8, tmp_path):
    import token_shard

    for name, ids in (("train_00001", [4, 5]), ("train_00000", [1, 2, 3]), ("train_00010", [6]), ("val_00000", [9, 8]), ("val_00001", [7])):
        writer = token_shard.ShardWriter(tmp_path / f"{name}.bin", 70_000 if name[0] == "v" else 10, 1, 2)
        writer.write(stub_torch.np.array(ids))
        writer.close()
    for split, ids, vocabulary in (("train", [1, 2, 3, 4, 5, 6], 10), ("val", [9, 8, 7], 70_000)):
        tokens, size, end = train_fp8.tokens_of(tmp_path, split, "cpu")
        assert tokens.tolist() == ids and str(tokens.dtype) == "int32" and (size, end) == (vocabulary, 2)
    data = train_fp8.Data(tmp_path, 1, 1)
    assert {split: len(tokens) for split, tokens in data.splits.items()} == {"train": 6, "val": 3}
    with pytest.raises(train_fp8.cli.FileError, match="no shards") as missing:
        train_fp8.tokens_of(tmp_path, "test", "cpu")
    assert missing.value.code == 3
