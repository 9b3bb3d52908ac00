// What a branch gives is normalised before it is added to the residual stream (ModelConfig::post_norms), and the norm of
// what reads the stream next, as one operator:
//
//   h = residual + norm(branch) (branch_weight + offset) + branch_bias
//   out = norm(h) (weight + offset) + bias
//
// Either half may be left out: without `branch` h is the residual stream, without `out` only h is stored. offset:
// ResidualNormShape::weight_offset. The specification is llmc/cpu/residual_norm.h, called twice.
//
// The branch and the stream are fp32, as statistics are; weights and out are stored in T (float, bf16, fp16). The bits of
// a row depend on that row alone. C is a multiple of 8 up to kMaxNormWidth (Exit::internal otherwise) and every pointer
// is aligned to 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "llmc/model/norm_shape.h"

namespace weft::cuda {

template <typename T>
struct PostNorm {
  const float* branch = nullptr;                             // [rows, C]; null: h = residual
  const T *branch_weight = nullptr, *branch_bias = nullptr;  // [C]; a bias may be null
  const float* residual = nullptr;                           // [rows, C]
  float* residual_out = nullptr;                             // h [rows, C], iff branch; may be `residual`
  const T *weight = nullptr, *bias = nullptr;                // [C]; a bias may be null
  T* out = nullptr;                                          // [rows, C]; null: none
};
// `overlapping`: launched as part of a chain (hw/launch.cuh); only on a GPU that supports it.
template <typename T>
void post_norm(const ResidualNormShape& shape, const PostNorm<T>& io, cudaStream_t stream, bool overlapping = false);

}  // namespace weft::cuda
