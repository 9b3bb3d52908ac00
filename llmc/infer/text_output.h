// Generated text on its way to stdout.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// `text` with every control character but newline and tab written as \xNN: what a model says must not steer a
// terminal.
std::string terminal_safe(std::string_view text);

// Writes pieces of text to stdout at once: to a terminal through terminal_safe(), to a file or a pipe as they
// are.
class TextOutput {
 public:
  TextOutput();
  void write(std::string_view text);
  void end_line();  // on a terminal, ends an unfinished line; a file or a pipe gets the text and nothing else

 private:
  bool terminal_;
  bool line_open_ = false;
};

}  // namespace weft
