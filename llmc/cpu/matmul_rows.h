// Batch-invariant linear layer: out = x W^T + bias, where the bits of a row of out depend on that row of x alone, not on how
// many other rows there are. matmul_forward() (matmul.h) does not promise that: a BLAS chooses its kernel by the shape.
//
// What makes it possible: each element is one dot product whose order of sums depends on C alone (dot_products.h).
#pragma once

#include <cstdint>

#include "llmc/cpu/matmul.h"
#include "llmc/model/block_weights.h"

namespace weft::cpu {

// out [N, OC] (+)= x [N, C] * weight [OC, C]^T + bias [OC] (null: none). With a scale for each row of the weight the sum runs
// over x * q, and is multiplied by the scale as the bias is added (one rounding). A grouped weight gives the bits of its
// dequantised floats. With `x_scales` [N] the sum is multiplied by that of its row of x first.
void matmul_rows_forward(float* out, const float* x, const Weight<const float>& weight, const float* bias,
                         std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate = Accumulate::no,
                         const float* x_scales = nullptr);

}  // namespace weft::cpu
