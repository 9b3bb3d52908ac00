// Errors and exit codes.
//
// Library code reports a failure by throwing weft::Error; only main() catches it, prints its one line and
// returns its exit code. Nothing below main() calls exit(), and nothing validates input with assert().
//
// A message has the form   <where>: <field>: got X, expected Y. <what to do>
// without a leading "error:", which main() adds. Text that comes from a file or from the user passes through
// escaped().
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace weft {

enum class Exit : int {
  ok = 0,
  internal = 1,       // a bug in weft
  usage = 2,          // unknown option, malformed or out-of-range value
  bad_file = 3,       // an input file is missing, damaged, of the wrong kind, or does not fit the others
  environment = 4,    // GPU, driver, architecture, lock, network
  resources = 5,      // out of memory or disk
  numeric = 6,        // a loss or a gradient is not finite
  failed_lines = 7,   // a batch is done, and some of its lines have an error for an answer
  interrupted = 130,  // SIGINT, state saved
  terminated = 143,   // SIGTERM or SIGHUP, state saved
};

class Error : public std::runtime_error {
 public:
  Error(Exit code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Exit code() const { return code_; }

 private:
  Exit code_;
};

// printf into a std::string. The C locale's "." is guaranteed: no weft program sets LC_NUMERIC.
std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

// Throws Error(code, format(fmt, ...)).
[[noreturn]] void fail(Exit code, const char* fmt, ...) __attribute__((format(printf, 2, 3)));

// `text` in single quotes, with quotes, control characters, invisible format characters (among them those that reverse
// the direction of text) and invalid UTF-8 escaped. All text from outside passes through this on its way to the
// terminal. A text of more than `limit` bytes is shortened to about `limit` of them: one third from its beginning,
// "...", and two thirds from its end, so that a long path keeps its file name.
std::string escaped(std::string_view text, std::size_t limit = 120);

}  // namespace weft
