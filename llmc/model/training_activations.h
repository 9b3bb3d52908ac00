// The activations that a training step keeps, as pointers, on either device. T is the storage type: float, or bf16 on the GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <vector>

#include "llmc/base/arena_layout.h"
#include "llmc/model/low_rank_shape.h"
#include "llmc/model/norm_shape.h"
#include "llmc/model/train_model.h"

namespace weft {

// What the backward pass of one layer reads. With recomputation several layers share one copy of a region.
template <typename T>
struct LayerActivations {
  T* input_norm = nullptr;                   // [N, C]
  float *mean1 = nullptr, *rstd1 = nullptr;  // [N]; the mean with LayerNorm only
  T* qkv = nullptr;                          // [N, q + 2 kv], q and k after RoPE
  T* qk = nullptr;                           // [N, q + kv], with qk_norm: what their norms read
  T* attention = nullptr;                    // [N, q], before the output projection
  float* lse = nullptr;                      // [B, NH, T]: log of the sum of exponentials of each query's scores
  T* residual_mid = nullptr;                 // [N, C], the stream after attention; null with parallel_residual
  T* post_norm = nullptr;                    // [N, C]
  float *mean2 = nullptr, *rstd2 = nullptr;  // [N]; null with parallel_residual: those of the first norm
  T* gate_up = nullptr;     // [N, 2F], without a gate [N, F]; the backward pass overwrites it with its gradient
  T* swiglu_out = nullptr;  // [N, F]: of the activation, silu(gate) up for one, the input of the down projection
  // With post_norms what the norms behind the branches read, [N, C], and their statistics, [N].
  T *attention_out = nullptr, *mlp_out = nullptr;
  float *attention_mean = nullptr, *attention_rstd = nullptr, *mlp_mean = nullptr, *mlp_rstd = nullptr;
};

// Every activation and every gradient of an activation of one micro-batch.
template <typename T>
class TrainingActivations {
 public:
  // classifier_rows: how many rows of logits exist at the same time, so that B * T * V of them never do.
  TrainingActivations(const ModelConfig& config, const TrainOptions& options, std::int64_t classifier_rows);
  TrainingActivations(const TrainingActivations&) = delete;  // layout_ has the addresses of its pointers
  TrainingActivations& operator=(const TrainingActivations&) = delete;

  const MemoryPlan& plan() const { return layout_.plan(); }
  template <typename Arena>
  void bind(const Arena& arena) {  // fills the pointers below
    layout_.bind(arena);
  }

  std::vector<LayerActivations<T>> layers;
  std::vector<T*> residual;  // L + 1 of [N, C]: the input of each layer, and the output of the last
  T* final_norm = nullptr;   // [N, C]
  float *final_mean = nullptr, *final_rstd = nullptr;  // [N]
  T* branch = nullptr;      // [N, C]: output of attention or MLP before it is added to the residual; its gradient
  T* logits = nullptr;      // [min(N, classifier_rows), V]
  float* losses = nullptr;  // [N]
  T *d_final_norm = nullptr, *d_residual = nullptr, *d_norm = nullptr;  // [N, C] each
  T* d_post_norm = nullptr;                                             // [N, C], with parallel_residual
  T *d_qkv = nullptr, *d_attention = nullptr;                           // [N, q + 2 kv], [N, q]
  // [N, F]. Unused where the GEMM of the down projection's gradient applies the derivative of SwiGLU itself (bf16 on
  // Hopper). It is planned all the same: a plan is made on machines without a GPU, for a GPU that is not known.
  T* d_swiglu_out = nullptr;

 private:
  ArenaLayout layout_{"activations"};
};

template <typename T>
TrainingActivations<T>::TrainingActivations(const ModelConfig& config, const TrainOptions& options,
                                            std::int64_t classifier_rows) {
  const std::int64_t L = config.num_layers, C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t q = config.q_size(), qkv = config.qkv_size();
  const bool share_norms = options.recompute != Recompute::none;  // norms and SwiGLU's output
  // With --precision fp8 a GPU stores the norms' and SwiGLU's outputs in fp8 alone, in memory of its own. An adapter reads them.
  const bool only_in_fp8 = options.precision == Precision::fp8 && !std::is_same_v<T, float> && !options.lora;
  const bool share_block = options.recompute == Recompute::block;  // everything but the layer's input

  layers.resize(static_cast<std::size_t>(L));
  residual.resize(static_cast<std::size_t>(L) + 1);  // sized once: layout_ keeps addresses of the elements
  for (T*& pointer : residual) layout_.reserve(&pointer, N * C);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    // A region of the layer's own or, where it is recomputed, the one of layer 0.
    const auto reserve = [&](auto LayerActivations<T>::*member, std::int64_t elements, bool shared) {
      if (l > 0 && shared) {
        layout_.share(&(layers[l].*member), &(layers[0].*member));
      } else {
        layout_.reserve(&(layers[l].*member), elements);
      }
    };
    using Layer = LayerActivations<T>;
    if (!only_in_fp8) {
      reserve(&Layer::input_norm, N * C, share_norms);
      reserve(&Layer::post_norm, N * C, share_norms);
      reserve(&Layer::swiglu_out, N * F, share_norms);
    }
    reserve(&Layer::mean1, N, share_block);
    reserve(&Layer::rstd1, N, share_block);
    reserve(&Layer::qkv, N * qkv, share_block);
    if (config.qk_norm) reserve(&Layer::qk, N * (q + config.kv_size()), share_block);
    reserve(&Layer::attention, N * q, share_block);
    reserve(&Layer::lse, N * config.num_heads, share_block);
    if (!config.parallel_residual) {
      reserve(&Layer::residual_mid, N * C, share_block);
      reserve(&Layer::mean2, N, share_block);
      reserve(&Layer::rstd2, N, share_block);
    }
    reserve(&Layer::gate_up, N * linear_size(config, BlockLinear::up).OC, share_block);
    if (config.post_norms) {
      reserve(&Layer::attention_out, N * C, share_block);
      reserve(&Layer::attention_mean, N, share_block);
      reserve(&Layer::attention_rstd, N, share_block);
      reserve(&Layer::mlp_out, N * C, share_block);
      reserve(&Layer::mlp_mean, N, false);  // so that recomputation ends with the projection
      reserve(&Layer::mlp_rstd, N, false);
    }
  }
  layout_.reserve(&final_norm, N * C);
  layout_.reserve(&final_mean, N);
  layout_.reserve(&final_rstd, N);
  layout_.reserve(&branch, N * C);
  layout_.reserve(&losses, N);
  layout_.reserve(&d_final_norm, N * C);
  layout_.reserve(&d_residual, N * C);
  layout_.reserve(&d_norm, N * C);
  if (config.parallel_residual) layout_.reserve(&d_post_norm, N * C);

  // The first gradient of a layer is written after the last logit has been read.
  ArenaLayout of_the_head("logits"), of_a_layer("gradients of a layer's activations");
  of_the_head.reserve(&logits, std::min(N, classifier_rows) * V);
  of_a_layer.reserve(&d_qkv, N * qkv);
  of_a_layer.reserve(&d_attention, N * q);
  of_a_layer.reserve(&d_swiglu_out, N * F);
  layout_.reserve_one_of({&of_the_head, &of_a_layer});
}

// Where the dropout masks of a branch begin among the Philox counters: every micro-step and every branch (2 l is the
// attention of layer l, 2 l + 1 its MLP or, with the parallel residual, the sum of both) has the next range of 2^40
// counters of four elements each. After 2^24 ranges,
// 262,144 micro-steps of a model of 32 layers, the first comes again, for other tokens.
inline std::uint64_t dropout_offset(std::uint64_t micro_step, std::int64_t branch, std::int64_t branches) {
  return (micro_step * static_cast<std::uint64_t>(branches) + static_cast<std::uint64_t>(branch)) << 40;
}

// The shape of the norm after branch `branch`; -1: after the embedding, to which no dropout is applied.
inline ResidualNormShape norm_shape_after(std::int64_t branch, const ModelConfig& config, const TrainOptions& options,
                                          std::uint64_t micro_step, bool training) {
  ResidualNormShape shape;
  shape.rows = options.micro_batch * options.seq_len;
  shape.C = config.hidden_size;
  shape.kind = config.norm;
  shape.eps = static_cast<float>(config.norm_eps);
  shape.weight_offset = static_cast<float>(config.norm_weight_offset);
  shape.dropout = training && branch >= 0 ? options.dropout : 0;
  shape.seed = options.seed;
  shape.offset = dropout_offset(micro_step, std::max<std::int64_t>(branch, 0), 2 * config.num_layers);
  return shape;
}

// What an adapter adds to this linear layer of each block, with the dropout of training; zero modules: it has none there.
inline LowRankShape low_rank_shape(const ModelConfig& config, const TrainOptions& options, BlockLinear linear) {
  const LinearSize size = linear_size(config, linear);
  LowRankShape shape;
  shape.N = options.micro_batch * options.seq_len;
  shape.in = size.C;
  shape.out = size.OC;
  shape.modules = 0;
  if (!options.lora) return shape;
  shape.rank = options.lora->rank;
  shape.scale = options.lora->scale();
  shape.dropout = options.adapter_dropout;
  shape.seed = options.seed;
  for (const LoraTarget& target : options.lora->targets) shape.modules += target.linear == linear ? 1 : 0;
  return shape;
}

// The same of layer `layer` in a pass: each layer of each micro-batch has dropout masks of its own, and evaluation none.
inline LowRankShape low_rank_shape_of(BlockLinear linear, std::int64_t layer, const ModelConfig& config,
                                      const TrainOptions& options, std::uint64_t micro_step, bool training) {
  LowRankShape shape = low_rank_shape(config, options, linear);
  if (!training) shape.dropout = 0;
  constexpr auto kLinears = static_cast<std::int64_t>(std::size(kBlockLinears));
  shape.offset =
      dropout_offset(micro_step, kLinears * layer + static_cast<std::int64_t>(linear), kLinears * config.num_layers);
  return shape;
}

}  // namespace weft
