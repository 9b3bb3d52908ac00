// The random draw among the kept ids.
#pragma once

#include <cstdint>

#include "llmc/cuda/op/sample/sampler_block.cuh"

namespace weft::cuda::sampler_detail {

template <typename Shape>
__device__ inline std::uint64_t SampleBlock<Shape>::kept_weight(std::uint64_t rank) const {
  const std::uint64_t w = weight(logit_of(static_cast<std::uint32_t>(rank >> 32)));
  return rank >= bound && w >= plan.least_weight ? w : 0;
}
// Sum of the kept weights of the ids from place `from` to `end`, over the warp.
template <typename Shape>
__device__ inline std::uint64_t SampleBlock<Shape>::kept_weights(std::int32_t from, std::int32_t end) const {
  const float low = logit_of(static_cast<std::uint32_t>(bound >> 32));
  std::uint64_t sum = 0;
  int found = 0;
  const auto add = [&](std::uint64_t rank, bool used) { sum += used ? kept_weight(rank) : 0; };
  for (std::int32_t place = from; place < end; place += kWarpBatch) {
    float values[kBatch];
    load_batch(values, place, end);
    if (bound > 0) {
      collect(values, place, low, INFINITY, found, add);
      continue;
    }
    in_groups<4>(values, [&](float logit, int) {
      const std::uint64_t w = weight(logit);
      sum += w >= plan.least_weight ? w : 0;
    });
  }
  use_rest(found, add);
  return warp_sum(sum);
}

// Inclusive prefix sum over the lanes.
template <typename Shape>
__device__ inline std::uint64_t SampleBlock<Shape>::running_sum(std::uint64_t value) const {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const std::uint64_t before = __shfl_up_sync(~0u, value, offset);
    if (lane >= offset) value += before;
  }
  return value;
}

template <typename Shape>
__device__ inline std::int32_t SampleBlock<Shape>::draw(std::int64_t position) {
  std::int32_t begin = 0, size = V + skew;  // places
  std::uint64_t target = 0;
  // The first level divides the ids among the warps of all blocks; the remaining levels are computed by the first
  // block alone.
  for (int level = 0; level == 0 || size > kWarpSize; ++level) {
    constexpr int kAllWarps = kWarps * kBlocks, kOfLane = (kAllWarps + kWarpSize - 1) / kWarpSize;
    const bool everybody = kCluster && level == 0;
    const int pieces = everybody ? kAllWarps : kWarps;
    const std::int32_t piece = static_cast<std::int32_t>(ceil_div(ceil_div(size, pieces), kWarpSize)) * kWarpSize;
    const std::int32_t from = begin + (everybody ? block * kWarps + warp : warp) * piece;
    const std::uint64_t sum = kept_weights(from, min(from + piece, begin + size));
    std::uint64_t own[kOfLane] = {};  // sums of consecutive pieces
    int chosen = 0;
    if (everybody) {
      if (lane == 0) scratch.outbox[outbox_area][warp] = sum;
      exchange();
      if (block != 0) return 0;
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        const int from_warp = lane * kOfLane + k;
        if (from_warp < kAllWarps) own[k] = messages.from(from_warp / kWarps)[from_warp % kWarps];
      }
    } else {
      if (lane == 0) scratch.range_sums[level % 2][warp] = sum;
      sync();
      own[0] = lane < kWarps ? scratch.range_sums[level % 2][lane] : 0;
    }
    std::uint64_t of_lane = 0;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) of_lane += own[k];
    const std::uint64_t running = running_sum(of_lane);
    if (level == 0) {
      const std::uint64_t total = __shfl_sync(~0u, running, kWarpSize - 1);
      target = sampling_target(sampling_bits(plan.seed, position), total);
    }
    chosen = __ffs(static_cast<int>(__ballot_sync(~0u, running > target))) - 1;
    target -= __shfl_sync(~0u, running - of_lane, chosen);
    if (everybody) {
      const int lane_chosen = chosen;
      chosen *= kOfLane;
      for (int k = 0; k + 1 < kOfLane; ++k) {
        const std::uint64_t one = __shfl_sync(~0u, own[k], lane_chosen);
        if (target < one) break;
        target -= one;
        ++chosen;
      }
    }
    size = min(piece, size - chosen * piece);
    begin += chosen * piece;
  }
  const std::int32_t id = begin + lane - skew;
  const bool used = lane < size && id >= 0;
  const std::uint64_t running = running_sum(used ? kept_weight(rank_of(read(logits + id), id)) : 0);
  return begin - skew + __ffs(static_cast<int>(__ballot_sync(~0u, running > target))) - 1;
}

}  // namespace weft::cuda::sampler_detail
