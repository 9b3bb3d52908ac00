// fp8 on GPUs: formats.cuh says what each member is.
#pragma once

#include <type_traits>

#include "llmc/cuda/formats/bits.cuh"
#include "llmc/model/formats/fp8.h"

namespace weft::cuda {

struct Fp8 {
  static constexpr DType kType = kFp8.dtype;
  static constexpr bool kGrouped = kFp8.grouped, kOfHead = kFp8.of_head;
  static constexpr int kBits = 8;

  // ---- op/gemm/quantized_matmul.cuh
  static constexpr unsigned kFlip = 0;
  template <typename T>
  using Group = NoGroup;
  // Puts sign, 4 exponent and 3 mantissa bits at the top of the 16-bit format. The exponent biases differ, so a
  // multiplication by a power of two follows, which is exact, also for subnormals.
  template <typename T>
  __device__ static void convert(unsigned (&out)[2], unsigned word, const NoGroup&) {
    constexpr bool kHalf = std::is_same_v<T, fp16>;
    constexpr unsigned kShift = kHalf ? 1 : 4, kFields = kHalf ? 0x3f803f80 : 0x07f007f0;
    const Pair<T> power = as_pair<T>(kHalf ? 0x5c005c00 : 0x7b807b80);  // 2^8, 2^120
    const auto pair = [&](unsigned bytes) {                             // the byte in the upper half of each 16 bits
      return as_bits(__hmul2(as_pair<T>(lop3<kAndOr>(bytes, 0x80008000, bytes >> kShift & kFields)), power));
    };
    out[0] = pair(word << 8);
    out[1] = pair(word);
  }

  // ---- fused/quantized_rows.cuh: the activations are three digits in fp16, the weights become fp16
  static constexpr int kTiles = 1;
  static constexpr bool kIntegers = false;
  static constexpr unsigned kDigitBits = 9;
  __device__ __forceinline__ static void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  // Four numbers in e4m3 as fp16.
  __device__ __forceinline__ static void e4m3_pairs(unsigned word, unsigned& low, unsigned& high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(word));
  }
  __device__ __forceinline__ static void multiply(float (&c)[4], const uint4 (&w)[2], const unsigned (*b)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = w[half];
      unsigned a[8];
      e4m3_pairs(v.x, a[0], a[1]);
      e4m3_pairs(v.y, a[2], a[3]);
      e4m3_pairs(v.z, a[4], a[5]);
      e4m3_pairs(v.w, a[6], a[7]);
      multiply_add(c, {a[0], a[1], a[2], a[3]}, b[2 * half]);
      multiply_add(c, {a[4], a[5], a[6], a[7]}, b[2 * half + 1]);
    }
  }
};

}  // namespace weft::cuda
