#include "llmc/train/packing.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace weft {

PackedRows pack_rows(std::span<const std::int64_t> lengths, std::int64_t capacity) {
  std::vector<std::size_t> longest_first(lengths.size());
  std::iota(longest_first.begin(), longest_first.end(), std::size_t{0});
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  std::map<std::int64_t, std::vector<std::size_t>> rows_with_room;  // by the tokens that still fit in
  std::vector<std::size_t> row_of(lengths.size());
  std::size_t rows = 0;
  for (const std::size_t document : longest_first) {
    const auto fullest = rows_with_room.lower_bound(lengths[document]);
    std::int64_t room = capacity;
    std::size_t row = rows;
    if (fullest == rows_with_room.end()) {
      ++rows;
    } else {
      room = fullest->first;
      row = fullest->second.back();
      fullest->second.pop_back();
      if (fullest->second.empty()) rows_with_room.erase(fullest);
    }
    row_of[document] = row;
    if (room > lengths[document]) rows_with_room[room - lengths[document]].push_back(row);
  }

  PackedRows packed;
  packed.begins.resize(rows + 1);
  for (const std::size_t row : row_of) ++packed.begins[row + 1];
  std::partial_sum(packed.begins.begin(), packed.begins.end(), packed.begins.begin());
  packed.documents.resize(lengths.size());
  std::vector<std::size_t> next(packed.begins.begin(), packed.begins.end() - 1);
  for (const std::size_t document : longest_first) packed.documents[next[row_of[document]]++] = document;
  return packed;
}

PackedRows rows_of_units(const PackedRows& units, std::size_t documents_each) {
  PackedRows rows;
  for (const std::size_t unit : units.documents) {
    for (std::size_t i = 0; i < documents_each; ++i) rows.documents.push_back(unit * documents_each + i);
  }
  rows.begins.clear();
  for (const std::size_t begin : units.begins) rows.begins.push_back(begin * documents_each);
  return rows;
}

PackedRows single_rows(std::size_t documents) {
  PackedRows rows;
  rows.documents.resize(documents);
  rows.begins.resize(documents + 1);
  std::iota(rows.documents.begin(), rows.documents.end(), std::size_t{0});
  std::iota(rows.begins.begin(), rows.begins.end(), std::size_t{0});
  return rows;
}

std::int64_t visible_tiles(std::span<const std::int64_t> lengths, std::int64_t seq_len, std::int64_t tile) {
  std::int64_t tiles = 0, start = 0, end = 0;  // of the document that has the tile's first query
  std::size_t document = 0;
  for (std::int64_t query = 0; query < seq_len; query += tile) {
    while (end <= query) {
      start = end;
      end = document < lengths.size() ? end + lengths[document++] : seq_len;
    }
    tiles += query / tile - start / tile + 1;
  }
  return tiles;
}

}  // namespace weft
