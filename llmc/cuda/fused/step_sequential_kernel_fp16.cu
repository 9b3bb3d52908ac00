// The kernel of one step for models with the sequential residual in fp16.
#include "llmc/cuda/fused/step_kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_STEP_KERNEL(fp16, false)

}  // namespace weft::cuda::fused
