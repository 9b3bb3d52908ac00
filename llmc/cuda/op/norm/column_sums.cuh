// The second half of sums over rows, for kernels whose blocks each leave partial sums of columns in a workspace: gradients
// of norms and of biases. The blocks are added in order, without atomics.
#pragma once

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/launch.cuh"

namespace weft::cuda::norm_detail {

constexpr int kColumnSums = 5;  // the most in one call: dweight, dbias, dweight2, dbias2, dcolscale of the fused norm

// slot[k]: the index of sum k among those that are requested; -1: not requested. Each takes `capacity` floats: C
// rounded up to whole groups of the row's threads, a multiple of kFinishPositions.
struct ColumnSums {
  float* target[kColumnSums];
  int slot[kColumnSums];
  int count;
  int capacity;
};

// Position of column c in a sum: a thread's columns are chunks of 4, and chunks of adjacent threads are adjacent, so
// that a warp's 16-byte accesses have no bank conflicts.
template <int kRowThreads, int kGroup>
__host__ __device__ constexpr int sum_position(int c) {
  const int group = c / kGroup, chunk = c % kGroup / 4;
  return ((group / kRowThreads * (kGroup / 4) + chunk) * kRowThreads + group % kRowThreads) * 4 + c % 4;
}
template <int kRowThreads, int kGroup>
__device__ constexpr int column_at(int position) {
  const int piece = position / 4, rest = piece / kRowThreads, chunks = kGroup / 4;
  return (rest / chunks * kRowThreads + piece % kRowThreads) * kGroup + rest % chunks * 4 + position % 4;
}

constexpr int kFinishPositions = 8, kFinishLanes = kWarpSize;  // a sector of memory; one warp for each of its sums

// target[c] += sum of partial[block][k][c] over the blocks: 32 lanes take every 32nd block each and are then added as a
// tree. May start before the kernel that writes the partial sums has ended.
template <int kRowThreads, int kGroup>
__global__ void __launch_bounds__(kFinishPositions* kFinishLanes)
    finish_columns_kernel(ColumnSums columns, const float* partial, int blocks, int C) {
  __shared__ float lane_sum[kFinishLanes][kFinishPositions + 1];
  float* target = nullptr;  // selected with constant indices: a run-time index would put the struct in local memory
  int slot = 0;
#pragma unroll
  for (int k = 0; k < kColumnSums; ++k) {
    if (columns.slot[k] == static_cast<int>(blockIdx.y)) target = columns.target[k], slot = columns.slot[k];
  }
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int c = column_at<kRowThreads, kGroup>(blockIdx.x * kFinishPositions + warp);
  float old = 0;
  if (lane == 0 && c < C) old = target[c];  // no kernel of the chain writes it
  wait_for_predecessors();
  const int x = threadIdx.x % kFinishPositions, y = threadIdx.x / kFinishPositions;
  const std::int64_t size = static_cast<std::int64_t>(columns.count) * columns.capacity;
  const float* first = partial + slot * columns.capacity + blockIdx.x * kFinishPositions + x;
  float sum = 0;
#pragma unroll 8
  for (int block = y; block < blocks; block += kFinishLanes) sum += first[block * size];
  lane_sum[y][x] = sum;
  __syncthreads();
  sum = warp_sum(lane_sum[lane][warp]);
  if (lane == 0 && c < C) target[c] = old + sum;
}

// Adds the partial sums [blocks][columns.count][columns.capacity] in the workspace, in which column c has position
// sum_position<kRowThreads, kGroup>(c), to their targets [C].
template <int kRowThreads, int kGroup>
void finish_columns(const ColumnSums& columns, const void* workspace, unsigned blocks, std::int64_t C,
                    cudaStream_t stream) {
  if (columns.count == 0) return;
  const dim3 grid(static_cast<unsigned>(columns.capacity / kFinishPositions), static_cast<unsigned>(columns.count));
  const bool overlapping = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  launch_chained(finish_columns_kernel<kRowThreads, kGroup>, grid, dim3(kFinishPositions * kFinishLanes), 0, stream,
                 overlapping, "column sums", columns, static_cast<const float*>(workspace), static_cast<int>(blocks),
                 static_cast<int>(C));
}
// The same where column c lies at position c.
inline void finish_columns(const ColumnSums& columns, const void* workspace, unsigned blocks, std::int64_t C,
                           cudaStream_t stream) {
  static_assert(sum_position<1, 4>(1) == 1 && sum_position<1, 4>(70) == 70);
  finish_columns<1, 4>(columns, workspace, blocks, C, stream);
}

}  // namespace weft::cuda::norm_detail
