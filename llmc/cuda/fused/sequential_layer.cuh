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
    load_position(p.position + token);
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
  find_place();
  narrow_matrix(l, token, id, Narrow::qkv);
  find_place();
  attend_groups(l);
  // One code for both: a layer's code exceeds the caches of instructions, and what is not there is waited for.
#pragma unroll 1
  for (int matrix = 1; matrix < 3; ++matrix) {
    find_place();
    narrow_matrix(l, token, id, static_cast<Narrow>(matrix));
  }
  find_place();
  down_rows(l);
  ++step;
}

// What a token's position decides, in shared memory: cos and sin, and the items of attention. The caller's next barrier
// precedes their use, and barriers of the last token's last layer lie behind the last use of what was there.
template <typename K>
__device__ __forceinline__ void Consumer<K>::load_position(int position) const {
  if (thread == 0) {
    c.flags.items = AttentionItems(c.p, c.p, position, c.blocks);
    c.flags.first_item = c.flags.items.at(c.block);
  }
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

// What rows of C elements are multiplied by: this thread's elements of a vector, or the digits of them (quantized_rows.cuh).
template <typename K>
struct Consumer<K>::Operand {
  using Elements = float[kInputs];
  std::conditional_t<K::kQuantized, Digits<typename K::Format, kRowLoads>, const Elements*> of;

  __device__ __forceinline__ Operand(const Consumer& consumer, const Elements& input) {
    if constexpr (K::kQuantized) {
      consumer.make_digits(of, input);
    } else {
      of = &input;
    }
  }
};

// Partial sums of `rows` rows of `width` elements of each of `matrices` matrices (2: gate and up) times `input`.
template <typename K>
__device__ __forceinline__ void Consumer<K>::multiply_part(int rows, int matrices, int width, const Operand& input) {
  if constexpr (K::kQuantized) {
    multiply_band(matrices * rows, groups_of(width), input.of, false);
  } else {
    multiply_chunks<kRowLoads, kRows>(rows, kRows * c.p.warps_r / matrices, width, *input.of, false);
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

// Chooses the buffer of partial sums for use `use` of the five in a layer. They take turns, so that the barrier of the other one
// lies between the readers of a buffer and its next use.
template <typename K>
__device__ __forceinline__ void Consumer<K>::use_partial_sums(int use) {
  partial_buffer = static_cast<int>((step + static_cast<unsigned>(use)) & 1);
}
// As finish_rows(), by partial_sum().
template <typename K>
template <typename Finish>
__device__ __forceinline__ void Consumer<K>::finish_sums(int count, const Finish& finish) {
  sync();
  if (thread < count) finish(thread, partial_sum(thread));
}

// QKV, the output projection, which is added to the residual, or MLP-up with GELU, gate and up with SwiGLU, in two parts.
template <typename K>
__device__ __forceinline__ void Consumer<K>::narrow_matrix(int l, int token, std::int32_t id, Narrow matrix) {
  const Parameters& p = c.p;
  const Layer& w = layers[l];
  const bool output = matrix == Narrow::output, hidden = matrix == Narrow::hidden, gated = hidden && p.gated;
  RowRange range;
  RowTerms terms;
  [[maybe_unused]] float up_row_scale = 1;  // where `terms` has that of gate
  const auto begin_part = [&](int part) {
    range = hidden ? hidden_part(p, p.first_part, part, c.block, c.blocks) : output ? own.out : own.qkv;
    const float* scales = hidden ? w.up_scales : output ? w.dense_scales : w.qkv_scales;
    const S* bias = hidden ? w.up_bias : output ? w.dense_bias : w.qkv_bias;
    terms = load_terms(bias, gated ? nullptr : scales, range);
    if constexpr (K::kQuantized) {
      if (gated && scales != nullptr && thread < range.end - range.begin) {
        terms.scale = load_scale(scales + gate_scale(range.begin + thread));
        up_row_scale = load_scale(scales + up_scale(range.begin + thread));
      }
    }
  };
  float x[kInputs];
  {
    // Loaded early, so that they arrive during the wait for x.
    begin_part(0);
    const NormWeight norm = hidden ? load_norm(w.norm2_weight, w.norm2_bias) : load_norm(w.norm1_weight, w.norm1_bias);
    if (matrix == Narrow::qkv && l == 0) {
      load_embedding(id, x);
    } else {
      const TaggedValue* vector = hidden ? p.x_mid : output ? p.attention : p.x;
      load_vector<kRowLoads>(vector, output ? p.q_size : p.C, output || hidden ? step + 1 : step, x);
    }
    stamp(l, hidden ? FusedPhase::middle_here : output ? FusedPhase::attention_here : FusedPhase::x_here);
    if (!output) normalize_late(norm, hidden ? 1 : 0, x);
  }
  if (matrix == Narrow::qkv) stamp(l, FusedPhase::norms_done);
  const Operand operand(*this, x);
#pragma unroll 1
  for (int part = 0; part < (hidden ? 2 : 1); ++part) {
    if (part == 1) begin_part(1);
    const int rows = range.end - range.begin;
    use_partial_sums(static_cast<int>(matrix) + part);
    multiply_part(rows, gated ? 2 : 1, output ? p.q_size : p.C, operand);
    finish_sums(rows, [&](int row, float sum) {
      if constexpr (K::kInstrumented) {  // the last token never completes
        if (hidden && p.instruments.lose_an_arrival && c.block == 0 && token == p.count - 1) return;
      }
      const float factor = output ? 1.0f : norm_factor(hidden ? 1 : 0);
      float value = terms.of(factor * sum);
      if (gated) {
        value = swiglu<float>(value, factor * partial_sum(rows + row) * (K::kQuantized ? up_row_scale : 1.0f));
      } else if (hidden) {
        value = gelu_exact(value);
      } else if (output) {
        value = x_own += value;
      }
      TaggedValue* to = hidden ? p.h : output ? p.x_mid : p.qkv;
      store_relaxed(to + range.begin + row, tagged(value, step + 1));
    });
  }
  stamp(l, hidden ? FusedPhase::up_done : output ? FusedPhase::middle_written : FusedPhase::qkv_done);
}

// MLP-down, part by part, added to the residual.
template <typename K>
__device__ __forceinline__ void Consumer<K>::down_rows(int l) {
  const Parameters& p = c.p;
  const int rows = own.out.end - own.out.begin;
  const RowTerms terms = load_terms(layers[l].down_bias, layers[l].down_scales, own.out);
  use_partial_sums(4);
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const int begin = part == 0 ? 0 : p.first_part, width = part == 0 ? p.first_part : p.F - p.first_part;
    if (width == 0 || rows <= 0) break;  // where there are no rows, others need not wait until this block has read h
    float hidden[kPartLoads * kLaneElements];
    load_vector<kPartLoads>(p.h + begin, width, step + 1, hidden);
    stamp(l, FusedPhase::mlp_up_here);
    if constexpr (K::kQuantized) {
      multiply_stream<typename K::Format, kPartLoads>(rows, width, hidden, part > 0);
    } else {
      multiply_chunks<kPartLoads, kPartRows>(rows, kPartRows * p.warps_r, width, hidden, part > 0);
    }
  }
  finish_sums(rows, [&](int row, float sum) {
    x_own += terms.of(sum);
    store_relaxed(p.x + own.out.begin + row, tagged(x_own, step + 1));
  });
  stamp(l, FusedPhase::x_written);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
