// Reads the lines of standard input one at a time. On a terminal with a prompt and, if weft was built with libedit,
// with line editing and a history.
#pragma once

#include <cstddef>
#include <istream>
#include <memory>
#include <string>

namespace weft {

inline constexpr std::size_t kMaxLineBytes = 1 << 20;  // a longer line is discarded

class LineInput {
 public:
  enum class Result { line, too_long, end };

  // On a terminal, prints how to leave.
  LineInput();
  ~LineInput();
  LineInput(const LineInput&) = delete;
  LineInput& operator=(const LineInput&) = delete;

  // Restores the terminal's settings from before line editing, for a signal handler that ends the program.
  // Async-signal-safe.
  static void restore_terminal();

  // The next line, without its newline. too_long: the line was read to its end and discarded.
  Result read(std::string& line);

 private:
  struct Editor;
  const bool prompting_;
  std::unique_ptr<Editor> editor_;  // null: no terminal, or no libedit
};

// LineInput::read from any stream, for lines of at most `limit` bytes. Never holds more than these in memory.
LineInput::Result read_line(std::istream& input, std::string& line, std::size_t limit);

}  // namespace weft
