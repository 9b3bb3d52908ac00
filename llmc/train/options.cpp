#include "llmc/train/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/threads.h"
#include "llmc/model/config.h"
#include "llmc/model/presets.h"
#include "llmc/train/fault_injection.h"

namespace weft {

namespace {

constexpr std::int64_t kWarmupShare = 4;  // the default warm-up is at most one part of so many
constexpr std::int64_t kMaxRanks = 1 << 16;
constexpr std::int64_t kMaxLocalRanks = 256;                       // that one process starts
constexpr std::int64_t kMaxRunTokens = 1'000'000'000'000'000'000;  // so that counts of tokens fit into 64 bits

constexpr const char* kFooter =
    "A run directory resumes by itself: the same command goes on from the newest\n"
    "checkpoint that is whole. --steps may grow on the way; options that change the\n"
    "numbers may not.\n"
    "Signals: INT, TERM and HUP save and stop, a second INT or TERM stops at once,\n"
    "USR1 saves and goes on.\n"
    "Exit codes: 0 ok, 1 internal error or failed comparison, 2 usage, 3 bad input\n"
    "file, 4 environment (GPU, another rank, run directory in use), 5 out of memory\n"
    "or disk, 6 loss or gradient not finite, 130 and 143 stopped by a signal after\n"
    "saving.\n"
    "\n"
    "Example:\n"
    "  train_llama --config tiny --train 'data/mine/train_*.bin' \\\n"
    "              --val 'data/mine/val_*.bin' --out runs/mine";

void add_model_and_data(OptionTable& table, TrainSettings& s) {
  table.group("Model");
  table.text("config", s.config, "NAME|FILE",
             "train from scratch: " + preset_list() + "; or the shape in a Hugging Face config.json");
  table.integer("vocab-size", s.vocab_size, 0, 1'000'000,
                "rows of a new model's embedding; 0: the vocabulary of the shards, padded to a multiple of 128");
  table.text("model", s.model, "FILE", "or go on from the weights of a model file");
  table.text("adapter", s.adapter, "FILE",
             "with an adapter in the weights of --model; with --lora-r this adapter is trained further");
  table.choice("norm", s.norm, {"rmsnorm", "layernorm"}, "kind of normalisation, with --config");
  table.group("Data and output");
  table.text("train", s.train, "GLOB", "token shards to train on (quote the pattern)");
  table.text("val", s.val, "GLOB", "token shards to measure on");
  table.flag("document-mask", s.document_mask,
             "plain text: attention sees its own document alone, and positions begin with it, as conversations always "
             "have it");
  table.flag("no-pack", s.no_pack,
             "conversations: a row of --seq-len for each, in the place of rows that hold several");
  table.text("tokenizer", s.tokenizer, "FILE",
             "tokenizer.json of the shards; default: that of --model, else "
             "tokenizer.json beside the training shards");
  table.text("out", s.out, "DIR", "run directory: log and checkpoints");
  table.choice("resume", s.resume, {"auto", "must", "never"},
               "auto goes on from the newest whole checkpoint, must insists on the newest, never refuses a used "
               "directory");
  table.integer("save-every", s.save_every, 0, kMaxSteps, "steps between checkpoints; 0 saves only at the end");
  table.integer("keep", s.keep, 2, 1'000'000, "checkpoints to keep");
  table.flag("keep-best", s.keep_best,
             "save at each new lowest loss on --val, and keep the newest such checkpoint as well");
}

void add_optimization(OptionTable& table, TrainSettings& s) {
  table.group("Optimisation");
  table.integer("steps", s.steps, 1, kMaxSteps, "optimizer steps of the whole run");
  table.number("epochs", s.epochs, 0, 1'000'000,
               "in the place of --steps: how often the run sees all of --train; 0: --steps decides");
  table.integer("micro-batch", s.micro_batch, 1, 1'000'000, "sequences computed at once");
  table.integer("seq-len", s.seq_len, 1, 1 << 24, "tokens of a sequence");
  table.integer(
      "batch-tokens", s.batch_tokens, 0, kMaxSteps,
      "tokens of a step, a multiple of micro-batch x seq-len: the rest is accumulated; 0: one micro-batch, of "
      "each of --virtual-ranks");
  table.number("lr", s.lr, 0, 10, "peak learning rate (doc/hyperparameters.md)");
  table.default_note("lr", "by the size of the model, with --model a tenth of it, with dpo a tenth again");
  table.number("min-lr-ratio", s.min_lr_ratio, 0, 1, "final learning rate as a share of the peak");
  table.integer("warmup-steps", s.warmup_steps, 0, kMaxSteps, "steps of linear warm-up");
  table.default_note("warmup-steps", "200, at most a quarter of the steps");
  table.choice("schedule", s.schedule, schedule_names(), "shape after the warm-up");
  table.number("wsd-decay-fraction", s.wsd_decay_fraction, 0, 1, "share of all steps that decays, with wsd");
  table.choice("optimizer", s.optimizer, optimizer_names(),
               "muon: the matrices of the blocks by Muon, the rest by AdamW (doc/hyperparameters.md)");
  table.number("muon-lr", s.muon_lr, 0, 10, "Muon's peak learning rate, on the schedule of --lr");
  table.default_note("muon-lr", "--lr");
  table.number("muon-momentum", s.muon_momentum, 0, 0.9999999, "Muon");
  table.number("weight-decay", s.weight_decay, 0, 10, "decay of the matrices");
  table.number("beta1", s.beta1, 0, 0.9999999, "AdamW");
  table.number("beta2", s.beta2, 0, 0.9999999, "AdamW");
  table.number("eps", s.eps, 1e-20, 1, "AdamW");
  table.number("grad-clip", s.grad_clip, 0, 1e9, "largest gradient norm; 0: no clipping");
  table.number("dropout", s.dropout, 0, 0.99, "probability, on each branch before it is added to the residual stream");
  table.integer("seed", s.seed, 0, std::numeric_limits<std::int64_t>::max(),
                "of initialisation, data order, dropout and samples");
  table.integer("virtual-ranks", s.virtual_ranks, 1, kMaxRanks,
                "compute what so many ranks would, one after the other, and add their gradients in the order of the "
                "ranks. The number of ranks that share the step is a divisor of it");
  table.default_note("virtual-ranks", "1, or the number of ranks of the run");
}

void add_objective(OptionTable& table, TrainSettings& s) {
  table.group("Preferences (doc/fine_tuning.md)");
  table.choice("objective", s.objective, {"cross-entropy", "dpo"},
               "dpo: learn from shards of pairs which of two answers is preferred, beside the --model as it was");
  table.number("dpo-beta", s.dpo_beta, 1e-6, 1000, "with --objective dpo: the larger, the closer to --model");
}

void add_adapter(OptionTable& table, TrainSettings& s) {
  table.group("LoRA: train an adapter beside a frozen --model (doc/fine_tuning.md)");
  table.integer("lora-r", s.lora_r, 0, 4096, "rank of the adapter's matrices; 0: no adapter, all weights are trained");
  table.number("lora-alpha", s.lora_alpha, 0, 1e6, "the adapter's product is multiplied by alpha / r");
  table.default_note("lora-alpha", "twice --lora-r");
  table.text("lora-targets", s.lora_targets, "LIST",
             "matrices of each block that get one: all, or some of q,k,v,o,gate,up,down; of a GPT-NeoX qkv,o,up,down");
  table.number("lora-dropout", s.lora_dropout, 0, 0.99, "probability, of the adapter's inputs");
}

void add_ranks(OptionTable& table, TrainSettings& s) {
  table.group("Several GPUs (doc/several_gpus.md)");
  table.integer(
      "gpus", s.gpus, 0, kMaxLocalRanks,
      "train on so many GPUs of this machine, one process each; 0: as many ranks as torchrun, srun or mpirun have "
      "started, or one");
  table.choice("shard", s.shard, {"none", "optimizer", "gradients", "parameters"},
               "what the ranks divide: nothing, the optimizer's state and the update, on GPUs gradients too, or "
               "parameters too. The numbers are the same");
  table.number("comm-timeout", s.comm_timeout, 1, 86400,
               "seconds that a rank waits for another one before the run ends");
}

void add_execution(OptionTable& table, TrainSettings& s) {
  table.group("Execution");
  table.choice("device", s.device, {"auto", "cuda", "cpu"}, "auto takes the GPU where there is one");
  table.choice("precision", s.precision, {"auto", "bf16", "fp32", "fp8"},
               "auto: bf16 on a GPU, fp32 on the CPU. fp8: the GEMMs of the blocks in 8 bits, the rest as with auto "
               "(doc/precision.md)");
  table.choice(
      "moments", s.moments, {"fp32", "bf16"},
      "AdamW's moments; bf16 with random rounding saves 4 bytes a parameter, on a GPU with --precision bf16 or fp8");
  table.choice("recompute", s.recompute, {"none", "norm", "block"}, "activations computed twice to save memory");
  table.flag("no-graph", s.no_graph, "launch each GPU kernel by itself: the same numbers, a little slower");
  table.number("max-minutes", s.max_minutes, 0, 1e7, "save and stop after this time; 0: no limit");
  table.choice("on-nan", s.on_nan, on_non_finite_names(),
               "when a loss or gradient is not finite: abort, skip the step, or rerun it once");
  table.integer("threads", s.threads, 0, kMaxThreads, kThreadsHelp);
  table.repeated("debug-inject", s.debug_inject, "SPEC", fault_help());
  table.only_in_help_all("debug-inject");
}

void add_reports(OptionTable& table, TrainSettings& s) {
  table.group("Reports");
  table.integer("val-every", s.val_every, 0, kMaxSteps, "steps between measurements on --val; 0: only at the end");
  table.integer("val-batches", s.val_batches, 0, kMaxSteps, "micro-batches of a measurement; 0: all of --val");
  table.integer("sample-every", s.sample_every, 0, kMaxSteps, "steps between generated samples; 0: none");
  table.text("sample-prompt", s.sample_prompt, "TEXT", "what a sample begins with");
  table.integer("sample-tokens", s.sample_tokens, 1, 1'000'000, "tokens of a sample");
  table.number("temperature", s.temperature, 0, 100, "of the samples; 0: the likeliest token");
  table.text("compare", s.compare, "FILE", "check --model against a reference dump instead of training");
  table.flag("eval", s.eval,
             "measure the loss of --model on --val (all of it, unless --val-batches is given), and stop");
  table.flag(
      "bench", s.bench,
      "time training steps on random tokens: no data, no run directory, nothing saved. With --lora-r the weights "
      "of --config NAME:int8, :int4 or :fp8 are quantised");
  table.flag("operators", s.operators, "with --bench: what each operator of a step costs on the GPU");
  table.flag("json", s.json, "with --bench or --eval: one JSON object");
  table.flag("dry-run", s.dry_run, "check settings, files and memory, and stop");
  table.text(
      "gpu-memory", s.gpu_memory, "SIZE",
      "with --dry-run: plan for a GPU with so much free memory, such as 80GB (10^9 bytes) or 80GiB (2^30), instead of "
      "the one that is here");
  table.flag("print-config", s.print_config, "print settings and model as JSON, and stop");
  table.flag("verbose", s.verbose, "show all settings at the start, not only those that were given");
  table.choice("color", s.color, {"auto", "always", "never"}, "coloured messages");
}

// How many ranks share the run's steps. `launched`: those that a launcher has started.
void check_ranks(TrainSettings& s, std::int64_t launched) {
  const std::int64_t asked = std::max(s.gpus, parse_faults(s.debug_inject).cpu_ranks.value_or(0));
  if (s.gpus > 0 && s.device == "cpu") {
    fail(Exit::usage,
         "--gpus: got %lld, but --device cpu uses no GPU. Ranks on the CPU, to try them, are started by torchrun, srun "
         "or "
         "mpirun (doc/several_gpus.md)",
         static_cast<long long>(s.gpus));
  }
  if (s.gpus > 0 && launched > 1 && s.gpus != launched) {
    fail(Exit::usage, "--gpus: got %lld, but a launcher has started %lld ranks. Leave --gpus out",
         static_cast<long long>(s.gpus), static_cast<long long>(launched));
  }
  if (s.gpus > 0) s.device = "cuda";
  s.ranks = launched > 1 ? launched : std::max<std::int64_t>(1, asked);
  s.start_ranks = launched > 1 || s.ranks == 1 || s.dry_run || s.print_config ? 0 : s.ranks;
  if (s.ranks == 1) return;
  if (s.virtual_ranks == 1) s.virtual_ranks = s.ranks;
  if (s.virtual_ranks % s.ranks != 0) {
    fail(Exit::usage, "--virtual-ranks: got %lld, expected a multiple of the %lld ranks of the run",
         static_cast<long long>(s.virtual_ranks), static_cast<long long>(s.ranks));
  }
  if (!s.compare.empty()) fail(Exit::usage, "--compare: needs one rank. Leave --gpus or the launcher out");
  if (s.operators) fail(Exit::usage, "--operators: needs one rank. Leave --gpus or the launcher out");
}

// A sample is generated from all parameters, by one rank.
void check_samples(TrainSettings& s, bool given) {
  if (s.ranks == 1 || s.shard_kind() != Shard::parameters) return;
  if (given && s.sample_every > 0) {
    fail(
        Exit::usage,
        "--sample-every: got %lld, but with --shard parameters no rank has the parameters to write samples with. Leave "
        "it out, and try checkpoints with infer_pythia",
        static_cast<long long>(s.sample_every));
  }
  s.sample_every = 0;
}

void check_batch(TrainSettings& s) {
  const std::int64_t micro_tokens = s.micro_batch * s.seq_len;               // bounded by the table: below 2^44
  if (s.batch_tokens == 0) s.batch_tokens = s.virtual_ranks * micro_tokens;  // below 2^60
  if (s.batch_tokens % micro_tokens != 0) {
    fail(Exit::usage, "--batch-tokens: got %lld, expected a multiple of --micro-batch x --seq-len = %lld",
         static_cast<long long>(s.batch_tokens), static_cast<long long>(micro_tokens));
  }
  if (s.accumulation() % s.virtual_ranks != 0 && s.virtual_ranks == s.ranks) {
    fail(
        Exit::usage,
        "--batch-tokens: got %lld, expected a multiple of --micro-batch x --seq-len = %lld, for each of the %lld ranks",
        static_cast<long long>(s.batch_tokens), static_cast<long long>(micro_tokens), static_cast<long long>(s.ranks));
  }
  if (s.accumulation() % s.virtual_ranks != 0) {
    fail(Exit::usage,
         "--virtual-ranks: got %lld, expected a divisor of the %lld micro-batches of a step (--batch-tokens over "
         "--micro-batch x --seq-len)",
         static_cast<long long>(s.virtual_ranks), static_cast<long long>(s.accumulation()));
  }
}

void check_run_tokens(const TrainSettings& s) {
  if (s.batch_tokens <= kMaxRunTokens / s.steps) return;
  fail(Exit::usage, "%s: %lld steps of %lld tokens are more than %lld tokens", s.epochs > 0 ? "--epochs" : "--steps",
       static_cast<long long>(s.steps), static_cast<long long>(s.batch_tokens), static_cast<long long>(kMaxRunTokens));
}

void check_optimizer(const TrainSettings& s, const OptionTable& table) {
  for (const char* option : {"muon-lr", "muon-momentum"}) {
    if (table.given(option) && s.optimizer != "muon") fail(Exit::usage, "--%s: only with --optimizer muon", option);
  }
  if (!s.compare.empty() && s.optimizer != "adamw") {
    fail(Exit::usage, "--compare: dumps have steps of AdamW. Leave --optimizer %s out", s.optimizer.c_str());
  }
}

void check_adapter(const TrainSettings& s, const OptionTable& table) {
  if (!s.adapter.empty() && s.model.empty()) fail(Exit::usage, "--adapter: needs --model, which it belongs to");
  if (s.lora_r == 0) {
    for (const char* option : {"lora-alpha", "lora-targets", "lora-dropout"}) {
      if (table.given(option)) fail(Exit::usage, "--%s: needs --lora-r, the rank of the adapter", option);
    }
    return;
  }
  if (s.model.empty() && !s.bench)
    fail(Exit::usage, "--lora-r: needs --model, beside whose weights the adapter is trained");
  if (!s.compare.empty()) fail(Exit::usage, "--compare: compares whole models. Leave --lora-r out");
  if (s.ranks > 1 && (s.shard_kind() == Shard::parameters || s.shard_kind() == Shard::gradients)) {
    fail(Exit::usage, "--shard: got %s, and the %s of an adapter are few. Use optimizer", s.shard.c_str(),
         s.shard.c_str());
  }
  check_lora_targets("--lora-targets", s.lora_targets);
}

void check_objective(const TrainSettings& s, const OptionTable& table) {
  if (!s.dpo()) {
    if (table.given("dpo-beta")) fail(Exit::usage, "--dpo-beta: only with --objective dpo");
    return;
  }
  if (s.model.empty()) fail(Exit::usage, "--objective: dpo needs --model, which answers are compared with");
  if (s.eval || s.bench || !s.compare.empty()) {
    fail(Exit::usage, "--objective: dpo is for training alone. Leave it out with --eval, --bench and --compare");
  }
  if (s.no_pack) fail(Exit::usage, "--no-pack: with --objective dpo the answers of a pair share a row. Leave it out");
  if (s.precision == "fp8") {
    fail(Exit::usage, "--precision: got fp8, whose rounding hides the differences that --objective dpo learns from");
  }
  for (const auto& [option, value] : {std::pair("dropout", s.dropout), std::pair("lora-dropout", s.lora_dropout)}) {
    if (value > 0) fail(Exit::usage, "--%s: got %g, with --objective dpo there is none. Leave it out", option, value);
  }
}

// Options of training that have no effect on what else the program does.
void check_effects(const TrainSettings& s, const OptionTable& table) {
  const bool compare = !s.compare.empty();
  if (!s.eval && !s.bench && !compare) return;
  const struct {
    bool of_task;
    std::vector<const char*> options;
  } rows[] = {
      {true, {"steps", "epochs", "lr", "min-lr-ratio", "warmup-steps", "schedule", "wsd-decay-fraction"}},
      {true, {"weight-decay", "beta1", "beta2", "eps", "muon-lr", "muon-momentum"}},
      {true, {"out", "resume", "save-every", "keep", "keep-best", "max-minutes", "on-nan"}},
      {true, {"val-every", "sample-every", "sample-prompt", "sample-tokens", "temperature"}},
      {!s.bench, {"train", "grad-clip", "dropout", "lora-dropout"}},
      {!s.eval, {"val", "val-batches", "document-mask", "no-pack"}},
      {compare, {"micro-batch", "seq-len", "batch-tokens", "seed"}},  // the dump has its own
  };
  std::vector<const char*> without;
  for (const auto& [of_task, options] : rows) {
    if (of_task) without.insert(without.end(), options.begin(), options.end());
  }
  const std::string all = table.all_given(without);
  if (all.empty()) return;
  fail(Exit::usage, "%s: not for --%s, on which it has no effect. Leave it out", all.c_str(),
       s.eval    ? "eval"
       : s.bench ? "bench"
                 : "compare");
}

void check_purpose(TrainSettings& s, const OptionTable& table) {
  if (!s.compare.empty() && s.model.empty())
    fail(Exit::usage, "--compare: needs --model, the file that the dump was made from");
  if (s.eval && s.model.empty()) fail(Exit::usage, "--eval: needs --model, the model file that is measured");
  if (s.eval && s.val.empty()) fail(Exit::usage, "--eval: needs --val, the token shards to measure on");
  if (s.bench + s.eval + !s.compare.empty() + s.dry_run + s.print_config > 1) {
    fail(Exit::usage, "--bench, --compare, --eval, --dry-run, --print-config: only one of them at a time");
  }
  check_effects(s, table);
  if (s.json && !s.bench && !s.eval) fail(Exit::usage, "--json: only for --bench and --eval");
  if (s.operators && !s.bench) fail(Exit::usage, "--operators: only for --bench");
  if (s.epochs > 0 && s.train.empty()) fail(Exit::usage, "--epochs: only for training on --train");
  if (s.keep_best && s.val.empty()) fail(Exit::usage, "--keep-best: needs --val, the token shards to measure on");
  if (s.vocab_size > 0 && !s.model.empty()) fail(Exit::usage, "--vocab-size: only with --config, a new model");
  if (s.gpu_memory.empty()) return;
  if (!s.dry_run) fail(Exit::usage, "--gpu-memory: only with --dry-run");
  if (s.device == "cpu") fail(Exit::usage, "--gpu-memory: not with --device cpu");
  s.gpu_memory_bytes = memory_size("--gpu-memory", s.gpu_memory);
}

std::int64_t default_warmup_steps(std::int64_t steps) {
  return std::min(TrainSettings().warmup_steps, steps / kWarmupShare);
}

// Values that were given have to fit together.
void check_schedule(const TrainSettings& s, bool warmup_given, bool decay_given) {
  const auto steps = static_cast<long long>(s.steps);
  const std::string all = s.epochs > 0 ? format("the %lld steps of --epochs", steps) : format("--steps %lld", steps);
  if (warmup_given && s.warmup_steps > s.steps) {
    fail(Exit::usage, "--warmup-steps: got %lld, expected at most %s", static_cast<long long>(s.warmup_steps),
         all.c_str());
  }
  const Schedule schedule = s.learning_rate();
  if ((warmup_given || decay_given) && schedule.shape == ScheduleShape::wsd &&
      s.warmup_steps + schedule.wsd_decay_steps() > s.steps) {
    fail(Exit::usage, "--wsd-decay-fraction: %lld warm-up (--warmup-steps) and %lld decay steps do not fit into %s",
         static_cast<long long>(s.warmup_steps), static_cast<long long>(schedule.wsd_decay_steps()), all.c_str());
  }
}

void check_together(TrainSettings& s, const OptionTable& table, std::int64_t launched) {
  if (s.model.empty() == s.config.empty()) {
    fail(Exit::usage, s.model.empty() ? "--config or --model: one of the two is needed, see --help"
                                      : "--config and --model: only one of the two can be given");
  }
  if (!s.config.empty() && !s.config_is_file()) {  // refuses an unknown name
    s.lora_r > 0 ? random_model_config(s.config, "--config") : preset_config(s.config);
  }
  check_ranks(s, launched);
  check_samples(s, table.given("sample-every"));
  check_optimizer(s, table);
  check_adapter(s, table);
  check_objective(s, table);
  check_batch(s);
  if (s.epochs > 0 && table.given("steps")) fail(Exit::usage, "--epochs and --steps: only one of the two can be given");
  if (!table.given("warmup-steps")) s.warmup_steps = default_warmup_steps(s.steps);
  if (s.epochs == 0) {
    check_run_tokens(s);
    check_schedule(s, table.given("warmup-steps"), table.given("wsd-decay-fraction"));
  }
  check_purpose(s, table);
  if (s.eval && !table.given("val-batches")) s.val_batches = 0;
  if (s.print_config || s.bench || s.eval || !s.compare.empty()) return;
  if (s.train.empty()) fail(Exit::usage, "--train: needed, the token shards to train on");
  if (s.out.empty() && !s.dry_run) fail(Exit::usage, "--out: needed, the directory for log and checkpoints");
}

}  // namespace

void TrainSettings::set_steps_of_epochs(std::uint64_t windows) {
  const std::int64_t sequences = batch_tokens / seq_len;  // of a step
  const double count = std::max(1.0, std::ceil(epochs * static_cast<double>(windows) / static_cast<double>(sequences)));
  if (count > static_cast<double>(kMaxSteps)) {
    fail(Exit::usage, "--epochs: got %g, which is more than %lld steps", epochs, static_cast<long long>(kMaxSteps));
  }
  steps = static_cast<std::int64_t>(count);
  for (auto& [name, value] : effective) {
    if (name == "steps") value = std::to_string(steps);
  }
  check_run_tokens(*this);
  if (!given.contains("warmup-steps")) set_warmup_steps(default_warmup_steps(steps));
  check_schedule(*this, given.contains("warmup-steps"), given.contains("wsd-decay-fraction"));
}

void TrainSettings::set_threads(std::int64_t count) {
  threads = count;
  for (auto& [name, value] : effective) {
    if (name == "threads") value = std::to_string(count);
  }
}

void TrainSettings::set_learning_rate(double rate) {
  lr = rate;
  char text[32];
  const std::to_chars_result end = std::to_chars(text, text + sizeof text, rate);
  for (auto& [name, value] : effective) {
    if (name == "lr") value.assign(text, end.ptr);
  }
}

void TrainSettings::set_warmup_steps(std::int64_t count) {
  warmup_steps = count;
  for (auto& [name, value] : effective) {
    if (name == "warmup-steps") value = std::to_string(count);
  }
}

bool TrainSettings::config_is_file() const {
  return names_config_file(config);
}

void TrainSettings::set_device(const std::string& definite_device, const std::string& definite_precision) {
  device = definite_device;
  precision = definite_precision;
  for (auto& [name, value] : effective) {
    if (name == "device") value = device;
    if (name == "precision") value = precision;
  }
}

Schedule TrainSettings::learning_rate() const {
  Schedule result;
  result.shape = schedule_from_name(schedule);
  result.peak = lr;
  result.min_ratio = min_lr_ratio;
  result.warmup_steps = warmup_steps;
  result.steps = steps;
  result.wsd_decay_fraction = wsd_decay_fraction;
  return result;
}

std::optional<LoraConfig> TrainSettings::lora(LoraTargets model) const {
  if (lora_r == 0) return std::nullopt;
  return LoraConfig{lora_r, lora_alpha > 0 ? lora_alpha : 2.0 * static_cast<double>(lora_r),
                    parse_lora_targets("--lora-targets", lora_targets, model)};
}

TrainOptions TrainSettings::model_options() const {
  TrainOptions options;
  options.micro_batch = micro_batch;
  options.seq_len = seq_len;
  options.document_mask = masks_documents;
  options.label_weights = dpo();
  options.precision = precision == "bf16" ? Precision::bf16 : precision == "fp8" ? Precision::fp8 : Precision::fp32;
  options.recompute = recompute == "block" ? Recompute::block : recompute == "norm" ? Recompute::norm : Recompute::none;
  options.dropout = static_cast<float>(dropout);
  options.seed = static_cast<std::uint64_t>(seed);
  options.lora = lora();
  options.adapter_dropout = static_cast<float>(lora_dropout);
  options.frozen_quantization = frozen_quantization;
  options.optimizer = find_optimizer(optimizer);
  options.moments = moments == "bf16" ? Precision::bf16 : Precision::fp32;
  options.virtual_ranks = virtual_ranks;
  options.rank_micro_batches = rank_accumulation();
  options.accumulates = accumulation() > 1;
  options.graph = !no_graph;
  return options;
}

OptimizerStep TrainSettings::optimizer_step(std::int64_t update, std::int64_t step, float gradient_scale) const {
  AdamWStep adamw;
  adamw.step = update;
  adamw.learning_rate = static_cast<float>(learning_rate().at(step));
  adamw.beta1 = static_cast<float>(beta1);
  adamw.beta2 = static_cast<float>(beta2);
  adamw.eps = static_cast<float>(eps);
  adamw.weight_decay = static_cast<float>(weight_decay);
  adamw.gradient_scale = gradient_scale;
  OptimizerStep result(adamw);
  if (muon_lr > 0) {
    Schedule schedule_of_muon = learning_rate();
    schedule_of_muon.peak = muon_lr;
    result.muon.learning_rate = static_cast<float>(schedule_of_muon.at(step));
  }
  result.muon.momentum = static_cast<float>(muon_momentum);
  return result;
}

ResumeMode TrainSettings::resume_mode() const {
  return resume == "must" ? ResumeMode::must : resume == "never" ? ResumeMode::never : ResumeMode::automatic;
}

Shard TrainSettings::shard_kind() const {
  return shard == "parameters"  ? Shard::parameters
         : shard == "gradients" ? Shard::gradients
         : shard == "optimizer" ? Shard::optimizer
                                : Shard::none;
}

Json TrainSettings::numeric_settings() const {
  Json fields = {{"micro-batch", micro_batch},
                 {"seq-len", seq_len},
                 {"batch-tokens", batch_tokens},
                 {"lr", lr},
                 {"min-lr-ratio", min_lr_ratio},
                 {"warmup-steps", warmup_steps},
                 {"schedule", schedule},
                 {"weight-decay", weight_decay},
                 {"beta1", beta1},
                 {"beta2", beta2},
                 {"eps", eps},
                 {"grad-clip", grad_clip},
                 {"dropout", dropout},
                 {"seed", seed},
                 {"precision", precision}};
  if (packed) fields["no-pack"] = false;  // runs of conversations that do not have it have a row for each
  if (document_mask) fields["document-mask"] = true;
  if (dpo()) fields.update({{"objective", objective}, {"dpo-beta", dpo_beta}});
  if (moments != "fp32") fields["moments"] = moments;
  if (optimizer != "adamw") fields["optimizer"] = optimizer;
  if (optimizer == "muon") fields.update({{"muon-lr", muon_lr > 0 ? muon_lr : lr}, {"muon-momentum", muon_momentum}});
  if (const std::optional<LoraConfig> adapter_config = lora()) {
    fields.update({{"lora-r", lora_r},
                   {"lora-alpha", adapter_config->alpha},
                   {"lora-targets", adapter_config->target_names()},
                   {"lora-dropout", lora_dropout}});
  }
  if (virtual_ranks != 1) fields["virtual-ranks"] = virtual_ranks;
  if (schedule == "wsd") fields["wsd-decay-fraction"] = wsd_decay_fraction;
  return fields;
}

TrainOptionParser::TrainOptionParser(const std::string& version)
    : table_("train_llama", "Trains a language model on token shards.") {
  table_.version(version);
  table_.footer(kFooter);
  add_model_and_data(table_, settings_);
  add_optimization(table_, settings_);
  add_adapter(table_, settings_);
  add_objective(table_, settings_);
  add_execution(table_, settings_);
  add_ranks(table_, settings_);
  add_reports(table_, settings_);
}

std::optional<TrainSettings> TrainOptionParser::parse(int argc, const char* const* argv, std::int64_t launched) {
  settings_ = TrainSettings();
  if (table_.parse(argc, argv) == OptionTable::Outcome::exit_ok) return std::nullopt;
  set_color_mode(color_mode_from_name(settings_.color));
  settings_.norm_given = table_.given("norm");
  check_together(settings_, table_, launched);
  settings_.effective = table_.effective();
  for (const auto& [name, value] : settings_.effective) {
    if (table_.given(name)) settings_.given.insert(name);
  }
  return settings_;
}

std::optional<TrainSettings> parse_train_options(int argc, const char* const* argv, const std::string& version,
                                                 std::int64_t launched) {
  return TrainOptionParser(version).parse(argc, argv, launched);
}

}  // namespace weft
