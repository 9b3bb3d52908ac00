"""The rows in dev/mutants/rows name functions and quote a little of them: a change of that code has to change them too."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "mutants"))
import anchor
import rows


def load():
    """dev/mutants/run.py: test/run.py has the same name."""
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "dev" / "mutants" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_applies_to_the_tree():
    done = subprocess.run([sys.executable, ROOT / "dev" / "mutants" / "run.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100


def test_each_room_has_one_module():
    names = [Path(room.__file__).stem for room in rows.ROOMS]
    assert sorted([*names, "__init__"]) == sorted(path.stem for path in (ROOT / "dev" / "mutants" / "rows").glob("*.py"))
    assert [Path(room.ROOM).name for room in rows.ROOMS] == names
    needs_gpu = [row.needs_gpu for row in rows.MUTANTS]
    assert needs_gpu == sorted(needs_gpu), "what needs no GPU comes first"
    of_files = [row.anchor for row in rows.MUTANTS if "." in row.anchor and not row.anchor.endswith(".sh")]
    assert len(of_files) < 5, "a row names a definition, not a file"


# ---- anchors (dev/mutants/anchor.py) ---------------------------------------------------------------------------------

CPP = r'''// int comment() { return 1; }
#define MACRO(x) void x() {
#include <vector>

namespace weft {
namespace {

constexpr char kBrace = '{';
const char* const kText = "} { \" {", *const kRaw = R"(void raw() { "{)";
const std::vector<int> kTable = {1, 2};
auto kLambda = [](int a) { return a; };

template <typename T, int N = 1'000>
T first(const std::vector<T>& v = {}, int n = N) {
  const auto inner = [&](int i) { return v[i]; };  // {
  if (n > 0) { return inner(0); }
  return inner(1);
}

float first(float x) { return x; }
template <> long first<long>(long x) { return x + 1; }

}  // namespace

struct Base { int value{3}; };

class Shape final : public Base {
 public:
  Shape(int n) : sides_{n}, names_(std::vector<int>{n}) { check(n); }
  ~Shape();
  bool operator==(const Shape& other) const { return sides_ == other.sides_; }
  int operator()(int n) const noexcept { return n; }

 private:
  struct Part { void turn() { ++n; } int n = 0; };
  int sides_;
};

Shape::~Shape() { release(); }
std::vector<int> Shape::Part::all(int n) const { return {n}; }
auto deduced(int n) -> std::vector<int> { return {n}; }

}  // namespace weft

extern "C" __global__ void __launch_bounds__(128, 1) kernel(float* x) { *x = 1; }
'''

PYTHON = '''"""def text(): pass"""
LIMIT = 3


class A:
    size = 1

    @property
    def f(self):
        def inner():
            return 1
        return inner()


async def f(x):
    return LIMIT
'''


def test_definitions_of_cpp(tmp_path):
    (tmp_path / "a.cu").write_text(CPP)
    text, found = anchor.read(tmp_path / "a.cu")
    texts = [(one.name, " ".join(text[one.begin:one.end].split())) for one in found]
    assert [name for name, _ in texts] == [
        "first", "first", "first", "Base", "Shape::Shape", "Shape::operator==", "Shape::operator()", "Shape::Part::turn",
        "Shape::Part", "Shape", "Shape::~Shape", "Shape::Part::all", "deduced", "kernel"]
    assert texts[0][1].startswith("template <typename T") and texts[0][1].endswith("return inner(1); }")
    assert texts[1][1] == "float first(float x) { return x; }"
    assert texts[4][1].endswith("Shape(int n) : sides_{n}, names_(std::vector<int>{n}) { check(n); }")
    assert texts[9][1].startswith("class Shape final") and texts[9][1].endswith("int sides_; }")
    assert texts[13][1].startswith('extern "C" __global__') and texts[13][1].endswith("*x = 1; }")


def test_definitions_of_python(tmp_path):
    (tmp_path / "a.py").write_text(PYTHON)
    text, found = anchor.read(tmp_path / "a.py")
    assert [(one.name, text[one.begin:one.end].split()[-1]) for one in found] == [
        ("A", "inner()"), ("A::f", "inner()"), ("A::f::inner", "1"), ("f", "LIMIT")]


def test_a_text_is_found_in_the_definitions_of_its_name_wherever_they_stand(tmp_path):
    (tmp_path / "room" / "within").mkdir(parents=True)
    (tmp_path / "room" / "within" / "a.cpp").write_text(CPP)
    (tmp_path / "room" / "a.py").write_text(PYTHON)
    (tmp_path / "other.py").write_text(PYTHON)

    def found(name: str, old: str) -> list[str]:
        return [one.file.read_text()[one.begin:one.end] for one in anchor.find(tmp_path, "room", name, old)]

    assert found("first", "return  inner(1);\n}") == ["return inner(1);\n}"]
    assert found("first", "x; }") == ["x; }"], "of overloads one holds it"
    assert len(found("first", "return x")) == 2
    assert found("Shape", "check(n)") == ["check(n)"], "a class and its constructor are one place"
    assert found("turn", "++n") == found("Part::turn", "++n") == found("Shape::Part::turn", "++n") == ["++n"]
    assert found("art::turn", "++n") == found("first", "") == found("comment", "return 1") == []
    assert found("A::f", "return inner()") == ["return inner()"] and len(found("f", "return")) == 3
    assert found("a.py", "LIMIT = 3") == ["LIMIT = 3"] and found("b.py", "LIMIT") == []


# ---- planting --------------------------------------------------------------------------------------------------------


def test_rows_that_do_not_apply_are_named(tmp_path):
    mutants = load()
    for folder in ("room", "test/python", "test/cpp", "test/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "room" / "a.cpp").write_text("int f() {\n  once twice twice\n}\n")
    (tmp_path / "room" / "a.py").write_text("def p():\n    return 1\n")
    (tmp_path / "test" / "python" / "test_x.py").write_text("def test_here():\n    pass\n")
    (tmp_path / "test" / "cpp" / "a_test.cpp").write_text("TEST(A, One) {}\nTEST_P(P, One) {}\n"
                                                          "INSTANTIATE_TEST_SUITE_P(Odd, P,\n  Values(1));\n")
    (tmp_path / "test" / "gpu" / "a_test.cpp").write_text("TYPED_TEST(T, One) {}\n")
    good = dataclasses.replace(rows.MUTANTS[0], name="good", room="room", anchor="f", old="once", new="never", tests=(
        "unit:A.O*", "unit:Odd/P.*", "unit:*P.One*", "gpu:T/*.One", "py:test_x.py::test_here[a]"))
    assert mutants.problems_of([good], tmp_path) == []
    bad = [({"old": "twice"}, "occurs 2 times"), ({"old": "thrice"}, "occurs 0 times"), ({"anchor": "g"}, "there is no room: g"),
           ({"room": "test"}, "there is no test: f"), ({"new": " once "}, "changes nothing"),
           ({"anchor": "p", "old": "1", "new": "("}, "no Python"),
           ({"tests": ("py:test_y.py",)}, "no such file"), ({"tests": ("py:test_x.py::test_gone",)}, "no such test"),
           ({"tests": ("unit:B.*",)}, "no such test"), ({"tests": ("unit:P.One",)}, "no such test"),
           ({"tests": ("gpu:A.One",)}, "no such test"), ({"tests": ("cpp:A.*",)}, "expected unit:")]
    for change, words in bad:
        (problem,) = mutants.problems_of([dataclasses.replace(good, **change)], tmp_path)
        assert words in problem
    assert "two rows have this name" in mutants.problems_of([good, good], tmp_path)[0]


def test_what_was_built_with_a_bug_is_built_again(tmp_path, monkeypatch):
    """As make sees it: an object that is older than its source, or is not there. Of a source file alone its own object stays."""
    mutants = load()
    out = tmp_path / "out"
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "OUT", out)
    out.mkdir()
    for file, own, stays in (("a.cpp", "a.o", True), ("a.h", "a.o", False), ("train_llama.cu", "train_llama.main.o", True),
                             ("new.cpp", None, False), ("a.py", None, True)):
        source, built = tmp_path / file, out / (own or "b.o")
        text = "def f():\n    once\n" if file.endswith(".py") else "int f() {\n  once\n}\n"
        source.write_text(text)
        os.utime(source, (1000, 1000))
        if own is not None:
            built.write_text("good")
            os.utime(built, (2000, 2000))
        row = dataclasses.replace(rows.MUTANTS[0], room=".", anchor="f", old="once", new="never")
        with mutants.Planted(row):
            assert source.read_text() == text.replace("once", "never") and source.stat().st_mtime > 2000
            built.write_text("bad")
            (out / "unit_tests").write_text("bad")
            os.utime(built, (source.stat().st_mtime, ) * 2)
        assert source.read_text() == text
        assert (source.stat().st_mtime == 1000) == stays, file
        if own is not None and stays:
            assert built.read_text() == "good" and built.stat().st_mtime == 2000 and not (out / "unit_tests").exists(), file
        assert not list(out.glob("*.kept"))
        for path in (source, *out.iterdir()):
            path.unlink()
