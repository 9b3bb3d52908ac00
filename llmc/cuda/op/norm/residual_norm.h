// Fused dropout + residual + norm on the GPU, as one operator:
//
//   h = dropout(x * rowscale) * colscale + residual        the new residual stream
//   z = norm(h) * (weight + weight_offset) + bias          LayerNorm or RMSNorm
//
// The specification, with every operand's meaning, is llmc/cpu/residual_norm.h. Activations and weights are
// stored in T (float, bf16, fp16), the residual stream in R (T or float), statistics and the gradients of
// weights in fp32.
//
// h is rounded to R before its statistics are computed. How a row is spread over threads, and with it the order of its
// sums, depends on C and the types alone. So the norm of a stored residual_out (passed as `residual`, with x null)
// gives the bits of the call that stored it, with or without dropout.
//
// C is a multiple of 8 up to 16384 and every pointer is aligned to 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/model/norm_shape.h"

namespace weft::cuda {

inline constexpr std::int64_t kMaxNormWidth = 16384;

// Bytes of dynamic shared memory that a block of these kernels may use: the device's limit minus their static memory.
// It is the default of `shared_limit` below; a smaller value serves only to run on one device what another one runs.
int norm_shared_memory();

template <typename T, typename R>
struct ResidualNormForward {
  const T* x = nullptr;             // [rows, C]; null: h = residual (the norm of the stream alone)
  const R* residual = nullptr;      // [rows, C]; null: none
  const float* rowscale = nullptr;  // [rows]; null: 1
  const T* colscale = nullptr;      // [C]; null: 1
  const T* weight = nullptr;        // [C]
  const T* bias = nullptr;          // [C]; null: none
  const T* weight2 = nullptr;       // [C]; null: one output only
  const T* bias2 = nullptr;
  R* residual_out = nullptr;  // [rows, C]; may be `residual` itself; null: not stored
  T* out = nullptr;           // [rows, C]; null with `codes` or `row_codes`
  T* out2 = nullptr;          // [rows, C] iff weight2
  float* mean = nullptr;      // [rows], LayerNorm only; null: not stored
  float* rstd = nullptr;      // [rows]; null: not stored
  // For T and R bf16, one output, C a multiple of 16, no offset: in the place of `out` its codes in e4m3, bit for bit those that
  // quantize_fp8() makes of it; not transposed.
  Fp8Target codes = {};
  // For T of 16 bits, R fp32, the norm of the stream alone, C a multiple of 16, no offset: in the place of `out` its rows in codes,
  // byte for byte those that quantize_rows_fp8() makes of it.
  Fp8Rows row_codes = {};
};
// `overlapping`: launched as part of a chain (hw/launch.cuh); only on a GPU that supports it.
template <typename T, typename R>
void residual_norm_forward(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, cudaStream_t stream,
                           int shared_limit = norm_shared_memory(), bool overlapping = false);

// Without dropout, rowscale and colscale dx equals dresidual (up to their dtypes): request only one of them and save a
// pass over memory.
template <typename T, typename R>
struct ResidualNormBackward {
  const T* dout = nullptr;           // [rows, C]
  const T* dout2 = nullptr;          // [rows, C] iff weight2
  const R* dresidual_out = nullptr;  // [rows, C]: gradient that reaches h from elsewhere; null: 0
  const R* residual_out = nullptr;   // [rows, C]: h of the forward pass; null: recomputed from x and residual
  const T* x = nullptr;              // [rows, C]; needed for colscale's gradient and for recomputing h
  const R* residual = nullptr;
  const float* rowscale = nullptr;
  const T* colscale = nullptr;
  const T* weight = nullptr;
  const T* weight2 = nullptr;
  const float* mean = nullptr;  // [rows], LayerNorm
  const float* rstd = nullptr;  // [rows]
  T* dx = nullptr;              // [rows, C] =; may be dout's memory; null: not computed
  R* dresidual = nullptr;       // [rows, C] =; may be dresidual_out's memory; null: not computed
  float* dweight = nullptr;     // [C] += ; null: not computed
  float* dbias = nullptr;
  float* dweight2 = nullptr;
  float* dbias2 = nullptr;
  float* dcolscale = nullptr;
  // residual_norm_backward_workspace(C, number of the five sums above that are requested) bytes
  void* workspace = nullptr;
};
// The sums over rows are computed block by block, then over the blocks in order: no atomics, the same bits every time
// on one type of GPU.
template <typename T, typename R>
void residual_norm_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream,
                            int shared_limit = norm_shared_memory());
std::size_t residual_norm_backward_workspace(std::int64_t C, int column_sums);

}  // namespace weft::cuda
