// int4 on GPUs: formats.cuh says what each member is.
#pragma once

#include "llmc/cuda/formats/bits.cuh"
#include "llmc/model/formats/int4.h"

namespace weft::cuda {

// Scale and zero point of a row's group, in the form that Int4::convert() needs.
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

struct Int4 {
  static constexpr DType kType = kInt4.dtype;
  static constexpr bool kGrouped = kInt4.grouped, kOfHead = kInt4.of_head;
  static constexpr int kBits = 4;

  // ---- op/gemm/quantized_matmul.cuh
  static constexpr unsigned kFlip = 0;
  template <typename T>
  using Group = GroupScale<T>;
  // Each as scale * (q - zero), rounded once. The magic number 0x6400 (fp16 1024) or 0x4300 (bf16 128) turns an integer in
  // the low mantissa bits into a float, exactly.
  template <typename T>
  __device__ static void convert(unsigned (&out)[4], unsigned word, const GroupScale<T>& group) {
    convert_nibbles(out, word, group);
  }
  __device__ static void convert_nibbles(unsigned (&out)[4], unsigned word, const GroupScale<fp16>& group) {
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
  __device__ static void convert_nibbles(unsigned (&out)[4], unsigned word, const GroupScale<bf16>& group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 magic = as_pair<bf16>(lop3<kAndOr>(word >> (4 * i), 0x000f000f, 0x43004300));  // 128 + q
      const __nv_bfloat162 q = __hsub2(magic, group.zero);
      out[i] = as_bits(__hfma2(group.scale, q, __hmul2(group.rest, q)));
    }
  }

  // ---- fused/quantized_rows.cuh
  // The weights of high nibbles are multiplied as the whole bytes that they are in: for a byte 16 high + low and the
  // activations x and y of the low and the high nibble, 16 (low x + high y) = low (16 x - y) + (16 high + low) y. So only
  // the low nibbles are masked, and the digits are those of 16 x - y and of y. To leave room for 17 times the largest
  // activation these have 22 bits below the largest, rather than 30.
  static constexpr int kTiles = 3;
  static constexpr bool kIntegers = true;
  static constexpr unsigned kDigitBits = 22;
  // Rounds to integers of up to 22 bits: the float 1.5 * 2^23 + n ends in n.
  static constexpr float kRounder = 12582912.0f;
  static constexpr unsigned kRounderBits = 0x4b400000u;
  __device__ __forceinline__ static unsigned fixed_point(const float* x, int half, int j, float up) {
    const unsigned low = __float_as_uint(fmaf(x[j], up, kRounder)),
                   high = __float_as_uint(fmaf(x[4 + j], up, kRounder));
    return half == 0 ? 16 * low - high - 15 * kRounderBits : high - kRounderBits;
  }
  __device__ __forceinline__ static void multiply_add(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ __forceinline__ static void multiply(int (&c)[4], const uint4 (&w)[1], const unsigned (*b)[2]) {
    constexpr unsigned kLow = 0x0f0f0f0fu;
    const uint4 v = w[0];
    multiply_add(c, {v.x, v.y, v.z, v.w}, b[1]);
    multiply_add(c, {v.x & kLow, v.y & kLow, v.z & kLow, v.w & kLow}, b[0]);
  }
  // The sum of a group of activations in this lane's two digits, times 16.
  __device__ __forceinline__ static int sum_of_group(const unsigned (&b)[4][2]) {
    // 16 x = (16 x - y) + y and 16 y, so y counts 17 times
    constexpr unsigned kOnce = 0x01010101u, kWeights[2][4] = {{kOnce, kOnce, kOnce, kOnce},
                                                              {17 * kOnce, 17 * kOnce, 17 * kOnce, 17 * kOnce}};
    int sums[4] = {};
#pragma unroll
    for (int f = 0; f < 4; ++f) multiply_add(sums, kWeights[f % 2], b[f]);
    return sums[0] + 256 * sums[1];
  }
};

}  // namespace weft::cuda
