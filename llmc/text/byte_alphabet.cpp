#include "llmc/text/byte_alphabet.h"

#include <array>
#include <cstddef>

#include "llmc/base/utf8.h"

namespace weft {

namespace {

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<std::uint16_t, 256> character{};  // code point by byte
  std::array<std::int16_t, 256 + 68> byte{};   // byte by code point, -1: outside the alphabet
};

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.byte.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const int character = stands_for_itself(byte) ? byte : next++;
    alphabet.character[static_cast<std::size_t>(byte)] = static_cast<std::uint16_t>(character);
    alphabet.byte[static_cast<std::size_t>(character)] = static_cast<std::int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

std::string alphabet_character(std::uint8_t byte) {
  const unsigned character = kAlphabet.character[byte];  // at most U+0143: one or two bytes of UTF-8
  if (character < 0x80) return std::string(1, static_cast<char>(character));
  return {static_cast<char>(0xC0 | (character >> 6)), static_cast<char>(0x80 | (character & 0x3F))};
}

std::optional<std::string> bytes_of_alphabet(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const std::size_t length = utf8_sequence_length(token);
    if (length == 0 || length > 2) return std::nullopt;
    const unsigned first = static_cast<unsigned char>(token[0]);
    const unsigned character =
        length == 1 ? first : (first & 0x1F) << 6 | (static_cast<unsigned char>(token[1]) & 0x3F);
    if (character >= kAlphabet.byte.size() || kAlphabet.byte[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet.byte[character]);
    token.remove_prefix(length);
  }
  return bytes;
}

}  // namespace weft
