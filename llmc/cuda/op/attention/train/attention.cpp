// The public functions of attention.h: they check shapes and choose a path.

#include "llmc/cuda/op/attention/train/attention.h"

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/attention/train/paths.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

// Limits of a grid: y counts blocks of at least 8 tokens, x batch and heads.
constexpr std::int64_t kMaxTokens = 65535 * 8, kMaxHeads = 0x7fffffff / 8;
constexpr std::int64_t kMaxWindow = 0x7fffffff;

void check_shape(const AttentionShape& shape) {
  constexpr std::int64_t kHeadDims[] = {32, 64, 80, 96, 128, 256};
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), shape.HS) == std::end(kHeadDims))
    fail(Exit::usage, "attention: head dimension: got %lld, expected 32, 64, 80, 96, 128 or 256",
         static_cast<long long>(shape.HS));
  if (shape.B < 1 || shape.TQ < 1 || shape.TK < shape.TQ || shape.TK > kMaxTokens)
    fail(Exit::usage, "attention: B %lld, TQ %lld, TK %lld: expected 1 <= B, 1 <= TQ <= TK <= %lld",
         static_cast<long long>(shape.B), static_cast<long long>(shape.TQ), static_cast<long long>(shape.TK),
         static_cast<long long>(kMaxTokens));
  if (shape.NKV < 1 || shape.NH < 1 || shape.NH % shape.NKV != 0 || shape.B > kMaxHeads / shape.NH)
    fail(Exit::usage, "attention: %lld query heads, %lld K/V heads, B %lld: expected a multiple, at most %lld in all",
         static_cast<long long>(shape.NH), static_cast<long long>(shape.NKV), static_cast<long long>(shape.B),
         static_cast<long long>(kMaxHeads));
  if (!(shape.scale > 0)) fail(Exit::usage, "attention: scale: got %g, expected > 0", shape.scale);
  if (shape.window < 0 || shape.window > kMaxWindow)
    fail(Exit::usage, "attention: window: got %lld, expected 0 to %lld", static_cast<long long>(shape.window),
         static_cast<long long>(kMaxWindow));
}

// Whether 16-byte copies can read the view's rows.
template <typename T>
bool aligned(const HeadViewOf<T>& view) {
  const std::int64_t bytes = view.batch_stride | view.token_stride | view.head_stride;
  return (reinterpret_cast<std::uintptr_t>(view.data) | static_cast<std::uintptr_t>(bytes) * sizeof(T)) % 16 == 0;
}

}  // namespace

std::string head_dim_unsupported_reason(std::int64_t head_dim) {
  if (attention_supports(head_dim)) return "";
  return format("head_dim: got %lld, the GPU has kernels for 32, 64, 80, 96, 128 and 256",
                static_cast<long long>(head_dim));
}

int shared_bytes_per_block() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

template <typename T>
void attention_forward(const AttentionShape& shape, HeadViewOf<T> out, float* lse, HeadViewOf<const T> q,
                       HeadViewOf<const T> k, HeadViewOf<const T> v, cudaStream_t stream) {
  check_shape(shape);
  const ForwardArguments<T> arguments = {shape, out, lse, q, k, v};
  if constexpr (!std::is_same_v<T, float>) {
    if (aligned(out) && aligned(q) && aligned(k) && aligned(v)) {
      if (hopper_forward_computes(shape) && hopper_multiprocessors() > 0) return hopper_forward(arguments, stream);
      return portable_forward(arguments, stream);
    }
  }
  plain_forward(arguments, stream);
}

std::size_t attention_backward_workspace(const AttentionShape& shape) {
  // The maximum over the paths: memory may be planned on another machine than the one that computes.
  if (hopper_backward_computes(shape)) return hopper_workspace(shape, nullptr).bytes;
  return static_cast<std::size_t>(shape.B * shape.NH * padded_queries(shape.TQ)) * sizeof(RowStatistics);
}

namespace {

void check_table(const AttentionShape& shape, const DeviceRopeTable& rope) {
  if (rope.half > 0 && (rope.positions < shape.TQ || shape.TQ != shape.TK))
    fail(Exit::internal, "attention: a RoPE table of %lld positions for %lld queries and %lld keys",
         static_cast<long long>(rope.positions), static_cast<long long>(shape.TQ), static_cast<long long>(shape.TK));
  if (rope.document_starts != nullptr && rope.document_starts != shape.document_starts)
    fail(Exit::internal, "attention: RoPE has other documents than the mask");
}

}  // namespace

bool attention_backward_rounds(const AttentionShape& shape, const DeviceRopeTable& rope) {
  return hopper_backward_computes(shape) && hopper_multiprocessors() > 0 &&
         (rope.half == 0 || hopper_backward_unrotates(shape, rope));
}

void attention_backward_fp8(const AttentionShape& shape, const AttentionCodes& codes, HeadViewOf<const bf16> dout,
                            HeadViewOf<const bf16> out, const float* lse, HeadViewOf<const bf16> q,
                            HeadViewOf<const bf16> k, HeadViewOf<const bf16> v, void* workspace, cudaStream_t stream,
                            const DeviceRopeTable& rope) {
  check_shape(shape);
  check_table(shape, rope);
  const bool possible = attention_backward_rounds(shape, rope) && aligned(dout) && aligned(out) && aligned(q) &&
                        aligned(k) && aligned(v) && aligned(codes.dq) && aligned(codes.dk) && aligned(codes.dv);
  if (!possible) fail(Exit::internal, "attention: no kernel rounds these gradients");
  hopper_backward<bf16>(
      {shape, {}, {}, {}, dout, out, lse, q, k, v, static_cast<RowStatistics*>(workspace), rope, codes}, stream);
}

template <typename T>
void attention_backward(const AttentionShape& shape, HeadViewOf<T> dq, HeadViewOf<T> dk, HeadViewOf<T> dv,
                        HeadViewOf<const T> dout, HeadViewOf<const T> out, const float* lse, HeadViewOf<const T> q,
                        HeadViewOf<const T> k, HeadViewOf<const T> v, void* workspace, cudaStream_t stream,
                        const DeviceRopeTable& rope) {
  check_shape(shape);
  check_table(shape, rope);
  BackwardArguments<T> arguments = {shape, dq, dk, dv, dout, out, lse, q, k, v, static_cast<RowStatistics*>(workspace)};
  bool tensor_cores = false, unrotated = rope.half == 0;
  if constexpr (!std::is_same_v<T, float>) {
    const bool inputs = aligned(dout) && aligned(out) && aligned(q) && aligned(k) && aligned(v);
    tensor_cores = inputs && aligned(dq) && aligned(dk) && aligned(dv);
    if (tensor_cores && hopper_backward_computes(shape) && hopper_multiprocessors() > 0) {
      if (hopper_backward_unrotates(shape, rope)) arguments.rope = rope, unrotated = true;
      hopper_backward(arguments, stream);
    } else if (tensor_cores) {
      portable_backward(arguments, stream);
    }
  }
  if (!tensor_cores) plain_backward(arguments, stream);
  if (!unrotated) rope_backward(dq, dk, rope, shape.B, shape.TQ, shape.NH, shape.NKV, 0, stream);
}

#define WEFT_INSTANTIATE(T)                                                                                        \
  template void attention_forward<T>(const AttentionShape&, HeadViewOf<T>, float*, HeadViewOf<const T>,            \
                                     HeadViewOf<const T>, HeadViewOf<const T>, cudaStream_t);                      \
  template void attention_backward<T>(const AttentionShape&, HeadViewOf<T>, HeadViewOf<T>, HeadViewOf<T>,          \
                                      HeadViewOf<const T>, HeadViewOf<const T>, const float*, HeadViewOf<const T>, \
                                      HeadViewOf<const T>, HeadViewOf<const T>, void*, cudaStream_t,               \
                                      const DeviceRopeTable&);
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
WEFT_INSTANTIATE(float)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
