// The command line of train_llama: its options, their checks, and the settings that they give.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/base/options.h"
#include "llmc/model/shards.h"
#include "llmc/model/train_model.h"
#include "llmc/train/guard.h"
#include "llmc/train/schedule.h"

namespace weft {

inline constexpr std::int64_t kMaxSteps = 1'000'000'000'000;  // of a run

enum class ResumeMode { automatic, must, never };

// One field for each option, with its default; names and meanings are those of --help. A size of zero means "not given".
struct TrainSettings {
  std::string model, adapter, config, norm = "rmsnorm";
  std::int64_t vocab_size = 0;
  std::string train, val, tokenizer;
  bool document_mask = false, no_pack = false;
  std::string out, resume = "auto";
  std::int64_t save_every = 100, keep = 2;
  bool keep_best = false;

  double epochs = 0;  // not 0: the number of steps follows from it once the data is known
  std::int64_t steps = 400, micro_batch = 8, seq_len = 256, batch_tokens = 0;
  double lr = 0, min_lr_ratio = 0.1;  // lr without --lr: default_learning_rate() of the model, once that is known
  std::int64_t warmup_steps = 200;  // without --warmup-steps at most a quarter of the steps, or what a resumed run has
  std::string schedule = "cosine";
  double wsd_decay_fraction = 0.2;
  std::string optimizer = "adamw";
  double muon_lr = 0, muon_momentum = 0.95;  // muon_lr 0: lr
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, grad_clip = 1.0;
  double dropout = 0;
  std::string objective = "cross-entropy";
  double dpo_beta = 0.1;
  std::int64_t lora_r = 0;  // 0: all parameters are trained
  double lora_alpha = 0;    // 0: twice the rank
  std::string lora_targets = "all";
  double lora_dropout = 0;
  std::int64_t seed = 1;
  std::int64_t virtual_ranks = 1;

  std::int64_t gpus = 0;
  std::string shard = "optimizer";
  double comm_timeout = 120;

  std::string device = "auto", precision = "auto", recompute = "none", moments = "fp32";
  bool no_graph = false;
  double max_minutes = 0;
  std::int64_t threads = 0;
  std::string on_nan = "abort";
  std::vector<std::string> debug_inject;

  std::int64_t val_every = 50, val_batches = 8;
  std::int64_t sample_every = 100, sample_tokens = 64;
  std::string sample_prompt = "Once upon a time";
  double temperature = 0.8;

  std::string compare;
  bool eval = false, bench = false, operators = false, json = false;
  bool dry_run = false, print_config = false, verbose = false;
  std::string gpu_memory;
  std::uint64_t gpu_memory_bytes = 0;  // what gpu_memory says; 0: nothing
  std::string color = "auto";

  // Known once the data is: whether rows of --train hold several conversations, and whether any rows say where documents begin.
  bool packed = false, masks_documents = false;
  // Known once the model is, beside which an adapter is trained.
  Quantization frozen_quantization;
  LoraTargets model_targets = llama_lora_targets();  // lora_targets()

  std::int64_t ranks = 1;        // processes of this run
  std::int64_t start_ranks = 0;  // of them, those that this process has to start; 0: a launcher has, or there is one

  bool norm_given = false;
  std::vector<std::pair<std::string, std::string>> effective;  // every option as text, for the start-up table

  std::set<std::string> given;  // names of those on the command line

  // Sets the number of steps of a run with --epochs, in the table of effective values too: so many that each of `windows`
  // windows is seen at least epochs times. The default warm-up follows. Exit::usage if other options do not fit to it.
  void set_steps_of_epochs(std::uint64_t windows);
  // Replaces 0 by the number of CPU threads that the run has, in the table of effective values too.
  void set_threads(std::int64_t count);
  // Replaces "auto" by what it means on this machine, in the table of effective values too.
  void set_device(const std::string& definite_device, const std::string& definite_precision);
  // Sets the learning rate of a run without --lr, in the table of effective values too.
  void set_learning_rate(double rate);
  // Sets the warm-up of a run without --warmup-steps, in the table of effective values too.
  void set_warmup_steps(std::int64_t count);
  bool dpo() const { return objective == "dpo"; }
  bool config_is_file() const;  // --config names a file, not a preset
  // Micro-batches of one step.
  std::int64_t accumulation() const { return batch_tokens / (micro_batch * seq_len); }
  // Micro-batches of one rank in a step; those of rank r follow those of rank r - 1.
  std::int64_t rank_accumulation() const { return accumulation() / virtual_ranks; }
  Schedule learning_rate() const;
  // Of the adapter that is trained; empty: none. Exit::usage for a target that the model has not.
  std::optional<LoraConfig> lora() const { return lora(model_targets); }
  std::optional<LoraConfig> lora(LoraTargets model) const;
  TrainOptions model_options() const;
  // What the optimizer is given in step `step`, counted from 1, which is the `update`-th that changes the parameters.
  OptimizerStep optimizer_step(std::int64_t update, std::int64_t step, float gradient_scale) const;
  ResumeMode resume_mode() const;
  Shard shard_kind() const;
  // The fields that decide the numbers of a run, by option name: what a checkpoint must agree with. --steps
  // is not among them, so that a run can be extended.
  Json numeric_settings() const;
};

// The table of the options, bound to the settings that it fills.
class TrainOptionParser {
 public:
  explicit TrainOptionParser(const std::string& version);
  // Parses a command line, starting from the defaults. `launched`: number of ranks that a launcher has started. Nothing
  // if --help or --version was printed. Exit::usage also if options do not fit together: missing or conflicting ones,
  // or a batch that does not divide.
  std::optional<TrainSettings> parse(int argc, const char* const* argv, std::int64_t launched = 1);

 private:
  TrainSettings settings_;
  OptionTable table_;
};

// The same with a parser made for this call.
std::optional<TrainSettings> parse_train_options(int argc, const char* const* argv, const std::string& version,
                                                 std::int64_t launched = 1);

}  // namespace weft
