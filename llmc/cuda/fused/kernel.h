// Host-side handles of the fused decode kernels. Each combination of storage types is compiled in its own file.
#pragma once

namespace weft::cuda::fused {

// The kernel function for storage type S and quantised matrices in Format (void: matrices in S), for `row_loads` (1 or 2)
// 16-byte loads a lane from a row of C elements. Its one parameter is Parameters<S>. Only kernels of matrices in S can be
// instrumented.
template <typename S, typename Format = void>
const void* fused_kernel(int row_loads, bool instrumented);
// The same for the sequential residual. One parameter: SequentialParameters<S>.
template <typename S, typename Format = void>
const void* fused_sequential_kernel(int row_loads, bool instrumented);

}  // namespace weft::cuda::fused
