// Which documents share a row of training data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weft {

// Row r holds documents[begins[r]], ..., documents[begins[r + 1] - 1], numbered as in the lengths that were given.
struct PackedRows {
  std::vector<std::size_t> documents, begins = {0};

  std::size_t count() const { return begins.size() - 1; }
  std::span<const std::size_t> row(std::size_t r) const {
    return std::span(documents).subspan(begins[r], begins[r + 1] - begins[r]);
  }
};

// Puts documents of 1 to `capacity` tokens into rows by best fit decreasing (Johnson et al., 1974: at most 11/9 of the fewest
// rows, and four): the longest document first, each into the fullest row that has room for it. Depends on nothing but the
// lengths and their order. n documents take O(n log n).
PackedRows pack_rows(std::span<const std::int64_t> lengths, std::int64_t capacity);
// Rows of units of `documents_each` documents, of which unit u has those from u * documents_each on: as rows of documents.
PackedRows rows_of_units(const PackedRows& units, std::size_t documents_each);
// A row for each document, in their order.
PackedRows single_rows(std::size_t documents);

// Number of square tiles of `tile` queries by `tile` keys that causal attention computes for rows of `seq_len` tokens, if those
// of documents of these lengths see their own alone; what they leave of the row is a document too.
std::int64_t visible_tiles(std::span<const std::int64_t> lengths, std::int64_t seq_len, std::int64_t tile);

}  // namespace weft
