// The training step of a Llama (Touvron et al., 2023), a GPT-NeoX (Black et al., 2022) or a Gemma 3 on the GPU, as two
// straight-line lists of operators: forward_layer() and backward_layer() mirror each other line by line, and llmc/cpu/training.cpp is the
// same list on the CPU.
// training_model.h has the letters, operators.cpp what each line launches.
#include <algorithm>

#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

// ---- forward --------------------------------------------------------------------------------------------------------

template <typename S>
void TrainingModel<S>::forward_layers() {
  parameters_needed(kEmbeddingSection);
  for (std::int64_t l = 0; l < std::min(config_.num_layers, kLayerBuffers); ++l) fetch_parameters(section_of_layer(l));
  embed();
  fetch_parameters(head_section());
  parameters_needed(section_of_layer(0));
  use_fp8_weights(0, false);
  normalize(norm_after(-1));
  for (std::int64_t l = 0; l < config_.num_layers; ++l) forward_layer(l);
}

template <typename S>
void TrainingModel<S>::forward_layer(std::int64_t l) {
  const TraceRange range("layer");
  const BlockWeights<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];

  forward_to_swiglu(l, acts_.branch, a.swiglu_out);
  if (l + 1 < config_.num_layers) {
    parameters_needed(section_of_layer(l + 1));  // the norm below belongs to that layer
    use_fp8_weights(l + 1, false);
  }
  if (config_.parallel_residual) {
    linears_and_normalize(l, norm_after(2 * l + 1), acts_.branch);
  } else {
    linear_and_normalize(down_, l, norm_after(2 * l + 1), a.swiglu_out, w.down, a.residual_mid, acts_.branch);
  }
  if (l + kLayerBuffers < config_.num_layers)
    fetch_parameters(section_of_layer(l + kLayerBuffers));  // in the place of this layer's
}

// The part of a layer that --recompute block runs again. `branch` [N, C] is scratch for the output of attention with
// dropout. swiglu_out may be null: then only gate_up is computed.
template <typename S>
void TrainingModel<S>::forward_to_swiglu(std::int64_t l, S* branch, S* swiglu_out) {
  const std::int64_t N = rows();
  const BlockWeights<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const S* residual = acts_.residual[static_cast<std::size_t>(l)];

  linear(qkv_, l, a.qkv, a.input_norm, w.qkv, N);
  if (config_.qk_norm) {
    normalize_heads(l);
  } else if (config_.rotates(l)) {
    rope(l, a.qkv);
  }
  attend(l, a);
  if (!config_.parallel_residual) {
    linear_and_normalize(output_, l, norm_after(2 * l), a.attention, w.output, residual, branch);
  }
  gate_up_and_swiglu(l, swiglu_out);
}

// Logits, losses and, in training, the gradients of the final norm's output and of the head, a chunk of rows at a time.
template <typename S>
void TrainingModel<S>::classify(float loss_scale, Accumulate head, LossTotal* total) {
  const TraceRange range("classifier");
  const std::int64_t N = rows(), C = config_.hidden_size, chunk = classifier_rows(N);
  parameters_needed(head_section());
  for (std::int64_t row = 0; row < N; row += chunk) {
    const std::int64_t count = std::min(chunk, N - row);
    const S* hidden = acts_.final_norm + row * C;
    linear(head_, kNoLayer, acts_.logits, hidden, {weights_.head}, count);
    softmax_and_loss(row, count, loss_scale);  // logits now hold their gradient
    if (!training_) continue;
    input_grad(head_, kNoLayer, acts_.d_final_norm + row * C, acts_.logits, weights_.head.plain, count);
    weight_grad(head_, kNoLayer, {d_weights_.head}, acts_.logits, hidden, count, row == 0 ? head : Accumulate::yes);
  }
  if (training_ && head_section() != kEmbeddingSection) gradients_.ready(head_section());
  sum_losses(total);
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <typename S>
void TrainingModel<S>::backward_layers(Accumulate accumulate) {
  if (accumulate == Accumulate::no) gradients_.zero_accumulated();
  if (!options_.lora) sort_tokens();  // for embed_backward(), in another stream
  gradients_.take_slot(config_.num_layers - 1);
  parameters_needed_again(section_of_layer(config_.num_layers - 1));
  normalize_backward(norm_after(2 * config_.num_layers - 1), acts_.d_final_norm, false);
  for (std::int64_t l = config_.num_layers - 1; l >= 0; --l) {
    if (l + 1 < config_.num_layers) gradients_.take_slot(l);
    parameters_needed_again(section_of_layer(l));
    use_fp8_weights(l, true);
    if (l > 0) fetch_parameters(section_of_layer(l - 1));
    recompute_layer(l);
    backward_layer(l, accumulate);
    gradients_.ready(section_of_layer(l));
  }
  if (!options_.lora) embed_backward();
  gradients_.ready(kEmbeddingSection);
}

// Recomputes what --recompute let other layers overwrite, by the same operators on the same inputs: the same bits.
// SwiGLU's output is left to its backward pass, which reads all its inputs, unless a norm behind the MLP needs that of its
// projection before.
template <typename S>
void TrainingModel<S>::recompute_layer(std::int64_t l) {
  if (options_.recompute == Recompute::none) return;
  const TraceRange range("recompute");
  recomputing_ = true;
  normalize(norm_after(2 * l - 1));
  if (options_.recompute == Recompute::block) {
    const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
    forward_to_swiglu(l, acts_.d_norm,
                      config_.post_norms ? a.swiglu_out : nullptr);  // acts_.branch holds a gradient now
    if (config_.post_norms) {
      linear(down_, l, a.mlp_out, a.swiglu_out, weights_.blocks[static_cast<std::size_t>(l)].down, rows());
    }
  } else {
    if (!config_.parallel_residual) normalize(norm_after(2 * l));
  }
  recomputing_ = false;
}

// On entry added_gradient() is the gradient of what the MLP adds, d_residual that of residual_mid by the skip
// connection; with the parallel residual those of both branches and of the layer's input. On return added_gradient() is the
// gradient of the output of the layer below (its MLP, or the embedding).
template <typename S>
void TrainingModel<S>::backward_layer(std::int64_t l, Accumulate accumulate) {
  const TraceRange range("layer");
  const std::int64_t N = rows();
  const BlockWeights<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const BlockWeights<float>& dw = d_weights_.blocks[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const bool parallel = config_.parallel_residual;

  if (config_.post_norms) branch_norm_backward(2 * l + 1);
  adapter_hidden_grad(down_, l, branch_gradient());
  // null: it still exists
  down_input_grad_and_swiglu(l, options_.recompute == Recompute::none ? nullptr : a.swiglu_out);
  weight_grad(down_, l, dw.down, branch_gradient(), a.swiglu_out, N, accumulate);
  adapter_hidden_grad(gate_up_, l, a.gate_up);
  weight_grad(gate_up_, l, dw.up, a.gate_up, a.post_norm, N, accumulate);  // a.gate_up: now its gradient
  input_grad(gate_up_, l, parallel ? acts_.d_post_norm : acts_.d_norm, a.gate_up, w.up.weight.plain, N);
  if (!parallel) normalize_backward(norm_after(2 * l), acts_.d_norm, true);

  if (config_.post_norms) branch_norm_backward(2 * l);
  adapter_hidden_grad(output_, l, branch_gradient());
  weight_grad(output_, l, dw.output, branch_gradient(), a.attention, N, accumulate);
  if (!input_gradient_is_read(options_.lora, l, BlockLinear::output)) return;
  input_grad(output_, l, acts_.d_attention, branch_gradient(), w.output.weight.plain, N);
  attend_backward(l, a);  // and RoPE's
  if (config_.qk_norm) normalize_heads_backward(l);
  adapter_hidden_grad(qkv_, l, acts_.d_qkv);
  weight_grad(qkv_, l, dw.qkv, acts_.d_qkv, a.input_norm, N, accumulate);
  if (!input_gradient_is_read(options_.lora, l, BlockLinear::qkv)) return;
  input_grad(qkv_, l, acts_.d_norm, acts_.d_qkv, w.qkv.weight.plain, N);
  normalize_backward(norm_after(2 * l - 1), acts_.d_norm, true);
}

#define WEFT_INSTANTIATE(S)                                                \
  template void TrainingModel<S>::forward_layers();                        \
  template void TrainingModel<S>::classify(float, Accumulate, LossTotal*); \
  template void TrainingModel<S>::backward_layers(Accumulate);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
