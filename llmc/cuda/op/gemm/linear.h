// Parameters of operators: a norm, a range of rows. A is the storage type of a norm's weight and bias: float, bf16 or fp16.
// Pointers are 16-byte aligned device addresses.
#pragma once

#include "llmc/model/block_weights.h"

namespace weft::cuda {

template <typename A>
using Norm = NormWeights<const A>;

// Rows [begin, end) of a matrix.
struct RowRange {
  int begin, end;
};

}  // namespace weft::cuda
