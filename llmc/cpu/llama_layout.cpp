#include "llmc/cpu/llama_layout.h"

#include <algorithm>

namespace weft::cpu {

void LlamaActivations::want(float** pointer, std::int64_t elements) {
  wanted_.emplace_back(pointer, plan_.add(static_cast<std::uint64_t>(elements) * sizeof(float)));
}

LlamaActivations::LlamaActivations(const ModelConfig& config, const TrainOptions& options) {
  const std::int64_t L = config.num_layers, C = config.hidden_size, F = config.ffn_size,
                     V = config.vocab_size;
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t q = config.q_size(), qkv = q + 2 * config.kv_size();
  const bool share_norms = options.recompute != Recompute::none;   // norms and the SwiGLU product
  const bool share_block = options.recompute == Recompute::block;  // everything but the layer's input

  layers.resize(static_cast<std::size_t>(L));
  residual.resize(static_cast<std::size_t>(L) + 1);  // sized once: want() keeps addresses of the elements
  for (float*& pointer : residual) want(&pointer, N * C);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    LayerActivations& layer = layers[l];
    if (l == 0 || !share_norms) {
      want(&layer.input_norm, N * C);
      want(&layer.post_norm, N * C);
      want(&layer.mlp_product, N * F);
    }
    if (l == 0 || !share_block) {
      want(&layer.mean1, N);
      want(&layer.rstd1, N);
      want(&layer.qkv, N * qkv);
      want(&layer.attention, N * q);
      want(&layer.lse, N * config.num_heads);
      want(&layer.residual_mid, N * C);
      want(&layer.mean2, N);
      want(&layer.rstd2, N);
      want(&layer.gate_up, N * 2 * F);
    }
  }
  want(&final_norm, N * C);
  want(&final_mean, N);
  want(&final_rstd, N);
  want(&branch, N * C);
  want(&logits, std::min(N, kClassifierRows) * V);
  want(&losses, N);
  want(&d_final_norm, N * C);
  want(&d_residual, N * C);
  want(&d_norm, N * C);
  want(&d_qkv, N * qkv);
  want(&d_attention, N * q);
  want(&d_gate_up, N * 2 * F);
  want(&d_mlp_product, N * F);
}

void LlamaActivations::bind(const HostArena& arena) {
  for (const auto& [pointer, offset] : wanted_) *pointer = arena.at<float>(offset);
  // A region that only layer 0 asked for is shared by all.
  const LayerActivations& first = layers[0];
  for (LayerActivations& layer : layers) {
    for (float* LayerActivations::*region :
         {&LayerActivations::input_norm, &LayerActivations::mean1, &LayerActivations::rstd1,
          &LayerActivations::qkv, &LayerActivations::attention, &LayerActivations::lse,
          &LayerActivations::residual_mid, &LayerActivations::post_norm, &LayerActivations::mean2,
          &LayerActivations::rstd2, &LayerActivations::gate_up, &LayerActivations::mlp_product}) {
      if (layer.*region == nullptr) layer.*region = first.*region;
    }
  }
}

}  // namespace weft::cpu
