// The byte alphabet of byte-level BPE: tokenizer.json writes each byte of a token as one printable character.
// The 188 bytes that print in Latin-1 stand for themselves, the others are U+0100, U+0101, ... in the order
// of their values. Source: bytes_to_unicode() of OpenAI's GPT-2 encoder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

// The UTF-8 of the character that stands for `byte`.
std::string alphabet_character(std::uint8_t byte);

// The bytes that `token`, valid UTF-8, stands for; nothing if it has a character outside the alphabet.
std::optional<std::string> bytes_of_alphabet(std::string_view token);

}  // namespace weft
