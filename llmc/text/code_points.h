// Characters of text that is known to be valid UTF-8.
#pragma once

#include <cstddef>
#include <string_view>

namespace weft {

// The code point of `character`: the bytes of one character, valid UTF-8.
inline char32_t code_point_of(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0);
  char32_t code_point = byte(0) & (0x7Fu >> character.size());
  for (std::size_t i = 1; i < character.size(); ++i) code_point = code_point << 6 | (byte(i) & 0x3Fu);
  return code_point;
}

}  // namespace weft
