// The work list of paged_attention.h as it lies in memory: a header, tiles, items of splits, merges.
//
// For one chunk and K/V head, the query rows are its positions times the G = NH / NKV query heads that read this K/V
// head: row i is position first_position + i / G and query head kv_head * G + i % G. A tile is up to paged_tile_rows()
// of them; a block computes it over all keys. An item of splits is up to kPagedItemRows of them over one split of the
// positions, of those that they see with the list's window; a warp computes it. Both ways give the same bits.
//
// Splits begin at fixed positions. They are short where a sequence is short, so that its splits occupy the GPU, and longer
// where there are enough of them, since each costs a merge:
//
//   positions from         0   8,192   131,072
//   positions of a split 256     512     1,024
//   number of the first    0      32       272
//
// Splits are merged in order, so a row's merge takes as long as it has splits. Up to kPagedSplitsOfOne of them the warp
// that finishes the last one merges all its rows. More are a merge: many warps, each with 32 dimensions of a row, which
// wait until the last split has been computed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/base/host_device.h"
#include "llmc/cuda/op/attention/paged/paged_attention.h"

namespace weft::cuda {

inline constexpr int kPagedShortestSplit = 256, kPagedLongestSplit = 1024;
// The length of the split that a position belongs to. A split begins at a multiple of its length.
WEFT_HOST_DEVICE constexpr int paged_split_length(int position) {
  return position < 8192 ? kPagedShortestSplit : position < 131072 ? 512 : kPagedLongestSplit;
}
WEFT_HOST_DEVICE constexpr bool paged_split_begins_at(int position) {
  return position % paged_split_length(position) == 0;
}
// The number of the split that a position belongs to, and the position at which a split begins.
WEFT_HOST_DEVICE constexpr int paged_split_of(int position) {
  return (position < 8192 ? 0 : position < 131072 ? 16 : 144) + position / paged_split_length(position);
}
WEFT_HOST_DEVICE constexpr int paged_split_begin(int split) {
  return split < 32 ? split * 256 : split < 272 ? (split - 16) * 512 : (split - 144) * 1024;
}
static_assert(paged_split_of(8192) == 32 && paged_split_of(131072) == 272);
static_assert(paged_split_begin(32) == 8192 && paged_split_begin(272) == 131072);
inline constexpr std::int64_t kPagedItemRows = 16;  // the rows of an m16 mma
inline constexpr std::int64_t kPagedSplitsOfOne = 8;

// Query rows of a tile.
constexpr std::int64_t paged_tile_rows(std::int64_t HS) {
  return HS <= 128 ? 128 : 64;
}

struct alignas(16) PagedWorkHeader {
  std::int32_t tiles = 0, items = 0;
  std::int32_t decodes = 0;  // 1: paged_work_decodes()
  std::int32_t merges = 0;
};
// A merge is the item of the first split of its rows.
struct alignas(16) PagedWorkUnit {
  std::uint16_t first_row = 0, rows = 0;  // the whole chunk's, as in PagedChunk
  std::int32_t first_position = 0;        // likewise
  std::int32_t partials = -1;             // first workspace slot of the item's splits; -1: no slots, a single split
  std::uint16_t tile = 0;                 // index in the chunk, in units of paged_tile_rows() or kPagedItemRows
  std::uint16_t split = 0;
};
static_assert(sizeof(PagedWorkHeader) == 16 && sizeof(PagedWorkUnit) == 16);

// Slots in the workspace. A slot holds the result of one row and one split for every K/V head.
std::int64_t paged_partial_slots(const PagedAttentionShape& shape);
// Floats of a slot for one K/V head: HS sums, the maximum, the sum of weights, padding to 16 bytes.
constexpr std::int64_t paged_slot_floats(std::int64_t HS) {
  return HS + 4;
}

}  // namespace weft::cuda
