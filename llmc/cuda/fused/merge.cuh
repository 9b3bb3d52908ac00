// Merging softmax states of a head: those of a block's warps, then those of the splits of its context, one a block. A
// state is HS + 2 numbers: the largest score, the sum of 2^(score - largest), and the sum of these weights times the
// values.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Stores two values of a split, each tagged with the step, for the block that merges the splits.
__device__ inline void store_pair(std::uint64_t* to, float first, float second, unsigned step) {
  const std::uint64_t number = static_cast<std::uint64_t>(step) << 32;
  store_relaxed(to, number | __float_as_uint(first));
  store_relaxed(to + 1, number | __float_as_uint(second));
}

// The sum of a head's splits in two neighbouring dimensions. Splits are added in order, so that the bits do not depend
// on which block stores first.
class SplitSum {
 public:
  // Adds splits 0 to `splits` - 1 in dimensions d and d + 1. Other blocks store them: wait(try_once) polls until they
  // are tagged with `step`, and returns false if the launch is aborted; so does this function then. `stored`: the
  // states of the head.
  template <typename Wait>
  __device__ __forceinline__ bool add_stored(const std::uint64_t* stored, int splits, int HS, int d, unsigned step,
                                             const Wait& wait) {
    constexpr int kAhead = 8;
    for (int begin = 0; begin < splits; begin += kAhead) {
      ulonglong2 state[kAhead], output[kAhead];
      const bool came = wait([&] {
        bool good = true;
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
          const std::uint64_t* from = stored + min(begin + s, splits - 1) * (HS + 2);
          state[s] = load_relaxed_x2(from);
          output[s] = load_relaxed_x2(from + 2 + d);
        }
        const auto is_here = [&](std::uint64_t word) { return static_cast<unsigned>(word >> 32) == step; };
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
          good = good && is_here(state[s].x) && is_here(state[s].y) && is_here(output[s].x) && is_here(output[s].y);
        }
        return good;
      });
      if (!came) return false;
      const auto value = [](std::uint64_t word) { return __uint_as_float(static_cast<unsigned>(word)); };
      float next = largest_;
#pragma unroll
      for (int s = 0; s < kAhead; ++s) next = fmaxf(next, value(state[s].x));
      const float base = raise(next);
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        const float weight = begin + s < splits ? exp2f(value(state[s].x) - base) : 0.0f;
        add_weighted(weight, value(state[s].y), value(output[s].x), value(output[s].y));
      }
    }
    return true;
  }
  // Adds this block's own split, the last one.
  __device__ __forceinline__ void add(float largest, float sum, float x, float y) {
    const float base = raise(fmaxf(largest_, largest));
    add_weighted(exp2f(largest - base), sum, x, y);
  }
  __device__ __forceinline__ float2 result() const {
    return make_float2(out_[0] / sum_, out_[1] / sum_);
  }

 private:
  // Rescales the sums to a new largest score; returns what weights are relative to.
  __device__ __forceinline__ float raise(float to) {
    const float base = to == -INFINITY ? 0.0f : to, keep = exp2f(largest_ - base);
    largest_ = to, sum_ *= keep, out_[0] *= keep, out_[1] *= keep;
    return base;
  }
  __device__ __forceinline__ void add_weighted(float weight, float sum, float x, float y) {
    sum_ = fmaf(sum, weight, sum_);
    out_[0] = fmaf(x, weight, out_[0]);
    out_[1] = fmaf(y, weight, out_[1]);
  }

  float largest_ = -INFINITY, sum_ = 0, out_[2] = {};
};

// A helper warp's merge of an item, a head and one split of its context. `states`: of the consumer warps, in shared
// memory; `stored`: of the head's splits, in global memory. The block with the last split merges all of them, with
// wait() as in SplitSum, and calls finish(d, values) for dimensions d and d + 1 of the result; the others store theirs.
// Returns false if the launch is aborted.
template <typename Wait, typename Finish>
__device__ __forceinline__ bool merge_work_unit(const float* states, int lane, int warps, int HS, std::uint64_t* stored,
                                                int split, int splits, unsigned step, const Wait& wait,
                                                const Finish& finish) {
  // Lane w holds the factor by which the state of warp w is rescaled.
  const float own = lane < warps ? states[lane * (HS + 2)] : -INFINITY, largest = warp_max(own);
  const float own_weight = exp2f(own - (largest == -INFINITY ? 0.0f : largest));
  const float sum = warp_sum(lane < warps ? states[lane * (HS + 2) + 1] * own_weight : 0.0f);
  for (int first = 0; first < HS; first += kWarpSize * 2) {
    const bool inside = first + lane * 2 < HS;
    const int d = inside ? first + lane * 2 : HS - 2;
    float out[2] = {};
#pragma unroll
    for (int w = 0; w < kMaxWarps; ++w) {
      const float weight = __shfl_sync(~0u, own_weight, w);
      if (w >= warps) continue;
      const float2 state = *reinterpret_cast<const float2*>(states + w * (HS + 2) + 2 + d);
      out[0] = fmaf(state.x, weight, out[0]);
      out[1] = fmaf(state.y, weight, out[1]);
    }
    if (split < splits - 1) {
      std::uint64_t* to = stored + split * (HS + 2);
      if (inside) store_pair(to + 2 + d, out[0], out[1], step);
      if (first == 0 && lane == 0) store_pair(to, largest, sum, step);
      continue;
    }
    SplitSum merged;
    if (!merged.add_stored(stored, splits - 1, HS, d, step, wait)) return false;
    merged.add(largest, sum, out[0], out[1]);
    if (inside) finish(d, merged.result());
  }
  return true;
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
