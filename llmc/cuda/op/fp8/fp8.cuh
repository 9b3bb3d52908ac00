// Rounding to fp8 inside a kernel, for kernels that write the codes of what they compute. What a tensor's codes and counters
// are is in llmc/cuda/op/fp8/fp8.h: those of quantize_fp8() on the same values, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/fp8/fp8.h"

namespace weft::cuda {

// One thread's part of a tensor's counters.
struct ThreadCounters {
  unsigned amax = 0, saturated = 0, flushed = 0;
};

// The larger of `most` and the magnitude of `value`; NaN if one of them is.
__device__ inline float larger_magnitude(float most, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(most), "f"(fabsf(value)));
  return result;
}

// The codes of four scaled values, the first in the lowest byte. What is beyond the largest number, even infinity,
// becomes that.
template <Fp8Format kFormat>
__device__ unsigned codes_of(const float (&scaled)[4]) {
  constexpr __nv_fp8_interpretation_t kType = kFormat == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
  const unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(scaled[0], scaled[1]), __NV_SATFINITE, kType);
  const unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(scaled[2], scaled[3]), __NV_SATFINITE, kType);
  return low | high << 16;
}

// Codes in e4m3 of a row with the scale `scale` (fp8_row_scale()), for values that 16 bits hold: of value / scale, correctly
// rounded.
//
// A product with the reciprocal and one correction give that quotient in four instructions (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990): compared with the division for all mantissas of bf16
// and fp16 and all of the scale. With a scale so small that the correction may underflow, or none, it is a division.
class RowCodes {
 public:
  __device__ explicit RowCodes(float scale) : scale_(scale), usual_(scale >= 0x1p-90f && scale <= 0x1p120f) {
    reciprocal_ = __fdiv_rn(1.0f, scale);
  }

  __device__ unsigned operator()(const float (&values)[4]) const {
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = quotient(values[i]);
    if (!usual_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = __fdiv_rn(values[i], scale_);
    }
    return codes_of<Fp8Format::e4m3>(scaled);
  }

 private:
  __device__ float quotient(float value) const {
    const float product = __fmul_rn(value, reciprocal_);
    return copysignf(__fmaf_rn(__fmaf_rn(-product, scale_, value), reciprocal_, product), value);  // also of -0
  }

  float scale_, reciprocal_;
  bool usual_;
};

// How many of four codes are zero.
__device__ inline unsigned zero_codes(unsigned codes) {
  constexpr unsigned kMagnitudes = 0x7F7F7F7Fu;
  return 4 - __popc(((codes & kMagnitudes) + kMagnitudes) & ~kMagnitudes);
}

// Rounds four values to four codes, and counts them in `counters`. Infinity becomes NaN.
template <Fp8Format kFormat>
__device__ unsigned round_four(const float* values, float scale, ThreadCounters& counters) {
  float scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned bits = __float_as_uint(values[i]) & 0x7FFFFFFFu;
    counters.amax = max(counters.amax, bits);
    scaled[i] = values[i] * scale;
    const float magnitude = fabsf(scaled[i]);
    counters.saturated += magnitude > fp8_largest(kFormat);
    counters.flushed += bits != 0 && magnitude <= fp8_flushed(kFormat);
    // infinity becomes NaN: only finite values saturate
    if (bits == 0x7F800000u) scaled[i] = __uint_as_float(0x7FC00000u);
  }
  return codes_of<kFormat>(scaled);
}

// Adds a block's counters to the tensor's. All are integers, so the order of the atomics does not matter. Every thread of
// the block calls it; `scratch`: three words of shared memory.
__device__ inline void add_counters(const Fp8Target& to, const ThreadCounters& counters, unsigned* scratch) {
  if (to.counters == nullptr) return;
  const unsigned amax = __reduce_max_sync(~0u, counters.amax);
  const unsigned saturated = __reduce_add_sync(~0u, counters.saturated),
                 flushed = __reduce_add_sync(~0u, counters.flushed);
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
  if (scratch[0] > *reinterpret_cast<volatile std::uint32_t*>(&to.counters->amax_bits)) {
    atomicMax(&to.counters->amax_bits, scratch[0]);
  }
  if (!to.writes()) return;
  using Count = unsigned long long;
  if (scratch[1] != 0) atomicAdd(reinterpret_cast<Count*>(&to.counters->saturated), static_cast<Count>(scratch[1]));
  if (scratch[2] != 0) atomicAdd(reinterpret_cast<Count*>(&to.counters->flushed), static_cast<Count>(scratch[2]));
}

// The same for one warp, whose lanes all call it: where a block's warps have different work.
__device__ inline void add_warp_counters(Fp8Counters* to, const ThreadCounters& counters) {
  const unsigned amax = __reduce_max_sync(~0u, counters.amax);
  const unsigned saturated = __reduce_add_sync(~0u, counters.saturated),
                 flushed = __reduce_add_sync(~0u, counters.flushed);
  if (threadIdx.x % kWarpSize != 0) return;
  if (amax > *reinterpret_cast<volatile std::uint32_t*>(&to->amax_bits)) atomicMax(&to->amax_bits, amax);
  using Count = unsigned long long;
  if (saturated != 0) atomicAdd(reinterpret_cast<Count*>(&to->saturated), static_cast<Count>(saturated));
  if (flushed != 0) atomicAdd(reinterpret_cast<Count*>(&to->flushed), static_cast<Count>(flushed));
}

// Four words, each four codes of a row, to four words, each the four rows of a column.
__device__ inline void transpose_four(unsigned (&to)[4], const unsigned* from) {
  const unsigned low01 = __byte_perm(from[0], from[1], 0x5140), low23 = __byte_perm(from[2], from[3], 0x5140);
  const unsigned high01 = __byte_perm(from[0], from[1], 0x7362), high23 = __byte_perm(from[2], from[3], 0x7362);
  to[0] = __byte_perm(low01, low23, 0x5410);
  to[1] = __byte_perm(low01, low23, 0x7632);
  to[2] = __byte_perm(high01, high23, 0x5410);
  to[3] = __byte_perm(high01, high23, 0x7632);
}

// ---- the transposed layout ------------------------------------------------------------------------------------------
// A block of 256 threads computes tiles of 128 rows and 64 columns, whose codes go through shared memory: a thread reads
// four columns by eight rows, transposes them by byte permutations in registers and stores 8 rows of each column, so
// that 16 threads fill a cache_line of 128 bytes.
namespace fp8_tile {

constexpr int kThreads = 256, kTileRows = 128, kTileColumns = 64;
// words of a row in shared memory; one is padding against bank conflicts
constexpr int kTileStride = kTileColumns / 4 + 1;
constexpr int kTileWords = kTileRows * kTileStride;

// Stores a tile's codes transposed: column `column` of the tile is row first_row + column of `transposed`.
__device__ inline void store_transposed(std::uint8_t* transposed, const unsigned* tile, std::int64_t row,
                                        std::int64_t column, std::int64_t rows, std::int64_t columns,
                                        std::int64_t first_row) {
  const int group = threadIdx.x % 16, square = threadIdx.x / 16;
  row += 8 * group;
  column += 4 * square;
  if (row >= rows || column >= columns) return;
  unsigned word[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) word[i] = tile[(8 * group + i) * kTileStride + square];
  unsigned out[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) transpose_four(out[half], word + 4 * half);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint8_t* to = transposed + (first_row + column + i) * rows + row;
    *reinterpret_cast<uint2*>(to) = make_uint2(out[0][i], out[1][i]);
  }
}

}  // namespace fp8_tile

}  // namespace weft::cuda
