#include "llmc/base/parallel.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/base/signals.h"

namespace weft {

unsigned helper_threads() {
  return std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u);
}

void in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work) {
  std::mutex mutex;
  std::size_t next = 0, failed = count;  // next: the index to begin; failed: the lowest index that has thrown
  std::exception_ptr error;
  const auto run = [&] {
    while (true) {
      std::size_t index = 0;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (next >= failed) return;
        index = next++;
      }
      try {
        work(index);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (index >= failed) return;
        failed = index;
        error = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  try {
    const SignalsElsewhere signals;
    for (std::size_t i = 1; i < std::min<std::size_t>(threads, count); ++i) others.emplace_back(run);
  } catch (const std::exception&) {  // no memory, or no more threads for this user: go on with those that started
  }
  run();
  for (std::thread& other : others) other.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace weft
