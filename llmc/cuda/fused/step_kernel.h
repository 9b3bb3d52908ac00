// The step kernel's host-side handle. Each storage type is compiled in its own file.
#pragma once

namespace weft::cuda::fused {

// The kernel function, for a launch; its one parameter is StepParameters<S>.
template <typename S>
const void* fused_step_kernel_of();

}  // namespace weft::cuda::fused
