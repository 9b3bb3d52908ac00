// gelu(x) = x Phi(x) with the normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2 and density phi;
//   d gelu / dx = Phi(x) + x phi(x).
// gelu_tanh(x) = x/2 (1 + t) with t = tanh(u), u = k (x + a x^3), k = sqrt(2 / pi), a = 0.044715;
//   d gelu_tanh / dx = (1 + t)/2 + x/2 (1 - t^2) k (1 + 3 a x^2).

#include "llmc/cpu/gelu.h"

#include <cmath>
#include <numbers>

namespace weft::cpu {

namespace {

constexpr float kInvSqrt2 = std::numbers::sqrt2_v<float> / 2;
constexpr float kInvSqrt2Pi = std::numbers::inv_sqrtpi_v<float> * kInvSqrt2;

constexpr float kCubic = 0.044715f;

float tanh_of_gelu(float x) {
  return std::tanh(2 * kInvSqrt2Pi * (x + kCubic * x * x * x));
}

float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh_of_gelu(x));
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

void geglu_tanh_backward(float* dgate_up, const float* dout, const float* gate_up, std::int64_t N, std::int64_t F) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    const float *gate = gate_up + n * 2 * F, *up = gate + F;
    float *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
    for (std::int64_t f = 0; f < F; ++f) {
      const float g = gate[f], u = up[f], d = dout[n * F + f];  // read before written: dgate_up may be gate_up
      const float t = tanh_of_gelu(g);
      const float slope = 2 * kInvSqrt2Pi * (1.0f + 3 * kCubic * g * g);
      dgate[f] = d * u * 0.5f * (1.0f + t + g * (1.0f - t * t) * slope);
      dup[f] = d * 0.5f * g * (1.0f + t);
    }
  }
}

}  // namespace weft::cpu
