// GELU and its derivative as device functions, arithmetic in fp32 (Hendrycks & Gimpel, 2016):
//
//   gelu(x) = x Phi(x)             Phi(x) = (1 + erf(x / sqrt 2)) / 2
//   d gelu / dx = Phi(x) + x phi(x)
//
// gelu_exact() uses erff(): for results in fp32, and where one GELU follows the thousands of multiplications of a row
// (GEMV, the fused decode kernel), so that its cost does not matter. gelu_16bit() is for kernels that compute nothing
// but GELU on 16-bit elements: there erff() would take longer than the memory accesses. Both are GELU with erf, not its
// tanh approximation; they agree to a fiftieth of the rounding error of fp16.
#pragma once

#include <type_traits>

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

constexpr float kInvSqrt2 = 0.70710678118654752f;
constexpr float kInvSqrt2Pi = 0.39894228040143268f;

__device__ inline float gelu_exact(float x) {
  return 0.5f * x * (1.0f + erff(x * kInvSqrt2));
}
__device__ inline float gelu_slope_exact(float x) {
  const float cdf = 0.5f * (1.0f + erff(x * kInvSqrt2));
  return cdf + x * kInvSqrt2Pi * expf(-0.5f * x * x);
}

// The tail of the normal distribution,
//
//   Phi(-a) = e^(-a a / 2) t P(t)     t = 1 / (1 + 0.3 a),  a >= 0
//
// (the form of Hastings, "Approximations for Digital Computers", 1955), with a polynomial P of degree 5 fitted here for
// the least relative error: 8.2e-6 on [0, 14], a fiftieth of the rounding error of fp16.
struct NormalTail {
  float tail, bell;  // Phi(-|x|), e^(-x x / 2)
};
__device__ inline NormalTail normal_tail_16bit(float x) {
  const float t = reciprocal_approximate(fmaf(fabsf(x), 0.3f, 1.0f));
  const float bell = exp2_approximate(x * x * (-0.5f * kLog2E));
  float sum = -0.07709735f;
  sum = fmaf(sum, t, 0.21603686f);
  sum = fmaf(sum, t, -0.01694788f);
  sum = fmaf(sum, t, 0.14419629f);
  sum = fmaf(sum, t, 0.11374194f);
  sum = fmaf(sum, t, 0.12007423f);
  return {sum * t * bell, bell};
}
// gelu(x) = max(x, 0) - |x| Phi(-|x|).
__device__ inline float gelu_16bit(float x) {
  return fmaf(-fabsf(x), normal_tail_16bit(x).tail, fmaxf(x, 0.0f));
}
// phi is `bell` up to a constant factor.
__device__ inline float gelu_slope_16bit(float x) {
  const NormalTail normal = normal_tail_16bit(x);
  const float cdf = x > 0 ? 1.0f - normal.tail : normal.tail;
  return fmaf(x * kInvSqrt2Pi, normal.bell, cdf);
}

// For a result that is stored in T.
template <typename T>
__device__ inline float gelu_for(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return gelu_exact(x);
  } else {
    return gelu_16bit(x);
  }
}
template <typename T>
__device__ inline float gelu_slope_for(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return gelu_slope_exact(x);
  } else {
    return gelu_slope_16bit(x);
  }
}

}  // namespace weft::cuda
