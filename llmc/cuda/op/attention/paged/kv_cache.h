// The K/V cache of one sequence, for all layers.
#pragma once

#include <cstdint>

namespace weft::cuda {

// Keys (rotated) and values, [L, capacity / page_size, NKV, page_size, HS] each. KV: their storage type.
template <typename KV>
struct KvCache {
  KV *keys = nullptr, *values = nullptr;
  std::int64_t capacity = 0;   // positions
  std::int64_t page_size = 0;  // positions
};

}  // namespace weft::cuda
