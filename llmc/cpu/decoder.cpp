// Prompts, scores and the K/V cache of a CPU decoder; the operators of a layer are in llama_decoder.cpp and neox.cpp.

#include "llmc/cpu/decoder.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/rope.h"

namespace weft::cpu {

namespace {

std::int64_t cache_elements(const ModelConfig& config, std::int64_t capacity) {
  return config.num_layers * config.kv_size() * capacity;
}

MemoryPlan cache_plan(const ModelConfig& config, std::int64_t capacity) {
  MemoryPlan plan("K/V cache");
  plan.add(2 * static_cast<std::uint64_t>(cache_elements(config, capacity)) * sizeof(float));
  return plan;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, std::int64_t capacity)
    : config_(config),
      capacity_(capacity),
      cache_arena_(cache_plan(config, capacity)),
      rope_(rope_table(config.rope, capacity)) {
  final_norm_.resize(static_cast<std::size_t>(std::min(kChunk, capacity) * config.hidden_size));
  logits_.resize(static_cast<std::size_t>(config.vocab_size));
}

void Decoder::check_room(std::size_t ids) const {
  if (ids == 0 || static_cast<std::int64_t>(ids) > capacity_ - length_) {
    fail(Exit::internal, "decoder: %zu tokens do not fit: %lld of %lld positions are used", ids,
         static_cast<long long>(length_), static_cast<long long>(capacity_));
  }
}

std::span<const float> Decoder::prefill(std::span<const std::int32_t> ids) {
  check_room(ids.size());
  if (keep_) kept_.clear();
  const std::int64_t C = config_.hidden_size;
  std::int64_t rows = 0;
  for (std::size_t begin = 0; begin < ids.size(); begin += static_cast<std::size_t>(rows)) {
    rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - begin));
    run_layers(ids.subspan(begin, static_cast<std::size_t>(rows)));
    length_ += rows;
  }
  matmul_forward(logits_.data(), final_norm() + (rows - 1) * C, head(), nullptr, 1, C, config_.vocab_size);
  return {logits_.data(), static_cast<std::size_t>(config_.vocab_size)};
}

std::vector<double> Decoder::score(std::span<const std::int32_t> ids) {
  reset();
  check_room(ids.size());
  const std::int64_t C = config_.hidden_size, V = config_.vocab_size;
  std::vector<double> nll;
  std::vector<float> losses(kChunk), logits(static_cast<std::size_t>(std::min<std::int64_t>(kChunk, ids.size()) * V));
  for (std::size_t begin = 0; begin + 1 < ids.size() && !score_interrupted(); begin += kChunk) {
    const std::int64_t rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - 1 - begin));
    run_layers(ids.subspan(begin, static_cast<std::size_t>(rows)));
    length_ += rows;
    matmul_forward(logits.data(), final_norm(), head(), nullptr, rows, C, V);
    classifier(logits.data(), losses.data(), ids.data() + begin + 1, rows, V, 0, false);
    nll.insert(nll.end(), losses.begin(), losses.begin() + rows);
  }
  return nll;
}

HeadView Decoder::cache_view(std::int64_t which, std::int64_t l) const {
  const std::int64_t layer = config_.num_kv_heads * capacity_ * config_.head_dim;
  const std::int64_t offset = which * cache_elements(config_, capacity_) + l * layer;
  return {cache_arena_.at<float>(0) + offset, 0, config_.head_dim, capacity_ * config_.head_dim};
}

void Decoder::attend(std::int64_t l, HeadView q, HeadView k, HeadView v, std::int64_t rows, float* out) {
  const std::int64_t NH = config_.num_heads, NKV = config_.num_kv_heads, HS = config_.head_dim;
  rope_forward(q, rope_, 1, rows, NH, length_);
  rope_forward(k, rope_, 1, rows, NKV, length_);
  const HeadView keys = cache_view(0, l), values = cache_view(1, l);
  for (std::int64_t h = 0; h < NKV; ++h) {
    for (std::int64_t t = 0; t < rows; ++t) {
      std::copy_n(k.at(0, t, h), HS, keys.at(0, length_ + t, h));
      std::copy_n(v.at(0, t, h), HS, values.at(0, length_ + t, h));
    }
  }
  AttentionShape shape;
  shape.B = 1;
  shape.TQ = rows;
  shape.TK = length_ + rows;
  shape.NH = NH;
  shape.NKV = NKV;
  shape.HS = HS;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(HS));
  attention_forward(shape, HeadView{out, 0, NH * HS, HS}, nullptr, q, keys, values);
  if (keep_) {
    const std::string prefix = "layers." + std::to_string(l) + ".";
    keep_heads(prefix + "q", q, rows, NH);
    keep_heads(prefix + "k", k, rows, NKV);
    keep_heads(prefix + "v", v, rows, NKV);
    keep(prefix + "attention", out, rows, NH * HS);
  }
}

void Decoder::keep(const std::string& name, const float* data, std::int64_t rows, std::int64_t columns) {
  if (!keep_) return;
  std::vector<float>& kept = kept_[name];
  kept.insert(kept.end(), data, data + rows * columns);
}

void Decoder::keep_heads(const std::string& name, ConstHeadView heads, std::int64_t rows, std::int64_t count) {
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < count; ++h) keep(name, heads.at(0, t, h), 1, config_.head_dim);
  }
}

std::vector<float> Decoder::activation(const std::string& name) {
  if (name == "logits") {  // of every position, from the final norm that was kept
    const auto found = kept_.find("final_norm");
    if (found == kept_.end()) return {};
    const std::int64_t rows = static_cast<std::int64_t>(found->second.size()) / config_.hidden_size;
    std::vector<float> logits(static_cast<std::size_t>(rows * config_.vocab_size));
    matmul_forward(logits.data(), found->second.data(), head(), nullptr, rows, config_.hidden_size, config_.vocab_size);
    return logits;
  }
  const auto found = kept_.find(name);
  return found == kept_.end() ? std::vector<float>{} : found->second;
}

std::uint64_t Decoder::bytes_per_token(std::int64_t context) const {
  const std::int64_t cached = 2 * config_.num_layers * config_.kv_size() * context;
  return weight_bytes() + static_cast<std::uint64_t>(cached) * sizeof(float);
}

}  // namespace weft::cpu
