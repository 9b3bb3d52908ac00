// The arithmetic of RoPE: one order of operations for all kernels that rotate, and so the same bits.
#pragma once

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/fragments.cuh"

namespace weft::cuda {

// Rotates an element with its partner of the pair; the sine is negative for the lower element. Computes fma(x, cos,
// round(partner * sin)) by intrinsics: written with operators, the compiler might contract it differently in different
// kernels.
__device__ inline float rotated(float x, float partner, float cosine, float signed_sine) {
  return __fmaf_rn(x, cosine, __fmul_rn(partner, signed_sine));
}

// Rotates both elements of a pair by an angle; by the opposite angle with the negative sine.
__device__ inline void rotate_pair(float& low, float& high, float cosine, float sine) {
  const float new_low = rotated(low, high, cosine, -sine);
  high = rotated(high, low, cosine, sine);
  low = new_low;
}

// Element d of a head, rotated by cos and sin [half] of a position; elements from 2 half on are unchanged.
template <typename S>
__device__ float rotated_element(const S* head, int d, const float* cos, const float* sin, int half) {
  if (d >= 2 * half) return to_float(head[d]);
  if (d < half) return rotated(to_float(head[d]), to_float(head[d + half]), cos[d], -sin[d]);
  return rotated(to_float(head[d]), to_float(head[d - half]), cos[d - half], sin[d - half]);
}

// A warp's rotation of heads of 16-bit elements at one position. A lane has words lane, lane + 32, ... of a head; word
// w is elements 2 w and 2 w + 1. All loads are unconditional, so that those of several heads can be in flight together;
// lanes without a word load the last one.
template <typename S, int HS>
class WarpRotation {
 public:
  static constexpr int kWords = ceil_div(HS / 2, kWarpSize);
  static __device__ int word(int i) { return threadIdx.x % kWarpSize + i * kWarpSize; }

  // cos, sin: [positions, half], aligned to 8 bytes.
  __device__ WarpRotation(const float* cos, const float* sin, int half, int position) : odd_(half % 2 != 0) {
    cos += static_cast<std::int64_t>(position) * half;
    sin += static_cast<std::int64_t>(position) * half;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int d = 2 * min(word(i), HS / 2 - 1);
      rotates_[i] = d < 2 * half;  // both elements of a word, or neither
      const int low[2] = {d < half, d + 1 < half};
      const int angle[2] = {rotates_[i] ? d - (low[0] ? 0 : half) : 0, rotates_[i] ? d + 1 - (low[1] ? 0 : half) : 0};
      partner_[i] = rotates_[i] ? d + (low[0] ? half : -half) : d;
      next_partner_[i] = rotates_[i] ? d + 1 + (low[1] ? half : -half) : d + 1;
      if (odd_) {
        c_[i] = {cos[angle[0]], cos[angle[1]]};
        s_[i] = {sin[angle[0]], sin[angle[1]]};
      } else if (half > 0) {
        c_[i] = *reinterpret_cast<const float2*>(cos + angle[0]);
        s_[i] = *reinterpret_cast<const float2*>(sin + angle[0]);
      }
      if (low[0]) s_[i].x = -s_[i].x;
      if (low[1]) s_[i].y = -s_[i].y;
    }
  }

  struct Head {
    unsigned own[kWords], partner[kWords];
  };
  // The head is aligned to 4 bytes.
  __device__ Head load(const S* head) const {
    const unsigned* words = reinterpret_cast<const unsigned*>(head);
    const unsigned short* elements = reinterpret_cast<const unsigned short*>(head);
    Head loaded;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      loaded.own[i] = words[min(word(i), HS / 2 - 1)];
      loaded.partner[i] =
          odd_ ? elements[partner_[i]] | unsigned{elements[next_partner_[i]]} << 16 : words[partner_[i] / 2];
    }
    return loaded;
  }
  // The lane's i-th word, rotated and rounded.
  __device__ unsigned rotate(const Head& head, int i) const {
    if (!rotates_[i]) return head.own[i];
    const float2 x = unpack<S>(head.own[i]), partner = unpack<S>(head.partner[i]);
    return pack<S>(rotated(x.x, partner.x, c_[i].x, s_[i].x), rotated(x.y, partner.y, c_[i].y, s_[i].y));
  }

 private:
  bool odd_, rotates_[kWords];
  int partner_[kWords], next_partner_[kWords];  // as element indices
  float2 c_[kWords] = {}, s_[kWords] = {};
};

}  // namespace weft::cuda
