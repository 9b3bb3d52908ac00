// The shape of what an adapter adds to a linear layer, on both devices (llmc/cpu/low_rank.h says what is computed).
#pragma once

#include <cstdint>

namespace weft {

struct LowRankShape {
  std::int64_t N = 0, in = 0, out = 0;  // x is [N, in], y [N, out]
  std::int64_t rank = 0;                // of each module
  float scale = 0;
  float dropout = 0;  // p in [0, 1)
  std::uint64_t seed = 0, offset = 0;
  std::int64_t modules = 1;  // of the layer, q, k and v say, that have a part of the adapter
};

}  // namespace weft
