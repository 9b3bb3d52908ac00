// A row is at most a few megabytes and is still in L2 when the head has just written it. Sampling is bound by
// instructions, so the blocks of a cluster share a row where the GPU has clusters. The algorithm is in sampler.cuh.

#include "llmc/cuda/op/sample/sampler.h"

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/sample/sampler.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 8;  // blocks of a cluster: the portable maximum
constexpr int kSmallThreads = 128;
constexpr std::int64_t kSmallRow = 4096;  // rows of up to so many logits get one block of kSmallThreads

// The rows of one call. plan_stride: from one row's plan to the next; 0: one plan for all rows.
struct SampledRows {
  std::int32_t* ids;
  SampleError* errors;
  const float* logits;
  std::int64_t rows, V, row_stride;
  const SamplingPlan* plans;
  std::int64_t plan_stride;
  const std::int64_t* positions;
};

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads) sample_kernel(const SampledRows io) {
  __shared__ SamplerScratch<kThreads, kBlocks> scratch;
  wait_for_predecessors();
  launch_dependents();
  const std::int64_t row = blockIdx.x / kBlocks, position = io.positions[row];
  if (position < 0) return;  // all blocks of the cluster return, so none waits for a message
  const SampledToken token =
      sample_block<kThreads, 0, true, kBlocks>(io.logits + row * io.row_stride, io.V, io.plans[row * io.plan_stride],
                                               position, static_cast<int>(threadIdx.x), scratch);
  if (threadIdx.x == 0 && blockIdx.x % kBlocks == 0) {
    io.ids[row] = token.id;
    if (token.error != SampleError::none) io.errors[row] = token.error;
  }
}

template <int kThreads, int kBlocks>
void launch(const SampledRows& io, bool overlapping, cudaStream_t stream) {
  const auto kernel = sample_kernel<kThreads, kBlocks>;
  const dim3 grid(static_cast<unsigned>(io.rows * kBlocks));
  if constexpr (kBlocks > 1) {
    launch_chained_clusters(kernel, grid, dim3(kThreads), 0, stream, overlapping, kBlocks, "sample", io);
  } else {
    launch_chained(kernel, grid, dim3(kThreads), 0, stream, overlapping, "sample", io);
  }
}

void launch_rows(const SampledRows& io, bool overlapping, cudaStream_t stream, bool clusters) {
  if (io.V > kMaxSampledVocab) {
    fail(Exit::usage, "sampling: got %lld ids, expected at most %lld", static_cast<long long>(io.V),
         static_cast<long long>(kMaxSampledVocab));
  }
  if (io.rows == 0) return;
  auto run = launch<kThreads, 1>;
  if (io.V <= kSmallRow) {
    run = launch<kSmallThreads, 1>;
  } else if (clusters && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    run = launch<kThreads, kBlocks>;
  }
  run(io, overlapping, stream);
}

}  // namespace

void sample(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
            std::int64_t row_stride, const SamplingPlan* plan, const std::int64_t* positions, cudaStream_t stream,
            bool clusters) {
  launch_rows({ids, errors, logits, rows, V, row_stride, plan, 0, positions}, false, stream, clusters);
}

void sample_rows(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
                 std::int64_t row_stride, const SamplingPlan* plans, const std::int64_t* positions, bool overlapping,
                 cudaStream_t stream) {
  launch_rows({ids, errors, logits, rows, V, row_stride, plans, 1, positions}, overlapping, stream, true);
}

}  // namespace weft::cuda
