// What the kernels of optimizers share: access to master weights, and a sum over the threads of a block.
#pragma once

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/optim/adamw.h"

namespace weft::cuda {

inline constexpr int kQuad = 4;  // elements that a thread processes at once: 16 bytes of every fp32 array

// Masters: fp32 parameters, or bf16 ones with their low halves (llmc/cuda/op/optim/adamw.h). The low half of parameter element i
// is at j.
struct Fp32Masters {
  float* p;

  __device__ void shift(std::int64_t elements) { p += elements; }
  __device__ float get(std::int64_t i, std::int64_t) const { return p[i]; }
  __device__ void set(std::int64_t i, std::int64_t, float value) const { p[i] = value; }
  __device__ float4 get_quad(std::int64_t i, std::int64_t) const {
    return __ldcs(reinterpret_cast<const float4*>(p + i));
  }
  __device__ void set_quad(std::int64_t i, std::int64_t, float4 value) const {
    __stcs(reinterpret_cast<float4*>(p + i), value);
  }
};

struct SplitMasters {
  std::uint16_t* p;  // the bits of bf16
  std::int16_t* low;

  __device__ void shift(std::int64_t elements) { p += elements; }
  static __device__ float join(unsigned high, unsigned low) {
    return __uint_as_float(
        join_master({static_cast<std::uint16_t>(high), static_cast<std::int16_t>(static_cast<std::uint16_t>(low))}));
  }
  // Two consecutive elements are in one 32-bit word, the first in its low half.
  static __device__ void split(float first, float second, unsigned& high, unsigned& low) {
    const SplitMaster a = split_master(__float_as_uint(first)), b = split_master(__float_as_uint(second));
    high = a.high | static_cast<unsigned>(b.high) << 16;
    low = static_cast<std::uint16_t>(a.low) | static_cast<unsigned>(static_cast<std::uint16_t>(b.low)) << 16;
  }

  __device__ float get(std::int64_t i, std::int64_t j) const { return join(p[i], static_cast<std::uint16_t>(low[j])); }
  __device__ void set(std::int64_t i, std::int64_t j, float value) const {
    const SplitMaster split = split_master(__float_as_uint(value));
    p[i] = split.high;
    low[j] = split.low;
  }
  __device__ float4 get_quad(std::int64_t i, std::int64_t j) const {
    const uint2 h = __ldcs(reinterpret_cast<const uint2*>(p + i)), l = __ldcs(reinterpret_cast<const uint2*>(low + j));
    return {join(h.x, l.x), join(h.x >> 16, l.x >> 16), join(h.y, l.y), join(h.y >> 16, l.y >> 16)};
  }
  __device__ void set_quad(std::int64_t i, std::int64_t j, float4 value) const {
    uint2 h, l;
    split(value.x, value.y, h.x, l.x);
    split(value.z, value.w, h.y, l.y);
    __stcs(reinterpret_cast<uint2*>(p + i), h);
    __stcs(reinterpret_cast<uint2*>(low + j), l);
  }
};

inline SplitMasters split_arrays(const bf16* parameters, const std::int16_t* low) {
  return {reinterpret_cast<std::uint16_t*>(const_cast<bf16*>(parameters)), const_cast<std::int16_t*>(low)};
}

// The sum over a block of kCount threads, in a fixed order; scratch [kCount].
template <int kCount>
__device__ double block_sum_double(double value, double* scratch) {
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kCount / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    __syncthreads();
  }
  return scratch[0];
}

}  // namespace weft::cuda
