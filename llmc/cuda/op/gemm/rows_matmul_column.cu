// rows_matmul() for few rows and one split, with tiles of other heights than 64: see rows_matmul_hopper.cu.
#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"

namespace weft::cuda::rows {

namespace {

// A block computes H rows of the weight, as columns of operand B, and normally has a multiprocessor to itself: if two
// fitted, blocks that start early, beside the preceding kernel, would pair up on the multiprocessors that have room.
//
// kConsumers warpgroups have 64 rows of x each. With kRows < 64 there is one warpgroup, and operand A reads past x into
// whatever shared memory follows; that affects only the rows of the result that do not exist.
template <typename P, int kRows, int H, int kConsumers, int kBlocks>
struct ColumnShape {
  using T = typename P::Element;
  // A large tile's sums of codes and of one stage need more registers than the threads have: the producer is then a
  // warpgroup, which cedes its own.
  static constexpr bool kCedes = P::kCodes && kConsumers == 2 && H > 128;
  static constexpr int kThreads = kConsumers * kWarpgroupSize + (kCedes ? kWarpgroupSize : kWarpSize);
  using XTile = SwizzledTile<T, 64, kDepth>;
  using Weights = SwizzledTile<T, H, kDepth>;
  static constexpr int kXBytes = kRows * XTile::kRowBytes, kStageBytes = Weights::kBytes + kXBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  // bytes that operand A reads past the last stage
  static constexpr int kBehind = kRows < 64 ? (64 - kRows) * XTile::kRowBytes : 0;
  static constexpr int kStages = (block_shared_bytes(kBlocks) - kAlignment - kBehind) / (kStageBytes + kBarrierBytes);
  static constexpr int kBytes = kAlignment + kBehind + kStages * (kStageBytes + kBarrierBytes);
  static constexpr int kStride = H + kSumsPadding;
  static_assert(kRows * kStride * 4 <= kStages * kStageBytes && kStageBytes % kAlignment == 0 && H % 16 == 0);
  static_assert(kRows == kConsumers * 64 || (kConsumers == 1 && kRows < 64 && kRows % 16 == 0));
};

template <typename P, int kRows, int H, int kConsumers, int kBlocks>
__global__ void __launch_bounds__(ColumnShape<P, kRows, H, kConsumers, kBlocks>::kThreads, kBlocks)
    column_kernel([[maybe_unused]] const __grid_constant__ P p) {
#if WEFT_WGMMA
  using T = typename P::Element;
  using Columns = typename P::Finish;
  using Shape = ColumnShape<P, kRows, H, kConsumers, kBlocks>;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), base = shared_address(dynamic, kAlignment);
  float* const sums = reinterpret_cast<float*>(dynamic + (base - begin));
  const RingBarriers ring(base + Shape::kStages * Shape::kStageBytes, Shape::kStages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int warp = __shfl_sync(~0u, thread / kWarpSize, 0);  // tells the compiler that it is uniform in a warp
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * H;
  const bool consumer = warp < kConsumers * kWarps,
             producer = !consumer && (Shape::kCedes ? thread == kConsumerThreads : lane == 0);
  const auto weights_at = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto x_at = [&](int stage) { return weights_at(stage) + Shape::Weights::kBytes; };
  const auto load_weights = [&](int stage, int step) {
    const bool gated = p.output.gated();
    mbarrier_arrive_expect(ring.full(stage), Shape::kStageBytes);
    tensor_load(weights_at(stage), &p.weight[0], ring.full(stage), step * kDepth, gated ? 0 : static_cast<int>(first),
                0, gated ? static_cast<int>(first / 16) : 0, L2::evict_first);
  };
  const auto load_x = [&](int stage, int step) {
    tensor_load(x_at(stage), &p.x[0], ring.full(stage), step * kDepth, 0);
  };
  if constexpr (Shape::kCedes) {
    begin_ring(p, ring, Shape::kStages, p.steps, kConsumers * kWarps, producer, load_weights);
    if (!consumer) {
      decrease_registers<24>();
      if (producer) produce(p, ring, Shape::kStages, p.steps, load_weights, load_x);
      return;
    }
    increase_registers<240>();
  } else {
    fill_ring(p, ring, Shape::kStages, p.steps, kConsumers * kWarps, producer, load_weights, load_x);
  }
  const int count = Columns::count(p.output, H);
  const Columns columns(p.output, first, thread % count);  // loads the bias early
  if (consumer) {
    const int group = warp / kWarps;
    float d[H / 2];
    RingPosition at;
    sum_split<P::kCodes, Shape::kCedes ? 2 : 1>(
        d, p.steps, at, ring, Shape::kStages,
        [&](int stage) {
          return Operands<typename Shape::XTile, typename Shape::Weights>{{x_at(stage) + group * Shape::XTile::kBytes},
                                                                          {weights_at(stage)}};
        },
        [&](int stage) {
          if (lane == 0) mbarrier_arrive(ring.empty(stage));
        });
    wait_for_predecessors();                  // they may still read what is written below
    named_barrier_wait(1, kConsumerThreads);  // no wgmma of the block reads the stages any more
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

template <int kRows, int H, int kBlocks, typename Io>
void launch(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  constexpr int kConsumers = kRows > 64 ? kRows / 64 : 1;
  using P = ArgumentsOf<Io>;
  using Shape = ColumnShape<P, kRows, H, kConsumers, kBlocks>;
  const auto kernel = column_kernel<P, kRows, H, kConsumers, kBlocks>;
  const P arguments = arguments_of(io, kRows, H);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
        "rows_matmul: shared memory");
  launch_chained(kernel, dim3(static_cast<unsigned>(ceil_div(weight_rows(io), H))), dim3(Shape::kThreads),
                 Shape::kBytes, stream, device.overlapping, "rows_matmul", arguments);
}
template <int H, typename Io>
void launch_height(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  // The preceding kernel is then attention of few rows, which leaves part of most multiprocessors free but few of them
  // whole.
  if constexpr (!ArgumentsOf<Io>::kCodes) {
    if (io.rows <= 8 && io.x_is_older) return launch<16, H, 2>(io, device, stream);
  }
  if (io.rows <= 16) return launch<16, H, 1>(io, device, stream);
  if (io.rows <= 32) return launch<32, H, 1>(io, device, stream);
  if (io.rows <= 64) return launch<64, H, 1>(io, device, stream);
  if (H == 80 && io.rows > 128) return launch<192, 80, 1>(io, device, stream);
  launch<128, H, 1>(io, device, stream);
}

}  // namespace

template <typename Io>
void launch_column_kernel(const Io& io, int height, const LaunchDevice& device, cudaStream_t stream) {
  if (height == 80) return launch_height<80>(io, device, stream);
  launch_height<224>(io, device, stream);
}

template void launch_column_kernel(const RowsMatmul<bf16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const RowsMatmul<fp16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const PairsMatmul<bf16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const PairsMatmul<fp16>&, int, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda::rows
