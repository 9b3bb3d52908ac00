// Repacks the quantised matrices of an inference model into the order in which the fused kernel reads them.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>

#include "llmc/cuda/op/gemm/quantized_matmul.h"

namespace weft::cuda::fused {

struct BlockRows;
struct SequentialSizes;
struct Sizes;

// Writes one layer's streams (packed_tiles.cuh) for all blocks to `to`: blocks * sizes.stream_bytes bytes of device
// memory. `from`: qkv, up, down and output (LayerParts::Matrix), all in one format, in the layout of quantized_matmul.cuh, on
// the device; `rows`: [blocks] on the device; `sequential`: null with the parallel residual. Queued in `stream`.
void pack_layer(std::byte* to, const std::array<PackedMatrix, 4>& from, const Sizes& sizes,
                const SequentialSizes* sequential, int row_loads, const BlockRows* rows, int blocks,
                cudaStream_t stream);
// The same for the head, which must have HeadFormat: blocks * sizes.head_stream_bytes bytes.
void pack_head(std::byte* to, const PackedMatrix& from, const Sizes& sizes, int row_loads, const BlockRows* rows,
               int blocks, cudaStream_t stream);

}  // namespace weft::cuda::fused
