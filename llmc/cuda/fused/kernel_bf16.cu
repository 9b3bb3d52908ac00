// The fused decode kernel for models in bf16.
#include "llmc/cuda/fused/kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_KERNELS(fused_kernel, Variant, bf16)

}  // namespace weft::cuda::fused
