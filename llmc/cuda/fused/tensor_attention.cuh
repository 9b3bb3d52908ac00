// Attention over many positions of an item of grouped_attention.cuh on tensor cores, for head sizes up to kTensorHeadSize.
// The warps of a set take turns, a stage of the ring each, and keep a softmax state of their own until the end.
//
// mma.m16n8k16 takes operand A in 16 bits, where queries and weights of the softmax are in fp32. So each of them is the sum
// of three numbers of 16 bits, exactly in bf16 and to 2^-25 in fp16, and the 16 rows of A are those of four queries:
// rows 0 to 3 have the first numbers, 4 to 7 the second, 8 to 11 the third. Keys and values are in 16 bits as they are, or
// codes of kv_fp8.h, which widen to 16 bits exactly.
//
// Which dimension is which index of a GEMM is for us to choose, so a lane loads 16 bytes at a time and no matrix is
// transposed. With lane = 4 g + t: of a key 8 tile + g the lane has dimensions 32 s + 8 t to + 7, of a value the groups
// of 8 that column g of the accumulators stands for. Codes lie in the order of the mma already.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/op/attention/paged/kv_codes.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Online softmax of up to kWarpQueries queries of kHeadSize dimensions or fewer, for one warp. The lane's row and the
// row 8 further on belong to query g % 4. Of each 32 dimensions of a query a lane has four pairs: those from kLaneStep t on,
// 16 / kLaneStep apart.
template <typename S, int kHeadSize, int kLaneStep>
struct TensorSoftmax {
  static constexpr int kSegments = kHeadSize / 32;  // of a query

  const int HS, g, t;
  float largest = -INFINITY, sum = 0;  // the sum: of this lane's positions
  float out[kHeadSize / 8][4] = {};    // of each 8 columns: columns 2t and 2t + 1

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

  __device__ __forceinline__ TensorSoftmax(int head_size, int lane) : HS(head_size), g(lane / 4), t(lane % 4) {}

  // Writes queries [count, HS], rotated and scaled, to shared memory as kQueryBytes of operands.
  static constexpr int kQueryBytes = 2 * kSegments * kWarpSize * static_cast<int>(sizeof(uint4));
  static_assert(kQueryBytes <= kOperandBytes);
  __device__ __forceinline__ void store_queries(unsigned operands, const float* queries, int count) const {
    const int u = g % kWarpQueries;
#pragma unroll 1
    for (int s = 0; s < kSegments; ++s) {
      const int first = 32 * s + kLaneStep * t;
      float of[8] = {};
      if (u < count && first < HS) {
#pragma unroll
        for (int j = 0; j < 8; ++j) of[j] = queries[u * HS + first + 16 / kLaneStep * (j / 2) + j % 2];
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

  // Rescales the state to the scores of two slices of positions, of which `count` are there, and adds the weights of these to
  // the sum. Returns the weights as operands A.
  struct Weights {
    Fragment of[2];
  };
  __device__ __forceinline__ Weights weights_of(const float (&score)[2][2][4], int count) {
    float p[4][2], most = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto& of = score[tile / 2][tile % 2];
        const float whole = joined(of[e], of[e + 2]);
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
      for (int i = 0; i < kHeadSize / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][e] *= keep;
      }
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        p[tile][e] = exp2f(p[tile][e] - largest);
        sum += p[tile][e];
      }
    }
    Weights a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      split(p[2 * i][0], p[2 * i][1], a.of[i].word[0], a.of[i].word[1]);
      split(p[2 * i + 1][0], p[2 * i + 1][1], a.of[i].word[2], a.of[i].word[3]);
    }
    return a;
  }

  // Stores the states of `count` queries, HS + 2 numbers each (merge.cuh). Column 2t + e of out[8 b + j] is dimension
  // first_of(b, e) + kStep j; with the first of eight all are there.
  template <int kStep, typename First>
  __device__ __forceinline__ void store_by(float* states, int count, const First& first_of) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float* const state = states + g * (HS + 2);
    const bool has_query = g < count;  // g < kWarpQueries, too
    if (has_query && t == 0) state[0] = largest, state[1] = sum;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int b = 0; b < kHeadSize / 64; ++b) {
        const int first = first_of(b, e);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float value = joined(out[8 * b + j][e], out[8 * b + j][e + 2]);
          if (has_query && first < HS) state[2 + first + kStep * j] = value;
        }
      }
    }
  }
};

// The state over keys and values in 16 bits. Column c of out[8 b + j] is dimension 8 (kGroups c + b) + j.
template <typename S, int kHeadSize>
struct TensorState : TensorSoftmax<S, kHeadSize, 8> {
  using Softmax = TensorSoftmax<S, kHeadSize, 8>;
  using Softmax::g, Softmax::HS, Softmax::load_operand, Softmax::out, Softmax::Softmax, Softmax::t;
  static constexpr int kGroups = kHeadSize / 64;  // of 8 dimensions of a value, for each column

  // Where positions lie in a stage of the ring.
  struct Slice {
    unsigned keys, values;
  };
  __device__ __forceinline__ Slice slice(unsigned stage, int chunk_positions, int first) const {
    const int pitch = 2 * HS;
    return {stage + first * pitch, stage + chunk_positions * pitch + first * pitch};
  }

  // Adds `count` positions, 1 to 2 kSlice, whose keys and values lie in shared memory one after another. `queries`: from
  // store_queries(). What is not there, positions behind the last and dimensions behind HS, is read from the nearest
  // place that is, and comes to nothing: a score of -INFINITY, a query of 0, an output that is not stored.
  __device__ __forceinline__ void add(unsigned queries, const Slice& at, int count) {
    const int pitch = 2 * HS;
    const bool both = count > kSlice;  // slices
    float score[2][2][4] = {};
    const auto place = [&](int position) { return min(position, count - 1) * pitch; };
    unsigned operand = queries + (4 * g + t) * 16;
#pragma unroll 1  // little code: what exceeds the caches of instructions takes longer than it does
    for (int s = 0; s < Softmax::kSegments; ++s, operand += 2 * kWarpSize * 16) {
      const Fragment query[2] = {load_operand(operand), load_operand(operand + kWarpSize * 16)};
      const unsigned keys = at.keys + min(64 * s + 16 * t, pitch - 16);
      const auto slice = [&](int i) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const uint4 k = load_shared(keys + place(kSlice * i + 8 * tile + g));
          multiply_add<S>(score[i][tile], query[0], k.x, k.y);
          multiply_add<S>(score[i][tile], query[1], k.z, k.w);
        }
      };
      slice(0);
      if (both) slice(1);
    }
    const auto weights = this->weights_of(score, count);
    const auto slice = [&](int n) {
#pragma unroll
      for (int b = 0; b < kGroups; ++b) {
        const unsigned values = at.values + min(16 * (kGroups * g + b), pitch - 16);
        uint4 v[4];  // of positions 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = load_shared(values + place(kSlice * n + 2 * t + i % 2 + i / 2 * 8));
        const auto two = [&](unsigned v0, unsigned v1, unsigned v2, unsigned v3, int j) {
          multiply_add<S>(out[8 * b + j], weights.of[n], __byte_perm(v0, v1, 0x5410), __byte_perm(v2, v3, 0x5410));
          multiply_add<S>(out[8 * b + j + 1], weights.of[n], __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x7632));
        };
        two(v[0].x, v[1].x, v[2].x, v[3].x, 0);
        two(v[0].y, v[1].y, v[2].y, v[3].y, 2);
        two(v[0].z, v[1].z, v[2].z, v[3].z, 4);
        two(v[0].w, v[1].w, v[2].w, v[3].w, 6);
      }
    };
    slice(0);
    if (both) slice(1);
  }

  // Adds the new token, whose key and value are `added` [2, HS].
  __device__ __forceinline__ void add_new(unsigned queries, const float*, int, const S* added) {
    const unsigned key = shared_address(added);
    add(queries, {key, key + 2 * HS}, 1);
  }

  __device__ __forceinline__ void store(float* states, int count) {
    Softmax::template store_by<1>(states, count, [&](int b, int e) { return 8 * (kGroups * (2 * t + e) + b); });
  }
};

// The state over codes of kHeadSize dimensions: 64 or 128. Columns of `out` are dimensions in order.
template <typename S, int kHeadSize>
struct CodeState : TensorSoftmax<S, kHeadSize, 2> {
  using Softmax = TensorSoftmax<S, kHeadSize, 2>;
  using Softmax::g, Softmax::load_operand, Softmax::out, Softmax::t;
  static constexpr int kLoads = kHeadSize / 32;  // of 16 bytes, of a unit
  static constexpr int kUnitBytes = kSlice * kHeadSize;
  static_assert(kHeadSize / 16 % 2 == 0);  // kv_pair_index()

  __device__ __forceinline__ CodeState(int, int lane) : Softmax(kHeadSize, lane) {}

  // Where units lie in a stage of the ring, which has codes of keys, of values, then scales of keys, of values.
  struct Slice {
    unsigned keys, values, key_scales, value_scales;
  };
  __device__ __forceinline__ Slice slice(unsigned stage, int chunk_positions, int first) const {
    const unsigned values = stage + chunk_positions * kHeadSize, scales = values + chunk_positions * kHeadSize;
    return {stage + first * kHeadSize, values + first * kHeadSize, scales + first, scales + chunk_positions + first};
  }

  // Adds the first `count` positions of two units. What the others have, perhaps codes of NaN, comes to nothing: a score of
  // -INFINITY, and weights and values of 0, since widen() makes finite numbers of all codes until it has multiplied by the scale.
  __device__ __forceinline__ void add(unsigned queries, const Slice& at, int count) {
    const int lane_bytes = (4 * g + t) * 16;
    const bool both = count > kSlice;  // units
    float score[2][2][4] = {};
    unsigned key_power[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        key_power[n][tile] = kv_power<S>(load_shared_byte(at.key_scales + (both ? kSlice * n : 0) + 8 * tile + g));
      }
    }
    unsigned operand = queries + lane_bytes, key = at.keys + lane_bytes;
    // Two groups of 16 dimensions; of each a word of the first 8 positions, and one of the others.
    const auto groups = [](const uint4& codes, int group, int half) {
      return group == 0 ? (half == 0 ? codes.x : codes.y) : (half == 0 ? codes.z : codes.w);
    };
#pragma unroll 1  // little code, as above
    for (int i = 0; i < kLoads; ++i, operand += 2 * kWarpSize * 16, key += kWarpSize * 16) {
      const Fragment query[2] = {load_operand(operand), load_operand(operand + kWarpSize * 16)};
      const auto unit = [&](int n) {
        const uint4 codes = load_shared(key + n * kUnitBytes);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const WidePairs wide = cuda::widen<S>(groups(codes, group, tile), key_power[n][tile]);
            multiply_add<S>(score[n][tile], query[group], wide.first, wide.second);
          }
        }
      };
      unit(0);
      if (both) unit(1);
    }
    const auto weights = this->weights_of(score, count);
    const auto unit = [&](int n) {
      unsigned power[2];  // of positions 2t and 2t + 1 of the first and of the last eight
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = kSlice * n + 8 * half + 2 * t;
        const unsigned scales = load_shared_pair(at.value_scales + position);
        power[half] = __byte_perm(position < count ? kv_power<S>(scales & 0xff) : 0,
                                  position + 1 < count ? kv_power<S>(scales >> 8) : 0, 0x7610);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 codes = load_shared(at.values + lane_bytes + n * kUnitBytes + i * kWarpSize * 16);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const WidePairs earlier = cuda::widen<S>(groups(codes, group, 0), power[0]),
                          later = cuda::widen<S>(groups(codes, group, 1), power[1]);
          multiply_add<S>(out[4 * i + 2 * group], weights.of[n], earlier.first, later.first);
          multiply_add<S>(out[4 * i + 2 * group + 1], weights.of[n], earlier.second, later.second);
        }
      }
    };
    unit(0);
    if (both) unit(1);
  }

  // The state of the new token alone, whose key and value as the codes hold them are `added` [2, kHeadSize]; before add().
  __device__ __forceinline__ void add_new(unsigned, const float* queries, int count, const S* added) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(added);
    const int u = g % kWarpQueries, part = g / kWarpQueries * 4 + t;  // of 8 lanes
    float score = 0;
#pragma unroll
    for (int i = 0; i < kHeadSize / 16; ++i) {
      const float2 key = unpack<S>(words[8 * i + part]);
      const float* const query = queries + u * kHeadSize + 16 * i + 2 * part;
      if (u < count) score = fmaf(key.x, query[0], fmaf(key.y, query[1], score));
    }
    score += __shfl_xor_sync(~0u, score, 1);
    score += __shfl_xor_sync(~0u, score, 2);
    this->largest = Softmax::joined(score, 0);
    this->sum = t == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kHeadSize / 8; ++i) {  // a weight of 1 is its own first number; the others are 0
      const float2 value = unpack<S>(words[kHeadSize / 2 + 4 * i + t]);
      out[i][0] = g < kWarpQueries ? value.x : 0.0f;
      out[i][1] = g < kWarpQueries ? value.y : 0.0f;
    }
  }

  __device__ __forceinline__ void store(float* states, int count) {
    Softmax::template store_by<8>(states, count, [&](int b, int e) { return 64 * b + 2 * t + e; });
  }
};

// As attend_group(), but a stage of the ring is the turn of one warp of each set. A warp goes from one of its turns to the
// next, and arrives at the stage for its whole set, so that the others never see it.
template <typename K>
template <typename State>
__device__ __forceinline__ void Consumer<K>::attend_turns(const AttentionItem& item, int turn) {
  const Parameters& p = c.p;
  const int sets = (item.queries + kWarpQueries - 1) / kWarpQueries;
  const int set = warp % sets, set_warp = warp / sets, set_warps = (kSequentialWarps - set + sets - 1) / sets;
  const int queries = min(kWarpQueries, item.queries - set * kWarpQueries);
  State state(p.HS, lane);
  // where the partial sums of matrices lie, which are idle meanwhile
  const unsigned operands = shared_address(shared + at.partials) + set * State::kQueryBytes;
  const float* query = reinterpret_cast<const float*>(shared + at.query) + set * kWarpQueries * p.HS;
  if (set_warp == 0) state.store_queries(operands, query, queries);
  sync();
  if (item.newest() && set_warp == 0) {  // the new token itself
    state.add_new(operands, query, queries, reinterpret_cast<const S*>(shared + at.added));
  }
  const int turns = (item.end - item.begin + turn - 1) / turn;
  // A barrier tells a phase only from those beside it, so a warp must know that the turn before in a stage has come. Before a
  // turn is asked for, all but kv_window - 1 of the turns before it have. So with as many takers as stages beside that window, the turn
  // that a warp had last says so of the one a ring before its next.
  const int takers = min(set_warps, max(p.stages - p.kv_window, 1));
  RingPosition own_turn = ring;
  own_turn.advance_a_little(p.stages, set_warp);
#pragma unroll 1
  for (int i = set_warp < takers ? set_warp : turns; i < turns; i += takers) {
    c.wait_barrier(c.full + 8 * own_turn.stage, own_turn.phase);
    const unsigned stage = c.ring + own_turn.stage * p.stage_bytes;
    const int count = min(turn, item.end - item.begin - i * turn);
#pragma unroll 1
    for (int first = 0; first < count; first += 2 * kSlice) {
      state.add(operands, state.slice(stage, p.chunk_positions, first), min(2 * kSlice, count - first));
    }
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.empty + 8 * own_turn.stage, set_warps);
    own_turn.advance_a_little(p.stages, takers);
  }
  ring.advance(p.stages, turns);
  state.store(reinterpret_cast<float*>(shared + at.states) + warp * min(item.queries, kWarpQueries) * (p.HS + 2),
              queries);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
