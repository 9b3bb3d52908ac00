// The first operator of a step over rows of many sequences, the token embedding, whose ids the host may not know yet;
// and the last one, which selects the rows whose logits are wanted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// out[r, :] = scale weight[id, :] in fp32, with id = ids[r] if that is not negative, else last_ids[-1 - ids[r]]. weight [V,
// C] in float, bf16 or fp16, out [rows, C]; C is a multiple of 8, pointers are aligned to 16 bytes. The caller
// guarantees that ids are in range.
template <typename S>
void embed_rows(float* out, const std::int32_t* ids, const std::int32_t* last_ids, const S* weight, float scale,
                std::int64_t rows, std::int64_t C, cudaStream_t stream);

// out[i, :] = in[rows[i], :], fp32 [count, C] with C a multiple of 4. Part of a chain (hw/launch.cuh) if `overlapping`.
void gather_rows(float* out, const float* in, const std::int32_t* rows, std::int64_t count, std::int64_t C,
                 bool overlapping, cudaStream_t stream);

// out = in rounded to S, [rows, C] with C a multiple of 4, pointers aligned to 16 bytes. Part of a chain if `overlapping`.
template <typename S>
void round_rows(S* out, const float* in, std::int64_t rows, std::int64_t C, bool overlapping, cudaStream_t stream);

}  // namespace weft::cuda
