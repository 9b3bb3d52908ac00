"""The corpus of dev/data/make_almanac.py."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "data"))

from almanac import pages  # noqa: E402

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
