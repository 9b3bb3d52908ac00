// rows_matmul() for many rows: a block walks all splits of a tile. See rows_matmul_hopper.cu.
#include "llmc/cuda/op/gemm/rows_matmul_accumulators.cuh"
#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"

namespace weft::cuda::rows {

namespace {

constexpr int kTileConsumers = 2, kTileThreads = (1 + kTileConsumers) * kWarpgroupSize, kCluster = 2;
constexpr int kPairRows = kCluster * kTileConsumers * kWeightRows;  // rows of the weight that a cluster computes

// How the consumers of a block work.
enum class Consumers {
  together,  // on one tile, 64 rows of the weight each
  splits,    // the same; sums are of several splits, of which each thread keeps the total
  in_turns,  // on a tile each: while one multiplies, the other finishes its last tile
};

// P: Arguments of the kernel.
template <typename P, int N>
struct TileShape {
  using T = typename P::Element;
  using XTile = SwizzledTile<T, N, kDepth>;
  static constexpr int kStageBytes = kTileConsumers * WeightTile<T>::kBytes + XTile::kBytes;
  // Rows of x that each block of the cluster fetches for both, in whole patterns of the swizzle: the first ones and the last.
  // In the middle they may overlap, and are then written twice.
  static constexpr int kFetchedRows = (N / kCluster + 7) / 8 * 8;
  static constexpr int kFetchedBytes =
      kTileConsumers * WeightTile<T>::kBytes + kCluster * kFetchedRows * XTile::kRowBytes;
  // Shared memory in which a consumer stages results that leave by tensor copies: two, likewise. stmatrix writes 16 rows.
  using OutTile = SwizzledTile<T, (N / 2 + 15) / 16 * 16, kWeightRows>;
  static constexpr bool kCopiesOut = !P::kCodes;
  static constexpr int kOutBytes = kCopiesOut ? (OutTile::kBytes + kAlignment - 1) / kAlignment * kAlignment : 0;
  static constexpr int kRest = kAlignment + kTileConsumers * kOutBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  static constexpr int kStages = (kMostSharedBytes - kRest) / (kStageBytes + kBarrierBytes);
  static constexpr int kBytes = kRest + kStages * (kStageBytes + kBarrierBytes);
  static_assert(kStages >= 4 && kStageBytes % kAlignment == 0);
};

#if WEFT_WGMMA

// The order of tiles: patches of kPatch pairs of weight tiles, within a patch one x tile after another. So the tiles
// that are computed at the same time share few rows of the weight and of x, which stay in L2.
constexpr int kPatch = 8;
template <typename P>
__device__ inline int pair_of(const P& p, int tile) {
  const int patch = kPatch * p.row_tiles, first = tile / patch * kPatch;
  return first + tile % patch % min(kPatch, p.tile_pairs - first);
}
template <typename P>
__device__ inline int row_tile_of(const P& p, int tile) {
  const int patch = kPatch * p.row_tiles, first = tile / patch * kPatch;
  return tile % patch / min(kPatch, p.tile_pairs - first);
}
// The first row of the weight in a consumer's part of a tile; `rank`: of its block in the cluster.
template <typename P>
__device__ inline std::int64_t first_row_of(const P& p, int tile, int rank, int consumer) {
  return static_cast<std::int64_t>((pair_of(p, tile) * kCluster + rank) * kTileConsumers + consumer) * kWeightRows;
}

template <typename P, int N>
struct TileMemory {
  using T = typename P::Element;
  using Shape = TileShape<P, N>;

  unsigned base;

  __device__ explicit TileMemory(unsigned char* dynamic) : base(shared_address(dynamic, kAlignment)) {}
  __device__ WeightTile<T> weight(int stage, int consumer) const {
    return {base + stage * Shape::kStageBytes + consumer * WeightTile<T>::kBytes};
  }
  __device__ typename Shape::XTile x(int stage) const { return {weight(stage, kTileConsumers).address}; }
  __device__ typename Shape::OutTile out(int consumer) const {
    return {base + Shape::kStages * Shape::kStageBytes + consumer * Shape::kOutBytes};
  }
  __device__ RingBarriers ring() const {
    return {base + Shape::kStages * Shape::kStageBytes + kTileConsumers * Shape::kOutBytes, Shape::kStages};
  }
};

template <typename P, int N>
__device__ void produce_tiles(const P& p, const TileMemory<P, N>& shared) {
  using Shape = TileShape<P, N>;
  constexpr std::uint16_t kAll = (1u << kCluster) - 1;
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int count = p.tile_pairs * p.row_tiles;
  const RingBarriers ring = shared.ring();
  const int first_row = rank == 0 ? 0 : N - Shape::kFetchedRows;
  const auto weight_tile = [&](int tile) { return (pair_of(p, tile) * kCluster + rank) * kTileConsumers; };
  const auto load_weights = [&](int stage, int step, int first_tile) {
    mbarrier_arrive_expect(ring.full(stage), Shape::kFetchedBytes);
#pragma unroll
    for (int i = 0; i < kTileConsumers; ++i)
      load_weight(p, shared.weight(stage, i).address, ring.full(stage), step, first_tile + i, L2::normal);
  };
  int tile = static_cast<int>(blockIdx.x) / kCluster;
  int ahead = min(p.steps, Shape::kStages);  // the first weights need not wait for the preceding kernel
  for (int i = 0; i < ahead; ++i) load_weights(i, i, weight_tile(tile));
  if (!p.x_is_older) wait_for_predecessors();
  RingPosition at;
  for (; tile < count; tile += clusters) {
    const int first_tile = weight_tile(tile), row = row_tile_of(p, tile) * N + first_row;
    for (int step = 0; step < p.steps; ++step) {
      if (ahead > 0) {
        --ahead;
      } else {
        ring.wait_empty(at);
        load_weights(at.stage, step, first_tile);
      }
      const Source source = source_of(p, step);
      tensor_load_to_cluster(shared.x(at.stage).template rows<Shape::kFetchedRows>(first_row).address,
                             &p.x[source.input], ring.full(at.stage), source.k, row, kAll);
      at.advance(Shape::kStages);
    }
  }
}

// Writes 64 columns of the result, from `column` on, of N rows of x, from `row` on: a warpgroup's values are transposed on their
// way to shared memory and leave by tensor copies, which clip at the bounds. values(block, half, k) returns the thread's two
// for rows 8 block + 2 (lane % 4) + {0, 1} of x, which are of column 16 warp + 8 half + lane / 4, or with `Halves` of column
// 32 half + 8 warp + lane / 4. The first rows leave, then the last ones; those that are both are written twice.
template <bool Halves, int N, typename OutTile, typename T, typename Values>
__device__ void copy_out(const Arguments<T>& p, const OutTile& staging, int barrier, int column, int row,
                         const Values& values) {
  static_assert(OutTile::kRows % 16 == 0 && 2 * OutTile::kRows >= N && OutTile::kRows <= N);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize, lane = thread % kWarpSize,
            warp = thread / kWarpSize;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int first = part * (N - OutTile::kRows);
    if (thread == 0) bulk_wait_read();
    named_barrier_wait(barrier, kWarpgroupSize);  // the previous copy has read the buffer
#pragma unroll
    for (int i = 0; i < OutTile::kRows / 16; ++i) {
      unsigned words[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {  // 8x8 matrices: rows of x by m / 2, columns by m % 2
        const int block = first / 8 + 2 * i + m / 2;
        words[m] = pack<T>(values(block, m % 2, 0), values(block, m % 2, 1));
      }
      const int r = 16 * i + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
      const int chunk = Halves ? 4 * half + warp : 2 * warp + half;
      store_matrices_transposed(staging.address + OutTile::offset(r, chunk), words[0], words[1], words[2], words[3]);
    }
    fence_async_proxy_shared();
    named_barrier_wait(barrier, kWarpgroupSize);
    if (thread == 0) {
      tensor_store(&p.out, staging.address, column, row + first, 0);
      bulk_commit();
    }
  }
}
// Of sums of 64 rows of the weight, from `first` on, with bias and GELU.
template <int N, typename OutTile, typename T>
__device__ void copy_out_sums(const Arguments<T>& p, const OutTile& staging, int barrier, std::int64_t first, int row,
                              const float (&sum)[N / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
  const bool biased = p.output.bias != nullptr, gelu = p.output.epilogue == RowsEpilogue::gelu;
  float bias[2] = {};  // of the thread's two rows of the weight
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t column = first + thread / kWarpSize * 16 + half * 8 + thread % kWarpSize / 4;
    if (biased && column < p.output.OC) bias[half] += to_float(p.output.bias[column]);
  }
  copy_out<false, N>(p, staging, barrier, static_cast<int>(first), row, [&](int block, int half, int k) {
    float value = sum[4 * block + 2 * half + k];
    if (biased) value += bias[half];
    return gelu ? gelu_for<T>(value) : value;
  });
}
// Of sums of twice 64 rows of gate and up.
template <int N, typename OutTile, typename T>
__device__ void copy_out_gated(const Arguments<T>& p, const OutTile& staging, int barrier, std::int64_t first, int row,
                               const float (&sums)[2][N / 2]) {
  copy_out<true, N>(p, staging, barrier, static_cast<int>(first / 2), row, [&](int block, int half, int k) {
    return gated_of_sums<T>(p.output.epilogue, sums[half][4 * block + k], sums[half][4 * block + 2 + k]);
  });
}

// Finishes a warpgroup's sums of 64 rows of the weight, from `first` on, by the N rows of x of a tile.
template <typename P, int N>
__device__ void finish_tile(const P& p, const TileMemory<P, N>& shared, int consumer, std::int64_t first, int row_tile,
                            const float (&total)[N / 2]) {
  wait_for_predecessors();  // they may still read what is written here
  if constexpr (TileShape<P, N>::kCopiesOut) {
    if (p.copies_out) return copy_out_sums<N>(p, shared.out(consumer), 1 + consumer, first, row_tile * N, total);
  }
  finish_accumulators<N>(p.output, first, std::int64_t{row_tile} * N, total);
}

template <typename P, int N>
__device__ void consume_splits(const P& p, const TileMemory<P, N>& shared, int consumer) {
  using T = typename P::Element;
  using Shape = TileShape<P, N>;
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int count = p.tile_pairs * p.row_tiles, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const RingBarriers ring = shared.ring();
  const auto release = [&](int stage) {  // in both blocks of the cluster, since both fill the stage
    if (lane < kCluster) cluster_mbarrier_arrive(ring.empty(stage), static_cast<unsigned>(lane));
  };
  const auto operands_at = [&](int stage) {
    return Operands<WeightTile<T>, typename Shape::XTile>{shared.weight(stage, consumer), shared.x(stage)};
  };
  RingPosition at;
  for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < count; tile += clusters) {
    float d[N / 2], total[N / 2];
    for (int split = 0; split < p.splits; ++split) {
      const int steps = split_begin(split + 1, p.steps, p.splits) - split_begin(split, p.steps, p.splits);
      sum_stages(d, steps, at, ring, Shape::kStages, operands_at, release);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[i] = split == 0 ? d[i] : total[i] + d[i];
    }
    finish_tile(p, shared, consumer, first_row_of(p, tile, rank, consumer), row_tile_of(p, tile), total);
  }
}

// Each consumer computes every other tile, both blocks of 64 rows of the weight, and passes the turn to multiply when it
// has issued its last stage.
template <typename P, int N>
__device__ void consume_in_turns(const P& p, const TileMemory<P, N>& shared, int consumer) {
  using T = typename P::Element;
  using Shape = TileShape<P, N>;
  constexpr int kTurn = 1 + kTileConsumers,
                kPair = kTileConsumers * kWarpgroupSize;  // kTurn: the first of two barriers
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int count = p.tile_pairs * p.row_tiles, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const RingBarriers ring = shared.ring();
  const auto release = [&](int stage) {  // in both blocks of the cluster, since both fill the stage
    if (lane < kCluster) cluster_mbarrier_arrive(ring.empty(stage), static_cast<unsigned>(lane));
  };
  const auto pass_turn = [&] { named_barrier_arrive(kTurn + 1 - consumer, kPair); };
  RingPosition at;
  int tile = static_cast<int>(blockIdx.x) / kCluster;
  if (consumer == 1) {
    pass_turn();
    tile += clusters;
    at.advance(Shape::kStages, p.steps);
  }
  for (; tile < count; tile += kTileConsumers * clusters) {
    float d[2][N / 2];
    const auto multiply = [&]<bool First>() {
      ring.wait_full(at);
      const auto a0 = shared.weight(at.stage, 0).k_major(), a1 = shared.weight(at.stage, 1).k_major();
      const auto b = shared.x(at.stage).k_major();
      if constexpr (First) forget(d[0]), forget(d[1]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < b.kSteps; ++i) {
        wgmma_async<T>(d[0], a0.step(i), b.step(i), !First || i > 0);
        wgmma_async<T>(d[1], a1.step(i), b.step(i), !First || i > 0);
      }
      wgmma_commit();
    };
    named_barrier_wait(kTurn + consumer, kPair);
    multiply.template operator()<true>();
    for (int step = 1; step < p.steps; ++step) {
      const int previous = at.stage;
      at.advance(Shape::kStages);
      multiply.template operator()<false>();
      wgmma_wait<1>();
      release(previous);
    }
    if (tile + clusters < count) pass_turn();  // otherwise nobody waits for it
    wgmma_wait<0>();
    pin(d[0]), pin(d[1]);
    release(at.stage);
    at.advance(Shape::kStages, 1 + p.steps);  // the stages of the next tile are the other consumer's
    const std::int64_t first = first_row_of(p, tile, rank, 0);
    const int row_tile = row_tile_of(p, tile);
    if (p.copies_out && p.output.gated()) {
      wait_for_predecessors();  // they may still read what is written here
      copy_out_gated<N>(p, shared.out(consumer), 1 + consumer, first, row_tile * N, d);
    } else {
#pragma unroll
      for (int half = 0; half < kTileConsumers; ++half)
        finish_tile(p, shared, consumer, first + half * kWeightRows, row_tile, d[half]);
    }
  }
}

// The same for codes. The second warpgroup begins a tile when the first has summed a stage, and stays behind: then the
// tensor cores compute for one while the other adds.
template <Consumers kConsumers, typename P, int N>
__device__ void consume_tiles_of_codes(const P& p, const TileMemory<P, N>& shared, int consumer) {
  using T = typename P::Element;
  using Shape = TileShape<P, N>;
  constexpr int kBegun = 1;  // the barrier
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  const int count = p.tile_pairs * p.row_tiles, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool apart = p.steps >= Shape::kStages;  // otherwise one may end a tile before the other has begun it
  const RingBarriers ring = shared.ring();
  const auto operands_at = [&](int stage) {
    return Operands<WeightTile<T>, typename Shape::XTile>{shared.weight(stage, consumer), shared.x(stage)};
  };
  RingPosition at;
  for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < count; tile += clusters) {
    const std::int64_t first = first_row_of(p, tile, rank, consumer);
    bool begins = apart && consumer == 0;
    if (apart && consumer == 1) named_barrier_wait(kBegun, kTileConsumers * kWarpgroupSize);
    const auto release = [&](int stage) {  // in both blocks of the cluster, since both fill the stage
      if (lane < kCluster) cluster_mbarrier_arrive(ring.empty(stage), static_cast<unsigned>(lane));
      if (begins) named_barrier_arrive(kBegun, kTileConsumers * kWarpgroupSize);
      begins = false;
    };
    const auto sum = [&](float(&to)[N / 2], int split) {
      const int steps = split_begin(split + 1, p.steps, p.splits) - split_begin(split, p.steps, p.splits);
      sum_stages_of_codes<1>(to, steps, at, ring, Shape::kStages, operands_at, release);
    };
    float total[N / 2];
    sum(total, 0);
    if constexpr (kConsumers == Consumers::splits) {
      float next[N / 2];
      for (int split = 1; split < p.splits; ++split) {
        sum(next, split);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) total[i] += next[i];
      }
    }
    wait_for_predecessors();  // they may still read what is written here
    finish_accumulators<N>(p.output, first, std::int64_t{row_tile_of(p, tile)} * N, total);
  }
}

#endif  // WEFT_WGMMA

template <typename P, int N, Consumers kConsumers>
__global__ void __launch_bounds__(kTileThreads, 1) tile_kernel([[maybe_unused]] const __grid_constant__ P p) {
#if WEFT_WGMMA
  using Shape = TileShape<P, N>;
  constexpr unsigned kReaders = kConsumers == Consumers::in_turns ? 1 : kTileConsumers;  // warpgroups, of a stage
  extern __shared__ unsigned char dynamic[];
  const TileMemory<P, N> shared(dynamic);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) shared.ring().init(stage, 1, kReaders * kWarps * kCluster);
    fence_barrier_init();
  }
  launch_dependents();
  cluster_barrier();
  // tells the compiler that it is uniform in a warp
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x == 0) produce_tiles(p, shared);
  } else {
    increase_registers<240>();
    if constexpr (P::kCodes) {
      consume_tiles_of_codes<kConsumers>(p, shared, warpgroup - 1);
    } else if constexpr (kConsumers == Consumers::in_turns) {
      consume_in_turns(p, shared, warpgroup - 1);
    } else {
      consume_splits(p, shared, warpgroup - 1);
    }
    if (p.copies_out && threadIdx.x % kWarpgroupSize == 0) bulk_wait();  // shared memory must outlive the copies
  }
  cluster_barrier();  // neither block may exit while the other still writes or arrives in its shared memory
#else
  __trap();
#endif
}

// Whether results are written by tensor copies, which need rows that begin at multiples of 16 bytes. With a gate 128 rows of the
// weight give 64 columns, a copy's width; a consumer has as many where consumers take turns.
template <typename T>
bool copies_out(const RowsMatmul<T>& io, Consumers consumers) {
  const bool of_sums = io.epilogue == RowsEpilogue::store || io.epilogue == RowsEpilogue::gelu;
  return (of_sums || (gated(io.epilogue) && consumers == Consumers::in_turns)) && io.OC % 8 == 0 &&
         aligned_to_16(io.out);
}

template <int N, Consumers kConsumers, typename Io>
void launch_tiles(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  using P = ArgumentsOf<Io>;
  using T = typename P::Element;
  const auto kernel = tile_kernel<P, N, kConsumers>;
  constexpr int kBytes = TileShape<P, N>::kBytes;
  P arguments = arguments_of(io, TileShape<P, N>::kFetchedRows);
  arguments.tile_pairs = static_cast<int>(ceil_div(weight_rows(io), kPairRows));
  arguments.row_tiles = static_cast<int>(ceil_div(io.rows, N));
  arguments.copies_out = TileShape<P, N>::kCopiesOut && copies_out(io, kConsumers);
  if (arguments.copies_out)
    arguments.out = encode_tensor_map(
        io.out, kMapType<T>, {static_cast<std::uint64_t>(io.OC), static_cast<std::uint64_t>(io.rows), 1},
        {io.OC * static_cast<std::int64_t>(sizeof(T)), 0}, {kWeightRows, TileShape<P, N>::OutTile::kRows, 1});
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "rows_matmul: shared memory");
  const int clusters = std::min(device.multiprocessors / kCluster, arguments.tile_pairs * arguments.row_tiles);
  launch_chained_clusters(kernel, dim3(static_cast<unsigned>(clusters * kCluster)), dim3(kTileThreads), kBytes, stream,
                          device.overlapping, kCluster, "rows_matmul", arguments);
}

// Launches tiles of the width with the least estimated time; if equal, the later one. A stage takes as long as shared memory
// needs for it, at 128 bytes a cycle: the copies write 16 KB of the weight and `width` rows of x, and each of its eight
// instructions reads 2 KB of the weight and a quarter of these rows again. Up to a width of 256 that is more than the tensor
// cores need, 4 `width` cycles. Consumers that work together on a tile of codes multiply nothing while they finish it; so do
// those of splits, but without shared memory it takes them too little to count. Of those in turns only the last tile's end
// is not hidden.
template <Consumers kConsumers, int... kWidths, typename Io>
void launch_best_width(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t pairs = ceil_div(weight_rows(io), kPairRows), clusters = device.multiprocessors / kCluster;
  const std::int64_t finish = gated(io.epilogue)                  ? 80
                              : io.epilogue == RowsEpilogue::gelu ? 60
                                                                  : 40;  // cycles a row of x
  int best = 0;
  std::int64_t least = INT64_MAX;
  for (const std::int64_t width : {kWidths...}) {
    const std::int64_t rounds = ceil_div(pairs * ceil_div(io.rows, width), clusters);
    const std::int64_t ends = kConsumers == Consumers::together ? rounds : kConsumers == Consumers::in_turns ? 1 : 0;
    const std::int64_t time = rounds * steps_of(io) * (256 + 3 * width) + ends * finish * width;
    if (time <= least) best = static_cast<int>(width), least = time;
  }
  ((best == kWidths ? launch_tiles<kWidths, kConsumers>(io, device, stream) : void()), ...);
}

}  // namespace

template <typename Io>
void launch_tile_kernel(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  using enum Consumers;
  // With several splits a thread has registers for a sum and the total, of codes for a stage, a sum and the total.
  if constexpr (ArgumentsOf<Io>::kCodes) {
    if (splits_of(io) > 1) return launch_best_width<splits, 64, 128>(io, device, stream);
    launch_best_width<together, 128, 160, 184, 192>(io, device, stream);
  } else {
    if (splits_of(io) > 1) return launch_best_width<splits, 64, 96, 128, 160, 176, 184, 192>(io, device, stream);
    launch_best_width<in_turns, 96, 128, 160, 176, 184, 192>(io, device, stream);
  }
}

template void launch_tile_kernel(const RowsMatmul<bf16>&, const LaunchDevice&, cudaStream_t);
template void launch_tile_kernel(const RowsMatmul<fp16>&, const LaunchDevice&, cudaStream_t);
template void launch_tile_kernel(const PairsMatmul<bf16>&, const LaunchDevice&, cudaStream_t);
template void launch_tile_kernel(const PairsMatmul<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda::rows
