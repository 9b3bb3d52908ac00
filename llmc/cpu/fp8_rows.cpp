#include "llmc/cpu/fp8_rows.h"

#include <algorithm>
#include <cmath>

#include "llmc/model/fp8_rows.h"

namespace weft::cpu {

void quantize_rows_fp8(float* values, float* scales, const float* x, std::int64_t N, std::int64_t C) {
#pragma omp parallel for if (N * C >= (std::int64_t{1} << 14))
  for (std::int64_t n = 0; n < N; ++n) {
    const float* const row = x + n * C;
    float amax = 0;
    for (std::int64_t c = 0; c < C; ++c) amax = std::max(amax, std::abs(row[c]));
    const float scale = fp8_row_scale(amax);
    scales[n] = scale;
    for (std::int64_t c = 0; c < C; ++c) values[n * C + c] = round_to_fp8(row[c] / scale, Fp8Format::e4m3);
  }
}

}  // namespace weft::cpu
