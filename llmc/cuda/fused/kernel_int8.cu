// The fused decode kernel for models with matrices in int8 and everything else in fp16.
#include "llmc/cuda/fused/kernel.cuh"
#include "llmc/cuda/fused/quantized_rows.cuh"

namespace weft::cuda::fused {

WEFT_QUANTIZED_FUSED_KERNELS(fused_kernel, Variant, fp16, Int8)

}  // namespace weft::cuda::fused
