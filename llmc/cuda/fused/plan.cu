#include "llmc/cuda/fused/plan.cuh"

#include <algorithm>

#include "llmc/base/error.h"

namespace weft::cuda {

namespace fused {

namespace {

constexpr int kDefaultWindow = 48 << 10;
constexpr int kMinStages = 3;
constexpr int kMaxStages = 64;
constexpr int kMaxLayers = 256;

constexpr KernelShape kernel_shape(std::int64_t C) {
  KernelShape shape;
  if (C % 16 != 0 || C < 16) return {};
  if (C <= 2560) {
    const int loads = static_cast<int>(ceil_div(C, kWarpElements));  // of warps, for one row
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

// The first kSamplerThreads consumer threads sample.
static_assert([] {
  for (std::int64_t C = 0; C <= 5120; C += 16) {
    const KernelShape shape = kernel_shape(C);
    const int warps = shape.warps_k * shape.warps_r;
    if (warps != 0 && (warps > kMaxWarps || warps * kWarpSize < kSamplerThreads)) return false;
  }
  return true;
}());

RowRange share_of(std::int64_t rows, int block, int blocks) {
  return {static_cast<int>(rows * block / blocks), static_cast<int>(rows * (block + 1) / blocks)};
}

// Every block gets the same number of bytes a layer: QKV and output rows are divided evenly, and the number of MLP-up rows
// makes up for the differences.
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

// Small models are bound by synchronisation between blocks, so they use half of the multiprocessors. Every block owns at
// least one QKV row, so that it writes none of the next layer's x before it has read this layer's.
int blocks_for(const ModelConfig& config, int multiprocessors, int wanted) {
  const int chosen = wanted > 0                  ? std::min(wanted, multiprocessors)
                     : config.hidden_size <= 256 ? (multiprocessors + 1) / 2
                                                 : multiprocessors;
  return static_cast<int>(std::min<std::int64_t>(chosen, 3 * config.hidden_size));
}

int max_splits_of(const ModelConfig& config, int blocks) {
  return std::max(1, blocks / static_cast<int>(config.num_heads));
}

Plan plan_of(const ModelConfig& config, const Device& device, const FusedTuning& tuning) {
  Plan plan;
  const auto refuse = [&](std::string why) {
    plan.refusal = std::move(why);
    return plan;
  };
  const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
  if (device.arch < 90) {
    return refuse(format("fused decoding needs a GPU of compute capability 9.0 or later, this is sm_%d", device.arch));
  }
  if (config.family != Family::gpt_neox) return refuse("fused decoding runs GPT-NeoX models only");
  if (!config.parallel_residual) return refuse("fused decoding runs models with the parallel residual only");
  if (config.ffn_size != 4 * config.hidden_size) {
    return refuse(format("fused decoding needs ffn_size = 4 hidden_size, got %lld and %lld", number(config.ffn_size),
                         number(config.hidden_size)));
  }
  if (config.head_dim % kLaneElements != 0 || config.head_dim > 256) {
    return refuse(
        format("fused decoding needs a head_dim that is a multiple of 8 up to 256, got %lld", number(config.head_dim)));
  }
  const KernelShape shape = plan.shape = kernel_shape(config.hidden_size);
  if (shape.warps_k == 0) {
    return refuse(format(
        "fused decoding needs a hidden_size that is a multiple of 16 up to 2560, or 4096, 4608 or 5120; got %lld",
        number(config.hidden_size)));
  }
  if (config.num_layers > kMaxLayers || config.vocab_size >= BlockBest::kIds) {
    return refuse(format("fused decoding needs at most %d layers and fewer than 2^20 ids", kMaxLayers));
  }

  plan.blocks = blocks_for(config, device.multiprocessors, tuning.blocks);
  plan.rows = assign_rows(config, plan.blocks, tuning.layer_only);
  const int chunk_rows = kChunkLoads / shape.row_loads * shape.warps_r;
  const int consumers = shape.warps_k * shape.warps_r * kWarpSize;
  int most_rows = chunk_rows;
  for (const BlockRows& own : plan.rows) {
    for (const RowRange rows : {own.qkv, own.up, own.out}) most_rows = std::max(most_rows, rows.end - rows.begin);
  }
  if (plan.blocks < 1 || most_rows > consumers) {  // a thread finishes one row
    return refuse(format(
        "fused decoding: %d multiprocessors are too few for this model: a block would own %d rows, at most %d are "
        "possible",
        plan.blocks, most_rows, consumers));
  }

  Sizes& p = plan.sizes;
  p.rope_half = static_cast<int>(config.rope.rotary_dim / 2);
  p.L = static_cast<int>(config.num_layers);
  p.C = static_cast<int>(config.hidden_size);
  p.F = static_cast<int>(config.ffn_size);
  p.V = static_cast<int>(config.vocab_size);
  p.NH = static_cast<int>(config.num_heads);
  p.HS = static_cast<int>(config.head_dim);
  p.warps_k = shape.warps_k;
  p.warps_r = shape.warps_r;
  p.stage_bytes = shape.stage_bytes;
  p.partial_rows = static_cast<int>(ceil_div(most_rows, chunk_rows) * chunk_rows);
  p.max_splits = max_splits_of(config, plan.blocks);
  // The ring takes the shared memory that is left.
  const int most = device.shared_bytes - static_cast<int>(ceil_div(sizeof(Flags), 128) * 128);
  const int stages_wanted = tuning.ring_bytes > 0 ? tuning.ring_bytes / p.stage_bytes : kMaxStages;
  for (p.stages = std::clamp(stages_wanted, kMinStages, kMaxStages); p.stages > kMinStages; --p.stages) {
    if (shared_layout(p).bytes <= most) break;
  }
  plan.layout = shared_layout(p);
  if (plan.layout.bytes > most) {
    return refuse(
        format("fused decoding: needs %d bytes of shared memory a block, this GPU has %d", plan.layout.bytes, most));
  }
  const int window_bytes = tuning.window_bytes > 0 ? tuning.window_bytes : kDefaultWindow;
  p.window = std::clamp((window_bytes + p.stage_bytes / 2) / p.stage_bytes, 1, p.stages);
  return plan;
}

}  // namespace fused

std::string fused_decode_refusal(const ModelConfig& config, const Device& device) {
  return fused::plan_of(config, device, {}).refusal;
}

}  // namespace weft::cuda
