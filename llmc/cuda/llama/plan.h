// What a training step keeps on the GPU, planned before anything is allocated and without a GPU.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/range.h"
#include "llmc/base/regions.h"
#include "llmc/cuda/op/adamw.h"
#include "llmc/cuda/op/classifier.h"
#include "llmc/model/head_view.h"
#include "llmc/model/shards.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// S, the storage type of parameters and activations, is bf16 or float.
template <typename S>
inline constexpr DType kStorage = std::is_same_v<S, __nv_bfloat16> ? DType::bf16 : DType::f32;
// bf16 parameters have 16 low bits beside them that make each an exact fp32 master (llmc/cuda/op/adamw.h).
template <typename S>
inline constexpr bool kSplitMaster = std::is_same_v<S, __nv_bfloat16>;

inline std::size_t moment_bytes(const TrainOptions& options) {
  return options.moments == Precision::bf16 ? sizeof(__nv_bfloat16) : sizeof(float);
}

// How many of the N rows of logits exist at the same time.
std::int64_t classifier_rows(std::int64_t N);
AttentionShape attention_shape(const ModelConfig& config, const TrainOptions& options);
// Which of the ranks of a run a model is, and what they divide. One rank: alone.
struct RankShare {
  int rank = 0, ranks = 1;
  Shard shard = Shard::none;
  // A rank computes so many ranks of the step, one after the other: in round i rank r is rank i ranks + r of the step.
  std::int64_t rounds = 1;
  // Of gradients or parameters that move at once, at least, where there are so many: below 64 MB latency costs bandwidth.
  std::int64_t bucket_elements = 16 << 20;
};

// How the ranks divide the arenas, and the work of this one. Blocks of the update and of the norm do not depend on the
// number of ranks: they end where sections and, at multiples of kAdamWBlockElements, parts of buckets may end.
struct Division {
  Division(const ModelConfig& config, const TensorTable& table, const RankShare& share);

  bool divided = false;             // moments, low halves and the update: of the rank's own parts alone
  bool gradients_divided = false;   // the gradients of the step too
  bool parameters_divided = false;  // the parameters too: stored as the state is
  std::vector<Bucket> buckets;      // of the arena, in its order
  std::vector<Range> sections;
  // Where the gradients of a section lie while they are computed. With divided gradients layers take turns in
  // kGradientSlots places, and the sums of the ranks are stored as the state is.
  std::vector<std::int64_t> gradient_begins;
  std::int64_t gradient_elements = 0;
  SectionPlaces places;                    // where passes have divided parameters
  std::vector<AdamWBlock> blocks;          // the work of the update, in the order of the buckets
  std::vector<Range> blocks_of_bucket;     // of `blocks`
  std::vector<std::int64_t> state_begins;  // where the moments of this rank's part of a bucket begin
  std::int64_t state_elements = 0;         // how many moments this rank has
  // Where the sums of this rank's parts of buckets lie while they are apart from gradients: divided ones, and those of the
  // rounds before the last.
  std::vector<std::int64_t> sum_begins;
  std::int64_t sum_elements = 0;
  // The squares of all blocks lie rank by rank: where those of each rank are, and the position of each block in the order of
  // the arena. The order is empty where that is the same.
  std::vector<Range> squares_of_rank;
  std::vector<std::int32_t> squares_order;
  std::int64_t squares = 0;
  std::int64_t received = 0;  // elements of a bucket that come from other ranks, at most

 private:
  void place_gradients(const ModelConfig& config);
};

// With divided gradients so many layers have gradients at the same time: one that is computed, and some that are exchanged.
inline constexpr std::size_t kGradientSlots = 3;

// Everything a step needs beside parameters and activations: inputs, tables, results and scratch memory of operators.
struct LlamaWorkspace {
  LlamaWorkspace(const ModelConfig& config, const TrainOptions& options, const RankShare& share,
                 const Division& division);
  LlamaWorkspace(const LlamaWorkspace&) = delete;  // regions has the addresses of the pointers
  LlamaWorkspace& operator=(const LlamaWorkspace&) = delete;

  std::int32_t *tokens = nullptr, *labels = nullptr;             // [N]
  std::byte* sorted_tokens = nullptr;                            // the order in which embedding_backward adds rows
  float *rope_cos = nullptr, *rope_sin = nullptr;                // [T, rotary_dim / 2]
  LossTotal *loss_total = nullptr, *evaluation_total = nullptr;  // of the rank so far; of one evaluate()
  LossTotal* rank_totals = nullptr;  // [ranks]: of the ranks of a run; the first one: the sum of virtual ranks before
  GradientNorm* gradient_norm = nullptr;
  AdamWBlock* adamw_blocks = nullptr;
  double* squares = nullptr;              // of the gradients of each block, of all ranks
  std::int32_t* squares_order = nullptr;  // null: their own
  std::byte* scratch = nullptr;           // of the operators that use some: no two of them run at the same time

  Regions regions{"workspace"};
};

// The memory table of a model: what its constructor allocates. S as above.
template <typename S>
std::vector<MemoryLine> llama_memory(const ModelConfig& config, const TrainOptions& options, const RankShare& share);

// Memory for each element of the arena, or for those whose state this rank has.
MemoryPlan state_plan(const char* name, const Division& division, std::size_t element_bytes);
// The sum of virtual ranks that have computed; empty with one.
MemoryPlan rank_sum_plan(const TensorTable& table, const TrainOptions& options);
MemoryPlan received_plan(const Division& division);
// What passes read: all parameters, or the places of those that are divided, of so many bytes an element.
MemoryPlan read_parameters_plan(const TensorTable& table, const Division& division, std::size_t element_bytes);
// Gradients while they are computed, and the sums of this rank's parts that are apart from them.
MemoryPlan gradient_plan(const Division& division);
MemoryPlan part_sum_plan(const Division& division);

// One of the ranks of a run: the step of `options` without the micro-batches of the others.
TrainOptions of_one_rank(TrainOptions options);

// Exit::usage for a width or head size that the kernels do not have.
void check_sizes(const ModelConfig& config);

}  // namespace weft::cuda
