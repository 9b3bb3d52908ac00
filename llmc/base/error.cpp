#include "llmc/base/error.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <iterator>

#include "llmc/base/utf8.h"

namespace weft {

namespace {

std::string vformat(const char* fmt, std::va_list args) {
  std::va_list again;
  va_copy(again, args);
  const int length = std::vsnprintf(nullptr, 0, fmt, args);
  std::string text(length > 0 ? static_cast<std::size_t>(length) : 0, '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, fmt, again);
  va_end(again);
  return text;
}

// The code point of a well-formed sequence.
char32_t code_point(std::string_view sequence) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(sequence[i]); };
  if (sequence.size() == 1) return byte(0);
  char32_t value = byte(0) & (0xFF >> (sequence.size() + 1));
  for (std::size_t i = 1; i < sequence.size(); ++i) value = value << 6 | (byte(i) & 0x3F);
  return value;
}

// Whether a character could manipulate what a terminal shows: C0 and C1 controls, line separators, and invisible format
// characters (category Cf), which can change the order or the look of the text around them. Format characters that
// belong to the number signs of a script are harmless and not listed.
bool steers_terminals(char32_t c) {
  constexpr struct {
    char32_t first, last;
  } kRanges[] = {{0x00, 0x1F},     {0x7F, 0x9F},     {0xAD, 0xAD},      {0x61C, 0x61C},
                 {0x180E, 0x180E}, {0x200B, 0x200F}, {0x2028, 0x202E},  {0x2060, 0x206F},
                 {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0xE0000, 0xE007F}};
  return std::any_of(std::begin(kRanges), std::end(kRanges),
                     [c](const auto& range) { return c >= range.first && c <= range.last; });
}

// Appends the characters of `text` that begin before byte `limit`; returns where the last one ends.
std::size_t append_escaped(std::string& out, std::string_view text, std::size_t limit) {
  std::size_t i = 0;
  while (i < limit) {
    const std::size_t length = utf8_sequence_length(text.substr(i));
    const std::string_view character = text.substr(i, std::max<std::size_t>(length, 1));
    if (length == 0 || steers_terminals(code_point(character))) {
      for (const char part : character) out += format("\\x%02x", static_cast<unsigned char>(part));
    } else {
      if (character == "'" || character == "\\") out += '\\';
      out += character;
    }
    i += character.size();
  }
  return i;
}

}  // namespace

std::string format(const char* fmt, ...) {
  std::va_list args;
  va_start(args, fmt);
  std::string text = vformat(fmt, args);
  va_end(args);
  return text;
}

void fail(Exit code, const char* fmt, ...) {
  std::va_list args;
  va_start(args, fmt);
  std::string text = vformat(fmt, args);
  va_end(args);
  throw Error(code, text);
}

std::string escaped(std::string_view text, std::size_t limit) {
  std::string out = "'";
  if (text.size() <= limit) {
    append_escaped(out, text, text.size());
    return out + "'";
  }
  const std::size_t end = append_escaped(out, text, limit / 3);
  // The last part must begin at a character: skip up to three continuation bytes.
  const std::size_t aim = text.size() - (limit - limit / 3);
  std::size_t begin = aim;
  while (begin < text.size() && begin < aim + 3 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) ++begin;
  out += "...";
  const std::string_view rest = text.substr(std::max(begin, end));
  append_escaped(out, rest, rest.size());
  return out + "'";
}

}  // namespace weft
