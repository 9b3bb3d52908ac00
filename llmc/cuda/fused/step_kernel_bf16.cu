// The step kernel for models in bf16.
#include "llmc/cuda/fused/step_kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_STEP_KERNEL(bf16)

}  // namespace weft::cuda::fused
