// Flash attention over pages on mma.m16n8k16; the recurrence is in paged_recurrence.cuh.
//
// Why a row's bits do not depend on other rows:
//  - Key blocks of kBlockKeys positions and splits (paged_work.h) begin at fixed absolute positions. A row
//    takes the key blocks of a split in order, and its splits in order, whether one warp computes each split of a
//    decoded row or one warp walks all splits of a prompt's rows.
//  - An element of an mma's result depends only on its row of A and its column of B, and steps of k come in order.
//  - Whether a row's maximum moves is decided by the row's own scores; if another row's maximum moves, this row's
//    factor is exactly 1. Softmax and merging are written with rounding intrinsics, so that the compiler cannot
//    contract multiplications and additions in one place and not in another.
//  - A key block or a split after a row's position changes nothing: its weights are exactly 0, its factor exactly 1.
//    Positions after the last row of a tile are zeroed in shared memory, since 0 times what another sequence left there
//    may be NaN.
//
// Where it runs. On Hopper: paged_hopper.cu and paged_work_units.cu. Elsewhere, and for heads of 256: here, in one kernel of
// persistent blocks. A block first computes tiles (paged_work.h), whose warps share the keys and values in shared
// memory. Then each warp on its own computes items of splits, with a ring of key and value blocks of its own; as many
// warps as shared memory has rings for. Copies run ahead across the ends of items. Since tiles and items differ in
// length, counters assign both.
//
// A tile's warp begins each split with empty sums and at its end merges it into the sums of the earlier splits, which
// lie in shared memory: 2 HS accesses of 4 bytes a row and split.

#include "llmc/cuda/op/attention/paged/paged_attention.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/paged/paged_paths.h"
#include "llmc/cuda/op/attention/paged/paged_recurrence.cuh"
#include "llmc/cuda/op/attention/paged/paged_work.h"
#include "llmc/cuda/op/attention/paged/paged_work_units.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

namespace weft::cuda {

using namespace paged;

namespace {

// StageKeys positions in each of the Stages stages of a tile's ring. Two blocks of 4 warps share a multiprocessor, or
// one of 8 warps where O needs more registers.
template <bool Windowed, int HeadDim, int StageKeys, int Stages, bool SumsInRegisters>
struct Tiling {
  static constexpr bool kWindowed = Windowed;
  static constexpr int HS = HeadDim, kStageKeys = StageKeys, kStages = Stages;
  static constexpr SlotCopy kCopy = SlotCopy::threads;
  static constexpr bool kCodes = false;
  // where O of the earlier splits is kept; false: in shared memory
  static constexpr bool kSumsInRegisters = SumsInRegisters;
  static constexpr int kKeys = kBlockKeys<HS>;
  static constexpr int M = HS <= 64 ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kTileRows = static_cast<int>(paged_tile_rows(HS)), kWarpRows = M * 16;
  static constexpr int kWarps = kTileRows / kWarpRows, kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = kWarps == 8 ? 1 : 2;
  // Slots of a warp's ring for items if all warps of a block compute (kRing), two (kPairRing), or one (kLongRing).
  static constexpr int kRing = HS > 96 ? 3 : HS == 32 ? 8 : HS == 64 ? 6 : HS == 80 ? 5 : 4;
  static constexpr int kLongRing = std::min(16, 3 * kRing), kPairRing = kLongRing / 2;
  static constexpr int kSlotKeys = kWideSlotKeys<HS>, kRingBytes = kRing * Tile<bf16, HS>::bytes(kSlotKeys);
  static_assert(3 * kRingBytes <= 99 * 1024, "on every GPU three warps have a ring");
  static constexpr int kSumBytes = SumsInRegisters ? 0 : kTileRows * HS * static_cast<int>(sizeof(float));
  static constexpr int kTileBytes = kSumBytes + kStages * Tile<bf16, HS>::bytes(2 * kStageKeys);
  static_assert(kSpan % kStageKeys == 0 && kStageKeys % kKeys == 0 && kStageKeys % kPageUnit == 0);
};

// Starts the copy of positions first to first + Rows - 1 of one span and head, by `Threads` threads of which this one
// is number `thread`; positions from `end` on, and with kWindowed those before `begin`, become zeros. For one or two tensors
// of the same layout, to tiles `distance` bytes apart.
template <int HS, int Rows, int Threads, bool kWindowed, int Tensors, typename S>
__device__ __forceinline__ void load_positions(const Arguments<S>& a, const S* const (&from)[Tensors], unsigned tile,
                                               unsigned distance, int pages, int kv_head, int first, int begin, int end,
                                               int thread) {
  using T = Tile<S, HS>;
  static_assert(Rows * T::kChunks % kWarpSize == 0, "all of a warp's lanes take part in a shuffle, or none");
#pragma unroll
  for (int i = 0; i < ceil_div(Rows * T::kChunks, Threads); ++i) {
    const int index = thread + i * Threads, row = index / T::kChunks, chunk = index % T::kChunks;
    if (Rows * T::kChunks % Threads != 0 && index >= Rows * T::kChunks) break;
    const int position = first + row;
    const int page = __shfl_sync(~0u, pages, position % kSpan / kPageUnit);
    const std::int64_t at = page_offset<HS>(a, page, kv_head, position) + chunk * 8;
    const bool inside = position < end && (!kWindowed || position >= begin);
#pragma unroll
    for (int n = 0; n < Tensors; ++n) {
      copy_async(tile + n * distance + row * T::kRowBytes + chunk * 16, from[n] + (inside ? at : 0), inside);
    }
  }
}

// A warp's rows of a tile, over all splits.
template <typename S, typename Tiling>
struct TileRows {
  static constexpr int HS = Tiling::HS, M = Tiling::M, kKeys = Tiling::kKeys;
  QueryRows<S> rows;
  int end, unmasked_end;  // positions that the last row sees, and that the first row sees
  int begin = 0,
      unmasked_begin = 0;  // kWindowed: the first position that the first row sees, and that the last row sees
  int visible[M][2];
  RegisterOperand<S, HS, M> Q;
  SplitState<S, HS, M> state;
  EarlierSplits<S, HS, M, Tiling::kSumsInRegisters> earlier;

  __device__ TileRows(const Arguments<S>& a, const QueryRows<S>& of_warp, unsigned char* shared)
      : rows(of_warp),
        end(of_warp.end()),
        unmasked_end(of_warp.count > 0 ? of_warp.visible(0) : 0),
        earlier(shared, threadIdx.x / kWarpSize) {
    if constexpr (Tiling::kWindowed) {
      if (rows.count > 0)
        begin = rows.first_visible(0, a.window), unmasked_begin = rows.first_visible(rows.count - 1, a.window);
    }
    visible_positions(visible, rows);
    Q.load([&](int i) { return rows.query(a, i); });
    state.clear();
  }

  // Adds one key block, whose keys and values are at these addresses in shared memory.
  __device__ __forceinline__ void add(unsigned keys, unsigned values, int first_key, float c, int window) {
    if (first_key >= end || (Tiling::kWindowed && first_key + kKeys <= begin)) return;
    Accumulators<M, kKeys / 8> scores;
    scores.clear();
    multiply_by_rows<S, HS>(scores, Q, keys + Tile<S, HS>::lane_by_columns());
    float shrink[M][2];
    const bool masked = first_key + kKeys > unmasked_end || (Tiling::kWindowed && first_key < unmasked_begin);
    if (state.template weigh<2, Tiling::kWindowed>(scores, shrink, visible, masked, first_key, c, window))
      state.rescale(shrink);
    multiply_by_columns<S, HS>(state.O, scores, values + Tile<S, HS>::lane_by_rows());
    if (paged_split_begins_at(first_key + kKeys) && first_key + kKeys < end) {
      merge_split(c);
      earlier.keep(state.O);
      state.clear();
    }
  }
  __device__ void merge_split(float c) {
    state.close();
    earlier.merge(state.O, state.maximum, state.sum, c);
  }

  __device__ void finish(const Arguments<S>& a) {
    if (rows.count == 0) return;
    merge_split(a.c);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) state.sum[m][half] = earlier.sum[m][half];
    }
    state.store(a, rows);
  }
};

template <typename S, typename Tiling>
__device__ void compute_tile(const Arguments<S>& a, const PagedWorkUnit& item, int kv_head, unsigned char* shared) {
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kStageKeys = Tiling::kStageKeys, kStages = Tiling::kStages;
  constexpr unsigned kStageBytes = Tile<S, HS>::bytes(2 * kStageKeys), kValues = Tile<S, HS>::bytes(kStageKeys);
  const QueryRows<S> rows(a, item, kv_head, Tiling::kTileRows);
  constexpr bool kWindowed = Tiling::kWindowed;
  const int end = rows.end(), stages = static_cast<int>(ceil_div(end, kStageKeys));
  const int begin = kWindowed ? rows.first_visible(0, a.window) : 0, first_stage = begin / kStageKeys;
  const int first_span = first_stage * kStageKeys / kSpan;
  const unsigned ring = shared_address(shared) + Tiling::kSumBytes;
  // Page numbers are looked up one span ahead, so that no copy waits for them.
  const int table = a.tables[rows.first_row];
  int pages = span_pages<kWindowed>(a, table, first_span, end, begin);
  int next_pages = span_pages<kWindowed>(a, table, first_span + 1, end, begin);
  int load_slot = 0;
  const auto load = [&](int stage) {
    const int first = stage * kStageKeys;
    if (first < end) {
      if (stage > first_stage && first % kSpan == 0) {
        pages = next_pages;
        next_pages = span_pages<kWindowed>(a, table, first / kSpan + 1, end, begin);
      }
      const S* const tensors[] = {a.keys, a.values};
      load_positions<HS, kStageKeys, Tiling::kThreads, kWindowed>(a, tensors, ring + load_slot * kStageBytes, kValues,
                                                                  pages, kv_head, first, begin, end,
                                                                  static_cast<int>(threadIdx.x));
    }
    commit_copies();  // also for a stage that does not exist: the number of commit groups in flight stays the same
    load_slot = load_slot + 1 == kStages ? 0 : load_slot + 1;
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first_stage + stage);
  TileRows<S, Tiling> warp(a, rows.part(threadIdx.x / kWarpSize * Tiling::kWarpRows, Tiling::kWarpRows), shared);
  int slot = 0;
  for (int stage = first_stage; stage < stages; ++stage) {
    wait_for_older_copies<kStages - 2>();
    __syncthreads();  // the stage is complete, and no thread reads the one that is overwritten next
    load(stage + kStages - 1);
    const unsigned keys = ring + slot * kStageBytes;
#pragma unroll 1
    for (int k = 0; k < kStageKeys; k += kKeys) {
      const unsigned offset = k * Tile<S, HS>::kRowBytes;
      warp.add(keys + offset, keys + kValues + offset, stage * kStageKeys + k, a.c, a.window);
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  warp.finish(a);
}

template <typename S, typename Tiling>
__device__ void compute_tiles(const Arguments<S>& a, const PagedWorkUnit* tiles, int count, unsigned char* shared) {
  __shared__ int next;
  for (int n = blockIdx.x; n < count * a.NKV;) {
    int fetched = 0;
    if (threadIdx.x == 0) fetched = gridDim.x + atomicAdd(&a.cursors->tiles, 1);
    compute_tile<S, Tiling>(a, tiles[n / a.NKV], n % a.NKV, shared);
    if (threadIdx.x == 0) next = fetched;
    __syncthreads();  // also: no thread reads this tile's keys any more
    n = next;
    // compute_tile() has a barrier before thread 0 writes `next` again
  }
}

// In a launch without tiles this is the beginning, so the first lookups precede the wait for the predecessors.
template <typename S, typename Tiling>
__device__ void compute_items(const Arguments<S>& a, const PagedWorkUnit* items, int entries, bool tiles_before,
                              unsigned char* shared) {
  const int warp = threadIdx.x / kWarpSize, count = entries * a.NKV, blocks = gridDim.x;
  // With few items, few warps of a block compute, with longer rings. The first items are assigned statically, unless
  // some blocks may still be computing tiles.
  int warps = a.item_warps, slots = Tiling::kRing;
  if (!tiles_before && warps > 2 && count <= 2 * blocks) {
    warps = count <= blocks ? 1 : 2;
    slots = warps == 1 ? Tiling::kLongRing : Tiling::kPairRing;
  }
  const unsigned ring = shared_address(shared) + warp * slots * Tile<S, Tiling::HS>::bytes(Tiling::kSlotKeys);
  const int assigned = tiles_before ? 0 : blocks * warps;
  const int first = warp < warps ? warp * blocks + static_cast<int>(blockIdx.x) : count;
  ItemStream<S, Tiling, false> stream(a, items, count, assigned, first, ring, slots);
  if (tiles_before) {
    stream.step = 0;
  } else {
    stream.look_up_first();
    wait_for_predecessors();
    launch_dependents();  // not before: see paged_attention() on what the successor may read
  }
  if (warp >= warps) return;
  stream.start();
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int n = stream.item(i);
    if (n >= count) break;
    compute_work_unit(a, items + n / a.NKV, n % a.NKV, i, stream);
  }
  compute_merges<S, Tiling, false>(a, warp * blocks + static_cast<int>(blockIdx.x), warps * blocks);
}

template <typename S, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    paged_attention_kernel(const __grid_constant__ Arguments<S> a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const PagedWorkHeader work = *a.work;
  const PagedWorkUnit* entries = reinterpret_cast<const PagedWorkUnit*>(a.work + 1);
  if (work.tiles > 0) {
    wait_for_predecessors();
    launch_dependents();
    compute_tiles<S, Tiling>(a, entries, work.tiles, shared);
    __syncthreads();
  }
  compute_items<S, Tiling>(a, entries + work.tiles, work.items, work.tiles > 0, shared);
  reset_cursors(a, static_cast<int>(gridDim.x));
}

// ---- launch ---------------------------------------------------------------------------------------------------------------
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
  if (io.window < 0 || shape.window < 0 || (shape.window > 0 && (io.window == 0 || io.window > shape.window))) {
    fail(Exit::internal,
         "paged attention: a window of %lld for a list of %lld: expected at most the list's, if it has one",
         static_cast<long long>(io.window), static_cast<long long>(shape.window));
  }
  constexpr std::int64_t pack = 16 / static_cast<std::int64_t>(sizeof(S));
  const auto fits = [](const HeadViewOf<const S>& view) {
    return aligned_to_16(view.data) && view.token_stride % pack == 0 && view.head_stride % pack == 0;
  };
  if (kv.fp8() && (std::is_same_v<S, float> || io.k.data != nullptr ||
                   !aligned_to_16(kv.codes.keys, kv.codes.values, kv.codes.key_scales, kv.codes.value_scales))) {
    fail(Exit::internal, "paged attention: codes that do not begin on a 16-byte boundary, in fp32, or to be appended");
  }
  const bool appends = io.k.data != nullptr;
  if (appends != (io.v.data != nullptr) || io.rope.half < 0 || 2 * io.rope.half > kv.HS) {
    fail(
        Exit::internal,
        "paged attention: keys %s and values %s to append, %lld of %lld dimensions rotated: expected both or none, and "
        "not more dimensions than a head has",
        appends ? "given" : "not given", io.v.data != nullptr ? "given" : "not given",
        static_cast<long long>(2 * io.rope.half), static_cast<long long>(kv.HS));
  }
  if (fits(io.q) && fits(io.k) && fits(io.v) &&
      aligned_to_16(kv.keys, kv.values, io.out, io.work, io.workspace, io.rope.cos, io.rope.sin)) {
    return;
  }
  fail(Exit::internal, "paged attention: a tensor that does not begin on a 16-byte boundary");
}

template <typename S, typename Tiling>
void launch(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream, int shared_limit) {
  constexpr const char* kName = "paged_attention";
  // Two blocks share the shared memory of a multiprocessor; each reserves 1 KiB more than it asks for.
  constexpr int kStaticBytes = 16;
  const int most = Tiling::kBlocksPerMultiprocessor == 2 ? 113 * 1024 : shared_limit;
  const int per_block = std::min(shared_limit, most) - kStaticBytes;
  const Arguments<S> arguments = arguments_of(io, std::min<int>(Tiling::kWarps, per_block / Tiling::kRingBytes));
  const auto kernel = paged_attention_kernel<S, Tiling>;
  const int shared = std::max(Tiling::kTileBytes, arguments.item_warps * Tiling::kRingBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit - kStaticBytes), kName);
  const dim3 grid(resident_blocks(kernel, Tiling::kThreads, shared, device.multiprocessors, kName));
  launch_chained(kernel, grid, dim3(Tiling::kThreads), static_cast<std::size_t>(shared), stream, device.overlapping,
                 kName, arguments);
}

template <typename S, int HS, bool kWindowed>
void launch_for(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  const int limit = shared_bytes_per_block();
  if constexpr (HS == 256) {
    launch<S, Tiling<kWindowed, HS, 16, 2, false>>(io, device, stream, limit);
  } else if constexpr (HS == 128) {
    using Large = Tiling<kWindowed, HS, 64, 3, false>;
    if (limit > Large::kTileBytes) return launch<S, Large>(io, device, stream, limit);
    // spills O of earlier splits, which is accessed once a split
    launch<S, Tiling<kWindowed, HS, 64, 2, true>>(io, device, stream, limit);
  } else {
    launch<S, Tiling<kWindowed, HS, 64, HS <= 64 ? 3 : 2, (HS > 64)>>(io, device, stream, limit);
  }
}

}  // namespace

std::size_t paged_attention_workspace(const PagedAttentionShape& shape) {
  return workspace_of(shape).bytes;
}

template <typename S>
void paged_attention(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream,
                     [[maybe_unused]] PagedPath path) {
  check_arguments(io);
  if (io.rows.rows == 0) return;
  if constexpr (std::is_same_v<S, float>) {
    paged_plain(io, device, stream);
  } else if (io.k.data != nullptr || (io.kv.fp8() && io.decodes)) {
    paged_work_units(io, device, stream);
  } else if (path == PagedPath::automatic && paged_hopper_computes(io.shape.HS)) {
    if (io.kv.fp8()) widen_pages(io, false, device, stream);
    paged_hopper_tiles(io, device, stream);
    paged_work_units(io, device, stream);
  } else {
    if (io.kv.fp8()) widen_pages(io, true, device, stream);
    for_head_dimension(io.shape.HS, "paged attention", [&]<int HS>() {
      for_window(io, [&]<bool kWindowed>() { launch_for<S, HS, kWindowed>(io, device, stream); });
    });
  }
}

template void paged_attention<float>(const PagedAttention<float>&, const LaunchDevice&, cudaStream_t, PagedPath);
template void paged_attention<bf16>(const PagedAttention<bf16>&, const LaunchDevice&, cudaStream_t, PagedPath);
template void paged_attention<fp16>(const PagedAttention<fp16>&, const LaunchDevice&, cudaStream_t, PagedPath);

}  // namespace weft::cuda
