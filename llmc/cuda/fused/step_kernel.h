// The kernel of one step as the host knows it. Each storage type is compiled in a file of its own.
#pragma once

namespace weft::cuda::fused {

// One parameter: StepParameters<S>.
template <typename S>
const void* fused_step_kernel_of();

}  // namespace weft::cuda::fused
