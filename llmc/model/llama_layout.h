// Where the parts of a Llama lie in memory, on either device: pointers to each layer's parameters, and to the
// activations that a training step keeps. T is the storage type (float, or bf16 on the GPU).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "llmc/base/regions.h"
#include "llmc/model/fp8.h"
#include "llmc/model/parameters.h"
#include "llmc/model/train_model.h"

namespace weft {

// The weights of the linear layers are null where they are quantised, their biases where the model has none.
template <typename T>
struct LayerParameters {
  NormParameters<T> input_norm, post_norm;
  T* qkv = nullptr;      // [q + 2 kv, C]: q, k, v are neighbours in the tensor table
  T* output = nullptr;   // [C, q]
  T* gate_up = nullptr;  // [2 F, C]: gate and up are neighbours
  T* down = nullptr;     // [C, F]
  T *qkv_bias = nullptr, *output_bias = nullptr, *gate_up_bias = nullptr, *down_bias = nullptr;

  T* weight(BlockLinear linear) const { return of(linear, qkv, output, gate_up, down); }
  T* bias(BlockLinear linear) const { return of(linear, qkv_bias, output_bias, gate_up_bias, down_bias); }

 private:
  static T* of(BlockLinear linear, T* qkv, T* output, T* gate_up, T* down) {
    return linear == BlockLinear::qkv       ? qkv
           : linear == BlockLinear::output  ? output
           : linear == BlockLinear::gate_up ? gate_up
                                            : down;
  }
};

// The parameters of a whole model, or their gradients, as pointers into an arena of the table's layout.
template <typename T>
struct LlamaParameters {
  T* embedding = nullptr;  // [V, C]
  std::vector<LayerParameters<T>> layers;
  NormParameters<T> final_norm;
  T* head = nullptr;  // [V, C]; the embedding where tied, null where it is quantised

  LlamaParameters(const ModelConfig& config, const TensorTable& table, T* arena, Offsets offsets) {
    const ParameterBinder<T> find(table, arena, offsets);
    embedding = find.weight(LlamaNames::kEmbedding);
    for (std::int64_t l = 0; l < config.num_layers; ++l) {
      const LlamaNames::Layer names(l);
      LayerParameters<T>& layer = layers.emplace_back();
      layer.input_norm = find.norm(names.input_norm), layer.post_norm = find.norm(names.post_norm);
      layer.qkv = find.weight(names.q), layer.qkv_bias = find.bias(names.q);
      layer.output = find.weight(names.output), layer.output_bias = find.bias(names.output);
      layer.gate_up = find.weight(names.gate), layer.gate_up_bias = find.bias(names.gate);
      layer.down = find.weight(names.down), layer.down_bias = find.bias(names.down);
    }
    final_norm = find.norm(LlamaNames::kFinalNorm);
    head = config.tied_embeddings ? embedding : find.weight(LlamaNames::kHead);
  }

  // For sections (llama_sections()) that lie in places of their own (SectionPlaces): moves the pointers into section s
  // by by[s] elements.
  void move_sections(std::span<const std::int64_t> by) {
    const auto move = [](std::int64_t elements, std::initializer_list<T**> pointers) {
      for (T** pointer : pointers) {
        if (*pointer != nullptr) *pointer += elements;
      }
    };
    for (std::size_t l = 0; l < layers.size(); ++l) {
      LayerParameters<T>& layer = layers[l];
      move(by[1 + l], {&layer.input_norm.weight, &layer.input_norm.bias, &layer.post_norm.weight, &layer.post_norm.bias,
                       &layer.qkv, &layer.output, &layer.gate_up, &layer.down, &layer.qkv_bias, &layer.output_bias,
                       &layer.gate_up_bias, &layer.down_bias});
    }
    move(by[layers.size()], {&final_norm.weight, &final_norm.bias});
    move(by.front(), {&embedding});
    const bool tied = by.size() == 1 + layers.size();
    move(tied ? by.front() : by.back(), {&head});
  }
};

// What the backward pass of one layer reads. With recomputation several layers share one copy of a region.
template <typename T>
struct LayerActivations {
  T* input_norm = nullptr;                   // [N, C]
  float *mean1 = nullptr, *rstd1 = nullptr;  // [N]; the mean with LayerNorm only
  T* qkv = nullptr;                          // [N, q + 2 kv], q and k after RoPE
  T* attention = nullptr;                    // [N, q], before the output projection
  float* lse = nullptr;                      // [B, NH, T]: log of the sum of exponentials of each query's scores
  T* residual_mid = nullptr;                 // [N, C], the residual stream after attention
  T* post_norm = nullptr;                    // [N, C]
  float *mean2 = nullptr, *rstd2 = nullptr;  // [N]
  T* gate_up = nullptr;                      // [N, 2F]; the backward pass overwrites it with its gradient
  T* swiglu_out = nullptr;                   // [N, F]: silu(gate) up, the input of the down projection
};

// Every activation and every gradient of an activation of one micro-batch.
template <typename T>
class LlamaActivations {
 public:
  // classifier_rows: how many rows of logits exist at the same time, so that B * T * V of them never do.
  LlamaActivations(const ModelConfig& config, const TrainOptions& options, std::int64_t classifier_rows);
  LlamaActivations(const LlamaActivations&) = delete;  // regions_ has the addresses of its pointers
  LlamaActivations& operator=(const LlamaActivations&) = delete;

  const MemoryPlan& plan() const { return regions_.plan(); }
  template <typename Arena>
  void bind(const Arena& arena) {  // fills the pointers below
    regions_.bind(arena);
  }

  std::vector<LayerActivations<T>> layers;
  std::vector<T*> residual;  // L + 1 of [N, C]: the input of each layer, and the output of the last
  T* final_norm = nullptr;   // [N, C]
  float *final_mean = nullptr, *final_rstd = nullptr;  // [N]
  T* branch = nullptr;      // [N, C]: output of attention or MLP before it is added to the residual; its gradient
  T* logits = nullptr;      // [min(N, classifier_rows), V]
  float* losses = nullptr;  // [N]
  T *d_final_norm = nullptr, *d_residual = nullptr, *d_norm = nullptr;  // [N, C] each
  T *d_qkv = nullptr, *d_attention = nullptr;                           // [N, q + 2 kv], [N, q]
  // [N, F]. Unused where the GEMM of the down projection's gradient applies the derivative of SwiGLU itself (bf16 on
  // Hopper). It is planned all the same: a plan is made on machines without a GPU, for a GPU that is not known.
  T* d_swiglu_out = nullptr;

 private:
  Regions regions_{"activations"};
};

template <typename T>
LlamaActivations<T>::LlamaActivations(const ModelConfig& config, const TrainOptions& options,
                                      std::int64_t classifier_rows) {
  const std::int64_t L = config.num_layers, C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t q = config.q_size(), qkv = q + 2 * config.kv_size();
  const bool share_norms = options.recompute != Recompute::none;  // norms and SwiGLU's output
  // With --precision fp8 a GPU stores the norms' and SwiGLU's outputs in fp8 alone, in memory of its own.
  const bool only_in_fp8 = options.precision == Precision::fp8 && !std::is_same_v<T, float>;
  const bool share_block = options.recompute == Recompute::block;  // everything but the layer's input

  layers.resize(static_cast<std::size_t>(L));
  residual.resize(static_cast<std::size_t>(L) + 1);  // sized once: regions_ keeps addresses of the elements
  for (T*& pointer : residual) regions_.want(&pointer, N * C);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    // A region of the layer's own or, where it is recomputed, the one of layer 0.
    const auto want = [&](auto LayerActivations<T>::*member, std::int64_t elements, bool shared) {
      if (l > 0 && shared) {
        regions_.share(&(layers[l].*member), &(layers[0].*member));
      } else {
        regions_.want(&(layers[l].*member), elements);
      }
    };
    using Layer = LayerActivations<T>;
    if (!only_in_fp8) {
      want(&Layer::input_norm, N * C, share_norms);
      want(&Layer::post_norm, N * C, share_norms);
      want(&Layer::swiglu_out, N * F, share_norms);
    }
    want(&Layer::mean1, N, share_block);
    want(&Layer::rstd1, N, share_block);
    want(&Layer::qkv, N * qkv, share_block);
    want(&Layer::attention, N * q, share_block);
    want(&Layer::lse, N * config.num_heads, share_block);
    want(&Layer::residual_mid, N * C, share_block);
    want(&Layer::mean2, N, share_block);
    want(&Layer::rstd2, N, share_block);
    want(&Layer::gate_up, N * 2 * F, share_block);
  }
  regions_.want(&final_norm, N * C);
  regions_.want(&final_mean, N);
  regions_.want(&final_rstd, N);
  regions_.want(&branch, N * C);
  regions_.want(&losses, N);
  regions_.want(&d_final_norm, N * C);
  regions_.want(&d_residual, N * C);
  regions_.want(&d_norm, N * C);

  // The first gradient of a layer is written after the last logit has been read.
  Regions of_the_head("logits"), of_a_layer("gradients of a layer's activations");
  of_the_head.want(&logits, std::min(N, classifier_rows) * V);
  of_a_layer.want(&d_qkv, N * qkv);
  of_a_layer.want(&d_attention, N * q);
  of_a_layer.want(&d_swiglu_out, N * F);
  regions_.want_one_of({&of_the_head, &of_a_layer});
}

// Where the dropout masks of a branch begin among the Philox counters: every micro-step and every branch (2 l is the
// attention of layer l, 2 l + 1 its MLP) has the next range of 2^40 counters of four elements each. After 2^24 ranges,
// 262,144 micro-steps of a model of 32 layers, the first comes again, for other tokens.
inline std::uint64_t dropout_offset(std::uint64_t micro_step, std::int64_t branch, std::int64_t branches) {
  return (micro_step * static_cast<std::uint64_t>(branches) + static_cast<std::uint64_t>(branch)) << 40;
}

}  // namespace weft
