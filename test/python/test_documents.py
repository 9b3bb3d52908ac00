"""Links of the documents lead somewhere, exit codes are documented, rooms include each other in one direction. And what the
scripts say to who starts them without reading."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                         text=True, check=True).stdout.split("\n")
TRACKED = [name for name in TRACKED if name and (ROOT / name).is_file()]
DOCUMENTS = [name for name in TRACKED if name.endswith(".md") and "fixtures" not in name]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def test_every_link_leads_somewhere():
    links = [(name, link) for name in DOCUMENTS for link in re.findall(r'\]\(([^)#\s]+)[^)]*\)|src="([^"]+)"', read(name))]
    local = [(name, "".join(link)) for name, link in links if not "".join(link).startswith(("http:", "https:", "mailto:"))]
    assert len(local) > 100
    assert [(name, link) for name, link in local if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_every_exit_code_is_documented():
    header = (ROOT / "llmc" / "base" / "error.h").read_text()
    codes = re.findall(r"^  \w+ = (\d+),", header, re.M)
    rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "doc" / "troubleshooting.md").read_text(), re.M)
    assert codes and sorted(codes) == sorted(code for row in rows for code in row.split(", "))


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


def test_every_command_of_readme_exists():
    """Programs, scripts and targets of the indented blocks."""
    targets = set(re.findall(r"^([\w.-]+):", read("Makefile"), re.M))
    commands = [line for block in re.findall(r"(?:^ {4}.*\n)+", read("README.md"), re.M) for line in block.splitlines()]
    made = [target for line in commands for target in re.findall(r"\bmake ([a-z][\w-]*)", line)]
    assert {"demo", "test"} <= set(made) <= targets, set(made) - targets
    run = [path for line in commands for path in re.findall(r"^ {4}(?:\.venv/bin/python )?((?:\./|scripts/|dev/)\S+)", line)]
    assert len(run) > 6
    assert [path for path in run if path not in ("./train_llama", "./infer_pythia") and not (ROOT / path).is_file()] == []


# ---- rooms ----------------------------------------------------------------------------------------------------------
# Which rooms a room may include. dev/ARCHITECTURE.md explains the rule.
BELOW_MODEL = {"base", "file", "text"}
CUDA_ROOMS = ["runtime", "comm", "hw", "formats", "op", "fused", "inference", "training"]  # each may include those before it
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
for with_ranks in ("cuda/comm", "cuda/training"):
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
    ("llmc/cpu/rope.cpp", "llmc/cuda/op/elementwise/rope.h"), ("llmc/cuda/op/elementwise/rope.cu", "llmc/cuda/fused/decode.h"),
    ("llmc/base/log.cpp", "llmc/file/run_dir.h"), ("llmc/cuda/flat.cu", "llmc/base/error.h")])
def test_an_include_against_the_direction_is_found(name, included):
    assert wrong_includes({name: f'#include "{included}"\n'})


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
