"""The corpus of dev/data/make_almanac.py, the driver of dev/accuracy, and how it compares learning curves."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev" / "data"), str(ROOT / "scripts")]

from almanac import pages, world  # noqa: E402

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
