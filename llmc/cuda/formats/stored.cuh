// The formats as a file has them (QuantizedMatrix), for kernels that turn whole matrices into floats: stored_value(Format(),
// byte, i) is q of element i of a byte, exactly.
#pragma once

#include "llmc/cuda/formats/formats.cuh"

namespace weft::cuda {

__device__ inline float stored_value(Int8, std::uint8_t byte, int) {
  return static_cast<float>(static_cast<std::int8_t>(byte));
}
__device__ inline float stored_value(Int4, std::uint8_t byte, int i) {
  return static_cast<float>(i == 0 ? byte & 15 : byte >> 4);
}
// The fields of an e4m3 number in those of an fp16 one, whose exponent has a bias of 15 in the place of 7: also of subnormals.
__device__ inline float stored_value(Fp8, std::uint8_t byte, int) {
  const unsigned bits = (byte & 0x80u) << 8 | (byte & 0x7fu) << 7;
  return 256.0f * __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

}  // namespace weft::cuda
