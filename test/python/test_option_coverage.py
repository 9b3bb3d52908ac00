"""Each option of the two programs, and each of its values, has a test that uses it and reads its effect: test/option_tests.toml
names it. The options are those that --help-all prints.

What is checked of a test: it exists, it asserts something, and it names the option (and the value, unless that is the
default) in its own text or in that of a helper, constant or fixture of its file. That it reads the effect is for who writes
the table."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ.get("WEFT_BIN_DIR", ROOT))
TABLE = ROOT / "test" / "option_tests.toml"
NAMES = ("train_llama", "infer_pythia")


# ---- the options -----------------------------------------------------------------------------------------------------


@dataclass
class Option:
    name: str  # without the dashes
    values: list[str]  # of a choice, or the places of --debug-inject; else empty
    default: str

    def keys(self) -> list[str]:
        """What the table has to have."""
        return [f"--{self.name} {value}" for value in self.values] or [f"--{self.name}"]


def parse_help(text: str) -> list[Option]:
    """The options of --help-all: each begins a line of its own, its description stands behind it or below."""
    text = text[text.index("\n\n", text.index("Usage:")):]
    heads = list(re.finditer(r"^  (?:-\w, )?--(?P<name>[a-z][a-z0-9-]*)(?: (?P<value>\S+))?(?=  |$)", text, re.M))
    options = []
    for head, following in zip(heads, [*heads[1:], None]):
        description = " ".join(text[head.end():following.start() if following else len(text)].split())
        values = []
        if re.fullmatch(r"[a-z0-9]+(\|[a-z0-9]+)+", head["value"] or ""):
            values = head["value"].split("|")
        elif head["value"] == "SPEC":
            values = list(dict.fromkeys(re.findall(r"[a-z-]+@[a-z]+", description)))
        default = re.search(r"\(default (\S+)\)", description)
        options.append(Option(head["name"], values, default[1] if default else ""))
    return options


def run_program(program: str, *words: str) -> str:
    if not (PROGRAMS / program).exists():
        pytest.skip(f"{program} is not built")
    return subprocess.run([PROGRAMS / program, *words], capture_output=True, text=True, check=True, timeout=60).stdout


@cache
def options_of(program: str) -> list[Option]:
    return parse_help(run_program(program, "--help-all"))


# ---- the tests -------------------------------------------------------------------------------------------------------


class PythonTests:
    """The functions, fixtures and constants of a file of tests."""

    def __init__(self, path: Path):
        self.defined: dict[str, ast.AST] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if ast.get_docstring(node) is not None:  # its words are no use of an option
                    node.body[0] = ast.Pass()
                self.defined[node.name] = node
            elif isinstance(node, ast.Assign):
                self.defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}

    def text(self, name: str) -> str | None:
        """A test with all of its file that it uses, as Python writes it; None if there is no such test."""
        if not name.startswith("test_") or not isinstance(self.defined.get(name), ast.FunctionDef):
            return None
        reached, waiting = [], [name]
        while waiting:
            current = waiting.pop()
            if current in reached or current not in self.defined or (current != name and current.startswith("test_")):
                continue
            reached.append(current)
            for node in ast.walk(self.defined[current]):
                waiting += [node.id] if isinstance(node, ast.Name) else [node.arg] if isinstance(node, ast.arg) else []
        return "\n".join(ast.unparse(self.defined[one]) for one in reached)


@cache
def python_tests(file: str) -> PythonTests | None:
    path = ROOT / "test" / "python" / file
    return PythonTests(path) if path.exists() else None


@cache
def cpp_tests(folder: str) -> dict[str, str]:
    """Suite.Test with the text of the test."""
    tests = {}
    for path in sorted((ROOT / "test" / folder).glob("*_test.cpp")):
        pieces = re.split(r"^(?=TEST(?:_F|_P)?\()", path.read_text(), flags=re.M)
        for piece in pieces[1:]:
            suite, name = re.match(r"\w+\(\s*(\w+)\s*,\s*(\w+)\s*\)", piece).groups()
            tests[f"{suite}.{name}"] = piece
    return tests


def names_in_python(text: str, option: Option, value: str) -> bool:
    keyword = option.name.replace("-", "_")  # train(..., batch_tokens=64), {"batch_tokens": 64}
    named = re.search(rf"--{option.name}(?![\w-])|(?<![\w.-]){keyword}=|'{keyword}'", text)
    if "@" in value:  # f"{fault}@step={step}" with "gpu" elsewhere
        what, where = value.split("@")
        return named is not None and (value in text or (f"'{what}'" in text and f"@{where}" in text))
    if value == "" or value == option.default:
        return named is not None or value != ""
    return named is not None and re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text) is not None


def names_in_cpp(text: str, option: Option, value: str) -> bool:
    """The member of the settings, or the value, or words of either in the test's name."""
    plain = re.sub(r"[_-]", "", text).lower()
    return any(word and re.sub(r"[_-]", "", word) in plain for word in (option.name, value))


def fault_of_test(test: str, option: Option, value: str) -> str:
    """What is wrong with a test as the test of an option; empty if nothing is."""
    if match := re.fullmatch(r"(unit|gpu):(\w+\.\w+)", test):
        body = cpp_tests({"unit": "cpp", "gpu": "gpu"}[match[1]]).get(match[2])
        if body is None:
            return "does not exist"
        return "" if names_in_cpp(body, option, value) else "does not name it"
    if match := re.fullmatch(r"(test_\w+\.py)::(\w+)", test):
        file = python_tests(match[1])
        body = file.text(match[2]) if file else None
        if body is None:
            return "does not exist"
        if not re.search(r"\bassert\b|\bassert_\w+\(|\brefused\(|pytest\.raises", body):
            return "asserts nothing"
        return "" if names_in_python(body, option, value) else "does not name it"
    return 'expected "test_x.py::test_name", "unit:Suite.Test" or "gpu:Suite.Test"'


def faults_of(options: list[Option], table: dict[str, list[str]]) -> list[str]:
    """Everything that is wrong with a program's part of the table, a line each."""
    wanted = {key: option for option in options for key in option.keys()}
    faults = [f"{key}: no test. Write one that reads its effect, and name it in {TABLE.name}"
              for key in wanted if not table.get(key)]
    faults += [f"{key}: no such option or value" for key in table if key not in wanted]
    for key, option in wanted.items():
        value = key.partition(" ")[2]
        for test in table.get(key, []):
            if fault := fault_of_test(test, option, value):
                faults.append(f"{key}: {test} {fault}")
    return faults


@cache
def table_of(program: str) -> dict[str, list[str]]:
    return tomllib.loads(TABLE.read_text())[program]


@pytest.mark.parametrize("program", NAMES)
def test_every_option_and_value_has_a_test(program):
    assert faults_of(options_of(program), table_of(program)) == []


def test_the_table_is_of_these_programs():
    assert set(tomllib.loads(TABLE.read_text())) == set(NAMES)


# ---- that nothing slips through --------------------------------------------------------------------------------------


GROUPS = {"infer_pythia": ["Model", "What to do, exactly one of", "Generation", "Many requests at once", "Perplexity", "Benchmark",
                           "Server", "Output", "About", "Example"],
          "train_llama": ["Model", "Data and output", "Optimisation", "Execution", "Several GPUs (doc/several_gpus.md)", "Reports",
                          "About", "Example"]}


@pytest.mark.parametrize("program", GROUPS)
def test_help_has_its_groups_in_order(program):
    text = run_program(program, "--help-all")
    assert re.findall(r"^(\S.*):$", text, re.M) == GROUPS[program]
    assert "\nExit codes: 0 ok, 1 internal error" in text and re.search(rf"\nExample:\n +(\./)?{program} --", text)


def test_help_shows_what_the_program_has():
    """The other list of the same options: what --print-config writes."""
    settings = json.loads(run_program("train_llama", "--config", "tiny", "--device", "cpu", "--print-config"))["settings"]
    assert {option.name for option in options_of("train_llama")} == set(settings) | {"help", "help-all", "version"}


@pytest.mark.parametrize("program", NAMES)
def test_help_is_read_as_the_source_declares_it(program):
    """Names and values of choices, from the calls that fill the table."""
    source = (ROOT / "llmc" / program.split("_")[0] / "options.cpp").read_text()
    declared = set(re.findall(r'table\.(?:text|choice|integer|number|flag|repeated)\(\s*"([a-z0-9-]+)"', source))
    assert {option.name for option in options_of(program)} == declared | {"help", "help-all", "version"}
    for name, values in re.findall(r'table\.choice\(\s*"([a-z0-9-]+)", [\w.]+, \{([^}]*)\}', source):
        option = next(option for option in options_of(program) if option.name == name)
        assert option.values == re.findall(r'"(\w+)"', values) and option.default in option.values


HELP = """Does something.

Usage: sample [--option VALUE]...

Group:
  -m, --model FILE          a file
  --a-name-longer-than-most fast|slow
                            how (--model is not enough) (default
                            fast)
  --flag                    on
  --debug-inject SPEC       fail at nan@step=N,
                            kill@save=BYTE (may be given several times)

About:
  -h, --help                print this and exit
"""


def test_help_is_read():
    assert parse_help(HELP) == [Option("model", [], ""), Option("a-name-longer-than-most", ["fast", "slow"], "fast"),
                                Option("flag", [], ""), Option("debug-inject", ["nan@step", "kill@save"], ""),
                                Option("help", [], "")]


EPS = "test_train_options.py::test_the_first_step_is_that_of_adamw"


def without(key):
    return lambda options, table: table.pop(key)


def with_tests(key, *tests):
    return lambda options, table: table.update({key: list(tests)})


def with_option(*option):
    return lambda options, table: options.append(Option(*option))


def with_value(name, value):
    return lambda options, table: next(option for option in options if option.name == name).values.append(value)


@pytest.mark.parametrize("change, fault", [
    (without("--eps"), "--eps: no test."),
    (without("--schedule wsd"), "--schedule wsd: no test."),
    (without("--debug-inject nan@step"), "--debug-inject nan@step: no test."),
    (with_tests("--eps"), "--eps: no test."),
    (with_option("new-option", [], "0"), "--new-option: no test."),
    (with_option("new-choice", ["on", "off"], "on"), "--new-choice off: no test."),
    (with_value("schedule", "sawtooth"), "--schedule sawtooth: no test."),
    (with_tests("--gone", EPS), "--gone: no such option or value"),
    (with_tests("--schedule triangle", EPS), "--schedule triangle: no such option or value"),
    (with_tests("--schedule", EPS), "--schedule: no such option or value"),
    (with_tests("--eps", "test_train_options.py::test_of_old"), "test_of_old does not exist"),
    (with_tests("--eps", "test_of_old.py::test_x"), "test_x does not exist"),
    (with_tests("--eps", "test_train_options.py::first_step"), "first_step does not exist"),
    (with_tests("--eps", "unit:AdamW.Old"), "AdamW.Old does not exist"),
    (with_tests("--eps", "gpu:AdamW.EpsIsThatOfTheStep"), "EpsIsThatOfTheStep does not exist"),
    (with_tests("--eps", "AdamW.EpsIsThatOfTheStep"), "expected \"test_x.py::test_name\""),
    (with_tests("--eps", "test_train_options.py::test_colour_is_for_terminals_or_on_demand"), "on_demand does not name it"),
    (with_tests("--keep", "test_train_cli.py::test_the_best_checkpoint_is_kept"), "is_kept does not name it"),
    (with_tests("--on-nan skip", "test_train_cli.py::test_not_finite_numbers_stop_before_the_update"), "update does not name it"),
    (with_tests("--eps", "unit:Schedule.Cosine"), "Cosine does not name it"),
])
def test_what_is_missing_is_found(change, fault):
    options, table = copy.deepcopy(options_of("train_llama")), copy.deepcopy(table_of("train_llama"))
    change(options, table)
    faults = faults_of(options, table)
    assert len(faults) in (1, 2) and any(fault in line for line in faults), faults


def test_what_a_test_file_defines_is_read(tmp_path):
    (tmp_path / "test_x.py").write_text('''
SPECS = ["nan@step=3"]
def helper(): return ["--eps", 1]
@pytest.fixture
def prepared(): return {"beta1": 2}
def test_a():
    "Not --debug-inject nan@step."
    assert helper()
def test_b(prepared): assert prepared
@pytest.mark.parametrize("spec", SPECS)
def test_c(spec): run("--debug-inject", spec); test_a()
''')
    tests = PythonTests(tmp_path / "test_x.py")
    eps, beta1, inject = Option("eps", [], ""), Option("beta1", [], ""), Option("debug-inject", ["nan@step"], "")
    found = {name: tests.text(name) or "" for name in ("test_a", "test_b", "test_c")}
    assert [names_in_python(found[name], eps, "") for name in found] == [True, False, False]
    assert [names_in_python(found[name], beta1, "") for name in found] == [False, True, False]
    assert [names_in_python(found[name], inject, "nan@step") for name in found] == [False, False, True]
    assert not names_in_python(found["test_c"], inject, "nan@token")
    assert tests.text("helper") is None and tests.text("test_d") is None
