// train_llama: trains language models. This file is an overview of training, from the options through the data and the
// model to the training loop; --compare, --bench and --eval branch off on the way.
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/app/paths.h"
#include "llmc/app/rank_team.h"
#include "llmc/app/train_device.h"
#include "llmc/base/arena.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/base/threads.h"
#include "llmc/comm/heartbeat.h"
#include "llmc/comm/launcher.h"
#include "llmc/comm/start_ranks.h"
#include "llmc/file/run_dir.h"
#include "llmc/model/compare.h"
#include "llmc/train/background_save.h"
#include "llmc/train/bench.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/evaluate.h"
#include "llmc/train/inputs.h"
#include "llmc/train/joint_save.h"
#include "llmc/train/loop.h"
#include "llmc/train/options.h"
#include "llmc/train/preference.h"
#include "llmc/train/rank_fields.h"
#include "llmc/train/report.h"
#include "llmc/train/run_log.h"
#include "llmc/train/sample.h"
#include "llmc/train/save_writers.h"
#include "version.h"

namespace weft {
namespace {

// The sequences of one rank in a step; a virtual rank counts as a rank. The micro-batch has to divide this number.
std::int64_t batch_sequences(const TrainSettings& settings) {
  return settings.batch_tokens / settings.seq_len / settings.virtual_ranks;
}

Exit compare(const TrainDevice& device, const TrainSettings& settings, const TrainInputs& inputs) {
  const TensorFile dump = TensorFile::open(settings.compare, FileKind::reference_dump);
  const Precision precision = settings.model_options().precision;
  device.check_memory(inputs.config, training_options(dump, precision, inputs.config), 0, 0);
  const auto make = [&](const TrainOptions& options) {
    std::unique_ptr<TrainModel> model = device.make(inputs.config, options);
    load_parameters(inputs, options.seed, *model);
    return model;
  };
  const Comparison comparison =
      compare_training(dump, precision, device.compare_tolerance(), make, device.gpu() ? DType::bf16 : DType::f32);
  for (const std::string& line : comparison.table()) write_stdout(line + "\n");
  return comparison.passed() ? Exit::ok : Exit::internal;
}

Exit bench(TrainDevice& device, const TrainSettings& settings, const TrainInputs& inputs, Communicator& ranks) {
  device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings), 0);
  const std::unique_ptr<TrainModel> model = device.make(inputs.config, settings.model_options(), ranks);
  if (inputs.weights) {
    load_frozen(inputs, *model);
    load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), *model);
  } else {
    bench_parameters(*model, settings.lora_r > 0);
  }
  if (settings.operators) {
    const OperatorTable table = bench_operators(*model, settings);
    if (settings.json) {
      write_stdout(json_text(operator_table_json(table, settings, device.name())) + "\n");
    } else {
      for (const std::string& line : operator_table_text(table, device.name())) write_stdout(line + "\n");
    }
    return Exit::ok;
  }
  const TrainBenchResult result = bench_training(*model, settings, device.name(), ranks);
  if (ranks.rank() != 0) return Exit::ok;
  if (settings.json) {
    write_stdout(json_text(train_bench_json(result, settings, device.name())) + "\n");
  } else {
    for (const std::string& line : train_bench_text(result, device.name())) write_stdout(line + "\n");
  }
  return Exit::ok;
}

// `result`: the lines are the result (--dry-run), so they go to stdout; otherwise they are log lines.
void print_lines(const std::vector<std::string>& lines, bool result) {
  for (const std::string& line : lines) {
    if (result)
      write_stdout(line + "\n");
    else
      log_info("%s", line.c_str());
  }
}

// Writes config.json. The programs do not read it back, so a failure is only a warning.
void write_config(const RunDirectory& directory, const Json& header) {
  try {
    write_file_atomically(directory.file("config.json"), json_text(header, 1) + "\n");
  } catch (const Error& error) {
    log_warning("%s", error.what());
  }
}

// The run directory and its checkpoints. Only the first rank has them.
struct Records {
  Records(const TrainSettings& settings, const RunIdentity& identity)
      : directory(settings.out), checkpoints(directory, identity, settings.keep) {}
  const RunDirectory directory;
  CheckpointKeeper checkpoints;
};

// Fills the model from the newest checkpoint, or with initial parameters if there is none; returns the state to begin
// from. `records` null: not the first rank.
TrainState begin(const TrainSettings& settings, const TrainInputs& inputs, Records* records, TrainModel& model,
                 Communicator& ranks) {
  const Heartbeat patience(ranks);  // the other ranks wait while the first one reads and verifies checkpoints
  CheckpointKeeper* const checkpoints = records != nullptr ? &records->checkpoints : nullptr;
  if (std::optional<TrainState> resumed = resume_on_all(ranks, checkpoints, settings.resume_mode(), model)) {
    log_info("resuming after step %lld of %lld: %s", static_cast<long long>(resumed->step),
             static_cast<long long>(settings.steps),
             escaped(checkpoints != nullptr ? checkpoints->last_path() : std::string()).c_str());
    return *std::move(resumed);
  }
  const std::string start = inputs.trains_adapter ? (inputs.adapter ? escaped(settings.adapter) : "a new adapter")
                            : inputs.weights      ? escaped(settings.model)
                                                  : "new parameters";
  log_info("%s holds no checkpoint: starting from step 1 with %s", escaped(settings.out).c_str(), start.c_str());
  load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), model);
  return {};
}

// The copy of the training state from which saves are written while training goes on. Null, with a log line, if memory is
// too small for it: training then waits for each save, and nothing else changes.
std::unique_ptr<StateCopy> state_copy(TrainModel& model) {
  try {
    return model.make_state_copy();
  } catch (const Error& error) {
    if (error.code() != Exit::resources) throw;
    log_info("saves: training waits for each: %s", error.what());
    return nullptr;
  }
}

// With several ranks saves run in the background: each rank writes its part, or the first one writes everything.
void add_savers(TrainLoop::Parts& parts, const TrainSettings& settings, RankTeam& team) {
  const SaveWriters writers =
      choose_save_writers(team.communicator(), settings.out, settings.shard_kind(), team.local_size() == team.size());
  if (writers.all) {
    log_info("saves: each rank writes its part, in the background");
    parts.copy = parts.model.make_own_copy();
    parts.joint_save = std::make_unique<JointSave>(team.save_communicator(), parts.checkpoints, parts.model.optimizer(),
                                                   parts.model.table(), parts.model.own_elements());
    return;
  }
  if (!writers.reason.empty()) log_info("saves: rank 0 writes for all, because %s", writers.reason.c_str());
  if (team.first()) parts.copy = parts.model.make_state_copy();
}

// What --objective dpo compares with: log p of the model that the run began with, computed once and kept in the run's directory.
// `model` is in `state`, and is so afterwards. Nothing if a signal came meanwhile.
std::optional<Reference> reference_of(const TrainSettings& settings, const TrainInputs& inputs, Records* records,
                                      TrainModel& model, TrainState& state, Communicator& ranks) {
  const Json identity = {{"settings", settings.numeric_settings()},
                         {"began_from", inputs.began_from},
                         {"train", inputs.train->fingerprint()},
                         {"val", inputs.val ? inputs.val->fingerprint() : Json()}};
  const std::string path = records != nullptr ? records->directory.file("reference.bin") : std::string();
  const std::int64_t of_train = inputs.train->pairs(), of_val = inputs.val ? inputs.val->pairs() : 0;
  std::optional<Reference> reference;
  do_together(ranks, [&] {
    if (records != nullptr) reference = read_reference(path, identity, of_train, of_val);
  });
  if (ranks.broadcast(reference.has_value())) {
    if (!reference) {
      reference.emplace();
      reference->train.resize(static_cast<std::size_t>(of_train));
      reference->val.resize(static_cast<std::size_t>(of_val));
    }
    for (std::vector<PairLogProbabilities>* pairs : {&reference->train, &reference->val}) {
      ranks.broadcast_bytes(reinterpret_cast<std::byte*>(pairs->data()),
                            static_cast<std::int64_t>(pairs->size() * sizeof(PairLogProbabilities)), 0);
    }
    return reference;
  }
  log_info("reference: computing log p of %lld pairs", static_cast<long long>(of_train + of_val));
  if (state.step > 0) load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), model);
  reference.emplace();
  const auto measure = [&](const TokenDataset& data, std::vector<PairLogProbabilities>& pairs) {
    std::optional<std::vector<PairLogProbabilities>> measured =
        pair_log_probabilities(model, data, settings.micro_batch, ranks);
    if (!measured) return false;
    pairs = *std::move(measured);
    return true;
  };
  if (!measure(*inputs.train, reference->train)) return std::nullopt;
  if (inputs.val && !measure(*inputs.val, reference->val)) return std::nullopt;
  do_together(ranks, [&] {
    if (records != nullptr) write_reference(path, identity, *reference);
  });
  if (state.step > 0) state = begin(settings, inputs, records, model, ranks);
  return reference;
}

Exit train(TrainDevice& device, const TrainSettings& settings, const TrainInputs& inputs,
           const std::vector<MemoryLine>& memory, bool save_in_background, SampleWriter* sample, RankTeam& team) {
  Communicator& ranks = team.communicator();
  device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings),
                      sample != nullptr ? sample->positions() : 0);
  const RunIdentity identity{
      inputs.config,
      settings.numeric_settings(),
      settings.steps,
      inputs.train->fingerprint(),
      settings.device,
      WEFT_VERSION,
      inputs.trains_adapter ? std::string() : inputs.tokenizer,
      inputs.began_from,
      inputs.chat,
      inputs.trains_adapter ? std::optional(TrainedAdapter{*settings.lora(), inputs.base}) : std::nullopt,
      settings.epochs > 0};
  std::optional<Records> records;
  if (team.first()) records.emplace(settings, identity);
  TrainOptions options = settings.model_options();
  if (records) options.matmul_plans = records->directory.file("matmul_plans.txt");
  const std::unique_ptr<TrainModel> model = device.make(inputs.config, options, ranks);
  load_frozen(inputs, *model);
  TrainState state = begin(settings, inputs, records ? &*records : nullptr, *model, ranks);
  std::optional<Preference> preference, val_preference;
  if (settings.dpo()) {
    std::optional<Reference> reference =
        reference_of(settings, inputs, records ? &*records : nullptr, *model, state, ranks);
    if (!reference) return exit_after_signal(static_cast<int>(largest(ranks, stop_signal())));
    preference.emplace(*inputs.train, std::move(reference->train), settings.dpo_beta);
    if (inputs.val) val_preference.emplace(*inputs.val, std::move(reference->val), settings.dpo_beta);
  }

  std::optional<RunLog> log;
  if (records) {
    const Json header = header_record(settings, inputs, memory, WEFT_VERSION);
    write_config(records->directory, header);
    log.emplace(records->directory.file("log.jsonl"));
    log->write(header);
    log->write({{"type", "resume"}, {"step", state.step}, {"tokens", state.step * settings.batch_tokens}});
  }
  RunLog silent;

  DataLoader data(*inputs.train, settings.micro_batch, static_cast<std::uint64_t>(settings.seed), state.windows,
                  {ranks.rank(), ranks.size(), settings.rank_accumulation()});
  TrainLoop::Parts parts{
      settings, *model,  data,   records ? &records->checkpoints : nullptr, log ? *log : silent, nullptr, nullptr,
      nullptr,  nullptr, nullptr};
  if (inputs.val) parts.validation = &*inputs.val;
  if (preference) parts.preference = &*preference;
  if (val_preference) parts.val_preference = &*val_preference;
  if (ranks.size() > 1) {
    parts.ranks = &ranks;
    add_savers(parts, settings, team);
  } else if (save_in_background) {
    parts.copy = state_copy(*model);
  }
  if (sample != nullptr) {
    sample->attach(*model);
    parts.sample = [sample](std::int64_t step) { return sample->write(step); };
  }
  try {
    return TrainLoop(std::move(parts), state).run();
  } catch (const Error& error) {
    if (ranks.size() == 1) throw;
    team.leave_with(error);
  }
}

// The default warm-up follows from --steps when a run begins. Steps that are added later do not change it.
void keep_warmup_steps(TrainSettings& settings, RankTeam& team) {
  if (settings.given.contains("warmup-steps") || settings.out.empty()) return;
  std::int64_t steps = settings.warmup_steps;
  if (team.first()) steps = saved_warmup_steps(settings.out).value_or(steps);
  if (settings.ranks > 1 && !settings.dry_run && !settings.print_config) steps = team.communicator().broadcast(steps);
  settings.set_warmup_steps(steps);
}

// Everything after the options, for one rank.
Exit run_rank(TrainSettings& settings, RankTeam& team) {
  Communicator& ranks = team.communicator();
  TrainDevice device(settings, team);
  refuse_model_directory(settings.model);
  refuse_tokenizer_directory(settings.tokenizer);
  const TrainInputs inputs = open_inputs(settings);
  settings.packed = inputs.packed();
  settings.masks_documents = inputs.masks_documents();
  settings.frozen_quantization = inputs.frozen_quantization;
  settings.model_targets = lora_targets(inputs.config);
  if (settings.epochs > 0) settings.set_steps_of_epochs(inputs.train->windows());
  if (!settings.given.contains("lr")) {
    const int divisor = (inputs.weights && !inputs.trains_adapter ? 10 : 1) * (settings.dpo() ? 10 : 1);
    settings.set_learning_rate(default_learning_rate(TensorTable(inputs.config).parameters(), divisor));
  }
  keep_warmup_steps(settings, team);
  if (ranks.size() > 1) {
    std::vector<RankField> fields = rank_fields(settings, inputs), more = device.rank_fields();
    fields.insert(fields.end(), more.begin(), more.end());
    require_same(ranks, fields);
    require_distinct(ranks, "GPU", device.gpu_id());
  }
  if (settings.print_config) {
    if (team.first()) write_stdout(json_text(config_record(settings, inputs.config), 1) + "\n");
    return Exit::ok;
  }
  if (!settings.compare.empty()) return compare(device, settings, inputs);
  if (settings.bench) return bench(device, settings, inputs, ranks);
  if (settings.eval) {
    TrainOptions options = settings.model_options();
    options.virtual_ranks = 1;
    device.check_memory(inputs.config, options, batch_sequences(settings), 0, Holds::all);
    const std::unique_ptr<TrainModel> model = device.make(inputs.config, options);
    return evaluate(*model, settings, inputs, ranks);
  }
  std::optional<SampleWriter> sample;
  if (settings.sample_every > 0 && team.first() && !inputs.tokenizer.empty()) {
    sample.emplace(settings, inputs.tokenizer, inputs.config);
  }
  const std::vector<MemoryLine> memory =
      device.plan(inputs.config, settings.model_options(), sample ? sample->positions() : 0);
  if (team.first()) print_lines(start_report(settings, inputs, memory), settings.dry_run);
  const SavePlan saves = plan_saves(settings, inputs.config, device.gpu() ? 0 : total_bytes(memory));
  if (settings.ranks == 1 && !saves.line.empty()) print_lines({saves.line}, settings.dry_run);
  if (settings.dry_run) {
    const auto needed = [&](const TrainOptions& options) {
      return device.planned_bytes(inputs.config, options, sample ? sample->positions() : 0);
    };
    if (team.first())
      print_lines(tuning_table(tuning_ways(settings, inputs.config), device.available_bytes(), needed), true);
    device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings),
                        sample ? sample->positions() : 0);
    return Exit::ok;
  }
  return train(device, settings, inputs, memory, saves.in_background, sample ? &*sample : nullptr, team);
}

Exit run(int argc, char** argv) {
  clean_thread_environment(argv);
  const std::optional<LaunchedRank> launched = launched_rank(std::getenv);
  std::optional<TrainSettings> parsed =
      parse_train_options(argc, argv, "train_llama " WEFT_VERSION " (" WEFT_BUILD ")", launched ? launched->size : 1);
  if (!parsed) return Exit::ok;  // --help, --version
  TrainSettings& settings = *parsed;
  if (settings.start_ranks > 0) {
    if (settings.gpus > 0) require_gpus(settings.gpus);
    return start_ranks(argv, settings.start_ranks, settings.comm_timeout);
  }
  RankTeam team(settings, launched);
  settings.set_threads(set_threads(team.threads(settings.threads, thread_limits())));
  on_stop(OnStop::leave);  // until the first step: before it there is nothing to save
  install_signal_handlers();
  if (settings.dry_run || settings.print_config) return run_rank(settings, team);
  team.meet(settings, WEFT_VERSION " (" WEFT_BUILD ")");
  return team.together([&] { return run_rank(settings, team); });
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
