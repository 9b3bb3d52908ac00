// The Unicode Normalization Forms, as the Hugging Face `tokenizers` library computes them: with the tables of
// Unicode 9 (see unicode_ranges.h). Characters assigned since then pass through unchanged.
#pragma once

#include <string>
#include <string_view>

namespace weft {

enum class NormalForm { nfc, nfd, nfkc, nfkd };

// The form (Unicode Standard Annex 15) of `text`, which must be valid UTF-8. O(n log n) in time, also for a run of
// millions of combining marks; additional memory is a few times the longest run without an ASCII character.
std::string normalize(std::string_view text, NormalForm form);

}  // namespace weft
