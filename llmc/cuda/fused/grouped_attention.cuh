// Attention of a K/V head and its query heads (grouped-query attention), by the consumers alone. An item is query heads of
// a K/V head and a split of the context (AttentionItems); keys and values are read once for it.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/fused/merge.cuh"
#include "llmc/cuda/fused/tensor_attention.cuh"
#include "llmc/cuda/op/attention/paged/code_rows.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Online softmax of the queries that a warp computes, in a group of lanes that share positions: see SoftmaxState.
template <typename K>
template <int kQueries>
struct Consumer<K>::GroupState {
  float largest[kQueries], sum[kQueries] = {}, out[kQueries][kLaneElements] = {};

  // Adds two positions to query u; a score of -INFINITY leaves one out.
  __device__ __forceinline__ void add(int u, float score0, float score1, const float (&v0)[kLaneElements],
                                      const float (&v1)[kLaneElements]) {
    const float most = fmaxf(largest[u], fmaxf(score0, score1));
    const float base = most == -INFINITY ? 0.0f : most;
    const float keep = exp2f(largest[u] - base), p0 = exp2f(score0 - base), p1 = exp2f(score1 - base);
    largest[u] = most;
    sum[u] = fmaf(sum[u], keep, p0 + p1);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) out[u][j] = fmaf(out[u][j], keep, fmaf(p0, v0[j], p1 * v1[j]));
  }
};

// RMSNorm of the heads of an item before they rotate (llmc/cpu/head_norm.h): `heads` of them, `queries` queries, then perhaps
// the key, one a warp at a time. `weights` [2, HS]: of queries, of keys.
template <typename K>
__device__ __forceinline__ void Consumer<K>::normalize_heads(float* first_head, int heads, int queries,
                                                             const S* weights) const {
  const Parameters& p = c.p;
  for (int h = warp; h < heads; h += threads / kWarpSize) {
    float* const head = first_head + h * p.HS;
    const S* const weight = weights + (h == queries ? p.HS : 0);
    float squares = 0;
    for (int d = lane; d < p.HS; d += kWarpSize) squares = fmaf(head[d], head[d], squares);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    const float r = rsqrtf(squares / static_cast<float>(p.HS) + p.eps);
    for (int d = lane; d < p.HS; d += kWarpSize) head[d] *= r * to_float(weight[d]);
  }
}

// With codes: rounds the new token's key (row 0) or value (row 1), by a warp, since all of a row has one scale. element(d):
// before it is rounded. What attends to it has the number that its code stands for; the helper makes the same codes of that,
// of a row that is not finite NaN alone.
template <typename K>
template <typename Element>
__device__ __forceinline__ void Consumer<K>::round_added(int row, const Element& element) {
  const int HS = c.p.HS;
  unsigned words[kTensorHeadSize / 2 / kWarpSize];
#pragma unroll
  for (int i = 0; i < kTensorHeadSize / 2 / kWarpSize; ++i) {
    const int d = (2 * lane + i * 2 * kWarpSize) % HS;
    words[i] = pack<S>(element(d), element(d + 1));
  }
  const unsigned scale = scale_of<S>(words);
  unsigned* const to = reinterpret_cast<unsigned*>(shared + at.added) + row * HS / 2;
#pragma unroll
  for (int i = 0; i < kTensorHeadSize / 2 / kWarpSize; ++i) {
    if (i * 2 * kWarpSize < HS) to[lane + i * kWarpSize] = as_stored<S>(words[i], scale);
  }
  if (lane == 0) c.flags.added_scales[row] = scale;
}

// Fetches the item's queries, normalised, rotated and scaled, to shared memory; if it has the token itself, also its key and
// value, rounded as the cache holds them.
template <typename K>
__device__ __forceinline__ void Consumer<K>::fetch_heads(int layer, const AttentionItem& item) {
  const Parameters& p = c.p;
  const bool newest = item.newest();
  const int head = item.head, HS = p.HS, half = p.rope_half, queries = item.queries * HS,
            wanted = queries + (newest ? 2 * HS : 0);
  float* raw = reinterpret_cast<float*>(shared + at.raw);
  float* query = reinterpret_cast<float*>(shared + at.query);
  S* added = reinterpret_cast<S*>(shared + at.added);
  // The weights of the norms arrive during the wait, and lie where the queries will.
  const bool has_weights = p.head_norms && thread < 2 * HS / kLaneElements;
  uint4 weights = make_uint4(0, 0, 0, 0);
  if (has_weights) weights = __ldg(reinterpret_cast<const uint4*>(p.head_norms_of + 2 * layer * HS) + thread);
  for (int e = 4 * thread; e < wanted; e += 4 * threads) {
    const int place = e < queries        ? head * p.q_stride + item.first_query * HS + e
                      : e < queries + HS ? head * p.kv_stride + p.key_begin + e - queries
                                         : head * p.kv_stride + p.value_begin + e - queries - HS;
    uint4 v = make_uint4(0, 0, 0, 0);
    c.wait_for([&] {
      v = load_relaxed_x4(p.qkv + place);
      return has_tag(v.x, step + 1) && has_tag(v.y, step + 1) && has_tag(v.z, step + 1) && has_tag(v.w, step + 1);
    });
    *reinterpret_cast<float4*>(raw + e) = make_float4(untagged(v.x), untagged(v.y), untagged(v.z), untagged(v.w));
  }
  if (has_weights) reinterpret_cast<uint4*>(query)[thread] = weights;
  if (newest) {  // wait until the helper has stored the previous key and value
    c.wait_barrier(c.item_done, item_phase ^ 1);
    item_phase ^= 1;
  }
  sync();
  if (p.head_norms) {
    normalize_heads(raw, item.queries + (newest ? 1 : 0), item.queries, reinterpret_cast<const S*>(query));
    sync();
  }
  const float *cosine = reinterpret_cast<const float*>(shared + at.rope), *sine = cosine + half;
  const int rotated = p.rotates(layer) ? queries + HS : 0;
  const auto element = [&](int e, int d) {
    return e < rotated ? rotated_element(raw + e - d, d, cosine, sine, half) : raw[e];
  };
  for (int e = thread; e < (p.kv_fp8 ? queries : wanted); e += threads) {
    const float value = element(e, e % HS);
    if (e < queries) {
      query[e] = value * p.scale;
    } else {
      added[e - queries] = from_float<S>(value);
    }
  }
  if (p.kv_fp8 && newest && warp >= kSequentialWarps - 2) {  // the warps that have the fewest queries
    const int row = warp - (kSequentialWarps - 2);
    round_added(row, [&](int d) { return element(queries + row * HS + d, d); });
  }
  sync();
  if (newest && thread == 0) hopper::mbarrier_arrive(c.query_here);
}

// Attention over one item, divided among all warps. Warps form sets, each with up to kQueries queries of the item; kLanes
// lanes share a position. Leaves a softmax state for each warp and query in shared memory. A stage of the ring has `turn`
// positions.
template <typename K>
template <int kLanes, int kQueries>
__device__ __forceinline__ void Consumer<K>::attend_group(const AttentionItem& item, int turn) {
  const Parameters& p = c.p;
  constexpr int kGroups = kWarpSize / kLanes;
  const int HS = p.HS, position_bytes = 2 * HS, group = lane / kLanes, slice = lane % kLanes;
  const int sets = (item.queries + kQueries - 1) / kQueries, set = warp % sets, set_warp = warp / sets;
  const int set_warps = (threads / kWarpSize - set + sets - 1) / sets;
  const int queries = min(kQueries, item.queries - set * kQueries);
  const bool active = slice * kLaneElements < HS;
  const float* query = reinterpret_cast<const float*>(shared + at.query) + set * kQueries * HS;
  float q[kQueries][kLaneElements];
#pragma unroll
  for (int u = 0; u < kQueries; ++u) {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      q[u][j] = active && u < queries ? query[u * HS + slice * kLaneElements + j] : 0.0f;
    }
  }
  const uint4 zero = make_uint4(0, 0, 0, 0);
  GroupState<kQueries> r;
#pragma unroll
  for (int u = 0; u < kQueries; ++u) r.largest[u] = -INFINITY;
  if (item.newest() && set_warp == 0) {  // the new token itself
    const S* added = reinterpret_cast<const S*>(shared + at.added);
    uint4 k = zero, v = zero;
    if (active && lane < kLanes) {
      k = *reinterpret_cast<const uint4*>(added + slice * kLaneElements);
      v = *reinterpret_cast<const uint4*>(added + HS + slice * kLaneElements);
    }
    float values[kLaneElements];
    widen<S>(v, values);
#pragma unroll
    for (int u = 0; u < kQueries; ++u) {
      float score = 0;
      dot<S>(score, k, q[u]);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
      if (lane >= kLanes) continue;
      r.largest[u] = score;
      r.sum[u] = 1;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) r.out[u][j] = values[j];
    }
  }

  // Adds two positions of this group of lanes. Queries that the set does not have are zeros: a branch would prevent the
  // compiler from interleaving the others.
  const auto attend_two = [&](const uint4(&k)[2], const uint4(&v)[2], bool first_is_there, bool second_is_there) {
    float keys[2][kLaneElements], values[2][kLaneElements];
    widen<S>(k[0], keys[0]);
    widen<S>(k[1], keys[1]);
    widen<S>(v[0], values[0]);
    widen<S>(v[1], values[1]);
#pragma unroll
    for (int u = 0; u < kQueries; ++u) {
      float score[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        score[0] = fmaf(keys[0][j], q[u][j], score[0]);
        score[1] = fmaf(keys[1][j], q[u][j], score[1]);
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        score[0] += __shfl_xor_sync(~0u, score[0], offset);
        score[1] += __shfl_xor_sync(~0u, score[1], offset);
      }
      r.add(u, first_is_there ? score[0] : -INFINITY, second_is_there ? score[1] : -INFINITY, values[0], values[1]);
    }
  };

  for (int done = item.begin; done < item.end; done += turn) {
    const int count = min(turn, item.end - done);
    const unsigned keys = begin_chunk() + slice * 16, values = keys + p.chunk_positions * position_bytes;
    for (int first = set_warp * kGroups; first < count; first += 2 * set_warps * kGroups) {
      const int at_position[2] = {first + group, first + set_warps * kGroups + group};
      uint4 k[2] = {zero, zero}, v[2] = {zero, zero};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (active && at_position[i] < count) {
          k[i] = load_shared(keys + at_position[i] * position_bytes);
          v[i] = load_shared(values + at_position[i] * position_bytes);
        }
      }
      attend_two(k, v, at_position[0] < count, at_position[1] < count);
    }
    end_chunk();
  }

  // Merges the softmax states of the groups of lanes.
  const int kept = min(item.queries, kQueries);
#pragma unroll
  for (int u = 0; u < kQueries; ++u) {
#pragma unroll
    for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
      const float other = __shfl_xor_sync(~0u, r.largest[u], offset), largest = fmaxf(r.largest[u], other);
      const float base = largest == -INFINITY ? 0.0f : largest, keep = exp2f(r.largest[u] - base);
      r.sum[u] *= keep;
      r.sum[u] += __shfl_xor_sync(~0u, r.sum[u], offset);
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        r.out[u][j] *= keep;
        r.out[u][j] += __shfl_xor_sync(~0u, r.out[u][j], offset);
      }
      r.largest[u] = largest;
    }
    float* state = reinterpret_cast<float*>(shared + at.states) + (warp * kept + u) * (HS + 2);
    if (u < queries && lane < kLanes && active) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) state[2 + slice * kLaneElements + j] = r.out[u][j];
    }
    if (u < queries && lane == 0) state[0] = r.largest[u], state[1] = r.sum[u];
  }
}

// Merges the softmax states of the warps, each of up to `warp_queries` queries, two dimensions a thread. Where the context
// has several splits, the block with the last one merges all of them in order.
template <typename K>
__device__ __forceinline__ void Consumer<K>::merge_group(const AttentionItem& item, int warp_queries) {
  const Parameters& p = c.p;
  const int split = item.split, splits = item.splits;
  const int HS = p.HS, pairs = HS / 2, warps = threads / kWarpSize, kept = min(item.queries, warp_queries);
  const int sets = (item.queries + warp_queries - 1) / warp_queries;
  const float* states = reinterpret_cast<const float*>(shared + at.states);
  for (int i = thread; i < item.queries * pairs; i += threads) {
    const int g = i / pairs, d = 2 * (i % pairs), set = g / warp_queries, u = g % warp_queries;
    float largest = -INFINITY, sum = 0, out[2] = {};
    // softmax states: largest score and sum; output times sum
    float2 of_warp[kSequentialWarps], values[kSequentialWarps];
#pragma unroll
    for (int n = 0; n < kSequentialWarps; ++n) {
      const int w = set + n * sets;
      const float2* state = reinterpret_cast<const float2*>(states + (w * kept + u) * (HS + 2));
      of_warp[n] = w < warps ? state[0] : make_float2(-INFINITY, 0);
      values[n] = w < warps ? state[1 + d / 2] : make_float2(0, 0);
      largest = fmaxf(largest, of_warp[n].x);
    }
    const float base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
    for (int n = 0; n < kSequentialWarps; ++n) {
      const float weight = exp2f(of_warp[n].x - base);
      sum = fmaf(of_warp[n].y, weight, sum);
      out[0] = fmaf(values[n].x, weight, out[0]);
      out[1] = fmaf(values[n].y, weight, out[1]);
    }
    const int query_head = item.head * p.group + item.first_query + g;
    std::uint64_t* stored = p.splits + static_cast<std::int64_t>(query_head) * p.max_splits * (HS + 2);
    if (split < splits - 1) {
      std::uint64_t* to = stored + split * (HS + 2);
      store_pair(to + 2 + d, out[0], out[1], step + 1);
      if (d == 0) store_pair(to, largest, sum, step + 1);
      continue;
    }
    SplitSum merged;
    merged.add_stored(stored, splits - 1, HS, d, step + 1, [&](const auto& try_once) {
      c.wait_for(try_once);
      return true;
    });
    merged.add(largest, sum, out[0], out[1]);
    const float2 result = merged.result();
    TaggedValue* to = p.attention + query_head * HS + d;
    store_relaxed(to, tagged(result.x, step + 1));
    store_relaxed(to + 1, tagged(result.y, step + 1));
  }
}

// Attention over an item, one query head a warp.
template <typename K>
__device__ __forceinline__ void Consumer<K>::attend_single(const AttentionItem& item, int turn) {
  if (c.p.HS <= 64) {
    attend_group<8, 1>(item, turn);
  } else if (c.p.HS <= 128) {
    attend_group<16, 1>(item, turn);
  } else {
    attend_group<32, 1>(item, turn);
  }
}

// The same with kWarpQueries of them.
template <typename K>
__device__ __forceinline__ void Consumer<K>::attend_several(const AttentionItem& item, int turn) {
  if (c.p.kv_fp8) {
    if (c.p.HS == 64) {
      attend_turns<CodeState<S, 64>>(item, turn);
    } else {
      attend_turns<CodeState<S, 128>>(item, turn);
    }
  } else if (c.p.HS <= 64) {
    attend_turns<TensorState<S, 64>>(item, turn);
  } else if (c.p.HS <= kTensorHeadSize) {
    attend_turns<TensorState<S, kTensorHeadSize>>(item, turn);
  } else {
    attend_group<32, kWarpQueries>(item, turn);
  }
}

// All items of this block, the same ones in every layer: no other work overlaps with attention here, and a block that
// always computes it has its code in the instruction cache.
template <typename K>
__device__ __forceinline__ void Consumer<K>::attend_groups(int layer) {
  const AttentionItems& items = c.flags.items;
  for (int i = c.block; i < items.count; i += c.blocks) {
    const AttentionItem item = i == c.block ? c.flags.first_item : items.at(i);
    fetch_heads(layer, item);
    stamp(layer, FusedPhase::query_here);
    if (items.single) {
      attend_single(item, items.turn);
    } else {
      attend_several(item, items.turn);
    }
    sync();
    merge_group(item, items.single ? 1 : kWarpQueries);
  }
  stamp(layer, FusedPhase::attention_done);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
