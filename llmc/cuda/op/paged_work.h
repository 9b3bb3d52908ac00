// The list of work of paged_attention.h as it lies in memory: a header, tiles, items of splits.
//
// Of a span, the rows of one K/V head are its positions times the G = NH / NKV query heads that read this K/V head: row i
// is position first_position + i / G and query head kv_head * G + i % G. A tile is up to paged_tile_rows() of them, computed by a
// block that walks all their keys. An item of splits is up to kPagedItemRows of them and one split of kPagedSplit positions,
// computed by a warp; of the splits of a tile of such rows, the warp that finishes last merges all. Both compute the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/cuda/op/paged_attention.h"

namespace weft::cuda {

inline constexpr std::int64_t kPagedSplit = 256;    // positions; split s holds those from s * kPagedSplit on
inline constexpr std::int64_t kPagedItemRows = 16;  // the rows of one MMA

// Rows of a block's tile.
constexpr std::int64_t paged_tile_rows(std::int64_t HS) {
  return HS <= 128 ? 128 : 64;
}

struct alignas(16) PagedWorkHeader {
  std::int32_t tiles = 0, items = 0;
  std::int32_t decodes = 0;  // 1: what paged_work_decodes() says
};
struct alignas(16) PagedItem {
  std::uint16_t first_row = 0, rows = 0;  // of the span
  std::int32_t first_position = 0;        // of the span
  std::int32_t partials =
      -1;                  // first slot for the results of this tile's splits; -1: there is one split, or none is used
  std::uint16_t tile = 0;  // which of the span's tiles, of paged_tile_rows() or of kPagedItemRows
  std::uint16_t split = 0;
};
static_assert(sizeof(PagedWorkHeader) == 16 && sizeof(PagedItem) == 16);

// How many slots the workspace has. A slot holds the result of one row and one split for every K/V head.
std::int64_t paged_partial_slots(const PagedAttentionShape& shape);
// Floats of a slot and K/V head: HS sums, the maximum, the sum of weights, padding to 16 bytes.
constexpr std::int64_t paged_slot_floats(std::int64_t HS) {
  return HS + 4;
}

}  // namespace weft::cuda
