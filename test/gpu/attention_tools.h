// What the tests of the Hopper attention kernels share: views with gaps, rounding, norms.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "llmc/model/head_view.h"

namespace weft::test {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using Doubles = std::vector<double>;

inline float widen(bf16 value) {
  return __bfloat162float(value);
}
inline float widen(fp16 value) {
  return __half2float(value);
}
inline float widen(float value) {
  return value;
}
template <typename T>
T rounded(float value) {
  if constexpr (std::is_same_v<T, bf16>) return __float2bfloat16(value);
  if constexpr (std::is_same_v<T, fp16>) return __float2half(value);
  if constexpr (std::is_same_v<T, float>) return value;
}
template <typename T>
constexpr double kHalfUlp = std::is_same_v<T, bf16> ? 0x1p-8 : 0x1p-11;

// Where the heads of a tensor lie in its buffer, in elements.
struct Layout {
  std::int64_t first, batch_stride, token_stride, head_stride, elements;
  template <typename T>
  HeadViewOf<T> view(T* data) const {
    return {data + first, batch_stride, token_stride, head_stride};
  }
};
enum class Packing { separate, llama_rows, neox_rows, cache };
struct Layouts {
  Layout q, k, v, out;  // gradients lie as what they are of
};

inline double norm(const Doubles& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}
inline Doubles difference(const Doubles& a, const Doubles& b) {
  Doubles result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) result[i] = a[i] - b[i];
  return result;
}
inline double largest(const Doubles& values) {
  double result = 0;
  for (const double value : values) result = std::max(result, std::isfinite(value) ? std::fabs(value) : INFINITY);
  return result;
}

}  // namespace weft::test
