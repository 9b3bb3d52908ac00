// SwiGLU (Shazeer, 2020): out = silu(gate) * up, with gate and up packed in one row [gate F | up F].
#pragma once

#include <cstdint>

namespace weft::cpu {

// gate_up [N, 2F] -> out [N, F].
void swiglu_forward(float* out, const float* gate_up, std::int64_t N, std::int64_t F);
// dgate_up [N, 2F] = from dout [N, F]; may be gate_up's memory.
void swiglu_backward(float* dgate_up, const float* dout, const float* gate_up, std::int64_t N, std::int64_t F);

}  // namespace weft::cpu
