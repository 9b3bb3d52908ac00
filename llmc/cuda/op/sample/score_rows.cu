// One block a row; thread t always has ids t, t + kThreads, ..., so the order of sums is fixed. Two passes over the
// row, which is in L2, find the largest logit and the sum. The most likely ids are selected one by one: each thread
// knows its best remaining id, the block finds the best of these, and the warp of its owner searches the owner's next
// best.
#include "llmc/cuda/op/sample/score_rows.h"

#include "llmc/cuda/hw/block.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/sample/sampler.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;
constexpr int kAhead = 8;  // loads that a thread issues before it uses the first

// Calls use(id, logit) for the thread's ids below `end`, in rising order.
template <typename Use>
__device__ void for_own_ids(const float* row, int end, const Use& use) {
  for (int first = threadIdx.x; first < end; first += kAhead * kThreads) {
    float values[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int id = first + u * kThreads;
      values[u] = id < end ? row[id] : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int id = first + u * kThreads;
      if (id < end) use(id, values[u]);
    }
  }
}

__device__ std::uint64_t rank_of(float logit, int id) {  // never 0
  return sampler_detail::rank_of(isnan(logit) ? -INFINITY : logit, id);
}

__device__ std::uint64_t warp_greatest(std::uint64_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const std::uint64_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

struct LogSoftmax {
  float greatest, log_sum;
  __device__ float logprob(float logit) const { return -(log_sum + (greatest - logit)); }
};

__device__ LogSoftmax log_softmax(const float* row, int V, float* scratch) {
  float greatest = -INFINITY, sum = 0;
  for_own_ids(row, V, [&](int, float logit) { greatest = fmaxf(greatest, logit); });
  greatest = block_max(greatest, scratch);
  for_own_ids(row, V, [&](int, float logit) { sum += expf(logit - greatest); });
  return {greatest, logf(block_sum(sum, scratch))};
}

__device__ void find_most_likely(IdLogprob* out, int count, const float* row, int end, const LogSoftmax& softmax) {
  __shared__ std::uint64_t best_of_warps[2][kWarps];  // alternating: one is read while the other is written
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  std::uint64_t best = 0;  // rank of the thread's best id that has not been selected; 0: none
  for_own_ids(row, end, [&](int id, float logit) {
    const std::uint64_t rank = rank_of(logit, id);
    best = rank > best ? rank : best;
  });
  for (int i = 0; i < count; ++i) {
    const std::uint64_t of_warp = warp_greatest(best);
    if (lane == 0) best_of_warps[i % 2][warp] = of_warp;
    __syncthreads();
    const std::uint64_t taken = warp_greatest(best_of_warps[i % 2][lane]);
    const int id = sampler_detail::id_of(taken), owner = id % kThreads;
    if (thread == 0) {
      out[i].id = id;
      out[i].logprob = softmax.logprob(row[id]);
    }
    if (warp != owner / kWarpSize) continue;
    std::uint64_t next = 0;
    for (int other = owner + lane * kThreads; other < end; other += kWarpSize * kThreads) {
      const std::uint64_t rank = rank_of(row[other], other);
      if (rank < taken && rank > next) next = rank;
    }
    next = warp_greatest(next);
    if (thread == owner) best = next;
  }
}
static_assert(kWarps == kWarpSize);

__global__ void __launch_bounds__(kThreads) score_rows_kernel(const ScoreRows io) {
  __shared__ float scratch[kWarpSize];
  wait_for_predecessors();
  launch_dependents();
  const std::int64_t r = blockIdx.x;
  const float* row = io.logits + r * io.V;
  const std::int32_t slot = io.slots[r], target = io.targets[r], alternatives = io.alternatives[r];
  const bool sampled = slot != kNotSampled;
  const std::int32_t id = sampled ? io.ids[r] : 0;
  const SampleError error = sampled ? io.errors[r] : SampleError::none;
  __syncthreads();  // all threads have read the error
  if (threadIdx.x == 0 && sampled) {
    if (slot >= 0) io.last_ids[slot] = id;
    io.errors[r] = SampleError::none;
  }
  const bool score_sampled = sampled && error == SampleError::none && alternatives >= 0;
  RowScore score = {id, error, 0, 0};
  if (score_sampled || target >= 0) {
    const LogSoftmax softmax = log_softmax(row, static_cast<int>(io.V), scratch);
    if (score_sampled) score.sampled = softmax.logprob(row[id]);
    if (target >= 0) score.target = softmax.logprob(row[target]);
    const int end = static_cast<int>(io.tokenizer_vocab);
    find_most_likely(io.most_likely + r * kMaxAlternatives, min(alternatives, end), row, end, softmax);
  }
  if (threadIdx.x == 0) (io.scores != nullptr ? io.scores : *io.scores_at)[r] = score;
}

}  // namespace

void score_rows(const ScoreRows& io, bool overlapping, cudaStream_t stream) {
  if (io.rows == 0) return;
  launch_chained(score_rows_kernel, dim3(static_cast<unsigned>(io.rows)), dim3(kThreads), 0, stream, overlapping,
                 "score_rows", io);
}

}  // namespace weft::cuda
