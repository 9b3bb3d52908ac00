// Grouped-query attention (Ainslie et al., 2023) by the flash recurrence (Dao et al., 2022): no T x T matrix is stored.
// Query head h reads K/V head h / (NH / NKV) in place. out = softmax(q k^T * scale) v. llmc/cpu/attention.h is the
// specification.
//
// T is bf16, fp16 or float; softmax, its statistics and all sums are fp32. Head dimensions: 32, 64, 80, 96, 128, 256.
// Any TQ >= 1, TK >= TQ, any NH / NKV, scale > 0. A shape outside of that fails with Exit::usage.
//
// bf16 and fp16 run on the tensor cores where every view is 16-byte aligned (data and strides); float, and 16-bit views
// with other addresses, take a plain and slow path.
//
// Results are the same bits in every run: no sum depends on which block comes first.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "llmc/cuda/op/rope.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

constexpr bool attention_supports(std::int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}
// Why there is no kernel for heads of this size, for the user; empty where there is one.
std::string head_dim_refusal(std::int64_t head_dim);

// lse [B, NH, TQ]: natural log of the sum of exponentials, for backward; null: not kept.
template <typename T>
void attention_forward(const AttentionShape& shape, HeadViewOf<T> out, float* lse, HeadViewOf<const T> q,
                       HeadViewOf<const T> k, HeadViewOf<const T> v, cudaStream_t stream);

// Bytes of workspace that attention_backward() needs: 8 a query and head, and 4 HS more (dQ in fp32) for the shapes that
// have a Hopper kernel. Any 16-byte aligned address.
std::size_t attention_backward_workspace(const AttentionShape& shape);

// dq, dk, dv are written (=), every element of the B x T x heads x HS they cover; they may not overlap the inputs. `out`
// and `lse` are what attention_forward() gave for these inputs. `rope`: the table by which rope_forward() has turned q and
// k, tokens from position 0 on; dq and dk are then the gradients of what they were before.
template <typename T>
void attention_backward(const AttentionShape& shape, HeadViewOf<T> dq, HeadViewOf<T> dk, HeadViewOf<T> dv,
                        HeadViewOf<const T> dout, HeadViewOf<const T> out, const float* lse, HeadViewOf<const T> q,
                        HeadViewOf<const T> k, HeadViewOf<const T> v, void* workspace, cudaStream_t stream,
                        const DeviceRopeTable& rope = {});

}  // namespace weft::cuda
