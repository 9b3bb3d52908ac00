// Rotary position embedding (Su et al., RoFormer, 2021), half-split pairing: for i < rotary_dim / 2
//   y[i]                = x[i] cos - x[i + rotary_dim/2] sin
//   y[i + rotary_dim/2] = x[i + rotary_dim/2] cos + x[i] sin
// with the table of weft::rope_table; dimensions >= rotary_dim pass through. In place.
#pragma once

#include <cstdint>

#include "llmc/cpu/head_view.h"
#include "llmc/model/config.h"

namespace weft::cpu {

// x: B x T tokens of NH heads; token t has position first_position + t < table.positions. document_starts [B, T], unless null:
// from the position of token t those are taken that are before the first token of its document (Visibility).
void rope_forward(HeadView x, const RopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                  std::int64_t first_position, const std::int32_t* document_starts = nullptr);
// The gradient is the rotation by the opposite angle, in place on dx.
void rope_backward(HeadView dx, const RopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                   std::int64_t first_position, const std::int32_t* document_starts = nullptr);

}  // namespace weft::cpu
