// Activations in fp8 on the CPU: the reference for llmc/cuda/op/gemm/rows_matmul_fp8.h.
#pragma once

#include <cstdint>

namespace weft::cpu {

// x [N, C] in e4m3, a scale for each row (llmc/model/fp8_rows.h): x[n, c] is about scales[n] values[n, c], and each of
// `values` [N, C] is the number of a code, which fp32 holds exactly.
void quantize_rows_fp8(float* values, float* scales, const float* x, std::int64_t N, std::int64_t C);

}  // namespace weft::cpu
