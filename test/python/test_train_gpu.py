"""train_llama on a GPU: kill -9 and resume, ways of computing that must not change a bit, long runs, GPUs that cannot be
used or that fail, and the kernels under compute-sanitizer. Skipped without a GPU."""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from train_runs import (ROOT, arguments, assert_refused, assert_same_run, checkpoints, environment, fp8_shape, losses, records,
                        run_program, state_bytes)
from train_runs import data_fixture  # noqa: F401, pytest finds it here
import checkpoints as ck
import tensor_file
import train_runs
from conversation_shards import write_conversations

GPU_TESTS = ROOT / "build" / "release" / "gpu_tests"
MINUTES = 60


class Gpu:
    """GPU 0 through the driver: how much of its memory is free, and a way to take it."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise OSError("no GPU")
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise OSError(f"{name}: error {code}")

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextlib.contextmanager
    def all_but(self, left):
        """Holds the free memory of the GPU but `left` bytes of it."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self.free_bytes() - left))
        try:
            yield
        finally:
            self.call("cuMemFree_v2", address)


try:
    GPU = Gpu()
except (OSError, AttributeError):
    pytest.skip("no GPU", allow_module_level=True)
if "CUDA" not in run_program("--version").stdout:
    pytest.skip("train_llama was built without nvcc", allow_module_level=True)


@pytest.fixture(scope="session", autouse=True)
def plans(tmp_path_factory):
    """Matmul plans of these tests alone: nothing depends on what the user's directory holds."""
    directory = tmp_path_factory.mktemp("plans")
    os.environ["WEFT_CACHE_DIR"] = str(directory)
    return directory


def train(data, out, *more, env=None, **keys):
    return train_runs.train(data, out, "--device", "cuda", *more, env=env, **keys)


@pytest.fixture
def whole(data, tmp_path):
    done = train(data, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    return tmp_path / "whole"


def parameters(out, step=12):
    return state_bytes(out, step)[0]


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits(data, tmp_path, whole):
    assert train(data, tmp_path / "again").returncode == 0
    assert_same_run(tmp_path / "again", whole)
    assert train(data, tmp_path / "other", "--seed", 2).returncode == 0
    assert losses(tmp_path / "other") != losses(whole)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("dropout", [0, 0.1])
def test_how_it_is_computed_changes_no_bit(data, tmp_path, precision, dropout):
    ways = {"plain": [], "norm": ["--recompute", "norm"], "block": ["--recompute", "block"], "launches": ["--no-graph"],
            "block launches": ["--recompute", "block", "--no-graph"]}
    shape = fp8_shape(tmp_path / "shape") if precision == "fp8" else []
    for name, options in ways.items():
        done = train(data, tmp_path / name, "--precision", precision, "--dropout", dropout, *shape, *options)
        assert done.returncode == 0, done.stderr
    for name in ways:
        assert losses(tmp_path / name) == losses(tmp_path / "plain"), name
        assert parameters(tmp_path / name) == parameters(tmp_path / "plain"), name


@pytest.mark.parametrize("step", [1, 5, 6, 9, 12])
def test_killed_at_a_step_and_resumed_bit_for_bit(data, tmp_path, whole, step):
    out = tmp_path / "run"
    assert train(data, out, "--debug-inject", f"kill@step={step}").returncode == -signal.SIGKILL
    done = train(data, out)
    assert done.returncode == 0, done.stderr
    assert_same_run(out, whole)


def whole_and_resumed(data, tmp_path, options):
    """The directories of a run, and of one that is killed and goes on."""
    whole, resumed = tmp_path / "whole", tmp_path / "parts"
    assert train(data, whole, *options).returncode == 0
    assert train(data, resumed, *options, "--debug-inject", "kill@step=9").returncode == -signal.SIGKILL
    done = train(data, resumed, *options)
    assert done.returncode == 0, done.stderr
    return whole, resumed


def assert_adapter_goes_on(data, tmp_path, options):
    whole, resumed = whole_and_resumed(data, tmp_path, options)
    assert losses(resumed) == losses(whole)
    for name in ("adapter.bin", "state.bin"):
        assert (resumed / "step_00000012" / name).read_bytes() == (whole / "step_00000012" / name).read_bytes()


@pytest.mark.parametrize("scheme", ["", "int8", "int4", "fp8"])
def test_an_adapter_goes_on_bit_for_bit(data, tmp_path, scheme):
    base = train_runs.MODEL
    if scheme:
        assert ck.run_script("export_hf.py", base, "-o", tmp_path / "float").returncode == 0
        ck.convert(tmp_path / "float", tmp_path / "base.bin", "--quantize", scheme)
        base = tmp_path / "base.bin"
    lora = ["--model", base, "--lora-r", 4, "--lora-dropout", 0.1, "--lr", 0.02, "--eps", 1e-5]
    assert_adapter_goes_on(data, tmp_path, lora)
    for device in ("cuda", "cpu"):
        done = train_runs.train(data, tmp_path / device, *lora, "--device", device, "--precision", "fp32")
        assert done.returncode == 0, done.stderr
    gpu, cpu = losses(tmp_path / "cuda"), losses(tmp_path / "cpu")
    assert [gpu[step][0] for step in gpu] == pytest.approx([cpu[step][0] for step in cpu], rel=1e-4)
    assert cpu[12][0] < cpu[1][0], "it learns"


def test_an_adapter_in_fp8_goes_on_bit_for_bit(data, tmp_path):
    shape = fp8_shape(tmp_path / "shape")
    assert train(data, tmp_path / "base", *shape, "--steps", 2).returncode == 0
    base = tmp_path / "base" / "step_00000002" / "model.bin"
    lora = ["--model", base, "--lora-r", 4, "--lora-dropout", 0.1, "--precision", "fp8", "--lr", 0.02]
    assert_adapter_goes_on(data, tmp_path, lora)


@pytest.mark.parametrize("options", [[], ["--moments", "bf16"], ["--precision", "fp32"], ["--precision", "fp8"]])
def test_muon_goes_on_bit_for_bit(data, tmp_path, options):
    shape = fp8_shape(tmp_path / "shape") if "fp8" in options else []
    muon = ["--optimizer", "muon", "--muon-lr", 0.02, "--muon-momentum", 0.9, *options, *shape]
    whole, out = tmp_path / "whole", tmp_path / "run"
    done = train(data, whole, *muon)
    assert done.returncode == 0, done.stderr
    assert train(data, out, *muon, "--debug-inject", "kill@step=9").returncode == -signal.SIGKILL
    assert_refused(train(data, out, *options, *shape), 2, "--optimizer: got adamw", "was made with muon")
    done = train(data, out, *muon)
    assert done.returncode == 0, done.stderr
    assert_same_run(out, whole)
    assert losses(out)[12][0] < losses(out)[1][0], "it learns"


@pytest.mark.parametrize("options", [[], ["--recompute", "block", "--dropout", 0.1, "--virtual-ranks", 2], ["--precision", "fp32"]])
def test_a_gemma_goes_on_bit_for_bit_and_is_exported(data, tmp_path, options):
    gemma = ["--model", train_runs.GOLDEN / "gemma3-local.model.bin", *options]
    whole, resumed = whole_and_resumed(data, tmp_path, gemma)
    assert_same_run(resumed, whole)
    assert losses(resumed)[12][0] < losses(resumed)[1][0], "it learns"
    model = resumed / "step_00000012" / "model.bin"
    assert ck.run_script("export_hf.py", model, "-o", tmp_path / "exported").returncode == 0
    assert ck.convert(tmp_path / "exported", tmp_path / "again.bin").tensors.keys() == tensor_file.read(model).tensors.keys()


def test_killed_from_outside_many_times(data, tmp_path):
    """kill -9 at moments that nobody chose: while the GPU is set up, in a step, while a checkpoint is written."""
    options = ("--device", "cuda", "--dropout", 0.1)
    assert train_runs.train(data, tmp_path / "whole", *options, steps=400).returncode == 0
    out = tmp_path / "run"
    killed = 0
    for attempt in range(60):
        process = subprocess.Popen(arguments(data, out, *options, steps=400), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=environment())
        try:
            process.wait(timeout=0.5 + 0.07 * attempt)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    assert process.returncode == 0 and killed > 0
    assert losses(out) == losses(tmp_path / "whole")
    assert parameters(out, 400) == parameters(tmp_path / "whole", 400)


def test_a_resumed_run_computes_by_its_own_plans(data, tmp_path, whole, plans):
    """The user's plans are gone, and elsewhere nothing can be written: the run's own file decides."""
    out = tmp_path / "run"
    assert train(data, out, "--debug-inject", "kill@step=9").returncode == -signal.SIGKILL
    assert (out / "matmul_plans.txt").read_text().startswith("weft matmul plans 2\n")
    done = train(data, out, env={"WEFT_CACHE_DIR": "/proc/nowhere"})
    assert done.returncode == 0 and "resuming after step" in done.stderr, done.stderr
    assert_same_run(out, whole)


def test_a_damaged_file_of_plans_is_a_warning(data, tmp_path):
    out = tmp_path / "run"
    assert train(data, out, steps=4).returncode == 0
    (out / "matmul_plans.txt").write_text("rubbish\n")
    done = train(data, out, "--schedule", "cosine", steps=8)
    assert done.returncode == 0 and "matmul_plans.txt" in done.stderr, done.stderr
    assert (out / "matmul_plans.txt").read_text().startswith("weft matmul plans 2\n")


# ---- options whose effect needs a GPU --------------------------------------------------------------------------------


def header(out):
    return next(r for r in records(out) if r["type"] == "header")


def test_auto_takes_the_gpu_and_bf16(data, tmp_path, whole):
    for name, options in (("plain", []), ("auto", ["--device", "auto", "--precision", "auto"])):
        done = train_runs.train(data, tmp_path / name, *options)
        assert done.returncode == 0 and "running on the CPU" not in done.stderr, done.stderr
        settings = header(tmp_path / name)["settings"]
        assert (header(tmp_path / name)["device"], settings["device"], settings["precision"]) == ("cuda", "cuda", "bf16")
        assert_same_run(tmp_path / name, whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mistral-gqa2", "qwen2-gqa3-tied", "qwen3-gqa2", "qwen3-biases-tied", "llama-yarn-biases",
                                  "gemma3-train-hs32"])
def test_training_of_every_family_is_that_of_pytorch(name, precision):
    model, dump = (train_runs.GOLDEN / f"{name}.{kind}.bin" for kind in ("model", "dump"))
    done = run_program("--device", "cuda", "--precision", precision, "--model", model, "--compare", dump)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


def test_precision_is_that_of_the_activations(data, tmp_path):
    """fp32 on the GPU follows the CPU; bf16 has other numbers, near them."""
    loss = {}
    for name, options in (("cpu", ["--device", "cpu"]), ("fp32", ["--device", "cuda", "--precision", "fp32"]),
                          ("bf16", ["--device", "cuda", "--precision", "bf16"])):
        done = train_runs.train(data, tmp_path / name, *options, "--grad-clip", 0, steps=3)
        assert done.returncode == 0, done.stderr
        loss[name] = losses(tmp_path / name)[1][0]
    assert abs(loss["fp32"] / loss["cpu"] - 1) < 1e-4
    assert 1e-6 < abs(loss["bf16"] / loss["cpu"] - 1) < 2e-2
    assert "  activations (fp32) " in train(data, tmp_path / "no", "--precision", "fp32", "--dry-run").stdout
    assert "  activations (bf16) " in train(data, tmp_path / "no", "--precision", "bf16", "--dry-run").stdout


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("bf16", 2e-2)])
def test_conversations_are_learned_as_on_the_cpu(tmp_path, precision, tolerance):
    """The same learned tokens in each step, and the loss and the gradient's norm of their mean. A resumed run has the same bits."""
    chats = write_conversations(tmp_path / "chats", train_runs.VOCABULARY, train_runs.SEED)
    shards = ("--train", chats / "train_*.bin", "--val=", "--grad-clip", 0, "--precision")
    cpu, gpu, again = (tmp_path / name for name in ("cpu", "gpu", "again"))
    assert train_runs.train(chats, cpu, *shards, "fp32", "--device", "cpu", steps=6).returncode == 0
    assert train(chats, gpu, *shards, precision, steps=6).returncode == 0
    assert train(chats, again, *shards, precision, "--schedule", "constant", steps=3).returncode == 0
    assert train(chats, again, *shards, precision, "--schedule", "constant", steps=6).returncode == 0
    assert train(chats, tmp_path / "whole", *shards, precision, "--schedule", "constant", steps=6).returncode == 0
    learned = [[record["learned_tokens"] for record in records(out) if record["type"] == "step"] for out in (cpu, gpu)]
    assert learned[0] == learned[1] and len(set(learned[0])) > 1
    for on_cpu, on_gpu in zip(losses(cpu).values(), losses(gpu).values()):
        assert abs(on_gpu[0] / on_cpu[0] - 1) < tolerance and abs(on_gpu[1] / on_cpu[1] - 1) < 10 * tolerance
    assert losses(again) == losses(tmp_path / "whole")


def test_moments_are_stored_as_asked_for(data, tmp_path):
    """A checkpoint holds fp32: of moments that were bf16 the lower 16 bits are zero."""
    low_bits = {}
    for moments in ("fp32", "bf16"):
        done = train(data, tmp_path / moments, "--moments", moments)
        assert done.returncode == 0 and f"  AdamW moments ({moments}) " in done.stderr, done.stderr
        state = tensor_file.read(tmp_path / moments / "step_00000012" / "state.bin")
        values = [state.f32(name) for name in state.tensors if name.startswith(("moment1.", "moment2."))]
        assert any(value.any() for value in values)
        low_bits[moments] = sum(int((value.view("u4") & 0xFFFF).astype(bool).sum()) for value in values)
    assert low_bits["fp32"] > 1000 and low_bits["bf16"] == 0
    one, two = (losses(tmp_path / moments) for moments in ("fp32", "bf16"))
    assert one[1] == two[1] and one[12] != two[12], "the first loss has seen no moments"
    assert abs(one[12][0] / two[12][0] - 1) < 0.05


def test_a_graph_saves_the_time_of_launches():
    """A model so small that its kernels take less time than their launches: without a graph it is slower, by more than
    the machine's noise."""
    def fastest(*options):
        results = [bench("--config", "tiny", "--seq-len", 16, "--micro-batch", 1, "--json", *options) for _ in range(3)]
        assert all(done.returncode == 0 for done in results), results[0].stderr
        return min(json.loads(done.stdout)["median_ms"] for done in results)
    assert fastest() < 0.95 * fastest("--no-graph")


def test_every_operator_of_a_step_has_its_time():
    words = ["--config", "tiny", "--seq-len", 128, "--micro-batch", 2, "--operators"]
    done = bench(*words, "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    times = {entry["name"]: entry for entry in table["operators"]}
    assert {"attention", "norm", "head", "adamw"} <= set(times) and times["head"]["calls"] == times["adamw"]["calls"] == 1
    for entry in times.values():
        assert entry["calls"] > 0 and entry["ms"] > 0 and entry["bytes"] > 0 and 0 < entry["floor_ms"], entry
    assert sum(entry["ms"] for entry in times.values()) <= 1.05 * table["step_ms"]
    lines = bench(*words).stdout.splitlines()
    assert lines[2].split()[:3] == ["operator", "calls", "us"] and len(lines) == 4 + len(times)
    assert lines[-1].startswith("sum ")


# ---- long runs -------------------------------------------------------------------------------------------------------


def resident_bytes(process):
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def test_ten_thousand_steps_in_flat_memory(data, tmp_path):
    out, steps = tmp_path / "run", 10_000
    process = subprocess.Popen(
        arguments(data, out, "--device", "cuda", "--dropout", 0.1, "--save-every", 2000, "--val-every", 2000, steps=steps),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    samples = []  # step, GPU bytes free, host bytes
    end = time.monotonic() + 5 * MINUTES
    while process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.25)
        done = [r["step"] for r in records(out) if r["type"] == "step"] if (out / "log.jsonl").exists() else []
        if done and process.poll() is None:
            samples.append((done[-1], GPU.free_bytes(), resident_bytes(process)))
    assert process.returncode == 0, process.stderr.read()
    assert len(losses(out)) == steps
    settled = [s for s in samples if s[0] > 3000 and s[2] > 0]  # the first save has made its copy of the state
    assert len(settled) > 5, samples
    first, last = settled[0], settled[-1]
    assert last[1] == first[1], "device memory grew"
    assert last[2] < first[2] + 4_000_000, f"host memory grew from {first[2]} to {last[2]} bytes"


# ---- GPUs that cannot be used ----------------------------------------------------------------------------------------


def bench(*options, env=None):
    return subprocess.run([str(train_runs.PROGRAM), "--device", "cuda", "--bench", *map(str, options)],
                          capture_output=True, text=True, timeout=train_runs.SECONDS, env=environment(**(env or {})))


def test_no_gpu(data, tmp_path):
    done = train(data, tmp_path / "run", env={"CUDA_VISIBLE_DEVICES": ""})
    assert_refused(done, 4, "no GPU", "CUDA_VISIBLE_DEVICES", "--device cpu")
    done = train_runs.train(data, tmp_path / "auto", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "running on the CPU: " in done.stderr and "--device" not in done.stderr


def test_a_gpu_that_is_too_old(data, tmp_path):
    done = train(data, tmp_path / "run", "--debug-inject", "arch@gpu=75")
    assert_refused(done, 4, "sm_75", "needs sm_80", "--device cpu")
    assert not (tmp_path / "run").exists()


def test_a_program_for_another_gpu(data, tmp_path):
    """The driver is told to ignore compiled kernels and to compile PTX, of which this program holds none: the error is the
    one that a GPU of another architecture gives."""
    done = train(data, tmp_path / "run", env={"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"})
    assert_refused(done, 4, "no code for a GPU of architecture", "GPU_ARCH=")


def test_memory_that_another_process_holds_is_refused_at_plan_time(data, tmp_path):
    with GPU.all_but(3 << 30):
        done = bench("--config", "d12", "--seq-len", 1024, "--micro-batch", 16)
        assert_refused(done, 5, "the plan needs", " free. ", "--micro-batch")
        assert train(data, tmp_path / "run").returncode == 0, "a small run still fits"


def test_memory_that_another_process_takes_after_the_plan(data, tmp_path):
    """The GPU says that there is room, and when the run wants it, it is gone."""
    out = tmp_path / "run"
    options = ("--micro-batch", 65536, "--batch-tokens", 65536 * 16)  # 3 GB of activations
    assert train(data, out, *options, "--debug-inject", "kill@step=6").returncode == -signal.SIGKILL
    before = checkpoints(out), state_bytes(out, 4)
    with GPU.all_but(2 << 30):
        assert_refused(train(data, out, *options), 5, "the plan needs", " free. ")
        done = train(data, out, *options, "--debug-inject", f"free@gpu={1 << 40}")
        assert_refused(done, 5, "of GPU memory planned", "are free")
    assert (checkpoints(out), state_bytes(out, 4)) == before
    done = train(data, out, *options, "--debug-inject", "term@step=6")
    assert done.returncode == 143 and "resuming after step 4" in done.stderr, done.stderr


def test_a_run_that_has_begun_needs_no_more_memory(data, tmp_path):
    """Behind its first steps, its first validation and its first save another process takes what is left."""
    out, steps = tmp_path / "run", 10_000
    process = subprocess.Popen(arguments(data, out, "--device", "cuda", "--save-every", 50, "--val-every", 50, steps=steps),
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    train_runs.wait_for(lambda: train_runs.has_checkpoint(out) or process.poll() is not None)
    with GPU.all_but(4 << 20):
        begun = max(losses(out))
        _, errors = process.communicate(timeout=train_runs.SECONDS)
    assert process.returncode == 0, errors
    assert begun < steps / 2 and len(losses(out)) == steps


def test_a_plan_that_says_what_would_fit():
    done = bench("--config", "llama3.1-8b", "--seq-len", 8192, "--micro-batch", 4)
    assert_refused(done, 5, "the plan needs", "--recompute block")


# ---- a GPU that fails ------------------------------------------------------------------------------------------------


def assert_a_step_fails_alone(data, out, whole, step, fault, code, *words):
    """One line; no step after the one before it, no checkpoint lost; the same command ends as if nothing had been."""
    done = train(data, out, "--debug-inject", f"{fault}@step={step}")
    assert_refused(done, code, *words)
    assert max((r["step"] for r in records(out) if r["type"] == "step"), default=0) == step - 1
    left = [name for name in checkpoints(out) if not name.endswith(".tmp")]
    assert all(int(name[5:]) < step for name in left)
    done = train(data, out)
    assert done.returncode == 0, done.stderr
    assert ("resuming after step" in done.stderr) == bool(left)
    assert_same_run(out, whole)


@pytest.mark.parametrize("step", [2, 7, 12])
def test_a_kernel_that_faults_ends_the_run_and_nothing_else(data, tmp_path, whole, step):
    """An error that stays: no CUDA call of the process succeeds after it."""
    assert_a_step_fails_alone(data, tmp_path / "run", whole, step, "gpu", 4, "illegal memory access",
                              "the last checkpoint stands")


@pytest.mark.parametrize("step", [2, 7, 12])
def test_memory_that_runs_out_ends_the_run_and_nothing_else(data, tmp_path, whole, step):
    assert_a_step_fails_alone(data, tmp_path / "run", whole, step, "memory", 5, "of GPU memory planned", "are free")


def test_a_fault_for_a_gpu_needs_one(data, tmp_path):
    done = train_runs.train(data, tmp_path / "run", "--device", "cpu", "--debug-inject", "gpu@step=2")
    assert_refused(done, 2, "no GPU in this run")


# ---- what the kernels do in memory -----------------------------------------------------------------------------------


def sanitizer():
    found = shutil.which("compute-sanitizer")
    for directory in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if not found and directory and (Path(directory) / "bin" / "compute-sanitizer").exists():
            found = str(Path(directory) / "bin" / "compute-sanitizer")
    assert found, "compute-sanitizer is not installed; it is part of the CUDA toolkit"
    return found


def under_sanitizer(tool, shapes="Sanitized.*"):
    """Small shapes of every kernel of training and inference, watched. A first run chooses matmul plans, so that the sanitizer does
    not watch hundreds of candidates being timed."""
    tests = [str(GPU_TESTS), f"--gtest_filter={shapes}", "--gtest_brief=1"]
    assert GPU_TESTS.exists(), "make tests builds it"
    plain = subprocess.run(tests, capture_output=True, text=True, cwd=ROOT, timeout=train_runs.SECONDS)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    watched = subprocess.run([sanitizer(), "--tool", tool, "--error-exitcode", "9", *tests], capture_output=True,
                             text=True, cwd=ROOT, timeout=5 * MINUTES)
    assert "[  PASSED  ]" in watched.stdout, watched.stdout[-6000:] + watched.stderr[-2000:]
    return watched


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_kernels_under_compute_sanitizer(tool, plans):
    watched = under_sanitizer(tool)
    assert watched.returncode == 0 and "ERROR SUMMARY: 0 errors" in watched.stdout, watched.stdout[-6000:]


def test_shared_memory_under_racecheck(plans):
    """Without heads of 64 and 128, and without inference in 16 bits: on sm_90 their attention or their GEMMs order shared memory
    by mbarriers and asynchronous copies, whose waiting under racecheck takes longer than a minute.

    One hand-over is left out, because it has an order that racecheck does not follow. In the portable backward of wide heads
    one warp of a pair writes probabilities and then arrives at a named barrier (bar.arrive); the other one waits there
    (bar.sync) and then reads them: PTX's producer and consumer. Before the place is written again all threads pass
    __syncthreads(). So exactly this is left out: in that kernel, a read after a write. A write that does not wait for a read
    (\"Read access ... and Write access\") would fail, there as everywhere."""
    watched = under_sanitizer("racecheck", "Sanitized.*-*HeadsOf64:*HeadsOf128:*InferenceInBf16:*InferenceInFp16")
    assert "RACECHECK SUMMARY" in watched.stdout, watched.stdout[-6000:]
    hazards, first = [], ""
    for line in watched.stdout.splitlines():
        if "Race reported between" in line:
            first = line
        elif "=========     and " in line:
            handed_over = all(re.search(r"key_gradient_kernel.*KeyTiling<\(int\)(96|128|256),", one) for one in (first, line))
            if not (handed_over and "between Write access" in first and "and Read access" in line):
                hazards += [first, line]
    assert not hazards, "\n".join(hazards[:20])
