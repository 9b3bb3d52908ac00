// The helper warp of the fused decode kernel: attention's accesses to global memory. Each takes one to two
// microseconds, because it queues behind the copies in flight; the helper makes them while the consumers multiply MLP
// rows.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"
#include "llmc/cuda/fused/merge.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

template <typename K>
struct Helper {
  using Parameters = typename Block<K>::Parameters;
  using S = typename K::S;

  const Block<K>& c;
  char* shared;
  const SharedLayout& at;
  int lane, warps;     // warps: of the consumers
  unsigned phase = 0;  // parity of the barrier item_done

  // Computes `lane` anew: see Consumer::find_place().
  __device__ void find_place() { asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); }

  // Polls in all lanes; false if no token follows or the launch is aborted.
  template <typename Try>
  __device__ bool wait(const Try& try_once) const {
    const volatile int* stop = &c.flags.stop;
    bool stopped = false;
    const bool came = c.wait_for([&] {
      if (try_once()) return true;
      return stopped = *stop != 0;
    });
    return __all_sync(~0u, came && !stopped) != 0;
  }

  // Waits until `target` appended rows have been counted, which is not urgent: polled slowly, beside accesses that are; and a load
  // that acquires empties L1, so it comes last.
  __device__ bool appended(unsigned target) const {
    const unsigned* counter = &c.p.control->attention.value;
    const bool counted = wait([&] {
      if (static_cast<int>(load_relaxed(counter) - target) >= 0) return true;
      __nanosleep(200);
      return false;
    });
    if (counted) load_acquire(counter);
    return counted;
  }

  __device__ void load_rope(int position) const {
    const int half = c.p.rope_half;
    float* to = reinterpret_cast<float*>(shared + at.rope);
    for (int e = lane; e < 2 * half; e += kWarpSize) {
      const float* table = e < half ? c.p.rope_cos : c.p.rope_sin;
      to[e] = __ldg(table + static_cast<std::int64_t>(position) * half + (e < half ? e : e - half));
    }
    __syncwarp();
  }

  // Waits for q, k and v of the item's head. Leaves the rotated and scaled query in shared memory for the consumers;
  // with the last split also the token's key and value, which it appends to the cache.
  __device__ bool prepare(int layer, int position, int head, bool newest, unsigned step) {
    constexpr int kAhead = 8;
    const Parameters& p = c.p;
    const int HS = p.HS, half = p.rope_half;
    float* raw = reinterpret_cast<float*>(shared + at.raw);
    float* query = reinterpret_cast<float*>(shared + at.query);
    S* added = reinterpret_cast<S*>(shared + at.added);
    const TaggedValue* from = p.qkv + head * 3 * HS;
    for (int first = lane; first - lane < 3 * HS; first += kAhead * kWarpSize) {
      TaggedValue values[kAhead];
      const bool came = wait([&] {
        bool good = true;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int e = first + u * kWarpSize;
          values[u] = load_relaxed(from + (e < 3 * HS ? e : 3 * HS - 1));
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) good = good && has_tag(values[u], step);
        return good;
      });
      if (!came) return false;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int e = first + u * kWarpSize;
        if (e < 3 * HS) raw[e] = untagged(values[u]);
      }
    }
    __syncwarp();
    const float *cosine = reinterpret_cast<const float*>(shared + at.rope), *sine = cosine + half;
    const std::int64_t page = static_cast<std::int64_t>(position / p.page_size) * p.NH + head;
    const std::int64_t row = (p.capacity * p.NH * layer + page * p.page_size + position % p.page_size) * HS;
    for (int d = lane; d < HS; d += kWarpSize) {
      query[d] = rotated_element(raw, d, cosine, sine, half) * p.scale;
      if (newest) {
        const S key = from_float<S>(rotated_element(raw + HS, d, cosine, sine, half)),
                value = from_float<S>(raw[2 * HS + d]);
        added[d] = key;
        added[HS + d] = value;
      }
    }
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.query_here);
    if (!newest) return true;
    for (int d = lane; d < HS; d += kWarpSize) {  // after the arrival, so that the consumers do not wait for the fence
      p.keys[row + d] = added[d];
      p.values[row + d] = added[HS + d];
    }
    hopper::fence_async_proxy_global();
    __syncwarp();
    if (lane == 0) add_release(&p.control->attention.value, 1);
    return true;
  }

  // Merges the softmax states of the consumer warps and, in the block with the last split of a head, all splits.
  __device__ bool collect(int head, int split, int splits, unsigned step) {
    const Parameters& p = c.p;
    if (!wait([&] { return hopper::mbarrier_try(c.item_done, phase); })) return false;
    phase ^= 1;
    return merge_work_unit(
        reinterpret_cast<const float*>(shared + at.states), lane, warps, p.HS,
        p.splits + static_cast<std::int64_t>(head) * p.max_splits * (p.HS + 2), split, splits, step,
        [&](const auto& try_once) { return wait(try_once); },
        [&](int d, float2 values) {
          store_relaxed(p.attention + head * p.HS + d, tagged(values.x, step));
          store_relaxed(p.attention + head * p.HS + d + 1, tagged(values.y, step));
        });
  }

  // ---- sequential_helper.cuh
  template <int HS>
  __device__ void append_codes(std::int64_t row);
  __device__ bool append(int layer, int position, const AttentionItem& item);
  __device__ void run_sequential();

  __device__ void run() {
    const Parameters& p = c.p;
    unsigned step = 0;
    for (int token = 0; token < p.count; ++token) {
      const int position = p.position + token, splits = splits_at(position, p.max_splits);
      load_rope(position);
      for (int l = 0; l < p.L; ++l) {
        find_place();
        for (int item = c.first_work_unit(l); item < p.NH * splits; item += c.blocks) {
          const int head = item / splits, split = item % splits;
          if (!prepare(l, position, head, split == splits - 1, step + 1)) return;
          find_place();
          if (!collect(head, split, splits, step + 1)) return;
        }
        ++step;
        // Once every block has appended its keys and values of this layer, the producer may read them at the next
        // token.
        const unsigned target = static_cast<unsigned>(p.NH) * step;
        if (!appended(target)) return;
        __threadfence_block();
        if (lane == 0) *const_cast<volatile unsigned*>(&c.flags.cache_steps) = step;
      }
    }
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
