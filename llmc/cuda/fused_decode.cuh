// The fused decode kernel. Private to fused_decode.cu, which says what it does and why.
#pragma once

#include <cstdint>

#include "llmc/base/sampling.h"
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/fused_decode.h"
#include "llmc/cuda/hopper.cuh"
#include "llmc/cuda/sampler.cuh"

namespace weft::cuda::fused {

constexpr int kLinesAtOnce = 4;     // lines of 512 bytes that a warp takes from a chunk
constexpr int kLineElements = 256;  // 16-bit elements of a line; a lane holds 8 of them
constexpr int kLane = 8;
constexpr int kSamplerThreads = 256;
constexpr int kMaxWarps = 10;  // consumers; with producer and helper 3 on each quarter of the multiprocessor
constexpr int kAttentionSplitTokens = 64;  // a split of the context has at least so many tokens, but for the last

// ---- what host and device share -------------------------------------------------------------------------------------

template <typename S>
struct Layer {
  const S *qkv, *up, *down, *dense;                                // weights, [out, in]
  const S *qkv_bias, *up_bias, *down_bias, *dense_bias;            // or null
  const S *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;  // [C]
};

// Rows that a block owns, [begin, end) of each matrix.
struct Rows {
  int begin, end;
};
struct Shares {
  Rows qkv, up, out, head;  // out: of MLP-down and of the output projection
};

// Words in page-locked host memory. A word holds the launch's serial number in its upper half, so that nothing needs to
// be cleared between launches.
struct Mailbox {
  std::uint64_t ids[kFusedTokens];
  std::uint64_t end;     // (FusedEnd << 24) | tokens
  std::uint64_t error;   // Fault, SampleError << 8
  std::uint64_t cancel;  // serial of the launch to cancel, written by the host
};

enum class Fault : std::uint32_t { none = 0, sampling = 1, timeout = 2 };

// Counters in global memory, each in a line of its own.
struct alignas(128) Counter {
  unsigned value;
};
struct Control {
  Counter up, attention, head, abort;
  alignas(128) std::uint64_t next;  // (token + 1) << 32 | stop << 31 | id
};

template <typename S>
struct Parameters {
  const Layer<S>* layers;  // [L + 1]: the last one holds the head in `qkv` and the final norm in norm1
  const Shares* shares;    // [blocks]
  const S* embedding;
  S *keys, *values;
  std::int64_t capacity;
  const float *rope_cos, *rope_sin;
  int rope_half;
  float eps, scale;  // scale: log2(e) / sqrt(head_dim)
  int L, C, F, V, NH, HS;
  int warps_k, warps_r;  // consumer warps along a row, groups of them along rows
  int stages, stage_bytes, window;
  int partial_rows;  // rows whose partial sums fit in shared memory
  int max_splits;
  // workspace
  Control* control;
  std::uint64_t* x;          // [C]: layers done << 32 | fp32 bits
  std::uint64_t* qkv;        // [3 C], the same
  std::uint64_t* attention;  // [C], the same: attention's output
  float* h;                  // [F]
  float* part_out;           // [NH, max_splits, HS], not divided by the sum
  float2* part_sum;          // [NH, max_splits]: largest score, sum
  unsigned* head_parts;      // [NH]: parts of a head that are ready, modulo their number
  float* logits;             // [V]
  ulonglong2* head_best;     // [blocks]: rank of the greatest logit, flags
  // the launch
  Mailbox* mailbox;
  unsigned serial;
  std::int32_t first_id;
  int position, count;
  SamplingPlan sampling;
  int num_stop_ids;
  std::int32_t stop_ids[kFusedStopIds];
  bool layer_only, lose_an_arrival;
  std::uint64_t timeout_ns;
  std::uint64_t* stamps;  // or null
};

// Where everything lies in dynamic shared memory; host and device compute it alike.
struct SharedLayout {
  int layers, partials, rope, raw, query, added, states, sampler, barriers, bytes;
};
template <typename S>
__host__ __device__ inline SharedLayout shared_layout(const Parameters<S>& p) {
  const int warps = p.warps_k * p.warps_r;
  const auto up16 = [](int bytes) { return (bytes + 15) / 16 * 16; };
  SharedLayout at{};
  int end = p.stages * p.stage_bytes;
  const auto take = [&](int bytes) {
    const int start = end;
    end += up16(bytes);
    return start;
  };
  at.layers = take((p.L + 1) * static_cast<int>(sizeof(Layer<S>)));
  at.partials = take(2 * p.warps_k * p.partial_rows * 4);
  at.rope = take(2 * p.rope_half * 4);
  at.raw = take(3 * p.HS * 4);
  at.query = take(p.HS * 4);
  at.added = take(2 * p.HS * static_cast<int>(sizeof(S)));
  at.states = take(warps * (p.HS + 2) * 4);
  at.sampler = take(static_cast<int>(sizeof(SamplerScratch<kSamplerThreads>)));
  at.barriers = take((2 * p.stages + 2) * 8);
  at.bytes = end;
  return at;
}

// Splits of the context of one head at `position`.
__host__ __device__ inline int splits_at(int position, int max_splits) {
  const int wanted = position / kAttentionSplitTokens;
  return wanted < 1 ? 1 : wanted > max_splits ? max_splits : wanted;
}

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
// The value before; after `last` comes 0.
__device__ inline unsigned increase_modulo(unsigned* address, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(last) : "memory");
  return before;
}
__device__ inline void store_word(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_word(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void load_words(std::uint64_t& a, std::uint64_t& b, const std::uint64_t* address) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(address) : "memory");
}
// To and from the host.
__device__ inline void store_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
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

// Words of shared memory between the warps of a block.
struct Flags {
  int abort;             // something went wrong here or elsewhere: waits return at once
  int stop;              // no token follows
  unsigned cache_steps;  // layers of this launch, counted over its tokens, whose new keys and values are in the cache
  std::int32_t id;       // of the next token
  float reduction[2][kMaxWarps];
};

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

// ---- the helper: one warp -------------------------------------------------------------------------------------------

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
  __device__ bool prepare(int layer, int position, int head, bool newest, unsigned epoch) {
    constexpr int kAhead = 8;
    const Parameters<S>& p = c.p;
    const int HS = p.HS, half = p.rope_half;
    float* raw = reinterpret_cast<float*>(shared + at.raw);
    float* query = reinterpret_cast<float*>(shared + at.query);
    S* added = reinterpret_cast<S*>(shared + at.added);
    const std::uint64_t* from = p.qkv + head * 3 * HS;
    for (int first = lane; first - lane < 3 * HS; first += kAhead * kWarpSize) {
      std::uint64_t words[kAhead];
      const bool came = wait([&] {
        bool good = true;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int e = first + u * kWarpSize;
          words[u] = load_word(from + (e < 3 * HS ? e : 3 * HS - 1));
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) good = good && static_cast<unsigned>(words[u] >> 32) == epoch;
        return good;
      });
      if (!came) return false;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int e = first + u * kWarpSize;
        if (e < 3 * HS) raw[e] = __uint_as_float(static_cast<unsigned>(words[u]));
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

  __device__ void store_output(int element, const float (&out)[4], float sum, unsigned epoch) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_word(c.p.attention + element + j, static_cast<std::uint64_t>(epoch) << 32 | __float_as_uint(out[j] / sum));
    }
  }

  // Merges the consumers' states; the block that is the last of a head merges the parts of the head.
  __device__ bool collect(int head, int split, int splits, unsigned epoch) {
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
        store_output(head * HS + d, out, sum, epoch);
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
      store_output(head * HS + d, out, total, epoch);
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

// ---- the consumers --------------------------------------------------------------------------------------------------

// QC: lines of a row of C elements that one warp owns.
template <typename S, int QC>
struct Consumer {
  static constexpr int kRows = kLinesAtOnce / QC;  // rows of C elements that a warp takes from a chunk
  static constexpr int kInputs = QC * kLane;       // of C, in this thread
  static constexpr int kHidden = 4 * QC * kLane;   // of F, in this thread

  const Common<S>& c;
  char* shared;
  SharedLayout at;
  const Layer<S>* layers;
  Shares own;
  int thread, warp, lane, threads, warp_k, warp_r;
  Cursor cursor;
  int turn = 0, reduction_turn = 0;
  unsigned step = 0;         // layers done in this launch
  unsigned item_parity = 0;  // of the next item of attention
  float x_own = 0;           // residual of row own.out.begin + thread
  bool stamping = false;

  __device__ __forceinline__ Consumer(const Common<S>& common, char* shared_memory, const SharedLayout& layout)
      : c(common),
        shared(shared_memory),
        at(layout),
        layers(reinterpret_cast<const Layer<S>*>(shared + layout.layers)) {
    const Parameters<S>& p = c.p;
    own = p.shares[c.block];
    thread = static_cast<int>(threadIdx.x);
    warp = thread / kWarpSize;
    lane = thread % kWarpSize;
    threads = p.warps_k * p.warps_r * kWarpSize;
    warp_k = warp % p.warps_k;
    warp_r = warp / p.warps_k;
  }

  __device__ __forceinline__ void sync() const { hopper::named_barrier_wait(1, threads); }
  __device__ __forceinline__ void stamp(int layer, int event) const {
    if (stamping && thread == 0) c.p.stamps[(layer * kFusedStamps + event) * c.blocks + c.block] = global_time();
  }
  // Piece i of the vectors whose inputs this thread holds: elements 8 piece ... 8 piece + 7.
  __device__ __forceinline__ int piece(int i) const { return (i * c.p.warps_k + warp_k) * kWarpSize + lane; }

  __device__ __forceinline__ unsigned begin_chunk() {
    c.wait_barrier(c.full + 8 * cursor.slot, cursor.parity);
    return c.ring + cursor.slot * c.p.stage_bytes;
  }
  __device__ __forceinline__ void end_chunk() {
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.empty + 8 * cursor.slot);
    cursor.advance(c.p.stages);
  }
  __device__ __forceinline__ float* partials() {
    return reinterpret_cast<float*>(shared + at.partials) + turn * c.p.warps_k * c.p.partial_rows;
  }

  // After the partial sums of up to partial_rows rows: finish(row, sum) in one thread a row. One barrier; the partial sums
  // of the next call go to the other buffer.
  template <typename Finish>
  __device__ __forceinline__ void finish_rows(int count, const Finish& finish) {
    sync();
    const float* partial = partials();
    if (thread < count) {
      float sum = partial[thread];
      for (int k = 1; k < c.p.warps_k; ++k) sum += partial[k * c.p.partial_rows + thread];
      finish(thread, sum);
    }
    turn ^= 1;
  }

  // Two chunks at a time, so that the latencies of one hide behind the other: what is in registers is released at once.

  // `count` rows of C elements, times the inputs; at most partial_rows.
  __device__ __forceinline__ void narrow_rows(int count, const float (&input)[kInputs]) {
    const Parameters<S>& p = c.p;
    const int row_bytes = 2 * p.C, chunk_rows = kRows * p.warps_r;
    float* partial = partials() + warp_k * p.partial_rows;
    bool inside[QC];
#pragma unroll
    for (int i = 0; i < QC; ++i) inside[i] = piece(i) * kLane < p.C;
    for (int first = 0; first < count; first += 2 * chunk_rows) {
      const int row = first + warp_r * kRows;  // this warp's first
      uint4 w[2][kRows][QC];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int left = count - row - half * chunk_rows;
        const bool exists = first + half * chunk_rows < count;
        const unsigned from =
            exists ? begin_chunk() + warp_r * kRows * row_bytes + (warp_k * kWarpSize + lane) * 16 : 0;
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
#pragma unroll
          for (int i = 0; i < QC; ++i) {
            w[half][j][i] = make_uint4(0, 0, 0, 0);
            if (inside[i] && j < left) w[half][j][i] = load_shared(from + j * row_bytes + i * p.warps_k * 512);
          }
        }
        if (exists) end_chunk();
      }
      float sums[2 * kRows] = {};
#pragma unroll
      for (int i = 0; i < QC; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kRows; ++j) dot<S>(sums[j], w[j / kRows][j % kRows][i], input + i * kLane);
      }
      const float sum = fold(sums, lane);
      constexpr int kSpan = kWarpSize / (2 * kRows);
      const int j = lane / kSpan, target = row + (j < kRows ? j : chunk_rows + j - kRows);
      if (lane % kSpan == 0 && target < count) partial[target] = sum;
    }
  }

  // `count` rows of F = 4 C elements, times the inputs. A chunk holds a row for each group of warps, or half a row.
  __device__ __forceinline__ void wide_rows(int count, const float (&input)[kHidden]) {
    constexpr int kTogether = 2 / QC;  // rows of this warp in two chunks
    const Parameters<S>& p = c.p;
    float* partial = partials() + warp_k * p.partial_rows;
    bool inside[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) inside[i] = QC > 1 || piece(i) * kLane < p.F;
    for (int first = 0; first < count; first += kTogether * p.warps_r) {
      uint4 w[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int begin = first + (QC == 1 ? half * p.warps_r : 0);  // rows of the chunk
        const bool exists = begin < count, mine = begin + warp_r < count;
        const unsigned from = exists ? begin_chunk() + warp_r * 2 * p.F + (warp_k * kWarpSize + lane) * 16 : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[half][i] = make_uint4(0, 0, 0, 0);
          if (inside[i] && mine) w[half][i] = load_shared(from + i * p.warps_k * 512);
        }
        if (exists) end_chunk();
      }
      float sums[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          dot<S>(sums[half][i], w[half][i], input + ((QC == 1 ? 0 : half * 4) + i) * kLane);
        }
      }
      float rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[half] = (sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]);
      if constexpr (QC == 1) {
        const float sum = fold(rows, lane);
        const int target = first + (lane / 16) * p.warps_r + warp_r;
        if (lane % 16 == 0 && target < count) partial[target] = sum;
      } else {
        const float sum = warp_sum(rows[0] + rows[1]);
        if (lane == 0 && first + warp_r < count) partial[first + warp_r] = sum;
      }
    }
  }

  // The sum over all inputs of a row: over the warps of this thread's group.
  __device__ __forceinline__ float group_sum(float value) {
    float* sums = c.flags.reduction[reduction_turn];
    reduction_turn ^= 1;
    value = warp_sum(value);
    if (lane == 0) sums[warp] = value;
    sync();
    float total = 0;
    for (int k = 0; k < c.p.warps_k; ++k) total += sums[warp_r * c.p.warps_k + k];
    return total;
  }

  struct NormWeights {
    uint4 weight1[QC], bias1[QC], weight2[QC], bias2[QC];
  };
  // Early, so that the loads are back when x is.
  __device__ __forceinline__ NormWeights load_norms(const Layer<S>& layer, bool both) const {
    NormWeights n;
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
      const auto get = [&](const S* from) { return load_early(reinterpret_cast<const uint4*>(from) + piece(i)); };
      n.weight1[i] = inside ? get(layer.norm1_weight) : zero;
      n.bias1[i] = inside ? get(layer.norm1_bias) : zero;
      n.weight2[i] = inside && both ? get(layer.norm2_weight) : zero;
      n.bias2[i] = inside && both ? get(layer.norm2_bias) : zero;
    }
    return n;
  }
  // This thread's part of a vector [C] whose words carry the number of layers done when they were written.
  __device__ __forceinline__ void load_vector(const std::uint64_t* vector, unsigned epoch, float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
      std::uint64_t words[kLane];
      const std::uint64_t* from = vector + piece(i) * kLane;
      const auto complete = [&] {
        bool good = true;
#pragma unroll
        for (int j = 0; j < kLane; j += 2) load_words(words[j], words[j + 1], from + j);
#pragma unroll
        for (int j = 0; j < kLane; ++j) good = good && static_cast<unsigned>(words[j] >> 32) == epoch;
        return good;
      };
      if (inside) c.wait_for(complete);
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        x[i * kLane + j] = inside ? __uint_as_float(static_cast<unsigned>(words[j])) : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void load_embedding(std::int32_t id, float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (piece(i) * kLane < c.p.C) {
        packed =
            __ldg(reinterpret_cast<const uint4*>(c.p.embedding + static_cast<std::int64_t>(id) * c.p.C) + piece(i));
      }
      widen<S>(packed, x + i * kLane);
    }
  }
  // LayerNorm in two passes: x becomes norm1(x), other becomes norm2(x).
  __device__ __forceinline__ void normalize(const NormWeights& n, float (&x)[kInputs], float (&other)[kInputs]) {
    const float C = static_cast<float>(c.p.C);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kInputs; ++j) sum += x[j];
    const float mean = group_sum(sum) / C;
    sum = 0;
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        const float d = inside ? x[i * kLane + j] - mean : 0.0f;
        x[i * kLane + j] = d;
        sum = fmaf(d, d, sum);
      }
    }
    const float rstd = rsqrtf(group_sum(sum) / C + c.p.eps);
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      float w[kLane], b[kLane];
      widen<S>(n.weight2[i], w);
      widen<S>(n.bias2[i], b);
#pragma unroll
      for (int j = 0; j < kLane; ++j) other[i * kLane + j] = fmaf(x[i * kLane + j] * rstd, w[j], b[j]);
      widen<S>(n.weight1[i], w);
      widen<S>(n.bias1[i], b);
#pragma unroll
      for (int j = 0; j < kLane; ++j) x[i * kLane + j] = fmaf(x[i * kLane + j] * rstd, w[j], b[j]);
    }
  }

  // What all threads of the block wrote is announced by one addition.
  __device__ __forceinline__ void announce(Counter& counter) const {
    sync();
    if (thread == 0) add_release(&counter.value, 1);
  }
  __device__ __forceinline__ void await(const Counter& counter, unsigned target) const {
    if (thread == 0) c.wait_counter(counter, target);
    sync();
  }

  // The bias of the row whose sum this thread will finish: its bits, so that nothing waits for them before that.
  __device__ __forceinline__ unsigned short load_bias(const S* bias, Rows rows) const {
    const bool mine = bias != nullptr && thread < rows.end - rows.begin;
    return mine ? load_early(reinterpret_cast<const unsigned short*>(bias) + rows.begin + thread) : 0;
  }
  __device__ __forceinline__ static float bias_value(unsigned short bits) {
    float low, high;
    widen<S>(bits, low, high);
    return low;
  }

  // ---- attention ----

  // One token more in a group's running softmax.
  struct Running {
    float largest = -INFINITY, sum = 0, out[kLane] = {};
  };

  // Chunks of keys and values of one item, by all warps; LT lanes share a token.
  template <int LT>
  __device__ __forceinline__ void attend_cached(Running& r, const float (&q)[kLane], int tokens) {
    const Parameters<S>& p = c.p;
    constexpr int kGroups = kWarpSize / LT;
    const int warps = threads / kWarpSize, group = lane / LT, part = lane % LT;
    const int chunk_tokens = p.stage_bytes / (4 * p.HS), token_bytes = 2 * p.HS;
    const bool active = part * kLane < p.HS;
    for (int done = 0; done < tokens; done += chunk_tokens) {
      const int count = min(chunk_tokens, tokens - done);
      const unsigned keys = begin_chunk() + part * 16, values = keys + chunk_tokens * token_bytes;
      for (int first = warp * kGroups; first < count; first += 2 * warps * kGroups) {
        const int token[2] = {first + group, first + warps * kGroups + group};
        uint4 v[2];
        float score[2] = {0, 0};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          uint4 k = make_uint4(0, 0, 0, 0);
          v[u] = k;
          if (active && token[u] < count) {
            k = load_shared(keys + token[u] * token_bytes);
            v[u] = load_shared(values + token[u] * token_bytes);
          }
          dot<S>(score[u], k, q);
        }
#pragma unroll
        for (int offset = LT / 2; offset > 0; offset /= 2) {
          score[0] += __shfl_xor_sync(~0u, score[0], offset);
          score[1] += __shfl_xor_sync(~0u, score[1], offset);
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) score[u] = token[u] < count ? score[u] : -INFINITY;
        add_tokens(r, score[0], score[1], v[0], v[1]);
      }
      end_chunk();
    }
  }
  __device__ __forceinline__ static void add_tokens(Running& r, float score0, float score1, const uint4& v0,
                                                    const uint4& v1) {
    const float largest = fmaxf(r.largest, fmaxf(score0, score1));
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float keep = exp2f(r.largest - base), p0 = exp2f(score0 - base), p1 = exp2f(score1 - base);
    float a[kLane], b[kLane];
    widen<S>(v0, a);
    widen<S>(v1, b);
    r.largest = largest;
    r.sum = fmaf(r.sum, keep, p0 + p1);
#pragma unroll
    for (int j = 0; j < kLane; ++j) r.out[j] = fmaf(r.out[j], keep, fmaf(p0, a[j], p1 * b[j]));
  }

  // An item: from the query that the helper left in shared memory to a softmax state a warp, which the helper merges.
  template <int LT>
  __device__ __forceinline__ void attend_item(int layer, int position, int item, int splits) {
    const Parameters<S>& p = c.p;
    const int HS = p.HS, split = item % splits, part = lane % LT;
    const bool active = part * kLane < HS;
    const Tokens tokens = split_tokens(position, splits, split);
    const S* added = reinterpret_cast<const S*>(shared + at.added);
    const float* query = reinterpret_cast<const float*>(shared + at.query);
    c.wait_barrier(c.query_here, item_parity);
    item_parity ^= 1;
    stamp(layer, 4);
    float q[kLane];
#pragma unroll
    for (int j = 0; j < kLane; ++j) q[j] = active ? query[part * kLane + j] : 0.0f;

    Running r;
    attend_cached<LT>(r, q, tokens.end - tokens.begin);
    if (split == splits - 1 && warp == 0) {  // the token itself
      uint4 k = make_uint4(0, 0, 0, 0), v = k;
      if (active && lane < LT) {
        k = *reinterpret_cast<const uint4*>(added + part * kLane);
        v = *reinterpret_cast<const uint4*>(added + HS + part * kLane);
      }
      float score = 0;
      dot<S>(score, k, q);
#pragma unroll
      for (int offset = LT / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
      add_tokens(r, lane < LT ? score : -INFINITY, -INFINITY, v, make_uint4(0, 0, 0, 0));
    }
    // The groups of the warp.
#pragma unroll
    for (int offset = LT; offset < kWarpSize; offset *= 2) {
      const float other = __shfl_xor_sync(~0u, r.largest, offset), largest = fmaxf(r.largest, other);
      const float base = largest == -INFINITY ? 0.0f : largest, keep = exp2f(r.largest - base);
      r.sum *= keep;
      r.sum += __shfl_xor_sync(~0u, r.sum, offset);
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        r.out[j] *= keep;
        r.out[j] += __shfl_xor_sync(~0u, r.out[j], offset);
      }
      r.largest = largest;
    }
    float* state = reinterpret_cast<float*>(shared + at.states) + warp * (HS + 2);
    if (lane < LT && active) {
#pragma unroll
      for (int j = 0; j < kLane; ++j) state[2 + part * kLane + j] = r.out[j];
    }
    if (lane == 0) state[0] = r.largest, state[1] = r.sum;
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.item_done);
  }

  __device__ __forceinline__ void attend(int layer, int position, int splits) {
    const Parameters<S>& p = c.p;
    for (int item = c.first_item(layer); item < p.NH * splits; item += c.blocks) {
      if (p.HS <= 32) {
        attend_item<4>(layer, position, item, splits);
      } else if (p.HS <= 64) {
        attend_item<8>(layer, position, item, splits);
      } else if (p.HS <= 128) {
        attend_item<16>(layer, position, item, splits);
      } else {
        attend_item<32>(layer, position, item, splits);
      }
    }
  }

  // ---- a layer ----

  __device__ __forceinline__ void run_layer(int l, int token, std::int32_t id) {
    const Parameters<S>& p = c.p;
    const Layer<S>& w = layers[l];
    const unsigned target = static_cast<unsigned>(c.blocks) * (step + 1);
    const int position = p.position + token, splits = splits_at(position, p.max_splits);
    float input[kInputs], other[kInputs];
    {
      const NormWeights norms = load_norms(w, true);
      if (l == 0 && !(p.layer_only && token > 0)) {
        load_embedding(id, input);
        const int row = own.out.begin + thread;
        if (row < own.out.end) x_own = to_float(p.embedding[static_cast<std::int64_t>(id) * p.C + row]);
      } else {
        load_vector(p.x, step, input);
      }
      stamp(l, 0);
      normalize(norms, input, other);
      stamp(l, 1);
    }
    {
      const unsigned short bias = load_bias(w.qkv_bias, own.qkv);
      const int rows = own.qkv.end - own.qkv.begin;
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float sum) {
        store_word(p.qkv + own.qkv.begin + row,
                   static_cast<std::uint64_t>(step + 1) << 32 | __float_as_uint(sum + bias_value(bias)));
      });
      stamp(l, 2);
    }
    {
      const unsigned short bias = load_bias(w.up_bias, own.up);
      const int rows = own.up.end - own.up.begin;
      narrow_rows(rows, other);
      finish_rows(rows, [&](int row, float sum) { p.h[own.up.begin + row] = gelu(sum + bias_value(bias)); });
      if (!(p.lose_an_arrival && c.block == 0 && token == p.count - 1)) announce(p.control->up);
      stamp(l, 3);
    }
    attend(l, position, splits);
    stamp(l, 5);
    const int rows = own.out.end - own.out.begin;
    float below = 0;  // what MLP-down adds to this thread's row
    const unsigned short down_bias = load_bias(w.down_bias, own.out), dense_bias = load_bias(w.dense_bias, own.out);
    if (rows > 0 && !p.layer_only) {
      await(p.control->up, target);
      stamp(l, 6);
      float hidden[kHidden];
#pragma unroll
      for (int i = 0; i < 4 * QC; ++i) {
        float4 a = make_float4(0, 0, 0, 0), b = a;
        if (piece(i) * kLane < p.F) {
          const float4* from = reinterpret_cast<const float4*>(p.h + piece(i) * kLane);
          a = __ldcg(from);
          b = __ldcg(from + 1);
        }
        float* to = hidden + i * kLane;
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
      }
      stamp(l, 7);
      wide_rows(rows, hidden);
      finish_rows(rows, [&](int, float sum) { below = sum + bias_value(down_bias); });
      stamp(l, 8);
    }
    if (rows > 0) {
      load_vector(p.attention, step + 1, input);
      stamp(l, 9);
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float sum) {
        x_own += (sum + bias_value(dense_bias)) + below;
        store_word(p.x + own.out.begin + row, static_cast<std::uint64_t>(step + 1) << 32 | __float_as_uint(x_own));
      });
      stamp(l, 10);
    }
    ++step;
  }

  // ---- the head ----

  // Logits of this block's rows, and the greatest of them.
  __device__ __forceinline__ void run_head(int token) {
    const Parameters<S>& p = c.p;
    float input[kInputs], unused[kInputs];
    const NormWeights norms = load_norms(layers[p.L], false);
    load_vector(p.x, step, input);
    stamp(p.L, 0);
    normalize(norms, input, unused);
    stamp(p.L, 1);
    std::uint64_t best = 0;
    unsigned bad = 0;
    const int chunk_rows = kRows * p.warps_r, batch = p.partial_rows / chunk_rows * chunk_rows;
    const std::int64_t limit = p.sampling.vocab_limit > 0 ? p.sampling.vocab_limit : p.V;
    for (int first = own.head.begin; first < own.head.end; first += batch) {
      const int rows = min(batch, own.head.end - first);
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float logit) {
        const int id = first + row;
        p.logits[id] = logit;
        if (id >= limit) return;
        const std::uint64_t rank = sampler_detail::rank_of(logit, id);
        best = rank > best ? rank : best;
        bad |= isnan(logit) ? 1u : logit == INFINITY ? 2u : 0u;
      });
    }
    stamp(p.L, 2);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
      best = other > best ? other : best;
      bad |= __shfl_xor_sync(~0u, bad, offset);
    }
    ulonglong2* words = reinterpret_cast<ulonglong2*>(shared + at.sampler);
    if (lane == 0) words[warp] = make_ulonglong2(best, bad);
    sync();
    if (thread == 0) {
      for (int w = 1; w < threads / kWarpSize; ++w) {
        best = words[w].x > best ? words[w].x : best;
        bad |= static_cast<unsigned>(words[w].y);
      }
      p.head_best[c.block] = make_ulonglong2(best, bad);
    }
    announce(p.control->head);
    if (c.block == 0) choose(token);
    stamp(p.L, 3);
  }

  // Block 0 picks the next id and tells the host and the other blocks.
  __device__ __forceinline__ void choose(int token) {
    const Parameters<S>& p = c.p;
    await(p.control->head, static_cast<unsigned>(c.blocks) * static_cast<unsigned>(token + 1));
    SampledToken chosen{0, SampleError::none};
    if (p.sampling.greedy) {
      if (warp == 0) {
        std::uint64_t best = 0;
        unsigned bad = 0;
        for (int b = lane; b < c.blocks; b += kWarpSize) {
          const ulonglong2 word = __ldcg(p.head_best + b);
          best = word.x > best ? word.x : best;
          bad |= static_cast<unsigned>(word.y);
        }
#pragma unroll
        for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
          const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
          best = other > best ? other : best;
          bad |= __shfl_xor_sync(~0u, bad, offset);
        }
        chosen.id = sampler_detail::id_of(best);
        if (best == 0 || sampler_detail::logit_of(static_cast<std::uint32_t>(best >> 32)) == -INFINITY) {
          chosen = {0, SampleError::nothing_finite};
        }
        if ((bad & 2u) != 0) chosen = {0, SampleError::infinite};
        if ((bad & 1u) != 0) chosen = {0, SampleError::not_a_number};
      }
    } else if (thread < kSamplerThreads) {
      auto& scratch = *reinterpret_cast<SamplerScratch<kSamplerThreads>*>(shared + at.sampler);
      chosen = sample_block<kSamplerThreads, 2>(p.logits, p.V, p.sampling, p.position + token + 1, thread, scratch);
    }
    if (thread != 0) return;
    const std::uint64_t serial = static_cast<std::uint64_t>(p.serial) << 32;
    FusedEnd end = token + 1 == p.count ? FusedEnd::length : FusedEnd::running;
    if (load_system(&p.mailbox->cancel) == p.serial) end = FusedEnd::cancelled;
    for (int i = 0; i < p.num_stop_ids; ++i) {
      if (p.stop_ids[i] == chosen.id) end = FusedEnd::stop_id;
    }
    int tokens = token + 1;
    if (chosen.error != SampleError::none) {
      store_system(&p.mailbox->error,
                   serial | static_cast<unsigned>(Fault::sampling) | static_cast<unsigned>(chosen.error) << 8);
      end = FusedEnd::cancelled;
      --tokens;
    } else {
      store_system(&p.mailbox->ids[token], serial | static_cast<unsigned>(chosen.id));
    }
    if (end != FusedEnd::running) {
      store_system(&p.mailbox->end, serial | static_cast<unsigned>(end) << 24 | static_cast<unsigned>(tokens));
    }
    const unsigned stop = end != FusedEnd::running ? 1u << 31 : 0u;
    store_word(&p.control->next, static_cast<std::uint64_t>(token + 1) << 32 | stop | static_cast<unsigned>(chosen.id));
  }

  // The id that follows, or -1 if there is none.
  __device__ __forceinline__ std::int32_t next_id(int token) {
    if (thread == 0) {
      std::uint64_t word = 0;
      const bool came = c.wait_for([&] {
        word = load_word(&c.p.control->next);
        return static_cast<int>(word >> 32) == token + 1;
      });
      const std::int32_t id = static_cast<std::int32_t>(word & 0x7fffffffu);
      c.flags.id = !came || (word & 0x80000000u) != 0 ? -1 : id;
    }
    sync();
    const std::int32_t id = *const_cast<volatile std::int32_t*>(&c.flags.id);
    return id;
  }

  __device__ __forceinline__ void run() {
    const Parameters<S>& p = c.p;
    std::int32_t id = p.first_id;
    for (int token = 0; token < p.count && id >= 0; ++token) {
      stamping = p.stamps != nullptr && token == p.count - 1;
      for (int l = 0; l < p.L; ++l) run_layer(l, token, id);
      if (p.layer_only) {
        if (c.block == 0 && thread == 0) {
          const std::uint64_t serial = static_cast<std::uint64_t>(p.serial) << 32;
          store_system(&p.mailbox->ids[token], serial);
          if (token + 1 == p.count) {
            store_system(&p.mailbox->end,
                         serial | static_cast<unsigned>(FusedEnd::length) << 24 | static_cast<unsigned>(p.count));
          }
        }
        id = 0;
        continue;
      }
      run_head(token);
      id = next_id(token);
    }
    if (thread == 0) *const_cast<volatile int*>(&c.flags.stop) = 1;
  }
};

#endif  // WEFT_BULK_COPY

// One block on each multiprocessor, all of them resident at once; the last two warps are producer and helper.
template <typename S, int QC>
__global__ void __launch_bounds__((kMaxWarps + 2) * kWarpSize, 1)
    fused_decode_kernel(const __grid_constant__ Parameters<S> p) {
#if WEFT_BULK_COPY
  extern __shared__ __align__(128) char shared[];
  __shared__ Flags flags;
  const SharedLayout at = shared_layout(p);
  const int consumers = p.warps_k * p.warps_r * kWarpSize;
  const unsigned base = hopper::shared_address(shared);
  const Common<S> common{p,
                         flags,
                         base,
                         base + at.barriers,
                         base + at.barriers + 8 * p.stages,
                         base + at.barriers + 16 * p.stages,
                         base + at.barriers + 16 * p.stages + 8,
                         static_cast<int>(gridDim.x),
                         static_cast<int>(blockIdx.x)};
  const int words = (p.L + 1) * static_cast<int>(sizeof(Layer<S>) / 8);
  auto* table = reinterpret_cast<std::uint64_t*>(shared + at.layers);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    table[i] = reinterpret_cast<const std::uint64_t*>(p.layers)[i];
  }
  if (threadIdx.x == 0) {
    flags.abort = 0;
    flags.stop = 0;
    flags.cache_steps = 0;
    for (int s = 0; s < p.stages; ++s) {
      hopper::mbarrier_init(common.full + 8 * s, 1);
      hopper::mbarrier_init(common.empty + 8 * s, static_cast<unsigned>(consumers / kWarpSize));
    }
    hopper::mbarrier_init(common.query_here, 1);
    hopper::mbarrier_init(common.item_done, static_cast<unsigned>(consumers / kWarpSize));
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= consumers + kWarpSize) {
    Helper<S> helper{common, shared, at, static_cast<int>(threadIdx.x) % kWarpSize, consumers / kWarpSize};
    helper.run();
    return;
  }
  if (static_cast<int>(threadIdx.x) >= consumers) {
    if (static_cast<int>(threadIdx.x) == consumers) {
      Producer<S> producer{common, reinterpret_cast<const Layer<S>*>(shared + at.layers), {}, {}, 0, false};
      producer.run(p.shares[blockIdx.x]);
    }
    return;
  }
  Consumer<S, QC> consumer(common, shared, at);
  consumer.run();
#else
  __trap();  // fused_decode_refusal() keeps such GPUs away
#endif
}

}  // namespace weft::cuda::fused
