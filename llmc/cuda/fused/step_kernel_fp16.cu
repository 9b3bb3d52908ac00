// The step kernel for models in fp16.
#include "llmc/cuda/fused/step_kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_STEP_KERNEL(fp16)

}  // namespace weft::cuda::fused
