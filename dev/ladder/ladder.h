// The two problems of the ladder and the list of steps that solve each. norm.cu and attention.cu hold the kernels,
// ladder.cu runs, checks and times them, README.md says what each step teaches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "llmc/model/head_view.h"

namespace weft::ladder {

using bf16 = __nv_bfloat16;

// h = x + residual, rounded to bf16 and kept;  out = (h - mean) rstd weight + bias, with statistics in fp32.
// LayerNorm: mean and variance of h. RMSNorm: mean = 0, no bias. All of it bf16, every pointer aligned to 16 bytes; no
// output shares memory with an input.
struct NormProblem {
  std::int64_t rows = 0;
  int C = 0;  // a multiple of 8, at most 16384
  bool layernorm = false;
  float eps = 0;
  const bf16 *x = nullptr, *residual = nullptr;   // [rows, C]
  const bf16 *weight = nullptr, *bias = nullptr;  // [C]; bias is null for RMSNorm
  bf16 *residual_out = nullptr, *out = nullptr;   // [rows, C]
};

// out = softmax(q k^T scale) v, causal, as many queries as keys (TQ = TK = T). Query head h reads K/V head
// h / (NH / NKV). Head size 64 or 128; rows of all views are aligned to 16 bytes.
struct AttentionProblem {
  AttentionShape shape;
  HeadViewOf<const bf16> q, k, v;
  HeadViewOf<bf16> out;
  float* scores = nullptr;  // [B, NH, T, T], read and written by the first step alone
};

// launch() queues the step's kernels; a launch that fails throws weft::Error.
template <typename Problem>
struct Step {
  const char* name;
  void (*launch)(const Problem& problem, cudaStream_t stream);
  bool (*available)() = nullptr;  // null: on every GPU from sm_80 on
};

const std::vector<Step<NormProblem>>& norm_steps();
const std::vector<Step<AttentionProblem>>& attention_steps();

}  // namespace weft::ladder
