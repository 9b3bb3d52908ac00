// Percentiles of measured times, by nearest rank.
#pragma once

#include <span>

namespace weft {

// The smallest of `values` that at least `percent` % of them do not exceed: always one that was measured, never a mean of
// two. So the median of 100 values is the 50th, and 0 gives the smallest. `percent` from 0 to 100; NaN if there are no
// values. The values may stand in any order. The same definition as percentile() of dev/bench/serving.py.
double percentile(std::span<const double> values, double percent);

}  // namespace weft
