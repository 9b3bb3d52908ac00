// Keys and values of the tokens of one sequence, of all layers.
#pragma once

#include <cstdint>

namespace weft::cuda {

// [L, NKV, capacity, HS] each, or in pages, [L, capacity / page_size, NKV, page_size, HS]; keys are rotated. KV is their
// storage type.
template <typename KV>
struct KvCache {
  KV *keys = nullptr, *values = nullptr;
  std::int64_t capacity = 0;   // positions
  std::int64_t page_size = 0;  // positions; 0: there are no pages
};

}  // namespace weft::cuda
