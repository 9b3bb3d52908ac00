// The K/V cache of one sequence, for all layers.
#pragma once

#include <cstdint>

#include "llmc/base/kv_fp8.h"

namespace weft::cuda {

// Keys (rotated) and values, [L, capacity / page_size, NKV, page_size, HS] each. KV: their storage type. Or `codes`, not null,
// of the first layer, which those of the others follow; then page_size is a multiple of kKvUnit.
template <typename KV>
struct KvCache {
  KV *keys = nullptr, *values = nullptr;
  std::int64_t capacity = 0;   // positions
  std::int64_t page_size = 0;  // positions
  KvCodes codes = {};

  bool fp8() const { return codes.keys != nullptr; }
};

}  // namespace weft::cuda
