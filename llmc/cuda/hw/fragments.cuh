// Fragments of tensor core instructions: how a warp's threads hold a matrix of 16-bit elements in registers.
//
// In an accumulator of mma.m16n8k16 and of wgmma, lane 4 g + t holds rows g and g + 8, columns 2t and 2t + 1 of each 8
// columns. Two adjacent accumulators, rounded to 16 bits, are operand A of the next GEMM over their 16 columns (PTX
// ISA, "Matrix Fragments for mma.m16n8k16"), and what stmatrix stores as 16 rows of 16 columns.
#pragma once

#include <type_traits>

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// Two fp32 values rounded to T; `low` at the lower address.
template <typename T>
__device__ inline unsigned pack(float low, float high) {
  unsigned packed;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <typename T>
__device__ inline float2 unpack(unsigned packed) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

// Accumulators of wgmma rounded to the words of a register operand, four for each 16 columns.
template <typename T, int R>
__device__ inline void round_to_operand(unsigned (&words)[R / 2], const float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R / 2; ++i) words[i] = pack<T>(d[2 * i], d[2 * i + 1]);
}

}  // namespace weft::cuda
