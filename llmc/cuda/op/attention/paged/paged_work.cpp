// How the work of a step is divided. A sequence with few rows, above all one that is decoded, is bound by reading keys
// and values: it is divided into splits, so that one long sequence uses the whole GPU as many short ones do. A sequence
// with many rows is bound by arithmetic: a block computes 64 or 128 of them, and each key that it loads serves all of
// them.
#include "llmc/cuda/op/attention/paged/paged_work.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/model/limits.h"

namespace weft::cuda {

namespace {

// Limit of the workspace, whatever the length of a sequence. Chunks that find no free slot are computed as tiles.
constexpr std::int64_t kMaxPartialBytes = std::int64_t{256} << 20;
constexpr std::int64_t kLengthUnit = 16;  // granularity, in positions, of sorting items by length
constexpr std::int64_t kMaxRows = 65535, kMaxTiles = 65535, kMaxPositions = std::int64_t{1} << 24;
static_assert(kMaxPositions >= weft::kMaxPositions, "the longest context of a model");
static_assert(paged_split_of(kMaxPositions - 1) <= 65535, "a split has 16 bits");

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Splits of that many positions.
std::int64_t splits_of(std::int64_t positions) {
  return paged_split_of(static_cast<int>(positions - 1)) + 1;
}

std::int64_t group(const PagedAttentionShape& shape) {
  return shape.NH / shape.NKV;
}

void check_shape(const PagedAttentionShape& shape) {
  const bool heads = shape.NKV > 0 && shape.NH > 0 && shape.NH % shape.NKV == 0 &&
                     shape.max_rows * group(shape) <= kMaxTiles * paged_tile_rows(shape.HS);
  const bool sizes = shape.max_rows > 0 && shape.max_rows <= kMaxRows && shape.max_chunks > 0 &&
                     shape.max_positions > 0 && shape.max_positions <= kMaxPositions;
  if (heads && sizes && attention_supports(shape.HS)) return;
  fail(Exit::internal,
       "paged attention: %lld heads of %lld, %lld K/V heads, steps of %lld rows and %lld chunks, %lld positions: "
       "expected a head "
       "dimension of 32, 64, 80, 96, 128 or 256, at most %lld rows and %lld positions",
       static_cast<long long>(shape.NH), static_cast<long long>(shape.HS), static_cast<long long>(shape.NKV),
       static_cast<long long>(shape.max_rows), static_cast<long long>(shape.max_chunks),
       static_cast<long long>(shape.max_positions), static_cast<long long>(kMaxRows),
       static_cast<long long>(kMaxPositions));
}

// The most entries of a list.
struct Bounds {
  std::int64_t tiles, items, merges;
};
Bounds bounds(const PagedAttentionShape& shape) {
  const std::int64_t splits = splits_of(shape.max_positions);
  const std::int64_t divided = std::min(shape.max_chunks, shape.max_rows) * ceil_div(group(shape), kPagedItemRows);
  return {shape.max_rows * group(shape) / paged_tile_rows(shape.HS) + shape.max_chunks, divided * splits,
          splits > kPagedSplitsOfOne ? divided : 0};
}

class Plan {
 public:
  explicit Plan(const PagedAttentionShape& shape)
      : shape_(shape), G_(group(shape)), free_slots_(paged_partial_slots(shape)) {}

  void add(const PagedChunk& chunk) {
    if (chunk.rows > 1) decodes_ = false;
    if (!add_splits(chunk)) add_tiles(chunk);
  }

  std::size_t write(void* work) {
    auto* header = static_cast<PagedWorkHeader*>(work);
    auto* entry = reinterpret_cast<PagedWorkUnit*>(header + 1);
    *header = {static_cast<std::int32_t>(tiles_.size()), static_cast<std::int32_t>(items_.size()),
               decodes_ && tiles_.empty() ? 1 : 0, static_cast<std::int32_t>(merges_.size())};
    // The longest first, so that the last ones, which leave blocks idle, are short.
    std::stable_sort(tiles_.begin(), tiles_.end(),
                     [&](const PagedWorkUnit& a, const PagedWorkUnit& b) { return tile_end(a) > tile_end(b); });
    entry = std::copy(tiles_.begin(), tiles_.end(), entry);
    std::array<std::size_t, kPagedLongestSplit / kLengthUnit> begin{};  // counting sort by length, which is at least 1
    for (const PagedWorkUnit& item : items_) ++begin[length(item) - 1];
    for (std::size_t l = begin.size(), sum = 0; l-- > 0;) sum += std::exchange(begin[l], sum);
    for (const PagedWorkUnit& item : items_) entry[begin[length(item) - 1]++] = item;
    std::copy(merges_.begin(), merges_.end(), entry + items_.size());
    return sizeof(PagedWorkHeader) + (tiles_.size() + items_.size() + merges_.size()) * sizeof(PagedWorkUnit);
  }

 private:
  static PagedWorkUnit item_of(const PagedChunk& chunk) {
    PagedWorkUnit item;
    item.first_row = static_cast<std::uint16_t>(chunk.first_row);
    item.rows = static_cast<std::uint16_t>(chunk.rows);
    item.first_position = static_cast<std::int32_t>(chunk.first_position);
    return item;
  }

  // Positions that the last row of tile item.tile sees.
  std::int64_t end(const PagedWorkUnit& item, std::int64_t tile_rows) const {
    const std::int64_t rows = std::min<std::int64_t>(item.rows * G_, (item.tile + 1) * tile_rows);
    return item.first_position + (rows - 1) / G_ + 1;
  }
  std::int64_t tile_end(const PagedWorkUnit& item) const { return end(item, paged_tile_rows(shape_.HS)); }
  // Length of the part of its split that an item sees, in kLengthUnit.
  std::size_t length(const PagedWorkUnit& item) const {
    const int begin = paged_split_begin(item.split);
    const std::int64_t seen = std::min<std::int64_t>(end(item, kPagedItemRows) - begin, paged_split_length(begin));
    return static_cast<std::size_t>(ceil_div(seen, kLengthUnit));
  }

  bool add_splits(const PagedChunk& chunk) {
    const std::int64_t rows = chunk.rows * G_;
    if (chunk.rows > 1 && rows > kPagedItemRows) return false;
    const std::int64_t before =
        shape_.window > 0 ? chunk.first_position + 1 - shape_.window : 0;  // hidden by the window
    const std::int64_t first_split = paged_split_of(static_cast<int>(std::max<std::int64_t>(before, 0)));
    const std::int64_t splits = splits_of(chunk.first_position + chunk.rows) - first_split;
    if (splits > 1 && rows * splits > free_slots_) return false;
    PagedWorkUnit item = item_of(chunk);
    for (std::int64_t first = 0; first < rows; first += kPagedItemRows, ++item.tile) {
      const std::int64_t slots = splits > 1 ? std::min(kPagedItemRows, rows - first) * splits : 0;
      item.partials = splits > 1 ? static_cast<std::int32_t>(used_slots_) : -1;
      for (std::int64_t split = 0; split < splits; ++split) {
        item.split = static_cast<std::uint16_t>(first_split + split);
        items_.push_back(item);
        if (split == 0 && splits > kPagedSplitsOfOne) merges_.push_back(item);
      }
      used_slots_ += slots;
      free_slots_ -= slots;
    }
    return true;
  }

  void add_tiles(const PagedChunk& chunk) {
    PagedWorkUnit item = item_of(chunk);
    const std::int64_t tiles = ceil_div(chunk.rows * G_, paged_tile_rows(shape_.HS));
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      item.tile = static_cast<std::uint16_t>(tile);
      tiles_.push_back(item);
    }
  }

  const PagedAttentionShape& shape_;
  std::int64_t G_, free_slots_, used_slots_ = 0;
  std::vector<PagedWorkUnit> tiles_, items_, merges_;
  bool decodes_ = true;  // no chunk has more than one row
};

void check_chunks(const PagedAttentionShape& shape, std::span<const PagedChunk> chunks) {
  if (static_cast<std::int64_t>(chunks.size()) > shape.max_chunks) {
    fail(Exit::internal, "paged attention: a step of %zu chunks, expected at most %lld", chunks.size(),
         static_cast<long long>(shape.max_chunks));
  }
  std::int64_t rows = 0;
  for (const PagedChunk& chunk : chunks) {
    rows += std::max<std::int64_t>(chunk.rows, 0);
    if (chunk.rows >= 0 && chunk.first_row >= 0 && chunk.first_row + chunk.rows <= shape.max_rows &&
        chunk.first_position >= 0 && chunk.first_position + chunk.rows <= shape.max_positions &&
        rows <= shape.max_rows) {
      continue;
    }
    fail(Exit::internal,
         "paged attention: a chunk of %lld rows from row %lld, position %lld: expected at most %lld rows of a step, "
         "%lld positions",
         static_cast<long long>(chunk.rows), static_cast<long long>(chunk.first_row),
         static_cast<long long>(chunk.first_position), static_cast<long long>(shape.max_rows),
         static_cast<long long>(shape.max_positions));
  }
}

}  // namespace

std::int64_t paged_partial_slots(const PagedAttentionShape& shape) {
  check_shape(shape);
  const std::int64_t splits = splits_of(shape.max_positions);
  if (splits == 1) return 0;
  const auto slot_bytes = shape.NKV * paged_slot_floats(shape.HS) * static_cast<std::int64_t>(sizeof(float));
  return std::min(std::min(shape.max_chunks, shape.max_rows) * group(shape) * splits, kMaxPartialBytes / slot_bytes);
}

std::size_t paged_work_bytes(const PagedAttentionShape& shape) {
  check_shape(shape);
  const auto [tiles, items, merges] = bounds(shape);
  return sizeof(PagedWorkHeader) + static_cast<std::size_t>(tiles + items + merges) * sizeof(PagedWorkUnit);
}

std::size_t write_paged_work(void* work, const PagedAttentionShape& shape, std::span<const PagedChunk> chunks) {
  check_chunks(shape, chunks);
  Plan plan(shape);
  // Slots go to chunks of one row first: they lose most if they are not divided into splits.
  for (const PagedChunk& chunk : chunks) {
    if (chunk.rows == 1) plan.add(chunk);
  }
  for (const PagedChunk& chunk : chunks) {
    if (chunk.rows > 1) plan.add(chunk);
  }
  return plan.write(work);
}

bool paged_work_decodes(const void* work) {
  return static_cast<const PagedWorkHeader*>(work)->decodes == 1;
}

}  // namespace weft::cuda
