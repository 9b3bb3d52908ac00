// Attention of one new token over the K/V cache, with what stands before it: RoPE of query and key, and the append of key
// and value. And the same preparation for the many tokens of a prompt, whose attention is attention.h.
//
// S is float, bf16 or fp16. Head dimensions: those of attention_supports().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/gemv.h"
#include "llmc/cuda/op/neox_weights.h"
#include "llmc/cuda/op/rope.h"

namespace weft::cuda {

struct NeoxHeads {
  std::int64_t NH = 0, HS = 0;
};

// The context of a head is split over blocks (flash decoding; Dao et al., 2023), as many as the GPU has room for, each of
// at least 128 positions. The split depends on the position and the GPU alone.
template <typename S>
struct DecodeAttention {
  NeoxHeads heads;
  const S* qkv = nullptr;                // [NH][q, k, v][HS] of the new token, before RoPE
  S *keys = nullptr, *values = nullptr;  // [NH, capacity, HS]: the layer's cache
  std::int64_t capacity = 0;
  const std::int64_t* position = nullptr;  // of the new token, on the device; everything before it is in the cache
  DeviceRopeTable rope;
  S* out = nullptr;           // [NH HS]
  float* partials = nullptr;  // decode_attention_workspace() bytes, zero before the first call
};
// Writes key and value of the new token to the cache at *position, which is below the capacity. Reads *position and the
// cache before its predecessor in the stream has finished: between whoever wrote them and this launch stands one that was
// not launched by launch_chained().
template <typename S>
void decode_attention(const DecodeAttention<S>& io, const LaunchDevice& device, cudaStream_t stream);
std::size_t decode_attention_workspace(const NeoxHeads& heads, const LaunchDevice& device);

// For the tokens at first_position .. of a prompt, qkv [rows][NH][q, k, v][HS]: rotates queries in place, writes rotated
// keys and values to the cache.
template <typename S>
void rope_and_append(S* qkv, S* keys, S* values, const NeoxHeads& heads, std::int64_t rows, std::int64_t capacity,
                     std::int64_t first_position, const DeviceRopeTable& rope, cudaStream_t stream);

}  // namespace weft::cuda
