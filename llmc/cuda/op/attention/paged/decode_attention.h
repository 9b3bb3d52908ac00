// Attention of one new token over the K/V cache, with the two operators before it: RoPE of query and key, and the
// append of key and value to the cache. For a prompt only these two are here; its attention is attention.h.
//
// A is the storage type of activations, KV that of the cache: float, bf16 or fp16. Head dimensions: those of
// attention_supports().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/gemm/gemv.h"

namespace weft::cuda {

struct NeoxHeads {
  std::int64_t NH = 0, HS = 0;  // queries, keys and values have the same number of heads
};

// The context of a head is divided into splits of at least 128 positions, one block each (flash decoding; Dao et al.,
// 2023), as many as the GPU has room for. Their boundaries depend on the position and the GPU alone.
template <typename A, typename KV>
struct DecodeAttention {
  NeoxHeads heads;
  const A* qkv = nullptr;                 // [NH][q, k, v][HS] of the new token, before RoPE
  KV *keys = nullptr, *values = nullptr;  // [NH, capacity, HS]: the layer's cache
  std::int64_t capacity = 0;
  // on the device: the new token's position; the cache holds all positions before it
  const std::int64_t* position = nullptr;
  DeviceRopeTable rope;
  A* out = nullptr;           // [NH HS]
  float* partials = nullptr;  // decode_attention_workspace() bytes, zeroed before the first call
};
// Appends key and value of the new token at *position, which must be below the capacity. *position and the cache are
// read before the predecessor in the stream has ended: between the kernel that wrote them and this one at least one
// kernel must be launched without launch_chained().
template <typename A, typename KV>
void decode_attention(const DecodeAttention<A, KV>& io, const LaunchDevice& device, cudaStream_t stream);
std::size_t decode_attention_workspace(const NeoxHeads& heads, const LaunchDevice& device);

// For a prompt's tokens from first_position on, qkv [rows][NH][q, k, v][HS]: rotates queries in place, writes rotated
// keys and values to the cache. A and KV must be the same type, since values are copied.
template <typename A, typename KV>
void rope_and_append(A* qkv, KV* keys, KV* values, const NeoxHeads& heads, std::int64_t rows, std::int64_t capacity,
                     std::int64_t first_position, const DeviceRopeTable& rope, cudaStream_t stream);

}  // namespace weft::cuda
