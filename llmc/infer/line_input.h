// Lines of standard input, one at a time: with a prompt and, where weft was built with libedit, line editing and a history
// if a person types them.
#pragma once

#include <cstddef>
#include <istream>
#include <memory>
#include <string>

namespace weft {

inline constexpr std::size_t kMaxLineBytes = 1 << 20;  // of a line; longer ones are refused without being kept

class LineInput {
 public:
  enum class Result { line, too_long, end };

  // On a terminal it says how to leave.
  LineInput();
  ~LineInput();
  LineInput(const LineInput&) = delete;
  LineInput& operator=(const LineInput&) = delete;

  // For a signal handler that ends the program while a line is edited: the terminal as it was before. Async-signal-safe.
  static void restore_terminal();

  // The next line, without its end. too_long: it was read to its end and forgotten.
  Result read(std::string& line);

 private:
  struct Editor;
  const bool prompting_;
  std::unique_ptr<Editor> editor_;  // null: no terminal, or no libedit
};

// The same from any stream. Never holds more than `limit` bytes.
LineInput::Result read_line(std::istream& input, std::string& line, std::size_t limit);

}  // namespace weft
