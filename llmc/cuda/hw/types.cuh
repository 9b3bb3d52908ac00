// Storage types of arrays and their conversions. Arithmetic is fp32; only storage is 16-bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "llmc/base/ceil_div.h"

namespace weft::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(bf16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(fp16 value) {
  return __half2float(value);
}

// Rounds to nearest, ties to even.
template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline bf16 from_float<bf16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline fp16 from_float<fp16>(float value) {
  return __float2half_rn(value);
}

}  // namespace weft::cuda
