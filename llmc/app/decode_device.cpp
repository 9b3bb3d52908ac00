#include "llmc/app/decode_device.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/cpu/inference.h"
#include "llmc/model/single_sequence.h"
#include "llmc/model/tensor_table.h"
#include "llmc/train/initialize.h"
#ifdef WEFT_CUDA
#include "llmc/cuda/inference/fused_tokens.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/op/gemm/ceilings.h"
#endif

namespace weft {

DecodeDevice::DecodeDevice(const InferSettings& settings) : settings_(settings) {
  DeviceRequest request;
  request.device = settings.device;
  choice_ = choose_device(request);
  if (!choice_.gpu) use_cpu(choice_);
}

void DecodeDevice::use_cpu(const DeviceChoice& cpu) {
  choice_ = cpu;
  const std::string& why = choice_.cpu_reason;
  if (settings_.decode == "fused" || settings_.decode == "graph") {
    fail(Exit::environment, "--decode %s: needs a GPU%s%s. On the CPU there is --decode reference",
         settings_.decode.c_str(), why.empty() ? "" : ": ", why.c_str());
  }
  if (settings_.dtype == "fp16" || settings_.dtype == "bf16") {
    fail(Exit::usage, "--dtype: got %s, the CPU computes in fp32 only", settings_.dtype.c_str());
  }
  announce_cpu(choice_);
  shared_cores_.emplace();
}

namespace {

// Rows of a step on the CPU: few, because a step of many takes long, and the sequences that are being decoded wait for
// it.
constexpr std::int64_t kCpuRows = 128;
constexpr double kCpuKvShare = 0.8;  // of the memory that is free beside the parameters

// How pages store keys and values.
struct KvElements {
  std::uint64_t bytes;
  bool fp8;
  std::uint64_t of(const ModelConfig& config, std::int64_t positions) const {
    return kv_bytes(config, positions, bytes, fp8);
  }
};

// The model's share of `bytes`, which are for the keys and values of the model and of its draft model, if there is one:
// each gets memory for the same number of positions.
std::uint64_t kv_share(std::uint64_t bytes, const ModelConfig& config, const std::optional<ModelConfig>& draft,
                       const KvElements& elements) {
  if (!draft) return bytes;
  const auto own = static_cast<double>(elements.of(config, 1)), other = static_cast<double>(elements.of(*draft, 1));
  return static_cast<std::uint64_t>(static_cast<double>(bytes) * own / (own + other));
}

// The page pool on the CPU for `sequences` sequences, in memory that the parameters leave.
InferenceOptions cpu_pool(const ModelConfig& config, std::uint64_t kv_memory, std::int64_t sequences,
                          const std::optional<ModelConfig>& draft, bool kv_fp8) {
  const KvElements elements = {kv_fp8 ? 0 : sizeof(float), kv_fp8};
  std::uint64_t bytes = kv_memory;
  if (bytes == 0) {
    const auto parameters_of = [](const ModelConfig& of) { return parameter_plan(TensorTable(of)).bytes(); };
    const std::uint64_t free = free_host_memory(),
                        parameters = parameters_of(config) + (draft ? parameters_of(*draft) : 0);
    if (free <= parameters) {
      fail(Exit::resources, "the parameters need %s of memory, %s are free",
           human_bytes(static_cast<double>(parameters)).c_str(), human_bytes(static_cast<double>(free)).c_str());
    }
    bytes = static_cast<std::uint64_t>(kCpuKvShare * static_cast<double>(free - parameters));
  }
  InferenceOptions options =
      pool_options(config, kv_share(bytes, config, draft, elements), sequences, elements.bytes, kv_fp8);
  options.max_rows = std::max(kCpuRows, sequences);
  return options;
}

std::unique_ptr<InferenceModel> random_on_cpu(const ModelConfig& config, const InferenceOptions& options,
                                              std::int64_t seed) {
  if (config.quantization.any()) {
    fail(Exit::usage, "--random-model: random weights in %s need a GPU. Use a model without ':'",
         quantization_text(config.quantization).c_str());
  }
  const auto fill = [&, tensor = std::uint64_t{0}](const TensorSpec& spec, std::byte* out) mutable {
    initial_values(spec, tensor++, config.num_layers, static_cast<std::uint64_t>(seed),
                   {reinterpret_cast<float*>(out), static_cast<std::size_t>(spec.elements)});
  };
  return cpu::make_inference(config, options, fill);
}

// The pool of a draft model for the sequences of `model`.
InferenceOptions pool_of_draft(const ModelConfig& config, const InferenceModel& model) {
  InferenceOptions pool;
  pool.num_pages = (model.num_pages() * model.page_size() + pool.page_size - 1) / pool.page_size;
  pool.slots = model.slots();
  pool.max_rows = model.max_rows();
  pool.max_positions = std::min(config.max_positions, model.max_positions());
  return pool;
}

void check_activations(const InferSettings& settings, const ModelConfig& config,
                       const std::optional<LoraConfig>& lora) {
  if (!settings.fp8_activations()) return;
  const std::string reason = fp8_activations_unsupported_reason(config.quantization, lora.has_value());
  if (!reason.empty()) fail(Exit::usage, "--activations fp8: %s. Use --activations auto", reason.c_str());
}

}  // namespace

#ifdef WEFT_CUDA

namespace {

// Loads a model with a progress line, and logs how long it took. load(progress) returns it.
template <typename Load>
auto load_on_gpu(const ModelFile& file, const Load& load) {
  const auto begin = std::chrono::steady_clock::now();
  std::uint64_t all = 0;
  for (const TensorSpec& spec : file.table().specs()) all += file.file().at(spec.name).bytes;
  ProgressLine line;
  auto model = load([&](std::uint64_t done, std::uint64_t) {
    line.show(format("reading %s: %s of %s, %.1f GB/s", escaped(file.file().path()).c_str(),
                     human_bytes(static_cast<double>(done)).c_str(), human_bytes(static_cast<double>(all)).c_str(),
                     static_cast<double>(done) / seconds_since(begin) / 1e9));
  });
  line.clear();
  log_info("read %s in %.2f s, %.1f GB/s, every hash right", human_bytes(static_cast<double>(all)).c_str(),
           seconds_since(begin), static_cast<double>(all) / seconds_since(begin) / 1e9);
  return model;
}

constexpr double kGpuKvShare = 0.9;  // of the memory that is free beside parameters and workspace

InferenceOptions one_sequence_on_gpu(std::int64_t capacity, bool fused, bool kv_fp8,
                                     std::int64_t rows = cuda::kInferenceRows) {
  InferenceOptions pool = one_sequence(capacity);
  pool.kv_fp8 = kv_fp8;
  pool.max_rows = std::min(rows, capacity);
  if (fused) {
    pool.page_size = cuda::kFusedPageSize;
    pool.num_pages = (capacity + pool.page_size - 1) / pool.page_size;
  }
  return pool;
}
constexpr std::int64_t kAllPositions = std::numeric_limits<std::int64_t>::max();

// Decoded in the fused kernel as far as `fused_positions`, which may be 0.
std::unique_ptr<DecodeModel> sequence_on_gpu(std::unique_ptr<InferenceModel> model, std::int64_t capacity, DType dtype,
                                             std::int64_t fused_positions = kAllPositions, bool layer_only = false) {
  std::unique_ptr<IdDecoder> decoder = fused_positions > 0 ? cuda::fused_tokens(*model, dtype, layer_only) : nullptr;
  return single_sequence(std::move(model), capacity, nullptr, std::move(decoder), fused_positions);
}

// What a model for one sequence, decoded in the fused kernel, will allocate.
std::vector<MemoryLine> plan_fused(const ModelConfig& config, const InferenceOptions& pool, DType dtype) {
  std::vector<MemoryLine> lines = cuda::plan_inference(config, pool, dtype);
  for (const MemoryLine& line : cuda::plan_fused_tokens(config)) lines.push_back(line);
  return lines;
}

}  // namespace

void DecodeDevice::choose(const ModelConfig& config, DType stored, const std::optional<LoraConfig>& lora) {
  check_activations(settings_, config, lora);
  if (!choice_.gpu) return;
  dtype_ = settings_.dtype == "fp16"                                           ? DType::f16
           : settings_.dtype == "bf16"                                         ? DType::bf16
           : settings_.dtype == "fp32" || settings_.task == InferTask::compare ? DType::f32
                                                                               : stored;
  lora_ = lora;
  if (settings_.kv_fp8() && dtype_ == DType::f32) {
    fail(Exit::usage, "--kv-dtype: got fp8, on the GPU it needs --dtype fp16 or bf16");
  }
  const std::string reason = cuda::inference_unsupported_reason(config, dtype_);
  if (settings_.fp8_activations() && reason.empty()) {
    std::string of_fp8 = cuda::fp8_activations_unsupported_reason(config, dtype_, lora);
    if (of_fp8.empty()) of_fp8 = cuda::fp8_activations_unsupported_gpu();
    if (!of_fp8.empty()) fail(Exit::environment, "--activations fp8: %s. Use --activations auto", of_fp8.c_str());
  }
  if (reason.empty()) return choose_decode(config, settings_.many_sequences() || settings_.drafts());
  if (settings_.device == "cuda") fail(Exit::usage, "--device cuda: %s. Use --device cpu", reason.c_str());
  use_cpu(choose_cpu(reason));
}

// --decode auto: fused if this GPU and model have it, otherwise graph, with a line that says why. It never is with
// --activations fp8, which parse_infer_options() refuses beside --decode fused, as it does --kv-dtype fp8 of steps of several
// rows. Many sequences and drafts take graph unless fused is asked for, so that the bits of a request do not depend on how much
// else runs.
void DecodeDevice::choose_decode(const ModelConfig& config, bool many) {
  if (settings_.bench_layer && (!config.parallel_residual || config.quantization.any())) {
    fail(Exit::usage, "--bench-layer: only for models with the parallel residual in 16 bits, and this one %s",
         config.quantization.any() ? "is quantised" : "has the sequential residual");
  }
  if (settings_.bench_timeline && config.quantization.any()) {
    fail(Exit::usage, "--bench-timeline: only for models in 16 bits, and this one is quantised");
  }
  if (lora_) {
    if (settings_.decode == "fused") {
      fail(Exit::environment, "--decode fused: got an adapter beside quantised weights. Use --decode graph");
    }
    if (settings_.decode == "auto") log_info("decode graph, not fused: an adapter stands beside quantised weights");
    decode_ = settings_.decode == "auto" ? "graph" : settings_.decode;
    return;
  }
  if (many || settings_.fp8_activations()) {
    decode_ = settings_.decode == "auto" ? "graph" : settings_.decode;
    if (decode_ != "fused") return;
    const std::string reason = cuda::fused_steps_unsupported_reason(config, dtype_);
    if (!reason.empty()) fail(Exit::environment, "--decode fused: %s. Use --decode graph", reason.c_str());
    return;
  }
  decode_ = settings_.decode == "auto" ? "fused" : settings_.decode;
  if (decode_ != "fused") return;
  std::string reason = cuda::fused_unsupported_reason(config, dtype_, settings_.kv_fp8());
  if (reason.empty() && settings_.decode == "auto" && cuda::graph_is_faster(config)) {
    reason = "the graph is faster for models as wide as this one";
  }
  if (reason.empty() && settings_.decode == "auto" && !cuda::fused_by_default(config)) {
    reason = "quantised weights of this model are decoded by the fused kernel only if --decode fused asks for it";
  }
  if (reason.empty() && settings_.decode == "auto" && config.quantization.any()) {
    const std::uint64_t needed =
        total_bytes(plan_fused(config, one_sequence_on_gpu(cuda::kFusedPageSize, true, settings_.kv_fp8()), dtype_));
    if (needed > choice_.available_bytes) {
      reason =
          "the fused kernel needs the quantised weights a second time, in an order of its own, and the GPU has no room";
    }
  }
  if (reason.empty()) return;
  if (settings_.decode == "fused") fail(Exit::environment, "--decode fused: %s. Use --decode graph", reason.c_str());
  decode_ = "graph";
  log_info("decode graph, not fused: %s", reason.c_str());
}

double DecodeDevice::read_ceiling() const {
  return choice_.gpu ? cuda::measure_read_bandwidth() : 0;
}

// What the model for one sequence takes, and the draft model beside it.
std::uint64_t DecodeDevice::planned(const ModelConfig& config, std::int64_t capacity, std::int64_t rows,
                                    DType dtype) const {
  const auto of = [&](const ModelConfig& each, bool fused, std::int64_t its_rows, const std::optional<LoraConfig>& lora,
                      bool fp8) {
    const InferenceOptions pool = one_sequence_on_gpu(capacity, fused, settings_.kv_fp8(), its_rows);
    return total_bytes(fused ? plan_fused(each, pool, dtype) : cuda::plan_inference(each, pool, dtype, lora, fp8));
  };
  const bool fused = decode_ == "fused" && !settings_.drafts();
  return (draft_ ? of(*draft_, fuses_draft(*draft_), cuda::kInferenceRows, std::nullopt, false) : 0) +
         steps_memory(config) + of(config, fused, rows, lora_, settings_.fp8_activations());
}

// Exit::resources if the plan does not fit, before anything is allocated; the message says what would fit.
void DecodeDevice::check_memory(const ModelConfig& config, std::int64_t capacity) const {
  if (!choice_.gpu) return;
  const auto fits = [&](std::int64_t positions, DType dtype) {
    return planned(config, positions, cuda::kInferenceRows, dtype) <= choice_.available_bytes;
  };
  if (fits(capacity, dtype_)) return;
  std::int64_t fitting = capacity;
  while (fitting > 1 && !fits(fitting, dtype_)) fitting /= 2;
  std::string advice = "Use --device cpu";
  if (fits(fitting, dtype_)) {
    advice = format("--context %lld would fit", static_cast<long long>(fitting));
  } else if (dtype_ == DType::f32 && fits(capacity, DType::f16)) {
    advice = "--dtype fp16 would fit";
  }
  fail_plan(planned(config, capacity, cuda::kInferenceRows, dtype_), choice_, advice);
}

// --decode auto leaves the fused kernel where the graph is faster.
std::unique_ptr<DecodeModel> DecodeDevice::one_on_gpu(const ModelConfig& config, std::int64_t capacity,
                                                      const MakePages& make) const {
  announce_gpu();
  check_memory(config, capacity);
  const bool fused = decode_ == "fused";
  const std::int64_t faster = settings_.decode == "auto" ? cuda::fused_positions(config) : kAllPositions;
  if (fused && faster < capacity)
    log_info("decode graph from position %lld on, where it is faster", static_cast<long long>(faster));
  const bool roomy = planned(config, capacity, cuda::kPromptRows, dtype_) <= choice_.available_bytes;
  const std::int64_t rows = roomy ? cuda::kPromptRows : cuda::kInferenceRows;
  return sequence_on_gpu(make(one_sequence_on_gpu(capacity, fused, settings_.kv_fp8(), rows)), capacity, dtype_,
                         fused ? faster : 0, settings_.bench_layer);
}

std::unique_ptr<DecodeModel> DecodeDevice::load(const ModelFile& file, std::int64_t capacity) const {
  if (!choice_.gpu)
    return single_sequence(load_pages(file, sequence_pool(capacity), settings_.fp8_activations()), capacity);
  return one_on_gpu(file.config(), capacity,
                    [&](const InferenceOptions& pool) { return load_pages(file, pool, settings_.fp8_activations()); });
}

std::unique_ptr<DecodeModel> DecodeDevice::make_random(const ModelConfig& config, std::int64_t capacity) const {
  if (!choice_.gpu) return single_sequence(random_pages(config, sequence_pool(capacity), false), capacity);
  return one_on_gpu(config, capacity, [&](const InferenceOptions& pool) {
    return random_pages(config, pool, settings_.fp8_activations());
  });
}

std::uint64_t DecodeDevice::steps_memory(const ModelConfig& config) const {
  const auto of = [&](const ModelConfig& each) {
    return fused_steps(each) ? total_bytes(cuda::plan_fused_steps(each)) : 0;
  };
  return of(config) + (draft_ && settings_.many_sequences() ? of(*draft_) : 0);
}

// A draft model has the fused kernel if that can run it; for the model itself choose_decode() has made sure.
bool DecodeDevice::fused_steps(const ModelConfig& config) const {
  const bool many = settings_.many_sequences() || settings_.drafts();
  return many && decode_ == "fused" && cuda::fused_steps_unsupported_reason(config, dtype_).empty();
}

bool DecodeDevice::fuses_draft(const ModelConfig& config) const {
  const bool wanted = settings_.decode == "auto" || settings_.decode == "fused";
  return choice_.gpu && wanted && cuda::fused_unsupported_reason(config, dtype_, settings_.kv_fp8()).empty() &&
         !cuda::graph_is_faster(config);
}

SequenceDraft DecodeDevice::sequence_draft(const ModelConfig& config, const InferenceModel& model,
                                           const MakePages& make) const {
  if (!fuses_draft(config)) return {make(draft_pool(config, model)), nullptr};
  const std::int64_t capacity = std::min(config.max_positions, model.max_positions());
  return {nullptr, sequence_on_gpu(make(one_sequence_on_gpu(capacity, true, settings_.kv_fp8())), capacity, dtype_)};
}

SequenceDraft DecodeDevice::load_sequence_draft(const ModelFile& file, const InferenceModel& model) const {
  return sequence_draft(file.config(), model, [&](const InferenceOptions& pool) { return load_pages(file, pool); });
}

SequenceDraft DecodeDevice::make_random_draft(const ModelConfig& config, const InferenceModel& model) const {
  return sequence_draft(config, model, [&](const InferenceOptions& pool) { return random_pages(config, pool); });
}

std::unique_ptr<InferenceModel> DecodeDevice::load_pages(const ModelFile& file, const InferenceOptions& pool,
                                                         bool fp8_activations) const {
  if (!choice_.gpu) return cpu::load_inference(file, pool, DType::f32, fp8_activations);
  return load_on_gpu(file, [&](const cuda::LoadProgress& progress) {
    cuda::GpuInferenceOptions options{dtype_, decode_ == "reference", fused_steps(file.config()), progress};
    options.fp8_activations = fp8_activations;
    return cuda::load_inference(file, pool, options);
  });
}

std::unique_ptr<InferenceModel> DecodeDevice::random_pages(const ModelConfig& config, const InferenceOptions& pool,
                                                           bool fp8_activations) const {
  if (!choice_.gpu) return random_on_cpu(config, pool, settings_.seed);
  cuda::GpuInferenceOptions options{dtype_, decode_ == "reference", fused_steps(config), nullptr};
  options.fp8_activations = fp8_activations;
  return cuda::random_inference(config, static_cast<std::uint64_t>(settings_.seed), pool, options);
}

// On the GPU the pool gets what parameters and workspace leave.
InferenceOptions DecodeDevice::many_pool(const ModelConfig& config, std::uint64_t kv_memory,
                                         std::int64_t sequences) const {
  if (!choice_.gpu) return cpu_pool(config, kv_memory, sequences, draft_, settings_.kv_fp8());
  const std::uint64_t free = choice_.available_bytes;
  const KvElements elements = {dtype_bytes(dtype_), settings_.kv_fp8()};
  const auto pool_of = [&](std::uint64_t bytes) {
    InferenceOptions pool =
        pool_options(config, kv_share(bytes, config, draft_, elements), sequences, elements.bytes, elements.fp8);
    pool.max_rows = std::max(cuda::kInferenceRows, sequences);
    return pool;
  };
  // The memory beside the pages depends a little on their number, so it is computed for the largest pool.
  const auto kv_of_both = [&](std::int64_t positions) {
    return elements.of(config, positions) + (draft_ ? elements.of(*draft_, positions) : 0);
  };
  const InferenceOptions largest =
      pool_of(std::max(kv_of_both(config.max_positions * sequences), 3 * kv_of_both(InferenceOptions{}.page_size)));
  std::uint64_t beside =
      total_bytes(cuda::plan_inference(config, largest, dtype_, lora_, settings_.fp8_activations())) -
      elements.of(config, largest.num_pages * largest.page_size);
  beside += steps_memory(config);
  if (draft_) {
    InferenceOptions of_draft = largest;
    of_draft.max_positions = 0;
    beside += total_bytes(cuda::plan_inference(*draft_, of_draft, dtype_)) -
              elements.of(*draft_, of_draft.num_pages * of_draft.page_size);
  }
  const std::uint64_t rest =
      free > beside ? static_cast<std::uint64_t>(kGpuKvShare * static_cast<double>(free - beside)) : 0;
  if (rest == 0 || kv_memory > free - beside) {
    fail_plan(beside + kv_memory, choice_,
              rest > 0               ? "--kv-memory " + human_bytes(static_cast<double>(rest)) + " would fit"
              : dtype_ == DType::f32 ? "Try --dtype fp16 or bf16, a smaller --max-running, or --device cpu"
                                     : "Try a smaller --max-running, or --device cpu");
  }
  return pool_of(kv_memory > 0 ? kv_memory : rest);
}

InferenceOptions DecodeDevice::sequence_pool(std::int64_t capacity) const {
  if (choice_.gpu) return one_sequence_on_gpu(capacity, false, settings_.kv_fp8());
  InferenceOptions pool = one_sequence(capacity);
  pool.kv_fp8 = settings_.kv_fp8();
  return pool;
}

InferenceOptions DecodeDevice::draft_pool(const ModelConfig& config, const InferenceModel& model) const {
  InferenceOptions pool = pool_of_draft(config, model);
  pool.kv_fp8 = settings_.kv_fp8();
  if (!choice_.gpu) return pool;
  const std::string reason = cuda::inference_unsupported_reason(config, dtype_);
  if (!reason.empty()) fail(Exit::usage, "--draft: the GPU cannot run it: %s", reason.c_str());
  return pool;
}

#else  // built without CUDA

void DecodeDevice::choose(const ModelConfig& config, DType, const std::optional<LoraConfig>& lora) {
  check_activations(settings_, config, lora);
}
void DecodeDevice::check_memory(const ModelConfig&, std::int64_t) const {}

double DecodeDevice::read_ceiling() const {
  return 0;
}

std::unique_ptr<DecodeModel> DecodeDevice::load(const ModelFile& file, std::int64_t capacity) const {
  return single_sequence(load_pages(file, sequence_pool(capacity), settings_.fp8_activations()), capacity);
}

std::unique_ptr<DecodeModel> DecodeDevice::make_random(const ModelConfig& config, std::int64_t capacity) const {
  return single_sequence(random_pages(config, sequence_pool(capacity), false), capacity);
}

SequenceDraft DecodeDevice::load_sequence_draft(const ModelFile& file, const InferenceModel& model) const {
  return {load_draft(file, model), nullptr};
}

SequenceDraft DecodeDevice::make_random_draft(const ModelConfig& config, const InferenceModel& model) const {
  return {random_pages(config, draft_pool(config, model)), nullptr};
}

std::unique_ptr<InferenceModel> DecodeDevice::load_pages(const ModelFile& file, const InferenceOptions& pool,
                                                         bool fp8_activations) const {
  return cpu::load_inference(file, pool, DType::f32, fp8_activations);
}

std::unique_ptr<InferenceModel> DecodeDevice::random_pages(const ModelConfig& config, const InferenceOptions& pool,
                                                           bool) const {
  return random_on_cpu(config, pool, settings_.seed);
}

InferenceOptions DecodeDevice::many_pool(const ModelConfig& config, std::uint64_t kv_memory,
                                         std::int64_t sequences) const {
  return cpu_pool(config, kv_memory, sequences, draft_, settings_.kv_fp8());
}

InferenceOptions DecodeDevice::sequence_pool(std::int64_t capacity) const {
  InferenceOptions pool = one_sequence(capacity);
  pool.kv_fp8 = settings_.kv_fp8();
  return pool;
}

InferenceOptions DecodeDevice::draft_pool(const ModelConfig& config, const InferenceModel& model) const {
  InferenceOptions pool = pool_of_draft(config, model);
  pool.kv_fp8 = settings_.kv_fp8();
  return pool;
}

#endif

void DecodeDevice::announce_gpu() const {
  if (!choice_.gpu) return;
  log_info("running on %s in %s, %sdecode %s", choice_.name.c_str(), dtype_name(dtype_),
           settings_.fp8_activations() ? "activations of linear layers in fp8, " : "", decode_.c_str());
}

std::unique_ptr<InferenceModel> DecodeDevice::load_inference(const ModelFile& file, std::uint64_t kv_memory,
                                                             std::int64_t sequences) const {
  announce_gpu();
  return load_pages(file, many_pool(file.config(), kv_memory, sequences), settings_.fp8_activations());
}

std::unique_ptr<InferenceModel> DecodeDevice::make_random_inference(const ModelConfig& config, std::uint64_t kv_memory,
                                                                    std::int64_t sequences) const {
  announce_gpu();
  return random_pages(config, many_pool(config, kv_memory, sequences), settings_.fp8_activations());
}

std::unique_ptr<InferenceModel> DecodeDevice::load_sequence(const ModelFile& file, std::int64_t capacity) const {
  announce_gpu();
  check_memory(file.config(), capacity);
  return load_pages(file, sequence_pool(capacity), settings_.fp8_activations());
}

std::unique_ptr<InferenceModel> DecodeDevice::make_random_sequence(const ModelConfig& config,
                                                                   std::int64_t capacity) const {
  announce_gpu();
  check_memory(config, capacity);
  return random_pages(config, sequence_pool(capacity), settings_.fp8_activations());
}

std::unique_ptr<InferenceModel> DecodeDevice::load_draft(const ModelFile& file, const InferenceModel& model) const {
  return load_pages(file, draft_pool(file.config(), model));
}

}  // namespace weft
