#include "llmc/base/log.h"

#include <sys/ioctl.h>
#include <unistd.h>
#include <utf8proc.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/terminal.h"
#include "llmc/base/utf8.h"

namespace weft {

namespace {

std::mutex output_mutex;
ColorMode color_mode = ColorMode::automatic;
std::string rank_prefix;                  // "rank 1: ", or empty; set before there are threads
std::atomic<bool> progress_shown{false};  // a signal handler reads it

bool is_terminal(int fd) {
  const char* term = std::getenv("TERM");
  return ::isatty(fd) == 1 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

bool color_is_welcome() {
  const char* no_color = std::getenv("NO_COLOR");
  return no_color == nullptr || *no_color == '\0';
}

bool use_color() {
  if (color_mode != ColorMode::automatic) return color_mode == ColorMode::always;
  return stderr_is_terminal() && color_is_welcome();
}

// Columns that one character takes on a terminal. `bytes`: one UTF-8 sequence, or one byte that belongs to none.
std::size_t character_columns(std::string_view bytes) {
  utf8proc_int32_t character = 0;
  const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(bytes.data());
  if (utf8proc_iterate(data, static_cast<utf8proc_ssize_t>(bytes.size()), &character) < 1) return 1;
  return static_cast<std::size_t>(std::max(0, utf8proc_charwidth(character)));
}

void write_line(const char* color, const char* prefix, const char* fmt, std::va_list args) {
  std::va_list again;
  va_copy(again, args);
  const int length = std::vsnprintf(nullptr, 0, fmt, args);
  std::string text(static_cast<std::size_t>(std::max(0, length)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, fmt, again);
  va_end(again);
  const std::lock_guard<std::mutex> lock(output_mutex);
  // Another rank's progress line may be on the terminal.
  const bool erase = progress_shown || (!rank_prefix.empty() && stderr_is_terminal());
  progress_shown = false;
  std::string line = (erase ? "\r\033[K" : "") + rank_prefix;
  if (*prefix != '\0') {
    const bool colored = use_color();
    line += std::string(colored ? color : "") + prefix + (colored ? "\033[0m " : " ");
  }
  line += text + "\n";
  // One write, so that lines of several processes do not mix.
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

void set_color_mode(ColorMode mode) {
  color_mode = mode;
}

ColorMode color_mode_from_name(std::string_view name) {
  return name == "always" ? ColorMode::always : name == "never" ? ColorMode::never : ColorMode::automatic;
}

bool stderr_is_terminal() {
  return is_terminal(STDERR_FILENO);
}

bool stdout_color() {
  return is_terminal(STDOUT_FILENO) && color_mode != ColorMode::never &&
         (color_mode == ColorMode::always || color_is_welcome());
}

void log_as_rank(int rank) {
  rank_prefix = format("rank %d: ", rank);
}

void log_info(const char* fmt, ...) {
  if (!rank_prefix.empty()) return;
  std::va_list args;
  va_start(args, fmt);
  write_line("", "", fmt, args);
  va_end(args);
}

void log_warning(const char* fmt, ...) {
  std::va_list args;
  va_start(args, fmt);
  write_line("\033[33m", "warning:", fmt, args);
  va_end(args);
}

void log_error(const char* fmt, ...) {
  std::va_list args;
  va_start(args, fmt);
  write_line("\033[31m", "error:", fmt, args);
  va_end(args);
}

void RepeatedError::log(const std::string& text, Clock::time_point now) {
  constexpr auto kInterval = std::chrono::seconds(10);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (written_ && now - *written_ < kInterval) {
    ++left_out_;
    last_ = text;
    return;
  }
  written_ = now;
  const long long left_out = std::exchange(left_out_, 0);
  if (left_out == 0) return log_error("%s", text.c_str());
  log_error("%s (and %lld more since the last such line)", text.c_str(), left_out);
}

RepeatedError::~RepeatedError() {
  if (left_out_ == 0) return;
  log_error("%s (%lld since the last such line)", last_.c_str(), static_cast<long long>(left_out_));
}

bool progress_line_shown() {
  return progress_shown.load();
}

std::string fit_columns(std::string_view text, std::size_t columns) {
  constexpr std::size_t kDots = 3;
  const std::size_t room = columns > kDots ? columns - kDots : 0;
  std::size_t end = 0, column = 0;  // bytes and columns of the longest prefix that leaves room for the dots
  for (std::size_t begin = 0, width = 0; begin < text.size();) {
    const std::size_t bytes = std::max<std::size_t>(1, utf8_sequence_length(text.substr(begin)));
    width += character_columns(text.substr(begin, bytes));
    begin += bytes;
    if (width > columns) return std::string(text.substr(0, end)) + std::string(std::min(kDots, columns - column), '.');
    if (width <= room) end = begin, column = width;
  }
  return std::string(text);
}

void ProgressLine::show(const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  if (!stderr_is_terminal() || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  winsize window{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 1;
  const std::size_t columns = known ? window.ws_col - 1u : 79u;  // a full line would wrap and could not be overwritten
  const std::lock_guard<std::mutex> lock(output_mutex);
  std::fprintf(stderr, "\r\033[K%s", fit_columns(text, columns).c_str());
  std::fflush(stderr);
  progress_shown = true;
}

void ProgressLine::clear() {
  const std::lock_guard<std::mutex> lock(output_mutex);
  if (!progress_shown) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  progress_shown = false;
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "KB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 1000 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  return format(unit > 0 && bytes < 10    ? "%.2f %s"
                : unit > 0 && bytes < 100 ? "%.1f %s"
                                          : "%.0f %s",
                bytes, units[unit]);
}

std::string human_count(double count) {
  return count < 1e6 ? format("%.0f", count) : format("%.2f M", count / 1e6);
}

std::string counted(std::int64_t count, const char* singular) {
  return format("%lld %s%s", static_cast<long long>(count), singular, count == 1 ? "" : "s");
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const long long whole = std::llround(seconds);
  if (whole < 3600) return format("%lld:%02lld", whole / 60, whole % 60);
  return format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace weft
