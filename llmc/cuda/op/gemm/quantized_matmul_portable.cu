// quantized_matmul() for sm_80 and later, as rows_matmul_portable.cu: a block computes 64 rows of the weight by some
// rows of x and walks K once, in order. Each thread loads its fragments' words from global memory, one step ahead; x
// goes through shared memory.

#include <algorithm>

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"
#include "llmc/cuda/op/gemm/quantized_matmul.cuh"

namespace weft::cuda::quantized {

namespace {

template <typename T>
struct Arguments {
  const T* x;
  const std::byte* blocks;
  const float* scales;
  std::int64_t K;
  rows::Output<T> output;
};

constexpr int kStages = 3;
constexpr int kSumsStride = kBlockRows + rows::kSumsPadding;
template <typename T, int kRows>
constexpr int kStageBytes = Tile<T, kHalfDepth>::bytes(kRows);
template <typename T, int kRows>
constexpr int kSharedBytes = std::max(kStages* kStageBytes<T, kRows>, kRows* kSumsStride * 4);

// One thread's words for step `step` of 64 of K, and the group words of its two rows.
template <typename Format>
struct Words {
  unsigned words[kWords<Format>];
  unsigned groups[2] = {};

  __device__ void load(const std::byte* blocks, int step, int row) {
    const std::byte* const block = blocks + std::int64_t{step / 2} * kBlockBytes<Format>;
    const std::byte* const half = block + step % 2 * kHalfBytes<Format>;
#pragma unroll
    for (int i = 0; i < kWords<Format> / 4; ++i) {
      const uint4 four = __ldcs(reinterpret_cast<const uint4*>(half + i * kPieceBytes) + threadIdx.x);
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    if constexpr (Format::kGrouped) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        groups[i] = reinterpret_cast<const unsigned*>(block + 2 * kHalfBytes<Format>)[row + 8 * i];
    }
  }
};

template <typename T, typename Format, int kRows>
__global__ void __launch_bounds__(kThreads) quantized_portable_kernel(const Arguments<T> p) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  using XTile = Tile<T, kHalfDepth>;
  using Group = typename Format::template Group<T>;
  const unsigned base = shared_address(dynamic);
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * kRows;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kBlockRows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int row = warp * 16 + lane / 4, steps = static_cast<int>(ceil_div(p.K, kHalfDepth));
  const std::byte* const blocks = p.blocks + block_of(first, 0, p.K) * kBlockBytes<Format>;
  const auto stage = [&](int step) { return base + step % kStages * kStageBytes<T, kRows>; };
  const auto load_x = [&](int step) {
    if (step < steps) {
      for (int i = thread; i < kRows * XTile::kChunks; i += kThreads) {
        const int r = i / XTile::kChunks, chunk = i % XTile::kChunks;
        const std::int64_t k = std::int64_t{step} * kHalfDepth + chunk * 8;
        const bool inside = first_row + r < p.output.rows && k < p.K;
        copy_async(stage(step) + r * XTile::kRowBytes + chunk * 16, inside ? p.x + (first_row + r) * p.K + k : p.x,
                   inside);
      }
    }
    commit_copies();
  };
  launch_dependents();
  Words<Format> next;
  next.load(blocks, 0, row);
  float scales[2] = {1, 1};
  if constexpr (!Format::kGrouped) {
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[i] = p.scales[first + row + 8 * i];
  }
  wait_for_predecessors();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load_x(step);
  Accumulators<1, kRows / 8> sums;
  sums.clear();
  for (int step = 0; step < steps; ++step) {
    const Words<Format> words = next;
    if (step + 1 < steps) next.load(blocks, step + 1, row);
    wait_for_older_copies<kStages - 2>();
    __syncthreads();  // the stage is complete, and no thread reads the previous one any more
    load_x(step + kStages - 1);
    unsigned a[16];
    const Group groups[2] = {Group(words.groups[0]), Group(words.groups[1])};
    convert_half<T, Format>(a, words.words, groups);
    const unsigned x = stage(step) + XTile::lane_by_columns();
#pragma unroll
    for (int k = 0; k < kHalfDepth / 16; ++k) {
      const Fragment weights[1] = {{{a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]}}};
#pragma unroll
      for (int n = 0; n < kRows / 16; ++n)
        multiply_add<T>(sums, weights, load_matrices(x + n * 16 * XTile::kRowBytes + k * 32), 2 * n);
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[0][n][i] *= scales[i / 2];
  float* const shared = reinterpret_cast<float*>(dynamic);
  rows::store_sums<kRows / 2>(shared + warp * 16, kSumsStride, &sums.at[0][0][0], lane);
  __syncthreads();
  const int count = rows::Columns<T>::count(p.output, kBlockRows);
  const rows::Columns<T> columns(p.output, first, thread % count);
  for (int r = thread / count; r < kRows; r += kThreads / count) {
    columns.finish(first_row + r,
                   [&](int i) { return *reinterpret_cast<const float4*>(shared + r * kSumsStride + i); });
  }
}

template <typename T, typename Format, int kRows>
void launch(const RowsMatmul<T>& io, const PackedMatrix& weight, const LaunchDevice& device, cudaStream_t stream) {
  const auto kernel = quantized_portable_kernel<T, Format, kRows>;
  constexpr int kBytes = kSharedBytes<T, kRows>;
  static_assert(kBytes <= 48 << 10);
  const dim3 grid(static_cast<unsigned>(ceil_div(io.rows, kRows)),
                  static_cast<unsigned>(ceil_div(rows::weight_rows(io), kBlockRows)));
  launch_chained(kernel, grid, dim3(kThreads), kBytes, stream, device.overlapping, "quantized_matmul",
                 Arguments<T>{io.x, weight.blocks, weight.row_scales, io.K, rows::Output<T>::of(io)});
}
template <typename T, typename Format>
void launch_rows(const RowsMatmul<T>& io, const PackedMatrix& weight, const LaunchDevice& device, cudaStream_t stream) {
  if (io.rows <= 16) return launch<T, Format, 16>(io, weight, device, stream);
  launch<T, Format, 64>(io, weight, device, stream);
}

}  // namespace

template <typename T>
void portable(const RowsMatmul<T>& io, const PackedMatrix& weight, const LaunchDevice& device, cudaStream_t stream) {
  for_format(weight.dtype, [&]<typename Format>() { launch_rows<T, Format>(io, weight, device, stream); });
}

template void portable(const RowsMatmul<bf16>&, const PackedMatrix&, const LaunchDevice&, cudaStream_t);
template void portable(const RowsMatmul<fp16>&, const PackedMatrix&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda::quantized
