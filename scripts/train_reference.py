#!/usr/bin/env python3
"""Repeats a run of train_llama in PyTorch, from the same weights on the same windows, and compares the losses.

    python3 scripts/train_reference.py runs/mine --against runs/mine/log.jsonl --tolerance 1e-4
    python3 scripts/train_reference.py runs/bf16 --device cuda --against runs/bf16 --smooth 25 --tolerance 0.005

RUN is a run directory, its config.json, or a file with what train_llama --print-config printed; paths in it are taken
relative to the current directory. Model, data order, micro-batches, schedule, AdamW and clipping follow its settings.
The model is transformers' class for it, everything else is PyTorch's own.

Prints one JSON object a step (step, loss, lr, grad_norm, seconds), and with --against a last one with the largest
differences of the two runs; --output writes them to a file instead. Needs torch and transformers. Exit codes: 1 the losses
differ, 2 usage, 3 bad input, 4 torch, transformers or the GPU missing.
"""

from __future__ import annotations

import argparse
import bisect
import glob
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import needs  # noqa: F401, before the packages
import numpy as np
import xxhash

import cli
import peft_format
from cli import ENVIRONMENT, INTERNAL, USAGE, FileError, bad_file, shown
from dump_reference import IGNORED_LABEL, learn_padding, libraries, named_parameters
from export_hf import read_model
from hf_config import Model, exported_config, model_from_json
from plot_log import is_number, read_run, smoothed
from tensor_file import escaped
from token_shard import HEADER_BYTES, TokenShard

if TYPE_CHECKING:
    import torch

MAX_CONFIG_BYTES = 16 << 20
INIT_STREAM, DATA_ORDER_STREAM = 1, 2  # RandomStream of llmc/base/philox.h
INIT_DEVIATION = 0.02
RESIDUAL_PROJECTIONS = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "attention.dense.weight", "mlp.dense_4h_to_h.weight")
FEISTEL_ROUNDS = 8
INIT_CHUNK = 1 << 20  # Philox blocks computed at once: bounds the memory of the initialisation
LR_TOLERANCE = 1e-9  # relative; both evaluate the same formula in double


# ---- settings of the run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings of the run, named like train_llama's options. model_file (--model) is empty for a run from scratch."""

    model_file: str
    train: str
    steps: int
    micro_batch: int
    seq_len: int
    batch_tokens: int
    lr: float
    min_lr_ratio: float
    warmup_steps: int
    schedule: str
    wsd_decay_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    grad_clip: float
    seed: int
    packed: bool = False  # rows hold several conversations; runs that do not say so have a row for each
    document_mask: bool = False
    dpo_beta: float = 0  # of --objective dpo; 0: the loss is that of text

    @property
    def accumulation(self) -> int:
        return self.batch_tokens // (self.micro_batch * self.seq_len)


@dataclass(frozen=True)
class Adapter:
    """Of a run with --lora-r."""

    rank: int
    alpha: float
    targets: list[str]  # of peft_format.targets_of()


@dataclass(frozen=True)
class RunDescription:
    settings: Settings
    model: Model
    shards: list[dict[str, Any]]  # name, tokens and header hash of each training shard; empty: unknown
    adapter: Adapter | None = None


def read_description(run: Path) -> RunDescription:
    """The run's config.json. FileError for runs that PyTorch cannot repeat."""
    path = run / "config.json" if run.is_dir() else run
    config = cli.read_json_object(path, MAX_CONFIG_BYTES)
    options = config.get("settings")
    if not isinstance(options, dict) or "model" not in config:
        bad_file(path, "settings", "missing: this is no config.json of a run directory")
    model = model_from_json(config["model"], path)
    if not model.trainable:
        bad_file(path, "model.family", f"got {shown(model.family)}, expected one that train_llama trains")
    exported_config(model, path)
    if setting(options, "dropout", float, path) != 0:
        bad_file(path, "settings.dropout", f"got {shown(options['dropout'])}, expected 0: PyTorch draws other masks")
    if (optimizer := options.get("optimizer", "adamw")) != "adamw":
        bad_file(path, "settings.optimizer", f"got {shown(optimizer)}, expected adamw, the only one here")
    shards = config.get("train", [])
    return RunDescription(read_settings(options, path), model, shards if isinstance(shards, list) else [],
                          read_adapter(options, model.family, path))


def read_adapter(options: dict[str, Any], family: str, path: Path) -> Adapter | None:
    if options.get("lora-r", "0") == "0":
        return None
    if setting(options, "lora-dropout", float, path) != 0:
        bad_file(path, "settings.lora-dropout", f"got {shown(options['lora-dropout'])}, expected 0: PyTorch draws other masks")
    rank, alpha = setting(options, "lora-r", int, path), setting(options, "lora-alpha", float, path)
    names = setting(options, "lora-targets", str, path).split(",")
    targets = [target for target in peft_format.targets_of(family) if target in names or names == ["all"]]
    return Adapter(rank, alpha or 2.0 * rank, targets)


def read_settings(options: dict[str, Any], path: Path) -> Settings:
    values = {name: setting(options, name.replace("_", "-"), kind, path)
              for name, kind in (("train", str), ("steps", int), ("micro_batch", int), ("seq_len", int),
                                 ("batch_tokens", int), ("lr", float), ("min_lr_ratio", float), ("warmup_steps", int),
                                 ("schedule", str), ("wsd_decay_fraction", float), ("weight_decay", float),
                                 ("beta1", float), ("beta2", float), ("eps", float), ("grad_clip", float),
                                 ("seed", int))}
    micro_tokens = values["micro_batch"] * values["seq_len"]
    ranks = setting(options, "virtual-ranks", int, path) if "virtual-ranks" in options else 1
    values["batch_tokens"] = values["batch_tokens"] or ranks * micro_tokens
    if micro_tokens <= 0 or values["batch_tokens"] % micro_tokens or values["steps"] <= 0:
        bad_file(path, "settings", "steps, micro-batch, seq-len and batch-tokens do not fit together")
    if values["schedule"] not in ("cosine", "linear", "constant", "wsd"):
        bad_file(path, "settings.schedule", f"got {shown(values['schedule'])}, expected a schedule of train_llama")
    return Settings(model_file=setting(options, "model", str, path), packed=options.get("no-pack") == "false",
                    document_mask=options.get("document-mask") == "true",
                    dpo_beta=setting(options, "dpo-beta", float, path) if options.get("objective") == "dpo" else 0, **values)


def setting(options: dict[str, Any], name: str, kind: Callable[[str], Any], path: Path) -> Any:
    text = options.get(name)
    try:
        value = kind(text) if isinstance(text, str) else None
    except ValueError:
        value = None
    if value is None or (kind is float and not math.isfinite(value)):
        bad_file(path, f"settings.{name}", f"got {shown(text)}, expected a setting of train_llama")
    return value


def learning_rate(s: Settings, step: int) -> float:
    """The rate of step `step`, 1 for the first: as llmc/train/schedule.h defines it."""
    if step <= s.warmup_steps:
        return s.lr * step / s.warmup_steps
    begin = s.warmup_steps
    if s.schedule == "wsd":
        begin = max(begin, s.steps - math.floor(s.wsd_decay_fraction * s.steps + 0.5))
    if step <= begin or s.schedule == "constant":
        return s.lr
    done = min(1.0, (step - 1 - begin) / (s.steps - begin))
    low = s.lr * s.min_lr_ratio
    shape = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "wsd": 1 - math.sqrt(done)}
    return low + (s.lr - low) * shape[s.schedule]


# ---- addressed random numbers ----------------------------------------------------------------------------------------


def philox(seed: int, low: np.ndarray, high: int) -> np.ndarray:
    """Philox4x32-10 of the counters (low, high): u32 [4, n] for u64 [n]. Salmon et al., SC 2011."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1 = low & mask, low >> shift
    c2 = np.full_like(low, high & 0xFFFFFFFF)
    c3 = np.full_like(low, high >> 32)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & mask, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def philox_u64(seed: int, low: np.ndarray, high: int) -> np.ndarray:
    """The first two words of each block as one number."""
    words = philox(seed, low, high).astype(np.uint64)
    return words[1] << np.uint64(32) | words[0]


class DataOrder:
    """Another permutation of [0, count) for each epoch: the order of llmc/train/data_order.h."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        self.half_bits = max(1, ((count - 1).bit_length() + 1) // 2)

    def windows(self, begin: int, number: int) -> np.ndarray:
        """The windows at positions begin to begin + number - 1 of the run, u64."""
        pieces = []
        while number > 0:
            epoch, first = divmod(begin, self.count)
            length = min(number, self.count - first)
            pieces.append(self._walk(np.arange(first, first + length, dtype=np.uint64), epoch))
            begin, number = begin + length, number - length
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint64)

    def _walk(self, values: np.ndarray, epoch: int) -> np.ndarray:
        """Encrypts each value until it is below count (cycle walking)."""
        epoch_seed = int(philox_u64(self.seed, np.array([epoch], dtype=np.uint64), DATA_ORDER_STREAM)[0])
        values = self._encrypt(values, epoch_seed)
        while (outside := values >= self.count).any():
            values[outside] = self._encrypt(values[outside], epoch_seed)
        return values

    def _encrypt(self, values: np.ndarray, epoch_seed: int) -> np.ndarray:
        bits, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & mask
        for number in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (philox_u64(epoch_seed, right, number) & mask)
        return left << bits | right


def normal_values(count: int, deviation: float, tensor: int, seed: int) -> np.ndarray:
    """f32 [count]: normal numbers, four from each Philox block, by the Box-Muller transform in double."""
    result = np.empty((count + 3) // 4 * 4, dtype=np.float32)
    for begin in range(0, result.size // 4, INIT_CHUNK):
        blocks = np.arange(begin, min(begin + INIT_CHUNK, result.size // 4), dtype=np.uint64)
        a, b = philox(seed, blocks, INIT_STREAM << 32 | tensor).astype(np.float64).reshape(2, 2, -1).swapaxes(0, 1)
        radius, angle = np.sqrt(-2 * np.log((a + 1) * 2.0**-32)), 2 * math.pi * (b * 2.0**-32)
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)  # [low and high, cos and sin, n]
        result[4 * begin:4 * (begin + blocks.size)] = (deviation * pairs).reshape(4, -1).T.reshape(-1)
    return result[:count]


def initial_tensors(model: Model, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of a run from scratch, as llmc/train/initialize.cpp makes them."""
    residual = INIT_DEVIATION / math.sqrt(2 * model.num_layers)
    norm = np.zeros if model.family == "gemma3_text" else np.ones  # whose norms add 1
    for number, (name, shape) in enumerate(model.tensors.items()):
        if len(shape) == 1:
            yield name, (np.zeros if name.endswith(".bias") else norm)(shape, dtype=np.float32)
            continue
        deviation = residual if name.endswith(RESIDUAL_PROJECTIONS) else INIT_DEVIATION
        yield name, normal_values(math.prod(shape), deviation, number, seed).reshape(shape)


def uniform_values(count: int, bound: float, tensor: int, seed: int) -> np.ndarray:
    """f32 [count] between -bound and bound, four from each Philox block."""
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    words = philox(seed, blocks, INIT_STREAM << 32 | tensor)
    uniform = (words >> np.uint32(8)).astype(np.float64) * 2.0**-24
    return (bound * (2 * uniform - 1)).astype(np.float32).T.reshape(-1)[:count]


def initial_adapter(description: RunDescription) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a new adapter begins with: A uniform, B zero."""
    adapter, model = description.adapter, description.model
    assert adapter is not None
    for number, module in enumerate(peft_format.modules(model.family, model.num_layers, adapter.targets)):
        rows, columns = model.tensors[f"{module}.weight"]
        down, up = peft_format.names_of(module)
        count = adapter.rank * columns
        yield down, uniform_values(count, 1 / math.sqrt(columns), 2 * number, description.settings.seed).reshape(adapter.rank, columns)
        yield up, np.zeros((rows, adapter.rank), dtype=np.float32)


def file_tensors(path: Path, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters in a model file; FileError if they are those of another model."""
    file, found, _ = read_model(path)
    if found.tensors != model.tensors:
        bad_file(path, "model", "the tensors are not those of the run")
    for name in model.tensors:
        file.verify_tensor(name)
        yield name, file.f32(name)


# ---- data ------------------------------------------------------------------------------------------------------------


def joined_texts(shards: list[TokenShard], seq_len: int) -> list[np.ndarray]:
    """The texts that windows lie in: each a shard, but one too short for a window joins the text before it, or the next one if
    it is the first (TokenDataset in llmc/train/data_loader.h)."""
    texts: list[list[np.ndarray]] = []
    for shard in shards:
        if texts and (shard.count <= seq_len or sum(part.size for part in texts[-1]) <= seq_len):
            texts[-1].append(shard.tokens)
        else:
            texts.append([shard.tokens])
    return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in texts]


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows of documents, as pack_rows() of llmc/train/packing.h makes them: the longest first, each into the fullest row that has room;
    of equally full ones into that which became so last."""
    rows: list[list[int]] = []
    room: list[tuple[int, int, int]] = []  # of each row that is not full: tokens that fit, since when, and its number; ascending
    for turn, document in enumerate(sorted(range(len(lengths)), key=lambda each: -lengths[each])):
        length, left, row = lengths[document], capacity, len(rows)
        if (at := bisect.bisect_left(room, (length,))) < len(room):
            left, _, row = room.pop(at)
        else:
            rows.append([])
        rows[row].append(document)
        if left > length:
            bisect.insort(room, (left - length, -turn, row))
    return rows


class Rows(NamedTuple):
    """Some rows of the run, i64 [number, T] each. labels: IGNORED_LABEL where none is learned. starts: where in the row the document of
    each token begins, for an attention that sees its own document alone; None: a row is one document. places: of each row the
    documents, by number, beginning and end."""

    inputs: np.ndarray
    labels: np.ndarray
    starts: np.ndarray | None
    places: list[list[tuple[int, int, int]]]


class Windows:
    """The training shards as rows of T tokens, handed out in the run's order. A row of plain text is T + 1 tokens, of which neighbours
    share one. A row of shards with documents has whole ones, without their last tokens, and zeros behind them."""

    def __init__(self, description: RunDescription, pattern: str):
        self.settings = settings = description.settings
        self.seq_len = settings.seq_len
        paths = sorted(path for path in glob.glob(pattern) if os.path.isfile(path))
        if not paths:
            raise FileError(cli.BAD_FILE, f"{escaped(pattern, 300)}: no file matches this pattern in "
                            f"{escaped(os.getcwd(), 300)}. Give the shards of the run with --train")
        shards = [TokenShard(path) for path in paths]
        check_shards(shards, description)
        self.documents: list[tuple[np.ndarray, np.ndarray]] = []  # tokens, and which of them are learned
        self.texts: list[np.ndarray] = []
        self.end_of_document = shards[0].end_of_document_id
        if any(shard.starts is not None for shard in shards):
            self.documents = [document for shard in shards
                              for document in (pairs_of if settings.dpo_beta else documents_of)(shard, self.seq_len + 1)]
        else:
            self.texts = joined_texts(shards, self.seq_len)
        self.masks = settings.packed if self.documents else settings.document_mask
        if self.masks and any(description.model.window(layer) for layer in range(description.model.num_layers)):
            bad_file(shards[0].path, "documents", "expected a model without windows: transformers takes one mask for all layers")
        together = 2 if settings.dpo_beta else 1  # documents that share a row
        lengths = [sum(tokens.size - 1 for tokens, _ in self.documents[number:number + together])
                   for number in range(0, len(self.documents), together)]
        units = best_fit(lengths, self.seq_len) if settings.packed else [[number] for number in range(len(lengths))]
        self.rows_of = [[unit * together + i for unit in row for i in range(together)] for row in units]
        self.first_window = np.cumsum([0] + [(text.size - 1) // self.seq_len for text in self.texts])
        if not (windows := len(self.rows_of) + int(self.first_window[-1])):
            bad_file(shards[0].path, "documents", f"none has at most {self.seq_len + 1} tokens and a learned one")
        self.order = DataOrder(windows, settings.seed)

    def rows(self, begin: int, number: int) -> Rows:
        """Those at positions begin to begin + number - 1 of the run."""
        return self.read(self.order.windows(begin, number).tolist())

    def read(self, windows: Iterable[int]) -> Rows:
        read = self._packed if self.documents else self._of_text
        inputs, labels, starts = zip(*map(read, windows), strict=True)
        return Rows(np.stack(inputs), np.stack(labels), np.stack(starts) if self.masks else None,
                    list(map(self._places, windows)) if self.documents else [])

    def _places(self, row: int) -> list[tuple[int, int, int]]:
        places, begin = [], 0
        for document in self.rows_of[row]:
            end = begin + self.documents[document][0].size - 1
            places.append((document, begin, end))
            begin = end
        return places

    def _packed(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, labels = np.zeros(self.seq_len, np.int64), np.full(self.seq_len, IGNORED_LABEL, np.int64)
        starts, begin = np.zeros(self.seq_len, np.int64), 0
        for document in self.rows_of[row]:
            tokens, learned = self.documents[document]
            end = begin + tokens.size - 1
            inputs[begin:end] = tokens[:-1]
            labels[begin:end] = np.where(learned[1:], tokens[1:].astype(np.int64), IGNORED_LABEL)
            starts[begin:end], begin = begin, end
        starts[begin:] = begin
        return inputs, labels, starts

    def _of_text(self, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        text = int(np.searchsorted(self.first_window, window, side="right")) - 1
        begin = (window - int(self.first_window[text])) * self.seq_len
        tokens = self.texts[text][begin:begin + self.seq_len + 1].astype(np.int64)
        inputs, labels, starts = tokens[:-1], tokens[1:], np.zeros(self.seq_len, np.int64)
        if self.masks:
            ends = inputs == self.end_of_document
            labels = np.where(ends, IGNORED_LABEL, labels)
            starts[1:] = np.maximum.accumulate(np.where(ends[:-1], np.arange(1, self.seq_len), 0))
        return inputs, labels, starts


def documents_of(shard: TokenShard, longest: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The documents that are trained on. One of more than `longest` tokens ends behind its last answer that fits."""
    if shard.starts is None:
        bad_file(shard.path, "version", "got plain text, expected conversations as in the other shards")
    learned = shard.learned()
    for begin, end in zip(shard.starts[:-1], shard.starts[1:]):
        if end - begin > longest:
            ends = np.flatnonzero(learned[begin + 1:begin + longest] & ~learned[begin + 2:begin + longest + 1])
            end = begin + 2 + ends[-1] if ends.size else begin
        if learned[begin + 1:end].any():
            yield shard.tokens[begin:end], learned[begin:end]


def pairs_of(shard: TokenShard, longest: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The documents of pairs that are trained on, of each pair the chosen and the rejected one."""
    if not shard.of_pairs:
        bad_file(shard.path, "version", "got no pairs, which --objective dpo needs")
    learned, starts = shard.learned(), shard.starts
    assert starts is not None
    for first, second, end in zip(starts[:-1:2], starts[1::2], starts[2::2], strict=True):
        pair = [(shard.tokens[begin:stop], learned[begin:stop]) for begin, stop in ((first, second), (second, end))]
        if end - first - 2 < longest and all(of_answer[1:].any() for _, of_answer in pair):
            yield from pair


def check_shards(shards: list[TokenShard], description: RunDescription) -> None:
    """Refuses damaged shards, and shards other than those of the run."""
    if (tokens := sum(shard.count for shard in shards)) <= description.settings.seq_len:
        bad_file(shards[0].path, "count", f"got {tokens} tokens in all shards, expected more than {description.settings.seq_len}")
    for shard in shards:
        if shard.vocab_size > description.model.vocab_size:
            bad_file(shard.path, "vocab_size", f"got {shard.vocab_size}, expected at most "
                     f"{description.model.vocab_size}")
        shard.verify()
    found = [{"name": os.path.basename(shard.path), "tokens": shard.count, "xxh3": header_hash(shard.path)}
             for shard in shards]
    if description.shards and found != description.shards:
        names = ", ".join(str(record["name"]) for record in found)
        bad_file(os.path.dirname(shards[0].path), "shards", f"got {escaped(names, 300)}, not the shards of the run")


def header_hash(path: str) -> str:
    with open(path, "rb") as file:
        return f"{xxhash.xxh3_64_intdigest(file.read(HEADER_BYTES)):016x}"


# ---- training --------------------------------------------------------------------------------------------------------


def make_model(description: RunDescription, model_file: str, device: str) -> torch.nn.Module:
    """The model in fp32 with the weights that the run began with."""
    torch, transformers = libraries()
    config = exported_config(description.model, "model") | {"torch_dtype": "float32", "dtype": "float32"}
    config = transformers.AutoConfig.for_model(**config, attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config)
    learn_padding(model, description.model)
    tensors = (file_tensors(Path(model_file), description.model) if model_file
               else initial_tensors(description.model, description.settings.seed))
    parameters = named_parameters(model, description.model)
    with torch.no_grad():
        for name, values in tensors:
            parameters[name].copy_(torch.from_numpy(np.array(values)))
    return (with_adapter(model, description) if description.adapter else model).to(device).train()


def with_adapter(model: torch.nn.Module, description: RunDescription) -> torch.nn.Module:
    """The model as PEFT trains an adapter beside it."""
    torch, _ = libraries()
    import peft
    adapter = description.adapter
    assert adapter is not None
    names = peft_format.target_modules(description.model.family, adapter.targets)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=names))
    parameters = {name.replace(".default.", "."): parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    tensors = {peft_format.PREFIX + name: values for name, values in initial_adapter(description)}
    if parameters.keys() != tensors.keys():
        raise FileError(INTERNAL, f"PEFT trains {len(parameters)} tensors, expected the {len(tensors)} of the adapter")
    with torch.no_grad():
        for name, values in tensors.items():
            parameters[name].copy_(torch.from_numpy(values))
    return adapted


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW that decays only matrices."""
    torch, _ = libraries()
    groups = [{"params": [p for p in trained(model) if p.ndim >= 2], "weight_decay": settings.weight_decay},
              {"params": [p for p in trained(model) if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)


def gradient_norm(model: torch.nn.Module) -> torch.Tensor:
    """The norm of all gradients, summed in double: with ten million squares in fp32 clip_grad_norm_ is off by 5e-5 on the CPU."""
    torch, _ = libraries()
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in trained(model)]
    return torch.linalg.vector_norm(torch.stack(norms))


def document_arguments(starts: torch.Tensor) -> dict[str, torch.Tensor]:
    """What makes a model of transformers see each document of a row for itself: a causal mask without the keys before the document,
    and positions that begin with it. `starts`: i64 [B, T]."""
    torch, _ = libraries()
    tokens = torch.arange(starts.shape[1], device=starts.device)
    seen = (tokens <= tokens[:, None]) & (tokens >= starts[:, :, None])
    return {"attention_mask": seen[:, None], "position_ids": tokens - starts}


class Trainer:
    """Takes one step after the other."""

    def __init__(self, description: RunDescription, windows: Windows, model: torch.nn.Module, dtype: str):
        self.settings, self.windows, self.model, self.dtype = description.settings, windows, model, dtype
        self.optimizer = make_optimizer(model, self.settings)
        self.device = next(model.parameters()).device
        self.steps_done = 0
        if self.settings.dpo_beta:
            torch, _ = libraries()
            self.reference = torch.zeros(len(windows.documents), dtype=torch.float64, device=self.device)
            rows = windows.read(range(len(windows.rows_of)))
            for first in range(0, len(rows.inputs), self.settings.micro_batch):
                with torch.no_grad():
                    documents, values = self.answers(rows, first)
                self.reference[documents] = values

    def precision(self) -> AbstractContextManager:
        torch, _ = libraries()
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.dtype == "bf16" else nullcontext()

    def gradients(self, begin: int) -> float:
        """Accumulates the gradients of the step whose data begins at window `begin`. Returns the mean loss, over all of its labels
        that count."""
        torch, _ = libraries()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        batch, beta = self.settings.micro_batch, self.settings.dpo_beta
        rows = self.windows.rows(begin, batch * self.settings.accumulation)
        count = sum(map(len, rows.places)) // 2 if beta else int((rows.labels != IGNORED_LABEL).sum())
        for first in range(0, len(rows.inputs), batch):
            if beta:
                documents, values = self.answers(rows, first)
                rewards = beta * (values - self.reference[documents])
                part = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).sum()
            else:
                part = self.losses(rows, first, "sum")
            (part / count).backward()
            loss += part.detach().double()
        return float(loss) / count

    def losses(self, rows: Rows, first: int, reduction: str) -> torch.Tensor:
        """Of the labels of the micro-batch whose first row is `first`."""
        torch, _ = libraries()
        batch = self.settings.micro_batch
        inputs, labels = (torch.from_numpy(each[first:first + batch]).to(self.device) for each in (rows.inputs, rows.labels))
        of_documents = {} if rows.starts is None else document_arguments(torch.from_numpy(rows.starts[first:first + batch]).to(self.device))
        with self.precision():
            logits = self.model(inputs, use_cache=False, **of_documents).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    def answers(self, rows: Rows, first: int) -> tuple[list[int], torch.Tensor]:
        """The documents of a micro-batch, and log p of the learned tokens of each."""
        torch, _ = libraries()
        losses = self.losses(rows, first, "none").view(-1, self.settings.seq_len)
        places = [(row, *place) for row, found in enumerate(rows.places[first:first + len(losses)]) for place in found]
        values = torch.stack([-losses[row, begin:end].sum(dtype=torch.float64) for row, _, begin, end in places])
        return [document for _, document, _, _ in places], values

    def step(self) -> dict[str, Any]:
        """Takes one step. Returns its record."""
        torch, _ = libraries()
        began = time.monotonic()
        number, settings = self.steps_done + 1, self.settings
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients(self.steps_done * settings.accumulation * settings.micro_batch)
        norm = gradient_norm(self.model)
        torch.nn.utils.clip_grads_with_norm_(trained(self.model), settings.grad_clip or math.inf, norm.float())
        rate = learning_rate(settings, number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.steps_done = number
        return {"type": "step", "step": number, "loss": loss, "lr": rate, "grad_norm": float(norm),
                "seconds": round(time.monotonic() - began, 4)}


def train(trainer: Trainer, steps: int, output: TextIO) -> list[dict[str, Any]]:
    """Takes `steps` steps and writes the record of each at once. Returns all records."""
    records = []
    progress = cli.Progress("training", steps)
    for _ in range(steps):
        records.append(trainer.step())
        print(json.dumps(records[-1]), file=output, flush=True)
        progress.advance(1)
        if not math.isfinite(records[-1]["loss"]):
            raise FileError(INTERNAL, f"step {records[-1]['step']}: the loss of the reference is not finite")
    progress.finish()
    return records


# ---- comparing -------------------------------------------------------------------------------------------------------


def read_losses(log: Path, steps: int) -> list[dict[str, Any]]:
    """The records of steps 1 to `steps` in a run's log. FileError if one is missing, was skipped or has no loss."""
    found = read_run(log).steps
    for step in range(1, steps + 1):
        record = found.get(step)
        if record is None:
            bad_file(log, f"step {step}", "missing: the run has not come that far. Compare fewer with --steps")
        if record.get("skipped") or not all(is_number(record.get(key)) for key in ("loss", "lr", "grad_norm")):
            bad_file(log, f"step {step}", "skipped or not finite: the reference has no such step")
    return [found[step] for step in range(1, steps + 1)]


def largest(got: list[float], want: list[float]) -> tuple[float, int]:
    """The largest |got - want| / |want| and the step, from 1, where it is."""
    relative = [abs(g - w) / max(abs(w), sys.float_info.min) for g, w in zip(got, want, strict=True)]
    worst = max(range(len(relative)), key=relative.__getitem__)
    return relative[worst], worst + 1


def compare(log: Path, reference: list[dict[str, Any]], tolerance: float, smooth: int) -> dict[str, Any]:
    """Compares a run's log with the reference. FileError if its learning rates do not follow from its settings."""
    run = read_losses(log, len(reference))
    rate, step = largest([record["lr"] for record in run], [record["lr"] for record in reference])
    if rate > LR_TOLERANCE:
        bad_file(log, f"step {step}", f"learning rate: got {run[step - 1]['lr']:g}, expected "
                 f"{reference[step - 1]['lr']:g}. The log is not that of these settings")
    losses = [smoothed([record["loss"] for record in records], smooth) for records in (run, reference)]
    loss, loss_step = largest(*losses)
    norm, norm_step = largest([record["grad_norm"] for record in run], [record["grad_norm"] for record in reference])
    return {"type": "comparison", "steps": len(run), "smooth": smooth, "loss_max_relative": loss,
            "loss_step": loss_step, "loss_got": losses[0][loss_step - 1], "loss_expected": losses[1][loss_step - 1],
            "grad_norm_max_relative": norm, "grad_norm_step": norm_step, "tolerance": tolerance,
            "passed": loss <= tolerance}


def report(verdict: dict[str, Any]) -> None:
    smooth = f", median of {verdict['smooth']} steps," if verdict["smooth"] > 1 else ""
    print(f"{'passed' if verdict['passed'] else 'FAILED'}: {verdict['steps']} steps, largest relative difference of "
          f"the loss{smooth} {verdict['loss_max_relative']:.3g} at step {verdict['loss_step']} "
          f"({verdict['loss_got']:.6f}, PyTorch {verdict['loss_expected']:.6f}), tolerance {verdict['tolerance']:g}; "
          f"of the gradient norm {verdict['grad_norm_max_relative']:.3g} at step {verdict['grad_norm_step']}",
          file=sys.stderr)


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, prog="train_reference.py")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory or config.json of train_llama")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32",
                        help="bf16: autocast with fp32 weights (default: fp32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--steps", type=cli.number_in(1, 1e12, int), metavar="N",
                        help="only the first N steps; the schedule stays that of the run")
    parser.add_argument("--train", metavar="GLOB", help="where the run's shards are now")
    parser.add_argument("--model", metavar="FILE", help="where the run's model file is now")
    parser.add_argument("--threads", type=cli.number_in(1, 4096, int), metavar="N", help="CPU threads of PyTorch")
    parser.add_argument("--against", type=Path, metavar="LOG", help="compare with a log.jsonl or run directory")
    parser.add_argument("--tolerance", type=cli.number_in(0, 1), default=1e-4, metavar="X",
                        help="largest relative difference of a loss (default: 1e-4)")
    parser.add_argument("--smooth", type=cli.number_in(1, 1e9, int), default=1, metavar="N",
                        help="compare running medians over N steps (default: 1)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the records here, not to stdout")
    return parser.parse_args()


def prepare_device(options: argparse.Namespace) -> None:
    torch, _ = libraries()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise FileError(ENVIRONMENT, "--device cuda: PyTorch finds no GPU. Use --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = False


def main() -> int:
    options = arguments()
    description = read_description(options.run)
    steps = options.steps or description.settings.steps
    if steps > description.settings.steps:
        raise FileError(USAGE, f"--steps: got {steps}, expected at most the {description.settings.steps} of the run")
    if options.against:
        read_losses(options.against, steps)  # a log that does not reach that far is refused before the work
    windows = Windows(description, options.train or description.settings.train)
    prepare_device(options)
    model = make_model(description, options.model or description.settings.model_file, options.device)
    trainer = Trainer(description, windows, model, options.dtype)
    with open(options.output, "w", encoding="utf-8") if options.output else nullcontext(sys.stdout) as output:
        records = train(trainer, steps, output)
        if not options.against:
            return cli.OK
        verdict = compare(options.against, records, options.tolerance, options.smooth)
        print(json.dumps(verdict), file=output)
    report(verdict)
    return cli.OK if verdict["passed"] else INTERNAL


if __name__ == "__main__":
    cli.run(main)
