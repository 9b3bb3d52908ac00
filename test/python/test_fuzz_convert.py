"""A short run of fuzz_convert.py. doc/robustness.md has the figures of the long ones."""

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

import checkpoints as ck  # noqa: E402
import fuzz_convert as fuzz  # noqa: E402

RUNS = 1000


def test_mutated_directories_are_converted_or_refused(tmp_path):
    fuzzer = fuzz.Fuzzer(tmp_path)
    for seed in range(RUNS):
        try:
            fuzzer.run(seed)
        except Exception as problem:
            pytest.fail(f"seed {seed}: {problem!r}. Again with: fuzz_convert.py --runs 1 --seed {seed} --keep DIR")
    assert sum(fuzzer.outcomes.values()) == RUNS
    assert fuzzer.outcomes["refused"] > RUNS / 2 and fuzzer.outcomes["converted"] > RUNS / 50, "the mutations are no use"


def test_the_valid_directories_are_valid(tmp_path):
    for number, files in enumerate(fuzz.valid_directories()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        ck.convert(folder, tmp_path / f"{number}.bin", "--strict")
