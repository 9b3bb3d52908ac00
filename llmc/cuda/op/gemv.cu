// How the products are laid out:
//  - A block owns a run of neighbouring rows, so that it reads one contiguous piece of the matrix. All blocks of the
//    grid are resident at once, with the same number of rows but for one.
//  - A thread owns the same 16-byte pieces (chunks) of every row and keeps their part of x in registers: x is read and
//    normalized once a block, and nothing but weights moves in the loop.
//  - About eight 16-byte loads a thread are in flight: kRows rows of kChunks chunks. The next ones are issued as soon as the
//    products of the last are formed, before their sums are folded over the warp.
//  - Sums over the warps of a row meet in shared memory after a batch of rows, so no barrier stands in the loop.
//  - The first loads are issued before the predecessor has finished: weights depend on nobody.
//
// Bytes moved: rows K E for elements of E bytes; everything else is a thousandth of that.
#include "llmc/cuda/op/gemv.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"

namespace weft::cuda {

namespace {

constexpr int kMaxBatch = 128;  // rows whose sums wait in shared memory
constexpr int kMaxWarps = 32;

// Weights are read once a token: past L1, and asm volatile so that no compiler moves the load behind the wait for the
// predecessor.
__device__ int4 load_weights(const char* address) {
  int4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

template <typename S>
__device__ void unpack(const int4& pack, float (&values)[Pack<S>::size]) {
  const Pack<S> p = *reinterpret_cast<const Pack<S>*>(&pack);
#pragma unroll
  for (int i = 0; i < Pack<S>::size; ++i) values[i] = to_float(p.value[i]);
}

// A thread's chunks of the rows in flight.
template <typename S, int kChunks, int kRows>
struct WeightStream {
  const char* at[kChunks];  // the chunk in row 0; null: the row has no such chunk
  std::uint32_t stride[kChunks];
  int4 data[kRows][kChunks];

  __device__ void set(int j, const S* matrix, int K, int chunk) {
    const bool inside = chunk * Pack<S>::size < K;
    at[j] = inside ? reinterpret_cast<const char*>(matrix) + std::int64_t{chunk} * 16 : nullptr;
    stride[j] = static_cast<std::uint32_t>(K * sizeof(S));
  }
  __device__ void load(int row, int end) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        data[r][j] = make_int4(0, 0, 0, 0);
        if (row + r < end && at[j] != nullptr)
          data[r][j] = load_weights(at[j] + static_cast<std::uint64_t>(row + r) * stride[j]);
      }
    }
  }
};

// x in registers: as fp32, or packed in its storage type where there is more of it.
template <typename S, int kChunks>
struct WideVector {
  float value[kChunks][Pack<S>::size];
  __device__ void get(int j, float (&x)[Pack<S>::size]) const {
#pragma unroll
    for (int i = 0; i < Pack<S>::size; ++i) x[i] = value[j][i];
  }
};
template <typename S, int kChunks>
struct PackedVector {
  int4 value[kChunks];
  __device__ void get(int j, float (&x)[Pack<S>::size]) const { unpack<S>(value[j], x); }
};

// Sums of kRows values over the warp, halving the number of rows a lane cares about at each step: lane l gets the total
// of row l / (32 / kRows).
template <int kRows>
__device__ float fold(float (&sum)[kRows]) {
  const int lane = threadIdx.x % kWarpSize;
  int offset = kWarpSize / 2;
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? sum[i] : sum[i + half], kept = upper ? sum[i + half] : sum[i];
      sum[i] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
  for (; offset > 0; offset /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], offset);
  return sum[0];
}

// Rows [row, end) of the stream, whose first kRows rows are already on their way. For each row r, one thread calls
// finish(r, sum, prepared), where prepared = prepare(r) was asked of the same thread before the loads of the batch.
template <typename S, int kChunks, int kRows, typename Vector, typename Prepare, typename Finish>
__device__ void stream_rows(WeightStream<S, kChunks, kRows>& stream, const Vector& x, int row, int end,
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
        float values[Pack<S>::size];
        x.get(j, values);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float weights[Pack<S>::size];
          unpack<S>(stream.data[r][j], weights);
#pragma unroll
          for (int i = 0; i < Pack<S>::size; ++i) sum[r] = fmaf(weights[i], values[i], sum[r]);
        }
      }
      stream.load(row + kRows, end);
      const float total = fold(sum);
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

struct RowRange {
  int first, last;
};
__device__ RowRange rows_of_block(std::int64_t rows) {
  return {static_cast<int>(rows * blockIdx.x / gridDim.x), static_cast<int>(rows * (blockIdx.x + 1) / gridDim.x)};
}

__device__ float exact_gelu(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// ---- norm and product -------------------------------------------------------------------------------------------------
template <typename S, int kChunks>
struct NormParameters {
  int4 weight[kChunks], bias[kChunks];

  __device__ void load(const NeoxNorm<S>& norm, std::int64_t K) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int column = static_cast<int>(threadIdx.x + j * blockDim.x) * Pack<S>::size;
      weight[j] = bias[j] = make_int4(0, 0, 0, 0);
      if (column >= K) continue;
      weight[j] = load_weights(reinterpret_cast<const char*>(norm.weight + column));
      if (norm.bias != nullptr) bias[j] = load_weights(reinterpret_cast<const char*>(norm.bias + column));
    }
  }
};

// The residual minus its mean, and 1 / its standard deviation, in two passes over registers.
template <typename S, int kChunks>
__device__ float center(WideVector<S, kChunks>& x, const float* residual, std::int64_t K, float eps, float* scratch) {
  constexpr int kElements = Pack<S>::size;
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

template <typename S, int kChunks, int kRows, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) normed_kernel(const __grid_constant__ NormedGemv<S> io) {
  constexpr int kElements = Pack<S>::size;
  __shared__ float partial[kMaxBatch][kMaxWarps];
  __shared__ float scratch[kWarpSize];
  let_successor_start();
  const RowRange rows = rows_of_block(io.outputs[0].rows + io.outputs[1].rows);
  if (rows.first >= rows.last) return;

  WeightStream<S, kChunks, kRows> stream;
  bool waited = false;
  // Output p has the rows from `offset` on; most blocks have rows of one output only.
  for (int p = 0, offset = 0; p < 2; offset += static_cast<int>(io.outputs[p].rows), ++p) {
    const auto& output = io.outputs[p];
    const int first = max(rows.first - offset, 0), last = min(rows.last - offset, static_cast<int>(output.rows));
    if (first >= last) continue;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      stream.set(j, output.linear.weight, static_cast<int>(io.K), static_cast<int>(threadIdx.x + j * blockDim.x));
    }
    stream.load(first, last);
    WideVector<S, kChunks> x;
    {
      NormParameters<S, kChunks> norm;
      norm.load(output.norm, static_cast<int>(io.K));
      if (!waited) wait_for_predecessors();
      waited = true;
      const float rstd = center<S, kChunks>(x, io.residual, static_cast<int>(io.K), io.eps, scratch);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        float weight[kElements], bias[kElements];
        unpack<S>(norm.weight[j], weight);
        unpack<S>(norm.bias[j], bias);
#pragma unroll
        for (int i = 0; i < kElements; ++i) x.value[j][i] = fmaf(x.value[j][i] * rstd, weight[i], bias[i]);
      }
    }
    stream_rows(
        stream, x, first, last, partial,
        [&](int r) { return output.linear.bias != nullptr ? to_float(output.linear.bias[r]) : 0.0f; },
        [&](int r, float sum, float bias) {
          sum += bias;
          if (output.gelu) sum = exact_gelu(sum);
          if (output.wide_out != nullptr) {
            output.wide_out[r] = sum;
          } else {
            output.out[r] = from_float<S>(sum);
          }
        });
  }
}

// ---- product into the residual ----------------------------------------------------------------------------------------
template <typename S, int kChunks, int kRows, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) joined_kernel(const __grid_constant__ JoinedGemv<S> io) {
  __shared__ float partial[kMaxBatch][kMaxWarps];
  let_successor_start();
  const RowRange rows = rows_of_block(io.rows);
  if (rows.first >= rows.last) return;

  // The rows of both matrices, one behind the other, as one row.
  const int chunks = static_cast<int>(io.inputs[0].K) / Pack<S>::size;
  WeightStream<S, kChunks, kRows> stream;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int chunk = static_cast<int>(threadIdx.x + j * blockDim.x);
    const bool second = chunk >= chunks;
    const auto& input = io.inputs[second ? 1 : 0];
    stream.set(j, input.linear.weight, static_cast<int>(input.K), second ? chunk - chunks : chunk);
  }
  stream.load(rows.first, rows.last);
  wait_for_predecessors();

  PackedVector<S, kChunks> x;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int chunk = static_cast<int>(threadIdx.x + j * blockDim.x);
    const bool second = chunk >= chunks;
    const auto& input = io.inputs[second ? 1 : 0];
    x.value[j] = make_int4(0, 0, 0, 0);
    if (stream.at[j] != nullptr) {
      x.value[j] = *reinterpret_cast<const int4*>(input.x + (second ? chunk - chunks : chunk) * Pack<S>::size);
    }
  }
  stream_rows(
      stream, x, rows.first, rows.last, partial,
      [&](int r) {
        float sum = io.residual[r];
        for (const auto& input : io.inputs) {
          if (input.K > 0 && input.linear.bias != nullptr) sum += to_float(input.linear.bias[r]);
        }
        return sum;
      },
      [&](int r, float sum, float before) { io.residual[r] = before + sum; });
}

// ---- launches ---------------------------------------------------------------------------------------------------------
// The launch bound of a kernel says how many of its threads fit on a multiprocessor: as many blocks as that allows are
// resident at once, and there are no more.
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

template <typename S, int kChunks, int kRows, int kMaxThreads>
void launch_normed(const NormedGemv<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t rows = io.outputs[0].rows + io.outputs[1].rows;
  const Launch launch = launch_of(io.K / Pack<S>::size, kChunks, rows, kRows, kMaxThreads, device);
  launch_chained(normed_kernel<S, kChunks, kRows, kMaxThreads>, launch.grid, launch.block, 0, stream,
                 device.overlapping, "normed_gemv", io);
}

template <typename S, int kChunks, int kRows, int kMaxThreads>
void launch_joined(const JoinedGemv<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t chunks = (io.inputs[0].K + io.inputs[1].K) / Pack<S>::size;
  const Launch launch = launch_of(chunks, kChunks, io.rows, kRows, kMaxThreads, device);
  launch_chained(joined_kernel<S, kChunks, kRows, kMaxThreads>, launch.grid, launch.block, 0, stream,
                 device.overlapping, "joined_gemv", io);
}

template <typename S>
void check_size(std::int64_t size, std::int64_t most, const char* what) {
  if (size % Pack<S>::size != 0 || size > most) {
    fail(Exit::usage, "%s: got an inner size of %lld, expected a multiple of %d up to %lld", what,
         static_cast<long long>(size), Pack<S>::size, static_cast<long long>(most));
  }
}

}  // namespace

LaunchDevice launch_device() {
  return {.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount),
          .overlapping = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
}

template <typename S>
void normed_gemv(const NormedGemv<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  check_size<S>(io.K, kMaxNormedWidth, "normed_gemv");
  const std::int64_t chunks = io.K / Pack<S>::size;
  if (chunks <= 640) return launch_normed<S, 1, 8, 640>(io, device, stream);
  if (chunks <= 2 * 832) return launch_normed<S, 2, 4, 832>(io, device, stream);
  launch_normed<S, 4, 2, 1024>(io, device, stream);
}

template <typename S>
void joined_gemv(const JoinedGemv<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t K = io.inputs[0].K + io.inputs[1].K, most = kMaxJoinedBytes / static_cast<std::int64_t>(sizeof(S));
  check_size<S>(io.inputs[0].K, most, "joined_gemv");
  check_size<S>(K, most, "joined_gemv");
  const std::int64_t chunks = K / Pack<S>::size;
  if (chunks <= 640) return launch_joined<S, 1, 8, 640>(io, device, stream);
  if (chunks <= 2 * 832) return launch_joined<S, 2, 4, 832>(io, device, stream);
  if (chunks <= 4 * 640) return launch_joined<S, 4, 2, 640>(io, device, stream);
  if (chunks <= 5 * 640) return launch_joined<S, 5, 2, 640>(io, device, stream);
  launch_joined<S, 10, 1, 640>(io, device, stream);
}

#define WEFT_INSTANTIATE(S)                                                              \
  template void normed_gemv<S>(const NormedGemv<S>&, const LaunchDevice&, cudaStream_t); \
  template void joined_gemv<S>(const JoinedGemv<S>&, const LaunchDevice&, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
