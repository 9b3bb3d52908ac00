#include "test/gpu/late_writer.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/block.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/hw/memory_order.cuh"

namespace weft::cuda {

namespace {

constexpr int kMostLooks = 2'000'000;  // at the clock: the watchdog of a clock that stands still

struct Copies {
  LateCopy copy[kMaxLateCopies];
  int count;
};

__global__ void __launch_bounds__(kWarpSize)
    late_kernel(const __grid_constant__ Copies copies, std::uint64_t nanoseconds) {
  launch_dependents();
  const std::uint64_t start = global_time();
  for (int i = 0; i < kMostLooks && global_time() - start < nanoseconds; ++i) __nanosleep(500);
  for (int c = 0; c < copies.count; ++c) {
    const LateCopy& copy = copies.copy[c];
    const std::size_t packs = copy.bytes / sizeof(uint4);
    auto* const to = static_cast<uint4*>(copy.to);
    const auto* const from = static_cast<const uint4*>(copy.from);
#pragma unroll 8
    for (std::size_t i = threadIdx.x; i < packs; i += kWarpSize) to[i] = from[i];
    for (std::size_t i = packs * sizeof(uint4) + threadIdx.x; i < copy.bytes; i += kWarpSize) {
      static_cast<char*>(copy.to)[i] = static_cast<const char*>(copy.from)[i];
    }
  }
}

__global__ void copy_kernel(int* to, const int* from, int count, bool waits) {
  if (waits) wait_for_predecessors();
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = __ldcg(from + i);
}

}  // namespace

void write_late(std::span<const LateCopy> copies, int microseconds, cudaStream_t stream) {
  if (copies.size() > kMaxLateCopies || microseconds < 0 || microseconds > 1'000'000) {
    fail(Exit::internal, "write_late: %zu copies after %d us", copies.size(), microseconds);
  }
  Copies all{};
  std::copy(copies.begin(), copies.end(), all.copy);
  all.count = static_cast<int>(copies.size());
  late_kernel<<<1, kWarpSize, 0, stream>>>(all, static_cast<std::uint64_t>(microseconds) * 1000);
  check_launch("write_late");
}

void copy_chained(int* to, const int* from, int count, bool waits, bool overlapping, cudaStream_t stream) {
  launch_chained(copy_kernel, dim3(1), dim3(128), 0, stream, overlapping, "copy_chained", to, from, count, waits);
}

}  // namespace weft::cuda
