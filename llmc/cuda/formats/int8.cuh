// int8 on GPUs: formats.cuh says what each member is.
#pragma once

#include <type_traits>

#include "llmc/cuda/formats/bits.cuh"
#include "llmc/model/formats/int8.h"

namespace weft::cuda {

struct Int8 {
  static constexpr DType kType = kInt8.dtype;
  static constexpr bool kGrouped = kInt8.grouped, kOfHead = kInt8.of_head;
  static constexpr int kBits = 8;

  // ---- op/gemm/quantized_matmul.cuh
  static constexpr unsigned kFlip = 0x80;  // stored as q + 128
  template <typename T>
  using Group = NoGroup;
  template <typename T>
  __device__ static void convert(unsigned (&out)[2], unsigned word, const NoGroup&) {
    if constexpr (std::is_same_v<T, fp16>) {
      const __half2 offset = as_pair<fp16>(0x64806480);  // 1024 + 128
      out[0] = as_bits(__hsub2(as_pair<fp16>(__byte_perm(word, 0x64646464, 0x4240)), offset));
      out[1] = as_bits(__hsub2(as_pair<fp16>(__byte_perm(word, 0x64646464, 0x4341)), offset));
    } else {
      // The stored byte is q + 128 = 128 h + l with h its top bit. q = (128 + l) - (h ? 128 : 256), both exact in bf16.
      const auto pair = [](unsigned bytes) {
        return as_bits(__hsub2(as_pair<bf16>(lop3<kAndOr>(bytes, 0x007f007f, 0x43004300)),
                               as_pair<bf16>(lop3<kAndXor>(bytes, 0x00800080, 0x43804380))));
      };
      out[0] = pair(word);
      out[1] = pair(word >> 8);
    }
  }

  // ---- fused/quantized_rows.cuh
  static constexpr int kTiles = 1;
  static constexpr bool kIntegers = true;
  static constexpr unsigned kDigitBits = 30;
  __device__ __forceinline__ static unsigned fixed_point(const float* x, int half, int j, float up) {
    return static_cast<unsigned>(__float2int_rn(x[4 * half + j] * up));
  }
  __device__ __forceinline__ static void multiply_add(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ __forceinline__ static void multiply(int (&c)[4], const uint4 (&w)[2], const unsigned (*b)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = w[half];
      multiply_add(c, {v.x, v.y, v.z, v.w}, b[half]);
    }
  }
};

}  // namespace weft::cuda
