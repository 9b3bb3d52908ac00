// Token embedding: out[n, :] = scale weight[tokens[n], :].
#pragma once

#include <cstdint>

namespace weft::cpu {

// tokens [N], each in [0, V) (the caller has checked), weight [V, C], out [N, C].
void embedding_forward(float* out, const std::int32_t* tokens, const float* weight, std::int64_t N, std::int64_t C,
                       float scale = 1);

// dweight[tokens[n], :] += scale dout[n, :], rows of one token added in the order of n: the same bits for any thread count.
void embedding_backward(float* dweight, const float* dout, const std::int32_t* tokens, std::int64_t N, std::int64_t C,
                        float scale = 1);

}  // namespace weft::cpu
