// Keys and values in 8 bits, as the pages of a K/V cache store them with --kv-dtype fp8. The key of one position and K/V head,
// and its value, are a row of HS codes in e4m3 (fp8.h) and a scale 2^e. The stored number is code 2^e.
//
// The scale follows from the row's own largest magnitude: the smallest 2^e for which that is at most 448, e4m3's largest
// number. So a row's bits never depend on its neighbours in the page, nor on what comes later. e is limited to -15 .. 7, in
// which every code 2^e is a number of fp16, and of bf16: widening a code rounds nothing, and attention over widened rows adds
// in fp32 as it does over any other. Larger magnitudes than 448 2^7 = 57344 saturate; the largest number of fp16 is 65504.
// A row with a value that is not finite gets a scale that is not finite either, so that a computation which reads it fails as
// it does without fp8.
//
// kv_scale(), kv_inverse_bits() and kv_code() are the definition for both devices.
#pragma once

#include <cstdint>

#include "llmc/base/host_device.h"

namespace weft {

// A scale as stored: e + 127, the exponent field of 2^e in fp32 (E8M0 of OCP's MX formats, 2023).
inline constexpr std::uint32_t kKvLeastScale = 127 - 15, kKvLargestScale = 127 + 7, kKvNotFinite = 255;

// The scale of a row; `amax_bits`: the fp32 bits of its largest magnitude, above those of infinity if one is NaN.
WEFT_HOST_DEVICE constexpr std::uint32_t kv_scale(std::uint32_t amax_bits) {
  if (amax_bits >= 0x7F800000u) return kKvNotFinite;
  const std::uint32_t above = (amax_bits & 0x7FFFFFu) > 0x600000u ? 1 : 0;  // 448 is 1.75 2^8
  const std::uint32_t exponent = (amax_bits >> 23) + above;
  return exponent < kKvLeastScale + 8 ? kKvLeastScale : exponent > kKvLargestScale + 8 ? kKvLargestScale : exponent - 8;
}
// fp32 bits of 2^e; infinity for kKvNotFinite.
WEFT_HOST_DEVICE constexpr std::uint32_t kv_scale_bits(std::uint32_t scale) {
  return scale << 23;
}
// fp32 bits of 2^-e, by which a value is multiplied before kv_code(); of 1 for kKvNotFinite: infinity times 0 is a NaN, whose
// sign differs between devices.
WEFT_HOST_DEVICE constexpr std::uint32_t kv_inverse_bits(std::uint32_t scale) {
  return scale == kKvNotFinite ? 127u << 23 : (254 - scale) << 23;
}
// The code nearest to a number, given by its fp32 bits; ties to even, saturating. One code for every NaN.
WEFT_HOST_DEVICE constexpr std::uint32_t kv_code(std::uint32_t bits) {
  constexpr std::uint32_t kLargest = 0x7E, kNaN = 0x7F;
  const std::uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kNaN;
  if (magnitude >= 121u << 23) {  // 2^-6, the smallest normal number: three bits of mantissa stay
    const std::uint32_t rounded = (magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20, code = rounded - (120u << 3);
    return sign | (code < kLargest ? code : kLargest);
  }
  const std::uint32_t dropped = 141 - (magnitude >> 23);  // bits below 2^-9, the spacing of subnormal numbers
  if (dropped > 24) return sign;
  const std::uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  return sign | (mantissa + (1u << (dropped - 1)) - 1u + (mantissa >> dropped & 1u)) >> dropped;
}

// Sixteen rows, of positions that follow each other in a page, are a unit of 16 HS bytes. In it codes lie as operand B of
// mma.m16n8k16 wants them (PTX ISA, "Matrix fragments for mma.m16n8k16"), so that a lane of a warp finds what it multiplies in
// 16 bytes of its own (code_slots.cuh). Of keys n is a position and k a dimension, of values n is a dimension and k a position.
inline constexpr std::int64_t kKvUnit = 16;
enum class KvKind : std::uint8_t { key, value };

// Dimensions d and d + 8 of 16 share 16 bits, of which the first one's are those of its bf16, but for the exponent's bias, and
// the second one's fill the gaps.
WEFT_HOST_DEVICE constexpr std::uint32_t kv_pair(std::uint32_t first, std::uint32_t second) {
  return (first & 0x80u) << 8 | (first & 0x7Fu) << 4 | (second & 0x80u) << 4 | (second & 0x70u) << 8 | (second & 0xFu);
}
WEFT_HOST_DEVICE constexpr std::uint32_t kv_first(std::uint32_t pair) {
  return (pair >> 8 & 0x80u) | (pair >> 4 & 0x7Fu);
}
WEFT_HOST_DEVICE constexpr std::uint32_t kv_second(std::uint32_t pair) {
  return (pair >> 4 & 0x80u) | (pair >> 8 & 0x70u) | (pair & 0xFu);
}
// Where a unit has the pair of dimensions d and d + 8 (d % 16 < 8) of its row p, counted in pairs. A lane's 16 bytes are of two
// groups of 16 dimensions, or of one (8 bytes) where their number is odd.
WEFT_HOST_DEVICE constexpr std::int64_t kv_pair_index(KvKind kind, std::int64_t p, std::int64_t d, std::int64_t HS) {
  const std::int64_t groups = HS / 16 % 2 == 0 ? 2 : 1, group = d / 16;
  const std::int64_t n = kind == KvKind::key ? p % 8 : d % 8, k = kind == KvKind::key ? d % 8 : p % 8,
                     lane = n * 4 + k / 2;
  return ((group / groups * 32 + lane) * groups + group % groups) * 4 + p / 8 * 2 + k % 2;
}
// A last part of fewer than 16 dimensions, which no GPU has, follows in order: the byte of dimension d of row p.
constexpr std::int64_t kv_rest_index(std::int64_t p, std::int64_t d, std::int64_t HS) {
  const std::int64_t whole = HS / 16 * 16;
  return kKvUnit * whole + p * (HS - whole) + d - whole;
}

// The pages of one layer: codes [page][NKV][page_size][HS] and their scales [page][NKV][page_size], of keys and of values. A
// layer has whole units.
struct KvCodes {
  std::uint8_t *keys = nullptr, *values = nullptr;
  std::uint8_t *key_scales = nullptr, *value_scales = nullptr;
};

// On the host: stores a row of HS values as row `row` of codes and scales, and reads `rows` of them to out [rows, HS]. `codes`
// begins with a unit and has all of the units of these rows.
void kv_store(KvKind kind, const float* values, std::int64_t HS, std::int64_t row, std::uint8_t* codes,
              std::uint8_t* scales);
void kv_load(KvKind kind, const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t HS, std::int64_t row,
             std::int64_t rows, float* out);

}  // namespace weft
