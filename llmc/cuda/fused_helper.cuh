// The helper warp of the fused decode kernel: what attention reads and writes in global memory.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused_stream.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// What attention needs and leaves behind, while consumers work through MLP rows: a global memory access takes as long as
// what is in flight in front of it, a microsecond or two, and here nobody waits for it.
template <typename S>
struct Helper {
  const Common<S>& c;
  char* shared;
  SharedLayout at;
  int lane, warps;  // warps: consumers
  unsigned parity = 0;

  // In all lanes; false if nothing follows or the launch is aborted.
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

  // q, k and v of the item's head: the query for the consumers, and with the last split the token's key and value for
  // them and for the cache.
  __device__ bool prepare(int layer, int position, int head, bool newest, unsigned step) {
    constexpr int kAhead = 8;
    const Parameters<S>& p = c.p;
    const int HS = p.HS, half = p.rope_half;
    float* raw = reinterpret_cast<float*>(shared + at.raw);
    float* query = reinterpret_cast<float*>(shared + at.query);
    S* added = reinterpret_cast<S*>(shared + at.added);
    const Word* from = p.qkv + head * 3 * HS;
    for (int first = lane; first - lane < 3 * HS; first += kAhead * kWarpSize) {
      Word words[kAhead];
      const bool came = wait([&] {
        bool good = true;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int e = first + u * kWarpSize;
          words[u] = load_relaxed(from + (e < 3 * HS ? e : 3 * HS - 1));
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) good = good && is_of(words[u], step);
        return good;
      });
      if (!came) return false;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int e = first + u * kWarpSize;
        if (e < 3 * HS) raw[e] = value_of(words[u]);
      }
    }
    __syncwarp();
    const float *cosine = reinterpret_cast<const float*>(shared + at.rope), *sine = cosine + half;
    const auto rotated = [&](const float* of, int d) {
      if (d >= 2 * half) return of[d];
      return d < half ? of[d] * cosine[d] - of[d + half] * sine[d]
                      : of[d] * cosine[d - half] + of[d - half] * sine[d - half];
    };
    const std::int64_t row = ((static_cast<std::int64_t>(layer) * p.NH + head) * p.capacity + position) * HS;
    for (int d = lane; d < HS; d += kWarpSize) {
      query[d] = rotated(raw, d) * p.scale;
      if (newest) {
        const S key = from_float<S>(rotated(raw + HS, d)), value = from_float<S>(raw[2 * HS + d]);
        added[d] = key;
        added[HS + d] = value;
        p.keys[row + d] = key;
        p.values[row + d] = value;
      }
    }
    if (newest) fence_async_proxy_global();
    __syncwarp();
    if (lane == 0) {
      hopper::mbarrier_arrive(c.query_here);
      if (newest) add_release(&p.control->attention.value, 1);
    }
    return true;
  }

  __device__ void store_output(int element, const float (&out)[4], float sum, unsigned step) const {
    store_words(c.p.attention + element, make_uint4(word_of(out[0] / sum, step), word_of(out[1] / sum, step),
                                                    word_of(out[2] / sum, step), word_of(out[3] / sum, step)));
  }

  // Merges the consumers' states; the block that is the last of a head merges the parts of the head.
  __device__ bool collect(int head, int split, int splits, unsigned step) {
    constexpr int kAhead = 8;
    const Parameters<S>& p = c.p;
    const int HS = p.HS;
    if (!wait([&] { return hopper::mbarrier_try(c.item_done, parity); })) return false;
    parity ^= 1;
    const float* states = reinterpret_cast<const float*>(shared + at.states);
    const std::int64_t slot = static_cast<std::int64_t>(head) * p.max_splits;
    // Lane w holds the share of warp w.
    const float own = lane < warps ? states[lane * (HS + 2)] : -INFINITY, largest = warp_max(own);
    const float own_share = exp2f(own - (largest == -INFINITY ? 0.0f : largest));
    const float sum = warp_sum(lane < warps ? states[lane * (HS + 2) + 1] * own_share : 0.0f);
    for (int first = 0; first < HS; first += kWarpSize * 4) {
      const int d = first + lane * 4;
      float out[4] = {};
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        const float share = __shfl_sync(~0u, own_share, w);
        if (w >= warps || d >= HS) continue;
        const float* state = states + w * (HS + 2) + 2 + d;
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] = fmaf(state[j], share, out[j]);
      }
      if (d >= HS) continue;
      if (splits == 1) {
        store_output(head * HS + d, out, sum, step);
      } else {
        *reinterpret_cast<float4*>(p.part_out + (slot + split) * HS + d) = make_float4(out[0], out[1], out[2], out[3]);
      }
    }
    if (splits == 1) return true;
    if (lane == 0) p.part_sum[slot + split] = make_float2(largest, sum);
    __syncwarp();
    unsigned before = 0;
    if (lane == 0) before = increase_modulo(p.head_parts + head, static_cast<unsigned>(splits - 1));
    if (__shfl_sync(~0u, before, 0) + 1 != static_cast<unsigned>(splits)) return true;
    __syncwarp();  // the lanes read what lane 0 has acquired
    for (int d = lane * 4; d < HS; d += kWarpSize * 4) {
      float out[4] = {}, total = 0, most = -INFINITY;
      for (int first = 0; first < splits; first += kAhead) {
        float2 state[kAhead];
        float4 part[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int s = min(first + u, splits - 1);
          state[u] = __ldcg(p.part_sum + slot + s);
          part[u] = __ldcg(reinterpret_cast<const float4*>(p.part_out + (slot + s) * HS + d));
        }
        float next = most;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) next = fmaxf(next, state[u].x);
        const float zero = next == -INFINITY ? 0.0f : next, keep = exp2f(most - zero);
        most = next;
        total *= keep;
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] *= keep;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const float share = first + u < splits ? exp2f(state[u].x - zero) : 0.0f;
          total = fmaf(state[u].y, share, total);
          out[0] = fmaf(part[u].x, share, out[0]);
          out[1] = fmaf(part[u].y, share, out[1]);
          out[2] = fmaf(part[u].z, share, out[2]);
          out[3] = fmaf(part[u].w, share, out[3]);
        }
      }
      store_output(head * HS + d, out, total, step);
    }
    return true;
  }

  __device__ void run() {
    const Parameters<S>& p = c.p;
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
        // Every key and value of this layer's token is in the cache: the producer may read them at the next token.
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
