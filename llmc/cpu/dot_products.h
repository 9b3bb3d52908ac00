// Dot products of a few rows with a few others, in registers. An element's sum has one order, whatever Rows and Outputs are:
// kLanes partial sums over the columns, added by sum_of_lanes(). So a caller may cut its rows and outputs into blocks as it
// likes, and no element's bits change.
#pragma once

#include <cstdint>

#include "llmc/cpu/lanes.h"

namespace weft::cpu {

// sums[r][o] = sum of x[r * x_stride + c] * w[o * w_stride + c] over c < C.
template <int Rows, int Outputs>
inline void dot_products(float (&sums)[Rows][Outputs], const float* x, std::int64_t x_stride, const float* w,
                         std::int64_t w_stride, std::int64_t C) {
  Lanes partial[Rows][Outputs] = {};
  const auto add = [&](const auto& load) {
    Lanes weights[Outputs];
#pragma GCC unroll 8
    for (int o = 0; o < Outputs; ++o) weights[o] = load(w + o * w_stride);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Lanes row = load(x + r * x_stride);
#pragma GCC unroll 8
      for (int o = 0; o < Outputs; ++o) partial[r][o] = multiply_add(row, weights[o], partial[r][o]);
    }
  };
  const std::int64_t whole = C / kLanes * kLanes;
  for (std::int64_t c = 0; c < whole; c += kLanes) add([c](const float* row) { return *lanes(row + c); });
  if (whole < C) add([=](const float* row) { return partial_lanes(row + whole, C - whole); });
  for (int r = 0; r < Rows; ++r) {
    for (int o = 0; o < Outputs; ++o) sums[r][o] = sum_of_lanes(partial[r][o]);
  }
}

// The dot product of two rows, with the bits that an element of dot_products() has.
inline float dot_product(const float* x, const float* w, std::int64_t C) {
  float sum[1][1];
  dot_products(sum, x, 0, w, 0, C);
  return sum[0][0];
}

}  // namespace weft::cpu
