// The kernel of matmul_swiglu.h and matmul_swiglu_fp8.h: a GEMM a [M, K] b with SwiGLU, or its derivative, in its
// epilogue, for Hopper. A `Direction` says what the operands are and what the epilogue does.
//
// A tile of the result is 128 x 192. One thread copies its operands into a ring of four stages, each 64 elements of 16
// bits deep: 64 values of k in bf16, or 128 codes of fp8, which the copies and the layout in shared memory treat as 64
// pairs. Two warpgroups alternate: while one multiplies, the other rounds and writes the previous tile, so that the
// tensor cores need not wait for memory. The sums of a tile are two blocks of 64 rows, 192 registers a thread. Two
// thread blocks form a cluster: their tiles lie one below the other and share the columns of b, of which each fetches
// half for both. In the GEMM of gate and up a tile has 96 columns of gate and the same 96 of up.
//
// What the epilogue reads and writes must be spread evenly: with more loads in flight, or with gate and up prefetched
// to L2, the copies of the operands arrive late (dev/performance/gemm.md, "Tried and rejected"). A sum is added in the
// order of k.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"

#if !WEFT_WGMMA
#pragma nv_diag_suppress 177  // "declared but never referenced": the kernel's body is compiled for sm_90a only
#endif

namespace weft::cuda::matmul_swiglu {

using namespace hopper;

constexpr int kRows = 128, kColumns = 192, kDepth = 64, kStages = 4, kCluster = 2;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroupSize;
// kAccumulators: registers a thread for a block of 64 rows
constexpr int kBlocks = kRows / 64, kAccumulators = kColumns / 2;
constexpr int kWarps = kWarpgroupSize / kWarpSize, kWarpRows = kRows / kWarps;

// Named barriers: 1 to 4 are the turns of the warpgroups.
constexpr int kEpilogueBarrier = 5;  // free for the epilogue of the warpgroup whose turn it is to write

using TileA = SwizzledTile<bf16, kRows, kDepth>;
// A tile in the layout of the weight. Major::k: a row of the weight is a column of b; Major::mn: it is a value of k.
template <Major kB>
using TileB =
    std::conditional_t<kB == Major::k, SwizzledTile<bf16, kColumns, kDepth>, SwizzledTile<bf16, kDepth, kColumns>>;
using WarpTile = SwizzledTile<bf16, kWarpRows, kColumns>;  // a warp's rows of a finished tile
using Eight = Elements<bf16, 8>;

template <typename Direction>
struct Storage {
  struct {
    TileA::Storage a;
    typename TileB<Direction::kB>::Storage b;
  } stages[kStages];
  WarpTile::Storage finished[kWarps];
  RingBarrierStorage<kStages> ring;
  typename Direction::Staging staging;
};
// alignof(): to align the storage.
template <typename Direction>
constexpr std::size_t kSharedBytes = alignof(Storage<Direction>) + sizeof(Storage<Direction>);

// A direction has
//   kB                       how the weight lies
//   Staging                  more shared memory for the epilogue of the warpgroup whose turn it is to write
//   kResultColumns           columns of the result that a tile covers
//   Maps, load_a()           the maps of a, and the copy of its part of a stage
//   weight_row()             where the weight lies along k: its first row that a block of the cluster fetches
//   multiply()               one wgmma
//   Tensors                  what the epilogue reads and writes
//   Epilogue                 a consumer thread's: scale() on the accumulators of a tile, finish() on the warp's rows of
//                            the tile in shared memory, end() after the last tile
template <typename Direction>
struct Arguments {
  typename Direction::Maps a;
  CUtensorMap b;
  std::int64_t M, F, K;         // K in elements of 16 bits
  int tile_rows, tile_columns;  // tiles of the result; a row of tiles has the two of a cluster
  typename Direction::Tensors tensors;
};

// The map of a matrix whose rows are `columns` elements of 16 bits, for boxes of kDepth of them in `box_rows` rows.
inline CUtensorMap encode_matrix(const void* data, CUtensorMapDataType type, std::int64_t rows, std::int64_t columns,
                                 int box_rows) {
  constexpr std::int64_t kElementBytes = 2;
  return encode_tensor_map(data, type, {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)},
                           {columns * kElementBytes}, {kDepth, static_cast<std::uint32_t>(box_rows)});
}

// weight_row() for the GEMM of gate and up: gate by the first block, up by the second.
__device__ inline int gate_or_up_row(int column, int rank, int F) {
  return column + rank * F;
}

// The order of tiles: patches of kHeight rows of tiles, column by column, so that the tiles that are computed at the
// same time read as few different rows of a as columns of b.
template <typename Direction>
__device__ inline void tile_coordinates(const Arguments<Direction>& p, int tile, int& row, int& column) {
  constexpr int kHeight = 8;
  const int patch = kHeight * p.tile_columns, first = tile / patch * kHeight;
  const int height = min(kHeight, p.tile_rows - first), within = tile % patch;
  row = first + within % height;
  column = within / height;
}

// A warp's rows of a finished tile, rounded to bf16: rows 0 to 15 belong to the upper block of 64 rows, the others to
// the lower one.
struct Sums {
  unsigned char* data;

  __device__ Sums of_warp(int from, int to) const { return {data + (to - from) * WarpTile::kBytes}; }

  // 8 consecutive elements.
  __device__ Eight get(int row, int chunk) const {
    Eight value;
    value.load(reinterpret_cast<const bf16*>(data + WarpTile::offset(row, chunk)));
    return value;
  }
};

#if WEFT_WGMMA

// ---- the two roles ----------------------------------------------------------------------------------------------------
template <typename Direction>
struct SharedMemory {
  using Layout = Storage<Direction>;
  static constexpr int kStageBytes = sizeof(Layout::stages[0]);

  unsigned base;
  unsigned char* memory;  // the same address as a pointer

  __device__ explicit SharedMemory(unsigned char* dynamic) {
    const unsigned begin = shared_address(dynamic);
    base = (begin + unsigned{alignof(Layout) - 1}) & ~unsigned{alignof(Layout) - 1};
    memory = dynamic + (base - begin);
  }
  __device__ TileA a(RingPosition at) const { return {base + at.stage * kStageBytes}; }
  __device__ TileB<Direction::kB> b(RingPosition at) const { return {a(at).address + TileA::kBytes}; }
  __device__ Sums finished(int warp) const { return {memory + offsetof(Layout, finished) + warp * WarpTile::kBytes}; }
  __device__ typename Direction::Staging& staging() const {
    return *reinterpret_cast<typename Direction::Staging*>(memory + offsetof(Layout, staging));
  }
  __device__ RingBarriers ring() const { return {base + unsigned{offsetof(Layout, ring)}, kStages}; }
};

template <typename Direction>
__device__ void produce(const Arguments<Direction>& p, const SharedMemory<Direction>& shared) {
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = static_cast<int>(ceil_div(p.K, kDepth)), count = p.tile_rows * p.tile_columns;
  constexpr std::uint16_t kAll = (1u << kCluster) - 1;
  const RingBarriers ring = shared.ring();
  RingPosition at;
  for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < count; tile += clusters) {
    int tile_row, tile_column;
    tile_coordinates(p, tile, tile_row, tile_column);
    const int row = (tile_row * kCluster + rank) * kRows, column = tile_column * Direction::kResultColumns;
    for (int step = 0; step < steps; ++step) {
      const auto a = shared.a(at);
      const auto b = shared.b(at);
      const unsigned full = ring.full(at.stage);
      ring.wait_empty(at);
      mbarrier_arrive_expect(full, a.kBytes + b.kBytes);
      const int k = step * kDepth;
      Direction::load_a(a, p.a, full, k, row);
      if constexpr (Direction::kB == Major::k) {
        constexpr int kHalf = kColumns / kCluster;
        tensor_load_to_cluster(b.template rows<kHalf>(rank * kHalf).address, &p.b, full, k,
                               Direction::weight_row(column, rank, static_cast<int>(p.F)), kAll);
      } else {
        constexpr int kHalf = kDepth / kCluster;
#pragma unroll
        for (int i = 0; i < b.kColumnTiles; ++i) {
          tensor_load_to_cluster(b.column_tile(i).template rows<kHalf>(rank * kHalf).address, &p.b, full,
                                 column + b.kTileColumns * i, k + rank * kHalf, kAll);
        }
      }
      at.advance(kStages, 1);
    }
  }
}

template <typename Direction>
__device__ void consume(const Arguments<Direction>& p, const SharedMemory<Direction>& shared, int consumer) {
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = static_cast<int>(ceil_div(p.K, kDepth)), count = p.tile_rows * p.tile_columns;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize % kWarps;
  constexpr Major kB = Direction::kB;
  // The consumers take turns at computing and at writing: each passes the turn to the other by a named barrier.
  constexpr int kPair = kConsumers * kWarpgroupSize;
  const auto wait_to_compute = [&] { named_barrier_wait(1 + consumer, kPair); };
  const auto wait_to_write = [&] { named_barrier_wait(3 + consumer, kPair); };
  const auto pass_computing = [&] { named_barrier_arrive(2 - consumer, kPair); };
  const auto pass_writing = [&] { named_barrier_arrive(4 - consumer, kPair); };
  const RingBarriers ring = shared.ring();
  const auto release = [&](int stage) {  // in both blocks of the cluster, since both fill the stage
    if (lane < kCluster) cluster_mbarrier_arrive(ring.empty(stage), static_cast<unsigned>(lane));
  };
  const Sums sums = shared.finished(warp);
  const WarpTile warp_tile{shared_address(sums.data)};
  typename Direction::Epilogue epilogue(p.tensors);
  RingPosition at;
  int tile = static_cast<int>(blockIdx.x) / kCluster;
  if (consumer == 1) {
    pass_computing();
    pass_writing();
    tile += clusters;
    at.advance(kStages, steps);
  }
  for (; tile < count; tile += kConsumers * clusters) {
    int tile_row, tile_column;
    tile_coordinates(p, tile, tile_row, tile_column);
    const bool last = tile + clusters >= count;
    float d[kBlocks][kAccumulators];
    const auto multiply = [&]<bool First>() {  // d += a b of a stage
      ring.wait_full(at);
      const auto a = shared.a(at).k_major();
      const auto b = shared.b(at).template operand<kB>();
      if constexpr (First)
        for (auto& block : d) forget(block);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < a.kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) Direction::multiply(d[i], a.step(s, i * 64), b.step(s), !First || s > 0);
      }
      wgmma_commit();
    };
    wait_to_compute();
    multiply.template operator()<true>();
    for (int step = 1; step < steps; ++step) {
      const int previous = at.stage;
      at.advance(kStages, 1);
      multiply.template operator()<false>();
      wgmma_wait<1>();
      release(previous);
    }
    if (!last) pass_computing();
    wgmma_wait<0>();
    for (auto& block : d) pin(block);
    release(at.stage);
    at.advance(kStages, 1 + steps);  // the next tile's stages belong to the other consumer
    for (auto& block : d) epilogue.scale(block);
    wait_to_write();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) warp_tile.store(warp_tile.lane_offset(0), d[i], 16 * i);

    __syncwarp();
    const std::int64_t row = (static_cast<std::int64_t>(tile_row) * kCluster + rank) * kRows;
    epilogue.finish(p, sums, shared.staging(), row, warp,
                    static_cast<std::int64_t>(tile_column) * Direction::kResultColumns, lane);
    __syncwarp();
    if (!last) pass_writing();
  }
  epilogue.end();
}

#endif  // WEFT_WGMMA

template <typename Direction>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_swiglu_kernel([[maybe_unused]] const __grid_constant__ Arguments<Direction> arguments) {
#if WEFT_WGMMA
  extern __shared__ unsigned char dynamic[];
  const SharedMemory<Direction> shared(dynamic);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) shared.ring().init(stage, 1, kWarps * kCluster);
    fence_barrier_init();
  }
  cluster_barrier();
  // tells the compiler that it is uniform in a warp
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x == 0) produce<Direction>(arguments, shared);
  } else {
    increase_registers<240>();
    consume<Direction>(arguments, shared, warpgroup - 1);
  }
  cluster_barrier();  // neither block may exit while the other still writes or arrives in its shared memory
#else
  __trap();
#endif
}

// Fills in what follows from the sizes, and launches. There are rows: M > 0.
template <typename Direction>
void launch(Arguments<Direction> arguments, const char* name, cudaStream_t stream) {
  constexpr std::size_t kBytes = kSharedBytes<Direction>;
  const auto kernel = matmul_swiglu_kernel<Direction>;
  arguments.tile_rows = static_cast<int>(ceil_div(arguments.M, kRows * kCluster));
  arguments.tile_columns = static_cast<int>(ceil_div(arguments.F, Direction::kResultColumns));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)), name);
  const int clusters = std::min(hopper_multiprocessors() / kCluster, arguments.tile_rows * arguments.tile_columns);
  launch_clustered(kernel, dim3(static_cast<unsigned>(clusters * kCluster)), dim3(kThreads), kBytes, stream, kCluster,
                   name, arguments);
}

}  // namespace weft::cuda::matmul_swiglu
