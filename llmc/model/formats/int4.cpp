#include "llmc/model/formats/int4.h"

#include <algorithm>

namespace weft {

namespace {

// One row. fp32 holds a weight exactly: 11 bits of a half and 4 of the difference.
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

void dequantize_int4(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K) {
  const auto* q = static_cast<const std::uint8_t*>(matrix.data);
  const std::int64_t groups = quant_groups(K);
  for (std::int64_t n = first; n < last; ++n) {
    dequantize_groups(out + (n - first) * K, q + n * (K / 2), matrix.group_scales + n * groups,
                      matrix.zeros + n * groups, K);
  }
}

}  // namespace weft
