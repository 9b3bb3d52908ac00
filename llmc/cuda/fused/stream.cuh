// The weight stream of the fused decode kernel: words in global memory that carry their own flag, waits that end, and the
// producer, which copies weights and cache into the ring in shared memory.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/layout.cuh"
#include "llmc/cuda/hw/hopper.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// ---- global memory --------------------------------------------------------------------------------------------------

__device__ inline std::uint64_t global_time() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ inline unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline unsigned load_relaxed(const unsigned* address) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void add_release(unsigned* address, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void store_word(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void store_word(Word* address, Word value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline uint4 load_words(const Word* address) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}
// What a word says: see Word.
__device__ inline Word word_of(float value, unsigned step) {
  return (__float_as_uint(value) & ~1u) | (step & 1);
}
__device__ inline bool is_of(Word word, unsigned step) {
  return ((word ^ step) & 1) == 0;
}
__device__ inline float value_of(Word word) {
  return __uint_as_float(word & ~1u);
}
__device__ inline std::uint64_t load_word(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline ulonglong2 load_pair(const std::uint64_t* address) {
  ulonglong2 pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.x), "=l"(pair.y) : "l"(address) : "memory");
  return pair;
}
// To and from the host.
__device__ inline void store_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void store_system_relaxed(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_system(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
// Between ordinary stores to global memory and bulk copies that read it, in both threads.
__device__ inline void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Loads that stay where they are written: the compiler would move an ordinary one to its first use, behind the wait that is
// meant to hide its latency.
__device__ inline uint4 load_early(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ inline unsigned short load_early(const unsigned short* address) {
  unsigned short value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
}

// ---- 16-bit values --------------------------------------------------------------------------------------------------

__device__ inline uint4 load_shared(unsigned address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
template <typename S>
__device__ inline void widen(unsigned pair, float& low, float& high) {
  if constexpr (std::is_same_v<S, bf16>) {
    const float2 both = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
    low = both.x;
    high = both.y;
  } else {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    low = both.x;
    high = both.y;
  }
}
template <typename S>
__device__ inline void widen(const uint4& packed, float* values) {
  widen<S>(packed.x, values[0], values[1]);
  widen<S>(packed.y, values[2], values[3]);
  widen<S>(packed.z, values[4], values[5]);
  widen<S>(packed.w, values[6], values[7]);
}
// sum += the dot product of 8 weights and 8 activations.
template <typename S>
__device__ inline void dot(float& sum, const uint4& packed, const float* activation) {
  float w[kLane];
  widen<S>(packed, w);
#pragma unroll
  for (int j = 0; j < kLane; ++j) sum = fmaf(w[j], activation[j], sum);
}

// Sums N values (a power of 2) over the warp at once: afterwards lane l holds the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ float fold(float (&v)[N], int lane) {
  int offset = kWarpSize / 2;
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float keep = upper ? v[j + n] : v[j], give = upper ? v[j] : v[j + n];
      v[j] = keep + __shfl_xor_sync(~0u, give, offset);
    }
  }
  float sum = v[0];
#pragma unroll
  for (; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

__device__ inline float gelu(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// ---- what producer and consumers share ------------------------------------------------------------------------------

// Something did not arrive within the time limit: everybody ends.
static __device__ __noinline__ void time_out(Control* control, Mailbox* mailbox, unsigned serial, volatile int* abort) {
  if (atomicExch(&control->abort.value, 1u) == 0) {
    store_system(&mailbox->error, static_cast<std::uint64_t>(serial) << 32 | static_cast<unsigned>(Fault::timeout));
  }
  *abort = 1;
}

// The slots of the ring in order, with the parity that a wait for them needs.
struct Cursor {
  int slot = 0;
  unsigned parity = 0;
  __device__ void advance(int stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

template <typename S>
struct Common {
  const Parameters<S>& p;
  Flags& flags;
  unsigned ring, full, empty;      // shared addresses
  unsigned query_here, item_done;  // of mbarriers between helper and consumers
  int blocks, block;

  // Repeats try_once() until it is true. False if the launch is aborted.
  template <typename Try>
  __device__ bool wait_for(const Try& try_once) const {
    if (try_once()) return true;
    const volatile int* abort = &flags.abort;
    std::uint64_t start = 0;
    for (unsigned n = 1;; ++n) {
      if (try_once()) return true;
      if (*abort != 0) return false;
      if (n % 1024 != 0) continue;
      const std::uint64_t now = global_time();
      if (start == 0) start = now;
      if (load_relaxed(&p.control->abort.value) != 0) *const_cast<volatile int*>(&flags.abort) = 1;
      if (now - start > p.timeout_ns) time_out(p.control, p.mailbox, p.serial, &flags.abort);
    }
  }
  __device__ bool wait_barrier(unsigned barrier, unsigned parity) const {
    return wait_for([&] { return hopper::mbarrier_try(barrier, parity); });
  }
  __device__ bool wait_counter(const Counter& counter, unsigned target) const {
    return wait_for([&] { return static_cast<int>(load_acquire(&counter.value) - target) >= 0; });
  }
  // Which item of attention, of `items`, a block takes first in a layer; the next ones are `blocks` further on. It changes
  // from layer to layer so that blocks without an item are not always the same.
  __device__ int first_item(int layer) const { return (block + layer * 37) % blocks; }
};

struct Tokens {
  int begin, end;
};
__device__ inline Tokens split_tokens(int position, int splits, int split) {
  const int each = (position + splits - 1) / splits;
  const int begin = min(split * each, position);
  return {begin, min(begin + each, position)};
}

// ---- the producer: one thread ---------------------------------------------------------------------------------------

template <typename S>
struct Producer {
  const Common<S>& c;
  const Layer<S>* layers;
  Cursor next, oldest;  // the slot that is filled next; the oldest copy that may be in flight
  int in_flight = 0;
  bool wrapped = false;  // slots hold chunks that consumers must release first

  // False: no more copies are wanted.
  __device__ bool acquire() {
    const Parameters<S>& p = c.p;
    if (in_flight == p.window) {
      if (!c.wait_barrier(c.full + 8 * oldest.slot, oldest.parity)) return false;
      oldest.advance(p.stages);
      --in_flight;
    }
    const volatile int* stop = &c.flags.stop;
    if (wrapped) {
      const unsigned barrier = c.empty + 8 * next.slot, parity = next.parity ^ 1;
      bool stopped = false;
      const bool free = c.wait_for([&] {
        if (hopper::mbarrier_try(barrier, parity)) return true;
        return stopped = *stop != 0;
      });
      if (!free || stopped) return false;
    }
    return true;
  }
  __device__ void issued() {
    ++in_flight;
    next.advance(c.p.stages);
    if (next.slot == 0) wrapped = true;
  }

  // Consecutive bytes, `chunk` at a time.
  __device__ bool bytes(const void* from, std::int64_t size, int chunk) {
    const char* source = static_cast<const char*>(from);
    for (std::int64_t done = 0; done < size; done += chunk) {
      const unsigned amount = static_cast<unsigned>(size - done < chunk ? size - done : chunk);
      if (!acquire()) return false;
      const unsigned barrier = c.full + 8 * next.slot;
      hopper::mbarrier_arrive_expect(barrier, amount);
      hopper::bulk_load(c.ring + next.slot * c.p.stage_bytes, source + done, amount, barrier, hopper::L2::evict_first);
      issued();
    }
    return true;
  }
  __device__ bool rows(const S* matrix, Rows rows, int columns) {
    return bytes(matrix + static_cast<std::int64_t>(rows.begin) * columns,
                 static_cast<std::int64_t>(rows.end - rows.begin) * columns * static_cast<int>(sizeof(S)),
                 c.p.stage_bytes);
  }

  // Keys and values of the positions before `position`, for the items of this block.
  __device__ bool cached(int token, int layer, int position) {
    const Parameters<S>& p = c.p;
    const int splits = splits_at(position, p.max_splits);
    const int chunk_tokens = p.stage_bytes / (4 * p.HS), token_bytes = p.HS * static_cast<int>(sizeof(S));
    bool checked = token == 0;  // what earlier launches wrote is there
    for (int item = c.first_item(layer); item < p.NH * splits; item += c.blocks) {
      const Tokens tokens = split_tokens(position, splits, item % splits);
      if (tokens.begin == tokens.end) continue;
      if (!checked) {
        const volatile unsigned* steps = &c.flags.cache_steps;
        const unsigned wanted = static_cast<unsigned>((token - 1) * p.L + layer + 1);
        if (!c.wait_for([&] { return *steps >= wanted || *const_cast<volatile int*>(&c.flags.stop) != 0; }))
          return false;
        if (*const_cast<volatile int*>(&c.flags.stop) != 0) return false;
        __threadfence_block();  // the other half of the helper's, before the copies' own
        fence_async_proxy_global();
        checked = true;
      }
      const std::int64_t head = (static_cast<std::int64_t>(layer) * p.NH + item / splits) * p.capacity;
      for (int first = tokens.begin; first < tokens.end; first += chunk_tokens) {
        const int count = min(chunk_tokens, tokens.end - first);
        const unsigned amount = static_cast<unsigned>(count * token_bytes);
        if (!acquire()) return false;
        const unsigned barrier = c.full + 8 * next.slot, slot = c.ring + next.slot * p.stage_bytes;
        hopper::mbarrier_arrive_expect(barrier, 2 * amount);
        hopper::bulk_load(slot, p.keys + (head + first) * p.HS, amount, barrier, hopper::L2::evict_first);
        hopper::bulk_load(slot + chunk_tokens * token_bytes, p.values + (head + first) * p.HS, amount, barrier,
                          hopper::L2::evict_first);
        issued();
      }
    }
    return true;
  }

  __device__ bool layer(const Shares& own, int token, int l) {
    const Parameters<S>& p = c.p;
    const Layer<S>& w = layers[l];
    return rows(w.qkv, own.qkv, p.C) && rows(w.up, own.up, p.C) && cached(token, l, p.position + token) &&
           (p.layer_only || rows(w.down, own.out, p.F)) && rows(w.dense, own.out, p.C);
  }

  __device__ void run(const Shares& own) {
    const Parameters<S>& p = c.p;
    bool more = true;
    for (int token = 0; more && token < p.count; ++token) {
      for (int l = 0; more && l < p.L; ++l) more = layer(own, token, l);
      more = more && (p.layer_only || rows(layers[p.L].qkv, own.head, p.C));
    }
    // Shared memory must not be given back while copies are on their way into it. They arrive whatever has happened.
    for (; in_flight > 0; --in_flight) {
      while (!hopper::mbarrier_try(c.full + 8 * oldest.slot, oldest.parity)) {
      }
      oldest.advance(p.stages);
    }
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
