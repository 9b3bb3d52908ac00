// The kernels behind paged_attention.h; arguments are checked there.
#pragma once

#include "llmc/cuda/op/paged_attention.h"

namespace weft::cuda {

// 16-bit types: a step that decodes (paged_work_decodes()), whose keys and values are appended.
template <typename S>
void paged_decode(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream);

// Any step, in fp32; appends keys and values where io.k is given.
void paged_plain(const PagedAttention<float>& io, const LaunchDevice& device, cudaStream_t stream);

}  // namespace weft::cuda
