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

// Two pairs of codes (kv_pair()) in a word: both first ones, and both second ones.
struct WidePairs {
  unsigned first, second;
};
template <typename S>
__device__ inline WidePairs widen(unsigned pairs, unsigned power) {
  // Sign, exponent and mantissa at their places in bf16, or three bits further in fp16, whose exponent is three bits shorter.
  unsigned first, second;
  if constexpr (std::is_same_v<S, fp16>) {
    first = lop3<kAndOr>(pairs, 0x80008000, pairs << 3 & 0x3f803f80);
    second = lop3<kAndOr>(pairs << 4, 0x80008000, pairs >> 1 & 0x38003800) | (pairs << 7 & 0x07800780);
  } else {
    first = pairs & 0x87f087f0;
    second = lop3<kAndOr>(pairs << 4, 0x80f080f0, pairs >> 4 & 0x07000700);
  }
  const auto scaled = [&](unsigned bits) { return as_bits(__hmul2(as_pair<S>(bits), as_pair<S>(power))); };
  return {scaled(first), scaled(second)};
}

}  // namespace weft::cuda
