#include "llmc/cuda/training/plan.h"

#include <algorithm>
#include <span>
#include <utility>

#include "llmc/base/checked.h"
#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/elementwise/embedding.h"
#include "llmc/cuda/op/gemm/bias_grad.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/norm/head_norm.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/error.h"
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

AttentionShape attention_shape(const ModelConfig& config, const TrainOptions& options, std::int64_t layer) {
  return {options.micro_batch,
          options.seq_len,
          options.seq_len,
          config.num_heads,
          config.num_kv_heads,
          config.head_dim,
          true,
          config.score_scale(),
          config.window(layer)};
}

std::vector<LowRankShape> low_rank_shapes(const ModelConfig& config, const TrainOptions& options) {
  std::vector<LowRankShape> shapes;
  for (const BlockLinear linear : kBlockLinears) {
    const LowRankShape shape = low_rank_shape(config, options, linear);
    if (shape.modules > 0) shapes.push_back(shape);
  }
  return shapes;
}

namespace {

// A block of the update or of the norm, and the tensor that it is a part of if the optimizer needs that whole.
struct Block {
  AdamWBlock block;
  const TensorSpec* whole;
};

// Those of all tensors of one section.
void add_blocks(const TensorTable& table, const Optimizer& optimizer, const Range& section, std::vector<Block>& all) {
  std::vector<AdamWRange> ranges;
  const auto add = [&](const TensorSpec* whole) {
    for (const AdamWBlock& block : adamw_blocks(ranges)) all.push_back({block, whole});
    ranges.clear();
  };
  for (const TensorSpec& spec : table.specs()) {
    if (spec.offset < section.begin || spec.offset >= section.end) continue;
    const bool whole = optimizer.needs_whole(spec);
    if (whole) add(nullptr);
    ranges.push_back({spec.offset, spec.offset + spec.elements, spec.decay});
    if (whole) add(&spec);
  }
  add(nullptr);
}

}  // namespace

Sharding::Sharding(const ModelConfig& config, const TensorTable& table, const Optimizer& optimizer,
                   const RankShare& share)
    : ranks(share.ranks),
      sharded(share.ranks > 1 && share.shard != Shard::none),
      gradients_sharded(share.ranks > 1 && (share.shard == Shard::gradients || share.shard == Shard::parameters)),
      parameters_sharded(share.ranks > 1 && share.shard == Shard::parameters),
      sections(parameter_sections(config, table)) {
  if (std::ssize(sections) > config.num_layers + 1) head_section = sections.size() - 1;
  place_gradients(config);
  if (parameters_sharded) places = SectionBuffers(sections, config.num_layers);
  const auto cut = [&](std::span<const Range> some) {
    return cut_buckets(table, some, share.ranks, kAdamWBlockElements, share.bucket_elements, optimizer);
  };
  if (gradients_sharded) {  // cut section by section, because their memory is reused
    for (std::size_t s = 0; s < sections.size(); ++s) {
      for (Bucket& bucket : cut({&sections[s], 1})) {
        bucket.section = s;
        buckets.push_back(std::move(bucket));
      }
    }
  } else {
    buckets = cut(sections);
  }
  std::vector<Block> all;
  for (const Range& section : sections) add_blocks(table, optimizer, section, all);
  squares = static_cast<std::int64_t>(all.size());

  const auto me = static_cast<std::size_t>(share.rank);
  std::vector<Range> second_ranges;
  for (const Bucket& bucket : buckets) {
    for (const Range& range :
         state_ranges(optimizer, table, TensorRole::state2, sharded ? bucket.parts[me] : bucket.range)) {
      second_ranges.push_back(range);
    }
  }
  seconds = PackedRanges(std::move(second_ranges));

  // indices of the blocks of each rank: of those that AdamW updates, and of the others
  std::vector<std::vector<std::int64_t>> adamw_of_rank(static_cast<std::size_t>(share.ranks)),
      others_of_rank(adamw_of_rank);
  std::vector<AdamWBlock> others;
  std::size_t next = 0;
  for (const Bucket& bucket : buckets) {
    const std::int64_t first = std::ssize(blocks), first_matrix = std::ssize(matrices);
    const Range held = sharded ? bucket.parts[me] : bucket.range;
    state_begins.push_back(state_elements);
    for (std::size_t r = 0; r < bucket.parts.size(); ++r) {
      const Range& part = bucket.parts[r];
      for (; next < all.size() && all[next].block.begin < part.end; ++next) {
        auto [block, whole] = all[next];
        (whole != nullptr ? others_of_rank : adamw_of_rank)[sharded ? r : 0].push_back(static_cast<std::int64_t>(next));
        if (sharded && r != me) continue;
        block.state = state_elements + block.begin - held.begin;
        if (gradients_sharded) block.gradient = block.state;
        if (parameters_sharded) block.parameter = block.state;
        if (whole == nullptr) {
          block.second = seconds.position_of(block.begin) - block.state;
          blocks.push_back(block);
          continue;
        }
        others.push_back(block);
        if (block.begin != whole->offset) continue;
        if (block.begin + whole->elements > part.end) {
          fail(Exit::internal, "%s is cut, which its update needs whole", whole->name.c_str());
        }
        matrices.push_back({{whole->shape[0], whole->shape[1]},
                            block.begin,
                            block.state,
                            block.gradient,
                            block.parameter,
                            whole->decay});
      }
    }
    state_elements += held.size();
    sum_begins.push_back(sum_elements);
    if (gradients_sharded || share.rounds > 1) sum_elements += bucket.parts[me].size();
    blocks_of_bucket.push_back({first, std::ssize(blocks)});
    matrices_of_bucket.push_back({first_matrix, std::ssize(matrices)});
    received = std::max(received, (share.ranks - 1) * bucket.parts[me].size());
  }
  blocks.insert(blocks.end(), others.begin(), others.end());
  const bool reordered = sharded || !others.empty();
  if (reordered) squares_order.resize(all.size());
  std::int64_t position = 0;
  for (std::size_t r = 0; r < adamw_of_rank.size(); ++r) {
    squares_of_rank.push_back({position, 0});
    for (const auto* numbers : {&adamw_of_rank[r], &others_of_rank[r]}) {
      for (const std::int64_t number : *numbers) {
        if (reordered) squares_order[static_cast<std::size_t>(number)] = static_cast<std::int32_t>(position);
        ++position;
      }
    }
    squares_of_rank.back().end = position;
  }
}

std::size_t Sharding::section_of(const TensorSpec& spec) const {
  const auto behind =
      std::find_if(sections.begin(), sections.end(), [&](const Range& section) { return spec.offset < section.end; });
  return static_cast<std::size_t>(behind - sections.begin());
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

MemoryPlan second_state_plan(const Sharding& sharding, std::size_t element_bytes) {
  return plan_of("second states of the optimizer", sharding.seconds.size(), element_bytes);
}

MemoryPlan rank_sum_plan(const TensorTable& table, const TrainOptions& options) {
  const char* const name = "sum of the ranks' gradients";
  return options.virtual_ranks > 1 ? per_parameter_plan(name, table, sizeof(float)) : MemoryPlan(name);
}

MemoryPlan received_plan(const Sharding& sharding) {
  return plan_of("gradients of other ranks", sharding.received, sizeof(float));
}

TensorTable frozen_table(const ModelConfig& config, const TrainOptions& options, DType storage) {
  ModelConfig frozen = config;
  frozen.quantization.weights = frozen_format(options);
  return TensorTable(frozen, storage);
}

MemoryPlan frozen_plan(const TensorTable& model, const TrainOptions& options) {
  return options.lora ? parameter_plan(model) : MemoryPlan("frozen parameters");
}

std::vector<MuonShape> muon_shapes(const TensorTable& table, const Optimizer& optimizer) {
  std::vector<MuonShape> shapes;
  for (const TensorSpec& spec : table.specs()) {
    if (!optimizer.needs_whole(spec)) continue;
    const MuonShape shape{spec.shape[0], spec.shape[1]};
    if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
  }
  return shapes;
}

TrainingWorkspace::TrainingWorkspace(const ModelConfig& config, const TrainOptions& options, const RankShare& share,
                                     const Sharding& sharding, std::span<const MuonShape> muon_shapes) {
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t rope_elements = options.seq_len * (config.rope.rotary_dim / 2);
  layout.reserve(&tokens, N);
  layout.reserve_bytes(&sorted_tokens, embedding_sort_bytes(N));
  layout.reserve(&labels, N);
  if (options.document_mask) layout.reserve(&document_starts, N);
  if (options.label_weights) layout.reserve(&label_weights, N);
  layout.reserve(&rope_cos, rope_elements);
  layout.reserve(&rope_sin, rope_elements);
  if (config.local_rope_theta > 0) {
    layout.reserve(&local_rope_cos, rope_elements);
    layout.reserve(&local_rope_sin, rope_elements);
  }
  layout.reserve(&loss_total, 1);
  layout.reserve(&evaluation_total, 1);
  layout.reserve(&rank_totals, share.ranks * share.rounds);
  if (options.precision == Precision::fp8 && share.ranks > 1) {
    layout.reserve(&rank_counters, share.ranks * Fp8Slots{config.num_layers}.count());
  }
  layout.reserve(&gradient_norm, 1);
  muon.reserve(layout, muon_shapes, options.precision == Precision::fp32 ? sizeof(float) : sizeof(__nv_bfloat16));
  layout.reserve(&squares, sharding.squares);
  if (!sharding.squares_order.empty()) layout.reserve(&squares_order, sharding.squares);
  // column sums: weight and, for LayerNorm, bias; with the parallel residual of two norms
  const int norm_sums = (config.norm == NormKind::layernorm ? 2 : 1) * (config.parallel_residual ? 2 : 1);
  std::size_t scratch_bytes = std::max({residual_norm_backward_workspace(config.hidden_size, norm_sums),
                                        attention_backward_workspace(attention_shape(config, options, 0)),
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
  const TensorTable table = trained_table(config, options, kStorage<S>);
  const Sharding sharding(config, table, *options.optimizer, share);
  const TrainingWorkspace workspace(config, options, share, sharding, muon_shapes(table, *options.optimizer));
  const TrainingActivations<S> activations(config, options, classifier_rows(options.micro_batch * options.seq_len));
  const auto state_bytes = [&](std::size_t element) { return state_plan("", sharding, element).bytes(); };
  std::vector<MemoryLine> lines;
  const std::uint64_t read = read_parameters_plan(table, sharding, sizeof(S)).bytes();
  const auto named = [](const char* what) { return format("%s (%s)", what, kSplitMaster<S> ? "bf16" : "fp32"); };
  lines.push_back({named("parameters"), sharding.parameters_sharded ? state_bytes(sizeof(S)) : read});
  if (sharding.parameters_sharded) lines.push_back({named("parameters of layers in use"), read});
  if (kSplitMaster<S>) lines.push_back({"low halves of fp32 masters", state_bytes(sizeof(std::int16_t))});
  if (options.lora) {
    const WeightFormat* const format = frozen_format(options);
    lines.push_back(
        {format != nullptr ? weft::format("frozen parameters (%s)", format->name) : named("frozen parameters"),
         frozen_plan(frozen_table(config, options, kStorage<S>), options).bytes()});
    lines.push_back({named("workspace of the adapter"), AdapterMemory<S>(config, options).layout.plan().bytes()});
  }
  lines.push_back({"gradients (fp32)", gradient_plan(sharding).bytes() + part_sum_plan(sharding).bytes()});
  if (options.virtual_ranks > 1) lines.push_back({"sum of the ranks (fp32)", rank_sum_plan(table, options).bytes()});
  if (share.ranks > 1) lines.push_back({"gradients of other ranks (fp32)", received_plan(sharding).bytes()});
  lines.push_back(
      {format("%s (%s)", options.optimizer->state_name(), options.moments == Precision::bf16 ? "bf16" : "fp32"),
       state_bytes(moment_bytes(options)) + second_state_plan(sharding, moment_bytes(options)).bytes()});
  lines.push_back({kSplitMaster<S> ? "activations (bf16)" : "activations (fp32)", activations.plan().bytes()});
  if (options.precision == Precision::fp8) {
    lines.push_back({options.lora ? "operands (fp8)" : "weights and operands (fp8)",
                     Fp8Memory(config, options, table, sharding).layout.plan().bytes()});
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

MemoryLine plan_merged(const ModelConfig& config, const TrainOptions& options) {
  const DType storage = options.precision == Precision::fp32 ? DType::f32 : DType::bf16;
  return {format("samples: parameters with the adapter (%s)", dtype_name(storage)),
          frozen_plan(TensorTable(config, storage), options).bytes()};
}

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
