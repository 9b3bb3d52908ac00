// Grouped-query attention (Ainslie et al., 2023) by the flash recurrence (Dao et al., 2022): no T x T matrix is stored.
// out = softmax(q k^T * scale) v; query head h reads K/V head h / (NH / NKV) in place. The specification is
// llmc/cpu/attention.h.
//
// T is bf16, fp16 or float; softmax, its statistics and all sums are fp32. Head dimensions: 32, 64, 80, 96, 128, 256.
// Any TQ >= 1, TK >= TQ, any NH / NKV, scale > 0, any window; other shapes fail with Exit::usage. document_starts are in the
// GPU's memory. Tiles of keys that no query of a tile sees are neither read nor multiplied. Within a tile what is hidden gets
// the weight 0, so that a NaN there reaches queries that do not see it, as a NaN after a query always did.
//
// bf16 and fp16 run on tensor cores if every view is 16-byte aligned (data and strides). float, and 16-bit views with
// other addresses, take a plain, slow path.
//
// Results have the same bits in every run: no sum depends on which block runs first.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

constexpr bool attention_supports(std::int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}
// Empty if there are kernels for this head dimension, else the reason for the user.
std::string head_dim_unsupported_reason(std::int64_t head_dim);

// out [B, TQ, NH, HS] from q and k, v [B, TK, NKV, HS], as views. lse [B, NH, TQ]: the natural log of the sum of
// exponentials, for backward; null: not stored.
template <typename T>
void attention_forward(const AttentionShape& shape, HeadViewOf<T> out, float* lse, HeadViewOf<const T> q,
                       HeadViewOf<const T> k, HeadViewOf<const T> v, cudaStream_t stream);

// Bytes of workspace for attention_backward(): 8 for each query and head, and for shapes with a Hopper kernel another 4
// HS (dQ in fp32) and 4 for each token. The same for every window and with documents. Any 16-byte aligned address will do.
std::size_t attention_backward_workspace(const AttentionShape& shape);

// dq, dk, dv are written (=) completely and may not overlap the inputs. `out` and `lse` are the results of
// attention_forward() for these inputs. `rope`: the table with which rope_forward() rotated q and k, tokens from
// position 0 on; dq and dk are then the gradients of the unrotated q and k. Its document_starts are null or those of the shape.
template <typename T>
void attention_backward(const AttentionShape& shape, HeadViewOf<T> dq, HeadViewOf<T> dk, HeadViewOf<T> dv,
                        HeadViewOf<const T> dout, HeadViewOf<const T> out, const float* lse, HeadViewOf<const T> q,
                        HeadViewOf<const T> k, HeadViewOf<const T> v, void* workspace, cudaStream_t stream,
                        const DeviceRopeTable& rope = {});

// Codes of dq, dk and dv as parts of one tensor, with one scale and one set of counters; views as those of the gradients.
struct AttentionCodes {
  HeadViewOf<std::uint8_t> dq, dk, dv;
  const float* scale = nullptr;
  Fp8Counters* counters = nullptr;
};
// Whether this GPU has attention_backward_fp8() for the shape and the table.
bool attention_backward_rounds(const AttentionShape& shape, const DeviceRopeTable& rope);
// attention_backward() that writes codes in e5m2 in the place of the gradients: those that quantize_fp8() makes of them,
// bit for bit, and counts alike. All views are aligned to 16 bytes.
void attention_backward_fp8(const AttentionShape& shape, const AttentionCodes& codes,
                            HeadViewOf<const __nv_bfloat16> dout, HeadViewOf<const __nv_bfloat16> out, const float* lse,
                            HeadViewOf<const __nv_bfloat16> q, HeadViewOf<const __nv_bfloat16> k,
                            HeadViewOf<const __nv_bfloat16> v, void* workspace, cudaStream_t stream,
                            const DeviceRopeTable& rope);

}  // namespace weft::cuda
