// Translates the patterns of Split, written for Oniguruma with its Ruby syntax, to PCRE2.
//
// The two dialects differ in details that would show only as a few wrong ids. So this is no list of replacements: the pattern
// is parsed, and each of its parts becomes one that means the same, with the Unicode classes of unicode_ranges.h. What has no
// exact counterpart is refused: back references, named groups, (?m), absent parts, \G, \K, \R, \X, sets in square brackets with a
// colon, a repeat of what may be empty, and whatever ignores case in other characters than those of ASCII.
// scripts/split_pattern.py accepts the same patterns.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

struct SplitPattern {
  std::string pcre2;    // for PCRE2_UTF, PCRE2_MULTILINE and line feeds as the only line breaks
  std::string problem;  // unless it is empty the pattern is refused: "at character 3: got X, expected Y"
};

constexpr std::size_t kMaxPatternBytes = 8192;
constexpr std::size_t kMaxPatternCost = 48'000;  // bytes of PCRE2's code, roughly: it takes up to 65,536
constexpr int kMaxPatternDepth = 30;
constexpr int kMaxRepeat = 1000;

// `pattern`: valid UTF-8.
SplitPattern translate_split_pattern(std::string_view pattern);

// The pattern that matches `text` itself.
std::string literal_split_pattern(std::string_view text);

}  // namespace weft
