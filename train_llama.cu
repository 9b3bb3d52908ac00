// train_llama: trains Llama models. The table of contents of training: options -> data -> model -> loop.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/cpu/llama.h"
#include "llmc/file/run_dir.h"
#include "llmc/model/compare.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/inputs.h"
#include "llmc/train/loop.h"
#include "llmc/train/options.h"
#include "llmc/train/report.h"
#include "llmc/train/run_log.h"
#include "llmc/train/sample.h"
#include "version.h"

namespace weft {
namespace {

constexpr double kCompareTolerance =
    1e-5;  // fp32 against PyTorch in fp32, relative to a tensor's largest value

// What `auto` means on this machine and in this build; afterwards device and precision are definite.
void choose_device(TrainSettings& s) {
  if (s.device == "cuda") {
    fail(Exit::environment, "--device cuda: this build has no GPU path for training. Use --device cpu");
  }
  if (s.device == "auto") log_info("running on the CPU: this build has no GPU path for training");
  if (s.precision == "bf16") fail(Exit::usage, "--precision: got bf16, the CPU computes in fp32 only");
  s.set_device("cpu", "fp32");
}

std::vector<MemoryLine> plan_train_model(const ModelConfig& config, const TrainOptions& options) {
  return cpu::plan_llama(config, options);
}

std::unique_ptr<TrainModel> make_train_model(const ModelConfig& config, const TrainOptions& options) {
  return cpu::make_llama(config, options);
}

std::uint64_t bytes_of(const std::vector<MemoryLine>& memory) {
  std::uint64_t total = 0;
  for (const MemoryLine& line : memory) total += line.bytes;
  return total;
}

// A plan that cannot fit is refused before anything is allocated, with what would fit.
void check_memory(const ModelConfig& config, TrainOptions options, const std::vector<MemoryLine>& memory) {
  const std::uint64_t available = available_host_memory();
  const std::uint64_t planned = bytes_of(memory);
  if (planned <= available) return;
  while (options.micro_batch > 1 && bytes_of(plan_train_model(config, options)) > available)
    options.micro_batch /= 2;
  const bool fits = bytes_of(plan_train_model(config, options)) <= available;
  fail(Exit::resources, "the plan needs %s of memory, %s are available. %s",
       human_bytes(static_cast<double>(planned)).c_str(), human_bytes(static_cast<double>(available)).c_str(),
       fits ? format("--micro-batch %lld would fit", static_cast<long long>(options.micro_batch)).c_str()
            : "Not even --micro-batch 1 fits: try --recompute block, a shorter --seq-len or a smaller model");
}

Exit compare(const TrainSettings& settings, const TrainInputs& inputs) {
  const TensorFile dump = TensorFile::open(settings.compare, FileKind::reference_dump);
  const auto make = [&](const TrainOptions& options) {
    std::unique_ptr<TrainModel> model = make_train_model(inputs.config, options);
    load_parameters(inputs, options.seed, *model);
    return model;
  };
  const Comparison comparison = compare_training(dump, kCompareTolerance, make);
  for (const std::string& line : comparison.table()) write_stdout(line + "\n");
  return comparison.passed() ? Exit::ok : Exit::internal;
}

void print_lines(const std::vector<std::string>& lines, bool result) {
  for (const std::string& line : lines) {
    if (result)
      write_stdout(line + "\n");
    else
      log_info("%s", line.c_str());
  }
}

// config.json is for people and tools; no run fails for want of it.
void write_config(const RunDirectory& directory, const Json& header) {
  try {
    write_file_atomically(directory.file("config.json"),
                          header.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  } catch (const Error& error) {
    log_warning("%s", error.what());
  }
}

// The state to begin from: that of the newest checkpoint, or the first step.
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

Exit train(const TrainSettings& settings, const TrainInputs& inputs, const std::vector<MemoryLine>& memory) {
  check_memory(inputs.config, settings.model_options(), memory);
  const RunDirectory directory(settings.out);
  const std::unique_ptr<TrainModel> model = make_train_model(inputs.config, settings.model_options());
  const RunIdentity identity{inputs.config,   settings.numeric_settings(),
                             settings.steps,  inputs.train->fingerprint(),
                             settings.device, WEFT_VERSION,
                             inputs.tokenizer};
  CheckpointKeeper checkpoints(directory, identity, settings.keep);
  const TrainState state = begin(settings, inputs, checkpoints, *model);

  const Json header = header_record(settings, inputs, memory, WEFT_VERSION);
  write_config(directory, header);
  RunLog log(directory.file("log.jsonl"));
  log.write(header);
  log.write({{"type", "resume"}, {"step", state.step}, {"tokens", state.step * settings.batch_tokens}});

  DataLoader data(*inputs.train, settings.micro_batch, static_cast<std::uint64_t>(settings.seed),
                  state.windows);
  TrainLoop::Parts parts{settings, *model, data, checkpoints, log, nullptr, nullptr};
  if (inputs.val) parts.validation = &*inputs.val;
  std::optional<SampleWriter> sample;
  if (settings.sample_every > 0 && !inputs.tokenizer.empty()) {
    sample.emplace(settings, inputs.tokenizer, *model);
    parts.sample = [&sample](std::int64_t step) { return sample->write(step); };
  }
  return TrainLoop(parts, state).run();
}

Exit run(int argc, const char* const* argv) {
  std::optional<TrainSettings> parsed =
      parse_train_options(argc, argv, "train_llama " WEFT_VERSION " (" WEFT_BUILD ")");
  if (!parsed) return Exit::ok;  // --help, --version
  TrainSettings& settings = *parsed;
  install_signal_handlers();
  choose_device(settings);

  const TrainInputs inputs = open_inputs(settings);
  if (settings.print_config) {
    write_stdout(config_record(settings, inputs.config).dump(1) + "\n");
    return Exit::ok;
  }
  if (!settings.compare.empty()) return compare(settings, inputs);
  const std::vector<MemoryLine> memory = plan_train_model(inputs.config, settings.model_options());
  print_lines(start_report(settings, inputs, memory), settings.dry_run);
  return settings.dry_run ? Exit::ok : train(settings, inputs, memory);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
