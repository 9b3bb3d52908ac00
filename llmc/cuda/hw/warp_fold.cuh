// Sums of several values over a warp at once.
#pragma once

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// Sums each of N values (a power of 2, at most 32) over the warp; afterwards lane l holds the sum of value l / (32 /
// N). In each step a lane keeps half of its values and sends the other half to its partner, so all sums take N - 1 +
// log2(32 / N) shuffles rather than 5 N. Overwrites v.
template <int N>
__device__ __forceinline__ float warp_fold(float (&v)[N], int lane) {
  int offset = kWarpSize / 2;
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float sent = upper ? v[j] : v[j + n], kept = upper ? v[j + n] : v[j];
      v[j] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
  float sum = v[0];
#pragma unroll
  for (; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

}  // namespace weft::cuda
