#include "llmc/cuda/fused/plan.cuh"

#include <algorithm>
#include <bit>

#include "llmc/base/error.h"
#include "llmc/cuda/fused/packed_tiles.cuh"
#include "llmc/model/qkv_heads.h"

namespace weft::cuda {

namespace fused {

namespace {

// Bytes of copies in flight, by default. More delay the small accesses of the exchanges; fewer leave memory idle. Measured
// (dev/performance/fused.md): narrow models with the sequential residual wait for exchanges most.
int default_window(const Sizes& p, bool sequential) {
  const bool quantized = p.stream_bytes > 0;
  if (!sequential) return (p.C == 2048 && !quantized ? 80 : 64) << 10;
  return (quantized ? (p.cautious ? 32 : 48) : (p.cautious ? 48 : 64)) << 10;
}
constexpr int kMinStages = 3;
constexpr int kLeastKvWindow = 3;  // stages: memory slows down below
constexpr int kMaxStages = 64;

constexpr KernelShape kernel_shape(std::int64_t C) {
  KernelShape shape;
  if (C % 16 != 0 || C < 16) return {};
  if (C <= 2560) {
    const int loads = static_cast<int>(ceil_div(C, kWarpElements));  // warp-wide loads of one row
    shape.row_loads = 1;
    shape.warps_k = loads == 6 || loads == 7 ? 8 : loads;
    shape.warps_r = std::max(1, 10 / shape.warps_k);
    shape.stage_bytes = static_cast<int>(kChunkLoads * 2 * C * shape.warps_r);
  } else if (C <= 5120 && C % 512 == 0 && C >= 4096) {
    shape.row_loads = 2;
    shape.warps_k = static_cast<int>(C / 512);
    shape.warps_r = 1;
    shape.stage_bytes = static_cast<int>(4 * C);
  }
  return shape;
}

// sample_block() runs on the first kSamplerThreads consumer threads, so every shape must have that many.
static_assert([] {
  for (std::int64_t C = 0; C <= 5120; C += 16) {
    const KernelShape shape = kernel_shape(C);
    const int warps = shape.warps_k * shape.warps_r;
    if (warps != 0 && (warps > kMaxWarps || warps * kWarpSize < kSamplerThreads)) return false;
  }
  return true;
}());

bool is_sequential(const ModelConfig& config) {
  return !config.parallel_residual;
}

// Size of the first of the two parts of the MLP's F hidden elements: half of them, rounded up to whole loads of a warp.
std::int64_t first_part_of(std::int64_t F) {
  return std::min(F, ceil_div(ceil_div(F, 2), kWarpElements) * kWarpElements);
}

// The shape for the sequential residual. Rows are as long as the hidden state or as all heads together, whichever is
// longer; F elements are processed in two parts, of which a lane has twice as many loads.
KernelShape sequential_shape(const ModelConfig& config) {
  const std::int64_t C = config.hidden_size, longest = std::max(C, config.q_size());
  if (C % kLaneElements != 0 || longest > 2 * kSequentialWarps * kWarpElements) return {};
  KernelShape shape;
  const auto loads_of = [](std::int64_t elements) { return static_cast<int>(ceil_div(elements, kWarpElements)); };
  const int loads = std::max(loads_of(longest), (loads_of(first_part_of(config.ffn_size)) + 1) / 2);
  shape.row_loads = loads <= kSequentialWarps ? 1 : 2;
  const auto needed = static_cast<unsigned>(ceil_div(loads, shape.row_loads));
  shape.warps_k = std::min(kSequentialWarps, static_cast<int>(std::bit_ceil(needed)));
  shape.warps_r = kSequentialWarps / shape.warps_k;
  return shape;
}

// Gives every block the same number of bytes a layer: QKV and output rows are divided evenly, and MLP-up rows make up
// for the differences.
std::vector<BlockRows> assign_rows(const ModelConfig& config, int blocks, bool layer_only) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size;
  const std::int64_t out_row = layer_only ? C : C + F;
  const std::int64_t total = 3 * C * C + F * C + C * out_row;
  std::vector<BlockRows> rows(static_cast<std::size_t>(blocks));
  int up = 0;
  for (int b = 0; b < blocks; ++b) {
    BlockRows& own = rows[static_cast<std::size_t>(b)];
    own.qkv = share_of(3 * C, b, blocks);
    own.out = share_of(C, b, blocks);
    own.head = share_of(config.vocab_size, b, blocks);
    const std::int64_t target = total * (b + 1) / blocks - own.qkv.end * C - own.out.end * out_row;
    const std::int64_t end = std::clamp<std::int64_t>((target + C / 2) / C, up, F);
    own.up = {up, b + 1 == blocks ? static_cast<int>(F) : static_cast<int>(end)};
    up = own.up.end;
  }
  return rows;
}

}  // namespace

// Small models are bound by synchronisation between blocks, so they use half of the multiprocessors. Every block must
// own at least one QKV row (with the sequential residual one row of the first part of the MLP): then no block can write
// the next layer's x before every block has read this layer's.
//
// With 2,048 elements a row, rows are divided evenly among a multiple of 32 blocks, although some multiprocessors stay
// idle: blocks with unequal numbers of rows take unequal numbers of iterations for a matrix, and all wait for the
// slowest (1B and 1.4B are 3.5 % faster). Wider models need the memory bandwidth of all multiprocessors; narrower ones
// take few iterations either way.
int blocks_for(const ModelConfig& config, int multiprocessors, int wanted) {
  const int even = multiprocessors / 32 * 32;
  const bool even_rows =
      even > 0 && config.hidden_size == 2048 && config.hidden_size % even == 0 && !is_sequential(config);
  const int chosen = wanted > 0                  ? std::min(wanted, multiprocessors)
                     : config.hidden_size <= 256 ? (multiprocessors + 1) / 2
                     : even_rows                 ? even
                                                 : multiprocessors;
  const std::int64_t rows = is_sequential(config) ? first_part_of(config.ffn_size) : 3 * config.hidden_size;
  return static_cast<int>(std::min<std::int64_t>(chosen, rows));
}

int max_splits_of(const ModelConfig& config, int blocks) {
  return std::max(1, blocks / static_cast<int>(config.num_kv_heads));
}

namespace {

long long number(std::int64_t value) {
  return value;
}

// Requirements on every model; empty if they are met, else the reason for the user.
std::string model_unsupported_reason(const ModelConfig& config, const Device& device) {
  if (device.arch < 90) {
    return format("fused decoding needs a GPU of compute capability 9.0 or later, this is sm_%d", device.arch);
  }
  if (config.head_dim % kLaneElements != 0 || config.head_dim > 256) {
    return format("fused decoding needs a head_dim that is a multiple of 8 up to 256, got %lld",
                  number(config.head_dim));
  }
  if (config.num_layers > kMaxLayers || config.vocab_size >= BlockBest::kIds) {
    return format("fused decoding needs at most %d layers and fewer than 2^20 ids", kMaxLayers);
  }
  if (!config.windows.empty()) return "fused decoding has no attention with a sliding window";
  if (config.parallel_residual && (config.qk_norm || !config.nope_layers.empty())) {
    return "fused decoding has norms of heads, and layers without RoPE, with the sequential residual alone";
  }
  if (config.gated() && config.mlp_bias) return "fused decoding has no biases beside SwiGLU";
  if (const char* part = part_without_fused_kernel(config); part != nullptr)
    return format("fused decoding has no kernels for %s", part);
  if (config.activation == Activation::gelu_tanh) return "fused decoding has GELU with erf alone";
  return "";
}

// Bytes of a stage of quantised weights: a set of rows for each group of warps, one load of each warp along K.
template <typename Format>
int stream_stage_bytes(const KernelShape& shape) {
  return set_bytes<Format>(kSetRows<Format> * shape.warps_r, kWarpGroups * shape.warps_k);
}

// Adds to a plan what quantised weights need. Stages must also hold rows of the head, quantised or in 16 bits.
template <typename Format>
void set_quantized(Plan& plan, const ModelConfig& config, int most_rows) {
  Sizes& p = plan.sizes;
  const int kRows = kChunkLoads / plan.shape.row_loads;
  p.stage_bytes = std::max(stream_stage_bytes<Format>(plan.shape), stream_stage_bytes<HeadFormat>(plan.shape));
  p.stage_bytes = std::max(p.stage_bytes, static_cast<int>(2 * config.hidden_size) * kRows * plan.shape.warps_r);
  p.stage_bytes = static_cast<int>(ceil_div(p.stage_bytes, 128) * 128);
  p.layer_bytes = kLayerBytes<true>;
  p.digit_bytes = kDigitBytes;
  const int unit = most_set_rows(WeightFormats{}) * plan.shape.warps_r;
  p.partial_rows = static_cast<int>(ceil_div(most_rows, unit) * unit);
  const StreamShape shape(p);
  const int row_loads = plan.shape.row_loads;
  const auto aligned = [](std::int64_t bytes) { return ceil_div(bytes, 128) * 128; };
  for (int b = 0; b < plan.blocks; ++b) {
    const BlockRows& own = plan.rows[static_cast<std::size_t>(b)];
    const LayerParts parts =
        layer_parts(p, plan.sequential ? &plan.sequential_sizes : nullptr, row_loads, own, b, plan.blocks);
    std::int64_t bytes = 0;
    for (int i = 0; i < parts.count; ++i) bytes += part_bytes<Format>(shape, parts.part[i]);
    p.stream_bytes = std::max(p.stream_bytes, aligned(bytes));
    if (config.quantization.head == nullptr) continue;
    const StreamPart head = {own.head.end - own.head.begin, groups_of(config.hidden_size), row_loads};
    p.head_stream_bytes = std::max(p.head_stream_bytes, aligned(part_bytes<HeadFormat>(shape, head)));
  }
}
void set_quantized(Plan& plan, const ModelConfig& config, int most_rows) {
  if (config.quantization.weights == nullptr) return;
  for_format(config.quantization.weights->dtype,
             [&]<typename Format>() { set_quantized<Format>(plan, config, most_rows); });
}

// Each consumer thread finishes one row, so a block can own at most that many.
std::string rows_unsupported_reason(const Plan& plan, int most_rows) {
  const int consumers = plan.shape.warps_k * plan.shape.warps_r * kWarpSize;
  if (plan.blocks < 1 || most_rows > consumers) {
    return format(
        "fused decoding: %d multiprocessors are too few for this model: a block would own %d rows, at most %d are "
        "possible",
        plan.blocks, most_rows, consumers);
  }
  return "";
}

// Sizes for both kinds of residual, except partial_rows and those of the ring.
void set_sizes(Plan& plan, const ModelConfig& config) {
  Sizes& p = plan.sizes;
  p.rope_half = static_cast<int>(config.rope.rotary_dim / 2);
  p.L = static_cast<int>(config.num_layers);
  p.C = static_cast<int>(config.hidden_size);
  p.F = static_cast<int>(config.ffn_size);
  p.V = static_cast<int>(config.vocab_size);
  p.NH = static_cast<int>(config.num_heads);
  p.HS = static_cast<int>(config.head_dim);
  p.warps_k = plan.shape.warps_k;
  p.warps_r = plan.shape.warps_r;
  p.threads = p.warps_k * p.warps_r * kWarpSize;
  p.blocks = plan.blocks;
  p.stage_bytes = plan.shape.stage_bytes;
  p.layer_bytes = kLayerBytes<false>;
  p.max_splits = max_splits_of(config, plan.blocks);
  p.cautious = config.hidden_size <= 2048;  // wider models wait for memory rather than for one another
}

// Gives the ring all shared memory that is left. `group`: query heads of an item of attention, at most.
void set_ring(Plan& plan, const Device& device, const FusedTuning& tuning, int group) {
  Sizes& p = plan.sizes;
  p.chunk_positions = p.stage_bytes / (4 * p.HS);
  if (plan.sequential_sizes.kv_fp8) {  // whole units; a stage that has room for the codes gets it for their scales, too
    p.chunk_positions = std::max(1, p.stage_bytes / (2 * p.HS) / kSlice) * kSlice;
    const int stage = static_cast<int>(ceil_div(2 * p.chunk_positions * (p.HS + 1), 128) * 128);
    p.stage_bytes = std::max(p.stage_bytes, stage);
  } else if (plan.sequential && p.chunk_positions > kSlice) {
    p.chunk_positions = p.chunk_positions / kSlice * kSlice;
  }
  const int most = device.shared_bytes - static_cast<int>(ceil_div(sizeof(Flags), 128) * 128);
  const int stages_wanted = tuning.ring_bytes > 0 ? tuning.ring_bytes / p.stage_bytes : kMaxStages;
  for (p.stages = std::clamp(stages_wanted, kMinStages, kMaxStages); p.stages > kMinStages; --p.stages) {
    if (shared_layout(p, group).bytes <= most) break;
  }
  plan.layout = shared_layout(p, group);
  if (plan.layout.bytes > most) {
    plan.reason =
        format("fused decoding: needs %d bytes of shared memory a block, this GPU has %d", plan.layout.bytes, most);
    return;
  }
  const int window_bytes = tuning.window_bytes > 0 ? tuning.window_bytes : default_window(p, plan.sequential);
  const int least = p.stream_bytes > 0 ? 2 : 1;  // stages of quantised weights can be nearly as large as the window
  p.window = std::clamp((window_bytes + p.stage_bytes / 2) / p.stage_bytes, least, p.stages);
  plan.sequential_sizes.kv_window =
      std::clamp(p.stages - kSequentialWarps, std::min(p.window, kLeastKvWindow), p.window);
}

// The rows of every matrix are divided evenly, because an exchange follows each of them.
Plan plan_sequential(const ModelConfig& config, const Device& device, const FusedTuning& tuning, bool kv_fp8) {
  Plan plan;
  const auto refuse = [&](std::string why) {
    plan.reason = std::move(why);
    return plan;
  };
  plan.sequential = true;
  if (kv_fp8 && config.head_dim != 64 && config.head_dim != 128) {
    return refuse(format("fused decoding reads keys and values in fp8 of a head_dim of 64 or 128, got %lld",
                         number(config.head_dim)));
  }
  if (tuning.layer_only) return refuse("fused decoding measures a layer alone with the parallel residual only");
  KernelShape& shape = plan.shape = sequential_shape(config);
  if (shape.warps_k == 0) {
    return refuse(
        format("fused decoding needs a hidden_size that is a multiple of 8 up to 4096, and heads x head_dim up to "
               "4096; got %lld, %lld x %lld",
               number(config.hidden_size), number(config.num_heads), number(config.head_dim)));
  }
  const std::int64_t C = config.hidden_size, F = config.ffn_size, first_part = first_part_of(F);
  const std::int64_t part_loads = 2 * shape.row_loads;  // 16-byte loads a lane from one part of a row of F elements
  if (F % kLaneElements != 0 || first_part > part_loads * shape.warps_k * kWarpElements) {
    return refuse(format("fused decoding needs an ffn_size that is a multiple of 8 up to 16384; got %lld", number(F)));
  }
  const int warps = shape.warps_k * shape.warps_r, group = static_cast<int>(config.num_heads / config.num_kv_heads);
  if (group > kWarpQueries * warps) {
    return refuse(
        format("fused decoding needs at most %d query heads a K/V head, got %d", kWarpQueries * warps, group));
  }
  const int kRows = kChunkLoads / shape.row_loads;
  const std::int64_t row = std::max(C, config.q_size());
  const std::int64_t stage =
      2 * shape.warps_r * std::max(kRows * row, kChunkLoads / part_loads * std::max(first_part, F - first_part));
  shape.stage_bytes = static_cast<int>(ceil_div(stage, 128) * 128);

  const bool gated = config.gated();
  plan.blocks = blocks_for(config, device.multiprocessors, tuning.blocks);
  int most_rows = 0;
  for (int b = 0; b < plan.blocks; ++b) {
    BlockRows own{};
    own.qkv = share_of(config.qkv_size(), b, plan.blocks);
    own.up = share_of(first_part, b, plan.blocks);
    own.out = share_of(C, b, plan.blocks);
    own.head = share_of(config.vocab_size, b, plan.blocks);
    plan.rows.push_back(own);
    const int up = own.up.end - own.up.begin;
    most_rows = std::max({most_rows, own.qkv.end - own.qkv.begin, own.out.end - own.out.begin, gated ? 2 * up : up});
  }
  if (std::string reason = rows_unsupported_reason(plan, most_rows); !reason.empty()) return refuse(std::move(reason));
  set_sizes(plan, config);
  // large, so that the head needs few barriers; a multiple of a chunk's rows
  plan.sizes.partial_rows = warps * kWarpSize;

  SequentialSizes& p = plan.sequential_sizes;
  const QkvHeads heads = qkv_heads(config);
  p.NKV = static_cast<int>(config.num_kv_heads);
  p.group = group;
  p.q_size = static_cast<int>(config.q_size());
  p.q_stride = group * static_cast<int>(heads.stride);
  p.kv_stride = static_cast<int>(heads.stride);
  p.key_begin = static_cast<int>(heads.keys);
  p.value_begin = static_cast<int>(heads.values);
  p.first_part = static_cast<int>(first_part);
  p.gated = gated;
  p.rms = config.norm == NormKind::rmsnorm;
  p.head_norms = config.qk_norm;
  p.kv_fp8 = kv_fp8;
  p.position_bytes = static_cast<int>(config.head_dim * (kv_fp8 ? 1 : sizeof(fp16)));
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    if (!config.rotates(l)) p.unrotated[l / 32] |= 1u << l % 32;
  }
  set_quantized(plan, config, most_rows);
  list_copies(plan, config, false);
  set_ring(plan, device, tuning, group);
  return plan;
}

Plan plan_parallel(const ModelConfig& config, const Device& device, const FusedTuning& tuning) {
  Plan plan;
  const auto refuse = [&](std::string why) {
    plan.reason = std::move(why);
    return plan;
  };
  if (tuning.layer_only && config.quantization.any()) {
    return refuse("fused decoding measures a layer alone with weights in 16 bits only");
  }
  if (config.ffn_size != 4 * config.hidden_size) {
    return refuse(format("fused decoding needs ffn_size = 4 hidden_size, got %lld and %lld", number(config.ffn_size),
                         number(config.hidden_size)));
  }
  const KernelShape shape = plan.shape = kernel_shape(config.hidden_size);
  if (shape.warps_k == 0) {
    return refuse(format(
        "fused decoding needs a hidden_size that is a multiple of 16 up to 2560, or 4096, 4608 or 5120; got %lld",
        number(config.hidden_size)));
  }
  plan.blocks = blocks_for(config, device.multiprocessors, tuning.blocks);
  plan.rows = assign_rows(config, plan.blocks, tuning.layer_only);
  const int chunk_rows = kChunkLoads / shape.row_loads * shape.warps_r;
  int most_rows = chunk_rows;
  for (const BlockRows& own : plan.rows) {
    for (const RowRange rows : {own.qkv, own.up, own.out}) most_rows = std::max(most_rows, rows.end - rows.begin);
  }
  if (std::string reason = rows_unsupported_reason(plan, most_rows); !reason.empty()) return refuse(std::move(reason));
  set_sizes(plan, config);
  plan.sizes.partial_rows = static_cast<int>(ceil_div(most_rows, chunk_rows) * chunk_rows);
  if (shape.warps_r > 1 && !tuning.own_vectors) plan.sizes.vector_bytes = 4 * plan.sizes.F;
  // A wide model is bound by memory: rotating the items spreads the blocks that have none. A narrow one is bound by
  // exchanges, and attention is faster in blocks that computed it in the previous layer.
  plan.sizes.item_shift = config.hidden_size <= 2048 ? 0 : 37;
  set_quantized(plan, config, most_rows);
  list_copies(plan, config, tuning.layer_only);
  set_ring(plan, device, tuning, 1);
  return plan;
}

}  // namespace

Plan plan_of(const ModelConfig& config, const Device& device, const FusedTuning& tuning, bool kv_fp8) {
  std::string reason = model_unsupported_reason(config, device);
  if (reason.empty() && kv_fp8 && !is_sequential(config)) {
    reason = "fused decoding reads keys and values of 16 bits with the parallel residual";
  }
  if (!reason.empty()) {
    Plan plan;
    plan.reason = std::move(reason);
    return plan;
  }
  return is_sequential(config) ? plan_sequential(config, device, tuning, kv_fp8)
                               : plan_parallel(config, device, tuning);
}

}  // namespace fused

std::string fused_decode_unsupported_reason(const ModelConfig& config, const Device& device, bool kv_fp8) {
  return fused::plan_of(config, device, {}, kv_fp8).reason;
}

int fused_row_loads(const ModelConfig& config) {
  return fused::sequential_shape(config).row_loads;
}

}  // namespace weft::cuda
