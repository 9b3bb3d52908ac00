// The operators of the training step as lists.cpp call them. Each launches its kernels under the name that
// the operator clock, nsys and ncu show, and states the minimum that the mathematics requires: the operations of its
// GEMMs, and the bytes of every operand read once and every result written once.
#include <algorithm>

#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/elementwise/embedding.h"
#include "llmc/cuda/op/elementwise/gelu.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/op/gemm/bias_grad.h"
#include "llmc/cuda/op/gemm/dequantize.h"
#include "llmc/cuda/op/gemm/matmul_swiglu.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

// ---- linear layers --------------------------------------------------------------------------------------------------

template <typename S>
const S* TrainingModel<S>::floats_of(const LinearLayer& layer, const Weight<S>& weight) {
  if (!weight.packed) return weight.plain;
  const double elements = static_cast<double>(layer.OC * layer.C);
  clock_.run("dequantise", 0, elements * (sizeof(S) + dtype_bits(weight.packed.dtype) / 8.0),
             [&] { dequantize(adapter_.weight, weight.packed, layer.OC, layer.C, stream_); });
  return adapter_.weight;
}

// out = x W^T + bias, plus addend [N, OC] unless it is null.
template <typename S>
void TrainingModel<S>::linear(const LinearLayer& layer, std::int64_t l, S* out, const S* x, const Linear<S>& w,
                              std::int64_t N, const S* addend) {
  if constexpr (std::is_same_v<S, bf16>) {
    if (in_fp8(layer)) {
      const bool rounded = options_.lora && layer.block == BlockLinear::down;  // by SwiGLU
      fp8_->forward(*layer.block, l, out, rounded ? nullptr : x, w.bias, addend, layer.forward, fp8_pass());
      return add_adapter(layer, l, out, x);
    }
  }
  const S* const weight = floats_of(layer, w.weight);
  const double n = static_cast<double>(N), C = static_cast<double>(layer.C), OC = static_cast<double>(layer.OC);
  clock_.run(layer.forward, 2 * n * C * OC, (n * C + C * OC + (addend != nullptr ? 2 : 1) * n * OC) * sizeof(S),
             [&] { matmul_.forward<S>(out, x, weight, w.bias, N, layer.C, layer.OC, Accumulate::no, addend); });
  add_adapter(layer, l, out, x);
}

// dx = dout W. `weight` null: it is quantised.
template <typename S>
void TrainingModel<S>::input_grad(const LinearLayer& layer, std::int64_t l, S* dx, const S* dout, const S* weight,
                                  std::int64_t N) {
  if constexpr (std::is_same_v<S, bf16>) {
    if (in_fp8(layer)) {
      if (options_.lora && layer.block != BlockLinear::up) fp8_->take_gradient(*layer.block, l, dout);
      fp8_->input_grad(*layer.block, l, dx, layer.input_grad);
      return adapter_input_grad(layer, l, dx);
    }
  }
  if (weight == nullptr) {
    weight = floats_of(layer, weights_.blocks[static_cast<std::size_t>(l)].linear(*layer.block).weight);
  }
  const double n = static_cast<double>(N), C = static_cast<double>(layer.C), OC = static_cast<double>(layer.OC);
  clock_.run(layer.input_grad, 2 * n * C * OC, (n * C + C * OC + n * OC) * sizeof(S),
             [&] { matmul_.input_grad<S>(dx, dout, weight, N, layer.C, layer.OC); });
  adapter_input_grad(layer, l, dx);
}

// dweight (+)= dout^T x, dbias += the sum of dout's rows. Beside frozen weights the gradients of the adapter alone.
template <typename S>
void TrainingModel<S>::weight_grad(const LinearLayer& layer, std::int64_t l, const Linear<float>& dw, const S* dout,
                                   const S* x, std::int64_t N, Accumulate accumulate) {
  if (options_.lora) return adapter_weight_grad(layer, l, dout, x, accumulate);
  if constexpr (std::is_same_v<S, bf16>) {
    if (in_fp8(layer)) {
      const bool taken = layer.block == BlockLinear::down || layer.block == BlockLinear::up ||
                         (layer.block == BlockLinear::qkv && attention_rounds());
      if (!taken) fp8_->take_gradient(*layer.block, l, dout);
      if (dw.bias != nullptr) fp8_->bias_grad(*layer.block, l, dw.bias, work_.scratch);
      return fp8_->weight_grad(*layer.block, l, dw.weight.plain, x, accumulate, layer.weight_grad);
    }
  }
  const double n = static_cast<double>(N), C = static_cast<double>(layer.C), OC = static_cast<double>(layer.OC);
  const double passes = accumulate == Accumulate::yes ? 2 : 1;
  clock_.run(layer.weight_grad, 2 * n * C * OC, n * (C + OC) * sizeof(S) + passes * C * OC * sizeof(float),
             [&] { matmul_.weight_grad<S>(dw.weight.plain, dout, x, N, layer.C, layer.OC, accumulate); });
  if (dw.bias == nullptr) return;
  clock_.run("bias grad", 0, n * OC * sizeof(S),
             [&] { bias_grad<S>(dw.bias, dout, N, layer.OC, work_.scratch, stream_); });
}

// ---- adapters ------------------------------------------------------------------------------------------------------

// Calls run(shape, modules) under `name` where the layer has a part of the adapter. Its operands are x or dx, y or dy, and the
// small matrices; `gemms` of N x H x in, and of N x H x out.
template <typename S>
template <typename Run>
void TrainingModel<S>::with_adapter(const LinearLayer& layer, std::int64_t l, const char* name, int in_gemms,
                                    int out_gemms, const Run& run) {
  if (!layer.block) return;
  const std::vector<LowRank<S>>& modules = weights_.blocks[static_cast<std::size_t>(l)].linear(*layer.block).low_rank;
  if (modules.empty()) return;
  const LowRankShape shape = adapter_shape(*layer.block, l);
  const double columns = in_gemms * static_cast<double>(shape.in) + out_gemms * static_cast<double>(shape.out);
  const double n = static_cast<double>(shape.N);
  clock_.run(name, 2 * n * columns * static_cast<double>(shape.modules * shape.rank), n * columns * sizeof(S),
             [&] { run(shape, std::span<const LowRank<S>>(modules)); });
}

// out [N, OC] += scale (dropout(x) A^T) B^T.
template <typename S>
void TrainingModel<S>::add_adapter(const LinearLayer& layer, std::int64_t l, S* out, const S* x) {
  with_adapter(layer, l, "adapter", 1, 1, [&](const LowRankShape& shape, const auto& modules) {
    low_rank_forward(matmul_, shape, out, x, modules, adapter_.work, stream_);
  });
}

// Before the other two, for the same layer.
template <typename S>
void TrainingModel<S>::adapter_hidden_grad(const LinearLayer& layer, std::int64_t l, const S* dout) {
  with_adapter(layer, l, "adapter dgrad", 0, 1, [&](const LowRankShape& shape, const auto& modules) {
    low_rank_hidden_grad(matmul_, shape, dout, modules, adapter_.work, stream_);
  });
}

// dx [N, C] += the adapter's part.
template <typename S>
void TrainingModel<S>::adapter_input_grad(const LinearLayer& layer, std::int64_t l, S* dx) {
  with_adapter(layer, l, "adapter dgrad", 1, 0, [&](const LowRankShape& shape, const auto&) {
    low_rank_input_grad(matmul_, shape, dx, adapter_.work, stream_);
  });
}

template <typename S>
void TrainingModel<S>::adapter_weight_grad(const LinearLayer& layer, std::int64_t l, const S* dout, const S* x,
                                           Accumulate accumulate) {
  with_adapter(layer, l, "adapter wgrad", 2, 1, [&](const LowRankShape& shape, const auto&) {
    const std::vector<LowRank<float>>& d = d_weights_.blocks[static_cast<std::size_t>(l)].linear(*layer.block).low_rank;
    low_rank_weight_grad(matmul_, shape, std::span<const LowRank<float>>(d), dout, x, adapter_.work, accumulate,
                         stream_);
  });
}

// Into merged_, unless it has the newest adapter already.
template <typename S>
void TrainingModel<S>::merge_adapter() {
  if (!merged_ || !merged_is_stale_) return;
  for (const TensorSpec& spec : merged_table_.specs()) {
    const TensorSpec& from = frozen_table_.at(spec.name);
    if (from.kind != ValueKind::floats) continue;
    check(cudaMemcpyAsync(merged_->at<std::byte>(spec.byte_offset), frozen_arena_.at<std::byte>(from.byte_offset),
                          spec.bytes, cudaMemcpyDeviceToDevice, stream_),
          "adapter");
  }
  const ModelWeights<S> merged = bind_weights(config_, merged_table_, merged_->at<S>(0), Offsets::bytes);
  for (std::size_t l = 0; l < merged.blocks.size(); ++l) {
    for (const BlockLinear linear : kBlockLinears) {
      const QuantizedMatrix& quantized = weights_.blocks[l].linear(linear).weight.packed;
      const LinearSize size = linear_size(config_, linear);
      if (quantized) dequantize(merged.blocks[l].linear(linear).weight.plain, quantized, size.OC, size.C, stream_);
      const std::vector<LowRank<S>>& modules = weights_.blocks[l].linear(linear).low_rank;
      if (modules.empty()) continue;
      low_rank_merge(matmul_, low_rank_shape(config_, options_, linear), merged.blocks[l].linear(linear).weight.plain,
                     std::span<const LowRank<S>>(modules), adapter_.work, stream_);
    }
  }
  merged_is_stale_ = false;
}

// ---- embedding ------------------------------------------------------------------------------------------------------

template <typename S>
void TrainingModel<S>::embed() {
  const std::int64_t C = config_.hidden_size;
  clock_.run("embedding", 0, 2 * row_bytes(C), [&] {
    embedding_forward(acts_.residual[0], work_.tokens, weights_.embedding, rows(), C, stream_,
                      config_.embedding_scale(kStorage<S>));
  });
}

// The order in which embed_backward() adds rows depends on the tokens alone, so it is found beside the backward pass,
// in a second stream that waits for the tokens.
template <typename S>
void TrainingModel<S>::sort_tokens() {
  fork_stream(stream_, side_stream_, tokens_ready_, "backward");
  embedding_sort(work_.sorted_tokens, work_.tokens, rows(), config_.vocab_size, side_stream_);
  check(cudaEventRecord(tokens_sorted_, side_stream_), "backward");
}

template <typename S>
void TrainingModel<S>::embed_backward() {
  check(cudaStreamWaitEvent(stream_, tokens_sorted_), "backward");
  const std::int64_t C = config_.hidden_size, touched = std::min(rows(), config_.vocab_size);
  clock_.run("embedding backward", 0, row_bytes(C) + 2.0 * static_cast<double>(touched * C) * sizeof(float), [&] {
    embedding_backward(d_weights_.embedding, added_gradient(), work_.sorted_tokens, rows(), C, work_.scratch, stream_,
                       config_.embedding_scale(kStorage<S>));
  });
}

// ---- norms ----------------------------------------------------------------------------------------------------------

template <typename S>
typename TrainingModel<S>::NormSite TrainingModel<S>::norm_after(std::int64_t branch) const {
  const std::int64_t layer = (branch + 1) / 2;
  const auto l = static_cast<std::size_t>(layer);
  S* residual = acts_.residual[l];
  if (branch == 2 * config_.num_layers - 1) {
    return {branch,           kNoLayer,         std::nullopt,    residual, weights_.final_norm, d_weights_.final_norm,
            acts_.final_norm, acts_.final_mean, acts_.final_rstd};
  }
  const BlockWeights<S>& w = weights_.blocks[l];
  const BlockWeights<float>& dw = d_weights_.blocks[l];
  const LayerActivations<S>& a = acts_.layers[l];
  if (branch % 2 == 0) {
    return {branch, layer, BlockLinear::up, a.residual_mid, w.post_norm, dw.post_norm, a.post_norm, a.mean2, a.rstd2};
  }
  NormSite site{branch, layer, BlockLinear::qkv, residual, w.input_norm, dw.input_norm, a.input_norm, a.mean1, a.rstd1};
  if (config_.parallel_residual) {
    site.weights2 = w.post_norm;
    site.d_weights2 = dw.post_norm;
    site.out2 = a.post_norm;
  }
  return site;
}

template <typename S>
ResidualNormForward<S, S> TrainingModel<S>::norm_operands(const NormSite& site) const {
  ResidualNormForward<S, S> norm;
  norm.residual = site.residual;
  norm.weight = site.weights.weight;
  norm.bias = site.weights.bias;
  norm.weight2 = site.weights2.weight;
  norm.bias2 = site.weights2.bias;
  norm.out = site.out;
  norm.out2 = site.out2;
  norm.mean = site.mean;
  norm.rstd = site.rstd;
  return norm;
}

template <typename S>
void TrainingModel<S>::launch_norm(const NormSite& site, const ResidualNormForward<S, S>& norm) {
  const ResidualNormShape shape = norm_shape(norm.x != nullptr ? site.branch : -1);  // dropout is that of a branch
  const int passes = (norm.x != nullptr) + (norm.residual != nullptr) + (norm.residual_out != nullptr);
  const double bytes = passes * row_bytes(config_.hidden_size);
  if constexpr (std::is_same_v<S, bf16>) {
    if (fp8_ && !options_.lora && site.reader) {
      const double codes = static_cast<double>(rows() * config_.hidden_size);
      return fp8_->write_input(*site.reader, site.layer, bytes + codes, fp8_pass(), [&](const Fp8Target& to) {
        ResidualNormForward<S, S> rounding = norm;
        rounding.codes = to;
        residual_norm_forward(shape, rounding, stream_);
      });
    }
  }
  const int outputs = norm.out2 != nullptr ? 2 : 1;
  clock_.run("norm", 0, bytes + outputs * row_bytes(config_.hidden_size),
             [&] { residual_norm_forward(shape, norm, stream_); });
}

// out = norm(residual): the first norm, and norms that are recomputed. residual_norm.h promises the bits of the call
// that stored the stream, so no dropout is needed here.
template <typename S>
void TrainingModel<S>::normalize(const NormSite& site) {
  launch_norm(site, norm_operands(site));
}

// residual = skip + dropout(x W^T + bias), out = norm(residual). Without dropout the GEMM adds skip in its epilogue; with
// it the GEMM writes `branch` [N, C], and the norm's kernel applies dropout, adds and normalises. With post_norms
// x W^T + bias is normalised before, into `branch`.
template <typename S>
void TrainingModel<S>::linear_and_normalize(const LinearLayer& layer, std::int64_t l, const NormSite& site, const S* x,
                                            const Linear<S>& w, const S* skip, S* branch) {
  ResidualNormForward<S, S> norm = norm_operands(site);
  if (residual_in_epilogue()) {
    linear(layer, l, site.residual, x, w, rows(), skip);
  } else {
    if (config_.post_norms) {
      const BranchNorm behind = branch_norm(site.branch);
      linear(layer, l, behind.x, x, w, rows());
      normalize_branch(behind, branch);
    } else {
      linear(layer, l, branch, x, w, rows());
    }
    norm.x = branch;
    norm.residual = skip;
    norm.residual_out = site.residual;
  }
  launch_norm(site, norm);
}

// linear_and_normalize() of attention's and of the MLP's projection of layer l, with the parallel residual: both add to the same
// memory, the stream's or with dropout `branch` [N, C].
template <typename S>
void TrainingModel<S>::linears_and_normalize(std::int64_t l, const NormSite& site, S* branch) {
  const BlockWeights<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const S* skip = acts_.residual[static_cast<std::size_t>(l)];
  S* const sum = residual_in_epilogue() ? site.residual : branch;
  linear(output_, l, sum, a.attention, w.output, rows(), residual_in_epilogue() ? skip : nullptr);
  linear(down_, l, sum, a.swiglu_out, w.down, rows(), sum);
  ResidualNormForward<S, S> norm = norm_operands(site);
  if (!residual_in_epilogue()) {
    norm.x = branch;
    norm.residual = skip;
    norm.residual_out = site.residual;
  }
  launch_norm(site, norm);
}

// Backward of a norm. `d_out`: the gradient of its output, acts_.d_post_norm that of its second one; with a skip connection
// acts_.d_residual holds the gradient of the residual stream after the norm. Afterwards added_gradient() is the gradient
// of what was added, acts_.d_residual that of the stream before it.
template <typename S>
void TrainingModel<S>::normalize_backward(const NormSite& site, const S* d_out, bool has_skip) {
  ResidualNormBackward<S, S> norm;
  norm.dout = d_out;
  norm.dresidual_out = has_skip ? acts_.d_residual : nullptr;
  norm.residual_out = site.residual;
  norm.weight = site.weights.weight;
  norm.mean = site.mean;
  norm.rstd = site.rstd;
  norm.dx = one_gradient() ? nullptr : added_gradient();
  norm.dresidual = acts_.d_residual;
  norm.dweight = site.d_weights.weight;
  norm.dbias = site.d_weights.bias;
  norm.workspace = work_.scratch;
  const bool two = site.out2 != nullptr;
  if (two) {
    norm.dout2 = acts_.d_post_norm;
    norm.weight2 = site.weights2.weight;
    norm.dweight2 = site.d_weights2.weight;
    norm.dbias2 = site.d_weights2.bias;
  }
  const int passes = (has_skip ? 4 : 3) + (one_gradient() ? 0 : 1) + (two ? 1 : 0);
  clock_.run("norm backward", 0, passes * row_bytes(config_.hidden_size),
             [&] { residual_norm_backward(norm_shape(site.branch), norm, stream_); });
}

template <typename S>
typename TrainingModel<S>::BranchNorm TrainingModel<S>::branch_norm(std::int64_t branch) const {
  const auto l = static_cast<std::size_t>(branch / 2);
  const BlockWeights<S>& w = weights_.blocks[l];
  const BlockWeights<float>& dw = d_weights_.blocks[l];
  const LayerActivations<S>& a = acts_.layers[l];
  if (branch % 2 == 0) {
    return {a.attention_out, w.attention_norm, dw.attention_norm, a.attention_mean, a.attention_rstd};
  }
  return {a.mlp_out, w.mlp_norm, dw.mlp_norm, a.mlp_mean, a.mlp_rstd};
}

template <typename S>
void TrainingModel<S>::normalize_branch(const BranchNorm& norm, S* out) {
  ResidualNormForward<S, S> io;
  io.residual = norm.x;
  io.weight = norm.weights.weight;
  io.bias = norm.weights.bias;
  io.out = out;
  io.mean = norm.mean;
  io.rstd = norm.rstd;
  clock_.run("norm of a branch", 0, 2 * row_bytes(config_.hidden_size),
             [&] { residual_norm_forward(norm_shape(-1), io, stream_); });
}

// From added_gradient() to branch_gradient().
template <typename S>
void TrainingModel<S>::branch_norm_backward(std::int64_t branch) {
  const BranchNorm norm = branch_norm(branch);
  ResidualNormBackward<S, S> io;
  io.dout = added_gradient();
  io.residual_out = norm.x;
  io.weight = norm.weights.weight;
  io.mean = norm.mean;
  io.rstd = norm.rstd;
  io.dx = branch_gradient();
  io.dweight = norm.d_weights.weight;
  io.dbias = norm.d_weights.bias;
  io.workspace = work_.scratch;
  clock_.run("norm of a branch backward", 0, 3 * row_bytes(config_.hidden_size),
             [&] { residual_norm_backward(norm_shape(-1), io, stream_); });
}

// ---- attention ------------------------------------------------------------------------------------------------------

template <typename S>
HeadNormShape TrainingModel<S>::head_norm_shape() const {
  return {options_.micro_batch,
          options_.seq_len,
          config_.num_heads,
          config_.num_kv_heads,
          config_.head_dim,
          static_cast<float>(config_.norm_eps),
          static_cast<float>(config_.norm_weight_offset)};
}

// Normalises the heads of q and k in place, keeps them as they were, and rotates them.
template <typename S>
void TrainingModel<S>::normalize_heads(std::int64_t l) {
  const BlockWeights<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const DeviceRopeTable rope = rope_table_of(l);
  const bool rotates = head_norm_rotates<S>(rope.half);
  const HeadNormForward<S> io = {q_heads(a.qkv),  k_heads(a.qkv), w.q_norm.weight,
                                 w.k_norm.weight, a.qk,           rotates ? rope : DeviceRopeTable{}};
  clock_.run("head norm, rope", 0, 3 * row_bytes(config_.q_size() + config_.kv_size()),
             [&] { head_norm_forward(head_norm_shape(), io, stream_); });
  if (!rotates) this->rope(l, a.qkv);
}

// The gradients of q and k in d_qkv become those before their norms.
template <typename S>
void TrainingModel<S>::normalize_heads_backward(std::int64_t l) {
  const BlockWeights<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const BlockWeights<float>& dw = d_weights_.blocks[static_cast<std::size_t>(l)];
  const HeadNormBackward<S> io = {
      q_heads(acts_.d_qkv), k_heads(acts_.d_qkv), acts_.layers[static_cast<std::size_t>(l)].qk,
      w.q_norm.weight,      w.k_norm.weight,      dw.q_norm.weight,
      dw.k_norm.weight,     work_.scratch};
  clock_.run("head norm backward", 0, 3 * row_bytes(config_.q_size() + config_.kv_size()),
             [&] { head_norm_backward(head_norm_shape(), io, stream_); });
}

// Rotates q and k in place.
template <typename S>
void TrainingModel<S>::rope(std::int64_t l, S* qkv) {
  clock_.run("rope", 0, 2 * row_bytes(config_.q_size() + config_.kv_size()), [&] {
    rope_forward(q_heads(qkv), k_heads(qkv), rope_table_of(l), options_.micro_batch, options_.seq_len,
                 config_.num_heads, config_.num_kv_heads, 0, stream_);
  });
}

template <typename S>
void TrainingModel<S>::attend(std::int64_t l, const LayerActivations<S>& a) {
  const std::int64_t q = config_.q_size();
  clock_.run("attention", attention_flops(l), row_bytes(q + qkv_size()), [&] {
    attention_forward<S>(attention_shape(l), heads(a.attention, q), a.lse, q_heads(a.qkv), k_heads(a.qkv),
                         v_heads(a.qkv), stream_);
  });
}

// d_attention -> d_qkv, the gradient of q and k before RoPE. Five GEMMs where the forward pass has two.
template <typename S>
void TrainingModel<S>::attend_backward(std::int64_t l, const LayerActivations<S>& a) {
  const std::int64_t q = config_.q_size();
  const DeviceRopeTable rope = rope_table_of(l);
  if constexpr (std::is_same_v<S, bf16>) {
    if (attention_rounds()) {
      const double bytes = row_bytes(2 * q + qkv_size()) + static_cast<double>(rows() * qkv_size());
      return fp8_->write_gradient(BlockLinear::qkv, l, [&](const Fp8Target& to) {
        const AttentionCodes codes{q_heads(to.codes), k_heads(to.codes), v_heads(to.codes), to.scale, to.counters};
        clock_.run("attention backward, quantise", 2.5 * attention_flops(l), bytes, [&] {
          attention_backward_fp8(attention_shape(l), codes, heads(acts_.d_attention, q), heads(a.attention, q), a.lse,
                                 q_heads(a.qkv), k_heads(a.qkv), v_heads(a.qkv), work_.scratch, stream_, rope);
        });
      });
    }
  }
  clock_.run("attention backward", 2.5 * attention_flops(l), row_bytes(2 * (q + qkv_size())), [&] {
    attention_backward<S>(attention_shape(l), q_heads(acts_.d_qkv), k_heads(acts_.d_qkv), v_heads(acts_.d_qkv),
                          heads(acts_.d_attention, q), heads(a.attention, q), a.lse, q_heads(a.qkv), k_heads(a.qkv),
                          v_heads(a.qkv), work_.scratch, stream_, rope);
  });
}

// ---- MLP ------------------------------------------------------------------------------------------------------------

// gate_up [N, 2F] and, unless it is null, swiglu_out [N, F] of layer l; without a gate up [N, F] and its GELU.
template <typename S>
void TrainingModel<S>::gate_up_and_swiglu(std::int64_t l, S* swiglu_out) {
  const std::int64_t N = rows(), C = config_.hidden_size, F = config_.ffn_size;
  const Linear<S>& up = weights_.blocks[static_cast<std::size_t>(l)].up;
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  if constexpr (std::is_same_v<S, bf16>) {
    if (fp8_ && !options_.lora) {
      return fp8_->gate_up_and_swiglu(l, a.gate_up, up.bias, gate_up_.forward, fp8_pass());
    }
    if (swiglu_in_epilogue_) {
      const S* const weight = floats_of(gate_up_, up.weight);
      const double n = static_cast<double>(N), c = static_cast<double>(C), f = static_cast<double>(F);
      clock_.run("gate, up, swiglu", 4 * n * c * f,
                 (n * c + 2 * f * c + (swiglu_out != nullptr ? 3 : 2) * n * f) * sizeof(S),
                 [&] { gate_up_swiglu(a.gate_up, swiglu_out, a.post_norm, weight, N, C, F, stream_); });
      return;
    }
  }
  linear(gate_up_, l, a.gate_up, a.post_norm, up, N);
  if (swiglu_out == nullptr) return;
  if constexpr (std::is_same_v<S, bf16>) {
    if (fp8_) return fp8_->swiglu(l, swiglu_out, a.gate_up, fp8_pass());
  }
  if (!config_.gated()) {
    return clock_.run("gelu", 0, 2 * row_bytes(F), [&] { gelu_forward(swiglu_out, a.gate_up, N * F, stream_); });
  }
  if (config_.activation == Activation::geglu_tanh) {
    return clock_.run("geglu", 0, 3 * row_bytes(F), [&] { geglu_tanh_forward(swiglu_out, a.gate_up, N, F, stream_); });
  }
  clock_.run("swiglu", 0, 3 * row_bytes(F), [&] { swiglu_forward(swiglu_out, a.gate_up, N, F, stream_); });
}

// Replaces gate_up of layer l by its gradient, from the gradient of the down projection's output; in fp8 gate_up stays,
// and fp8_ has the gradient. swiglu_out, unless null, gets the forward pass's values again.
template <typename S>
void TrainingModel<S>::down_input_grad_and_swiglu(std::int64_t l, S* swiglu_out) {
  const std::int64_t N = rows(), C = config_.hidden_size, F = config_.ffn_size;
  const Weight<S>& down = weights_.blocks[static_cast<std::size_t>(l)].down.weight;
  S* gate_up = acts_.layers[static_cast<std::size_t>(l)].gate_up;
  if constexpr (std::is_same_v<S, bf16>) {
    if (fp8_ && !options_.lora) {
      fp8_->take_gradient(BlockLinear::down, l, branch_gradient());
      return fp8_->down_input_grad_and_swiglu(l, acts_.d_swiglu_out, gate_up, down_.input_grad);
    }
    if (swiglu_in_epilogue_) {
      const S* const weight = floats_of(down_, down);
      const double n = static_cast<double>(N), c = static_cast<double>(C), f = static_cast<double>(F);
      clock_.run("down dgrad, swiglu", 2 * n * c * f,
                 (n * c + f * c + (swiglu_out != nullptr ? 5 : 4) * n * f) * sizeof(S),
                 [&] { down_input_grad_swiglu(gate_up, swiglu_out, branch_gradient(), weight, N, C, F, stream_); });
      return;
    }
  }
  input_grad(down_, l, acts_.d_swiglu_out, branch_gradient(), down.plain, N);
  if constexpr (std::is_same_v<S, bf16>) {
    if (fp8_) return fp8_->swiglu_backward(l, gate_up, acts_.d_swiglu_out, swiglu_out);
  }
  if (!config_.gated()) {
    return clock_.run("gelu backward", 0, (swiglu_out == nullptr ? 3 : 4) * row_bytes(F),
                      [&] { gelu_backward(gate_up, acts_.d_swiglu_out, gate_up, N * F, swiglu_out, stream_); });
  }
  const double bytes = (swiglu_out == nullptr ? 5 : 6) * row_bytes(F);
  if (config_.activation == Activation::geglu_tanh) {
    return clock_.run("geglu backward", 0, bytes,
                      [&] { geglu_tanh_backward(gate_up, acts_.d_swiglu_out, gate_up, N, F, swiglu_out, stream_); });
  }
  clock_.run("swiglu backward", 0, bytes,
             [&] { swiglu_backward(gate_up, acts_.d_swiglu_out, gate_up, N, F, swiglu_out, stream_); });
}

// ---- classifier -----------------------------------------------------------------------------------------------------

// Losses of the logits of rows `row` to row + count - 1; in training the logits are replaced by their gradient.
template <typename S>
void TrainingModel<S>::softmax_and_loss(std::int64_t row, std::int64_t count, float loss_scale) {
  const std::int64_t V = config_.vocab_size;
  const double bytes = static_cast<double>(count * V) * sizeof(S);
  const float* const weights = work_.label_weights != nullptr ? work_.label_weights + row : nullptr;
  clock_.run("softmax, loss", 0, training_ ? 2 * bytes : bytes, [&] {
    classifier(acts_.logits, acts_.losses + row, work_.labels + row, count, V, V, loss_scale, training_, stream_,
               classifier_limits(), weights);
  });
}

template <typename S>
void TrainingModel<S>::sum_losses(LossTotal* total) {
  clock_.run("loss sum", 0, static_cast<double>(rows()) * (sizeof(float) + sizeof(std::int32_t)),
             [&] { add_losses(total, acts_.losses, work_.labels, rows(), stream_); });
}

#define WEFT_INSTANTIATE(S)                                                                                           \
  template void TrainingModel<S>::linear(const LinearLayer&, std::int64_t, S*, const S*, const Linear<S>&,            \
                                         std::int64_t, const S*);                                                     \
  template void TrainingModel<S>::input_grad(const LinearLayer&, std::int64_t, S*, const S*, const S*, std::int64_t); \
  template void TrainingModel<S>::weight_grad(const LinearLayer&, std::int64_t, const Linear<float>&, const S*,       \
                                              const S*, std::int64_t, Accumulate);                                    \
  template void TrainingModel<S>::adapter_hidden_grad(const LinearLayer&, std::int64_t, const S*);                    \
  template void TrainingModel<S>::merge_adapter();                                                                    \
  template void TrainingModel<S>::embed();                                                                            \
  template void TrainingModel<S>::sort_tokens();                                                                      \
  template void TrainingModel<S>::embed_backward();                                                                   \
  template TrainingModel<S>::NormSite TrainingModel<S>::norm_after(std::int64_t) const;                               \
  template void TrainingModel<S>::normalize(const NormSite&);                                                         \
  template void TrainingModel<S>::linear_and_normalize(const LinearLayer&, std::int64_t, const NormSite&, const S*,   \
                                                       const Linear<S>&, const S*, S*);                               \
  template void TrainingModel<S>::linears_and_normalize(std::int64_t, const NormSite&, S*);                           \
  template void TrainingModel<S>::normalize_backward(const NormSite&, const S*, bool);                                \
  template void TrainingModel<S>::normalize_heads(std::int64_t);                                                      \
  template void TrainingModel<S>::normalize_heads_backward(std::int64_t);                                             \
  template void TrainingModel<S>::branch_norm_backward(std::int64_t);                                                 \
  template void TrainingModel<S>::rope(std::int64_t, S*);                                                             \
  template void TrainingModel<S>::attend(std::int64_t, const LayerActivations<S>&);                                   \
  template void TrainingModel<S>::attend_backward(std::int64_t, const LayerActivations<S>&);                          \
  template void TrainingModel<S>::gate_up_and_swiglu(std::int64_t, S*);                                               \
  template void TrainingModel<S>::down_input_grad_and_swiglu(std::int64_t, S*);                                       \
  template void TrainingModel<S>::softmax_and_loss(std::int64_t, std::int64_t, float);                                \
  template void TrainingModel<S>::sum_losses(LossTotal*);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
