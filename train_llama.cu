// train_llama: trains Llama models. This file is an overview of training, from the options through the data and the
// model to the training loop; --compare, --bench and --eval branch off on the way.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/app/paths.h"
#include "llmc/app/train_device.h"
#include "llmc/base/arena.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/base/threads.h"
#include "llmc/file/run_dir.h"
#include "llmc/model/compare.h"
#include "llmc/train/background_save.h"
#include "llmc/train/bench.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/evaluate.h"
#include "llmc/train/inputs.h"
#include "llmc/train/loop.h"
#include "llmc/train/options.h"
#include "llmc/train/report.h"
#include "llmc/train/run_log.h"
#include "llmc/train/sample.h"
#include "version.h"

namespace weft {
namespace {

// A rank's sequences per step: the micro-batch has to divide this number.
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
  const Comparison comparison = compare_training(dump, precision, device.compare_tolerance(), make);
  for (const std::string& line : comparison.table()) write_stdout(line + "\n");
  return comparison.passed() ? Exit::ok : Exit::internal;
}

Exit bench(const TrainDevice& device, const TrainSettings& settings, const TrainInputs& inputs) {
  device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings), 0);
  const std::unique_ptr<TrainModel> model = device.make(inputs.config, settings.model_options());
  if (inputs.weights) {
    load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), *model);
  } else {
    bench_parameters(*model);
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
  const TrainBenchResult result = bench_training(*model, settings, device.name());
  if (settings.json) {
    write_stdout(json_text(train_bench_json(result, settings, device.name())) + "\n");
  } else {
    for (const std::string& line : train_bench_text(result, device.name())) write_stdout(line + "\n");
  }
  return Exit::ok;
}

// `result`: the lines are what --dry-run was asked for, so they go to stdout; otherwise they are log lines.
void print_lines(const std::vector<std::string>& lines, bool result) {
  for (const std::string& line : lines) {
    if (result)
      write_stdout(line + "\n");
    else
      log_info("%s", line.c_str());
  }
}

// Writes config.json. It is for people and tools alone, so a failure is only a warning.
void write_config(const RunDirectory& directory, const Json& header) {
  try {
    write_file_atomically(directory.file("config.json"), json_text(header, 1) + "\n");
  } catch (const Error& error) {
    log_warning("%s", error.what());
  }
}

// Fills the model from the newest checkpoint, or with initial parameters if there is none; returns the state to begin
// from.
TrainState begin(const TrainSettings& settings, const TrainInputs& inputs, CheckpointKeeper& checkpoints,
                 TrainModel& model) {
  if (std::optional<TrainState> resumed = checkpoints.resume(settings.resume_mode(), model)) {
    log_info("resuming after step %lld of %lld: %s", static_cast<long long>(resumed->step),
             static_cast<long long>(settings.steps), escaped(checkpoints.last_path()).c_str());
    return *std::move(resumed);
  }
  log_info("%s holds no checkpoint: starting from step 1 with %s", escaped(settings.out).c_str(),
           inputs.weights ? escaped(settings.model).c_str() : "new parameters");
  load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), model);
  return {};
}

// The copy of the training state that saves are written from while training goes on. Null, with a log line, if there is
// no memory for it: training then waits for each save, and nothing else changes.
std::unique_ptr<StateCopy> state_copy(TrainModel& model) {
  try {
    return model.make_state_copy();
  } catch (const Error& error) {
    if (error.code() != Exit::resources) throw;
    log_info("saves: training waits for each: %s", error.what());
    return nullptr;
  }
}

Exit train(const TrainDevice& device, const TrainSettings& settings, const TrainInputs& inputs,
           const std::vector<MemoryLine>& memory, bool save_in_background, SampleWriter* sample) {
  device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings),
                      sample != nullptr ? sample->positions() : 0);
  const RunDirectory directory(settings.out);
  TrainOptions options = settings.model_options();
  options.matmul_plans = directory.file("matmul_plans.txt");
  const std::unique_ptr<TrainModel> model = device.make(inputs.config, options);
  const RunIdentity identity{inputs.config,    settings.numeric_settings(),
                             settings.steps,   inputs.train->fingerprint(),
                             settings.device,  WEFT_VERSION,
                             inputs.tokenizer, inputs.began_from};
  CheckpointKeeper checkpoints(directory, identity, settings.keep);
  const TrainState state = begin(settings, inputs, checkpoints, *model);

  const Json header = header_record(settings, inputs, memory, WEFT_VERSION);
  write_config(directory, header);
  RunLog log(directory.file("log.jsonl"));
  log.write(header);
  log.write({{"type", "resume"}, {"step", state.step}, {"tokens", state.step * settings.batch_tokens}});

  DataLoader data(*inputs.train, settings.micro_batch, static_cast<std::uint64_t>(settings.seed), state.windows);
  TrainLoop::Parts parts{settings, *model, data, &checkpoints, log, nullptr, nullptr, nullptr};
  if (inputs.val) parts.validation = &*inputs.val;
  if (save_in_background) parts.copy = state_copy(*model);
  if (sample != nullptr) {
    sample->attach(*model);
    parts.sample = [sample](std::int64_t step) { return sample->write(step); };
  }
  return TrainLoop(std::move(parts), state).run();
}

Exit run(int argc, char** argv) {
  clean_thread_environment(argv);
  std::optional<TrainSettings> parsed =
      parse_train_options(argc, argv, "train_llama " WEFT_VERSION " (" WEFT_BUILD ")");
  if (!parsed) return Exit::ok;  // --help, --version
  TrainSettings& settings = *parsed;
  settings.set_threads(set_threads(settings.threads));
  on_stop(OnStop::leave);  // until the first step: before it there is nothing to save
  install_signal_handlers();
  const TrainDevice device(settings);

  refuse_model_directory(settings.model);
  refuse_tokenizer_directory(settings.tokenizer);
  const TrainInputs inputs = open_inputs(settings);
  if (!settings.given.contains("lr")) {
    settings.set_learning_rate(
        default_learning_rate(TensorTable(inputs.config).parameters(), inputs.weights.has_value()));
  }
  if (settings.print_config) {
    write_stdout(json_text(config_record(settings, inputs.config), 1) + "\n");
    return Exit::ok;
  }
  if (!settings.compare.empty()) return compare(device, settings, inputs);
  if (settings.bench) return bench(device, settings, inputs);
  if (settings.eval) {
    device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings), 0);
    const std::unique_ptr<TrainModel> model = device.make(inputs.config, settings.model_options());
    return evaluate(*model, settings, inputs);
  }
  std::optional<SampleWriter> sample;
  if (settings.sample_every > 0 && !inputs.tokenizer.empty()) {
    sample.emplace(settings, inputs.tokenizer, inputs.config);
  }
  const std::vector<MemoryLine> memory =
      device.plan(inputs.config, settings.model_options(), sample ? sample->positions() : 0);
  print_lines(start_report(settings, inputs, memory), settings.dry_run);
  const SavePlan saves = plan_saves(settings, inputs.config, device.gpu() ? 0 : total_bytes(memory));
  if (!saves.line.empty()) print_lines({saves.line}, settings.dry_run);
  if (settings.dry_run) {
    device.check_memory(inputs.config, settings.model_options(), batch_sequences(settings),
                        sample ? sample->positions() : 0);
    return Exit::ok;
  }
  return train(device, settings, inputs, memory, saves.in_background, sample ? &*sample : nullptr);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
