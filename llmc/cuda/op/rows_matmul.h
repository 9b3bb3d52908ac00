// Linear layers of the rows of an inference step, batch-invariant: the bits of a row of the result depend on that row of x
// alone, not on how many rows there are, where it lies, or what its neighbours hold. So decoding row by row, a prompt in one
// step and a prompt in any chunks give the same numbers.
//
// Order of sums. An element is a sum over K in fp32. On Hopper in 16 bits K is cut into 1 to 8 splits, a function of K and of
// the rows of the weight alone; in a split, K is walked in order, and the splits are added in order. On the portable
// path, and in fp32, K is walked in order as a whole. Then come bias and epilogue. The paths need not give the same bits.
//
// Two inputs, as the output projection and the down projection of the parallel residual: x weight^T + x2 weight2^T is one sum
// over K and then K2 on Hopper in 16 bits, each of them filled up with zeros to a multiple of 64; the biases are added to each
// other, and their sum to it. Elsewhere these are two launches, each of which adds to the residual stream.
//
// Kernels are part of a chain (hw/launch.cuh): they fetch weights before their predecessor has finished, and x (but see
// x_is_older), the residual stream and all results after it. No memory beside the arguments' is used, and a launch may be
// captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/cuda/op/gemv.h"

namespace weft::cuda {

enum class RowsEpilogue {
  store,       // out = sum + bias
  gelu,        // out = gelu(sum + bias), with erf
  swiglu,      // out = silu(gate) up, both rounded to S before, as swiglu.h finds them; without a bias
  add,         // out_fp32 += sum + bias
  store_fp32,  // out_fp32 = sum + bias
};

// S: float, bf16 or fp16. x and weight are aligned to 16 bytes; results to 16 bytes for full speed, else to their elements.
template <typename S>
struct RowsMatmul {
  const S* x = nullptr;       // [rows, K]
  const S* weight = nullptr;  // [OC, K]; swiglu: [2 OC, K], rows of gate, then rows of up
  const S* bias = nullptr;    // [OC] or null
  std::int64_t rows = 0, K = 0, OC = 0;
  RowsEpilogue epilogue = RowsEpilogue::store;
  S* out = nullptr;  // [rows, OC]: store, gelu, swiglu
  // x was complete before the predecessor in the chain let this kernel start (paged_attention() does so late enough): it is
  // read without waiting for the predecessor, and both run at the same time as far as there is room.
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

// Why rows_matmul() cannot compute with weights of this size (either of two): K must be a multiple of 16 bytes. Empty where it can.
std::string rows_matmul_refusal(std::int64_t K, std::int64_t OC, DType dtype);

// Any number of rows; none: nothing is launched. Exit::usage with the refusal's text for other sizes, Exit::internal for
// pointers that are null or not aligned, and for a second input with another epilogue than `add`.
template <typename S>
void rows_matmul(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream,
                 RowsPath path = RowsPath::automatic);

}  // namespace weft::cuda
