// Tensors rounded to fp8 on the CPU: the specification of llmc/cuda/op/fp8/fp8.h. A GEMM of such values in fp32 has exact products:
// it is what a GPU computes from the codes and their scales, up to the order of the sums.
#pragma once

#include <cstdint>

#include "llmc/base/fp8.h"

namespace weft::cpu {

// out[i] = the fp8 number nearest to x[i] 2^exponent, times 2^-exponent; out may be x. Adds to `counters` unless it is null.
void round_fp8(float* out, const float* x, std::int64_t count, Fp8Format format, int exponent, Fp8Counters* counters);

// The bits of the largest magnitude; a NaN is the largest.
std::uint32_t amax_bits(const float* x, std::int64_t count);

}  // namespace weft::cpu
