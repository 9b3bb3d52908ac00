// Unicode Normalization Form C, as the Hugging Face `tokenizers` library computes it: with the tables of
// Unicode 9 (see unicode_ranges.h). Characters assigned since then pass through unchanged.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// NFC (Unicode Standard Annex 15) of `text`, which must be valid UTF-8. O(n log n) in time, also for a run of
// millions of combining marks; additional memory is a few times the longest run without an ASCII character.
std::string normalize_nfc(std::string_view text);

}  // namespace weft
