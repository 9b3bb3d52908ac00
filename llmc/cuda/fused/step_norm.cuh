// What the matrices of a layer are multiplied by in the step kernel: the residual stream as all blocks have written it,
// normalized.
//
// A step of one row divides the row among all lanes, 8 neighbouring elements each, and exchanges what comes out, so that
// it lies as operands of mma. In a step of several rows lanes 4 r to 4 r + 3 have row r in the pieces of its operand, and
// nothing is exchanged: with 8 rows divided as one row is, their norms took 8.2 us a layer rather than 4.0
// (dev/performance/fused.md, "Counted again"). Sums are added in the same order in both, that of warp_sum(): so a row
// has the same bits.
#pragma once

#include "llmc/cuda/fused/step_consumer.cuh"
#include "llmc/cuda/hw/block.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Hides an address from the compiler. In a loop that polls it would otherwise compute each address again in every round,
// by loads of parameters that wait for each other.
__device__ __forceinline__ const TaggedValue* opaque(const TaggedValue* from) {
  asm volatile("" : "+l"(from));
  return from;
}

// Of several rows: lane 4 r + t has the pieces of row r that are its own in the tiles (StepConsumer::piece()).
template <typename S, int kRows>
struct StepNorm {
  using Consumer = StepConsumer<S, kRows>;
  using Operand = typename Consumer::Operand;
  static constexpr int kPieces = 2 * kWarpTiles;  // piece k is in tile k / 2, half k % 2

  Consumer& k;
  float x[kPieces * kLaneElements];

  __device__ __forceinline__ bool has(int piece) const { return k.piece(piece / 2, piece % 2) * kLaneElements < k.p.C; }
  // The residual stream that enters layer l; all 0 for rows that the step does not have.
  __device__ __forceinline__ void load(int l) {
    if (l > 0) return load_tagged();
    const S* embedding = k.embedding_of(k.act);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (k.act < k.step_rows() && has(i)) {
        packed = __ldg(reinterpret_cast<const uint4*>(embedding + k.piece(i / 2, i % 2) * kLaneElements));
      }
      widen<S>(packed, x + i * kLaneElements);
    }
  }
  // From p.x: polls until all values have the tag of the layer before, and repeats only the loads of those that do not.
  __device__ __forceinline__ void load_tagged() {
    constexpr int kLoads = 2 * kPieces;
    uint4 values[kLoads] = {};
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) missing |= has(i) ? 3u << 2 * i : 0;
    if (k.act >= k.step_rows()) missing = 0;
    const TaggedValue* from = opaque(k.p.x + exchange_place(k.act, k.warp_k * kWarpElements) + k.slice * 4);
    k.c.wait_for([&] {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if ((missing >> i & 1) != 0) values[i] = load_relaxed_x4(from + i / 2 * 16 + i % 2 * (kWarpElements / 2));
      }
      unsigned incomplete = 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) incomplete |= all_tagged(values[i], k.step) ? 0 : 1u << i;
      return (missing &= incomplete) == 0;
    });
#pragma unroll
    for (int i = 0; i < kLoads; ++i) untag(values[i], x + 4 * i);
  }

  // of(piece) added up over all pieces of this lane's row in this warp.
  template <typename Of>
  __device__ __forceinline__ static float sum_of_pieces(const Of& of) {
    float sums[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) sums[i] = of(i);
#pragma unroll
    for (int n = kPieces / 2; n > 0; n /= 2) {
#pragma unroll
      for (int i = 0; i < n; ++i) sums[i] += sums[i + n];
    }
    sums[0] += __shfl_xor_sync(~0u, sums[0], 2);
    return sums[0] + __shfl_xor_sync(~0u, sums[0], 1);
  }
  // first = norm1(x), second = norm2(x), rounded to S. Their weights and biases are the next chunk of the ring, one after
  // another.
  template <bool kBoth>
  __device__ __forceinline__ void apply(Operand& first, Operand& second) {
    const float sum = sum_of_pieces([&](int i) {
      float of_piece = 0;  // elements past the end are 0
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) of_piece += x[i * kLaneElements + j];
      return of_piece;
    });
    const float own_mean = k.mean_of_warp(sum);
    const float squares = sum_of_pieces([&](int i) {
      float of_piece = 0;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        const float d = has(i) ? x[i * kLaneElements + j] - own_mean : 0.0f;
        of_piece = fmaf(d, d, of_piece);
      }
      return of_piece;
    });
    const auto [mean, rstd] = k.combine_moments(own_mean, squares, k.act, k.slice == 0);
    const unsigned chunk = k.begin_chunk();
    const auto vector = [&](int n, int i) {
      return load_shared(chunk + (n * k.p.C + k.piece(i / 2, i % 2) * kLaneElements) * 2);
    };
#pragma unroll
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      uint4 out[2][2] = {};  // [norm][half]
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * tile + half;
        if (!has(i)) continue;
        float standard[kLaneElements];
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) standard[j] = (x[i * kLaneElements + j] - mean) * rstd;
#pragma unroll
        for (int n = 0; n < (kBoth ? 2 : 1); ++n) {
          out[n][half] = Consumer::scale_and_shift(standard, vector(2 * n, i), vector(2 * n + 1, i));
        }
      }
      Consumer::make_fragments(first.at[tile], out[0][0], out[0][1]);
      if constexpr (kBoth) Consumer::make_fragments(second.at[tile], out[1][0], out[1][1]);
    }
    k.end_chunk();
  }
};

// Of one row: each lane has the 8 elements of column().
template <typename S>
struct StepNorm<S, 1> {
  using Consumer = StepConsumer<S, 1>;
  using Operand = typename Consumer::Operand;
  // This lane's elements of a norm's weight and bias.
  struct Weight {
    uint4 weight, bias;
  };

  Consumer& k;
  float x[kLaneElements];

  __device__ __forceinline__ int column() const { return k.warp_k * kWarpSize + k.lane; }
  __device__ __forceinline__ bool has_column() const { return column() * kLaneElements < k.p.C; }
  // Called before load(), so that they arrive during the wait for x.
  __device__ __forceinline__ Weight weight_of(const S* weight, const S* bias) const {
    if (!has_column()) return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    return {load_early(reinterpret_cast<const uint4*>(weight) + column()),
            load_early(reinterpret_cast<const uint4*>(bias) + column())};
  }
  // As above, of one row.
  __device__ __forceinline__ void load(int l) {
    if (l > 0) return load_tagged();
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (has_column()) {
      packed = __ldg(reinterpret_cast<const uint4*>(k.embedding_of(0) + column() * kLaneElements));
    }
    widen<S>(packed, x);
  }
  __device__ __forceinline__ void load_tagged() {
    uint4 values[2] = {};
    const TaggedValue* from = opaque(k.p.x + exchange_place(0, k.warp_k * kWarpElements) + k.lane * 4);
    unsigned missing = has_column() ? 3 : 0;
    k.c.wait_for([&] {
      if ((missing & 1) != 0) values[0] = load_relaxed_x4(from);
      if ((missing & 2) != 0) values[1] = load_relaxed_x4(from + kWarpElements / 2);
      missing &= (all_tagged(values[0], k.step) ? 0u : 1u) | (all_tagged(values[1], k.step) ? 0u : 2u);
      return missing == 0;
    });
    untag(values[0], x);
    untag(values[1], x + 4);
  }

  // x becomes (x - mean) / sqrt(variance + eps).
  __device__ __forceinline__ void standardize() {
    float sum = 0, squares = 0;  // elements past the end are 0
#pragma unroll
    for (float value : x) sum += value;
    const float own_mean = k.mean_of_warp(warp_sum(sum));
#pragma unroll
    for (float value : x) {
      const float d = has_column() ? value - own_mean : 0.0f;
      squares = fmaf(d, d, squares);
    }
    const auto [mean, rstd] = k.combine_moments(own_mean, warp_sum(squares), 0, k.lane == 0);
#pragma unroll
    for (float& value : x) value = (value - mean) * rstd;
  }

  // Of each warp, the rows that its lanes exchange, one of each norm.
  __device__ __forceinline__ unsigned exchanged(int norm) const {
    return k.base() + k.at.normalized + (2 * k.warp + norm) * kNormalizedRow;
  }
  // The words of a piece and of its counterpart in the other half of the tile, 4 lanes away, as the two fragments that
  // they make: the lane of the first half returns the first one.
  __device__ __forceinline__ uint4 fragment_of(const uint4& piece) const {
    const bool second = (k.lane & 4) != 0;
    const unsigned from_x = __shfl_xor_sync(~0u, second ? piece.x : piece.z, 4),
                   from_y = __shfl_xor_sync(~0u, second ? piece.y : piece.w, 4);
    return second ? make_uint4(from_x, piece.z, from_y, piece.w) : make_uint4(piece.x, from_x, piece.y, from_y);
  }
  __device__ __forceinline__ void load_exchanged(Operand& out, int norm) const {
    const unsigned from = exchanged(norm) + k.slice * 16;
#pragma unroll
    for (int i = 0; i < 2 * kWarpTiles; ++i) {
      const uint4 words = k.act == 0 ? load_shared(from + 64 * i) : make_uint4(0, 0, 0, 0);
      out.at[i / 2][i % 2] = Fragment{{words.x, words.y, words.z, words.w}};
    }
  }
  // first = norm1(x), rounded to S; norm2(x) stays in shared memory: load_second().
  template <bool kBoth>
  __device__ __forceinline__ void apply(const Weight& norm1, const Weight& norm2, Operand& first) {
    standardize();
    store_shared(exchanged(0) + k.lane * 16, fragment_of(Consumer::scale_and_shift(x, norm1.weight, norm1.bias)));
    if constexpr (kBoth) {
      store_shared(exchanged(1) + k.lane * 16, fragment_of(Consumer::scale_and_shift(x, norm2.weight, norm2.bias)));
    }
    __syncwarp();
    load_exchanged(first, 0);
  }
  __device__ __forceinline__ void load_second(Operand& second) const {
    load_exchanged(second, 1);
  }
};

// The input of layer l's matrices, or of the head if not kBoth: norm1 and norm2 of the residual stream that enters the
// layer. With one row `second` is not written: load_second_input().
template <typename S, int kRows>
template <bool kBoth>
__device__ __forceinline__ void StepConsumer<S, kRows>::load_input(int l, Operand& first, Operand& second) {
  StepNorm<S, kRows> norm{*this};
  if (l == 0) {
    const int row = own.out.begin + kStepTileRows * warp + slice;
    if (row < own.out.end && act < kRows) x_own = to_float(embedding_of(act)[row]);
  }
  if constexpr (kRows == 1) {
    const Layer& w = layers[l];
    const auto norm1 = norm.weight_of(w.norm1_weight, w.norm1_bias);
    const auto norm2 = kBoth ? norm.weight_of(w.norm2_weight, w.norm2_bias) : norm1;
    norm.load(l);
    stamp(l, FusedPhase::x_here);
    norm.template apply<kBoth>(norm1, norm2, first);
  } else {
    norm.load(l);
    stamp(l, FusedPhase::x_here);
    norm.template apply<kBoth>(first, second);
  }
  stamp(l, FusedPhase::norms_done);
}
// input = norm2 of the layer's input: of one row from shared memory, otherwise `second` of load_input().
template <typename S, int kRows>
__device__ __forceinline__ void StepConsumer<S, kRows>::load_second_input(Operand& input, const Operand& second) {
  if constexpr (kRows == 1) {
    StepNorm<S, 1>{*this}.load_second(input);
  } else {
    input = second;
  }
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
