#include "llmc/cuda/llama/plan.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/checked.h"
#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/llama/llama.h"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/embedding.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/op/residual_norm.h"
#include "llmc/model/llama_layout.h"

namespace weft::cuda {

// With fewer rows the gradient of the head, which every chunk reads and writes, costs more; more rows gain nothing and
// take memory (1 GB here with a vocabulary of 128,256).
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

// The blocks of one section, of all its tensors.
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

Division::Division(const ModelConfig& config, const TensorTable& table, const RankShare& share)
    : divided(share.ranks > 1 && share.shard == Shard::optimizer) {
  const std::vector<Range> all_sections = llama_sections(config, table);
  sections = all_sections.size();
  buckets = cut_buckets(all_sections, share.ranks, kAdamWBlockElements, share.bucket_elements);
  std::vector<AdamWBlock> all;
  for (const Range& section : all_sections) {
    for (const AdamWBlock& block : blocks_of(table, section)) all.push_back(block);
  }
  squares = static_cast<std::int64_t>(all.size());

  const auto me = static_cast<std::size_t>(share.rank);
  std::vector<std::vector<std::int64_t>> blocks_of_rank(static_cast<std::size_t>(share.ranks));  // their numbers
  std::size_t next = 0;
  for (const Bucket& bucket : buckets) {
    const std::int64_t first = static_cast<std::int64_t>(blocks.size());
    const Range held = divided ? bucket.parts[me] : bucket.range;
    state_begins.push_back(state_elements);
    for (std::size_t r = 0; r < bucket.parts.size(); ++r) {
      const Range& part = bucket.parts[r];
      for (; next < all.size() && all[next].begin < part.end; ++next) {
        blocks_of_rank[divided ? r : 0].push_back(static_cast<std::int64_t>(next));
        if (divided && r != me) continue;
        blocks.push_back(all[next]);
        blocks.back().state = state_elements + all[next].begin - held.begin;
      }
    }
    state_elements += held.size();
    blocks_of_bucket.push_back({first, static_cast<std::int64_t>(blocks.size())});
    received = std::max(received, (share.ranks - 1) * bucket.parts[me].size());
  }
  if (divided) squares_order.resize(all.size());
  std::int64_t position = 0;
  for (const std::vector<std::int64_t>& numbers : blocks_of_rank) {
    squares_of_rank.push_back({position, position + static_cast<std::int64_t>(numbers.size())});
    for (const std::int64_t number : numbers) {
      if (divided) squares_order[static_cast<std::size_t>(number)] = static_cast<std::int32_t>(position);
      ++position;
    }
  }
}

MemoryPlan state_plan(const char* name, const Division& division, std::size_t element_bytes) {
  MemoryPlan plan(name);
  plan.add(checked_mul(static_cast<std::uint64_t>(division.state_elements), element_bytes, name));
  return plan;
}

MemoryPlan rank_sum_plan(const TensorTable& table, const TrainOptions& options) {
  const char* const name = "sum of the ranks' gradients";
  return options.virtual_ranks > 1 ? per_parameter_plan(name, table, sizeof(float)) : MemoryPlan(name);
}

MemoryPlan received_plan(const Division& division) {
  MemoryPlan plan("gradients of other ranks");
  plan.add(checked_mul(static_cast<std::uint64_t>(division.received), sizeof(float), plan.name()));
  return plan;
}

LlamaWorkspace::LlamaWorkspace(const ModelConfig& config, const TrainOptions& options, const RankShare& share,
                               const Division& division) {
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t rope_elements = options.seq_len * (config.rope.rotary_dim / 2);
  regions.want(&tokens, N);
  regions.want_bytes(&sorted_tokens, embedding_sort_bytes(N));
  regions.want(&labels, N);
  regions.want(&rope_cos, rope_elements);
  regions.want(&rope_sin, rope_elements);
  regions.want(&loss_total, 1);
  regions.want(&evaluation_total, 1);
  regions.want(&rank_totals, share.ranks);
  regions.want(&gradient_norm, 1);
  regions.want(&adamw_blocks, static_cast<std::int64_t>(division.blocks.size()));
  regions.want(&squares, division.squares);
  if (!division.squares_order.empty()) regions.want(&squares_order, division.squares);
  const int norm_sums = config.norm == NormKind::layernorm ? 2 : 1;  // column sums: weight, and bias
  regions.want_bytes(&scratch, std::max({residual_norm_backward_workspace(config.hidden_size, norm_sums),
                                         attention_backward_workspace(attention_shape(config, options)),
                                         embedding_backward_workspace(N, config.hidden_size)}));
}

template <typename S>
std::vector<MemoryLine> llama_memory(const ModelConfig& config, const TrainOptions& options, const RankShare& share) {
  const TensorTable table(config, kStorage<S>);
  const Division division(config, table, share);
  const LlamaWorkspace workspace(config, options, share, division);
  const LlamaActivations<S> activations(config, options, classifier_rows(options.micro_batch * options.seq_len));
  const auto state_bytes = [&](std::size_t element) { return state_plan("", division, element).bytes(); };
  std::vector<MemoryLine> lines;
  lines.push_back({kSplitMaster<S> ? "parameters (bf16)" : "parameters (fp32)", table.arena_bytes()});
  if (kSplitMaster<S>) lines.push_back({"low halves of fp32 masters", state_bytes(sizeof(std::int16_t))});
  lines.push_back({"gradients (fp32)", per_parameter_plan("", table, sizeof(float)).bytes()});
  if (options.virtual_ranks > 1) lines.push_back({"sum of the ranks (fp32)", rank_sum_plan(table, options).bytes()});
  if (share.ranks > 1) lines.push_back({"gradients of other ranks (fp32)", received_plan(division).bytes()});
  lines.push_back({options.moments == Precision::bf16 ? "AdamW moments (bf16)" : "AdamW moments (fp32)",
                   2 * state_bytes(moment_bytes(options))});
  lines.push_back({kSplitMaster<S> ? "activations (bf16)" : "activations (fp32)", activations.plan().bytes()});
  lines.push_back({"workspace", workspace.regions.plan().bytes() + Matmul::kWorkspaceBytes});
  return lines;
}
template std::vector<MemoryLine> llama_memory<float>(const ModelConfig&, const TrainOptions&, const RankShare&);
template std::vector<MemoryLine> llama_memory<bf16>(const ModelConfig&, const TrainOptions&, const RankShare&);

void check_sizes(const ModelConfig& config) {
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

std::vector<MemoryLine> plan_of(const ModelConfig& config, const TrainOptions& options, const RankShare& share) {
  check_sizes(config);
  return options.precision == Precision::bf16 ? llama_memory<bf16>(config, options, share)
                                              : llama_memory<float>(config, options, share);
}

}  // namespace

TrainOptions of_one_rank(TrainOptions options) {
  options.virtual_ranks = 1;
  return options;
}

std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options) {
  return plan_of(config, options, {});
}

std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options, int rank, int ranks,
                                   Shard shard) {
  return plan_of(config, of_one_rank(options), {rank, ranks, shard});
}

}  // namespace weft::cuda
