// Exact GELU on the GPU, x Phi(x), and its derivative. The specification is llmc/cpu/gelu.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// x [count] -> out [count]; T is float, bf16 or fp16. out may be x.
template <typename T>
void gelu_forward(T* out, const T* x, std::int64_t count, cudaStream_t stream);

// T is float or bf16. dx [count] is computed from dout and x, and may share the memory of either. `gelu_out`, unless null, gets the forward pass's
// out again, bit for bit; it may share dout's memory, if dx does not.
template <typename T>
void gelu_backward(T* dx, const T* dout, const T* x, std::int64_t count, T* gelu_out, cudaStream_t stream);

}  // namespace weft::cuda
