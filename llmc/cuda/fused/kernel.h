// Host-side handles of the fused decode kernels. Each combination of storage types is compiled in its own file.
#pragma once

namespace weft::cuda::fused {

// The kernel function for matrices in W, vectors in A and a cache in KV, for `row_loads` (1 or 2) 16-byte loads a lane
// from a row of C elements. Its one parameter is Parameters<W, A, KV>.
// The second function: for the sequential residual; its parameter is SequentialParameters<W, A, KV>.
template <typename W, typename A, typename KV>
const void* fused_kernel(int row_loads, bool instrumented);
// The same for the sequential residual. One parameter: SequentialParameters<W, A, KV>.
template <typename W, typename A, typename KV>
const void* fused_sequential_kernel(int row_loads, bool instrumented);

}  // namespace weft::cuda::fused
