// What work costs in processor time of all threads of the process. Who waits costs next to nothing, however busy the machine is:
// a loop that looks again and again instead of waiting takes about as long as the wait.
#pragma once

#include <ctime>

namespace weft::test {

template <typename Work>
double processor_seconds(const Work& work) {
  const auto now = [] {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double begin = now();
  work();
  return now() - begin;
}

}  // namespace weft::test
