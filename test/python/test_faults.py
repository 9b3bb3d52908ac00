"""Faults while train_llama runs (F01 to F41 in doc/robustness.md): it dies, or is stopped, or a call fails, at exact and at
random places, and afterwards the run goes on to the same bits, or one line says why it cannot."""

import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from train_runs import (NEOX, PROGRAM, ROOT, SECONDS, arguments, assert_refused, assert_same_run, checkpoints, environment,
                        has_checkpoint, losses, preload, records, send, start, train, wait_for, write_shard)
from train_runs import data_fixture, end_started, whole_fixture  # noqa: F401, pytest finds them here

MEMORY = Path("/dev/shm")


def memory_is_of_use():
    """There is room for the largest of these tests, and the libraries that they build may be loaded from there."""
    return (os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 256 << 20
            and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC)


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is such a place: hundreds of saves wait several times each for their disk."""
    if not memory_is_of_use():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="weft_faults_", dir=MEMORY) as directory:
        yield Path(directory)


# ---- F01 to F03: killed ----------------------------------------------------------------------------------------------


def test_fifty_runs_killed_at_random_moments(data, tmp_path):
    """kill -9 at a moment that nobody chose, anywhere between the first instruction and the last; then the same command."""
    options = ["--save-every", 3, "--val-every", 0, "--dropout", 0.1]
    begin = time.monotonic()
    assert train(data, tmp_path / "whole", *options, steps=24).returncode == 0
    length = time.monotonic() - begin
    moments, killed = random.Random(20261120), 0
    for _ in range(150):
        out = tmp_path / "run"
        begin = time.monotonic()
        process = start(data, out, *options, steps=24)
        try:
            process.communicate(timeout=moments.uniform(0.01, length))
            length = min(length, time.monotonic() - begin)  # the run that was measured was slower than this one
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if process.returncode == -signal.SIGKILL:
            killed += 1
            done = train(data, out, *options, steps=24)
            assert done.returncode == 0, done.stderr
        assert_same_run(out, tmp_path / "whole", 24)
        shutil.rmtree(out)
        if killed == 50:
            break
    assert killed == 50


def test_killed_at_every_4_kib_of_a_save(data, tmp_path):
    """The process dies exactly when so many bytes of a checkpoint are written: the older one is always there."""
    first = tmp_path / "first"
    assert train(data, first, "--debug-inject", "term@step=4").returncode == 143
    size = sum(path.stat().st_size for path in (first / "step_00000004").iterdir())
    assert size > 200_000
    for byte in range(0, size, 4096):
        out = tmp_path / "run"
        shutil.copytree(first, out)
        assert train(data, out, "--debug-inject", f"kill@save={byte}").returncode == -signal.SIGKILL, byte
        assert checkpoints(out) == ["step_00000004", "step_00000008.tmp"]
        # Loaded, every hash compared, and not a step computed.
        done = train(data, out, "--resume", "must", "--max-minutes", 1e-9)
        assert done.returncode == 0 and "resuming after step 4 of" in done.stderr, done.stderr
        assert checkpoints(out) == ["step_00000004"], "what the killed save left is gone"
        shutil.rmtree(out)


def count_calls(data, tmp_path):
    """How many syncs, renames and removals the saves of a whole run make."""
    low, high = 0, 1000
    while low < high:
        middle = (low + high) // 2
        out = tmp_path / "count"
        code = train(data, out, "--val-every", 0, "--debug-inject", f"kill@call={middle}").returncode
        shutil.rmtree(out)
        low, high = (middle + 1, high) if code == -signal.SIGKILL else (low, middle)
    return low


def test_killed_and_failing_at_every_call_of_a_save(data, tmp_path, whole):
    """Before each sync, rename and removal of three saves: also between a checkpoint's rename and its sync, and while an
    old one goes. The same call failing costs at most that checkpoint."""
    calls = count_calls(data, tmp_path)
    # Three files (sync, rename, sync of the directory), the directory (sync, rename, sync above); the third save removes
    # the first checkpoint (rename, sync, removal).
    assert calls == 3 * (3 * 3 + 3) + 3
    for call in range(calls):
        out = tmp_path / "run"
        assert train(data, out, "--debug-inject", f"kill@call={call}").returncode == -signal.SIGKILL
        done = train(data, out)
        assert done.returncode == 0, done.stderr
        assert ("resuming after step" in done.stderr) == (call >= 11), "the 11th call, from 0, follows the rename"
        assert_same_run(out, whole)
        shutil.rmtree(out)

        done = train(data, out, "--debug-inject", f"io-error@call={call}")
        last_save = 24 <= call < 36
        assert done.returncode == (5 if last_save else 0), done.stderr
        assert "Input/output error" in done.stderr
        warned, failed = "warning: no checkpoint of step" in done.stderr, "error: the last checkpoint" in done.stderr
        assert (warned, failed) == (call < 24, last_save), (call, done.stderr)
        if last_save:
            assert train(data, out).returncode == 0
        assert_same_run(out, whole)
        shutil.rmtree(out)


# ---- F04, F05: disks -------------------------------------------------------------------------------------------------


def test_a_file_size_limit_costs_checkpoints_not_the_run(data, tmp_path):
    """ulimit -f: the same answers as a full disk, without one."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    out = tmp_path / "run"
    done = subprocess.run(arguments(data, out), capture_output=True, text=True, timeout=SECONDS, env=environment(),
                          preexec_fn=limit)
    assert_refused(done, 5, "last checkpoint", "cannot reserve space: File too large")
    assert done.stderr.count("warning: no checkpoint of step") == 2
    assert max(losses(out)) == 12 and checkpoints(out) == []
    assert train(data, out).returncode == 0


def test_a_full_disk(data, tmp_path, whole):
    """A real one: a file system with room for two checkpoints and a half."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    checkpoint = sum(path.stat().st_size + 4096 for path in (whole / "step_00000012").iterdir())
    mount = 'mount -t tmpfs -o size="$1" none "$0"'
    size = str(checkpoint * 5 // 2 + 65536)
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount, str(disk), size], capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount a file system of its own")
    script = mount + ' && shift && "$@"; code=$?; cp -r "$0/run" "$COPY"; exit $code'
    command = ["unshare", "--mount", "sh", "-c", script, str(disk), size]
    done = subprocess.run(command + arguments(data, disk / "run", "--keep", 4), capture_output=True, text=True,
                          timeout=SECONDS, env=environment(COPY=str(copy)))
    assert done.returncode == 5, done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert checkpoints(copy) == ["step_00000004", "step_00000008"], "what was saved before stays, no temporary does"
    done = train(data, copy, "--resume", "must")
    assert done.returncode == 0 and "resuming after step 8" in done.stderr
    assert_same_run(copy, whole)


# Makes calls that concern a checkpoint fail: $FAIL is "fsync", "mkdir", "rename" or "open", $ERRNO the error.
FAILING_CALLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static int fails(const char* call, const char* path) {
  if (strcmp(getenv("FAIL"), call) != 0 || strstr(path, "step_00000004") == 0) return 0;
  errno = atoi(getenv("ERRNO"));
  return 1;
}
int fsync(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  path[n > 0 ? n : 0] = 0;
  return fails("fsync", path) ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int mkdir(const char* path, mode_t mode) {
  return fails("mkdir", path) ? -1 : ((int (*)(const char*, mode_t))dlsym(RTLD_NEXT, "mkdir"))(path, mode);
}
int rename(const char* from, const char* to) {
  return fails("rename", to) ? -1 : ((int (*)(const char*, const char*))dlsym(RTLD_NEXT, "rename"))(from, to);
}
int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  mode_t mode = va_arg(list, mode_t);
  va_end(list);
  return fails("open", path) ? -1 : ((int (*)(const char*, int, ...))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}
"""


@pytest.mark.parametrize("call, error, words", [
    ("fsync", "EIO", "cannot sync: Input/output error"),  # what a dying disk says
    ("mkdir", "EROFS", "cannot create: Read-only file system"),  # a remount after an error
    ("open", "EROFS", "Read-only file system"),
    ("rename", "EDQUOT", "Disk quota exceeded"),
    ("open", "EMFILE", "Too many open files"),
])
def test_calls_of_the_system_that_fail(data, tmp_path, whole, call, error, words):
    out = tmp_path / "run"
    done = train(data, out, env=preload(tmp_path, FAILING_CALLS) | {"FAIL": call, "ERRNO": str(getattr(errno, error))})
    if "LD_PRELOAD" in done.stderr:
        pytest.skip("this build cannot be preloaded")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "no checkpoint of step 4" in warnings[0] and words in warnings[0], warnings
    assert not list(out.glob("*.tmp"))
    assert_same_run(out, whole)


def test_the_run_directory_is_deleted_meanwhile(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    while out.exists():  # the run may be making a file in it
        shutil.rmtree(out, ignore_errors=True)
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 5, messages
    assert messages.splitlines()[-1].startswith("error: the last checkpoint could not be saved: ")
    assert "No such file or directory" in messages.splitlines()[-1]


# ---- F11, F19: data and memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["removed", "cut"])
def test_a_shard_that_goes_away(data, tmp_path, what):
    out = tmp_path / "run"
    process = start(data, out, steps=1_000_000)
    wait_for(lambda: has_checkpoint(out))
    shard = data / "train_0.bin"
    shard.unlink() if what == "removed" else os.truncate(shard, 300)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 3, messages
    last = messages.splitlines()[-1]
    assert last.startswith("error: ") and ("train_0.bin" in last or "bus error" in last)
    assert has_checkpoint(out) and not list(out.glob("*.tmp"))


def test_address_space_limits(data, tmp_path):
    """ulimit -v: the run works, or one line says what there is too little of; never a signal, never a half-written file."""
    codes = set()
    code = PROGRAM.stat().st_size >> 20  # mapped as a whole, and a build with GPU code has much
    for megabytes in (220, 260, 300, 400, 500, 1000):  # below, OpenBLAS waits for ever while it is loaded
        out = tmp_path / f"run{megabytes}"

        def limit(bytes=megabytes + code << 20):
            resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes))

        done = subprocess.run(arguments(data, out), capture_output=True, text=True, timeout=SECONDS, env=environment(),
                              preexec_fn=limit)
        assert done.returncode in (0, 5), (megabytes, done.returncode, done.stderr)
        if done.returncode == 5:
            assert_refused(done, 5)
        codes.add(done.returncode)
    assert codes == {0, 5}
    # A plan beyond the limit is refused before anything is written.
    out = tmp_path / "beyond"
    done = subprocess.run(arguments(data, out, "--model=", "--val=", "--config", "d12", "--micro-batch", 2), timeout=SECONDS,
                          capture_output=True, text=True, env=environment(),
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)))
    assert_refused(done, 5, "the plan needs", "available")
    assert not out.exists()


# ---- F31 to F36 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, last", [
    ("term@step=1", 1), ("term@step=6", 6), ("term@step=11", 11), ("term@validation=5", 5), ("term@sample=6", 6),
    ("term@save=0", 4), ("term@save=8000000", 4), ("term@save=15500000", 4),
])
def test_terminated_in_every_phase(data, tmp_path, spec, last):
    """In a step, while it is measured, while it writes a sample, at the beginning, in the middle and at the end of a save:
    what was begun is finished, the state is saved, the same command goes on to the same bits."""
    tokenizer = ROOT / "models" / "tiny-llama" / "tokenizer.json"
    xxhash = pytest.importorskip("xxhash")
    hash_of_tokenizer = xxhash.xxh3_64_intdigest(tokenizer.read_bytes())
    for name, count in (("train_0.bin", 400), ("val_0.bin", 200)):
        write_shard(data / name, count, vocabulary=2048, tokenizer_hash=hash_of_tokenizer)
    shutil.copy(tokenizer, data)
    options = ["--model=", "--config", "tiny", "--train", data / "train_0.bin", "--sample-every", 6, "--sample-tokens", 4,
               "--micro-batch", 1, "--batch-tokens", 16]
    assert train(data, tmp_path / "whole", *options).returncode == 0
    out = tmp_path / "run"
    done = train(data, out, *options, "--debug-inject", spec)
    assert done.returncode == 143, done.stderr
    saved = max(int(name[5:]) for name in checkpoints(out))
    # A save runs beside training: the signal reaches whichever step is being computed then.
    assert saved == last if "save" not in spec else last <= saved <= 12, checkpoints(out)
    assert not list(out.glob("*.tmp")) and f"step {saved} " in done.stdout
    done = train(data, out, *options)
    assert done.returncode == 0, done.stderr
    assert_same_run(out, tmp_path / "whole")


def test_terminated_while_it_starts(data, tmp_path):
    """Before there is anything to lose it just ends; from the first handler on it saves. Resuming works in both cases."""
    codes = set()
    begin = time.monotonic()
    assert train(data, tmp_path / "whole", "--val=").returncode == 0
    length = time.monotonic() - begin
    for attempt in range(200):  # up to five times as long as that run took
        if codes >= {143, -signal.SIGTERM} and attempt >= 16:
            break
        out = tmp_path / "run"
        process = start(data, out, "--val=")
        time.sleep(length * attempt / 40)
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=SECONDS)
        codes.add(process.returncode)
        assert process.returncode in (0, 143, -signal.SIGTERM), messages
        log = out / "log.jsonl"
        if process.returncode == 143 and not checkpoints(out):  # nothing was lost
            assert not (log.exists() and any(record.get("type") == "step" for record in records(out))), messages
        elif process.returncode == 143:
            assert "the same command goes on" in messages or checkpoints(out)[-1] == "step_00000012"
        done = train(data, out, "--val=")
        assert done.returncode == 0, done.stderr
        assert_same_run(out, tmp_path / "whole")
        shutil.rmtree(out)
    assert 143 in codes


def test_a_second_signal_does_not_wait_for_a_save(data, tmp_path, whole):
    """The save stands still (its disk does not answer); the second signal ends the program, the older checkpoint stands."""
    shim = preload(tmp_path, r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int fsync(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  path[n > 0 ? n : 0] = 0;
  while (strstr(path, "step_00000008") != 0) pause();
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
""")
    out = tmp_path / "run"
    process = start(data, out, env=shim)
    wait_for(lambda: (out / "step_00000008.tmp").exists() or process.poll() is not None)
    if process.poll() is not None:
        assert "LD_PRELOAD" in process.communicate()[1]
        pytest.skip("this build cannot be preloaded")
    wait_for(lambda: any(r.get("step") == 11 for r in records(out)))  # training goes on without the disk
    send(process, signal.SIGTERM)
    time.sleep(0.5)  # two within 0.1 s are one
    assert process.poll() is None, "it waits for the save"
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, messages
    assert train(data, out).returncode == 0
    assert_same_run(out, whole)


def test_of_many_starts_at_once_one_wins(data, tmp_path):
    out = tmp_path / "run"
    processes = [start(data, out, "--debug-inject", "hang@step=3") for _ in range(6)]
    wait_for(lambda: sum(process.poll() is not None for process in processes) == 5)
    for process in processes:
        if process.poll() is not None:
            messages = process.communicate()[1]
            assert process.returncode == 4, messages
            assert re.search(r"another run works here: 'pid \d+ on [^'\\]+'\. Stop it", messages), messages


def test_a_clock_that_jumps(data, tmp_path, whole):
    """The wall clock goes back an hour at every look at it: rates and durations come from another one."""
    shim = preload(tmp_path, r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec* now) {
  static long looks = 0;
  int result = ((int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec -= 3600 * ++looks;
  return result;
}
""")
    out = tmp_path / "run"
    done = train(data, out, env=shim | {"TZ": "Asia/Kathmandu"})
    if "LD_PRELOAD" in done.stderr:
        pytest.skip("this build cannot be preloaded")
    assert done.returncode == 0, done.stderr
    steps = [r for r in records(out) if r["type"] == "step"]
    assert steps[1]["time"] < steps[0]["time"], "the clock of this test is that of the run"
    assert all(0 < r["dt_ms"] < 60_000 and r["tokens_per_s"] > 0 for r in steps)
    assert_same_run(out, whole)


# ---- F40, F41 --------------------------------------------------------------------------------------------------------


def make(*words, **environment):
    """As from a shell: `make test GPU_ARCH=...` hands its settings down to every make below it."""
    own = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MODE", "CPU_FLAGS", "GPU_ARCH", "NVCC", "CXX", "PYTHON"}
    return subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", *map(str, words)], capture_output=True, text=True,
                          timeout=SECONDS, env={**{k: v for k, v in os.environ.items() if k not in own}, **environment})


def test_builds_say_what_is_wrong(tmp_path):
    done = make("-n", "NVCC=", f"B={tmp_path}/b", "programs")
    assert done.returncode == 0 and "nvcc" not in done.stdout.replace("no nvcc", ""), done.stderr
    done = make("CXX=/nonexistent/g++", "NVCC=", f"B={tmp_path}/b", f"{tmp_path}/b/llmc/base/error.o")
    assert done.returncode != 0 and "no C++ compiler: /nonexistent/g++" in done.stderr, done.stderr
    old = tmp_path / "python3"
    old.write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c \"import sys; sys.version_info = (3, 9, 18); $1\"\n")
    old.chmod(0o755)
    done = make(f"PYTHON={old}", "-o", "deps", "-W", "scripts/requirements.txt", "venv")
    assert done.returncode != 0 and "is 3.9, the scripts need 3.11 to 3.13" in done.stderr, done.stderr
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '7.5\\n9.0\\n'\n")
    smi.chmod(0o755)
    done = make("help", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert 'GPU_ARCH="90a"' in done.stdout, "a GPU that is too old is no reason to build for it"
    done = make("GPU_ARCH=75 90a", f"B={tmp_path}/b", "-n", "programs")
    assert done.returncode != 0 and "GPU_ARCH: got 75 90a, weft's kernels need 80 or later" in done.stderr, done.stderr
    nvcc = shutil.which("nvcc") or next(iter(map(str, Path("/usr/local/cuda/bin").glob("nvcc"))), None)
    if nvcc is None:
        pytest.skip("no nvcc: the rest needs one")
    done = make("GPU_ARCH=12", f"NVCC={nvcc}", f"B={tmp_path}/b", f"{tmp_path}/b/llmc/cuda/runtime/error.o")
    assert done.returncode != 0 and "compute_12" in done.stderr


def test_ten_thousand_steps_leak_nothing(data, tmp_path):
    """Memory, files and threads of a long run with a hundred saves."""
    out = tmp_path / "run"
    process = start(data, out, "--micro-batch", 1, "--seq-len", 4, "--batch-tokens", 4, "--save-every", 100, "--val-every",
                    500, "--val-batches", 1, steps=10_000)
    proc = Path(f"/proc/{process.pid}")

    def look():
        resident, shared = map(int, (proc / "statm").read_text().split()[1:3])  # shared: pages of libraries come and go
        return (resident - shared) * 4096, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))

    looks = []
    wait_for(lambda: has_checkpoint(out))
    while process.poll() is None:
        try:
            looks.append(look())
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.01)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, messages
    assert len(looks) >= 10
    memory, files, threads = zip(*looks)
    part = len(looks) // 5
    # The least of many looks: a leak is there at every one of them, a save's files and buffers only while it saves.
    assert min(memory[-part:]) <= min(memory[part:2 * part]) + (1 << 20), memory
    assert min(files[-part:]) <= min(files[part:2 * part]) and max(files) < 20, files
    saving = max(4, min(8, os.cpu_count() // 2))  # two files, each with a thread that writes; or those that read them back
    assert max(threads) <= 2 + saving, "training, reading ahead, saving"
    assert len(losses(out)) == 10_000


# ---- infer_pythia ----------------------------------------------------------------------------------------------------

INFER = PROGRAM.with_name("infer_pythia")


def generate(*more):
    return [str(INFER), "--model", str(NEOX), "--device", "cpu", "--prompt-ids", "1,2,3", "--max-tokens", "8", "--ignore-eos",
            *map(str, more)]


@pytest.mark.parametrize("spec, code, words", [
    ("nan@token=1", 6, "is NaN"), ("nan@token=5", 6, "is NaN"), ("io-error@load", 3, "bus error"),
    ("kill@token=3", -signal.SIGKILL, ""), ("term@token=3", 143, ""), ("boom@token=3", 2, "nan@token=N"),
    ("nan@token=0", 2, "nan@token=N"), ("nan@token", 2, "nan@token=N"),
])
def test_inference_fails_in_one_line(spec, code, words):
    done = subprocess.run(generate("--debug-inject", spec), capture_output=True, text=True, timeout=SECONDS,
                          env=environment())
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code in (2, 3, 6)) and all(words in line for line in errors), done.stderr


def test_an_answer_that_hangs_is_interrupted():
    process = subprocess.Popen(generate("--debug-inject", "hang@token=4"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=environment())
    try:
        for line in process.stderr:
            if "token 4 never comes" in line:
                break
        send(process, signal.SIGINT)
        time.sleep(0.5)  # two within 0.1 s are one
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
