// Online softmax over cached positions, in a group of lanes that share them.
#pragma once

#include "llmc/cuda/fused/packed.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// The largest score, the sum of 2^(score - largest), and the sum of these weights times the values, in this lane's
// dimensions.
template <typename S>
struct SoftmaxState {
  float largest = -INFINITY, sum = 0, out[kLaneElements] = {};

  // Adds two positions; a score of -INFINITY leaves one out.
  __device__ __forceinline__ void add(float score0, float score1, const uint4& v0, const uint4& v1) {
    const float most = fmaxf(largest, fmaxf(score0, score1));
    const float base = most == -INFINITY ? 0.0f : most;
    const float keep = exp2f(largest - base), p0 = exp2f(score0 - base), p1 = exp2f(score1 - base);
    float a[kLaneElements], b[kLaneElements];
    widen<S>(v0, a);
    widen<S>(v1, b);
    largest = most;
    sum = fmaf(sum, keep, p0 + p1);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) out[j] = fmaf(out[j], keep, fmaf(p0, a[j], p1 * b[j]));
  }

  // Merges the states of the warp's groups of kLanes lanes and stores the warp's to `state` (merge.cuh).
  template <int kLanes>
  __device__ __forceinline__ void store(float* state, int lane, int HS) {
#pragma unroll
    for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
      const float other = __shfl_xor_sync(~0u, largest, offset), both = fmaxf(largest, other);
      const float base = both == -INFINITY ? 0.0f : both, keep = exp2f(largest - base);
      sum *= keep;
      sum += __shfl_xor_sync(~0u, sum, offset);
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        out[j] *= keep;
        out[j] += __shfl_xor_sync(~0u, out[j], offset);
      }
      largest = both;
    }
    if (lane < kLanes && lane * kLaneElements < HS) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) state[2 + lane * kLaneElements + j] = out[j];
    }
    if (lane == 0) state[0] = largest, state[1] = sum;
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
