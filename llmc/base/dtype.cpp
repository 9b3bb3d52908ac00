#include "llmc/base/dtype.h"

#include <bit>
#include <cstring>

#include "llmc/base/error.h"

namespace weft {

namespace {

struct DTypeInfo {
  const char* name;
  std::size_t bits;
};
constexpr DTypeInfo kInfo[kNumDTypes] = {{"f32", 32}, {"f16", 16}, {"bf16", 16}, {"u8", 8}, {"u16", 16}, {"u32", 32},
                                         {"i32", 32}, {"i64", 64}, {"i8", 8},    {"u4", 4}, {"e4m3", 8}};

}  // namespace

std::size_t dtype_bits(DType dtype) {
  return kInfo[static_cast<std::uint32_t>(dtype)].bits;
}
std::size_t dtype_bytes(DType dtype) {
  if (dtype_bits(dtype) < 8) fail(Exit::internal, "an element of dtype %s has no bytes of its own", dtype_name(dtype));
  return dtype_bits(dtype) / 8;
}
const char* dtype_name(DType dtype) {
  return kInfo[static_cast<std::uint32_t>(dtype)].name;
}

float bf16_to_f32(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1Fu;
  const std::uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    // Zero or subnormal: mantissa * 2^-24 is exact in fp32.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

float e4m3_to_f32(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t exponent = (bits >> 3) & 0xFu, mantissa = bits & 7u;
  if (exponent == 0xF && mantissa == 7) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;  // zero or subnormal
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {
    // Subnormal result: adding 0.5 aligns the fp32 mantissa so that the hardware does the rounding.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

void convert_to_f32(const void* source, DType dtype, float* out, std::size_t count) {
  const auto* halves = static_cast<const std::uint16_t*>(source);
  switch (dtype) {
    case DType::f32:
      std::memcpy(out, source, count * sizeof(float));
      return;
    case DType::f16:
      for (std::size_t i = 0; i < count; ++i) out[i] = f16_to_f32(halves[i]);
      return;
    case DType::bf16:
      for (std::size_t i = 0; i < count; ++i) out[i] = bf16_to_f32(halves[i]);
      return;
    default:
      fail(Exit::internal, "convert_to_f32: dtype %s is not a float type", dtype_name(dtype));
  }
}

void convert_from_f32(const float* source, DType dtype, void* out, std::size_t count) {
  auto* halves = static_cast<std::uint16_t*>(out);
  switch (dtype) {
    case DType::f32:
      std::memcpy(out, source, count * sizeof(float));
      return;
    case DType::f16:
      for (std::size_t i = 0; i < count; ++i) halves[i] = f32_to_f16(source[i]);
      return;
    case DType::bf16:
      for (std::size_t i = 0; i < count; ++i) halves[i] = f32_to_bf16(source[i]);
      return;
    default:
      fail(Exit::internal, "convert_from_f32: dtype %s is not a float type", dtype_name(dtype));
  }
}

}  // namespace weft
