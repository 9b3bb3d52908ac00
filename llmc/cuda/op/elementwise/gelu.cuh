// GELU as a device function, arithmetic in fp32 (Hendrycks & Gimpel, 2016):
//
//   gelu(x) = x Phi(x)             Phi(x) = (1 + erf(x / sqrt 2)) / 2
//   d gelu / dx = Phi(x) + x phi(x)             phi(x) = e^(-x x / 2) / sqrt(2 pi)
//
// gelu_exact() uses erff(): for results in fp32, and where one GELU follows the thousands of multiplications of a row
// (the fused decode kernel), so that its cost does not matter. gelu_16bit() is for epilogues of GEMMs with results in 16
// bits: there erff() would take too long. Both are GELU with erf, not its tanh approximation; they agree to a fiftieth of
// the rounding error of fp16.
#pragma once

#include <type_traits>

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

constexpr float kInvSqrt2 = 0.70710678118654752f;
constexpr float kInvSqrt2Pi = 0.39894228040143268f;

__device__ inline float gelu_exact(float x) {
  return 0.5f * x * (1.0f + erff(x * kInvSqrt2));
}

// The tail of the normal distribution,
//
//   Phi(-a) = e^(-a a / 2) t P(t)     t = 1 / (1 + 0.3 a),  a >= 0
//
// (the form of Hastings, "Approximations for Digital Computers", 1955), with a polynomial P of degree 5 fitted here for
// the least relative error: 8.2e-6 on [0, 14], a fiftieth of the rounding error of fp16.
__device__ inline float normal_tail_16bit(float x) {  // Phi(-|x|)
  const float t = reciprocal_approximate(fmaf(fabsf(x), 0.3f, 1.0f));
  const float bell = exp2_approximate(x * x * (-0.5f * kLog2E));
  float sum = -0.07709735f;
  sum = fmaf(sum, t, 0.21603686f);
  sum = fmaf(sum, t, -0.01694788f);
  sum = fmaf(sum, t, 0.14419629f);
  sum = fmaf(sum, t, 0.11374194f);
  sum = fmaf(sum, t, 0.12007423f);
  return sum * t * bell;
}
// gelu(x) = max(x, 0) - |x| Phi(-|x|).
__device__ inline float gelu_16bit(float x) {
  return fmaf(-fabsf(x), normal_tail_16bit(x), fmaxf(x, 0.0f));
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

// For a gradient that is stored in T.
template <typename T>
__device__ inline float gelu_derivative_for(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return 0.5f * (1.0f + erff(x * kInvSqrt2)) + x * kInvSqrt2Pi * expf(-0.5f * x * x);
  } else {
    const float tail = normal_tail_16bit(x);
    const float density = kInvSqrt2Pi * exp2_approximate(x * x * (-0.5f * kLog2E));
    return fmaf(x, density, x > 0 ? 1 - tail : tail);
  }
}

}  // namespace weft::cuda
