// The producer thread for the sequential residual: keys and values.
#pragma once

#include "llmc/cuda/fused/producer.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// As cache(), for a cache that may be in pages.
template <typename K>
__device__ bool Producer<K>::pages(int token, int layer) {
  const Parameters& p = c.p;
  int position = p.position + token;
  asm volatile("" : "+r"(position));  // otherwise what derives from it takes registers in all of a layer
  const AttentionItems items(p, p, position, c.blocks);
  const std::int64_t layer_begin = p.capacity * p.NKV * layer;
  bool checked = token == 0;  // the first token reads only what earlier launches wrote
  for (int i = c.block; i < items.count; i += c.blocks) {
    const AttentionItem item = items.at(i);
    if (item.begin == item.end) continue;
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
    int row = item.begin % p.page_size;
    std::int64_t from =
        layer_begin + (static_cast<std::int64_t>(item.begin / p.page_size) * p.NKV + item.head) * p.page_size + row;
    for (int first = item.begin; first < item.end; first += items.turn) {
      // Codes come in whole units. In the last one the helper, of this block or another, may be writing the new token: bytes
      // of that row alone, which none of this token's readers counts.
      const int left = item.end - first,
                count = min(items.turn, p.kv_fp8 ? (left + kSlice - 1) / kSlice * kSlice : left);
      if (!acquire(p.kv_window)) return false;
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

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
