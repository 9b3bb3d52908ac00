// Token embedding on the GPU: out[n, :] = scale weight[tokens[n], :]. The specification is llmc/cpu/embedding.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::cuda {

// tokens [N], each in [0, V), which the caller guarantees; weight [V, C] in T, out [N, C] in R, which is T or float.
template <typename T, typename R>
void embedding_forward(R* out, const std::int32_t* tokens, const T* weight, std::int64_t N, std::int64_t C,
                       cudaStream_t stream, float scale = 1);

// Finds the order in which backward adds the rows of dout: token by token, each token's rows in the order of n. It
// depends on the tokens alone, so it can be found while other passes run. `sorted`: embedding_sort_bytes(N) bytes,
// aligned to 16; N < 2^31.
void embedding_sort(void* sorted, const std::int32_t* tokens, std::int64_t N, std::int64_t V, cudaStream_t stream);
std::size_t embedding_sort_bytes(std::int64_t N);

// dweight[tokens[n], :] += scale dout[n, :] in fp32, with `sorted` from embedding_sort() for these tokens. Rows of one token
// are added in the order of n, in runs of a fixed length whose sums are then added in order: the same bits every time.
// dweight [V, C]; dout [N, C] in float, bf16 or fp16. `workspace`: embedding_backward_workspace(N, C) bytes, aligned to
// 16.
template <typename T>
void embedding_backward(float* dweight, const T* dout, void* sorted, std::int64_t N, std::int64_t C, void* workspace,
                        cudaStream_t stream, float scale = 1);
std::size_t embedding_backward_workspace(std::int64_t N, std::int64_t C);

}  // namespace weft::cuda
