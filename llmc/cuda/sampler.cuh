// Sampling by one group of threads, on its own (sampler.cu) or inside another kernel. The choice is the host's
// (llmc/infer/sampler.h) bit for bit: weights are integers, and an integer sum does not depend on its order.
//
// An id's rank is its logit and, among equals, the lower id: one 64-bit number, so what top-k and top-p keep is "all ranks
// from a bound up". The bound is found without sorting:
//  - A pass over the logits measures (by count for top-k, by weight for top-p) what lies above each of eight pivots between
//    the bracket's ends, and the bracket closes around the bound. Seven pivots divide the range of logit values, which
//    suits the logits of a model; one divides the range of ranks, so that 64 passes are enough whatever the logits are.
//    As long as all eight are values a comparison of two floats decides; ids only count once the values are equal.
//  - As soon as few enough ids lie in the bracket, their order is found by comparing all pairs.
// Then the weights of the kept ids are summed range by range, the range that holds the target is divided again, and so on
// down to one id.
//
// Cost for V logits: one pass for the greatest, one with V weights (a double-precision exponential each) unless top-k
// alone decides, and three to five that skip what lies outside of the bracket.
#pragma once

#include <cstdint>

#include "llmc/base/sampling.h"
#include "llmc/base/sampling_math.h"
#include "llmc/cuda/common.cuh"

namespace weft::cuda {

// Shared memory of sample_block: 4 to 8 KB.
template <int kThreads>
struct SamplerScratch {
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kPivots = 8;
  static constexpr int kSums = kPivots + 1;  // and the total
  static constexpr int kCandidates = 256;

  struct Candidate {
    std::uint64_t rank, measure;
  };
  Candidate candidates[kCandidates];
  std::uint64_t warp_sums[kWarps][kSums];
  std::uint64_t sums[kSums];
  std::uint64_t range_sums[2][kWarps];
  std::uint64_t answer;
  int counts[2];  // candidates found, by turns
};

struct SampledToken {
  std::int32_t id;  // 0 if there is an error
  SampleError error;
};

namespace sampler_detail {

// Greater for a greater logit; -0 and +0 are equal.
__device__ inline std::uint32_t ordered_key(float logit) {
  std::uint32_t bits = __float_as_uint(logit);
  if (bits == 0x80000000u) bits = 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}
__device__ inline std::uint64_t rank_of(float logit, std::int32_t id) {
  return static_cast<std::uint64_t>(ordered_key(logit)) << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(id));
}
__device__ inline std::int32_t id_of(std::uint64_t rank) {
  return static_cast<std::int32_t>(0xFFFFFFFFu - static_cast<std::uint32_t>(rank));
}

__device__ inline std::uint64_t warp_sum(std::uint64_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <int kThreads, int kBarrier, bool kThroughL1>
struct SampleBlock {
  using Scratch = SamplerScratch<kThreads>;
  static constexpr int kWarps = Scratch::kWarps, kPivots = Scratch::kPivots, kSums = Scratch::kSums;
  static constexpr int kAhead = 4;                               // 16-byte loads of a thread before it uses the first
  static constexpr int kBatch = 4 * kAhead;                      // logits
  static constexpr std::int32_t kWarpBatch = kBatch * kWarpSize;  // logits of a warp
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024);

  const float* logits;
  std::int32_t V;
  const SamplingPlan& plan;
  Scratch& scratch;
  int thread, warp, lane;
  int skew;                 // logits lie so many places past a multiple of 16 bytes; place = id + skew
  int turn = 0;             // of Scratch::counts
  float greatest = 0;       // logit
  float least_finite = 0;   // logit
  std::uint64_t bound = 0;  // ranks from here on are kept
  std::uint64_t top = 0;    // rank of the greatest

  __device__ void sync() const { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory"); }

  // In a persistent kernel another multiprocessor may just have written the logits: there L1 must not answer.
  template <typename Word>
  static __device__ Word read(const Word* address) {
    return kThroughL1 ? *address : __ldcg(address);
  }

  // The lane's logits of the warp's batch that begins at `place`, -infinity from place `end` on and where there is no id.
  __device__ void load_batch(float (&values)[kBatch], std::int32_t place, std::int32_t end) const {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const std::int32_t first = place + (u * kWarpSize + lane) * 4, id = first - skew;
      if (id >= 0 && first + 4 <= end) {
        const float4 four = read(reinterpret_cast<const float4*>(logits + id));
        values[4 * u] = four.x, values[4 * u + 1] = four.y, values[4 * u + 2] = four.z, values[4 * u + 3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          values[4 * u + i] = id + i >= 0 && first + i < end ? read(logits + id + i) : -INFINITY;
      }
    }
  }
  __device__ std::int32_t id_in_batch(std::int32_t place, int i) const {
    return place + (i / 4 * kWarpSize + lane) * 4 + i % 4 - skew;
  }

  // use(values, place) for all batches, the ids of a thread rising. All lanes of a warp come together.
  template <typename Use>
  __device__ void for_each_batch(const Use& use) const {
    for (std::int32_t place = warp * kWarpBatch; place < V + skew; place += kWarps * kWarpBatch) {
      float values[kBatch];
      load_batch(values, place, V + skew);
      use(values, place);
    }
  }

  __device__ std::uint64_t weight(float logit) const { return sampling_weight(logit, greatest, plan.scale); }
  // Whether the weight is above 0; most logits do not need the exponential for that.
  __device__ bool has_weight(float logit) const {
    const double exponent = (static_cast<double>(logit) - static_cast<double>(greatest)) * plan.scale;
    return exponent > -static_cast<double>(kWeightBits) || weight(logit) > 0;
  }

  // The greatest logit and its lowest id, the least finite logit, and whether all of them are usable.
  __device__ SampledToken find_greatest() {
    float highest = -INFINITY, least = INFINITY;
    std::int32_t highest_id = 0;
    bool not_a_number = false;
    for_each_batch([&](const float (&values)[kBatch], std::int32_t place) {
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
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
      best = other > best ? other : best;
      least = fminf(least, __shfl_xor_sync(~0u, least, offset));
      flags |= __shfl_xor_sync(~0u, flags, offset);
    }
    if (lane == 0) {
      scratch.warp_sums[warp][0] = best;
      scratch.warp_sums[warp][1] = __float_as_uint(least);
      scratch.warp_sums[warp][2] = flags;
    }
    if (thread == 0) scratch.counts[0] = scratch.counts[1] = 0;
    sync();
    // Every warp repeats the end of the reduction: no second barrier before the results are known to all.
    const int from = lane < kWarps ? lane : 0;
    best = scratch.warp_sums[from][0];
    least = __uint_as_float(static_cast<unsigned>(scratch.warp_sums[from][1]));
    flags = static_cast<unsigned>(scratch.warp_sums[from][2]);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
      best = other > best ? other : best;
      least = fminf(least, __shfl_xor_sync(~0u, least, offset));
      flags |= __shfl_xor_sync(~0u, flags, offset);
    }
    sync();  // the scratch is free again
    top = best;
    greatest = logit_of(static_cast<std::uint32_t>(best >> 32));
    least_finite = least;
    if (flags != 0) return {0, SampleError::not_a_number};
    if (greatest == INFINITY) return {0, SampleError::infinite};
    if (V <= 0 || greatest == -INFINITY) return {0, SampleError::nothing_finite};
    return {id_of(best), SampleError::none};
  }

  // Pivots strictly between lo and hi; needs hi - lo >= 2. True if all of them are values: ranks of no id, above which lie
  // the logits that are at least values[j].
  __device__ bool choose_pivots(std::uint64_t (&pivots)[kPivots], float (&values)[kPivots], std::uint64_t lo,
                                std::uint64_t hi) const {
    const std::uint64_t middle = lo + (hi - lo) / 2;
    const auto between = [&](std::uint64_t pivot) { return pivot > lo && pivot < hi; };
    pivots[0] = middle >> 32 << 32;
    values[0] = logit_of(static_cast<std::uint32_t>(middle >> 32));
    bool by_value = between(pivots[0]) && middle >> 32 > ordered_key(-INFINITY);
    if (!by_value) pivots[0] = middle;
    // The bracket's ends as logits, where they are logits at all: ids that weigh something are above `lightest`.
    const double lightest = fmax(static_cast<double>(least_finite),
                                 static_cast<double>(greatest) - (kWeightBits + 1.0) / plan.scale);
    const double low = fmax(static_cast<double>(logit_of(static_cast<std::uint32_t>(lo >> 32))), lightest);
    const double high = fmin(static_cast<double>(logit_of(static_cast<std::uint32_t>(hi >> 32))),
                             static_cast<double>(greatest));
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

  // One batch of a first pass: everything is in the bracket, and nothing is gathered.
  template <typename Measure>
  __device__ void measure_all(std::uint64_t (&sums)[kSums], const float (&logits_)[kBatch], const Measure& measure,
                              const float (&values)[kPivots]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::uint64_t size = measure(logits_[i]);
#pragma unroll
      for (int j = 0; j < kPivots; ++j) sums[j] += logits_[i] >= values[j] ? size : 0;
      sums[kPivots] += size;
    }
  }

  // Adds each of the sums over all threads; the results are in scratch.sums for everybody.
  __device__ void add_up(const std::uint64_t (&sums)[kSums]) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const std::uint64_t sum = warp_sum(sums[j]);
      if (lane == 0) scratch.warp_sums[warp][j] = sum;
    }
    sync();
    for (int j = warp; j < kSums; j += kWarps) {
      const std::uint64_t sum = warp_sum(lane < kWarps ? scratch.warp_sums[lane][j] : 0);
      if (lane == 0) scratch.sums[j] = sum;
    }
    if (thread == 0) scratch.counts[turn ^ 1] = 0;  // its last readers have passed this barrier
    sync();
  }

  // Raises `bound` to the greatest rank r such that the ranks from r on, none below the old bound, measure at least
  // need(total measure). Leaves it where it is if even all of them measure less. measure(logit) is 0 for ids that weigh
  // nothing.
  template <typename Measure, typename Need>
  __device__ void raise_bound(const Measure& measure, const Need& need_of) {
    std::uint64_t lo = bound, hi = top + 1;  // the answer is in [lo, hi)
    std::uint64_t above = 0, need = 0;       // above: measure of the ranks from hi on
    bool first_pass = true;
    while (hi - lo > 1) {
      std::uint64_t pivots[kPivots], sums[kSums] = {};
      float values_of_pivots[kPivots];
      const bool by_value = choose_pivots(pivots, values_of_pivots, lo, hi);
      const bool all = first_pass && bound == 0 && by_value && V > Scratch::kCandidates;
      // Most logits of a later pass lie outside of the bracket's values and need no more than a look.
      const auto low_key = static_cast<std::uint32_t>(lo >> 32), high_key = static_cast<std::uint32_t>(hi >> 32);
      const float low = low_key > ordered_key(-INFINITY) ? logit_of(low_key) : -INFINITY;
      const float high = fminf(logit_of(high_key), greatest);
      for_each_batch([&](const float (&values)[kBatch], std::int32_t place) {
        if (all) return measure_all(sums, values, measure, values_of_pivots);
        bool any = false;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) any |= values[i] >= low && values[i] <= high;
        if (!__any_sync(~0u, any)) return;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const bool looked_at = values[i] >= low && values[i] <= high;
          if (!__any_sync(~0u, looked_at)) continue;
          const std::uint64_t rank = rank_of(values[i], id_in_batch(place, i));
          const std::uint64_t size = looked_at && rank >= lo && rank < hi ? measure(values[i]) : 0;
          const unsigned inside = __ballot_sync(~0u, size > 0);
          if (inside == 0) continue;
          int slot = 0;
          if (lane == 0) slot = atomicAdd(&scratch.counts[turn], __popc(inside));
          slot = __shfl_sync(~0u, slot, 0) + __popc(inside & ((1u << lane) - 1));
          if (size == 0) continue;
          if (slot < Scratch::kCandidates) scratch.candidates[slot] = {rank, size};
#pragma unroll
          for (int j = 0; j < kPivots; ++j) {
            const bool above_pivot = by_value ? values[i] >= values_of_pivots[j] : rank >= pivots[j];
            sums[j] += above_pivot ? size : 0;
          }
          sums[kPivots] += size;
        }
      });
      add_up(sums);
      const int count = all ? V : scratch.counts[turn];
      turn ^= 1;
      if (first_pass) {
        const std::uint64_t total = scratch.sums[kPivots];
        need = need_of(total);
        if (total < need) break;
        first_pass = false;
      }
      if (count <= Scratch::kCandidates) {
        lo = rank_among_candidates(count, above, need);
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
    sync();  // nobody writes to the scratch while another still reads it
  }

  // The rank of the candidate that brings the measure from above to at least `need`.
  __device__ std::uint64_t rank_among_candidates(int count, std::uint64_t above, std::uint64_t need) {
    for (int i = thread; i < count; i += kThreads) {
      const typename Scratch::Candidate own = scratch.candidates[i];
      std::uint64_t before = above;
      for (int j = 0; j < count; ++j) {
        const typename Scratch::Candidate other = scratch.candidates[j];
        before += other.rank > own.rank ? other.measure : 0;
      }
      if (before < need && before + own.measure >= need) scratch.answer = own.rank;
    }
    sync();
    return scratch.answer;
  }

  __device__ std::uint64_t kept_weight(float logit, std::int32_t id) const {
    const std::uint64_t w = weight(logit);
    return rank_of(logit, id) >= bound && w >= plan.least_weight ? w : 0;
  }

  // The sum over the lanes up to this one.
  __device__ std::uint64_t running_sum(std::uint64_t value) const {
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const std::uint64_t before = __shfl_up_sync(~0u, value, offset);
      if (lane >= offset) value += before;
    }
    return value;
  }

  // The id at which the running sum of the kept weights, in order of id, exceeds the target that the random bits pick.
  __device__ std::int32_t draw(std::int64_t position) {
    std::int32_t begin = 0, size = V + skew;  // places
    std::uint64_t target = 0;
    for (int level = 0; level == 0 || size > kWarpSize; ++level) {
      const std::int32_t piece = static_cast<std::int32_t>(ceil_div(ceil_div(size, kWarps), kWarpSize)) * kWarpSize;
      const std::int32_t from = begin + warp * piece, end = min(from + piece, begin + size);
      std::uint64_t sum = 0;
      for (std::int32_t place = from; place < end; place += kWarpBatch) {
        float values[kBatch];
        load_batch(values, place, end);
        bool any = bound == 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) any |= rank_of(values[i], id_in_batch(place, i)) >= bound;
        if (!__any_sync(~0u, any)) continue;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sum += kept_weight(values[i], id_in_batch(place, i));
      }
      sum = warp_sum(sum);
      if (lane == 0) scratch.range_sums[level % 2][warp] = sum;
      sync();
      const std::uint64_t own = lane < kWarps ? scratch.range_sums[level % 2][lane] : 0;
      const std::uint64_t running = running_sum(own);
      if (level == 0) {
        const std::uint64_t total = __shfl_sync(~0u, running, kWarpSize - 1);
        target = sampling_target(sampling_bits(plan.seed, position), total);
      }
      const int chosen = __ffs(static_cast<int>(__ballot_sync(~0u, running > target))) - 1;
      target -= __shfl_sync(~0u, running - own, chosen);
      size = min(piece, size - chosen * piece);
      begin += chosen * piece;
    }
    const std::int32_t id = begin + lane - skew;
    const bool used = lane < size && id >= 0;
    const std::uint64_t running = running_sum(used ? kept_weight(read(logits + id), id) : 0);
    return begin - skew + __ffs(static_cast<int>(__ballot_sync(~0u, running > target))) - 1;
  }

  __device__ SampledToken sample(std::int64_t position) {
    const SampledToken best = find_greatest();
    if (best.error != SampleError::none || plan.greedy) return best;
    if (plan.top_k > 0) {
      raise_bound([&](float logit) { return has_weight(logit) ? std::uint64_t{1} : 0; },
                  [&](std::uint64_t) { return plan.top_k; });
    }
    if (plan.top_p < 1) {
      raise_bound([&](float logit) { return weight(logit); },
                  [&](std::uint64_t total) { return sampling_share(plan.top_p, total); });
    }
    const std::int32_t id = draw(position);
    sync();  // the scratch may be used for something else
    return {id, SampleError::none};
  }
};

}  // namespace sampler_detail

// The id for `position` from fp32 logits [V] in global memory, 0 <= V < 2^20; llmc/base/sampling.h says which. To be called
// by kThreads threads (a multiple of 32) numbered `thread` from 0 in whole warps, all with the same arguments; each gets the
// result. They meet at hardware barrier kBarrier (0: that of __syncthreads), so other warps of the block may do something
// else. What wrote the logits must be visible to them before; kThroughL1 is for logits that nothing in this kernel wrote.
// `plan` and `position` may lie anywhere; `scratch` is shared memory that no thread still uses, and is free again when the
// call returns.
template <int kThreads, int kBarrier = 0, bool kThroughL1 = false>
__device__ inline SampledToken sample_block(const float* logits, std::int64_t V, const SamplingPlan& plan,
                                            std::int64_t position, int thread, SamplerScratch<kThreads>& scratch) {
  if (plan.vocab_limit > 0 && plan.vocab_limit < V) V = plan.vocab_limit;
  const int skew = static_cast<int>(reinterpret_cast<std::uintptr_t>(logits) / sizeof(float) % 4);
  sampler_detail::SampleBlock<kThreads, kBarrier, kThroughL1> block{
      logits, static_cast<std::int32_t>(V), plan, scratch, thread, thread / kWarpSize, thread % kWarpSize, skew};
  return block.sample(position);
}

}  // namespace weft::cuda
