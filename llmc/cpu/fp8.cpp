#include "llmc/cpu/fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace weft::cpu {

void round_fp8(float* out, const float* x, std::int64_t count, Fp8Format format, int exponent, Fp8Counters* counters) {
  const float scale = std::bit_cast<float>(fp8_scale_bits(exponent));
  const float inverse = std::bit_cast<float>(fp8_scale_bits(-exponent));
  std::int64_t saturated = 0, flushed = 0;
  if (counters != nullptr) counters->amax_bits = std::max(counters->amax_bits, amax_bits(x, count));
#pragma omp parallel for schedule(static) reduction(+ : saturated, flushed)
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = x[i], scaled = std::abs(value * scale);
    saturated += scaled > fp8_largest(format) ? 1 : 0;
    flushed += value != 0 && scaled <= fp8_flushed(format) ? 1 : 0;
    // An infinity of x is not finite, one of the product saturates.
    const float finite = std::clamp(value * scale, -fp8_largest(format), fp8_largest(format));
    out[i] = round_to_fp8(std::isinf(value) ? value : finite, format) * inverse;
  }
  if (counters == nullptr) return;
  counters->saturated += static_cast<std::uint64_t>(saturated);
  counters->flushed += static_cast<std::uint64_t>(flushed);
}

std::uint32_t amax_bits(const float* x, std::int64_t count) {
  std::uint32_t largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7FFFFFFFu);
  }
  return largest;
}

}  // namespace weft::cpu
