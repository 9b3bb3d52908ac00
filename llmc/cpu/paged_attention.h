// Attention over keys and values in pages, for rows of many sequences: out = softmax(q k^T * scale) v, where row r sees the
// positions 0 .. position of its own sequence, of those at most the last `window`, and query head h reads K/V head
// h / (NH / NKV).
//
// The softmax is taken page by page in the order of positions (Dao et al., FlashAttention, 2022, algorithm 1): a row's bits
// depend on its query and on the keys and values of its positions, not on the other rows of the call, nor on which pages of
// the pool they lie in.
//
// Keys and values in e4m3 (llmc/base/kv_fp8.h) are widened, which is exact, a page at a time: the bits are those of attention
// over fp32 pages with the same numbers, sums in fp32 included.
#pragma once

#include <cstdint>
#include <span>

#include "llmc/base/kv_fp8.h"

namespace weft::cpu {

// The pages of one layer.
struct PagedKv {
  float *keys = nullptr, *values = nullptr;  // [page][NKV][page_size][HS] each; null where there are codes
  std::int64_t page_size = 0, NKV = 0, HS = 0;
  KvCodes codes = {};

  bool fp8() const { return codes.keys != nullptr; }
  // Of the first position of a page: its row, and the row's first element.
  std::int64_t row(std::int32_t page, std::int64_t kv_head) const { return (page * NKV + kv_head) * page_size; }
  std::int64_t offset(std::int32_t page, std::int64_t kv_head) const { return row(page, kv_head) * HS; }
};

// Consecutive positions of one sequence.
struct PagedRows {
  std::span<const std::int32_t> pages;  // block table; covers the last of the rows. Pages that no row sees are not read
  std::int64_t first_position = 0, rows = 0;
  std::int64_t first_row = 0;  // in q and out
};

struct PagedAttentionShape {
  std::int64_t NH = 0;
  float scale = 0;
  std::int64_t q_row_stride = 0, q_head_stride = 0;  // in elements
  std::int64_t window = 0;                           // 0: none (Visibility)
};

// q: rows of NH heads; out [rows, NH, HS].
void paged_attention(const PagedAttentionShape& shape, float* out, const float* q, const PagedKv& kv,
                     std::span<const PagedRows> work);

}  // namespace weft::cpu
