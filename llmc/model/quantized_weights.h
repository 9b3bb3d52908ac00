// The quantised matrices of a model, of either family, as pointers into an arena of the tensor table's layout by bytes
// (Offsets::bytes), on either device. What is not quantised is found by LlamaParameters and NeoxParameters, whose pointers to
// quantised matrices are null.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "llmc/model/quantization.h"
#include "llmc/model/tensor_table.h"

namespace weft {

struct QuantizedLayer {
  QuantizedMatrix qkv;     // Llama: [q + 2 kv, C], three tensors that are neighbours; GPT-NeoX: [3 C, C]
  QuantizedMatrix output;  // [C, q]; GPT-NeoX: dense
  QuantizedMatrix up;      // Llama: gate and up, [2 F, C]; GPT-NeoX: [F, C]
  QuantizedMatrix down;    // [C, F]
};

struct QuantizedWeights {
  std::vector<QuantizedLayer> layers;  // num_layers of them, also where nothing is quantised
  QuantizedMatrix head;
};

// `table` is that of `config`, whose arena begins at `arena`.
QuantizedWeights bind_quantized(const ModelConfig& config, const TensorTable& table, const std::byte* arena);

}  // namespace weft
