#include "llmc/model/tensor_table.h"

#include "llmc/base/checked.h"
#include "llmc/model/tensor_names.h"

namespace weft {

TensorTable::TensorTable(const ModelConfig& config, DType storage) : storage_(storage) {
  if (config.family == Family::llama) {
    add_llama(config);
  } else {
    add_gpt_neox(config);
  }
  begin_group();  // the arenas end on a group boundary too
}

void TensorTable::begin_group() {
  arena_elements_ = (arena_elements_ + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
  arena_bytes_ = align_up(arena_bytes_, kGroupAlignment * dtype_bytes(storage_), "parameters");
}

void TensorTable::add(std::string name, std::vector<std::int64_t> shape, Init init, bool decay) {
  TensorSpec spec;
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) elements = checked_mul(elements, static_cast<std::uint64_t>(size), name);
  spec.dtype = storage_;
  spec.bytes = checked_mul(elements, dtype_bytes(spec.dtype), name);
  spec.byte_offset = arena_bytes_;
  arena_bytes_ = checked_add(arena_bytes_, spec.bytes, name);
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.init = init;
  spec.decay = decay;
  spec.elements = static_cast<std::int64_t>(elements);
  spec.offset = arena_elements_;
  parameters_ += spec.elements;
  arena_elements_ += spec.elements;
  specs_.push_back(std::move(spec));
}

void TensorTable::add_llama(const ModelConfig& config) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const std::int64_t q = config.q_size(), kv = config.kv_size();
  const auto add_norm = [&](const std::string& module) {
    begin_group();
    add(weight_of(module), {C}, Init::ones, false);
    if (config.norm == NormKind::layernorm) {
      begin_group();
      add(bias_of(module), {C}, Init::zeros, false);
    }
  };
  const auto add_matrix = [&](const std::string& module, std::int64_t out, std::int64_t in, Init init) {
    add(weight_of(module), {out, in}, init, true);
  };
  add_matrix(LlamaNames::kEmbedding, V, C, Init::normal);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const LlamaNames::Layer names(l);
    add_norm(names.input_norm);
    begin_group();
    add_matrix(names.q, q, C, Init::normal);
    add_matrix(names.k, kv, C, Init::normal);
    add_matrix(names.v, kv, C, Init::normal);
    begin_group();
    add_matrix(names.output, C, q, Init::normal_residual);
    add_norm(names.post_norm);
    begin_group();
    add_matrix(names.gate, F, C, Init::normal);
    add_matrix(names.up, F, C, Init::normal);
    begin_group();
    add_matrix(names.down, C, F, Init::normal_residual);
  }
  add_norm(LlamaNames::kFinalNorm);
  begin_group();
  if (!config.tied_embeddings) add_matrix(LlamaNames::kHead, V, C, Init::normal);
}

void TensorTable::add_gpt_neox(const ModelConfig& config) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const auto add_linear = [&](const std::string& module, std::int64_t out, std::int64_t in, Init init, bool bias) {
    begin_group();
    add(weight_of(module), {out, in}, init, true);
    begin_group();
    if (bias) add(bias_of(module), {out}, Init::zeros, false);
  };
  const auto add_norm = [&](const std::string& module) {
    begin_group();
    add(weight_of(module), {C}, Init::ones, false);
    begin_group();
    add(bias_of(module), {C}, Init::zeros, false);
  };
  add(weight_of(NeoxNames::kEmbedding), {V, C}, Init::normal, true);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const NeoxNames::Layer names(l);
    add_norm(names.input_norm);
    add_norm(names.post_norm);
    add_linear(names.qkv, 3 * C, C, Init::normal, config.attention_bias);
    add_linear(names.dense, C, C, Init::normal_residual, config.attention_bias);
    add_linear(names.up, F, C, Init::normal, true);
    add_linear(names.down, C, F, Init::normal_residual, true);
  }
  add_norm(NeoxNames::kFinalNorm);
  begin_group();
  add(weight_of(NeoxNames::kHead), {V, C}, Init::normal, true);
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

MemoryPlan parameter_plan(const TensorTable& table) {
  MemoryPlan plan("parameters");
  plan.add(table.arena_bytes());
  return plan;
}

MemoryPlan per_parameter_plan(const char* name, const TensorTable& table, std::size_t element_bytes) {
  MemoryPlan plan(name);
  plan.add(checked_mul(static_cast<std::uint64_t>(table.arena_elements()), element_bytes, name));
  return plan;
}

}  // namespace weft
