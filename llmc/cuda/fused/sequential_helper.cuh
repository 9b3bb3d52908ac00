// The helper warp for the sequential residual. The consumers compute attention without it, since they have no other
// work to overlap with; the helper writes the token's keys and values to the cache while they continue.
#pragma once

#include "llmc/cuda/fused/helper.cuh"
#include "llmc/cuda/op/attention/paged/code_rows.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Writes the codes of the key and value that the consumers left in shared memory as row `row`, counted over all layers.
template <typename K>
template <int HS>
__device__ void Helper<K>::append_codes(std::int64_t row) {
  using Rotation = WarpRotation<S, HS>;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const unsigned* added = reinterpret_cast<const unsigned*>(shared + at.added) + i * HS / 2;
    unsigned words[Rotation::kWords];
#pragma unroll
    for (int w = 0; w < Rotation::kWords; ++w) words[w] = added[Rotation::word(w)];
    store_codes<S, HS>(i == 0 ? KvKind::key : KvKind::value, words, c.flags.added_scales[i], row, c.p.cached);
  }
}

// Writes the key and value that the consumers left in shared memory to their page, if the item is the one that does. The
// consumers may reuse that memory after item_done.
template <typename K>
__device__ bool Helper<K>::append(int layer, int position, const AttentionItem& item) {
  const Parameters& p = c.p;
  const auto is_here = [&] { return hopper::mbarrier_try(c.query_here, phase); };
  // If no token follows, query_here may have completed just before `stop` was set: test once more.
  if (!wait(is_here) && __all_sync(~0u, is_here()) == 0) return false;
  phase ^= 1;
  if (!item.appends()) {
    if (lane == 0) hopper::mbarrier_arrive(c.item_done);
    return true;
  }
  const uint4* added = reinterpret_cast<const uint4*>(shared + at.added);
  const std::int64_t page = static_cast<std::int64_t>(position / p.page_size) * p.NKV + item.head;
  const std::int64_t row = p.capacity * p.NKV * layer + page * p.page_size + position % p.page_size;
  if (p.kv_fp8) {
    if (p.HS == 64) {
      append_codes<64>(row);
    } else {
      append_codes<128>(row);
    }
  } else {
    const int pieces = p.HS / kLaneElements;
    for (int i = lane; i < 2 * pieces; i += kWarpSize) {
      S* to =
          i < pieces ? p.keys + row * p.HS + i * kLaneElements : p.values + row * p.HS + (i - pieces) * kLaneElements;
      *reinterpret_cast<uint4*>(to) = added[i];
    }
  }
  hopper::fence_async_proxy_global();
  __syncwarp();
  if (lane == 0) {
    hopper::mbarrier_arrive(c.item_done);
    add_release(&p.control->attention.value, 1);
  }
  return true;
}

template <typename K>
__device__ void Helper<K>::run_sequential() {
  const Parameters& p = c.p;
  unsigned step = 0;
  for (int token = 0; token < p.count; ++token) {
    const int position = p.position + token;
    const AttentionItems items(p, p, position, c.blocks);
    const int stop = *const_cast<volatile int*>(&c.flags.stop);
    if (stop != 0 && token >= stop) return;
    for (int l = 0; l < p.L; ++l) {
      find_place();
      for (int i = c.block; i < items.count; i += c.blocks) {
        const AttentionItem item = items.at(i);
        if (item.newest() && !append(l, position, item)) return;
      }
      ++step;
      // Once every block has appended its keys and values of this layer, the producer may read them at the next token.
      // If no token follows, the remaining layers are appended all the same.
      const unsigned target = static_cast<unsigned>(p.NKV) * step;
      if (!appended(target)) {
        if (*const_cast<volatile int*>(&c.flags.abort) != 0) return;
        continue;
      }
      __threadfence_block();
      if (lane == 0) *const_cast<volatile unsigned*>(&c.flags.cache_steps) = step;
    }
  }
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
