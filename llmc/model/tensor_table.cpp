#include "llmc/model/tensor_table.h"

#include "llmc/base/checked.h"

namespace weft {

TensorTable::TensorTable(const ModelConfig& config) {
  if (config.family == Family::llama) {
    add_llama(config);
  } else {
    add_gpt_neox(config);
  }
  begin_group();  // the arena ends on a group boundary too
}

void TensorTable::begin_group() {
  arena_ = (arena_ + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
}

void TensorTable::add(std::string name, std::vector<std::int64_t> shape, Init init, bool decay) {
  TensorSpec spec;
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) elements = checked_mul(elements, static_cast<std::uint64_t>(size), name);
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.init = init;
  spec.decay = decay;
  spec.elements = static_cast<std::int64_t>(elements);
  spec.offset = arena_;
  parameters_ += spec.elements;
  arena_ += spec.elements;
  specs_.push_back(std::move(spec));
}

void TensorTable::add_llama(const ModelConfig& config) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const std::int64_t q = config.q_size(), kv = config.kv_size();
  const auto add_norm = [&](const std::string& name) {
    begin_group();
    add(name + ".weight", {C}, Init::ones, false);
    if (config.norm == NormKind::layernorm) {
      begin_group();
      add(name + ".bias", {C}, Init::zeros, false);
    }
  };
  add("model.embed_tokens.weight", {V, C}, Init::normal, true);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add_norm(prefix + "input_layernorm");
    begin_group();
    add(prefix + "self_attn.q_proj.weight", {q, C}, Init::normal, true);
    add(prefix + "self_attn.k_proj.weight", {kv, C}, Init::normal, true);
    add(prefix + "self_attn.v_proj.weight", {kv, C}, Init::normal, true);
    begin_group();
    add(prefix + "self_attn.o_proj.weight", {C, q}, Init::normal_residual, true);
    add_norm(prefix + "post_attention_layernorm");
    begin_group();
    add(prefix + "mlp.gate_proj.weight", {F, C}, Init::normal, true);
    add(prefix + "mlp.up_proj.weight", {F, C}, Init::normal, true);
    begin_group();
    add(prefix + "mlp.down_proj.weight", {C, F}, Init::normal_residual, true);
  }
  add_norm("model.norm");
  begin_group();
  if (!config.tied_embeddings) add("lm_head.weight", {V, C}, Init::normal, true);
}

void TensorTable::add_gpt_neox(const ModelConfig& config) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const auto add_linear = [&](const std::string& name, std::int64_t out, std::int64_t in, Init init, bool bias) {
    begin_group();
    add(name + ".weight", {out, in}, init, true);
    begin_group();
    if (bias) add(name + ".bias", {out}, Init::zeros, false);
  };
  const auto add_norm = [&](const std::string& name) {
    begin_group();
    add(name + ".weight", {C}, Init::ones, false);
    begin_group();
    add(name + ".bias", {C}, Init::zeros, false);
  };
  add("gpt_neox.embed_in.weight", {V, C}, Init::normal, true);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = "gpt_neox.layers." + std::to_string(layer) + ".";
    add_norm(prefix + "input_layernorm");
    add_norm(prefix + "post_attention_layernorm");
    add_linear(prefix + "attention.query_key_value", 3 * C, C, Init::normal, config.attention_bias);
    add_linear(prefix + "attention.dense", C, C, Init::normal_residual, config.attention_bias);
    add_linear(prefix + "mlp.dense_h_to_4h", F, C, Init::normal, true);
    add_linear(prefix + "mlp.dense_4h_to_h", C, F, Init::normal_residual, true);
  }
  add_norm("gpt_neox.final_layer_norm");
  begin_group();
  add("embed_out.weight", {V, C}, Init::normal, true);
}

const TensorSpec* TensorTable::find(std::string_view name) const {
  for (const TensorSpec& spec : specs_) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

const TensorSpec& TensorTable::at(std::string_view name) const {
  return specs_[index_of(name)];
}

std::size_t TensorTable::index_of(std::string_view name) const {
  const TensorSpec* spec = find(name);
  if (spec == nullptr) fail(Exit::internal, "no parameter is called %s", escaped(name).c_str());
  return static_cast<std::size_t>(spec - specs_.data());
}

}  // namespace weft
