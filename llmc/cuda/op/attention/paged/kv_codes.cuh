// Keys and values in e4m3 (llmc/base/kv_fp8.h) on the GPU: widening codes to 16 bits, which rounds nothing.
#pragma once

#include <type_traits>

#include "llmc/base/kv_fp8.h"
#include "llmc/cuda/formats/bits.cuh"

namespace weft::cuda {

// What widen() multiplies by, in both halves: the scale, and the difference of the exponents' biases as in formats/fp8.cuh.
template <typename S>
__device__ inline unsigned kv_power(unsigned scale) {
  constexpr bool kHalf = std::is_same_v<S, fp16>;
  // The exponent field of 2^(e + 8) in fp16, of 2^(e + 120) in bf16.
  const unsigned power = scale == kKvNotFinite ? (kHalf ? 0x7e00u : 0x7fc0u)
                         : kHalf               ? (scale - 127 + 8 + 15) << 10
                                               : (scale - 127 + 120 + 127) << 7;
  return power | power << 16;
}

// Four codes as they follow each other in a row (kv_index()): elements of dimensions below 8 of their 16, and of those from 8 on.
struct WidePairs {
  unsigned lower, upper;
};
template <typename S>
__device__ inline WidePairs widen(unsigned codes, unsigned power) {
  constexpr bool kHalf = std::is_same_v<S, fp16>;
  constexpr unsigned kShift = kHalf ? 1 : 4, kFields = kHalf ? 0x3f803f80 : 0x07f007f0;
  const auto pair = [&](unsigned bytes) {  // a code in the upper half of each 16 bits
    return as_bits(__hmul2(as_pair<S>(lop3<kAndOr>(bytes, 0x80008000, bytes >> kShift & kFields)), as_pair<S>(power)));
  };
  return {pair(codes << 8), pair(codes)};
}

}  // namespace weft::cuda
