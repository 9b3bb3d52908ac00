"""The corpus of dev/data/make_almanac.py, the driver of dev/accuracy, and how it compares learning curves."""

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

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
    rows = [{"model": "llama", "key": "int8", "text": "held.txt"}, {"model": "llama", "key": "fp8-up", "text": "part.txt"},
            {"model": "neox", "key": "int4", "text": "held.txt"},
            *({"model": "llama", "key": key, "text": "both.txt"} for key in ("fp8", "int4", "int4-GPTQ"))]  # of the stage cpu
    for row in rows:
        run.add(row)
    (tmp_path / "corpus" / "train.txt").write_text(driver.SEPARATOR.join("abcdefghijklmnopqrstuvwxyz"))
    done = []
    monkeypatch.setattr(run, "base", lambda model: tmp_path)
    monkeypatch.setattr(run, "measure", lambda model, variant, calibration, text, device: done.append(
        (model, variant.key, len(calibration.read_text().split(driver.BETWEEN)), text.name, device)))
    run.evaluate("llama")
    assert sorted(done) == sorted(("llama", each.key, 10 if each.part else 20, "part.txt" if each.part else "held.txt", "cpu")
                                  for each in driver.VARIANTS if each.key not in ("int8", "fp8-up"))
    assert run.measured() == rows


def test_a_command_runs_from_the_root_and_is_logged(driver, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "99")
    run = driver.Run(driver.argparse.Namespace(work=tmp_path / "work", size="dry"))
    show = 'echo "$PWD ${OMP_NUM_THREADS:-unset} $OPENBLAS_NUM_THREADS"; echo "said $1" >&2'
    assert run.call(["sh", "-c", show, "sh", 7], "log", threads=3) == f"{ROOT} 3 3\n"
    assert run.call(["sh", "-c", show, "sh", Path("x")], "log") == f"{ROOT} unset 99\n"
    assert [line for line in (tmp_path / "work" / "log.log").read_text().splitlines()] == [
        f"$ sh -c {show} sh 7", "said 7", f"{ROOT} 3 3", f"$ sh -c {show} sh x", "said x", f"{ROOT} unset 99"]
    with pytest.raises(driver.cli.FileError, match="(?s)^other: exit code 5:.*in vain") as failed:
        run.call(["sh", "-c", "echo in vain; exit 5"], "other")
    assert failed.value.code == 1
    monkeypatch.setattr(run, "call", lambda *words: words)
    assert run.script("a/b.py", 1, "x", log="name", threads=2) == ([sys.executable, ROOT / "a/b.py", 1, "x"], "name", 2)


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
