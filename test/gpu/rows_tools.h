// What the tests of rows_matmul() and of its form with quantised weights go through, and operands whose sums are exact in fp32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>

#include "llmc/cuda/op/rows_matmul.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {

constexpr std::array kEpilogues = {cuda::RowsEpilogue::store, cuda::RowsEpilogue::gelu, cuda::RowsEpilogue::swiglu,
                                   cuda::RowsEpilogue::add, cuda::RowsEpilogue::store_fp32};
constexpr std::array kPaths = {cuda::RowsPath::automatic, cuda::RowsPath::portable};

inline bool is_fp32(cuda::RowsEpilogue epilogue) {
  return epilogue == cuda::RowsEpilogue::add || epilogue == cuda::RowsEpilogue::store_fp32;
}

// -1/2 to 1/2.
inline Floats quarters(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = 0.25f * static_cast<float>(static_cast<int>(generator() % 5) - 2);
  return values;
}

}  // namespace weft::test
