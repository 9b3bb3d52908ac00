// A GPT-NeoX model as it lies on the device: what prefill, the decode kernels and their tests hand to each other. S is the
// storage type of weights and cache (fp16, bf16 or fp32); all pointers are 16-byte aligned.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::cuda {

template <typename S>
struct NeoxNorm {
  const S *weight = nullptr, *bias = nullptr;  // [C]
};

template <typename S>
struct NeoxLinear {
  const S* weight = nullptr;  // [out, in], row-major
  const S* bias = nullptr;    // [out] or null
};

template <typename S>
struct NeoxLayerWeights {
  NeoxNorm<S> input_norm, post_norm;
  NeoxLinear<S> qkv;    // [3 C, C]; rows in the order of the checkpoint: [head][q, k, v][HS]
  NeoxLinear<S> dense;  // [C, C]
  NeoxLinear<S> up;     // [F, C]
  NeoxLinear<S> down;   // [C, F]
};

template <typename S>
struct NeoxWeights {
  const S* embedding = nullptr;  // [V, C]
  const S* head = nullptr;       // [V, C]
  NeoxNorm<S> final_norm;
  std::vector<NeoxLayerWeights<S>> layers;
};

// Keys (rotated) and values of every layer: [L, NH, capacity, HS] each.
template <typename S>
struct NeoxCache {
  S *keys = nullptr, *values = nullptr;
  std::int64_t capacity = 0;
};

}  // namespace weft::cuda
