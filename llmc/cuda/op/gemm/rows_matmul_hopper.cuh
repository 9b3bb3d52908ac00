// What the Hopper kernels of rows_matmul and rows_matmul_fp8 share: the order of sums, tensor maps, the stages of both
// operands and the sum over them. Which kernel is for what: rows_matmul_hopper.cu.
//
// Codes of fp8 travel in pairs, as 16-bit elements: maps, tiles and stages are those of 16 bits, and K counts pairs. A
// stage then has 128 values of k.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"
#include "llmc/cuda/op/gemm/rows_matmul.cuh"
#include "llmc/cuda/op/gemm/rows_matmul_fp8.cuh"

#if !WEFT_WGMMA
#pragma nv_diag_suppress 177  // "declared but never referenced": the kernels' bodies are compiled for sm_90a only
#endif

namespace weft::cuda::rows {

using namespace hopper;

constexpr int kWeightRows = 64, kDepth = 64;  // rows of a warpgroup's weight tile; values of k in a stage
constexpr int kMostSplits = 8;
constexpr int kWarps = kWarpgroupSize / kWarpSize;
constexpr int kSumsStride = kWeightRows + kSumsPadding;
constexpr int kAlignment = 1024;  // required for a tile in the 128-byte swizzle
// the most for a block: a multiprocessor has 228 KB and reserves 1 KB a block
constexpr int kMostSharedBytes = 227 << 10;
constexpr int block_shared_bytes(int blocks) {  // shared memory a block if `blocks` share a multiprocessor
  return kMostSharedBytes / blocks - (blocks - 1) * 512;
}

template <typename T>
using WeightTile = SwizzledTile<T, kWeightRows, kDepth>;

// The number of splits of K for a sum over `steps` stages. 1 if the tiles alone occupy 132 multiprocessors; otherwise
// the fewest with which blocks of 64 rows of the weight by one split would occupy them nearly one and a half times, but
// no split shorter than 256 values. (6 and 7 are left out: clusters of these sizes leave multiprocessors idle.) This
// defines the order of every sum: a change of it changes bits. Split s has the stages from split_begin(s) to
// split_begin(s + 1).
inline int split_count(std::int64_t weight_rows, std::int64_t steps) {
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

template <typename T, bool kOfCodes = false>
struct Arguments {
  using Element = T;                        // of the result and the bias
  static constexpr bool kCodes = kOfCodes;  // the operands are codes of fp8
  using Finish = std::conditional_t<kCodes, ScaledColumns<T>, Columns<T>>;

  CUtensorMap weight[2], x[2];  // [input]
  CUtensorMap out;              // tile_kernel, where copies_out()
  std::conditional_t<kCodes, ScaledOutput<T>, Output<T>> output;
  int first_steps, steps;  // stages of the first input, of both inputs
  int splits;              // splits of all stages
  int stages;              // split_kernel: stages of the ring
  bool x_is_older;
  int tile_pairs, row_tiles;  // tile_kernel: tiles of 256 rows of the weight, tiles of rows of x
  bool copies_out;            // tile_kernel
};

template <typename T>
constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// Boxes of 64 rows: coordinates (k, row, 0, 0), or with a gate (k, 0, 0, unit / 8).
template <typename T>
CUtensorMap weight_map(const T* weight, std::int64_t columns, std::int64_t rows, bool gated, std::uint32_t box) {
  const auto K = static_cast<std::uint64_t>(columns), OC = static_cast<std::uint64_t>(rows);
  const std::int64_t row = columns * static_cast<std::int64_t>(sizeof(T));
  if (gated)
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

// Stages of a sum; no stage holds both inputs.
template <typename T>
std::int64_t steps_of(const RowsMatmul<T>& io) {
  return ceil_div(io.K, kDepth) + ceil_div(io.K2, kDepth);
}
template <typename T>
int splits_of(const RowsMatmul<T>& io) {
  return split_count(weight_rows(io), steps_of(io));
}

template <bool kCodes, typename T>
Arguments<T, kCodes> arguments_without_scales(const RowsMatmul<T>& io, int box_rows, std::uint32_t weight_box) {
  Arguments<T, kCodes> arguments{};
  arguments.weight[0] = weight_map(io.weight, io.K, io.OC, gated(io.epilogue), weight_box);
  arguments.x[0] = x_map(io.x, io.K, io.rows, box_rows);
  if (io.K2 > 0) {
    arguments.weight[1] = weight_map(io.weight2, io.K2, io.OC, false, weight_box);
    arguments.x[1] = x_map(io.x2, io.K2, io.rows, box_rows);
  }
  static_cast<Output<T>&>(arguments.output) = Output<T>::of(io);
  arguments.first_steps = static_cast<int>(ceil_div(io.K, kDepth));
  arguments.steps = static_cast<int>(steps_of(io));
  arguments.splits = splits_of(io);
  arguments.x_is_older = io.x_is_older;
  return arguments;
}
template <typename T>
Arguments<T> arguments_of(const RowsMatmul<T>& io, int box_rows, std::uint32_t weight_box = kWeightRows) {
  return arguments_without_scales<false>(io, box_rows, weight_box);
}
template <typename T>
Arguments<T, true> arguments_of(const PairsMatmul<T>& io, int box_rows, std::uint32_t weight_box = kWeightRows) {
  Arguments<T, true> arguments = arguments_without_scales<true>(io, box_rows, weight_box);
  arguments.output.x_scales = io.x_scales;
  arguments.output.weight_scales = io.weight_scales;
  return arguments;
}
// The arguments of a launch.
template <typename Io>
using ArgumentsOf = decltype(arguments_of(std::declval<const Io&>(), 0));

// Both operands of a stage, as a warpgroup reads them: 64 rows of A, B::kRows columns of B.
template <typename A, typename B>
struct Operands {
  A a;
  B b;
};

#if WEFT_WGMMA

// The input that stage `step` belongs to, and its first value of k there.
struct Source {
  int input, k;
};
template <typename P>
__device__ inline Source source_of(const P& p, int step) {
  const int input = step >= p.first_steps ? 1 : 0;
  return {input, (step - input * p.first_steps) * kDepth};
}
// Copies one stage of weight tile `tile`: 64 rows, kDepth values of k.
template <typename P>
__device__ void load_weight(const P& p, unsigned shared, unsigned barrier, int step, int tile, L2 keep) {
  const bool gated = p.output.gated();
  const Source source = source_of(p, step);
  tensor_load(shared, &p.weight[source.input], barrier, source.k, gated ? 0 : tile * kWeightRows, 0,
              gated ? tile * (kWeightRows / 16) : 0, keep);
}

// d = a b (First) or d += a b over one stage: 32 bytes of k an instruction, in order. The same in all three kernels.
template <bool First, bool kCodes = false, typename A, typename B>
__device__ inline void multiply_stage(float (&d)[B::kRows / 2], const Operands<A, B>& stage) {
  const auto a = stage.a.k_major();
  const auto b = stage.b.k_major();
  if constexpr (First) forget(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < a.kSteps; ++i) {
    if constexpr (kCodes) {
      wgmma_async_fp8<Fp8Format::e4m3>(d, a.step(i), b.step(i), !First || i > 0);
    } else {
      wgmma_async<typename A::Element>(d, a.step(i), b.step(i), !First || i > 0);
    }
  }
  wgmma_commit();
}

// d = the sum over `steps` stages of the ring from `at` on. operands_at(stage) returns a stage's operands;
// release(stage) hands the stage back to the producer.
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

// The same with operands of codes: the tensor core keeps about 14 bits of a sum, so it sums one stage, 128 values of k,
// and the stages are added in fp32, in order. The columns may be summed in kPieces, one after the other, so that they
// share the registers of a stage.
template <int kPieces, int R, typename OperandsAt, typename Release>
__device__ inline void sum_stages_of_codes(float (&sum)[R], int steps, RingPosition& at, const RingBarriers& ring,
                                           int stages, const OperandsAt& operands_at, const Release& release) {
  constexpr int kColumns = 2 * R / kPieces;
  static_assert(R % kPieces == 0 && kColumns % 8 == 0);
  const auto next_piece = [&](float(&d)[kColumns / 2], int piece) {
    if (piece == 0) ring.wait_full(at);
    const auto stage = operands_at(at.stage);
    const auto columns = stage.b.template rows<kColumns>(piece * kColumns);
    multiply_stage<true, true>(d, Operands<decltype(stage.a), decltype(columns)>{stage.a, columns});
    wgmma_wait<0>();
    pin(d);
    if (piece + 1 < kPieces) return;
    release(at.stage);
    at.advance(stages);
  };
  int step = 0;
  if constexpr (kPieces == 1) {
    next_piece(sum, 0);
    step = 1;
  } else {
#pragma unroll
    for (float& value : sum) value = -0.0f;  // what is added to it stays as it is
  }
  for (; step < steps; ++step) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float d[kColumns / 2];
      next_piece(d, piece);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sum[piece * kColumns / 2 + i] += d[i];
    }
  }
}
template <bool kCodes, int kPieces = 1, int R, typename OperandsAt, typename Release>
__device__ inline void sum_split(float (&d)[R], int steps, RingPosition& at, const RingBarriers& ring, int stages,
                                 const OperandsAt& operands_at, const Release& release) {
  if constexpr (kCodes) {
    sum_stages_of_codes<kPieces>(d, steps, at, ring, stages, operands_at, release);
  } else {
    sum_stages(d, steps, at, ring, stages, operands_at, release);
  }
}

// Initialises the ring; called by all threads of the block. The producer initialises the barriers and fetches the first
// round of weights, which needs neither the other threads nor the preceding kernel. Then the block synchronises.
// load_weights(stage, step) and load_x(stage, step) fetch one stage.
template <typename P, typename LoadWeights>
__device__ inline void begin_ring(const P& p, const RingBarriers& ring, int stages, int steps, unsigned consumer_warps,
                                  bool producer, const LoadWeights& load_weights) {
  const int ahead = min(steps, stages);
  launch_dependents();
  if (producer) {
    for (int stage = 0; stage < stages; ++stage) ring.init(stage, 1, consumer_warps);
    fence_barrier_init();
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    prefetch_tensor_map(&p.x[0]);
    if (p.steps > p.first_steps) prefetch_tensor_map(&p.x[1]), prefetch_tensor_map(&p.weight[1]);
  }
  __syncthreads();
}
// Then the producer fetches x and the remaining stages.
template <typename P, typename LoadWeights, typename LoadX>
__device__ inline void produce(const P& p, const RingBarriers& ring, int stages, int steps,
                               const LoadWeights& load_weights, const LoadX& load_x) {
  const int ahead = min(steps, stages);
  if (!p.x_is_older) wait_for_predecessors();
  for (int i = 0; i < ahead; ++i) load_x(i, i);
  RingPosition at = RingPosition::at(ahead, stages);
  for (int step = ahead; step < steps; ++step) {
    ring.wait_empty(at);
    load_weights(at.stage, step);
    load_x(at.stage, step);
    at.advance(stages);
  }
}
// Both, in split_kernel and column_kernel.
template <typename P, typename LoadWeights, typename LoadX>
__device__ inline void fill_ring(const P& p, const RingBarriers& ring, int stages, int steps, unsigned consumer_warps,
                                 bool producer, const LoadWeights& load_weights, const LoadX& load_x) {
  begin_ring(p, ring, stages, steps, consumer_warps, producer, load_weights);
  if (producer) produce(p, ring, stages, steps, load_weights, load_x);
}

// The sum of four floats that each block of the cluster has at shared address `at`, in the order of the blocks.
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

// The end of kernels whose splits are the blocks of a cluster, called by all threads. Every block of the cluster has
// stored its split's sums, [N][kStride] for each of kGroups tiles side by side, at the same shared address `sums`. The
// blocks, of which this one is number `rank`, divide the rows from first_row to `rows` among them, add all blocks' sums
// of a row, and finish it. `count`: threads for a row of one of the tiles; `finishes`: whether the thread is among
// those of the first kThreads that make up whole rows.
template <int N, int kThreads, int kGroups = kThreads / kWarpgroupSize, int kStride = kSumsStride, typename Columns>
__device__ __forceinline__ void finish_splits(const Columns& columns, unsigned sums, bool finishes, int thread,
                                              int count, int splits, int rank, std::int64_t first_row,
                                              std::int64_t rows) {
  __syncwarp();  // reconverges the producer's warp
  if (splits > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  if (finishes) {
    const int all = count * kGroups, group = thread % all / count;
    const int shared_rows = kThreads / all * splits;  // rows that the cluster's threads finish at a time
    const int end = static_cast<int>(min(std::int64_t{N}, rows - first_row));
    for (int r = thread / all * splits + rank; r < end; r += shared_rows) {
      columns.finish(first_row + r,
                     [&](int i) { return sum_of_splits(sums + ((group * N + r) * kStride + i) * 4, splits); });
    }
  }
  __syncwarp();
  if (splits > 1) {  // no block may exit while others read its sums
    cluster_arrive();
    cluster_wait();
  }
}

#endif  // WEFT_WGMMA

// Io: RowsMatmul<T> or PairsMatmul<T>.
//
// For up to 64 rows, with several splits up to 256.
template <typename Io>
void launch_split_kernel(const Io& io, const LaunchDevice& device, cudaStream_t stream);
// For up to 128 rows, with `height` 80 up to 192; one split, one input. `height`: rows of the weight in a block, 80 or
// 224, or in 16 bits what best_height_of_one_round() says.
template <typename Io>
void launch_column_kernel(const Io& io, int height, const LaunchDevice& device, cudaStream_t stream);
// For 33 to 128 rows and several splits of 16 bits. `height`: 96 or 112.
template <typename T>
void launch_column_splits(const RowsMatmul<T>& io, int height, const LaunchDevice& device, cudaStream_t stream);
// How many clusters of `splits` blocks of the latter the current GPU has room for at once, each block on a
// multiprocessor of its own.
int resident_column_clusters(int splits);
// For any number of rows.
template <typename Io>
void launch_tile_kernel(const Io& io, const LaunchDevice& device, cudaStream_t stream);

// The height of column_kernel's tiles with which the busiest multiprocessor has the fewest rows of the weight; 0 if no
// height is better than tiles of 64 rows by more than a tenth.
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

// From 33 rows of x on, what a multiprocessor fetches takes as long as what memory gives. So where it has two or three tiles of
// 64 rows, and fetches x for each, one larger tile is better: the smallest height with which all tiles run at once; 0: no
// height, or tiles of 64 rows do, too.
inline int best_height_of_one_round(std::int64_t weight_rows) {
  constexpr std::int64_t kMultiprocessors = 132;
  if (ceil_div(weight_rows, kWeightRows) <= kMultiprocessors) return 0;
  for (const int height : {96, 128, 160, 192})
    if (ceil_div(weight_rows, height) <= kMultiprocessors) return height;
  return 0;
}

// The height of column_kernel's tiles with several splits; 0: tiles of 128 rows, split_kernel's. From 33 rows of x on a
// layer takes as long as one block fetches, `height` rows of the weight and all of x. So the smallest height is best
// with which no cluster waits for the end of another. (A cluster lies within one part of the GPU, whose multiprocessors
// it need not divide, so the GPU is asked.)
inline int best_height_of_splits(std::int64_t weight_rows, int splits) {
  const std::int64_t clusters = resident_column_clusters(splits);
  for (const int height : {96, 112})
    if (ceil_div(weight_rows, height) <= clusters) return height;
  return 0;
}

// Launches the kernel that is fastest for the sizes: the choice affects time only. Above 64 rows a layer with one split
// has enough tiles for tile_kernel, which reads x and weight fewer times. With several splits its tiles would occupy
// only a third of the multiprocessors. Codes keep tiles of 128 rows, with which they were faster.
template <typename Io>
void launch_best_kernel(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  const int splits = splits_of(io);
  const std::int64_t weight = weight_rows(io);
  const bool fetches_much = !ArgumentsOf<Io>::kCodes && io.rows > 32 && io.rows <= 128;
  if (splits == 1 && io.K2 == 0) {
    int height = best_height<80, 224>(weight);
    if (height == 0 && fetches_much) height = best_height_of_one_round(weight);
    const std::int64_t most_rows = height == 80 ? 192 : 128;  // the most rows of x for column_kernel
    if (height > 0 && io.rows <= most_rows) return launch_column_kernel(io, height, device, stream);
  }
  if constexpr (!ArgumentsOf<Io>::kCodes) {
    const int height = splits > 1 && fetches_much ? best_height_of_splits(weight, splits) : 0;
    if (height > 0) return launch_column_splits(io, height, device, stream);
  }
  if (io.rows <= (splits > 1 ? 256 : 64)) return launch_split_kernel(io, device, stream);
  launch_tile_kernel(io, device, stream);
}

}  // namespace weft::cuda::rows
