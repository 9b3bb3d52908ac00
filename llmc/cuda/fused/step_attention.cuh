// Attention of the step kernel (flash decoding; Dao et al., 2023). An item is a row of the step, a head and a split of
// its positions. The warp and lanes that compute a position, and so the order of all sums, depend on the position
// alone: not on whether it lies in the pages or is a row of this step, nor on the other rows.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/merge.cuh"
#include "llmc/cuda/fused/softmax_state.cuh"
#include "llmc/cuda/fused/step_consumer.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// ---- the consumers --------------------------------------------------------------------------------------------------

// Computes one softmax state for each warp from the query that the helper left in shared memory; the helper merges the
// states. kLanes lanes share a position.
template <typename S, int kRows>
template <int kLanes>
__device__ __forceinline__ void StepConsumer<S, kRows>::attend_work_unit(const StepWorkUnit& item, int slot) {
  constexpr int kGroups = kWarpSize / kLanes;
  const int HS = p.HS, position_bytes = 2 * HS, group = lane / kLanes, lane_bytes = lane % kLanes * 16;
  const bool active = lane % kLanes * kLaneElements < HS;
  const ItemPositions positions = positions_of_work_unit(p, item);
  const float* query = reinterpret_cast<const float*>(shared + at.query) + slot * HS + lane % kLanes * kLaneElements;
  float q[kLaneElements];
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) q[j] = active ? query[j] : 0.0f;

  SoftmaxState<S> r;
  const unsigned added = base() + at.added + slot * 2 * kRows * position_bytes + lane_bytes;
  for (int begin = positions.begin; begin < positions.end; begin += p.chunk_positions) {
    const int count = min(p.chunk_positions, positions.end - begin), cached = positions.cached - begin;
    const unsigned keys = cached > 0 ? begin_chunk() + lane_bytes : 0,
                   values = keys + p.chunk_positions * position_bytes;
    for (int first = warp * kGroups; first < count; first += 2 * warps * kGroups) {
      const int at_position[2] = {first + group, first + warps * kGroups + group};
      uint4 v[2];
      float score[2] = {0, 0};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint4 k = make_uint4(0, 0, 0, 0);
        v[u] = k;
        if (active && at_position[u] < count) {
          const int in_step = at_position[u] - cached;  // below 0: the position is in the chunk, from the pages
          k = load_shared(in_step < 0 ? keys + at_position[u] * position_bytes : added + in_step * position_bytes);
          v[u] = load_shared(in_step < 0 ? values + at_position[u] * position_bytes
                                         : added + (kRows + in_step) * position_bytes);
        }
        dot<S>(score[u], k, q);
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        score[0] += __shfl_xor_sync(~0u, score[0], offset);
        score[1] += __shfl_xor_sync(~0u, score[1], offset);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) score[u] = at_position[u] < count ? score[u] : -INFINITY;
      r.add(score[0], score[1], v[0], v[1]);
    }
    if (cached > 0) end_chunk();
  }
  r.template store<kLanes>(reinterpret_cast<float*>(shared + at.states) + (slot * warps + warp) * (HS + 2), lane, HS);
}

template <typename S, int kRows>
__device__ __forceinline__ void StepConsumer<S, kRows>::attend(int layer) {
  StepWorkUnit item;
  for (int round = 0; item_at(p, c.block, c.blocks, round, item); ++round, ++items) {
    const int slot = static_cast<int>(items % kItemSlots);
    c.wait_barrier(c.query_here + 8 * slot, items / kItemSlots & 1);
    stamp(layer, FusedPhase::query_here);
    if (p.HS <= 32) {
      attend_work_unit<4>(item, slot);
    } else if (p.HS <= 64) {
      attend_work_unit<8>(item, slot);
    } else if (p.HS <= 128) {
      attend_work_unit<16>(item, slot);
    } else {
      attend_work_unit<32>(item, slot);
    }
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.item_done + 8 * slot);
  }
  stamp(layer, FusedPhase::attention_done);
}

// ---- the helper warp: attention's accesses to global memory, while the consumers multiply
// ---------------------------------

template <typename S, int kRows>
struct StepHelper {
  const Block<StepVariant<S>>& c;
  const StepParameters<S>& p;
  char* shared;
  StepLayout at;
  int lane, warps;  // warps: consumers

  // Polls in all lanes; false if the launch is aborted.
  template <typename Try>
  __device__ bool wait(const Try& try_once) const {
    return __all_sync(~0u, c.wait_for(try_once)) != 0;
  }

  // Fills `slot` with the item's query, rotated and scaled, and with the keys and values of those of its positions that
  // are rows of this step, rounded as the pages hold them. The item of the last split also writes the key and value of
  // its own row to their page.
  __device__ bool prepare(int layer, const StepWorkUnit& item, int slot, unsigned step) {
    constexpr int kAhead = 4, kSpan = 4 * kWarpSize;
    const int HS = p.HS, half = p.rope_half;
    const FusedStepRow& row = p.row[item.row];
    const ItemPositions positions = positions_of_work_unit(p, item);
    const bool newest = item.split == item.splits - 1, in_step = positions.end > positions.cached;
    const int first_key = in_step ? row.first : item.row, key_rows = in_step ? item.row - first_key + 1 : 0;
    float* raw = reinterpret_cast<float*>(shared + at.raw);  // the query, then keys
    float* query = reinterpret_cast<float*>(shared + at.query) + slot * HS;
    // [rows of the sequence in this step][HS], from its first row on.
    S* keys = reinterpret_cast<S*>(shared + at.added) + slot * 2 * kRows * HS;
    S* values = keys + kRows * HS;
    S *const wanted_keys = keys + (first_key - row.first) * HS, *const wanted_values =
                                                                    values + (first_key - row.first) * HS;

    // The query, then k and v of each row, as one range of `wanted` elements.
    const int wanted = (1 + 2 * key_rows) * HS;
    for (int first = 4 * lane; first - 4 * lane < wanted; first += kAhead * kSpan) {
      uint4 v[kAhead];
      const bool came = wait([&] {
        bool good = true;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int e = min(first + u * kSpan, wanted - 4), vector = e / HS - 1;
          const int of_row = vector < 0 ? item.row : first_key + vector / 2;
          const int begin = vector < 0        ? item.head * p.q_stride
                            : vector % 2 == 0 ? item.head * p.kv_stride + p.key_begin
                                              : item.head * p.kv_stride + p.value_begin;
          v[u] = load_relaxed_x4(p.qkv + of_row * p.qkv_stride + begin + e % HS);
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          good =
              good && has_tag(v[u].x, step) && has_tag(v[u].y, step) && has_tag(v[u].z, step) && has_tag(v[u].w, step);
        }
        return good;
      });
      if (!came) return false;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int e = first + u * kSpan, vector = e / HS - 1, d = e % HS;
        if (e >= wanted) continue;
        const float f[4] = {untagged(v[u].x), untagged(v[u].y), untagged(v[u].z), untagged(v[u].w)};
        const bool is_value = vector >= 0 && vector % 2 == 1;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (is_value) {
            wanted_values[vector / 2 * HS + d + j] = from_float<S>(f[j]);
          } else {
            raw[(vector + 2) / 2 * HS + d + j] = f[j];
          }
        }
      }
    }
    __syncwarp();
    const auto rotated_at = [&](int position, const float* of, int d) {
      if (d >= 2 * half) return of[d];
      const std::int64_t angle = static_cast<std::int64_t>(position) * half + (d < half ? d : d - half);
      const float cosine = __ldg(p.rope_cos + angle), sine = __ldg(p.rope_sin + angle);
      return d < half ? rotated(of[d], of[d + half], cosine, -sine) : rotated(of[d], of[d - half], cosine, sine);
    };
    for (int d = lane; d < HS; d += kWarpSize) query[d] = rotated_at(row.position, raw, d) * p.scale;
    for (int e = lane; e < key_rows * HS; e += kWarpSize) {
      const int key = e / HS, position = row.position - (key_rows - 1 - key);
      wanted_keys[e] = from_float<S>(rotated_at(position, raw + (1 + key) * HS, e % HS));
    }
    __syncwarp();
    if (newest) {
      const std::int64_t page =
          static_cast<std::int64_t>(p.pages[row.table + row.position / p.page_size]) * p.NKV + item.head;
      const std::int64_t to = p.capacity * p.NKV * HS * layer + (page * p.page_size + row.position % p.page_size) * HS;
      const int pieces = HS / kLaneElements, from = (item.row - row.first) * HS;
      for (int i = lane; i < 2 * pieces; i += kWarpSize) {
        const int e = i % pieces * kLaneElements;
        const S* source = (i < pieces ? keys : values) + from + e;
        *reinterpret_cast<uint4*>((i < pieces ? p.keys : p.values) + to + e) = *reinterpret_cast<const uint4*>(source);
      }
    }
    if (lane == 0) hopper::mbarrier_arrive(c.query_here + 8 * slot);
    return true;
  }

  // Merges the softmax states of the consumer warps and, in the block with the last split of a head, all splits.
  __device__ bool collect(const StepWorkUnit& item, int slot, unsigned phase, unsigned step) {
    const int HS = p.HS;
    if (!wait([&] { return hopper::mbarrier_try(c.item_done + 8 * slot, phase); })) return false;
    return merge_work_unit(
        reinterpret_cast<const float*>(shared + at.states) + slot * warps * (HS + 2), lane, warps, HS,
        p.splits + static_cast<std::int64_t>(item.row * p.NH + item.head) * p.max_splits * (HS + 2), item.split,
        item.splits, step, [&](const auto& try_once) { return wait(try_once); },
        [&](int d, float2 values) {
          S* to = p.attended + static_cast<std::int64_t>(item.row) * p.q_size + item.head * HS + d;
          store_relaxed(reinterpret_cast<unsigned*>(to), pack<S>(values.x, values.y));
        });
  }

  // The next item is prepared before the states of the current one are waited for. One atomic announces all heads of a
  // layer: a release operation waits until all earlier stores have completed, so one for each head would stall.
  __device__ void run() {
    unsigned items = 0;
    for (int l = 0; l < p.L; ++l) {
      const unsigned step = p.first_step + static_cast<unsigned>(l) + 1;
      StepWorkUnit item, next;
      if (!item_at(p, c.block, c.blocks, 0, item)) return;
      if (!prepare(l, item, static_cast<int>(items % kItemSlots), step)) return;
      unsigned heads = 0;
      int round = 1;
      for (bool more = true; more; item = next, ++items, ++round) {
        more = item_at(p, c.block, c.blocks, round, next);
        if (more && !prepare(l, next, static_cast<int>((items + 1) % kItemSlots), step)) return;
        if (!collect(item, static_cast<int>(items % kItemSlots), items / kItemSlots & 1, step)) return;
        heads += item.split == item.splits - 1 ? 1 : 0;
      }
      __syncwarp();
      if (lane == 0 && heads > 0) add_release(&p.control->attention.value, heads);
    }
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
