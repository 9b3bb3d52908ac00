// The sum of several ranks' gradients, in the order of the ranks: which process computed them, and how they were cut into
// pieces, does not change a bit.
#pragma once

#include <cstdint>
#include <span>

namespace weft::cpu {

// sum[i] = ((pieces[0][i] + pieces[1][i]) + pieces[2][i]) + ..., in fp32. [count] each; at least one piece. `sum` may be one
// of the pieces: adding ranks one by one, {sum, next} at a time, gives the bits of adding all of them at once.
void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count);

}  // namespace weft::cpu
