"""scripts/tensor_file.py and scripts/token_shard.py: shared vectors with the C++ readers, damage, failing disks."""

import errno
import importlib.util
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "test" / "fixtures"
sys.path.insert(0, str(ROOT / "scripts"))
import tensor_file  # noqa: E402
import token_shard  # noqa: E402
from tensor_file import FileError, Writer, escaped  # noqa: E402


def load(name: str):
    path = FIXTURES / name / "make_fixtures.py"
    spec = importlib.util.spec_from_file_location(f"make_{name}_fixtures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tensor_vectors, shard_vectors = load("tensor_file"), load("token_shard")


def cases(name: str) -> list:
    listed = json.loads((FIXTURES / name / "damaged.json").read_text(encoding="utf-8"))
    return [pytest.param(case, id=case["name"]) for case in listed]


# ---- tensor files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tensor_vectors.GOOD)
def test_writes_the_committed_bytes(name, tmp_path):
    tensor_vectors.GOOD[name](tmp_path / name)
    assert (tmp_path / name).read_bytes() == (FIXTURES / "tensor_file" / name).read_bytes()
    tensor_file.read(tmp_path / name).verify()


@pytest.mark.parametrize("case", cases("tensor_file"))
def test_refuses_damage(case, tmp_path):
    path = tmp_path / "damaged.bin"
    path.write_bytes(tensor_vectors.apply(case))
    with pytest.raises(FileError) as caught:
        tensor_file.read(path)
    assert str(caught.value) == f"{escaped(str(path))}: {case['message']}"
    assert caught.value.code == tensor_file.BAD_FILE


def test_reads_the_content():
    file = tensor_file.read(FIXTURES / "tensor_file" / "all_dtypes.bin", "model")
    assert file.kind == "model" and file.config["model"]["family"] == "llama"
    assert list(file.tensors) == ["matrix", "half", "brain", "tokenizer.json", "u16", "u32", "i32", "i64",
                                  "i8", "u4", "e4m3"]
    np.testing.assert_array_equal(file.array("matrix"), np.arange(6, dtype=np.float32).reshape(2, 3) / 2 - 1)
    np.testing.assert_array_equal(file.f32("brain"), np.array([1, 1, np.inf, -2.5], dtype=np.float32))
    assert file.f32("half")[3] == 65504 and file.array("i64")[0] == -1
    assert bytes(file.bytes("tokenizer.json")) == b'{"model":{}}'
    assert file.at("u4").shape == (2, 4) and file.array("u4").tolist() == [[0x10, 0x32], [0x54, 0xF6]]
    assert file.array("i8").tolist() == [-128, 127, 1] and file.array("e4m3").tolist() == [0x01, 0x7E, 0xB8]
    with pytest.raises(FileError, match="tensor 'none': missing"):
        file.array("none")
    with pytest.raises(FileError, match="dtype: got u16, expected f32, f16 or bf16"):
        file.f32("u16")
    with pytest.raises(ValueError):
        file.array("matrix")[0, 0] = 1  # a view of the file


def test_scalars_and_empty_tensors():
    file = tensor_file.read(FIXTURES / "tensor_file" / "edge.bin")
    assert file.array("scalar").shape == () and file.array("scalar") == np.float32(3.25)
    assert file.array("empty").shape == (0, 3) and file.array("last_empty").shape == (2, 0)
    assert file.tensors["eight"].shape == (1, 1, 1, 1, 1, 1, 2, 1) and file.tensors["eight"].elements == 2


def test_refuses_every_other_kind():
    kinds = {"all_dtypes.bin": "model", "no_tensors.bin": "training state", "edge.bin": "reference dump"}
    for name, kind in kinds.items():
        for expected in set(kinds.values()) - {kind}:
            with pytest.raises(FileError, match=f"kind: this is a {kind}, expected a {expected}"):
                tensor_file.read(FIXTURES / "tensor_file" / name, expected)


def test_refuses_each_flipped_bit_and_each_cut(tmp_path):
    whole = (FIXTURES / "tensor_file" / "edge.bin").read_bytes()
    path = tmp_path / "x.bin"
    path.write_bytes(whole)
    with open(path, "r+b", buffering=0) as file:
        for at in [*range(0, 80), *range(80, 4096, 31), *range(4096, 6500), *range(6500, len(whole), 3)]:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << at % 8]))
            with pytest.raises(FileError):
                tensor_file.read(path).verify()
            file.seek(at)
            file.write(whole[at:at + 1])
        tensor_file.read(path).verify()
        for size in range(len(whole) - 1, -1, -7):
            file.truncate(size)
            with pytest.raises(FileError):
                tensor_file.read(path)


def test_refuses_what_is_not_a_file(tmp_path):
    with pytest.raises(FileError, match="cannot open"):
        tensor_file.read(tmp_path / "absent")
    with pytest.raises(FileError, match="not a regular file"):
        tensor_file.read(tmp_path)


def test_writes_in_pieces(tmp_path):
    values = np.arange(1000, dtype=np.float32)
    with Writer(tmp_path / "a.bin", "model", {}) as writer:
        writer.declare("x", "f32", (10, 100))
        writer.write("x", (values[i:i + 300] for i in range(0, 1000, 300)))
    with Writer(tmp_path / "b.bin", "model", {}) as writer:
        writer.declare("x", "f32", (10, 100))
        writer.write("x", np.asfortranarray(values.reshape(10, 100)))  # stored in C order whatever it came in
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    np.testing.assert_array_equal(tensor_file.read(tmp_path / "a.bin").array("x").reshape(-1), values)


@pytest.mark.parametrize("misuse", [
    lambda w: w.declare("x", "f32", (1,)),
    lambda w: w.declare("", "f32", (1,)),
    lambda w: w.declare("n" * 256, "f32", (1,)),
    lambda w: w.declare("a\nb", "f32", (1,)),
    lambda w: w.declare("y", "f64", (1,)),
    lambda w: w.declare("y", "f32", (-1,)),
    lambda w: w.declare("y", "u8", (1,) * 9),
    lambda w: w.declare("y", "f32", (1 << 61, 1 << 61, 0)),
    lambda w: w.write("y", b""),
    lambda w: w.write("x", np.zeros(3, dtype=np.float32)),
    lambda w: w.write("x", np.zeros(2, dtype=np.float64)),
    lambda w: w.write("x", bytes(7)),
    lambda w: w.write("x", bytes(9)),
    lambda w: w.close(),
])
def test_misuse_leaves_the_old_file(misuse, tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), Writer(path, "model", {}) as writer:
        writer.declare("x", "f32", (2,))
        with pytest.raises(ValueError):
            misuse(writer)
        raise KeyboardInterrupt  # the end of the block would complain of what is not written
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("dtype", tensor_file.NUMPY_DTYPES)
def test_bytes_of_every_dtype_up_to_the_limit(dtype):
    """The sizes that are not zero count for the limit, also beside one that is: as the C++ reader has it."""
    size = np.dtype(tensor_file.NUMPY_DTYPES[dtype]).itemsize
    assert tensor_file.payload_bytes(dtype, (6, 4)) == (12 if dtype == "u4" else 24 * size)
    for zeros in ((), (0,), (0, 0)):
        for most in (2**63 // size,), (2**31 // size, 2**32), (2**40, 2**40):
            for shape in ((*zeros, *most), (*most, *zeros), (most[0], *zeros, *most[1:])):
                assert tensor_file.payload_bytes(dtype, shape) is None
        below = 2**63 // size - 2
        assert tensor_file.payload_bytes(dtype, (*zeros, below)) == (0 if zeros else below // 2 if dtype == "u4" else below * size)
        assert tensor_file.payload_bytes(dtype, zeros) == (0 if zeros else tensor_file.payload_bytes(dtype, (1,)))


def test_a_configuration_that_is_not_json_is_refused(tmp_path):
    for config in ({"x": float("nan")}, {"model": {"family": "mamba"}}):
        with pytest.raises(ValueError):
            Writer(tmp_path / "x.bin", "model", config)


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(FileError) as caught, Writer(path, "model", {}) as writer:
            writer.declare("x", "u8", (1 << 20,))
            writer.write("x", bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.code == tensor_file.RESOURCES
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_an_absent_directory_is_an_environment_error(tmp_path):
    with pytest.raises(FileError) as caught:
        Writer(tmp_path / "none" / "x.bin", "model", {}).close()
    assert caught.value.code == tensor_file.ENVIRONMENT


def test_bf16_conversions():
    bits = np.arange(65536, dtype=np.uint16)
    wide = tensor_file.bf16_to_f32(bits)
    nan = np.isnan(wide)
    assert nan.sum() == 2 * 127
    np.testing.assert_array_equal(tensor_file.f32_to_bf16(wide)[~nan], bits[~nan])
    assert np.isnan(tensor_file.bf16_to_f32(tensor_file.f32_to_bf16(wide))[nan]).all()
    finite = np.sort(wide[np.isfinite(wide) & (wide >= 0)].astype(np.float64))
    middles = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    below = tensor_file.bf16_to_f32(tensor_file.f32_to_bf16(np.nextafter(middles, np.float32(0))))
    above = tensor_file.bf16_to_f32(tensor_file.f32_to_bf16(np.nextafter(middles, np.float32(np.inf))))
    positive = np.unique(finite)
    middles = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    assert (tensor_file.f32_to_bf16(middles) % 2 == 0).all()  # ties go to the even one
    assert np.isin(below, positive).all() and np.isin(above, positive).all() and (above >= below).all()


def test_escaped_agrees_with_the_cpp_one():  # the same cases are in test/cpp/base_test.cpp
    assert escaped("plain \u00e9") == "'plain \u00e9'"
    assert escaped("a\x1b[31mb\n\x7f") == "'a\\x1b[31mb\\x0a\\x7f'"
    assert escaped(b"\xc2\x9b1m") == "'\\xc2\\x9b1m'"
    assert escaped(b"\xff\xc0\xaf") == "'\\xff\\xc0\\xaf'"
    assert escaped("it's \\ here") == "'it\\'s \\\\ here'"
    assert escaped("a\u202eb\ufeff\U000e0041") == "'a\\xe2\\x80\\xaeb\\xef\\xbb\\xbf\\xf3\\xa0\\x81\\x81'"
    assert escaped("a\0b") == "'a\\x00b'"
    assert escaped("abcdef", 3) == "'a...ef'"
    assert escaped("abcdef", 6) == "'abcdef'"
    assert escaped("ab\u00e9f", 3) == "'a...f'"
    assert escaped("ab\u00e9f\n", 4) == "'a...f\\x0a'"
    assert escaped(b"a" * 9 + b"\xff\xff\xff", 6) == "'aa...a\\xff\\xff\\xff'"
    assert escaped("/dir" * 100 + "/file.bin").endswith("/dir/file.bin'")


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / f"x.tmp.{os.getpid()}").symlink_to(tmp_path / "victim")
    with tensor_file.AtomicFile(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "x").read_bytes() == b"new" and not (tmp_path / "x").is_symlink()


def test_interrupted_while_it_syncs_it_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "x.bin", "model", {}):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code, exit_code", [(errno.EIO, tensor_file.ENVIRONMENT), (errno.ENOSPC, tensor_file.RESOURCES),
                                             (errno.EDQUOT, tensor_file.RESOURCES)])
@pytest.mark.parametrize("call, action", [("ftruncate", "truncate"), ("fsync", "sync"), ("close", "close"),
                                          ("rename", "rename the finished file")])
def test_a_failure_to_finish_leaves_the_old_file_alone(call, action, code, exit_code, tmp_path, monkeypatch):
    def fails(*arguments):
        if call == "close":
            close(*arguments)
        raise OSError(code, "it failed")

    path, close = tmp_path / "x.bin", os.close
    path.write_bytes(b"old")
    file = tensor_file.AtomicFile(path)
    file.write(b"new")
    with monkeypatch.context() as patch, pytest.raises(FileError, match=f"x.bin': cannot {action}: it failed") as caught:
        patch.setattr(os, call, fails)
        file.publish()
    assert caught.value.code == exit_code
    file.discard()  # what is over is over
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_a_directory_leaves_nothing(tmp_path):
    (tmp_path / "x.bin").mkdir()
    with pytest.raises(FileError, match="rename the finished file"), Writer(tmp_path / "x.bin", "model", {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_a_file_system_that_cannot_sync_directories_will_do(tmp_path, monkeypatch):
    fsync = os.fsync

    def only_files(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", only_files)
    with tensor_file.AtomicFile(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def run_tool(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "tensor_file.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def test_the_tool_lists_and_verifies(tmp_path):
    good = FIXTURES / "tensor_file" / "all_dtypes.bin"
    listing = run_tool(good)
    assert listing.returncode == 0 and "'brain'" in listing.stdout and '"family": "llama"' in listing.stdout
    file = tensor_file.read(good)
    lines = listing.stdout.splitlines()
    assert lines[0] == f"model, {len(file.tensors)} tensors, {sum(info.bytes for info in file.tensors.values()):,} bytes of data"
    width = max(len(repr(name)) for name in file.tensors)
    for line, info in zip(lines[-len(file.tensors):], file.tensors.values(), strict=True):
        columns = line[width + 2:].split()
        assert line.startswith(f"{repr(info.name):<{width}}  ") and columns[0] == info.dtype, "columns below each other"
        assert columns[-2:] == [f"{info.offset:,}", f"{info.hash:016x}"]
    assert "all hashes match" in run_tool("--verify", good).stdout
    flipped = bytearray(good.read_bytes())
    flipped[-1] ^= 1
    (tmp_path / "flipped.bin").write_bytes(flipped)
    assert run_tool(tmp_path / "flipped.bin").returncode == 0
    refused = run_tool("--verify", tmp_path / "flipped.bin")
    assert refused.returncode == 3 and refused.stdout == ""
    assert refused.stderr.startswith("error: ") and "tensor 'e4m3': XXH3-64" in refused.stderr
    assert refused.stderr.count("\n") == 1


# ---- token shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shard_vectors.GOOD)
def test_shards_have_the_committed_bytes(name, tmp_path):
    shard_vectors.write_good(tmp_path / name, **shard_vectors.GOOD[name])
    assert (tmp_path / name).read_bytes() == (FIXTURES / "token_shard" / name).read_bytes()
    shard = token_shard.TokenShard(tmp_path / name)
    shard.verify()
    assert shard.tokens.tolist() == shard_vectors.GOOD[name]["ids"]


@pytest.mark.parametrize("case", cases("token_shard"))
def test_shards_refuse_damage(case, tmp_path):
    path = tmp_path / "damaged.bin"
    path.write_bytes(shard_vectors.apply(case))
    with pytest.raises(FileError) as caught:
        token_shard.TokenShard(path).verify()
    assert str(caught.value) == f"{escaped(str(path))}: {case['message']}"


@pytest.mark.parametrize("name, size", [("u16.bin", 65536), ("u32.bin", 128256)])
def test_the_end_of_a_document_is_an_id_of_the_vocabulary_or_none(name, size, tmp_path):
    path = tmp_path / "x.bin"
    for end in (-2, -1, 0, size - 1, size, size + 1, 2**63 - 1, -(2**63)):
        path.write_bytes(shard_vectors.apply({"base": name, "edits": [[40, end.to_bytes(8, "little", signed=True).hex()]], "rehash": True}))
        if -1 <= end < size:
            assert token_shard.TokenShard(path).end_of_document_id == end
            continue
        with pytest.raises(FileError, match=f"end_of_document_id: got {end}, expected -1 to {size - 1}"):
            token_shard.TokenShard(path)
        with pytest.raises(ValueError, match=f"vocabulary of {size}, end of document {end}"):
            token_shard.ShardWriter(tmp_path / "y.bin", size, 0, end)
    assert list(tmp_path.iterdir()) == [path]


def test_shard_writer_refuses_ids_outside_the_vocabulary(tmp_path):
    writer = token_shard.ShardWriter(tmp_path / "x.bin", vocab_size=10, tokenizer_hash=0)
    for ids in ([10], [-1], [2**40], [1, -1, 2], [1, 10, 2], [1, 2, -1]):
        with pytest.raises(ValueError):
            writer.write(np.array(ids))
    with pytest.raises(ValueError):
        writer.close()  # nothing was written
    assert not list(tmp_path.iterdir())
