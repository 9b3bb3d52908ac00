// Grouped-query attention (Ainslie et al., 2023) by the flash recurrence (Dao et al., 2022): no T x T matrix is stored.
// Query head h reads K/V head h / (NH / NKV). out = softmax(q k^T * scale) v.
#pragma once

#include <cstdint>

#include "llmc/cpu/head_view.h"

namespace weft::cpu {

// lse [B, NH, TQ]: natural log of the sum of exponentials, for backward; null: not kept.
void attention_forward(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                       ConstHeadView v);

// dq, dk, dv are written (=), every element of the B x T x heads x HS they cover. Fixed summation order.
void attention_backward(const AttentionShape& shape, HeadView dq, HeadView dk, HeadView dv, ConstHeadView dout,
                        ConstHeadView out, const float* lse, ConstHeadView q, ConstHeadView k, ConstHeadView v);

}  // namespace weft::cpu
