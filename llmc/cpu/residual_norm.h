// Fused dropout + residual + norm, as one operator:
//
//   h = dropout(x * rowscale) * colscale + residual        the new residual stream
//   z = norm(h) * (weight + weight_offset) + bias          LayerNorm (Ba et al., 2016) or RMSNorm (Zhang & Sennrich, 2019)
//
// With two weights (GPT-NeoX's parallel residual) one h gives two outputs z, z2 from the same statistics.
// Dropout scales what it keeps by 1/(1-p). Its mask is not stored: element e = row * C + column is kept iff
// uniform01(philox(seed, offset + e / 4, RandomStream::dropout).word[e % 4]) >= p, forward and backward alike.
//
// Prenorm (Llama, GPT-NeoX): residual_out is asked for and backward takes its gradient too.
// Postnorm: residual_out and dresidual_out are null; h is then recomputed in backward from x and residual.
// The norm of a stored residual_out (as `residual`, with x null) gives the bits of the call that stored it.
// Backward needs the rstd (and LayerNorm's mean) that forward kept. The same bits for any number of threads.
#pragma once

#include <cstdint>

#include "llmc/model/norm_shape.h"

namespace weft::cpu {

struct ResidualNormForward {
  const float* x = nullptr;         // [rows, C]; null: h = residual (the norm of the stream alone)
  const float* residual = nullptr;  // [rows, C]; null: none
  const float* rowscale = nullptr;  // [rows]; null: 1 (stochastic depth; no gradient)
  const float* colscale = nullptr;  // [C]; null: 1 (LayerScale)
  const float* weight = nullptr;    // [C]
  const float* bias = nullptr;      // [C]; null: none
  const float* weight2 = nullptr;   // [C]; null: one output only
  const float* bias2 = nullptr;
  float* residual_out = nullptr;  // [rows, C]; may be `residual` itself; null: not kept
  float* out = nullptr;           // [rows, C]; may be x, unless residual_out is asked for too
  float* out2 = nullptr;          // [rows, C] iff weight2
  float* mean = nullptr;          // [rows], LayerNorm only; null: not kept
  float* rstd = nullptr;          // [rows]; null: not kept
};
void residual_norm_forward(const ResidualNormShape& shape, const ResidualNormForward& io);

struct ResidualNormBackward {
  const float* dout = nullptr;           // [rows, C]
  const float* dout2 = nullptr;          // [rows, C] iff weight2
  const float* dresidual_out = nullptr;  // [rows, C]: gradient that reaches h from elsewhere (the skip path); null: 0
  const float* residual_out = nullptr;   // [rows, C]: h of the forward pass; null: recomputed from x and residual
  const float* x = nullptr;              // needed for colscale's gradient and for the recomputation
  const float* residual = nullptr;
  const float* rowscale = nullptr;
  const float* colscale = nullptr;
  const float* weight = nullptr;
  const float* weight2 = nullptr;
  const float* mean = nullptr;  // [rows], LayerNorm
  const float* rstd = nullptr;  // [rows]
  float* dx = nullptr;          // [rows, C] =; may be dout's memory; null: not computed
  float* dresidual = nullptr;   // [rows, C] =; may be dresidual_out's memory; null: not computed
  float* dweight = nullptr;     // [C] +=, in a fixed order
  float* dbias = nullptr;
  float* dweight2 = nullptr;
  float* dbias2 = nullptr;
  float* dcolscale = nullptr;  // [C] +=
};
void residual_norm_backward(const ResidualNormShape& shape, const ResidualNormBackward& io);

}  // namespace weft::cpu
