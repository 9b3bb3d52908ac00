// Decoding: block (split, head) of 256 threads. A position's key is spread over kLanes lanes, 16 bytes each, so that a
// warp reads several keys with one instruction. Each such group of lanes runs the recurrence of flash attention over
// its own positions, kUnroll at a time. The groups of a block are merged through shared memory, the splits of a head
// through global memory by the block that finishes last; it merges them in the order of positions, so the bits do not
// depend on which block that is.
//
// Bytes moved: the cache of the head up to the position, once.
#include "llmc/cuda/op/attention/paged/decode_attention.h"

#include <algorithm>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMinSplit = 128;  // positions; with fewer, another block costs more than it saves
constexpr int kSplitUnit = 16;
constexpr int kUnroll = 4;

template <typename KV, int HS>
struct Layout {
  static constexpr int kElements = Pack<KV>::size;
  static constexpr int kChunks = HS / kElements;  // 16-byte chunks of a head
  static constexpr int round_up(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
  }
  static constexpr int kLanes = round_up(kChunks) < kWarpSize ? round_up(kChunks) : kWarpSize;
  static constexpr int kPerLane = (kChunks + kLanes - 1) / kLanes;
  static constexpr int kGroups = kThreads / kLanes;
};

// RoPE of one dimension of a head. The angles are loaded before the head itself has arrived.
struct Rotation {
  int partner = -1;  // none: the dimension is not rotated
  float cosine = 1, signed_sine = 0;

  __device__ Rotation(int d, const DeviceRopeTable& rope, std::int64_t position) {
    const int half = static_cast<int>(rope.half);
    if (d >= 2 * half) return;
    const int i = d < half ? d : d - half;
    partner = d < half ? d + half : d - half;
    cosine = rope.cos[position * half + i];
    signed_sine = rope.sin[position * half + i] * (d < half ? -1.0f : 1.0f);
  }
  __device__ float of(const float* x, int d) const {
    return partner < 0 ? x[d] : rotated(x[d], x[partner], cosine, signed_sine);
  }
};

// Online softmax over the positions of a group of lanes: m the largest score, o = sum of 2^(score - m) v, l = sum of
// 2^(score - m).
template <typename KV, int HS>
struct GroupState {
  using L = Layout<KV, HS>;
  float m = -INFINITY, l = 0;
  float o[L::kPerLane][L::kElements] = {};

  // Adds kCount positions, of whose keys and values this lane holds some chunks; positions with valid[u] false are
  // skipped.
  template <int kCount>
  __device__ void add(const Pack<KV> (&k)[kCount][L::kPerLane], const Pack<KV> (&v)[kCount][L::kPerLane],
                      const float (&q)[L::kPerLane][L::kElements], const bool (&valid)[kCount]) {
    float score[kCount];
    float largest = m;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      float dot = 0;
#pragma unroll
      for (int j = 0; j < L::kPerLane; ++j) {
#pragma unroll
        for (int i = 0; i < L::kElements; ++i) dot = fmaf(q[j][i], to_float(k[u][j].value[i]), dot);
      }
#pragma unroll
      for (int offset = L::kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(~0u, dot, offset);
      score[u] = valid[u] ? dot : -INFINITY;
      largest = fmaxf(largest, score[u]);
    }
    if (largest == -INFINITY) return;
    const float shrink = exp2f(m - largest);
    m = largest;
    l *= shrink;
#pragma unroll
    for (int j = 0; j < L::kPerLane; ++j) {
#pragma unroll
      for (int i = 0; i < L::kElements; ++i) o[j][i] *= shrink;
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const float p = exp2f(score[u] - m);
      l += p;
#pragma unroll
      for (int j = 0; j < L::kPerLane; ++j) {
#pragma unroll
        for (int i = 0; i < L::kElements; ++i) o[j][i] = fmaf(p, valid[u] ? to_float(v[u][j].value[i]) : 0.0f, o[j][i]);
      }
    }
  }
};

// asm volatile keeps the compiler from moving the load to after the wait for the predecessor.
template <typename KV>
__device__ Pack<KV> load_cached(const KV* address) {
  int4 v;
  asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return *reinterpret_cast<const Pack<KV>*>(&v);
}

template <typename KV>
__device__ Pack<KV> zero_pack() {
  Pack<KV> pack;
#pragma unroll
  for (int i = 0; i < Pack<KV>::size; ++i) pack.value[i] = from_float<KV>(0.0f);
  return pack;
}

template <typename A, typename KV, int HS>
__global__ void __launch_bounds__(kThreads)
    decode_attention_kernel(const __grid_constant__ DecodeAttention<A, KV> io, float scale_log2e) {
  using L = Layout<KV, HS>;
  constexpr int kElements = L::kElements;
  __shared__ float raw[3][HS];             // q, k, v before RoPE
  __shared__ float query[HS];              // rotated, scaled
  alignas(16) __shared__ KV fresh[2][HS];  // the new key, rotated, and value, as the cache holds them
  __shared__ float group_m[L::kGroups], group_l[L::kGroups], group_scale[L::kGroups];
  __shared__ float group_o[L::kGroups][HS + 1];
  __shared__ bool is_last;
  launch_dependents();

  // The position, and all keys and values before it, were written by kernels of the previous token. These have ended,
  // because the first kernel of this token, the embedding, is not chained (llmc/cuda/inference/neox_token.cu). So the
  // first keys and values are loaded while the predecessor still computes the query.
  const std::int64_t position = __ldcg(io.position);
  const int split = blockIdx.x, head = blockIdx.y, splits = gridDim.x;
  const int cached = static_cast<int>(position);
  const int length = max(kMinSplit, static_cast<int>(ceil_div(ceil_div(cached + 1, splits), kSplitUnit)) * kSplitUnit);
  const int used = static_cast<int>(ceil_div(cached + 1, length));
  if (split >= used) return;

  KV* keys = io.keys + head * io.capacity * HS;
  KV* values = io.values + head * io.capacity * HS;
  const int group = threadIdx.x / L::kLanes, lane = threadIdx.x % L::kLanes;
  const int begin = split * length, end = min(begin + length, cached);
  Pack<KV> k[kUnroll][L::kPerLane], v[kUnroll][L::kPerLane];
  bool valid[kUnroll];
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int t = first + u * L::kGroups + group;
      valid[u] = t < end;
#pragma unroll
      for (int j = 0; j < L::kPerLane; ++j) {
        const int chunk = j * L::kLanes + lane;
        k[u][j] = v[u][j] = zero_pack<KV>();
        if (!valid[u] || chunk >= L::kChunks) continue;
        k[u][j] = load_cached(keys + static_cast<std::int64_t>(t) * HS + chunk * kElements);
        v[u][j] = load_cached(values + static_cast<std::int64_t>(t) * HS + chunk * kElements);
      }
    }
  };
  load(begin);
  static_assert(HS <= kThreads);
  const int d_own = static_cast<int>(threadIdx.x);  // a thread prepares one dimension
  const Rotation rotation(d_own < HS ? d_own : 2 * static_cast<int>(io.rope.half), io.rope, position);
  wait_for_predecessors();

  const A* from = io.qkv + static_cast<std::int64_t>(head) * 3 * HS;
  for (int i = threadIdx.x; i < 3 * HS; i += kThreads) raw[i / HS][i % HS] = to_float(from[i]);
  __syncthreads();
  if (d_own < HS) {
    query[d_own] = rotation.of(raw[0], d_own) * scale_log2e;
    fresh[0][d_own] = from_float<KV>(rotation.of(raw[1], d_own));
    fresh[1][d_own] = from_float<KV>(raw[2][d_own]);
    if (split == used - 1) {
      keys[position * HS + d_own] = fresh[0][d_own];
      values[position * HS + d_own] = fresh[1][d_own];
    }
  }
  __syncthreads();

  float q[L::kPerLane][kElements];
#pragma unroll
  for (int j = 0; j < L::kPerLane; ++j) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int d = (j * L::kLanes + lane) * kElements + i;
      q[j][i] = d < HS ? query[d] : 0.0f;
    }
  }
  GroupState<KV, HS> state;
  for (int first = begin; first < end; first += kUnroll * L::kGroups) {
    state.add(k, v, q, valid);
    if (first + kUnroll * L::kGroups < end) load(first + kUnroll * L::kGroups);
  }
  if (split == used - 1) {  // the new token itself, by the first group
    Pack<KV> own_k[1][L::kPerLane], own_v[1][L::kPerLane];
    const bool first_group[1] = {group == 0};
#pragma unroll
    for (int j = 0; j < L::kPerLane; ++j) {
      const int chunk = j * L::kLanes + lane;
      own_k[0][j] = own_v[0][j] = zero_pack<KV>();
      if (chunk >= L::kChunks) continue;
      own_k[0][j] = load_pack(fresh[0] + chunk * kElements);
      own_v[0][j] = load_pack(fresh[1] + chunk * kElements);
    }
    state.add(own_k, own_v, q, first_group);
  }

  // Merges the groups of the block in the order of their numbers.
  if (lane == 0) group_m[group] = state.m, group_l[group] = state.l;
#pragma unroll
  for (int j = 0; j < L::kPerLane; ++j) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int d = (j * L::kLanes + lane) * kElements + i;
      if (d < HS) group_o[group][d] = state.o[j][i];
    }
  }
  __syncthreads();
  float block_m = -INFINITY;
  for (int g = 0; g < L::kGroups; ++g) block_m = fmaxf(block_m, group_m[g]);
  if (static_cast<int>(threadIdx.x) < L::kGroups) {
    group_scale[threadIdx.x] = exp2f(group_m[threadIdx.x] - block_m);
  }
  __syncthreads();
  float block_l = 0;
  for (int g = 0; g < L::kGroups; ++g) block_l = fmaf(group_scale[g], group_l[g], block_l);
  const auto block_o = [&](int d) {
    float o = 0;
    for (int g = 0; g < L::kGroups; ++g) o = fmaf(group_scale[g], group_o[g][d], o);
    return o;
  };
  A* out = io.out + head * HS;
  if (used == 1) {
    for (int d = threadIdx.x; d < HS; d += kThreads) out[d] = from_float<A>(block_o(d) / block_l);
    return;
  }

  // Merges the splits of the head. Workspace: [NH][splits][HS + 2] floats (m, l, o), then a ticket for each head: [NH]
  // ints.
  float* states = io.partials + static_cast<std::int64_t>(head) * splits * (HS + 2);
  int* ticket = reinterpret_cast<int*>(io.partials + static_cast<std::int64_t>(gridDim.y) * splits * (HS + 2)) + head;
  for (int d = threadIdx.x; d < HS; d += kThreads) states[split * (HS + 2) + 2 + d] = block_o(d);
  if (threadIdx.x == 0) states[split * (HS + 2)] = block_m, states[split * (HS + 2) + 1] = block_l;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1) == used - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) *ticket = 0;  // for the next token
  for (int d = threadIdx.x; d < HS; d += kThreads) {
    float m = -INFINITY, l = 0, o = 0;
    for (int s = 0; s < used; ++s) m = fmaxf(m, __ldcg(states + s * (HS + 2)));
    for (int s = 0; s < used; ++s) {
      const float* other = states + s * (HS + 2);
      const float scale = exp2f(__ldcg(other) - m);
      l = fmaf(scale, __ldcg(other + 1), l);
      o = fmaf(scale, __ldcg(other + 2 + d), o);
    }
    out[d] = from_float<A>(o / l);
  }
}

std::int64_t split_count(const NeoxHeads& heads, const LaunchDevice& device) {
  return std::clamp<std::int64_t>(2 * device.multiprocessors / heads.NH, 1, 64);
}

template <typename A, typename KV, int HS>
void launch_decode(const DecodeAttention<A, KV>& io, const LaunchDevice& device, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(split_count(io.heads, device)), static_cast<unsigned>(io.heads.NH));
  const float scale = 1.0f / sqrtf(static_cast<float>(HS)) * kLog2E;
  launch_chained(decode_attention_kernel<A, KV, HS>, grid, dim3(kThreads), 0, stream, device.overlapping,
                 "decode_attention", io, scale);
}

// A warp processes a few consecutive heads of one token. Chunks of keys and values that RoPE does not change are copied
// to the cache, 16 bytes a lane and access. Rotated dimensions come in pairs, half a rotation apart; a lane rotates
// kWide consecutive pairs, so that lanes exchange nothing, and one iteration suffices where a quarter of a head is
// rotated. The loads of the copies are issued before the first pair is rotated. Unrotated dimensions of queries stay
// where they are.
constexpr int kAppendWarps = 4, kAppendThreads = kAppendWarps * kWarpSize;

template <typename A, int HS>
struct AppendLayout {
  static constexpr int kElements = Pack<A>::size;
  static constexpr int kChunks = 2 * HS / kElements;  // 16-byte chunks of a key and a value
  static constexpr int kHeads = kChunks < 2 * kWarpSize ? 2 * kWarpSize / kChunks : 1;  // heads that a warp processes
  static constexpr int kPerLane = (kHeads * kChunks + kWarpSize - 1) / kWarpSize;
};

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Few {
  T value[kCount];
};

template <typename A, int HS, int kWide>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(A* qkv, A* keys, A* values, int NH, std::int64_t rows, std::int64_t capacity,
                  std::int64_t first_position, DeviceRopeTable rope) {
  using L = AppendLayout<A, HS>;
  constexpr int kElements = L::kElements, kChunks = L::kChunks;
  const int lane = threadIdx.x % kWarpSize, half = static_cast<int>(rope.half), rotated = 2 * half;
  const unsigned warp = blockIdx.x * kAppendWarps + threadIdx.x / kWarpSize, groups = (NH + L::kHeads - 1) / L::kHeads;
  const std::int64_t row = warp / groups, position = first_position + row;
  if (row >= rows) return;
  const int first_head = static_cast<int>(warp % groups) * L::kHeads, heads = min(L::kHeads, NH - first_head);
  A* from = qkv + (row * NH + first_head) * 3 * HS;
  const auto cached = [&](int head, int d) { return ((first_head + head) * capacity + position) * HS + d; };

  Pack<A> pack[L::kPerLane];
#pragma unroll
  for (int j = 0; j < L::kPerLane; ++j) {
    const int i = j * kWarpSize + lane, head = i / kChunks, d = i % kChunks * kElements;  // value: d >= HS
    if (head < heads && d + kElements > rotated) pack[j] = load_pack(from + (3 * head + 1) * HS + d);
  }

  using Pair = Few<A, kWide>;
  using Angle = Few<float, kWide>;
  const unsigned pieces = half / kWide;
  for (unsigned i = lane; i < heads * 2 * pieces; i += kWarpSize) {
    const int head = i / pieces / 2, key = i / pieces % 2, d = i % pieces * kWide;
    A* x = from + (3 * head + key) * HS + d;
    Pair low = *reinterpret_cast<const Pair*>(x), high = *reinterpret_cast<const Pair*>(x + half);
    const Angle cosine = *reinterpret_cast<const Angle*>(rope.cos + position * half + d),
                sine = *reinterpret_cast<const Angle*>(rope.sin + position * half + d);
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      float a = to_float(low.value[e]), b = to_float(high.value[e]);
      rotate_pair(a, b, cosine.value[e], sine.value[e]);
      low.value[e] = from_float<A>(a);
      high.value[e] = from_float<A>(b);
    }
    if (key == 1) x = keys + cached(head, d);
    *reinterpret_cast<Pair*>(x) = low;
    *reinterpret_cast<Pair*>(x + half) = high;
  }

#pragma unroll
  for (int j = 0; j < L::kPerLane; ++j) {
    const int i = j * kWarpSize + lane, head = i / kChunks, d = i % kChunks * kElements;
    if (head >= heads || d + kElements <= rotated) continue;
    A* to = d < HS ? keys + cached(head, d) : values + cached(head, d - HS);
    if (d >= rotated) {
      store_pack(to, pack[j]);
      continue;
    }
    // The rotated dimensions end inside this chunk: the rest of it is written in 4-byte stores.
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(A));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (d + w * kPerWord < rotated) continue;
      reinterpret_cast<unsigned*>(to)[w] = reinterpret_cast<const unsigned*>(&pack[j])[w];
    }
  }
}

template <typename Function>
void with_head_dim(std::int64_t head_dim, const Function& function) {
  switch (head_dim) {
    case 32:
      return function(std::integral_constant<int, 32>());
    case 64:
      return function(std::integral_constant<int, 64>());
    case 80:
      return function(std::integral_constant<int, 80>());
    case 96:
      return function(std::integral_constant<int, 96>());
    case 128:
      return function(std::integral_constant<int, 128>());
    case 256:
      return function(std::integral_constant<int, 256>());
    default:
      fail(Exit::usage, "attention: head dimension: got %lld, expected 32, 64, 80, 96, 128 or 256",
           static_cast<long long>(head_dim));
  }
}
static_assert(attention_supports(32) && attention_supports(64) && attention_supports(80) && attention_supports(96) &&
              attention_supports(128) && attention_supports(256));

}  // namespace

template <typename A, typename KV>
void decode_attention(const DecodeAttention<A, KV>& io, const LaunchDevice& device, cudaStream_t stream) {
  with_head_dim(io.heads.HS,
                [&](auto head_dim) { launch_decode<A, KV, decltype(head_dim)::value>(io, device, stream); });
}

std::size_t decode_attention_workspace(const NeoxHeads& heads, const LaunchDevice& device) {
  const std::int64_t floats = heads.NH * split_count(heads, device) * (heads.HS + 2);
  return static_cast<std::size_t>(floats) * sizeof(float) + static_cast<std::size_t>(heads.NH) * sizeof(int);
}

template <typename A, typename KV>
void rope_and_append(A* qkv, KV* keys, KV* values, const NeoxHeads& heads, std::int64_t rows, std::int64_t capacity,
                     std::int64_t first_position, const DeviceRopeTable& rope, cudaStream_t stream) {
  static_assert(std::is_same_v<A, KV>, "keys and values are copied bit for bit");
  if (rows == 0) return;
  with_head_dim(heads.HS, [&](auto head_dim) {
    constexpr int HS = decltype(head_dim)::value;
    using L = AppendLayout<A, HS>;
    const std::int64_t warps = rows * ceil_div(heads.NH, L::kHeads);
    const auto kernel = rope.half % 2 == 0 ? append_kernel<A, HS, 2> : append_kernel<A, HS, 1>;
    kernel<<<static_cast<unsigned>(ceil_div(warps, kAppendWarps)), kAppendThreads, 0, stream>>>(
        qkv, keys, values, static_cast<int>(heads.NH), rows, capacity, first_position, rope);
    check_launch("rope_and_append");
  });
}

#define WEFT_INSTANTIATE(A, KV)                                                                                  \
  template void decode_attention<A, KV>(const DecodeAttention<A, KV>&, const LaunchDevice&, cudaStream_t);       \
  template void rope_and_append<A, KV>(A*, KV*, KV*, const NeoxHeads&, std::int64_t, std::int64_t, std::int64_t, \
                                       const DeviceRopeTable&, cudaStream_t);
WEFT_INSTANTIATE(float, float)
WEFT_INSTANTIATE(bf16, bf16)
WEFT_INSTANTIATE(fp16, fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
