// What the tests of kernels that write fp8 codes share.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "llmc/cuda/op/fp8/fp8.h"
#include "test/gpu/device_buffer.h"

namespace weft::test {

using Codes = std::vector<std::uint8_t>;

// 2^exponent.
inline float scale_of(int exponent) {
  return std::bit_cast<float>(fp8_scale_bits(exponent));
}

// What a kernel writes of one tensor of `count` elements. The arrays have `more` elements behind it; the counters, to which
// kernels add, is `before`.
struct Written {
  Written(std::int64_t count, int exponent, std::int64_t more = 0, const Fp8Counters& before = {})
      : codes(static_cast<std::size_t>(count + more)),
        transposed(codes.size()),
        scale(std::vector<float>{scale_of(exponent)}),
        counters(std::vector<Fp8Counters>{before}) {}
  // Both layouts and the counters; the rows alone; the columns alone, of a tensor that was counted before.
  cuda::Fp8Target target() const { return {codes.data(), transposed.data(), scale.data(), counters.data()}; }
  cuda::Fp8Target rows() const { return {codes.data(), nullptr, scale.data(), counters.data()}; }
  cuda::Fp8Target columns() const { return {nullptr, transposed.data(), scale.data(), nullptr}; }

  DeviceBuffer<std::uint8_t> codes, transposed;
  DeviceBuffer<float> scale;
  DeviceBuffer<Fp8Counters> counters;
};

}  // namespace weft::test
