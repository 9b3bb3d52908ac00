// RMSNorm (Zhang and Sennrich, 2019) of each head: y = x / sqrt(mean(x^2) + eps) (w + weight_offset) over the HS elements
// of a head, with one weight for all heads. Of q and of k, before they rotate (Henry et al., "Query-Key Normalization for Transformers", 2020).
//
// The same bits for any number of threads, and for a head whatever stands beside it.
#pragma once

#include <cstdint>

#include "llmc/cpu/head_view.h"

namespace weft::cpu {

struct HeadNormShape {
  std::int64_t B = 0, T = 0, heads = 0, HS = 0;
  float eps = 0;
  float weight_offset = 0;
};

// out may be x.
void head_norm_forward(const HeadNormShape& shape, HeadView out, ConstHeadView x, const float* weight);

// dx is written (=) and may be dout; dweight [HS] += in a fixed order. x: the input of forward.
void head_norm_backward(const HeadNormShape& shape, HeadView dx, float* dweight, ConstHeadView dout, ConstHeadView x,
                        const float* weight);

}  // namespace weft::cpu
