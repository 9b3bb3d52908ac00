// The pointers to a model's weights as the fused kernels read them: one entry for each layer, and a last one with the
// head and the norm before it.
#pragma once

#include <vector>

#include "llmc/cuda/fused/neox_weights.h"
#include "llmc/cuda/fused/parameters.cuh"

namespace weft::cuda::fused {

template <typename W, typename A>
std::vector<Layer<W, A>> layer_table(const NeoxWeights<W, A>& weights) {
  std::vector<Layer<W, A>> layers;
  for (const NeoxLayerWeights<W, A>& w : weights.layers) {
    layers.push_back({w.qkv.weight, w.up.weight, w.down.weight, w.dense.weight, w.qkv.bias, w.up.bias, w.down.bias,
                      w.dense.bias, w.input_norm.weight, w.input_norm.bias, w.post_norm.weight, w.post_norm.bias});
  }
  Layer<W, A> last{};
  last.qkv = weights.head;
  last.norm1_weight = weights.final_norm.weight;
  last.norm1_bias = weights.final_norm.bias;
  layers.push_back(last);
  return layers;
}

}  // namespace weft::cuda::fused
