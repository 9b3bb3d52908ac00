#include "llmc/base/error.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

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
  // [head, tail) is left out: the end of a path, its file name, says more than the middle.
  const std::size_t head = text.size() > limit ? limit / 3 : text.size();
  const std::size_t tail = text.size() > limit ? text.size() - (limit - limit / 3) : text.size();
  bool cut = false;
  std::string out = "'";
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    const std::size_t length = utf8_sequence_length(text.substr(i));
    if (i >= head && i < tail) {
      if (!cut) out += "...";
      cut = true;
      i += std::max<std::size_t>(length, 1);
      continue;
    }
    // C1 controls (U+0080..U+009F, encoded C2 80..C2 9F) steer terminals just as C0 controls do.
    const bool c1_control = length == 2 && byte == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (length == 0 || byte < 0x20 || byte == 0x7F || c1_control) {
      out += format("\\x%02x", byte);
      i += 1;
    } else {
      if (byte == '\'' || byte == '\\') out += '\\';
      out += text.substr(i, length);
      i += length;
    }
  }
  return out + "'";
}

}  // namespace weft
