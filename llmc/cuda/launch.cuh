// Launches that may overlap their predecessor (programmatic dependent launch, sm_90 and later; CUDA programming guide).
//
// A kernel launched this way starts while the one before it still runs. It may read what no kernel of the chain writes,
// weights say; wait_for_predecessors() stands before everything else. On older GPUs the launch is an ordinary one and
// both functions do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "llmc/cuda/error.h"
#include "llmc/cuda/l2_hint.h"

namespace weft::cuda {

// Until every kernel before this one has finished and what it wrote can be seen. The kernels before that one waited
// themselves, so all of the chain is done.
__device__ inline void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start as soon as all blocks have said this and there is room.
__device__ inline void let_successor_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Called by one thread of each block: its share of what the hint names goes from memory to L2, and nobody waits for it.
__device__ inline void prefetch_to_l2(const L2Hint& hint) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr std::uint32_t kPiece = 16 << 10;
  const int block = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x),
            blocks = static_cast<int>(gridDim.x * gridDim.y);
  for (const L2Hint::Rows& rows : hint.rows) {
    for (int reader = block; reader < rows.readers; reader += blocks) {
      const int first = static_cast<int>(static_cast<std::int64_t>(rows.total) * reader / rows.readers) - rows.before;
      const int begin = max(first, 0), end = min(first + rows.count, rows.rows);
      if (begin >= end) continue;
      const char* at = rows.matrix + static_cast<std::uint64_t>(begin) * rows.row_bytes;
      std::uint32_t left = static_cast<std::uint32_t>(end - begin) * rows.row_bytes;
      while (left > 0) {
        const std::uint32_t bytes = min(left, kPiece);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
        at += bytes;
        left -= bytes;
      }
    }
  }
#else
  (void)hint;
#endif
}

// `overlapping`: the GPU knows such launches (launch_device()).
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                    bool overlapping, const char* name, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlapping ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace weft::cuda
