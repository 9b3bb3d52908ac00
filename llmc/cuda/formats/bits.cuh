// What the formats of weights share on the GPU: pairs of 16-bit numbers in a register, and bit operations on them.
#pragma once

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

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

// In the place of a grouped format's scale and zero point.
struct NoGroup {
  NoGroup() = default;
  __device__ explicit NoGroup(unsigned) {}
};

}  // namespace weft::cuda
