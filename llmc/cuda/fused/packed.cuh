// Loads of 16-bit values, eight in 16 bytes, and their conversion to fp32.
#pragma once

#include <type_traits>

#include "llmc/cuda/fused/parameters.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// asm volatile keeps these loads where they are written. The compiler would move an ordinary load down to its first
// use, behind the wait that is meant to hide its latency.
__device__ inline uint4 load_early(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ inline unsigned short load_early(const unsigned short* address) {
  unsigned short value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
}
__device__ inline float load_early(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}
__device__ inline uint4 load_shared(unsigned address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
__device__ inline unsigned load_shared_byte(unsigned address) {
  unsigned value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ inline unsigned load_shared_pair(unsigned address) {  // of bytes
  unsigned short value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}
__device__ inline void store_shared(unsigned address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

template <typename T>
__device__ inline void widen(unsigned pair, float& low, float& high) {
  if constexpr (std::is_same_v<T, bf16>) {
    const float2 both = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
    low = both.x;
    high = both.y;
  } else {
    static_assert(std::is_same_v<T, fp16>);
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    low = both.x;
    high = both.y;
  }
}
template <typename T>
__device__ inline void widen(const uint4& packed, float* values) {
  widen<T>(packed.x, values[0], values[1]);
  widen<T>(packed.y, values[2], values[3]);
  widen<T>(packed.z, values[4], values[5]);
  widen<T>(packed.w, values[6], values[7]);
}
// sum += the dot product of 8 weights and 8 activations.
template <typename T>
__device__ inline void dot(float& sum, const uint4& packed, const float* activation) {
  float w[kLaneElements];
  widen<T>(packed, w);
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) sum = fmaf(w[j], activation[j], sum);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
