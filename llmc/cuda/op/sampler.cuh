// Sampling by one group of threads, on its own (sampler.cu) or inside another kernel. The result equals the host's
// (llmc/base/sampler.h) bit for bit: weights are integers, and an integer sum does not depend on its order.
//
// An id's rank is one 64-bit number that orders by logit and, among equal logits, by lower id. So what top-k and top-p
// keep is "all ranks from a bound up". The bound is found without sorting, by narrowing a bracket of ranks:
//  - A pass over the logits measures (by count for top-k, by weight for top-p) what lies above each of eight pivots
//    inside the bracket; the bracket then narrows to the interval that contains the bound. Seven pivots divide the
//    range of logit values, which suits the logits of a model; one divides the range of ranks, so that 64 passes
//    suffice for any logits. In the first pass, which measures all logits, all eight pivots are values if possible, so
//    that a comparison of two floats is enough.
//  - In later passes a logit outside the bracket costs one comparison. The others are collected in shared memory and
//    measured 32 at a time: measured where they are found, they would mostly occupy a single lane of a warp.
//  - As soon as few enough ids are in the bracket, they are ranked by comparing all pairs.
//
// To draw, the weights of the kept ids are summed range by range, the range that holds the target is divided again, and
// so on down to one id.
//
// Several blocks of a cluster may share the row (sm_90 and later): each passes over its part, and after a pass they
// exchange their sums, so that every block knows all results.
//
// Cost for V logits: one pass for the largest, one with V weights (a double-precision exponential each) unless top-k
// alone decides, and three to five that skip what lies outside the bracket.
#pragma once

#include <cstdint>

#include "llmc/base/sampling.h"
#include "llmc/base/sampling_math.h"
#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

namespace sampler_detail {

constexpr int kPivots = 8;
constexpr int kSums = kPivots + 1;  // one for each pivot, and the total

// 64-bit words of a message: a block's sums and its number of candidates, or one word for each of its warps. Even,
// because messages are sent in pieces of 16 bytes.
constexpr int message_words(int threads) {
  const int warps = threads / kWarpSize, words = kSums + 1 > warps ? kSums + 1 : warps;
  return words + words % 2;
}

// Shared memory in which a block of a cluster receives: messages of kWords 64-bit words (a ClusterExchange), and an
// mbarrier that counts the bytes of candidates.
template <int kBlocks, int kWords>
struct ClusterInbox {
  alignas(16) char messages[16 + 2 * kBlocks * kWords * 8];
  std::uint64_t candidates_arrived;
};
template <int kWords>
struct ClusterInbox<1, kWords> {};

}  // namespace sampler_detail

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

// Orders like the logit; -0 and +0 are equal.
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

// Messages between the blocks of a cluster: asynchronous stores into another block's shared memory, counted by its
// mbarrier (hw/cluster.cuh). No block reads another's shared memory. So no cluster barrier is needed, whose fence would
// wait for all accesses of every thread, and a block may exit once it has received its last message, since nothing is
// stored to it after that.
//
// The primary template sends no messages: for one block, and for GPUs without clusters, for which kernels of several
// blocks are compiled but never launched.
template <int kBlocks, int kWords>
struct ClusterMessages {
  __device__ explicit ClusterMessages(ClusterInbox<kBlocks, kWords>&) {}
  __device__ int rank() const { return 0; }
  __device__ void exchange(const std::uint64_t*) {}
  __device__ const std::uint64_t* from(int) const { return nullptr; }
  template <typename Candidate>
  __device__ void gather(Candidate*, const Candidate*, const int*) {}
};

#if WEFT_BULK_COPY
template <int kBlocks, int kWords>
requires(kBlocks > 1) struct ClusterMessages<kBlocks, kWords> {
  using Inbox = ClusterInbox<kBlocks, kWords>;
  static_assert(sizeof(Inbox::messages) == ClusterExchange<kBlocks>::bytes(2 * kWords));

  __device__ explicit ClusterMessages(Inbox& inbox)
      : arrived_(shared_address(&inbox.candidates_arrived)), exchange_(prepared(inbox), 2 * kWords) {}

  __device__ int rank() const { return static_cast<int>(exchange_.rank()); }

  // Sends kWords words, which all threads of the block have finished writing, to every block. Until the next exchange
  // from(b) is the message of block b. The words may be overwritten after the next exchange.
  __device__ void exchange(const std::uint64_t* words) {
    received_ = exchange_.gather(reinterpret_cast<const float*>(words), 2 * kWords);
  }
  __device__ const std::uint64_t* from(int b) const {
    return reinterpret_cast<const std::uint64_t*>(received_ + b * exchange_.message_stride());
  }

  // all = the candidates of every block, in the order of the blocks; `own`: those of this block, counts[b]: their
  // number in block b. A block sends only after an exchange, which the other blocks enter when they have read the
  // previous contents of `all`, so nothing is overwritten before it is read.
  template <typename Candidate>
  __device__ void gather(Candidate* all, const Candidate* own, const int* counts) {
    static_assert(sizeof(Candidate) == 16);
    int before = 0, total = 0;
    for (int b = 0; b < kBlocks; ++b) {
      if (b < rank()) before += counts[b];
      total += counts[b];
    }
    if (threadIdx.x == 0) hopper::mbarrier_arrive_expect(arrived_, static_cast<unsigned>(total) * sizeof(Candidate));
    for (int i = static_cast<int>(threadIdx.x); i < counts[rank()] * kBlocks; i += static_cast<int>(blockDim.x)) {
      const unsigned to = static_cast<unsigned>(i % kBlocks);
      cluster_store(cluster_address(shared_address(all + before + i / kBlocks), to),
                    reinterpret_cast<const float4*>(own)[i / kBlocks], cluster_address(arrived_, to));
    }
    hopper::mbarrier_wait(arrived_, parity_);
    cluster_acquire(arrived_, parity_);
    parity_ ^= 1;
  }

 private:
  // The constructor of exchange_ synchronises all blocks, so none sends before this mbarrier is initialised.
  static __device__ void* prepared(Inbox& inbox) {
    if (threadIdx.x == 0) {
      hopper::mbarrier_init(shared_address(&inbox.candidates_arrived), 1);
      hopper::fence_barrier_init();
    }
    return inbox.messages;
  }

  unsigned arrived_, parity_ = 0;
  ClusterExchange<kBlocks> exchange_;
  const float* received_ = nullptr;
};
#endif  // WEFT_BULK_COPY

template <int kThreads, int kBarrier, bool kThroughL1, int kBlocks>
struct SampleBlock {
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
    return kThroughL1 ? *address : __ldcg(address);
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

  // Finds the largest logit with its lowest id and the smallest finite logit, and checks that all logits are usable.
  __device__ SampledToken find_greatest() {
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
      best = words[0], least = __uint_as_float(static_cast<unsigned>(words[1])),
      flags = static_cast<unsigned>(words[2]);
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

  // Chooses pivots strictly between lo and hi; needs hi - lo >= 2. Returns whether all are values: such a pivot is the
  // rank of no id, and above it are exactly the logits >= values[j].
  __device__ bool choose_pivots(std::uint64_t (&pivots)[kPivots], float (&values)[kPivots], std::uint64_t lo,
                                std::uint64_t hi) const {
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
  template <typename Measure>
  __device__ void measure_all(std::uint64_t (&sums)[kSums], float (&logits_)[kBatch], const Measure& measure,
                              const float (&values)[kPivots]) const {
    in_groups<4>(logits_, [&](float logit, int) {
      const std::uint64_t size = measure(logit);
#pragma unroll
      for (int j = 0; j < kPivots; ++j) sums[j] += logit >= values[j] ? size : 0;
      sums[kPivots] += size;
    });
  }

  // Adds each of the sums over all threads and counts the candidates; all threads then find the results in
  // scratch.sums.
  __device__ void add_up(const std::uint64_t (&sums)[kSums]) {
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

  // Raises `bound` to the largest rank r such that the ranks >= r measure at least need(total measure). Leaves it alone
  // if even all of them measure less. measure(logit) is 0 for ids without weight.
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
  __device__ std::uint64_t rank_among_candidates(int count, std::uint64_t above, std::uint64_t need) {
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

  __device__ std::uint64_t kept_weight(std::uint64_t rank) const {
    const std::uint64_t w = weight(logit_of(static_cast<std::uint32_t>(rank >> 32)));
    return rank >= bound && w >= plan.least_weight ? w : 0;
  }
  // Sum of the kept weights of the ids from place `from` to `end`, over the warp.
  __device__ std::uint64_t kept_weights(std::int32_t from, std::int32_t end) const {
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
  __device__ std::uint64_t running_sum(std::uint64_t value) const {
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const std::uint64_t before = __shfl_up_sync(~0u, value, offset);
      if (lane >= offset) value += before;
    }
    return value;
  }

  // Draws: the id at which the prefix sum of the kept weights, in the order of ids, exceeds the target given by the
  // random bits.
  __device__ std::int32_t draw(std::int64_t position) {
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
    sync();  // the caller may reuse the scratch
    return {id, SampleError::none};
  }
};

}  // namespace sampler_detail

// The id for `position` from fp32 logits [V] in global memory, 0 <= V <= kMaxSampledVocab, as llmc/base/sampling.h
// defines it. Called by kThreads threads (a multiple of 32), numbered `thread` from 0 in whole warps, all with the same
// arguments; each gets the result. They synchronise at hardware barrier kBarrier (0: that of __syncthreads), so other
// warps of the block may do other work. The logits must already be visible to the threads; kThroughL1 only if nothing
// in this kernel has written them. `plan` and `position` may be in any memory; `scratch` is shared memory, not in use
// before the call and free again after it.
// kBlocks > 1: called once in a kernel, by all threads of all blocks of a cluster of that size; the first block gets
// the result.
template <int kThreads, int kBarrier = 0, bool kThroughL1 = false, int kBlocks = 1>
__device__ inline SampledToken sample_block(const float* logits, std::int64_t V, const SamplingPlan& plan,
                                            std::int64_t position, int thread,
                                            SamplerScratch<kThreads, kBlocks>& scratch) {
  static_assert(kBlocks == 1 || kBarrier == 0);
  if (plan.vocab_limit > 0 && plan.vocab_limit < V) V = plan.vocab_limit;
  const int skew = static_cast<int>(reinterpret_cast<std::uintptr_t>(logits) / sizeof(float) % 4);
  const sampler_detail::ClusterMessages<kBlocks, SamplerScratch<kThreads, kBlocks>::kMessageWords> messages(scratch);
  sampler_detail::SampleBlock<kThreads, kBarrier, kThroughL1, kBlocks> sampler{logits,
                                                                               static_cast<std::int32_t>(V),
                                                                               plan,
                                                                               scratch,
                                                                               thread,
                                                                               thread / kWarpSize,
                                                                               thread % kWarpSize,
                                                                               messages.rank(),
                                                                               skew,
                                                                               messages};
  return sampler.sample(position);
}

}  // namespace weft::cuda
