// The GPU memory of a training step, planned before anything is allocated and without a GPU.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "llmc/base/arena_layout.h"
#include "llmc/base/dtype.h"
#include "llmc/base/range.h"
#include "llmc/cuda/op/classifier/classifier.h"
#include "llmc/cuda/op/lora/low_rank.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/op/optim/muon.h"
#include "llmc/model/head_view.h"
#include "llmc/model/optimizer.h"
#include "llmc/model/shards.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// S, the storage type of parameters and activations, is bf16 or float.
template <typename S>
inline constexpr DType kStorage = std::is_same_v<S, __nv_bfloat16> ? DType::bf16 : DType::f32;
// bf16 parameters have 16 low bits beside them, which make each an exact fp32 master (llmc/cuda/op/optim/adamw.h).
template <typename S>
inline constexpr bool kSplitMaster = std::is_same_v<S, __nv_bfloat16>;

inline std::size_t moment_bytes(const TrainOptions& options) {
  return options.moments == Precision::bf16 ? sizeof(__nv_bfloat16) : sizeof(float);
}

// The shapes of the matrices that the optimizer needs whole, each once.
std::vector<MuonShape> muon_shapes(const TensorTable& table, const Optimizer& optimizer);

// Number of the N rows of logits that exist at the same time.
std::int64_t classifier_rows(std::int64_t N);
// Of layer `layer`.
AttentionShape attention_shape(const ModelConfig& config, const TrainOptions& options, std::int64_t layer);
// Those of the linear layers that have a part of the adapter.
std::vector<LowRankShape> low_rank_shapes(const ModelConfig& config, const TrainOptions& options);
// Which rank of a run a model is, and what the ranks divide. One rank: alone.
struct RankShare {
  int rank = 0, ranks = 1;
  Shard shard = Shard::none;
  // Number of ranks of the step that a rank computes, one after the other: in round i rank r computes rank i ranks + r
  // of the step.
  std::int64_t rounds = 1;
  // Elements of gradients or parameters that are exchanged at once, at least, where there are so many: below 64 MB
  // latency costs bandwidth.
  std::int64_t bucket_elements = 16 << 20;
};

// How the ranks divide the arenas, and the work of this rank. The blocks of the update and of the norm do not depend on
// the number of ranks: they end where sections end, at multiples of kAdamWBlockElements, and where a tensor that the optimizer
// needs whole begins or ends. Parts of buckets end there too, but within no such tensor.
struct Sharding {
  Sharding(const ModelConfig& config, const TensorTable& table, const Optimizer& optimizer, const RankShare& share);

  std::int64_t ranks = 1;
  bool sharded = false;             // a rank has moments, low halves and the update of its own parts only
  bool gradients_sharded = false;   // likewise the gradients of the step
  bool parameters_sharded = false;  // likewise the parameters, stored like the moments
  std::vector<Bucket> buckets;      // in the order of the arena
  std::vector<Range> sections;      // parameter_sections(): embedding, layers and, unless it is tied, the head
  std::size_t head_section = 0;     // the embedding's if it is tied
  // Where the gradients of each section lie while they are computed. With sharded gradients, layers take turns in
  // kGradientSlots places, and the ranks' sums are stored like the moments.
  std::vector<std::int64_t> gradient_begins;
  std::int64_t gradient_elements = 0;
  SectionBuffers places;  // where sharded parameters lie while a pass uses them
  // The work of this rank: the blocks that AdamW updates and the matrices that Muon does, each in the order of the buckets.
  // Behind all of AdamW's, `blocks` has those of the matrices, for the norm.
  std::vector<AdamWBlock> blocks;
  std::vector<MuonMatrix> matrices;
  std::vector<Range> blocks_of_bucket, matrices_of_bucket;  // ranges of the two
  std::vector<std::int64_t> state_begins;  // where low halves and first states of this rank's part of each bucket begin
  std::int64_t state_elements = 0;         // number of first states that this rank has
  // The elements of the arena of which it has second states. If all tensors have one, those are where the first are.
  PackedRanges seconds{{}};
  // Where the sums of this rank's parts of buckets lie if they are apart from the gradients: with sharded gradients,
  // and in rounds before the last.
  std::vector<std::int64_t> sum_begins;
  std::int64_t sum_elements = 0;
  // The squares of all blocks are stored rank by rank: the range of each rank, and the index of each block's square in
  // the order of the arena (empty if that is the same order).
  std::vector<Range> squares_of_rank;
  std::vector<std::int32_t> squares_order;
  std::int64_t squares = 0;
  std::int64_t received = 0;  // the most elements received from other ranks for one bucket

  std::size_t end_of_layers() const {
    return sections.size() - (head_section > 0 ? 1 : 0);
  }  // layer l has section l + 1
  std::size_t section_of(const TensorSpec& spec) const;
  // Offset of a section's gradient, while it is computed, from its position in the table's layout.
  std::int64_t gradient_shift(std::size_t section) const { return gradient_begins[section] - sections[section].begin; }

 private:
  void place_gradients(const ModelConfig& config);
};

// Layers that have gradients at the same time with sharded gradients: one that is being computed, and some that are
// being exchanged.
inline constexpr std::size_t kGradientSlots = 3;

// Everything that a step needs beside parameters and activations: inputs, tables, results and scratch memory of
// operators.
struct TrainingWorkspace {
  TrainingWorkspace(const ModelConfig& config, const TrainOptions& options, const RankShare& share,
                    const Sharding& sharding, std::span<const MuonShape> muon_shapes);
  TrainingWorkspace(const TrainingWorkspace&) = delete;  // `layout` holds the addresses of the pointers below
  TrainingWorkspace& operator=(const TrainingWorkspace&) = delete;

  std::int32_t *tokens = nullptr, *labels = nullptr;  // [N]
  std::int32_t* document_starts = nullptr;            // [B, T] of Batch; null without TrainOptions::document_mask
  float* label_weights = nullptr;                     // [B, T] of Batch; null without TrainOptions::label_weights
  std::byte* sorted_tokens = nullptr;                 // of embedding_sort(), for embedding_backward()
  float *rope_cos = nullptr, *rope_sin = nullptr;     // [T, rotary_dim / 2]
  float *local_rope_cos = nullptr, *local_rope_sin = nullptr;    // with ModelConfig::local_rope_theta only
  LossTotal *loss_total = nullptr, *evaluation_total = nullptr;  // loss of the rank so far; loss of one evaluate()
  // [ranks]: losses of the ranks of a run; with virtual ranks the first one is their sum
  LossTotal* rank_totals = nullptr;
  Fp8Counters* rank_counters = nullptr;  // with fp8 and several ranks: what each has met, [ranks, slots]
  GradientNorm* gradient_norm = nullptr;
  AdamWBlock* adamw_blocks = nullptr;
  MuonWorkspace muon;
  double* squares = nullptr;              // sums of squares of the gradients of each block, of all ranks
  std::int32_t* squares_order = nullptr;  // null: the order of `squares`
  std::byte* scratch = nullptr;           // scratch shared by operators that never run at the same time

  ArenaLayout layout{"workspace"};
};

// The model beside an adapter as the GPU keeps it: the linear layers of the blocks quantised as in the file, or with
// Precision::fp8 in e4m3, whose rows then all have the scale of the matrix that a GEMM reads; a quantised head, which is read
// several times in a pass, as floats.
TensorTable frozen_table(const ModelConfig& config, const TrainOptions& options, DType storage);
// The format in which it keeps them; null: floats.
inline const WeightFormat* frozen_format(const TrainOptions& options) {
  return options.precision == Precision::fp8 ? &weight_format(DType::e4m3) : options.frozen_quantization.weights;
}

// The scratch memory of an adapter; empty without one.
template <typename S>
struct AdapterMemory {
  AdapterMemory(const ModelConfig& config, const TrainOptions& options) {
    work.reserve(layout, low_rank_shapes(config, options), options.adapter_dropout > 0);
    std::int64_t largest = 0;
    for (const BlockLinear linear : kBlockLinears) {
      const LinearSize size = linear_size(config, linear);
      const bool dequantised = options.frozen_quantization.weights != nullptr && options.precision != Precision::fp8;
      if (dequantised) largest = std::max(largest, size.C * size.OC);
    }
    layout.reserve(&weight, largest);
  }
  AdapterMemory(const AdapterMemory&) = delete;  // `layout` holds the addresses of the pointers in `work`
  AdapterMemory& operator=(const AdapterMemory&) = delete;

  LowRankWorkspace<S> work;
  S* weight = nullptr;  // a quantised matrix of the frozen model as floats, while a GEMM reads it
  ArenaLayout layout{"workspace of the adapter"};
};
// All parameters of the model beside an adapter; empty without one.
MemoryPlan frozen_plan(const TensorTable& model, const TrainOptions& options);

// The memory table of a model: what its constructor allocates. S as above.
template <typename S>
std::vector<MemoryLine> llama_memory(const ModelConfig& config, const TrainOptions& options, const RankShare& share);

// Memory for each element of the arena, or for those whose state this rank has.
MemoryPlan state_plan(const char* name, const Sharding& sharding, std::size_t element_bytes);
MemoryPlan second_state_plan(const Sharding& sharding, std::size_t element_bytes);
// The gradients' sum over completed virtual ranks; empty with one.
MemoryPlan rank_sum_plan(const TensorTable& table, const TrainOptions& options);
MemoryPlan received_plan(const Sharding& sharding);
// Parameters as passes read them: all of them, or the places of sharded ones; element_bytes each.
MemoryPlan read_parameters_plan(const TensorTable& table, const Sharding& sharding, std::size_t element_bytes);
// gradient_plan(): gradients while they are computed; part_sum_plan(): sums of this rank's parts that are apart from
// them.
MemoryPlan gradient_plan(const Sharding& sharding);
MemoryPlan part_sum_plan(const Sharding& sharding);

// The options of one rank: `options` without the micro-batches of the others.
TrainOptions of_one_rank(TrainOptions options);

// Exit::usage for a width, a head size or a block that the kernels do not have.
void check_sizes(const ModelConfig& config);

}  // namespace weft::cuda
