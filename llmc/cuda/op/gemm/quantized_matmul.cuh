// What the kernels of quantized_matmul.h share: where a weight lies in a block, and how it becomes a 16-bit value.
//
// A block has 64 rows by 128 of K. Warp w has its rows 16 w to 16 w + 15, and lane 4 g + t the weights that it needs as
// operand A of mma.m16n8k16 and wgmma (PTX ISA, "Matrix Fragments"): rows g and g + 8, k = 16 s + 2 t, + 1, + 8 and +
// 9, for each of 8 steps s. Half a block (4 steps) is 8 words a thread in 8 bits, 4 words in 4 bits:
//   8 bits: word 2 s + r has step s, row g + 8 r; bytes 0 and 2 are k and k + 1, bytes 1 and 3 are k + 8 and k + 9
//   4 bits: word 2 (s / 2) + r; for step s, nibble 2 (s % 2) is k and nibble 2 (s % 2) + 4 is k + 1; the next higher
//           nibbles are k + 8 and k + 9
// Words are stored four at a time, 16 bytes for each of 128 threads: [half][word / 4][thread][4]. int8 is stored with
// its sign bit flipped, as q + 128.
#pragma once

#include <cstdint>
#include <type_traits>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul.cuh"

namespace weft::cuda::quantized {

constexpr int kBlockRows = 64, kBlockDepth = 128, kHalfDepth = kBlockDepth / 2, kThreads = 128;
constexpr int kPieceBytes = kThreads * 16;  // four words of each thread
static_assert(kBlockDepth == kQuantGroup);

template <DType Q>
constexpr int kWords = Q == DType::u4 ? 4 : 8;  // words of one thread in half a block
template <DType Q>
constexpr int kHalfBytes = kWords<Q> / 4 * kPieceBytes;
// Bytes of a whole block; int4 blocks end with the words of scales and zero points.
__host__ __device__ constexpr int block_bytes(DType dtype) {
  return dtype == DType::u4 ? 2 * kPieceBytes + kBlockRows * 4 : 4 * kPieceBytes;
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
template <DType Q>
__device__ inline unsigned packed_value(const std::byte* blocks, std::int64_t K, std::int64_t row, std::int64_t k) {
  const int in_warp = static_cast<int>(row % 16), in_depth = static_cast<int>(k % kBlockDepth);
  const int step = in_depth / 16, upper = in_depth / 8 % 2, t = in_depth % 8 / 2, odd = in_depth % 2;
  const int thread = static_cast<int>(row % kBlockRows) / 16 * kWarpSize + in_warp % 8 * 4 + t;
  const std::byte* const half = blocks + block_of(row, k, K) * block_bytes(Q) + step / 4 * kHalfBytes<Q>;
  const auto word_of = [&](int index) {
    return reinterpret_cast<const unsigned*>(half + index / 4 * kPieceBytes)[thread * 4 + index % 4];
  };
  if constexpr (Q == DType::u4) {
    return word_of(step % 4 / 2 * 2 + in_warp / 8) >> (4 * (2 * (step % 2) + upper + 4 * odd)) & 15;
  } else {
    const unsigned byte = word_of(step % 4 * 2 + in_warp / 8) >> (8 * (upper + 2 * odd)) & 255;
    return Q == DType::i8 ? byte ^ 0x80 : byte;
  }
}
// The word of a row's group (int4): the scale's fp16 bits in the low half, the zero point in the high half.
__device__ inline unsigned packed_group(const std::byte* blocks, std::int64_t K, std::int64_t row, std::int64_t group) {
  const std::byte* const words =
      blocks + block_of(row, group * kBlockDepth, K) * block_bytes(DType::u4) + 2 * kPieceBytes;
  return reinterpret_cast<const unsigned*>(words)[row % kBlockRows];
}

// ---- conversion ---------------------------------------------------------------------------------------------------------

template <unsigned kLut>  // truth table over the bits of a, b and c (PTX ISA, "lop3")
__device__ inline unsigned lop3(unsigned a, unsigned b, unsigned c) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(kLut));
  return result;
}
constexpr unsigned kAndOr = (0xf0 & 0xcc) | 0xaa, kAndXor = (0xf0 & 0xcc) ^ 0xaa;

// Two consecutive elements in one register.
template <typename T>
struct PairOf;
template <>
struct PairOf<fp16> {
  using Type = __half2;
};
template <>
struct PairOf<bf16> {
  using Type = __nv_bfloat162;
};
template <typename T>
using Pair = typename PairOf<T>::Type;
template <typename T>
__device__ inline Pair<T> as_pair(unsigned bits) {
  return *reinterpret_cast<const Pair<T>*>(&bits);
}
template <typename P>
__device__ inline unsigned as_bits(P pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Scale and zero point of a row's group, in the form that convert_nibbles() needs.
template <typename T>
struct GroupScale;
template <>
struct GroupScale<fp16> {
  __half2 scale, low, high;  // zero + 1024; -(zero + 64)
  GroupScale() = default;
  __device__ explicit GroupScale(unsigned word) {
    scale = as_pair<fp16>(__byte_perm(word, 0, 0x1010));
    low = as_pair<fp16>(__byte_perm(word, 0, 0x3232) | 0x64006400);
    high = __hsub2(as_pair<fp16>(0x63806380), low);  // 960 - (zero + 1024)
  }
};
// An fp16 scale has 11 significant bits: 8 go to `scale`, at most 3 to `rest`, whose product with q - zero is exact in
// bf16.
template <>
struct GroupScale<bf16> {
  __nv_bfloat162 scale, rest, zero;  // zero + 128
  GroupScale() = default;
  __device__ explicit GroupScale(unsigned word) {
    zero = as_pair<bf16>(__byte_perm(word, 0, 0x3232) | 0x43004300);
    const float exact = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffff)));
    scale = __float2bfloat162_rn(exact);
    rest = __float2bfloat162_rn(exact - __low2float(scale));
  }
};

// out[i] = the pair of nibbles i and i + 4, each as scale * (q - zero), rounded once. The magic number 0x6400 (fp16
// 1024) or 0x4300 (bf16 128) turns an integer in the low mantissa bits into a float, exactly.
__device__ inline void convert_nibbles(unsigned (&out)[4], unsigned word, const GroupScale<fp16>& group) {
  const __half2 sixteenth = as_pair<fp16>(0x2c002c00);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned at = word >> (8 * i);
    const __half2 low = as_pair<fp16>(lop3<kAndOr>(at, 0x000f000f, 0x64006400));   // 1024 + q
    const __half2 high = as_pair<fp16>(lop3<kAndOr>(at, 0x00f000f0, 0x64006400));  // 1024 + 16 q
    out[2 * i] = as_bits(__hmul2(__hsub2(low, group.low), group.scale));
    out[2 * i + 1] = as_bits(__hmul2(__hfma2(high, sixteenth, group.high), group.scale));
  }
}
__device__ inline void convert_nibbles(unsigned (&out)[4], unsigned word, const GroupScale<bf16>& group) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 magic = as_pair<bf16>(lop3<kAndOr>(word >> (4 * i), 0x000f000f, 0x43004300));  // 128 + q
    const __nv_bfloat162 q = __hsub2(magic, group.zero);
    out[i] = as_bits(__hfma2(group.scale, q, __hmul2(group.rest, q)));
  }
}

// even = bytes 0 and 2 of a word, odd = bytes 1 and 3, as pairs. Exact.
template <typename T, DType Q>
__device__ inline void convert_bytes(unsigned& even, unsigned& odd, unsigned word) {
  if constexpr (Q == DType::i8 && std::is_same_v<T, fp16>) {
    const __half2 offset = as_pair<fp16>(0x64806480);  // 1024 + 128
    even = as_bits(__hsub2(as_pair<fp16>(__byte_perm(word, 0x64646464, 0x4240)), offset));
    odd = as_bits(__hsub2(as_pair<fp16>(__byte_perm(word, 0x64646464, 0x4341)), offset));
  } else if constexpr (Q == DType::i8) {
    // The stored byte is q + 128 = 128 h + l with h its top bit. q = (128 + l) - (h ? 128 : 256), both exact in bf16.
    const auto convert = [](unsigned bytes) {
      return as_bits(__hsub2(as_pair<bf16>(lop3<kAndOr>(bytes, 0x007f007f, 0x43004300)),
                             as_pair<bf16>(lop3<kAndXor>(bytes, 0x00800080, 0x43804380))));
    };
    even = convert(word);
    odd = convert(word >> 8);
  } else {
    // Puts sign, 4 exponent and 3 mantissa bits at the top of the 16-bit format. The exponent biases differ, so a
    // multiplication by a power of two follows, which is exact, also for subnormals.
    constexpr bool kHalf = std::is_same_v<T, fp16>;
    constexpr unsigned kShift = kHalf ? 1 : 4, kFields = kHalf ? 0x3f803f80 : 0x07f007f0;
    const Pair<T> power = as_pair<T>(kHalf ? 0x5c005c00 : 0x7b807b80);  // 2^8, 2^120
    const auto convert = [&](unsigned bytes) {                          // the byte in the upper half of each 16 bits
      return as_bits(__hmul2(as_pair<T>(lop3<kAndOr>(bytes, 0x80008000, bytes >> kShift & kFields)), power));
    };
    even = convert(word << 8);
    odd = convert(word);
  }
}

// Converts half a block's words to the A operands of 4 steps: a[4 s] to a[4 s + 3] for step s. `groups`: int4, of rows
// g and g + 8.
template <typename T, DType Q>
__device__ inline void convert_half(unsigned (&a)[16], const unsigned (&words)[kWords<Q>],
                                    [[maybe_unused]] const GroupScale<T> (&groups)[2]) {
  if constexpr (Q == DType::u4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned pairs[4];
      convert_nibbles(pairs, words[i], groups[i % 2]);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[4 * (i / 2 * 2 + j / 2) + i % 2 + 2 * (j % 2)] = pairs[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) convert_bytes<T, Q>(a[4 * (i / 2) + i % 2], a[4 * (i / 2) + i % 2 + 2], words[i]);
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
