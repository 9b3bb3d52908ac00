// Element types of tensors, and their conversions on the host: to fp32 (exact) and from fp32 (rounded).
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// The values are stored in tensor files (doc/tensor_file.md): never change or reuse one.
enum class DType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  bf16 = 2,
  u8 = 3,
  u16 = 4,
  u32 = 5,
  i32 = 6,
  i64 = 7,
  i8 = 8,
  u4 = 9,  // two elements a byte along the last dimension, whose size is even; the first of them in the low four bits
  e4m3 =
      10,  // OCP 8-bit floating point (OFP8, 2023): 4 bits of exponent (bias 7), 3 of mantissa, no infinity; 0x7F, 0xFF: NaN
};
inline constexpr std::uint32_t kNumDTypes = 11;

std::size_t dtype_bits(DType dtype);   // of one element
std::size_t dtype_bytes(DType dtype);  // of one element; u4, of which two share a byte, is Exit::internal
const char* dtype_name(DType dtype);   // "f32", "bf16", ...

float bf16_to_f32(std::uint16_t bits);
float f16_to_f32(std::uint16_t bits);
float e4m3_to_f32(std::uint8_t bits);    // exact; the two NaNs as a quiet NaN
std::uint16_t f32_to_bf16(float value);  // round to nearest even; NaN stays NaN
std::uint16_t f32_to_f16(float value);   // round to nearest even; overflow to infinity; NaN stays NaN

// `count` elements of `source` (f32, f16 or bf16) as fp32. The two ranges do not overlap.
void convert_to_f32(const void* source, DType dtype, float* out, std::size_t count);
// `count` fp32 values as `dtype` (f32, f16 or bf16), rounded to nearest even.
void convert_from_f32(const float* source, DType dtype, void* out, std::size_t count);

}  // namespace weft
