#include "llmc/text/unicode_ranges.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "llmc/base/error.h"

namespace weft {

namespace {

struct Range {
  char32_t first;
  char32_t last;
};

// General category L, assigned by Unicode 15.0, 15.1 or 16.0.
constexpr Range kLettersAfter14[] = {
    {0x1C89, 0x1C8A},   {0xA7CB, 0xA7CD},   {0xA7DA, 0xA7DC},   {0x105C0, 0x105F3}, {0x10D4A, 0x10D65},
    {0x10D6F, 0x10D85}, {0x10EC2, 0x10EC4}, {0x1123F, 0x11240}, {0x11380, 0x11389}, {0x1138B, 0x1138B},
    {0x1138E, 0x1138E}, {0x11390, 0x113B5}, {0x113B7, 0x113B7}, {0x113D1, 0x113D1}, {0x113D3, 0x113D3},
    {0x11BC0, 0x11BE0}, {0x11F02, 0x11F02}, {0x11F04, 0x11F10}, {0x11F12, 0x11F33}, {0x1342F, 0x1342F},
    {0x13441, 0x13446}, {0x13460, 0x143FA}, {0x16100, 0x1611D}, {0x16D40, 0x16D6C}, {0x18CFF, 0x18CFF},
    {0x1B132, 0x1B132}, {0x1B155, 0x1B155}, {0x1DF25, 0x1DF2A}, {0x1E030, 0x1E06D}, {0x1E4D0, 0x1E4EB},
    {0x1E5D0, 0x1E5ED}, {0x1E5F0, 0x1E5F0}, {0x2B739, 0x2B739}, {0x2EBF0, 0x2EE5D}, {0x31350, 0x323AF},
};

// General category N, likewise.
constexpr Range kNumbersAfter14[] = {
    {0x10D40, 0x10D49}, {0x116D0, 0x116E3}, {0x11BF0, 0x11BF9}, {0x11F50, 0x11F59}, {0x16130, 0x16139},
    {0x16D70, 0x16D79}, {0x1CCF0, 0x1CCF9}, {0x1D2C0, 0x1D2D3}, {0x1E4F0, 0x1E4F9}, {0x1E5F1, 0x1E5FA},
};

// General category N, assigned by Unicode 17.0.
constexpr Range kNumbersOf17[] = {{0x11DE0, 0x11DE9}, {0x16FF4, 0x16FF6}};

// Combining marks (canonical combining class not 0) and parts of canonical compositions that Unicode assigned
// after 9.0. Where a whole block is newer than 9.0 the block is listed, so that a newer utf8proc (Unicode 16 or 17)
// gives the same result.
constexpr Range kInertInNfc9[] = {
    {0x07FD, 0x07FD},   {0x0897, 0x089F},   {0x08CA, 0x08D3},   {0x09FE, 0x09FE},   {0x0C3C, 0x0C3C},
    {0x0D3B, 0x0D3C},   {0x0EBA, 0x0EBA},   {0x1715, 0x1715},   {0x1ABF, 0x1AFF},   {0x1DF6, 0x1DFA},
    {0xA82C, 0xA82C},   {0x105C0, 0x105FF}, {0x10D24, 0x10D27}, {0x10D40, 0x10D8F}, {0x10EAB, 0x10EAC},
    {0x10EC0, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B},
    {0x11380, 0x113FF}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x11935, 0x11935},
    {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34},
    {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
    {0x11F41, 0x11F42}, {0x16100, 0x1613F}, {0x16D40, 0x16D7F}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F},
    {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5D0, 0x1E5FF},
    {0x1E6C0, 0x1E6FF},
};

std::string class_ranges(std::string text, std::span<const Range> ranges) {
  for (const Range& range : ranges) {
    text += format("\\x{%X}-\\x{%X}", static_cast<unsigned>(range.first), static_cast<unsigned>(range.last));
  }
  return text;
}

}  // namespace

std::string letter_class() {
  return class_ranges("\\p{L}", kLettersAfter14);
}

std::string number_class() {
  return class_ranges("\\p{N}", kNumbersAfter14);
}

std::string digits_class() {
  return class_ranges(number_class(), kNumbersOf17);
}

std::string whitespace_class() {
  return "\\t-\\r\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{"
         "3000}";
}

bool inert_in_nfc_9(char32_t code_point) {
  const auto after = std::upper_bound(std::begin(kInertInNfc9), std::end(kInertInNfc9), code_point,
                                      [](char32_t value, const Range& range) { return value < range.first; });
  return after != std::begin(kInertInNfc9) && code_point <= std::prev(after)->last;
}

}  // namespace weft
