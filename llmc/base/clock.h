// Times in seconds as numbers, on the steady clock, which does not follow changes of the time of day.
#pragma once

#include <chrono>

namespace weft {

inline std::chrono::steady_clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

inline double in_seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

inline double in_milliseconds(std::chrono::steady_clock::duration duration) {
  return in_seconds(duration) * 1e3;
}

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return in_seconds(std::chrono::steady_clock::now() - begin);
}

}  // namespace weft
