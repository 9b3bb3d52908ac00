// The GPT-NeoX decoder's memory, and the functions that the programs call. The rest is in the files that
// neox_decoder.cuh lists.
#include "llmc/cuda/inference/neox.h"

#include <algorithm>

#include "llmc/cuda/inference/neox_decoder.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/device.h"

namespace weft::cuda {

// ---- memory -----------------------------------------------------------------------------------------------------------
template <typename S>
ArenaLayout plan_neox_workspace(const ModelConfig& c, std::int64_t capacity, const LaunchDevice& device,
                                NeoxBuffers<S>& b) {
  const std::int64_t rows = padded_rows(std::min(kChunk, capacity)), C = c.hidden_size, F = c.ffn_size,
                     V = c.vocab_size;
  ArenaLayout layout("decoder workspace");
  layout.reserve(&b.residual, rows * C);
  layout.reserve(&b.norm1, rows * C);
  layout.reserve(&b.norm2, rows * C);
  layout.reserve(&b.branch, rows * C);
  layout.reserve(&b.attention, rows * C);
  layout.reserve(&b.qkv, rows * 3 * C);
  layout.reserve(&b.up, rows * F);
  layout.reserve(&b.side_workspace, Matmul::kWorkspaceBytes);
  layout.reserve(&b.score_logits, std::min(kScoreChunk, rows) * V);
  layout.reserve(&b.logits, V);
  layout.reserve(&b.losses, kScoreChunk);
  const std::size_t partials = decode_attention_workspace({c.num_heads, c.head_dim}, device);
  layout.reserve(&b.partials, ceil_div(static_cast<std::int64_t>(partials), sizeof(float)));
  layout.reserve(&b.cos, capacity * (c.rope.rotary_dim / 2));
  layout.reserve(&b.sin, capacity * (c.rope.rotary_dim / 2));
  layout.reserve(&b.ids, rows + 1);
  layout.reserve(&b.state, 1);
  return layout;
}

MemoryPlan plan_neox_parameters(const TensorTable& table, std::size_t element_bytes) {
  MemoryPlan plan("parameters");
  plan.add(static_cast<std::uint64_t>(table.arena_elements()) * element_bytes);
  return plan;
}

MemoryPlan plan_neox_cache(const ModelConfig& c, std::int64_t capacity, std::size_t element_bytes) {
  MemoryPlan plan("K/V cache");
  plan.add(2 * static_cast<std::uint64_t>(c.num_layers * c.hidden_size * capacity) * element_bytes);
  return plan;
}

template <typename S>
std::vector<MemoryLine> neox_memory(const ModelConfig& config, const NeoxOptions& options, std::uint64_t parameters,
                                    std::uint64_t cache, std::uint64_t workspace) {
  const std::string type = std::string(" (") + dtype_name(options.dtype) + ")";
  std::vector<MemoryLine> lines = {{"parameters" + type, parameters},
                                   {"K/V cache" + type, cache},
                                   {"workspace", workspace + Matmul::kWorkspaceBytes}};
  if constexpr (!std::is_same_v<S, float>) {
    if (options.mode == DecodeMode::fused) {
      for (const MemoryLine& line : FusedDecode<S>::memory(config)) lines.push_back(line);
    }
  }
  return lines;
}

template <typename S>
NeoxDecoder<S>::NeoxDecoder(const ModelConfig& config, const NeoxOptions& options, const std::function<void(S*)>& fill)
    : config_(config),
      options_(options),
      table_(config),
      device_(launch_device()),
      layout_(plan_neox_workspace<S>(config, options.capacity, device_, b_)),
      matmul_(stream_),
      parameters_(plan_neox_parameters(table_, sizeof(S))),
      cache_arena_(plan_neox_cache(config, options.capacity, sizeof(S))),
      workspace_(layout_.plan()),
      host_logits_(static_cast<std::uint64_t>(config.vocab_size) * sizeof(float)) {
  layout_.bind(workspace_);
  workspace_.clear(stream_);   // tickets, and padding rows of GEMMs, must start as zeros
  parameters_.clear(stream_);  // padding between tensors
  stream_.synchronize("clearing GPU memory");
  fill(parameters_.at<S>(0));
  weights_ = bind_plain<S>(config, table_, parameters_.at<S>(0));
  cache_ = {cache_arena_.at<S>(0), cache_arena_.at<S>(0) + config.num_layers * config.hidden_size * options.capacity,
            options.capacity};
  const RopeTable table = rope_table(config.rope, options.capacity);
  rope_ = upload_rope_table(table, b_.cos, b_.sin, stream_);
  stream_.synchronize("RoPE table");
  if constexpr (!std::is_same_v<S, float>) {
    if (options.mode == DecodeMode::fused) {
      FusedTuning tuning;
      tuning.layer_only = options.layer_only;
      fused_ = std::make_unique<FusedDecode<S>>(config, weights_, cache_, rope_, mailbox_, stream_, tuning);
    }
  }
}

template class NeoxDecoder<float>;
template class NeoxDecoder<bf16>;
template class NeoxDecoder<fp16>;

// ---- what the programs call -------------------------------------------------------------------------------------------
namespace {

void check_model(const ModelConfig& config, DType dtype) {
  const std::string reason = neox_unsupported_reason(config, dtype);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
}

}  // namespace

const char* decode_mode_name(DecodeMode mode) {
  return mode == DecodeMode::reference ? "reference" : mode == DecodeMode::graph ? "graph" : "fused";
}

std::string neox_unsupported_reason(const ModelConfig& c, DType dtype) {
  if (const std::string reason = head_dim_unsupported_reason(c.head_dim); !reason.empty()) return reason;
  if (!c.windows.empty()) return "windows: the GPU has no attention with a sliding window";
  if (c.activation == Activation::gelu_tanh)
    return "activation: the GPU has GELU with erf alone, not its approximation by tanh";
  const std::int64_t element = static_cast<std::int64_t>(dtype_bytes(dtype));
  // a row of both output matrices together
  const std::int64_t unit = 16 / element, widest = kMaxResidualGemvBytes / element;
  if (c.ffn_size % unit != 0 || c.hidden_size > kMaxNormWidth || c.hidden_size + c.ffn_size > widest) {
    return format(
        "hidden_size %lld, ffn_size %lld: in %s the GPU has kernels for multiples of %lld, together at most %lld",
        static_cast<long long>(c.hidden_size), static_cast<long long>(c.ffn_size), dtype_name(dtype),
        static_cast<long long>(unit), static_cast<long long>(widest));
  }
  return "";
}

std::string fused_unsupported_reason(const ModelConfig& config, DType dtype) {
  if (dtype == DType::f32) return "the fused kernel computes with fp16 or bf16 weights, not fp32";
  if (config.quantization.any()) {
    const bool parallel = config.parallel_residual;
    if (config.quantization.weights == nullptr) {
      return "the fused kernel reads quantised heads beside quantised layers, not beside layers in 16 bits";
    }
    if (dtype != (parallel ? DType::f16 : DType::bf16)) {
      return format("the fused kernel reads quantised weights of %s beside %s, not %s",
                    parallel ? "models with the parallel residual" : "Llamas and models without the parallel residual",
                    parallel ? "fp16" : "bf16", parallel ? "bf16" : "fp16");
    }
  }
  return fused_decode_unsupported_reason(config, probe_device());
}

bool graph_is_faster(const ModelConfig& config) {
  constexpr std::int64_t kLoadedElements = 2048;
  const bool parallel = config.parallel_residual;
  return !parallel && config.hidden_size % kLoadedElements != 0;
}

bool fused_by_default(const ModelConfig& config) {
  constexpr std::int64_t kWidest = 2560;  // one 16-byte load a lane covers a row
  const bool parallel = config.parallel_residual;
  return !config.quantization.any() || !parallel || config.hidden_size <= kWidest;
}

std::vector<MemoryLine> plan_neox(const ModelConfig& config, const NeoxOptions& options) {
  check_model(config, options.dtype);
  return with_storage(options.dtype, [&](auto storage) {
    using S = decltype(storage);
    NeoxBuffers<S> buffers;
    const TensorTable table(config);
    return neox_memory<S>(config, options, plan_neox_parameters(table, sizeof(S)).bytes(),
                          plan_neox_cache(config, options.capacity, sizeof(S)).bytes(),
                          plan_neox_workspace<S>(config, options.capacity, launch_device(), buffers).plan().bytes());
  });
}

std::unique_ptr<DecodeModel> load_neox(const ModelFile& file, const NeoxOptions& options) {
  check_model(file.config(), options.dtype);
  return with_storage(options.dtype, [&](auto storage) -> std::unique_ptr<DecodeModel> {
    using S = decltype(storage);
    return std::make_unique<NeoxDecoder<S>>(
        file.config(), options, [&](S* parameters) { load_parameters<S>(file, parameters, options.progress); });
  });
}

std::unique_ptr<DecodeModel> random_neox(const ModelConfig& config, std::uint64_t seed, const NeoxOptions& options) {
  check_model(config, options.dtype);
  return with_storage(options.dtype, [&](auto storage) -> std::unique_ptr<DecodeModel> {
    using S = decltype(storage);
    return std::make_unique<NeoxDecoder<S>>(
        config, options, [&](S* parameters) { randomize_parameters<S>(TensorTable(config), seed, parameters); });
  });
}

}  // namespace weft::cuda
