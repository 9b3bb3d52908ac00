// Rounds bf16 tensors to fp8, as operands of Matmul's fp8 GEMMs. The specification is llmc/cpu/fp8.h; codes and counters
// equal those of the CPU bit for bit.
//
// A kernel reads its source once and writes the codes in one or both layouts: as the source lies, and transposed. What
// the layouts and the GEMMs cost: dev/performance/fp8.md. All sizes are multiples of 16, all arrays are aligned to 16
// bytes. Functions queue their work in `stream` and return.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/base/fp8.h"

namespace weft::cuda {

// Where the codes of a tensor [N, C] go, its scale and its counters; all on the device.
struct Fp8Target {
  std::uint8_t* codes = nullptr;       // [N, C]; null: not wanted
  std::uint8_t* transposed = nullptr;  // [C, N]; null: not wanted
  const float* scale = nullptr;        // 2^exponent; may be null where no codes are wanted
  Fp8Counters* counters = nullptr;     // accumulated into: amax and, with codes, the counts; null: not wanted

  WEFT_HOST_DEVICE bool writes() const { return codes != nullptr || transposed != nullptr; }
};

// A matrix [rows, K] on the device: row r is scales[r] times the codes of e4m3 in codes[r, :]. Codes are aligned to 16 bytes.
struct Fp8Rows {
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
};

// Rounds x [N, C] to `format`.
void quantize_fp8(Fp8Format format, const Fp8Target& to, const __nv_bfloat16* x, std::int64_t N, std::int64_t C,
                  cudaStream_t stream);

// transposed [C, N] from the codes [N, C] of either format.
void transpose_fp8(std::uint8_t* transposed, const std::uint8_t* codes, std::int64_t N, std::int64_t C,
                   cudaStream_t stream);

// out [N, F] = silu(gate) up of gate_up [N, 2F] (llmc/cuda/op/elementwise/swiglu.h), rounded from fp32 to e4m3 at once. `plain`
// [N, F], unless null, gets what swiglu_forward() stores.
void swiglu_forward_fp8(const Fp8Target& out, const __nv_bfloat16* gate_up, std::int64_t N, std::int64_t F,
                        cudaStream_t stream, __nv_bfloat16* plain = nullptr);

// dgate_up [N, 2F], the gradient for dout [N, F], in e5m2; and the forward pass's out [N, F] again in e4m3, with the
// codes of swiglu_forward_fp8() for the same scale. Either target may be empty.
void swiglu_backward_fp8(const Fp8Target& dgate_up, const Fp8Target& out, const __nv_bfloat16* dout,
                         const __nv_bfloat16* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream);

// swiglu_backward() that stores its gradient's codes, too: those of the function above, as rows alone (otherwise Exit::internal).
// As there plain_dgate_up [N, 2F] may share gate_up's memory, and plain_out [N, F] may be null.
void swiglu_backward_fp8(const Fp8Target& dgate_up, __nv_bfloat16* plain_dgate_up, __nv_bfloat16* plain_out,
                         const __nv_bfloat16* dout, const __nv_bfloat16* gate_up, std::int64_t N, std::int64_t F,
                         cudaStream_t stream);

// Current scaling: *scale = 2^e and *inverse = 2^-e with e = fp8_exponent(amax) of the tensor's own counters, or 1 where
// amax is not finite.
void fp8_current_scale(float* scale, float* inverse, const Fp8Counters* counters, Fp8Format format,
                       cudaStream_t stream);

}  // namespace weft::cuda
