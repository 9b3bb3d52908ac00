// The tiles of a step (paged_work.h) on Hopper's wgmma (sm_90a). The pipeline is that of attention/hopper_forward.cu:
// while the GEMMs O += P V of one key block and S = Q K^T of the next run, a warpgroup computes the softmax of that S,
// and the two consumers issue their GEMMs in turn.
//
// The bits are those of mma.m16n8k16, which computes the items of splits. One wgmma covers 16 values of k for all
// columns, and in both instructions Hopper adds an element's 16 products and the accumulator in the same way (measured
// on an H200; CudaPagedAttention.ARowsBitsAreItsOwn compares prompts with decoded rows). Softmax is the code of
// paged_recurrence.cuh, key block by key block.
//
// A block is a producer and two consumer warpgroups. Keys and values come by tensor copies, each the rows of one page
// and head, and mbarriers count them. Positions after a tile's last one must become zeros, even where another sequence
// left NaN. So where a tile ends inside its last key block, the producer's 128 threads copy that block themselves, 16
// bytes each. Loads are not the bottleneck: a prompt of 2,000 rows of Pythia-2.8B takes 75 us, with all key blocks
// copied by threads 82, with no loads at all 69 (dev/performance/batch.md).
//
// A tile's queries are loaded during the last GEMM of the previous tile.

#include <algorithm>
#include <cstddef>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"
#include "llmc/cuda/op/attention/paged/paged_paths.h"
#include "llmc/cuda/op/attention/paged/paged_recurrence.cuh"
#include "llmc/cuda/op/attention/train/hold_back.cuh"
#include "llmc/cuda/op/attention/train/launch.cuh"

#if !WEFT_WGMMA
#pragma nv_diag_suppress 177  // "declared but never referenced": the kernel's body is compiled for sm_90a only
#endif

// Variants of the merge of splits, to be timed against each other: -DWEFT_ATT_VARIANT=n, or its parts one by one.
//  ORDER    where a split is merged: 0 after its last GEMM, with nothing in flight; 1 while the first Q K^T of the next
//           split runs, which is issued after the split's last P V; 2 a key block later, while the second Q K^T of the
//           next split runs, before its first P V is issued
//  TOTALS   quarters of the earlier splits' sums that lie in registers, the others in shared memory
//  QUERIES  quarters of the queries that lie in registers, the others in shared memory
//  VOTE     where no row of the warp raises its maximum by the added split, the earlier sums are not multiplied by 1
//  EARLY    with ORDER 2: the other consumer may issue its GEMMs while this one merges
//  CONSUMER, PRODUCER: registers a thread
#ifndef WEFT_ATT_VARIANT
#define WEFT_ATT_VARIANT 0
#endif
#define WEFT_ATT(order, totals, queries, vote, early, consumer, producer)     \
  [[maybe_unused]] constexpr int kOrder = order;                              \
  constexpr int kTotalQuarters = totals, kQueryQuarters = queries;            \
  constexpr int kConsumerRegisters = consumer, kProducerRegisters = producer; \
  [[maybe_unused]] constexpr bool kVote = vote, kEarly = early;

namespace weft::cuda {

using namespace paged;

// clang-format off
#if WEFT_ATT_VARIANT == 0
WEFT_ATT(0, 0, 4, 0, 0, 224, 56)
#elif WEFT_ATT_VARIANT == 1   // V1
WEFT_ATT(0, 0, 4, 1, 0, 224, 56)
#elif WEFT_ATT_VARIANT == 2   // V2
WEFT_ATT(0, 4, 0, 1, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 3   // V3
WEFT_ATT(1, 4, 0, 0, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 4   // V4 from here on
WEFT_ATT(2, 4, 0, 0, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 5
WEFT_ATT(2, 4, 4, 0, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 6
WEFT_ATT(2, 4, 2, 0, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 7
WEFT_ATT(2, 3, 4, 0, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 8
WEFT_ATT(2, 0, 4, 0, 0, 224, 56)
#elif WEFT_ATT_VARIANT == 9
WEFT_ATT(1, 4, 4, 0, 0, 240, 24)
#elif WEFT_ATT_VARIANT == 10
WEFT_ATT(2, 4, 4, 0, 1, 240, 24)
#elif WEFT_ATT_VARIANT == 11
WEFT_ATT(1, 0, 4, 0, 0, 224, 56)
#elif WEFT_ATT_VARIANT == 12
WEFT_ATT(2, 4, 4, 1, 0, 240, 24)
#else                         // parts by -D
WEFT_ATT(WEFT_ATT_ORDER, WEFT_ATT_TOTALS, WEFT_ATT_QUERIES, WEFT_ATT_VOTE, WEFT_ATT_EARLY, WEFT_ATT_CONSUMER, WEFT_ATT_PRODUCER)
#endif
// clang-format on

namespace {

using namespace hopper;

constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroupSize;
constexpr int kRows = 64;                           // rows of a consumer: M of its GEMMs
constexpr int kWarps = kWarpgroupSize / kWarpSize;  // warps of a warpgroup

template <typename T, bool Windowed, int HeadDim, int Stages, int TileColumns>
struct HopperTiling {
  using Element = T;
  static constexpr bool kWindowed = Windowed;
  static constexpr int HS = HeadDim, kStages = Stages, kKeys = kBlockKeys<HS>, kTileColumns = TileColumns;
  static_assert(paged_tile_rows(HS) == kConsumers * kRows && kSplit % kKeys == 0);
  using KeyTile = SwizzledTile<T, kKeys, HS, 2 * TileColumns>;
  using Earlier = EarlierSplits<T, HS, 1>;
  // The producer's spare registers go to the consumers; together at most 64K. Heads below 128 need no more than these.
  static constexpr int kConsumerRegisters = HS < 128 ? 224 : weft::cuda::kConsumerRegisters;
  static constexpr int kProducerRegisters = HS < 128 ? 56 : weft::cuda::kProducerRegisters;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= 504);
  using QueryTile = SwizzledTile<T, kRows, HS, 2 * TileColumns>;
  static constexpr int kQuerySteps = HS / 16 * kQueryQuarters / 4;  // of Q K^T, whose queries lie in registers
  static constexpr bool kSharedQueries = kQuerySteps < HS / 16;
  static constexpr int kTotalTiles = (HS / 8 * kTotalQuarters + 3) / 4;  // mma tiles of sums in registers
  static constexpr int kSumFloats = WEFT_ATT_VARIANT == 0 ? Earlier::kFloats : 16 * (HS - kTotalTiles * 8);

  struct Storage {
    typename KeyTile::Storage k[kStages], v[kStages];
    typename QueryTile::Storage q[kSharedQueries ? kConsumers : 1];
    alignas(16) float sums[kConsumers * kWarps][std::max(kSumFloats, 4)];
    RingBarrierStorage<kStages> ring;
  };
  static constexpr int kSharedBytes = alignof(Storage) + sizeof(Storage);  // alignof: to align the storage
  static_assert(kSharedBytes <= 227 * 1024);
};

template <typename S>
struct HopperArguments {
  CUtensorMap keys, values;  // [page][NKV][page_size][HS]; a box is a page's rows by kTileColumns columns
  Arguments<S> a;
};

#if WEFT_WGMMA

template <typename Tiling>
struct SharedMemory {
  using Storage = typename Tiling::Storage;
  using KeyTile = typename Tiling::KeyTile;

  unsigned char* memory;
  unsigned base;

  __device__ explicit SharedMemory(unsigned char* dynamic) {
    base = shared_address(dynamic, alignof(Storage));
    memory = dynamic + (base - shared_address(dynamic));
  }
  __device__ KeyTile k(int stage) const { return {base + unsigned{offsetof(Storage, k)} + stage * KeyTile::kBytes}; }
  __device__ KeyTile v(int stage) const { return {base + unsigned{offsetof(Storage, v)} + stage * KeyTile::kBytes}; }
  __device__ typename Tiling::QueryTile q(int consumer) const {
    return {base + unsigned{offsetof(Storage, q)} + consumer * Tiling::QueryTile::kBytes};
  }
  __device__ unsigned char* sums() const { return memory + offsetof(Storage, sums); }
  __device__ RingBarriers ring() const { return {base + unsigned{offsetof(Storage, ring)}, Tiling::kStages}; }
};

// The i-th tile of this block, assigned forth and back over the blocks, so that each gets long and short ones.
__device__ inline int tile_index(int i) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return i * blocks + (i % 2 == 0 ? block : blocks - 1 - block);
}

// Each warp of the producer arrives at a stage's barrier.
constexpr int kProducers = kWarps;

// Starts the copies of a key block that lies wholly within the tile's positions. Each warp copies some of its pages'
// keys and values.
template <typename Tiling, typename S = typename Tiling::Element>
__device__ __forceinline__ void copy_stage(const HopperArguments<S>& p, const typename Tiling::KeyTile& keys,
                                           const typename Tiling::KeyTile& values, unsigned full, int pages,
                                           int kv_head, int first) {
  using KeyTile = typename Tiling::KeyTile;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, shift = p.a.page_shift;
  const int copies = 2 * Tiling::kKeys >> shift;  // one of keys and one of values for each page
  const unsigned copy_bytes = static_cast<unsigned>(KeyTile::kColumnTiles * KeyTile::kRowBytes) << shift;
  if (lane == 0) {
    mbarrier_arrive_expect(full, static_cast<unsigned>((copies - warp + kProducers - 1) / kProducers) * copy_bytes);
  }
#pragma unroll 1
  for (int i = warp; i < copies; i += kProducers) {
    const int row = i / 2 << shift;
    const int page = __shfl_sync(~0u, pages, (first + row) % kSplit / kPageUnit);
    const auto to = (i % 2 == 0 ? keys : values).template rows<kPageUnit>(row);  // and the rows after them in the page
    if (lane == 0) tensor_load(to, i % 2 == 0 ? p.keys : p.values, full, 0, kv_head, page);
  }
}

// Copies a key block's keys and values; positions from `end` on, and with a window those before `begin`, become zeros.
template <typename Tiling, typename S = typename Tiling::Element>
__device__ __forceinline__ void load_stage(const Arguments<S>& a, const typename Tiling::KeyTile& keys,
                                           const typename Tiling::KeyTile& values, unsigned full, int pages,
                                           int kv_head, int first, int begin, int end) {
  using KeyTile = typename Tiling::KeyTile;
  constexpr int HS = Tiling::HS, kChunks = HS / 8, kEach = Tiling::kKeys * kChunks / kWarpgroupSize;
  static_assert(kEach * kWarpgroupSize == Tiling::kKeys * kChunks);
  constexpr int kUnroll = Tiling::kProducerRegisters < 56 ? 1 : kEach;
#pragma unroll kUnroll
  for (int i = 0; i < kEach; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kWarpgroupSize, row = index / kChunks,
              chunk = index % kChunks;
    const int position = first + row;
    const int page = __shfl_sync(~0u, pages, position % kSplit / kPageUnit);
    const bool inside = position < end && (!Tiling::kWindowed || position >= begin);
    const std::int64_t at = inside ? page_offset<HS>(a, page, kv_head, position) + chunk * 8 : 0;
    const int to = KeyTile::offset(row, chunk);
    copy_async(keys.address + to, a.keys + at, inside);
    copy_async(values.address + to, a.values + at, inside);
  }
  commit_copies();
  wait_for_older_copies<0>();
  fence_async_proxy_shared();  // wgmma reads through the async proxy what copy_async() wrote
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(full);
}

// Called by all threads of the first warpgroup.
template <typename Tiling, typename S = typename Tiling::Element>
__device__ void produce(const HopperArguments<S>& p, const PagedWorkUnit* tiles, int count,
                        const SharedMemory<Tiling>& shared) {
  constexpr bool kWindowed = Tiling::kWindowed;
  const Arguments<S>& a = p.a;
  const RingBarriers ring = shared.ring();
  RingPosition next;
  for (int i = 0; tile_index(i) < count; ++i) {
    const int n = tile_index(i), kv_head = n % a.NKV;
    const QueryRows<S> rows(a, tiles[n / a.NKV], kv_head, kConsumers * kRows);
    const int end = rows.end(), table = a.tables[rows.first_row];
    const int begin = kWindowed ? rows.first_visible(0, a.window) : 0, first_block = begin / Tiling::kKeys;
    const int first_split = begin / kSplit;
    int pages = split_pages<kWindowed>(a, table, first_split, end, begin);
    int next_pages = split_pages<kWindowed>(a, table, first_split + 1, end, begin);
    for (int first = first_block * Tiling::kKeys; first < end; first += Tiling::kKeys) {
      if (first > first_split * kSplit && first % kSplit == 0) {
        pages = next_pages;
        next_pages = split_pages<kWindowed>(a, table, first / kSplit + 1, end, begin);
      }
      ring.wait_empty(next);
      __syncwarp();
      const unsigned full = ring.full(next.stage);
      if (first + Tiling::kKeys <= end && (!kWindowed || first >= begin)) {
        copy_stage<Tiling>(p, shared.k(next.stage), shared.v(next.stage), full, pages, kv_head, first);
      } else {
        load_stage<Tiling>(a, shared.k(next.stage), shared.v(next.stage), full, pages, kv_head, first, begin, end);
      }
      next.advance(Tiling::kStages);
    }
  }
}

// ---- a consumer -----------------------------------------------------------------------------------------------------------
// Accumulators as the array that wgmma takes: both hold elements in the same order.
template <int N>
__device__ inline float (&flat(Accumulators<1, N>& accumulators))[4 * N] {
  return reinterpret_cast<float(&)[4 * N]>(accumulators.at);
}

#if WEFT_ATT_VARIANT == 0

template <typename Tiling, typename S = typename Tiling::Element>
__device__ void consume(const Arguments<S>& a, const PagedWorkUnit* tiles, int count,
                        const SharedMemory<Tiling>& shared, int consumer) {
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kSplitBlocks = kSplit / kKeys, kStages = Tiling::kStages;
  constexpr bool kWindowed = Tiling::kWindowed;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
  const int gemm_slot = 1 + consumer, next_gemm_slot = 1 + (consumer + 1) % kConsumers;  // named barriers
  const RingBarriers ring = shared.ring();
  RingPosition at;  // position of key block j
  Accumulators<1, kKeys / 8> scores;
  unsigned P[kKeys / 4];
  RegisterOperand<S, HS, 1> Q;
  SplitState<S, HS, 1> state;

  const auto wait_for_gemm_slot = [&] { named_barrier_wait(gemm_slot, kConsumers * kWarpgroupSize); };
  const auto pass_gemm_slot = [&] { named_barrier_arrive(next_gemm_slot, kConsumers * kWarpgroupSize); };
  const auto start_scores = [&](int stage) {  // S = Q K^T
    const auto keys = shared.k(stage).k_major();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HS / 16; ++k) {
      const unsigned(&q)[4] = Q.at[0][k].word;
      wgmma_async<S>(flat(scores), q[0], q[1], q[2], q[3], keys.step(k), k > 0);
    }
    wgmma_commit();
  };
  const auto start_output = [&](int stage, bool accumulate) {  // O += P V
    wgmma_fence();
    gemm_add_async(flat(state.O), P, shared.v(stage).mn_major(), accumulate);
    wgmma_commit();
  };
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(ring.empty(stage));
  };

  const auto rows_of_tile = [&](int n) { return QueryRows<S>(a, tiles[n / a.NKV], n % a.NKV, kConsumers * kRows); };
  const auto load_queries = [&](int n) {
    const QueryRows<S> rows = rows_of_tile(n).part(consumer * kRows + warp * 16, 16);
    Q.load([&](int row) { return rows.query(a, row); });
  };
  if (consumer == kConsumers - 1) pass_gemm_slot();
  if (tile_index(0) < count) load_queries(tile_index(0));
  for (int i = 0; tile_index(i) < count; ++i) {
    const int n = tile_index(i), next_n = tile_index(i + 1);
    const QueryRows<S> of_tile = rows_of_tile(n);
    const QueryRows<S> of_group = of_tile.part(consumer * kRows, kRows), rows = of_group.part(warp * 16, 16);
    const int tile_blocks = static_cast<int>(ceil_div(of_tile.end(), kKeys));
    const int blocks = static_cast<int>(ceil_div(of_group.end(), kKeys));
    // The first key blocks that the tile's and the consumer's rows see.
    const int tile_begin = kWindowed ? of_tile.first_visible(0, a.window) / kKeys : 0;
    const int begin = kWindowed && blocks > 0 ? of_group.first_visible(0, a.window) / kKeys : tile_begin;
    // Key blocks that only the other consumer's rows see.
    const auto skip_blocks = [&](int from, int to) {
      for (int j = from; j < to; ++j, at.advance(kStages)) {
        wait_for_gemm_slot();
        pass_gemm_slot();
        ring.wait_full(at);
        release(at.stage);
      }
    };
    if constexpr (kWindowed) skip_blocks(tile_begin, begin);
    if (blocks > 0) {
      const int unmasked_end = rows.count > 0 ? rows.visible(0) : 0;
      const int unmasked_begin = kWindowed && rows.count > 0 ? rows.first_visible(rows.count - 1, a.window) : 0;
      int visible[1][2];
      visible_positions(visible, rows);
      typename Tiling::Earlier earlier(shared.sums(), consumer * kWarps + warp);
      float shrink[1][2];
      const auto weigh = [&](int j) {
        const bool masked = (j + 1) * kKeys > unmasked_end || (kWindowed && j * kKeys < unmasked_begin);
        return state.template weigh<2, kWindowed>(scores, shrink, visible, masked, j * kKeys, a.c, a.window);
      };

      state.clear();
      ring.wait_full(at);
      wait_for_gemm_slot();
      start_scores(at.stage);
      pass_gemm_slot();
      wgmma_wait<0>();
      pin(flat(scores));
      weigh(begin);
      round_to_operand<S>(P, flat(scores));
#pragma unroll 1
      for (int j = begin + 1; j < blocks; ++j) {
        const int before = at.stage;  // stage of key block j - 1
        at.advance(kStages);
        ring.wait_full(at);
        wait_for_gemm_slot();
        start_scores(at.stage);
        start_output(before, (j - 1) % kSplitBlocks != 0 && (!kWindowed || j - 1 > begin));
        pass_gemm_slot();
        wgmma_wait<1>();
        pin(flat(scores));
        const bool new_split = j % kSplitBlocks == 0;
        float closed_maximum[1][2] = {{state.maximum[0][0], state.maximum[0][1]}};
        float closed_sum[1][2] = {{state.sum[0][0], state.sum[0][1]}};
        if (new_split) {
#pragma unroll
          for (int half = 0; half < 2; ++half) state.maximum[0][half] = -INFINITY, state.sum[0][half] = 0;
        }
        const bool grown = weigh(j);
        hold_back(state.sum[0][0] + state.sum[0][1], shared.base);
        wgmma_wait<0>();
        pin(flat(state.O)), pin(P);
        release(before);
        if (new_split) {
          SplitState<S, HS, 1>::close(closed_sum);
          earlier.merge(state.O, closed_maximum, closed_sum, a.c);
          earlier.keep(state.O);
        } else if (grown) {
          state.rescale(shrink);
        }
        round_to_operand<S>(P, flat(scores));
      }
      start_output(at.stage, (blocks - 1) % kSplitBlocks != 0 && (!kWindowed || blocks - 1 > begin));
      if (next_n < count) load_queries(next_n);
      wgmma_wait<0>();
      pin(flat(state.O)), pin(P);
      release(at.stage);
      at.advance(kStages);
      state.close();
      earlier.merge(state.O, state.maximum, state.sum, a.c);
#pragma unroll
      for (int half = 0; half < 2; ++half) state.sum[0][half] = earlier.sum[0][half];
      state.store(a, rows);
    } else if (next_n < count) {
      load_queries(next_n);
    }
    skip_blocks(kWindowed && blocks == 0 ? tile_begin : blocks, tile_blocks);
  }
}

#else

// The sums of the merged earlier splits of a warp's 16 rows: its first `InRegisters` mma tiles in registers, the others
// in shared memory. Before the first split they are zeros, which its sums replace: their factors are then 0 and 1.
template <int HS, int InRegisters>
struct Totals {
  static constexpr int kTiles = HS / 8, kShared = kTiles - InRegisters;
  float maximum[2], sum[2];
  MergeFactors factors[2];
  bool none;
  float at[InRegisters > 0 ? InRegisters : 1][4];
  float4* shared;  // of this lane; the next mma tile is kWarpSize further

  __device__ Totals(unsigned char* memory, int warp)
      : shared(reinterpret_cast<float4*>(memory) + warp * (kShared * 32) + threadIdx.x % kWarpSize) {}
  __device__ void clear() {
    none = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) maximum[half] = -INFINITY, sum[half] = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n < InRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at[n][i] = 0;
      } else {
        shared[(n - InRegisters) * kWarpSize] = make_float4(0, 0, 0, 0);
      }
    }
  }
  // Merges a split's maximum and closed sum; its weighted values are then added by add() or finish().
  __device__ void merge(const float (&added_maximum)[2], const float (&added_sum)[2], float c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = fmaxf(maximum[half], added_maximum[half]);
      const MergeFactors merging = {merge_factor(maximum[half], largest, c),
                                    merge_factor(added_maximum[half], largest, c)};
      factors[half] = none ? MergeFactors{0, 1} : merging;
      maximum[half] = largest;
      sum[half] = merged(factors[half], sum[half], added_sum[half]);
    }
    none = false;
  }
  __device__ void add(const Accumulators<1, kTiles>& O) {
    if constexpr (kVote) {
      // exp2(0) is 1 exactly
      if (!__any_sync(~0u, factors[0].before != 1 || factors[1].before != 1)) {
        for_tiles([&](int n, int i, float before) { return __fmaf_rn(O.at[0][n][i], factors[i / 2].added, before); });
        return;
      }
    }
    for_tiles([&](int n, int i, float before) { return merged(factors[i / 2], before, O.at[0][n][i]); });
  }
  // Adds these sums to those of the last split instead.
  __device__ void finish(Accumulators<1, kTiles>& O) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 loaded = n < InRegisters ? make_float4(0, 0, 0, 0) : shared[(n - InRegisters) * kWarpSize];
      const float before[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        O.at[0][n][i] =
            merged(factors[i / 2], n < InRegisters ? at[n < InRegisters ? n : 0][i] : before[i], O.at[0][n][i]);
    }
  }

 private:
  template <typename Sum>
  __device__ void for_tiles(const Sum& sum_of) {
    float4 loaded[kShared > 0 ? kShared : 1];
#pragma unroll
    for (int n = 0; n < kShared; ++n) loaded[n] = shared[n * kWarpSize];
#pragma unroll
    for (int n = 0; n < InRegisters; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at[n][i] = sum_of(n, i, at[n][i]);
    }
#pragma unroll
    for (int n = 0; n < kShared; ++n) {
      const int m = InRegisters + n;
      shared[n * kWarpSize] = make_float4(sum_of(m, 0, loaded[n].x), sum_of(m, 1, loaded[n].y),
                                          sum_of(m, 2, loaded[n].z), sum_of(m, 3, loaded[n].w));
    }
  }
};

template <typename Tiling, typename S = typename Tiling::Element>
__device__ void consume(const Arguments<S>& a, const PagedWorkUnit* tiles, int count,
                        const SharedMemory<Tiling>& shared, int consumer) {
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kSplitBlocks = kSplit / kKeys, kStages = Tiling::kStages;
  constexpr int kQuerySteps = Tiling::kQuerySteps;
  constexpr bool kWindowed = Tiling::kWindowed;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
  const int gemm_slot = 1 + consumer, next_gemm_slot = 1 + (consumer + 1) % kConsumers;  // named barriers
  const int own_barrier = 1 + kConsumers + consumer;
  const RingBarriers ring = shared.ring();
  RingPosition at;  // position of key block j
  Accumulators<1, kKeys / 8> scores;
  unsigned P[kKeys / 4];
  RegisterOperand<S, HS, 1> Q;  // its first kQuerySteps, until put_queries() all
  SplitState<S, HS, 1> state;
  Totals<HS, Tiling::kTotalTiles> totals(shared.sums(), consumer * kWarps + warp);

  const auto wait_for_gemm_slot = [&] { named_barrier_wait(gemm_slot, kConsumers * kWarpgroupSize); };
  const auto pass_gemm_slot = [&] { named_barrier_arrive(next_gemm_slot, kConsumers * kWarpgroupSize); };
  const auto start_scores = [&](int stage) {  // S = Q K^T
    const auto keys = shared.k(stage).k_major();
    [[maybe_unused]] const auto queries = shared.q(consumer).k_major();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HS / 16; ++k) {
      if (k < kQuerySteps) {
        const unsigned(&q)[4] = Q.at[0][k].word;
        wgmma_async<S>(flat(scores), q[0], q[1], q[2], q[3], keys.step(k), k > 0);
      } else {
        wgmma_async<S>(flat(scores), queries.step(k), keys.step(k), k > 0);
      }
    }
    wgmma_commit();
  };
  const auto start_output = [&](int stage, bool accumulate) {  // O += P V
    wgmma_fence();
    gemm_add_async(flat(state.O), P, shared.v(stage).mn_major(), accumulate);
    wgmma_commit();
  };
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(ring.empty(stage));
  };

  const auto rows_of_tile = [&](int n) { return QueryRows<S>(a, tiles[n / a.NKV], n % a.NKV, kConsumers * kRows); };
  const auto load_queries = [&](int n) {
    const QueryRows<S> rows = rows_of_tile(n).part(consumer * kRows + warp * 16, 16);
    Q.load([&](int row) { return rows.query(a, row); });
  };
  // Those of the steps from kQuerySteps on to shared memory.
  const auto put_queries = [&] {
    if constexpr (Tiling::kSharedQueries) {
      const auto tile = shared.q(consumer);
      const unsigned offset = tile.lane_offset(warp * 16);
      named_barrier_wait(own_barrier, kWarpgroupSize);  // no warp's GEMM reads the previous queries any more
#pragma unroll
      for (int k = kQuerySteps; k < HS / 16; ++k) {
        const unsigned(&q)[4] = Q.at[0][k].word;
        store_matrices(tile.columns_at(offset, k), q[0], q[1], q[2], q[3]);
      }
      fence_async_proxy_shared();
      named_barrier_wait(own_barrier, kWarpgroupSize);
    }
  };
  if (consumer == kConsumers - 1) pass_gemm_slot();
  if (tile_index(0) < count) load_queries(tile_index(0)), put_queries();
  for (int i = 0; tile_index(i) < count; ++i) {
    const int n = tile_index(i), next_n = tile_index(i + 1);
    const QueryRows<S> of_tile = rows_of_tile(n);
    const QueryRows<S> of_group = of_tile.part(consumer * kRows, kRows), rows = of_group.part(warp * 16, 16);
    const int tile_blocks = static_cast<int>(ceil_div(of_tile.end(), kKeys));
    const int blocks = static_cast<int>(ceil_div(of_group.end(), kKeys));
    // The first key blocks that the tile's and the consumer's rows see.
    const int tile_begin = kWindowed ? of_tile.first_visible(0, a.window) / kKeys : 0;
    const int begin = kWindowed && blocks > 0 ? of_group.first_visible(0, a.window) / kKeys : tile_begin;
    // Key blocks that only the other consumer's rows see.
    const auto skip_blocks = [&](int from, int to) {
      for (int j = from; j < to; ++j, at.advance(kStages)) {
        wait_for_gemm_slot();
        pass_gemm_slot();
        ring.wait_full(at);
        release(at.stage);
      }
    };
    if constexpr (kWindowed) skip_blocks(tile_begin, begin);
    if (blocks > 0) {
      const int unmasked_end = rows.count > 0 ? rows.visible(0) : 0;
      const int unmasked_begin = kWindowed && rows.count > 0 ? rows.first_visible(rows.count - 1, a.window) : 0;
      int visible[1][2];
      visible_positions(visible, rows);
      float shrink[1][2];
      const auto weigh = [&](int j) {
        const bool masked = (j + 1) * kKeys > unmasked_end || (kWindowed && j * kKeys < unmasked_begin);
        return state.template weigh<2, kWindowed>(scores, shrink, visible, masked, j * kKeys, a.c, a.window);
      };
      // Whether P V of block j is the first of its split, and whether a split before it is not merged yet (ORDER 2).
      const auto first_of_split = [&](int j) { return j % kSplitBlocks == 0 || (kWindowed && j == begin); };
      const auto to_merge = [&](int j) { return kOrder == 2 && j % kSplitBlocks == 0 && j > begin; };
      float closed_maximum[1][2], closed_sum[1][2];
      const auto close_split = [&] {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          closed_maximum[0][half] = state.maximum[0][half], closed_sum[0][half] = state.sum[0][half];
          state.maximum[0][half] = -INFINITY, state.sum[0][half] = 0;
        }
      };
      const auto merge_split = [&] {
        SplitState<S, HS, 1>::close(closed_sum);
        totals.merge(closed_maximum[0], closed_sum[0], a.c);
        totals.add(state.O);
      };

      forget(flat(scores)), forget(flat(state.O));  // the first GEMMs overwrite them
#pragma unroll
      for (int half = 0; half < 2; ++half) state.maximum[0][half] = -INFINITY, state.sum[0][half] = 0;
      totals.clear();
      ring.wait_full(at);
      wait_for_gemm_slot();
      start_scores(at.stage);
      pass_gemm_slot();
      wgmma_wait<0>();
      pin(flat(scores));
      weigh(begin);
      round_to_operand<S>(P, flat(scores));
#pragma unroll 1
      for (int j = begin + 1; j < blocks; ++j) {
        const int before = at.stage;  // stage of key block j - 1
        at.advance(kStages);
        const bool new_split = j % kSplitBlocks == 0;
        ring.wait_full(at);
        wait_for_gemm_slot();
        if (kOrder == 1 && new_split) {
          start_output(before, !first_of_split(j - 1));
          start_scores(at.stage);
          pass_gemm_slot();
          close_split();
          SplitState<S, HS, 1>::close(closed_sum);
          totals.merge(closed_maximum[0], closed_sum[0], a.c);
          wgmma_wait<1>();
          pin(flat(state.O)), pin(P);
          release(before);
          totals.add(state.O);
          ring.wait_full(at);  // again: the branch keeps the assembler from moving the merge behind the wait for scores
          wgmma_wait<0>();
          pin(flat(scores));
          weigh(j);
        } else {
          start_scores(at.stage);
          if (kOrder == 2 && kEarly) pass_gemm_slot();
          if (to_merge(j - 1)) merge_split();
          start_output(before, !first_of_split(j - 1));
          if (!(kOrder == 2 && kEarly)) pass_gemm_slot();
          wgmma_wait<1>();
          pin(flat(scores));
          if (kOrder != 1 && new_split) close_split();
          const bool grown = weigh(j);
          hold_back(state.sum[0][0] + state.sum[0][1], shared.base);
          wgmma_wait<0>();
          pin(flat(state.O)), pin(P);
          release(before);
          if (kOrder != 1 && new_split) {
            if constexpr (kOrder == 0) merge_split();
          } else if (grown) {
            state.rescale(shrink);
          }
        }
        round_to_operand<S>(P, flat(scores));
      }
      if (to_merge(blocks - 1)) merge_split();
      start_output(at.stage, !first_of_split(blocks - 1));
      if (next_n < count) load_queries(next_n);
      wgmma_wait<0>();
      pin(flat(state.O)), pin(P);
      release(at.stage);
      at.advance(kStages);
      state.close();
      totals.merge(state.maximum[0], state.sum[0], a.c);
      totals.finish(state.O);
#pragma unroll
      for (int half = 0; half < 2; ++half) state.sum[0][half] = totals.sum[half];
      state.store(a, rows);
    } else if (next_n < count) {
      load_queries(next_n);
    }
    if (next_n < count) put_queries();
    skip_blocks(kWindowed && blocks == 0 ? tile_begin : blocks, tile_blocks);
  }
}

#endif

#endif  // WEFT_WGMMA

template <typename Tiling, typename S>
__global__ void __launch_bounds__(kThreads, 1)
    paged_hopper_kernel([[maybe_unused]] const __grid_constant__ HopperArguments<S> p) {
#if WEFT_WGMMA
  const Arguments<S>& a = p.a;
  extern __shared__ unsigned char dynamic[];
  const SharedMemory<Tiling> shared(dynamic);
  const PagedWorkUnit* tiles = reinterpret_cast<const PagedWorkUnit*>(a.work + 1);
  const int count = a.work->tiles * a.NKV;
  // block 0 stays: some block must wait for the predecessors, as every kernel of a chain does
  if (blockIdx.x > 0 && static_cast<int>(blockIdx.x) >= count) return;
  if (threadIdx.x < Tiling::kStages) shared.ring().init(threadIdx.x, kProducers, kConsumers * kWarps);
  if (threadIdx.x < kWarpSize) fence_barrier_init();
  __syncthreads();
  wait_for_predecessors();
  launch_dependents();  // not earlier: see paged_attention() on what the successor may read
  // tells the compiler that it is uniform in a warp
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  if (warpgroup == 0) {
    decrease_registers<Tiling::kProducerRegisters>();
    produce(p, tiles, count, shared);
  } else {
    increase_registers<Tiling::kConsumerRegisters>();
    consume(a, tiles, count, shared, warpgroup - 1);
  }
#else
  __trap();
#endif
}

template <typename S, int HS, bool kWindowed>
void launch_for(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  using Tiling = HopperTiling<S, kWindowed, HS, 4, HS == 64 || HS == 128 ? 64 : 32>;
  constexpr const char* kName = "paged_attention (Hopper)";
  const auto kernel = paged_hopper_kernel<Tiling, S>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiling::kSharedBytes), kName);
  // The number of pages is not known here: an upper bound that exceeds any memory.
  constexpr std::int64_t kPages = std::int64_t{1} << 28;
  const PagedKv<S>& kv = io.kv;
  const auto map = [&](const S* pages) {
    const std::int64_t head = kv.page_size * kv.HS;
    return encode_head_map(HeadViewOf<const S>{pages, kv.NKV * head, kv.HS, head}, kPages, kv.page_size, kv.NKV, kv.HS,
                           static_cast<int>(kv.page_size), Tiling::kTileColumns);
  };
  const HopperArguments<S> arguments = {map(kv.keys), map(kv.values), arguments_of(io, 0)};
  launch_chained(kernel, dim3(static_cast<unsigned>(device.multiprocessors)), dim3(kThreads), Tiling::kSharedBytes,
                 stream, device.overlapping, kName, arguments);
}

}  // namespace

bool paged_hopper_computes(std::int64_t HS) {
  return HS <= 128 && hopper_multiprocessors() > 0;
}

template <typename S>
void paged_hopper_tiles(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  for_head_dimension(io.shape.HS, "paged attention", [&]<int HS>() {
    if constexpr (HS <= 128)
      for_window(io, [&]<bool kWindowed>() { launch_for<S, HS, kWindowed>(io, device, stream); });
  });
}

template void paged_hopper_tiles<bf16>(const PagedAttention<bf16>&, const LaunchDevice&, cudaStream_t);
template void paged_hopper_tiles<fp16>(const PagedAttention<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda
