// The producer thread for the sequential residual: which bytes it copies into the ring, and in which order.
#pragma once

#include "llmc/cuda/fused/producer.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Fills one stage with `copies` ranges of `amount` bytes, `apart` bytes apart in global memory and `stage_apart` in the
// stage.
template <typename K>
__device__ bool Producer<K>::chunk(const void* from, int copies, int amount, std::int64_t apart, int stage_apart) {
  if (!acquire()) return false;
  const unsigned barrier = c.full + 8 * next.stage, stage = c.ring + next.stage * c.p.stage_bytes;
  const char* source = static_cast<const char*>(from);
  hopper::mbarrier_arrive_expect(barrier, static_cast<unsigned>(copies * amount));
  for (int i = 0; i < copies; ++i) {
    hopper::bulk_load(stage + i * stage_apart, source + i * apart, static_cast<unsigned>(amount), barrier,
                      hopper::L2::evict_first);
  }
  issued();
  return true;
}

// Copies columns begin to begin + width - 1 of `rows` of a matrix with `columns` columns, chunk_rows rows a stage.
template <typename K>
__device__ bool Producer<K>::part_rows(const S* matrix, RowRange rows, int columns, int begin, int width,
                                       int chunk_rows) {
  if (width == 0) return true;
  constexpr int kBytes = sizeof(*matrix);
  for (int row = rows.begin; row < rows.end; row += chunk_rows) {
    const int count = min(chunk_rows, rows.end - row);
    const auto* from = matrix + static_cast<std::int64_t>(row) * columns + begin;
    const bool good = width == columns ? chunk(from, 1, count * width * kBytes, 0, 0)
                                       : chunk(from, count, width * kBytes, static_cast<std::int64_t>(columns) * kBytes,
                                               width * kBytes);
    if (!good) return false;
  }
  return true;
}

// Copies rows of gate and the same rows of up, which lie F rows further on. A stage has `half` rows of gate, then the
// same rows of up.
template <typename K>
__device__ bool Producer<K>::gated_rows(const S* matrix, RowRange rows, int half) {
  const int row_bytes = c.p.C * static_cast<int>(sizeof(*matrix));
  for (int row = rows.begin; row < rows.end; row += half) {
    const int count = min(half, rows.end - row);
    if (!chunk(matrix + static_cast<std::int64_t>(row) * c.p.C, 2, count * row_bytes,
               static_cast<std::int64_t>(c.p.F) * row_bytes, half * row_bytes)) {
      return false;
    }
  }
  return true;
}

// As cache(), for a cache that may be in pages.
template <typename K>
__device__ bool Producer<K>::pages(int token, int layer, int position) {
  const Parameters& p = c.p;
  const AttentionItems items(p, p, position, c.blocks);
  const std::int64_t layer_begin = p.capacity * p.NKV * layer;
  bool checked = token == 0;  // the first token reads only what earlier launches wrote
  for (int i = c.block; i < items.count; i += c.blocks) {
    const AttentionItem item = items.at(i);
    const Positions cached = positions_of<kPageUnit>(position, item.splits, item.split);
    if (cached.begin == cached.end) continue;
    if (!checked) {
      const volatile unsigned* steps = &c.flags.cache_steps;
      const volatile int* stop = &c.flags.stop;
      const unsigned wanted = static_cast<unsigned>((token - 1) * p.L + layer + 1);
      if (!c.wait_for([&] { return *steps >= wanted || *stop != 0; })) return false;
      if (*stop != 0) return false;
      // orders the read of cache_steps, as the helper's fence its write; the next fence is for the async proxy
      __threadfence_block();
      hopper::fence_async_proxy_global();
      checked = true;
    }
    int row = cached.begin % p.page_size;
    std::int64_t from =
        layer_begin + (static_cast<std::int64_t>(cached.begin / p.page_size) * p.NKV + item.head) * p.page_size + row;
    for (int first = cached.begin; first < cached.end; first += items.turn) {
      // Codes come in whole units. In the last one the helper, of this block or another, may be writing the new token: bytes
      // of that row alone, which none of this token's readers counts.
      const int left = cached.end - first,
                count = min(items.turn, p.kv_fp8 ? (left + kSlice - 1) / kSlice * kSlice : left);
      if (!acquire()) return false;
      const unsigned barrier = c.full + 8 * next.stage, stage = c.ring + next.stage * p.stage_bytes;
      hopper::mbarrier_arrive_expect(barrier,
                                     static_cast<unsigned>(2 * count * (p.position_bytes + (p.kv_fp8 ? 1 : 0))));
      for (int done = 0; done < count;) {  // a page at a time
        const int rows = min(count - done, p.page_size - row);
        const auto copy = [&](unsigned at, const std::uint8_t* of, int row_bytes) {
          hopper::bulk_load(stage + at + done * row_bytes, of + from * row_bytes,
                            static_cast<unsigned>(rows * row_bytes), barrier, hopper::L2::evict_first);
        };
        const unsigned half = p.chunk_positions * p.position_bytes;
        copy(0, p.cached.keys, p.position_bytes);
        copy(half, p.cached.values, p.position_bytes);
        if (p.kv_fp8) {
          copy(2 * half, p.cached.key_scales, 1);
          copy(2 * half + p.chunk_positions, p.cached.value_scales, 1);
        }
        done += rows;
        from += rows;
        row += rows;
        if (row == p.page_size) row = 0, from += (p.NKV - 1) * p.page_size;
      }
      issued();
    }
  }
  return true;
}

// Copies one layer, in the order in which the consumers read it.
template <typename K>
__device__ bool Producer<K>::sequential_layer(const BlockRows& own, int token, int l) {
  const Parameters& p = c.p;
  const Layer& w = layers[l];
  constexpr int kRows = kChunkLoads / K::kRowLoads, kPartRows = kChunkLoads / (2 * K::kRowLoads);
  const int chunk_rows = kRows * p.warps_r;
  if (!part_rows(w.qkv, own.qkv, p.C, 0, p.C, chunk_rows)) return false;
  if (!pages(token, l, p.position + token)) return false;
  if (!part_rows(w.dense, own.out, p.q_size, 0, p.q_size, chunk_rows)) return false;
  for (int part = 0; part < 2; ++part) {
    const RowRange rows = hidden_part(p, p.first_part, part, c.block, c.blocks);
    if (!(p.gated ? gated_rows(w.up, rows, chunk_rows / 2) : part_rows(w.up, rows, p.C, 0, p.C, chunk_rows))) {
      return false;
    }
  }
  return part_rows(w.down, own.out, p.F, 0, p.first_part, kPartRows * p.warps_r) &&
         part_rows(w.down, own.out, p.F, p.first_part, p.F - p.first_part, kPartRows * p.warps_r);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
