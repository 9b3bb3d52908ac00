// Linear layers of codes: result[row, o] = (sum over k of x[row, k] w[o, k]) * scale of x's row * scale of w's row, with x
// and w in e4m3, on Hopper's tensor cores. Epilogues are those of rows_matmul.h, and so is batch invariance: a row of x
// has a scale of its own, a function of that row alone (llmc/model/fp8_rows.h).
//
// Order of sums. The tensor core sums 128 values of k and keeps about 14 bits of such a sum. These are added in fp32, in
// order, within each of 1 to 8 splits of K (a function of K and of the weight's number of rows alone), and the splits in
// order. K is padded with zeros to a multiple of 128.
//
// Kernels are part of a chain (hw/launch.cuh). No memory beside the arguments' is used, and a launch may be captured in a
// graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/cuda/op/gemm/rows_matmul.h"

namespace weft::cuda {

// The longest row that quantize_rows_fp8() has kernels for.
inline constexpr std::int64_t kMostFp8RowElements = 32768;

// Why these functions cannot compute with weights [OC, K]; empty if they can. Needs no GPU.
std::string rows_matmul_fp8_unsupported_reason(std::int64_t K, std::int64_t OC);
// Why the current GPU cannot; empty if it can.
std::string rows_matmul_fp8_unsupported_gpu();

// to = x [rows, K] in codes, as fp8_row_scale() and fp8_row_code() have them. x is aligned to 16 bytes. T: bf16 or fp16.
template <typename T>
void quantize_rows_fp8(const Fp8Rows& to, const T* x, std::int64_t rows, std::int64_t K, const LaunchDevice& device,
                       cudaStream_t stream);

// As rows_matmul() of x [io.rows, io.K] and weight [io.OC, io.K] (gated: [2 io.OC, io.K]); io.x, io.weight and
// io.x_is_older are not read, and there is no second input. T: bf16 or fp16. With no rows nothing is launched.
// Exit::usage with the text of rows_matmul_fp8_unsupported_reason(), Exit::environment with that of
// rows_matmul_fp8_unsupported_gpu(); Exit::internal as rows_matmul(), and for gated outputs that are no multiple of 8.
template <typename T>
void rows_matmul_fp8(const RowsMatmul<T>& io, const Fp8Rows& x, const Fp8Rows& weight, const LaunchDevice& device,
                     cudaStream_t stream);

}  // namespace weft::cuda
