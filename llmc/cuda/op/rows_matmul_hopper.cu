// rows_matmul() with wgmma, for Hopper and 16 bits.
//
// K is cut into splits (split_count(), a function of the weight's size): within a split one accumulator takes 16 values of k an
// instruction, in order; the splits' sums are added in order. Three kernels compute this, and an element is the same sum in all
// of them, so that the step's number of rows may choose. (wgmma adds the same whichever operand the weight is; the tests hold
// that together.)
//
//  - split_kernel, for steps that are bound by reading the weight. Rows of the weight are rows of a (M), rows of x are columns
//    of b (N), so that a step of a few rows wastes no tensor core work on rows that do not exist. The splits of a tile are
//    the blocks of a cluster, which meet in distributed shared memory: each leaves its sums in its own, and adds up and
//    finishes a share of the tile. Its ring keeps 48 to 88 KB of the weight in flight; with 64 rows of the weight two blocks
//    fit in a multiprocessor, so that the next kernel of the chain fetches weights before this one has ended.
//  - column_kernel, for the same steps where there is one split and its tiles of 64 rows would leave some multiprocessors
//    with twice as many as others. Rows of the weight are columns of b, so a tile may have 80 or 224 of them, and each
//    multiprocessor gets one.
//  - tile_kernel, for steps that are bound by the tensor cores. A block walks all splits of a tile and adds each to a total
//    in registers. Blocks stay, tile after tile; two of them form a cluster, have the same rows of x, and each fetches
//    half of those for both.
// All fetch their first round of weights before they wait for the kernel that writes x.
//
// With two inputs the stages of the second follow those of the first, each input in whole stages.
//
// With SwiGLU a tile of 16 n rows of the weight is n times 8 rows of gate and the 8 of up that belong to them, by a tensor map
// over [units / 8][gate, up][8][K]: in the 128-byte swizzle 8 rows are a pattern of their own.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"
#include "llmc/cuda/op/rows_matmul.cuh"

#if !WEFT_WGMMA
#pragma nv_diag_suppress 177  // without the kernels' bodies nobody uses what only they need
#endif

namespace weft::cuda::rows {

namespace {

using namespace hopper;

constexpr int kWeightRows = 64, kDepth = 64;  // of a warpgroup's tile and of a stage
constexpr int kMostSplits = 8;
constexpr int kWarps = kWarpgroupSize / kWarpSize;
constexpr int kSumsStride = kWeightRows + kSumsPadding;
constexpr int kAlignment = 1024;                // of a swizzled tile
constexpr int kMostSharedBytes = 227 << 10;     // of a block; a multiprocessor has 228 KB and keeps 1 KB a block
constexpr int block_shared_bytes(int blocks) {  // of one of so many blocks of a multiprocessor
  return kMostSharedBytes / blocks - (blocks - 1) * 512;
}

template <typename T>
using WeightTile = SwizzledTile<T, kWeightRows, kDepth>;

// Into how many splits K is cut, for a sum over `steps` stages: the fewest with which blocks of 64 rows of the weight and a
// split occupy 132 multiprocessors nearly one and a half times, but one where the tiles alone occupy them, and no split is
// shorter than 256 values. (Clusters of 6 and 7 leave multiprocessors empty.) The order of every sum follows from this: a
// change of it changes bits. Split s has the stages from split_begin(s) to split_begin(s + 1).
int split_count(std::int64_t weight_rows, std::int64_t steps) {
  constexpr std::int64_t kEnoughTiles = 128, kEnoughBlocks = 185, kFewestSteps = 4;
  const std::int64_t tiles = ceil_div(weight_rows, kWeightRows);
  if (tiles >= kEnoughTiles) return 1;
  const std::int64_t wanted = std::min(ceil_div(kEnoughBlocks, tiles), steps / kFewestSteps);
  if (wanted >= kMostSplits) return kMostSplits;
  return static_cast<int>(std::clamp<std::int64_t>(wanted, 1, 5));
}
__device__ inline int split_begin(int split, int steps, int splits) {
  return static_cast<int>(static_cast<std::int64_t>(split) * steps / splits);
}

template <typename T>
struct Arguments {
  CUtensorMap weight[2], x[2];  // of the inputs
  CUtensorMap out;              // tile_kernel, where copies_out()
  Output<T> output;
  int first_steps, steps;     // stages of the first input, of both
  int splits;                 // of all stages
  int stages;                 // split_kernel: of the ring
  bool x_is_older;            // split_kernel
  int tile_pairs, row_tiles;  // tile_kernel: of 256 rows of the weight, of rows of x
  bool copies_out;            // tile_kernel
};

template <typename T>
constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// Boxes of 64 rows: coordinates (k, row, 0, 0), or with SwiGLU (k, 0, 0, unit / 8).
template <typename T>
CUtensorMap weight_map(const T* weight, std::int64_t columns, std::int64_t rows, bool swiglu, std::uint32_t box) {
  const auto K = static_cast<std::uint64_t>(columns), OC = static_cast<std::uint64_t>(rows);
  const std::int64_t row = columns * static_cast<std::int64_t>(sizeof(T));
  if (swiglu)
    return encode_tensor_map(weight, kMapType<T>, {K, 8, 2, OC / 8}, {row, rows * row, 8 * row},
                             {kDepth, 8, 2, box / 16});
  return encode_tensor_map(weight, kMapType<T>, {K, OC, 1, 1}, {row, row, row}, {kDepth, box, 1, 1});
}
template <typename T>
CUtensorMap x_map(const T* x, std::int64_t columns, std::int64_t rows, int box_rows) {
  return encode_tensor_map(x, kMapType<T>, {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)},
                           {columns * static_cast<std::int64_t>(sizeof(T))},
                           {kDepth, static_cast<std::uint32_t>(box_rows)});
}

// Stages of a sum: each input begins with a stage of its own.
template <typename T>
std::int64_t steps_of(const RowsMatmul<T>& io) {
  return ceil_div(io.K, kDepth) + ceil_div(io.K2, kDepth);
}
template <typename T>
int splits_of(const RowsMatmul<T>& io) {
  return split_count(weight_rows(io), steps_of(io));
}

template <typename T>
Arguments<T> arguments_of(const RowsMatmul<T>& io, int box_rows, std::uint32_t weight_box = kWeightRows) {
  Arguments<T> arguments{};
  arguments.weight[0] = weight_map(io.weight, io.K, io.OC, io.epilogue == RowsEpilogue::swiglu, weight_box);
  arguments.x[0] = x_map(io.x, io.K, io.rows, box_rows);
  if (io.K2 > 0) {
    arguments.weight[1] = weight_map(io.weight2, io.K2, io.OC, false, weight_box);
    arguments.x[1] = x_map(io.x2, io.K2, io.rows, box_rows);
  }
  arguments.output = Output<T>::of(io);
  arguments.first_steps = static_cast<int>(ceil_div(io.K, kDepth));
  arguments.steps = static_cast<int>(steps_of(io));
  arguments.splits = splits_of(io);
  return arguments;
}

// Both operands of a stage, as a warpgroup reads them: 64 rows of a, B::kRows columns of b.
template <typename A, typename B>
struct Operands {
  A a;
  B b;
};

#if WEFT_WGMMA

// Which input stage `step` belongs to, and its first value of k there.
struct Source {
  int input, k;
};
template <typename T>
__device__ inline Source source_of(const Arguments<T>& p, int step) {
  const int input = step >= p.first_steps ? 1 : 0;
  return {input, (step - input * p.first_steps) * kDepth};
}
// The 64 rows of the weight of tile `tile`, values of k of one stage.
template <typename T>
__device__ void load_weight(const Arguments<T>& p, unsigned shared, unsigned barrier, int step, int tile, L2 keep) {
  const bool swiglu = p.output.swiglu();
  const Source source = source_of(p, step);
  tensor_load(shared, &p.weight[source.input], barrier, source.k, swiglu ? 0 : tile * kWeightRows, 0,
              swiglu ? tile * (kWeightRows / 16) : 0, keep);
}

// d = a b, or d += a b, of the stage at hand: 16 values of k an instruction, in order. The same in both kernels.
template <bool First, typename A, typename B>
__device__ inline void multiply_stage(float (&d)[B::kRows / 2], const Operands<A, B>& stage) {
  const auto a = stage.a.k_major();
  const auto b = stage.b.k_major();
  if constexpr (First) forget(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < a.kSteps; ++i) wgmma_async<typename A::Element>(d, a.step(i), b.step(i), !First || i > 0);
  wgmma_commit();
}

// d = the sum over `steps` stages of the ring from `at` on. operands_at(stage) says where they are, release(stage) gives the
// stage back.
template <int R, typename OperandsAt, typename Release>
__device__ inline void sum_stages(float (&d)[R], int steps, RingPosition& at, const RingBarriers& ring, int stages,
                                  const OperandsAt& operands_at, const Release& release) {
  const auto multiply = [&]<bool First>() {
    ring.wait_full(at);
    multiply_stage<First>(d, operands_at(at.stage));
  };
  multiply.template operator()<true>();
  for (int step = 1; step < steps; ++step) {
    const int previous = at.stage;
    at.advance(stages);
    multiply.template operator()<false>();
    wgmma_wait<1>();
    release(previous);
  }
  wgmma_wait<0>();
  pin(d);
  release(at.stage);
  at.advance(stages);
}

#endif  // WEFT_WGMMA

// ---- few rows ---------------------------------------------------------------------------------------------------------
// Threads of a block: kConsumers warpgroups of 64 rows of the weight each, and a warp that issues the copies.
template <typename T, int N, int kConsumers, int kBlocks>  // kBlocks: of a multiprocessor
struct SplitShape {
  using XTile = SwizzledTile<T, N, kDepth>;
  static constexpr int kThreads = kConsumers * kWarpgroupSize + kWarpSize;
  static constexpr int kStageBytes = kConsumers * WeightTile<T>::kBytes + XTile::kBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  static constexpr int kMostStages = (block_shared_bytes(kBlocks) - kAlignment) / (kStageBytes + kBarrierBytes);
  static constexpr int kSumsBytes = kConsumers * N * kSumsStride * 4;  // over the stages, when they have been used
  static_assert(kSumsBytes <= kMostStages * kStageBytes && kStageBytes % kAlignment == 0);
  static constexpr int bytes(int stages) { return kAlignment + stages * (kStageBytes + kBarrierBytes); }
};

#if WEFT_WGMMA

// What the blocks of a cluster have at the same address, added in order.
__device__ inline float4 sum_of_splits(unsigned at, int splits) {
  float4 parts[kMostSplits];
#pragma unroll
  for (int s = 0; s < kMostSplits; ++s)
    if (s < splits) parts[s] = cluster_load(cluster_address(at, static_cast<unsigned>(s)));
  float4 sum = parts[0];
#pragma unroll
  for (int s = 1; s < kMostSplits; ++s) {
    if (s < splits) sum.x += parts[s].x, sum.y += parts[s].y, sum.z += parts[s].z, sum.w += parts[s].w;
  }
  return sum;
}

#endif  // WEFT_WGMMA

template <typename T, int N, int kConsumers, int kBlocks>
__global__ void __launch_bounds__(SplitShape<T, N, kConsumers, kBlocks>::kThreads, kBlocks)
    split_kernel([[maybe_unused]] const __grid_constant__ Arguments<T> p) {
#if WEFT_WGMMA
  using Shape = SplitShape<T, N, kConsumers, kBlocks>;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), base = (begin + unsigned{kAlignment - 1}) & ~unsigned{kAlignment - 1};
  float* const sums = reinterpret_cast<float*>(dynamic + (base - begin));
  const RingBarriers ring(base + p.stages * Shape::kStageBytes, p.stages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int warp = __shfl_sync(~0u, thread / kWarpSize, 0);   // known to be the same in a warp
  const int split = static_cast<int>(blockIdx.x) % p.splits;  // and the rank in the cluster
  const int tile = static_cast<int>(blockIdx.x) / p.splits * kConsumers;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * N;
  const int first_step = split_begin(split, p.steps, p.splits);
  const int steps = split_begin(split + 1, p.steps, p.splits) - first_step;
  const bool consumer = warp < kConsumers * kWarps, producer = !consumer && lane == 0;
  const auto x_address = [&](int stage) {
    return base + stage * Shape::kStageBytes + kConsumers * WeightTile<T>::kBytes;
  };
  const auto load_weights = [&](int stage, int step) {
    mbarrier_arrive_expect(ring.full(stage), Shape::kStageBytes);
#pragma unroll
    for (int i = 0; i < kConsumers; ++i)
      load_weight(p, base + stage * Shape::kStageBytes + i * WeightTile<T>::kBytes, ring.full(stage), first_step + step,
                  tile + i, L2::evict_first);
  };
  const auto load_x = [&](int stage, int step) {
    const Source source = source_of(p, first_step + step);
    tensor_load(x_address(stage), &p.x[source.input], ring.full(stage), source.k, static_cast<int>(first_row));
  };
  const int ahead = min(steps, p.stages);
  let_successor_start();
  if (producer) {  // the first round of weights needs neither the other threads nor the kernel before
    for (int stage = 0; stage < p.stages; ++stage) ring.init(stage, 1, kConsumers * kWarps);
    fence_barrier_init();
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    prefetch_tensor_map(&p.x[0]);
    if (p.steps > p.first_steps) prefetch_tensor_map(&p.x[1]), prefetch_tensor_map(&p.weight[1]);
  }
  __syncthreads();
  if (producer) {
    if (!p.x_is_older) wait_for_predecessors();
    for (int i = 0; i < ahead; ++i) load_x(i, i);
    RingPosition at = RingPosition::at(ahead, p.stages);
    for (int step = ahead; step < steps; ++step) {
      ring.wait_empty(at);
      load_weights(at.stage, step);
      load_x(at.stage, step);
      at.advance(p.stages);
    }
  }
  const int count = Columns<T>::count(p.output, kWeightRows), all = count * kConsumers;
  const Columns<T> columns(p.output, static_cast<std::int64_t>(tile + thread % all / count) * kWeightRows,
                           thread % count);  // reads the bias, early
  if (consumer) {
    const int group = warp / kWarps;
    float d[N / 2];
    RingPosition at;
    sum_stages(
        d, steps, at, ring, p.stages,
        [&](int stage) {
          return Operands<WeightTile<T>, typename Shape::XTile>{
              {base + stage * Shape::kStageBytes + group * WeightTile<T>::kBytes}, {x_address(stage)}};
        },
        [&](int stage) {
          if (lane == 0) mbarrier_arrive(ring.empty(stage));
        });
    wait_for_predecessors();                  // they may still read what is written below
    named_barrier_wait(1, kConsumerThreads);  // nobody's wgmma reads the stages any more
    store_sums<N / 2>(sums + group * N * kSumsStride + warp % kWarps * 16, kSumsStride, d, lane);
  }
  __syncwarp();  // the producer's lanes meet again
  if (p.splits > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  if (consumer) {
    const int group = thread % all / count;
    const int shared_rows = kConsumerThreads / all * p.splits;  // that the cluster's threads take at a time
    const int end = static_cast<int>(min(std::int64_t{N}, p.output.rows - first_row));
    for (int r = thread / all * p.splits + split; r < end; r += shared_rows) {
      columns.finish(first_row + r,
                     [&](int i) { return sum_of_splits(base + ((group * N + r) * kSumsStride + i) * 4, p.splits); });
    }
  }
  __syncwarp();
  if (p.splits > 1) {  // nobody leaves while others read its sums
    cluster_arrive();
    cluster_wait();
  }
#else
  __trap();
#endif
}

template <typename T, int N, int kConsumers, int kBlocks>
void launch_splits(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  using Shape = SplitShape<T, N, kConsumers, kBlocks>;
  const auto kernel = split_kernel<T, N, kConsumers, kBlocks>;
  Arguments<T> arguments = arguments_of(io, N);
  arguments.stages = Shape::kMostStages;
  const int bytes = Shape::bytes(arguments.stages);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "rows_matmul: shared memory");
  const std::int64_t tiles = ceil_div(weight_rows(io), kConsumers * kWeightRows);
  arguments.x_is_older = io.x_is_older;
  const dim3 grid(static_cast<unsigned>(tiles * arguments.splits), static_cast<unsigned>(ceil_div(io.rows, N)));
  launch_chained_clusters(kernel, grid, dim3(Shape::kThreads), static_cast<std::size_t>(bytes), stream,
                          device.overlapping, arguments.splits, "rows_matmul", arguments);
}

// ---- few rows, one split ----------------------------------------------------------------------------------------------
// A block has H rows of the weight, as columns of b, and as a rule a multiprocessor for itself: with two in one, those that start
// early, beside the kernel before, lie two by two where there is room.
//
// kConsumers warpgroups of 64 rows of x each, or one of kRows where there are fewer: then a has rows of whatever follows in
// shared memory, which only its own rows of the result see.
template <typename T, int kRows, int H, int kConsumers, int kBlocks>
struct ColumnShape {
  static constexpr int kThreads = kConsumers * kWarpgroupSize + kWarpSize;
  using XTile = SwizzledTile<T, 64, kDepth>;
  using Weights = SwizzledTile<T, H, kDepth>;
  static constexpr int kXBytes = kRows * XTile::kRowBytes, kStageBytes = Weights::kBytes + kXBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  static constexpr int kBehind = kRows < 64 ? (64 - kRows) * XTile::kRowBytes : 0;  // that the last stage's a reads
  static constexpr int kStages = (block_shared_bytes(kBlocks) - kAlignment - kBehind) / (kStageBytes + kBarrierBytes);
  static constexpr int kBytes = kAlignment + kBehind + kStages * (kStageBytes + kBarrierBytes);
  static constexpr int kStride = H + kSumsPadding;
  static_assert(kRows * kStride * 4 <= kStages * kStageBytes && kStageBytes % kAlignment == 0 && H % 16 == 0);
  static_assert(kRows == kConsumers * 64 || (kConsumers == 1 && kRows < 64 && kRows % 16 == 0));
};

template <typename T, int kRows, int H, int kConsumers, int kBlocks>
__global__ void __launch_bounds__(ColumnShape<T, kRows, H, kConsumers, kBlocks>::kThreads, kBlocks)
    column_kernel([[maybe_unused]] const __grid_constant__ Arguments<T> p) {
#if WEFT_WGMMA
  using Shape = ColumnShape<T, kRows, H, kConsumers, kBlocks>;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), base = (begin + unsigned{kAlignment - 1}) & ~unsigned{kAlignment - 1};
  float* const sums = reinterpret_cast<float*>(dynamic + (base - begin));
  const RingBarriers ring(base + Shape::kStages * Shape::kStageBytes, Shape::kStages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int warp = __shfl_sync(~0u, thread / kWarpSize, 0);  // known to be the same in a warp
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * H;
  const bool consumer = warp < kConsumers * kWarps, producer = !consumer && lane == 0;
  const auto weights_at = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto x_at = [&](int stage) { return weights_at(stage) + Shape::Weights::kBytes; };
  const auto load_weights = [&](int stage, int step) {
    const bool swiglu = p.output.swiglu();
    mbarrier_arrive_expect(ring.full(stage), Shape::kStageBytes);
    tensor_load(weights_at(stage), &p.weight[0], ring.full(stage), step * kDepth, swiglu ? 0 : static_cast<int>(first),
                0, swiglu ? static_cast<int>(first / 16) : 0, L2::evict_first);
  };
  const auto load_x = [&](int stage, int step) {
    tensor_load(x_at(stage), &p.x[0], ring.full(stage), step * kDepth, 0);
  };
  const int ahead = min(p.steps, Shape::kStages);
  let_successor_start();
  if (producer) {  // the first round of weights needs neither the other threads nor the kernel before
    for (int stage = 0; stage < Shape::kStages; ++stage) ring.init(stage, 1, kConsumers * kWarps);
    fence_barrier_init();
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    prefetch_tensor_map(&p.x[0]);
  }
  __syncthreads();
  if (producer) {
    if (!p.x_is_older) wait_for_predecessors();
    for (int i = 0; i < ahead; ++i) load_x(i, i);
    RingPosition at = RingPosition::at(ahead, Shape::kStages);
    for (int step = ahead; step < p.steps; ++step) {
      ring.wait_empty(at);
      load_weights(at.stage, step);
      load_x(at.stage, step);
      at.advance(Shape::kStages);
    }
  }
  const int count = Columns<T>::count(p.output, H);
  const Columns<T> columns(p.output, first, thread % count);  // reads the bias, early
  if (consumer) {
    const int group = warp / kWarps;
    float d[H / 2];
    RingPosition at;
    sum_stages(
        d, p.steps, at, ring, Shape::kStages,
        [&](int stage) {
          return Operands<typename Shape::XTile, typename Shape::Weights>{{x_at(stage) + group * Shape::XTile::kBytes},
                                                                          {weights_at(stage)}};
        },
        [&](int stage) {
          if (lane == 0) mbarrier_arrive(ring.empty(stage));
        });
    wait_for_predecessors();                  // they may still read what is written below
    named_barrier_wait(1, kConsumerThreads);  // nobody's wgmma reads the stages any more
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + half * 8 + lane / 4;
      if (kRows < 64 && row >= kRows) continue;
#pragma unroll
      for (int j = 0; j < H / 8; ++j)
        *reinterpret_cast<float2*>(sums + row * Shape::kStride + 8 * j + lane % 4 * 2) = {d[4 * j + 2 * half],
                                                                                          d[4 * j + 2 * half + 1]};
    }
    named_barrier_wait(1, kConsumerThreads);
    const int rows_at_once = kConsumerThreads / count;
    if (thread < rows_at_once * count) {
      for (int r = thread / count; r < p.output.rows; r += rows_at_once)
        columns.finish(r, [&](int i) { return *reinterpret_cast<const float4*>(sums + r * Shape::kStride + i); });
    }
  }
#else
  __trap();
#endif
}

template <typename T, int kRows, int H, int kBlocks>
void launch_column_blocks(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  constexpr int kConsumers = kRows > 64 ? kRows / 64 : 1;
  using Shape = ColumnShape<T, kRows, H, kConsumers, kBlocks>;
  const auto kernel = column_kernel<T, kRows, H, kConsumers, kBlocks>;
  Arguments<T> arguments = arguments_of(io, kRows, H);
  arguments.x_is_older = io.x_is_older;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
        "rows_matmul: shared memory");
  launch_chained(kernel, dim3(static_cast<unsigned>(ceil_div(weight_rows(io), H))), dim3(Shape::kThreads),
                 Shape::kBytes, stream, device.overlapping, "rows_matmul", arguments);
}
template <typename T, int H>
void launch_columns(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  // Beside attention of few rows, which leaves room in many multiprocessors and a whole one in few.
  if (io.rows <= 8 && io.x_is_older) return launch_column_blocks<T, 16, H, 2>(io, device, stream);
  if (io.rows <= 16) return launch_column_blocks<T, 16, H, 1>(io, device, stream);
  if (io.rows <= 32) return launch_column_blocks<T, 32, H, 1>(io, device, stream);
  if (io.rows <= 64) return launch_column_blocks<T, 64, H, 1>(io, device, stream);
  launch_column_blocks<T, 128, H, 1>(io, device, stream);
}

// ---- many rows --------------------------------------------------------------------------------------------------------
constexpr int kTileConsumers = 2, kTileThreads = (1 + kTileConsumers) * kWarpgroupSize, kCluster = 2;
constexpr int kPairRows = kCluster * kTileConsumers * kWeightRows;  // of the weight, of a cluster
constexpr int kSumsRows = 32;                                       // of x, that wait for the epilogue at a time

template <typename T, int N>
struct TileShape {
  using XTile = SwizzledTile<T, N, kDepth>;
  static_assert(N % kSumsRows == 0);
  static constexpr int kStageBytes = kTileConsumers * WeightTile<T>::kBytes + XTile::kBytes;
  // What a consumer has for its results on their way to memory: sums, or values as copies take them.
  using OutTile = SwizzledTile<T, N / 2, kWeightRows>;
  static constexpr int kSumsBytes =
      (std::max(kSumsRows * kSumsStride * 4, OutTile::kBytes) + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kRest = kAlignment + kTileConsumers * kSumsBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  static constexpr int kStages = (kMostSharedBytes - kRest) / (kStageBytes + kBarrierBytes);
  static constexpr int kBytes = kRest + kStages * (kStageBytes + kBarrierBytes);
  static_assert(kStages >= 4 && kStageBytes % kAlignment == 0);
};

#if WEFT_WGMMA

// The order of tiles: patches of kPatch pairs of tiles of the weight, one tile of x after the other, so that the tiles that
// are computed at one time have few rows of the weight and of x.
constexpr int kPatch = 8;
template <typename T>
__device__ inline int pair_of(const Arguments<T>& p, int tile) {
  const int patch = kPatch * p.row_tiles, first = tile / patch * kPatch;
  return first + tile % patch % min(kPatch, p.tile_pairs - first);
}
template <typename T>
__device__ inline int row_tile_of(const Arguments<T>& p, int tile) {
  const int patch = kPatch * p.row_tiles, first = tile / patch * kPatch;
  return tile % patch / min(kPatch, p.tile_pairs - first);
}

template <typename T, int N>
struct TileMemory {
  using Shape = TileShape<T, N>;

  unsigned base;
  unsigned char* memory;  // the same as a pointer

  __device__ explicit TileMemory(unsigned char* dynamic) {
    const unsigned begin = shared_address(dynamic);
    base = (begin + unsigned{kAlignment - 1}) & ~unsigned{kAlignment - 1};
    memory = dynamic + (base - begin);
  }
  __device__ WeightTile<T> weight(int stage, int consumer) const {
    return {base + stage * Shape::kStageBytes + consumer * WeightTile<T>::kBytes};
  }
  __device__ typename Shape::XTile x(int stage) const { return {weight(stage, kTileConsumers).address}; }
  __device__ float* sums(int consumer) const {
    return reinterpret_cast<float*>(memory + Shape::kStages * Shape::kStageBytes + consumer * Shape::kSumsBytes);
  }
  __device__ typename Shape::OutTile out(int consumer) const {
    return {base + Shape::kStages * Shape::kStageBytes + consumer * Shape::kSumsBytes};
  }
  __device__ RingBarriers ring() const {
    return {base + Shape::kStages * Shape::kStageBytes + kTileConsumers * Shape::kSumsBytes, Shape::kStages};
  }
};

template <typename T, int N>
__device__ void produce_tiles(const Arguments<T>& p, const TileMemory<T, N>& shared) {
  using Shape = TileShape<T, N>;
  constexpr int kHalf = N / kCluster;
  constexpr std::uint16_t kAll = (1u << kCluster) - 1;
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int count = p.tile_pairs * p.row_tiles;
  const RingBarriers ring = shared.ring();
  const auto weight_tile = [&](int tile) { return (pair_of(p, tile) * kCluster + rank) * kTileConsumers; };
  const auto load_weights = [&](int stage, int step, int first_tile) {
    mbarrier_arrive_expect(ring.full(stage), Shape::kStageBytes);
#pragma unroll
    for (int i = 0; i < kTileConsumers; ++i)
      load_weight(p, shared.weight(stage, i).address, ring.full(stage), step, first_tile + i, L2::normal);
  };
  int tile = static_cast<int>(blockIdx.x) / kCluster;
  int ahead = min(p.steps, Shape::kStages);  // weights of the first round need not wait for the kernel before
  for (int i = 0; i < ahead; ++i) load_weights(i, i, weight_tile(tile));
  wait_for_predecessors();
  RingPosition at;
  for (; tile < count; tile += clusters) {
    const int first_tile = weight_tile(tile), row = row_tile_of(p, tile) * N + rank * kHalf;
    for (int step = 0; step < p.steps; ++step) {
      if (ahead > 0) {
        --ahead;
      } else {
        ring.wait_empty(at);
        load_weights(at.stage, step, first_tile);
      }
      const Source source = source_of(p, step);
      tensor_load_to_cluster(shared.x(at.stage).template rows<kHalf>(rank * kHalf).address, &p.x[source.input],
                             ring.full(at.stage), source.k, row, kAll);
      at.advance(Shape::kStages);
    }
  }
}

// Sums of a warpgroup's 64 rows of the weight, from `first` on, and N rows of x, from `row` on, to `out`: bias and GELU in
// registers, transposed on the way to shared memory, from there by tensor copies, which leave out what is outside.
template <typename T, int N>
__device__ void copy_out(const Arguments<T>& p, const typename TileShape<T, N>::OutTile& staging, int barrier,
                         std::int64_t first, int row, const float (&sum)[N / 2]) {
  using OutTile = typename TileShape<T, N>::OutTile;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize, lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const bool biased = p.output.bias != nullptr, gelu = p.output.epilogue == RowsEpilogue::gelu;
  float bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int64_t column = first + warp * 16 + i * 8 + lane / 4;
    bias[i] = biased && column < p.output.OC ? to_float(p.output.bias[column]) : 0.0f;
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (thread == 0) bulk_wait_read();
    named_barrier_wait(barrier, kWarpgroupSize);  // the copy before has been read
#pragma unroll
    for (int i = 0; i < OutTile::kRows / 16; ++i) {
      unsigned words[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {  // matrices of 8 rows of x, m / 2, and 8 of the weight, m % 2
        const int at = 4 * (part * (OutTile::kRows / 8) + 2 * i + m / 2) + 2 * (m % 2);
        float pair[2] = {sum[at], sum[at + 1]};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (biased) pair[k] += bias[m % 2];
          if (gelu) pair[k] = gelu_for<T>(pair[k]);
        }
        words[m] = pack<T>(pair[0], pair[1]);
      }
      const int r = 16 * i + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
      store_matrices_transposed(staging.address + OutTile::offset(r, chunk), words[0], words[1], words[2], words[3]);
    }
    fence_async_proxy_shared();
    named_barrier_wait(barrier, kWarpgroupSize);
    if (thread == 0) {
      tensor_store(&p.out, staging.address, static_cast<int>(first), row + part * OutTile::kRows, 0);
      bulk_commit();
    }
  }
}

template <typename T, int N, bool kSplits>
__device__ void consume_tiles(const Arguments<T>& p, const TileMemory<T, N>& shared, int consumer) {
  using Shape = TileShape<T, N>;
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int count = p.tile_pairs * p.row_tiles;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize, lane = thread % kWarpSize;
  const RingBarriers ring = shared.ring();
  const auto release = [&](int stage) {  // in both blocks, since both fill it
    if (lane < kCluster) cluster_mbarrier_arrive(ring.empty(stage), static_cast<unsigned>(lane));
  };
  const auto operands_at = [&](int stage) {
    return Operands<WeightTile<T>, typename Shape::XTile>{shared.weight(stage, consumer), shared.x(stage)};
  };
  float* const sums = shared.sums(consumer);
  const int fours = Columns<T>::count(p.output, kWeightRows);
  RingPosition at;
  wait_for_predecessors();  // they may still read what is written here
  for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < count; tile += clusters) {
    const int pair = pair_of(p, tile), row_tile = row_tile_of(p, tile);
    float d[N / 2];
    const auto finish = [&](const float(&total)[N / 2]) {
      const std::int64_t first =
          static_cast<std::int64_t>((pair * kCluster + rank) * kTileConsumers + consumer) * kWeightRows;
      if (p.copies_out) return copy_out<T, N>(p, shared.out(consumer), 1 + consumer, first, row_tile * N, total);
      const Columns<T> columns(p.output, first, thread % fours);
#pragma unroll
      for (int chunk = 0; chunk < N / kSumsRows; ++chunk) {
        const std::int64_t row = static_cast<std::int64_t>(row_tile) * N + chunk * kSumsRows;
        named_barrier_wait(1 + consumer, kWarpgroupSize);  // the chunk before has been read
        store_sums<kSumsRows / 2>(sums + thread / kWarpSize * 16, kSumsStride, total + chunk * (kSumsRows / 2), lane);
        named_barrier_wait(1 + consumer, kWarpgroupSize);
#pragma unroll 2
        for (int r = thread / fours; r < kSumsRows; r += kWarpgroupSize / fours) {
          columns.finish(row + r, [&](int i) { return *reinterpret_cast<const float4*>(sums + r * kSumsStride + i); });
        }
      }
    };
    if constexpr (kSplits) {
      float total[N / 2];
      for (int split = 0; split < p.splits; ++split) {
        const int steps = split_begin(split + 1, p.steps, p.splits) - split_begin(split, p.steps, p.splits);
        sum_stages(d, steps, at, ring, Shape::kStages, operands_at, release);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) total[i] = split == 0 ? d[i] : total[i] + d[i];
      }
      finish(total);
    } else {
      sum_stages(d, p.steps, at, ring, Shape::kStages, operands_at, release);
      finish(d);
    }
  }
  if (p.copies_out && thread == 0) bulk_wait();  // shared memory stays until all has been written
}

#endif  // WEFT_WGMMA

template <typename T, int N, bool kSplits>
__global__ void __launch_bounds__(kTileThreads, 1)
    tile_kernel([[maybe_unused]] const __grid_constant__ Arguments<T> p) {
#if WEFT_WGMMA
  using Shape = TileShape<T, N>;
  extern __shared__ unsigned char dynamic[];
  const TileMemory<T, N> shared(dynamic);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage)
      shared.ring().init(stage, 1, kTileConsumers * kWarps * kCluster);
    fence_barrier_init();
  }
  let_successor_start();
  cluster_barrier();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x == 0) produce_tiles(p, shared);
  } else {
    increase_registers<240>();
    consume_tiles<T, N, kSplits>(p, shared, warpgroup - 1);
  }
  cluster_barrier();  // nobody leaves while the other block writes into its memory or arrives there
#else
  __trap();
#endif
}

// Whether results go to memory by tensor copies, whose rows begin at multiples of 16 bytes.
template <typename T>
bool copies_out(const RowsMatmul<T>& io) {
  return (io.epilogue == RowsEpilogue::store || io.epilogue == RowsEpilogue::gelu) && io.OC % 8 == 0 &&
         aligned_to_16(io.out);
}

template <typename T, int N, bool kSplits>
void launch_tiles(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  const auto kernel = tile_kernel<T, N, kSplits>;
  constexpr int kBytes = TileShape<T, N>::kBytes;
  Arguments<T> arguments = arguments_of(io, N / kCluster);
  arguments.tile_pairs = static_cast<int>(ceil_div(weight_rows(io), kPairRows));
  arguments.row_tiles = static_cast<int>(ceil_div(io.rows, N));
  arguments.copies_out = copies_out(io);
  if (arguments.copies_out)
    arguments.out = encode_tensor_map(io.out, kMapType<T>,
                                      {static_cast<std::uint64_t>(io.OC), static_cast<std::uint64_t>(io.rows), 1},
                                      {io.OC * static_cast<std::int64_t>(sizeof(T)), 0}, {kWeightRows, N / 2, 1});
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "rows_matmul: shared memory");
  const int clusters = std::min(device.multiprocessors / kCluster, arguments.tile_pairs * arguments.row_tiles);
  launch_chained_clusters(kernel, dim3(static_cast<unsigned>(clusters * kCluster)), dim3(kTileThreads), kBytes, stream,
                          device.overlapping, kCluster, "rows_matmul", arguments);
}

// The width of tile_kernel's tiles for which the multiprocessors are done first: rounds of tiles, each of which takes its
// width and a constant for beginning and end. On equality the wider one, which reads less.
template <int... kWidths>
int best_width(std::int64_t rows, std::int64_t tile_pairs, int clusters) {
  constexpr std::int64_t kOverhead = 24;
  int best = 0;
  std::int64_t least = INT64_MAX;
  for (const int width : {kWidths...}) {
    const std::int64_t time = ceil_div(tile_pairs * ceil_div(rows, width), clusters) * (width + kOverhead);
    if (time <= least) best = width, least = time;
  }
  return best;
}

template <typename T>
void launch_best_tiles(const RowsMatmul<T>& io, int splits, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t pairs = ceil_div(weight_rows(io), kPairRows);
  const int clusters = device.multiprocessors / kCluster;
  if (splits > 1) {  // twice as many registers a column
    switch (best_width<128, 160, 192>(io.rows, pairs, clusters)) {
      case 128:
        return launch_tiles<T, 128, true>(io, device, stream);
      case 160:
        return launch_tiles<T, 160, true>(io, device, stream);
      default:
        return launch_tiles<T, 192, true>(io, device, stream);
    }
  }
  switch (best_width<96, 128, 192, 256>(io.rows, pairs, clusters)) {
    case 96:
      return launch_tiles<T, 96, false>(io, device, stream);
    case 128:
      return launch_tiles<T, 128, false>(io, device, stream);
    case 192:
      return launch_tiles<T, 192, false>(io, device, stream);
    default:
      return launch_tiles<T, 256, false>(io, device, stream);
  }
}

}  // namespace

template <typename T>
bool hopper_computes(const RowsMatmul<T>& io) {
  return (io.epilogue != RowsEpilogue::swiglu || io.OC % 8 == 0) && hopper_multiprocessors() > 0;
}

// The height of column_kernel's tiles for which the busiest multiprocessor has the fewest rows of the weight; 0 where tiles of 64
// rows are as good, up to a tenth.
template <int... kHeights>
int best_height(std::int64_t weight_rows) {
  constexpr std::int64_t kMultiprocessors = 132;
  const auto most_rows = [&](std::int64_t height) {
    return ceil_div(ceil_div(weight_rows, height), kMultiprocessors) * height;
  };
  int best = 0;
  std::int64_t least = most_rows(kWeightRows) * 9 / 10;
  for (const int height : {kHeights...}) {
    if (most_rows(height) < least) best = height, least = most_rows(height);
  }
  return best;
}

// Which kernel is a matter of time alone, and so is which of its shapes. Above 64 rows a block of split_kernel has 128 rows of
// the weight, and from 33 on where there are several splits, so that x is read half as often. With one split a layer has tiles
// enough for tile_kernel, which reads x and weight fewer times; with several its tiles would occupy a third of the multiprocessors.
template <typename T>
void hopper(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  const int splits = splits_of(io);
  if (splits == 1 && io.K2 == 0 && io.rows <= 128) {
    switch (best_height<80, 224>(weight_rows(io))) {
      case 80:
        return launch_columns<T, 80>(io, device, stream);
      case 224:
        return launch_columns<T, 224>(io, device, stream);
      default:
        break;
    }
  }
  if (io.rows <= 16) return launch_splits<T, 16, 1, 2>(io, device, stream);
  if (io.rows <= 32) return launch_splits<T, 32, 1, 2>(io, device, stream);
  if (splits == 1 && io.rows <= 48) return launch_splits<T, 48, 1, 2>(io, device, stream);
  if (splits == 1 && io.rows <= 64) return launch_splits<T, 64, 1, 2>(io, device, stream);
  if (splits > 1 && io.rows <= 48) return launch_splits<T, 48, 2, 1>(io, device, stream);
  if (splits > 1 && io.rows <= 64) return launch_splits<T, 64, 2, 1>(io, device, stream);
  if (splits > 1 && io.rows <= 96) return launch_splits<T, 96, 2, 1>(io, device, stream);
  if (splits > 1 && io.rows <= 128) return launch_splits<T, 128, 2, 1>(io, device, stream);
  if (splits > 1 && io.rows <= 192) return launch_splits<T, 192, 2, 1>(io, device, stream);
  if (splits > 1 && io.rows <= 256) return launch_splits<T, 256, 2, 1>(io, device, stream);
  launch_best_tiles(io, splits, device, stream);
}

#define WEFT_INSTANTIATE(T)                            \
  template bool hopper_computes(const RowsMatmul<T>&); \
  template void hopper(const RowsMatmul<T>&, const LaunchDevice&, cudaStream_t);
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda::rows
