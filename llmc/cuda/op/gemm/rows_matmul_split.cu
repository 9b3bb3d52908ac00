// rows_matmul() for few rows: the splits of a tile are the blocks of a cluster. See rows_matmul_hopper.cu.
#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"

namespace weft::cuda::rows {

namespace {

// A block has kConsumers warpgroups of 64 rows of the weight each, and a warp that issues the copies. kBlocks: blocks
// that share a multiprocessor.
template <typename T, int N, int kConsumers, int kBlocks>
struct SplitShape {
  using XTile = SwizzledTile<T, N, kDepth>;
  static constexpr int kThreads = kConsumers * kWarpgroupSize + kWarpSize;
  static constexpr int kStageBytes = kConsumers * WeightTile<T>::kBytes + XTile::kBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  static constexpr int kMostStages = (block_shared_bytes(kBlocks) - kAlignment) / (kStageBytes + kBarrierBytes);
  static constexpr int kSumsBytes = kConsumers * N * kSumsStride * 4;  // reuses the memory of the stages
  static_assert(kSumsBytes <= kMostStages * kStageBytes && kStageBytes % kAlignment == 0);
  static constexpr int bytes(int stages) { return kAlignment + stages * (kStageBytes + kBarrierBytes); }
};

template <typename P, int N, int kConsumers, int kBlocks>
__global__ void __launch_bounds__(SplitShape<typename P::Element, N, kConsumers, kBlocks>::kThreads, kBlocks)
    split_kernel([[maybe_unused]] const __grid_constant__ P p) {
#if WEFT_WGMMA
  using T = typename P::Element;
  using Columns = typename P::Finish;
  using Shape = SplitShape<T, N, kConsumers, kBlocks>;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), base = shared_address(dynamic, kAlignment);
  float* const sums = reinterpret_cast<float*>(dynamic + (base - begin));
  const RingBarriers ring(base + p.stages * Shape::kStageBytes, p.stages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int warp = __shfl_sync(~0u, thread / kWarpSize, 0);   // tells the compiler that it is uniform in a warp
  const int split = static_cast<int>(blockIdx.x) % p.splits;  // also the rank in the cluster
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
  fill_ring(p, ring, p.stages, steps, kConsumers * kWarps, producer, load_weights, load_x);
  const int count = Columns::count(p.output, kWeightRows), all = count * kConsumers;
  const Columns columns(p.output, static_cast<std::int64_t>(tile + thread % all / count) * kWeightRows,
                        thread % count);  // loads the bias early
  if (consumer) {
    const int group = warp / kWarps;
    float d[N / 2];
    RingPosition at;
    sum_split<P::kCodes>(
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
  finish_splits<N, kConsumerThreads>(columns, base, consumer, thread, count, p.splits, split, first_row, p.output.rows);
#else
  __trap();
#endif
}

template <int N, int kConsumers, int kBlocks, typename Io>
void launch(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  using P = ArgumentsOf<Io>;
  using Shape = SplitShape<typename P::Element, N, kConsumers, kBlocks>;
  const auto kernel = split_kernel<P, N, kConsumers, kBlocks>;
  P arguments = arguments_of(io, N);
  arguments.stages = Shape::kMostStages;
  const int bytes = Shape::bytes(arguments.stages);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "rows_matmul: shared memory");
  const std::int64_t tiles = ceil_div(weight_rows(io), kConsumers * kWeightRows);
  const dim3 grid(static_cast<unsigned>(tiles * arguments.splits), static_cast<unsigned>(ceil_div(io.rows, N)));
  launch_chained_clusters(kernel, grid, dim3(Shape::kThreads), static_cast<std::size_t>(bytes), stream,
                          device.overlapping, arguments.splits, "rows_matmul", arguments);
}

}  // namespace

// Up to 64 rows of x, two blocks with 64 rows of the weight each fit in a multiprocessor. With several splits a block
// has 128 rows of the weight from 33 rows of x on, so that x is read half as often.
template <typename Io>
void launch_split_kernel(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  if (io.rows <= 16) return launch<16, 1, 2>(io, device, stream);
  if (io.rows <= 32) return launch<32, 1, 2>(io, device, stream);
  if (splits_of(io) == 1) {
    if (io.rows <= 48) return launch<48, 1, 2>(io, device, stream);
    return launch<64, 1, 2>(io, device, stream);
  }
  if (io.rows <= 48) return launch<48, 2, 1>(io, device, stream);
  if (io.rows <= 64) return launch<64, 2, 1>(io, device, stream);
  if (io.rows <= 96) return launch<96, 2, 1>(io, device, stream);
  if constexpr (ArgumentsOf<Io>::kCodes) {  // a stage and the split have registers of their own: not for more rows
    launch<128, 2, 1>(io, device, stream);
  } else {
    if (io.rows <= 128) return launch<128, 2, 1>(io, device, stream);
    if (io.rows <= 192) return launch<192, 2, 1>(io, device, stream);
    launch<256, 2, 1>(io, device, stream);
  }
}

template void launch_split_kernel(const RowsMatmul<bf16>&, const LaunchDevice&, cudaStream_t);
template void launch_split_kernel(const RowsMatmul<fp16>&, const LaunchDevice&, cudaStream_t);
template void launch_split_kernel(const PairsMatmul<bf16>&, const LaunchDevice&, cudaStream_t);
template void launch_split_kernel(const PairsMatmul<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda::rows
