// RoPE of queries and keys in an inference step: one order of operations, whichever kernel rotates a row.
#pragma once

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/fragments.cuh"

namespace weft::cuda {

// A pair (a, z) becomes fma(a, cos, -{z sin}) and fma(z, cos, {a sin}), the products in braces rounded. Written with operators, the
// compiler would fuse these differently in different kernels.
__device__ inline float rotated_low(float a, float z, float cosine, float sine) {
  return __fmaf_rn(a, cosine, -__fmul_rn(z, sine));
}
__device__ inline float rotated_high(float a, float z, float cosine, float sine) {
  return __fmaf_rn(z, cosine, __fmul_rn(a, sine));
}

// The rotation of one position, for kernels that read a head element by element.
template <typename S>
class RotationOf {
 public:
  // cos, sin: [positions, half].
  __device__ RotationOf(const float* cos, const float* sin, int half, int position)
      : cos_(cos + static_cast<std::int64_t>(position) * half),
        sin_(sin + static_cast<std::int64_t>(position) * half),
        half_(half) {}

  // Element d of the head, rotated; those from 2 half on are as they were.
  __device__ float element(const S* head, int d) const {
    const float x = to_float(head[d]);
    if (d >= 2 * half_) return x;
    if (d < half_) return rotated_low(x, to_float(head[d + half_]), cos_[d], sin_[d]);
    return rotated_high(to_float(head[d - half_]), x, cos_[d - half_], sin_[d - half_]);
  }

  // Elements 2 w and 2 w + 1 of 16 bits, rotated and rounded. The head is aligned to 4 bytes.
  __device__ unsigned word(const S* head, int w) const {
    const unsigned* words = reinterpret_cast<const unsigned*>(head);
    if (2 * w >= 2 * half_) return words[w];
    if (half_ % 2 != 0) return pack<S>(element(head, 2 * w), element(head, 2 * w + 1));
    // Both elements are of the same half, and so are their partners. cos_ and sin_ are aligned to 8 bytes, since `half` is even.
    const bool low = 2 * w < half_;
    const int angle = low ? w : w - half_ / 2;
    const float2 x = unpack<S>(words[w]), partner = unpack<S>(words[low ? w + half_ / 2 : angle]);
    const float2 c = reinterpret_cast<const float2*>(cos_)[angle], s = reinterpret_cast<const float2*>(sin_)[angle];
    if (low) return pack<S>(rotated_low(x.x, partner.x, c.x, s.x), rotated_low(x.y, partner.y, c.y, s.y));
    return pack<S>(rotated_high(partner.x, x.x, c.x, s.x), rotated_high(partner.y, x.y, c.y, s.y));
  }

 private:
  const float *cos_, *sin_;
  int half_;
};

}  // namespace weft::cuda
