#include "llmc/model/formats/fp8.h"

#include <array>

namespace weft {

namespace {

std::array<float, 256> make_e4m3_values() {
  std::array<float, 256> values{};
  for (std::size_t bits = 0; bits < values.size(); ++bits) values[bits] = e4m3_to_f32(static_cast<std::uint8_t>(bits));
  return values;
}

}  // namespace

void dequantize_fp8(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K) {
  static const std::array<float, 256> values = make_e4m3_values();
  const auto* q = static_cast<const std::uint8_t*>(matrix.data) + first * K;
  for (std::int64_t i = 0; i < (last - first) * K; ++i) out[i] = values[q[i]];
}

}  // namespace weft
