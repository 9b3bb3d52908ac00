// Pointers to the parameters of a Llama on the device, in the form that the fused decode kernel takes.
#pragma once

#include "llmc/cuda/fused/neox_weights.h"
#include "llmc/model/llama_layout.h"

namespace weft::cuda {

// `parameters`: the model's arena on the device, laid out by `table`.
template <typename S>
NeoxWeights<S, S> bind_llama(const ModelConfig& config, const TensorTable& table, S* parameters) {
  const LlamaParameters<S> from(config, table, parameters, Offsets::elements);
  const auto norm = [](const auto& of) { return Norm<S>{of.weight, of.bias}; };
  NeoxWeights<S, S> weights;
  weights.embedding = from.embedding;
  weights.head = from.head;
  weights.final_norm = norm(from.final_norm);
  for (const LayerParameters<S>& layer : from.layers) {
    weights.layers.push_back({norm(layer.input_norm),
                              norm(layer.post_norm),
                              {layer.qkv, nullptr},
                              {layer.output, nullptr},
                              {layer.gate_up, nullptr},
                              {layer.down, nullptr}});
  }
  return weights;
}

}  // namespace weft::cuda
