// Rounding to fp8 inside a kernel, for kernels that write the codes of what they compute. What a tensor's codes and tally
// are is in llmc/cuda/op/fp8.h: those of quantize_fp8() on the same values, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/fp8.h"

namespace weft::cuda {

// One thread's part of a tensor's tally.
struct ThreadTally {
  unsigned amax = 0, saturated = 0, flushed = 0;
};

// Rounds four values to four codes, the first in the lowest byte, and counts them in `tally`.
template <Fp8Format kFormat>
__device__ unsigned round_four(const float* values, float scale, ThreadTally& tally) {
  constexpr __nv_fp8_interpretation_t kType = kFormat == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
  float scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned bits = __float_as_uint(values[i]) & 0x7FFFFFFFu;
    tally.amax = max(tally.amax, bits);
    scaled[i] = values[i] * scale;
    const float magnitude = fabsf(scaled[i]);
    tally.saturated += magnitude > fp8_largest(kFormat);
    tally.flushed += bits != 0 && magnitude <= fp8_flushed(kFormat);
    // infinity becomes NaN: only finite values saturate
    if (bits == 0x7F800000u) scaled[i] = __uint_as_float(0x7FC00000u);
  }
  const unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(scaled[0], scaled[1]), __NV_SATFINITE, kType);
  const unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(scaled[2], scaled[3]), __NV_SATFINITE, kType);
  return low | high << 16;
}

// Adds a block's tallies to the tensor's. All are integers, so the order of the atomics does not matter. Every thread of
// the block calls it; `scratch`: three words of shared memory.
__device__ inline void add_tally(const Fp8Target& to, const ThreadTally& tally, unsigned* scratch) {
  if (to.tally == nullptr) return;
  const unsigned amax = __reduce_max_sync(~0u, tally.amax);
  const unsigned saturated = __reduce_add_sync(~0u, tally.saturated), flushed = __reduce_add_sync(~0u, tally.flushed);
  __syncthreads();
  if (threadIdx.x < 3) scratch[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) {
    atomicMax(&scratch[0], amax);
    atomicAdd(&scratch[1], saturated);
    atomicAdd(&scratch[2], flushed);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Most blocks find a larger amax already stored and skip the atomic.
  if (scratch[0] > *reinterpret_cast<volatile std::uint32_t*>(&to.tally->amax_bits)) {
    atomicMax(&to.tally->amax_bits, scratch[0]);
  }
  if (!to.writes()) return;
  using Count = unsigned long long;
  if (scratch[1] != 0) atomicAdd(reinterpret_cast<Count*>(&to.tally->saturated), static_cast<Count>(scratch[1]));
  if (scratch[2] != 0) atomicAdd(reinterpret_cast<Count*>(&to.tally->flushed), static_cast<Count>(scratch[2]));
}

}  // namespace weft::cuda
