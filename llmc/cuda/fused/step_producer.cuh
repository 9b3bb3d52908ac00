// The producer thread of the step kernel: which bytes it copies into the ring, and in which order.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/producer.cuh"
#include "llmc/cuda/fused/step_parameters.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

template <typename S, int kRows>
struct StepProducer {
  using Layer = typename Block<StepVariant<S>>::Layer;

  Producer<StepVariant<S>>& ring;
  const StepParameters<S>& p;

  __device__ unsigned stage() const { return ring.c.ring + ring.next.stage * p.stage_bytes; }
  __device__ unsigned full() const { return ring.c.full + 8 * ring.next.stage; }

  // Columns begin to begin + width - 1 of `rows` of a matrix with `columns` columns, chunk_rows rows a stage.
  __device__ bool part_rows(const S* matrix, RowRange rows, int columns, int begin, int width, int chunk_rows) {
    for (int row = rows.begin; row < rows.end; row += chunk_rows) {
      if (!ring.acquire(p.window)) return false;
      // whole rows are one range
      const int count = min(chunk_rows, rows.end - row), ranges = width == columns ? 1 : count;
      const unsigned amount = static_cast<unsigned>(width == columns ? count * width : width) * sizeof(S), to = stage();
      const S* from = matrix + static_cast<std::int64_t>(row) * columns + begin;
      hopper::mbarrier_arrive_expect(full(), static_cast<unsigned>(ranges) * amount);
      for (int i = 0; i < ranges; ++i, from += columns) {
        hopper::bulk_load(to + static_cast<unsigned>(i) * amount, from, amount, full(), hopper::L2::evict_first);
      }
      ring.issued();
    }
    return true;
  }

  // One chunk with weight and bias of norm1, then, if `both`, of norm2. For a single row the consumers load their own.
  __device__ bool norms(const Layer& w, bool both) {
    if (kRows == 1) return true;
    if (!ring.acquire(p.window)) return false;
    const unsigned bytes = static_cast<unsigned>(p.C) * sizeof(S);
    const S* const vectors[] = {w.norm1_weight, w.norm1_bias, w.norm2_weight, w.norm2_bias};
    const int count = both ? 4 : 2;
    hopper::mbarrier_arrive_expect(full(), static_cast<unsigned>(count) * bytes);
    for (int i = 0; i < count; ++i) {
      hopper::bulk_load(stage() + static_cast<unsigned>(i) * bytes, vectors[i], bytes, full());
    }
    ring.issued();
    return true;
  }

  // Keys and values of this block's items, as far as they are in pages: chunk_positions positions a stage, keys first.
  // A chunk may span pages.
  __device__ bool pages(int layer) {
    const std::int64_t layer_begin = p.capacity * p.NKV * p.HS * layer;
    const int position_bytes = p.HS * static_cast<int>(sizeof(S));
    StepWorkUnit item;
    for (int round = 0; item_at(p, ring.c.block, ring.c.blocks, round, item); ++round) {
      const ItemPositions positions = positions_of_work_unit(p, item);
      const int end = min(positions.end, positions.cached);
      const std::int32_t* table = p.pages + p.row[item.row].table;
      for (int begin = positions.begin; begin < end; begin += p.chunk_positions) {
        if (!ring.acquire(p.window)) return false;
        const int count = min(p.chunk_positions, end - begin);
        hopper::mbarrier_arrive_expect(full(), static_cast<unsigned>(2 * count * position_bytes));
        for (int done = 0; done < count;) {
          const int position = begin + done, place = position % p.page_size;
          const int run = min(count - done, p.page_size - place);
          const std::int64_t page =
              static_cast<std::int64_t>(__ldg(table + position / p.page_size)) * p.NKV + item.head;
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
    const int chunk_rows = kStepTileRows * p.warps_r;
    const auto all = [&](const S* matrix, RowRange rows, int width) {
      return part_rows(matrix, rows, width, 0, width, chunk_rows);
    };
    if (!norms(w, true) || !all(w.qkv, own.qkv, p.C) || !all(w.up, own.up, p.C) || !pages(l)) return false;
    for (int begin = 0; begin < p.F; begin += p.C) {
      if (!part_rows(w.down, own.out, p.F, begin, p.C, chunk_rows)) return false;
    }
    return all(w.dense, own.out, p.q_size);
  }

  __device__ void run(const BlockRows& own) {
    bool more = true;
    for (int l = 0; more && l < p.L; ++l) more = layer(own, l);
    if (more && p.logits != nullptr && norms(ring.layers[p.L], false)) {
      part_rows(ring.layers[p.L].qkv, own.head, p.C, 0, p.C, kStepTileRows * p.warps_r);
    }
    ring.finish();
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
