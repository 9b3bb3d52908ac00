// The sum of the ranks, a block of elements at a time: the block's sum stays in the cache while the pieces pass.
#include "llmc/cpu/rank_sum.h"

#include <algorithm>

namespace weft::cpu {

namespace {

constexpr std::int64_t kBlock = 4096;

}  // namespace

void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t size = std::min(kBlock, count - first);
    float block[kBlock];  // apart from `sum`, which may be a piece that is still to be added
    std::copy_n(pieces[0] + first, size, block);
    for (const float* piece : pieces.subspan(1)) {
#pragma omp simd
      for (std::int64_t i = 0; i < size; ++i) block[i] += piece[first + i];
    }
    std::copy_n(block, size, sum + first);
  }
}

}  // namespace weft::cpu
