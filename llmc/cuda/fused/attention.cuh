// Attention over the cached keys and values that come through the ring (flash decoding; Dao et al., 2023).
#pragma once

#include "llmc/cuda/fused/consumer.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Adds the cached keys and values of one item, chunk by chunk, divided among all warps; kLanes lanes share a position.
template <typename K>
template <int kLanes>
__device__ __forceinline__ void Consumer<K>::attend_cached(SoftmaxState<S>& r, const float (&q)[kLaneElements],
                                                           Positions cached) {
  const Parameters& p = c.p;
  constexpr int kGroups = kWarpSize / kLanes;
  const int warps = threads / kWarpSize, group = lane / kLanes, slice = lane % kLanes;
  const int position_bytes = 2 * p.HS;
  const bool active = slice * kLaneElements < p.HS;
  for (int done = cached.begin; done < cached.end;) {
    const int count = chunk_of(p, done, cached.end);
    const unsigned keys = begin_chunk() + slice * 16, values = keys + p.chunk_positions * position_bytes;
    for (int first = warp * kGroups; first < count; first += 2 * warps * kGroups) {
      const int at_position[2] = {first + group, first + warps * kGroups + group};
      uint4 v[2];
      float score[2] = {0, 0};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint4 k = make_uint4(0, 0, 0, 0);
        v[u] = k;
        if (active && at_position[u] < count) {
          k = load_shared(keys + at_position[u] * position_bytes);
          v[u] = load_shared(values + at_position[u] * position_bytes);
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
    end_chunk();
    done += count;
  }
}

// Computes one softmax state for each warp from the query that the helper left in shared memory; the helper merges the
// states.
template <typename K>
template <int kLanes>
__device__ __forceinline__ void Consumer<K>::attend_work_unit(int layer, int position, int item, int splits) {
  const Parameters& p = c.p;
  const int HS = p.HS, split = item % splits, slice = lane % kLanes;
  const bool active = slice * kLaneElements < HS;
  const Positions cached = positions_of(position, splits, split);
  const S* added = reinterpret_cast<const S*>(shared + at.added);
  const float* query = reinterpret_cast<const float*>(shared + at.query);
  c.wait_barrier(c.query_here, item_phase);
  item_phase ^= 1;
  stamp(layer, FusedPhase::query_here);
  float q[kLaneElements];
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) q[j] = active ? query[slice * kLaneElements + j] : 0.0f;

  SoftmaxState<S> r;
  attend_cached<kLanes>(r, q, cached);
  if (split == splits - 1 && warp == 0) {  // the new token itself
    uint4 k = make_uint4(0, 0, 0, 0), v = k;
    if (active && lane < kLanes) {
      k = *reinterpret_cast<const uint4*>(added + slice * kLaneElements);
      v = *reinterpret_cast<const uint4*>(added + HS + slice * kLaneElements);
    }
    float score = 0;
    dot<S>(score, k, q);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
    r.add(lane < kLanes ? score : -INFINITY, -INFINITY, v, make_uint4(0, 0, 0, 0));
  }
  r.template store<kLanes>(reinterpret_cast<float*>(shared + at.states) + warp * (HS + 2), lane, HS);
  __syncwarp();
  if (lane == 0) hopper::mbarrier_arrive(c.item_done);
}

// All items of this block: each is a head and a split of its context.
template <typename K>
__device__ __forceinline__ void Consumer<K>::attend(int layer, int position, int splits) {
  const Parameters& p = c.p;
  for (int item = c.first_work_unit(layer); item < p.NH * splits; item += c.blocks) {
    if (p.HS <= 32) {
      attend_work_unit<4>(layer, position, item, splits);
    } else if (p.HS <= 64) {
      attend_work_unit<8>(layer, position, item, splits);
    } else if (p.HS <= 128) {
      attend_work_unit<16>(layer, position, item, splits);
    } else {
      attend_work_unit<32>(layer, position, item, splits);
    }
  }
  stamp(layer, FusedPhase::attention_done);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
