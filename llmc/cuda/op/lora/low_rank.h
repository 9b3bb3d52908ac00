// What an adapter adds to a linear layer on the GPU. The specification is llmc/cpu/low_rank.h.
//
// The modules of one layer, q, k and v say, are computed together: their A lie below each other as one matrix `down` [H, in], and
// their B, times the scale, are the blocks of a matrix `up` [out, H] that is zero elsewhere. H is the sum of their ranks, padded
// with zeros to a multiple of 8, so that the GEMMs find aligned rows for any rank. With x' = dropout(x):
//
//   h = x' down^T,   y += h up^T,   dh = dy up,   dx += dropout'(dh down),   ddown = dh^T x',   dup = dy^T h
//
// All but packing, unpacking and dropout are GEMMs of matmul.h: h, dh and the sums into y and dx are rounded to T. No atomics:
// the same bits every time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/arena_layout.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/low_rank_shape.h"

namespace weft::cuda {

inline constexpr std::int64_t kMaxLowRankModules = 3;

// H of a layer with 1 to kMaxLowRankModules modules.
inline std::int64_t hidden_size(const LowRankShape& shape) {
  return (shape.modules * shape.rank + 7) / 8 * 8;
}

// Scratch memory that the layers of a model use in turn. T: float or bf16.
template <typename T>
struct LowRankWorkspace {
  T *down = nullptr, *up = nullptr;          // [H, in], [out, H]
  T *hidden = nullptr, *d_hidden = nullptr;  // [N, H]
  T* input = nullptr;                        // [N, in]; with dropout
  float *d_down = nullptr, *d_up = nullptr;  // [H, in], [out, H]

  // For layers of these shapes; `dropout`: whether any pass has it.
  void reserve(ArenaLayout& layout, std::span<const LowRankShape> shapes, bool dropout);
};

// The GEMMs of a layer in training, for Matmul::prepare().
template <typename T>
std::vector<MatmulShape> low_rank_matmuls(const LowRankShape& shape);

// y += scale (x' A^T) B^T for each of `modules`.
template <typename T>
void low_rank_forward(Matmul& matmul, const LowRankShape& shape, T* y, const T* x, std::span<const LowRank<T>> modules,
                      const LowRankWorkspace<T>& work, cudaStream_t stream);

// Backward, in three calls for the same layer, since its gradients are needed at different times: first the gradient of h, which
// stays in the workspace, from dy [N, out]; then, in any order, the other two.
template <typename T>
void low_rank_hidden_grad(Matmul& matmul, const LowRankShape& shape, const T* dy, std::span<const LowRank<T>> modules,
                          const LowRankWorkspace<T>& work, cudaStream_t stream);
// dx [N, in] += the part of these modules.
template <typename T>
void low_rank_input_grad(Matmul& matmul, const LowRankShape& shape, T* dx, const LowRankWorkspace<T>& work,
                         cudaStream_t stream);
// The gradients of A and B, d_modules (+)=.
template <typename T>
void low_rank_weight_grad(Matmul& matmul, const LowRankShape& shape, std::span<const LowRank<float>> d_modules,
                          const T* dy, const T* x, const LowRankWorkspace<T>& work, Accumulate accumulate,
                          cudaStream_t stream);

// weight [out, in] += scale B A for each module: what inference reads. The sum is rounded to T once.
template <typename T>
void low_rank_merge(Matmul& matmul, const LowRankShape& shape, T* weight, std::span<const LowRank<T>> modules,
                    const LowRankWorkspace<T>& work, cudaStream_t stream);

}  // namespace weft::cuda
