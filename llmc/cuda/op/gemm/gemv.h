// Linear layers of one token: matrix times vector, bound by memory bandwidth. Each kernel reads its matrices once, adds
// in fp32 in an order that does not depend on timing, and includes the pointwise operators before and after the GEMV.
//
// W is the storage type of matrices, A that of activations, biases and norms (float, bf16, fp16); the residual stream
// is fp32. A row of every matrix is a multiple of 16 bytes, and every pointer is aligned to 16 bytes.
//
// Launched as part of a chain (hw/launch.cuh): a kernel fetches its first weights while its predecessor still runs.
// Exit::usage for sizes beyond the limits below.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/gemm/linear.h"

namespace weft::cuda {

// What launches need to know about the GPU.
struct LaunchDevice {
  int multiprocessors = 0;
  bool overlapping = false;  // programmatic dependent launch: sm_90 and later
};
LaunchDevice launch_device();

// LayerNorms of the residual stream and the linear layers that read them, in one pass:
//   out[i] = activation(W_i norm_i(residual) + b_i)
// One output, or two that share mean and deviation (the parallel residual of GPT-NeoX).
template <typename W, typename A>
struct NormGemv {
  struct Output {
    Norm<A> norm;               // norm over the residual [K]
    GemvLinear<W, A> linear;    // [rows, K]
    std::int64_t rows = 0;      // 0: this output is unused
    bool gelu = false;          // apply GELU to the result
    A* out = nullptr;           // [rows]; or
    float* fp32_out = nullptr;  // [rows] in fp32: logits
  };
  const float* residual = nullptr;  // [K]
  std::int64_t K = 0;               // at most kMaxNormGemvWidth
  float eps = 0;
  Output outputs[2];
};
inline constexpr std::int64_t kMaxNormGemvWidth = 16384;
template <typename W, typename A>
void norm_gemv(const NormGemv<W, A>& io, const LaunchDevice& device, cudaStream_t stream);

// The linear layers whose results accumulate into the residual stream, one or two at once:
//   residual[r] += sum over i of W_i[r] x_i + b_i[r]
template <typename W, typename A>
struct ResidualGemv {
  struct Input {
    const A* x = nullptr;     // [K]
    GemvLinear<W, A> linear;  // [rows, K]
    std::int64_t K = 0;       // 0: this input is unused
  };
  Input inputs[2];
  float* residual = nullptr;  // [rows], in place
  std::int64_t rows = 0;
};
// The most bytes of one row over both inputs.
inline constexpr std::int64_t kMaxResidualGemvBytes = 10 * 640 * 16;
template <typename W, typename A>
void residual_gemv(const ResidualGemv<W, A>& io, const LaunchDevice& device, cudaStream_t stream);

}  // namespace weft::cuda
