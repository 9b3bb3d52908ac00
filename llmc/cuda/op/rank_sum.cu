// The sum of the ranks. Bytes moved: 4 for each element of each piece, and 4 for the sum.
//
// The pointers are kernel parameters, kPieces at a time: a launch that goes on begins with the sum of those before it, which
// is the order of the definition. A thread takes kInFlight quads of elements, a block's width apart, and reads all of them
// from one piece before the next: that keeps enough bytes in flight however few pieces there are.
#include "llmc/cuda/op/rank_sum.h"

#include <algorithm>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256, kInFlight = 4;
constexpr std::size_t kPieces = 16;

struct Pieces {
  const float* piece[kPieces];
  int count;
};

template <int kCount>
__global__ void __launch_bounds__(kThreads) add_ranks_kernel(float* sum, Pieces pieces, std::int64_t count) {
  constexpr std::int64_t kStep = kThreads * kCount;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kStep * kInFlight + threadIdx.x * kCount;
  float total[kInFlight][kCount];
  for (int p = 0; p < pieces.count; ++p) {
    const float* piece = pieces.piece[p];
    Elements<float, kCount> next[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * kStep < count) next[k].load(piece + first + k * kStep);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) total[k][i] = p == 0 ? next[k].value[i] : total[k][i] + next[k].value[i];
    }
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    if (first + k * kStep >= count) continue;
    Elements<float, kCount> result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.value[i] = total[k][i];
    result.store(sum + first + k * kStep);
  }
}

template <int kCount>
void launch(float* sum, const Pieces& pieces, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(count, static_cast<std::int64_t>(kThreads) * kInFlight * kCount));
  add_ranks_kernel<kCount><<<blocks, kThreads, 0, stream>>>(sum, pieces, count);
  check_launch("add_ranks");
}

}  // namespace

void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count, cudaStream_t stream) {
  constexpr std::int64_t kQuad = 4;
  const bool aligned = aligned_to_16(sum) && std::all_of(pieces.begin(), pieces.end(),
                                                         [](const float* piece) { return aligned_to_16(piece); });
  const std::int64_t in_quads = aligned ? count / kQuad * kQuad : 0;
  const auto add = [&](const Pieces& now) {
    launch<kQuad>(sum, now, in_quads, stream);
    Pieces rest = now;
    for (int p = 0; p < rest.count; ++p) rest.piece[p] += in_quads;
    launch<1>(sum + in_quads, rest, count - in_quads, stream);
  };
  for (std::size_t next = 0; next < pieces.size();) {
    Pieces now{};
    if (next > 0) now.piece[now.count++] = sum;
    while (now.count < static_cast<int>(kPieces) && next < pieces.size()) now.piece[now.count++] = pieces[next++];
    add(now);
  }
}

}  // namespace weft::cuda
