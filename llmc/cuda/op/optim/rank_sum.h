// The sum of several ranks' gradients, in the order of the ranks. The specification is llmc/cpu/rank_sum.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

namespace weft::cuda {

// sum[i] = ((pieces[0][i] + pieces[1][i]) + pieces[2][i]) + ..., in fp32. [count] each, on the device; 1 to 448 pieces
// (more: Exit::internal), of which `sum` may be one. 16-byte accesses if all are aligned to 16 bytes, otherwise slower.
// The span may be reused after the call.
void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count, cudaStream_t stream);

}  // namespace weft::cuda
