// Rows of a quantised matrix as fp32.
#pragma once

#include <cstdint>

#include "llmc/model/quantization.h"

namespace weft::cpu {

// Rows [first, last) of `matrix`, which has K columns, to out [last - first, K]. i8 and e4m3: q alone, which fp32 holds exactly;
// the scale of the row is for the sum over K (matmul_rows.h). u4: scale (q - zero), which fp32 holds exactly too: 11 bits of a
// half and 4 of the difference.
void dequantize_rows(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K);

}  // namespace weft::cpu
