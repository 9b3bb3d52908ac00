// GEMMs with SwiGLU, or its derivative, fused into the epilogue (sm_90a, bf16): what it reads and writes need not go to
// memory and back between two kernels. Sums are fp32, rounded to bf16 before SwiGLU as a GEMM of its own would round them,
// so that the results are those of Matmul and swiglu.h up to the order of the sums. That order is fixed: the same bits
// every time.
//
// A row of gate_up is [gate F | up F]. Weights are as Hugging Face stores them. All arrays are aligned to 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// Whether the current device and these sizes have them: C and F are multiples of 8.
bool matmul_swiglu_computes(std::int64_t C, std::int64_t F);

// gate_up [N, 2F] = x [N, C] W^T with W [2F, C]; swiglu_out [N, F] = silu(gate) up, unless it is null.
void gate_up_swiglu(__nv_bfloat16* gate_up, __nv_bfloat16* swiglu_out, const __nv_bfloat16* x,
                    const __nv_bfloat16* weight, std::int64_t N, std::int64_t C, std::int64_t F, cudaStream_t stream);

// The gradient of swiglu_out is dout [N, C] W with W [C, F]; gate_up [N, 2F] is replaced by its own gradient. `swiglu_out`
// [N, F], unless it is null, gets the forward pass's values again, bit for bit.
void down_input_grad_swiglu(__nv_bfloat16* gate_up, __nv_bfloat16* swiglu_out, const __nv_bfloat16* dout,
                            const __nv_bfloat16* weight, std::int64_t N, std::int64_t C, std::int64_t F,
                            cudaStream_t stream);

}  // namespace weft::cuda
