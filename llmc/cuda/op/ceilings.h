// The highest rates that this GPU reaches, measured: the ceilings that programs compare themselves with.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

namespace weft::cuda {

// GB/s (10^9 bytes) of a plain read of `gigabytes` of device memory, much more than any cache; median of several passes of
// the best of a few launch shapes. Less is read where that much is not free.
double measure_read_bandwidth(double gigabytes = 4);

// The ceilings of an OperatorTable on this GPU, each the best of a few runs: bytes/s and flops/s. Takes up to 2 GB of
// device memory for the time of the call, less where less is free.
std::pair<double, double> measure_ceilings(cudaStream_t stream);

}  // namespace weft::cuda
