// rows_matmul() for sm_80 and later: mma.sync in 16 bits, fused multiply-adds in fp32.
//
// A block computes a tile of the result: 32 or 64 rows of the weight, as rows of operand A, by some rows of x, as
// columns of B. It walks K once, in order, with each element in one accumulator, so that the bits depend neither on the
// size of the tile nor on the other rows. Copies run some stages ahead. Blocks that share rows of the weight are
// neighbours in the grid.

#include <algorithm>
#include <type_traits>

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"
#include "llmc/cuda/op/gemm/rows_matmul.cuh"

namespace weft::cuda::rows {

namespace {

template <typename S>
struct Arguments {
  const S *x, *weight;
  std::int64_t K;
  Output<S> output;
};

// A thread's share of copying `Rows` rows to shared memory, Depth elements of each at a time.
template <typename S, int Rows, int Depth, int Stride, int Threads>
class RowCopies {
 public:
  // row_of(r): the row of `data` [., K] that is row r of the tile; negative: row r is zeros.
  template <typename RowOf>
  __device__ RowCopies(const S* data, std::int64_t K, const RowOf& row_of) : data_(data), K_(K) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * Threads, r = index / kPieces;
      const std::int64_t row = r < Rows ? row_of(r) : -1;
      from_[i] = row < 0 ? nullptr : data + row * K + index % kPieces * kPiece;
    }
  }
  // Copies elements k to k + Depth of each row, zeros from K on. K is a multiple of kPiece.
  __device__ void load(unsigned tile, std::int64_t k) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * Threads, r = index / kPieces, piece = index % kPieces;
      if (Rows * kPieces % Threads != 0 && r >= Rows) break;
      const bool inside = from_[i] != nullptr && k + piece * kPiece < K_;
      copy_async(tile + r * (Stride * static_cast<int>(sizeof(S))) + piece * 16, inside ? from_[i] + k : data_, inside);
    }
  }

 private:
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(S)), kPieces = Depth / kPiece;
  static constexpr int kCount = (Rows * kPieces + Threads - 1) / Threads;
  const S* data_;
  std::int64_t K_;
  const S* from_[kCount];
};

// 16 bits: each warp computes 16 rows of the weight by all kRows rows of x.
template <typename T, int Warps, int Rows, int Depth, int Stages>
struct TensorCores {
  using S = T;
  static constexpr int kThreads = Warps * kWarpSize, kWeightRows = 16 * Warps, kRows = Rows;
  static constexpr int kDepth = Depth, kStride = Tile<S, Depth>::kStride, kStages = Stages;
  static constexpr int kSumsStride = kWeightRows + kSumsPadding;

  Accumulators<1, Rows / 8> sums;
  __device__ TensorCores() { sums.clear(); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ void multiply(unsigned weight, unsigned x) {
    const LeftOperand<S, Depth, 1> a(weight + warp() * 16 * Tile<S, Depth>::kRowBytes);
    multiply_by_rows<S, Depth>(sums, a, x + Tile<S, Depth>::lane_by_columns());
  }
  __device__ void store(float* to) const {
    store_sums<Rows / 2>(to + warp() * 16, kSumsStride, &sums.at[0][0][0], static_cast<int>(threadIdx.x) % kWarpSize);
  }
};

// fp32: thread (u, v) of 16 x 16 computes rows u + 16 i of the weight by rows v + 16 j of x. A row of the tile is an
// odd number of 16-byte pieces, so that 8 consecutive rows begin in different banks.
template <int Rows, int Stages>
struct FusedMultiplyAdd {
  using S = float;
  static constexpr int kThreads = 256, kWeightRows = 64, kRows = Rows;
  static constexpr int kDepth = 32, kStride = kDepth + 4, kStages = Stages;
  static constexpr int kSumsStride = kWeightRows + kSumsPadding;
  static constexpr int kI = kWeightRows / 16, kJ = Rows / 16;

  float sums[kI][kJ];
  __device__ FusedMultiplyAdd() {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j) sums[i][j] = 0;
  }
  __device__ static float4 four(unsigned tile, int row, int k) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(tile + (row * kStride + k) * 4)
                 : "memory");
    return value;
  }
  __device__ void multiply(unsigned weight, unsigned x) {
    const int u = static_cast<int>(threadIdx.x) % 16, v = static_cast<int>(threadIdx.x) / 16;
#pragma unroll 2
    for (int k = 0; k < kDepth; k += 4) {
      float4 a[kI], b[kJ];
#pragma unroll
      for (int i = 0; i < kI; ++i) a[i] = four(weight, u + 16 * i, k);
#pragma unroll
      for (int j = 0; j < kJ; ++j) b[j] = four(x, v + 16 * j, k);
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int j = 0; j < kJ; ++j) {
          float& sum = sums[i][j];
          sum = fmaf(a[i].x, b[j].x, sum);
          sum = fmaf(a[i].y, b[j].y, sum);
          sum = fmaf(a[i].z, b[j].z, sum);
          sum = fmaf(a[i].w, b[j].w, sum);
        }
    }
  }
  __device__ void store(float* to) const {
    const int u = static_cast<int>(threadIdx.x) % 16, v = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j) to[(v + 16 * j) * kSumsStride + u + 16 * i] = sums[i][j];
  }
};

template <typename Math>
constexpr int kWeightBytes = Math::kWeightRows* Math::kStride* static_cast<int>(sizeof(typename Math::S));
template <typename Math>
constexpr int kStageBytes = kWeightBytes<Math> + Math::kRows* Math::kStride* static_cast<int>(sizeof(typename Math::S));
template <typename Math>
constexpr int kSharedBytes = std::max(Math::kStages* kStageBytes<Math>, Math::kRows* Math::kSumsStride * 4);

template <typename Math>
__global__ void __launch_bounds__(Math::kThreads) rows_portable_kernel(const Arguments<typename Math::S> p) {
  using S = typename Math::S;
  extern __shared__ __align__(16) unsigned char dynamic[];
  const unsigned base = shared_address(dynamic);
  const Output<S>& output = p.output;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * Math::kRows;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * Math::kWeightRows;
  const RowCopies<S, Math::kWeightRows, Math::kDepth, Math::kStride, Math::kThreads> weight(
      p.weight, p.K, [&](int r) -> std::int64_t {
        const std::int64_t row = first + r;
        if (!output.gated()) return row < output.OC ? row : -1;
        const std::int64_t unit = row / 16 * 8 + row % 8;
        return unit < output.OC ? row / 8 % 2 * output.OC + unit : -1;
      });
  const RowCopies<S, Math::kRows, Math::kDepth, Math::kStride, Math::kThreads> x(
      p.x, p.K, [&](int r) -> std::int64_t { return first_row + r < output.rows ? first_row + r : -1; });
  const int steps = static_cast<int>(ceil_div(p.K, Math::kDepth));
  const auto stage = [&](int step) { return base + step % Math::kStages * kStageBytes<Math>; };
  constexpr int kAhead = Math::kStages - 1;
  launch_dependents();
#pragma unroll
  for (int step = 0; step < kAhead; ++step)
    if (step < steps) weight.load(stage(step), step * Math::kDepth);
  wait_for_predecessors();
#pragma unroll
  for (int step = 0; step < kAhead; ++step) {  // the first commit group also holds the weights of all of these stages
    if (step < steps) x.load(stage(step) + kWeightBytes<Math>, step * Math::kDepth);
    commit_copies();
  }
  Math math;
  for (int step = 0; step < steps; ++step) {
    wait_for_older_copies<kAhead - 1>();
    __syncthreads();  // the stage is complete, and no thread reads the previous one any more
    const int next = step + kAhead;
    if (next < steps) {
      weight.load(stage(next), static_cast<std::int64_t>(next) * Math::kDepth);
      x.load(stage(next) + kWeightBytes<Math>, static_cast<std::int64_t>(next) * Math::kDepth);
    }
    commit_copies();
    math.multiply(stage(step), stage(step) + kWeightBytes<Math>);
  }
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(dynamic);
  math.store(sums);
  __syncthreads();
  const int count = Columns<S>::count(output, Math::kWeightRows), thread = static_cast<int>(threadIdx.x);
  const Columns<S> columns(output, first, thread % count);
  for (int r = thread / count; r < Math::kRows; r += Math::kThreads / count) {
    columns.finish(first_row + r,
                   [&](int i) { return *reinterpret_cast<const float4*>(sums + r * Math::kSumsStride + i); });
  }
}

template <typename Math>
void launch(const RowsMatmul<typename Math::S>& io, const LaunchDevice& device, cudaStream_t stream) {
  using S = typename Math::S;
  const auto kernel = rows_portable_kernel<Math>;
  constexpr int kBytes = kSharedBytes<Math>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "rows_matmul: shared memory");
  const dim3 grid(static_cast<unsigned>(ceil_div(io.rows, Math::kRows)),
                  static_cast<unsigned>(ceil_div(weight_rows(io), Math::kWeightRows)));
  launch_chained(kernel, grid, dim3(Math::kThreads), kBytes, stream, device.overlapping, "rows_matmul",
                 Arguments<S>{io.x, io.weight, io.K, Output<S>::of(io)});
}

}  // namespace

template <typename S>
void portable(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  if constexpr (std::is_same_v<S, float>) {
    if (io.rows <= 16) return launch<FusedMultiplyAdd<16, 6>>(io, device, stream);
    launch<FusedMultiplyAdd<64, 4>>(io, device, stream);
  } else {
    // tiles of 64 rows would leave multiprocessors idle
    const bool narrow = ceil_div(weight_rows(io), 64) < device.multiprocessors;
    if (io.rows <= 16) {
      if (narrow) return launch<TensorCores<S, 2, 16, 64, 8>>(io, device, stream);
      return launch<TensorCores<S, 4, 16, 64, 6>>(io, device, stream);
    }
    if (io.rows <= 64) {
      if (narrow) return launch<TensorCores<S, 2, 64, 64, 5>>(io, device, stream);
      return launch<TensorCores<S, 4, 64, 64, 4>>(io, device, stream);
    }
    launch<TensorCores<S, 4, 128, 32, 4>>(io, device, stream);
  }
}

template void portable<float>(const RowsMatmul<float>&, const LaunchDevice&, cudaStream_t);
template void portable<bf16>(const RowsMatmul<bf16>&, const LaunchDevice&, cudaStream_t);
template void portable<fp16>(const RowsMatmul<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda::rows
