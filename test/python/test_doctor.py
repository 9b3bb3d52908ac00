"""make doctor: each row of its report, and whether what is missing counts, on machines that are made of stubs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "awk", "dirname", "head", "sed", "sort")
GPU = "NVIDIA H100, {}, 570.1, 81559 MiB"
# What is piped into a compiler is read: writing to one that has ended fails.
FAILS = "read -r program; exit 1"
COMPILES = f'case "$*" in "{{}} -o /dev/null") read -r program;; *) {FAILS};; esac'
CXX, FUZZ_CXX = COMPILES.format("-std=c++20 -fopenmp -x c++ -"), COMPILES.format("-fsanitize=fuzzer,address,undefined -x c++ -")
SOUND = {"g++": f'case "$1" in -dump*) echo 13.2.0;; *) {CXX};; esac', "clang++": FUZZ_CXX, "python3": "echo 3.12", "ls": "exit 2",
         "df": "[ \"$*\" = '-Pk .' ] && printf 'Filesystem\\n/dev/x 1 1 50000000 1 /\\n'", "deps": '[ "$*" = --check ]'}


@pytest.fixture
def doctor(tmp_path):
    """Runs the script where nothing but these commands is there: name -> what it does, or None where it is absent."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "scripts" / "doctor.sh", tmp_path / "scripts")
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))

    outside = {name: value for name, value in os.environ.items() if name not in ("CXX", "FUZZ_CXX", "NVCC", "PYTHON")}

    def run(commands, **variables):
        for name, text in (SOUND | commands).items():
            path = tmp_path / "scripts" / "deps.sh" if name == "deps" else tmp_path / "bin" / name
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
                path.chmod(0o755)
        done = subprocess.run([tmp_path / "scripts" / "doctor.sh"], capture_output=True, text=True, timeout=60,
                              env={**outside, "PATH": str(tmp_path / "bin"), **variables})
        *rows, verdict = done.stdout.splitlines()
        assert not done.stderr and verdict == ("doctor: ready" if done.returncode == 0 else
                                               f"doctor: {sum(' BAD ' in row for row in rows)} problem(s)"), done
        assert (done.returncode == 0) == (" BAD " not in done.stdout) and done.returncode in (0, 4)
        return rows

    return run


def nvcc(version):
    return {"nvcc": f"echo 'Cuda compilation tools, release {version}, V{version}.131'"}


def gpus(*capabilities):
    return {"nvidia-smi": "\n".join(f"echo '{GPU.format(capability)}'" for capability in capabilities)}


@pytest.mark.parametrize("commands, row, verdict, words", [
    ({}, "compiler", "ok", "g++ 13.2.0"),
    ({"g++": None}, "compiler", "BAD", "g++ not found. Install g++ 12"),
    ({"g++": f'case "$1" in -dump*) echo 8.1.0;; *) {FAILS};; esac'}, "compiler", "BAD", "g++ 8.1.0 cannot compile C++20 with OpenMP"),
    ({}, "libraries", "ok", "nlohmann-json"),
    ({"deps": "echo 'deps: xxHash is missing' >&2; exit 4"}, "libraries", "BAD", "BAD  xxHash is missing"),
    ({"deps": "echo 'deps: xxHash is missing'; exit 1"}, "libraries", "BAD", "BAD  xxHash is missing"),
    ({"g++": f'case "$1" in -dumpversion) echo 12;; -dump*) exit 1;; *) {CXX};; esac'}, "compiler", "ok", "g++ 12, C++20"),
    ({}, "fuzzing", "ok", "clang++ with libFuzzer"),
    ({"clang++": FAILS}, "fuzzing", "-", "no clang with libFuzzer"),
    ({"clang++": None}, "fuzzing", "-", "no clang with libFuzzer"),
    ({}, "nvcc", "-", "not found: the programs are built for the CPU"),
    *((nvcc(version), "nvcc", "ok", f"CUDA {version}") for version in ("12.4", "12.5", "12.10", "13.0")),
    *((nvcc(version), "nvcc", "BAD", f"is CUDA {version}, weft needs 12.4") for version in ("12.3", "11.8", "9.2")),
    ({}, "driver", "-", "no nvidia-smi"),
    ({"nvidia-smi": "echo 'NVIDIA-SMI has failed'; exit 9"}, "driver", "-", "finds no GPU"),
    ({"nvidia-smi": "exit 0"}, "driver", "-", "finds no GPU"),
    *((gpus(capability), "GPU", "ok", f"NVIDIA H100, compute capability {capability}, 81559 MiB, driver 570.1")
      for capability in ("8.0", "8.6", "9.0", "10.0", "12.1")),
    *((gpus(capability), "GPU", "BAD", f"NVIDIA H100 has compute capability {capability}, weft needs 8.0") for capability in ("7.0", "7.5", "3.7")),
    *(({"python3": f"echo {version}"}, "python", "ok", f"python3 {version}") for version in ("3.11", "3.12", "3.13")),
    *(({"python3": f"echo {version}"}, "python", "BAD", f"python3 is {version}") for version in ("3.9", "3.10", "3.14", "2.7")),
    ({"python3": None}, "python", "BAD", "python3 not found"),
    ({}, "packages", "-", ".venv is not made yet"),
    ({"df": "printf 'Filesystem\\n/dev/x 1 1 2000000 1 /\\n'"}, "disk", "ok", "2 GB free"),
    ({"df": "printf 'Filesystem\\n/dev/x 1 1 1999999 1 /\\n'"}, "disk", "BAD", "1999 MB free"),
])
def test_each_row_and_whether_it_counts(doctor, commands, row, verdict, words):
    rows = doctor(commands)
    chosen = [line for line in rows if line.split()[0] == row]
    assert len(chosen) == 1 and chosen[0].split()[1] == verdict and words in chosen[0], rows
    assert [line for line in rows if " BAD " in line] == (chosen if verdict == "BAD" else []), "nothing else is wrong"
    assert [line.split()[0] for line in rows if not line.startswith("packages")] == [
        "compiler", "libraries", "fuzzing", "nvcc", "GPU" if row == "GPU" else "driver", "python", "disk"]


@pytest.mark.parametrize("built, told", [("CPU only", True), ("CPU + CUDA for sm_90a", False), (None, False)])
def test_nvcc_alone_makes_no_gpu_program(doctor, tmp_path, built, told):
    if built:
        (tmp_path / "train_llama").write_text(f"#!{shutil.which('bash')}\necho 'train_llama 0.3.0 ({built})'\n")
        (tmp_path / "train_llama").chmod(0o755)
    (row,) = [line for line in doctor(nvcc("12.6")) if line.startswith("nvcc")]
    assert row.endswith('CUDA 12.6; the programs here are built for the CPU alone: make GPU_ARCH="80 90a 120" builds them for GPUs' if told else "CUDA 12.6")


def test_every_gpu_has_a_row_and_every_problem_counts(doctor):
    rows = doctor(gpus("7.5", "9.0", "6.1"))
    assert [line.split()[1] for line in rows if line.startswith("GPU")] == ["BAD", "ok", "BAD"]
    rows = doctor({"g++": None, "deps": "exit 4", "python3": None, "df": "printf 'Filesystem\\n/dev/x 1 1 1 1 /\\n'", **nvcc("11.0"), **gpus("5.0")})
    assert [line.split()[0] for line in rows if " BAD " in line] == ["compiler", "libraries", "nvcc", "GPU", "python", "disk"]


def test_a_toolkit_that_is_not_in_path_is_found(doctor, tmp_path):
    """Where it is installed by default; one in PATH goes before it, and one that is named before both."""
    default = tmp_path / "bin" / "default-nvcc"
    more = {"ls": f"[ \"$*\" = /usr/local/cuda/bin/nvcc ] && echo '{default}'", "default-nvcc": nvcc("12.6")["nvcc"], "other-nvcc": nvcc("12.8")["nvcc"]}

    def row(commands, **variables):
        return next(line for line in doctor(more | commands, **variables) if line.startswith("nvcc"))

    assert f"{default}, CUDA 12.6" in row({})
    assert "bin/nvcc, CUDA 12.4" in row(nvcc("12.4")) and "other-nvcc, CUDA 12.8" in row(nvcc("12.4"), NVCC=str(tmp_path / "bin" / "other-nvcc"))
