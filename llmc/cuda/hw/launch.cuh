// Launches with attributes: programmatic dependent launches, which may overlap their predecessor, and clusters (both
// sm_90 and later; CUDA C++ Programming Guide).
//
// A chained kernel may start while its predecessor still runs. Before wait_for_predecessors() it may read only what no
// kernel of the chain writes, such as weights. On older GPUs the launch is an ordinary one and both functions do
// nothing.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

// Waits until the preceding kernel has ended and what it wrote is visible. Since that kernel has waited, too, all
// earlier kernels of the chain have ended.
__device__ inline void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next kernel to start once all blocks have called this or exited, and there is room for it.
__device__ inline void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Number of blocks that fit on the GPU at once, at least one a multiprocessor. For more than 48 KB of shared memory the
// kernel's limit must have been raised before.
template <typename Kernel>
unsigned resident_blocks(Kernel kernel, int threads, int shared_bytes, int multiprocessors, const char* name) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<std::size_t>(shared_bytes)),
        name);
  return static_cast<unsigned>(std::max(1, blocks) * multiprocessors);
}

// `attribute` must outlive the returned configuration.
inline cudaLaunchConfig_t launch_config(dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                                        cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

// Clusters of `blocks` blocks that are consecutive along x.
inline cudaLaunchAttribute cluster_attribute(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Number of clusters of `cluster` blocks that fit on the GPU at once. For more than 48 KB of shared memory the kernel's
// limit must have been raised before.
template <typename Kernel>
int resident_clusters(Kernel kernel, int threads, int shared_bytes, int cluster, const char* name) {
  cudaLaunchAttribute attribute = cluster_attribute(cluster);
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(cluster)), dim3(static_cast<unsigned>(threads)),
                    static_cast<std::size_t>(shared_bytes), nullptr, attribute);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), name);
  return clusters;
}

template <typename... Parameters, typename... Arguments>
void launch_clustered(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                      int cluster, const char* name, Arguments... arguments) {
  cudaLaunchAttribute attribute = cluster_attribute(cluster);
  const cudaLaunchConfig_t config = launch_config(grid, block, shared, stream, attribute);
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

// Launches a kernel of a chain. `overlapping`: whether the GPU supports it (launch_device()).
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                    bool overlapping, const char* name, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = launch_config(grid, block, shared, stream, attribute);
  config.numAttrs = overlapping ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

// Cooperative launch: all blocks are resident at once, or the launch fails. `kernel` takes one struct.
template <typename Struct>
void launch_cooperative(const void* kernel, int blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const char* name, Struct& argument) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                    static_cast<std::size_t>(shared_bytes), stream, cooperative);
  void* arguments[] = {&argument};
  check(cudaLaunchKernelExC(&config, kernel, arguments), name);
}

// Launches a kernel of a chain in clusters.
template <typename... Parameters, typename... Arguments>
void launch_chained_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared,
                             cudaStream_t stream, bool overlapping, int cluster, const char* name,
                             Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {cluster_attribute(cluster), {}};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = launch_config(grid, block, shared, stream, attributes[0]);
  config.numAttrs = overlapping ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace weft::cuda
