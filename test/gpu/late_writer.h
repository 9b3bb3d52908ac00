// A predecessor that a chain of launches (hw/launch.cuh) may have, as unkind as possible: its successor starts at once, and
// what it writes, it writes long after that.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

namespace weft::cuda {

struct LateCopy {
  void* to = nullptr;  // both on the device, aligned to 16 bytes
  const void* from = nullptr;
  std::size_t bytes = 0;
};
inline constexpr std::size_t kMaxLateCopies = 12;

// One block of one warp, which leaves the GPU to its successor: lets it start, does nothing for `microseconds` (at most
// 1,000,000), then makes the copies.
void write_late(std::span<const LateCopy> copies, int microseconds, cudaStream_t stream);

// to = from, [count], launched as part of a chain where `overlapping`. Without `waits` it reads and writes at once, as no
// kernel of a chain may.
void copy_chained(int* to, const int* from, int count, bool waits, bool overlapping, cudaStream_t stream);

}  // namespace weft::cuda
