// Where the parts of a Llama lie in memory: pointers to one layer's parameters, and to one layer's
// activations.
#pragma once

#include <cstdint>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/cpu/head_view.h"
#include "llmc/model/tensor_table.h"
#include "llmc/model/train_model.h"

namespace weft::cpu {

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

// The parameters (or the gradients: same layout) of a whole model, as pointers into an arena of the table's
// layout.
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
struct LayerActivations {
  float* input_norm = nullptr;    // [N, C]
  float* mean1 = nullptr;         // [N] (LayerNorm only)
  float* rstd1 = nullptr;         // [N]
  float* qkv = nullptr;           // [N, q + 2 kv], q and k after RoPE
  float* attention = nullptr;     // [N, q], before the output projection
  float* lse = nullptr;           // [B, NH, T]
  float* residual_mid = nullptr;  // [N, C], after the attention branch has joined
  float* post_norm = nullptr;     // [N, C]
  float* mean2 = nullptr;         // [N]
  float* rstd2 = nullptr;         // [N]
  float* gate_up = nullptr;       // [N, 2F]
  float* mlp_product = nullptr;   // [N, F]
};

// Rows of logits that are held at once: B * T * V never is.
inline constexpr std::int64_t kClassifierRows = 512;

// Every activation and every gradient of an activation of one micro-batch, planned as offsets, then bound to
// memory.
class LlamaActivations {
 public:
  LlamaActivations(const ModelConfig& config, const TrainOptions& options);

  const MemoryPlan& plan() const { return plan_; }
  void bind(const HostArena& arena);  // fills the pointers below

  std::vector<LayerActivations> layers;
  std::vector<float*> residual;  // L + 1 of [N, C]: the input of each layer, and the output of the last
  float *final_norm = nullptr, *final_mean = nullptr, *final_rstd = nullptr;  // [N, C], [N], [N]
  float* branch =
      nullptr;  // [N, C]: output of attention or MLP before it joins the residual, and its gradient
  float* logits = nullptr;                                                  // [min(N, kClassifierRows), V]
  float* losses = nullptr;                                                  // [N]
  float *d_final_norm = nullptr, *d_residual = nullptr, *d_norm = nullptr;  // [N, C] each
  float *d_qkv = nullptr, *d_attention = nullptr;                           // [N, q + 2 kv], [N, q]
  float *d_gate_up = nullptr, *d_mlp_product = nullptr;                     // [N, 2F], [N, F]

 private:
  void want(float** pointer, std::int64_t elements);

  MemoryPlan plan_{"activations"};
  std::vector<std::pair<float**, std::uint64_t>> wanted_;
};

}  // namespace weft::cpu
