"""The commands that scripts print are pasted: each is run here by a shell as it stands, in a directory like a checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")
tokenizers = pytest.importorskip("tokenizers")

import checkpoints as ck  # noqa: E402
import cli  # noqa: E402
from printed_commands import make_checkout  # noqa: E402

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
STRANGE = ["it's $(touch pwned) `touch pwned`.bin", "line\nbreak\x1b[31m.bin", "-x \u202egnp.bin", os.fsdecode(b"\xff\xfe.bin"),
           "*[a]?~#back\\slash\".bin"]


@pytest.fixture
def place(tmp_path):
    """A directory in which the printed paths lead to this tree."""
    place = tmp_path / "checkout"
    place.mkdir()
    return make_checkout(place, ("scripts", "dev", "models"))


def shell(place, command, code=0, **environment):
    done = subprocess.run(["bash", "-c", command], cwd=place, capture_output=True, timeout=300,
                          env={**os.environ, **environment})
    assert done.returncode == code, (command, done.stdout, done.stderr)
    return done


def script(place, name, *arguments, **environment):
    """A script as README starts it; what it printed."""
    return shell(place, shlex.join([".venv/bin/python", name, *map(str, arguments)]), **environment).stdout


def next_lines(printed: bytes) -> list[str]:
    found = re.findall(rb"^next +(.*)$", printed, re.M) + re.findall(rb"^Next:\n  (.*)$", printed, re.M)
    assert found, printed
    return [os.fsdecode(line) for line in found]


def trains(place, command):
    """A training run, begun as it stands and ended by Ctrl-C after its first step."""
    process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = b""
    end = time.monotonic() + 200
    os.set_blocking(process.stdout.fileno(), False)
    while b"step 1/" not in said and process.poll() is None and time.monotonic() < end:
        said += process.stdout.read() or b""
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=200)[0] or b""
    assert b"step 1/" in said and process.returncode in (0, 130), said


def byte_tokenizer(path, size=260):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["a"], tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False, initial_alphabet=alphabet))
    tokenizer.save(str(path))


@pytest.mark.parametrize("quantised", [False, True])
def test_a_pythia(place, quantised):
    (place / "my.txt").write_text("Once upon a time there was a weft.\n" * 3000)
    infer, prepare, train = next_lines(script(place, "scripts/convert_hf.py", "models/tiny-pythia", "-o", "a b.bin",
                                              *["--quantize", "int8"] * quantised))
    assert "--prompt " in infer and ("--lora-r 16" in train) == quantised
    assert shell(place, infer + " --max-tokens 4").stdout
    shell(place, prepare)
    trains(place, train)


def test_a_llama_from_conversion_to_training(place, tmp_path):
    """One's own text is my.txt, as in README."""
    model = tmp_path / "a llama"
    ck.write_checkpoint(model, ck.LLAMA | {"vocab_size": 264, "max_position_embeddings": 256, "eos_token_id": 0,
                                           "bos_token_id": None})
    byte_tokenizer(model / "tokenizer.json")
    (place / "my.txt").write_text("Once upon a time there was a weft.\n" * 3000)
    infer, prepare, train = next_lines(script(place, "scripts/convert_hf.py", model, "-o", "llama.bin"))
    assert shell(place, infer).stdout.startswith(b"Hello")
    shell(place, prepare)
    trains(place, train)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_model_that_chats_is_tuned_on_conversations(place, quantised):
    """With a chat format the lines are those of doc/fine_tuning.md: the program chats, and the shards are of chats.jsonl. Beside
    quantised matrices an adapter is trained."""
    chat = {"messages": [{"role": "user", "content": "Who lives in the hut?"}, {"role": "assistant", "content": "An old fox."}]}
    (place / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    infer, prepare, train = next_lines(script(place, "scripts/convert_hf.py", "models/tiny-llama", "--chat-format",
                                              "models/tiny-llama/chat_format.json", "-o", "a chat.bin",
                                              *["--quantize", "int4"] * quantised))
    assert infer == "./infer_pythia --model 'a chat.bin' --chat"
    assert prepare == ".venv/bin/python dev/prepare_data.py --chat chats.jsonl --model 'a chat.bin' -o data/mine"
    shell(place, f"echo Hello | {infer} --max-tokens 4")
    (proposed,) = [line.strip() for line in shell(place, prepare).stdout.decode().splitlines() if "train_llama" in line]
    for line in (proposed, train.replace("runs/mine", "runs/another")):
        assert ("--lora-r 16" in line) == quantised
        trains(place, line)


def test_a_llama_without_a_tokenizer(place, tmp_path):
    ck.write_checkpoint(tmp_path / "bare", ck.LLAMA)
    (line,) = next_lines(script(place, "scripts/convert_hf.py", tmp_path / "bare", "-o", "bare.bin"))
    assert "--prompt-ids 1,2,3" in line
    shell(place, line)


def test_shards_of_a_small_vocabulary(place):
    (place / "my.txt").write_text("Once upon a time there was a weft.\n" * 3000)
    (line,) = next_lines(script(place, "dev/prepare_data.py", "my.txt", "--tokenizer", "models/tiny-llama/tokenizer.json",
                                "-o", "data/it's [mine]"))
    trains(place, line)
    script(place, "scripts/convert_hf.py", "models/tiny-llama", "-o", "m.bin")
    (line,) = next_lines(script(place, "dev/prepare_data.py", "my.txt", "--model", "m.bin", "-o", "data/tuning"))
    assert line.startswith("./train_llama --model m.bin --train 'data/tuning/train_*.bin'")
    trains(place, line)


@pytest.mark.parametrize("style", [(), ("--style", "sentencepiece")], ids=["llama3", "sentencepiece"])
def test_a_tokenizer_of_ones_own(place, style):
    """From a text to shards, and to a model that trains on them."""
    words = [f"{one}{two}" for one in ("weft", "warp", "loom", "thread") for two in ("ing", "ed", "er", "s", "ish", "")]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) + ".\n" for i in range(3000)]
    (place / "my text.txt").write_text("".join(lines))
    (line,) = next_lines(script(place, "dev/train_tokenizer.py", "my text.txt", "--vocab-size", 330, "-o", "own.json", *style))
    (train,) = next_lines(shell(place, line).stdout)
    assert "--config tiny" in train
    trains(place, train)
    done = shell(place, ".venv/bin/python dev/train_tokenizer.py 'my text.txt' --vocab-size 60000 -o large.json", code=3)
    assert b"give more text" in done.stderr and done.stderr.count(b"\n") == 1 and not (place / "large.json").exists()


def test_an_export(place):
    script(place, "scripts/convert_hf.py", "models/tiny-llama", "-o", "m.bin")
    (line,) = next_lines(script(place, "scripts/export_hf.py", "m.bin", "-o", "my export"))
    shell(place, line)
    assert (place / "again.bin").stat().st_size == (place / "m.bin").stat().st_size


@pytest.mark.parametrize("name, environment", [*((name, {}) for name in STRANGE), ("modèle-日本.bin", ASCII), ("\u202egnp.bin", ASCII)])
def test_strange_names_are_safe_to_paste(place, name, environment):
    """The line reaches the file, whatever its name, and nothing else happens."""
    printed = script(place, "scripts/convert_hf.py", "models/tiny-pythia", "-o", f"./{name}", **environment)
    lines = next_lines(printed)
    for line in lines:
        assert all(0x20 <= byte < 0x7F or byte >= 0xA0 or 0x80 <= byte for byte in line.encode("utf-8", "surrogateescape"))
    shell(place, lines[0] + " --max-tokens 1")
    assert not (place / "pwned").exists()


def test_every_script_speaks_under_an_ascii_locale(place):
    script(place, "scripts/convert_hf.py", "models/tiny-llama", "-o", "modèle.bin", **ASCII)
    script(place, "scripts/export_hf.py", "modèle.bin", "-o", "expört", **ASCII)
    (place / "täxt.txt").write_text("Once upon a time.\n" * 100)
    script(place, "dev/prepare_data.py", "täxt.txt", "--tokenizer", "models/tiny-llama/tokenizer.json", "-o", "dâta", **ASCII)
    script(place, "scripts/tensor_file.py", "modèle.bin", **ASCII)
    (place / "rün").mkdir()
    (place / "rün" / "log.jsonl").write_text(json.dumps({"type": "header"}) + "\n" + json.dumps(
        {"type": "step", "step": 1, "loss": 2.0, "lr": 0.1, "tokens": 8}) + "\n")
    pytest.importorskip("matplotlib")
    script(place, "scripts/plot_log.py", "rün", "-o", "bïld.png", **ASCII)
    assert (place / "bïld.png").exists()


def test_what_a_command_begins_does_not_exist_yet(place):
    """So that a second model or text of one's own is not refused by the first one's run, and replaces no shards."""
    (place / "my.txt").write_text("Once upon a time there was a weft.\n" * 3000)
    (place / "chats.jsonl").write_text('{"prompt": "Who?", "completion": "An old fox."}\n' * 4)
    for made, data, run in (("data/other", "data/mine", "runs/mine"), ("data/mine", "data/mine-2", "runs/mine"),
                            ("runs/mine", "data/mine-2", "runs/mine-2"), ("runs/mine-2", "data/mine-2", "runs/mine-3")):
        (place / made).mkdir(parents=True)
        _, prepare, train = next_lines(script(place, "scripts/convert_hf.py", "models/tiny-llama", "-o", "m.bin"))
        assert prepare.endswith(f" -o {data}") and train.endswith(f" --train '{data}/train_*.bin' --val '{data}/val_*.bin' --out {run}")
        prepared = script(place, "dev/prepare_data.py", "my.txt", "--tokenizer", "models/tiny-llama/tokenizer.json", "-o", "data/text")
        chats = script(place, "dev/prepare_data.py", "--chat", "chats.jsonl", "--tokenizer", "models/tiny-llama/tokenizer.json", "--chat-format",
                       "models/tiny-llama/chat_format.json", "-o", "data/chats")
        assert all(line.endswith(f" --out {run}") for line in next_lines(prepared) + next_lines(chats))
        assert b"train          3 conversations          6 turns" in chats and b"val            1 conversation           2 turns" in chats


def test_pasteable_words():
    assert cli.pasteable("plain/x.bin") == "plain/x.bin" and cli.pasteable("a b") == "'a b'"
    assert cli.pasteable("-x") == "./-x" and cli.pasteable("a\x1b[31m'\\") == r"$'a\x1b[31m\x27\x5c'"
