// For tests in a process of their own: memory and threads that cannot be had.
#pragma once

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>

namespace weft::test {

// From here on the process gets `more_bytes` of address space at most. Not under a sanitizer, which takes terabytes of it.
inline void limit_address_space(std::size_t more_bytes) {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + more_bytes;
  const rlimit limit{bytes, bytes};
  ::setrlimit(RLIMIT_AS, &limit);
}

// Bytes of the stack of a new thread.
inline std::size_t stack_bytes() {
  pthread_attr_t defaults;
  std::size_t bytes = 0;
  ::pthread_getattr_default_np(&defaults);
  ::pthread_attr_getstacksize(&defaults, &bytes);
  ::pthread_attr_destroy(&defaults);
  return bytes;
}

// Takes all memory that malloc() can still give.
inline void use_up_memory() {
  limit_address_space(0);
  for (std::size_t bytes = std::size_t{1} << 24; bytes >= 16;) {
    void* volatile block = std::malloc(bytes);
    if (block == nullptr) bytes /= 2;
  }
}

}  // namespace weft::test
