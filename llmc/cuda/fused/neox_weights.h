// Device pointers to the parameters of a GPT-NeoX, as the decoder, the fused kernel and their tests pass them. W is the
// storage type of the matrices, A that of the embedding, biases and norms. The fused kernel takes a Llama in the same
// form: `qkv` [q + 2 kv, C] has the heads of q, k and v one after another, `up` [2 F, C] is gate and up, and there are
// no biases.
#pragma once

#include <vector>

#include "llmc/cuda/op/linear.h"
#include "llmc/cuda/op/quantized_matmul.h"

namespace weft::cuda {

template <typename W, typename A>
struct NeoxLayerWeights {
  Norm<A> input_norm, post_norm;
  Linear<W, A> qkv;    // [3 C, C]; rows in the order of the checkpoint: [head][q, k, v][HS]
  Linear<W, A> dense;  // [C, C]
  Linear<W, A> up;     // [F, C]
  Linear<W, A> down;   // [C, F]
};

// Quantised matrices of the layers, as an inference model packs them: q, k and v are one matrix, and so are gate and
// up. Without layers: the model is not quantised.
struct QuantizedMatrices {
  struct Layer {
    PackedMatrix qkv, up, down, dense;
  };
  std::vector<Layer> layers;
  PackedMatrix head;  // empty where it is in 16 bits
};

template <typename W, typename A>
struct NeoxWeights {
  const A* embedding = nullptr;  // [V, C]
  const W* head = nullptr;       // [V, C]
  Norm<A> final_norm;
  std::vector<NeoxLayerWeights<W, A>> layers;
  QuantizedMatrices quantized;  // if it has layers, the matrices in `layers` are null
};

}  // namespace weft::cuda
