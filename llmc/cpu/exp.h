// e^x in fp32 by plain arithmetic, so that a loop over it becomes vector code: without fast-math g++ calls
// libm's expf once an element, 2.0 ns against 0.6 ns here, and attention, SwiGLU and the classifier are mostly
// exponentials outside their GEMMs.
//
// x = n ln2 + r with |r| <= ln2 / 2, then e^x = 2^n (1 + r + r^2 p(r)) with a minimax p of degree 4. At most
// 2 units in the last place from the true value, subnormal results included; 0 below -104, infinity
// above 88.73, NaN for NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "llmc/cpu/lanes.h"

namespace weft::cpu {

inline float exp_f32(float x) {
  // The bounds only keep n small: e^-104 already rounds to 0 and e^89 to infinity. A NaN passes both
  // comparisons.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  // Adding 1.5 * 2^23 leaves the nearest integer of x / ln2 in the low mantissa bits.
  const float kRound = 0x1.8p23f;
  const float shifted = multiply_add(x, 0x1.715476p0f, kRound);
  const float n = shifted - kRound;
  // ln2 in two parts: the first has so few bits that n times it is exact.
  const float r = multiply_add(-n, 0x1.7f7d1cp-20f, multiply_add(-n, 0x1.62e4p-1f, x));
  float p = 0x1.6a23d0p-10f;
  p = multiply_add(p, r, 0x1.123a20p-7f);
  p = multiply_add(p, r, 0x1.5558f2p-5f);
  p = multiply_add(p, r, 0x1.555492p-3f);
  p = multiply_add(p, r, 0x1.fffffcp-2f);
  const float y = multiply_add(r * r, p, r) + 1.0f;
  // 2^n in two factors, because n = 128 and n < -126 have no fp32 of their own.
  const std::int32_t exponent = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound);
  const std::int32_t half = exponent >> 1;
  const auto power_of_two = [](std::int32_t e) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23);
  };
  return y * power_of_two(half) * power_of_two(exponent - half);
}

}  // namespace weft::cpu
