// Attention over many positions of an item of grouped_attention.cuh on tensor cores, for head sizes up to 128. Each warp
// takes every so many turns of 32 positions and keeps a softmax state of its own until the end.
//
// mma.m16n8k16 takes operand A in 16 bits, where queries and weights of the softmax are in fp32. So each of them is the sum
// of three numbers of 16 bits, exactly in bf16 and to 2^-25 in fp16, and the 16 rows of A are those of four queries:
// rows 0 to 3 have the first numbers, 4 to 7 the second, 8 to 11 the third. Keys and values are in 16 bits as they are.
//
// Which dimension is which index of a GEMM is for us to choose, so a lane loads 16 bytes at a time and no matrix is
// transposed. With lane = 4 g + t: of a key 8 tile + g the lane has dimensions 32 s + 8 t to + 7, of a value the groups
// of 8 that column g of the accumulators stands for.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

constexpr int kSlice = 16;  // positions, as many as one mma multiplies by values
static_assert(kTurn % kSlice == 0 && kPageUnit % kTurn == 0);

// Online softmax of up to kWarpQueries queries of kHeadSize dimensions or fewer, for one warp. The lane's row and the
// row 8 further on belong to query g % 4.
template <typename S, int kHeadSize>
struct TensorState {
  static constexpr int kSegments = kHeadSize / 32;  // of a key
  static constexpr int kGroups = kHeadSize / 64;    // of 8 dimensions of a value, for each column

  const int HS, g, t;
  float largest = -INFINITY, sum = 0;  // the sum: of this lane's positions
  float out[8 * kGroups][4] = {};      // [8 b + j]: columns 2t and 2t + 1, dimension 8 (kGroups column + b) + j

  // Two numbers of the lane's query as operand A: in its row, and in the row 8 further on.
  __device__ __forceinline__ void split(float x, float y, unsigned& row, unsigned& row_8) const {
    const unsigned first = pack<S>(x, y);
    const float2 of_first = unpack<S>(first);
    const float x_left = x - of_first.x, y_left = y - of_first.y;
    const unsigned second = pack<S>(x_left, y_left);
    const float2 of_second = unpack<S>(second);
    row = g < kWarpQueries ? first : second;
    row_8 = g < kWarpQueries ? pack<S>(x_left - of_second.x, y_left - of_second.y) : 0;
  }

  __device__ __forceinline__ TensorState(int head_size, int lane) : HS(head_size), g(lane / 4), t(lane % 4) {}

  // Writes queries [count, HS], rotated and scaled, to shared memory as kQueryBytes of operands.
  static constexpr int kQueryBytes = 2 * kSegments * kWarpSize * static_cast<int>(sizeof(uint4));
  static_assert(kQueryBytes <= kOperandBytes);
  __device__ __forceinline__ void store_queries(unsigned operands, const float* queries, int count) const {
    const int u = g % kWarpQueries;
#pragma unroll 1
    for (int s = 0; s < kSegments; ++s) {
      const int first = 32 * s + 8 * t;
      float of[8] = {};
      if (u < count && first < HS) {
#pragma unroll
        for (int j = 0; j < 8; ++j) of[j] = queries[u * HS + first + j];
      }
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        uint4 a;
        split(of[j], of[j + 1], a.x, a.y);
        split(of[j + 2], of[j + 3], a.z, a.w);
        store_shared(operands + ((2 * s + j / 4) * kWarpSize + 4 * g + t) * 16, a);
      }
    }
  }
  __device__ __forceinline__ static Fragment load_operand(unsigned from) {
    const uint4 words = load_shared(from);
    return {{words.x, words.y, words.z, words.w}};
  }

  // The sum of the three parts of two accumulators' elements; the same in the lanes of rows u and u + 4.
  __device__ __forceinline__ static float joined(float row, float row_8) {
    const float both = row + row_8;
    return both + __shfl_xor_sync(~0u, both, 16);
  }

  // Adds `count` positions, 1 to kSlice, whose keys and values lie in shared memory one after another. `queries`: from
  // store_queries(). What is not there, positions behind the last and dimensions behind HS, is read from the nearest
  // place that is, and comes to nothing: a score of -INFINITY, a query of 0, an output that is not stored.
  __device__ __forceinline__ void add(unsigned queries, unsigned keys, unsigned values, int count) {
    const int pitch = 2 * HS;
    float score[2][4] = {};
    const unsigned key[2] = {keys + min(g, count - 1) * pitch, keys + min(8 + g, count - 1) * pitch};
    unsigned operand = queries + (4 * g + t) * 16;
#pragma unroll 1  // little code: what exceeds the caches of instructions takes longer than it does
    for (int s = 0; s < kSegments; ++s, operand += 2 * kWarpSize * 16) {
      const Fragment query[2] = {load_operand(operand), load_operand(operand + kWarpSize * 16)};
      const int offset = min(64 * s + 16 * t, pitch - 16);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 k = load_shared(key[tile] + offset);
        multiply_add<S>(score[tile], query[0], k.x, k.y);
        multiply_add<S>(score[tile], query[1], k.z, k.w);
      }
    }
    float p[2][2], most = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float whole = joined(score[tile][e], score[tile][e + 2]);
        p[tile][e] = 8 * tile + 2 * t + e < count ? whole : -INFINITY;
        most = fmaxf(most, p[tile][e]);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (__any_sync(~0u, most > largest)) {
      const float next = fmaxf(largest, most), keep = exp2f(largest - next);
      largest = next;
      sum *= keep;
#pragma unroll
      for (int i = 0; i < 8 * kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][e] *= keep;
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        p[tile][e] = exp2f(p[tile][e] - largest);
        sum += p[tile][e];
      }
    }
    Fragment a;
    split(p[0][0], p[0][1], a.word[0], a.word[1]);
    split(p[1][0], p[1][1], a.word[2], a.word[3]);
#pragma unroll
    for (int b = 0; b < kGroups; ++b) {
      const int offset = min(16 * (kGroups * g + b), pitch - 16);
      uint4 v[4];  // of positions 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = load_shared(values + min(2 * t + i % 2 + i / 2 * 8, count - 1) * pitch + offset);
      }
      const auto two = [&](unsigned v0, unsigned v1, unsigned v2, unsigned v3, int j) {
        multiply_add<S>(out[8 * b + j], a, __byte_perm(v0, v1, 0x5410), __byte_perm(v2, v3, 0x5410));
        multiply_add<S>(out[8 * b + j + 1], a, __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x7632));
      };
      two(v[0].x, v[1].x, v[2].x, v[3].x, 0);
      two(v[0].y, v[1].y, v[2].y, v[3].y, 2);
      two(v[0].z, v[1].z, v[2].z, v[3].z, 4);
      two(v[0].w, v[1].w, v[2].w, v[3].w, 6);
    }
  }

  // Stores the states of `count` queries, HS + 2 numbers each (merge.cuh).
  __device__ __forceinline__ void store(float* states, int count) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float* const state = states + g * (HS + 2);
    const bool has_query = g < count;  // g < kWarpQueries, too
    if (has_query && t == 0) state[0] = largest, state[1] = sum;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int b = 0; b < kGroups; ++b) {
        const int group = kGroups * (2 * t + e) + b;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float value = joined(out[8 * b + j][e], out[8 * b + j][e + 2]);
          if (has_query && 8 * group < HS) state[2 + 8 * group + j] = value;
        }
      }
    }
  }
};

// As attend_group().
template <typename K>
template <int kHeadSize>
__device__ __forceinline__ void Consumer<K>::attend_slices(int position, const AttentionItem& item) {
  const Parameters& p = c.p;
  const int position_bytes = 2 * p.HS, sets = (item.queries + kWarpQueries - 1) / kWarpQueries;
  const int set = warp % sets, set_warp = warp / sets, set_warps = (kSequentialWarps - set + sets - 1) / sets;
  const int queries = min(kWarpQueries, item.queries - set * kWarpQueries);
  using State = TensorState<S, kHeadSize>;
  State state(p.HS, lane);
  // where the partial sums of matrices lie, which are idle meanwhile
  const unsigned operands = shared_address(shared + at.partials) + set * State::kQueryBytes;
  if (set_warp == 0) {
    const float* query = reinterpret_cast<const float*>(shared + at.query) + set * kWarpQueries * p.HS;
    state.store_queries(operands, query, queries);
  }
  sync();
  if (item.newest() && set_warp == 0) {  // the new token itself
    const unsigned added = shared_address(shared + at.added);
    state.add(operands, added, added + position_bytes, 1);
  }
  const Positions cached = positions_of<kPageUnit>(position, item.splits, item.split);
  for (int done = cached.begin; done < cached.end;) {
    const int count = chunk_of(p, done, cached.end);
    const unsigned keys = begin_chunk(), values = keys + p.chunk_positions * position_bytes;
#pragma unroll 1
    for (int first = 0; first < count; first += kSlice) {
      if ((done + first - cached.begin) / kTurn % set_warps != set_warp) continue;
      state.add(operands, keys + first * position_bytes, values + first * position_bytes, min(kSlice, count - first));
    }
    end_chunk();
    done += count;
  }
  state.store(reinterpret_cast<float*>(shared + at.states) + warp * min(item.queries, kWarpQueries) * (p.HS + 2),
              queries);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
