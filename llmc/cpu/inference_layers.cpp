// A model on the CPU as a straight list of operators, from ids to the final norm: the specification of paged inference.
//
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))     one residual_norm with two outputs a block
// With post norms what attention and mlp give has a norm of its own before it is added.
#include <algorithm>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/fp8_rows.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/head_norm.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/low_rank.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/model/qkv_heads.h"

namespace weft::cpu {

namespace {

void append_rounded(const float* from, std::int64_t count, DType type, float* to) {
  const auto elements = static_cast<std::size_t>(count);
  if (type == DType::f32) {
    std::copy_n(from, elements, to);
    return;
  }
  std::vector<std::uint16_t> rounded(elements);
  convert_from_f32(from, type, rounded.data(), elements);
  convert_to_f32(rounded.data(), type, to, elements);
}

}  // namespace

void Inference::run_layers() {
  const std::int64_t C = config_.hidden_size;
  embedding_forward(residual_.data(), ids_.data(), weights_.embedding, rows(), C, config_.embedding_scale());
  keep("embedding", residual_.data(), C);
  normalize_input(0, nullptr);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) run_block(l);
  keep("final_norm", final_norm_.data(), C);
}

void Inference::run_block(std::int64_t l) {
  const BlockWeights<const float>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const std::int64_t N = rows(), C = config_.hidden_size, F = config_.ffn_size;
  const bool parallel = config_.parallel_residual;
  const std::string prefix = "layers." + std::to_string(l) + ".";
  float* const norm2 = parallel ? norm2_.data() : norm1_.data();
  float* const product = config_.gated() ? product_.data() : up_.data();

  keep(prefix + "input_norm", norm1_.data(), C);
  multiply(qkv_.data(), norm1_.data(), w, BlockLinear::qkv);
  attend(l);
  multiply(branch_.data(), attention_.data(), w, BlockLinear::output);
  if (config_.post_norms) normalize_branch(w.attention_norm);
  if (!parallel) normalize(branch_.data(), w.post_norm, norm2);
  keep(prefix + "post_attention_norm", norm2, C);
  multiply(up_.data(), norm2, w, BlockLinear::up);
  switch (config_.activation) {
    case Activation::swiglu:
      swiglu_forward(product, up_.data(), N, F);
      break;
    case Activation::gelu:
      gelu_forward(product, up_.data(), N * F);
      break;
    case Activation::gelu_tanh:
      gelu_tanh_forward(product, up_.data(), N * F);
      break;
    case Activation::geglu_tanh:
      geglu_tanh_forward(product, up_.data(), N, F);
      break;
  }
  keep(prefix + "mlp_product", product, F);
  // Parallel residual: both branches are added at once, so the MLP accumulates into what attention left.
  multiply(branch_.data(), product, w, BlockLinear::down, parallel ? Accumulate::yes : Accumulate::no);
  if (config_.post_norms) normalize_branch(w.mlp_norm);
  normalize_input(l + 1, branch_.data());
  keep(prefix + "residual", residual_.data(), C);
}

LowRankShape Inference::low_rank_shape(BlockLinear which, std::int64_t rows) const {
  const LinearSize size = linear_size(config_, which);
  return {.N = rows, .in = size.C, .out = size.OC, .rank = lora_->rank, .scale = lora_->scale()};
}

void Inference::multiply(float* out, const float* x, const BlockWeights<const float>& block, BlockLinear which,
                         Accumulate accumulate) {
  const Linear<const float>& w = block.linear(which);
  const LinearSize size = linear_size(config_, which);
  if (!codes_.empty()) {
    quantize_rows_fp8(codes_.data(), code_scales_.data(), x, rows(), size.C);
    return matmul_rows_forward(out, codes_.data(), w.weight, w.bias, rows(), size.C, size.OC, accumulate,
                               code_scales_.data());
  }
  matmul_rows_forward(out, x, w.weight, w.bias, rows(), size.C, size.OC, accumulate);
  for (const LowRank<const float>& module : w.low_rank) {
    low_rank_rows_forward(low_rank_shape(which, rows()), out, x, module, low_rank_.data());
  }
}

// ---- norms ----------------------------------------------------------------------------------------------------------

void Inference::normalize_input(std::int64_t l, const float* branch) {
  if (l == config_.num_layers) return normalize(branch, weights_.final_norm, final_norm_.data());
  const BlockWeights<const float>& w = weights_.blocks[static_cast<std::size_t>(l)];
  if (!config_.parallel_residual) return normalize(branch, w.input_norm, norm1_.data());
  normalize(branch, w.input_norm, norm1_.data(), w.post_norm, norm2_.data());
}

ResidualNormShape Inference::norm_shape() const {
  ResidualNormShape shape;
  shape.rows = rows();
  shape.C = config_.hidden_size;
  shape.kind = config_.norm;
  shape.eps = static_cast<float>(config_.norm_eps);
  shape.weight_offset = static_cast<float>(config_.norm_weight_offset);
  return shape;
}

void Inference::normalize_branch(const Norm& norm) {
  ResidualNormForward io;
  io.x = branch_.data();
  io.weight = norm.weight;
  io.bias = norm.bias;
  io.out = branch_.data();
  residual_norm_forward(norm_shape(), io);
}

void Inference::normalize(const float* branch, const Norm& norm, float* out, const Norm& norm2, float* out2) {
  ResidualNormForward io;
  io.x = branch != nullptr ? branch : residual_.data();
  io.residual = branch != nullptr ? residual_.data() : nullptr;
  io.residual_out = branch != nullptr ? residual_.data() : nullptr;
  io.weight = norm.weight;
  io.bias = norm.bias;
  io.out = out;
  io.weight2 = norm2.weight;
  io.bias2 = norm2.bias;
  io.out2 = out2;
  residual_norm_forward(norm_shape(), io);
}

// ---- attention ------------------------------------------------------------------------------------------------------

HeadView Inference::heads(std::int64_t first_element) {
  return {qkv_.data() + first_element, 0, config_.qkv_size(), qkv_heads(config_).stride};
}

PagedKv Inference::pages_of_layer(std::int64_t l) const {
  PagedKv kv = {nullptr, nullptr, options_.page_size, config_.num_kv_heads, config_.head_dim};
  if (options_.kv_fp8) {
    kv.codes = kv_codes(config_, options_, kv_arena_.at<std::uint8_t>(0), l);
  } else {
    const std::int64_t layer = config_.kv_size() * options_.num_pages * options_.page_size;
    kv.keys = kv_arena_.at<float>(0) + l * layer;
    kv.values = kv.keys + config_.num_layers * layer;
  }
  return kv;
}

void Inference::append(const PagedKv& kv, std::int64_t row, const float* key, const float* value) const {
  const std::int64_t HS = kv.HS;
  if (!kv.fp8()) {
    append_rounded(key, HS, cache_type_, kv.keys + row * HS);
    append_rounded(value, HS, cache_type_, kv.values + row * HS);
    return;
  }
  std::vector<float> rounded(static_cast<std::size_t>(HS));
  append_rounded(key, HS, cache_type_, rounded.data());
  kv_store(KvKind::key, rounded.data(), HS, row, kv.codes.keys, kv.codes.key_scales);
  append_rounded(value, HS, cache_type_, rounded.data());
  kv_store(KvKind::value, rounded.data(), HS, row, kv.codes.values, kv.codes.value_scales);
}

void Inference::attend(std::int64_t l) {
  const std::int64_t NH = config_.num_heads, NKV = config_.num_kv_heads, HS = config_.head_dim, P = options_.page_size;
  const QkvHeads layout = qkv_heads(config_);
  const HeadView q = heads(0), k = heads(layout.keys), v = heads(layout.values);
  const PagedKv kv = pages_of_layer(l);
  if (config_.qk_norm) {
    const BlockWeights<const float>& w = weights_.blocks[static_cast<std::size_t>(l)];
    const ResidualNormShape norm = norm_shape();
    head_norm_forward({1, rows(), NH, HS, norm.eps, norm.weight_offset}, q, q, w.q_norm.weight);
    head_norm_forward({1, rows(), NKV, HS, norm.eps, norm.weight_offset}, k, k, w.k_norm.weight);
  }
  const auto from_row = [](HeadView view, std::int64_t row) {
    view.data += row * view.token_stride;
    return view;
  };
  const RopeTable& rope = config_.rotates_locally(l) ? local_rope_ : rope_;
  for (const PagedRows& chunk : rows_) {
    if (config_.rotates(l)) {
      rope_forward(from_row(q, chunk.first_row), rope, 1, chunk.rows, NH, chunk.first_position);
      rope_forward(from_row(k, chunk.first_row), rope, 1, chunk.rows, NKV, chunk.first_position);
    }
    for (std::int64_t t = 0; t < chunk.rows; ++t) {
      const std::int64_t position = chunk.first_position + t;
      for (std::int64_t h = 0; h < NKV; ++h) {
        const std::int64_t row = kv.row(chunk.pages[static_cast<std::size_t>(position / P)], h) + position % P;
        append(kv, row, k.at(0, chunk.first_row + t, h), v.at(0, chunk.first_row + t, h));
      }
    }
  }
  paged_attention({NH, config_.score_scale(), q.token_stride, q.head_stride, config_.window(l)}, attention_.data(),
                  q.data, kv, rows_);
  if (!keep_) return;
  const std::string prefix = "layers." + std::to_string(l) + ".";
  keep_heads(prefix + "q", q, NH);
  keep_heads(prefix + "k", k, NKV);
  keep_heads(prefix + "v", v, NKV);
  keep(prefix + "attention", attention_.data(), NH * HS);
}

}  // namespace weft::cpu
