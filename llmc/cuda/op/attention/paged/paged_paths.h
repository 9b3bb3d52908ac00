// The paths of paged_attention(), which checks their arguments.
#pragma once

#include "llmc/cuda/op/attention/paged/paged_attention.h"

namespace weft::cuda {

// 16-bit types: the items of splits. With io.k, for a list that decodes; it also appends keys and values. With io.kv.fp8()
// from codes, for any list. Otherwise after paged_hopper_tiles(), for the same head dimensions.
template <typename S>
void paged_work_units(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream);

// 16-bit types, head dimensions up to 128, on Hopper: the tiles of a step.
bool paged_hopper_computes(std::int64_t HS);
template <typename S>
void paged_hopper_tiles(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream);

// With io.kv.fp8(): writes the keys and values that tiles, with `items` also items, see to io.kv.keys and values.
template <typename S>
void widen_pages(const PagedAttention<S>& io, bool items, const LaunchDevice& device, cudaStream_t stream);

// fp32: all of a step; appends keys and values where io.k is given.
void paged_plain(const PagedAttention<float>& io, const LaunchDevice& device, cudaStream_t stream);

}  // namespace weft::cuda
