"""What the documents say, against the tree: messages that are printed, files, functions and options that exist, figures that
agree, rooms that include each other in one direction. And what the scripts say to who starts them without reading."""

from __future__ import annotations

import fnmatch
import json
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


# ---- usage errors: each has an entry ----------------------------------------------------------------------------------
USAGE_ROOMS = ("base", "text", "model", "train", "infer", "serve", "app")
SPEC = r"%[-+ #0]*\d*(?:\.(?:\d+|\*))?(?:hh|h|ll|l|z|t)?[diouxXeEfgGscp]"


def failures(text: str, codes: str) -> list[str]:
    """The messages of the calls fail(code, MESSAGE, ...) of a source, `...` for each value. MESSAGE may choose between two."""
    text = re.sub(r"//[^\n]*", "", text)
    found = []
    for call in re.finditer(rf"\bfail\(\s*(?:{codes}),", text):
        depth, at, message = 0, call.end(), ""
        while depth > 0 or text[at] not in ",)":
            piece = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.S).match(text, at)[0]
            depth += (piece in "([{") - (piece in ")]}")
            message, at = message + piece, at + len(piece)
        message = re.sub(r'"\s*"', "", message)
        found += [re.sub(rf"(?:{SPEC})+", "...", literal) for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', message)]
    return found


def explains(entry: str, message: str) -> bool:
    """Whether an entry is about a message: both begin with the same option, or with any, and the words of the entry are those
    of the message, in order."""
    option = re.match(r"--(?:[a-z][a-z-]*|\.\.\.)", message)
    words = [part.strip() for part in entry.split("...") if part.strip()]
    if option is not None and not re.match(re.escape(option[0]) + r"(?![a-z-])", entry):
        return False
    return sum(map(len, words)) >= 10 and re.search(".*?".join(map(re.escape, words)), message) is not None


def unexplained(sources: dict[str, str], entries: list[str]) -> list[str]:
    absent = []
    for name, text in sources.items():
        codes = r"Exit::\w+|code" if "/app/" in name else "Exit::usage"
        messages = [message for message in failures(text, codes) if re.search("[a-z]", message)]
        absent += [f"{name}: {message}" for message in messages if not any(explains(entry, message) for entry in entries)]
    return absent


def usage_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for room in USAGE_ROOMS for path in (ROOT / "llmc" / room).glob("*.cpp")}


def test_every_usage_error_has_an_entry():
    sources = usage_sources()
    assert sum(len(failures(text, "Exit::usage")) for text in sources.values()) > 60
    absent = unexplained(sources, documented(ROOT / "doc" / "troubleshooting.md"))
    assert not absent, "without an entry in doc/troubleshooting.md:\n" + "\n".join(absent)


def test_a_usage_error_without_an_entry_is_found():
    entries = documented(ROOT / "doc" / "troubleshooting.md")
    name = "llmc/train/options.cpp"
    for line in ('fail(Exit::usage, "--moon: got %s, expected a phase", x);', 'fail(Exit::usage, full ? "--out: needed" : "--moon: blue");',
                 'fail(Exit::usage,\n     "--eval: needs "\n     "--moon, the %d");', 'fail(Exit::usage, "the moon is %s", phase(1, "x").c_str());'):
        assert len(unexplained({name: line}, entries)) == 1, line


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
    assert "depth 64, 100 MB, 5,000,000 values; in a tensor file 16 MiB" in text and "each of 1,000,000 values" in text
    json_header = sources[ROOT / "llmc/base/json.h"]
    assert "bytes = 100'000'000" in json_header and "depth = 64" in json_header and "values = 5'000'000" in json_header
    assert value("kMaxConfigValues", "llmc/base/json.h") == "1'000'000"
    assert value("kMaxConfigBytes", "llmc/file/tensor_file.h") == "16 << 20"
    assert "1,024 layers, 1,000,000 tokens, hidden and FFN size 2^20, 1,024 heads of at most 1,024, 2^24 positions" in text
    config = "llmc/model/limits.h"
    assert [value(name, config) for name in ("kMaxLayers", "kMaxVocab", "kMaxWidth", "kMaxHeads", "kMaxHeadDim",
                                             "kMaxPositions")] == ["1024", "1'000'000", "1 << 20", "1024", "1024", "1 << 24"]
    assert "prompt | 64 MiB; text to score 4 GiB" in text
    assert value("kMaxPromptBytes", "llmc/app/decode_session.h") == "64 << 20"
    assert value("kMaxTextBytes", "llmc/app/decode_session.h") == "4ull << 30"


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


# ---- names in code font ---------------------------------------------------------------------------------------------
TRACKED = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                         text=True, check=True).stdout.split("\n")
TRACKED = [name for name in TRACKED if name and (ROOT / name).is_file()]
CODE = re.compile(r"\.(cu|cuh|h|cpp|py|sh|mk|toml|yml|yaml)$|(^|/)Makefile$")
DOCUMENTS = [name for name in TRACKED if name.endswith(".md") and
             (name.startswith(("doc/", "dev/")) or name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")) and
             "archive" not in name and "fixtures" not in name]

# What documents name and the tree does not hold, each with its reason.
ELSEWHERE = {
    "--gtest_filter",   # an option of GoogleTest
    "--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--no-python",  # options of torchrun
    "--nodes", "--ntasks-per-node", "--gpus-per-node",  # and of srun
    "train_00001.bin",  # an example of a name that dev/prepare_data.py counts up
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


class Tree:
    """Answers whether a name that a document puts in code font exists."""

    def __init__(self) -> None:
        # Without C++ comments: a name that only a comment still holds does not exist.
        self.code = "\n".join(re.sub(r"//.*", "", read(name)) if re.search(r"\.(cu|cuh|h|cpp)$", name) else read(name)
                              for name in TRACKED if CODE.search(name) and name != "test/python/test_documents.py")
        self.words = set(re.findall(r"[A-Za-z_]\w*", self.code)) | {Path(name).stem for name in TRACKED}  # stems: programs
        self.called = set(re.findall(r"([A-Za-z_]\w*)\s*[(<{]", self.code))
        self.names = {Path(name).name for name in TRACKED}
        self.top = {name.split("/")[0] for name in TRACKED}
        self.targets = set(re.findall(r"^([\w.-]+):", read("Makefile"), re.M))

    def path(self, text: str, base: str = "") -> bool:
        """A path from the root, or from the folder of the document; `*` and `{a,b}` as a shell reads them."""
        for option in self._alternatives(text):
            found = any((ROOT / start / option.rstrip("/")).exists() or
                        ("*" in option and any((ROOT / start).glob(option))) for start in {"", base})
            if not found and not self._is_a_file_name(option):
                return False
        return True

    def _alternatives(self, text: str) -> list[str]:
        match = re.search(r"\{([^{}]*)\}", text)
        if match is None:
            return [text]
        return [path for part in match[1].split(",")
                for path in self._alternatives(text[:match.start()] + part + text[match.end():])]

    def _is_a_file_name(self, path: str) -> bool:
        """A bare file name: that of a file somewhere in the tree, or one that a source has in a string."""
        return "/" not in path and (path in self.names or
                                    re.search(rf'["\'/]{re.escape(path)}["\'\s.]', self.code) is not None)

    def target(self, text: str) -> bool:
        """A target by its name, or what it makes under build/<mode>: an object of a source, a program of a main or of tests."""
        if match := re.fullmatch(r"build/release/(.+?)(\.o)?", text):
            sources = [f"{match[1]}{ending}" for ending in (".cpp", ".cu")]
            return any((ROOT / source).exists() for source in sources) or (
                match[2] is None and re.search(rf"^\$B/{re.escape(match[1])}:", read("Makefile"), re.M) is not None)
        return text in self.targets

    def option(self, text: str) -> bool:
        """Declared in an option table (C++: its name in quotes), by a script, or named whole in a source."""
        name = text.lstrip("-")
        return text in ELSEWHERE or f'"{name}"' in self.code or re.search(rf"{text}(?![\w-])", self.code) is not None

    def missing(self, span: str, base: str) -> list[str]:
        """What of a span does not exist. Spans that are no path, name, option or command are not looked at."""
        if span in ELSEWHERE:
            return []
        absent = [option for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", span) if not self.option(option)]
        if match := re.match(r"make ([a-z][\w./-]*)", span):
            absent += [] if self.target(match[1]) else [span]
        elif re.fullmatch(r"[\w.*{},-]+(/[\w.*{},-]+)*/?", span) and (
                "/" in span or re.search(r"\.(cu|cuh|h|cpp|py|sh|md|bin|json|jsonl|txt|mk)$", span)) and (
                span.split("/")[0] in self.top or "/" not in span or span.startswith("..")):
            absent += [] if self.path(span, base) else [span]
        elif match := re.fullmatch(r"(?:[\w:]+::)?([A-Za-z_]\w*)(?:<[\w, ]*>)?\(.*\)", span):
            absent += [] if match[1] in self.called else [span]
        elif re.fullmatch(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*", span) and re.search(r"[a-z\d]_[a-z\d]|[a-z][A-Z]|_$|::", span):
            absent += [word for word in span.split("::") if word not in self.words and word not in ELSEWHERE]
        return absent


def spans(name: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", read(name), flags=re.M | re.S)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree()


def test_every_name_in_code_font_exists(tree):
    looked_at = [(name, span) for name in DOCUMENTS for span in spans(name)]
    assert len(looked_at) > 500
    absent = [f"{name}: `{span}`: no {part}" for name, span in looked_at
              for part in tree.missing(span, str(Path(name).parent))]
    assert not absent, "\n".join(sorted(set(absent)))


def test_options_in_commands_exist(tree):
    """Indented and fenced commands, too."""
    absent = []
    for name in DOCUMENTS:
        for command in re.findall(r"^(?: {4}|\$ )(.*)$", read(name), re.M):
            absent += [f"{name}: {option}" for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", command)
                       if not tree.option(option)]
            absent += [f"{name}: {script}" for script in re.findall(r"(?:scripts|dev|test)/[\w/.-]+\.(?:py|sh|cpp|cu)", command)
                       if not (ROOT / script).exists()]
    assert not absent, absent


def test_every_link_leads_somewhere():
    absent = [f"{name}: {link}" for name in [*DOCUMENTS, "dev/performance/archive/2026-11.md"]
              for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", read(name))
              if not link.startswith(("http:", "https:", "mailto:")) and not (ROOT / Path(name).parent / link).exists()]
    assert not absent, absent


def not_in_their_files(text: str, folder: str) -> list[str]:
    """Names that a link to a file follows, "`name()` ([file](link))", which that file does not hold."""
    pairs = re.findall(r"`(?:\w+::)*(\w+)(?:\(\))?`\s+\(\[[^\]]+\]\(([^)]+)\)", text)
    assert pairs
    return [f"{name} in {link}" for name, link in pairs
            if not re.search(rf"\b{name}\b", (ROOT / folder / link).read_text())]


def test_the_tour_links_functions_to_their_files():
    assert not_in_their_files(read("doc/tour.md"), "doc") == []
    assert not_in_their_files("`run_blue()` ([x](../llmc/base/log.h))", "doc") == ["run_blue in ../llmc/base/log.h"]


@pytest.mark.parametrize("span", ["llmc/cuda/op/blue_moon.cu", "blue_moon.cu", "forward_of_the_moon()", "BlueMoonKernel",
                                  "blue_moon", "--blue-moon", "make moon", "make build/release/llmc/moon.o", "train_llama --config tiny --blue-moon 3",
                                  "llmc/cuda/op/{gelu,moon}.cu", "weft::BlueMoon", "llmc/moon/*.cpp"])
def test_a_name_that_does_not_exist_is_found(tree, span):
    assert tree.missing(span, "")


@pytest.mark.parametrize("span", ["llmc/model/config.h", "config.h", "Makefile", "llmc/base/*.h", "run_program()", "MemoryPlan",
                                  "TrainModel", "--micro-batch", "make test", "make build/release/llmc/cpu/matmul.o", "test/fixtures/golden", "x * y",
                                  "llmc/base/{error,log}.h", "weft::Error"])
def test_a_name_that_exists_is_found(tree, span):
    assert not tree.missing(span, "")


def test_code_cites_sections_that_exist():
    """`dev/performance/PAGE.md, "Section"` in code and documents, over the end of a comment's line, too."""
    cited, absent = 0, []
    for name in TRACKED:
        if not (CODE.search(name) or name.endswith(".md")) or name == "test/python/test_documents.py" or "archive" in name:
            continue
        text = re.sub(r"\n\s*(//|#)\s*", " ", read(name))
        if "dev/PERFORMANCE" in text:
            absent.append(f"{name}: dev/PERFORMANCE.md, which is dev/performance/ now")
        for page, section in re.findall(r'dev/performance/([\w./-]+\.md)\)?(?:,\s+"([^"]+)")?', text):
            cited += 1
            path = ROOT / "dev" / "performance" / page
            if not path.exists() or (section and not re.search(rf"^#+ {re.escape(section)}\b", path.read_text(), re.M)):
                absent.append(f'{name}: {page}, "{section}"')
    assert cited > 3 and not absent, absent


def test_current_figures_are_those_of_the_pages():
    figures = json.loads(read("dev/performance/figures.json"))
    assert len(figures) > 40
    index = read("dev/performance/README.md")
    for figure in figures:
        page = read(f"dev/performance/{figure['page']}")
        assert f"({figure['page']})" in index, figure
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", figure["date"]), figure
        assert figure["gpu"] and figure["command"] and figure["unit"], figure
        for key in ("value", "share", "share_of_floor", "share_of_read", "mfu", "peer", "ratio", "tflops"):
            assert figure.get(key, "") in page, (key, figure)


def test_piece_sizes_name_constants_and_tests_of_today():
    tests = "".join(path.read_text() for room in ("cpp", "gpu") for path in sorted((ROOT / "test" / room).glob("*_test.cpp")))
    names = {f"{suite}.{name}" for suite, name in re.findall(r"TEST(?:_[FP])?\((\w+), (\w+)\)", tests)}
    rows = re.findall(r"^\| `(llmc/\S+)` \| (.*?) \| (.*?) \| (.*) \|$", read("doc/piece_sizes.md"), flags=re.M)
    assert len(rows) > 80
    for file, constants, _, crossed_by in rows:
        for constant in re.findall(r"`(k[A-Z]\w*)`", constants):
            assert re.search(rf"\b{constant}\b", read(file)), (file, constant)
        for test in re.findall(r"`([*\w]+\.[*\w]+)`", crossed_by):
            assert any(fnmatch.fnmatch(name, test) or fnmatch.fnmatch(f"x/{name}/0", test) for name in names), (file, test)


# ---- rooms ----------------------------------------------------------------------------------------------------------
# Which rooms a room may include. dev/ARCHITECTURE.md explains the rule.
BELOW_MODEL = {"base", "file", "text"}
CUDA_ROOMS = ["runtime", "comm", "hw", "op", "fused", "transformer", "llama"]  # each may include those before it
MAY_INCLUDE = {
    "base": set(),
    "file": {"base"},
    "text": {"base"},
    "comm": {"base"},
    "model": {"base", "file"},
    "cpu": {"base", "comm", "model"},
    "infer": BELOW_MODEL | {"model"},
    "train": BELOW_MODEL | {"comm", "model", "infer"},
    "serve": {"base", "text", "model", "infer"},
    **{f"cuda/{room}": {"base", "model"} | {f"cuda/{before}" for before in CUDA_ROOMS[:i]}
       for i, room in enumerate(CUDA_ROOMS)},
}
for with_ranks in ("cuda/comm", "cuda/llama"):
    MAY_INCLUDE[with_ranks] |= {"comm"}
# What both mains share chooses between the devices, so it and the mains see every room.
MAY_INCLUDE["app"] = set(MAY_INCLUDE)


def room_of(path: str) -> str:
    parts = path.split("/")
    if parts[0] != "llmc":
        return ""
    return "/".join(parts[1:3]) if parts[1] == "cuda" and len(parts) > 3 else parts[1]


def wrong_includes(sources: dict[str, str]) -> list[str]:
    wrong = []
    for name, text in sources.items():
        room = room_of(name)
        if room not in MAY_INCLUDE:
            wrong.append(f"{name}: {room} is no room")
            continue
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
            if room_of(included) != room and room_of(included) not in MAY_INCLUDE[room]:
                wrong.append(f"{name} includes {included}")
    return wrong


def test_rooms_include_in_one_direction():
    sources = {name: read(name) for name in TRACKED if re.match(r"llmc/.*\.(cu|cuh|h|cpp)$", name)}
    assert len(sources) > 150
    assert wrong_includes(sources) == []
    assert {room_of(name) for name in sources} >= set(MAY_INCLUDE) - {"app"}


@pytest.mark.parametrize("name, included", [
    ("llmc/cpu/rope.cpp", "llmc/cuda/op/rope.h"), ("llmc/cuda/op/rope.cu", "llmc/cpu/rope.h"),
    ("llmc/cuda/runtime/arena.cu", "llmc/cuda/hw/common.cuh"), ("llmc/cuda/op/gelu.cu", "llmc/cuda/fused/decode.h"),
    ("llmc/base/log.cpp", "llmc/file/run_dir.h"), ("llmc/infer/engine.cpp", "llmc/serve/http.h"),
    ("llmc/serve/server.cpp", "llmc/file/tensor_file.h"), ("llmc/infer/report.cpp", "llmc/train/loop.h"),
    ("llmc/train/loop.cpp", "llmc/cuda/llama/llama.h"), ("llmc/model/config.cpp", "llmc/app/device.h"),
    ("llmc/cuda/flat.cu", "llmc/base/error.h"), ("llmc/cuda/op/rank_sum.cu", "llmc/comm/communicator.h"), ("llmc/comm/communicator.h", "llmc/model/tensor_table.h"),
    ("llmc/model/train_model.h", "llmc/comm/communicator.h")])
def test_an_include_against_the_direction_is_found(name, included):
    assert wrong_includes({name: f'#include "{included}"\n'})


def test_few_headers_include_all_of_json():
    """Its header costs each file that includes it a second of compiling, and clang-tidy four: the others include json_fwd.h."""
    sources = {name: read(name) for name in TRACKED if re.match(r"llmc/.*\.(cuh|h)$", name)}
    with_json = {"llmc/base/json.h"}
    del sources["llmc/base/precompiled.h"]  # parsed once
    while True:
        more = {name for name, text in sources.items() if any(f'#include "{header}"' in text for header in with_json)} | with_json
        if more == with_json:
            break
        with_json = more
    assert {room_of(name) for name in with_json} == {"base", "model", "text", "train"} and len(with_json) <= 7, sorted(with_json)


SCRIPTS = ["scripts/convert_hf.py", "scripts/export_hf.py", "scripts/plot_log.py", "scripts/dump_reference.py",
           "scripts/train_reference.py", "scripts/tensor_file.py", "dev/prepare_data.py", "scripts/export_log.py",
           "dev/train_tokenizer.py", "dev/memory_table.py"]


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
