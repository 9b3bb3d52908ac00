// The arithmetic of sampling, written so that a host loop and a device kernel make the same choice.
//
// Probabilities are fixed-point integers. Integer sums do not depend on their order, so a parallel reduction gives the
// same total as a sequential one, and the comparison that picks a token involves no rounding. The only floating-point
// part is one exponential for each token, built from correctly rounded operations alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "llmc/base/philox.h"

namespace weft {

// The token of the greatest logit has the weight 2^40. The sum over a vocabulary of at most 2^20 ids stays below 2^61,
// and a token whose probability is below 2^-41 of the greatest has the weight 0.
inline constexpr int kWeightBits = 40;
inline constexpr std::int64_t kMaxSampledVocab = std::int64_t{1} << 20;
inline constexpr std::uint64_t kGreatestWeight = std::uint64_t{1} << kWeightBits;

// The two roundings of sampling_weight, both to nearest even. The device adds a constant so large that the sum has no
// fraction bits: that rounds in the FP64 add, whereas conversion instructions run at a quarter of its rate.
WEFT_HOST_DEVICE inline double round_exponent(double exponent, int* whole) {  // |exponent| <= 42; *whole: the result
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
WEFT_HOST_DEVICE inline std::uint64_t round_scaled(double value, int power) {  // value * 2^power, below 2^52
#if defined(__CUDA_ARCH__)
  const double factor = __hiloint2double((power + 1023) << 20, 0);
  return static_cast<std::uint64_t>(__double_as_longlong(__fma_rn(value, factor, 0x1p52))) & ((1ull << 52) - 1);
#else
  return static_cast<std::uint64_t>(std::llrint(std::ldexp(value, power)));
#endif
}

// 2^40 * exp((logit - greatest) / temperature), rounded to nearest even, for logit <= greatest; `scale` is
// log2(e) / temperature. Every operation is an explicit fma, a multiplication whose result is not added to anything, or
// exact: two compilers cannot contract multiplications and additions differently.
WEFT_HOST_DEVICE inline std::uint64_t sampling_weight(float logit, float greatest, double scale) {
  const double below = static_cast<double>(logit) - static_cast<double>(greatest);
  const double exponent = below * scale;
  const bool weighs = exponent > -(kWeightBits + 1.0);  // false for a logit of -infinity
#if !defined(__CUDA_ARCH__)
  if (!weighs) return 0;  // the device has no branch here: it computes on and discards the result
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

// The 64 random bits for one position of a sequence. They are a function of seed and position, so a token depends on
// these and its logits alone, not on what was sampled before or at the same time.
WEFT_HOST_DEVICE inline std::uint64_t sampling_bits(std::uint64_t seed, std::int64_t position) {
  const PhiloxWords words =
      philox(seed, static_cast<std::uint64_t>(position), static_cast<std::uint64_t>(RandomStream::sampling));
  return (static_cast<std::uint64_t>(words.word[1]) << 32) | words.word[0];
}

// floor(total * bits / 2^64), uniform in [0, total): the high 64 bits of the 128-bit product, from 32-bit halves.
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
  // The conversion to double may have rounded a total beyond 2^53 up: never return more than the total itself.
  return share < static_cast<double>(total) ? static_cast<std::uint64_t>(share) : total;
}

}  // namespace weft
