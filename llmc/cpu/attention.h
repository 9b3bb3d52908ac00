// Grouped-query attention (Ainslie et al., 2023): out = softmax(q k^T * scale) v. Query head h reads K/V head
// h / (NH / NKV); AttentionShape (llmc/model/head_view.h) says which keys a query sees.
//
// Two forms with the same contract: weft::cpu::plain (attention.cpp) is the specification, loops to be read; the functions
// without a namespace of their own (attention_blocks.cpp) compute the same by the flash recurrence, block by block, and are
// what the models call. They add in different orders, so their results differ by fp32 rounding. Each gives the same bits for
// any number of threads.
#pragma once

#include <cstdint>

#include "llmc/cpu/head_view.h"

namespace weft::cpu {

// lse [B, NH, TQ]: natural log of the sum of exponentials, for backward; null: not kept.
void attention_forward(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                       ConstHeadView v);

// dq, dk, dv are written (=), every element of the B x T x heads x HS they cover; they may not overlap the inputs. `out`
// and `lse` are what attention_forward() gave for these inputs.
void attention_backward(const AttentionShape& shape, HeadView dq, HeadView dk, HeadView dv, ConstHeadView dout,
                        ConstHeadView out, const float* lse, ConstHeadView q, ConstHeadView k, ConstHeadView v);

namespace plain {

void attention_forward(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                       ConstHeadView v);
void attention_backward(const AttentionShape& shape, HeadView dq, HeadView dk, HeadView dv, ConstHeadView dout,
                        ConstHeadView out, const float* lse, ConstHeadView q, ConstHeadView k, ConstHeadView v);

}  // namespace plain

}  // namespace weft::cpu
