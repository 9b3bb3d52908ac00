// Keys and values in pages on the GPU, and which pages the rows of a step use: what append_to_pages.h writes and
// paged_attention.h reads. The layout of a page is that of cpu::PagedKv (llmc/cpu/paged_attention.h).
#pragma once

#include <cstdint>

namespace weft::cuda {

// The pages of one layer. S: float, bf16 or fp16. Keys and values are 16-byte aligned.
template <typename S>
struct PagedKv {
  S *keys = nullptr, *values = nullptr;  // [page][NKV][page_size][HS] each
  std::int64_t page_size = 0;            // 16, 32 or 64
  std::int64_t NKV = 0, HS = 0;          // head dimensions of attention_supports()
};

// The rows of a step, one position of one sequence each; arrays in device memory. Operators read them before they wait for their
// predecessors in a chain of launches, so they must be complete when the chain begins: written by a copy, or by a kernel, that
// lies before a kernel which is launched plainly, not chained.
struct PagedRows {
  const std::int32_t* positions = nullptr;  // [rows]; -1: padding, of which nothing is written
  const std::int32_t* tables = nullptr;     // [rows]: where the block table of the row's sequence begins in `pages`
  const std::int32_t* pages = nullptr;      // the block tables of the step's sequences, one after another
  std::int64_t rows = 0;                    // with padding
};

}  // namespace weft::cuda
