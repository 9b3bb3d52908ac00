// out[n, :] = scale weight[tokens[n], :], a gather; its transpose is a scatter-add.
//
// Backward: each thread owns the tokens of one residue class and goes through the batch in order. Two threads
// never touch the same row, and a row's sum does not depend on how many threads there are.

#include "llmc/cpu/embedding.h"

#include <omp.h>

namespace weft::cpu {

void embedding_forward(float* out, const std::int32_t* tokens, const float* weight, std::int64_t N, std::int64_t C,
                       float scale) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    const float* row = weight + tokens[n] * C;
#pragma omp simd
    for (std::int64_t c = 0; c < C; ++c) out[n * C + c] = scale * row[c];
  }
}

void embedding_backward(float* dweight, const float* dout, const std::int32_t* tokens, std::int64_t N, std::int64_t C,
                        float scale) {
#pragma omp parallel
  {
    const std::int32_t threads = omp_get_num_threads(), self = omp_get_thread_num();
    for (std::int64_t n = 0; n < N; ++n) {
      if (tokens[n] % threads != self) continue;
      float* row = dweight + tokens[n] * C;
      const float* gradient = dout + n * C;
#pragma omp simd
      for (std::int64_t c = 0; c < C; ++c) row[c] += scale * gradient[c];
    }
  }
}

}  // namespace weft::cpu
