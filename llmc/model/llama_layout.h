// Where the parts of a Llama lie in memory, on either device: pointers to each layer's parameters, and to the
// activations that a training step keeps. T is the storage type of activations (float, or bf16 on the GPU).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/model/tensor_table.h"
#include "llmc/model/train_model.h"

namespace weft {

// One norm's parameters; bias only with --norm layernorm.
template <typename T>
struct NormParameters {
  T* weight = nullptr;  // [C]
  T* bias = nullptr;    // [C] or null
};

template <typename T>
struct LayerParameters {
  NormParameters<T> input_norm, post_norm;
  T* qkv = nullptr;      // [q + 2 kv, C]: q, k, v are neighbours in the tensor table
  T* output = nullptr;   // [C, q]
  T* gate_up = nullptr;  // [2 F, C]
  T* down = nullptr;     // [C, F]
};

// The parameters (or the gradients: same layout) of a whole model, as pointers into an arena of the table's layout.
template <typename T>
struct LlamaParameters {
  T* embedding = nullptr;  // [V, C]
  std::vector<LayerParameters<T>> layers;
  NormParameters<T> final_norm;
  T* head = nullptr;  // [V, C]; the embedding where tied

  LlamaParameters(const ModelConfig& config, const TensorTable& table, T* base) {
    const auto at = [&](const std::string& name) { return base + table.at(name).offset; };
    const auto norm = [&](const std::string& name) {
      const bool has_bias = config.norm == NormKind::layernorm;
      return NormParameters<T>{at(name + ".weight"), has_bias ? at(name + ".bias") : nullptr};
    };
    embedding = at("model.embed_tokens.weight");
    for (std::int64_t l = 0; l < config.num_layers; ++l) {
      const std::string prefix = "model.layers." + std::to_string(l) + ".";
      layers.push_back({norm(prefix + "input_layernorm"), norm(prefix + "post_attention_layernorm"),
                        at(prefix + "self_attn.q_proj.weight"), at(prefix + "self_attn.o_proj.weight"),
                        at(prefix + "mlp.gate_proj.weight"), at(prefix + "mlp.down_proj.weight")});
    }
    final_norm = norm("model.norm");
    head = config.tied_embeddings ? embedding : at("lm_head.weight");
  }
};

// What the backward pass of one layer reads. With recomputation several layers share one copy of a region.
template <typename T>
struct LayerActivations {
  T* input_norm = nullptr;                   // [N, C]
  float *mean1 = nullptr, *rstd1 = nullptr;  // [N]; the mean with LayerNorm only
  T* qkv = nullptr;                          // [N, q + 2 kv], q and k after RoPE
  T* attention = nullptr;                    // [N, q], before the output projection
  float* lse = nullptr;                      // [B, NH, T]
  T* residual_mid = nullptr;                 // [N, C], after the attention branch has joined
  T* post_norm = nullptr;                    // [N, C]
  float *mean2 = nullptr, *rstd2 = nullptr;  // [N]
  T* gate_up = nullptr;                      // [N, 2F]; its gradient, once the backward pass has used it
  T* mlp_product = nullptr;                  // [N, F]
};

// Every activation and every gradient of an activation of one micro-batch: planned as offsets, then bound to memory.
template <typename T>
class LlamaActivations {
 public:
  // classifier_rows: rows of logits that are held at once, so that B * T * V never is.
  LlamaActivations(const ModelConfig& config, const TrainOptions& options, std::int64_t classifier_rows);
  LlamaActivations(const LlamaActivations&) = delete;  // wanted_ points into this object
  LlamaActivations& operator=(const LlamaActivations&) = delete;

  const MemoryPlan& plan() const { return plan_; }
  void bind(std::byte* base);  // fills the pointers below

  std::vector<LayerActivations<T>> layers;
  std::vector<T*> residual;  // L + 1 of [N, C]: the input of each layer, and the output of the last
  T* final_norm = nullptr;   // [N, C]
  float *final_mean = nullptr, *final_rstd = nullptr;  // [N]
  T* branch = nullptr;      // [N, C]: output of attention or MLP before it joins the residual, and its gradient
  T* logits = nullptr;      // [min(N, classifier_rows), V]
  float* losses = nullptr;  // [N]
  T *d_final_norm = nullptr, *d_residual = nullptr, *d_norm = nullptr;   // [N, C] each
  T *d_qkv = nullptr, *d_attention = nullptr, *d_mlp_product = nullptr;  // [N, q + 2 kv], [N, q], [N, F]

 private:
  template <typename U>
  void want(U** pointer, std::int64_t elements) {
    const std::uint64_t offset = plan_.add(static_cast<std::uint64_t>(elements) * sizeof(U));
    wanted_.emplace_back(reinterpret_cast<void**>(pointer), offset);
  }

  MemoryPlan plan_{"activations"};
  std::vector<std::pair<void**, std::uint64_t>> wanted_;
};

template <typename T>
LlamaActivations<T>::LlamaActivations(const ModelConfig& config, const TrainOptions& options,
                                      std::int64_t classifier_rows) {
  const std::int64_t L = config.num_layers, C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t q = config.q_size(), qkv = q + 2 * config.kv_size();
  const bool share_norms = options.recompute != Recompute::none;   // norms and the SwiGLU product
  const bool share_block = options.recompute == Recompute::block;  // everything but the layer's input

  layers.resize(static_cast<std::size_t>(L));
  residual.resize(static_cast<std::size_t>(L) + 1);  // sized once: want() keeps addresses of the elements
  for (T*& pointer : residual) want(&pointer, N * C);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    LayerActivations<T>& layer = layers[l];
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
  want(&losses, N);
  want(&d_final_norm, N * C);
  want(&d_residual, N * C);
  want(&d_norm, N * C);

  // The first gradient of a layer is written after the last logit has been read: they lie in one place.
  const std::uint64_t place = plan_.add(0);
  const std::pair<T**, std::int64_t> gradients[] = {{&d_qkv, N * qkv}, {&d_attention, N * q}, {&d_mlp_product, N * F}};
  MemoryPlan of_a_layer("gradients of a layer's activations");
  for (const auto& [pointer, elements] : gradients) {
    const std::uint64_t offset = of_a_layer.add(static_cast<std::uint64_t>(elements) * sizeof(T));
    wanted_.emplace_back(reinterpret_cast<void**>(pointer), place + offset);
  }
  wanted_.emplace_back(reinterpret_cast<void**>(&logits), place);
  plan_.add(std::max(static_cast<std::uint64_t>(std::min(N, classifier_rows) * V) * sizeof(T), of_a_layer.bytes()));
}

template <typename T>
void LlamaActivations<T>::bind(std::byte* base) {
  for (const auto& [pointer, offset] : wanted_) *pointer = base + offset;
  // A region that only layer 0 asked for is shared by all.
  const LayerActivations<T>& first = layers[0];
  const auto share = [](auto*& own, auto* shared) { own = own != nullptr ? own : shared; };
  for (LayerActivations<T>& layer : layers) {
    share(layer.input_norm, first.input_norm);
    share(layer.mean1, first.mean1);
    share(layer.rstd1, first.rstd1);
    share(layer.qkv, first.qkv);
    share(layer.attention, first.attention);
    share(layer.lse, first.lse);
    share(layer.residual_mid, first.residual_mid);
    share(layer.post_norm, first.post_norm);
    share(layer.mean2, first.mean2);
    share(layer.rstd2, first.rstd2);
    share(layer.gate_up, first.gate_up);
    share(layer.mlp_product, first.mlp_product);
  }
}

// Where the dropout masks of a branch begin among the Philox counters: every micro-step and every branch (2 l is the
// attention of layer l, 2 l + 1 its MLP) has the next range of 2^40 counters of four elements each. After 2^24 ranges,
// 262,144 micro-steps of a model of 32 layers, the first comes again, for other tokens.
inline std::uint64_t dropout_offset(std::uint64_t micro_step, std::int64_t branch, std::int64_t branches) {
  return (micro_step * static_cast<std::uint64_t>(branches) + static_cast<std::uint64_t>(branch)) << 40;
}

}  // namespace weft
