// The parameters of a GPT-NeoX as pointers into an arena of the tensor table's layout, for both devices.
#pragma once

#include <cstdint>
#include <vector>

#include "llmc/model/parameters.h"

namespace weft {

template <typename T>
struct NeoxLayerParameters {
  NormParameters<T> input_norm, post_norm;
  LinearParameters<T> qkv;    // [3 C, C]; rows in the order of the checkpoint: [head][q, k, v][HS]
  LinearParameters<T> dense;  // [C, C]
  LinearParameters<T> up;     // [F, C]
  LinearParameters<T> down;   // [C, F]
};

template <typename T>
struct NeoxParameters {
  T* embedding = nullptr;  // [V, C]
  std::vector<NeoxLayerParameters<T>> layers;
  NormParameters<T> final_norm;
  T* head = nullptr;  // [V, C]; null where it is quantised

  NeoxParameters() = default;
  NeoxParameters(const ModelConfig& config, const TensorTable& table, T* arena, Offsets offsets = Offsets::elements) {
    const ParameterBinder<T> find(table, arena, offsets);
    embedding = find.weight(NeoxNames::kEmbedding);
    for (std::int64_t l = 0; l < config.num_layers; ++l) {
      const NeoxNames::Layer names(l);
      layers.push_back({find.norm(names.input_norm), find.norm(names.post_norm), find.linear(names.qkv),
                        find.linear(names.dense), find.linear(names.up), find.linear(names.down)});
    }
    final_norm = find.norm(NeoxNames::kFinalNorm);
    head = find.weight(NeoxNames::kHead);
  }
};

}  // namespace weft
