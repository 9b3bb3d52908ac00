// Messages for people, on stderr. Results go to stdout and do not pass through here.
#pragma once

#include <chrono>
#include <string>

namespace weft {

enum class ColorMode { automatic, always, never };

// What --color asks for. `automatic` colours only a terminal that is not TERM=dumb, with NO_COLOR unset.
void set_color_mode(ColorMode mode);
bool stderr_is_terminal();

// Each writes one line to stderr, after wiping the progress line if one stands there. A write error (a closed
// pipe) is ignored: a log must not kill a run.
void log_info(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warning(const char* fmt, ...) __attribute__((format(printf, 1, 2)));  // "warning: ..."
void log_error(const char* fmt, ...) __attribute__((format(printf, 1, 2)));    // "error: ..."

// A line that overwrites itself, at most ten times a second; only where stderr is a terminal.
class ProgressLine {
 public:
  ~ProgressLine() { clear(); }
  void show(const std::string& text);
  void clear();

 private:
  std::chrono::steady_clock::time_point last_{};
};

// "1.5 GB", "312 MB", "17 KB": powers of ten.
std::string human_bytes(double bytes);
// "3:05", "2:03:05": hours only when needed.
std::string human_seconds(double seconds);

}  // namespace weft
