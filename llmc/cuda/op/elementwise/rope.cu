// Rotary position embedding (Su et al., RoFormer, 2021), half-split pairing, in place:
//
//   y[i]        = x[i] cos - x[i + half] sin
//   y[i + half] = x[i + half] cos + x[i] sin          backward: the same with -sin
//
// Heads are addressed through views (llmc/model/head_view.h), so q and k of a packed row are rotated in one launch and
// v is not touched. Bytes moved: every rotated element is read and written once, 2 N (NH + NKV) 2 half E. One block
// rotates all heads of one token, so the token's row of the table, 2 half floats, is read from memory once a block and
// then from L1. Dimensions from 2 half on are unchanged and not accessed.

#include "llmc/cuda/op/elementwise/rope.h"

#include <algorithm>

#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda {

namespace {

constexpr int kMaxThreads = 256;

template <typename Storage>
struct RopeHeads {
  HeadViewOf<Storage> q, k;
  int NH, NKV;
};

template <typename Storage, int kCount>
__global__ void __launch_bounds__(kMaxThreads)
    rope_kernel(RopeHeads<Storage> heads, DeviceRopeTable table, std::int64_t T, std::int64_t first_position,
                float direction) {
  const std::int64_t b = blockIdx.x / T, t = blockIdx.x % T;
  const int half = static_cast<int>(table.half), per_head = half / kCount;
  const std::int64_t start = table.document_starts != nullptr ? table.document_starts[blockIdx.x] : 0;
  const float* cos_row = table.cos + (first_position + t - start) * table.half;
  const float* sin_row = table.sin + (first_position + t - start) * table.half;
  for (int item = threadIdx.x; item < (heads.NH + heads.NKV) * per_head; item += blockDim.x) {
    const int head = item / per_head, i = item % per_head * kCount;
    Storage* low_half = (head < heads.NH ? heads.q.at(b, t, head) : heads.k.at(b, t, head - heads.NH)) + i;
    Storage* high_half = low_half + half;
    Elements<Storage, kCount> low, high;
    Elements<float, kCount> cosine, sine;
    low.load(low_half);
    high.load(high_half);
    cosine.load(cos_row + i);
    sine.load(sin_row + i);
    float rotated_low[kCount], rotated_high[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      rotated_low[j] = low.get(j), rotated_high[j] = high.get(j);
      rotate_pair(rotated_low[j], rotated_high[j], cosine.get(j), direction * sine.get(j));
    }
    low.set(rotated_low);
    high.set(rotated_high);
    low.store(low_half);
    high.store(high_half);
  }
}

// Whether every head of the view begins on a 16-byte boundary.
template <typename Storage>
bool packs_fit(const HeadViewOf<Storage>& view) {
  constexpr int kPack = Pack<Storage>::size;
  return aligned_to_16(view.data) && view.batch_stride % kPack == 0 && view.token_stride % kPack == 0 &&
         view.head_stride % kPack == 0;
}

template <typename Storage>
void rotate(const RopeHeads<Storage>& heads, const DeviceRopeTable& table, std::int64_t B, std::int64_t T,
            std::int64_t first_position, float direction, cudaStream_t stream) {
  constexpr int kPack = Pack<Storage>::size;
  if (B * T == 0 || table.half == 0) return;
  const bool aligned =
      table.half % kPack == 0 && packs_fit(heads.q) && packs_fit(heads.k) && aligned_to_16(table.cos, table.sin);
  with_count<kPack>(aligned, [&](auto count) {
    const std::int64_t items = (heads.NH + heads.NKV) * table.half / count;
    const int threads = static_cast<int>(std::min<std::int64_t>(kMaxThreads, ceil_div(items, kWarpSize) * kWarpSize));
    rope_kernel<Storage, count>
        <<<static_cast<unsigned>(B * T), threads, 0, stream>>>(heads, table, T, first_position, direction);
  });
  check_launch("rope");
}

template <typename Storage>
RopeHeads<Storage> pair_of(HeadViewOf<Storage> q, HeadViewOf<Storage> k, std::int64_t NH, std::int64_t NKV) {
  return {q, k, static_cast<int>(NH), static_cast<int>(NKV)};
}

}  // namespace

template <typename Storage>
void rope_forward(HeadViewOf<Storage> x, const DeviceRopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                  std::int64_t first_position, cudaStream_t stream) {
  rotate(pair_of(x, x, NH, 0), table, B, T, first_position, 1.0f, stream);
}

template <typename Storage>
void rope_backward(HeadViewOf<Storage> dx, const DeviceRopeTable& table, std::int64_t B, std::int64_t T,
                   std::int64_t NH, std::int64_t first_position, cudaStream_t stream) {
  rotate(pair_of(dx, dx, NH, 0), table, B, T, first_position, -1.0f, stream);
}

template <typename Storage>
void rope_forward(HeadViewOf<Storage> q, HeadViewOf<Storage> k, const DeviceRopeTable& table, std::int64_t B,
                  std::int64_t T, std::int64_t NH, std::int64_t NKV, std::int64_t first_position, cudaStream_t stream) {
  rotate(pair_of(q, k, NH, NKV), table, B, T, first_position, 1.0f, stream);
}

template <typename Storage>
void rope_backward(HeadViewOf<Storage> dq, HeadViewOf<Storage> dk, const DeviceRopeTable& table, std::int64_t B,
                   std::int64_t T, std::int64_t NH, std::int64_t NKV, std::int64_t first_position,
                   cudaStream_t stream) {
  rotate(pair_of(dq, dk, NH, NKV), table, B, T, first_position, -1.0f, stream);
}

DeviceRopeTable upload_rope_table(const RopeTable& table, float* cos, float* sin, cudaStream_t stream) {
  const std::size_t bytes = table.cos.size() * sizeof(float);
  check(cudaMemcpyAsync(cos, table.cos.data(), bytes, cudaMemcpyHostToDevice, stream), "RoPE table");
  check(cudaMemcpyAsync(sin, table.sin.data(), bytes, cudaMemcpyHostToDevice, stream), "RoPE table");
  return {cos, sin, table.positions, table.half};
}

#define WEFT_INSTANTIATE(S)                                                                                        \
  template void rope_forward<S>(HeadViewOf<S>, const DeviceRopeTable&, std::int64_t, std::int64_t, std::int64_t,   \
                                std::int64_t, cudaStream_t);                                                       \
  template void rope_backward<S>(HeadViewOf<S>, const DeviceRopeTable&, std::int64_t, std::int64_t, std::int64_t,  \
                                 std::int64_t, cudaStream_t);                                                      \
  template void rope_forward<S>(HeadViewOf<S>, HeadViewOf<S>, const DeviceRopeTable&, std::int64_t, std::int64_t,  \
                                std::int64_t, std::int64_t, std::int64_t, cudaStream_t);                           \
  template void rope_backward<S>(HeadViewOf<S>, HeadViewOf<S>, const DeviceRopeTable&, std::int64_t, std::int64_t, \
                                 std::int64_t, std::int64_t, std::int64_t, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
