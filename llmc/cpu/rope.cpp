// One pair (i, i + half) of a head turns by the angle of its position; the table holds cos and sin of all of
// them. Backward is the transposed rotation: the same with -sin.

#include "llmc/cpu/rope.h"

namespace weft::cpu {

namespace {

void rotate(HeadView x, const RopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
            std::int64_t first_position, const std::int32_t* document_starts, float direction) {
  const std::int64_t half = table.half;
#pragma omp parallel for collapse(2) schedule(static)
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t t = 0; t < T; ++t) {
      const std::int64_t start = document_starts != nullptr ? document_starts[b * T + t] : 0;
      const float* cosine = table.cos.data() + (first_position + t - start) * half;
      const float* sine = table.sin.data() + (first_position + t - start) * half;
      for (std::int64_t h = 0; h < NH; ++h) {
        float* low = x.at(b, t, h);
        float* high = low + half;
#pragma omp simd
        for (std::int64_t i = 0; i < half; ++i) {
          const float c = cosine[i], s = direction * sine[i];
          const float a = low[i], z = high[i];
          low[i] = a * c - z * s;
          high[i] = z * c + a * s;
        }
      }
    }
  }
}

}  // namespace

void rope_forward(HeadView x, const RopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                  std::int64_t first_position, const std::int32_t* document_starts) {
  rotate(x, table, B, T, NH, first_position, document_starts, 1.0f);
}

void rope_backward(HeadView dx, const RopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                   std::int64_t first_position, const std::int32_t* document_starts) {
  rotate(dx, table, B, T, NH, first_position, document_starts, -1.0f);
}

}  // namespace weft::cpu
