// The pointers to a model's weights as the fused kernels read them: one entry for each layer, and a last one with the
// head and the norm before it.
#pragma once

#include <vector>

#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/cuda/op/gemm/device_weights.h"

namespace weft::cuda::fused {

template <typename S>
std::vector<Layer<S>> layer_table(const DeviceWeights<S>& weights) {
  std::vector<Layer<S>> layers;
  for (const DeviceBlock<S>& w : weights.blocks) {
    layers.push_back({w.qkv.weight.plain, w.up.weight.plain, w.down.weight.plain, w.output.weight.plain, w.qkv.bias,
                      w.up.bias, w.down.bias, w.output.bias, w.input_norm.weight, w.input_norm.bias, w.post_norm.weight,
                      w.post_norm.bias});
  }
  Layer<S> last{};
  last.qkv = weights.head.plain;
  last.norm1_weight = weights.final_norm.weight;
  last.norm1_bias = weights.final_norm.bias;
  layers.push_back(last);
  return layers;
}

}  // namespace weft::cuda::fused
