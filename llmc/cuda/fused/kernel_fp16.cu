// The fused decode kernel for models in fp16.
#include "llmc/cuda/fused/kernel.cuh"

namespace weft::cuda::fused {

WEFT_FUSED_KERNELS(fused_kernel, Variant, fp16)

}  // namespace weft::cuda::fused
