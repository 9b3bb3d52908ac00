"""The corpus of dev/data/make_almanac.py, and the scales of training in fp8 in dev/accuracy."""

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
