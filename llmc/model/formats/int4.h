// int4: w = scale[n, g] (q - zero[n, g]), q in 0 .. 15, two of them a byte.
#pragma once

#include "llmc/model/formats/weight_format.h"

namespace weft {

void dequantize_int4(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K);

inline constexpr WeightFormat kInt4 = {.name = "int4",
                                       .dtype = DType::u4,
                                       .grouped = true,
                                       .of_head = false,
                                       .valid_values = "0 to 15",
                                       .invalid_mask = 0,  // every byte is two numbers
                                       .invalid_bits = 0xff,
                                       .random_mask = 0xff,
                                       .random_deviation = 4.18,
                                       .dequantize = dequantize_int4};

}  // namespace weft
