// SwiGLU and GeGLU on the GPU: out = silu(gate) * up, or gelu_tanh(gate) * up, with gate and up packed in one row
// [gate F | up F]. The specifications are llmc/cpu/swiglu.h and llmc/cpu/gelu.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// gate_up [N, 2F] -> out [N, F]; T is float, bf16 or fp16.
template <typename T>
void swiglu_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream);

// dgate_up [N, 2F] is computed from dout [N, F] and gate_up [N, 2F], and may share gate_up's memory. `swiglu_out` [N,
// F], unless null, gets the forward pass's out again, bit for bit; it may share dout's memory.
template <typename T>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* swiglu_out,
                     cudaStream_t stream);

// The same with GELU's approximation by tanh in the place of silu.
template <typename T>
void geglu_tanh_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream);
template <typename T>
void geglu_tanh_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* geglu_out,
                         cudaStream_t stream);

}  // namespace weft::cuda
