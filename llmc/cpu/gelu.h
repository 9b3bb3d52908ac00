// Exact GELU (Hendrycks & Gimpel, 2016): x * Phi(x) = x/2 (1 + erf(x / sqrt 2)); not the tanh approximation.
#pragma once

#include <cstdint>

namespace weft::cpu {

void gelu_forward(float* out, const float* x, std::int64_t count);                     // out may be x
void gelu_backward(float* dx, const float* dout, const float* x, std::int64_t count);  // dx may be dout

}  // namespace weft::cpu
