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

// What SwiGLU and GeGLU differ in: a as a function of g, and its derivative.
struct Swiglu {
  static __device__ float argument(float gate) { return gate; }
  static __device__ float slope(float) { return 1.0f; }
};
struct GegluTanh {
  static constexpr float kLinear = 1.5957691216f, kCubic = 0.07135481627f;
  static __device__ float argument(float gate) { return gate * fmaf(kCubic, gate * gate, kLinear); }
  static __device__ float slope(float gate) { return fmaf(3 * kCubic, gate * gate, kLinear); }
};

// gate / (1 + e^-argument) up. T: what the results are stored in.
template <typename T>
__device__ inline float gated_product(float gate, float argument, float up) {
  return gate * reciprocal_for<T>(1.0f + exp_for<T>(-argument)) * up;
}
template <typename T>
__device__ inline float swiglu(float gate, float up) {
  return gated_product<T>(gate, Swiglu::argument(gate), up);
}

struct GatedGradient {
  float gate, up;
  float out;  // the forward pass's result
};
template <typename Gated, typename T>
__device__ inline GatedGradient gated_gradient(float dout, float gate, float up) {
  const float s = reciprocal_for<T>(1.0f + exp_for<T>(-Gated::argument(gate)));
  return {dout * up * s * (1.0f + gate * Gated::slope(gate) * (1.0f - s)), dout * gate * s, gate * s * up};
}
template <typename T>
__device__ inline GatedGradient swiglu_gradient(float dout, float gate, float up) {
  return gated_gradient<Swiglu, T>(dout, gate, up);
}

// The gradients of kCount neighbours of a row [gate F | up F], from `gate_up` on, and the product again.
template <typename Gated, typename T, int kCount>
struct GatedGradients {
  float gate[kCount], up[kCount], out[kCount];

  __device__ GatedGradients(const T* dout, const T* gate_up, std::int64_t F) {
    Elements<T, kCount> g, u, d;
    g.load(gate_up);
    u.load(gate_up + F);
    d.load(dout);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const GatedGradient of = gated_gradient<Gated, T>(d.get(i), g.get(i), u.get(i));
      gate[i] = of.gate;
      up[i] = of.up;
      out[i] = of.out;
    }
  }
};

}  // namespace weft::cuda
