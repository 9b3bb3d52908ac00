// Exact GELU (Hendrycks & Gimpel, 2016): x * Phi(x) = x/2 (1 + erf(x / sqrt 2)); not the tanh approximation.
#pragma once

#include <cstdint>

namespace weft::cpu {

void gelu_forward(float* out, const float* x, std::int64_t count);  // out may be x
// Its approximation x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which transformers calls gelu_new, gelu_fast and
// gelu_pytorch_tanh.
void gelu_tanh_forward(float* out, const float* x, std::int64_t count);  // out may be x
// dx may be dout or x.
void gelu_backward(float* dx, const float* dout, const float* x, std::int64_t count);
// GEGLU (Shazeer, 2020) with the approximation: gate_up [N, 2F], each row gate and then up -> out [N, F] = gelu_tanh(gate) up.
void geglu_tanh_forward(float* out, const float* gate_up, std::int64_t N, std::int64_t F);
// dgate_up [N, 2F] may be gate_up; dout [N, F].
void geglu_tanh_backward(float* dgate_up, const float* dout, const float* gate_up, std::int64_t N, std::int64_t F);

}  // namespace weft::cpu
