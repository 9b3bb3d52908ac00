// Where the heads of q, k and v begin in a row of a block's qkv, and how far one is from the next, in elements: what
// ModelConfig::qkv_layout means.
#pragma once

#include <cstdint>

#include "llmc/model/config.h"

namespace weft {

struct QkvHeads {
  std::int64_t keys, values;  // queries begin at 0
  std::int64_t stride;
};

inline QkvHeads qkv_heads(const ModelConfig& config) {
  const std::int64_t HS = config.head_dim;
  if (config.qkv_layout == QkvLayout::per_head) return {HS, 2 * HS, 3 * HS};
  return {config.q_size(), config.q_size() + config.kv_size(), HS};
}

}  // namespace weft
