// gelu(x) = x Phi(x) with the normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2 and density phi;
//   d gelu / dx = Phi(x) + x phi(x).

#include "llmc/cpu/gelu.h"

#include <cmath>
#include <numbers>

namespace weft::cpu {

namespace {

constexpr float kInvSqrt2 = std::numbers::sqrt2_v<float> / 2;
constexpr float kInvSqrt2Pi = std::numbers::inv_sqrtpi_v<float> * kInvSqrt2;

float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + std::tanh(2 * kInvSqrt2Pi * (x + 0.044715f * x * x * x)));
}

}  // namespace

void gelu_forward(float* out, const float* x, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i) out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * kInvSqrt2));
}

void gelu_tanh_forward(float* out, const float* x, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i) out[i] = gelu_tanh(x[i]);
}

void geglu_tanh_forward(float* out, const float* gate_up, std::int64_t N, std::int64_t F) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    const float *gate = gate_up + n * 2 * F, *up = gate + F;
    for (std::int64_t f = 0; f < F; ++f) out[n * F + f] = gelu_tanh(gate[f]) * up[f];
  }
}

void gelu_backward(float* dx, const float* dout, const float* x, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i) {
    const float cdf = 0.5f * (1.0f + std::erf(x[i] * kInvSqrt2));
    const float density = kInvSqrt2Pi * std::exp(-0.5f * x[i] * x[i]);
    dx[i] = dout[i] * (cdf + x[i] * density);
  }
}

}  // namespace weft::cpu
