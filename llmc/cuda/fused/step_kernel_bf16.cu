// The kernel of one step for models with the parallel residual in bf16.
#include "llmc/cuda/fused/step_kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_STEP_KERNEL(bf16, true)

}  // namespace weft::cuda::fused
