// Exact GELU on the GPU: x/2 (1 + erf(x / sqrt 2)). The specification is llmc/cpu/gelu.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// out [count] = gelu(x). T is float, bf16 or fp16; out may be x.
template <typename T>
void gelu_forward(T* out, const T* x, std::int64_t count, cudaStream_t stream);
// dx [count] = dout times the derivative at x. dx may be dout.
template <typename T>
void gelu_backward(T* dx, const T* dout, const T* x, std::int64_t count, cudaStream_t stream);

}  // namespace weft::cuda
