// Tensor maps, by which the copy engine of sm_90 addresses a tensor. A launcher encodes them on the host (under a
// microsecond each, no device memory, allowed during stream capture) and passes them by value as __grid_constant__
// parameters.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "llmc/model/head_view.h"

namespace weft::cuda {

// Outermost dimension last. `size` in elements; `stride` in bytes, for every dimension but the first, a multiple of 16
// (ignored for a dimension of size 1); `box`: what one copy moves. Rows of a box (its first dimension) are 128, 64 or
// 32 bytes of 16-bit elements, in the swizzle of that width (hopper.cuh). Elements outside of the tensor read as zero
// and are not written. Exit::environment if the driver has no tensor maps, Exit::internal if it refuses these.
CUtensorMap encode_tensor_map(const void* data, CUtensorMapDataType type, std::initializer_list<std::uint64_t> size,
                              std::initializer_list<std::int64_t> stride, std::initializer_list<std::uint32_t> box);

// The map of a view [B, T, heads, HS] of 16-bit elements; coordinates (dimension, token, head, batch). A box is
// `columns` (64, 32 or 16) dimensions of `rows` tokens. The view is 16-byte aligned in data and strides.
template <typename T>
CUtensorMap encode_head_map(const HeadViewOf<T>& view, std::int64_t B, std::int64_t tokens, std::int64_t heads,
                            std::int64_t HS, int rows, int columns = 64);

}  // namespace weft::cuda
