// Sampling on the GPU. llmc/base/sampling.h defines which id is picked; the result equals the host Sampler's bit for
// bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/base/sampling.h"

namespace weft::cuda {

// Picks ids[r] for the token at positions[r] (from 0, in the whole sequence) from the first V logits of row r of fp32
// [rows, row_stride]. V is at most kMaxSampledVocab (Exit::usage). All pointers are device memory, so a captured launch
// can be replayed with other plans and positions. Where no id can be picked, ids[r] is 0 and errors[r] says why. Errors
// are only ever set: clear them once, and check them when the host synchronises anyway (check_sample). clusters =
// false: one block a row, as on GPUs before sm_90; for tests.
void sample(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
            std::int64_t row_stride, const SamplingPlan* plan, const std::int64_t* positions, cudaStream_t stream,
            bool clusters = true);

// The same with a plan for each row, plans[r]. Rows with a negative position are skipped: nothing is written for them.
// Part of a chain (hw/launch.cuh) if `overlapping`.
void sample_rows(std::int32_t* ids, SampleError* errors, const float* logits, std::int64_t rows, std::int64_t V,
                 std::int64_t row_stride, const SamplingPlan* plans, const std::int64_t* positions, bool overlapping,
                 cudaStream_t stream);

}  // namespace weft::cuda
