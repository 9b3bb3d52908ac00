"""Each file includes the standard headers of what it names, itself or by a header of the project.

Which other headers a standard header brings along differs between compilers: what g++ 12 finds by luck, g++ 13 may not.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of each header, names that nothing else is allowed to bring.
NAMES = {
    "algorithm": "all_of any_of clamp copy fill find find_if lower_bound max min none_of reverse sort upper_bound",
    "array": "array",
    "atomic": "atomic atomic_flag",
    "charconv": "from_chars to_chars",
    "chrono": "chrono",
    "cmath": "ceil exp floor isfinite isnan log lround pow sqrt",
    "condition_variable": "condition_variable condition_variable_any",
    "cstdint": "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t",
    "cstring": "memcmp memcpy memset strcmp strlen",
    "deque": "deque",
    "filesystem": "filesystem",
    "functional": "function",
    "limits": "numeric_limits",
    "map": "map",
    "memory": "make_shared make_unique shared_ptr unique_ptr",
    "mutex": "lock_guard mutex once_flag recursive_mutex scoped_lock unique_lock",
    "optional": "nullopt optional",
    "set": "set",
    "span": "span",
    "string": "string to_string",
    "string_view": "string_view",
    "thread": "jthread thread this_thread",
    "unordered_map": "unordered_map",
    "utility": "exchange in_place pair",
    "vector": "vector",
}
USES = {header: re.compile(rf"\bstd::(?:{'|'.join(names.split())})\b") for header, names in NAMES.items()}
INCLUDE = re.compile(r'^#include ([<"])([^>"]+)[>"]', re.MULTILINE)


def missing(files: list[str], read: Callable[[str], str]) -> list[str]:
    """'file: header' for each standard header that a file needs and does not reach through the project's includes."""
    texts: dict[str, str] = {}

    def text(name: str) -> str:
        if name not in texts:
            texts[name] = read(name)
        return texts[name]

    found = []
    for name in files:
        reached: set[str] = set()
        seen, todo = {name}, [name]
        while todo:
            for kind, included in INCLUDE.findall(text(todo.pop())):
                if kind == "<":
                    reached.add(included)
                elif included not in seen:
                    seen.add(included)
                    todo.append(included)
        code = re.sub(r"//.*", "", text(name))
        found += [f"{name}: <{header}>" for header, use in USES.items() if header not in reached and use.search(code)]
    return found


def read_file(name: str) -> str:
    path = ROOT / name
    return path.read_text() if path.is_file() else ""


def test_every_file_includes_the_standard_headers_it_uses():
    listed = subprocess.run(["git", "ls-files", "*.cpp", "*.h", "*.cu", "*.cuh"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split() or [str(path.relative_to(ROOT)) for room in ("llmc", "test", "dev")
                                      for path in (ROOT / room).rglob("*.[ch]*")]
    assert len(files) > 300
    assert not missing(files, read_file)


@pytest.mark.parametrize("included", ["<cuda.h>", "<string>", '"llmc/other.h"'])
def test_a_missing_header_is_found(included):
    tree = {"a.cpp": f"#include {included}\nstd::uint64_t hash;", "llmc/other.h": "#include <vector>"}
    assert missing(["a.cpp"], lambda name: tree.get(name, "")) == ["a.cpp: <cstdint>"]
