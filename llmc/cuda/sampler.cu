// Sampling, one block a row: a row is at most a megabyte and lies in L2 when the head has just written it. llmc/cuda/
// sampler.cuh has the algorithm.

#include "llmc/cuda/sampler.h"

#include "llmc/cuda/sampler.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kSmallThreads = 128;
constexpr std::int64_t kSmallRow = 4096;  // logits up to which a row has kSmallThreads

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t V, std::int64_t row_stride,
                  const SamplingPlan* plan, const std::int64_t* positions) {
  __shared__ SamplerScratch<kThreads> scratch;
  const std::int64_t row = blockIdx.x;
  const SampledToken token = sample_block<kThreads, 0, true>(logits + row * row_stride, V, *plan, positions[row],
                                                    static_cast<int>(threadIdx.x), scratch);
  if (threadIdx.x != 0) return;
  ids[row] = token.id;
  if (token.error != SampleError::none) errors[row] = token.error;
}

}  // namespace

void sample(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
            std::int64_t row_stride, const SamplingPlan* plan, const std::int64_t* positions, cudaStream_t stream) {
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>(rows);
  if (V <= kSmallRow) {
    sample_kernel<kSmallThreads>
        <<<blocks, kSmallThreads, 0, stream>>>(ids, errors, logits, V, row_stride, plan, positions);
  } else {
    sample_kernel<kThreads><<<blocks, kThreads, 0, stream>>>(ids, errors, logits, V, row_stride, plan, positions);
  }
  check_launch("sample");
}

}  // namespace weft::cuda
