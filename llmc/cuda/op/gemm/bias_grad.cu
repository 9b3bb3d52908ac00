// Sums over the rows of a matrix. Block (x, y) adds chunk y of the rows of 32 groups of columns: each of its warps every
// 8th row, then the warps in order. A second kernel adds the chunks in order. dout is read once.
#include "llmc/cuda/op/gemm/bias_grad.h"

#include <algorithm>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/norm/column_sums.cuh"

namespace weft::cuda {

namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;
constexpr std::int64_t kMaxChunks = 128,
                       kLeastRows = 64;  // chunks of the rows, and rows of a chunk where there are few

// A code in e5m2, which is the upper half of an fp16.
struct E5m2 {
  std::uint8_t code;
};
__device__ float to_float(E5m2 value) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(value.code << 8)));
}

// scale: of codes; null: 1.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    bias_grad_kernel(float* partial, int capacity, const T* dout, const float* scale, std::int64_t N, std::int64_t OC,
                     std::int64_t chunk_rows) {
  constexpr int kColumns = kWarpSize * kCount;
  __shared__ float sums[kWarps][kColumns];
  launch_dependents();  // the successor waits for the end of this kernel; only its launch latency is hidden
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kColumns, column = first + lane * kCount;
  const std::int64_t begin = blockIdx.y * chunk_rows, end = begin + chunk_rows < N ? begin + chunk_rows : N;
  float sum[kCount] = {};
  if (column < OC) {
#pragma unroll 4
    for (std::int64_t row = begin + warp; row < end; row += kWarps) {
      Elements<T, kCount> values;
      values.load(dout + row * OC + column);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += values.get(i);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[warp][lane * kCount + i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < kColumns && first + c < OC; c += kThreads) {
    float total = sums[0][c];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w][c];
    partial[static_cast<std::int64_t>(blockIdx.y) * capacity + first + c] = scale != nullptr ? total * *scale : total;
  }
}

// Floats of a partial sum.
std::int64_t capacity_for(std::int64_t OC) {
  return ceil_div(OC, norm_detail::kFinishPositions) * norm_detail::kFinishPositions;
}

template <typename T>
void add_rows(float* dbias, const T* dout, const float* scale, std::int64_t N, std::int64_t OC, void* workspace,
              cudaStream_t stream) {
  if (N == 0) return;
  constexpr int kWide = std::min(8, 16 / static_cast<int>(sizeof(T)));
  const std::int64_t chunk_rows = ceil_div(N, std::min(kMaxChunks, ceil_div(N, kLeastRows)));
  const auto chunks = static_cast<unsigned>(ceil_div(N, chunk_rows));
  const auto capacity = static_cast<int>(capacity_for(OC));
  with_count<kWide>(OC % kWide == 0 && aligned_to_16(dout), [&](auto count) {
    const dim3 grid(static_cast<unsigned>(ceil_div(OC, kWarpSize * count)), chunks);
    bias_grad_kernel<T, count>
        <<<grid, kThreads, 0, stream>>>(static_cast<float*>(workspace), capacity, dout, scale, N, OC, chunk_rows);
  });
  check_launch("bias_grad");
  norm_detail::finish_columns({{dbias}, {0, -1, -1, -1, -1}, 1, capacity}, workspace, chunks, OC, stream);
}

}  // namespace

template <typename T>
void bias_grad(float* dbias, const T* dout, std::int64_t N, std::int64_t OC, void* workspace, cudaStream_t stream) {
  add_rows(dbias, dout, nullptr, N, OC, workspace, stream);
}

void bias_grad_fp8(float* dbias, const Fp8Matrix& dout, std::int64_t N, std::int64_t OC, void* workspace,
                   cudaStream_t stream) {
  add_rows(dbias, reinterpret_cast<const E5m2*>(dout.codes), dout.scale, N, OC, workspace, stream);
}

std::size_t bias_grad_workspace(std::int64_t OC) {
  return static_cast<std::size_t>(kMaxChunks * capacity_for(OC)) * sizeof(float);
}

#define WEFT_INSTANTIATE(T) \
  template void bias_grad<T>(float*, const T*, std::int64_t, std::int64_t, void*, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
