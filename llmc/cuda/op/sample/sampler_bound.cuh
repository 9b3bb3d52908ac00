// The ranks that top-k and top-p keep are all those from a bound up. It is found without sorting, by narrowing a
// bracket of ranks.
#pragma once

#include <cstdint>

#include "llmc/cuda/op/sample/sampler_block.cuh"

namespace weft::cuda::sampler_detail {

// Chooses pivots strictly between lo and hi; needs hi - lo >= 2. Returns whether all are values: such a pivot is the
// rank of no id, and above it are exactly the logits >= values[j].
template <typename Shape>
__device__ inline bool SampleBlock<Shape>::choose_pivots(std::uint64_t (&pivots)[kPivots], float (&values)[kPivots],
                                                         std::uint64_t lo, std::uint64_t hi) const {
  const std::uint64_t middle = lo + (hi - lo) / 2;
  const auto between = [&](std::uint64_t pivot) { return pivot > lo && pivot < hi; };
  pivots[0] = middle >> 32 << 32;
  values[0] = logit_of(static_cast<std::uint32_t>(middle >> 32));
  bool by_value = between(pivots[0]) && middle >> 32 > ordered_key(-INFINITY);
  if (!by_value) pivots[0] = middle;
  // The bracket's ends as logits, clamped to actual logits.
  const double low = fmax(static_cast<double>(logit_of(static_cast<std::uint32_t>(lo >> 32))), lightest);
  const double high =
      fmin(static_cast<double>(logit_of(static_cast<std::uint32_t>(hi >> 32))), static_cast<double>(greatest));
#pragma unroll
  for (int j = 1; j < kPivots; ++j) {
    values[j] = static_cast<float>(low + (high - low) * (static_cast<double>(j) / kPivots));
    std::uint64_t pivot = static_cast<std::uint64_t>(ordered_key(values[j])) << 32;
    by_value &= between(pivot);
    if (!between(pivot)) pivot = lo + (hi - lo) / kPivots * static_cast<unsigned>(j);
    if (!between(pivot)) pivot = middle;
    pivots[j] = pivot;
  }
  return by_value;
}

// One batch of the first pass, in which all logits are in the bracket and no candidates are collected.
template <typename Shape>
template <typename Measure>
__device__ inline void SampleBlock<Shape>::measure_all(std::uint64_t (&sums)[kSums], float (&logits_)[kBatch],
                                                       const Measure& measure, const float (&values)[kPivots]) const {
  in_groups<4>(logits_, [&](float logit, int) {
    const std::uint64_t size = measure(logit);
#pragma unroll
    for (int j = 0; j < kPivots; ++j) sums[j] += logit >= values[j] ? size : 0;
    sums[kPivots] += size;
  });
}

// Adds each of the sums over all threads and counts the candidates; all threads then find the results in
// scratch.sums.
template <typename Shape>
__device__ inline void SampleBlock<Shape>::add_up(const std::uint64_t (&sums)[kSums]) {
  // In each of three rounds a lane gives away half of its sums, so that in the end four lanes hold parts of each sum.
  static_assert(kPivots == 8);
  std::uint64_t part[kPivots];
#pragma unroll
  for (int j = 0; j < kPivots; ++j) part[j] = sums[j];
#pragma unroll
  for (int half = kPivots / 2; half > 0; half /= 2) {
    const bool upper = (lane & 4 * half) != 0;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const std::uint64_t given = upper ? part[j] : part[j + half], kept = upper ? part[j + half] : part[j];
      part[j] = kept + __shfl_xor_sync(~0u, given, 4 * half);
    }
  }
  part[0] += __shfl_xor_sync(~0u, part[0], 2);
  part[0] += __shfl_xor_sync(~0u, part[0], 1);
  if (lane % 4 == 0) scratch.warp_sums[warp][lane / 4] = part[0];
  const std::uint64_t all = warp_sum(sums[kPivots]);
  if (lane == 0) scratch.warp_sums[warp][kPivots] = all;
  sync();
  std::uint64_t* of_this_block = kCluster ? scratch.outbox[outbox_area] : scratch.sums;
  for (int j = warp; j < kSums; j += kWarps) {
    const std::uint64_t sum = warp_sum(lane < kWarps ? scratch.warp_sums[lane][j] : 0);
    if (lane == 0) of_this_block[j] = sum;
  }
  if (thread == 0) {
    of_this_block[kSums] = static_cast<std::uint64_t>(scratch.counts[turn]);
    scratch.counts[turn ^ 1] = 0;  // its last readers have passed the barrier above
  }
  if constexpr (kCluster) {
    exchange();
    if (thread <= kSums) {
      std::uint64_t sum = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const std::uint64_t one = messages.from(b)[thread];
        if (thread == kSums) scratch.counts_of_blocks[b] = static_cast<int>(one);
        sum += one;
      }
      scratch.sums[thread] = sum;
    }
  }
  sync();
}

template <typename Shape>
template <typename Measure, typename Need>
__device__ inline void SampleBlock<Shape>::raise_bound(const Measure& measure, const Need& need_of) {
  std::uint64_t lo = bound, hi = top + 1;  // the answer is in [lo, hi)
  std::uint64_t above = 0, need = 0;       // above: measure of the ranks from hi on
  bool first_pass = true;
  while (hi - lo > 1) {
    std::uint64_t pivots[kPivots], sums[kSums] = {};
    float values_of_pivots[kPivots];
    const bool by_value = choose_pivots(pivots, values_of_pivots, lo, hi);
    const bool all = first_pass && bound == 0 && by_value && V > Scratch::kCandidates;
    const auto low_key = static_cast<std::uint32_t>(lo >> 32), high_key = static_cast<std::uint32_t>(hi >> 32);
    const float low = low_key > ordered_key(-INFINITY) ? logit_of(low_key) : -INFINITY;
    const float high = fminf(logit_of(high_key), greatest);
    const auto look_at = [&](std::uint64_t rank, bool used) {
      const float logit = logit_of(static_cast<std::uint32_t>(rank >> 32));
      const std::uint64_t size = used && rank >= lo && rank < hi ? measure(logit) : 0;
      const unsigned inside = __ballot_sync(~0u, size > 0);
      if (inside == 0) return;
      int slot = 0;
      if (lane == 0) slot = atomicAdd(&scratch.counts[turn], __popc(inside));
      slot = __shfl_sync(~0u, slot, 0) + __popc(inside & ((1u << lane) - 1));
      if (size > 0 && slot < Scratch::kCandidates) scratch.candidates[slot] = {rank, size};
#pragma unroll
      for (int j = 0; j < kPivots; ++j) sums[j] += rank >= pivots[j] ? size : 0;
      sums[kPivots] += size;
    };
    int found = 0;
    for_each_batch([&](float(&values)[kBatch], std::int32_t place) {
      if (all) return measure_all(sums, values, measure, values_of_pivots);
      collect(values, place, low, high, found, look_at);
    });
    use_rest(found, look_at);
    add_up(sums);
    const std::uint64_t count = all ? static_cast<std::uint64_t>(V) : scratch.sums[kSums];
    turn ^= 1;
    if (first_pass) {
      const std::uint64_t total = scratch.sums[kPivots];
      need = need_of(total);
      if (total < need) break;
      first_pass = false;
    }
    if (count <= Scratch::kCandidates) {
      lo = rank_among_candidates(static_cast<int>(count), above, need);
      break;
    }
#pragma unroll
    for (int j = 0; j < kPivots; ++j) {
      if (above + scratch.sums[j] >= need && pivots[j] > lo) lo = pivots[j];
    }
    std::uint64_t next_above = above;
#pragma unroll
    for (int j = 0; j < kPivots; ++j) {
      if (above + scratch.sums[j] < need && pivots[j] < hi) hi = pivots[j], next_above = above + scratch.sums[j];
    }
    above = next_above;
  }
  bound = lo;
  sync();  // no thread may overwrite the scratch while another still reads it
}

// The rank of the candidate with which the measure, counted from the top, reaches `need`; `above`: the measure above
// all candidates.
template <typename Shape>
__device__ inline std::uint64_t SampleBlock<Shape>::rank_among_candidates(int count, std::uint64_t above,
                                                                          std::uint64_t need) {
  const typename Scratch::Candidate* candidates = scratch.candidates;
  if constexpr (kCluster) {
    messages.gather(scratch.all_candidates, scratch.candidates, scratch.counts_of_blocks);
    candidates = scratch.all_candidates;
  }
  constexpr int kSplit =
      kThreads > Scratch::kCandidates ? kThreads / Scratch::kCandidates : 1;  // threads that share a candidate
  for (int first = 0; first < count; first += kThreads / kSplit) {
    const int i = first + thread / kSplit;
    const typename Scratch::Candidate own = candidates[min(i, count - 1)];
    std::uint64_t before = 0;
    for (int j = thread % kSplit; j < count; j += kSplit) {
      const typename Scratch::Candidate other = candidates[j];
      before += other.rank > own.rank ? other.measure : 0;
    }
#pragma unroll
    for (int offset = 1; offset < kSplit; offset *= 2) before += __shfl_xor_sync(~0u, before, offset);
    before += above;
    if (i < count && before < need && before + own.measure >= need) scratch.answer = own.rank;
  }
  sync();
  return scratch.answer;
}

}  // namespace weft::cuda::sampler_detail
