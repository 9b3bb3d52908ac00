// Measures the highest rates that this GPU reaches, as ceilings for comparison.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

namespace weft::cuda {

// GB/s (10^9 bytes) of plainly reading `gigabytes` of device memory, or half of the free memory if that is less: the
// median of several passes, for the best of a few launch shapes. Throws if the memory cannot be allocated.
double measure_read_bandwidth(double gigabytes = 4);

// The ceilings of an OperatorTable on this GPU, in bytes/s and FLOP/s, each the best of a few runs. Uses up to 2 GB of
// device memory during the call, less if less is free.
std::pair<double, double> measure_ceilings(cudaStream_t stream);

}  // namespace weft::cuda
