// CUDA errors as weft::Error: one clear line and the right exit code.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "llmc/base/error.h"

namespace weft::cuda {

// Describes a CUDA error that occurred during `action`, and what to do. `driver` and `runtime` are versions as CUDA
// reports them (13000 is 13.0; driver 0: none installed); `arch` is the GPU's (90), 0 if unknown. Out of memory is
// Exit::resources, everything else Exit::environment: a kernel that faulted is failing hardware as often as a bug, and
// in both cases the caller should restart from the last checkpoint.
Error describe_error(cudaError_t error, const std::string& action, int driver, int runtime, int arch);

// For tests (--debug-inject gpu@step): launches a kernel that writes to an invalid address. The error surfaces at the
// next synchronisation, after which every CUDA call of the process fails.
void launch_faulty_kernel(cudaStream_t stream);

// Throws describe_error() for this machine unless `error` is cudaSuccess.
void check(cudaError_t error, const char* action);

// Call after a launch: throws for a launch error. Errors during execution surface at the next synchronising call.
void check_launch(const char* kernel);

// An attribute of the current device.
int device_attribute(cudaDeviceAttr attribute);

// Number of multiprocessors of the current device if it has compute capability 9.0, and thus wgmma; otherwise 0.
int hopper_multiprocessors();

}  // namespace weft::cuda
