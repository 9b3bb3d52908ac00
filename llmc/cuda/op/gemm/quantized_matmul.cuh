// What the kernels of quantized_matmul.h share: where a weight lies in a block, and how it becomes a 16-bit value.
//
// A block has 64 rows by 128 of K. Warp w has its rows 16 w to 16 w + 15, and lane 4 g + t the weights that it needs as
// operand A of mma.m16n8k16 and wgmma (PTX ISA, "Matrix Fragments"): rows g and g + 8, k = 16 s + 2 t, + 1, + 8 and +
// 9, for each of 8 steps s. Half a block (4 steps) is 8 words a thread in 8 bits, 4 words in 4 bits:
//   8 bits: word 2 s + r has step s, row g + 8 r; bytes 0 and 2 are k and k + 1, bytes 1 and 3 are k + 8 and k + 9
//   4 bits: word 2 (s / 2) + r; for step s, nibble 2 (s % 2) is k and nibble 2 (s % 2) + 4 is k + 1; the next higher
//           nibbles are k + 8 and k + 9
// Words are stored four at a time, 16 bytes for each of 128 threads: [half][word / 4][thread][4]. Bits of q may be stored
// inverted (Format::kFlip).
#pragma once

#include <cstdint>

#include "llmc/cuda/formats/formats.cuh"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul.cuh"

namespace weft::cuda::quantized {

constexpr int kBlockRows = 64, kBlockDepth = 128, kHalfDepth = kBlockDepth / 2, kThreads = 128;
constexpr int kPieceBytes = kThreads * 16;  // four words of each thread
static_assert(kBlockDepth == kQuantGroup);

template <typename Format>
constexpr int kSteps = 8 / Format::kBits;  // steps of 16 of K in a word
template <typename Format>
constexpr int kWords = Format::kBits;  // words of one thread in half a block
template <typename Format>
constexpr int kHalfBytes = kWords<Format> / 4 * kPieceBytes;
// Bytes of a whole block; with groups it ends with the words of scales and zero points.
template <typename Format>
constexpr int kBlockBytes = 2 * kHalfBytes<Format> + (Format::kGrouped ? kBlockRows * 4 : 0);
// The lowest bit, in its word, of the weight at (step, upper 8 of K, second of a pair).
template <typename Format>
__device__ constexpr int bit_of(int step, int upper, int odd) {
  return Format::kBits * (2 * (step % kSteps<Format>)+upper + 16 / Format::kBits * odd);
}

// The row of the packed matrix that row `row` of a tensor becomes.
__host__ __device__ inline std::int64_t packed_row(const PackedPlace& place, std::int64_t row) {
  const std::int64_t at = place.first + row;
  if (place.part == PackedPlace::Part::rows) return at;
  return at / 8 * 16 + at % 8 + (place.part == PackedPlace::Part::up ? 8 : 0);
}
// Index of the block with (row, k): all blocks of 64 rows are consecutive along K.
__host__ __device__ inline std::int64_t block_of(std::int64_t row, std::int64_t k, std::int64_t K) {
  return row / kBlockRows * ceil_div(K, kBlockDepth) + k / kBlockDepth;
}

// The code at (row of the packed matrix, k), as the tensor file has it.
template <typename Format>
__device__ inline unsigned packed_value(const std::byte* blocks, std::int64_t K, std::int64_t row, std::int64_t k) {
  const int in_warp = static_cast<int>(row % 16), in_depth = static_cast<int>(k % kBlockDepth);
  const int step = in_depth / 16, upper = in_depth / 8 % 2, t = in_depth % 8 / 2, odd = in_depth % 2;
  const int thread = static_cast<int>(row % kBlockRows) / 16 * kWarpSize + in_warp % 8 * 4 + t;
  const std::byte* const half = blocks + block_of(row, k, K) * kBlockBytes<Format> + step / 4 * kHalfBytes<Format>;
  const auto word_of = [&](int index) {
    return reinterpret_cast<const unsigned*>(half + index / 4 * kPieceBytes)[thread * 4 + index % 4];
  };
  const unsigned word = word_of(step % 4 / kSteps<Format> * 2 + in_warp / 8);
  return (word >> bit_of<Format>(step, upper, odd) & ((1 << Format::kBits) - 1)) ^ Format::kFlip;
}
// The word of a row's group: the scale's fp16 bits in the low half, the zero point in the high half.
template <typename Format>
__device__ inline unsigned packed_group(const std::byte* blocks, std::int64_t K, std::int64_t row, std::int64_t group) {
  const std::byte* const words =
      blocks + block_of(row, group * kBlockDepth, K) * kBlockBytes<Format> + 2 * kHalfBytes<Format>;
  return reinterpret_cast<const unsigned*>(words)[row % kBlockRows];
}

// Converts half a block's words to the A operands of 4 steps: a[4 s] to a[4 s + 3] for step s. `groups`: of rows g and
// g + 8.
template <typename T, typename Format>
__device__ inline void convert_half(unsigned (&a)[16], const unsigned (&words)[kWords<Format>],
                                    const typename Format::template Group<T> (&groups)[2]) {
#pragma unroll
  for (int i = 0; i < kWords<Format>; ++i) {
    unsigned pairs[2 * kSteps<Format>];
    Format::template convert<T>(pairs, words[i], groups[i % 2]);
#pragma unroll
    for (int j = 0; j < 2 * kSteps<Format>; ++j) {
      a[4 * (i / 2 * kSteps<Format> + j / 2) + i % 2 + 2 * (j % 2)] = pairs[j];
    }
  }
}

// ---- the paths ----------------------------------------------------------------------------------------------------------

template <typename T>
void hopper(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
            const LaunchDevice& device, cudaStream_t stream);
// One input only.
template <typename T>
void portable(const RowsMatmul<T>& io, const PackedMatrix& weight, const LaunchDevice& device, cudaStream_t stream);

}  // namespace weft::cuda::quantized
