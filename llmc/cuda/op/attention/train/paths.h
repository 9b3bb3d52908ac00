// The paths of attention.h and what they share: which keys a query sees, and the arguments as one struct.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "llmc/base/ceil_div.h"
#include "llmc/base/host_device.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

template <typename T>
struct ForwardArguments {
  AttentionShape shape;
  HeadViewOf<T> out;
  float* lse;  // [B, NH, TQ] or null
  HeadViewOf<const T> q, k, v;
};

// Statistics of one query: its log-sum-exp in base 2, and D = sum over d of dout * out.
struct alignas(8) RowStatistics {
  float lse2, D;
};

template <typename T>
struct BackwardArguments {
  AttentionShape shape;
  HeadViewOf<T> dq, dk, dv;
  HeadViewOf<const T> dout, out;
  const float* lse;  // [B, NH, TQ]
  HeadViewOf<const T> q, k, v;
  RowStatistics* statistics;  // workspace [B, NH, padded_queries(TQ)]
  DeviceRopeTable rope = {};  // used by hopper_backward() only; its table covers a whole head, or is empty
  AttentionCodes codes = {};  // of hopper_backward() with T bf16: written in the place of dq, dk and dv; no data: none
};

// The statistics are padded to full query blocks, so that the tensor core kernels copy them without remainders.
constexpr std::int64_t kStatisticsBlock = 128;
WEFT_HOST_DEVICE inline std::int64_t padded_queries(std::int64_t TQ) {
  return ceil_div(TQ, kStatisticsBlock) * kStatisticsBlock;
}

// The keys that query t of sequence b sees lie in [first_visible_key(), end_visible_key()). t may be past the last query, the
// padding of a block: it sees from the last query's first key on. Token counts are 32-bit (kMaxTokens bounds them), which
// saves registers; everything that is multiplied by a stride is 64-bit.
WEFT_HOST_DEVICE inline int first_visible_key(const AttentionShape& shape, std::int64_t b, int t) {
  const int last = static_cast<int>(shape.TQ) - 1;
  return shape.visibility(b).first_key(t < last ? t : last);
}
// Visibility::end_key(), written out: from the struct the compiler makes more instructions of it.
WEFT_HOST_DEVICE inline int end_visible_key(const AttentionShape& shape, int t) {
  const int TK = static_cast<int>(shape.TK), seen = TK - static_cast<int>(shape.TQ) + t + 1;
  return shape.causal && seen < TK ? seen : TK;
}

// Shared memory that a block may have on every device from sm_80 on.
constexpr int kSharedBytesEverywhere = 99 * 1024;
// Shared memory that a block may have on the current device.
int shared_bytes_per_block();

// Tensor cores, sm_80 and later; T is bf16 or fp16, all views 16-byte aligned. `shared_limit`: the shared memory a
// block for which the tiling is chosen, at least kSharedBytesEverywhere.
template <typename T>
void portable_forward(const ForwardArguments<T>& arguments, cudaStream_t stream,
                      int shared_limit = shared_bytes_per_block());
template <typename T>
void portable_backward(const BackwardArguments<T>& arguments, cudaStream_t stream,
                       int shared_limit = shared_bytes_per_block());

// Parts of hopper_backward()'s workspace, which begins with the statistics: see hopper_backward.cu.
struct HopperWorkspace {
  float *statistics, *sums;
  int *first_keys, *order, *ticket;
  std::size_t bytes;
};
HopperWorkspace hopper_workspace(const AttentionShape& shape, RowStatistics* memory);

// wgmma and tensor copies, compute capability 9.0; T is bf16 or fp16, all views 16-byte aligned, and the shape one that
// hopper_backward_computes(): head dimension 64 or 128, causal, as many queries as keys.
bool hopper_backward_computes(const AttentionShape& shape);
// Whether hopper_backward() can undo the rotation by this table: all of a head must be rotated, and the table's rows
// must be 16-byte aligned.
bool hopper_backward_unrotates(const AttentionShape& shape, const DeviceRopeTable& rope);
template <typename T>
void hopper_backward(const BackwardArguments<T>& arguments, cudaStream_t stream);

// wgmma and tensor copies, compute capability 9.0; T is bf16 or fp16, all views 16-byte aligned, and the shape one that
// hopper_forward_computes(): head dimension 64, 80, 128 or 256.
bool hopper_forward_computes(const AttentionShape& shape);
template <typename T>
void hopper_forward(const ForwardArguments<T>& arguments, cudaStream_t stream);

// CUDA cores in fp32; T is any of the three, views at any address.
template <typename T>
void plain_forward(const ForwardArguments<T>& arguments, cudaStream_t stream);
template <typename T>
void plain_backward(const BackwardArguments<T>& arguments, cudaStream_t stream);

}  // namespace weft::cuda
