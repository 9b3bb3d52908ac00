// The sum of several ranks' gradients, in the order of the ranks: which process computed them, and how they were cut into
// pieces, does not change a bit.
#pragma once

#include <cstdint>
#include <span>

#include "llmc/comm/communicator.h"

namespace weft::cpu {

// sum[i] = ((pieces[0][i] + pieces[1][i]) + pieces[2][i]) + ..., in fp32. [count] each; at least one piece. `sum` may be one
// of the pieces: adding ranks one by one, {sum, next} at a time, gives the bits of adding all of them at once.
void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count);

// The same over ranks that have a gradient each: afterwards elements parts[r] of `values` are the sum of all ranks' on rank
// r. What other ranks' parts hold stays; the parts do not overlap. The pieces of others come `piece` elements of each part
// at a time, which bounds the memory and changes no bit.
inline constexpr std::int64_t kExchangePiece = 1 << 18;
void exchange_and_add(Communicator& ranks, float* values, std::span<const Range> parts,
                      std::int64_t piece = kExchangePiece);

}  // namespace weft::cpu
