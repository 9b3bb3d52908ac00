// The producer thread of the fused decode kernel: copies weights and cache into the ring in shared memory.
#pragma once

#include <cstddef>
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

  // The pointers at the beginning of a layer in 16 bits, by LayerParts::Matrix.
  using Plain = LayerMatrices<typename K::S, false>;
  static_assert(offsetof(Plain, qkv) == LayerParts::qkv * sizeof(void*) &&
                offsetof(Plain, up) == LayerParts::up * sizeof(void*));
  static_assert(offsetof(Plain, down) == LayerParts::down * sizeof(void*) &&
                offsetof(Plain, dense) == LayerParts::dense * sizeof(void*));

  const Block<K>& c;
  const Layer* layers;
  const CopyRun* runs;                  // of this block
  RingPosition next = {}, oldest = {};  // the stage to fill next; the stage of the oldest copy that may be in flight
  int in_flight = 0;

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
  __device__ bool acquire(int window) {
    if (!drain(window - 1)) return false;
    const volatile int* stop = &c.flags.stop;
    const unsigned barrier = c.empty + 8 * next.stage, phase = next.phase ^ 1;
    bool stopped = false;
    const bool free = c.wait_for([&] {
      if (hopper::mbarrier_try(barrier, phase)) return true;
      return stopped = *stop != 0;
    });
    return free && !stopped;
  }
  __device__ void issued() {
    ++in_flight;
    next.advance(c.p.stages);
  }

  // A block must not end while copies into its shared memory are in flight. They complete whether or not the launch was
  // aborted, so wait_for() would return too early.
  __device__ void finish() {
    for (; in_flight > 0; --in_flight) {
      hopper::mbarrier_wait(c.full + 8 * oldest.stage, oldest.phase);
      oldest.advance(c.p.stages);
    }
  }

  using S = typename K::S;
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
        if (!acquire(p.window)) return false;
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
  __device__ bool pages(int token, int layer);
  // Whether the block may have items of attention at `position`.
  __device__ bool has_items([[maybe_unused]] int position) const {
    if constexpr (K::kSequential) return c.block < AttentionItems(c.p, c.p, position, c.blocks).count;
    return true;
  }

  // Copies runs begin to end - 1, and before run `cached_at`, if that is not -1, what cached() copies. base(matrix): the matrix's
  // first byte. quiet, with quantised weights: of each stage most is asked for once all before it have come.
  template <typename Base, typename Cached>
  __device__ bool copy(int begin, int end, int cached_at, bool quiet, const Base& base, const Cached& cached) {
    const Parameters& p = c.p;
#pragma unroll 1
    for (int i = begin;; ++i) {
      if (i == cached_at && !cached()) return false;
      if (i == end) return true;
      const CopyRun run = runs[i];
      const char* from = base(run.matrix) + static_cast<std::int64_t>(run.from) * kCopyUnit;
      const unsigned amount = run.amount * kCopyUnit;
#pragma unroll 1
      for (unsigned left = run.stages; left > 0; --left) {
        if (!acquire(p.window)) return false;
        const unsigned barrier = c.full + 8 * next.stage, to = c.ring + next.stage * p.stage_bytes;
        hopper::mbarrier_arrive_expect(barrier, run.ranges * amount);
        bool good = true;
        if constexpr (K::kQuantized) {
          // Small accesses of other blocks queue behind what is in flight (dev/performance/fused.md).
          const unsigned first = quiet ? amount / 4 / kCopyUnit * kCopyUnit : amount;
          if (first > 0) hopper::bulk_load(to, from, first, barrier, hopper::L2::evict_first);
          if (first < amount) {
            good = drain();  // if the launch ends, what is asked for must still come whole: see run()
            hopper::bulk_load(to + first, from + first, amount - first, barrier, hopper::L2::evict_first);
          }
        } else {
#pragma unroll 1
          for (unsigned n = 0; n < run.ranges; ++n) {
            hopper::bulk_load(to + n * run.stage_apart * kCopyUnit,
                              from + static_cast<std::int64_t>(n) * run.apart * kCopyUnit, amount, barrier,
                              hopper::L2::evict_first);
          }
        }
        issued();
        from += static_cast<std::int64_t>(run.step) * kCopyUnit;
        if (!good) return false;
      }
    }
  }

  __device__ void run(const BlockRows& own) {
    const Parameters& p = c.p;
    bool more = true;
    for (int token = 0; more && token < p.count; ++token) {
      const int lists = token < p.num_more || c.layer_only() ? p.L : p.L + 1;  // without logits, or with them
      const bool has_items = this->has_items(p.position + token);
#pragma unroll 1
      for (int l = 0; more && l < lists; ++l) {
        const Layer& w = layers[l];
        const bool head = l == p.L;
        const int begin = head ? own.layer_runs : 0, end = head ? own.runs : own.layer_runs;
        const int cached_at = has_items && !head ? own.cached_at : -1;
        const auto cached = [&] {
          if constexpr (K::kSequential) {
            return pages(token, l);
          } else {
            return cache(token, l, p.position + token);
          }
        };
        if constexpr (K::kQuantized) {
          const char* from = reinterpret_cast<const char*>(w.qkv);
          if (w.stream != nullptr) {
            from = reinterpret_cast<const char*>(w.stream + c.block * (head ? p.head_stream_bytes : p.stream_bytes));
          }
          const bool quiet = K::Format::kTiles > 1 && p.cautious && !head;
          more = copy(
              begin, end, cached_at, quiet, [&](unsigned) { return from; }, cached);
        } else {
          const auto base = [&](unsigned matrix) { return reinterpret_cast<const char* const*>(&w)[matrix]; };
          more = copy(begin, end, cached_at, false, base, cached);
        }
      }
    }
    finish();
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
