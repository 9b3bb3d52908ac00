// The arithmetic of SwiGLU (Shazeer, 2020) for one pair of gate and up, in fp32:
//
//   out = g s u               s = 1 / (1 + e^-g)
//   dup = dout g s            dgate = dout u s (1 + g (1 - s))
//
// One definition for the kernels of swiglu.cu and fp8.cu and for the epilogues of matmul_swiglu.cu and
// matmul_swiglu_fp8.cu: the same bits in all.
#pragma once

#include "llmc/cuda/hw/elements.cuh"

namespace weft::cuda {

// T: what the results are stored in.
template <typename T>
__device__ inline float swiglu(float gate, float up) {
  return gate * reciprocal_for<T>(1.0f + exp_for<T>(-gate)) * up;
}

struct SwigluGradient {
  float gate, up;
  float out;  // the forward pass's result
};
template <typename T>
__device__ inline SwigluGradient swiglu_gradient(float dout, float gate, float up) {
  const float s = reciprocal_for<T>(1.0f + exp_for<T>(-gate));
  return {dout * up * s * (1.0f + gate * (1.0f - s)), dout * gate * s, gate * s * up};
}

}  // namespace weft::cuda
