// The shape of the fused dropout + residual + norm, on both devices (llmc/cpu/residual_norm.h says what it computes).
#pragma once

#include <cstdint>

#include "llmc/model/config.h"

namespace weft {

struct ResidualNormShape {
  std::int64_t rows = 0, C = 0;
  NormKind kind = NormKind::rmsnorm;
  float eps = 0;
  float dropout = 0;  // p in [0, 1)
  std::uint64_t seed = 0, offset = 0;
  float weight_offset = 0;  // added to each weight
};

}  // namespace weft
