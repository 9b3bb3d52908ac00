// train_llama: trains Llama models. The table of contents of training: options -> data -> model -> loop.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/cpu/llama.h"
#ifdef WEFT_CUDA
#include "llmc/cuda/llama/llama.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/cuda/transformer/llama_decoder.h"
#endif
#include "llmc/file/run_dir.h"
#include "llmc/model/compare.h"
#include "llmc/train/background_save.h"
#include "llmc/train/bench.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/evaluate.h"
#include "llmc/train/fault_injection.h"
#include "llmc/train/inputs.h"
#include "llmc/train/loop.h"
#include "llmc/train/options.h"
#include "llmc/train/report.h"
#include "llmc/train/run_log.h"
#include "llmc/train/sample.h"
#include "version.h"

namespace weft {
namespace {

// Where a run computes. The only place in this program that knows both devices.
struct Place {
  bool gpu = false;
  std::string name;                   // of the GPU, or "CPU"
  std::uint64_t available_bytes = 0;  // for the plan; 0: unknown
  double compare_tolerance = 1e-5;    // fp32 against PyTorch in fp32, relative to a tensor's largest value

  // `sample_positions`: of the decoder that writes samples; 0: none. The CPU's plan leaves that one out.
  std::vector<MemoryLine> plan(const ModelConfig& config, const TrainOptions& options,
                               [[maybe_unused]] std::int64_t sample_positions) const {
#ifdef WEFT_CUDA
    if (gpu) {
      std::vector<MemoryLine> lines = cuda::plan_llama(config, options);
      if (sample_positions == 0) return lines;
      for (MemoryLine& line : cuda::plan_llama_decoder(config, options.precision, sample_positions)) {
        lines.push_back(std::move(line));
      }
      return lines;
    }
#endif
    return cpu::plan_llama(config, options);
  }
  std::unique_ptr<TrainModel> make(const ModelConfig& config, const TrainOptions& options) const {
#ifdef WEFT_CUDA
    if (gpu) return cuda::make_llama(config, options);
#endif
    return cpu::make_llama(config, options);
  }
};

// The GPU where it was asked for or, with `auto`, where there is one. `plan_only`: --dry-run and --print-config speak of
// a GPU without having one, where the program knows GPUs.
Place find_gpu(const std::string& device, [[maybe_unused]] const FaultPlan& faults, [[maybe_unused]] bool plan_only) {
  if (device == "cpu") return {};
#ifdef WEFT_CUDA
  const cuda::Device gpu = cuda::probe_device(static_cast<int>(faults.gpu_arch.value_or(0)));
  const auto free_bytes =
      static_cast<std::uint64_t>(faults.gpu_free.value_or(static_cast<std::int64_t>(gpu.free_bytes)));
  if (gpu.usable) return {true, gpu.name, free_bytes, 1e-4};
  if (device == "cuda" && plan_only) return {true, "a GPU that is not here", 0, 1e-4};
  const std::string problem = gpu.problem;
  const Exit code = gpu.code;
#else
  const std::string problem = "this program was built without nvcc and has no GPU code";
  const Exit code = Exit::environment;
#endif
  if (device == "cuda") fail(code, "--device cuda: %s. --device cpu needs no GPU", problem.c_str());
  log_info("running on the CPU: %s", problem.c_str());
  return {};
}

// What `auto` means on this machine and in this build; afterwards device and precision are definite.
Place choose_place(TrainSettings& s) {
  const bool named_gpu = s.gpu_memory_bytes > 0;
  Place place = find_gpu(named_gpu ? "cuda" : s.device, parse_faults(s.debug_inject), s.dry_run || s.print_config);
  if (named_gpu) {
    place.name = "a GPU with " + s.gpu_memory;
    place.available_bytes = s.gpu_memory_bytes;
  }
  if (!place.gpu) {
    place.name = "CPU";
    place.available_bytes = available_host_memory();
    if (s.precision == "bf16") fail(Exit::usage, "--precision: got bf16, the CPU computes in fp32 only");
  }
  const std::string precision = s.precision != "auto" ? s.precision : place.gpu ? "bf16" : "fp32";
  s.set_device(place.gpu ? "cuda" : "cpu", precision);
  if (s.moments == "bf16" && (!place.gpu || precision != "bf16")) {
    fail(Exit::usage, "--moments: got bf16, which needs a GPU and --precision bf16");
  }
  return place;
}

// A plan that cannot fit is refused before anything is allocated, with what would fit.
void check_memory(const Place& place, const ModelConfig& config, const TrainSettings& settings,
                  std::int64_t sample_positions) {
  TrainOptions options = settings.model_options();
  const auto planned = [&] { return total_bytes(place.plan(config, options, sample_positions)); };
  const std::uint64_t available = place.available_bytes, needed = planned();
  if (needed <= available || available == 0) return;
  const std::int64_t sequences = settings.batch_tokens / settings.seq_len;  // which micro-batches have to divide
  do --options.micro_batch;
  while (options.micro_batch > 1 && (sequences % options.micro_batch != 0 || planned() > available));
  const bool fits = options.micro_batch > 0 && planned() <= available;
  fail(Exit::resources, "the plan needs %s of memory, %s has %s available. %s",
       human_bytes(static_cast<double>(needed)).c_str(), place.name.c_str(),
       human_bytes(static_cast<double>(available)).c_str(),
       fits        ? format("--micro-batch %lld would fit", static_cast<long long>(options.micro_batch)).c_str()
       : place.gpu ? "Not even --micro-batch 1 fits: try --recompute block, --moments bf16, a shorter --seq-len or a "
                     "smaller model"
                   : "Not even --micro-batch 1 fits: try --recompute block, a shorter --seq-len or a smaller model");
}

Exit compare(const Place& place, const TrainSettings& settings, const TrainInputs& inputs) {
  const TensorFile dump = TensorFile::open(settings.compare, FileKind::reference_dump);
  const auto make = [&](const TrainOptions& options) {
    std::unique_ptr<TrainModel> model = place.make(inputs.config, options);
    load_parameters(inputs, options.seed, *model);
    return model;
  };
  const Comparison comparison =
      compare_training(dump, settings.model_options().precision, place.compare_tolerance, make);
  for (const std::string& line : comparison.table()) write_stdout(line + "\n");
  return comparison.passed() ? Exit::ok : Exit::internal;
}

Exit bench(const Place& place, const TrainSettings& settings, const TrainInputs& inputs) {
  check_memory(place, inputs.config, settings, 0);
  const std::unique_ptr<TrainModel> model = place.make(inputs.config, settings.model_options());
  if (inputs.weights) {
    load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), *model);
  } else {
    bench_parameters(*model);
  }
  if (settings.operators) {
    const OperatorTable table = bench_operators(*model, settings);
    if (settings.json) {
      write_stdout(json_text(operator_table_json(table, settings, place.name)) + "\n");
    } else {
      for (const std::string& line : operator_table_text(table, place.name)) write_stdout(line + "\n");
    }
    return Exit::ok;
  }
  const TrainBenchResult result = bench_training(*model, settings, place.name);
  if (settings.json) {
    write_stdout(json_text(train_bench_json(result, settings, place.name)) + "\n");
  } else {
    for (const std::string& line : train_bench_text(result, place.name)) write_stdout(line + "\n");
  }
  return Exit::ok;
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
    write_file_atomically(directory.file("config.json"), json_text(header, 1) + "\n");
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

// Null, with a line, where the memory for it cannot be had: saves then hold training up, and nothing else changes.
std::unique_ptr<StateCopy> state_copy(TrainModel& model) {
  try {
    return model.make_state_copy();
  } catch (const Error& error) {
    if (error.code() != Exit::resources) throw;
    log_info("saves: training waits for each: %s", error.what());
    return nullptr;
  }
}

Exit train(const Place& place, const TrainSettings& settings, const TrainInputs& inputs,
           const std::vector<MemoryLine>& memory, bool save_in_background, SampleWriter* sample) {
  check_memory(place, inputs.config, settings, sample != nullptr ? sample->positions() : 0);
  const RunDirectory directory(settings.out);
  TrainOptions options = settings.model_options();
  options.matmul_plans = directory.file("matmul_plans.txt");
  const std::unique_ptr<TrainModel> model = place.make(inputs.config, options);
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
  TrainLoop::Parts parts{settings, *model, data, checkpoints, log, nullptr, nullptr, nullptr};
  if (inputs.val) parts.validation = &*inputs.val;
  if (save_in_background) parts.copy = state_copy(*model);
  if (sample != nullptr) {
    sample->attach(*model);
    parts.sample = [sample](std::int64_t step) { return sample->write(step); };
  }
  return TrainLoop(std::move(parts), state).run();
}

Exit run(int argc, const char* const* argv) {
  std::optional<TrainSettings> parsed =
      parse_train_options(argc, argv, "train_llama " WEFT_VERSION " (" WEFT_BUILD ")");
  if (!parsed) return Exit::ok;  // --help, --version
  TrainSettings& settings = *parsed;
  install_signal_handlers();
  const Place place = choose_place(settings);

  const TrainInputs inputs = open_inputs(settings);
  if (settings.print_config) {
    write_stdout(json_text(config_record(settings, inputs.config), 1) + "\n");
    return Exit::ok;
  }
  if (!settings.compare.empty()) return compare(place, settings, inputs);
  if (settings.bench) return bench(place, settings, inputs);
  if (settings.eval) {
    check_memory(place, inputs.config, settings, 0);
    const std::unique_ptr<TrainModel> model = place.make(inputs.config, settings.model_options());
    return evaluate(*model, settings, inputs);
  }
  std::optional<SampleWriter> sample;
  if (settings.sample_every > 0 && !inputs.tokenizer.empty()) {
    sample.emplace(settings, inputs.tokenizer, inputs.config);
  }
  const std::vector<MemoryLine> memory =
      place.plan(inputs.config, settings.model_options(), sample ? sample->positions() : 0);
  print_lines(start_report(settings, inputs, memory), settings.dry_run);
  const SavePlan saves = plan_saves(settings, inputs.config, place.gpu ? 0 : total_bytes(memory));
  if (!saves.line.empty()) print_lines({saves.line}, settings.dry_run);
  if (settings.dry_run) {
    check_memory(place, inputs.config, settings, sample ? sample->positions() : 0);
    return Exit::ok;
  }
  return train(place, settings, inputs, memory, saves.in_background, sample ? &*sample : nullptr);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
