// What the tests of rows_matmul() and of its form with quantised weights go through.
#pragma once

#include <array>
#include <cmath>
#include <numbers>

#include "llmc/cuda/op/gemm/rows_matmul.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {

constexpr std::array kEpilogues = {cuda::RowsEpilogue::store,  cuda::RowsEpilogue::gelu,
                                   cuda::RowsEpilogue::swiglu, cuda::RowsEpilogue::geglu_tanh,
                                   cuda::RowsEpilogue::add,    cuda::RowsEpilogue::store_fp32};
inline constexpr std::array kPaths = {cuda::RowsPath::automatic, cuda::RowsPath::portable};

inline bool is_fp32(cuda::RowsEpilogue epilogue) {
  return epilogue == cuda::RowsEpilogue::add || epilogue == cuda::RowsEpilogue::store_fp32;
}

// The product of a gated epilogue.
inline double gated_of(cuda::RowsEpilogue epilogue, double gate, double up) {
  if (epilogue == cuda::RowsEpilogue::swiglu) return gate / (1 + std::exp(-gate)) * up;
  const double inner = std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate);
  return 0.5 * gate * (1 + std::tanh(inner)) * up;
}

}  // namespace weft::test
