#include "llmc/base/kv_fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "llmc/base/dtype.h"

namespace weft {

namespace {

// Calls of_pair(d, address of the pair) for dimensions d and d + 8 of a row, and of_rest(d, address of the byte) for its last part.
template <typename Byte, typename OfPair, typename OfRest>
void visit_row(KvKind kind, std::int64_t HS, std::int64_t row, Byte* codes, const OfPair& of_pair,
               const OfRest& of_rest) {
  Byte* const unit = codes + row / kKvUnit * kKvUnit * HS;
  const std::int64_t p = row % kKvUnit, whole = HS / 16 * 16;
  for (std::int64_t group = 0; group < whole; group += 16) {
    // From dimension to dimension the index grows by one of two steps, in turn.
    std::int64_t at[8];
    at[0] = kv_pair_index(kind, p, group, HS), at[1] = kv_pair_index(kind, p, group + 1, HS);
    const std::int64_t two = kv_pair_index(kind, p, group + 2, HS) - at[0];
    for (int d = 2; d < 8; ++d) at[d] = at[d - 2] + two;
    for (int d = 0; d < 8; ++d) of_pair(group + d, unit + 2 * at[d]);
  }
  for (std::int64_t d = whole; d < HS; ++d) of_rest(d, unit + kv_rest_index(p, d, HS));
}

}  // namespace

void kv_store(KvKind kind, const float* values, std::int64_t HS, std::int64_t row, std::uint8_t* codes,
              std::uint8_t* scales) {
  std::uint32_t amax_bits = 0;
  for (std::int64_t d = 0; d < HS; ++d) {
    amax_bits = std::max(amax_bits, std::bit_cast<std::uint32_t>(values[d]) & 0x7FFFFFFFu);
  }
  const std::uint32_t scale = kv_scale(amax_bits);
  const float inverse = std::bit_cast<float>(kv_inverse_bits(scale));
  scales[row] = static_cast<std::uint8_t>(scale);
  const auto code = [&](std::int64_t d) { return kv_code(std::bit_cast<std::uint32_t>(values[d] * inverse)); };
  visit_row(
      kind, HS, row, codes,
      [&](std::int64_t d, std::uint8_t* at) {
        const auto pair = static_cast<std::uint16_t>(kv_pair(code(d), code(d + 8)));
        std::memcpy(at, &pair, sizeof pair);
      },
      [&](std::int64_t d, std::uint8_t* at) { *at = static_cast<std::uint8_t>(code(d)); });
}

void kv_load(KvKind kind, const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t HS, std::int64_t row,
             std::int64_t rows, float* out) {
  static const std::array<float, 256> kNumbers = [] {
    std::array<float, 256> numbers{};
    for (std::size_t code = 0; code < numbers.size(); ++code) {
      numbers[code] = e4m3_to_f32(static_cast<std::uint8_t>(code));
    }
    return numbers;
  }();
  for (std::int64_t r = row; r < row + rows; ++r, out += HS) {
    const float scale = std::bit_cast<float>(kv_scale_bits(scales[r]));
    visit_row(
        kind, HS, r, codes,
        [&](std::int64_t d, const std::uint8_t* at) {
          std::uint16_t pair = 0;
          std::memcpy(&pair, at, sizeof pair);
          out[d] = kNumbers[kv_first(pair)] * scale;
          out[d + 8] = kNumbers[kv_second(pair)] * scale;
        },
        [&](std::int64_t d, const std::uint8_t* at) { out[d] = kNumbers[*at] * scale; });
  }
}

}  // namespace weft
