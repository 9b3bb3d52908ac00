#!/usr/bin/env python3
"""Trains one of the two tiny models of the repository on stories and saves it in the Hugging Face layout.

  pythia  GPT-NeoX: parallel residual, rotary on a quarter of each head, untied, float16, padded vocabulary rows
  llama   Llama: 3 query heads per key-value head, llama3 RoPE scaling, tied embeddings, bfloat16

Needs PyTorch, transformers 5 and tokenizers. The tokenizer comes from train_tokenizer.py in the matching style.
With --minutes the learning rate falls over the given time instead of over the steps, so the result depends on the machine.
"""

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import GenerationConfig, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from command_line import EXIT_BAD_INPUT, EXIT_DISK, InputError, Parser, read_stories, real_number, whole_number, write_atomically

CONTEXT = 512  # positions a model knows, and the length of a training window
PROMPTS = ["Once upon a time", "Do you know", "Long ago,"]
VAL_BATCH = 32
EXIT_ENVIRONMENT = 4
EXIT_NON_FINITE = 6


class EnvironmentProblem(Exception):
    """The machine lacks something that was asked for."""


@dataclass(frozen=True)
class Special:
    """The special tokens of a family; `starts` tells whether a document begins with `bos`."""

    bos: str
    eos: str
    pad: str | None
    starts: bool


SPECIAL = {
    "pythia": Special("<|endoftext|>", "<|endoftext|>", "<|padding|>", starts=False),
    "llama": Special("<|begin_of_text|>", "<|end_of_text|>", None, starts=True),
}
SAVED_DTYPE = {"pythia": torch.float16, "llama": torch.bfloat16}


def padded_rows(tokens: int) -> int:
    """The next multiple of 128 that leaves at least 8 unused rows."""
    return (tokens + 8 + 127) // 128 * 128


def build_pythia(tokens: int, bos: int, eos: int) -> PreTrainedModel:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=padded_rows(tokens),
            hidden_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=512,
            hidden_act="gelu",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            max_position_embeddings=CONTEXT,
            use_parallel_residual=True,
            attention_bias=True,
            tie_word_embeddings=False,
            layer_norm_eps=1e-5,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )


def build_llama(tokens: int, bos: int, eos: int) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokens,
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=512,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": CONTEXT // 2,
            },
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )


BUILD = {"pythia": build_pythia, "llama": build_llama}


@dataclass(frozen=True)
class Corpus:
    tokens: torch.Tensor  # (N,) all documents, one after the other
    starts: torch.Tensor  # (D,) where a document begins


def encode(stories: list[str], tokenizer: Tokenizer, special: Special) -> Corpus:
    vocab = tokenizer.get_vocab()
    bos, eos = vocab[special.bos], vocab[special.eos]
    ids: list[int] = []
    starts: list[int] = []
    for encoding in tokenizer.encode_batch(stories, add_special_tokens=False):
        starts.append(len(ids))
        ids += ([bos] if special.starts else []) + encoding.ids + [eos]
    return Corpus(torch.tensor(ids), torch.tensor(starts))


def windows(corpus: Corpus, offsets: torch.Tensor) -> torch.Tensor:
    """(B, CONTEXT + 1) token windows at the given offsets, wrapping at the end of the corpus."""
    span = torch.arange(CONTEXT + 1, device=offsets.device)
    return corpus.tokens[(offsets[:, None] + span) % corpus.tokens.numel()]


def sample_offsets(corpus: Corpus, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Half of the windows begin with a document, as a prompt does; the others begin anywhere."""
    aligned = torch.randint(corpus.starts.numel(), (batch // 2,), generator=generator)
    anywhere = torch.randint(corpus.tokens.numel(), (batch - batch // 2,), generator=generator)
    return torch.cat([corpus.starts[aligned.to(corpus.starts.device)], anywhere.to(corpus.tokens.device)])


def window_loss(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: PreTrainedModel, corpus: Corpus) -> float:
    """Mean loss over whole windows of the corpus, each token predicted once, in the model's own precision."""
    count = (corpus.tokens.numel() - 1) // CONTEXT
    if count == 0:
        raise InputError(f"the validation text is shorter than {CONTEXT} tokens")
    offsets = torch.arange(count, device=corpus.tokens.device) * CONTEXT
    total = sum(window_loss(model, windows(corpus, part)).item() * part.numel() for part in offsets.split(VAL_BATCH))
    return total / count


def optimizer_for(model: PreTrainedModel, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=next(model.parameters()).is_cuda)


def progress(step: int, started: float, options: argparse.Namespace) -> float:
    """The share of the training that is done, by time if a time is given, else by steps."""
    by_step = step / options.steps
    return max(by_step, (time.monotonic() - started) / (60 * options.minutes)) if options.minutes else by_step


def rate_factor(step: int, done: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to one percent."""
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return min((step + 1) / warmup, 1.0) * cosine


def train(model: PreTrainedModel, training: Corpus, validation: Corpus, options: argparse.Namespace) -> int:
    """Trains in place and returns the number of steps made."""
    device = training.tokens.device
    optimizer = optimizer_for(model, options.learning_rate, options.weight_decay)
    generator = torch.Generator().manual_seed(options.seed)
    started = time.monotonic()
    step = 0
    while step < options.steps and (done := progress(step, started, options)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate_factor(step, done, options.warmup)
        batch = windows(training, sample_offsets(training, options.batch, generator))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = window_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % options.report_every == 0:
            value = loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(f"loss {value} at step {step}")
            model.eval()
            held_out = validation_loss(model, validation)
            model.train()
            print(f"step {step} train {value:.4f} val {held_out:.4f} seconds {time.monotonic() - started:.0f}", flush=True)
    return step


def add_older_keys(path: Path, family: str) -> None:
    """Adds the RoPE and dtype keys that transformers 4 reads; transformers 5 takes rope_parameters and dtype."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config["rope_parameters"])
    config["torch_dtype"] = config["dtype"]
    if family == "pythia":
        config["rotary_pct"] = rope["partial_rotary_factor"]
        config["rotary_emb_base"] = rope["rope_theta"]
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
    write_atomically(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(model: PreTrainedModel, family: str, tokenizer_path: Path, directory: Path) -> None:
    special = SPECIAL[family]
    model.generation_config = GenerationConfig(bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id)
    model.to(SAVED_DTYPE[family]).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    add_older_keys(directory / "config.json", family)
    if tokenizer_path.resolve() != (directory / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_path, directory / "tokenizer.json")
    tokens = {"bos_token": special.bos, "eos_token": special.eos}
    if special.pad:
        tokens["pad_token"] = special.pad
    write_atomically(directory / "special_tokens_map.json", json.dumps(tokens, indent=2) + "\n")
    settings = tokens | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(directory / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def print_samples(model: PreTrainedModel, tokenizer: Tokenizer, device: torch.device, max_new: int) -> None:
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        for temperature in (0.0, 0.8):
            choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new,
                                 pad_token_id=model.config.eos_token_id, **choice)
            print(f"--- temperature {temperature}\n{tokenizer.decode(out[0].tolist())}\n", flush=True)


def run(options: argparse.Namespace) -> None:
    special = SPECIAL[options.family]
    try:
        tokenizer = Tokenizer.from_file(str(options.tokenizer))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"cannot read {options.tokenizer}: {error}") from None
    vocab = tokenizer.get_vocab()
    bos, eos = vocab[special.bos], vocab[special.eos]
    if bos is None or eos is None:
        missing = special.bos if bos is None else special.eos
        raise InputError(f"{options.tokenizer} has no {missing}: train it in the style of this family")
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise EnvironmentProblem("--device cuda, but PyTorch finds no GPU")
    device = torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")
    torch.manual_seed(options.seed)
    training, validation = (
        Corpus(corpus.tokens.to(device), corpus.starts.to(device))
        for corpus in (encode(read_stories(paths), tokenizer, special) for paths in (options.train, [options.val]))
    )
    model = BUILD[options.family](tokenizer.get_vocab_size(), bos, eos).to(device)
    print(f"{options.family}: {model.num_parameters()} parameters, {training.tokens.numel()} training tokens, "
          f"{validation.tokens.numel()} validation tokens, {device}", flush=True)
    steps = train(model.train(), training, validation, options)
    model.eval()
    before = validation_loss(model, validation)
    options.output.mkdir(parents=True, exist_ok=True)
    save(model, options.family, options.tokenizer, options.output)
    rounded = type(model).from_pretrained(options.output, dtype=torch.float32).to(device).eval()
    after = validation_loss(rounded, validation)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{options.family}: {steps} steps of {options.batch} x {CONTEXT} tokens on {name}; "
          f"val loss {before:.4f} in float32, {after:.4f} after rounding to {SAVED_DTYPE[options.family]}", flush=True)
    print_samples(rounded, tokenizer, device, options.sample_tokens)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Train a tiny model on stories and save it in the Hugging Face layout.")
    parser.add_argument("family", choices=sorted(BUILD), help="which model to train")
    parser.add_argument("--train", nargs="+", type=Path, required=True, metavar="TEXT",
                        help="training text, stories separated as make_stories.py does")
    parser.add_argument("--val", type=Path, required=True, metavar="TEXT", help="validation text")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE",
                        help="tokenizer.json in the style of the family")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="directory of the model")
    parser.add_argument("--steps", type=whole_number(1, 10_000_000), default=8000, metavar="N", help="steps at most (default 8000)")
    parser.add_argument("--minutes", type=real_number(0, 10_000), default=0.0, metavar="M", help="end after this time (default 0: no limit)")
    parser.add_argument("--batch", type=whole_number(2, 65536), default=128, metavar="B", help="windows a step (default 128)")
    parser.add_argument("--learning-rate", type=real_number(1e-8, 1), default=3e-3, metavar="R", help="peak rate (default 0.003)")
    parser.add_argument("--weight-decay", type=real_number(0, 10), default=0.1, metavar="W", help="decay of matrices (default 0.1)")
    parser.add_argument("--warmup", type=whole_number(1, 1_000_000), default=200, metavar="N", help="warm-up steps (default 200)")
    parser.add_argument("--report-every", type=whole_number(1, 1_000_000), default=500, metavar="N",
                        help="steps between lines of the log (default 500)")
    parser.add_argument("--sample-tokens", type=whole_number(1, CONTEXT - 16), default=320, metavar="N",
                        help="longest sample (default 320)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default auto: the GPU if there is one")
    parser.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=1, metavar="S", help="random seed (default 1)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except FloatingPointError as error:
        print(f"error: training diverged: {error}", file=sys.stderr)
        return EXIT_NON_FINITE
    except EnvironmentProblem as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    except OSError as error:
        print(f"error: cannot write to {options.output}: {error}", file=sys.stderr)
        return EXIT_DISK
    return 0


if __name__ == "__main__":
    sys.exit(main())
