// What a training step keeps on the GPU, planned before anything is allocated and without a GPU.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/regions.h"
#include "llmc/cuda/op/adamw.h"
#include "llmc/cuda/op/classifier.h"
#include "llmc/model/head_view.h"
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
// The update's work, cut into CUDA blocks.
std::vector<AdamWBlock> update_blocks(const TensorTable& table);

// Everything a step needs beside parameters and activations: inputs, tables, results and scratch memory of operators.
struct LlamaWorkspace {
  LlamaWorkspace(const ModelConfig& config, const TrainOptions& options, std::int64_t adamw_block_count);
  LlamaWorkspace(const LlamaWorkspace&) = delete;  // regions has the addresses of the pointers
  LlamaWorkspace& operator=(const LlamaWorkspace&) = delete;

  std::int32_t *tokens = nullptr, *labels = nullptr;             // [N]
  std::byte* sorted_tokens = nullptr;                            // the order in which embedding_backward adds rows
  float *rope_cos = nullptr, *rope_sin = nullptr;                // [T, rotary_dim / 2]
  LossTotal *loss_total = nullptr, *evaluation_total = nullptr;  // of the step so far; of one evaluate()
  GradientNorm* gradient_norm = nullptr;
  AdamWBlock* adamw_blocks = nullptr;
  std::byte* scratch = nullptr;  // of the operators that use some: no two of them run at the same time

  Regions regions{"workspace"};
};

// The memory table of a model: what its constructor allocates. S as above.
template <typename S>
std::vector<MemoryLine> llama_memory(const ModelConfig& config, const TrainOptions& options);

// Exit::usage for a width or head size that the kernels do not have.
void check_sizes(const ModelConfig& config);

}  // namespace weft::cuda
