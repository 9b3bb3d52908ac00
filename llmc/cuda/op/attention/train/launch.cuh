// Launches attention kernels, and chooses the kernel for a head dimension.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

// Launches a grid of `heads` x `blocks` with `shared_bytes` of dynamic shared memory a block; raises the kernel's limit
// first.
template <typename Arguments>
void launch_attention(void (*kernel)(const Arguments), const char* name, std::int64_t heads, std::int64_t blocks,
                      int threads, std::int64_t shared_bytes, cudaStream_t stream,
                      const std::type_identity_t<Arguments>& arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        name);
  kernel<<<dim3(static_cast<unsigned>(heads), static_cast<unsigned>(blocks)), static_cast<unsigned>(threads),
           static_cast<std::size_t>(shared_bytes), stream>>>(arguments);
  check_launch(name);
}

// Calls launch.operator()<HS>() for a head dimension of attention_supports(); Exit::internal for another.
template <typename Launch>
void for_head_dimension(std::int64_t HS, const char* name, const Launch& launch) {
  switch (HS) {
    case 32:
      return launch.template operator()<32>();
    case 64:
      return launch.template operator()<64>();
    case 80:
      return launch.template operator()<80>();
    case 96:
      return launch.template operator()<96>();
    case 128:
      return launch.template operator()<128>();
    case 256:
      return launch.template operator()<256>();
    default:
      fail(Exit::internal, "%s: no kernel for head dimension %lld", name, static_cast<long long>(HS));
  }
}

// Calls launch.operator()<HidesPast>(): the kernels that hide no past keys have no instructions for it.
template <typename Launch>
void for_visibility(const AttentionShape& shape, const Launch& launch) {
  if (shape.hides_past()) return launch.template operator()<true>();
  launch.template operator()<false>();
}

}  // namespace weft::cuda
