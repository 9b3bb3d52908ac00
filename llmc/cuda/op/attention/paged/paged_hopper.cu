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
// A split is merged while the first Q K^T of the next split runs. The merged sums of weighted values stay in registers.

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

namespace weft::cuda {

using namespace paged;

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
  static_assert(paged_tile_rows(HS) == kConsumers * kRows && kSpan % kKeys == 0);
  using KeyTile = SwizzledTile<T, kKeys, HS, 2 * TileColumns>;
  // The producer's spare registers go to the consumers; together at most 64K. At heads of 128, O, the earlier splits'
  // sums and the queries are 160 registers, scores and weights 48 more: consumers get all that the producer can spare.
  // Smaller heads need no more than 224.
  static constexpr bool kWide = HS >= 128;
  static constexpr int kConsumerRegisters = kWide ? 240 : 224, kProducerRegisters = kWide ? 24 : 56;
  static_assert((kConsumers * kConsumerRegisters + kProducerRegisters) * kWarpgroupSize <= 64 * 1024);

  struct Storage {
    typename KeyTile::Storage k[kStages], v[kStages];
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

  unsigned base;

  __device__ explicit SharedMemory(unsigned char* dynamic) : base(shared_address(dynamic, alignof(Storage))) {}
  __device__ KeyTile k(int stage) const { return {base + unsigned{offsetof(Storage, k)} + stage * KeyTile::kBytes}; }
  __device__ KeyTile v(int stage) const { return {base + unsigned{offsetof(Storage, v)} + stage * KeyTile::kBytes}; }
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
    const int page = __shfl_sync(~0u, pages, (first + row) % kSpan / kPageUnit);
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
  constexpr int kUnroll = Tiling::kWide ? 1 : kEach;  // the addresses of more copies do not fit in 24 registers
#pragma unroll kUnroll
  for (int i = 0; i < kEach; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kWarpgroupSize, row = index / kChunks,
              chunk = index % kChunks;
    const int position = first + row;
    const int page = __shfl_sync(~0u, pages, position % kSpan / kPageUnit);
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
    const int first_span = begin / kSpan;
    int pages = span_pages<kWindowed>(a, table, first_span, end, begin);
    int next_pages = span_pages<kWindowed>(a, table, first_span + 1, end, begin);
    for (int first = first_block * Tiling::kKeys; first < end; first += Tiling::kKeys) {
      if (first > first_span * kSpan && first % kSpan == 0) {
        pages = next_pages;
        next_pages = span_pages<kWindowed>(a, table, first / kSpan + 1, end, begin);
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

// The merged earlier splits of a warp's 16 rows, with their sums of weighted values in registers. merge() needs only a
// split's maximum and sum, so it runs while the split's last P V is still in flight; add() or finish() follows.
template <int HS>
struct MergedSplits {
  float maximum[2], sum[2];
  MergeFactors factors[2];
  bool none;
  Accumulators<1, HS / 8> O;

  __device__ void clear() {
    none = true;
    O.clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) maximum[half] = -INFINITY, sum[half] = 0;
  }
  // The first split's sums replace the zeros: with a window a row may see nothing of it, and then its factors would be
  // NaN. They are selected, since a branch would keep the assembler from mixing the merge with what is around it.
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
  // Adds the split's sums.
  __device__ void add(const Accumulators<1, HS / 8>& added) {
#pragma unroll
    for (int n = 0; n < HS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) O.at[0][n][i] = merged(factors[i / 2], O.at[0][n][i], added.at[0][n][i]);
    }
  }
  // Adds these sums to the last split's instead.
  __device__ void finish(Accumulators<1, HS / 8>& last) const {
#pragma unroll
    for (int n = 0; n < HS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) last.at[0][n][i] = merged(factors[i / 2], O.at[0][n][i], last.at[0][n][i]);
    }
  }
};

template <typename Tiling, typename S = typename Tiling::Element>
__device__ void consume(const Arguments<S>& a, const PagedWorkUnit* tiles, int count,
                        const SharedMemory<Tiling>& shared, int consumer) {
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kStages = Tiling::kStages;
  constexpr bool kWindowed = Tiling::kWindowed;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
  const int gemm_slot = 1 + consumer, next_gemm_slot = 1 + (consumer + 1) % kConsumers;  // named barriers
  const RingBarriers ring = shared.ring();
  RingPosition at;  // position of key block j
  Accumulators<1, kKeys / 8> scores;
  unsigned P[kKeys / 4];
  RegisterOperand<S, HS, 1> Q;
  SplitState<S, HS, 1> state;
  MergedSplits<HS> earlier;

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
      float shrink[1][2];
      const auto weigh = [&](int j) {
        const bool masked = (j + 1) * kKeys > unmasked_end || (kWindowed && j * kKeys < unmasked_begin);
        return state.template weigh<2, kWindowed>(scores, shrink, visible, masked, j * kKeys, a.c, a.window);
      };
      int split_begin = begin, split_end;  // key blocks; the first one that the rows see, where that is later
      const auto begin_split = [&](int j) {
        const int length = paged_split_length(j * kKeys) / kKeys;
        split_begin = j;
        split_end = (j / length + 1) * length;
#pragma unroll
        for (int half = 0; half < 2; ++half) state.maximum[0][half] = -INFINITY, state.sum[0][half] = 0;
      };
      const auto merge_maxima = [&] {  // and sums of weights
        state.close();
        earlier.merge(state.maximum[0], state.sum[0], a.c);
      };

      forget(flat(scores)), forget(flat(state.O));  // the first GEMMs overwrite them
      begin_split(begin);
      earlier.clear();
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
        if (j == split_end) {  // of a new split
          // The last P V of the split before is issued first, so that it ends first, and O is merged while Q K^T runs.
          start_output(before, j - 1 != split_begin);
          start_scores(at.stage);
          pass_gemm_slot();
          merge_maxima();
          begin_split(j);
          wgmma_wait<1>();
          pin(flat(state.O)), pin(P);
          release(before);
          earlier.add(state.O);
          // Waits a second time for what is there: this branch keeps the assembler from moving the merge behind the
          // wait for the scores.
          ring.wait_full(at);
          wgmma_wait<0>();
          pin(flat(scores));
          weigh(j);  // O is overwritten, so it needs no rescaling
        } else {
          start_scores(at.stage);
          start_output(before, j - 1 != split_begin);
          pass_gemm_slot();
          wgmma_wait<1>();
          pin(flat(scores));
          const bool grown = weigh(j);
          hold_back(state.sum[0][0] + state.sum[0][1], shared.base);
          wgmma_wait<0>();
          pin(flat(state.O)), pin(P);
          release(before);
          if (grown) state.rescale(shrink);
        }
        round_to_operand<S>(P, flat(scores));
      }
      start_output(at.stage, blocks - 1 != split_begin);
      if (next_n < count) load_queries(next_n);
      wgmma_wait<0>();
      pin(flat(state.O)), pin(P);
      release(at.stage);
      at.advance(kStages);
      merge_maxima();
      earlier.finish(state.O);
#pragma unroll
      for (int half = 0; half < 2; ++half) state.sum[0][half] = earlier.sum[half];
      state.store(a, rows);
    } else if (next_n < count) {
      load_queries(next_n);
    }
    skip_blocks(kWindowed && blocks == 0 ? tile_begin : blocks, tile_blocks);
  }
}

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
