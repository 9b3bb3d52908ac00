// Functions of the NVIDIA driver, looked up at run time, so that no program links with the driver's library and all of
// them start on machines without it.
#pragma once

#include <cuda_runtime_api.h>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

// The driver's function `name` in its version of CUDA 12.0 or earlier; Function is its pointer type from
// <cudaTypedefs.h>. Exit::environment if the driver lacks it.
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
