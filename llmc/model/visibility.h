// Which keys a query sees: asked by attention on both devices and by what accounts for pages of keys and values.
#pragma once

#include <cstdint>
#include <limits>

#include "llmc/base/host_device.h"
#include "llmc/base/range.h"

namespace weft {

// Of the rows of one sequence. Row r is the token at first_position + r; keys are numbered by their positions. The row sees
// the keys j, first_key(r) <= j < end_key(r), for which all of these hold:
//
//   causal                j <= position
//   window > 0            position - j < window, as in transformers: a window of 1 is the token alone
//   document_starts       j >= document_starts[r]
//
// Neither bound falls from one row to the next. So what the rows r .. s see lies in [first_key(r), end_key(s)), and each key
// is seen by rows that follow each other. Positions are 32-bit (kMaxPositions), which saves a GPU registers.
struct Visibility {
  int first_position = 0;
  int keys = std::numeric_limits<int>::max();  // no key from here on exists
  bool causal = true;
  int window = 0;  // 0: none
  // Position of the first token of each row's document (Krell et al., "Efficient Sequence Packing without Cross-contamination",
  // 2021), at most the row's own and never less than that of the row before. Null: one document.
  const std::int32_t* document_starts = nullptr;

  WEFT_HOST_DEVICE int first_key(int row) const {
    const int start = document_starts ? document_starts[row] : 0;
    const int first = window > 0 ? first_position + row - window + 1 : 0;
    return first > start ? first : start;
  }
  // `row` may be past the last one, the padding of a block of rows.
  WEFT_HOST_DEVICE int end_key(int row) const {
    const int seen = first_position + row + 1;
    return causal && seen < keys ? seen : keys;
  }
};

inline Range visible_keys(const Visibility& visibility, std::int64_t row) {
  return {visibility.first_key(static_cast<int>(row)), visibility.end_key(static_cast<int>(row))};
}

}  // namespace weft
