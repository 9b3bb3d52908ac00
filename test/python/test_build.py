"""What make does on machines that differ: without CUDA, without a GPU, with few or many cores. Nothing is compiled here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = "/nonexistent/nvcc"


def make(*words, **environment):
    """As from a shell: `make test` hands its settings down to every make below it."""
    own = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MODE", "CPU_FLAGS", "GPU_ARCH", "NVCC", "CXX", "PYTHON", "TEST_ADD", "TEST_QUICK", "TEST_SAVE"}
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", *map(str, words)], capture_output=True, text=True,
                          timeout=120, env={**{k: v for k, v in os.environ.items() if k not in own}, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def no_gpu(tmp_path):
    """PATH with an nvidia-smi that finds nothing."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def gpu(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def headers(nvcc: str) -> dict[str, str]:
    return {name: kind for kind, name in (line.split(" ", 1) for line in make(f"NVCC={nvcc}", "list-headers").splitlines())}


def test_without_cuda_its_headers_are_skipped_and_counted(tmp_path):
    """A machine without the toolkit has no cuda_bf16.h: make test failed there."""
    found = headers("")
    assert {name for name, kind in found.items() if kind == "compiled"} >= {"llmc/base/error.h", "llmc/cpu/matmul.h"}
    gpu_code = {name for name in found if name.startswith(("llmc/cuda/", "test/gpu/", "dev/ladder/")) or name.endswith(".cuh")}
    assert len(gpu_code) > 40 and all(found[name] == "skipped" for name in gpu_code)
    commands = make("-n", "NVCC=", f"B={tmp_path}/b", "headers")
    assert "llmc/base/error.h" in commands and "llmc/cuda" not in commands
    assert re.search(rf"headers: {len(found) - len(gpu_code)} compile alone, {len(gpu_code)} skipped: GPU code, and there is no nvcc", commands)
    assert f"headers: {len(found)} compile alone, 0 skipped\"" in make("-n", f"NVCC={NVCC}", f"B={tmp_path}/b", "headers")


def test_every_header_of_every_folder_is_compiled_alone():
    tracked = subprocess.run(["git", "ls-files", "*.h", "*.cuh"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    found = headers(NVCC)
    assert set(tracked.stdout.split()) <= set(found) and set(found.values()) == {"compiled"}


def test_every_program_under_dev_is_compiled(tmp_path):
    commands = make("-n", f"NVCC={NVCC}", "GPU_ARCH=80 90a", f"B={tmp_path}/b", "CUPTI=cupti.h", "benches")
    sources = [path for folder in ("bench", "ladder") for kind in ("*.cu", "*.cpp") for path in (ROOT / "dev" / folder).glob(kind)]
    assert len(sources) >= 6
    for path in sources:
        name = path.relative_to(ROOT)
        line = re.search(rf"^.* -c {name} .*$", commands, re.M)
        assert line, name
        assert path.suffix == ".cpp" or "sm_90a" in line[0] and "sm_80" not in line[0], "one architecture is enough"
    assert "those of GPU code skipped" in make("-n", "NVCC=", f"B={tmp_path}/b", "benches")


@pytest.mark.parametrize("target", ["all", "test"])
def test_gpu_code_is_compiled_only_for_a_gpu_that_is_there(no_gpu, tmp_path, target):
    words = ["-n", f"NVCC_FOUND={NVCC}", f"B={tmp_path}/b", target]
    said = make(*words, **no_gpu)
    assert NVCC not in said and 'CPU only (no GPU found; GPU_ARCH=\\"80 90a 120\\" builds for GPUs)' in said
    assert f"{NVCC} -std" in make(*words, "GPU_ARCH=90a", **no_gpu), "asked for by name"
    assert "CPU only (no nvcc found)" in make("-n", "NVCC_FOUND=", f"B={tmp_path}/b", target, **no_gpu)


def test_all_gpu_code_is_compiled_for_all_tests(no_gpu, tmp_path):
    words = ["-n", f"B={tmp_path}/b", "test-all"]
    assert "code=sm_80 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_120,code=sm_120" in make(*words, f"NVCC_FOUND={NVCC}", **no_gpu)
    assert "code=sm_" not in make(*words, f"NVCC_FOUND={NVCC}", "NVCC=", **no_gpu), "NVCC= leaves the GPU out"


def test_the_tests_of_one_operator(no_gpu, tmp_path):
    commands = make("-n", f"B={tmp_path}/b", "test-op", "OP=SwiGlu", **no_gpu)
    assert "operators_test.o" in commands and "engine_test.o" not in commands and "run.py --op SwiGlu" in commands
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", "test-op", "OP=nosuchoperator"], capture_output=True, text=True)
    assert done.returncode != 0 and "got OP=nosuchoperator" in done.stderr


def test_the_demo_compiles_for_the_gpu_that_is_there(gpu, tmp_path):
    commands = make("-n", f"NVCC={NVCC}", f"B={tmp_path}/b", "demo", **gpu)
    assert f"{NVCC} " in commands and "sm_90a" in commands and "sm_80" not in commands


def test_the_demo_trains_before_the_server_is_compiled(no_gpu, tmp_path):
    commands = make("-n", "-j1", "NVCC=", f"B={tmp_path}/b", "demo", **no_gpu)
    first, rest = commands.split("run_demo.sh train")
    assert "llmc/train/loop.cpp" in first and re.search(r"\[(\d+)/\1\] *LINK +\S+/train_llama", first)
    assert not re.search(r"llmc/serve/|llmc/infer/engine.cpp|infer_pythia", first), "the first line of training waits for these"
    assert "llmc/serve/http.cpp" in rest.split("run_demo.sh infer")[0]


def test_make_alone_builds_the_programs(tmp_path):
    commands = make("-n", "NVCC=", f"B={tmp_path}/b")
    assert "built train_llama infer_pythia" in commands and commands == make("-n", "NVCC=", f"B={tmp_path}/b", "all")


def test_make_uses_the_cores_unless_told_otherwise(tmp_path):
    (tmp_path / "show.mk").write_text("show:\n\t@echo jobs $(filter -j%,$(MAKEFLAGS))\n")
    words = ["-f", "Makefile", "-f", tmp_path / "show.mk", "show"]
    own = f"-j{len(os.sched_getaffinity(0))}"
    assert make(*words).strip() == f"jobs {own}"
    assert own not in make(*words, MAKELEVEL="1"), "a make below shares the jobs of the one above"


def test_progress_counts_to_the_end(tmp_path):
    said = re.findall(r"\[(\d+)/(\d+)\]", make("-n", "-j1", "NVCC=", f"B={tmp_path}/b", "programs"))
    total = len(said)
    assert total > 50 and [(int(n), int(of)) for n, of in said] == [(n, total) for n in range(1, total + 1)]


@pytest.mark.parametrize("target", ["bench", "profile-infer", "operators_bench"])
def test_what_runs_on_a_gpu_says_so_before_it_compiles(target, no_gpu, tmp_path):
    if target == "operators_bench":
        left = tmp_path / "dev" / "bench" / target  # by a build with GPU code
        left.parent.mkdir(parents=True)
        left.touch()
        target = str(left)
    for nvcc, words in (("", "no nvcc found: install the CUDA toolkit or name one with NVCC="), (NVCC, "no GPU found")):
        if nvcc and "/" in target:
            continue  # such a program is built without a GPU, too
        done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", f"B={tmp_path}", f"NVCC={nvcc}", "NVCC_FOUND=", target], capture_output=True,
                              text=True, timeout=120, env={**os.environ, **no_gpu})
        said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        assert done.returncode != 0 and "Error 4" in done.stderr and done.stdout == "", done
        assert len(said) == 1 and said[0].startswith(f"{Path(target).name}: {words}"), said


def test_torch_does_not_replace_pinned_packages():
    lines = (ROOT / "scripts" / "requirements-torch.txt").read_text().splitlines()
    assert "-c requirements.txt" in lines and any(line.startswith("torch") for line in lines)
    assert "-r scripts/requirements-torch.txt" in make("-n", "torch")


def test_git_ignores_what_runs_and_conversions_leave():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    made = ["smollm2.bin", "pythia-160m.bin", "runs/x/model.bin", "tuned/config.json", "train_llama", "compile_commands.json"]
    done = subprocess.run(["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == made
    tracked = subprocess.run(["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout == "", "a file of the project is ignored"
    new = subprocess.run(["git", "check-ignore", "test/fixtures/golden/new.bin"], cwd=ROOT, capture_output=True)
    assert new.returncode == 1, "a new fixture is not ignored"


def test_the_repository_stays_small():
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git repository")
    total = sum(path.stat().st_size for name in tracked.stdout.split("\0") if name and (path := ROOT / name).is_file())
    assert total < 45_000_000, f"{total} bytes of tracked files"


def test_the_runner_adds_an_earlier_run_up(tmp_path, monkeypatch, capsys):
    sys.path.insert(0, str(ROOT / "test"))
    import run
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "run_everything", lambda after_quick: [run.Outcome("unit", passed=2)])
    (tmp_path / "rows.json").write_text('[{"name": "no cuda", "passed": 3, "failed": 1, "skipped": 4, "seconds": 1.0, '
                                        '"failures": ["a"]}]')
    monkeypatch.setattr(sys, "argv", ["run.py", "--add", str(tmp_path / "rows.json"), "--save", str(tmp_path / "own.json")])
    assert run.main() == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "5 passed, 1 failed, 4 skipped" and "FAILED a" in out
    assert '"unit"' in (tmp_path / "own.json").read_text() and "no cuda" not in (tmp_path / "own.json").read_text()


def test_what_quick_ran_is_left_out_after_it(monkeypatch):
    sys.path.insert(0, str(ROOT / "test"))
    import run
    jobs = {}
    monkeypatch.setattr(run, "run_jobs", lambda chosen: jobs.update(chosen) or {name: [run.Outcome(name)] for name in chosen})
    monkeypatch.setattr(run, "run_gpu", lambda release: run.Outcome("gpu"))
    selections = {}
    monkeypatch.setattr(run, "run_pytest", lambda name, selection: selections.setdefault(name, selection) and run.Outcome(name))
    for after_quick in (False, True):
        jobs.clear()
        run.run_everything(after_quick)
        left_out = {name for name, words in run.QUICK_PYTHON.items() if not words}
        assert ("again" in jobs) == after_quick and left_out.isdisjoint(jobs) == after_quick
    jobs["again"]()
    jobs["test_serve"]()
    again, serve = selections["python again"], selections["python test_serve"]
    assert {Path(name).stem for name in again[:-2]} == left_out and again[-2:] == ("-k", run.OF_THE_BUILD)
    assert serve[-1] == f"not ({run.QUICK_PYTHON['test_serve']}) or {run.OF_THE_BUILD}"
