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
    for name in ("tokenizer.json", "u16", "u32", "i32", "i64", "i8", "u4", "e4m3"):
        with pytest.raises(FileError, match=f"dtype: got {file.at(name).dtype}, expected f32, f16 or bf16"):
            file.f32(name)
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


@pytest.mark.parametrize("read", [tensor_file.read, token_shard.TokenShard])
def test_nothing_waits_for_what_is_no_file(read, tmp_path, nothing_hangs):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, words in ((tmp_path / "fifo", "not a regular file"), (tmp_path / "link", "not a regular file"),
                        ("/dev/null", "not a regular file"),
                        (tmp_path, "this is a directory, not a regular file"),
                        (tmp_path / "loop", "cannot open: Too many levels of symbolic links"),
                        (tmp_path / "absent", "cannot open: No such file or directory"),
                        ("a\0b", "cannot open: embedded null byte")):
        with pytest.raises(FileError) as caught:
            read(path)
        assert str(caught.value) == f"{escaped(str(path))}: {words}" and caught.value.code == tensor_file.BAD_FILE


@pytest.mark.parametrize("head, words", [
    (b'\xef\xbb\xbf{"a":1}', "JSON text"), (b" \n[1]", "JSON text"), (b"\xef\xbb\xbf \n<html>", "web page"),
    (b"\x89WTOK\n\x1a", "text-mode copy"),
    (b"\tWTOK\r\n", "text-mode copy"), (b"\x89WEFT\n\x1a", "text-mode copy"), (b"\tWEFT\r\n", "text-mode copy"),
    (tensor_file.SHARD_MAGIC[::-1], "other byte order"), (tensor_file.MAGIC[::-1], "other byte order"),
    (tensor_file.SHARD_MAGIC, "a token shard"),
    (b"\x02" + bytes(7) + b"{}", "a safetensors file"), (b"\x03" + bytes(7) + b"{}", "not a tensor file"),
    (b"\x02" + bytes(7), "not a tensor file"),
    (b"\x02" + bytes(7) + b"[]", "not a tensor file"), (b"\x89WEFX\r\n\x1a", "got '\\x89WEFX"),
    (b"hello there", "got 'hello th'"), (b"\x80\x01", "got '\\x80\\x01'"),
    *((tensor_file.MAGIC[:size], f"truncated: got {size} bytes, expected at least 4096") for size in range(1, 9))])
def test_what_stands_where_a_tensor_file_should(head, words, tmp_path):
    (tmp_path / "x.bin").write_bytes(head)
    with pytest.raises(FileError) as caught:
        tensor_file.read(tmp_path / "x.bin")
    assert words in str(caught.value)


def test_every_byte_of_the_paddings_is_checked(tmp_path):
    """The first and the last of each, where the header hash is right."""
    table_end = tensor_vectors.TABLE + 6 * tensor_file.RECORD.size
    for begin, end, where in ((tensor_file.HEADER.size, 4096, "header page"),
                              (4096 + 163, tensor_vectors.TABLE, "configuration"), (table_end, 8192, "tensor table")):
        for at in {begin, (begin + end) // 2, end - 1}:
            (tmp_path / "x.bin").write_bytes(tensor_vectors.apply({"base": "edge.bin", "edits": [[at, "01"]], "rehash": True}))
            with pytest.raises(FileError, match=f"{where}: padding is not zero"):
                tensor_file.read(tmp_path / "x.bin")
    file = tensor_file.read(FIXTURES / "tensor_file" / "edge.bin")
    data = bytearray((FIXTURES / "tensor_file" / "edge.bin").read_bytes())
    end = 8192
    for info in file.tensors.values():
        for at in {end, info.offset - 1} if end < info.offset else ():
            data[at] = 1
            (tmp_path / "x.bin").write_bytes(data)
            with pytest.raises(FileError, match="data section: padding is not zero"):
                tensor_file.read(tmp_path / "x.bin").verify()
            data[at] = 0
        end = info.offset + info.bytes


def test_limits_are_accepted_and_one_more_is_not(tmp_path, monkeypatch):
    """By the writer and by the reader: tensors, bytes of a configuration, bytes of a name."""
    path, config = tmp_path / "x.bin", {"a": "\u00fc"}

    def write(names=("a", "b"), config=config):
        with Writer(path, "model", config) as writer:
            for name in names:
                writer.declare(name, "u8", (0,))
            for name in names:
                writer.write(name, b"")

    write()
    for limit, words in (("MAX_TENSORS", "tensor_count: got 2, expected at most 1"),
                         ("MAX_CONFIG_BYTES", "config_bytes: got 10, expected at most 9")):
        least = 2 if limit == "MAX_TENSORS" else 10
        with monkeypatch.context() as patch:
            patch.setattr(tensor_file, limit, least)
            write()
            assert list(tensor_file.read(path).tensors) == ["a", "b"]
            patch.setattr(tensor_file, limit, least - 1)
            with pytest.raises(ValueError, match="too many tensors" if least == 2 else "configuration of 10 bytes: at most 9"):
                write()
            with pytest.raises(FileError, match=words):
                tensor_file.read(path)
    write(["\u00fc" * 127 + "a", "n" * 255, " ~\u00a0"])
    assert list(tensor_file.read(path).tensors) == ["\u00fc" * 127 + "a", "n" * 255, " ~\u00a0"]
    for name in ("\u00fc" * 128, "n" * 256, "a\x1f", "\x7f", "\x80", "\u009f", "\x00"):
        with pytest.raises(ValueError, match="a tensor name is"):
            write([name])


CONFIGURATIONS = [
    (b'{"a":' + b"[" * 63 + b"]" * 63 + b"}", None), (b'{"a":[1,' + b"[" * 63 + b"]" * 63 + b"]}", "nested deeper than 64"),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper than 64"), (b'{"a":NaN}', "number out of range: NaN"),
    (b'{"a":-Infinity}', "number out of range: -Infinity"), (b'{"a":1e999}', "number out of range: 1e999"),
    (b'{"a":1e308}', None), (b'{"a":"\\ud800"}', "surrogates not allowed"), (b'{"a":"\\ud83e\\uddf5"}', None),
    (b'{"a":"\xff"}', "not valid JSON"), (b"[]", "expected a JSON object"), (b' {"a":1}', "expected a JSON object"),
    (b'{"a":{"b":1,"b":1}}', "JSON key 'b' occurs twice"), (b'[{"a":1,"a":1}]', "expected a JSON object")]


def test_configurations_at_the_limits_of_json():
    for text, words in CONFIGURATIONS:
        if words is None:
            assert list(tensor_file.parse_config("x", text)) == ["a"]
            continue
        with pytest.raises(FileError, match=f"'x': configuration: .*{words}") as caught:
            tensor_file.parse_config("x", text)
        assert caught.value.code == tensor_file.BAD_FILE


@pytest.mark.parametrize("model, family", [(None, None), (7, None), ([], None), ("llama", None), ({}, None),
                                           ({"family": None}, None),
                                           ({"family": "llama"}, "llama"), ({"family": ["llama"]}, ["llama"])])
def test_the_family_of_any_configuration(model, family, tmp_path):
    assert tensor_file.model_family({"model": model}) == family
    if isinstance(family, list):
        text = tensor_file.configuration_text({"model": model})
        base = tensor_vectors.apply({"base": "no_tensors.bin", "rehash": True,
                                     "edits": [[32, len(text).to_bytes(8, "little").hex()], [4096, text.hex()],
                                     [48, tensor_file.align_up(4096 + len(text), 8).to_bytes(8, "little").hex()]]})
        (tmp_path / "x.bin").write_bytes(base)
        with pytest.raises(FileError, match=r"family: got none, expected the configuration's model.family, '\[\"llama\"\]'"):
            tensor_file.read(tmp_path / "x.bin")
        return
    with Writer(tmp_path / "x.bin", "model", {"model": model}):
        pass
    assert tensor_file.read(tmp_path / "x.bin").config == {"model": model}


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


def test_a_file_that_is_closed_too_early_leaves_nothing(tmp_path):
    writer = Writer(tmp_path / "x.bin", "model", {})
    for name in ("x", "y"):
        writer.declare(name, "u8", (4,))
    with pytest.raises(ValueError, match="x: more than the declared 4 bytes"):
        writer.write("x", [bytes(4), b"1"])
    with pytest.raises(ValueError, match="x: declared but not written"):
        writer.close()
    assert not list(tmp_path.iterdir())


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
    for config in ({"x": float("nan")}, {"model": {"family": 7}}):
        with pytest.raises(ValueError):
            Writer(tmp_path / "x.bin", "model", config)


@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
def test_pieces_of_any_length_give_the_same_file(chunk, tmp_path, monkeypatch):
    """Also where the system writes less than it was given."""
    values = {"a": ("f32", np.arange(7, dtype=np.float32)), "scalar": ("f32", np.float32(2.5)),
              "pairs": ("u4", np.arange(6, dtype=np.uint8).reshape(2, 3)),
              "view": ("u16", np.arange(20, dtype=np.uint16).reshape(4, 5)[::2, ::-1]),
              "none": ("i64", np.zeros((3, 0), dtype=np.int64))}

    def write(path):
        with Writer(path, "model", {}) as writer:
            for name, (dtype, array) in values.items():
                writer.declare(name, dtype, (2, 6) if dtype == "u4" else array.shape)
            for name, (_, array) in values.items():
                writer.write(name, array)
        return path.read_bytes()

    whole, pwrite = write(tmp_path / "a.bin"), os.pwrite
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, memoryview(data)[:max(5, len(data) // 2)], offset))
    assert write(tmp_path / "b.bin") == whole
    file = tensor_file.read(tmp_path / "b.bin")
    file.verify()
    for name, (_, array) in values.items():
        np.testing.assert_array_equal(file.array(name), array)
    assert [file.at(name).elements for name in values] == [7, 1, 12, 10, 0]


@pytest.mark.parametrize("code, exit_code", [(errno.EOPNOTSUPP, None), (errno.EINVAL, None),
                                             (errno.ENOSPC, tensor_file.RESOURCES),
                                             (errno.EFBIG, tensor_file.RESOURCES), (errno.EDQUOT, tensor_file.RESOURCES),
                                             (errno.EIO, tensor_file.ENVIRONMENT)])
def test_space_is_reserved_before_the_first_byte_where_the_file_system_can(code, exit_code, tmp_path, monkeypatch):
    asked = []

    def reserve(fd, offset, size):
        asked.append((offset, size))
        raise OSError(code, "no space")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with tensor_file.AtomicFile(tmp_path / "y") as file:  # of a length that nobody knows
        file.write(b"y")
    assert not asked
    if exit_code is None:
        with Writer(path, "model", {}) as writer:
            writer.declare("x", "u8", (10,))
            writer.write("x", bytes(10))
        tensor_file.read(path).verify()
    else:
        with pytest.raises(FileError, match="x.bin': cannot reserve space: no space") as caught, Writer(path, "model",
                                                                                                        {}) as writer:
            writer.declare("x", "u8", (10,))
            writer.write("x", bytes(10))
        assert caught.value.code == exit_code and path.read_bytes() == b"old"
    assert asked == [(0, 8192 + 10)] and sorted(tmp_path.iterdir()) == [path, tmp_path / "y"]


def test_space_that_was_reserved_and_not_used_is_given_back(tmp_path):
    with tensor_file.AtomicFile(tmp_path / "x", expected_bytes=1000) as file:
        file.write(np.arange(3, dtype="<u2"))
        file.write(b"")
        file.write(b"end")
        file.rewrite(2, b"\xff\xff")
    assert (tmp_path / "x").read_bytes() == b"\0\0\xff\xff\2\0end"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644 & ~umask, "others may read it"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("target")
    for name, kind in (("pipe", "not a regular file"), ("link", "a symbolic link"), (".", "a directory")):
        before = os.lstat(tmp_path / name)
        with pytest.raises(tensor_file.FileError, match=f"is {kind}, expected the name of a file to write. Choose another name"):
            tensor_file.AtomicFile(tmp_path / name)
        assert os.lstat(tmp_path / name) == before
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


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


def test_bf16_of_arrays_of_any_size_and_shape():
    """NaN, whatever its bits, in every piece of a large array."""
    bits = np.full(3 * 65536 + 5, 0x3F800000, dtype=np.uint32)
    places = np.array([0, 1, 65535, 65536, 65537, 131071, 131072, 196608, bits.size - 1])
    bits[places] = [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F80FFFF]
    got = tensor_file.f32_to_bf16(bits.view(np.float32))
    want = np.full(bits.size, 0x3F80, dtype=np.uint16)
    want[places] = [0x7FC0, 0xFFFF, 0x7FC0, 0xFFC0, 0x7FFF, 0x3F80, 0x3F82, 0x7F80, 0x7FC0]
    np.testing.assert_array_equal(got, want)
    for shape in ((), (0,), (1,), (2, 3), (2, 0, 3), (1, 1, 4)):
        values = np.ones(shape, dtype=np.float32)
        assert tensor_file.f32_to_bf16(values).shape == shape == tensor_file.bf16_to_f32(tensor_file.f32_to_bf16(values)).shape
    turned = np.array([[1, 2], [3, 4]], dtype=np.float32).T
    np.testing.assert_array_equal(tensor_file.f32_to_bf16(turned), [[0x3F80, 0x4040], [0x4000, 0x4080]])


@pytest.mark.parametrize("first, last", [
    (0x00, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x61C, 0x61C), (0x180E, 0x180E), (0x200B, 0x200F), (0x2028, 0x202E),
    (0x2060, 0x206F),
    (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F)])
def test_both_ends_of_each_range_of_characters_are_escaped_and_their_neighbours_are_not(first, last):
    for code in {first, (first + last) // 2, last}:
        assert escaped(chr(code)) == "'" + "".join(f"\\x{byte:02x}" for byte in chr(code).encode()) + "'"
    for code in (first - 1, last + 1):
        assert code < 0 or escaped(chr(code)) == f"'{chr(code)}'"


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


def test_the_directory_is_synced_after_the_rename(tmp_path, monkeypatch):
    """Also that of a name without one; what fails there is an error, and the file is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    fsync, synced = os.fsync, []

    def records(fd):
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), path.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", records)
    for name in ("x", "./y", "sub/x", str(tmp_path / "z")):
        path = Path(name)
        with tensor_file.AtomicFile(name) as file:
            file.write(b"new")
        full = str(tmp_path / path)
        assert synced == [(f"{full}.tmp.{os.getpid()}", False), (os.path.dirname(full), True)]
        synced.clear()

    def fails(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "it failed")

    monkeypatch.setattr(os, "fsync", fails)
    file = tensor_file.AtomicFile("x")
    file.write(b"newer")
    with pytest.raises(FileError, match="'x': cannot sync the directory: it failed") as caught:
        file.publish()
    assert caught.value.code == tensor_file.ENVIRONMENT and (tmp_path / "x").read_bytes() == b"newer"


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, ROOT / "scripts" / "tensor_file.py", FIXTURES / "tensor_file" / "edge.bin"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": ""})
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


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


@pytest.mark.parametrize("begin", [1, 2, 65_535, 65_536, 65_537, 1_000_000])
def test_a_shard_keeps_what_it_was_made_with(begin, tmp_path):
    """Vocabularies up to both limits, ids of any layout, pieces without any."""
    size, path = begin, tmp_path / "x.bin"
    assert token_shard.dtype_for(size) == (np.uint16 if size <= 65536 else np.uint32)
    ids = np.array([[0, size - 1, 0], [size // 2, 0, size - 1]])
    for tokenizer_hash in (0, 2**63, 2**64 - 1):
        writer = token_shard.ShardWriter(path, size, tokenizer_hash)
        for piece in (ids[:0], ids, ids[:, ::2], ids.T, np.array([], dtype=np.float64), ids.astype(np.uint64)[1]):
            writer.write(piece)
        writer.close()
        shard = token_shard.TokenShard(path)
        shard.verify()
        assert shard.tokens.tolist() == [*ids.flatten(), *ids[:, ::2].flatten(), *ids.T.flatten(), *ids[1]]
        assert shard.count == shard.tokens.size == 19
        assert (shard.vocab_size, shard.tokenizer_hash, shard.end_of_document_id) == (size, tokenizer_hash, -1)
    for wrong in (0, -1, 1_000_001):
        with pytest.raises(ValueError, match=f"vocabulary of {wrong}"):
            token_shard.ShardWriter(path, wrong, 0)
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_id_that_is_damaged_is_named_and_every_byte_of_the_padding_checked(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(shard_vectors.apply({"base": "u32.bin", "edits": [[256, "ffffff00ffffffff"]], "rehash": False}))
    with pytest.raises(FileError, match="token 0: got id 16777215, expected at most 128255"):
        token_shard.TokenShard(path).verify()
    for at in (64, 65, 128, 254, 255):
        path.write_bytes(shard_vectors.apply({"base": "u32.bin", "edits": [[at, "01"]], "rehash": True}))
        with pytest.raises(FileError, match="header: padding is not zero"):
            token_shard.TokenShard(path)


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
