// What the tests of rows_matmul() and of its form with quantised weights go through.
#pragma once

#include <array>

#include "llmc/cuda/op/gemm/rows_matmul.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {

constexpr std::array kEpilogues = {cuda::RowsEpilogue::store, cuda::RowsEpilogue::gelu, cuda::RowsEpilogue::swiglu,
                                   cuda::RowsEpilogue::add, cuda::RowsEpilogue::store_fp32};
constexpr std::array kPaths = {cuda::RowsPath::automatic, cuda::RowsPath::portable};

inline bool is_fp32(cuda::RowsEpilogue epilogue) {
  return epilogue == cuda::RowsEpilogue::add || epilogue == cuda::RowsEpilogue::store_fp32;
}

}  // namespace weft::test
