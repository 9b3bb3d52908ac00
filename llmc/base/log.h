// Messages for people, on stderr: log lines, a progress line, and numbers in readable units. Results go to stdout and
// do not pass through here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

enum class ColorMode { automatic, always, never };

// What --color asks for. `automatic` colours only a terminal that is not TERM=dumb, with NO_COLOR unset.
void set_color_mode(ColorMode mode);
ColorMode color_mode_from_name(std::string_view name);  // auto, always or never: the choices of --color
bool stderr_is_terminal();

// For a process that is not the first of several on one terminal: from now on log_info() writes nothing, and warnings
// and errors begin with "rank R: ".
void log_as_rank(int rank);

// Each writes one line to stderr, after erasing the progress line if one is shown. A write error (a closed pipe) is
// ignored: a log must not kill a run.
void log_info(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warning(const char* fmt, ...) __attribute__((format(printf, 1, 2)));  // "warning: ..."
void log_error(const char* fmt, ...) __attribute__((format(printf, 1, 2)));    // "error: ..."

// Errors that others can cause as often as they like, as the clients of a server: a line in ten seconds at most, each with how
// many were left out since the one before. Any thread may use it.
class RepeatedError {
 public:
  using Clock = std::chrono::steady_clock;
  ~RepeatedError();                                                         // a line for those that were left out last
  void log(const std::string& text, Clock::time_point now = Clock::now());  // `now`: only tests give another time

 private:
  std::mutex mutex_;
  std::string last_;
  std::int64_t left_out_ = 0;
  std::optional<Clock::time_point> written_;
};

// `text` shortened to at most `columns` columns of a terminal: a longer one is cut between characters and ends in
// "...".
std::string fit_columns(std::string_view text, std::size_t columns);

// A line that overwrites itself, at most ten times a second; only where stderr is a terminal. fit_columns() shortens it
// to the terminal's width.
class ProgressLine {
 public:
  ~ProgressLine() { clear(); }
  void show(const std::string& text);
  void clear();

 private:
  std::chrono::steady_clock::time_point last_{};
};

// Whether a progress line is on the terminal now. Async-signal-safe.
bool progress_line_shown();

// "1.5 GB", "312 MB", "17 KB": powers of ten.
std::string human_bytes(double bytes);
// "31250", "1.97 M": a plain number below a million.
std::string human_count(double count);
// "1 row", "2 rows".
std::string counted(std::int64_t count, const char* singular);
// "3:05", "2:03:05": hours only when needed.
std::string human_seconds(double seconds);

}  // namespace weft
