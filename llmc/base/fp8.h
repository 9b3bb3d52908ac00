// 8-bit floating point as training uses it: the two formats of OFP8 (OCP, 2023), rounding to them, and the scale that brings
// a tensor into their range. The same functions on the host and on a GPU: the reference on the CPU and the kernels agree in
// every bit.
//
//   e4m3   4 bits of exponent (bias 7), 3 of mantissa; largest 448, smallest 2^-9; no infinity, 0x7F and 0xFF are NaN
//   e5m2   5 bits of exponent (bias 15), 2 of mantissa; largest 57344, smallest 2^-16; infinities and NaNs as IEEE has them
//
// A tensor x is stored as the numbers nearest to x 2^e (ties to even, saturating) with one exponent e for all of it. Scales
// are powers of two, so that scaling itself rounds nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "llmc/base/philox.h"  // WEFT_HOST_DEVICE

namespace weft {

enum class Fp8Format { e4m3, e5m2 };

WEFT_HOST_DEVICE constexpr float fp8_largest(Fp8Format format) {
  return format == Fp8Format::e4m3 ? 448.0f : 57344.0f;
}
// Half of the smallest number: magnitudes up to this are rounded to zero.
WEFT_HOST_DEVICE constexpr float fp8_flushed(Fp8Format format) {
  return format == Fp8Format::e4m3 ? 0x1p-10f : 0x1p-17f;
}

// e for a tensor whose largest magnitude is `amax`: the largest with amax 2^e at most half of the format's largest number. The
// factor of two is for values that have grown since amax was measured. From -126 to 126, so that 2^e and 2^-e are normal
// numbers of fp32; 0 for amax = 0. amax is finite.
WEFT_HOST_DEVICE constexpr int fp8_exponent(std::uint32_t amax_bits, Fp8Format format) {
  constexpr int kLimit = 126, kHeadroom = 1;
  if (amax_bits == 0) return 0;
  const int largest = format == Fp8Format::e4m3 ? 8 : 15;  // 1.75 2^largest
  const int exponent = static_cast<int>(amax_bits >> 23) - 127;
  const bool above = (amax_bits & 0x7FFFFFu) > 0x600000u;  // 1.75
  const int e = largest - kHeadroom - exponent - (above ? 1 : 0);
  return e > kLimit ? kLimit : e < -kLimit ? -kLimit : e;
}
// The bits of 2^e in fp32.
WEFT_HOST_DEVICE constexpr std::uint32_t fp8_scale_bits(int e) {
  return static_cast<std::uint32_t>(e + 127) << 23;
}

// What was lost in rounding a tensor, and its largest magnitude. All are sums or maxima of integers: the same in any
// order.
struct Fp8Counters {
  std::uint64_t saturated = 0;  // values beyond the largest number: stored as that
  std::uint64_t flushed = 0;    // values that are not zero and were stored as zero
  std::uint32_t amax_bits = 0;  // of the largest magnitude, before scaling; above those of infinity: a NaN
  std::uint32_t unused = 0;

  bool operator==(const Fp8Counters&) const = default;
};

// ---- on the host ----------------------------------------------------------------------------------------------------

struct Fp8Layout {
  int mantissa_bits, bias;
};
constexpr Fp8Layout fp8_layout(Fp8Format format) {
  return format == Fp8Format::e4m3 ? Fp8Layout{3, 7} : Fp8Layout{2, 15};
}

// The number of the format nearest to `value`, ties to even, saturating; infinities and NaNs become NaN: what is not finite
// stays so.
inline float round_to_fp8(float value, Fp8Format format) {
  const Fp8Layout layout = fp8_layout(format);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), sign = bits & 0x80000000u;
  const std::uint32_t magnitude = bits ^ sign;
  if (magnitude >= 0x7F800000u) return std::numeric_limits<float>::quiet_NaN();
  float rounded = 0;
  if (magnitude >= static_cast<std::uint32_t>(128 - layout.bias) << 23) {  // a normal number of the format
    const int dropped = 23 - layout.mantissa_bits;
    const std::uint32_t odd = (magnitude >> dropped) & 1u, half = (1u << (dropped - 1)) - 1u;
    rounded = std::bit_cast<float>((magnitude + half + odd) >> dropped << dropped);
  } else {
    // Near `steps` fp32 numbers have the spacing of the format's subnormal numbers, so the addition rounds.
    const float steps =
        std::bit_cast<float>(static_cast<std::uint32_t>(128 - layout.bias + 23 - layout.mantissa_bits) << 23);
    rounded = (std::bit_cast<float>(magnitude) + steps) - steps;
  }
  rounded = std::min(rounded, fp8_largest(format));
  return sign != 0 ? -rounded : rounded;
}
// The code of round_to_fp8(), and the number of a code, exactly.
std::uint8_t f32_to_fp8(float value, Fp8Format format);
float fp8_to_f32(std::uint8_t code, Fp8Format format);

}  // namespace weft
