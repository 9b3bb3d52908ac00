// The arithmetic of SwiGLU (Shazeer, 2020) for one pair of gate and up, in fp32:
//
//   out = g s u               s = 1 / (1 + e^-g)
//   dup = dout g s            dgate = dout u s (1 + g (1 - s))
//
// and of GeGLU with GELU's approximation by tanh (Hendrycks and Gimpel, 2016), which is g / (1 + e^-a) for another a,
// since (1 + tanh(a / 2)) / 2 = 1 / (1 + e^-a):
//
//   out = g s u               s = 1 / (1 + e^-a)    a = 2 sqrt(2 / pi) (g + 0.044715 g^3)
//   dup = dout g s            dgate = dout u s (1 + g (1 - s) da/dg)
//
// One definition for the kernels of swiglu.cu and fp8.cu and for the epilogues of matmul_swiglu.cu and
// matmul_swiglu_fp8.cu: the same bits in all.
#pragma once

#include "llmc/cuda/hw/elements.cuh"

namespace weft::cuda {

// gate / (1 + e^-argument) up. T: what the results are stored in.
template <typename T>
__device__ inline float gated_product(float gate, float argument, float up) {
  return gate * reciprocal_for<T>(1.0f + exp_for<T>(-argument)) * up;
}
template <typename T>
__device__ inline float swiglu(float gate, float up) {
  return gated_product<T>(gate, gate, up);
}
// a of GeGLU, and its derivative.
constexpr float kGeluLinear = 1.5957691216f, kGeluCubic = 0.07135481627f;
__device__ inline float gelu_tanh_argument(float gate) {
  return gate * fmaf(kGeluCubic, gate * gate, kGeluLinear);
}
__device__ inline float gelu_tanh_slope(float gate) {
  return fmaf(3 * kGeluCubic, gate * gate, kGeluLinear);
}
template <typename T>
__device__ inline float geglu_tanh(float gate, float up) {
  return gated_product<T>(gate, gelu_tanh_argument(gate), up);
}

struct SwigluGradient {
  float gate, up;
  float out;  // the forward pass's result
};
// `slope`: of the argument.
template <typename T>
__device__ inline SwigluGradient gated_gradient(float dout, float gate, float argument, float slope, float up) {
  const float s = reciprocal_for<T>(1.0f + exp_for<T>(-argument));
  return {dout * up * s * (1.0f + gate * slope * (1.0f - s)), dout * gate * s, gate * s * up};
}
template <typename T>
__device__ inline SwigluGradient swiglu_gradient(float dout, float gate, float up) {
  return gated_gradient<T>(dout, gate, gate, 1.0f, up);
}
template <typename T>
__device__ inline SwigluGradient geglu_tanh_gradient(float dout, float gate, float up) {
  return gated_gradient<T>(dout, gate, gelu_tanh_argument(gate), gelu_tanh_slope(gate), up);
}

}  // namespace weft::cuda
