#include "llmc/cpu/dequantize.h"

#include <algorithm>
#include <array>

#include "llmc/base/error.h"

namespace weft::cpu {

namespace {

std::array<float, 256> make_e4m3_values() {
  std::array<float, 256> values{};
  for (std::size_t bits = 0; bits < values.size(); ++bits) values[bits] = e4m3_to_f32(static_cast<std::uint8_t>(bits));
  return values;
}

// One row of u4.
void dequantize_groups(float* out, const std::uint8_t* q, const std::uint16_t* scales, const std::uint8_t* zeros,
                       std::int64_t K) {
  for (std::int64_t first = 0; first < K; first += kQuantGroup) {
    const std::int64_t group = first / kQuantGroup, last = std::min(first + kQuantGroup, K);
    const float scale = f16_to_f32(scales[group]);
    const int zero = zeros[group];
    for (std::int64_t k = first; k < last; k += 2) {
      const int pair = q[k / 2];
      out[k] = scale * static_cast<float>((pair & 15) - zero);
      out[k + 1] = scale * static_cast<float>((pair >> 4) - zero);
    }
  }
}

}  // namespace

void dequantize_rows(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K) {
  const std::int64_t count = (last - first) * K;
  switch (matrix.dtype) {
    case DType::i8: {
      const auto* q = static_cast<const std::int8_t*>(matrix.data) + first * K;
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(q[i]);
      return;
    }
    case DType::e4m3: {
      static const std::array<float, 256> values = make_e4m3_values();
      const auto* q = static_cast<const std::uint8_t*>(matrix.data) + first * K;
      for (std::int64_t i = 0; i < count; ++i) out[i] = values[q[i]];
      return;
    }
    case DType::u4: {
      const auto* q = static_cast<const std::uint8_t*>(matrix.data);
      const std::int64_t groups = quant_groups(K);
      for (std::int64_t n = first; n < last; ++n) {
        dequantize_groups(out + (n - first) * K, q + n * (K / 2), matrix.group_scales + n * groups,
                          matrix.zeros + n * groups, K);
      }
      return;
    }
    default:
      fail(Exit::internal, "dequantize_rows: no quantised matrix is of dtype %s", dtype_name(matrix.dtype));
  }
}

}  // namespace weft::cpu
