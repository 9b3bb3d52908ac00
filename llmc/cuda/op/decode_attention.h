// Attention of one new token over the K/V cache, with the two operators before it: RoPE of query and key, and the append of
// key and value to the cache. For the tokens of a prompt there are these two alone; their attention is attention.h.
//
// A is the storage type of activations, KV that of the cache: float, bf16 or fp16. Head dimensions: those of
// attention_supports().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/gemv.h"
#include "llmc/cuda/op/rope.h"

namespace weft::cuda {

struct NeoxHeads {
  std::int64_t NH = 0, HS = 0;  // queries, keys and values have the same number of heads
};

// The context of a head is divided into splits of at least 128 positions, a block each (flash decoding; Dao et al., 2023),
// as many as the GPU has room for. Where they begin depends on the position and the GPU alone.
template <typename A, typename KV>
struct DecodeAttention {
  NeoxHeads heads;
  const A* qkv = nullptr;                 // [NH][q, k, v][HS] of the new token, before RoPE
  KV *keys = nullptr, *values = nullptr;  // [NH, capacity, HS]: the layer's cache
  std::int64_t capacity = 0;
  const std::int64_t* position = nullptr;  // of the new token, on the device; everything before it is in the cache
  DeviceRopeTable rope;
  A* out = nullptr;           // [NH HS]
  float* partials = nullptr;  // decode_attention_workspace() bytes, zero before the first call
};
// Writes key and value of the new token to the cache at *position, which is below the capacity. Reads *position and the
// cache before its predecessor in the stream has finished: between the kernel that wrote them and this one, at least one
// kernel must have been launched without launch_chained().
template <typename A, typename KV>
void decode_attention(const DecodeAttention<A, KV>& io, const LaunchDevice& device, cudaStream_t stream);
std::size_t decode_attention_workspace(const NeoxHeads& heads, const LaunchDevice& device);

// For the tokens at first_position .. of a prompt, qkv [rows][NH][q, k, v][HS]: rotates queries in place, writes rotated
// keys and values to the cache. Values are copied bit for bit, so A and KV are the same type.
template <typename A, typename KV>
void rope_and_append(A* qkv, KV* keys, KV* values, const NeoxHeads& heads, std::int64_t rows, std::int64_t capacity,
                     std::int64_t first_position, const DeviceRopeTable& rope, cudaStream_t stream);

}  // namespace weft::cuda
