// What every kernel uses: 16-byte accesses, conversions to and from fp32, reductions that synchronise by
// themselves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr int kWarpSize = 32;

__host__ __device__ constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// ---- conversions: all arithmetic is fp32, only storage is 16-bit ------------------------------------------------------
__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(bf16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(fp16 value) {
  return __half2float(value);
}

template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline bf16 from_float<bf16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline fp16 from_float<fp16>(float value) {
  return __float2half_rn(value);
}

// ---- 16-byte accesses -------------------------------------------------------------------------------------------------
// One LDG.128 / STG.128 a thread: a warp moves 512 contiguous bytes, four full sectors of 128.
template <typename T>
struct alignas(16) Pack {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  T value[size];
};

template <typename T>
__device__ inline Pack<T> load_pack(const T* address) {
  Pack<T> pack;
  *reinterpret_cast<int4*>(&pack) = *reinterpret_cast<const int4*>(address);
  return pack;
}
// For data that is read once: evict first, so that it does not push out what will be read again.
template <typename T>
__device__ inline Pack<T> load_pack_streaming(const T* address) {
  Pack<T> pack;
  *reinterpret_cast<int4*>(&pack) = __ldcs(reinterpret_cast<const int4*>(address));
  return pack;
}
template <typename T>
__device__ inline void store_pack(T* address, const Pack<T>& pack) {
  *reinterpret_cast<int4*>(address) = *reinterpret_cast<const int4*>(&pack);
}
// For data that nobody reads soon.
template <typename T>
__device__ inline void store_pack_streaming(T* address, const Pack<T>& pack) {
  __stcs(reinterpret_cast<int4*>(address), *reinterpret_cast<const int4*>(&pack));
}

// ---- shared memory and barriers of a part of a block ----------------------------------------------------------------
__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
// Barrier `id` (1 to 15; 0 is __syncthreads) completes when `threads` threads have come, a multiple of 32. Those that
// arrive go on, those that wait then see what the others wrote before.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- 2^x and 1/x by the special function unit -----------------------------------------------------------------------
// Relative error at most 2^-22 (CUDA C++ Programming Guide), nothing to a result that is rounded to 16 bits. Results below
// 2^-126 are 0.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// ---- reductions -------------------------------------------------------------------------------------------------------
// Butterfly over the warp: every lane gets the result, in an order that does not depend on timing.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}
__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// Over the block of up to 1024 threads (a multiple of 32); every thread gets the result. `scratch` is 32
// floats of shared memory. Synchronises before it reads and before it returns, so that two calls in a row may
// share the scratch.
template <float (*WarpReduce)(float)>
__device__ inline float block_reduce(float value, float* scratch, float identity) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  value = WarpReduce(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = WarpReduce(lane < warps ? scratch[lane] : identity);
  __syncthreads();
  return value;
}
__device__ inline float block_sum(float value, float* scratch) {
  return block_reduce<warp_sum>(value, scratch, 0.0f);
}
__device__ inline float block_max(float value, float* scratch) {
  return block_reduce<warp_max>(value, scratch, -INFINITY);
}

}  // namespace weft::cuda
