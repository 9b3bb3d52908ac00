// rows_matmul() before attention: while it ends, memory already works for its successor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/gemv.h"
#include "llmc/cuda/op/rows_matmul.h"

namespace weft::cuda {

// Pages of keys and values (paged_kv.h) that are asked for in L2. A hint: any of them, or none, may be.
struct PagesAhead {
  const void *keys = nullptr, *values = nullptr;  // of page 0, aligned to 16 bytes
  std::int64_t page_bytes = 0;                    // a multiple of 16
  const std::int32_t* list = nullptr;             // {where the pages' numbers begin in `pages`, how many there are}
  const std::int32_t* pages = nullptr;
  int most_bytes = 16 << 20;
};

// The same results as rows_matmul(). From the end of a block's own reads on, when memory has nothing to do until the successor
// has started and looked up what it reads, it asks for pages. The list and its pages are read before the wait for the predecessor.
template <typename S>
void rows_matmul_ahead(const RowsMatmul<S>& io, const PagesAhead& ahead, const LaunchDevice& device,
                       cudaStream_t stream);

}  // namespace weft::cuda
