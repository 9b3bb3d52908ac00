"""What documents quote of the code exists: paths, functions, types. Each name that a link follows is in the file of the link."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from test_documents import DOCUMENTS, ROOT, TRACKED, read

SOURCES = [name for name in TRACKED if re.search(r"\.(cu|cuh|h|cpp|py|sh|mk|toml|txt)$|^Makefile$|^\.ci/run$", name)]
WITH_NAMES = [name for name in DOCUMENTS if not name.startswith("dev/performance/archive/")]  # the archive keeps the names of its day
ABOUT_CODE = ["CONTRIBUTING.md", "dev/ARCHITECTURE.md", "doc/tour.md", *(name for name in DOCUMENTS if name.startswith("dev/recipes/"))]


@functools.cache
def words_of_code() -> frozenset[str]:
    others = (name for name in SOURCES if name != f"test/python/{Path(__file__).name}")  # which names what does not exist
    return frozenset(word for name in others for word in re.findall(r"\w+", read(name)))


def is_tracked(path: str) -> bool:
    """Whether `path` names a file or folder, perhaps without the folders that lead to it. NAME and "..." stand for anything."""
    pattern = re.sub(r"[A-Z]{4,}(_[A-Z]+)*", r"\\w+", re.escape(path.rstrip("/")).replace(re.escape("..."), ".*"))
    return any(re.search(rf"(^|/){pattern}(/|$)", name) for name in TRACKED)


def stale_names(document: str, text: str) -> list[str]:
    """What `document` quotes of the code and the code does not have."""
    stale = []
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"(llmc|scripts|dev|test|doc|packaging)/[\w./-]+|[a-z]\w*\.(cu|cuh|h|cpp|py)", span):
            wrong = not is_tracked(span) and span != "configuration_NAME.py"  # a file of transformers
        elif document in ABOUT_CODE or re.fullmatch(r"[\w:]+\(\)|\w+(::\w+)+", span):
            names = re.findall(r"[A-Za-z]\w+", re.sub(r"NAME\w*|[\w-]*/[\w/.-]*", "", span))
            wrong = not words_of_code().issuperset(names)
        else:
            continue
        stale += [span] * wrong
    return stale


def names_in_other_files(folder: Path, text: str) -> list[str]:
    """Of "`name()` ([file](link))", "`name()`, [file](link)" and "`name()` (`file`)" those whose file does not have the name."""
    elsewhere = []
    for name, link, path in re.findall(r"`([\w:]+)(?:\(\))?`(?:\s\(|,\s)(?:\[[^\]]*\]\(([^)]+)\)|`([\w./-]+)`)\)", text):
        file = folder / link if link else ROOT / path
        if file.is_file() and not re.search(rf"\b{name.split('::')[-1]}\b", file.read_text()):
            elsewhere.append(f"{name} in {link or path}")
    return elsewhere


@pytest.mark.parametrize("document", WITH_NAMES)
def test_names_of_the_code_exist(document):
    assert stale_names(document, read(document)) == []
    assert names_in_other_files((ROOT / document).parent, read(document)) == []


def test_stale_names_are_found():
    assert {"doc/tour.md", "dev/recipes/operator.md"} <= set(ABOUT_CODE) <= set(WITH_NAMES)
    good = "`llmc/cpu/rope.h`, `rope.h`, `rope_forward()`, `TensorTable`, `llmc/model/families/NAME.cpp`, `llmc/.../rope.h`"
    bad = ["llmc/cpu/rope_of_old.h", "rope_of_old.h", "rope_of_old()", "TensorTable::of_old()", "llmc/model/of_old/NAME.cpp"]
    assert stale_names("doc/tour.md", good) == stale_names("doc/chat.md", good) == []
    assert stale_names("doc/chat.md", good + "".join(f" `{name}`" for name in bad)) == bad
    assert stale_names("doc/tour.md", "`RopeOfOld`") == ["RopeOfOld"]
    rope = "`rope_forward()` ([llmc/cpu/rope.h](../llmc/cpu/rope.h)), `matmul_forward()` (`llmc/cpu/matmul.h`)"
    assert names_in_other_files(ROOT / "doc", rope) == []
    assert names_in_other_files(ROOT / "doc", rope.replace("rope_forward", "matmul_forward")) == ["matmul_forward in ../llmc/cpu/rope.h"]
    assert names_in_other_files(ROOT / "doc", rope.replace("cpu/matmul.h", "cpu/rope.h")) == ["matmul_forward in llmc/cpu/rope.h"]
