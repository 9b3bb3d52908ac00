// What the producer thread of the step kernel copies.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/sequential_producer.cuh"
#include "llmc/cuda/fused/step_parameters.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

template <typename S, bool kParallel>
struct StepProducer {
  using Layer = typename Block<StepVariant<S>>::Layer;

  Producer<StepVariant<S>>& ring;
  const StepParameters<S>& p;

  __device__ unsigned stage() const { return ring.c.ring + ring.next.stage * p.stage_bytes; }
  __device__ unsigned full() const { return ring.c.full + 8 * ring.next.stage; }

  // Keys and values of the positions of this block's items that lie in pages, chunk_positions a stage.
  __device__ bool pages(int layer) {
    const std::int64_t layer_begin = p.capacity * p.NKV * p.HS * layer;
    const int position_bytes = p.HS * static_cast<int>(sizeof(S));
    StepItem item;
    for (int round = 0; item_at(p, ring.c.block, ring.c.blocks, round, item); ++round) {
      const ItemPositions positions = positions_of_item(p, item);
      const int end = min(positions.end, positions.cached), kv_head = item.head / p.group;
      const std::int32_t* table = p.pages + p.row[item.row].table;
      for (int begin = positions.begin; begin < end; begin += p.chunk_positions) {
        if (!ring.acquire()) return false;
        const int count = min(p.chunk_positions, end - begin);
        hopper::mbarrier_arrive_expect(full(), static_cast<unsigned>(2 * count * position_bytes));
        for (int done = 0; done < count;) {
          const int position = begin + done, place = position % p.page_size;
          const int run = min(count - done, p.page_size - place);
          const std::int64_t page = static_cast<std::int64_t>(__ldg(table + position / p.page_size)) * p.NKV + kv_head;
          const std::int64_t from = layer_begin + (page * p.page_size + place) * p.HS;
          const unsigned to = stage() + static_cast<unsigned>(done * position_bytes);
          const auto bytes = static_cast<unsigned>(run * position_bytes);
          hopper::bulk_load(to, p.keys + from, bytes, full());
          hopper::bulk_load(to + static_cast<unsigned>(p.chunk_positions * position_bytes), p.values + from, bytes,
                            full());
          done += run;
        }
        ring.issued();
      }
    }
    return true;
  }

  __device__ bool layer(const BlockRows& own, int l) {
    const Layer& w = ring.layers[l];
    const int chunk_rows = kTileRows * p.warps_r;
    const auto all = [&](const S* matrix, RowRange rows, int width) {
      return ring.part_rows(matrix, rows, width, 0, width, chunk_rows);
    };
    if (!all(w.qkv, own.qkv, p.C)) return false;
    if constexpr (kParallel) {
      return all(w.up, own.up, p.C) && pages(l) && down(w, own.out) && all(w.dense, own.out, p.q_size);
    }
    if (!pages(l) || !all(w.dense, own.out, p.q_size)) return false;
    const bool good = p.gated ? ring.gated_rows(w.up, own.up, chunk_rows / 2) : all(w.up, own.up, p.C);
    return good && down(w, own.out);
  }
  __device__ bool down(const Layer& w, RowRange rows) {
    for (int begin = 0; begin < p.F; begin += p.part) {
      if (!ring.part_rows(w.down, rows, p.F, begin, min(p.part, p.F - begin), kTileRows * p.warps_r)) return false;
    }
    return true;
  }

  __device__ void run(const BlockRows& own) {
    bool more = true;
    for (int l = 0; more && l < p.L; ++l) more = layer(own, l);
    if (more && p.logits != nullptr) {
      ring.part_rows(ring.layers[p.L].qkv, own.head, p.C, 0, p.C, kTileRows * p.warps_r);
    }
    // A block must not end while copies into its shared memory are in flight. They complete whatever has happened.
    for (; ring.in_flight > 0; --ring.in_flight) {
      while (!hopper::mbarrier_try(ring.c.full + 8 * ring.oldest.stage, ring.oldest.phase)) {
      }
      ring.oldest.advance(p.stages);
    }
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
