// Tensors rounded to fp8 on the GPU: operands of Matmul's GEMMs in fp8. The specification is llmc/cpu/fp8.h; codes and tallies
// are those of the CPU, bit for bit.
//
// A kernel reads its source once and writes the codes in one or both layouts: as the source lies, and transposed. What both
// layouts of an operand and a GEMM of it cost is counted in dev/performance/fp8.md. All sizes are multiples of 16, all
// arrays are aligned to 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/base/fp8.h"

namespace weft::cuda {

// Where the codes of a tensor [N, C] go, and what is known about it; all on the device.
struct Fp8Target {
  std::uint8_t* codes = nullptr;       // [N, C]; null: not wanted
  std::uint8_t* transposed = nullptr;  // [C, N]; null: not wanted
  const float* scale = nullptr;        // 2^exponent; read only where codes are wanted
  Fp8Tally* tally = nullptr;           // is added to: amax and, where codes are wanted, the counts; null: not wanted

  WEFT_HOST_DEVICE bool writes() const { return codes != nullptr || transposed != nullptr; }
};

// x [N, C].
void quantize_fp8(Fp8Format format, const Fp8Target& to, const __nv_bfloat16* x, std::int64_t N, std::int64_t C,
                  cudaStream_t stream);

// out [N, F] = silu(gate) up of gate_up [N, 2F] (llmc/cuda/op/swiglu.h), rounded from fp32 to e4m3 at once.
void swiglu_forward_fp8(const Fp8Target& out, const __nv_bfloat16* gate_up, std::int64_t N, std::int64_t F,
                        cudaStream_t stream);

// dgate_up [N, 2F] of dout [N, F] in e5m2, and the forward pass's out [N, F] again in e4m3, with the codes of
// swiglu_forward_fp8() for the same scale. Either may want nothing.
void swiglu_backward_fp8(const Fp8Target& dgate_up, const Fp8Target& out, const __nv_bfloat16* dout,
                         const __nv_bfloat16* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream);

// The scale of a tensor by its own tally: *scale = 2^e and *inverse = 2^-e with e = fp8_exponent(amax), or 1 where amax is not
// finite.
void fp8_current_scale(float* scale, float* inverse, const Fp8Tally* tally, Fp8Format format, cudaStream_t stream);

}  // namespace weft::cuda
