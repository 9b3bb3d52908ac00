// CUDA errors as weft::Error: one clear line and the right exit code.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "llmc/base/error.h"

namespace weft::cuda {

// What went wrong and what to do, for a CUDA error that appeared while doing `action`. `driver` and `runtime`
// are versions as CUDA reports them (13000 is 13.0; driver 0: none installed); `arch` is the GPU's (90), 0 if
// unknown. Out of memory is Exit::resources, everything else Exit::environment: a kernel that faulted is failing hardware
// as often as it is a bug, and for the caller both mean the same, to start again from the last checkpoint.
Error describe_error(cudaError_t error, const std::string& action, int driver, int runtime, int arch);

// Test tool (--debug-inject gpu@step): a kernel that writes where nothing is. The error surfaces at the next
// synchronisation, and no CUDA call of the process succeeds after it.
void launch_faulty_kernel(cudaStream_t stream);

// Throws describe_error() for this machine unless `error` is cudaSuccess.
void check(cudaError_t error, const char* action);

// After a launch: reports a launch error at once. Errors during execution surface at the next synchronising
// call.
void check_launch(const char* kernel);

// Of the current device.
int device_attribute(cudaDeviceAttr attribute);

// Multiprocessors of the current device if it has compute capability 9.0 and with it wgmma; otherwise 0.
int hopper_multiprocessors();

}  // namespace weft::cuda
