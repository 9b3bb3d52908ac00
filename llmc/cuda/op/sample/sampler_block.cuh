// What the threads that sample share: scratch memory, their state, and passes over the logits.
#pragma once

#include <cstdint>

#include "llmc/base/sampling.h"
#include "llmc/base/sampling_math.h"
#include "llmc/cuda/op/sample/sampler_messages.cuh"
#include "llmc/cuda/op/sample/sampler_rank.cuh"

namespace weft::cuda {

// Shared memory of sample_block: 8 to 30 KB.
template <int kThreads, int kBlocks = 1>
struct SamplerScratch : sampler_detail::ClusterInbox<kBlocks, sampler_detail::message_words(kThreads)> {
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kPivots = sampler_detail::kPivots;
  static constexpr int kSums = sampler_detail::kSums;
  static constexpr int kCandidates = 256;
  static constexpr int kFound =
      3 * kWarpSize;  // ranks that a warp has collected but not measured: < 32 left over and up to 64 new ones
  static constexpr int kMessageWords = sampler_detail::message_words(kThreads);

  struct alignas(16) Candidate {
    std::uint64_t rank, measure;
  };
  Candidate candidates[kCandidates];                        // of this block
  Candidate all_candidates[kBlocks > 1 ? kCandidates : 1];  // of all blocks
  std::uint64_t found[kWarps][kFound];
  std::uint64_t warp_sums[kWarps][kSums];
  std::uint64_t sums[kSums + 1];  // the last one is the number of candidates
  // messages to all blocks; two buffers that alternate
  alignas(kBlocks > 1 ? 16 : 8) std::uint64_t outbox[2][kMessageWords];
  std::uint64_t range_sums[2][kWarps];
  std::uint64_t answer;
  int counts[2];  // number of candidates found; one is cleared while the other is used
  int counts_of_blocks[kBlocks];
};

struct SampledToken {
  std::int32_t id;  // 0 if there is an error
  SampleError error;
};

namespace sampler_detail {

__device__ inline std::uint64_t warp_sum(std::uint64_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// The template arguments of sample_block() (sampler.cuh) as one type.
template <int kThreads_, int kBarrier_, bool kThroughL1_, int kBlocks_>
struct SampleShape {
  static constexpr int kThreads = kThreads_, kBarrier = kBarrier_, kBlocks = kBlocks_;
  static constexpr bool kThroughL1 = kThroughL1_;
};

// A thread's state, and its passes over the logits. The stages of sampling are in the files named below.
template <typename Shape>
struct SampleBlock {
  static constexpr int kThreads = Shape::kThreads, kBarrier = Shape::kBarrier, kBlocks = Shape::kBlocks;
  using Scratch = SamplerScratch<kThreads, kBlocks>;
  static constexpr int kWarps = Scratch::kWarps;
  static constexpr int kAhead = 4;           // 16-byte loads that a thread issues before it uses the first
  static constexpr int kBatch = 4 * kAhead;  // logits that a thread loads at a time
  static constexpr std::int32_t kWarpBatch = kBatch * kWarpSize;  // logits that a warp loads at a time
  static constexpr bool kCluster = kBlocks > 1;
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024);

  const float* logits;
  std::int32_t V;
  const SamplingPlan& plan;
  Scratch& scratch;
  int thread, warp, lane;
  int block;  // rank in the cluster
  int skew;   // logits[0] is `skew` elements past a 16-byte boundary; place = id + skew
  ClusterMessages<kBlocks, Scratch::kMessageWords> messages;
  int turn = 0;             // which of Scratch::counts is used
  int outbox_area = 0;      // which of Scratch::outbox is used
  float greatest = 0;       // the largest logit
  double lightest = 0;      // lower bound of the logits that are finite and have a weight
  std::uint64_t bound = 0;  // ranks >= bound are kept
  std::uint64_t top = 0;    // rank of the largest logit

  __device__ void sync() const { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory"); }

  // Sends scratch.outbox[outbox_area] to all blocks; messages.from(b) is then what block b sent. There are two outboxes
  // because a thread may write the next message while another still sends this one.
  __device__ void exchange() {
    messages.exchange(scratch.outbox[outbox_area]);
    outbox_area ^= 1;
  }

  // kThroughL1 = false: in a persistent kernel another multiprocessor may just have written the logits, so L1, which
  // may be stale, is bypassed.
  template <typename Word>
  static __device__ Word read(const Word* address) {
    return Shape::kThroughL1 ? *address : __ldcg(address);
  }

  // Loads the lane's logits of the warp's batch that begins at `place`; -infinity from place `end` on and where there
  // is no id.
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

  // Calls use(values, place) for all batches of this warp; a thread's ids ascend. All lanes of a warp call together.
  template <typename Use>
  __device__ void for_each_batch(const Use& use) const {
    for (std::int32_t place = (warp * kBlocks + block) * kWarpBatch; place < V + skew;
         place += kWarps * kBlocks * kWarpBatch) {
      float values[kBatch];
      load_batch(values, place, V + skew);
      use(values, place);
    }
  }

  // Calls use(values[i], i) for all i, kGroup of them in each iteration of a loop. Registers cannot be indexed at run
  // time, so the values are shifted between iterations. Fully unrolled, with sixteen copies of the body, the kernel had
  // 22,800 instructions.
  template <int kGroup, typename Use, typename Between>
  static __device__ void in_groups(float (&values)[kBatch], const Use& use, const Between& between) {
#pragma unroll 1
    for (int first = 0; first < kBatch; first += kGroup) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) use(values[k], first + k);
#pragma unroll
      for (int i = 0; i + kGroup < kBatch; ++i) values[i] = values[i + kGroup];
      between();
    }
  }
  template <int kGroup, typename Use>
  static __device__ void in_groups(float (&values)[kBatch], const Use& use) {
    in_groups<kGroup>(values, use, [] {});
  }

  // Collects the ranks of the logits in [low, high]; whenever there are 32 of them, calls use(rank, true) in all lanes.
  // `found` counts those not used yet.
  template <typename Use>
  __device__ void collect(float (&values)[kBatch], std::int32_t place, float low, float high, int& found,
                          const Use& use) const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) any |= values[i] >= low && values[i] <= high;
    if (!__any_sync(~0u, any)) return;
    std::uint64_t* ranks = scratch.found[warp];
    const auto add = [&](float logit, int i) {
      const bool inside = logit >= low && logit <= high;
      const unsigned lanes = __ballot_sync(~0u, inside);
      if (inside) ranks[found + __popc(lanes & ((1u << lane) - 1))] = rank_of(logit, id_in_batch(place, i));
      found += __popc(lanes);
    };
    in_groups<2>(values, add, [&] {
#pragma unroll 1
      while (found >= kWarpSize) {
        found -= kWarpSize;
        __syncwarp();
        const std::uint64_t rank = ranks[found + lane];
        __syncwarp();
        use(rank, true);
      }
    });
  }
  // Calls use() for the remaining ranks, fewer than 32; the second argument is false in lanes without one.
  template <typename Use>
  __device__ void use_rest(int found, const Use& use) const {
    __syncwarp();
    if (found > 0) use(lane < found ? scratch.found[warp][lane] : 0, lane < found);
    __syncwarp();
  }

  __device__ std::uint64_t weight(float logit) const {
    return sampling_weight(logit, greatest, plan.scale);
  }
  // Whether the weight is above 0; for most logits without computing the exponential.
  __device__ bool has_weight(float logit) const {
    const double exponent = (static_cast<double>(logit) - static_cast<double>(greatest)) * plan.scale;
    return exponent > -static_cast<double>(kWeightBits) || weight(logit) > 0;
  }

  // ---- sampler_greatest.cuh

  // Finds the largest logit with its lowest id and the smallest finite logit, and checks that all logits are usable.
  __device__ SampledToken find_greatest();

  // ---- sampler_bound.cuh

  // Raises `bound` to the largest rank r such that the ranks >= r measure at least need(total measure). Leaves it alone
  // if even all of them measure less. measure(logit) is 0 for ids without weight.
  template <typename Measure, typename Need>
  __device__ void raise_bound(const Measure& measure, const Need& need_of);
  __device__ bool choose_pivots(std::uint64_t (&pivots)[kPivots], float (&values)[kPivots], std::uint64_t lo,
                                std::uint64_t hi) const;
  template <typename Measure>
  __device__ void measure_all(std::uint64_t (&sums)[kSums], float (&logits_)[kBatch], const Measure& measure,
                              const float (&values)[kPivots]) const;
  __device__ void add_up(const std::uint64_t (&sums)[kSums]);
  __device__ std::uint64_t rank_among_candidates(int count, std::uint64_t above, std::uint64_t need);

  // ---- sampler_draw.cuh

  // Draws: the id at which the prefix sum of the kept weights, in the order of ids, exceeds the target given by the
  // random bits.
  __device__ std::int32_t draw(std::int64_t position);
  __device__ std::uint64_t kept_weight(std::uint64_t rank) const;
  __device__ std::uint64_t kept_weights(std::int32_t from, std::int32_t end) const;
  __device__ std::uint64_t running_sum(std::uint64_t value) const;
};

}  // namespace sampler_detail

}  // namespace weft::cuda
