// The first pass over the logits.
#pragma once

#include <cstdint>

#include "llmc/cuda/op/sample/sampler_block.cuh"

namespace weft::cuda::sampler_detail {

template <typename Shape>
__device__ inline SampledToken SampleBlock<Shape>::find_greatest() {
  float highest = -INFINITY, least = INFINITY;
  std::int32_t highest_id = 0;
  bool not_a_number = false;
  for_each_batch([&](const float(&values)[kBatch], std::int32_t place) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float logit = values[i];
      not_a_number |= !(logit == logit);
      if (logit > highest) highest = logit, highest_id = id_in_batch(place, i);
      if (logit != -INFINITY) least = fminf(least, logit);
    }
  });
  std::uint64_t best = rank_of(highest, highest_id);
  unsigned flags = not_a_number ? 1u : 0u;
  const auto reduce = [&] {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
      best = other > best ? other : best;
      least = fminf(least, __shfl_xor_sync(~0u, least, offset));
      flags |= __shfl_xor_sync(~0u, flags, offset);
    }
  };
  const auto write = [&](std::uint64_t* words) {
    words[0] = best, words[1] = __float_as_uint(least), words[2] = flags;
  };
  const auto read_back = [&](const std::uint64_t* words) {
    best = words[0], least = __uint_as_float(static_cast<unsigned>(words[1])), flags = static_cast<unsigned>(words[2]);
  };
  reduce();
  if (lane == 0) write(scratch.warp_sums[warp]);
  if (thread == 0) scratch.counts[0] = scratch.counts[1] = 0;
  sync();
  // Every warp repeats the end of the reduction for itself, which saves a second barrier.
  read_back(scratch.warp_sums[lane < kWarps ? lane : 0]);
  reduce();
  if constexpr (kCluster) {
    if (thread == 0) write(scratch.outbox[outbox_area]);
    exchange();
    read_back(messages.from(lane % kBlocks));
    reduce();
  } else {
    sync();  // the scratch is free again
  }
  top = best;
  greatest = logit_of(static_cast<std::uint32_t>(best >> 32));
  lightest = fmax(static_cast<double>(least), static_cast<double>(greatest) - (kWeightBits + 1.0) / plan.scale);
  if (flags != 0) return {0, SampleError::not_a_number};
  if (greatest == INFINITY) return {0, SampleError::infinite};
  if (V <= 0 || greatest == -INFINITY) return {0, SampleError::nothing_finite};
  return {id_of(best), SampleError::none};
}

}  // namespace weft::cuda::sampler_detail
