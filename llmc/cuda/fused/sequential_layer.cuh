// The order of operators in a layer of the sequential residual, and of the tokens in a launch:
//
//   x_mid = x + output(attention(norm1(x)));  x = x_mid + down(mlp(norm2(x_mid)))
//
// Each arrow of x -> QKV -> attention -> x_mid -> h -> x is an exchange between all blocks. h is exchanged in two
// parts, which hides its exchange: the first part travels while the second is computed, the second while the first is
// multiplied. During the other four exchanges the ring fills. The times are in dev/performance/fused.md, "The
// sequential residual".
#pragma once

#include "llmc/cuda/fused/grouped_attention.cuh"
#include "llmc/cuda/fused/head.cuh"
#include "llmc/cuda/fused/norm.cuh"
#include "llmc/cuda/fused/rows.cuh"
#include "llmc/cuda/fused/sampling.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"
#include "llmc/cuda/op/elementwise/swiglu.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// All tokens of the launch. Each id is the input of the next token; -1 ends the launch.
template <typename K>
__device__ __forceinline__ void Consumer<K>::run_sequential() {
  const Parameters& p = c.p;
  std::int32_t id = p.first_id;
  int token = 0;
  for (; token < p.count && id >= 0; ++token) {
    if constexpr (K::kInstrumented) stamping = p.instruments.timeline != nullptr && token == p.count - 1;
    load_rope(p.position + token);
    for (int l = 0; l < p.L; ++l) run_sequential_layer(l, token, id);
    if (token < p.num_more) {
      id = given_id(token);
      continue;
    }
    run_head(token);
    id = p.sampling.greedy ? greedy_id(token) : sampled_id(token);
  }
  if (thread == 0) *const_cast<volatile int*>(&c.flags.stop) = token;
}

template <typename K>
__device__ __forceinline__ void Consumer<K>::run_sequential_layer(int l, int token, std::int32_t id) {
  const int position = c.p.position + token;
  find_place();
  float x[kInputs];
  {
    // loaded early, so that it arrives during the wait for x
    const NormWeight norm = load_norm(layers[l].norm1_weight, layers[l].norm1_bias);
    load_residual(l, token, id, x);
    normalize_one(norm, x);
  }
  stamp(l, FusedPhase::norms_done);
  sequential_qkv_rows(l, x);
  find_place();
  attend_groups(l, position);
  find_place();
  middle_rows(l, x);
  {
    const NormWeight norm = load_norm(layers[l].norm2_weight, layers[l].norm2_bias);
    load_vector<kRowLoads>(c.p.x_mid, c.p.C, step + 1, x);
    stamp(l, FusedPhase::middle_here);
    normalize_one(norm, x);
  }
  hidden_rows(l, token, x);
  down_rows(l);
  ++step;
}

// Copies cos and sin of the token's position to shared memory. The caller's next barrier precedes their use.
template <typename K>
__device__ __forceinline__ void Consumer<K>::load_rope(int position) const {
  const int half = c.p.rope_half;
  float* to = reinterpret_cast<float*>(shared + at.rope);
  for (int e = thread; e < 2 * half; e += threads) {
    const float* table = e < half ? c.p.rope_cos : c.p.rope_sin;
    to[e] = __ldg(table + static_cast<std::int64_t>(position) * half + (e < half ? e : e - half));
  }
}

// Partial sums of `rows` rows of a matrix, which come in ceil(rows / chunk_rows) chunks, times `input`. A chunk holds
// kEach rows of `width` elements for each group of warps. If chunk_rows is half of that, the second half of a chunk has
// the same rows of a second matrix, whose sums are stored `rows` further on. Otherwise as narrow_rows().
template <typename K>
template <int kLoads, int kEach>
__device__ __forceinline__ void Consumer<K>::multiply_chunks(int rows, int chunk_rows, int width,
                                                             const float (&input)[kLoads * kLaneElements],
                                                             bool accumulate) {
  const Parameters& p = c.p;
  const int row_bytes = 2 * width, chunks = (rows + chunk_rows - 1) / chunk_rows;
  const unsigned own_bytes = warp_r * kEach * row_bytes;
  float* partial =
      reinterpret_cast<float*>(shared + at.partials) + (partial_buffer * p.warps_k + warp_k) * p.partial_rows;
  int offset[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) offset[i] = piece(i) * kLaneElements < width ? piece(i) * 16 : -1;
  uint4 w[2][kEach][kLoads] = {};
  const auto add = [&](float* sums, const uint4(&of)[kEach][kLoads]) {
    float each[kLoads][kEach] = {};  // independent accumulators, so that the additions overlap
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) dot<S>(each[i][j], of[j][i], input + i * kLaneElements);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      sums[j] = each[0][j];
#pragma unroll
      for (int i = 1; i < kLoads; ++i) sums[j] += each[i][j];
    }
  };
  if (chunks > 0) load_chunk(w[0], own_bytes, row_bytes, offset);
  for (int chunk = 0; chunk < chunks; chunk += 2) {
    float sums[2 * kEach];
    if (chunk + 1 < chunks) load_chunk(w[1], own_bytes, row_bytes, offset);
    add(sums, w[0]);
    if (chunk + 2 < chunks) load_chunk(w[0], own_bytes, row_bytes, offset);
    add(sums + kEach, w[1]);
    const float sum = warp_fold(sums, lane);
    constexpr int kSpan = kWarpSize / (2 * kEach);
    const int slot = lane / kSpan, of_chunk = chunk + slot / kEach, row = warp_r * kEach + slot % kEach;
    const bool second = row >= chunk_rows;
    const int target = of_chunk * chunk_rows + (second ? row - chunk_rows : row);
    if (lane % kSpan == 0 && target < rows) {
      float& place = partial[second ? rows + target : target];
      place = accumulate ? place + sum : sum;
    }
  }
}

// Partial sums of `rows` rows of `width` elements of each of `matrices` matrices (2: gate and up) times `input`, which
// is overwritten where it has several bands (quantized_rows.cuh).
template <typename K>
template <int kLoads, int kEach>
__device__ __forceinline__ void Consumer<K>::multiply_part(int rows, int matrices, int width,
                                                           float (&input)[kLoads * kLaneElements], bool accumulate) {
  if constexpr (K::kQuantized) {
    multiply_stream<typename K::Format, kLoads>(matrices * rows, width, input, accumulate);
  } else {
    multiply_chunks<kLoads, kEach>(rows, kEach * c.p.warps_r / matrices, width, input, accumulate);
  }
}

// Adds the partial sums of a row in the order of the warps.
template <typename K>
__device__ __forceinline__ float Consumer<K>::partial_sum(int target) const {
  const float* partial =
      reinterpret_cast<const float*>(shared + at.partials) + partial_buffer * c.p.warps_k * c.p.partial_rows + target;
  float of_warp[kSequentialWarps];  // all loads before the first addition
#pragma unroll
  for (int k = 0; k < kSequentialWarps; ++k) of_warp[k] = k < c.p.warps_k ? partial[k * c.p.partial_rows] : 0.0f;
  float sum = of_warp[0];
#pragma unroll
  for (int k = 1; k < kSequentialWarps; ++k) sum += of_warp[k];
  return sum;
}

// As finish_rows(), by partial_sum().
template <typename K>
template <typename Finish>
__device__ __forceinline__ void Consumer<K>::finish_sums(int count, const Finish& finish) {
  sync();
  if (thread < count) finish(thread, partial_sum(thread));
  partial_buffer ^= 1;
}

template <typename K>
__device__ __forceinline__ void Consumer<K>::sequential_qkv_rows(int l, float (&input)[kInputs]) {
  const RowTerms terms = load_terms(layers[l].qkv_bias, layers[l].qkv_scales, own.qkv);
  const int rows = own.qkv.end - own.qkv.begin;
  partial_buffer = 0;
  multiply_part<kRowLoads, kRows>(rows, 1, c.p.C, input, false);
  finish_sums(
      rows, [&](int row, float sum) { store_relaxed(c.p.qkv + own.qkv.begin + row, tagged(terms.of(sum), step + 1)); });
  stamp(l, FusedPhase::qkv_done);
}

// The output projection, added to the residual. `input` is passed as scratch registers.
template <typename K>
__device__ __forceinline__ void Consumer<K>::middle_rows(int l, float (&input)[kInputs]) {
  const Parameters& p = c.p;
  const int rows = own.out.end - own.out.begin;
  if (rows <= 0) return;
  const RowTerms terms = load_terms(layers[l].dense_bias, layers[l].dense_scales, own.out);
  load_vector<kRowLoads>(p.attention, p.q_size, step + 1, input);
  stamp(l, FusedPhase::attention_here);
  partial_buffer = 1;
  multiply_part<kRowLoads, kRows>(rows, 1, p.q_size, input, false);
  finish_sums(rows, [&](int row, float sum) {
    x_own += terms.of(sum);
    store_relaxed(p.x_mid + own.out.begin + row, tagged(x_own, step + 1));
  });
  stamp(l, FusedPhase::middle_written);
}

// MLP-up with GELU, or gate and up with SwiGLU, in two parts.
template <typename K>
__device__ __forceinline__ void Consumer<K>::hidden_rows(int l, int token, float (&input)[kInputs]) {
  const Parameters& p = c.p;
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const RowRange own_rows = hidden_part(p, p.first_part, part, c.block, c.blocks);
    RowTerms terms = load_terms(layers[l].up_bias, p.gated ? nullptr : layers[l].up_scales, own_rows);
    const int rows = own_rows.end - own_rows.begin;
    [[maybe_unused]] float up_row_scale = 1;  // where `terms` has that of gate
    if constexpr (K::kQuantized) {
      if (p.gated && layers[l].up_scales != nullptr && thread < rows) {
        terms.scale = load_scale(layers[l].up_scales + gate_scale(own_rows.begin + thread));
        up_row_scale = load_scale(layers[l].up_scales + up_scale(own_rows.begin + thread));
      }
    }
    partial_buffer = part;
    multiply_part<kRowLoads, kRows>(rows, p.gated ? 2 : 1, p.C, input, false);
    bool write = true;
    if constexpr (K::kInstrumented) {  // the last token never completes
      write = !(p.instruments.lose_an_arrival && c.block == 0 && token == p.count - 1);
    }
    finish_sums(rows, [&](int row, float sum) {
      const auto up = [&] { return partial_sum(rows + row) * (K::kQuantized ? up_row_scale : 1.0f); };
      const float value =
          p.gated ? swiglu<float>(K::kQuantized ? terms.of(sum) : sum, up()) : gelu_exact(terms.of(sum));
      if (write) store_relaxed(p.h + own_rows.begin + row, tagged(value, step + 1));
    });
  }
  stamp(l, FusedPhase::up_done);
}

// MLP-down, part by part, added to the residual.
template <typename K>
__device__ __forceinline__ void Consumer<K>::down_rows(int l) {
  const Parameters& p = c.p;
  const int rows = own.out.end - own.out.begin;
  if (rows <= 0) return;
  const RowTerms terms = load_terms(layers[l].down_bias, layers[l].down_scales, own.out);
  partial_buffer = 0;
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const int begin = part == 0 ? 0 : p.first_part, width = part == 0 ? p.first_part : p.F - p.first_part;
    if (width == 0) break;
    float hidden[kPartLoads * kLaneElements];
    load_vector<kPartLoads>(p.h + begin, width, step + 1, hidden);
    stamp(l, FusedPhase::mlp_up_here);
    multiply_part<kPartLoads, kPartRows>(rows, 1, width, hidden, part > 0);
  }
  finish_sums(rows, [&](int row, float sum) {
    x_own += terms.of(sum);
    store_relaxed(p.x + own.out.begin + row, tagged(x_own, step + 1));
  });
  stamp(l, FusedPhase::x_written);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
