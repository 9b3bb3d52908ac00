// The inference model's memory, and the functions that the programs call. The rest is in the files that
// inference_model.h lists.
#include "llmc/cuda/inference/inference.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/base/sampling_math.h"
#include "llmc/cuda/inference/inference_model.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/cuda/inference/quantized_parameters.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/model/single_sequence.h"

namespace weft::cuda {

// ---- memory -----------------------------------------------------------------------------------------------------------

PagedAttentionShape attention_shape(const ModelConfig& c, const InferenceOptions& pool) {
  return {c.num_heads, c.num_kv_heads,     c.head_dim,        row_bucket(pool.max_rows),
          pool.slots,  pool.max_positions, c.longest_window()};
}

std::size_t step_bytes(const ModelConfig& c, const InferenceOptions& pool) {
  const std::int64_t rows = row_bucket(pool.max_rows);
  const std::int64_t pages_of_sequence = ceil_div(pool.max_positions, pool.page_size);
  std::byte* const begin = nullptr;
  const std::byte* const arrays_end = step_arrays(begin, rows, rows).work;
  return static_cast<std::size_t>(arrays_end - begin) + paged_work_bytes(attention_shape(c, pool)) +
         static_cast<std::size_t>(pool.slots * pages_of_sequence + 1) * sizeof(std::int32_t);
}

template <typename S>
ArenaLayout plan_inference_workspace(const ModelConfig& c, const InferenceOptions& pool, InferenceBuffers<S>& b,
                                     const std::optional<LoraConfig>& lora, bool fp8_activations) {
  const std::int64_t rows = row_bucket(pool.max_rows), logit_rows = std::min(kLogitRows, rows), C = c.hidden_size;
  ArenaLayout layout("inference workspace");
  layout.reserve(&b.residual, rows * C);
  layout.reserve(&b.norm1, rows * C);
  layout.reserve(&b.norm2, two_norms(c) ? rows * C : 0);
  layout.reserve(&b.branch, c.post_norms ? rows * C : 0);
  layout.reserve(&b.qkv, rows * c.qkv_size());
  layout.reserve(&b.attention, rows * c.q_size());
  layout.reserve(&b.product, rows * c.ffn_size);
  const bool adapted_up = low_rank_hidden(lora, BlockLinear::up) > 0,
             adapted_qkv = low_rank_hidden(lora, BlockLinear::qkv) > 0;
  const std::int64_t up_columns = linear_size(c, BlockLinear::up).OC;
  layout.reserve(&b.gate_up, gate_up_in_memory(c) || adapted_up ? rows * up_columns : 0);
  std::int64_t hidden = 0;
  for (const BlockLinear linear : kBlockLinears) hidden = std::max(hidden, low_rank_hidden(lora, linear));
  layout.reserve(&b.low_rank, rows * hidden);
  layout.reserve(&b.sums, rows * std::max(adapted_qkv ? c.qkv_size() : 0, adapted_up ? up_columns : 0));
  layout.reserve(&b.codes.codes, fp8_activations ? rows * widest_input(c) : 0);
  layout.reserve(&b.codes.scales, fp8_activations ? rows : 0);
  layout.reserve(&b.gathered, logit_rows * C);
  layout.reserve(&b.final_norm, logit_rows * C);
  layout.reserve(&b.logits, logit_rows * c.vocab_size);
  layout.reserve(&b.sampled_ids, logit_rows);
  layout.reserve(&b.errors, logit_rows);
  layout.reserve(&b.most_likely, rows * kMaxAlternatives);
  layout.reserve(&b.last_ids, pool.slots + kDeviceDrafts);
  const std::int64_t angles = pool.max_positions * (c.rope.rotary_dim / 2);
  for (float** table : {&b.cos, &b.sin}) layout.reserve(table, angles);
  for (float** table : {&b.local_cos, &b.local_sin}) layout.reserve(table, c.local_rope_theta > 0 ? angles : 0);
  for (std::byte*& step : b.step) layout.reserve_bytes(&step, step_bytes(c, pool));
  layout.reserve_bytes(&b.attention_workspace, paged_attention_workspace(attention_shape(c, pool)));
  return layout;
}

namespace {

template <typename S>
std::vector<MemoryLine> memory_lines(const ModelConfig& config, bool kv_fp8, std::uint64_t parameters,
                                     std::uint64_t pages, std::uint64_t workspace) {
  const std::string storage = dtype_name(storage_dtype<S>());
  const std::string of_pages = kv_fp8 ? "fp8, a layer in " + storage : storage;
  std::vector<MemoryLine> lines = {{"K/V cache (" + of_pages + ")", pages}, {"workspace", workspace}};
  const std::string types =
      config.quantization.any() ? quantization_text(config.quantization) + ", others " + storage : storage;
  if (parameters > 0) lines.insert(lines.begin(), {"parameters (" + types + ")", parameters});
  return lines;
}

template <typename S>
std::vector<MemoryLine> plan_of(const ModelConfig& config, const InferenceOptions& asked, std::uint64_t parameters,
                                const std::optional<LoraConfig>& lora = std::nullopt, bool fp8_activations = false) {
  const InferenceOptions pool = completed(asked, config);
  InferenceBuffers<S> buffers;
  return memory_lines<S>(config, pool.kv_fp8, parameters, plan_pages(config, pool, sizeof(S)).bytes(),
                         plan_inference_workspace<S>(config, pool, buffers, lora, fp8_activations).plan().bytes());
}

}  // namespace

template <typename S>
Inference<S>::Inference(const ModelConfig& config, const InferenceOptions& pool, const GpuInferenceOptions& options,
                        DeviceWeights<S> weights, std::unique_ptr<DeviceArena> own)
    : config_(config),
      pool_(completed(pool, config)),
      options_(options),
      own_(std::move(own)),
      weights_(std::move(weights)),
      device_(launch_device()),
      kv_arena_(plan_pages(config, pool_, sizeof(S))),
      layout_(plan_inference_workspace<S>(config, pool_, b_, options.lora, options.fp8_activations)),
      workspace_(layout_.plan()) {
  layout_.bind(workspace_);
  workspace_.clear(stream_);  // padding rows, slots, errors and attention's workspace must start as zeros
  kv_arena_.clear(stream_);
  const std::int64_t rows = row_bucket(pool_.max_rows);
  for (std::int64_t i = 0; i < kDepth; ++i) {
    flights_.push_back(std::make_unique<Flight>(step_bytes(config_, pool_), rows));
  }
  for (std::int64_t i = 0; i < kStepSlots; ++i) rules_.push_back(std::make_unique<Rules>(rows));
  const RopeTable table = rope_table(config.rope, pool_.max_positions);
  rope_ = upload_rope_table(table, b_.cos, b_.sin, stream_);
  RopeTable local;
  if (config.local_rope_theta > 0) {
    local = rope_table(config.local_rope(), pool_.max_positions);
    local_rope_ = upload_rope_table(local, b_.local_cos, b_.local_sin, stream_);
  }
  if (options.fused_steps) {
    if constexpr (std::is_same_v<S, float>) {
      fail(Exit::internal, "fused steps in fp32");
    } else {
      if (const std::string reason = fused_steps_unsupported_reason(config, storage_dtype<S>()); !reason.empty()) {
        fail(Exit::environment, "%s", reason.c_str());
      }
      const InferenceParts<S> own_parts = parts();
      fused_ = std::make_unique<FusedStep<S>>(config, weights_, own_parts.cache, rope_, stream_);
    }
  }
  cuda::check(cudaEventRecord(*last_done_, stream_), "clearing GPU memory");
  stream_.synchronize("clearing GPU memory");
}

template <typename S>
std::vector<MemoryLine> Inference<S>::memory() const {
  std::vector<MemoryLine> lines = memory_lines<S>(config_, pool_.kv_fp8, own_ != nullptr ? own_->bytes() : 0,
                                                  kv_arena_.bytes(), workspace_.bytes());
  if (fused_ != nullptr) std::ranges::copy(plan_fused_steps(config_), std::back_inserter(lines));
  return lines;
}

template <typename S>
std::uint64_t Inference<S>::bytes_per_step(std::int64_t sequences, std::int64_t context) const {
  return read_bytes_of_step(config_, sequences, context, sizeof(S), pool_.kv_fp8);
}

#define WEFT_INSTANTIATE(S)                                                                                 \
  template Inference<S>::Inference(const ModelConfig&, const InferenceOptions&, const GpuInferenceOptions&, \
                                   DeviceWeights<S>, std::unique_ptr<DeviceArena>);                         \
  template std::vector<MemoryLine> Inference<S>::memory() const;                                            \
  template std::uint64_t Inference<S>::bytes_per_step(std::int64_t, std::int64_t) const;
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

// ---- weights ----------------------------------------------------------------------------------------------------------
namespace {

void check_model(const ModelConfig& config, DType dtype) {
  const std::string reason = inference_unsupported_reason(config, dtype);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
}

void check_options(const ModelConfig& config, const InferenceOptions& pool, const GpuInferenceOptions& options) {
  check_model(config, options.dtype);
  if (options.fp8_activations) {
    std::string reason = fp8_activations_unsupported_reason(config, options.dtype, options.lora);
    if (reason.empty() && options.fused_steps) reason = "not with fused steps";
    if (!reason.empty()) fail(Exit::usage, "fp8 activations: %s", reason.c_str());
    if (const std::string gpu = fp8_activations_unsupported_gpu(); !gpu.empty())
      fail(Exit::environment, "%s", gpu.c_str());
  }
  if (pool.kv_fp8 && options.dtype == DType::f32)
    fail(Exit::usage, "keys and values in fp8 on a GPU need fp16 or bf16 beside them");
  if (pool.kv_fp8 && options.fused_steps) fail(Exit::usage, "keys and values in fp8: not with fused steps");
}

template <typename S>
constexpr bool kHoldsQuantized = !std::is_same_v<S, float>;  // inference_unsupported_reason() says so

template <typename S>
MemoryPlan parameters_plan(const ModelConfig& config, const std::optional<LoraConfig>& lora, bool fp8_activations) {
  if constexpr (kHoldsQuantized<S>) {
    if (config.quantization.any()) return QuantizedParameters<S>(config, lora, fp8_activations).plan();
  }
  return per_parameter_plan("parameters", TensorTable(config), sizeof(S));
}

// A model that owns its parameters. fill(table, parameters) writes them once all memory is allocated; `parameters` is a
// list of targets if the model is quantised, otherwise the beginning of the arena. `adapter`: what stands beside the weights, or
// null.
template <typename S, typename Fill>
std::unique_ptr<InferenceModel> filled_inference(const ModelConfig& config, const InferenceOptions& pool,
                                                 const GpuInferenceOptions& options, const Fill& fill,
                                                 const ModelFile* adapter = nullptr) {
  const MemoryPlan plan = parameters_plan<S>(config, options.lora, options.fp8_activations);
  auto own = std::make_unique<DeviceArena>(plan);
  check(cudaMemset(own->at<S>(0), 0, own->bytes()), "clearing GPU memory");  // padding between tensors
  check(cudaDeviceSynchronize(), "clearing GPU memory");
  if constexpr (kHoldsQuantized<S>) {
    if (config.quantization.any()) {
      const QuantizedParameters<S> parameters(config, options.lora, options.fp8_activations);
      std::byte* const arena = own->at<std::byte>(0);
      const std::vector<ParameterTarget<S>> targets = parameters.targets(arena);
      DeviceWeights<S> weights = parameters.weights(arena);
      auto model = std::make_unique<Inference<S>>(config, pool, options, std::move(weights), std::move(own));
      fill(parameters.table(), std::span<const ParameterTarget<S>>(targets));
      if (adapter != nullptr) parameters.load_adapter(*adapter, arena);
      return model;
    }
  }
  const TensorTable table(config);
  S* const parameters = own->at<S>(0);
  DeviceWeights<S> weights = bind_plain<S>(config, table, parameters);
  auto model = std::make_unique<Inference<S>>(config, pool, options, std::move(weights), std::move(own));
  fill(table, parameters);
  return model;
}

}  // namespace

std::string inference_unsupported_reason(const ModelConfig& c, DType dtype) {
  if (const std::string reason = head_dim_unsupported_reason(c.head_dim); !reason.empty()) return reason;
  if (gate_up_in_memory(c) && c.quantization.any()) return "mlp_bias: the GPU has no quantised gate and up with biases";
  if (c.parallel_residual && (c.post_norms || c.norm_weight_offset != 0))
    return "parallel_residual: the GPU has no norms behind attention and MLP, nor with 1 + weight, beside it";
  if (c.activation == Activation::gelu_tanh)
    return "activation: the GPU has GELU with erf alone, not its approximation by tanh";
  if (c.quantization.any() && dtype == DType::f32)
    return "quantised weights on a GPU need fp16 or bf16 beside them. Use --dtype fp16 or bf16";
  if (c.hidden_size % 8 != 0 || c.hidden_size > kMaxNormWidth) {
    return format("hidden_size: got %lld, the GPU has kernels for multiples of 8 up to %lld",
                  static_cast<long long>(c.hidden_size), static_cast<long long>(kMaxNormWidth));
  }
  if (c.vocab_size > kMaxSampledVocab) {
    return format("vocab_size: got %lld, the GPU samples from at most %lld", static_cast<long long>(c.vocab_size),
                  static_cast<long long>(kMaxSampledVocab));
  }
  const std::int64_t C = c.hidden_size, q = c.q_size();
  const std::pair<std::int64_t, std::int64_t> matrices[] = {
      {C, c.qkv_size()}, {q, C}, {C, c.ffn_size}, {c.ffn_size, C}, {C, c.vocab_size}};
  for (const auto& [K, OC] : matrices) {
    const std::string reason = rows_matmul_unsupported_reason(K, OC, dtype);
    if (!reason.empty()) return reason;
  }
  return "";
}

std::string fp8_activations_unsupported_reason(const ModelConfig& config, DType dtype,
                                               const std::optional<LoraConfig>& lora) {
  std::string reason = weft::fp8_activations_unsupported_reason(config.quantization, lora.has_value());
  if (!reason.empty()) return reason;
  if (dtype == DType::f32) return "fp8 activations need --dtype fp16 or bf16";
  if (config.gated() && config.ffn_size % 8 != 0) {
    return format("ffn_size: got %lld, expected a multiple of 8", static_cast<long long>(config.ffn_size));
  }
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config, linear);
    if (reason = rows_matmul_fp8_unsupported_reason(size.C, size.OC); !reason.empty()) return reason;
  }
  return "";
}

std::string fp8_activations_unsupported_gpu() {
  return rows_matmul_fp8_unsupported_gpu();
}

std::string fused_steps_unsupported_reason(const ModelConfig& config, DType dtype) {
  if (dtype == DType::f32) return "fused decoding needs fp16 or bf16";
  return fused_step_unsupported_reason(config, probe_device());
}

std::vector<MemoryLine> plan_fused_steps(const ModelConfig& config) {
  return FusedStep<fp16>::memory(config);
}

std::vector<MemoryLine> plan_inference(const ModelConfig& config, const InferenceOptions& pool, DType dtype,
                                       const std::optional<LoraConfig>& lora, bool fp8_activations) {
  check_model(config, dtype);
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    return plan_of<S>(config, pool, parameters_plan<S>(config, lora, fp8_activations).bytes(), lora, fp8_activations);
  });
}

std::unique_ptr<InferenceModel> load_inference(const ModelFile& file, const InferenceOptions& pool,
                                               const GpuInferenceOptions& asked) {
  const ModelFile* const adapter = file.adapter_beside();
  GpuInferenceOptions options = asked;
  if (adapter != nullptr) options.lora = adapter->lora();
  check_options(file.config(), pool, options);
  if (options.lora && options.fused_steps)
    fail(Exit::usage, "an adapter beside quantised weights: not with fused steps");
  return with_storage(options.dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto fill = [&](const TensorTable&, auto parameters) {
      load_parameters<S>(file, parameters, options.progress);
    };
    return filled_inference<S>(file.config(), pool, options, fill, adapter);
  });
}

std::unique_ptr<InferenceModel> random_inference(const ModelConfig& config, std::uint64_t seed,
                                                 const InferenceOptions& pool, const GpuInferenceOptions& options) {
  check_options(config, pool, options);
  return with_storage(options.dtype, [&](auto storage) {
    using S = decltype(storage);
    return filled_inference<S>(config, pool, options, [&](const TensorTable& table, auto parameters) {
      randomize_parameters<S>(table, seed, parameters);
    });
  });
}

template <typename S>
std::unique_ptr<InferenceModel> make_inference(const ModelConfig& config, const TensorTable& table, const S* parameters,
                                               const InferenceOptions& pool, bool direct) {
  check_model(config, storage_dtype<S>());
  return std::make_unique<Inference<S>>(config, pool, GpuInferenceOptions{storage_dtype<S>(), direct},
                                        bind_plain<S>(config, table, parameters), nullptr);
}

template std::unique_ptr<InferenceModel> make_inference<float>(const ModelConfig&, const TensorTable&, const float*,
                                                               const InferenceOptions&, bool);
template std::unique_ptr<InferenceModel> make_inference<bf16>(const ModelConfig&, const TensorTable&, const bf16*,
                                                              const InferenceOptions&, bool);

std::vector<MemoryLine> plan_samples(const ModelConfig& config, Precision precision, std::int64_t capacity) {
  const InferenceOptions pool = one_sequence(capacity);
  const std::string reason =
      inference_unsupported_reason(config, precision == Precision::fp32 ? DType::f32 : DType::bf16);
  if (!reason.empty()) fail(Exit::usage, "samples on the GPU: %s. Use --sample-every 0", reason.c_str());
  std::vector<MemoryLine> lines =
      precision == Precision::fp32 ? plan_of<float>(config, pool, 0) : plan_of<bf16>(config, pool, 0);
  for (MemoryLine& line : lines) line.name += " of samples";
  return lines;
}

}  // namespace weft::cuda
