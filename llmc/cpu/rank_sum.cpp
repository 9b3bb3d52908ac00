// The sum of the ranks, a block of elements at a time: the block's sum stays in the cache while the pieces pass.
#include "llmc/cpu/rank_sum.h"

#include <algorithm>
#include <vector>

namespace weft::cpu {

namespace {

constexpr std::int64_t kRangeBlock = 4096;

}  // namespace

void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < count; first += kRangeBlock) {
    const std::int64_t size = std::min(kRangeBlock, count - first);
    float block[kRangeBlock];  // not in `sum`, which may be a piece that is still to be added
    std::copy_n(pieces[0] + first, size, block);
    for (const float* piece : pieces.subspan(1)) {
#pragma omp simd
      for (std::int64_t i = 0; i < size; ++i) block[i] += piece[first + i];
    }
    std::copy_n(block, size, sum + first);
  }
}

void exchange_and_add(Communicator& ranks, float* sum, const float* values, std::span<const Range> parts, bool behind,
                      std::int64_t piece) {
  const std::int64_t longest = longest_of(parts);
  const auto size = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  std::vector<float> received(size * static_cast<std::size_t>(std::min(piece, longest)));
  std::vector<const float*> pieces(size + 1);
  for (std::int64_t first = 0; first < longest; first += piece) {
    const std::vector<Range> now = pieces_of(parts, first, piece);
    ranks.exchange(values, now, received.data());
    float* const here = sum + (now[me].begin - parts[me].begin);
    pieces[0] = here;
    for (std::size_t r = 0; r < size; ++r)
      pieces[r + 1] = received.data() + static_cast<std::int64_t>(r) * now[me].size();
    add_ranks(here, std::span(pieces).subspan(behind ? 0 : 1), now[me].size());
  }
}

}  // namespace weft::cpu
