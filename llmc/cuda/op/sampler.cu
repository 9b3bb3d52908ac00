// Sampling: a row is at most a few megabytes and lies in L2 when the head has just written it. What takes time is
// instructions, so the blocks of a cluster share a row where the GPU has clusters. llmc/cuda/op/sampler.cuh has the algorithm.

#include "llmc/cuda/op/sampler.h"

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/sampler.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 8;  // of a cluster, the most that every GPU with clusters has
constexpr int kSmallThreads = 128;
constexpr std::int64_t kSmallRow = 4096;  // logits up to which a row has one block of kSmallThreads

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t V, std::int64_t row_stride,
                  const SamplingPlan* plan, const std::int64_t* positions) {
  __shared__ SamplerScratch<kThreads, kBlocks> scratch;
  const std::int64_t row = blockIdx.x / kBlocks;
  const SampledToken token = sample_block<kThreads, 0, true, kBlocks>(
      logits + row * row_stride, V, *plan, positions[row], static_cast<int>(threadIdx.x), scratch);
  if (threadIdx.x == 0 && blockIdx.x % kBlocks == 0) {
    ids[row] = token.id;
    if (token.error != SampleError::none) errors[row] = token.error;
  }
}

template <int kThreads, int kBlocks>
void launch(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
            std::int64_t row_stride, const SamplingPlan* plan, const std::int64_t* positions, cudaStream_t stream) {
  const auto kernel = sample_kernel<kThreads, kBlocks>;
  const dim3 grid(static_cast<unsigned>(rows * kBlocks));
  if constexpr (kBlocks > 1) {
    launch_clustered(kernel, grid, dim3(kThreads), 0, stream, kBlocks, "sample", ids, errors, logits, V, row_stride,
                     plan, positions);
  } else {
    kernel<<<grid, kThreads, 0, stream>>>(ids, errors, logits, V, row_stride, plan, positions);
    check_launch("sample");
  }
}

}  // namespace

void sample(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
            std::int64_t row_stride, const SamplingPlan* plan, const std::int64_t* positions, cudaStream_t stream,
            bool clusters) {
  if (V > kMaxSampledVocab) {
    fail(Exit::usage, "sampling: got %lld ids, expected at most %lld", static_cast<long long>(V),
         static_cast<long long>(kMaxSampledVocab));
  }
  if (rows == 0) return;
  auto run = launch<kThreads, 1>;
  if (V <= kSmallRow) {
    run = launch<kSmallThreads, 1>;
  } else if (clusters && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    run = launch<kThreads, kBlocks>;
  }
  run(ids, errors, logits, rows, V, row_stride, plan, positions, stream);
}

}  // namespace weft::cuda
