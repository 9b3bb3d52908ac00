// Flash attention (Dao et al., 2022; the recurrence stands in attention/portable_forward.cu) over pages, on mma.m16n8k16.
//
// What makes a row's bits its own:
// - Key blocks of kKeys positions and splits of kPagedSplit positions begin at fixed absolute positions. A row takes the key
//   blocks of a split in order, and its splits in order, whoever computes them: a warp for each split of a decoded row, or a
//   warp that walks all splits of a prompt's rows.
// - An element of an MMA's result depends on its row of A and its column of B alone, and steps of k come in order.
// - What a row decides (whether its maximum moves) it decides by its own scores; factors of rows that decide otherwise are
//   exactly 1. Arithmetic of softmax and merge is written with intrinsics that the compiler may not fuse in one place only.
// - A key block or a split behind a row's position changes nothing: its weights are exactly 0, its factor exactly 1. Positions
//   behind the last row of a tile are zeros in shared memory, since 0 times what another sequence left there may be NaN.
//
// Where it runs: one kernel of persistent blocks. A block takes tiles first (paged_work.h): all its warps share the keys and values in
// shared memory. Then each warp by itself takes items of splits, with a ring of key and value blocks of its own, as many
// warps as shared memory has rings for; copies run ahead of the computation across the ends of items. Both are assigned by
// counters, since they differ in length.
//
// A tile's warp begins each split with empty sums and merges it, when it ends, into what lies in shared memory since the
// split before: 2 HS accesses of 4 bytes a row for 256 keys.

#include "llmc/cuda/op/paged_attention.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/memory_order.cuh"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/attention/launch.cuh"
#include "llmc/cuda/op/attention/mma.cuh"
#include "llmc/cuda/op/attention/paths.h"
#include "llmc/cuda/op/paged_work.h"

namespace weft::cuda {

namespace {

constexpr int kSplit = static_cast<int>(kPagedSplit), kItemRows = static_cast<int>(kPagedItemRows);
constexpr int kPageUnit = 16;                    // positions that lie in one page, whatever its size
constexpr int kSplitUnits = kSplit / kPageUnit;  // at most a warp's lanes
static_assert(kSplitUnits <= kWarpSize);
template <int HS>
constexpr std::int64_t kSlotFloats = paged_slot_floats(HS);

// StageKeys, Stages: of the ring of a tile's keys and values. Two blocks of 128 threads where these are faster for tiles.
template <int HeadDim, int StageKeys, int Stages>
struct Tiling {
  static constexpr int HS = HeadDim, kStageKeys = StageKeys, kStages = Stages;
  static constexpr int kKeys = HS <= 128 ? 32 : 16;  // of a key block: decides the bits
  static constexpr int M = HS <= 96 ? 2 : 1;         // m16 tiles of a warp of a tile
  static constexpr int kWarps = HS == 128 ? 8 : 4, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = M * 16, kTileRows = kWarps * kWarpRows;
  static constexpr int kBlocksPerMultiprocessor = HS == 128 ? 1 : 2;
  // Key or value blocks of the ring of a warp that computes items.
  static constexpr int kRing = HS > 96 ? 3 : HS == 32 ? 8 : HS == 64 ? 6 : HS == 80 ? 5 : 4;
  static constexpr int kRingBytes = kRing * Tile<bf16, HS>::bytes(kKeys);
  static constexpr int kSumBytes = kTileRows * HS * static_cast<int>(sizeof(float));
  static constexpr int kTileBytes = kSumBytes + kStages * Tile<bf16, HS>::bytes(2 * kStageKeys);
  // The same of a warp that computes with one other or none in its block.
  static constexpr int kLongRing = std::min(16, kTileBytes / Tile<bf16, HS>::bytes(kKeys));
  static_assert(kTileRows == paged_tile_rows(HS));
  static_assert(kSplit % kStageKeys == 0 && kStageKeys % kKeys == 0 && kStageKeys % kPageUnit == 0);
};

// In the workspace, before the counters of merged tiles.
struct Cursors {
  int tiles, items, finished_blocks, unused;
};

template <typename S>
struct Arguments {
  const S* q;
  std::int64_t q_row_stride, q_head_stride;
  const S *keys, *values;
  const std::int32_t *tables, *pages;
  const PagedWorkHeader* work;
  Cursors* cursors;
  int* merged;      // [slots, NKV]: how many splits of the tile that begins with this slot are done
  float* partials;  // [slots, NKV, paged_slot_floats(HS)]
  S* out;
  int NH, NKV, group, page_shift;  // group: NH / NKV
  int item_warps;                  // of a block
  float c;                         // scale log2 e
};

// ---- rows, keys, values -------------------------------------------------------------------------------------------------
// Rows of a span and a K/V head (paged_work.h).
template <typename S>
struct QueryRows {
  int first_row, first_position;  // of the span
  int group, first_head;
  int first, count;  // rows of the span that these are

  __device__ QueryRows(const Arguments<S>& a, const PagedItem& item, int kv_head, int tile_rows) {
    group = a.group;
    first_head = kv_head * group;
    first_row = item.first_row;
    first_position = item.first_position;
    first = item.tile * tile_rows;
    count = min(tile_rows, item.rows * group - first);
  }
  // `count` of them from the i-th on; may be none.
  __device__ QueryRows part(int i, int rows) const {
    QueryRows part = *this;
    part.first += i;
    part.count = max(0, min(rows, count - i));
    return part;
  }
  // How many positions row i sees.
  __device__ int visible(int i) const { return first_position + (first + i) / group + 1; }
  __device__ int end() const { return count > 0 ? visible(count - 1) : 0; }
  __device__ const S* query(const Arguments<S>& a, int i) const {
    if (i >= count) return nullptr;
    return a.q + (first_row + (first + i) / group) * a.q_row_stride +
           (first_head + (first + i) % group) * a.q_head_stride;
  }
  template <int HS>
  __device__ S* out(const Arguments<S>& a, int i) const {
    const std::int64_t row = first_row + (first + i) / group;
    return a.out + (row * a.NH + first_head + (first + i) % group) * HS;
  }
};

// The pages of a split: lane u holds that of positions split * kSplit + 16 u ...; those from `end` on are not looked up.
template <typename S>
__device__ int split_pages(const Arguments<S>& a, int table, int split, int end) {
  const int position = split * kSplit + threadIdx.x % kWarpSize * kPageUnit;
  if (threadIdx.x % kWarpSize >= kSplitUnits || position >= end) return 0;
  return a.pages[table + (position >> a.page_shift)];
}

// Starts the copy of the positions first .. first + Rows - 1 of one split and head by `Threads` threads, `thread` being this
// one's number; from `end` on they become zeros. One or two tensors that lie alike, to tiles `distance` apart.
template <int HS, int Rows, int Threads, int Tensors, typename S>
__device__ __forceinline__ void load_positions(const Arguments<S>& a, const S* const (&from)[Tensors], unsigned tile,
                                               unsigned distance, int pages, int kv_head, int first, int end,
                                               int thread) {
  using T = Tile<S, HS>;
  static_assert(Rows * T::kChunks % kWarpSize == 0, "all of a warp's lanes take part in a shuffle, or none");
#pragma unroll
  for (int i = 0; i < ceil_div(Rows * T::kChunks, Threads); ++i) {
    const int index = thread + i * Threads, row = index / T::kChunks, chunk = index % T::kChunks;
    if (Rows * T::kChunks % Threads != 0 && index >= Rows * T::kChunks) break;
    const int position = first + row;
    const int page = __shfl_sync(~0u, pages, position % kSplit / kPageUnit);
    const std::int64_t head = static_cast<std::int64_t>(page) * a.NKV + kv_head;
    const std::int64_t at = ((head << a.page_shift) + (position & ((1 << a.page_shift) - 1))) * HS + chunk * 8;
    const bool inside = position < end;
#pragma unroll
    for (int n = 0; n < Tensors; ++n) {
      copy_async(tile + n * distance + row * T::kRowBytes + chunk * 16, from[n] + (inside ? at : 0), inside);
    }
  }
}

// The same of a warp and one tensor, in units of kPageUnit positions, which lie in one piece in their page.
template <int HS, int Rows, typename S>
__device__ __forceinline__ void load_units(const Arguments<S>& a, const S* from, unsigned tile, int pages, int kv_head,
                                           int first, int end) {
  using T = Tile<S, HS>;
  constexpr int kUnitChunks = kPageUnit * T::kChunks;
  static_assert(Rows % kPageUnit == 0 && kUnitChunks % kWarpSize == 0);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int unit = 0; unit < Rows / kPageUnit; ++unit) {
    const int position = first + unit * kPageUnit;
    const int page = __shfl_sync(~0u, pages, position % kSplit / kPageUnit);
    const std::int64_t head = static_cast<std::int64_t>(page) * a.NKV + kv_head;
    const S* at = from + ((head << a.page_shift) + (position & ((1 << a.page_shift) - 1))) * HS + lane * 8;
    const int chunks = (end - position) * T::kChunks - lane;  // from this lane's first one on
#pragma unroll
    for (int i = 0; i < kUnitChunks / kWarpSize; ++i) {
      const int index = lane + i * kWarpSize, row = unit * kPageUnit + index / T::kChunks;
      copy_async(tile + row * T::kRowBytes + index % T::kChunks * 16, at + i * kWarpSize * 8, i * kWarpSize < chunks);
    }
  }
}

// ---- the recurrence -------------------------------------------------------------------------------------------------------
// Two splits' states of a row become one, by the order of positions: how much of each remains.
struct MergeFactors {
  float before, added;
};
// (maximum, sum) of the splits before and of the split that comes next become those of all. The first split has a position
// that every row sees; one that a row sees nothing of has maximum -infinity and sum 0, and changes nothing.
__device__ inline MergeFactors merge(float& maximum, float& sum, float added_maximum, float added_sum, float c) {
  const float largest = fmaxf(maximum, added_maximum);
  const MergeFactors factors = {exp2_approximate(__fmul_rn(__fsub_rn(maximum, largest), c)),
                                exp2_approximate(__fmul_rn(__fsub_rn(added_maximum, largest), c))};
  maximum = largest;
  sum = __fmaf_rn(added_sum, factors.added, __fmul_rn(sum, factors.before));
  return factors;
}
__device__ inline float merged(const MergeFactors& factors, float before, float added) {
  return __fmaf_rn(added, factors.added, __fmul_rn(before, factors.before));
}
// The mean; + 0 makes -0 of a row that saw fewer key blocks than its neighbours the 0 that theirs is.
__device__ inline float mean(float o, float inverse_sum) {
  return __fmaf_rn(o, inverse_sum, 0.0f);
}

// M * 16 rows of a warp over the key blocks of one split. A thread has rows g and g + 8 of each m16 tile; the four threads of a
// quad share a row, agree on its maximum, and each sums its own columns until the end of the split.
template <typename S, int HeadDim, int M>
struct SplitState {
  static constexpr int HS = HeadDim;
  static constexpr float kSlack = 8;  // log2 of how far a score may exceed the maximum in use
  Accumulators<M, HS / 8> O;
  float maximum[M][2], sum[M][2];

  __device__ void clear() {
    O.clear();
#pragma unroll
    for (int m = 0; m < M; ++m) maximum[m][0] = maximum[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
  }

  // scores of Keys keys from `first_key` on become weights; row (m, half) sees the positions below visible[m][half]. Halves = 1:
  // the rows of half 1 are padding. Their scores and sums remain what they are, and nobody reads them.
  template <int Halves = 2, int N>
  __device__ void weigh(Accumulators<M, N>& scores, const int (&visible)[M][2], bool masked, int first_key, float c) {
    const int t = threadIdx.x % 4;
    if (masked) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 2 * Halves; ++i)
            if (first_key + n * 8 + t * 2 + i % 2 >= visible[m][i / 2]) scores.at[m][n][i] = -INFINITY;
    }
    float shrink[M][2];
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
        const float growth = __fmul_rn(__fsub_rn(largest, maximum[m][half]), c);  // NaN where nothing was seen yet
        const bool grown = growth > kSlack;
        shrink[m][half] = grown ? exp2_approximate(-growth) : 1.0f;
        if (grown) maximum[m][half] = largest;
        any_grown |= grown;
      }
    }
    if (__any_sync(~0u, any_grown)) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 2 * Halves; ++i) {
#pragma unroll
          for (int n = 0; n < HS / 8; ++n) O.at[m][n][i] = __fmul_rn(O.at[m][n][i], shrink[m][i / 2]);
        }
#pragma unroll
        for (int half = 0; half < Halves; ++half) sum[m][half] = __fmul_rn(sum[m][half], shrink[m][half]);
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
  }

  // Once, at the end of a split: the quad's sums.
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

  // A closed state of all splits, to the rows of `out`.
  __device__ void store(const Arguments<S>& a, const QueryRows<S>& rows) const {
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

// What each row of a warp sees.
template <int M, typename S>
__device__ void visible_positions(int (&visible)[M][2], const QueryRows<S>& rows) {
  const int g = threadIdx.x % kWarpSize / 4;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visible[m][half] = rows.visible(max(0, min(m * 16 + half * 8 + g, rows.count - 1)));
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------------
// A warp's rows of a tile, from the first split to the last.
template <typename S, typename Tiling>
struct TileRows {
  static constexpr int HS = Tiling::HS, M = Tiling::M, kKeys = Tiling::kKeys;
  QueryRows<S> rows;
  int end, unmasked_end;  // positions that the last row sees, that the first one sees
  int visible[M][2];
  RegisterOperand<S, HS, M> Q;
  SplitState<S, HS, M> state;
  float maximum[M][2], sum[M][2];  // of the splits before this one
  bool first_split = true;
  float4*
      sums;  // of the splits before this one, in shared memory; of this lane, those of another MMA kWarpSize further

  __device__ TileRows(const Arguments<S>& a, const QueryRows<S>& of_warp, unsigned char* shared)
      : rows(of_warp), end(of_warp.end()), unmasked_end(of_warp.count > 0 ? of_warp.visible(0) : 0) {
    visible_positions(visible, rows);
    Q.load([&](int i) { return rows.query(a, i); });
    state.clear();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    sums = reinterpret_cast<float4*>(shared) + warp * (M * HS / 8) * kWarpSize + lane;
  }

  // One key block; the addresses are those of its keys and values in shared memory.
  __device__ __forceinline__ void add(unsigned keys, unsigned values, int first_key, float c) {
    if (first_key >= end) return;
    Accumulators<M, kKeys / 8> scores;
    scores.clear();
    multiply_by_rows<S, HS>(scores, Q, keys + Tile<S, HS>::lane_by_columns());
    state.weigh(scores, visible, first_key + kKeys > unmasked_end, first_key, c);
    multiply_by_columns<S, HS>(state.O, scores, values + Tile<S, HS>::lane_by_rows());
    if ((first_key + kKeys) % kSplit == 0 && first_key + kKeys < end) {
      merge_split(c);
      store_sums();
      state.clear();
    }
  }

  // After the last split the state is that of all splits.
  __device__ void merge_split(float c) {
    state.close();
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (first_split) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          maximum[m][half] = state.maximum[m][half], sum[m][half] = state.sum[m][half];
        continue;
      }
      MergeFactors factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[half] = merge(maximum[m][half], sum[m][half], state.maximum[m][half], state.sum[m][half], c);
        state.sum[m][half] = sum[m][half];
      }
#pragma unroll
      for (int n = 0; n < HS / 8; ++n) {
        const float4 before = sums[(m * HS / 8 + n) * kWarpSize];
        float(&o)[4] = state.O.at[m][n];
        o[0] = merged(factors[0], before.x, o[0]);
        o[1] = merged(factors[0], before.y, o[1]);
        o[2] = merged(factors[1], before.z, o[2]);
        o[3] = merged(factors[1], before.w, o[3]);
      }
    }
    first_split = false;
  }
  __device__ void store_sums() {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < HS / 8; ++n) {
        const float(&o)[4] = state.O.at[m][n];
        sums[(m * HS / 8 + n) * kWarpSize] = make_float4(o[0], o[1], o[2], o[3]);
      }
    }
  }

  __device__ void finish(const Arguments<S>& a) {
    if (rows.count == 0) return;
    merge_split(a.c);
    state.store(a, rows);
  }
};

template <typename S, typename Tiling>
__device__ void compute_tile(const Arguments<S>& a, const PagedItem& item, int kv_head, unsigned char* shared) {
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kStageKeys = Tiling::kStageKeys, kStages = Tiling::kStages;
  constexpr unsigned kStageBytes = Tile<S, HS>::bytes(2 * kStageKeys), kValues = Tile<S, HS>::bytes(kStageKeys);
  const QueryRows<S> rows(a, item, kv_head, Tiling::kTileRows);
  const int end = rows.end(), stages = static_cast<int>(ceil_div(end, kStageKeys));
  const unsigned ring = shared_address(shared) + Tiling::kSumBytes;
  // Looked up a split ahead, so that no copy waits for a page number.
  const int table = a.tables[rows.first_row];
  int pages = split_pages(a, table, 0, end), next_pages = split_pages(a, table, 1, end);
  int load_slot = 0;
  const auto load = [&](int stage) {
    const int first = stage * kStageKeys;
    if (first < end) {
      if (first > 0 && first % kSplit == 0) {
        pages = next_pages;
        next_pages = split_pages(a, table, first / kSplit + 1, end);
      }
      const S* const tensors[] = {a.keys, a.values};
      load_positions<HS, kStageKeys, Tiling::kThreads>(a, tensors, ring + load_slot * kStageBytes, kValues, pages,
                                                       kv_head, first, end, static_cast<int>(threadIdx.x));
    }
    commit_copies();  // of a stage that does not exist, too: the number of groups in flight stays the same
    load_slot = load_slot + 1 == kStages ? 0 : load_slot + 1;
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  TileRows<S, Tiling> warp(a, rows.part(threadIdx.x / kWarpSize * Tiling::kWarpRows, Tiling::kWarpRows), shared);
  int slot = 0;
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_older_copies<kStages - 2>();
    __syncthreads();  // the stage is complete, and nobody reads the one that is loaded next any more
    load(stage + kStages - 1);
    const unsigned keys = ring + slot * kStageBytes;
#pragma unroll 1
    for (int k = 0; k < kStageKeys; k += kKeys) {
      const unsigned offset = k * Tile<S, HS>::kRowBytes;
      warp.add(keys + offset, keys + kValues + offset, stage * kStageKeys + k, a.c);
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  warp.finish(a);
}

template <typename S, typename Tiling>
__device__ void compute_tiles(const Arguments<S>& a, const PagedItem* tiles, int count, unsigned char* shared) {
  __shared__ int next;
  for (int n = blockIdx.x; n < count * a.NKV;) {
    int fetched = 0;
    if (threadIdx.x == 0) fetched = gridDim.x + atomicAdd(&a.cursors->tiles, 1);
    compute_tile<S, Tiling>(a, tiles[n / a.NKV], n % a.NKV, shared);
    if (threadIdx.x == 0) next = fetched;
    __syncthreads();  // and nobody reads this tile's keys any more
    n = next;
    // compute_tile() has a barrier before thread 0 writes `next` again
  }
}

// ---- items of splits --------------------------------------------------------------------------------------------------------
// The state of one split, for the warp that will merge the splits.
template <typename S, int HS>
__device__ void store_partial(const Arguments<S>& a, const SplitState<S, HS, 1>& state, int rows,
                              std::int64_t first_slot, int kv_head) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + g;
    if (row >= rows) continue;
    float* slot = a.partials + ((first_slot + row) * a.NKV + kv_head) * kSlotFloats<HS>;
#pragma unroll
    for (int n = 0; n < HS / 8; ++n)
      *reinterpret_cast<float2*>(slot + n * 8 + t * 2) = {state.O.at[0][n][half * 2], state.O.at[0][n][half * 2 + 1]};
    if (t == 0) *reinterpret_cast<float2*>(slot + HS) = {state.maximum[0][half], state.sum[0][half]};
  }
}

// All splits of a tile, in order; a lane has four neighbouring dimensions of a row.
template <typename S, int HS>
__device__ void merge_partials(const Arguments<S>& a, const QueryRows<S>& rows, int splits, std::int64_t first_slot,
                               int kv_head) {
  constexpr int kTogether = 8;  // splits that are loaded before the first of them is merged
  for (int i = threadIdx.x % kWarpSize; i < rows.count * (HS / 4); i += kWarpSize) {
    const int row = i / (HS / 4), d = i % (HS / 4) * 4;
    float o[4] = {}, maximum = -INFINITY, sum = 0;
    for (int first = 0; first < splits; first += kTogether) {
      float4 added[kTogether];
      float2 of_row[kTogether];  // maximum, sum
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        const std::int64_t at = first_slot + min(first + s, splits - 1) * rows.count + row;
        const float* slot = a.partials + (at * a.NKV + kv_head) * kSlotFloats<HS>;
        added[s] = __ldcg(reinterpret_cast<const float4*>(slot + d));
        of_row[s] = __ldcg(reinterpret_cast<const float2*>(slot + HS));
      }
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        if (first + s >= splits) break;
        const float from[4] = {added[s].x, added[s].y, added[s].z, added[s].w};
        if (first + s == 0) {
          maximum = of_row[s].x, sum = of_row[s].y;
#pragma unroll
          for (int e = 0; e < 4; ++e) o[e] = from[e];
          continue;
        }
        const MergeFactors factors = merge(maximum, sum, of_row[s].x, of_row[s].y, a.c);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = merged(factors, o[e], from[e]);
      }
    }
    const float inverse = __frcp_rn(sum);
    *reinterpret_cast<uint2*>(rows.template out<HS>(a, row) + d) = {pack<S>(mean(o[0], inverse), mean(o[1], inverse)),
                                                                    pack<S>(mean(o[2], inverse), mean(o[3], inverse))};
  }
}

// The items of a warp, in the order in which it computes them, and the ring that their keys and values come through: key block,
// value block, the next key block, ..., one slot each, item after item. What is copied is up to the whole ring ahead of what is
// computed, and the lookups (number of the item -> entry -> block table -> pages) are an item ahead of the copies, one step
// with each copy, so that none waits for the one before it.
template <typename S, typename Tiling>
struct ItemStream {
  static constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kRing = Tiling::kRing, kLongRing = Tiling::kLongRing;
  static constexpr unsigned kSlotBytes = Tile<S, HS>::bytes(kKeys);

  const Arguments<S>& a;
  const PagedItem* entries;
  int count;     // numbers of items: entry n / NKV, K/V head n % NKV
  int assigned;  // so many are assigned beforehand, one to a warp; the others come from the cursor
  unsigned ring;
  int slots;  // kRing, kLongRing / 2 or kLongRing
  int load_slot = 0, slot = 0;
  int numbers;        // of the items that are looked up: lane i has those of the i-th, the i + 32-th, ...
  int looked_up = 0;  // how many items before the one below
  // Being looked up: the number, the entry; then the positions of its split and the block table, then this lane's page.
  int step, number;
  int4 entry;
  int next_first, next_end, table_or_page;
  // Being copied.
  int load_first = 0, load_end = 0, load_pages = 0, load_head = 0;
  bool load_values = false;

  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  // In lane 0.
  __device__ int from_cursor() const {
    if (assigned >= count) return count;
    return lane() == 0 ? assigned + atomicAdd(&a.cursors->items, 1) : 0;
  }

  // `first`: this warp's assigned item, or `numbers_of_items`, if there is none.
  __device__ ItemStream(const Arguments<S>& arguments, const PagedItem* list, int numbers_of_items,
                        int assigned_beforehand, int first, unsigned shared_ring, int ring_slots)
      : a(arguments),
        entries(list),
        count(numbers_of_items),
        assigned(assigned_beforehand),
        ring(shared_ring),
        slots(ring_slots) {
    numbers = number = first;
    step = 1;
  }

  // The next lookup of the four. Behind the last item there is nothing to look up.
  __device__ __forceinline__ void look_up() {
    if (step == 0) {
      number = from_cursor();
    } else if (step == 1) {
      number = __shfl_sync(~0u, number, 0);
      if (lane() == looked_up % kWarpSize) numbers = number;
      if (number < count) entry = *reinterpret_cast<const int4*>(entries + number / a.NKV);
    } else if (number < count) {
      if (step == 2) {
        const PagedItem& item = reinterpret_cast<const PagedItem&>(entry);
        next_first = item.split * kSplit;
        next_end = min(next_first + kSplit, QueryRows<S>(a, item, 0, kItemRows).end());
        table_or_page = a.tables[item.first_row];
      } else {
        table_or_page = split_pages(a, table_or_page, next_first / kSplit, next_end);
      }
    }
    ++step;
  }
  __device__ void look_up_first() {
#pragma unroll 1
    while (step < 4) look_up();
  }

  // Starts the next copy, to the slot that was read last.
  __device__ __forceinline__ void load_next() {
    const bool ended = load_first >= load_end;
#pragma unroll 1
    while (step < 4) {
      look_up();
      if (!ended) break;
    }
    if (ended && number < count) {
      load_first = next_first;
      load_end = next_end;
      load_pages = table_or_page;
      load_head = number % a.NKV;
      ++looked_up;
      step = 0;
    }
    if (load_first < load_end) {
      load_units<HS, kKeys>(a, load_values ? a.values : a.keys, ring + load_slot * kSlotBytes, load_pages, load_head,
                            load_first, load_end);
      if (load_values) load_first += kKeys;
      load_values = !load_values;
    }
    commit_copies();  // an empty group behind the last item: the number of groups in flight stays the same
    load_slot = load_slot + 1 == slots ? 0 : load_slot + 1;
  }
  __device__ void start() {
#pragma unroll 1
    for (int i = 0; i < slots - 1; ++i) load_next();
  }

  // The number of the i-th item, whose copies have begun, or of none.
  __device__ int item(int i) const {
    return __shfl_sync(~0u, numbers, i % kWarpSize);
  }

  // The next slot's block, and the copy of another one to the slot that was read before it.
  __device__ __forceinline__ unsigned next_block() {
    if (slots == kRing) {
      wait_for_older_copies<kRing - 2>();
    } else if (slots == kLongRing) {
      wait_for_older_copies<kLongRing - 2>();
    } else {
      wait_for_older_copies<kLongRing / 2 - 2>();
    }
    __syncwarp();
    load_next();
    const unsigned block = ring + slot * kSlotBytes;
    slot = slot + 1 == slots ? 0 : slot + 1;
    return block;
  }
};

template <typename S, typename Tiling>
__device__ void compute_item(const Arguments<S>& a, const PagedItem* entry, int kv_head,
                             ItemStream<S, Tiling>& blocks) {
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys;
  int begin, end, unmasked_end, visible[1][2];
  bool few_rows;
  RegisterOperand<S, HS, 1> Q;
  {
    const PagedItem item = *entry;
    const QueryRows<S> rows(a, item, kv_head, kItemRows);
    begin = item.split * kSplit;
    end = min(begin + kSplit, rows.end());
    visible_positions(visible, rows);
    unmasked_end = rows.visible(0);
    few_rows = rows.count <= 8;
    Q.load([&](int i) { return rows.query(a, i); });
  }
  SplitState<S, HS, 1> state;
  state.clear();
#pragma unroll 1
  for (int first_key = begin; first_key < end; first_key += kKeys) {
    Accumulators<1, kKeys / 8> scores;
    scores.clear();
    multiply_by_rows<S, HS>(scores, Q, blocks.next_block() + Tile<S, HS>::lane_by_columns());
    const bool masked = first_key + kKeys > unmasked_end;
    if (few_rows) {
      state.template weigh<1>(scores, visible, masked, first_key, a.c);
    } else {
      state.weigh(scores, visible, masked, first_key, a.c);
    }
    multiply_by_columns<S, HS>(state.O, scores, blocks.next_block() + Tile<S, HS>::lane_by_rows());
  }
  state.close();
  const PagedItem item = *entry;  // again, rather than in registers that the loop needs
  const QueryRows<S> rows(a, item, kv_head, kItemRows);
  if (item.partials < 0) return state.store(a, rows);

  const int lane = threadIdx.x % kWarpSize, splits = (rows.end() + kSplit - 1) / kSplit;
  store_partial(a, state, rows.count, item.partials + static_cast<std::int64_t>(item.split) * rows.count, kv_head);
  int* merged = a.merged + static_cast<std::int64_t>(item.partials) * a.NKV + kv_head;
  __syncwarp();
  int before = 0;
  if (lane == 0) before = fetch_add_acquire_release(merged, 1);
  if (__shfl_sync(~0u, before, 0) != splits - 1) return;
  __syncwarp();
  merge_partials<S, HS>(a, rows, splits, item.partials, kv_head);
  if (lane == 0) *merged = 0;  // for the next layer
}

// Of a launch without tiles this is the beginning: the first lookups precede the wait.
template <typename S, typename Tiling>
__device__ void compute_items(const Arguments<S>& a, const PagedItem* items, int entries, bool tiles_before,
                              unsigned char* shared) {
  const int warp = threadIdx.x / kWarpSize, count = entries * a.NKV, blocks = gridDim.x;
  // Few items: few warps of a block compute, whose rings are longer. The first ones are assigned beforehand, unless some
  // blocks still compute tiles.
  int warps = a.item_warps, slots = Tiling::kRing;
  if (!tiles_before && warps > 2 && count <= 2 * blocks) {
    warps = count <= blocks ? 1 : 2;
    slots = Tiling::kLongRing / warps;
  }
  const unsigned ring = shared_address(shared) + warp * slots * Tile<S, Tiling::HS>::bytes(Tiling::kKeys);
  const int assigned = tiles_before ? 0 : blocks * warps;
  const int first = warp < warps ? warp * blocks + static_cast<int>(blockIdx.x) : count;
  ItemStream<S, Tiling> stream(a, items, count, assigned, first, ring, slots);
  if (tiles_before) {
    stream.step = 0;
  } else {
    stream.look_up_first();
    wait_for_predecessors();
    let_successor_start();  // not before: paged_attention.h says what the successor may read
  }
  if (warp >= warps) return;
  stream.start();
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int n = stream.item(i);
    if (n >= count) break;
    compute_item<S, Tiling>(a, items + n / a.NKV, n % a.NKV, stream);
  }
}

template <typename S, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    paged_attention_kernel(const __grid_constant__ Arguments<S> a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const PagedWorkHeader work = *a.work;
  const PagedItem* entries = reinterpret_cast<const PagedItem*>(a.work + 1);
  if (work.tiles > 0) {
    wait_for_predecessors();
    let_successor_start();
    compute_tiles<S, Tiling>(a, entries, work.tiles, shared);
    __syncthreads();
  }
  compute_items<S, Tiling>(a, entries + work.tiles, work.items, work.tiles > 0, shared);

  // The last block to finish prepares the next launch.
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int before = fetch_add_acquire_release(&a.cursors->finished_blocks, 1);
  if (before == static_cast<int>(gridDim.x) - 1) *a.cursors = {};
}

// ---- fp32 -----------------------------------------------------------------------------------------------------------------
// A block for a row and head. Blocks of 32 keys go to the warps in turn, a key to a lane; then the lanes share the dimensions. The
// warps' states are merged in order of warps.
constexpr int kPlainWarps = 4;

struct PlainArguments {
  HeadViewOf<const float> q;
  PagedKv<float> kv;
  PagedRows rows;
  float* out;
  int NH;
  float c;
};

template <int HS>
__global__ void __launch_bounds__(kPlainWarps* kWarpSize) plain_kernel(const __grid_constant__ PlainArguments a) {
  constexpr int kPerLane = (HS + kWarpSize - 1) / kWarpSize;
  __shared__ float query[HS], group_maximum[kPlainWarps], group_sum[kPlainWarps], group_out[kPlainWarps][HS];
  wait_for_predecessors();
  let_successor_start();
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int position = a.rows.positions[row];
  if (position < 0) return;
  const float* q = a.q.at(0, row, head);
  for (int d = threadIdx.x; d < HS; d += kPlainWarps * kWarpSize) query[d] = q[d];
  __syncthreads();

  const int kv_head = head / (a.NH / static_cast<int>(a.kv.NKV)), page_size = static_cast<int>(a.kv.page_size);
  const std::int32_t* table = a.rows.pages + a.rows.tables[row];
  const auto offset = [&](int of) {
    return ((table[of / page_size] * a.kv.NKV + kv_head) * page_size + of % page_size) * HS;
  };
  float maximum = -INFINITY, sum = 0, o[kPerLane] = {};
  for (int first = warp * kWarpSize; first <= position; first += kPlainWarps * kWarpSize) {
    const int own = min(first + lane, position);
    const std::int64_t at = offset(own);
    float score = 0;
#pragma unroll 4
    for (int d = 0; d < HS; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(a.kv.keys + at + d);
      score = fmaf(query[d], k.x, score);
      score = fmaf(query[d + 1], k.y, score);
      score = fmaf(query[d + 2], k.z, score);
      score = fmaf(query[d + 3], k.w, score);
    }
    if (first + lane > position) score = -INFINITY;
    const float largest = fmaxf(maximum, warp_max(score));  // the block's first key is visible
    const float shrink = exp2f((maximum - largest) * a.c), p = exp2f((score - largest) * a.c);
    maximum = largest;
    sum = fmaf(sum, shrink, warp_sum(p));
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) o[j] *= shrink;
    const int count = min(kWarpSize, position + 1 - first);
    for (int key = 0; key < count; ++key) {
      const float weight = __shfl_sync(~0u, p, key);
      const float* v = a.kv.values + __shfl_sync(~0u, at, key);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int d = j * kWarpSize + lane;
        if (d < HS) o[j] = fmaf(weight, v[d], o[j]);
      }
    }
  }
  if (lane == 0) group_maximum[warp] = maximum, group_sum[warp] = sum;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int d = j * kWarpSize + lane;
    if (d < HS) group_out[warp][d] = o[j];
  }
  __syncthreads();
  float* out = a.out + (static_cast<std::int64_t>(row) * a.NH + head) * HS;
  for (int d = threadIdx.x; d < HS; d += kPlainWarps * kWarpSize) {
    float largest = -INFINITY, total = 0, result = 0;
    for (int w = 0; w < kPlainWarps; ++w) largest = fmaxf(largest, group_maximum[w]);
    for (int w = 0; w < kPlainWarps; ++w) {
      const float factor = exp2f((group_maximum[w] - largest) * a.c);  // 0 for a warp without keys
      total = fmaf(group_sum[w], factor, total);
      result = fmaf(group_out[w][d], factor, result);
    }
    out[d] = result / total;
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------------
std::size_t round_up(std::size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

struct Workspace {
  std::size_t merged, partials, bytes;  // offsets; the cursors come first
};
Workspace workspace_of(const PagedAttentionShape& shape) {
  const auto pairs = static_cast<std::size_t>(paged_partial_slots(shape) * shape.NKV);
  Workspace at{};
  at.merged = sizeof(Cursors);
  at.partials = round_up(at.merged + pairs * sizeof(int));
  at.bytes = at.partials + pairs * static_cast<std::size_t>(paged_slot_floats(shape.HS)) * sizeof(float);
  return at;
}

template <typename S>
void check_arguments(const PagedAttention<S>& io) {
  const auto& [shape, kv] = std::pair(io.shape, io.kv);
  const bool pages = kv.page_size == 16 || kv.page_size == 32 || kv.page_size == 64;
  if (!pages || kv.NKV != shape.NKV || kv.HS != shape.HS || io.rows.rows < 0 || io.rows.rows > 65535) {
    fail(Exit::internal,
         "paged attention: pages of %lld positions and %lld heads of %lld, %lld rows: expected 16, 32 or 64 positions, "
         "%lld "
         "heads of %lld, at most 65535 rows",
         static_cast<long long>(kv.page_size), static_cast<long long>(kv.NKV), static_cast<long long>(kv.HS),
         static_cast<long long>(io.rows.rows), static_cast<long long>(shape.NKV), static_cast<long long>(shape.HS));
  }
  const std::int64_t pack = 16 / static_cast<std::int64_t>(sizeof(S));
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  if (aligned(io.q.data) && io.q.token_stride % pack == 0 && io.q.head_stride % pack == 0 && aligned(kv.keys) &&
      aligned(kv.values) && aligned(io.out) && aligned(io.work) && aligned(io.workspace)) {
    return;
  }
  fail(Exit::internal, "paged attention: a tensor that does not begin on a 16-byte boundary");
}

template <typename S, typename Tiling>
void launch(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream, int shared_limit) {
  constexpr const char* kName = "paged_attention";
  const Workspace at = workspace_of(io.shape);
  char* workspace = static_cast<char*>(io.workspace);
  // Two blocks of a multiprocessor share its memory, of which each block costs 1 KiB more than it asks for.
  constexpr int kStaticBytes = 16;
  const int most = Tiling::kBlocksPerMultiprocessor == 2 ? 113 * 1024 : shared_limit;
  const int per_block = std::min(shared_limit, most) - kStaticBytes;
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
  arguments.item_warps = std::min(Tiling::kWarps, per_block / Tiling::kRingBytes);
  arguments.c = io.scale * kLog2E;

  const auto kernel = paged_attention_kernel<S, Tiling>;
  const int shared = std::max(Tiling::kTileBytes, arguments.item_warps * Tiling::kRingBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit - kStaticBytes), kName);
  int blocks = 1;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Tiling::kThreads,
                                                      static_cast<std::size_t>(shared)),
        kName);
  const dim3 grid(static_cast<unsigned>(std::max(1, blocks) * device.multiprocessors));
  launch_chained(kernel, grid, dim3(Tiling::kThreads), static_cast<std::size_t>(shared), stream, device.overlapping,
                 kName, arguments);
}

template <typename S, int HS>
void launch_for(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  if constexpr (std::is_same_v<S, float>) {
    if (io.rows.rows == 0) return;
    const PlainArguments arguments = {io.q, io.kv, io.rows, io.out, static_cast<int>(io.shape.NH), io.scale * kLog2E};
    const dim3 grid(static_cast<unsigned>(io.shape.NH), static_cast<unsigned>(io.rows.rows));
    launch_chained(plain_kernel<HS>, grid, dim3(kPlainWarps * kWarpSize), 0, stream, device.overlapping,
                   "paged_attention", arguments);
  } else {
    const int limit = shared_bytes_per_block();
    if constexpr (HS == 256) {
      launch<S, Tiling<HS, 16, 2>>(io, device, stream, limit);
    } else if constexpr (HS == 128) {
      using Large = Tiling<HS, 64, 3>;
      if (limit > Large::kTileBytes) return launch<S, Large>(io, device, stream, limit);
      launch<S, Tiling<HS, 32, 2>>(io, device, stream, limit);
    } else {
      constexpr int kStageKeys = HS == 96 ? 32 : 64, kStages = HS == 80 ? 2 : 3;
      launch<S, Tiling<HS, kStageKeys, kStages>>(io, device, stream, limit);
    }
  }
}

}  // namespace

std::size_t paged_attention_workspace(const PagedAttentionShape& shape) {
  return workspace_of(shape).bytes;
}

template <typename S>
void paged_attention(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  check_arguments(io);
  for_head_dimension(io.shape.HS, "paged attention", [&]<int HS>() { launch_for<S, HS>(io, device, stream); });
}

template void paged_attention<float>(const PagedAttention<float>&, const LaunchDevice&, cudaStream_t);
template void paged_attention<bf16>(const PagedAttention<bf16>&, const LaunchDevice&, cudaStream_t);
template void paged_attention<fp16>(const PagedAttention<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda
