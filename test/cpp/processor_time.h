// What work costs in processor time of all threads of the process. Who waits costs next to nothing, however busy the machine is:
// a loop that looks again and again instead of waiting takes about as long as the wait.
#pragma once

#include <ctime>

namespace weft {

template <typename Work>
double processor_seconds(Work work) {
  const std::clock_t begin = std::clock();
  work();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

}  // namespace weft
