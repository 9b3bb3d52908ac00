#include "llmc/base/kv_fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>

#include "llmc/base/dtype.h"

namespace weft {

void kv_store(const float* values, std::int64_t HS, std::int64_t row, std::uint8_t* codes, std::uint8_t* scales) {
  std::uint32_t amax_bits = 0;
  for (std::int64_t d = 0; d < HS; ++d) {
    amax_bits = std::max(amax_bits, std::bit_cast<std::uint32_t>(values[d]) & 0x7FFFFFFFu);
  }
  const std::uint32_t scale = kv_scale(amax_bits);
  const float inverse = std::bit_cast<float>(kv_inverse_bits(scale));
  scales[row] = static_cast<std::uint8_t>(scale);
  for (std::int64_t d = 0; d < HS; ++d) {
    const std::uint32_t code = kv_code(std::bit_cast<std::uint32_t>(values[d] * inverse));
    codes[row * HS + kv_index(d, HS)] = static_cast<std::uint8_t>(code);
  }
}

void kv_load(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t HS, std::int64_t row,
             std::int64_t rows, float* out) {
  static const std::array<float, 256> kNumbers = [] {
    std::array<float, 256> numbers{};
    for (std::size_t code = 0; code < numbers.size(); ++code) {
      numbers[code] = e4m3_to_f32(static_cast<std::uint8_t>(code));
    }
    return numbers;
  }();
  for (std::int64_t r = row; r < row + rows; ++r) {
    const float scale = std::bit_cast<float>(kv_scale_bits(scales[r]));
    for (std::int64_t d = 0; d < HS; ++d) *out++ = kNumbers[codes[r * HS + kv_index(d, HS)]] * scale;
  }
}

}  // namespace weft
