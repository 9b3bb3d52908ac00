// Keys and values of the tokens of one sequence, of all layers.
#pragma once

#include <cstdint>

namespace weft::cuda {

// [L, NH, capacity, HS] each; keys are rotated. KV is their storage type.
template <typename KV>
struct KvCache {
  KV *keys = nullptr, *values = nullptr;
  std::int64_t capacity = 0;
};

}  // namespace weft::cuda
