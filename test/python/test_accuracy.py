"""The corpus of dev/data/make_almanac.py, the driver of dev/accuracy, and how it compares learning curves."""

import hashlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev" / "data"), str(ROOT / "scripts")]

from almanac import pages, world  # noqa: E402

stub_torch = pytest.importorskip("stub_torch")  # it needs numpy

PAGES = [pages.write_page(1, index) for index in range(400)]


def make(directory: Path, *options: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "dev/data/make_almanac.py"), "-o", str(directory), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_text_is_that_of_the_seed_whoever_writes_it(tmp_path, monkeypatch):
    make(tmp_path / "one", "--documents", "30", "--val", "4", "--held", "5", "--processes", "1")
    make(tmp_path / "two", "--documents", "40", "--val", "4", "--held", "5", "--processes", "2")
    for name in ("val.txt", "held.txt"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "two" / "train.txt").read_bytes().startswith((tmp_path / "one" / "train.txt").read_bytes())
    assert (tmp_path / "one" / "held.txt").read_text() == "".join(f"{page}\n<|endoftext|>\n" for page in PAGES[:5])
    assert pages.write_page(2, 0) != PAGES[0]
    assert hashlib.sha256("\n".join(PAGES[:50]).encode()).hexdigest() == HASH


HASH = "a1fb161c7c4073121bdbb68a537b0d93f087e468d63c8e50eea289eb6e9934dc"  # of 50 documents


def test_every_kind_is_written_and_no_mark_is_left():
    text = "\n".join(PAGES)
    assert text.isascii() and not re.search(r"[\[\]{}]|\(n\)|  | \.|<\|", text)
    for words in ("Q: ", "Total: ", "Where is the", "The coachman is", "Dear ", " x ", "steps north", " | trade | ", "let ", "Council of",
                  "plays the", "They had two children", "So what ", "miles", "Once"):
        assert words in text, words
    assert len(set(PAGES)) == len(PAGES)


def test_sums_are_right():
    bills = [page for page in PAGES if "\nTotal: " in page]
    assert len(bills) > 5
    for bill in bills:
        total = 0
        for count, price, amount, together in re.findall(r"^\d+\. (\d+) .* at (\d+) crowns: (\d+) crowns, together (\d+)$", bill, re.M):
            total += int(amount)
            assert int(count) * int(price) == int(amount) and int(together) == total
        assert f"\nTotal: {total} crowns\n" in bill
    for left, sign, right, result in re.findall(r"(\d+) ([+x-]) (\d+) = (\d+)", "\n".join(PAGES)):
        assert {"+": int(left) + int(right), "-": int(left) - int(right), "x": int(left) * int(right)}[sign] == int(result)


def test_what_is_known_of_the_world_is_the_same_everywhere():
    known = {town.name: town for town in world.world_of(1).towns}
    assert len(known) == world.TOWNS
    found = [(name, craft) for page in PAGES for name, craft in re.findall(r"Q: What is (\w+) known for\?\nA: For its (\w+)\.", page)]
    assert len(found) > 10 and all(known[name].craft == craft for name, craft in found)


# ---- the driver ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver():
    pytest.importorskip("numpy")
    spec = importlib.util.spec_from_file_location("accuracy_run", ROOT / "dev/accuracy/run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_variants_cover_every_scheme_and_part_once(driver):
    keys = [variant.key for variant in driver.VARIANTS]
    assert len(set(keys)) == len(keys) == 6 + 4 * 4 + 1
    assert driver.Variant("int4 GPTQ", "up").options(Path("c.txt")) == ["--quantize", "int4", "--gptq", "c.txt", "--only", "up"]
    assert driver.Variant("int8", "head", head=True).options(Path("c.txt")) == ["--quantize", "int8", "--head", "int8", "--only", "head"]


def test_tables(driver):
    row = {"model": "llama", "key": "int8", "scheme": "int8", "part": "", "head": False, "text": "held.txt", "tokens": 1000, "device": "a GPU",
           "mean_nll": 1.01, "mean_nll_against": 1.0, "nll_difference_standard_error": 0.001, "kl_mean": 0.0123456, "same_top": 0.98,
           "bytes": 12_300_000, "convert_seconds": 4.2}
    text = driver.tables([row, row | {"part": "qkv", "text": "part.txt", "mean_nll": 1.0}])
    assert "| int8 | 2.7456 | +1.01 ± 0.10 % | 0.012346 | 98.00 % | 12.3 | 4 s |" in text
    assert "| int8 | +0.00 ± 0.10 %, 0.012346 |" in text and "perplexity 2.7183" in text


def test_a_report_has_every_row_in_its_table(driver, tmp_path, capsys):
    """Of each model: schemes in their order, those with an int8 head after; both devices; parts alone; what drafts wrote."""
    def row(model, scheme, text, nll, part="", head=False):
        return {"model": model, "key": scheme, "scheme": scheme, "part": part, "head": head, "text": text, "tokens": 1234, "device": "a CPU",
                "mean_nll": nll, "mean_nll_against": 1.5, "nll_difference_standard_error": 0.01, "kl_mean": 0.002, "same_top": 0.5,
                "bytes": 2_000_000, "convert_seconds": 61}

    rows = [row("neox", "int4 GPTQ", "held.txt", 1.5), row("neox", "int8", "held.txt", 1.6, head=True), row("neox", "fp8", "held.txt", 1.4),
            row("neox", "int8", "held.txt", 1.5), row("llama", "int4", "both.txt", 1.5), row("neox", "int4", "both.txt", 1.5),
            *(row("neox", "int4", "part.txt", 1.5, part) for part in ("head", "down", "qkv")), row("neox", "fp8", "part.txt", 1.6, "up"),
            *({"model": "neox", "key": key, "prompts": 3, "report": f"answered {key}", "ids": ids}
              for key, ids in (("plain", [[1], [2], [3]]), ("draft", [[1], [9], [3]]), ("lookup", [[1], [2], [3]]))),
            {"model": "llama", "key": "draft", "prompts": 1, "report": "answered", "ids": [[1]]}]
    run = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry"))
    for each in rows:
        run.add(each)
    capsys.readouterr()
    run.report()
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    both = "1234 tokens, perplexity 4.48169, of 16 bits 4.48169, divergence 0.002000"
    assert text.splitlines() == [
        f"llama, int4, a CPU: {both}", "llama, draft: 0 of 1 texts as without; answered",
        "### neox: 1,234 tokens, a CPU, 16 bits: perplexity 4.4817", "",
        "| | perplexity | change | divergence | same top token | file, MB | converted in |", "|---|---|---|---|---|---|---|",
        *(f"| {name} | {perplexity} | {change} % | 0.002000 | 50.00 % | 2.0 | 61 s |" for name, perplexity, change in (
            ("int8", "4.4817", "+0.00 ± 1.00"), ("int8, head int8", "4.9530", "+10.52 ± 1.11"), ("fp8", "4.0552", "-9.52 ± 0.90"),
            ("int4 GPTQ", "4.4817", "+0.00 ± 1.00"))), "", f"neox, int4, a CPU: {both}",
        "### neox: a part alone, change of the perplexity and divergence", "", "| | qkv | output | up | down | head |", "|---|---|---|---|---|---|",
        "| int8 |  |  |  |  |  |", "| fp8 |  |  | +10.52 ± 1.11 %, 0.002000 |  |  |",
        "| int4 | +0.00 ± 1.00 %, 0.002000 |  |  | +0.00 ± 1.00 %, 0.002000 | +0.00 ± 1.00 %, 0.002000 |", "| int4 GPTQ |  |  |  |  |  |", "",
        "neox, plain: 3 of 3 texts as without; answered plain", "neox, draft: 2 of 3 texts as without; answered draft",
        "neox, lookup: 3 of 3 texts as without; answered lookup"]


def test_what_is_measured_already_is_not_measured_again(driver, tmp_path, monkeypatch):
    options = driver.argparse.Namespace(work=tmp_path, size="dry", jobs=2, device="cpu", train_seconds=1)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "held.txt").write_text(driver.SEPARATOR.join(["one", "two", "three", ""]))
    run = driver.Run(options)
    assert run.text("a.txt", "held.txt", 2).read_text() == "one<|end_of_text|><|begin_of_text|>two"
    rows = [{"model": "llama", "key": "int8", "text": "held.txt"}, {"model": "llama", "key": "fp8-up", "text": "part.txt"},
            {"model": "neox", "key": "int4", "text": "held.txt"},
            *({"model": "llama", "key": key, "text": "both.txt"} for key in ("fp8", "int4", "int4-GPTQ"))]  # of the stage cpu
    for row in rows:
        run.add(row)
    (tmp_path / "corpus" / "train.txt").write_text(driver.SEPARATOR.join("abcdefghijklmnopqrstuvwxyz"))
    done = []
    monkeypatch.setattr(run, "base", lambda model: tmp_path)
    monkeypatch.setattr(run, "measure", lambda model, variant, calibration, text, device: done.append(
        (model, variant.key, len(calibration.read_text().split(driver.BETWEEN)), text.name, device)))
    run.evaluate("llama")
    assert sorted(done) == sorted(("llama", each.key, 10 if each.part else 20, "part.txt" if each.part else "held.txt", "cpu")
                                  for each in driver.VARIANTS if each.key not in ("int8", "fp8-up"))
    assert run.measured() == rows


def test_an_error_of_any_measurement_ends_the_stage(driver, tmp_path, monkeypatch):
    run = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", jobs=2, device=""))
    (tmp_path / "corpus").mkdir()
    for name in ("held.txt", "train.txt"):
        (tmp_path / "corpus" / name).write_text("text")

    def measure(model, variant, *rest):
        if variant == driver.VARIANTS[-1]:
            raise driver.cli.FileError(1, "the last one")

    monkeypatch.setattr(run, "base", lambda model: tmp_path)
    monkeypatch.setattr(run, "measure", measure)
    with pytest.raises(driver.cli.FileError, match="the last one"):
        run.evaluate("neox")


def arguments(driver, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, words)])
    return driver.arguments()


@pytest.mark.parametrize("words", [["nosuch"], ["report", "nosuch"], ["nosuch", "report"], ["corpus", "cpu", "llama-", "report"], ["evaluate"],
                                   ["corpus", "--jobs", 0], ["--jobs", 65], ["--train-seconds", 0.5], ["--size", "small"], ["--device", "gpu"]])
def test_every_word_is_known_before_the_first_stage_begins(driver, tmp_path, monkeypatch, capsys, words):
    with pytest.raises(SystemExit) as end:
        arguments(driver, monkeypatch, tmp_path / "new", *words)
    assert end.value.code == 2 and not (tmp_path / "new").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_stages_run_in_the_order_of_the_command_line_or_all_of_them(driver, tmp_path, monkeypatch):
    """Each by its own function, for the model that its name says."""
    monkeypatch.chdir(tmp_path)
    done = []
    for name in ("corpus", "evaluate", "train_llama", "train_neox", "cpu", "drafts", "report"):
        monkeypatch.setattr(driver.Run, name, lambda run, *model, name=name: done.append((run.work, name, *model)))
    everything = [("corpus",), ("train_llama", "llama"), ("evaluate", "llama"), ("train_neox", "neox"), ("evaluate", "neox"), ("cpu",),
                  ("train_llama", "llama-small"), ("train_neox", "neox-small"), ("drafts",), ("report",)]
    for words, expected in ([], everything), (["report", "cpu", "evaluate-neox"], [("report",), ("cpu",), ("evaluate", "neox")]):
        monkeypatch.setattr(sys, "argv", ["run.py", "work", *words])
        assert driver.main() == 0
        assert done == [(tmp_path / "work", *one) for one in expected]
        done.clear()
    options = arguments(driver, monkeypatch, "work")
    assert (options.size, options.train_seconds, options.device) == ("full", 300, "") and options.jobs == max(1, driver.CORES // 3)
    options = arguments(driver, monkeypatch, "work", "--size", "dry", "--jobs", 64, "--train-seconds", 1, "--device", "cuda")
    assert (options.size, options.jobs, options.train_seconds, options.device) == ("dry", 64, 1, "cuda")


def test_a_command_runs_from_the_root_and_is_logged(driver, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "99")
    run = driver.Run(driver.argparse.Namespace(work=tmp_path / "work", size="dry"))
    show = 'echo "$PWD ${OMP_NUM_THREADS:-unset} $OPENBLAS_NUM_THREADS"; echo "said $1" >&2'
    assert run.call(["sh", "-c", show, "sh", 7], "log", threads=3) == f"{ROOT} 3 3\n"
    assert run.call(["sh", "-c", show, "sh", Path("x")], "log") == f"{ROOT} unset 99\n"
    assert [line for line in (tmp_path / "work" / "log.log").read_text().splitlines()] == [
        f"$ sh -c {show} sh 7", "said 7", f"{ROOT} 3 3", f"$ sh -c {show} sh x", "said x", f"{ROOT} unset 99"]
    with pytest.raises(driver.cli.FileError, match="(?s)^other: exit code 5:.*in vain") as failed:
        run.call(["sh", "-c", "echo in vain; exit 5"], "other")
    assert failed.value.code == 1
    monkeypatch.setattr(run, "call", lambda *words: words)
    assert run.script("a/b.py", 1, "x", log="name", threads=2) == ([sys.executable, ROOT / "a/b.py", 1, "x"], "name", 2)


class Commands(list):
    """What a run calls, each as its words; what it asks to be written is."""

    def __init__(self, driver, work, monkeypatch, device="cuda"):
        self.run = driver.Run(driver.argparse.Namespace(work=work, size="dry", device=device, train_seconds=90, jobs=1))
        monkeypatch.setattr(self.run, "call", self.call)

    def call(self, command, log, threads=0):
        self.append([str(word) for word in command if word != sys.executable])
        self.run.work.joinpath(f"{log}.log").write_text("the end\n")
        if "--out" in command:
            folder = command[command.index("--out") + 1]
            for step in (8, 12):
                (folder / f"step_{step:08d}").mkdir(parents=True)
                (folder / f"step_{step:08d}" / "model.bin").touch()
            (folder / "log.jsonl").write_text("the end\n")
        elif "-o" in command:
            folder = command[command.index("-o") + 1]
            if folder.suffix:
                folder.write_text("made")
            else:
                folder.mkdir(exist_ok=True)
                if "--documents" in command:
                    (folder / "train.txt").write_text("abcdefghij" * 60_000)
                elif str(command[1]).endswith("prepare_data.py"):
                    (folder / "train_00000.bin").touch()
        return "first line\nsecond line\n"


def test_a_corpus_is_made_once(driver, tmp_path, monkeypatch, capsys):
    commands, corpus, sample = Commands(driver, tmp_path, monkeypatch), tmp_path / "corpus", tmp_path / "tokenizer.txt"
    monkeypatch.setitem(driver.SIZES, "dry", driver.SIZES["dry"])
    commands.run.stage("corpus")
    assert list(commands) == [
        [f"{ROOT}/dev/data/make_almanac.py", "-o", f"{corpus}", "--documents", "300", "--held", "4", "--val", "20"],
        [f"{ROOT}/dev/train_tokenizer.py", f"{sample}", "--vocab-size", "1024", "-o", f"{tmp_path}/tokenizer.json"],
        [f"{ROOT}/dev/prepare_data.py", f"{corpus}/train.txt", "--val", f"{corpus}/val.txt", "--tokenizer", f"{tmp_path}/tokenizer.json",
         "-o", f"{corpus}"]]
    assert sample.stat().st_size == 300_000
    assert capsys.readouterr().out.splitlines()[0] == "first line"
    commands.run.stage("corpus")
    assert len(commands) == 3
    commands.run.size = driver.SIZES["full"]
    (corpus / "train_00000.bin").unlink()
    commands.run.stage("corpus")
    assert commands[3][3:] == ["--documents", "320000", "--held", "380", "--val", "640"] and sample.stat().st_size == 600_000


@pytest.mark.parametrize("device", ["", "cpu"])
def test_a_model_is_trained_once_by_the_numbers_of_its_shape(driver, tmp_path, monkeypatch, device):
    commands, more = Commands(driver, tmp_path, monkeypatch, device), ["--device", device] if device else []
    for _ in range(2):
        commands.run.stage("llama-small")
        commands.run.stage("neox")
    run, corpus = tmp_path / "llama-small-run", tmp_path / "corpus"
    assert list(commands) == [
        ["./train_llama", "--config", f"{tmp_path}/llama-small.json", "--train", f"{corpus}/train_*.bin", "--val", f"{corpus}/val_*.bin", "--out",
         f"{run}", "--steps", "8", "--micro-batch", "4", "--seq-len", "128", "--lr", "1e-3", "--warmup-steps", "2", "--save-every", "0",
         "--sample-every", "0", "--val-every", "0", "--max-minutes", "1.5", *more],
        [f"{ROOT}/scripts/export_hf.py", f"{run}/step_00000012/model.bin", "-o", f"{tmp_path}/llama-small"],
        [f"{ROOT}/dev/accuracy/train_neox.py", "--data", f"{corpus}", "-o", f"{tmp_path}/neox", "--layers", "2", "--hidden", "128", "--seq-len", "128",
         "--micro-batch", "4", "--steps", "12", "--seconds", "90", *more]]
    config = json.loads((tmp_path / "llama-small.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "tie_word_embeddings")
    assert [config[name] for name in names] == [1024, 64, 128, 1, 1, 1, 64, 128, False]
    commands.run.size = driver.SIZES["full"]
    commands.run.stage("llama")
    assert commands[3][commands[3].index("--warmup-steps") + 1] == "100"
    config = json.loads((tmp_path / "llama.json").read_text())
    assert [config[name] for name in names] == [8192, 768, 2048, 16, 12, 4, 64, 1024, False]


def test_documents_of_a_text_are_whole_and_it_is_made_once(driver, tmp_path):
    """They are read only as far as so many documents can reach."""
    (tmp_path / "corpus").mkdir()
    documents = [f"{number}" * (4000 - len(driver.SEPARATOR)) for number in range(6)]
    (tmp_path / "corpus" / "held.txt").write_text(driver.SEPARATOR.join(documents))
    run = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry"))
    for count in (1, 3, 6):
        assert run.text(f"{count}.txt", "held.txt", count).read_text() == driver.BETWEEN.join(documents[:count])
    assert run.text("3.txt", "held.txt", 5).read_text() == driver.BETWEEN.join(documents[:3])


@pytest.mark.parametrize("jobs, cores, text, threads", [(1, 8, "held.txt", 10), (4, 8, "part.txt", 2), (3, 16, "held.txt", 6), (8, 2, "held.txt", 1),
                                                        (4, 8, "both.txt", 8)])
def test_measurements_at_the_same_time_share_the_cores(driver, tmp_path, monkeypatch, jobs, cores, text, threads):
    run, used = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", jobs=jobs)), []

    def call(command, log, threads=0):
        if "-o" in command:
            command[command.index("-o") + 1].touch()
        used.append(threads)
        return "{}"

    monkeypatch.setattr(driver, "CORES", cores)
    monkeypatch.setattr(run, "call", call)
    run.base("llama")
    run.measure("llama", driver.Variant("int8"), Path("c.txt"), tmp_path / text, "")
    assert used == [0, threads, threads]


def test_every_device_is_measured_once(driver, tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    for name in ("held.txt", "train.txt"):
        (tmp_path / "corpus" / name).write_text("text")
    for model in ("llama", "neox"):
        (tmp_path / model).mkdir()

    def measured(device):
        """What the stage measures, of which the first is there already when it is called again."""
        run, done = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", device=device)), []

        def measure(model, variant, calibration, text, device):
            done.append((model, variant.key, device))
            run.add({"model": model, "key": variant.key, "text": text.name, "device_option": device})

        monkeypatch.setattr(run, "measure", measure)
        run.stage("cpu")
        return done

    keys = [variant.key for variant in driver.ON_BOTH]
    everything = [(model, key, device) for model in ("llama", "neox") for key in keys for device in ("cpu", "cuda")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
        {"model": "llama", "key": "int8", "text": "held.txt", "device_option": "cpu"},
        {"model": "llama", "key": "fp8", "text": "both.txt", "device_option": "cuda"})))
    assert measured("cuda") == [one for one in everything if one != ("llama", "fp8", "cuda")]
    assert measured("cuda") == [] == measured("cpu")
    assert measured("") == [(model, key, "") for model in ("llama", "neox") for key in keys]
    (tmp_path / "results.jsonl").unlink()
    assert measured("cpu") == [(model, key, "cpu") for model in ("llama", "neox") for key in keys]


@pytest.mark.parametrize("model, dtype", [("llama", "bf16"), ("neox-small", "fp16")])
@pytest.mark.parametrize("device", ["cpu", "cuda", ""])
@pytest.mark.parametrize("scheme, part", [("int8", ""), ("int4 GPTQ", "up")])
def test_a_variant_is_made_measured_against_16_bits_and_removed(driver, tmp_path, monkeypatch, model, dtype, device, scheme, part):
    run, commands = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", jobs=2, device=device)), []

    def call(command, log, threads=0):
        commands.append(list(map(str, command)))
        if "-o" in commands[-1]:
            Path(commands[-1][commands[-1].index("-o") + 1]).write_bytes(bytes(77))
        return json.dumps({"mean_nll": 2.5})

    monkeypatch.setattr(run, "call", call)
    variant = driver.Variant(scheme, part)
    run.measure(model, variant, Path("calibration.txt"), tmp_path / "held.txt", device)
    made, base, measured = commands
    file, against = tmp_path / f"{model}-{variant.key}.bin", tmp_path / f"{model}-16.bin"
    assert made[2:] == [str(tmp_path / model), "-o", str(file), "--dtype", dtype, *variant.options(Path("calibration.txt"))]
    assert base[2:] == [str(tmp_path / model), "-o", str(against), "--dtype", dtype]
    assert measured == ["./infer_pythia", "--model", str(file), "--perplexity", str(tmp_path / "held.txt"), "--special", "--context", "128", "--stride", "96",
                        "--against", str(against), "--json", *(["--dtype", "fp32"] if part and device != "cpu" else []),
                        *(["--device", device] if device else [])]
    (row,) = run.measured()
    assert {key: row[key] for key in ("model", "key", "scheme", "part", "head", "text", "device_option", "bytes", "mean_nll")} == {
        "model": model, "key": variant.key, "scheme": scheme, "part": part, "head": False, "text": "held.txt", "device_option": device, "bytes": 77,
        "mean_nll": 2.5}
    assert file.exists() == (variant in driver.ON_BOTH) and against.exists(), "what is measured on both devices is needed again"


def test_each_way_to_draft_is_run_once(driver, tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "held.txt").write_text(driver.SEPARATOR.join(["abcdef", "ghi", "jkl", "mno", ""]))
    for name in ("llama", "llama-small", "neox"):
        (tmp_path / name).mkdir()
    run, commands = driver.Run(driver.argparse.Namespace(work=tmp_path, size="dry", device="cpu")), []

    def call(command, log, threads=0):
        commands.append(command)
        requests, answers = (command[command.index(option) + 1] for option in ("--batch", "--output"))
        answers.write_text("".join(json.dumps({"ids": [len(json.loads(line)["prompt"])]}) + "\n" for line in requests.read_text().splitlines()))
        (tmp_path / f"{log}.log").write_text(f"answered before\nanswered {log}\nthe end\n")

    monkeypatch.setattr(run, "base", lambda model: f"{model}.bin")
    monkeypatch.setattr(run, "call", call)
    run.add({"model": "llama", "key": "plain"})
    run.add({"model": "neox", "key": "draft"})
    run.drafts()
    assert [command[command.index("--max-running") + 2:] for command in commands] == [
        ["--draft", "llama-small.bin", "--device", "cpu"], ["--lookup", "5", "--device", "cpu"]]
    assert run.measured()[2:] == [{"model": "llama", "key": key, "prompts": 3, "report": f"answered drafts-llama-{key}", "ids": [[2], [1], [1]]}
                                  for key in ("draft", "lookup")]


# ---- learning curves -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curves():
    pytest.importorskip("numpy")
    spec = importlib.util.spec_from_file_location("accuracy_curves", ROOT / "dev/accuracy/curves.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_curve_that_is_three_steps_late_lags_by_three_steps(curves):
    reference = [8 * 0.99**step for step in range(300)]
    late = [8 * 0.99**(step - 3) for step in range(300)]
    for part in (curves.STEEP, curves.LATE):
        lag, gap = curves.behind(late, reference, 25, part)
        assert lag == pytest.approx(3, abs=0.01) and gap == pytest.approx(100 * (0.99**-3 - 1))
        lag, gap = curves.behind(reference[2:] + reference[-2:], reference, 25, curves.STEEP)
        assert lag == pytest.approx(-2, abs=0.01) and gap == pytest.approx(100 * (0.99**2 - 1))
    worse = list(reference)
    worse[100:130] = [1.1 * loss for loss in worse[100:130]]
    assert curves.largest_gap(worse, reference, 25) == pytest.approx(10, abs=0.01)
    assert curves.largest_gap(reference, worse, 25) < -9


@pytest.fixture
def curve_options(tmp_path):
    return SimpleNamespace(output=tmp_path, steps=9, micro_batch=8, seq_len=16, program="train_llama", reference="bf16",
                           rest=["--config", "tiny", "--val", "v_*.bin", "--device", "cpu", "--val-batches", "3", "--lr", "1"])


def test_a_run_is_what_its_log_and_its_checkpoints_say(curves, curve_options, tmp_path, monkeypatch):
    """Losses in the order of the steps, counts of all steps by kind, and the steps in which anything was saturated."""
    def counts(**saturated):
        return {kind: {"values": 10, "saturated": number, "flushed": 1} for kind, number in saturated.items()}

    lost = [counts(input=0, gradient=0), counts(input=3, gradient=5), counts(input=0, gradient=1), counts(input=1), {}]
    commands = []

    def call(command):
        commands.append(list(map(str, command)))
        if "--eval" in command:
            return json.dumps({"val_loss": float(len(commands))})
        folder = Path(command[command.index("--out") + 1])
        for step in (4, 2):
            (folder / f"step_{step:08d}").mkdir(parents=True)
        records = [{"type": "step", "step": step, "loss": 10.0 - step, "fp8": lost[step - 1]} for step in (1, 3, 2, 4)]
        records.append({"type": "step", "step": 5, "loss": 5.0})
        (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    monkeypatch.setattr(curves, "call", call)
    run = curves.Run("fp8", 7, 2)
    row = curves.train(run, curve_options)
    assert row == {"losses": [9.0, 8.0, 7.0, 6.0, 5.0], "val": [[2, 2.0], [4, 3.0]], "saturated_steps": 3, "fp8": {
        "input": {"values": 40, "saturated": 4, "flushed": 4}, "gradient": {"values": 30, "saturated": 6, "flushed": 3}}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8-seed7-order2.json"], "the checkpoints go"
    options = dict(zip(commands[0][len(curve_options.rest) + 1::2], commands[0][len(curve_options.rest) + 2::2]))
    assert (options["--micro-batch"], options["--batch-tokens"], options["--seed"], options["--precision"]) == ("2", "128", "7", "fp8")
    assert (options["--save-every"], options["--keep"], options["--steps"]) == ("2", str(curves.MEASURED + 1), "9")
    for command, step in zip(commands[1:], (2, 4), strict=True):
        assert command[1:5] == ["--model", str(tmp_path / run.name / f"step_{step:08d}" / "model.bin"), "--precision", "bf16"]
        assert command[-6:] == ["--val", "v_*.bin", "--device", "cpu", "--val-batches", "3"]
    assert curves.train(run, curve_options) == row and len(commands) == 3, "what is complete is not made again"
    curve_options.rest = ["--config", "tiny"]
    assert curves.train(curves.Run("bf16", 7, 0), curve_options)["val"] == [] and len(commands) == 4, "without --val nothing is measured"


def test_curves_are_compared_with_those_of_the_same_seed(curves):
    def row(by):
        losses = [by * 4 * 0.99**step for step in range(200)]
        return {"losses": losses, "val": [[100, losses[99]], [200, losses[199]]], "fp8": {}, "saturated_steps": 0}

    rows = {curves.Run("bf16", 1, 0): row(1.0), curves.Run("bf16", 1, 1): row(1.01), curves.Run("fp8", 1, 0): row(1.02),
            curves.Run("bf16", 2, 0): row(2.0), curves.Run("bf16", 2, 1): row(2.02), curves.Run("fp8", 2, 0): row(2.0)}
    order, seeds, fp8 = (line.split(" | ") for line in curves.table(rows, "bf16", "fp8", 25).splitlines()[2:])
    assert (order[0], order[1], order[3]) == ("| bf16, sums in another order", "2", "+1.00 ± 0.00")
    assert (seeds[0], seeds[1], seeds[3]) == ("| bf16, other seeds", "1", "+100.00")
    assert (fp8[0], fp8[1], fp8[3], fp8[-1]) == ("| fp8 against bf16", "2", "+1.00 ± 1.00", "+1.00 ± 1.00 / +1.00 ± 1.00 |")


def test_each_column_is_of_its_part_of_the_run(curves):
    """A run that is late by 2 steps at first and by 4 in the last fifth, and in one bump worse by far, with another sign in the second pair."""
    reference = [8 * 0.99**step for step in range(1000)]
    late = [8 * 0.99**(step - (2 if step < 700 else 4)) for step in range(1000)]
    late[0:1] = [50 * late[0]]
    pairs = [({"losses": losses, "val": [[1, by], [2, 2 * by]]}, {"losses": reference, "val": [[1, 1.0], [2, 2.0]]})
             for losses, by in ((late, 1.1), ([0.5 * loss for loss in reference], 0.9))]
    text = curves.line("name", pairs[:1], 1)
    early, end = 100 * (0.99**-2 - 1), 100 * (0.99**-4 - 1)
    assert text == f"| name | 1 | +2.00 | {early:+.2f} | +4.00 | {end:+.2f} | {100 * (50 * 0.99**-2 - 1):.2f} | +10.00 / +10.00 |"
    assert curves.line("name", [*pairs, pairs[1]], 1).split(" | ")[1] == "3"
    assert curves.line("name", [pairs[1]], 1).split(" | ")[5:] == ["-50.00", "50.00", "-10.00 / -10.00 |"]
    assert curves.mean_cell([1.0]) == "+1.00" and curves.mean_cell([1.0, 3.0, 5.0]) == f"+3.00 ± {2 / math.sqrt(3):.2f}"
    assert math.isnan(curves.behind([9.0] * 50, [1.0] * 50, 5, curves.STEEP)[0]), "as low as the reference ever was: no lag"


def test_every_seed_order_and_precision_is_run(curves, tmp_path, monkeypatch, capsys):
    made = []

    def train(run, options):
        made.append((run.name, options.rest, options.output, options.steps, options.smooth))
        lost = {"input": {"values": 1000, "saturated": 1, "flushed": 20}, "weight": {"values": 10, "saturated": 0, "flushed": 0}}
        return {"losses": [9.0] * 40, "val": [], "fp8": lost if run.precision == "fp8" else {}, "saturated_steps": run.seed}

    monkeypatch.setattr(curves, "train", train)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["curves.py", "-o", "out/put", "--seeds", "3,5", "--shuffled", "2", "--", "--config", "d12", "--steps", "--"])
    assert curves.main() == 0
    rest = ["--config", "d12", "--steps", "--"]
    assert made == [(f"{precision}-seed{seed}-order{order}", rest, tmp_path / "out" / "put", 400, 25) for seed in (3, 5) for order in range(3)
                    for precision in ("bf16", "fp8")] and (tmp_path / "out" / "put").is_dir()
    printed = capsys.readouterr().out.splitlines()
    table, said = printed[:6], printed[6:]
    assert [line.split(" | ")[:2] for line in table[2:]] == [
        ["| bf16, sums in another order", "4"], ["| fp8, sums in another order", "4"], ["| bf16, other seeds", "1"], ["| fp8 against bf16", "6"]]
    assert said == [f"fp8-seed{seed}-order{order}: steps with saturation {seed}; input 1.0e-03 saturated, 2.000 % flushed, weight 0.0e+00 saturated, "
                    "0.000 % flushed" for seed in (3, 5) for order in range(3)]
    made.clear()
    monkeypatch.setattr(sys, "argv", ["curves.py", "-o", "x", "--seeds", "1", "--shuffled", "0", "--reference", "fp32", "--precision", "bf16"])
    assert curves.main() == 0 and [(name, rest) for name, rest, *_ in made] == [("fp32-seed1-order0", []), ("bf16-seed1-order0", [])]


def test_runs_in_pytorch_stand_beside_those_of_their_seed(curves, curve_options, tmp_path, monkeypatch):
    """The table compares them with both precisions; the command line of the run goes to --print-config and from there to PyTorch."""
    calls = []

    def call(command):
        calls.append([str(word) for word in command])
        return "{}" if "--print-config" in command else '{"loss": 4.0}\n{"loss": 2.0}\n'

    monkeypatch.setattr(curves, "call", call)
    row = curves.train(curves.Run(curves.PYTORCH, 7, 0), curve_options)
    assert row["losses"] == [4.0, 2.0] and curves.train(curves.Run(curves.PYTORCH, 7, 0), curve_options) == row and len(calls) == 2
    first = dict(zip(calls[0], calls[0][1:]))
    assert (first["--precision"], first["--seed"], first["--batch-tokens"], calls[0][-1]) == ("bf16", "7", "128", "--print-config")
    assert calls[1][2:] == [str(tmp_path / "pytorch-seed7-order0.config.json"), "--device", "cpu", "--dtype", "bf16"]

    losses = [8.0 - 0.05 * step for step in range(100)]
    rows = {curves.Run(name, seed, 0): {"losses": [factor * loss for loss in losses], "val": [], "fp8": {}, "saturated_steps": 0}
            for name, seed, factor in (("bf16", 1, 1), ("fp8", 1, 1.02), ("bf16", 2, 1), ("fp8", 2, 1), (curves.PYTORCH, 1, 1.01))}
    lines = {text.split("|")[1].strip(): text.split("|") for text in curves.table(rows, "bf16", "fp8", 25).splitlines()}
    assert lines["bf16 against PyTorch's bf16"][2].strip() == "1" and lines["bf16 against PyTorch's bf16"][7].strip() == "0.99"
    assert lines["fp8 against PyTorch's bf16"][4].strip() == "+0.99" and lines["fp8 against bf16"][2].strip() == "2"


def test_a_command_that_fails_is_named(curves):
    assert curves.call(["sh", "-c", "pwd; exit 0"]) == f"{ROOT}\n"
    with pytest.raises(curves.cli.FileError, match="(?s)sh -c echo why >&2; exit 3: exit code 3:\nwhy") as failed:
        curves.call(["sh", "-c", "echo why >&2; exit 3"])
    assert failed.value.code == 1


# ---- scripts that need torch, without it: what is no arithmetic ------------------------------------------------------


@pytest.fixture(scope="module")
def train_fp8():
    pytest.importorskip("xxhash")
    with pytest.MonkeyPatch.context() as patch, stub_torch.installed():
        patch.syspath_prepend(ROOT / "dev" / "accuracy")
        yield importlib.import_module("train_fp8")


def tensor(*values):
    return stub_torch.tensor([float(value) for value in values])


def test_the_largest_magnitude_of_a_step_is_that_of_all_its_sightings(train_fp8):
    for rounding in (train_fp8.Rounding(), train_fp8.SchemeRounding(train_fp8.FP8, 2)):
        for values in ((1, -2), (-7, 3), (0.5,), (6, 1)):
            rounding.see("input", "0.qkv", tensor(*values))
        rounding.see("input", "1.qkv", tensor(-0.25))
        rounding.see("gradient", "0.qkv", tensor(0, 0))
        rounding.counting = False
        rounding.see("input", "0.qkv", tensor(100))
        rounding.counting = True
        rounding.end_step()
        rounding.see("input", "0.qkv", tensor(3))
        rounding.end_step()
        assert rounding.past == {("input", "0.qkv"): [7.0, 3.0], ("input", "1.qkv"): [0.25], ("gradient", "0.qkv"): [0.0]}


def test_a_scale_follows_from_the_last_steps(train_fp8):
    """In the first step from the first tensor itself, and the same until the step ends."""
    for kind in train_fp8.KINDS:
        rounding, form = train_fp8.Rounding(), train_fp8.FORMATS[kind]
        exponent = lambda amax, margin: train_fp8.exponent_of(amax, form, margin)
        assert rounding.exponent(kind, "a", tensor(-3, 1)) == exponent(3, 1) == rounding.exponent(kind, "a", tensor(300))
        assert rounding.exponent(kind, "b", tensor(0.1)) == exponent(0.1, 1)
        for step in range(train_fp8.HISTORY + 1):
            rounding.see(kind, "a", tensor(1000 if step == 0 else 20 if step == 1 else 3))
            rounding.end_step()
            assert not rounding.current and not rounding.now
            largest = 1000 if step < train_fp8.HISTORY else 20
            assert rounding.exponent(kind, "a", tensor(1e6)) == exponent(largest, train_fp8.MARGINS[kind]), step


@pytest.mark.parametrize("form, largest", [("e4m3", 448), ("e5m2", 57344)])
def test_the_largest_power_that_leaves_the_margin(train_fp8, form, largest):
    """With margin 1 the largest magnitude becomes at most half of the format's largest number, and more than a quarter."""
    assert train_fp8.exponent_of(0, form, 1) == 0
    for amax in (1e-30, 0.1, 0.9375, 1, 1.5, 1.75, 1.7500001, 1.999, 2, 3.5, 3.6, largest, 2 * largest, 1e30):
        exponent = train_fp8.exponent_of(amax, form, 1)
        assert largest / 4 < amax * 2.0**exponent <= largest / 2
        assert train_fp8.exponent_of(amax, form, 6) == exponent - 5
    assert train_fp8.exponent_of(1e-45, form, 1) == 126 and train_fp8.exponent_of(1e-45, form, 6) == 121


def test_layers_products_and_steps_of_a_scheme(train_fp8):
    def at_work(scheme, layers=3, step=10**9):
        rounding = train_fp8.SchemeRounding(scheme, layers)
        rounding.begin_step(step)
        return {(layer, product) for layer in range(layers) for product in train_fp8.PRODUCTS if rounding.at_work(f"{layer}.gate_up", product)}

    but, fp8, schemes = train_fp8.but, train_fp8.FP8, train_fp8.SCHEMES
    every = {(layer, product) for layer in range(3) for product in train_fp8.PRODUCTS}
    assert at_work(fp8) == every and not at_work(train_fp8.FP32) and not at_work(schemes["bf16"])
    for layers, chosen in (((0,), {0}), ((-1,), {2}), ((0, -1), {0, 2}), ((-3,), {0}), ((1, 2), {1, 2}), ((-2,), {1})):
        assert at_work(but(fp8, layers=layers)) == {one for one in every if one[0] in chosen}
    assert {layer for layer, _ in at_work(schemes["last-layer"], layers=12)} == {11}
    assert {layer for layer, _ in at_work(schemes["first-layer"], layers=12)} == {0}
    for product in train_fp8.PRODUCTS:
        assert at_work(schemes[f"only-{product.replace('_', '-')}"]) == {one for one in every if one[1] == product}
    assert {product for _, product in at_work(schemes["no-weight-grad"])} == {"forward", "input_grad"}
    assert [bool(at_work(schemes["from-50"], step=step)) for step in (0, 49, 50, 51)] == [False, False, True, True]
    for kind in train_fp8.KINDS:
        assert schemes[f"only-{kind}"].form(kind) == train_fp8.FORMATS[kind]
        assert at_work(schemes[f"only-{kind}"]) == every and [each for each in train_fp8.KINDS if schemes[f"only-{kind}"].form(each)] == [kind]


def test_a_report_compares_with_the_mean_of_the_other_runs_of_the_seed(train_fp8, capsys):
    def row(scheme, seed, by, forward=1.0, steps=100):
        losses = [by * 4 * 0.99**step for step in range(steps)]
        val = [[step, losses[step - 1], forward * losses[step - 1]] for step in (50, 100) if step <= steps]
        return {"scheme": scheme, "seed": seed, "losses": losses, "val": val}

    rows = [row("fp32", 1, 0.99), row("fp32-1e-3", 1, 1.01), row("fp8", 1, 1.02, 1.03), row("fp32", 2, 2.0), row("fp8", 2, 2.0, 1.01),
            row("bf16", 1, 1.0, steps=40), row("fp8", 3, 1.0), row("fp32-1e-2", 2, 2.0, steps=7) | {"losses": [math.nan]}]
    train_fp8.report(rows, 15)
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["bf16"] == ["not finite in step 40"] and "fp32-1e-7" not in lines
    assert lines["fp8"][0] == "2", "a seed without a run in fp32 has nothing to be compared with"
    assert (lines["fp8"][2], lines["fp8"][3], lines["fp8"][5]) == ("+1.00 ± 1.00",) * 3
    assert lines["fp8"][6:] == ["+1.00 ± 1.00 / +1.00 ± 1.00", "+2.00 ± 1.00 / +2.00 ± 1.00"]
    assert lines["fp32"][0] == "1" and lines["fp32"][2] == f"{100 * (0.99 / 1.01 - 1):+.2f}", "not with itself"
    assert lines["fp32-1e-3"][2] == f"{100 * (1.01 / 0.99 - 1):+.2f}"


def test_all_shards_of_a_split_are_its_tokens_in_order(train_fp8, tmp_path):
    import token_shard

    for name, ids in (("train_00001", [4, 5]), ("train_00000", [1, 2, 3]), ("train_00010", [6]), ("val_00000", [9, 8]), ("val_00001", [7])):
        writer = token_shard.ShardWriter(tmp_path / f"{name}.bin", 70_000 if name[0] == "v" else 10, 1, 2)
        writer.write(stub_torch.np.array(ids))
        writer.close()
    for split, ids, vocabulary in (("train", [1, 2, 3, 4, 5, 6], 10), ("val", [9, 8, 7], 70_000)):
        tokens, size, end = train_fp8.tokens_of(tmp_path, split, "cpu")
        assert tokens.tolist() == ids and str(tokens.dtype) == "int32" and (size, end) == (vocabulary, 2)
    data = train_fp8.Data(tmp_path, 1, 1)
    assert {split: len(tokens) for split, tokens in data.splits.items()} == {"train": 6, "val": 3}
    with pytest.raises(train_fp8.cli.FileError, match="no shards") as missing:
        train_fp8.tokens_of(tmp_path, "test", "cpu")
    assert missing.value.code == 3


def test_a_scheme_scales_by_its_history_margin_and_range(train_fp8):
    """Delayed scales by the last `history` steps, current ones by the tensor itself: powers of two, or to the end of the range."""
    but, fp8, exponent = train_fp8.but, train_fp8.FP8, train_fp8.exponent_of

    def scale(scheme, kind, form, past, x=(-3, 1)):
        rounding = train_fp8.SchemeRounding(scheme, 2)
        rounding.past = {(kind, "0.qkv"): list(past), (kind, "1.qkv"): [1e30]}
        return rounding.scale(kind, "0.qkv", tensor(*x), form)

    for kind, form in (("input", "e4m3"), ("weight", "e4m3"), ("gradient", "e5m2")):
        margin = fp8.gradient_margin if kind == "gradient" else fp8.margin
        other = but(fp8, margin=2, gradient_margin=4)
        assert scale(fp8, kind, form, ()) == 2.0**exponent(3, form, 1)
        assert scale(but(fp8, history=2), kind, form, (100, 7, 5)) == 2.0**exponent(7, form, margin)
        assert scale(other, kind, form, (7,)) == 2.0**exponent(7, form, 4 if kind == "gradient" else 2)
        assert scale(but(fp8, scale="current", margin=3), kind, form, (700,)) == 2.0**exponent(3, form, 3)
        largest = train_fp8.LARGEST[form]
        assert scale(but(fp8, scale="current", exact=True, margin=1), kind, form, (700,)) == pytest.approx(largest / 2 / 3)
        assert scale(but(fp8, scale="current", exact=True), kind, form, (), (0, 0)) == 1.0


@pytest.fixture
def fp8_options(tmp_path):
    return SimpleNamespace(layers=2, hidden=64, ffn=96, length=8, micro_batch=3, accumulate=2, steps=6, lr=0.25, val_every=2, val_batches=1, warm_up=2)


class FakeTrainer:
    """Losses in turn; weights are measured as that, with the scheme a little worse."""

    losses = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]

    def __init__(self, scheme, shape, data, seed, options):
        self.scheme, self.left, self.rounding = scheme, list(self.losses), "its own"

    def step(self):
        self.last = self.left.pop(0)
        return self.last

    def measure(self, data, rounding):
        return self.last + (0.5 if rounding == "its own" else 0.0)


def test_weights_are_measured_with_their_scheme_and_without(train_fp8, fp8_options, monkeypatch):
    monkeypatch.setattr(train_fp8, "Trainer", FakeTrainer)
    shape = SimpleNamespace(layers=2)
    row = train_fp8.train("fp8", 3, shape, None, fp8_options)
    assert row | {"seconds": 0} == {"scheme": "fp8", "seed": 3, "losses": FakeTrainer.losses, "seconds": 0,
                                    "val": [[2, 5.0, 5.5], [4, 3.0, 3.5], [6, 1.0, 1.5]],
                                    "setting": "2x64, ffn 96, 3x2x8 tokens, 6 steps, lr 0.25"}
    assert train_fp8.train("bf16", 3, shape, None, fp8_options)["val"] == [[2, 5.0, 5.0], [4, 3.0, 3.0], [6, 1.0, 1.0]]
    for bad in (math.nan, math.inf):
        monkeypatch.setattr(FakeTrainer, "losses", [2.0, 1.0, bad, 0.0])
        row = train_fp8.train("fp8", 1, shape, None, fp8_options)
        assert str(row["losses"]) == str([2.0, 1.0, bad]) and row["val"] == [[2, 1.0, 1.5]], "it ends where it is not finite"


def test_runs_of_other_settings_are_left_and_those_that_are_there_are_not_made_again(train_fp8, tmp_path, monkeypatch, capsys):
    made, reported = [], []

    def train(name, seed, shape, data, options):
        made.append((name, seed, vars(shape)))
        return {"scheme": name, "seed": seed, "setting": train_fp8.setting(options), "losses": [1.0], "val": [], "seconds": 1}

    monkeypatch.setattr(train_fp8, "train", train)
    monkeypatch.setattr(train_fp8, "report", lambda rows, width: reported.append(([(row["scheme"], row["seed"]) for row in rows], width)))
    monkeypatch.setattr(train_fp8, "check_rounding", lambda: None)
    monkeypatch.setattr(train_fp8, "Data", lambda *words: SimpleNamespace(vocabulary=77))

    def run(*words):
        made.clear()
        monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--data", "d", "-o", str(tmp_path / "out"), *words])
        assert train_fp8.main() == 0
        return [one[:2] for one in made]

    two = ["--schemes", "fp32,fp8", "--seeds", "1,4"]
    every = [("fp32", 1), ("fp8", 1), ("fp32", 4), ("fp8", 4)]
    assert run(*two, "--report") == [] and reported.pop() == ([], 15)
    assert run("--schemes", "fp8", "--seeds", "4", "--smooth", "7") == [("fp8", 4)] and reported.pop() == ([("fp8", 4)], 7)
    assert run(*two) == every[:3] and made[0][2] == {
        "layers": 4, "hidden": 128, "ffn": 384, "heads": 4, "kv_heads": 2, "vocabulary": 77, "length": 128}
    assert sorted(reported.pop()[0]) == sorted(every)
    assert run(*two) == [] and run(*two, "--lr", "1e-3") == every and run(*two, "--report", "--steps", "9") == []
    assert [len(rows) for rows, _ in reported] == [4, 4, 0]
    assert run("--schemes", "fp8", "--hidden", "32") == [("fp8", 1)] and (made[0][2]["heads"], made[0][2]["kv_heads"]) == (1, 1)
    with pytest.raises(SystemExit) as end:
        run("--schemes", "fp32,fp9")
    assert end.value.code == 2 and "'fp9'" in capsys.readouterr().err
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 9


def test_what_other_histories_and_margins_would_have_lost(train_fp8, capsys):
    """One tensor with values of 1 and 2^-20, and 16 in the steps 2 and 11."""
    np = stub_torch.np
    slot, small = ("input", "0.qkv"), np.zeros(1024, int)
    small[4 * 127], small[4 * 107], small[0] = 30, 10, 60  # 1.0, 2^-20 and zeros
    large = np.zeros(1024, int)
    large[4 * 131], large[0] = 40, 60
    train_fp8.policies([{slot: large if step in (1, 10) else small} for step in range(64)])
    lines = {tuple(line.strip("| ").split(" | ")[:2]): line.strip("| ").split(" | ")[2:] for line in capsys.readouterr().out.splitlines()[3:]}
    assert len(lines) == 4 * 5 * 5
    # Steps 2 to 60: 59 of them, with 40 values that are not zero in each, of which ten are small in all but two steps.
    small_share = 100 * 10 * 57 / (40 * 59)
    assert lines["input, e4m3", "current, 0"] == ["0.00", "0.00", "0.000", "0.000", f"{small_share:.3f}", "25.000"]
    assert lines["input, e4m3", "1, 0"][0] == f"{200 / 59:.2f}" and lines["input, e4m3", "1, 0"][2] == "40.000"
    assert lines["input, e4m3", "1, 4"][0] == "0.00" and lines["input, e4m3", "1, 2"][0] == f"{200 / 59:.2f}"
    assert [lines["input, e4m3", f"{history}, 0"][:2] for history in (16, 64)] == [[f"{100 / 59:.2f}", "0.00"]] * 2, "it is known already"
    assert lines["gradient, e5m2", "1, 0"] == ["0.00", "0.00", "0.000", "0.000", "0.000", "0.000"]
