// Activations in e4m3, one scale a row: what CPU and GPU multiply with `--activations fp8`. The scale is a function of the
// row alone, so a row's result does not depend on what is computed beside it.
#pragma once

#include "llmc/base/fp8.h"
#include "llmc/base/host_device.h"

namespace weft {

// The scale of a row whose largest magnitude is `amax`: amax / 448, with which it becomes the largest code. 1 if that is
// not a normal number of fp32: the row is zero, or its codes are. (`amax` not finite: so is the scale.)
WEFT_HOST_DEVICE constexpr float fp8_row_scale(float amax) {
  const float scale = amax / fp8_largest(Fp8Format::e4m3);
  return scale < 0x1p-126f ? 1.0f : scale;
}

}  // namespace weft
