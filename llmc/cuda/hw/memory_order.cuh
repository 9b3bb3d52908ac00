// Accesses to global memory on whose order other blocks or the host rely (PTX ISA, "Memory Consistency Model"), and the
// clock that all multiprocessors share.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// Acquire and release: what the releasing thread wrote before is visible after the acquire.
__device__ inline unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void add_release(unsigned* address, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Returns the old value. Releases what this thread has written and seen before, and acquires what earlier adders
// released: the last of several adders sees what all the others wrote.
__device__ inline int fetch_add_acquire_release(int* address, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}
// Relaxed accesses order nothing else: for words that carry their own version. An access to a word is atomic; a vector
// access is several such words.
__device__ inline unsigned load_relaxed(const unsigned* address) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::uint64_t load_relaxed(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint4 load_relaxed_x4(const unsigned* address) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}
__device__ inline ulonglong2 load_relaxed_x2(const std::uint64_t* address) {
  ulonglong2 pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.x), "=l"(pair.y) : "l"(address) : "memory");
  return pair;
}
__device__ inline void store_relaxed(unsigned* address, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void store_relaxed(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// ---- between GPU and host: page-locked memory -------------------------------------------------------------------------
__device__ inline void store_release_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void store_relaxed_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_relaxed_system(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// ---- time -------------------------------------------------------------------------------------------------------------
// Nanoseconds, the same clock on all multiprocessors.
__device__ inline std::uint64_t global_time() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// ---- waiting ----------------------------------------------------------------------------------------------------------
// Waits until the counter has reached `least`, called by a whole warp; acquires what its adders released. With a watchdog:
// after 10 s the kernel ends with an illegal address.
__device__ inline void wait_for_count(const int* counter, int least) {
  constexpr std::uint64_t kWatchdog = 10'000'000'000;  // ns
  constexpr unsigned kPause = 100;                     // ns
  if (threadIdx.x % kWarpSize == 0 && load_acquire(counter) < least) {
    const std::uint64_t start = global_time();
    do {
      __nanosleep(kPause);
      if (global_time() - start > kWatchdog) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(least) : "memory");
    } while (load_acquire(counter) < least);
  }
  __syncwarp();
}

}  // namespace weft::cuda
