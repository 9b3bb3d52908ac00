// rows_matmul() for few rows, with tiles of other heights than 64 and 128: see rows_matmul_hopper.cu.
#include <array>

#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"

namespace weft::cuda::rows {

namespace {

// A block computes H rows of the weight, as columns of operand B, and normally has a multiprocessor to itself: if two
// fitted, blocks that start early, beside the preceding kernel, would pair up on the multiprocessors that have room.
//
// kConsumers warpgroups have 64 rows of x each. Where kRows is less, operand A reads past x into whatever shared memory
// follows; that affects only the rows of the result that do not exist.
//
// With kSplits a tile has several, which are the blocks of a cluster.
template <typename P, int kRows, int H, int kConsumers, int kBlocks, bool kSplits>
struct ColumnShape {
  using T = typename P::Element;
  // A large tile's sums of codes and of one stage need more registers than the threads have: the producer is then a
  // warpgroup, which cedes its own.
  static constexpr bool kCedes = P::kCodes && kConsumers == 2 && H > 128;
  // The threads that finish rows: a second warpgroup, where there are registers for it, halves what one would do in turn.
  static constexpr int kFinishers = (kSplits || (kRows == 64 && !P::kCodes) ? 2 : kConsumers) * kWarpgroupSize;
  static constexpr int kThreads = kFinishers + (kCedes ? kWarpgroupSize : kWarpSize);
  using XTile = SwizzledTile<T, 64, kDepth>;
  using Weights = SwizzledTile<T, H, kDepth>;
  static constexpr int kXBytes = kRows * XTile::kRowBytes, kStageBytes = Weights::kBytes + kXBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  // bytes that operand A reads past the last stage
  static constexpr int kBehind = (kConsumers * 64 - kRows) * XTile::kRowBytes;
  static constexpr int kStages = (block_shared_bytes(kBlocks) - kAlignment - kBehind) / (kStageBytes + kBarrierBytes);
  static constexpr int kBytes = kAlignment + kBehind + kStages * (kStageBytes + kBarrierBytes);
  // Half a warp stores 8 sums of 4 rows at once; with this padding they fall into different banks.
  static constexpr int kStride = H + 8;
  static_assert(kStride % 32 == 8 || kStride % 32 == 24);
  static_assert(kRows * kStride * 4 <= kStages * kStageBytes && kStageBytes % kAlignment == 0 && H % 16 == 0);
  static_assert(kRows % 16 == 0 && (kRows + 63) / 64 == kConsumers && kConsumers * kWarpgroupSize <= kFinishers);
  static_assert(!kSplits || !P::kCodes);
};

template <typename P, int kRows, int H, int kConsumers, int kBlocks, bool kSplits>
__global__ void __launch_bounds__(ColumnShape<P, kRows, H, kConsumers, kBlocks, kSplits>::kThreads, kBlocks)
    column_kernel([[maybe_unused]] const __grid_constant__ P p) {
#if WEFT_WGMMA
  using T = typename P::Element;
  using Columns = typename P::Finish;
  using Shape = ColumnShape<P, kRows, H, kConsumers, kBlocks, kSplits>;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), base = shared_address(dynamic, kAlignment);
  float* const sums = reinterpret_cast<float*>(dynamic + (base - begin));
  const RingBarriers ring(base + Shape::kStages * Shape::kStageBytes, Shape::kStages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int warp = __shfl_sync(~0u, thread / kWarpSize, 0);  // tells the compiler that it is uniform in a warp
  const int splits = kSplits ? p.splits : 1;
  const int split = static_cast<int>(blockIdx.x) % splits;  // also the rank in the cluster
  const std::int64_t first = static_cast<std::int64_t>(static_cast<int>(blockIdx.x) / splits) * H;
  const int first_step = split_begin(split, p.steps, splits);
  const int steps = split_begin(split + 1, p.steps, splits) - first_step;
  const bool consumer = warp < kConsumers * kWarps, producer = thread == Shape::kFinishers;
  const auto weights_at = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto x_at = [&](int stage) { return weights_at(stage) + Shape::Weights::kBytes; };
  const auto source_at = [&](int step) {  // a tile with one split has one input
    return kSplits ? source_of(p, first_step + step) : Source{0, step * kDepth};
  };
  const auto load_weights = [&](int stage, int step) {
    const bool gated = p.output.gated();
    const Source source = source_at(step);
    mbarrier_arrive_expect(ring.full(stage), Shape::kStageBytes);
    tensor_load(weights_at(stage), &p.weight[source.input], ring.full(stage), source.k,
                gated ? 0 : static_cast<int>(first), 0, gated ? static_cast<int>(first / 16) : 0, L2::evict_first);
  };
  const auto load_x = [&](int stage, int step) {
    const Source source = source_at(step);
    tensor_load(x_at(stage), &p.x[source.input], ring.full(stage), source.k, 0);
  };
  if constexpr (Shape::kCedes) {
    begin_ring(p, ring, Shape::kStages, steps, kConsumers * kWarps, producer, load_weights);
    if (!consumer) {
      decrease_registers<24>();
      if (producer) produce(p, ring, Shape::kStages, steps, load_weights, load_x);
      return;
    }
    increase_registers<240>();
  } else {
    fill_ring(p, ring, Shape::kStages, steps, kConsumers * kWarps, producer, load_weights, load_x);
  }
  const int count = Columns::count(p.output, H);
  const Columns columns(p.output, first, thread % count);  // loads the bias early
  if (consumer) {
    const int group = warp / kWarps;
    float d[H / 2];
    RingPosition at;
    sum_split<P::kCodes, Shape::kCedes ? 2 : 1>(
        d, steps, at, ring, Shape::kStages,
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
      if (kRows % 64 != 0 && row >= kRows) continue;
#pragma unroll
      for (int j = 0; j < H / 8; ++j)
        *reinterpret_cast<float2*>(sums + row * Shape::kStride + 8 * j + lane % 4 * 2) = {d[4 * j + 2 * half],
                                                                                          d[4 * j + 2 * half + 1]};
    }
  }
  const int rows_at_once = Shape::kFinishers / count;
  const bool finishes = thread < rows_at_once * count;
  if (finishes && !consumer) wait_for_predecessors();  // as the consumers have
  if constexpr (kSplits) {
    finish_splits<kRows, Shape::kFinishers, 1, Shape::kStride>(columns, base, finishes, thread, count, splits, split, 0,
                                                               p.output.rows);
  } else if (warp < Shape::kFinishers / kWarpSize) {
    named_barrier_wait(2, Shape::kFinishers);
    if (!finishes) return;
    for (int r = thread / count; r < p.output.rows; r += rows_at_once)
      columns.finish(r, [&](int i) { return *reinterpret_cast<const float4*>(sums + r * Shape::kStride + i); });
  }
#else
  __trap();
#endif
}

// A kernel that may have its shared memory.
template <typename P, int kRows, int H, int kBlocks, bool kSplits>
struct ColumnKernel {
  static constexpr int kConsumers = (kRows + 63) / 64;
  using Shape = ColumnShape<P, kRows, H, kConsumers, kBlocks, kSplits>;

  ColumnKernel() {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
          "rows_matmul: shared memory");
  }

  void (*function)(P) = column_kernel<P, kRows, H, kConsumers, kBlocks, kSplits>;
};

template <int kRows, int H, int kBlocks, typename Io>
void launch(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  using P = ArgumentsOf<Io>;
  using Kernel = ColumnKernel<P, kRows, H, kBlocks, false>;
  const P arguments = arguments_of(io, kRows, H);
  launch_chained(Kernel().function, dim3(static_cast<unsigned>(ceil_div(weight_rows(io), H))),
                 dim3(Kernel::Shape::kThreads), Kernel::Shape::kBytes, stream, device.overlapping, "rows_matmul",
                 arguments);
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

template <int H, typename Io>
void launch_height_of_one_round(const Io& io, const LaunchDevice& device, cudaStream_t stream) {
  if (io.rows <= 64) return launch<64, H, 1>(io, device, stream);
  launch<128, H, 1>(io, device, stream);
}

template <int kRows, int H, typename T>
void launch_splits(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  using P = Arguments<T>;
  using Kernel = ColumnKernel<P, kRows, H, 1, true>;
  const P arguments = arguments_of(io, kRows, H);
  launch_chained_clusters(Kernel().function,
                          dim3(static_cast<unsigned>(ceil_div(weight_rows(io), H) * arguments.splits)),
                          dim3(Kernel::Shape::kThreads), Kernel::Shape::kBytes, stream, device.overlapping,
                          arguments.splits, "rows_matmul", arguments);
}
template <int H, typename T>
void launch_height_of_splits(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  if (io.rows <= 48) return launch_splits<48, H>(io, device, stream);
  if (io.rows <= 64) return launch_splits<64, H>(io, device, stream);
  if (io.rows <= 96) return launch_splits<96, H>(io, device, stream);
  launch_splits<128, H>(io, device, stream);
}

}  // namespace

template <typename T>
void launch_column_splits(const RowsMatmul<T>& io, int height, const LaunchDevice& device, cudaStream_t stream) {
  if (height == 96) return launch_height_of_splits<96>(io, device, stream);
  launch_height_of_splits<112>(io, device, stream);
}

// All shapes fill a multiprocessor's shared memory, so the answer for one is that for all. It takes the driver longer
// than a launch: a thread asks once, and again when it has changed the device.
int resident_column_clusters(int splits) {
  using Kernel = ColumnKernel<Arguments<bf16>, 128, 112, 1, true>;
  thread_local int known_device = -1;
  thread_local std::array<int, kMostSplits + 1> known;
  int device = 0;
  check(cudaGetDevice(&device), "rows_matmul");
  if (device != known_device) known.fill(-1), known_device = device;
  int& clusters = known[static_cast<std::size_t>(splits)];
  if (clusters < 0) {
    clusters = resident_clusters(Kernel().function, Kernel::Shape::kThreads, Kernel::Shape::kBytes, splits,
                                 "rows_matmul: resident clusters");
  }
  return clusters;
}

template <typename Io>
void launch_column_kernel(const Io& io, int height, const LaunchDevice& device, cudaStream_t stream) {
  if (height == 80) return launch_height<80>(io, device, stream);
  if constexpr (!ArgumentsOf<Io>::kCodes) {
    switch (height) {
      case 96:
        return launch_height_of_one_round<96>(io, device, stream);
      case 128:
        return launch_height_of_one_round<128>(io, device, stream);
      case 160:
        return launch_height_of_one_round<160>(io, device, stream);
      case 192:
        return launch_height_of_one_round<192>(io, device, stream);
      default:
        break;
    }
  }
  launch_height<224>(io, device, stream);
}

template void launch_column_splits(const RowsMatmul<bf16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_splits(const RowsMatmul<fp16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const RowsMatmul<bf16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const RowsMatmul<fp16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const PairsMatmul<bf16>&, int, const LaunchDevice&, cudaStream_t);
template void launch_column_kernel(const PairsMatmul<fp16>&, int, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda::rows
