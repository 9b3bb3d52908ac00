// A product a [M, K] b with SwiGLU as its last step, for Hopper.
//
// A tile of the result is 128 x 192. One thread copies its operands into a ring of four stages, each 64 of K deep, and two
// warpgroups take turns: while one multiplies, the other rounds and writes the tile before, so that the tensor cores need
// not wait for memory. The sums of a tile are 192 registers a thread of its warpgroup, two blocks of 64 rows. Two blocks
// of threads form a cluster: their tiles lie one below the other and share the columns of b, of which each fetches half
// for both. In the product of gate and up a tile has 96 columns of gate and the same 96 of up.
//
// Bytes moved beside the operands, for E bytes an element: forward writes 3 N F E, where the product alone writes 2 and
// SwiGLU moves 3; backward reads and writes 4 N F E, where the product writes 1 and SwiGLU moves 5. It pays to move them
// evenly: with more loads in flight, or with gate and up fetched into L2 ahead, the copies of the operands come late
// (dev/performance/gemm.md, "Tried and rejected"). The order of a sum is that of k.

#include "llmc/cuda/op/matmul_swiglu.h"

#include <algorithm>
#include <type_traits>

#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/op/swiglu.cuh"

namespace weft::cuda {

namespace {

using namespace hopper;

constexpr int kRows = 128, kColumns = 192, kDepth = 64, kStages = 4, kCluster = 2;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroupSize;
constexpr unsigned kRowBytes = kDepth * sizeof(bf16);
constexpr unsigned kBytesA = kRows * kRowBytes, kStageBytes = kBytesA + kColumns * kRowBytes;
constexpr unsigned kTileBytes = kRows * kColumns * sizeof(bf16);  // a finished tile on its way to memory
constexpr std::size_t kSharedBytes = 1024 + kStages * kStageBytes + kTileBytes + kStages * 16;

struct Arguments {
  CUtensorMap a, b;
  std::int64_t M, F, K;
  int tile_rows, tile_columns;  // tiles of the result, in rows of a cluster's two
  bf16 *gate_up, *product;
};

#if WEFT_WGMMA

constexpr int kBlocks = kRows / 64, kAccumulators = kColumns / 2;  // of a block, a thread
constexpr unsigned kBlockBytes = 64 * kRowBytes;
constexpr int kWarps = kWarpgroupSize / kWarpSize, kWarpRows = kRows / kWarps;

using Eight = Elements<bf16, 8>;

// The order of tiles: patches of kHeight rows of tiles, columns by columns, so that what is in work at one time reads as
// few different rows of a as columns of b.
__device__ inline void place_of(const Arguments& p, int tile, int& row, int& column) {
  constexpr int kHeight = 8;
  const int patch = kHeight * p.tile_columns, first = tile / patch * kHeight;
  const int height = min(kHeight, p.tile_rows - first), within = tile % patch;
  row = first + within % height;
  column = within / height;
}

// ---- what becomes of the sums -----------------------------------------------------------------------------------------
// A warp's rows of a finished tile, rounded: rows 0 to 15 are of the upper block, the others of the lower. Chunks are 16
// bytes.
struct Sums {
  unsigned char* data;

  __device__ unsigned char* at(int row, int chunk) const {
    return data + chunk / 8 * (kWarpRows * 128) + row * 128 + swizzled_chunk<128>(row, chunk % 8) * 16;
  }
  __device__ Eight get(int row, int chunk) const {
    Eight value;
    value.load(reinterpret_cast<const bf16*>(at(row, chunk)));
    return value;
  }
  __device__ void set(const float (&d)[kBlocks][kAccumulators], int lane) const {
    const unsigned first = shared_address(at(lane % 16, lane / 16));
    const auto pair = [](float a, float b) {
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(a, b);
      return *reinterpret_cast<const unsigned*>(&rounded);
    };
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {  // chunks j and j + 1: an even j is added by xor
        const float* v = &d[i][4 * j];
        const unsigned to = (first ^ (j % 8 * 16)) + j / 8 * (kWarpRows * 128) + i * 16 * 128;
        store_matrices(to, pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7]));
      }
    }
  }
};

// Of eight neighbouring columns: kPieces of them are a row of a tile. `load` reads what `finish` needs besides the sums.
struct Forward {
  static constexpr Major kB = Major::k;
  static constexpr int kPieces = kColumns / 16;
  struct Input {};
  static __device__ void load(Input&, const Arguments&, std::int64_t, std::int64_t) {}
  static __device__ void finish(const Input&, const Sums& sums, int r, int piece, const Arguments& p, std::int64_t row,
                                std::int64_t column) {
    const Eight gate = sums.get(r, piece), up = sums.get(r, piece + kPieces);
    bf16* to = p.gate_up + row * 2 * p.F + column;
    gate.store(to);
    up.store(to + p.F);
    if (p.product == nullptr) return;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = swiglu<bf16>(gate.get(i), up.get(i));
    Eight product;
    product.set(values);
    product.store(p.product + row * p.F + column);
  }
};

struct Backward {
  static constexpr Major kB = Major::mn;
  static constexpr int kPieces = kColumns / 8;
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
    float dgate[8], dup[8], product[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluGradient d = swiglu_gradient<bf16>(gradient.get(i), input.gate.get(i), input.up.get(i));
      dgate[i] = d.gate;
      dup[i] = d.up;
      product[i] = d.out;
    }
    bf16* to = p.gate_up + row * 2 * p.F + column;
    Eight result;
    result.set(dgate);
    result.store(to);
    result.set(dup);
    result.store(to + p.F);
    if (p.product == nullptr) return;
    result.set(product);
    result.store(p.product + row * p.F + column);
  }
};

// All pieces of a warp's rows: row 0 of `sums` is row0 of the result, row 16 is row0 + 64. Inputs are loaded a batch ahead.
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
  // Outside of the result the nearest place in it, so that no register keeps an older value and with it its place.
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
struct Shared {
  unsigned stages;  // kStages of [128 rows of a | 192 columns of b]
  unsigned full, empty;
  unsigned char* tile;
};

struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ void advance(int steps = 1) {
    stage += steps;
    parity ^= static_cast<unsigned>(stage / kStages) & 1;
    stage %= kStages;
  }
};

template <typename Direction>
__device__ void produce(const Arguments& p, const Shared& shared) {
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = static_cast<int>(ceil_div(p.K, kDepth)), count = p.tile_rows * p.tile_columns;
  constexpr std::uint16_t kAll = (1u << kCluster) - 1;
  Ring ring;
  for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < count; tile += clusters) {
    int tile_row, tile_column;
    place_of(p, tile, tile_row, tile_column);
    const int row = (tile_row * kCluster + rank) * kRows, column = tile_column * 8 * Direction::kPieces;
    for (int step = 0; step < steps; ++step) {
      const unsigned a = shared.stages + ring.stage * kStageBytes, b = a + kBytesA, full = shared.full + 8 * ring.stage;
      mbarrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      mbarrier_arrive_expect(full, kStageBytes);
      const int k = step * kDepth;
      tensor_load(a, &p.a, full, k, row);
      if constexpr (Direction::kB == Major::k) {  // gate by the first block, up by the second
        constexpr int kHalf = kColumns / kCluster;
        tensor_load_to_cluster(b + rank * kHalf * kRowBytes, &p.b, full, k, column + rank * static_cast<int>(p.F),
                               kAll);
      } else {
        constexpr int kPart = kDepth / kCluster;
#pragma unroll
        for (int i = 0; i < kColumns / 64; ++i) {
          tensor_load_to_cluster(b + i * kBlockBytes + rank * kPart * kRowBytes, &p.b, full, column + 64 * i,
                                 k + rank * kPart, kAll);
        }
      }
      ring.advance();
    }
  }
}

template <typename Direction>
__device__ void consume(const Arguments& p, const Shared& shared, int consumer) {
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = static_cast<int>(ceil_div(p.K, kDepth)), count = p.tile_rows * p.tile_columns;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize % kWarps;
  constexpr Major kB = Direction::kB;
  constexpr unsigned kStepA = 32, kStepB = kB == Major::k ? 32 : 16 * kRowBytes;
  // Whose turn it is to compute, and whose to write: the named barriers of a consumer are passed on by the other one.
  constexpr int kPair = kConsumers * kWarpgroupSize;
  const auto wait_to_compute = [&] { named_barrier_wait(1 + consumer, kPair); };
  const auto wait_to_write = [&] { named_barrier_wait(3 + consumer, kPair); };
  const auto pass_computing = [&] { named_barrier_arrive(2 - consumer, kPair); };
  const auto pass_writing = [&] { named_barrier_arrive(4 - consumer, kPair); };
  const auto release = [&](int stage) {  // in both blocks, since both fill it
    if (lane < kCluster) cluster_mbarrier_arrive(shared.empty + 8 * stage, static_cast<unsigned>(lane));
  };
  const Sums sums{shared.tile + warp * (kTileBytes / kWarps)};
  Ring ring;
  int tile = static_cast<int>(blockIdx.x) / kCluster;
  if (consumer == 1) {
    pass_computing();
    pass_writing();
    tile += clusters;
    ring.advance(steps);
  }
  for (; tile < count; tile += kConsumers * clusters) {
    int tile_row, tile_column;
    place_of(p, tile, tile_row, tile_column);
    const bool last = tile + clusters >= count;
    float d[kBlocks][kAccumulators];
    const auto multiply = [&](auto first) {
      const unsigned stage = shared.stages + ring.stage * kStageBytes;
      mbarrier_wait(shared.full + 8 * ring.stage, ring.parity);
      const std::uint64_t a = operand(stage), b = operand(stage + kBytesA, kB == Major::mn ? kBlockBytes : 16);
      products_begin();
#pragma unroll
      for (int s = 0; s < kDepth / 16; ++s) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          const std::uint64_t a_s = advance(a, i * kBlockBytes + s * kStepA), b_s = advance(b, s * kStepB);
          if (decltype(first)::value && s == 0)
            multiply_first_async<bf16, Major::k, kB>(d[i], a_s, b_s);
          else
            multiply_async<bf16, Major::k, kB>(d[i], a_s, b_s);
        }
      }
      products_commit();
    };
    wait_to_compute();
    multiply(std::true_type());
    for (int step = 1; step < steps; ++step) {
      const int previous = ring.stage;
      ring.advance();
      multiply(std::false_type());
      products_wait<1>();
      release(previous);
    }
    if (!last) pass_computing();
    products_wait<0>();
    for (auto& block : d) pin(block);
    release(ring.stage);
    ring.advance(1 + steps);  // the next tile is the other's
    wait_to_write();
    sums.set(d, lane);
    __syncwarp();
    const std::int64_t row = (static_cast<std::int64_t>(tile_row) * kCluster + rank) * kRows + 16 * warp;
    finish_rows<Direction>(p, sums, row, static_cast<std::int64_t>(tile_column) * 8 * Direction::kPieces, lane);
    __syncwarp();
    if (!last) pass_writing();
  }
}

#else
struct Forward;
struct Backward;
#endif  // WEFT_WGMMA

template <typename Direction>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_swiglu_kernel([[maybe_unused]] const __grid_constant__ Arguments arguments) {
#if WEFT_WGMMA
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), aligned = static_cast<unsigned>(ceil_div(begin, 1024) * 1024);
  constexpr unsigned kTile = kStages * kStageBytes, kBarriers = kTile + kTileBytes;
  const Shared shared{aligned, aligned + kBarriers, aligned + kBarriers + 8 * kStages,
                      dynamic + (aligned - begin) + kTile};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared.full + 8 * stage, 1);
      mbarrier_init(shared.empty + 8 * stage, kWarps * kCluster);
    }
    fence_barrier_init();
  }
  cluster_barrier();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x == 0) produce<Direction>(arguments, shared);
  } else {
    increase_registers<240>();
    consume<Direction>(arguments, shared, warpgroup - 1);
  }
  cluster_barrier();  // nobody leaves while the other block writes into its memory or arrives there
#else
  __trap();
#endif
}

CUtensorMap encode_matrix(const bf16* data, std::int64_t rows, std::int64_t columns, int box_rows) {
  return encode_tensor_map(
      data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)},
      {columns * static_cast<std::int64_t>(sizeof(bf16))}, {kDepth, static_cast<std::uint32_t>(box_rows)});
}

template <typename Direction>
void launch(Arguments& arguments, const bf16* a, std::int64_t columns, cudaStream_t stream) {
  const auto kernel = matmul_swiglu_kernel<Direction>;
  arguments.a = encode_matrix(a, arguments.M, arguments.K, kRows);
  arguments.tile_rows = static_cast<int>(ceil_div(arguments.M, kRows * kCluster));
  arguments.tile_columns = static_cast<int>(ceil_div(arguments.F, columns));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes)),
        "matmul with SwiGLU: shared memory");
  const int clusters = std::min(device_attribute(cudaDevAttrMultiProcessorCount) / kCluster,
                                arguments.tile_rows * arguments.tile_columns);
  launch_clustered(kernel, dim3(static_cast<unsigned>(clusters * kCluster)), dim3(kThreads), kSharedBytes, stream,
                   kCluster, "matmul with SwiGLU", arguments);
}

}  // namespace

bool matmul_swiglu_computes(std::int64_t C, std::int64_t F) {
  return C % 8 == 0 && F % 8 == 0 && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
}

void gate_up_swiglu(bf16* gate_up, bf16* product, const bf16* x, const bf16* weight, std::int64_t N, std::int64_t C,
                    std::int64_t F, cudaStream_t stream) {
  if (N == 0) return;
  Arguments arguments{};
  arguments.M = N, arguments.F = F, arguments.K = C;
  arguments.gate_up = gate_up, arguments.product = product;
  arguments.b = encode_matrix(weight, 2 * F, C, kColumns / kCluster);
  launch<Forward>(arguments, x, kColumns / 2, stream);
}

void down_input_grad_swiglu(bf16* gate_up, bf16* product, const bf16* dout, const bf16* weight, std::int64_t N,
                            std::int64_t C, std::int64_t F, cudaStream_t stream) {
  if (N == 0) return;
  Arguments arguments{};
  arguments.M = N, arguments.F = F, arguments.K = C;
  arguments.gate_up = gate_up, arguments.product = product;
  arguments.b = encode_matrix(weight, C, F, kDepth / kCluster);
  launch<Backward>(arguments, dout, kColumns, stream);
}

}  // namespace weft::cuda
