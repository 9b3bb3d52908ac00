"""The rows of dev/mutants/table.py quote code: a change of that code has to change them too."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load():
    """dev/mutants/run.py: test/run.py has the same name."""
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "dev" / "mutants" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_applies_to_the_tree():
    done = subprocess.run([sys.executable, ROOT / "dev" / "mutants" / "run.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100


def test_rows_that_do_not_apply_are_named(tmp_path):
    mutants = load()
    (tmp_path / "a.cpp").write_text("once twice twice\n")
    (tmp_path / "test" / "python").mkdir(parents=True)
    (tmp_path / "test" / "python" / "test_x.py").write_text("def test_here():\n    pass\n")
    good = dataclasses.replace(mutants.MUTANTS[0], name="good", file="a.cpp", old="once", new="never",
                               tests=("unit:A.*", "py:test_x.py::test_here[a]"))
    assert mutants.problems_of([good], tmp_path) == []
    bad = [({"old": "twice"}, "occurs 2 times"), ({"old": "thrice"}, "occurs 0 times"), ({"file": "b.cpp"}, "occurs 0 times"),
           ({"new": "once"}, "changes nothing"), ({"tests": ("py:test_y.py",)}, "no such file"),
           ({"tests": ("py:test_x.py::test_gone",)}, "no such test"), ({"tests": ("cpp:A.*",)}, "expected unit:")]
    for change, words in bad:
        (problem,) = mutants.problems_of([dataclasses.replace(good, **change)], tmp_path)
        assert words in problem
    assert "two rows have this name" in mutants.problems_of([good, good], tmp_path)[0]


def test_what_was_built_with_a_bug_is_built_again(tmp_path, monkeypatch):
    """As make sees it: an object that is older than its source, or is not there. Of a source file alone its own object stays."""
    mutants = load()
    out = tmp_path / "out"
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "OUT", out)
    out.mkdir()
    for file, own, stays in (("a.cpp", "a.o", True), ("a.h", "a.o", False), ("train_llama.cu", "train_llama.main.o", True),
                             ("new.cpp", None, False), ("a.py", None, True)):
        source, built = tmp_path / file, out / (own or "b.o")
        source.write_text("once\n")
        os.utime(source, (1000, 1000))
        if own is not None:
            built.write_text("good")
            os.utime(built, (2000, 2000))
        row = dataclasses.replace(mutants.MUTANTS[0], file=file, old="once", new="never")
        with mutants.Planted(row):
            assert source.read_text() == "never\n" and source.stat().st_mtime > 2000
            built.write_text("bad")
            (out / "unit_tests").write_text("bad")
            os.utime(built, (source.stat().st_mtime, ) * 2)
        assert source.read_text() == "once\n"
        assert (source.stat().st_mtime == 1000) == stays, file
        if own is not None and stays:
            assert built.read_text() == "good" and built.stat().st_mtime == 2000 and not (out / "unit_tests").exists(), file
        assert not list(out.glob("*.kept"))
        for path in out.iterdir():
            path.unlink()
