#include "llmc/base/percentile.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace weft {

double percentile(std::span<const double> values, double percent) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  // Multiplied before it is divided: 7 % of 100 values are 7 of them, and 0.07 * 100 is more than that in fp64.
  const auto rank = static_cast<std::ptrdiff_t>(std::ceil(percent * static_cast<double>(values.size()) / 100));
  const std::ptrdiff_t index = std::clamp<std::ptrdiff_t>(rank, 1, std::ssize(values)) - 1;
  std::vector<double> some(values.begin(), values.end());
  std::nth_element(some.begin(), some.begin() + index, some.end());
  return some[static_cast<std::size_t>(index)];
}

}  // namespace weft
