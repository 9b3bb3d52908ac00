"""make install, make dist and packaging/: commands that messages name exist, pages say what --help says, nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_build import NVCC, gpu, make, no_gpu  # noqa: F401, fixtures

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
PROGRAMS = ("train_llama", "infer_pythia")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What make install makes of the programs that are built: DESTDIR and PREFIX are both honoured."""
    place = tmp_path_factory.mktemp("destination")
    for name in PROGRAMS:
        if not (ROOT / "build/release" / name).exists():
            pytest.skip("the programs are not built")
    # `all` is up to date: its rules are left out, so that nothing is compiled here.
    make("-o", "all", f"DESTDIR={place}", "PREFIX=/opt/weft", f"PYTHON={sys.executable}", "install")
    return place


def run(*words, code=0, **environment):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done


def test_everything_is_under_destdir_and_goes_again(installed, tmp_path):
    assert sorted(path.name for path in installed.iterdir()) == ["opt"]
    copy = tmp_path / "copy"
    shutil.copytree(installed, copy, symlinks=True)
    make(f"DESTDIR={copy}", "PREFIX=/opt/weft", "uninstall")
    assert [path for path in copy.rglob("*") if not path.is_dir()] == []


def test_the_version_is_one_number(installed):
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    for name in PROGRAMS:
        said = run(installed / "opt/weft/bin" / name, "--version").stdout
        assert re.match(rf"{name} {re.escape(VERSION)}(\+[0-9a-f]+(-dirty)?)? \(", said), said


def test_commands_that_messages_name_exist(installed, tmp_path):
    """A conversion, its next commands as they stand, and a program's advice, in a directory that is no checkout."""
    path = {"PATH": f"{installed}/opt/weft/bin:{os.environ['PATH']}", "WEFT_PYTHON": sys.executable, "HOME": str(tmp_path)}
    share = installed / "opt/weft/share/weft"

    def shell(command, code=0):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=240,
                              env={**os.environ, **path})
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done

    said = shell(f"weft-convert-hf {share}/models/tiny-llama -o m.bin").stdout
    infer, prepare, train = re.findall(r"^next +(.*)$", said, re.M)
    assert (infer.split()[0], prepare.split()[0], train.split()[0]) == ("infer_pythia", "weft-prepare-data", "train_llama")
    assert shell(infer + " --max-tokens 4").stdout.startswith("Hello")
    (tmp_path / "my.txt").write_text("Once upon a time there was a weft.\n" * 2000)
    assert "\n  train_llama --config tiny " in shell(prepare).stdout
    shell(train + " --steps 1 --micro-batch 1 --seq-len 16 --val-batches 1")
    shell("weft-plot-log --help")
    advice = shell(f"infer_pythia --model {share}/models/tiny-llama/model.safetensors --prompt x", code=3).stderr
    assert "convert it with weft-convert-hf" in advice
    assert "made by weft-convert-hf" in " ".join(shell("infer_pythia --help").stdout.split())
    advice = shell(f"weft-tensor-file {share}/models/tiny-llama/model.safetensors", code=3).stderr
    assert "convert it with weft-convert-hf" in advice
    for command in sorted((installed / "opt/weft/bin").iterdir()):
        if command.name not in ("weft-setup",):
            shell(f"{command.name} --help")


def test_a_package_that_is_missing_names_the_setup(installed, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(name='numpy')")
    done = run(installed / "opt/weft/bin/weft-convert-hf", "x", "-o", "y", code=4, WEFT_PYTHON=sys.executable,
               PYTHONPATH=str(tmp_path))
    assert done.stderr == "error: numpy: not installed. Run weft-setup\n"


def words_of(text: str) -> str:
    return " ".join(text.split())


def test_pages_say_what_help_says(installed):
    pages = sorted((installed / "opt/weft/share/man/man1").iterdir())
    assert {"train_llama.1", "infer_pythia.1", "weft-convert-hf.1", "weft-prepare-data.1"} <= {page.name for page in pages}
    for page in pages:
        text = page.read_text()
        name = page.stem
        assert text.startswith(f'.TH "{name}" 1 "" "weft {VERSION}')
        help_text = run(installed / "opt/weft/bin" / name, "--help", WEFT_PYTHON=sys.executable, COLUMNS="80").stdout
        shown = text.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'").replace("\\&", "")
        body = shown.split(".SH DESCRIPTION\n.nf\n")[1].replace(".fi\n", "").replace(".nf\n", "")
        body = re.sub(r'^\.SH "(.*)"$', lambda m: m[1] + ":", body, flags=re.M).removesuffix(".fi\n")
        assert words_of(body).lower() == words_of(help_text).lower(), name
        if shutil.which("man"):
            done = run("man", "--warnings", "-l", page, MANWIDTH="100", MAN_KEEP_FORMATTING="", LC_ALL="C.UTF-8")
            assert done.stderr == "" and name in done.stdout


def test_the_service_is_hardened_and_valid(installed, tmp_path):
    unit = (installed / "opt/weft/lib/systemd/system/weft.service").read_text()
    assert "ExecStart=/opt/weft/bin/infer_pythia --model" in unit
    for line in ("DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes", "ProtectHome=yes", "CapabilityBoundingSet=",
                 "Environment=WEFT_ADDRESS=127.0.0.1:8000"):
        assert f"\n{line}\n" in unit
    options = re.findall(r" (--[a-z-]+)", unit)
    known = run(ROOT / "build/release/infer_pythia", "--help").stdout
    assert {"--model", "--serve", "--api-key-file", "--drain-seconds"} <= set(options) and all(option in known for option in options)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    test = tmp_path / "weft.service"
    test.write_text(unit.replace("/opt/weft/bin/infer_pythia", "/bin/true").replace("Documentation=man:infer_pythia(1)\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", test], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    rated = subprocess.run(["systemd-analyze", "security", "--offline=true", "--json=short", "--threshold=20", test], capture_output=True,
                           text=True, timeout=60)
    assert rated.returncode == 0, "an exposure of more than 2.0 of 10"


def test_the_container_runs_what_dist_makes():
    lines = (ROOT / "packaging/Dockerfile").read_text()
    assert "make dist" in lines and "USER 65534" in lines and "STOPSIGNAL SIGTERM" in lines
    command = json.loads(re.search(r"^CMD (\[.*\])$", lines, re.M)[1])
    known = run(ROOT / "build/release/infer_pythia", "--help").stdout
    assert all(word in known for word in command if word.startswith("--"))
    health = json.loads(re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", lines, re.M)[1])
    assert health[:2] == ["bash", "-c"]
    run("bash", "-n", "-c", health[2])


def test_the_tarball_is_for_every_gpu_that_is_named(no_gpu, tmp_path):  # noqa: F811
    commands = make("-n", f"NVCC={NVCC}", "dist", **no_gpu)
    compiled = [line for line in commands.splitlines() if line.startswith(NVCC)]
    for flag in ("arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_120,code=sm_120",
                 "arch=compute_120,code=compute_120"):
        assert compiled and all(flag in line for line in compiled), flag
    host = [line for line in commands.splitlines() if line.startswith("g++") and " -c " in line]
    assert host and all("-march=x86-64-v3" in line and "-march=native" not in line for line in host)
    link = [line for line in commands.splitlines() if "-o build/dist/" in line and "-lopenblas" in line]
    assert len(link) == 2 and all("-rpath,\\$ORIGIN/../lib/weft" in line and "--disable-new-dtags" in line for line in link)
    assert "-cuda.tar.gz" in commands and "CPU alone" not in commands
    commands = make("-n", "NVCC=", "dist", **no_gpu)
    assert "-cpu.tar.gz" in commands and "this tarball is for the CPU alone" in commands and "nvcc " not in commands.replace("no nvcc", "")
