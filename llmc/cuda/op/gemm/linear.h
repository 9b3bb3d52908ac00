// Parameters of operators of one token: a linear layer, a norm, a range of rows. W is the storage type of matrices, A
// that of activations, biases and norms: float, bf16 or fp16. Pointers are 16-byte aligned device addresses.
#pragma once

#include "llmc/model/block_weights.h"

namespace weft::cuda {

template <typename W, typename A>
struct GemvLinear {
  const W* weight = nullptr;  // [out, in], row-major
  const A* bias = nullptr;    // [out] or null
};

template <typename A>
using Norm = NormWeights<const A>;

// Rows [begin, end) of a matrix.
struct RowRange {
  int begin, end;
};

}  // namespace weft::cuda
