#include "llmc/base/fp8.h"

#include <bit>

#include "llmc/base/dtype.h"

namespace weft {

std::uint8_t f32_to_fp8(float value, Fp8Format format) {
  const Fp8Layout layout = fp8_layout(format);
  const float rounded = round_to_fp8(value, format);
  if (rounded != rounded) return 0x7F;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(rounded);
  const std::uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + layout.bias;
  if (exponent >= 1) {
    const std::uint32_t mantissa = (magnitude & 0x7FFFFFu) >> (23 - layout.mantissa_bits);
    return static_cast<std::uint8_t>(sign | static_cast<std::uint32_t>(exponent) << layout.mantissa_bits | mantissa);
  }
  const float spacing =
      std::bit_cast<float>(static_cast<std::uint32_t>(128 - layout.bias - layout.mantissa_bits) << 23);
  return static_cast<std::uint8_t>(sign | static_cast<std::uint32_t>(std::bit_cast<float>(magnitude) / spacing));
}

float fp8_to_f32(std::uint8_t code, Fp8Format format) {
  if (format == Fp8Format::e4m3) return e4m3_to_f32(code);
  return f16_to_f32(static_cast<std::uint16_t>(code << 8));  // the upper half of an fp16 number
}

}  // namespace weft
