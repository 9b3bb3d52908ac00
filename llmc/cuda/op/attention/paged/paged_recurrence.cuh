// What the kernels of paged_attention.h share: the rows of a K/V head, the recurrence of flash attention (Dao et al.,
// 2022; derived in attention/portable_forward.cu) over one split of positions on mma.m16n8k16, and the merge of splits.
#pragma once

#include <algorithm>
#include <cmath>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/memory_order.cuh"
#include "llmc/cuda/op/attention/paged/paged_attention.h"
#include "llmc/cuda/op/attention/paged/paged_work.h"
#include "llmc/cuda/op/attention/train/mma.cuh"

namespace weft::cuda::paged {

constexpr int kItemRows = static_cast<int>(kPagedItemRows);
constexpr int kPageUnit = 16;  // positions that are contiguous for every page size
// Positions whose pages are looked up at once, by a warp's lanes; a part of a split.
constexpr int kSpan = 256, kSpanUnits = kSpan / kPageUnit;
static_assert(kSpanUnits <= kWarpSize && kPagedShortestSplit % kSpan == 0);
template <int HS>
constexpr std::int64_t kSlotFloats = paged_slot_floats(HS);

// Keys of a key block. A row's maximum moves at most once a block, so this decides the bits.
template <int HS>
constexpr int kBlockKeys = HS <= 128 ? 64 : 16;

// Counters that assign tiles and items; at the beginning of the workspace.
struct Cursors {
  int tiles, items, finished_blocks, unused;
};
struct Workspace {
  std::size_t merged, partials, bytes;  // byte offsets; the cursors are at 0
};
inline Workspace workspace_of(const PagedAttentionShape& shape) {
  const auto pairs = static_cast<std::size_t>(paged_partial_slots(shape) * shape.NKV);
  Workspace at{};
  at.merged = sizeof(Cursors);
  at.partials = (at.merged + pairs * sizeof(int) + 15) / 16 * 16;
  at.bytes = at.partials + pairs * static_cast<std::size_t>(paged_slot_floats(shape.HS)) * sizeof(float);
  return at;
}

// The keys and values that attention appends, and the table by which it rotates queries and keys.
template <typename S>
struct AppendedRows {
  const S *k, *v;
  std::int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
  const float *cos, *sin;  // [positions, half]
  int half;
};

template <typename S>
struct Arguments {
  const S* q;
  std::int64_t q_row_stride, q_head_stride;
  S *keys, *values;
  const std::int32_t *tables, *pages;
  const PagedWorkHeader* work;
  Cursors* cursors;
  int* merged;      // [slots, NKV]: finished splits of the item whose slots begin here
  float* partials;  // [slots, NKV, paged_slot_floats(HS)]
  S* out;
  int NH, NKV, group, page_shift;  // group: NH / NKV
  int item_warps;                  // warps of a block that compute items
  int early_entries;               // entries of items to prefetch, see paged_work_units.cu
  float c;                         // scale log2 e
  AppendedRows<S> appended;        // used with kAppends
  int window, list_window;         // with kWindowed: of the layer, and of the list (0: none)
  KvCodes codes;
};

template <typename S>
Arguments<S> arguments_of(const PagedAttention<S>& io, int item_warps) {
  const Workspace at = workspace_of(io.shape);
  char* workspace = static_cast<char*>(io.workspace);
  Arguments<S> arguments{};
  arguments.q = io.q.data;
  arguments.q_row_stride = io.q.token_stride;
  arguments.q_head_stride = io.q.head_stride;
  arguments.keys = io.kv.keys;
  arguments.values = io.kv.values;
  arguments.tables = io.rows.tables;
  arguments.pages = io.rows.pages;
  arguments.work = static_cast<const PagedWorkHeader*>(io.work);
  arguments.cursors = reinterpret_cast<Cursors*>(workspace);
  arguments.merged = reinterpret_cast<int*>(workspace + at.merged);
  arguments.partials = reinterpret_cast<float*>(workspace + at.partials);
  arguments.out = io.out;
  arguments.NH = static_cast<int>(io.shape.NH);
  arguments.NKV = static_cast<int>(io.shape.NKV);
  arguments.group = arguments.NH / arguments.NKV;
  arguments.page_shift = io.kv.page_size == 16 ? 4 : io.kv.page_size == 32 ? 5 : 6;
  arguments.item_warps = item_warps;
  arguments.c = io.scale * kLog2E;
  arguments.appended = {io.k.data,        io.v.data,         io.k.token_stride,
                        io.k.head_stride, io.v.token_stride, io.v.head_stride,
                        io.rope.cos,      io.rope.sin,       static_cast<int>(io.rope.half)};
  arguments.window = static_cast<int>(io.window);
  arguments.list_window = static_cast<int>(io.shape.window);
  arguments.codes = io.kv.codes;
  return arguments;
}

// Calls launch.operator()<kWindowed>(): the kernels without a window have no instructions for it.
template <typename S, typename Launch>
void for_window(const PagedAttention<S>& io, const Launch& launch) {
  if (io.window > 0 && io.window < io.shape.max_positions) return launch.template operator()<true>();
  launch.template operator()<false>();
}

// Query rows of a chunk for a K/V head (paged_work.h). kSingle: the chunk is one row, so no division by the group is
// needed.
template <typename S, bool kSingle = false>
struct QueryRows {
  int first_row, first_position;  // as in PagedChunk
  int group, first_head;
  int first, count;  // the range of the chunk's query rows

  __device__ QueryRows(const Arguments<S>& a, const PagedWorkUnit& item, int kv_head, int tile_rows) {
    group = a.group;
    first_head = kv_head * group;
    first_row = item.first_row;
    first_position = item.first_position;
    first = item.tile * tile_rows;
    count = min(tile_rows, item.rows * group - first);
  }
  // At most `rows` of them from the i-th on, possibly none.
  __device__ QueryRows part(int i, int rows) const {
    QueryRows part = *this;
    part.first += i;
    part.count = max(0, min(rows, count - i));
    return part;
  }
  // Number of positions that row i sees.
  __device__ int visible(int i) const { return first_position + row_of(i) + 1; }
  __device__ int end() const { return count > 0 ? visible(count - 1) : 0; }
  // With a window, the first position that row i sees.
  __device__ int first_visible(int i, int window) const { return max(0, visible(i) - window); }
  __device__ const S* query(const Arguments<S>& a, int i) const {
    if (i >= count) return nullptr;
    return a.q + (first_row + row_of(i)) * a.q_row_stride + head_of(i) * a.q_head_stride;
  }
  template <int HS>
  __device__ S* out(const Arguments<S>& a, int i) const {
    return a.out + (static_cast<std::int64_t>(first_row + row_of(i)) * a.NH + head_of(i)) * HS;
  }

 private:
  // Row of the chunk, and head.
  __device__ int row_of(int i) const { return kSingle ? 0 : (first + i) / group; }
  __device__ int head_of(int i) const { return first_head + (kSingle ? first + i : (first + i) % group); }
};

// The pages of a span: lane u holds the page of positions span * kSpan + 16 u and following; 0 from position `end`
// on, and with kWindowed in front of `begin`, where the table may name no page.
template <bool kWindowed = false, typename S>
__device__ int span_pages(const Arguments<S>& a, int table, int span, int end, int begin = 0) {
  const int position = span * kSpan + threadIdx.x % kWarpSize * kPageUnit;
  if (threadIdx.x % kWarpSize >= kSpanUnits || position >= end) return 0;
  if (kWindowed && position + kPageUnit <= begin) return 0;
  return a.pages[table + (position >> a.page_shift)];
}

// Element offset of a position's key or value in the tensor of all pages.
template <int HS, typename S>
__device__ __forceinline__ std::int64_t page_offset(const Arguments<S>& a, int page, int kv_head, int position) {
  const std::int64_t head = static_cast<std::int64_t>(page) * a.NKV + kv_head;
  return ((head << a.page_shift) + (position & ((1 << a.page_shift) - 1))) * HS;
}

// Called by all threads at the end of a block: the last of `blocks` blocks resets the cursors for the next launch.
template <typename S>
__device__ void reset_cursors(const Arguments<S>& a, int blocks) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (fetch_add_acquire_release(&a.cursors->finished_blocks, 1) == blocks - 1) *a.cursors = {};
}

// Factors by which the sums of the earlier splits and of the added split are scaled when they are merged.
struct MergeFactors {
  float before, added;
};
__device__ inline float merge_factor(float maximum, float largest, float c) {
  return exp2_approximate(__fmul_rn(__fsub_rn(maximum, largest), c));
}
__device__ inline float merged(const MergeFactors& factors, float before, float added) {
  return __fmaf_rn(added, factors.added, __fmul_rn(before, factors.before));
}
// Merges (maximum, sum) of a split into those of the earlier splits. Every row sees a position of the first split, or with a
// window of the second: the rows of an item or tile are of fewer positions than a split has. A split of which a row sees
// nothing has maximum -infinity, sum 0 and sums of weighted values 0, and changes nothing.
__device__ inline MergeFactors merge(float& maximum, float& sum, float added_maximum, float added_sum, float c) {
  const float largest = fmaxf(maximum, added_maximum);
  const MergeFactors factors = {merge_factor(maximum, largest, c), merge_factor(added_maximum, largest, c)};
  maximum = largest;
  sum = merged(factors, sum, added_sum);
  return factors;
}
// The weighted mean. Adding + 0 turns -0 into + 0, so that rows that saw different numbers of key blocks agree.
__device__ inline float mean(float o, float inverse_sum) {
  return __fmaf_rn(o, inverse_sum, 0.0f);
}

// M * 16 rows of a warp over the key blocks of one split. A thread has rows g and g + 8 of each m16 tile. The four
// threads of a quad share a row and agree on its maximum; each sums its own columns until the end of the split.
template <typename S, int HeadDim, int M>
struct SplitState {
  static constexpr int HS = HeadDim;
  // A weight may reach 2^kSlack before the maximum in use moves.
  static constexpr float kSlack = 8;
  Accumulators<M, HS / 8> O;
  float maximum[M][2], sum[M][2];

  __device__ void clear() {
    O.clear();
#pragma unroll
    for (int m = 0; m < M; ++m) maximum[m][0] = maximum[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
  }

  // Turns the scores of the keys from `first_key` on into weights; row (m, half) sees the positions below
  // visible[m][half]. Returns whether any row's maximum has moved: O must then be multiplied by `shrink`. Halves = 1:
  // the rows of half 1 are padding, whose scores and sums are left alone and not used. With kWindowed a row sees the last
  // `window` of its positions alone.
  template <int Halves = 2, bool kWindowed = false, int N>
  __device__ bool weigh(Accumulators<M, N>& scores, float (&shrink)[M][2], const int (&visible)[M][2], bool masked,
                        int first_key, float c, int window = 0) {
    const int t = threadIdx.x % 4;
    if (masked) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 2 * Halves; ++i)
            if (first_key + n * 8 + t * 2 + i % 2 >= visible[m][i / 2]) scores.at[m][n][i] = -INFINITY;
      if constexpr (kWindowed) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 2 * Halves; ++i)
              if (first_key + n * 8 + t * 2 + i % 2 < visible[m][i / 2] - window) scores.at[m][n][i] = -INFINITY;
      }
    }
    bool any_grown = false;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < Halves; ++half) {
        float largest = scores.at[m][0][half * 2];
#pragma unroll
        for (int n = 0; n < N; ++n)
          largest = fmaxf(largest, fmaxf(scores.at[m][n][half * 2], scores.at[m][n][half * 2 + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        // NaN (not grown) while all scores so far are masked
        const float growth = __fmul_rn(__fsub_rn(largest, maximum[m][half]), c);
        const bool grown = growth > kSlack;
        shrink[m][half] = grown ? exp2_approximate(-growth) : 1.0f;
        if (grown) maximum[m][half] = largest;
        sum[m][half] = __fmul_rn(sum[m][half], shrink[m][half]);
        any_grown |= grown;
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < Halves; ++half) {
        const float offset = maximum[m][half] == -INFINITY ? 0.0f : __fmul_rn(maximum[m][half], c);
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores.at[m][n][half * 2 + i];
            s = exp2_approximate(__fmaf_rn(s, c, -offset));
            sum[m][half] = __fadd_rn(sum[m][half], s);
          }
        }
      }
    }
    return __any_sync(~0u, any_grown);
  }
  template <int Halves = 2>
  __device__ void rescale(const float (&shrink)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 2 * Halves; ++i) {
#pragma unroll
        for (int n = 0; n < HS / 8; ++n) O.at[m][n][i] = __fmul_rn(O.at[m][n][i], shrink[m][i / 2]);
      }
    }
  }

  // At the end of a split: adds up the row sums over the quad.
  __device__ void close() {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& s = sum[m][half];
        s = __fadd_rn(s, __shfl_xor_sync(~0u, s, 1));
        s = __fadd_rn(s, __shfl_xor_sync(~0u, s, 2));
      }
    }
  }

  // Writes a closed state of all splits to the rows of `out`.
  template <typename Rows>
  __device__ void store(const Arguments<S>& a, const Rows& rows) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + g;
        if (row >= rows.count) continue;
        const float inverse = __frcp_rn(sum[m][half]);
        unsigned* words = reinterpret_cast<unsigned*>(rows.template out<HS>(a, row)) + t;
#pragma unroll
        for (int n = 0; n < HS / 8; ++n)
          words[n * 4] = pack<S>(mean(O.at[m][n][half * 2], inverse), mean(O.at[m][n][half * 2 + 1], inverse));
      }
    }
  }
};

// The merged earlier splits of M * 16 rows of a warp that walks all splits. Their O is kept in shared memory or in
// registers.
template <typename S, int HS, int M, bool kInRegisters = false>
struct EarlierSplits {
  float maximum[M][2], sum[M][2];
  bool none = true;
  float4* shared;  // of this lane; the next mma tile is kWarpSize further
  Accumulators<M, kInRegisters ? HS / 8 : 1> registers;

  // Floats of each warp in `memory`, which is aligned to 16 bytes.
  static constexpr int kFloats = kInRegisters ? 0 : M * 16 * HS;
  __device__ EarlierSplits(unsigned char* memory, int warp)
      : shared(reinterpret_cast<float4*>(memory) + warp * (kFloats / 4) + threadIdx.x % kWarpSize) {}

  // Merges the earlier splits into `O`, the next split's, with its maximum and closed sum. Afterwards O, and maximum
  // and sum of this object, are those of all splits so far.
  __device__ void merge(Accumulators<M, HS / 8>& O, const float (&added_maximum)[M][2], const float (&added_sum)[M][2],
                        float c) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (none) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          maximum[m][half] = added_maximum[m][half], sum[m][half] = added_sum[m][half];
        continue;
      }
      MergeFactors factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factors[half] = paged::merge(maximum[m][half], sum[m][half], added_maximum[m][half], added_sum[m][half], c);
#pragma unroll
      for (int n = 0; n < HS / 8; ++n) {
        const float4 before = load(m, n);
        float(&o)[4] = O.at[m][n];
        o[0] = merged(factors[0], before.x, o[0]);
        o[1] = merged(factors[0], before.y, o[1]);
        o[2] = merged(factors[1], before.z, o[2]);
        o[3] = merged(factors[1], before.w, o[3]);
      }
    }
    none = false;
  }
  // Keeps the merged O for the next split.
  __device__ void keep(const Accumulators<M, HS / 8>& O) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < HS / 8; ++n) {
        const float(&o)[4] = O.at[m][n];
        if constexpr (kInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) registers.at[m][n][i] = o[i];
        } else {
          shared[(m * HS / 8 + n) * kWarpSize] = make_float4(o[0], o[1], o[2], o[3]);
        }
      }
    }
  }

 private:
  __device__ float4 load(int m, int n) const {
    if constexpr (kInRegisters) {
      const float(&o)[4] = registers.at[m][n];
      return make_float4(o[0], o[1], o[2], o[3]);
    } else {
      return shared[(m * HS / 8 + n) * kWarpSize];
    }
  }
};

// Number of positions that each row of a warp sees.
template <int M, typename Rows>
__device__ void visible_positions(int (&visible)[M][2], const Rows& rows) {
  const int g = threadIdx.x % kWarpSize / 4;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visible[m][half] = rows.visible(max(0, min(m * 16 + half * 8 + g, rows.count - 1)));
  }
}

}  // namespace weft::cuda::paged
