// Keys and values in pages on the GPU, and which pages the rows of a step use. append_to_pages.h writes them,
// paged_attention.h reads them. The layout of a page is that of cpu::PagedKv (llmc/cpu/paged_attention.h).
#pragma once

#include <cstdint>

#include "llmc/base/kv_fp8.h"

namespace weft::cuda {

// The pages of one layer. S: float, bf16 or fp16. Keys and values are 16-byte aligned.
template <typename S>
struct PagedKv {
  S *keys = nullptr, *values = nullptr;  // [page][NKV][page_size][HS] each
  std::int64_t page_size = 0;            // 16, 32 or 64
  std::int64_t NKV = 0, HS = 0;          // head dimensions of attention_supports()
  // Not null, for 16-bit S alone: keys and values in e4m3, each array 16-byte aligned. Then `keys` and `values` are scratch of
  // paged_attention() with these page numbers, which keeps nothing from one call to the next: all layers may have the same.
  KvCodes codes = {};

  bool fp8() const { return codes.keys != nullptr; }
};

// The rows of a step, each one position of one sequence; arrays in device memory. Operators read them before they wait
// for their predecessors in a chain of launches. So they must be complete when the chain begins: whatever writes them
// must precede a kernel that is launched without programmatic dependency.
struct PagedRows {
  const std::int32_t* positions = nullptr;  // [rows]; -1: a padding row, for which nothing is written
  // [rows]: index in `pages` at which the block table of the row's sequence begins
  const std::int32_t* tables = nullptr;
  const std::int32_t* pages = nullptr;  // the block tables of the step's sequences, one after another
  std::int64_t rows = 0;                // including padding
};

}  // namespace weft::cuda
