// 2^x, e^x and 1/x by the special function unit, and which of them a result's storage type allows.
#pragma once

#include <type_traits>

namespace weft::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Relative error at most 2^-22 (CUDA C++ Programming Guide), far below the rounding to 16 bits.
// Results below 2^-126 are 0.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x and 1/x for a result that is stored in T: full precision for float, the approximations for 16-bit types, whose
// rounding hides their error.
template <typename T>
__device__ inline float exp_for(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    return exp2_approximate(x * kLog2E);
  }
}
template <typename T>
__device__ inline float reciprocal_for(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return 1.0f / x;
  } else {
    return reciprocal_approximate(x);
  }
}

}  // namespace weft::cuda
