"""What the documents say about messages, against the source: a message that nobody prints any more is a trap for readers.
And what the scripts say to who starts them without reading."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def code_files() -> list[Path]:
    patterns = ("*.cu", "llmc/*/*.cpp", "llmc/*/*.h", "llmc/*/*.cu", "llmc/*/*.cuh", "llmc/*/*/*.cu", "llmc/*/*/*.h",
                "scripts/*.py", "scripts/*.sh", "dev/*.py", "dev/*.sh")
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


HOLE = "\0"  # in a message: what is filled in
NAMES = ("tokenizer.json", "model.merges", "pid", "gpt_neox")  # of files, fields and models, as examples have them
SYSTEM = ("No such file or directory", "No space left on device")  # the system's own words


def literals() -> list[str]:
    """The string literals of the source, those that follow each other joined, with a hole for each value."""
    found = []
    for path in code_files():
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)
    spec = r"%[-+ #0]*\d*(?:\.(?:\d+|\*))?(?:hh|h|ll|l|z|t)?[diouxXeEfgGscp]"
    return [re.sub(rf"(?:{spec}|\{{[^{{}}]*\}})+", HOLE, text.replace('\\"', '"')) for text in found]


class Source:
    """Answers whether a documented message can come from the literals of the source."""

    def __init__(self) -> None:
        self.literals = literals()
        self.all = "\n".join(self.literals)

    def holds(self, message: str) -> bool:
        return message in self.all or any(self._begins(message, text.split(HOLE)) for text in self.literals if HOLE in text)

    def _begins(self, message: str, pieces: list[str]) -> bool:
        """The message begins with a value, or in a piece at the beginning of a word, and goes on as the literal does."""
        for number, piece in enumerate(pieces[:-1]):
            value = re.match(r"[\w.-]+", message)
            if value and self._goes_on(message, pieces[number + 1:]):
                return True
            starts = {0} | {match.end() for match in re.finditer(r"[: ]", piece)}
            for start in sorted(starts):
                tail = piece[start:]
                if len(tail) >= 2 and message.startswith(tail) and self._goes_on(message[len(tail):], pieces[number + 1:]):
                    return True
        return False

    def _goes_on(self, rest: str, pieces: list[str]) -> bool:
        """`rest` is a value, then the first piece, and so on; it may end anywhere."""
        if self._is_value(rest):
            return True
        if not pieces:
            return False
        piece = pieces[0]
        for end in range(len(rest) + 1):
            shared = min(len(piece), len(rest) - end)
            if rest[end:end + shared] == piece[:shared] and shared and self._is_value(rest[:end]):
                if end + shared == len(rest) or self._goes_on(rest[end + shared:], pieces[1:]):
                    return True
        return False

    def _is_value(self, text: str) -> bool:
        """What can be filled in: a number, an option, other words of the source, of the system."""
        return (re.fullmatch(r"[\d.,]*|--[a-z-]+|'.*'", text) is not None or text in self.all or text in SYSTEM or
                text in NAMES)


def documented(path: Path) -> list[str]:
    """The code spans in the first column of each table whose first column is `message`."""
    found, inside = [], False
    for line in path.read_text().splitlines():
        if re.match(r"\| message \|", line):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside:
            found += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return found


def parts(message: str) -> list[str]:
    return [part for part in re.split(r"\s*\.\.\.\s*", message) if len(part) > 3]


def test_every_documented_message_is_in_the_source():
    source = Source()
    spans = documented(ROOT / "doc" / "troubleshooting.md")
    assert len(spans) > 60
    absent = [(span, part) for span in spans
              for part in parts(span.removeprefix("error: ").removeprefix("warning: ")) if not source.holds(part)]
    assert not absent, "\n".join(f"{part!r} of {span!r}" for span, part in absent)


def test_a_message_that_nobody_prints_is_found():
    source = Source()
    assert source.holds("kind: this is a training state, expected a model")
    assert not source.holds("kind: this is a blue moon, expected a model")
    assert not source.holds("the disk is tired of you")


def test_every_exit_code_is_documented():
    header = (ROOT / "llmc" / "base" / "error.h").read_text()
    codes = re.findall(r"^  \w+ = (\d+),", header, re.M)
    rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "doc" / "troubleshooting.md").read_text(), re.M)
    assert codes and sorted(codes) == sorted(code for row in rows for code in row.split(", "))


def test_limits_in_the_security_notes_are_those_of_the_code():
    text = (ROOT / "SECURITY.md").read_text()
    sources = {path: path.read_text() for path in code_files()}
    def value(name: str, file: str) -> str:
        return re.search(rf"\b{name}\b = ([^;]+);", sources[ROOT / file])[1]
    assert "65,536 tensors, rank 8, names of 255 bytes" in text
    assert value("kMaxTensors", "llmc/file/tensor_file.h") == "65536"
    assert value("kMaxTensorRank", "llmc/file/tensor_file.h") == "8"
    assert value("kMaxTensorName", "llmc/file/tensor_file.h") == "255"
    assert "depth 64, 100 MB; in a tensor file 16 MiB" in text
    assert "bytes = 100'000'000" in sources[ROOT / "llmc/base/json.h"] and "depth = 64" in sources[ROOT / "llmc/base/json.h"]
    assert value("kMaxConfigBytes", "llmc/file/tensor_file.h") == "16 << 20"
    assert "1,024 layers, 1,000,000 tokens, hidden and FFN size 2^20, 1,024 heads of at most 1,024, 2^24 positions" in text
    config = "llmc/model/config.cpp"
    assert [value(name, config) for name in ("kMaxLayers", "kMaxVocab", "kMaxWidth", "kMaxHeads", "kMaxHeadDim",
                                             "kMaxPositions")] == ["1024", "1'000'000", "1 << 20", "1024", "1024", "1 << 24"]
    assert "prompt | 64 MiB; text to score 4 GiB" in text
    assert value("kMaxPromptBytes", "infer_pythia.cu") == "64 << 20"
    assert value("kMaxTextBytes", "infer_pythia.cu") == "4ull << 30"


def test_every_numbered_case_has_a_row():
    text = (ROOT / "doc" / "robustness.md").read_text()
    numbers = set()
    for first, last in re.findall(r"\bB(\d\d)(?:–B(\d\d))?", text):
        numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers == set(range(1, 99)), sorted(set(range(1, 99)) - numbers)


def test_every_test_that_the_table_names_exists():
    """`FILE::TEST`, then `::TEST` of the same file, and in C++ `.TEST` of the same suite too."""
    tests = {path.name: path.read_text() for folder in ("test/python", "test/cpp", "test/gpu")
             for path in (ROOT / folder).glob("*") if path.is_file()}
    missing, named, file, suite = [], 0, "", ""
    for span in re.findall(r"`([^`\n]+)`", (ROOT / "doc" / "robustness.md").read_text()):
        match = re.fullmatch(r"(?:(\w+\.(?:py|cpp))?::)?(?:(\w*)\.)?(\w+|\*)", span)
        if match is None or not ("::" in span or re.match(r"\.[A-Z]", span)):
            continue
        named += 1
        file, suite = match[1] or file, match[2] or suite
        name = "" if match[3] == "*" else match[3]
        wanted = rf"^def {name}\(" if file.endswith(".py") else rf"^(?:TYPED_)?TEST(?:_F|_P)?\({suite}, {name}"
        if not re.search(wanted, tests.get(file, ""), re.M):
            missing.append(f"{file}: {span}")
    assert named > 100 and not missing, missing


SCRIPTS = ["scripts/convert_hf.py", "scripts/export_hf.py", "scripts/plot_log.py", "scripts/dump_reference.py",
           "scripts/train_reference.py", "scripts/tensor_file.py", "dev/prepare_data.py", "scripts/export_log.py",
           "dev/train_tokenizer.py"]


def refused(*command, code=4, **environment) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": "", **environment})
    assert done.returncode == code and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_its_packages_says_what_to_do(script):
    message = refused("-S", script, "--help")  # -S: no package that was installed
    assert re.match(rf"error: \w+: not installed. Run make venv, then .venv/bin/python {script}$", message), message


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_under_an_old_python_says_what_to_do(script, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 9, 18, 'final', 0)\n")
    assert "this is Python 3.9, expected 3.11 or later" in refused(script, "--help", PYTHONPATH=str(tmp_path))


def test_an_interrupt_while_packages_load_is_one_line(tmp_path):
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    assert refused("scripts/convert_hf.py", "--help", code=130, PYTHONPATH=str(tmp_path)) == "error: interrupted\n"
