// All formats of quantised weights.
#pragma once

#include "llmc/model/formats/fp8.h"
#include "llmc/model/formats/int4.h"
#include "llmc/model/formats/int8.h"

namespace weft {

inline constexpr const WeightFormat* kWeightFormats[] = {&kInt8, &kInt4, &kFp8};

}  // namespace weft
