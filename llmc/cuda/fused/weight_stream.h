// Quantised matrices of an inference model on their way into the order in which the fused kernel reads them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "llmc/cuda/fused/neox_weights.h"

namespace weft::cuda::fused {

struct BlockRows;
struct Sizes;

// Writes the streams of all blocks of a layer (weight_stream.cuh), `sizes.stream_bytes` of each, to device memory. `rows`: of each
// block, on the device.
void pack_layer(std::byte* to, const QuantizedMatrices::Layer& from, const Sizes& sizes, int row_loads,
                const BlockRows* rows, int blocks, cudaStream_t stream);
// The same for the head, in int8: `sizes.head_stream_bytes` of each block.
void pack_head(std::byte* to, const PackedMatrix& from, const Sizes& sizes, int row_loads, const BlockRows* rows,
               int blocks, cudaStream_t stream);

}  // namespace weft::cuda::fused
