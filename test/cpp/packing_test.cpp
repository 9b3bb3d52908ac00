// Rows of whole documents: which documents share one, and what attention computes of them.
#include "llmc/train/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "llmc/model/visibility.h"

namespace weft {
namespace {

using Lengths = std::vector<std::int64_t>;

// The lengths in each row; every document is in one row, and no row is too long.
std::vector<Lengths> rows_of(const Lengths& lengths, std::int64_t capacity) {
  const PackedRows packed = pack_rows(lengths, capacity);
  std::vector<std::size_t> all = packed.documents;
  std::sort(all.begin(), all.end());
  std::vector<std::size_t> expected(lengths.size());
  std::iota(expected.begin(), expected.end(), std::size_t{0});
  EXPECT_EQ(all, expected);
  EXPECT_EQ(packed.begins.back(), lengths.size());
  std::vector<Lengths> rows;
  for (std::size_t r = 0; r < packed.count(); ++r) {
    rows.emplace_back();
    for (const std::size_t document : packed.row(r)) rows.back().push_back(lengths[document]);
    EXPECT_LE(std::accumulate(rows.back().begin(), rows.back().end(), std::int64_t{0}), capacity);
    EXPECT_FALSE(rows.back().empty());
  }
  return rows;
}

TEST(Packing, TheLongestFirstEachIntoTheFullestRowThatHasRoom) {
  EXPECT_EQ(rows_of({8, 2, 6, 1, 8, 4, 7, 3}, 8), (std::vector<Lengths>{{8}, {8}, {7}, {6, 2}, {4, 3, 1}}));
  EXPECT_EQ(rows_of({5, 6, 3}, 9), (std::vector<Lengths>{{6, 3}, {5}}))
      << "the first row has room for 3 as well, and less";
  EXPECT_EQ(rows_of({1, 1, 1}, 2), (std::vector<Lengths>{{1, 1}, {1}}));
  EXPECT_EQ(rows_of({}, 4), std::vector<Lengths>());
  EXPECT_EQ(pack_rows(Lengths{3, 3, 3, 3}, 6).documents, (std::vector<std::size_t>{0, 1, 2, 3}))
      << "equal ones in order";
}

// Against the rule by itself: of all rows the fullest that has room, the one that got room for so much last.
TEST(Packing, ManyDocumentsFillTheirRows) {
  std::mt19937 generator(3);
  for (const std::int64_t capacity : {16, 100, 4096}) {
    Lengths lengths(3000);
    for (std::int64_t& length : lengths) {
      length = 1 + static_cast<std::int64_t>(generator() % static_cast<unsigned>(capacity / (1 + generator() % 4)));
    }
    const std::vector<Lengths> rows = rows_of(lengths, capacity);
    const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    const auto fewest = static_cast<std::size_t>((tokens + capacity - 1) / capacity);
    EXPECT_LE(rows.size(), fewest + fewest / 25) << capacity;
    Lengths sorted = lengths;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    Lengths room;
    for (const std::int64_t length : sorted) {
      auto best = room.end();
      for (auto row = room.begin(); row != room.end(); ++row) {
        if (*row >= length && (best == room.end() || *row < *best)) best = row;
      }
      if (best == room.end()) best = room.insert(room.end(), capacity);
      *best -= length;
    }
    EXPECT_EQ(rows.size(), room.size());
    Lengths left;
    for (const Lengths& row : rows) left.push_back(capacity - std::accumulate(row.begin(), row.end(), std::int64_t{0}));
    std::sort(left.begin(), left.end());
    std::sort(room.begin(), room.end());
    EXPECT_EQ(left, room) << capacity;
  }
}

// Each key that a query of the row sees, and the tiles in which there is one.
struct Counted {
  std::int64_t keys = 0, tiles = 0;
};
Counted count(const Lengths& lengths, std::int64_t seq_len, std::int64_t tile) {
  std::vector<std::int32_t> starts;
  for (const std::int64_t length : lengths) {
    starts.insert(starts.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(starts.size()));
  }
  starts.resize(static_cast<std::size_t>(seq_len), static_cast<std::int32_t>(starts.size()));
  const Visibility visibility{.document_starts = starts.data()};
  Counted counted;
  for (std::int64_t first = 0; first < seq_len; first += tile) {
    const std::int64_t end = std::min(first + tile, seq_len);
    for (std::int64_t row = first; row < end; ++row) counted.keys += visible_keys(visibility, row).size();
    const Range seen = {visible_keys(visibility, first).begin, visible_keys(visibility, end - 1).end};
    counted.tiles += (seen.end - 1) / tile - seen.begin / tile + 1;
  }
  return counted;
}

TEST(Packing, VisibleTilesAreThoseWithAVisibleKey) {
  const std::vector<Lengths> rows = {{},   {70},         {1},          {64, 6},      {63, 7},
                                     {40}, {1, 1, 1, 1}, {30, 30, 9},  {16, 16, 16}, {5, 60},
                                     {70}, {17, 15, 33}, {2, 64, 1, 3}};
  for (const Lengths& lengths : rows) {
    for (const std::int64_t tile : {1, 3, 16, 64, 128}) {
      EXPECT_EQ(visible_tiles(lengths, 70, tile), count(lengths, 70, tile).tiles)
          << testing::PrintToString(lengths) << tile;
    }
  }
}

// 8,192 tokens of documents of 512: the queries see a sixteenth of the keys, and the tiles are not many more.
TEST(Packing, AttentionCostsWhatTheDocumentsCost) {
  const Lengths documents(16, 512);
  const Counted packed = count(documents, 8192, 128), whole = count({}, 8192, 128);
  EXPECT_EQ(packed.keys, 16 * 512 * 513 / 2);
  EXPECT_EQ(whole.keys, 8192LL * 8193 / 2);
  EXPECT_NEAR(static_cast<double>(packed.keys) / static_cast<double>(whole.keys), 1.0 / 16, 1e-3);
  EXPECT_EQ(visible_tiles(documents, 8192, 128), 16 * 10);
  EXPECT_EQ(visible_tiles({}, 8192, 128), 64 * 65 / 2);
}

}  // namespace
}  // namespace weft
