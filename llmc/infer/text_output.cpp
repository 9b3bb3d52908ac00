#include "llmc/infer/text_output.h"

#include <unistd.h>

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/base/options.h"
#include "llmc/base/terminal.h"
#include "llmc/base/utf8.h"

namespace weft {

std::string terminal_safe(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    const std::size_t length = utf8_sequence_length(text.substr(i));
    const bool c0_control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F;
    // C1 controls (U+0080..U+009F, encoded C2 80..C2 9F) steer terminals just as C0 controls do.
    const bool c1_control = length == 2 && byte == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (length == 0 || c0_control || c1_control) {
      const std::size_t bytes = std::max<std::size_t>(length, 1);
      for (std::size_t j = 0; j < bytes; ++j) out += format("\\x%02x", static_cast<unsigned char>(text[i + j]));
      i += bytes;
    } else {
      out += text.substr(i, length);
      i += length;
    }
  }
  return out;
}

TextOutput::TextOutput() : terminal_(::isatty(STDOUT_FILENO) == 1) {}

void TextOutput::write(std::string_view text) {
  if (text.empty()) return;
  line_open_ = text.back() != '\n';
  write_stdout(terminal_ ? terminal_safe(text) : std::string(text));
}

void TextOutput::write_prompt(std::string_view text) {
  const bool dim = terminal_ && !text.empty() && stdout_color();
  if (dim) write_stdout("\033[2m");
  write(text);
  if (dim) write_stdout("\033[22m");
}

void TextOutput::end_line() {
  if (terminal_ && line_open_) write_stdout("\n");
  line_open_ = false;
}

}  // namespace weft
