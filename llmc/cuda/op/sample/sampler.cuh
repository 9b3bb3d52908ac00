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

#include "llmc/cuda/op/sample/sampler_block.cuh"
#include "llmc/cuda/op/sample/sampler_bound.cuh"
#include "llmc/cuda/op/sample/sampler_draw.cuh"
#include "llmc/cuda/op/sample/sampler_greatest.cuh"

namespace weft::cuda {

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
  using Shape = sampler_detail::SampleShape<kThreads, kBarrier, kThroughL1, kBlocks>;
  const sampler_detail::ClusterMessages<kBlocks, SamplerScratch<kThreads, kBlocks>::kMessageWords> messages(scratch);
  sampler_detail::SampleBlock<Shape> sampler{logits,
                                             static_cast<std::int32_t>(V),
                                             plan,
                                             scratch,
                                             thread,
                                             thread / kWarpSize,
                                             thread % kWarpSize,
                                             messages.rank(),
                                             skew,
                                             messages};
  const SampledToken best = sampler.find_greatest();
  if (best.error != SampleError::none || plan.greedy) return best;
  if (plan.top_k > 0) {
    sampler.raise_bound([&](float logit) { return sampler.has_weight(logit) ? std::uint64_t{1} : 0; },
                        [&](std::uint64_t) { return plan.top_k; });
  }
  if (plan.top_p < 1) {
    sampler.raise_bound([&](float logit) { return sampler.weight(logit); },
                        [&](std::uint64_t total) { return sampling_share(plan.top_p, total); });
  }
  const std::int32_t id = sampler.draw(position);
  sampler.sync();  // the caller may reuse the scratch
  return {id, SampleError::none};
}

}  // namespace weft::cuda
