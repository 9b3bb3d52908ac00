// Functions of the NVIDIA driver: they are looked up at run time, so that no program links with the driver's library and each
// one starts on machines without it.
#pragma once

#include <cuda_runtime_api.h>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

// The driver's function `name`, as CUDA 12.0 defined it or before; Function is its pointer type of <cudaTypedefs.h>.
// Exit::environment where the driver does not have it.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result), name);
#else
  check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result), name);
#endif
  if (result != cudaDriverEntryPointSuccess || function == nullptr) {
    fail(Exit::environment, "the NVIDIA driver has no %s; install one for CUDA 12 or later", name);
  }
  return reinterpret_cast<Function>(function);
}

}  // namespace weft::cuda
