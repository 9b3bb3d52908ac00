// The producer thread of the fused decode kernel: copies weights and cache into the ring in shared memory.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"
#include "llmc/cuda/fused/packed_tiles.cuh"
#include "llmc/cuda/hw/ring.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

template <typename K>
struct Producer {
  using Parameters = typename Block<K>::Parameters;
  using Layer = typename Block<K>::Layer;

  const Block<K>& c;
  const Layer* layers;
  RingPosition next, oldest;  // the stage to fill next; the stage of the oldest copy that may be in flight
  int in_flight = 0;
  bool wrapped = false;  // every stage has been used, so the consumers must release it before it is filled again

  // Waits until at most `most` of the copies issued() are in flight. False: the launch ends, stop copying.
  __device__ bool drain(int most = 0) {
    for (; in_flight > most; --in_flight) {
      if (!c.wait_barrier(c.full + 8 * oldest.stage, oldest.phase)) return false;
      oldest.advance(c.p.stages);
    }
    return true;
  }
  // Waits until the next stage is free and fewer than `window` copies are in flight. False: the launch ends, stop
  // copying.
  __device__ bool acquire() {
    const Parameters& p = c.p;
    if (!drain(p.window - 1)) return false;
    const volatile int* stop = &c.flags.stop;
    if (wrapped) {
      const unsigned barrier = c.empty + 8 * next.stage, phase = next.phase ^ 1;
      bool stopped = false;
      const bool free = c.wait_for([&] {
        if (hopper::mbarrier_try(barrier, phase)) return true;
        return stopped = *stop != 0;
      });
      if (!free || stopped) return false;
    }
    return true;
  }
  __device__ void issued() {
    ++in_flight;
    next.advance(c.p.stages);
    if (next.stage == 0) wrapped = true;
  }

  // Copies `size` consecutive bytes, `chunk` of them a stage.
  __device__ bool bytes(const void* from, std::int64_t size, int chunk) {
    const char* source = static_cast<const char*>(from);
    for (std::int64_t done = 0; done < size; done += chunk) {
      const unsigned amount = static_cast<unsigned>(size - done < chunk ? size - done : chunk);
      if (!acquire()) return false;
      const unsigned barrier = c.full + 8 * next.stage;
      hopper::mbarrier_arrive_expect(barrier, amount);
      hopper::bulk_load(c.ring + next.stage * c.p.stage_bytes, source + done, amount, barrier, hopper::L2::evict_first);
      issued();
    }
    return true;
  }
  using S = typename K::S;
  __device__ bool rows(const S* matrix, RowRange rows, int columns) {
    return bytes(matrix + static_cast<std::int64_t>(rows.begin) * columns,
                 static_cast<std::int64_t>(rows.end - rows.begin) * columns * static_cast<int>(sizeof(*matrix)),
                 c.p.stage_bytes);
  }

  // Copies keys and values of the positions before `position`, for the items of this block. From the second token on it
  // first waits until the cache holds what this launch appended at the previous token.
  __device__ bool cache(int token, int layer, int position) {
    const Parameters& p = c.p;
    const int splits = splits_at(position, p.max_splits);
    const int position_bytes = p.HS * static_cast<int>(sizeof(S));
    const std::int64_t layer_begin = p.capacity * p.NH * p.HS * layer;
    bool checked = token == 0;  // the first token reads only what earlier launches wrote
    for (int item = c.first_work_unit(layer); item < p.NH * splits; item += c.blocks) {
      const Positions cached = positions_of(position, splits, item % splits);
      if (cached.begin == cached.end) continue;
      if (!checked) {
        const volatile unsigned* steps = &c.flags.cache_steps;
        const unsigned wanted = static_cast<unsigned>((token - 1) * p.L + layer + 1);
        if (!c.wait_for([&] { return *steps >= wanted || *const_cast<volatile int*>(&c.flags.stop) != 0; }))
          return false;
        if (*const_cast<volatile int*>(&c.flags.stop) != 0) return false;
        // orders the read of cache_steps, as the helper's fence its write; the next fence is for the async proxy
        __threadfence_block();
        hopper::fence_async_proxy_global();
        checked = true;
      }
      for (int first = cached.begin; first < cached.end;) {
        const int count = chunk_of(p, first, cached.end);
        const std::int64_t page = static_cast<std::int64_t>(first / p.page_size) * p.NH + item / splits;
        const std::int64_t from = layer_begin + (page * p.page_size + first % p.page_size) * p.HS;
        const unsigned amount = static_cast<unsigned>(count * position_bytes);
        if (!acquire()) return false;
        const unsigned barrier = c.full + 8 * next.stage, stage = c.ring + next.stage * p.stage_bytes;
        hopper::mbarrier_arrive_expect(barrier, 2 * amount);
        hopper::bulk_load(stage, p.keys + from, amount, barrier, hopper::L2::evict_first);
        hopper::bulk_load(stage + p.chunk_positions * position_bytes, p.values + from, amount, barrier,
                          hopper::L2::evict_first);
        issued();
        first += count;
      }
    }
    return true;
  }

  // ---- sequential_producer.cuh
  __device__ bool chunk(const void* from, int copies, int amount, std::int64_t apart, int stage_apart);
  __device__ bool part_rows(const S* matrix, RowRange rows, int columns, int begin, int width, int chunk_rows);
  __device__ bool gated_rows(const S* matrix, RowRange rows, int half);
  __device__ bool pages(int token, int layer, int position);
  __device__ bool sequential_layer(const BlockRows& own, int token, int l);

  // ---- quantized_rows.cuh
  template <typename Format>
  __device__ bool stream_part(const std::byte*& source, const StreamPart& part);
  __device__ bool quantized_layer(const LayerParts& parts, int token, int l);

  // Copies one layer, in the order in which the consumers read it.
  __device__ bool layer(const BlockRows& own, int token, int l) {
    const Parameters& p = c.p;
    const Layer& w = layers[l];
    return rows(w.qkv, own.qkv, p.C) && rows(w.up, own.up, p.C) && cache(token, l, p.position + token) &&
           (c.layer_only() || rows(w.down, own.out, p.F)) && rows(w.dense, own.out, p.C);
  }

  // `parts`: shared memory for those of quantised matrices, which a loop indexes.
  __device__ void run(const BlockRows& own, [[maybe_unused]] LayerParts& parts) {
    const Parameters& p = c.p;
    bool more = true;
    if constexpr (K::kQuantized) {
      const SequentialSizes* sequential = nullptr;
      if constexpr (K::kSequential) sequential = &p;
      parts = layer_parts(p, sequential, K::kRowLoads, own, c.block, c.blocks);
    }
    for (int token = 0; more && token < p.count; ++token) {
      for (int l = 0; more && l < p.L; ++l) {
        if constexpr (K::kQuantized) {
          more = quantized_layer(parts, token, l);
        } else if constexpr (K::kSequential) {
          more = sequential_layer(own, token, l);
        } else {
          more = layer(own, token, l);
        }
      }
      if (token < p.num_more) continue;  // no logits
      if constexpr (K::kQuantized) {
        if (more && layers[p.L].stream != nullptr) {
          const std::byte* source = layers[p.L].stream + c.block * p.head_stream_bytes;
          more = stream_part<HeadFormat>(source, {own.head.end - own.head.begin, groups_of(p.C), K::kRowLoads});
          continue;
        }
      }
      if constexpr (K::kSequential || K::kQuantized) {
        more = more && part_rows(layers[p.L].qkv, own.head, p.C, 0, p.C, kChunkLoads / K::kRowLoads * p.warps_r);
      } else {
        more = more && (c.layer_only() || rows(layers[p.L].qkv, own.head, p.C));
      }
    }
    // A block must not end while copies into its shared memory are in flight. They complete whether or not the launch
    // was aborted, so wait_for() would return too early.
    for (; in_flight > 0; --in_flight) {
      hopper::mbarrier_wait(c.full + 8 * oldest.stage, oldest.phase);
      oldest.advance(p.stages);
    }
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
