// The pointers to a model's weights as the fused kernels read them: one entry for each layer, and a last one with the
// head and the norm before it.
#pragma once

#include <vector>

#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/cuda/op/gemm/device_weights.h"

namespace weft::cuda::fused {

// matrices(l) returns the LayerMatrices of layer l, after the last one those of the head.
template <bool kPacked, typename S, typename Matrices>
std::vector<Layer<S, kPacked>> layer_table(const DeviceWeights<S>& weights, const Matrices& matrices) {
  static_assert(sizeof(Layer<S, kPacked>) == kLayerBytes<kPacked>);
  std::vector<Layer<S, kPacked>> layers;
  for (const DeviceBlock<S>& w : weights.blocks) {
    layers.push_back({matrices(layers.size()), w.qkv.bias, w.up.bias, w.down.bias, w.output.bias, w.input_norm.weight,
                      w.input_norm.bias, w.post_norm.weight, w.post_norm.bias});
  }
  Layer<S, kPacked> last{matrices(layers.size())};
  last.norm1_weight = weights.final_norm.weight;
  last.norm1_bias = weights.final_norm.bias;
  layers.push_back(last);
  return layers;
}

// Of a model in 16 bits.
template <typename S>
std::vector<Layer<S, false>> layer_table(const DeviceWeights<S>& weights) {
  return layer_table<false>(weights, [&](std::size_t l) -> LayerMatrices<S, false> {
    if (l == weights.blocks.size()) return {weights.head.plain};
    const DeviceBlock<S>& w = weights.blocks[l];
    return {w.qkv.weight.plain, w.up.weight.plain, w.down.weight.plain, w.output.weight.plain};
  });
}

}  // namespace weft::cuda::fused
