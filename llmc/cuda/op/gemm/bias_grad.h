// The gradient of a linear layer's bias: dbias [OC] += the sum of the rows of dout [N, OC].
//
// The order of the sum depends on N alone. workspace: bias_grad_workspace(OC) bytes, aligned to 16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "llmc/cuda/op/gemm/matmul.h"

namespace weft::cuda {

// T: float, bf16 or fp16.
template <typename T>
void bias_grad(float* dbias, const T* dout, std::int64_t N, std::int64_t OC, void* workspace, cudaStream_t stream);
// From codes in e5m2.
void bias_grad_fp8(float* dbias, const Fp8Matrix& dout, std::int64_t N, std::int64_t OC, void* workspace,
                   cudaStream_t stream);
std::size_t bias_grad_workspace(std::int64_t OC);

}  // namespace weft::cuda
