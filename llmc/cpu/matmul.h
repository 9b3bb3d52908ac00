// Linear layer: out = x W^T + bias, with the weight as Hugging Face stores it, [OC, C].
//
// Two forms with the same contract: weft::cpu::plain (matmul.cpp) is the specification, loops to be read; the functions
// without a namespace of their own (matmul_blas.cpp) leave the GEMMs to OpenBLAS and are what the models call. They add in
// different orders, so their results differ by fp32 rounding. Each gives the same bits for any number of threads.
#pragma once

#include <cstdint>

namespace weft::cpu {

enum class Accumulate { no, yes };  // = or +=

// out [N, OC] (+)= x [N, C] * weight [OC, C]^T + bias [OC] (null: none).
void matmul_forward(float* out, const float* x, const float* weight, const float* bias, std::int64_t N, std::int64_t C,
                    std::int64_t OC, Accumulate accumulate = Accumulate::no);

// dx [N, C] (+)= dout [N, OC] * weight;  dweight [OC, C] += dout^T * x;  dbias [OC] += column sums of dout.
// A null dx, dweight or dbias is not computed.
void matmul_backward(float* dx, float* dweight, float* dbias, const float* dout, const float* x, const float* weight,
                     std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate_dx = Accumulate::no);

namespace plain {

void matmul_forward(float* out, const float* x, const float* weight, const float* bias, std::int64_t N, std::int64_t C,
                    std::int64_t OC, Accumulate accumulate = Accumulate::no);
void matmul_backward(float* dx, float* dweight, float* dbias, const float* dout, const float* x, const float* weight,
                     std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate_dx = Accumulate::no);

}  // namespace plain

}  // namespace weft::cpu
