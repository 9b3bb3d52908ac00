// The fused decode kernel for models in bf16 with the sequential residual.
#include "llmc/cuda/fused/kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_KERNELS(fused_sequential_kernel, SequentialVariant, bf16)

}  // namespace weft::cuda::fused
