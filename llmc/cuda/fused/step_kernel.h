// The step kernel's host-side handle. Each storage type is compiled in its own file.
#pragma once

namespace weft::cuda::fused {

// The kernel function, for a launch; its one parameter is StepParameters<S>. There is one for a single row, and one for
// up to kStepRows rows.
template <typename S>
const void* fused_step_kernel_of(int rows);

}  // namespace weft::cuda::fused
