// The arithmetic of sampling, in a form in which a host loop and a device kernel make the same choice.
//
// Probabilities are fixed-point integers. Integer sums do not depend on their order, so a parallel reduction
// gives the total of a sequential one, and the comparison that picks a token has no rounding to disagree
// about. What is left of floating point is one exponential a token, built from correctly rounded operations
// only.
#pragma once

#include <cmath>
#include <cstdint>

#include "llmc/base/philox.h"

namespace weft {

// A token of the greatest logit weighs 2^40. The sum over a vocabulary of at most 2^20 ids stays below 2^61,
// and a token below 2^-41 of the greatest weighs nothing.
inline constexpr int kWeightBits = 40;
inline constexpr std::int64_t kMaxSampledVocab = std::int64_t{1} << 20;
inline constexpr std::uint64_t kGreatestWeight = std::uint64_t{1} << kWeightBits;

// The two roundings of sampling_weight. The device adds a power of two so large that the sum has no fraction bits: the
// same rounding to nearest even by the multiplier's pipe, instead of conversions that run at a quarter of its pace.
WEFT_HOST_DEVICE inline double round_exponent(double exponent, int* whole) {  // |exponent| <= 42
#if defined(__CUDA_ARCH__)
  const double shifted = __dadd_rn(exponent, 0x1.8p52);
  *whole = __double2loint(shifted);
  return __dadd_rn(shifted, -0x1.8p52);
#else
  const double rounded = std::rint(exponent);
  *whole = static_cast<int>(rounded);
  return rounded;
#endif
}
WEFT_HOST_DEVICE inline std::uint64_t round_scaled(double value, int power) {  // value 2^power, below 2^52
#if defined(__CUDA_ARCH__)
  const double factor = __hiloint2double((power + 1023) << 20, 0);
  return static_cast<std::uint64_t>(__double_as_longlong(__fma_rn(value, factor, 0x1p52))) & ((1ull << 52) - 1);
#else
  return static_cast<std::uint64_t>(std::llrint(std::ldexp(value, power)));
#endif
}

// 2^40 * exp((logit - greatest) / temperature), rounded to nearest even, for logit <= greatest; `scale` is
// log2(e) / temperature. Every operation is an explicit fma, a lone product or exact, so that no compiler can
// contract one differently from another.
WEFT_HOST_DEVICE inline std::uint64_t sampling_weight(float logit, float greatest, double scale) {
  const double below = static_cast<double>(logit) - static_cast<double>(greatest);
  const double exponent = below * scale;
  const bool weighs = exponent > -(kWeightBits + 1.0);  // -infinity does not
#if !defined(__CUDA_ARCH__)
  if (!weighs) return 0;  // the device computes on, without a branch, and drops what comes out
#endif
  int power = 0;
  const double whole = round_exponent(exponent, &power);
  const double x = std::fma(below, scale, -whole) * 0.6931471805599453;  // |x| <= ln(2) / 2
  // exp(x) by its Taylor series: the first term left out is below 2^-46.
  double sum = 1.0 / 39916800.0;
  sum = std::fma(sum, x, 1.0 / 3628800.0);
  sum = std::fma(sum, x, 1.0 / 362880.0);
  sum = std::fma(sum, x, 1.0 / 40320.0);
  sum = std::fma(sum, x, 1.0 / 5040.0);
  sum = std::fma(sum, x, 1.0 / 720.0);
  sum = std::fma(sum, x, 1.0 / 120.0);
  sum = std::fma(sum, x, 1.0 / 24.0);
  sum = std::fma(sum, x, 1.0 / 6.0);
  sum = std::fma(sum, x, 0.5);
  sum = std::fma(sum, x, 1.0);
  sum = std::fma(sum, x, 1.0);
  return weighs ? round_scaled(sum, power + kWeightBits) : 0;
}

// The 64 random bits of one position of a sequence: addressed, not drawn, so that a token depends on its
// seed, its position and its logits, and on nothing that ran before or beside it.
WEFT_HOST_DEVICE inline std::uint64_t sampling_bits(std::uint64_t seed, std::int64_t position) {
  const PhiloxWords words =
      philox(seed, static_cast<std::uint64_t>(position), static_cast<std::uint64_t>(RandomStream::sampling));
  return (static_cast<std::uint64_t>(words.word[1]) << 32) | words.word[0];
}

// floor(total * bits / 2^64): uniform in [0, total). The high half of the product, from 32-bit parts.
WEFT_HOST_DEVICE inline std::uint64_t sampling_target(std::uint64_t bits, std::uint64_t total) {
  const std::uint64_t a0 = bits & 0xFFFFFFFFu, a1 = bits >> 32;
  const std::uint64_t b0 = total & 0xFFFFFFFFu, b1 = total >> 32;
  const std::uint64_t middle = a1 * b0 + ((a0 * b0) >> 32);
  const std::uint64_t cross = a0 * b1 + (middle & 0xFFFFFFFFu);
  return a1 * b1 + (middle >> 32) + (cross >> 32);
}

// The smallest weight sum that is at least the share `p` (0 to 1) of `total`, and at least 1.
WEFT_HOST_DEVICE inline std::uint64_t sampling_share(double p, std::uint64_t total) {
  if (p >= 1) return total;
  const double share = std::ceil(p * static_cast<double>(total));
  if (share < 1) return 1;
  // A total beyond 2^53 may have been rounded up on its way to double.
  return share < static_cast<double>(total) ? static_cast<std::uint64_t>(share) : total;
}

}  // namespace weft
