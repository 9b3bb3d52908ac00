// GEMMs on codes of fp8 with SwiGLU, or its derivative, in the epilogue, which rounds the results to codes at once
// (sm_90a). That saves two passes over memory: swiglu_forward_fp8() and swiglu_backward_fp8() (fp8.h). Sums are rounded
// to bf16 before SwiGLU, as Matmul rounds them, so what follows from equal sums is equal: codes and counters bit for bit.
// Sums stay in the tensor core, which keeps about 14 bits of them (fast accumulation). Forward that is how Matmul adds,
// up to the order; the gradient of an input Matmul adds in fp32. The order is fixed: the same bits every time.
//
// A row of gate_up is [gate F | up F]. All arrays are aligned to 16 bytes.
//
// Errors: Exit::internal if a size is no multiple of 16 (N may be 0) or a layout is asked for that is not written,
// Exit::environment if the driver makes no tensor maps. Where matmul_swiglu_fp8_computes() is false, the launch fails.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/cuda/op/gemm/matmul.h"

namespace weft::cuda {

// Whether the current device is supported: Hopper.
bool matmul_swiglu_fp8_computes();

// gate_up [N, 2F] = x [N, C] W^T with W [2F, C], both e4m3. out [N, F] = silu(gate) up in e4m3, as rows only; without
// codes in the target only gate_up is computed.
void gate_up_swiglu_fp8(__nv_bfloat16* gate_up, const Fp8Target& out, const Fp8Matrix& x, const Fp8Matrix& weight,
                        std::int64_t N, std::int64_t C, std::int64_t F, cudaStream_t stream);

// With dout [N, C] W as the gradient of SwiGLU's result, dout in e5m2, and the transposed weight [F, C] in e4m3:
// dgate_up [N, 2F], the gradient of gate_up, in e5m2 in both layouts, and the result again, in e4m3, transposed [F, N].
// All three are written. The counters of `out` are not added to.
void down_input_grad_swiglu_fp8(const Fp8Target& dgate_up, const Fp8Target& out, const Fp8Matrix& dout,
                                const Fp8Matrix& weight_transposed, const __nv_bfloat16* gate_up, std::int64_t N,
                                std::int64_t C, std::int64_t F, cudaStream_t stream);

}  // namespace weft::cuda
