#include "llmc/base/log.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "llmc/base/error.h"

namespace weft {

namespace {

std::mutex output_mutex;
ColorMode color_mode = ColorMode::automatic;
bool progress_shown = false;

bool use_color() {
  if (color_mode != ColorMode::automatic) return color_mode == ColorMode::always;
  const char* no_color = std::getenv("NO_COLOR");
  return stderr_is_terminal() && (no_color == nullptr || *no_color == '\0');
}

void write_line(const char* color, const char* prefix, const char* fmt, std::va_list args) {
  char text[8192];
  std::vsnprintf(text, sizeof text, fmt, args);
  const std::lock_guard<std::mutex> lock(output_mutex);
  if (progress_shown) std::fputs("\r\033[K", stderr);
  progress_shown = false;
  if (*prefix != '\0') {
    const bool colored = use_color();
    std::fprintf(stderr, "%s%s%s ", colored ? color : "", prefix, colored ? "\033[0m" : "");
  }
  std::fprintf(stderr, "%s\n", text);
  std::fflush(stderr);
}

}  // namespace

void set_color_mode(ColorMode mode) {
  color_mode = mode;
}

bool stderr_is_terminal() {
  const char* term = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) == 1 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

void log_info(const char* fmt, ...) {
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

void ProgressLine::show(const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  if (!stderr_is_terminal() || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  winsize window{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 1;
  const std::size_t columns = known ? window.ws_col - 1u : 79u;  // a full line would wrap and could not be overwritten
  const std::lock_guard<std::mutex> lock(output_mutex);
  std::fprintf(stderr, "\r\033[K%s", text.substr(0, columns).c_str());
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

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const long long whole = std::llround(seconds);
  if (whole < 3600) return format("%lld:%02lld", whole / 60, whole % 60);
  return format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace weft
