// out = silu(g) u with silu(g) = g s(g), s the logistic function;
//   d out / d u = g s,   d out / d g = u s (1 + g (1 - s)).

#include "llmc/cpu/swiglu.h"

#include "llmc/cpu/exp.h"

namespace weft::cpu {

void swiglu_forward(float* out, const float* gate_up, std::int64_t N, std::int64_t F) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    const float* gate = gate_up + n * 2 * F;
    const float* up = gate + F;
    float* row = out + n * F;
#pragma omp simd
    for (std::int64_t f = 0; f < F; ++f) row[f] = gate[f] / (1.0f + exp_f32(-gate[f])) * up[f];
  }
}

void swiglu_backward(float* dgate_up, const float* dout, const float* gate_up, std::int64_t N, std::int64_t F) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    const float* gate = gate_up + n * 2 * F;
    const float* up = gate + F;
    const float* gradient = dout + n * F;
    float* dgate = dgate_up + n * 2 * F;
    float* dup = dgate + F;
#pragma omp simd
    for (std::int64_t f = 0; f < F; ++f) {
      const float g = gate[f], u = up[f], d = gradient[f];  // read before written: dgate_up may be gate_up
      const float s = 1.0f / (1.0f + exp_f32(-g));
      dgate[f] = d * u * s * (1.0f + g * (1.0f - s));
      dup[f] = d * g * s;
    }
  }
}

}  // namespace weft::cpu
