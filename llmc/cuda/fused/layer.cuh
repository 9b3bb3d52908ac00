// The order of operators in a layer of the parallel residual, and of the tokens in a launch.
#pragma once

#include "llmc/cuda/fused/attention.cuh"
#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/fused/head.cuh"
#include "llmc/cuda/fused/norm.cuh"
#include "llmc/cuda/fused/rows.cuh"
#include "llmc/cuda/fused/sampling.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// All tokens of the launch. Each id is the input of the next token; -1 ends the launch.
template <typename K>
__device__ __forceinline__ void Consumer<K>::run() {
  const Parameters& p = c.p;
  std::int32_t id = p.first_id;
  for (int token = 0; token < p.count && id >= 0; ++token) {
    if constexpr (K::kInstrumented) stamping = p.instruments.timeline != nullptr && token == p.count - 1;
    for (int l = 0; l < p.L; ++l) run_layer(l, token, id);
    if (c.layer_only()) {  // no head: every id is 0
      const FusedEnd end = token + 1 == p.count ? FusedEnd::length : FusedEnd::running;
      id = 0;
      if (c.block == 0 && thread == 0) tell_host({id, SampleError::none}, token, end);
      continue;
    }
    if (token < p.num_more) {
      id = given_id(token);
      continue;
    }
    run_head(token);
    id = p.sampling.greedy ? greedy_id(token) : sampled_id(token);
  }
  if (thread == 0) *const_cast<volatile int*>(&c.flags.stop) = 1;
}

// The parallel residual: h' = h + attention(norm1(h)) + mlp(norm2(h)). Attention is computed between MLP-up and
// MLP-down.
template <typename K>
__device__ __forceinline__ void Consumer<K>::run_layer(int l, int token, std::int32_t id) {
  const int position = c.p.position + token;
  find_place();
  float attention_input[kInputs], mlp_input[kInputs];
  {
    const NormWeights norms = load_norms(layers[l], true);  // loaded early, so that they arrive during the wait for x
    load_residual(l, token, id, attention_input);
    normalize(norms, attention_input, mlp_input);
  }
  stamp(l, FusedPhase::norms_done);
  input_rows(l, token, attention_input, mlp_input);
  find_place();
  attend(l, position, splits_at(position, c.p.max_splits));
  find_place();
  output_rows(l, attention_input);
  ++step;
}

// This thread's elements of the residual stream entering layer l. For the first layer of a token they come from the embedding.
template <typename K>
__device__ __forceinline__ void Consumer<K>::load_residual(int l, int token, std::int32_t id, float (&x)[kInputs]) {
  const Parameters& p = c.p;
  if (l == 0 && !(c.layer_only() && token > 0)) {
    load_embedding(id, x);
  } else {
    load_vector<kRowLoads>(p.x, p.C, step, x);
  }
  stamp(l, FusedPhase::x_here);
}
// The same of an embedding, and the element that this thread owns.
template <typename K>
__device__ __forceinline__ void Consumer<K>::load_embedding(std::int32_t id, float (&x)[kInputs]) {
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (piece(i) * kLaneElements < c.p.C) {
      packed = __ldg(reinterpret_cast<const uint4*>(c.p.embedding + static_cast<std::int64_t>(id) * c.p.C) + piece(i));
    }
    widen<S>(packed, x + i * kLaneElements);
  }
  const int row = own.out.begin + thread;
  if (row < own.out.end) x_own = to_float(c.p.embedding[static_cast<std::int64_t>(id) * c.p.C + row]);
}

// QKV, then MLP-up and GELU, in a loop that is not unrolled: a layer's code exceeds the instruction cache. `input` is
// the input of QKV and is overwritten.
template <typename K>
__device__ __forceinline__ void Consumer<K>::input_rows(int l, int token, float (&input)[kInputs],
                                                        const float (&mlp_input)[kInputs]) {
#pragma unroll 1
  for (int matrix = 0; matrix < 2; ++matrix) {
    const bool up = matrix == 1;
    const RowRange range = up ? own.up : own.qkv;
    const RowTerms terms = up ? load_terms(layers[l].up_bias, layers[l].up_scales, range)
                              : load_terms(layers[l].qkv_bias, layers[l].qkv_scales, range);
    const int rows = range.end - range.begin;
    partial_buffer = matrix;
    multiply_rows<kRowLoads>(rows, c.p.C, input);
    finish_rows(rows, [&](int row, float sum) {
      if constexpr (K::kInstrumented) {  // the last token never completes
        if (up && c.p.instruments.lose_an_arrival && c.block == 0 && token == c.p.count - 1) return;
      }
      const float value = terms.of(sum);
      store_relaxed((up ? c.p.h : c.p.qkv) + range.begin + row, tagged(up ? gelu_exact(value) : value, step + 1));
    });
    stamp(l, up ? FusedPhase::up_done : FusedPhase::qkv_done);
#pragma unroll
    for (int j = 0; j < kInputs; ++j) input[j] = mlp_input[j];
  }
}

// MLP-down and the output projection of the same rows; their sum is added to the residual. `input` is passed as scratch
// registers.
template <typename K>
__device__ __forceinline__ void Consumer<K>::output_rows(int l, float (&input)[kInputs]) {
  const Parameters& p = c.p;
  const int rows = own.out.end - own.out.begin;
  float mlp = 0;  // MLP-down's result for this thread's row
  const RowTerms down_terms = load_terms(layers[l].down_bias, layers[l].down_scales, own.out),
                 dense_terms = load_terms(layers[l].dense_bias, layers[l].dense_scales, own.out);
  if (rows <= 0) return;
  partial_buffer = 0;
  if (!c.layer_only()) {
    float hidden[kHidden];
    load_vector<4 * kRowLoads>(p.h, p.F, step + 1, hidden);
    stamp(l, FusedPhase::mlp_up_here);
    multiply_rows<4 * kRowLoads>(rows, p.F, hidden);
    finish_rows(rows, [&](int, float sum) { mlp = down_terms.of(sum); });
    stamp(l, FusedPhase::down_done);
  }
  load_vector<kRowLoads>(p.attention, p.C, step + 1, input);
  stamp(l, FusedPhase::attention_here);
  multiply_rows<kRowLoads>(rows, p.C, input);
  finish_rows(rows, [&](int row, float sum) {
    x_own += dense_terms.of(sum) + mlp;
    store_relaxed(p.x + own.out.begin + row, tagged(x_own, step + 1));
  });
  stamp(l, FusedPhase::x_written);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
