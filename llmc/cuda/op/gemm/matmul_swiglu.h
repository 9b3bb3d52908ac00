// GEMMs with SwiGLU, or its derivative, fused into the epilogue (sm_90a, bf16), which saves a pass over memory. Sums
// are fp32 and are rounded to bf16 before SwiGLU, as a separate GEMM would round them, so the results are those of
// Matmul and swiglu.h up to the order of the sums. That order is fixed: the same bits every time.
//
// A row of gate_up is [gate F | up F]. Weights are as Hugging Face stores them. All arrays are aligned to 16 bytes.
//
// Errors: Exit::environment if the driver makes no tensor maps. Where matmul_swiglu_computes() is false, the launch fails.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// Whether the current device and these sizes are supported: Hopper, and C and F multiples of 8.
bool matmul_swiglu_computes(std::int64_t C, std::int64_t F);

// gate_up [N, 2F] = x [N, C] W^T with W [2F, C]; swiglu_out [N, F] = silu(gate) up, unless it is null.
void gate_up_swiglu(__nv_bfloat16* gate_up, __nv_bfloat16* swiglu_out, const __nv_bfloat16* x,
                    const __nv_bfloat16* weight, std::int64_t N, std::int64_t C, std::int64_t F, cudaStream_t stream);

// With dout [N, C] W, W [C, F], as the gradient of swiglu_out: replaces gate_up [N, 2F] by its gradient. `swiglu_out`
// [N, F], unless null, gets the forward pass's values again, bit for bit.
void down_input_grad_swiglu(__nv_bfloat16* gate_up, __nv_bfloat16* swiglu_out, const __nv_bfloat16* dout,
                            const __nv_bfloat16* weight, std::int64_t N, std::int64_t C, std::int64_t F,
                            cudaStream_t stream);

}  // namespace weft::cuda
