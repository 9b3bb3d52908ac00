// The threads of a block: warps, shared-memory addresses, barriers for some of the threads, reductions over a warp or a
// block.
#pragma once

#include <cuda_runtime.h>

namespace weft::cuda {

constexpr int kWarpSize = 32;

// The 32-bit address of a shared variable, as PTX instructions take it.
__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
// The same, rounded up to a multiple of `alignment`, a power of two.
__device__ inline unsigned shared_address(const void* pointer, unsigned alignment) {
  return (shared_address(pointer) + alignment - 1) & ~(alignment - 1);
}

// Named barrier `id` (1 to 15; 0 is __syncthreads) completes when `threads` threads, a multiple of 32, have arrived or
// are waiting. A thread that arrives continues at once; one that waits then sees what the others wrote before they
// arrived.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Butterfly reduction over kLanes neighbouring lanes, a power of two: every lane gets the result, in an order that does
// not depend on timing. All lanes of the warp call it.
template <int kLanes>
__device__ inline float lanes_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}
__device__ inline float warp_sum(float value) {
  return lanes_sum<kWarpSize>(value);
}
__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// Reduction over a block of up to 1024 threads (a multiple of 32); every thread gets the result. `scratch`: 32 floats
// of shared memory. It synchronises before it reads and before it returns, so consecutive calls may share the scratch.
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
