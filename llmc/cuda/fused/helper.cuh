// The helper warp of the fused decode kernel: attention's accesses to global memory. Each takes one to two
// microseconds, because it queues behind the copies in flight; the helper makes them while the consumers multiply MLP
// rows.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"
#include "llmc/cuda/op/rotate_pair.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

template <typename K>
struct Helper {
  using Parameters = typename Block<K>::Parameters;
  using KV = typename K::KV;

  const Block<K>& c;
  char* shared;
  SharedLayout at;
  int lane, warps;     // warps: of the consumers
  unsigned phase = 0;  // parity of the barrier item_done

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
    KV* added = reinterpret_cast<KV*>(shared + at.added);
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
        const KV key = from_float<KV>(rotated_element(raw + HS, d, cosine, sine, half)),
                 value = from_float<KV>(raw[2 * HS + d]);
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

  // Stores two values of a split, each tagged with the step, for the block that merges the splits.
  __device__ void store_pair(std::uint64_t* to, float first, float second, unsigned step) const {
    const std::uint64_t number = static_cast<std::uint64_t>(step) << 32;
    store_relaxed(to, number | __float_as_uint(first));
    store_relaxed(to + 1, number | __float_as_uint(second));
  }

  // Merges the softmax states of the consumer warps. Where a head has several splits, the block with the last one
  // merges all of them in order.
  __device__ bool collect(int head, int split, int splits, unsigned step) {
    constexpr int kAhead = 8;
    const Parameters& p = c.p;
    const int HS = p.HS;
    if (!wait([&] { return hopper::mbarrier_try(c.item_done, phase); })) return false;
    phase ^= 1;
    const float* states = reinterpret_cast<const float*>(shared + at.states);
    std::uint64_t* stored = p.splits + static_cast<std::int64_t>(head) * p.max_splits * (HS + 2);
    // Lane w holds the factor by which the state of warp w is rescaled.
    const float own = lane < warps ? states[lane * (HS + 2)] : -INFINITY, largest = warp_max(own);
    const float own_weight = exp2f(own - (largest == -INFINITY ? 0.0f : largest));
    const float sum = warp_sum(lane < warps ? states[lane * (HS + 2) + 1] * own_weight : 0.0f);
    for (int first = 0; first < HS; first += kWarpSize * 2) {
      const bool inside = first + lane * 2 < HS;
      const int d = inside ? first + lane * 2 : HS - 2;
      float out[2] = {};
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        const float weight = __shfl_sync(~0u, own_weight, w);
        if (w >= warps) continue;
        const float2 state = *reinterpret_cast<const float2*>(states + w * (HS + 2) + 2 + d);
        out[0] = fmaf(state.x, weight, out[0]);
        out[1] = fmaf(state.y, weight, out[1]);
      }
      if (split < splits - 1) {
        std::uint64_t* to = stored + split * (HS + 2);
        if (inside) store_pair(to + 2 + d, out[0], out[1], step);
        if (first == 0 && lane == 0) store_pair(to, largest, sum, step);
        continue;
      }
      float merged[2] = {}, total = 0, most = -INFINITY;
      const auto raise = [&](float to) {  // rescales the sums to a new largest score
        const float zero = to == -INFINITY ? 0.0f : to, keep = exp2f(most - zero);
        most = to, total *= keep, merged[0] *= keep, merged[1] *= keep;
        return zero;
      };
      const auto add = [&](float weight, float sum_of_split, float x, float y) {
        total = fmaf(sum_of_split, weight, total);
        merged[0] = fmaf(x, weight, merged[0]);
        merged[1] = fmaf(y, weight, merged[1]);
      };
      const int others = splits - 1;
      for (int begin = 0; begin < others; begin += kAhead) {
        ulonglong2 state[kAhead], output[kAhead];
        const bool came = wait([&] {
          bool good = true;
#pragma unroll
          for (int u = 0; u < kAhead; ++u) {
            const std::uint64_t* from = stored + min(begin + u, others - 1) * (HS + 2);
            state[u] = load_relaxed_x2(from);
            output[u] = load_relaxed_x2(from + 2 + d);
          }
          const auto is_here = [&](std::uint64_t word) { return static_cast<unsigned>(word >> 32) == step; };
#pragma unroll
          for (int u = 0; u < kAhead; ++u) {
            good = good && is_here(state[u].x) && is_here(state[u].y) && is_here(output[u].x) && is_here(output[u].y);
          }
          return good;
        });
        if (!came) return false;
        const auto value = [](std::uint64_t word) { return __uint_as_float(static_cast<unsigned>(word)); };
        float next = most;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) next = fmaxf(next, value(state[u].x));
        const float zero = raise(next);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const float weight = begin + u < others ? exp2f(value(state[u].x) - zero) : 0.0f;
          add(weight, value(state[u].y), value(output[u].x), value(output[u].y));
        }
      }
      const float zero = raise(fmaxf(most, largest));
      add(exp2f(largest - zero), sum, out[0], out[1]);
      if (inside) {
        store_relaxed(p.attention + head * HS + d, tagged(merged[0] / total, step));
        store_relaxed(p.attention + head * HS + d + 1, tagged(merged[1] / total, step));
      }
    }
    return true;
  }

  // ---- sequential_helper.cuh
  __device__ bool append(int layer, int position, int head);
  __device__ void run_sequential();

  __device__ void run() {
    const Parameters& p = c.p;
    unsigned step = 0;
    for (int token = 0; token < p.count; ++token) {
      const int position = p.position + token, splits = splits_at(position, p.max_splits);
      load_rope(position);
      for (int l = 0; l < p.L; ++l) {
        for (int item = c.first_item(l); item < p.NH * splits; item += c.blocks) {
          const int head = item / splits, split = item % splits;
          if (!prepare(l, position, head, split == splits - 1, step + 1)) return;
          if (!collect(head, split, splits, step + 1)) return;
        }
        ++step;
        // Once every block has appended its keys and values of this layer, the producer may read them at the next
        // token.
        const unsigned target = static_cast<unsigned>(p.NH) * step;
        if (!wait([&] { return static_cast<int>(load_acquire(&p.control->attention.value) - target) >= 0; })) return;
        __threadfence_block();
        if (lane == 0) *const_cast<volatile unsigned*>(&c.flags.cache_steps) = step;
      }
    }
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
