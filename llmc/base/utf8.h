// Checking UTF-8, as The Unicode Standard 15, table 3-7 defines it: no overlong forms, no surrogates, nothing past
// U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

// Bytes of the well-formed sequence at the start of `text` (1 to 4), or 0 if there is none.
std::size_t utf8_sequence_length(std::string_view text);

// Number of bytes at the end of `text` (0 to 3) that are the beginning of a well-formed sequence: a streaming decoder
// keeps them back until the rest arrives.
std::size_t utf8_incomplete_suffix(std::string_view text);

// Characters of `text`, which is valid: all bytes but those that continue a sequence.
std::size_t utf8_characters(std::string_view text);

// `text` with each byte that is not part of a well-formed sequence replaced by U+FFFD, one U+FFFD for each
// maximal ill-formed subpart (The Unicode Standard 15, section 3.9), as Python's errors="replace" does.
std::string utf8_replace_invalid(std::string_view text);

}  // namespace weft
