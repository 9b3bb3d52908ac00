// The fused decode kernel for models with matrices in fp8, everything else in bf16, and the sequential residual.
#include "llmc/cuda/fused/kernel.cuh"
#include "llmc/cuda/fused/quantized_rows.cuh"

namespace weft::cuda::fused {

WEFT_QUANTIZED_FUSED_KERNELS(fused_sequential_kernel, SequentialVariant, bf16, Fp8)

}  // namespace weft::cuda::fused
