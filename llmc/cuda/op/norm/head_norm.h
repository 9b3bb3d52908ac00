// RMSNorm of each head of q and of k on the GPU, before they rotate, and their rotation. The specification is
// llmc/cpu/head_norm.h, and of the rotation llmc/cpu/rope.h.
//
// Heads lie where their views say, so packed rows of any layout are normalised in place, and v is not touched. HS is a
// multiple of 8 up to 256, and every head begins on a 16-byte boundary (Exit::internal otherwise). Statistics and the
// gradients of weights are fp32. The bits of a head depend on that head alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

// B x T tokens, each with NH heads of q and NKV of k.
struct HeadNormShape {
  std::int64_t B = 0, T = 0, NH = 0, NKV = 0, HS = 0;
  float eps = 0;
  float weight_offset = 0;  // added to each weight
};

// T: float, bf16 or fp16.
template <typename T>
struct HeadNormForward {
  HeadViewOf<T> q, k;                                // in place
  const T *q_weight = nullptr, *k_weight = nullptr;  // [HS]
  T* kept = nullptr;  // [B T, (NH + NKV) HS]: gets q and k as they were, for backward; null: not kept
  // Also does what rope_forward() from position 0 would do to the rounded results, bit for bit; half = 0: nothing. Only
  // where head_norm_rotates().
  DeviceRopeTable rope = {};
};
// Whether a lane's elements of a head have their partners of the rotation in one other lane.
template <typename T>
constexpr bool head_norm_rotates(std::int64_t half) {
  return half % (16 / static_cast<std::int64_t>(sizeof(T))) == 0;
}
// `overlapping`: launched as part of a chain (hw/launch.cuh); only on a GPU that supports it.
template <typename T>
void head_norm_forward(const HeadNormShape& shape, const HeadNormForward<T>& io, cudaStream_t stream,
                       bool overlapping = false);

template <typename T>
struct HeadNormBackward {
  HeadViewOf<T> dq, dk;     // the gradients of forward's results; become those of its inputs
  const T* kept = nullptr;  // of forward
  const T *q_weight = nullptr, *k_weight = nullptr;
  float *dq_weight = nullptr, *dk_weight = nullptr;  // [HS] +=; both null: not computed
  void* workspace = nullptr;                         // head_norm_backward_workspace(HS) bytes
};
// The gradients of the weights are added block by block, then over the blocks in order: no atomics, the same bits every
// time on one type of GPU.
template <typename T>
void head_norm_backward(const HeadNormShape& shape, const HeadNormBackward<T>& io, cudaStream_t stream);
std::size_t head_norm_backward_workspace(std::int64_t HS);

}  // namespace weft::cuda
