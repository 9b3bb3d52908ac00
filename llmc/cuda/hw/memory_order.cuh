// Accesses to global memory whose order other blocks, or the host, rely on (PTX ISA, "Memory Consistency Model"), and the clock
// that all multiprocessors share.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// ---- between the blocks of a GPU --------------------------------------------------------------------------------------
// What the thread that released has written before can be read after the acquire.
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
// Returns the value before. Releases what this thread has written and seen before, and acquires what those released who added
// before it: of several adders, the last one sees what all the others wrote.
__device__ inline int fetch_add_acquire_release(int* address, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}
// Relaxed accesses order nothing else: for words that say themselves which version they are. One access sees all bytes of
// a word or none.
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

}  // namespace weft::cuda
