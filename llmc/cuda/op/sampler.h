// Sampling on the GPU: llmc/base/sampling.h says which id, and the choice is the host Sampler's bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/base/sampling.h"

namespace weft::cuda {

// ids[r] for the token at positions[r] (0-based, in the whole sequence) from the fp32 logits of row r, [rows, row_stride],
// of which the first V count, at most kMaxSampledVocab (Exit::usage). Plan, positions and results lie in device memory, so a
// captured launch can be replayed with other values. Where no id can be picked ids[r] is 0 and errors[r] says why; errors
// are only ever set: clear them once, and check them when the host waits anyway (check_sample). Without `clusters` one block
// works on a row, as on GPUs before sm_90: for tests.
void sample(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
            std::int64_t row_stride, const SamplingPlan* plan, const std::int64_t* positions, cudaStream_t stream,
            bool clusters = true);

// The same with a plan for each row, plans[r]. A row whose position is negative is left out: nothing of it is written. Part of a
// chain (hw/launch.cuh) where `overlapping`.
void sample_rows(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
                 std::int64_t row_stride, const SamplingPlan* plans, const std::int64_t* positions, bool overlapping,
                 cudaStream_t stream);

}  // namespace weft::cuda
