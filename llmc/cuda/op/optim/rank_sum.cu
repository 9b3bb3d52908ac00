// The sum over the ranks. Bytes moved: 4 for each element of each piece, and 4 for the sum.
//
// The pointers are kernel parameters, in one of two sizes. A thread has kInFlight groups of 4 elements, a block's width
// apart, and loads all of them from one piece before the next piece: that keeps enough bytes in flight however few
// pieces there are.
#include "llmc/cuda/op/optim/rank_sum.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256, kInFlight = 4;
constexpr std::size_t kFewPieces = 16, kMostPieces = 448;  // 3.5 KB of the 4 KB that parameters may take

template <std::size_t kPieces>
struct Pieces {
  const float* piece[kPieces];
  int count;
};

template <int kCount, std::size_t kPieces>
__global__ void __launch_bounds__(kThreads)
    add_ranks_kernel(float* sum, const __grid_constant__ Pieces<kPieces> pieces, std::int64_t count) {
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

template <int kCount, std::size_t kPieces>
void launch(float* sum, const Pieces<kPieces>& pieces, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(count, static_cast<std::int64_t>(kThreads) * kInFlight * kCount));
  add_ranks_kernel<kCount><<<blocks, kThreads, 0, stream>>>(sum, pieces, count);
  check_launch("add_ranks");
}

template <std::size_t kPieces>
void add(float* sum, std::span<const float* const> list, std::int64_t count, cudaStream_t stream) {
  constexpr int kQuad = 4;
  const bool aligned = aligned_to_16(sum) &&
                       std::all_of(list.begin(), list.end(), [](const float* piece) { return aligned_to_16(piece); });
  const std::int64_t in_quads = aligned ? count / kQuad * kQuad : 0;
  Pieces<kPieces> pieces{};
  pieces.count = static_cast<int>(list.size());
  std::copy(list.begin(), list.end(), pieces.piece);
  launch<kQuad>(sum, pieces, in_quads, stream);
  for (int p = 0; p < pieces.count; ++p) pieces.piece[p] += in_quads;
  launch<1>(sum + in_quads, pieces, count - in_quads, stream);
}

}  // namespace

void add_ranks(float* sum, std::span<const float* const> pieces, std::int64_t count, cudaStream_t stream) {
  if (pieces.size() > kMostPieces)
    fail(Exit::internal, "a sum of %zu ranks, of at most %zu", pieces.size(), kMostPieces);
  if (pieces.size() <= kFewPieces) return add<kFewPieces>(sum, pieces, count, stream);
  add<kMostPieces>(sum, pieces, count, stream);
}

}  // namespace weft::cuda
