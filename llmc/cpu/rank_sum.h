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

// The same over ranks that have a gradient each, called by all of them: afterwards `sum` of rank r, [parts[r].size()],
// is the sum of all ranks' elements parts[r] of `values`; it may be that part of `values`. With `behind`, the sum
// begins with what `sum` holds: so ranks that have several gradients each add them in rounds, with the bits of adding
// all at once. The parts do not overlap. Elements of other ranks come `piece` of each part at a time, which bounds the
// memory and changes no bit.
inline constexpr std::int64_t kExchangePiece = 1 << 18;
void exchange_and_add(Communicator& ranks, float* sum, const float* values, std::span<const Range> parts, bool behind,
                      std::int64_t piece = kExchangePiece);

}  // namespace weft::cpu
