// Loads that acquire and stores that release, between blocks through global memory (PTX ISA, "Memory Consistency Model"):
// who has loaded a value with acquire sees what the thread that stored it with release, had written before.
#pragma once

namespace weft::cuda {

__device__ inline int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace weft::cuda
