// The kernels of fused decoding as the host knows them. Each storage type is compiled in a file of its own.
#pragma once

namespace weft::cuda::fused {

// The kernel for matrices of W, vectors of A and a cache of KV, with so many 16-byte loads of a row by a lane (1 or 2), with
// instruments or without. One parameter: Parameters<W, A, KV>.
template <typename W, typename A, typename KV>
const void* fused_kernel(int row_loads, bool instrumented);
// The same for the sequential residual. One parameter: SequentialParameters<W, A, KV>.
template <typename W, typename A, typename KV>
const void* fused_sequential_kernel(int row_loads, bool instrumented);

}  // namespace weft::cuda::fused
