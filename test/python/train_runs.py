"""What the tests of train_llama share: shards, a run of a few milliseconds a step, and what it leaves."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
np = pytest.importorskip("numpy")
xxhash = pytest.importorskip("xxhash")

import token_shard  # noqa: E402

PROGRAM = (Path(os.environ.get("WEFT_BIN_DIR", ROOT)) / "train_llama").absolute()
GOLDEN = ROOT / "test" / "fixtures" / "golden"
MODEL = GOLDEN / "llama-hs32-mha.model.bin"  # a random model of 19 k parameters
NEOX = GOLDEN / "neox-hs32-padded.model.bin"
VOCABULARY, SEED = 64, 7
SECONDS = 120

if not PROGRAM.exists():
    pytest.skip(f"{PROGRAM} is not built", allow_module_level=True)


def write_shard(path, count, begin=0, vocabulary=VOCABULARY, tokenizer_hash=SEED):
    n = np.arange(begin, begin + count)
    writer = token_shard.ShardWriter(path, vocabulary, tokenizer_hash)
    writer.write((n * n // 3 + n) % min(vocabulary, 31))
    writer.close()
    return path


def make_data(directory):
    directory.mkdir()
    for i, count in enumerate((400, 170, 90)):
        write_shard(directory / f"train_{i}.bin", count, 1000 * i)
    write_shard(directory / "val_0.bin", 200, 5000)
    return directory


def make_texts(directory):
    """A shard with a tokenizer beside it; that tokenizer."""
    tokenizer = ROOT / "models" / "tiny-llama" / "tokenizer.json"
    directory.mkdir()
    shutil.copy(tokenizer, directory)
    write_shard(directory / "train_0.bin", 500, vocabulary=2048,
                tokenizer_hash=xxhash.xxh3_64_intdigest(tokenizer.read_bytes()))
    return tokenizer


# The fixtures have names of their own in Python: a test that imports them has parameters with the names that pytest knows.
@pytest.fixture(name="data")
def data_fixture(tmp_path):
    return make_data(tmp_path / "shards with spaces")


@pytest.fixture(name="whole")
def whole_fixture(data, tmp_path):
    """The uninterrupted run that every interrupted one must equal bit for bit."""
    assert train(data, tmp_path / "whole").returncode == 0
    return tmp_path / "whole"


def environment(**more):
    # One thread: the model is so small that waking a second one costs more than its work.
    return {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **more}


# Those of the options below that other tasks than training take.
OF_TASKS = {"--eval": ["--model", "--val", "--micro-batch", "--seq-len", "--batch-tokens", "--val-batches"],
            "--bench": ["--model", "--micro-batch", "--seq-len", "--batch-tokens"], "--compare": ["--model"]}


def arguments(data, out, *more, steps=12):
    """A run of a few milliseconds a step; options in `more` replace those here."""
    chosen = {"--model": MODEL, "--train": data / "train_*.bin", "--val": data / "val_*.bin", "--out": out, "--steps": steps,
              "--micro-batch": 2, "--seq-len": 16, "--batch-tokens": 64, "--schedule": "cosine", "--lr": 0.003, "--warmup-steps": 2,
              "--save-every": 4, "--val-every": 5, "--val-batches": 2}
    given = {str(option).split("=")[0] for option in more}
    for task in given & OF_TASKS.keys():
        chosen = {option: chosen[option] for option in OF_TASKS[task]}
    kept = [str(word) for option, value in chosen.items() if option not in given for word in (option, value)]
    return [str(PROGRAM), *kept, *map(str, more)]


def fp8_shape(directory):
    """A new model whose widths are multiples of 16, as --precision fp8 needs them; MODEL's are not."""
    directory.mkdir(exist_ok=True)
    path = directory / "fp8_shape.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
                                "vocab_size": 64, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
                                "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
                                "rms_norm_eps": 1e-5, "rope_theta": 10000.0}))
    return ["--model=", "--config", path]


def train(data, out, *more, env=None, **keys):
    return subprocess.run(arguments(data, out, *more, **keys), capture_output=True, text=True, timeout=SECONDS,
                          env=environment(**(env or {})))


_started = []


def start(data, out, *more, env=None, cwd=None, preexec_fn=None, **keys):
    """A run beside the test; `end_started` ends it with the test."""
    process = subprocess.Popen(arguments(data, out, *more, **keys), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment(**(env or {})), cwd=cwd, preexec_fn=preexec_fn)
    _started.append(process)
    return process


@pytest.fixture(autouse=True)
def end_started(tmp_path):
    """What a failed test has started does not run on for hours beside the others."""
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()


def run_program(*options, **keys):
    return subprocess.run([str(PROGRAM), *map(str, options)], capture_output=True, text=True, timeout=SECONDS,
                          env=environment(), **keys)


def assert_refused(done, code, *words):
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0], done.stderr
    for word in words:
        assert word in errors[0], errors[0]


def records(out):
    # A killed run may leave half a line; the next one begins on a line of its own.
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines() if line.endswith("}")]


def losses(out):
    """Loss and gradient norm by step; of a step that was computed twice, the later one."""
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in records(out) if r["type"] == "step"}


def checkpoints(out):
    return sorted(path.name for path in out.glob("step_*"))


def state_bytes(out, step):
    directory = out / f"step_{step:08d}"
    return [(directory / name).read_bytes() for name in ("model.bin", "state.bin")]


def has_checkpoint(out):
    """Any one: --keep removes the first ones while the program still runs. A save that has not ended is called step_N.tmp."""
    return any(out.glob("step_????????/manifest.json"))


def stat_of(pid):
    """From /proc, for a small system has no ps: state, parent, ... of a process, which stand behind its name, that may hold
    anything. Nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def children_of(process):
    """Process ids."""
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if stat_of(pid)[1:2] == [str(process.pid)]]


def send(process, number):
    """Sends a signal and waits until it has arrived: a second one before that would be one with it."""
    process.send_signal(number)

    def pending():
        status = Path(f"/proc/{process.pid}/status").read_text()
        return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in status.splitlines()
                   if line.startswith(("SigPnd:", "ShdPnd:")))

    wait_for(lambda: not pending())


def preload(tmp_path, source):
    """The environment that puts a library of C `source` in front of the system's; skips where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler for a library that takes calls over")
    (tmp_path / "shim.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(tmp_path / "shim.so")}


def wait_for(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_same_run(out, whole, step=12):
    """Log, parameters and moments, bit for bit."""
    assert losses(out) == losses(whole)
    one, two = state_bytes(out, step), state_bytes(whole, step)
    assert one[0] == two[0] and one[1] == two[1]
