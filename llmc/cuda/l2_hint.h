// What a kernel that leaves memory idle (attention, the end of a product) may bring into L2 for the launch that follows it:
// the first weights of each of that launch's blocks. Weights depend on nobody, so a hint changes no result.
#pragma once

#include <cstdint>

namespace weft::cuda {

struct L2Hint {
  // `total` rows are split over `readers` blocks; each block's first `count` ones are wanted, as far as they lie in this
  // matrix, which has the rows [before, before + rows) of them. readers 0: nothing.
  struct Rows {
    const char* matrix = nullptr;
    std::uint32_t row_bytes = 0;  // a multiple of 16
    int before = 0, rows = 0, total = 0, readers = 0, count = 0;
  };
  Rows rows[2];
};

}  // namespace weft::cuda
