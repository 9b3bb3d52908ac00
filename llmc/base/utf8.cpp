#include "llmc/base/utf8.h"

#include <algorithm>

namespace weft {

namespace {

struct Scan {
  std::size_t matched;   // leading bytes that agree with some well-formed sequence
  std::size_t expected;  // length of that sequence; 0 if the first byte cannot start one
};

Scan scan_sequence(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (text.empty()) return {0, 0};
  const unsigned char first = byte(0);
  if (first < 0x80) return {1, 1};
  if (first < 0xC2 || first > 0xF4) return {0, 0};
  const std::size_t expected = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The second byte's range depends on the first: it excludes overlong forms, surrogates and values past
  // U+10FFFF.
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  std::size_t matched = 1;
  if (text.size() > 1 && byte(1) >= low && byte(1) <= high) {
    matched = 2;
    while (matched < expected && matched < text.size() && (byte(matched) & 0xC0) == 0x80) ++matched;
  }
  return {matched, expected};
}

}  // namespace

std::size_t utf8_sequence_length(std::string_view text) {
  const Scan scan = scan_sequence(text);
  return scan.expected > 0 && scan.matched == scan.expected ? scan.expected : 0;
}

std::size_t utf8_incomplete_suffix(std::string_view text) {
  for (std::size_t back = std::min<std::size_t>(3, text.size()); back > 0; --back) {
    const Scan scan = scan_sequence(text.substr(text.size() - back));
    if (scan.expected > back && scan.matched == back) return back;
  }
  return 0;
}

std::size_t utf8_characters(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string utf8_replace_invalid(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Scan scan = scan_sequence(text);
    const bool valid = scan.expected > 0 && scan.matched == scan.expected;
    const std::size_t taken = std::max<std::size_t>(1, scan.matched);
    if (valid) {
      out += text.substr(0, taken);
    } else {
      out += "\xEF\xBF\xBD";
    }
    text.remove_prefix(taken);
  }
  return out;
}

}  // namespace weft
