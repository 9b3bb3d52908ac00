// A GEMM a [M, K] b with SwiGLU, or its derivative, fused into the epilogue, for Hopper.
//
// A tile of the result is 128 x 192. One thread copies its operands into a ring of four stages, each 64 values of k
// deep. Two warpgroups alternate: while one multiplies, the other rounds and writes the previous tile, so that the
// tensor cores need not wait for memory. The sums of a tile are two blocks of 64 rows, 192 registers a thread. Two
// thread blocks form a cluster: their tiles lie one below the other and share the columns of b, of which each fetches
// half for both. In the GEMM of gate and up a tile has 96 columns of gate and the same 96 of up.
//
// Bytes moved beside the operands, for elements of E bytes: forward writes 3 N F E, where the GEMM alone writes 2 and
// SwiGLU moves 3; backward reads and writes 4 N F E, where the GEMM writes 1 and SwiGLU moves 5. These accesses must be
// spread evenly: with more loads in flight, or with gate and up prefetched to L2, the copies of the operands arrive
// late (dev/performance/gemm.md, "Tried and rejected"). A sum is added in the order of k.

#include "llmc/cuda/op/matmul_swiglu.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"
#include "llmc/cuda/op/swiglu.cuh"

#if !WEFT_WGMMA
#pragma nv_diag_suppress 177  // "declared but never referenced": the kernel's body is compiled for sm_90a only
#endif

namespace weft::cuda {

namespace {

using namespace hopper;

constexpr int kRows = 128, kColumns = 192, kDepth = 64, kStages = 4, kCluster = 2;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroupSize;
// kAccumulators: registers a thread for a block of 64 rows
constexpr int kBlocks = kRows / 64, kAccumulators = kColumns / 2;
constexpr int kWarps = kWarpgroupSize / kWarpSize, kWarpRows = kRows / kWarps;

using TileA = SwizzledTile<bf16, kRows, kDepth>;
// A tile in the layout of the weight. Major::k: a row of the weight is a column of b; Major::mn: it is a value of k.
template <Major kB>
using TileB =
    std::conditional_t<kB == Major::k, SwizzledTile<bf16, kColumns, kDepth>, SwizzledTile<bf16, kDepth, kColumns>>;
using WarpTile = SwizzledTile<bf16, kWarpRows, kColumns>;  // a warp's rows of a finished tile

template <Major kB>
struct Storage {
  struct {
    TileA::Storage a;
    typename TileB<kB>::Storage b;
  } stages[kStages];
  WarpTile::Storage finished[kWarps];
  RingBarrierStorage<kStages> ring;
};
// alignof(): to align the storage.
template <Major kB>
constexpr std::size_t kSharedBytes = alignof(Storage<kB>) + sizeof(Storage<kB>);

struct Arguments {
  CUtensorMap a, b;
  std::int64_t M, F, K;
  int tile_rows, tile_columns;  // tiles of the result; a row of tiles has the two of a cluster
  bf16 *gate_up, *swiglu_out;
};

using Eight = Elements<bf16, 8>;

CUtensorMap encode_matrix(const bf16* data, std::int64_t rows, std::int64_t columns, int box_rows) {
  return encode_tensor_map(
      data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)},
      {columns * static_cast<std::int64_t>(sizeof(bf16))}, {kDepth, static_cast<std::uint32_t>(box_rows)});
}

// The order of tiles: patches of kHeight rows of tiles, column by column, so that the tiles that are computed at the
// same time read as few different rows of a as columns of b.
__device__ inline void tile_coordinates(const Arguments& p, int tile, int& row, int& column) {
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

  // 8 consecutive elements.
  __device__ Eight get(int row, int chunk) const {
    Eight value;
    value.load(reinterpret_cast<const bf16*>(data + WarpTile::offset(row, chunk)));
    return value;
  }
};

// The epilogues. They work on pieces of eight consecutive columns, kPieces in a row of a tile. load() reads what
// finish() needs beside the sums.
struct Forward {
  static constexpr Major kB = Major::k;
  static constexpr int kPieces = kColumns / 16;
  static CUtensorMap weight_map(const bf16* weight, std::int64_t C, std::int64_t F) {
    return encode_matrix(weight, 2 * F, C, kColumns / kCluster);
  }
  struct Input {};
  static __device__ void load(Input&, const Arguments&, std::int64_t, std::int64_t) {}
  static __device__ void finish(const Input&, const Sums& sums, int r, int piece, const Arguments& p, std::int64_t row,
                                std::int64_t column) {
    const Eight gate = sums.get(r, piece), up = sums.get(r, piece + kPieces);
    bf16* to = p.gate_up + row * 2 * p.F + column;
    gate.store(to);
    up.store(to + p.F);
    if (p.swiglu_out == nullptr) return;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = swiglu<bf16>(gate.get(i), up.get(i));
    Eight out;
    out.set(values);
    out.store(p.swiglu_out + row * p.F + column);
  }
};

struct Backward {
  static constexpr Major kB = Major::mn;
  static constexpr int kPieces = kColumns / 8;
  static CUtensorMap weight_map(const bf16* weight, std::int64_t C, std::int64_t F) {
    return encode_matrix(weight, C, F, kDepth / kCluster);
  }
  struct Input {
    Eight gate, up;
  };
  static __device__ void load(Input& input, const Arguments& p, std::int64_t row, std::int64_t column) {
    const bf16* from = p.gate_up + row * 2 * p.F + column;
    input.gate.load(from);
    input.up.load(from + p.F);
  }
  static __device__ void finish(const Input& input, const Sums& sums, int r, int piece, const Arguments& p,
                                std::int64_t row, std::int64_t column) {
    const Eight gradient = sums.get(r, piece);
    float dgate[8], dup[8], out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluGradient d = swiglu_gradient<bf16>(gradient.get(i), input.gate.get(i), input.up.get(i));
      dgate[i] = d.gate;
      dup[i] = d.up;
      out[i] = d.out;
    }
    bf16* to = p.gate_up + row * 2 * p.F + column;
    Eight result;
    result.set(dgate);
    result.store(to);
    result.set(dup);
    result.store(to + p.F);
    if (p.swiglu_out == nullptr) return;
    result.set(out);
    result.store(p.swiglu_out + row * p.F + column);
  }
};

#if WEFT_WGMMA

// Finishes all pieces of a warp's rows. Row 0 of `sums` is row row0 of the result, row 16 is row0 + 64. Inputs are
// loaded one batch ahead.
template <typename Direction>
__device__ void finish_rows(const Arguments& p, const Sums& sums, std::int64_t row0, std::int64_t column0, int lane) {
  constexpr int kPieces = Direction::kPieces, kAtOnce = 3, kBatches = kWarpRows * kPieces / kWarpSize / kAtOnce;
  static_assert(kBatches * kAtOnce * kWarpSize == kWarpRows * kPieces && kBatches % 2 == 0);
  using Inputs = typename Direction::Input[kAtOnce];
  const auto for_batch = [&](int batch, const auto& use) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = (batch * kAtOnce + j) * kWarpSize + lane, r = i / kPieces, piece = i % kPieces;
      use(j, r, piece, row0 + r / 16 * 64 + r % 16, column0 + 8 * piece);
    }
  };
  // Outside of the result loads the nearest row and column inside it: an unconditional load, so that no register must
  // keep its old value.
  const auto load = [&](int batch, Inputs& inputs) {
    for_batch(batch, [&](int j, int, int, std::int64_t row, std::int64_t column) {
      Direction::load(inputs[j], p, min(row, p.M - 1), min(column, p.F - 8));
    });
  };
  const auto finish = [&](int batch, const Inputs& inputs) {
    for_batch(batch, [&](int j, int r, int piece, std::int64_t row, std::int64_t column) {
      if (row < p.M && column < p.F) Direction::finish(inputs[j], sums, r, piece, p, row, column);
    });
  };
  Inputs even, odd;
  load(0, even);
#pragma unroll 1
  for (int batch = 0; batch < kBatches; batch += 2) {
    load(batch + 1, odd);
    finish(batch, even);
    if (batch + 2 < kBatches) load(batch + 2, even);
    finish(batch + 1, odd);
  }
}

// ---- the two roles ----------------------------------------------------------------------------------------------------
template <Major kB>
struct SharedMemory {
  using Layout = Storage<kB>;
  static constexpr int kStageBytes = sizeof(Layout::stages[0]);

  unsigned base;
  unsigned char* memory;  // the same address as a pointer

  __device__ explicit SharedMemory(unsigned char* dynamic) {
    const unsigned begin = shared_address(dynamic);
    base = (begin + unsigned{alignof(Layout) - 1}) & ~unsigned{alignof(Layout) - 1};
    memory = dynamic + (base - begin);
  }
  __device__ TileA a(RingPosition at) const { return {base + at.stage * kStageBytes}; }
  __device__ TileB<kB> b(RingPosition at) const { return {a(at).address + TileA::kBytes}; }
  __device__ Sums finished(int warp) const { return {memory + offsetof(Layout, finished) + warp * WarpTile::kBytes}; }
  __device__ RingBarriers ring() const { return {base + unsigned{offsetof(Layout, ring)}, kStages}; }
};

template <typename Direction>
__device__ void produce(const Arguments& p, const SharedMemory<Direction::kB>& shared) {
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = static_cast<int>(ceil_div(p.K, kDepth)), count = p.tile_rows * p.tile_columns;
  constexpr std::uint16_t kAll = (1u << kCluster) - 1;
  const RingBarriers ring = shared.ring();
  RingPosition at;
  for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < count; tile += clusters) {
    int tile_row, tile_column;
    tile_coordinates(p, tile, tile_row, tile_column);
    const int row = (tile_row * kCluster + rank) * kRows, column = tile_column * 8 * Direction::kPieces;
    for (int step = 0; step < steps; ++step) {
      const auto a = shared.a(at);
      const auto b = shared.b(at);
      const unsigned full = ring.full(at.stage);
      ring.wait_empty(at);
      mbarrier_arrive_expect(full, a.kBytes + b.kBytes);
      const int k = step * kDepth;
      tensor_load(a.address, &p.a, full, k, row);
      if constexpr (Direction::kB == Major::k) {  // gate by the first block, up by the second
        constexpr int kHalf = kColumns / kCluster;
        tensor_load_to_cluster(b.template rows<kHalf>(rank * kHalf).address, &p.b, full, k,
                               column + rank * static_cast<int>(p.F), kAll);
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
__device__ void consume(const Arguments& p, const SharedMemory<Direction::kB>& shared, int consumer) {
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
        for (int i = 0; i < kBlocks; ++i)
          wgmma_async<bf16, Major::k, kB>(d[i], a.step(s, i * 64), b.step(s), !First || s > 0);
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
    wait_to_write();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) warp_tile.store(warp_tile.lane_offset(0), d[i], 16 * i);

    __syncwarp();
    const std::int64_t row = (static_cast<std::int64_t>(tile_row) * kCluster + rank) * kRows + 16 * warp;
    finish_rows<Direction>(p, sums, row, static_cast<std::int64_t>(tile_column) * 8 * Direction::kPieces, lane);
    __syncwarp();
    if (!last) pass_writing();
  }
}

#endif  // WEFT_WGMMA

template <typename Direction>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_swiglu_kernel([[maybe_unused]] const __grid_constant__ Arguments arguments) {
#if WEFT_WGMMA
  extern __shared__ unsigned char dynamic[];
  const SharedMemory<Direction::kB> shared(dynamic);
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

template <typename Direction>
void launch(bf16* gate_up, bf16* swiglu_out, const bf16* a, const bf16* weight, std::int64_t N, std::int64_t C,
            std::int64_t F, cudaStream_t stream) {
  if (N == 0) return;
  constexpr std::int64_t kTileColumns = 8 * Direction::kPieces;
  constexpr std::size_t kBytes = kSharedBytes<Direction::kB>;
  const auto kernel = matmul_swiglu_kernel<Direction>;
  Arguments arguments;
  arguments.a = encode_matrix(a, N, C, kRows), arguments.b = Direction::weight_map(weight, C, F);
  arguments.M = N, arguments.F = F, arguments.K = C;
  arguments.gate_up = gate_up, arguments.swiglu_out = swiglu_out;
  arguments.tile_rows = static_cast<int>(ceil_div(N, kRows * kCluster));
  arguments.tile_columns = static_cast<int>(ceil_div(F, kTileColumns));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "matmul with SwiGLU: shared memory");
  const int clusters = std::min(hopper_multiprocessors() / kCluster, arguments.tile_rows * arguments.tile_columns);
  launch_clustered(kernel, dim3(static_cast<unsigned>(clusters * kCluster)), dim3(kThreads), kBytes, stream, kCluster,
                   "matmul with SwiGLU", arguments);
}

}  // namespace

bool matmul_swiglu_computes(std::int64_t C, std::int64_t F) {
  return C % 8 == 0 && F % 8 == 0 && hopper_multiprocessors() > 0;
}

void gate_up_swiglu(bf16* gate_up, bf16* swiglu_out, const bf16* x, const bf16* weight, std::int64_t N, std::int64_t C,
                    std::int64_t F, cudaStream_t stream) {
  launch<Forward>(gate_up, swiglu_out, x, weight, N, C, F, stream);
}

void down_input_grad_swiglu(bf16* gate_up, bf16* swiglu_out, const bf16* dout, const bf16* weight, std::int64_t N,
                            std::int64_t C, std::int64_t F, cudaStream_t stream) {
  launch<Backward>(gate_up, swiglu_out, dout, weight, N, C, F, stream);
}

}  // namespace weft::cuda
