// The fused decode kernel for models with matrices in fp8 and everything else in fp16.
#include "llmc/cuda/fused/kernel.cuh"
#include "llmc/cuda/fused/quantized_rows.cuh"

namespace weft::cuda::fused {

WEFT_QUANTIZED_FUSED_KERNELS(fused_kernel, Variant, fp16, Fp8)

}  // namespace weft::cuda::fused
