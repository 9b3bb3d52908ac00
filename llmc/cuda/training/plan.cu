#include "llmc/cuda/training/plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/base/checked.h"
#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/elementwise/embedding.h"
#include "llmc/cuda/op/gemm/bias_grad.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/norm/head_norm.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/training/fp8_linears.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/model_file.h"
#include "llmc/model/training_activations.h"

namespace weft::cuda {

// With fewer rows the gradient of the head, which every chunk reads and writes, costs more; with more rows nothing is
// gained and memory is used (1 GB at this size with a vocabulary of 128,256).
std::int64_t classifier_rows(std::int64_t N) {
  constexpr std::int64_t kRows = 4096;
  return std::min(N, kRows);
}

AttentionShape attention_shape(const ModelConfig& config, const TrainOptions& options) {
  return {options.micro_batch,
          options.seq_len,
          options.seq_len,
          config.num_heads,
          config.num_kv_heads,
          config.head_dim,
          true,
          1.0f / std::sqrt(static_cast<float>(config.head_dim))};
}

namespace {

// The AdamW blocks of all tensors of one section.
std::vector<AdamWBlock> blocks_of(const TensorTable& table, const Range& section) {
  std::vector<AdamWRange> ranges;
  for (const TensorSpec& spec : table.specs()) {
    if (spec.offset >= section.begin && spec.offset < section.end) {
      ranges.push_back({spec.offset, spec.offset + spec.elements, spec.decay});
    }
  }
  return adamw_blocks(ranges);
}

}  // namespace

Sharding::Sharding(const ModelConfig& config, const TensorTable& table, const RankShare& share)
    : ranks(share.ranks),
      sharded(share.ranks > 1 && share.shard != Shard::none),
      gradients_sharded(share.ranks > 1 && (share.shard == Shard::gradients || share.shard == Shard::parameters)),
      parameters_sharded(share.ranks > 1 && share.shard == Shard::parameters),
      sections(parameter_sections(config, table)) {
  place_gradients(config);
  if (parameters_sharded) places = SectionBuffers(sections, config.num_layers);
  if (gradients_sharded) {  // cut section by section, because their memory is reused
    for (std::size_t s = 0; s < sections.size(); ++s) {
      for (Bucket& bucket : cut_buckets({&sections[s], 1}, share.ranks, kAdamWBlockElements, share.bucket_elements)) {
        bucket.section = s;
        buckets.push_back(std::move(bucket));
      }
    }
  } else {
    buckets = cut_buckets(sections, share.ranks, kAdamWBlockElements, share.bucket_elements);
  }
  std::vector<AdamWBlock> all;
  for (const Range& section : sections) {
    for (const AdamWBlock& block : blocks_of(table, section)) all.push_back(block);
  }
  squares = static_cast<std::int64_t>(all.size());

  const auto me = static_cast<std::size_t>(share.rank);
  // indices of the blocks of each rank
  std::vector<std::vector<std::int64_t>> blocks_of_rank(static_cast<std::size_t>(share.ranks));
  std::size_t next = 0;
  for (const Bucket& bucket : buckets) {
    const std::int64_t first = static_cast<std::int64_t>(blocks.size());
    const Range held = sharded ? bucket.parts[me] : bucket.range;
    state_begins.push_back(state_elements);
    for (std::size_t r = 0; r < bucket.parts.size(); ++r) {
      const Range& part = bucket.parts[r];
      for (; next < all.size() && all[next].begin < part.end; ++next) {
        blocks_of_rank[sharded ? r : 0].push_back(static_cast<std::int64_t>(next));
        if (sharded && r != me) continue;
        blocks.push_back(all[next]);
        blocks.back().state = state_elements + all[next].begin - held.begin;
        if (gradients_sharded) blocks.back().gradient = blocks.back().state;
        if (parameters_sharded) blocks.back().parameter = blocks.back().state;
      }
    }
    state_elements += held.size();
    sum_begins.push_back(sum_elements);
    if (gradients_sharded || share.rounds > 1) sum_elements += bucket.parts[me].size();
    blocks_of_bucket.push_back({first, static_cast<std::int64_t>(blocks.size())});
    received = std::max(received, (share.ranks - 1) * bucket.parts[me].size());
  }
  if (sharded) squares_order.resize(all.size());
  std::int64_t position = 0;
  for (const std::vector<std::int64_t>& numbers : blocks_of_rank) {
    squares_of_rank.push_back({position, position + static_cast<std::int64_t>(numbers.size())});
    for (const std::int64_t number : numbers) {
      if (sharded) squares_order[static_cast<std::size_t>(number)] = static_cast<std::int32_t>(position);
      ++position;
    }
  }
}

void Sharding::place_gradients(const ModelConfig& config) {
  if (!gradients_sharded) {
    for (const Range& section : sections) gradient_begins.push_back(section.begin);
    gradient_elements = sections.back().end;
    return;
  }
  const auto layers = static_cast<std::size_t>(config.num_layers);
  std::int64_t slot = 0;
  for (std::size_t l = 0; l < layers; ++l) slot = std::max(slot, sections[1 + l].size());
  gradient_begins.push_back(0);
  gradient_elements = sections[0].size();
  for (std::size_t l = 0; l < layers; ++l) {
    gradient_begins.push_back(gradient_elements + static_cast<std::int64_t>(l % kGradientSlots) * slot);
  }
  gradient_elements += static_cast<std::int64_t>(std::min(layers, kGradientSlots)) * slot;
  for (std::size_t s = 1 + layers; s < sections.size(); ++s) {  // the head's section, if any
    gradient_begins.push_back(gradient_elements);
    gradient_elements += sections[s].size();
  }
}

namespace {

MemoryPlan plan_of(const char* name, std::int64_t elements, std::size_t element_bytes) {
  MemoryPlan plan(name);
  plan.add(checked_mul(static_cast<std::uint64_t>(elements), element_bytes, name));
  return plan;
}

}  // namespace

MemoryPlan read_parameters_plan(const TensorTable& table, const Sharding& sharding, std::size_t element_bytes) {
  if (!sharding.parameters_sharded) return parameter_plan(table);
  return plan_of("parameters of layers in use", sharding.places.elements(), element_bytes);
}

MemoryPlan gradient_plan(const Sharding& sharding) {
  return plan_of("gradients", sharding.gradient_elements, sizeof(float));
}

MemoryPlan part_sum_plan(const Sharding& sharding) {
  return plan_of("sums of gradients", sharding.sum_elements, sizeof(float));
}

MemoryPlan state_plan(const char* name, const Sharding& sharding, std::size_t element_bytes) {
  return plan_of(name, sharding.state_elements, element_bytes);
}

MemoryPlan rank_sum_plan(const TensorTable& table, const TrainOptions& options) {
  const char* const name = "sum of the ranks' gradients";
  return options.virtual_ranks > 1 ? per_parameter_plan(name, table, sizeof(float)) : MemoryPlan(name);
}

MemoryPlan received_plan(const Sharding& sharding) {
  return plan_of("gradients of other ranks", sharding.received, sizeof(float));
}

TrainingWorkspace::TrainingWorkspace(const ModelConfig& config, const TrainOptions& options, const RankShare& share,
                                     const Sharding& sharding) {
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t rope_elements = options.seq_len * (config.rope.rotary_dim / 2);
  layout.reserve(&tokens, N);
  layout.reserve_bytes(&sorted_tokens, embedding_sort_bytes(N));
  layout.reserve(&labels, N);
  layout.reserve(&rope_cos, rope_elements);
  layout.reserve(&rope_sin, rope_elements);
  layout.reserve(&loss_total, 1);
  layout.reserve(&evaluation_total, 1);
  layout.reserve(&rank_totals, share.ranks * share.rounds);
  if (options.precision == Precision::fp8 && share.ranks > 1) {
    layout.reserve(&rank_tallies, share.ranks * Fp8Slots{config.num_layers}.count());
  }
  layout.reserve(&gradient_norm, 1);
  layout.reserve(&squares, sharding.squares);
  if (!sharding.squares_order.empty()) layout.reserve(&squares_order, sharding.squares);
  const int norm_sums = config.norm == NormKind::layernorm ? 2 : 1;  // column sums: weight and, for LayerNorm, bias
  std::size_t scratch_bytes = std::max({residual_norm_backward_workspace(config.hidden_size, norm_sums),
                                        attention_backward_workspace(attention_shape(config, options)),
                                        embedding_backward_workspace(N, config.hidden_size)});
  if (config.qk_norm) scratch_bytes = std::max(scratch_bytes, head_norm_backward_workspace(config.head_dim));
  for (const BlockLinear linear : kBlockLinears) {
    if (!has_bias(config, linear)) continue;
    scratch_bytes = std::max(scratch_bytes, bias_grad_workspace(linear_size(config, linear).OC));
  }
  layout.reserve_bytes(&scratch, scratch_bytes);
  // Last, because its size differs between ranks, and what ranks exchange must have the same offset on all.
  layout.reserve(&adamw_blocks, static_cast<std::int64_t>(sharding.blocks.size()));
}

template <typename S>
std::vector<MemoryLine> llama_memory(const ModelConfig& config, const TrainOptions& options, const RankShare& share) {
  const TensorTable table(config, kStorage<S>);
  const Sharding sharding(config, table, share);
  const TrainingWorkspace workspace(config, options, share, sharding);
  const TrainingActivations<S> activations(config, options, classifier_rows(options.micro_batch * options.seq_len));
  const auto state_bytes = [&](std::size_t element) { return state_plan("", sharding, element).bytes(); };
  std::vector<MemoryLine> lines;
  const std::uint64_t read = read_parameters_plan(table, sharding, sizeof(S)).bytes();
  const auto named = [](const char* what) { return format("%s (%s)", what, kSplitMaster<S> ? "bf16" : "fp32"); };
  lines.push_back({named("parameters"), sharding.parameters_sharded ? state_bytes(sizeof(S)) : read});
  if (sharding.parameters_sharded) lines.push_back({named("parameters of layers in use"), read});
  if (kSplitMaster<S>) lines.push_back({"low halves of fp32 masters", state_bytes(sizeof(std::int16_t))});
  lines.push_back({"gradients (fp32)", gradient_plan(sharding).bytes() + part_sum_plan(sharding).bytes()});
  if (options.virtual_ranks > 1) lines.push_back({"sum of the ranks (fp32)", rank_sum_plan(table, options).bytes()});
  if (share.ranks > 1) lines.push_back({"gradients of other ranks (fp32)", received_plan(sharding).bytes()});
  lines.push_back({options.moments == Precision::bf16 ? "AdamW moments (bf16)" : "AdamW moments (fp32)",
                   2 * state_bytes(moment_bytes(options))});
  lines.push_back({kSplitMaster<S> ? "activations (bf16)" : "activations (fp32)", activations.plan().bytes()});
  if (options.precision == Precision::fp8) {
    lines.push_back({"weights and operands (fp8)", Fp8Memory(config, options, table, sharding).layout.plan().bytes()});
  }
  lines.push_back({"workspace", workspace.layout.plan().bytes() + Matmul::kWorkspaceBytes});
  return lines;
}
template std::vector<MemoryLine> llama_memory<float>(const ModelConfig&, const TrainOptions&, const RankShare&);
template std::vector<MemoryLine> llama_memory<bf16>(const ModelConfig&, const TrainOptions&, const RankShare&);

void check_sizes(const ModelConfig& config) {
  if (const std::string reason = training_unsupported_reason(config); !reason.empty()) {
    fail(Exit::usage, "the model: %s", reason.c_str());
  }
  if (!config.windows.empty()) {
    fail(Exit::usage, "windows: the GPU trains models without sliding windows. Use --device cpu");
  }
  if (config.hidden_size % 8 != 0 || config.hidden_size > kMaxNormWidth) {
    fail(Exit::usage, "hidden_size: got %lld, the GPU kernels need a multiple of 8 up to %lld. Use --device cpu",
         static_cast<long long>(config.hidden_size), static_cast<long long>(kMaxNormWidth));
  }
  if (!attention_supports(config.head_dim)) {
    fail(Exit::usage, "head_dim: got %lld, the GPU kernels have 32, 64, 80, 96, 128 and 256. Use --device cpu",
         static_cast<long long>(config.head_dim));
  }
}

namespace {

std::vector<MemoryLine> lines_of(const ModelConfig& config, const TrainOptions& options, const RankShare& share) {
  check_sizes(config);
  return options.precision == Precision::fp32 ? llama_memory<float>(config, options, share)
                                              : llama_memory<bf16>(config, options, share);
}

}  // namespace

TrainOptions of_one_rank(TrainOptions options) {
  options.virtual_ranks = 1;
  return options;
}

std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options) {
  return lines_of(config, options, {});
}

std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options, int rank, int ranks,
                                      Shard shard) {
  return lines_of(config, of_one_rank(options), {rank, ranks, shard, options.virtual_ranks / ranks});
}

}  // namespace weft::cuda
