// Sharding that rounds up, on both devices.
#pragma once

#include <cstdint>

#include "llmc/base/host_device.h"

namespace weft {

// The smallest number of pieces of `b` that hold `a`; a >= 0, b > 0, and a + b fits into 64 bits.
WEFT_HOST_DEVICE constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace weft
