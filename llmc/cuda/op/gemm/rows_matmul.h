// Batch-invariant linear layers for the rows of an inference step: the bits of a row of the result depend on that row
// of x alone, not on how many rows there are, where it lies, or what other rows hold. So decoding row by row, a prompt
// in one step and a prompt in any chunks give the same numbers.
//
// Order of sums. An element is a sum over K in fp32. On Hopper in 16 bits K is cut into 1 to 8 splits, a function of K
// and of the weight's number of rows alone; within a split K is walked in order, and the splits are added in order. On
// the portable path, and in fp32, all of K is walked in order. Bias and epilogue follow. The paths need not give the
// same bits.
//
// Two inputs, for the output projection and the down projection of the parallel residual: on Hopper in 16 bits x
// weight^T + x2 weight2^T is one sum over K and then K2, each padded with zeros to a multiple of 64; the sum of both
// biases is added to it. Elsewhere it is two launches, each of which adds to the residual stream.
//
// Kernels are part of a chain (hw/launch.cuh): they fetch weights before the preceding kernel has ended, and x (except
// with x_is_older), the residual stream and everything else after it. No memory beside the arguments' is used, and a
// launch may be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/base/host_device.h"
#include "llmc/cuda/runtime/device.h"

namespace weft::cuda {

enum class RowsEpilogue {
  store,       // out = sum + bias
  gelu,        // out = gelu(sum + bias), with erf
  swiglu,      // out = silu(gate) up, with gate and up rounded to S first, as swiglu.h has them; no bias
  geglu_tanh,  // the same with GELU's approximation by tanh in the place of silu
  add,         // out_fp32 += sum + bias
  store_fp32,  // out_fp32 = sum + bias
};

// Whether the weight has rows of gate and of up.
WEFT_HOST_DEVICE constexpr bool gated(RowsEpilogue epilogue) {
  return epilogue == RowsEpilogue::swiglu || epilogue == RowsEpilogue::geglu_tanh;
}

// S: float, bf16 or fp16. x and weight are aligned to 16 bytes. Results aligned to 16 bytes are stored faster;
// otherwise alignment to an element is enough.
template <typename S>
struct RowsMatmul {
  const S* x = nullptr;       // [rows, K]
  const S* weight = nullptr;  // [OC, K]; gated: [2 OC, K], rows of gate, then rows of up
  const S* bias = nullptr;    // [OC] or null
  std::int64_t rows = 0, K = 0, OC = 0;
  RowsEpilogue epilogue = RowsEpilogue::store;
  S* out = nullptr;  // [rows, OC]: store, gelu, gated
  // x was complete before the preceding kernel of the chain let this one start (paged_attention() does so late enough).
  // It is then read without waiting, and both kernels overlap as far as there is room.
  bool x_is_older = false;
  float* out_fp32 = nullptr;  // [rows, OC]: add, store_fp32
  // A second input; K2 = 0: none. With `add` only.
  const S* x2 = nullptr;       // [rows, K2]
  const S* weight2 = nullptr;  // [OC, K2]
  const S* bias2 = nullptr;    // [OC] or null
  std::int64_t K2 = 0;
};

enum class RowsPath {
  automatic,  // wgmma on Hopper in 16 bits, otherwise portable
  portable,   // mma.sync in 16 bits, also on Hopper
};

// Why rows_matmul() cannot compute with weights [OC, K] of this type; empty if it can. A row of K elements must be a
// multiple of 16 bytes.
std::string rows_matmul_unsupported_reason(std::int64_t K, std::int64_t OC, DType dtype);

// Any number of rows; with none, nothing is launched. Exit::usage with the text of rows_matmul_unsupported_reason() for other
// sizes; Exit::internal for pointers that are null or not aligned, and for a second input with an epilogue other than
// `add`.
template <typename S>
void rows_matmul(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream,
                 RowsPath path = RowsPath::automatic);

}  // namespace weft::cuda
