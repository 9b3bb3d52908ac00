// How a GEMV is laid out:
//  - A block owns a range of consecutive rows, so it reads one contiguous range of the matrix. All blocks of the grid
//    are resident at once and own the same number of rows, give or take one.
//  - A thread owns the same 16-byte chunks of every row and keeps the matching elements of x in registers: x is read
//    and normalized once a block, and the loop loads nothing but weights.
//  - About eight 16-byte loads a thread are in flight: kRows rows of kChunks chunks. The next ones are issued as soon
//    as the previous ones are multiplied, before their sums are folded over the warp.
//  - The warps' sums of a row are added in shared memory after a batch of rows, so that the inner loop has no barrier.
//  - The first loads are issued before the predecessor has ended: no kernel writes weights.
//
// Bytes moved: rows K E for elements of E bytes; everything else is a thousandth of that.
#include "llmc/cuda/op/gemm/gemv.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/warp_fold.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"

namespace weft::cuda {

namespace {

constexpr int kMaxBatch = 128;  // rows whose partial sums are in shared memory at once
constexpr int kMaxWarps = 32;

// Weights are read once a token, so they bypass L1. asm volatile keeps the compiler from moving the load to after the
// wait for the predecessor.
__device__ int4 load_weights(const char* address) {
  int4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// kCount consecutive elements in their storage type.
template <typename T, int kCount>
struct Packed {
  static constexpr int kPieces = kCount * static_cast<int>(sizeof(T)) / 16;
  static_assert(kPieces > 0, "activations are at least as wide as weights");
  int4 piece[kPieces];

  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) piece[p] = make_int4(0, 0, 0, 0);
  }
  __device__ void load(const T* address) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) piece[p] = reinterpret_cast<const int4*>(address)[p];
  }
  __device__ void load_early(const T* address) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) piece[p] = load_weights(reinterpret_cast<const char*>(address) + 16 * p);
  }
  __device__ void get(float (&values)[kCount]) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(&piece[p]);
#pragma unroll
      for (int i = 0; i < Pack<T>::size; ++i) values[p * Pack<T>::size + i] = to_float(pack.value[i]);
    }
  }
};

// A thread's chunks of the rows in flight.
template <typename W, int kChunks, int kRows>
struct WeightStream {
  using Chunk = Packed<W, Pack<W>::size>;
  const char* at[kChunks];  // the chunk in row 0; null: the row has no such chunk
  std::uint32_t stride[kChunks];
  Chunk data[kRows][kChunks];

  __device__ void set(int j, const W* matrix, int K, int chunk) {
    const bool inside = chunk * Pack<W>::size < K;
    at[j] = inside ? reinterpret_cast<const char*>(matrix) + std::int64_t{chunk} * 16 : nullptr;
    stride[j] = static_cast<std::uint32_t>(K * sizeof(W));
  }
  __device__ void load(int row, int end) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        data[r][j].clear();
        if (row + r < end && at[j] != nullptr)
          data[r][j].load_early(reinterpret_cast<const W*>(at[j] + static_cast<std::uint64_t>(row + r) * stride[j]));
      }
    }
  }
};

// x in registers, kElements for each chunk: as fp32, or in its storage type where a thread holds more of it.
template <int kElements, int kChunks>
struct Fp32Vector {
  float value[kChunks][kElements];
  __device__ void get(int j, float (&x)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = value[j][i];
  }
};
template <typename A, int kElements, int kChunks>
struct PackedVector {
  Packed<A, kElements> value[kChunks];
  __device__ void get(int j, float (&x)[kElements]) const { value[j].get(x); }
};

// Multiplies rows [row, end); the loads of the first kRows rows have been issued. For each row r one thread calls
// finish(r, sum, prepared), with prepared = prepare(r) called by the same thread before the batch.
template <typename W, int kChunks, int kRows, typename Vector, typename Prepare, typename Finish>
__device__ void stream_rows(WeightStream<W, kChunks, kRows>& stream, const Vector& x, int row, int end,
                            float (*partial)[kMaxWarps], const Prepare& prepare, const Finish& finish) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int batch = min(static_cast<int>(blockDim.x), kMaxBatch);
  for (int first = row; first < end; first += batch) {
    const int batch_end = min(first + batch, end), mine = first + static_cast<int>(threadIdx.x);
    const bool finishing = mine < batch_end;
    float prepared = 0;
    if (finishing) prepared = prepare(mine);
    for (; row < batch_end; row += kRows) {
      float sum[kRows] = {};
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        float values[Pack<W>::size];
        x.get(j, values);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float weights[Pack<W>::size];
          stream.data[r][j].get(weights);
#pragma unroll
          for (int i = 0; i < Pack<W>::size; ++i) sum[r] = fmaf(weights[i], values[i], sum[r]);
        }
      }
      stream.load(row + kRows, end);
      const float total = warp_fold(sum, lane);
      constexpr int kLanesPerRow = kWarpSize / kRows;
      const int owned = row + lane / kLanesPerRow;
      if (lane % kLanesPerRow == 0 && owned < batch_end) partial[owned - first][warp] = total;
    }
    __syncthreads();
    if (finishing) {
      float total = 0;
      for (int w = 0; w < warps; ++w) total += partial[threadIdx.x][w];
      finish(mine, total, prepared);
    }
    __syncthreads();
  }
}

__device__ RowRange rows_of_block(std::int64_t rows) {
  return {static_cast<int>(rows * blockIdx.x / gridDim.x), static_cast<int>(rows * (blockIdx.x + 1) / gridDim.x)};
}

// ---- norm and GEMV ----------------------------------------------------------------------------------------------------
template <typename A, int kElements, int kChunks>
struct NormTerms {
  Packed<A, kElements> weight[kChunks], bias[kChunks];

  __device__ void load(const Norm<A>& norm, std::int64_t K) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int column = static_cast<int>(threadIdx.x + j * blockDim.x) * kElements;
      weight[j].clear();
      bias[j].clear();
      if (column >= K) continue;
      weight[j].load_early(norm.weight + column);
      if (norm.bias != nullptr) bias[j].load_early(norm.bias + column);
    }
  }
};

// x = the residual minus its mean; returns 1 / sqrt(variance + eps). Two passes over registers.
template <int kElements, int kChunks>
__device__ float center(Fp32Vector<kElements, kChunks>& x, const float* residual, std::int64_t K, float eps,
                        float* scratch) {
  const auto column = [](int j) { return static_cast<int>(threadIdx.x + j * blockDim.x) * kElements; };
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    Elements<float, kElements> values;
    values.clear();
    if (column(j) < K) values.load(residual + column(j));
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum += x.value[j][i] = values.value[i];
  }
  const float mean = block_sum(sum, scratch) / static_cast<float>(K);
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    if (column(j) >= K) continue;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x.value[j][i] -= mean;
      squares = fmaf(x.value[j][i], x.value[j][i], squares);
    }
  }
  return 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(K) + eps);
}

template <typename W, typename A, int kChunks, int kRows, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) norm_gemv_kernel(const __grid_constant__ NormGemv<W, A> io) {
  constexpr int kElements = Pack<W>::size;
  __shared__ float partial[kMaxBatch][kMaxWarps];
  __shared__ float scratch[kWarpSize];
  launch_dependents();
  const RowRange rows = rows_of_block(io.outputs[0].rows + io.outputs[1].rows);
  if (rows.begin >= rows.end) return;

  WeightStream<W, kChunks, kRows> stream;
  bool waited = false;
  // Output p has the rows from `offset` on; most blocks have rows of one output only.
  for (int p = 0, offset = 0; p < 2; offset += static_cast<int>(io.outputs[p].rows), ++p) {
    const auto& output = io.outputs[p];
    const int first = max(rows.begin - offset, 0), last = min(rows.end - offset, static_cast<int>(output.rows));
    if (first >= last) continue;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      stream.set(j, output.linear.weight, static_cast<int>(io.K), static_cast<int>(threadIdx.x + j * blockDim.x));
    }
    stream.load(first, last);
    Fp32Vector<kElements, kChunks> x;
    {
      NormTerms<A, kElements, kChunks> norm;
      norm.load(output.norm, static_cast<int>(io.K));
      if (!waited) wait_for_predecessors();
      waited = true;
      const float rstd = center(x, io.residual, static_cast<int>(io.K), io.eps, scratch);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        float weight[kElements], bias[kElements];
        norm.weight[j].get(weight);
        norm.bias[j].get(bias);
#pragma unroll
        for (int i = 0; i < kElements; ++i) x.value[j][i] = fmaf(x.value[j][i] * rstd, weight[i], bias[i]);
      }
    }
    stream_rows(
        stream, x, first, last, partial,
        [&](int r) { return output.linear.bias != nullptr ? to_float(output.linear.bias[r]) : 0.0f; },
        [&](int r, float sum, float bias) {
          sum += bias;
          if (output.gelu) sum = gelu_exact(sum);
          if (output.fp32_out != nullptr) {
            output.fp32_out[r] = sum;
          } else {
            output.out[r] = from_float<A>(sum);
          }
        });
  }
}

// ---- GEMV into the residual -------------------------------------------------------------------------------------------
template <typename W, typename A, int kChunks, int kRows, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) residual_gemv_kernel(const __grid_constant__ ResidualGemv<W, A> io) {
  constexpr int kElements = Pack<W>::size;
  __shared__ float partial[kMaxBatch][kMaxWarps];
  launch_dependents();
  const RowRange rows = rows_of_block(io.rows);
  if (rows.begin >= rows.end) return;

  // A row is the first matrix's row followed by the second matrix's.
  const int chunks = static_cast<int>(io.inputs[0].K) / kElements;
  WeightStream<W, kChunks, kRows> stream;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int chunk = static_cast<int>(threadIdx.x + j * blockDim.x);
    const bool second = chunk >= chunks;
    const auto& input = io.inputs[second ? 1 : 0];
    stream.set(j, input.linear.weight, static_cast<int>(input.K), second ? chunk - chunks : chunk);
  }
  stream.load(rows.begin, rows.end);
  wait_for_predecessors();

  PackedVector<A, kElements, kChunks> x;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int chunk = static_cast<int>(threadIdx.x + j * blockDim.x);
    const bool second = chunk >= chunks;
    const auto& input = io.inputs[second ? 1 : 0];
    x.value[j].clear();
    if (stream.at[j] != nullptr) x.value[j].load(input.x + (second ? chunk - chunks : chunk) * kElements);
  }
  stream_rows(
      stream, x, rows.begin, rows.end, partial,
      [&](int r) {
        float sum = io.residual[r];
        for (const auto& input : io.inputs) {
          if (input.K > 0 && input.linear.bias != nullptr) sum += to_float(input.linear.bias[r]);
        }
        return sum;
      },
      [&](int r, float sum, float before) { io.residual[r] = before + sum; });
}

// max_threads is the kernel's launch bound: as many blocks as fit into that many threads are resident on a
// multiprocessor, and no more are launched.
struct Launch {
  dim3 grid, block;
};
Launch launch_of(std::int64_t chunks, int chunks_per_thread, std::int64_t rows, int rows_in_flight, int max_threads,
                 const LaunchDevice& device) {
  const std::int64_t threads = ceil_div(ceil_div(chunks, chunks_per_thread), kWarpSize) * kWarpSize;
  const std::int64_t blocks = std::clamp<std::int64_t>(max_threads / threads, 1, 8);
  const std::int64_t grid = std::min(device.multiprocessors * blocks, ceil_div(rows, rows_in_flight));
  return {dim3(static_cast<unsigned>(grid)), dim3(static_cast<unsigned>(threads))};
}

template <typename W, typename A, int kChunks, int kRows, int kMaxThreads>
void launch_norm_gemv(const NormGemv<W, A>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t rows = io.outputs[0].rows + io.outputs[1].rows;
  const Launch launch = launch_of(io.K / Pack<W>::size, kChunks, rows, kRows, kMaxThreads, device);
  launch_chained(norm_gemv_kernel<W, A, kChunks, kRows, kMaxThreads>, launch.grid, launch.block, 0, stream,
                 device.overlapping, "norm_gemv", io);
}

template <typename W, typename A, int kChunks, int kRows, int kMaxThreads>
void launch_residual_gemv(const ResidualGemv<W, A>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t chunks = (io.inputs[0].K + io.inputs[1].K) / Pack<W>::size;
  const Launch launch = launch_of(chunks, kChunks, io.rows, kRows, kMaxThreads, device);
  launch_chained(residual_gemv_kernel<W, A, kChunks, kRows, kMaxThreads>, launch.grid, launch.block, 0, stream,
                 device.overlapping, "residual_gemv", io);
}

template <typename W>
void check_size(std::int64_t size, std::int64_t most, const char* what) {
  if (size % Pack<W>::size != 0 || size > most) {
    fail(Exit::usage, "%s: got an inner size of %lld, expected a multiple of %d up to %lld", what,
         static_cast<long long>(size), Pack<W>::size, static_cast<long long>(most));
  }
}

}  // namespace

LaunchDevice launch_device() {
  return {.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount),
          .overlapping = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
}

template <typename W, typename A>
void norm_gemv(const NormGemv<W, A>& io, const LaunchDevice& device, cudaStream_t stream) {
  check_size<W>(io.K, kMaxNormGemvWidth, "norm_gemv");
  const std::int64_t chunks = io.K / Pack<W>::size;
  if (chunks <= 640) return launch_norm_gemv<W, A, 1, 8, 640>(io, device, stream);
  if (chunks <= 2 * 832) return launch_norm_gemv<W, A, 2, 4, 832>(io, device, stream);
  launch_norm_gemv<W, A, 4, 2, 1024>(io, device, stream);
}

template <typename W, typename A>
void residual_gemv(const ResidualGemv<W, A>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t K = io.inputs[0].K + io.inputs[1].K,
                     most = kMaxResidualGemvBytes / static_cast<std::int64_t>(sizeof(W));
  check_size<W>(io.inputs[0].K, most, "residual_gemv");
  check_size<W>(K, most, "residual_gemv");
  const std::int64_t chunks = K / Pack<W>::size;
  if (chunks <= 640) return launch_residual_gemv<W, A, 1, 8, 640>(io, device, stream);
  if (chunks <= 2 * 832) return launch_residual_gemv<W, A, 2, 4, 832>(io, device, stream);
  if (chunks <= 4 * 640) return launch_residual_gemv<W, A, 4, 2, 640>(io, device, stream);
  if (chunks <= 5 * 640) return launch_residual_gemv<W, A, 5, 2, 640>(io, device, stream);
  launch_residual_gemv<W, A, 10, 1, 640>(io, device, stream);
}

#define WEFT_INSTANTIATE(W, A)                                                             \
  template void norm_gemv<W, A>(const NormGemv<W, A>&, const LaunchDevice&, cudaStream_t); \
  template void residual_gemv<W, A>(const ResidualGemv<W, A>&, const LaunchDevice&, cudaStream_t);
WEFT_INSTANTIATE(float, float)
WEFT_INSTANTIATE(bf16, bf16)
WEFT_INSTANTIATE(fp16, fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
