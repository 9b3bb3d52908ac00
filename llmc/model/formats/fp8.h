// fp8: w = scale[n] q, q in e4m3.
#pragma once

#include "llmc/model/formats/weight_format.h"

namespace weft {

void dequantize_fp8(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K);

inline constexpr WeightFormat kFp8 = {.name = "fp8",
                                      .dtype = DType::e4m3,
                                      .grouped = false,
                                      .of_head = false,
                                      .valid_values = "a number, not NaN",
                                      .invalid_mask = 0x7f,
                                      .invalid_bits = 0x7f,
                                      .random_mask = 0xbf,  // magnitude below 2
                                      .random_deviation = 0.59,
                                      .dequantize = dequantize_fp8};

}  // namespace weft
