// What an adapter adds to a linear layer (LoRA, Hu et al., 2021, section 4.1), with `down` A and `up` B:
//
//   y[n, rows] += scale (dropout(x)[n] down^T) up^T
//
// Dropout scales what it keeps by 1 / (1 - p). Its mask is not stored: element e = n * in + c is kept iff
// uniform01(philox(seed, offset + e / 4, RandomStream::adapter_dropout).word[e % 4]) >= p, forward and backward alike. All
// modules of one layer, q, k and v say, have one mask.
//
// A call computes one module. By the GEMMs of matmul.h, except where said; the same bits for any number of threads.
#pragma once

#include <cstdint>

#include "llmc/model/block_weights.h"
#include "llmc/model/low_rank_shape.h"

namespace weft::cpu {

// floats of the workspace that both functions need.
std::int64_t low_rank_workspace(const LowRankShape& shape);

void low_rank_forward(const LowRankShape& shape, float* y, const float* x, const LowRank<float>& adapter,
                      float* workspace);

// The same without dropout by the GEMMs of matmul_rows.h: the bits of a row of y depend on that row of x and y alone.
void low_rank_rows_forward(const LowRankShape& shape, float* y, const float* x, const LowRank<const float>& adapter,
                           float* workspace);

// Adds to the gradients of x, down and up; dx null: not computed. dy [N, out] is the gradient of y.
void low_rank_backward(const LowRankShape& shape, float* dx, const LowRank<float>& d_adapter, const float* dy,
                       const float* x, const LowRank<float>& adapter, float* workspace);

}  // namespace weft::cpu
