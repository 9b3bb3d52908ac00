// Writes generated text to stdout, to a terminal without control characters.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// `text` with every control character except newline and tab, and every byte that is not UTF-8, written as \xNN: a
// model's output must not be able to control the terminal.
std::string terminal_safe(std::string_view text);

// Writes pieces of text to stdout without delay: to a terminal through terminal_safe(), to a file or a pipe unchanged.
class TextOutput {
 public:
  TextOutput();
  void write(std::string_view text);
  void write_prompt(std::string_view text);  // the same, dimmed on a terminal that shows colours
  void end_line();  // ends an unfinished line on a terminal; a file or a pipe gets the text alone

 private:
  bool terminal_;
  bool line_open_ = false;
};

}  // namespace weft
