// Softmax + cross-entropy on the GPU, forward and backward in one pass over the logits. The specification is
// llmc/cpu/classifier.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// The properties of a GPU on which the split of rows depends.
struct ClassifierLimits {
  int major, shared_of_block, shared_of_multiprocessor;  // compute capability; bytes
};
ClassifierLimits classifier_limits();  // for the current GPU

// For each row n of logits [N, row_stride], of which the first V columns count: losses[n] = -log
// softmax(logits[n])[labels[n]], 0 where labels[n] is kIgnoredLabel. With write_gradient the logits are replaced by
// loss_scale * d(sum of losses)/d(logits), which is zero in ignored rows and in columns V .. row_stride - 1, so that a
// GEMM may run over whole padded rows. `weights` [N]: the loss of row n counts weights[n] times in that sum; null: once.
// T is float, bf16 or fp16; any V <= row_stride. 16-byte accesses where row_stride is a multiple of 16 bytes, a slower
// path otherwise. Labels are kIgnoredLabel or in [0, V), which the caller guarantees. `limits` other than the GPU's own, but
// not beyond them, are for tests.
template <typename T>
void classifier(T* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
                std::int64_t row_stride, float loss_scale, bool write_gradient, cudaStream_t stream,
                const ClassifierLimits& limits = classifier_limits(), const float* weights = nullptr);

// Accumulates on the device over the micro-batches of a step; zero it with cudaMemsetAsync before the first.
struct LossTotal {
  double loss_sum;
  std::int64_t label_count;
};
// total += the losses [N] and the number of labels [N] that are not kIgnoredLabel, added in double in a fixed
// order.
void add_losses(LossTotal* total, const float* losses, const std::int32_t* labels, std::int64_t N, cudaStream_t stream);
// sum += total; total = 0.
void move_losses(LossTotal* sum, LossTotal* total, cudaStream_t stream);

}  // namespace weft::cuda
