#!/usr/bin/env python3
"""Exports a weft model file as a Hugging Face directory that transformers 4 and 5 load with the same logits.

    python3 scripts/export_hf.py runs/mine/step_00001000/model.bin -o exported

Writes config.json, generation_config.json, model.safetensors (several shards and an index where it is large) and, where
the model carries them, tokenizer.json with tokenizer_config.json, and chat_template.jinja. A chat format that was given by hand
has no template: it becomes chat_format.json, for --chat-format of convert_hf.py. DIR appears when it is complete.

    python3 scripts/export_hf.py model.bin --adapter runs/mine/step_00001000/adapter.bin -o merged
    python3 scripts/export_hf.py runs/mine/step_00001000/adapter.bin -o adapter

The first adds a LoRA adapter to the weights; the second writes the adapter alone, as PEFT reads it, and its chat_format.json.
Exit codes: 2 usage, 3 bad input, 4 cannot write, 5 disk or memory full.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs  # before the packages

import numpy as np

import chat_format
import peft_format
import tensor_file
from peft_format import Adapter
from tensor_file import AtomicFile, FileError, TensorFile, escaped

import cli
from cli import bad_file, shown
from hf_config import Model, describe, exported_config, model_of
from hf_tokenizer import tokenizer_vocabulary

SAFETENSORS_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
TOKENIZER_TENSOR = "tokenizer.json"
MAX_SHARD_BYTES = 5 << 30
# The files of an export, besides shards: --force replaces only directories that hold nothing else.
EXPORTED_NAMES = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
                  "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", chat_format.FILE, peft_format.CONFIG,
                  peft_format.WEIGHTS}


def read_model(path: Path, with_adapter: bool = False) -> tuple[TensorFile, Model, bytes | None]:
    """Opens a model file, whose tensors infer_pythia --describe has checked. Returns the file, its model and its tokenizer.json.
    Only the tokenizer's hash is verified here, the others when they are written."""
    file = tensor_file.read(path, expected="model")
    if "quantization" in file.config:
        bad_file(path, "", "its weights are quantised, and an export needs floats", "Export the file it was converted from" + with_adapter *
                 ", with this adapter. infer_pythia --adapter runs the adapter beside the quantised file")
    model = model_of(describe(path))
    exported_config(model, path)
    tokenizer = None
    if TOKENIZER_TENSOR in file.tensors:
        file.verify_tensor(TOKENIZER_TENSOR)
        tokenizer = bytes(file.bytes(TOKENIZER_TENSOR))
        tokenizer_vocabulary(tokenizer, path)
    return file, model, tokenizer


# ---- the files of the directory --------------------------------------------------------------------------------------


def plan_shards(file: TensorFile, names: list[str], limit: int) -> list[list[str]]:
    """The tensors in order, in shards of at most `limit` bytes; a larger tensor has a shard of its own."""
    shards: list[list[str]] = []
    size = limit + 1
    for name in names:
        if size + file.at(name).bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += file.at(name).bytes
    return shards


def values_of(file: TensorFile, name: str, adapter: Adapter | None) -> Any:
    """The bytes of a tensor, with the adapter in it: rounded to the file's type."""
    file.verify_tensor(name)
    merged = adapter.merged(file, name) if adapter else None
    if merged is None:
        return file.bytes(name)
    rounded = tensor_file.from_f32(merged, file.at(name).dtype)
    too_large = np.isinf(tensor_file.to_f32(rounded, file.at(name).dtype)) & np.isfinite(merged)
    if too_large.any():
        bad_file(file.path, name, f"with the adapter a value is {np.abs(merged[too_large]).max():g}, which does not fit in "
                 f"{file.at(name).dtype}", "Convert the model with --dtype bf16, and give that file")
    return rounded.tobytes()


def write_shard(path: Path, file: TensorFile, names: list[str], progress: cli.Progress, adapter: Adapter | None = None,
                exported: dict[str, str] | None = None) -> None:
    """One safetensors file; every tensor's hash is verified on the way. `exported`: other names that tensors have there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info = file.at(name)
        header[(exported or {}).get(name, name)] = {"dtype": SAFETENSORS_DTYPES[info.dtype], "shape": list(info.shape),
                        "data_offsets": [end, end + info.bytes]}
        end += info.bytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8
    with AtomicFile(path, expected_bytes=8 + len(text) + end) as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            output.write(values_of(file, name, adapter))
            progress.advance(file.at(name).bytes)


def write_weights(directory: Path, file: TensorFile, model: Model, limit: int, adapter: Adapter | None) -> list[str]:
    """Writes all shards, and the index if there are several. Returns the names of the shards."""
    names = list(model.tensors)
    shards = plan_shards(file, names, limit)
    progress = cli.Progress("exporting", sum(file.at(name).bytes for name in names))
    shard_names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for shard_name, shard in zip(shard_names, shards):
        write_shard(directory / shard_name, file, shard, progress, adapter)
    progress.finish()
    if len(shards) > 1:
        weight_map = {name: shard_name for shard_name, shard in zip(shard_names, shards) for name in shard}
        total = sum(file.at(name).bytes for name in names)
        write_json(directory / "model.safetensors.index.json",
                   {"metadata": {"total_size": total}, "weight_map": weight_map})
    return shard_names


def write_json(path: Path, value: Any) -> None:
    with AtomicFile(path) as output:
        output.write((json.dumps(value, indent=2, ensure_ascii=True) + "\n").encode("ascii"))


def tokenizer_config(model: Model, tokenizer: bytes, tokens: dict[str, Any] | None = None) -> dict[str, Any]:
    """The smallest tokenizer_config.json with which AutoTokenizer reads the tokenizer.json beside it. `tokens`: those that the
    chat template names, as `bos_token`."""
    parsed = json.loads(tokenizer)
    names = {token_id: name for name, token_id in parsed["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in parsed.get("added_tokens") or []}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_positions,
              "clean_up_tokenization_spaces": False}
    if model.bos_id is not None and model.bos_id in names:
        config["bos_token"] = names[model.bos_id]
    if model.eos_ids and model.eos_ids[0] in names:
        config["eos_token"] = names[model.eos_ids[0]]
    return config | (tokens or {})


def write_chat(directory: Path, config: dict[str, Any]) -> None:
    """The chat template of a file's configuration or, without one, its chat format."""
    if isinstance(config.get("chat_template"), str):
        with AtomicFile(directory / "chat_template.jinja") as output:
            output.write(config["chat_template"].encode("utf-8"))
    else:
        write_chat_format(directory, config)


def write_chat_format(directory: Path, config: dict[str, Any]) -> None:
    if "chat_format" in config:
        write_json(directory / chat_format.FILE, config["chat_format"])


def write_directory(directory: Path, file: TensorFile, model: Model, tokenizer: bytes | None, limit: int,
                    adapter: Adapter | None = None) -> list[str]:
    """Writes every file of the export into an existing empty directory. Returns the names of the weight files."""
    config = exported_config(model, file.path)
    chats = adapter.file.config if adapter and "chat_format" in adapter.file.config else file.config  # as infer_pythia --adapter chats
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    if tokenizer is not None:
        with AtomicFile(directory / "tokenizer.json") as output:
            output.write(tokenizer)
        write_json(directory / "tokenizer_config.json", tokenizer_config(model, tokenizer, chats.get("chat_tokens")))
    write_chat(directory, chats)
    return write_weights(directory, file, model, limit, adapter)


def write_adapter(directory: Path, adapter: Adapter, base: str | None) -> None:
    """Writes the files of PEFT into an existing empty directory, and beside them the chat format, which PEFT has no member for."""
    exported = {name: there for there, name in adapter.tensors()}
    write_json(directory / peft_format.CONFIG, adapter.peft_config(base))
    write_chat_format(directory, adapter.file.config)
    progress = cli.Progress("exporting", sum(adapter.file.at(name).bytes for name in exported))
    write_shard(directory / peft_format.WEIGHTS, adapter.file, list(exported), progress, exported=exported)
    progress.finish()


# ---- replacing a directory -------------------------------------------------------------------------------------------


def check_target(directory: Path, force: bool) -> None:
    """Refuses an existing target unless it is to be replaced and is an export itself."""
    if not directory.exists() and not directory.is_symlink():
        return
    if not force:
        raise FileError(cli.USAGE, f"--output: {escaped(str(directory))} exists. Choose another, or add --force")
    if directory.is_symlink() or not directory.is_dir():
        raise FileError(cli.USAGE, f"--output: {escaped(str(directory))} is not a directory: not replaced")
    for entry in directory.iterdir():
        shard = entry.name.startswith("model-") and entry.name.endswith(".safetensors")
        if not entry.is_file() or not (entry.name in EXPORTED_NAMES or shard):
            raise FileError(cli.USAGE, f"--output: {escaped(str(directory))} holds {shown(entry.name)}, which is no "
                            "part of an exported model: not replaced")


def publish(temporary: Path, directory: Path) -> None:
    """Gives the finished directory its name. A directory that has this name is removed last."""
    if not directory.exists():
        os.rename(temporary, directory)
        return
    # The old directory moves into a new temporary one, where no name is taken. It lies beside the target, because rename()
    # works within one file system.
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name[:200]}.", dir=directory.parent))
    try:
        os.rename(directory, aside / "old")
        try:
            os.rename(temporary, directory)
        except OSError:
            os.rename(aside / "old", directory)
            raise
    finally:
        shutil.rmtree(aside)


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="export_hf.py")
    parser.add_argument("file", type=Path, metavar="FILE", help="weft model file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the directory to make")
    parser.add_argument("--adapter", type=Path, metavar="FILE", help="LoRA adapter to add to the weights")
    parser.add_argument("--base-name", metavar="NAME", help="of an adapter's export: what PEFT loads as its base model, a directory "
                        "or a name on the hub")
    parser.add_argument("--force", action="store_true", help="replace DIR if it is an earlier export")
    parser.add_argument("--max-shard-bytes", type=cli.number_in(1, 1 << 50, int), default=MAX_SHARD_BYTES, metavar="N",
                        help="size above which the weights are split (default: 5 GiB)")
    return parser.parse_args()


def in_new_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Calls write() with a temporary directory, which then gets the name."""
    temporary = directory.with_name(f"{directory.name}.tmp.{os.getpid()}")
    os.mkdir(temporary)
    try:
        write(temporary)
        publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_adapter(options: argparse.Namespace, directory: Path) -> int:
    if options.adapter is not None:
        raise FileError(cli.USAGE, f"--adapter: {escaped(str(options.file))} is an adapter itself, expected a model file to add it to")
    adapter = Adapter(options.file)
    in_new_directory(directory, lambda temporary: write_adapter(temporary, adapter, options.base_name))
    print(f"exported    adapter of rank {adapter.rank} for {', '.join(adapter.targets)} to {escaped(str(options.output))}")
    print(f"next        peft.PeftModel.from_pretrained(model, {str(options.output)!a})")
    return cli.OK


def main() -> int:
    options = arguments()
    directory = Path(os.path.abspath(options.output))
    check_target(directory, options.force)
    if tensor_file.read(options.file).kind == "LoRA adapter":
        return export_adapter(options, directory)
    if options.base_name is not None:
        raise FileError(cli.USAGE, "--base-name: only for the export of an adapter")
    file, model, tokenizer = read_model(options.file, options.adapter is not None)
    adapter = Adapter(options.adapter) if options.adapter else None
    if adapter:
        adapter.check_base(file)
    if model.hidden_size % model.num_heads:
        print(f"warning: hidden_size {model.hidden_size} is not a multiple of num_heads {model.num_heads}: "
              "transformers 5 refuses such a configuration", file=sys.stderr)
    shards: list[str] = []
    in_new_directory(directory, lambda temporary: shards.extend(
        write_directory(temporary, file, model, tokenizer, options.max_shard_bytes, adapter)))
    print(f"exported    {len(model.tensors)} tensors in {len(shards)} file{'s' * (len(shards) > 1)} to "
          f"{escaped(str(options.output))}")
    by_hand = f" --chat-format {cli.pasteable(options.output / chat_format.FILE)}" if (directory / chat_format.FILE).exists() else ""
    print(f"next        {needs.command('scripts/convert_hf.py')} {cli.pasteable(options.output)} -o again.bin{by_hand}")
    print(f"or          transformers.AutoModelForCausalLM.from_pretrained({str(options.output)!a})")
    return cli.OK


if __name__ == "__main__":
    cli.run(main)
