// A format of quantised weights is data: its name, how a matrix [N, K] is stored, which stored values are valid, and how a
// row becomes floats. On GPUs its kernels take a type that llmc/cuda/formats derives from it. These two folders and the
// writer, scripts/quantization.py, are the only places that know a format by its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "llmc/base/ceil_div.h"
#include "llmc/base/dtype.h"
#include "llmc/base/host_device.h"

namespace weft {

inline constexpr std::int64_t kQuantGroup = 128;  // columns that share a scale and a zero in a grouped format
inline std::int64_t quant_groups(std::int64_t columns) {
  return ceil_div(columns, kQuantGroup);
}

// A quantised matrix [N, K] in the memory of either device.
struct QuantizedMatrix {
  const void* data = nullptr;         // q: [N, K]; of 4 bits [N, K / 2] bytes, the even column in the low bits
  DType dtype = DType::f32;           // of q, which tells the format; f32: there is no quantised matrix
  const float* row_scales = nullptr;  // [N]; null where grouped
  const std::uint16_t* group_scales = nullptr;  // [N, G] bits of fp16; grouped only
  const std::uint8_t* zeros = nullptr;          // [N, G]; grouped only

  explicit operator bool() const { return data != nullptr; }
};

inline constexpr std::uint8_t kMaxZero = 15, kRandomZero = 8;

struct WeightFormat {
  const char* name;  // in files, options and messages
  DType dtype;       // of q; no two formats have the same
  // false: w = scale[n] q, scale fp32 [N]
  // true:  w = scale[n, g] (q - zero[n, g]) in groups of kQuantGroup along K (the last one may be shorter), scale fp16
  //        [N, G], zero u8 [N, G], 0 to kMaxZero
  bool grouped;
  bool of_head;              // whether the head may have it
  const char* valid_values;  // of q, for messages
  // A byte b of q is invalid where (b & invalid_mask) == invalid_bits.
  std::uint8_t invalid_mask, invalid_bits;
  // Of random_q(): which bits of it are random, and the standard deviation of its values, with kRandomZero as the zero.
  std::uint8_t random_mask;
  double random_deviation;
  // Rows [first, last) to out [last - first, K] in fp32, which holds them exactly: where grouped, w; else q alone, since the
  // scale of the row is for the sum over K (matmul_rows.h).
  void (*dequantize)(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K);

  // The matrix whose tensors lie there. `zeros` is used where grouped alone.
  QuantizedMatrix matrix(const std::byte* q, const std::byte* scales, const std::byte* zeros) const {
    if (!grouped) return {q, dtype, reinterpret_cast<const float*>(scales)};
    return {q, dtype, nullptr, reinterpret_cast<const std::uint16_t*>(scales),
            reinterpret_cast<const std::uint8_t*>(zeros)};
  }
  WEFT_HOST_DEVICE constexpr bool valid(std::uint8_t byte) const { return (byte & invalid_mask) != invalid_bits; }
  // A byte of q of a random model, of 8 random bits. The mean of its values is zero: one of half a step, as plain bits of int4 have it,
  // is a direction that each layer amplifies, until all tokens look alike.
  WEFT_HOST_DEVICE constexpr std::uint8_t random_q(std::uint8_t bits) const {
    auto q = static_cast<std::uint8_t>(bits & random_mask);
    if (dtype == DType::u4) {  // 0 has no counterpart above the zero
      if ((q & 0x0f) == 0) q |= kRandomZero;
      if ((q & 0xf0) == 0) q |= kRandomZero << 4;
    }
    return valid(q) ? q : std::uint8_t{0};
  }
  constexpr std::int64_t group() const { return grouped ? kQuantGroup : 0; }
  constexpr DType scale_dtype() const { return grouped ? DType::f16 : DType::f32; }
};

std::span<const WeightFormat* const> weight_formats();
const WeightFormat* find_weight_format(const std::string& name);  // null if there is none
const WeightFormat& weight_format(DType dtype);                   // Exit::internal if there is none
// The names, for messages: "int8, int4 or fp8". `of_head`: only of those that the head may have.
std::string weight_format_names(bool of_head = false);

}  // namespace weft
