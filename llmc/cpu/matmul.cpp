// The linear layer as it is defined:
//
//   out[n, o] = sum_c x[n, c] W[o, c] + bias[o]
//   dx[n, c] = sum_o dout[n, o] W[o, c];   dW[o, c] += sum_n dout[n, o] x[n, c];   dbias[o] += sum_n dout[n, o]

#include "llmc/cpu/matmul.h"

namespace weft::cpu::plain {

void matmul_forward(float* out, const float* x, const float* weight, const float* bias, std::int64_t N, std::int64_t C,
                    std::int64_t OC, Accumulate accumulate) {
#pragma omp parallel for collapse(2) schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t o = 0; o < OC; ++o) {
      float sum = bias ? bias[o] : 0.0f;
      for (std::int64_t c = 0; c < C; ++c) sum += x[n * C + c] * weight[o * C + c];
      float& element = out[n * OC + o];
      element = accumulate == Accumulate::yes ? element + sum : sum;
    }
  }
}

void matmul_backward(float* dx, float* dweight, float* dbias, const float* dout, const float* x, const float* weight,
                     std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate_dx) {
#pragma omp parallel for collapse(2) schedule(static)
  for (std::int64_t n = 0; n < (dx ? N : 0); ++n) {
    for (std::int64_t c = 0; c < C; ++c) {
      float sum = 0;
      for (std::int64_t o = 0; o < OC; ++o) sum += dout[n * OC + o] * weight[o * C + c];
      float& element = dx[n * C + c];
      element = accumulate_dx == Accumulate::yes ? element + sum : sum;
    }
  }
#pragma omp parallel for schedule(static)
  for (std::int64_t o = 0; o < OC; ++o) {
    for (std::int64_t n = 0; n < N; ++n) {
      const float gradient = dout[n * OC + o];
      for (std::int64_t c = 0; c < (dweight ? C : 0); ++c) dweight[o * C + c] += gradient * x[n * C + c];
      if (dbias) dbias[o] += gradient;
    }
  }
}

}  // namespace weft::cpu::plain
