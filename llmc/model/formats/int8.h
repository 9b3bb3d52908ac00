// int8: w = scale[n] q, q in [-127, 127].
#pragma once

#include "llmc/model/formats/weight_format.h"

namespace weft {

void dequantize_int8(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K);

inline constexpr WeightFormat kInt8 = {.name = "int8",
                                       .dtype = DType::i8,
                                       .grouped = false,
                                       .of_head = true,
                                       .valid_values = "-127 to 127",
                                       .invalid_mask = 0xff,  // -128
                                       .invalid_bits = 0x80,
                                       .random_mask = 0xff,
                                       .random_deviation = 73.3,
                                       .dequantize = dequantize_int8};

}  // namespace weft
