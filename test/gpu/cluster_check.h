// Exercises cluster.cuh alone, for its test and its latency.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

enum class ClusterOperation { gather, reduce, barrier };

// Runs `rounds` exchanges in clusters of `blocks` (2, 4, 8 or 16) blocks of `threads` threads: one cluster for each of
// `clusters`. In every round each block sends `count` floats (a multiple of 4) that are a function of cluster, round and
// rank. `wrong` [1] counts the elements that arrive as anything else, or sums that differ from those added in the order of
// ranks. With `dawdle` blocks and warps pause between exchanges, each in its own way; without it, for timing, only the
// first round makes a message and nothing is compared. clocks [clusters]: cycles from the first exchange to the last, in
// block 0. Returns false if the GPU has no such clusters.
bool cluster_check(ClusterOperation operation, int blocks, int clusters, int threads, int count, int rounds,
                   bool dawdle, unsigned* wrong, long long* clocks, cudaStream_t stream);

}  // namespace weft::cuda
