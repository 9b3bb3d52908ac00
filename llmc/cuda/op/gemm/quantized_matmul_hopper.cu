// quantized_matmul() with wgmma, for Hopper: rows_matmul's split_kernel (rows_matmul_split.cu) with the weight as a
// register operand. The producer copies packed blocks unchanged; each warp converts its share and multiplies it by x
// from shared memory, converting one half of a block while wgmma computes with the other. Any number of rows:
// blockIdx.y selects N rows of x.
#include "llmc/cuda/op/gemm/quantized_matmul.cuh"
#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"

namespace weft::cuda::quantized {

namespace {

using namespace hopper;
using rows::Columns;
using rows::kAlignment;
using rows::kSumsStride;
using rows::kWarps;
static_assert(rows::kWeightRows == kBlockRows && rows::kDepth == kHalfDepth && kWarpgroupSize == kThreads);

// The order of a sum is defined in steps of 64 of K, as in rows_matmul. A stage holds two steps, or one at the end of
// an input whose number of steps is odd.
template <typename T>
struct Arguments {
  CUtensorMap x[2];
  const std::byte* blocks[2];
  const float* scales[2];
  rows::Output<T> output;
  int tiles;               // tiles of 64 rows of the weight
  int first_steps, steps;  // steps of the first input, of both inputs
  int splits;
  int first_splits;  // 0: splits divide the steps of both inputs; else the splits of the first input alone
  bool x_is_older;
};

template <typename T, typename Format, int N, int kConsumers, int kBlocks>
struct Shape {
  using XTile = SwizzledTile<T, N, kBlockDepth>;
  static constexpr int kBlockThreads = kConsumers * kWarpgroupSize + 2 * kWarpSize;
  static constexpr int kWeightBytes = kConsumers * kBlockBytes<Format>, kLoadBytes = XTile::kBytes + kWeightBytes;
  static constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(BarrierStorage));
  static constexpr int kStages = (rows::block_shared_bytes(kBlocks) - kAlignment) / (kLoadBytes + kBarrierBytes);
  static constexpr int kBytes = kAlignment + kStages * (kLoadBytes + kBarrierBytes);
  static_assert(kStages >= 2 && XTile::kBytes % kAlignment == 0 && kBlockBytes<Format> % 16 == 0);
  static_assert(kConsumers * N * kSumsStride * 4 <= kStages * kLoadBytes);  // the sums reuse the memory of the stages
};

#if WEFT_WGMMA

// The steps begin..end of one input that a split computes, and the weight blocks that they touch.
struct Segment {
  int begin = 0, end = 0;

  __device__ int first_block() const { return begin / 2; }
  __device__ int blocks() const { return end > begin ? (end + 1) / 2 - begin / 2 : 0; }
};
template <typename T>
struct Split {
  Segment first, second;  // inputs 0 and 1

  __device__ Split(const Arguments<T>& p, int split) {
    const bool behind = p.first_splits > 0 && split >= p.first_splits;
    const int from = behind ? p.first_steps : 0, before = behind ? p.first_splits : 0;
    const int steps = p.first_splits == 0 ? p.steps : behind ? p.steps - p.first_steps : p.first_steps;
    const int splits = p.first_splits == 0 ? p.splits : behind ? p.splits - p.first_splits : p.first_splits;
    const int begin = from + rows::split_begin(split - before, steps, splits),
              end = from + rows::split_begin(split - before + 1, steps, splits);
    first = {min(begin, p.first_steps), min(end, p.first_steps)};
    second = {max(begin, p.first_steps) - p.first_steps, max(end, p.first_steps) - p.first_steps};
  }
  __device__ Segment input(int i) const { return i == 0 ? first : second; }
  __device__ int stages() const { return first.blocks() + second.blocks(); }
};

// Loads this thread's words of half `half` of the block at shared address `block`; load_groups() loads the scales and
// zero points of its rows.
template <typename Format>
__device__ inline void load_half(unsigned (&words)[kWords<Format>], unsigned block, int half) {
  const unsigned from = block + half * kHalfBytes<Format> + threadIdx.x % kThreads * 16;
#pragma unroll
  for (int i = 0; i < kWords<Format> / 4; ++i)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]), "=r"(words[4 * i + 3])
                 : "r"(from + i * kPieceBytes)
                 : "memory");
}
template <typename T, typename Format>
__device__ inline void load_groups(typename Format::template Group<T> (&groups)[2], unsigned block, int row) {
  if constexpr (Format::kGrouped) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned word;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(word)
                   : "r"(block + 2 * kHalfBytes<Format> + (row + 8 * i) * 4)
                   : "memory");
      groups[i] = typename Format::template Group<T>(word);
    }
  }
}

__device__ inline int blocks_of_steps(int steps) {
  return (steps + 1) / 2;
}

// d += a b over 64 of K. Asynchronous: `a` must not change until wgmma_wait().
template <typename B, int R>
__device__ inline void multiply_half(float (&d)[R], unsigned (&a)[16], const B& b) {
  pin(a);
  wgmma_fence();
  gemm_add_async(d, a, b);
  wgmma_commit();
}

#endif  // WEFT_WGMMA

template <typename T, typename Format, int N, int kConsumers, int kBlocks>
__global__ void __launch_bounds__(Shape<T, Format, N, kConsumers, kBlocks>::kBlockThreads, kBlocks)
    quantized_kernel([[maybe_unused]] const __grid_constant__ Arguments<T> p) {
#if WEFT_WGMMA
  using Shape = quantized::Shape<T, Format, N, kConsumers, kBlocks>;
  using XTile = typename Shape::XTile;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  extern __shared__ unsigned char dynamic[];
  const unsigned begin = shared_address(dynamic), base = shared_address(dynamic, kAlignment);
  float* const sums = reinterpret_cast<float*>(dynamic + (base - begin));
  const RingBarriers ring(base + Shape::kStages * Shape::kLoadBytes, Shape::kStages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int warp = __shfl_sync(~0u, thread / kWarpSize, 0);  // tells the compiler that it is uniform in a warp
  const int rank = static_cast<int>(blockIdx.x) % p.splits;  // in the cluster
  const int tile = static_cast<int>(blockIdx.x) / p.splits * kConsumers;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * N;
  const Split<T> split(p, rank);
  // One thread copies weights, a thread of another warp x: issued by one thread, the copies would take most of a
  // stage's time.
  constexpr int kConsumerWarps = kConsumers * kWarps;
  const bool consumer = warp < kConsumerWarps, elected = !consumer && lane == 0;
  const int stages = split.stages(), first_stages = split.first.blocks();
  const auto x_at = [&](int stage) { return XTile{base + stage * XTile::kBytes}; };
  const auto weights_at = [&](int stage) {
    return base + Shape::kStages * XTile::kBytes + stage * Shape::kWeightBytes;
  };
  const auto load_weights = [&](int stage, int step) {
    const int input = step < first_stages ? 0 : 1;
    const int blocks = blocks_of_steps(input == 0 ? p.first_steps : p.steps - p.first_steps);
    const int block = split.input(input).first_block() + step - input * first_stages;
    mbarrier_arrive_expect(ring.full(stage), Shape::kWeightBytes);
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(min(tile + i, p.tiles - 1)) * blocks + block;
      bulk_load(weights_at(stage) + i * kBlockBytes<Format>, p.blocks[input] + at * kBlockBytes<Format>,
                kBlockBytes<Format>, ring.full(stage), L2::evict_first);
    }
  };
  launch_dependents();
  const int ahead = min(stages, Shape::kStages);
  if (elected && warp == kConsumerWarps) {
    for (int stage = 0; stage < Shape::kStages; ++stage) ring.init(stage, 2, kConsumerWarps);
    fence_barrier_init();
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
  }
  __syncthreads();
  if (elected && warp == kConsumerWarps) {
    RingPosition at = RingPosition::at(ahead, Shape::kStages);
    for (int step = ahead; step < stages; ++step) {
      ring.wait_empty(at);
      load_weights(at.stage, step);
      at.advance(Shape::kStages);
    }
  } else if (elected) {
    prefetch_tensor_map(&p.x[0]);
    if (p.steps > p.first_steps) prefetch_tensor_map(&p.x[1]);
    if (!p.x_is_older) wait_for_predecessors();
    RingPosition at;
    for (int input = 0; input < 2; ++input) {
      const Segment segment = split.input(input);
      const int begin = segment.first_block() * kBlockDepth, end = begin + segment.blocks() * kBlockDepth;
      for (int k = begin; k < end; k += kBlockDepth) {
        ring.wait_empty(at);
        mbarrier_arrive_expect(ring.full(at.stage), XTile::kBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          tensor_load(x_at(at.stage).column_tile(i).address, &p.x[input], ring.full(at.stage), k + i * kHalfDepth,
                      static_cast<int>(first_row));
        at.advance(Shape::kStages);
      }
    }
  }
  const int count = Columns<T>::count(p.output, kBlockRows), all = count * kConsumers;
  const Columns<T> columns(p.output, static_cast<std::int64_t>(tile + thread % all / count) * kBlockRows,
                           thread % count);  // loads the bias early
  if (consumer) {
    const int group = warp / kWarps, row = warp % kWarps * 16 + lane / 4;  // and row + 8, in the block
    float scales[2];
    if constexpr (!Format::kGrouped) {
      const std::int64_t at = static_cast<std::int64_t>(min(tile + group, p.tiles - 1)) * kBlockRows + row;
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = p.scales[first_stages > 0 ? 0 : 1][at + 8 * i];
    }
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0;
    RingPosition at;
    int previous = -1;  // stage that wgmma may still be reading
    const auto release = [&](int stage) {
      if (stage >= 0 && lane == 0) mbarrier_arrive(ring.empty(stage));
    };
    const auto next = [&] {
      previous = at.stage;
      at.advance(Shape::kStages);
    };
    const auto x = x_at(0).column_tile(0).k_major();
    const unsigned first_block = weights_at(0) + group * kBlockBytes<Format>;
    unsigned a[2][16];
    typename Format::template Group<T> groups[2];
    // Multiplies the one half of a stage that belongs to the split.
    const auto multiply_half_stage = [&](int half) {
      const unsigned block = first_block + at.stage * Shape::kWeightBytes;
      unsigned words[kWords<Format>];
      ring.wait_full(at);
      load_groups<T, Format>(groups, block, row);
      load_half<Format>(words, block, half);
      wgmma_wait<0>();
      release(previous);
      convert_half<T, Format>(a[0], words, groups);
      multiply_half(d, a[0], x.moved(at.stage * XTile::kBytes + half * XTile::kColumnTileBytes));
      wgmma_wait<0>();
      next();
    };
    for (int input = 0; input < 2; ++input) {
      int step = split.input(input).begin;
      const int end = split.input(input).end;
      if (step < end && step % 2 == 1) multiply_half_stage(1), ++step;
      // The words of whole stages are loaded one stage ahead, while wgmma runs.
      unsigned words[2][kWords<Format>];
      const auto load = [&] {
        const unsigned block = first_block + at.stage * Shape::kWeightBytes;
        ring.wait_full(at);
        load_groups<T, Format>(groups, block, row);
#pragma unroll
        for (int i = 0; i < 2; ++i) load_half<Format>(words[i], block, i);
      };
      if (step + 1 < end) load();
      for (; step + 1 < end; step += 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          wgmma_wait<1>();  // at most the wgmma of the other half is in flight
          if (i == 1) release(previous);
          convert_half<T, Format>(a[i], words[i], groups);
          multiply_half(d, a[i], x.moved(at.stage * XTile::kBytes + i * XTile::kColumnTileBytes));
        }
        next();
        if (step + 3 < end) load();
      }
      if (step < end) multiply_half_stage(0);
    }
    wgmma_wait<0>();
    pin(d);
    if constexpr (!Format::kGrouped) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[i] *= scales[i / 2 % 2];
    }
    wait_for_predecessors();                  // earlier kernels may still read what is written below
    named_barrier_wait(1, kConsumerThreads);  // no wgmma of the block reads the stages any more
    rows::store_sums<N / 2>(sums + group * N * kSumsStride + warp % kWarps * 16, kSumsStride, d, lane);
  }
  rows::finish_splits<N, kConsumerThreads>(columns, base, consumer, thread, count, p.splits, rank, first_row,
                                           p.output.rows);
#else
  __trap();
#endif
}

// With one scale a row, no split may chunk both inputs: each input gets splits in proportion to its steps, at least one.
template <typename T>
void divide(Arguments<T>& arguments, const RowsMatmul<T>& io, bool row_scales) {
  arguments.first_steps = static_cast<int>(ceil_div(io.K, kHalfDepth));
  arguments.steps = static_cast<int>(rows::steps_of(io));
  arguments.splits = rows::splits_of(io);
  arguments.first_splits = 0;
  if (!row_scales || io.K2 == 0) return;
  arguments.splits = std::max(2, arguments.splits);
  const int rounded = (2 * arguments.splits * arguments.first_steps + arguments.steps) / (2 * arguments.steps);
  arguments.first_splits = std::clamp(rounded, 1, arguments.splits - 1);
}

template <typename T, typename Format, int N, int kConsumers, int kBlocks>
void launch(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
            const LaunchDevice& device, cudaStream_t stream) {
  using Shape = quantized::Shape<T, Format, N, kConsumers, kBlocks>;
  const auto kernel = quantized_kernel<T, Format, N, kConsumers, kBlocks>;
  Arguments<T> arguments{};
  arguments.x[0] = rows::x_map(io.x, io.K, io.rows, N);
  if (io.K2 > 0) arguments.x[1] = rows::x_map(io.x2, io.K2, io.rows, N);
  arguments.blocks[0] = weight.blocks, arguments.blocks[1] = weight2.blocks;
  arguments.scales[0] = weight.row_scales, arguments.scales[1] = weight2.row_scales;
  arguments.output = rows::Output<T>::of(io);
  arguments.tiles = static_cast<int>(ceil_div(rows::weight_rows(io), kBlockRows));
  arguments.x_is_older = io.x_is_older;
  divide(arguments, io, !Format::kGrouped);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
        "quantized_matmul: shared memory");
  const dim3 grid(static_cast<unsigned>(ceil_div(arguments.tiles, kConsumers) * arguments.splits),
                  static_cast<unsigned>(ceil_div(io.rows, N)));
  launch_chained_clusters(kernel, grid, dim3(Shape::kBlockThreads), Shape::kBytes, stream, device.overlapping,
                          arguments.splits, "quantized_matmul", arguments);
}

template <typename T, typename Format>
void launch_rows(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
                 const LaunchDevice& device, cudaStream_t stream) {
  if (io.rows <= 16) {
    // Three blocks a multiprocessor only where there are enough blocks: otherwise some multiprocessors would get three
    // and others none.
    const std::int64_t blocks = ceil_div(rows::weight_rows(io), kBlockRows) * rows::splits_of(io);
    if (blocks >= 4 * std::int64_t{device.multiprocessors})
      return launch<T, Format, 16, 1, 3>(io, weight, weight2, device, stream);
    return launch<T, Format, 16, 1, 2>(io, weight, weight2, device, stream);
  }
  if (io.rows <= 64) return launch<T, Format, 64, 1, 2>(io, weight, weight2, device, stream);
  launch<T, Format, 128, 2, 1>(io, weight, weight2, device, stream);
}

}  // namespace

template <typename T>
void hopper(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
            const LaunchDevice& device, cudaStream_t stream) {
  for_format(weight.dtype, [&]<typename Format>() { launch_rows<T, Format>(io, weight, weight2, device, stream); });
}

template void hopper(const RowsMatmul<bf16>&, const PackedMatrix&, const PackedMatrix&, const LaunchDevice&,
                     cudaStream_t);
template void hopper(const RowsMatmul<fp16>&, const PackedMatrix&, const PackedMatrix&, const LaunchDevice&,
                     cudaStream_t);

}  // namespace weft::cuda::quantized
