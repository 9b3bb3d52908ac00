"""Bad safetensors files, name -> (content, words of the message): the B numbers are those of doc/robustness.md.

test_convert.py runs them through the converter in its own process, hostile_cases.py through the script as users run it.
"""

import json

import checkpoints as ck

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entries(**changes):
    """A file of one tensor 'a' with changed fields, and 8 bytes of data."""
    return ck.safetensors_bytes({"a": ENTRY | changes}, bytes(8))


def many_entries(count, begin=lambda number: number * 4):
    """A header of `count` scalars, as text: json.dumps would take longer than the reader."""
    items = ",".join(f'"t{number}":{{"dtype":"F32","shape":[],"data_offsets":[{begin(number)},{begin(number) + 4}]}}'
                     for number in range(count))
    return ck.safetensors_bytes(b"{" + items.encode() + b"}", bytes(64))


HOSTILE_FILES = {
    "B01 empty": (b"", ["0 bytes", "download failed"]),
    "B02 seven bytes": (b"\x10" + bytes(6), ["got 7 bytes"]),
    "B03 header length 0": (ck.safetensors_bytes(b"", b"xx", 0), ["header length", "got 0"]),
    "B04 header length 2^63": (ck.safetensors_bytes(b"{}", b"", 2**63), ["header length", str(2**63)]),
    "B05 header longer than the file": (ck.safetensors_bytes(b"{}", b"", 11), ["header length", "got 11"]),
    "B06 header over the limit": (ck.safetensors_bytes(b"{}", b"", 100_000_001), ["header length", "100000001"]),
    "B07 git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", ["git-lfs pointer"]),
    "B08 web page": (b"<!DOCTYPE html><html>404</html>", ["looks like a web page"]),
    "B08 JSON message": (b'{"error": "Repository not found"}', ["looks like a web page"]),
    "B09 not UTF-8": (ck.safetensors_bytes(b'{"\xff": 1}'), ["not UTF-8"]),
    "B10 not JSON": (ck.safetensors_bytes(b"{nonsense}"), ["not valid JSON"]),
    "B11 leading space": (ck.safetensors_bytes(b' {"a": 1}'), ["header", "' '", "'{'"]),
    "B12 deep": (ck.safetensors_bytes(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), ["nested deeper"]),
    "B12 deep objects": (ck.safetensors_bytes(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), ["nested deeper"]),
    "B13 duplicate name": (ck.safetensors_bytes(b'{"a":%s,"a":%s}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8)),
                           ["duplicate key", "'a'"]),
    "B15 overlap": (ck.safetensors_bytes({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)),
                    ["'b'", "overlaps 'a'"]),
    "B15 same place": (ck.safetensors_bytes({"a": ENTRY, "b": ENTRY}, bytes(8)), ["overlaps"]),
    "B16 hole": (ck.safetensors_bytes({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, bytes(20)),
                 ["'b'", "hole after 'a'"]),
    "B16 hole at the start": (entries(data_offsets=[8, 16]), ["'a'"]),
    "B17 begin after end": (entries(data_offsets=[8, 0]), ["data_offsets", "begin <= end"]),
    "B18 trailing bytes": (ck.safetensors_bytes({"a": ENTRY}, bytes(9)), ["1 bytes after the last tensor"]),
    "B19 end beyond the file": (ck.safetensors_bytes({"a": ENTRY}, bytes(7)), ["'a'", "cut short"]),
    "B20 product overflows": (entries(shape=[2**62, 2**62, 2]), ["data_offsets", "got 8 bytes"]),
    "B21 size and shape differ": (entries(shape=[3]), ["got 8 bytes", "expected 12"]),
    "B22 negative size": (entries(shape=[-2]), ["shape", "-2"]),
    "B22 fraction": (entries(shape=[2.0]), ["shape", "2.0"]),
    "B22 huge float": (ck.safetensors_bytes(b'{"a":{"dtype":"F32","shape":[1e30],"data_offsets":[0,8]}}', bytes(8)),
                       ["shape", "1e+30"]),
    "B22 infinite": (ck.safetensors_bytes(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}', bytes(8)),
                     ["out of range"]),
    "B22 huge integer": (ck.safetensors_bytes(b'{"a":{"dtype":"F32","shape":[%s]}}' % (b"9" * 5000)), ["header"]),
    "B22 true": (ck.safetensors_bytes({"a": {"dtype": "F32", "shape": [2, True], "data_offsets": [0, 8]}}, bytes(8)), ["shape", "true"]),
    "B22 false": (ck.safetensors_bytes({"a": {"dtype": "F32", "shape": [False], "data_offsets": [0, 0]}}), ["shape", "false"]),
    "B22 text": (entries(shape=["2"]), ["shape", '"2"']),
    "B22 size of 2^63": (ck.safetensors_bytes({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}), ["shape", str(2**63)]),
    "B17 offset false": (entries(data_offsets=[False, 8]), ["data_offsets", "false"]),
    "B17 offset true": (ck.safetensors_bytes({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, True]}}, bytes(1)), ["data_offsets", "true"]),
    "B17 offset of another type": (entries(data_offsets=[0, 8.0]), ["data_offsets", "8.0"]),
    "B17 negative offset": (entries(data_offsets=[-8, 0]), ["data_offsets", "-8"]),
    "B17 three offsets": (entries(data_offsets=[0, 8, 8]), ["data_offsets"]),
    "B22 nine dimensions": (entries(shape=[1] * 8 + [2]), ["shape", "at most 8"]),
    "B23 unknown dtype": (entries(dtype="F12"), ["dtype", "'F12'", "BF16"]),
    "B23 dtype of another type": (entries(dtype=["F32"]), ["dtype"]),
    "B29 100,000 tensors": (many_entries(100_000), ["more than 65536 tensors"]),
    "B30 overlapping tensors": (many_entries(300_000, lambda number: 0), ["more than 65536 tensors"]),
    "B30 a million names": (ck.safetensors_bytes(b"{" + b",".join(b'"%d":1' % n for n in range(500_000)) + b"}"),
                            ["500000 tensors"]),
    "missing key": (ck.safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), ["data_offsets"]),
    "unknown key": (entries(quantized=True), ["'a'", "expected dtype, shape and data_offsets"]),
    "entry is no object": (ck.safetensors_bytes({"a": 5}), ["'a'", "integer 5"]),
    "header is an array of objects": (ck.safetensors_bytes({"__metadata__": {"a": 1}}), ["__metadata__"]),
    "escape sequence in a name": (ck.safetensors_bytes({"\x1b[31m": ENTRY}, bytes(8)), ["\\x1b"]),
    "lone surrogate in a name": (ck.safetensors_bytes(b'{"\\ud800":%s}' % json.dumps(ENTRY).encode(), bytes(8)),
                                 ["header", "surrogate pair"]),
    "long name": (ck.safetensors_bytes({"n" * 300: ENTRY}, bytes(8)), ["255 bytes"]),
    "PyTorch pickle": (b"PK\x03\x04" + bytes(60), ["PyTorch", "save_pretrained"]),
    "GGUF": (b"GGUF" + bytes(60), ["GGUF"]),
}
