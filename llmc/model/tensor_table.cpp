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

void TensorTable::add(std::string name, std::vector<std::int64_t> shape, Init init, bool decay, ValueKind kind,
                      std::optional<DType> dtype) {
  TensorSpec spec;
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) elements = checked_mul(elements, static_cast<std::uint64_t>(size), name);
  spec.dtype = dtype.value_or(storage_);
  spec.bytes = checked_add(checked_mul(elements, dtype_bits(spec.dtype), name), 7, name) / 8;
  spec.byte_offset = arena_bytes_;
  arena_bytes_ = checked_add(arena_bytes_, spec.bytes, name);
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.init = init;
  spec.decay = decay;
  spec.kind = kind;
  spec.elements = static_cast<std::int64_t>(elements);
  spec.offset = arena_elements_;
  if (kind == ValueKind::floats || kind == ValueKind::quants) parameters_ += spec.elements;
  arena_elements_ += spec.elements;
  specs_.push_back(std::move(spec));
}

// Adds neighbouring matrices, which a GEMM reads as one.
void TensorTable::add_matrices(WeightScheme scheme, const std::vector<Matrix>& matrices) {
  begin_group();
  if (scheme == WeightScheme::none) {
    for (const Matrix& m : matrices) add(weight_of(m.module), {m.out, m.in}, m.init, true);
    return;
  }
  quantized_ = true;
  const bool grouped = scheme == WeightScheme::int4;
  const DType q = grouped ? DType::u4 : scheme == WeightScheme::int8 ? DType::i8 : DType::e4m3;
  for (const Matrix& m : matrices) add(weight_of(m.module), {m.out, m.in}, m.init, true, ValueKind::quants, q);
  const auto of_groups = [](const Matrix& m) { return std::vector<std::int64_t>{m.out, quant_groups(m.in)}; };
  begin_group();
  for (const Matrix& m : matrices) {
    add(scales_of(weight_of(m.module)), grouped ? of_groups(m) : std::vector<std::int64_t>{m.out}, Init::ones, false,
        ValueKind::scales, grouped ? DType::f16 : DType::f32);
  }
  begin_group();
  for (const Matrix& m : matrices) {
    if (grouped) add(zeros_of(weight_of(m.module)), of_groups(m), Init::zeros, false, ValueKind::zeros, DType::u8);
  }
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
  // Neighbouring matrices and, behind them, their biases, which are neighbours too.
  const auto add_linears = [&](const std::vector<Matrix>& matrices, bool biased) {
    add_matrices(config.quantization.weights, matrices);
    if (!biased) return;
    begin_group();
    for (const Matrix& m : matrices) add(bias_of(m.module), {m.out}, Init::zeros, false);
  };
  const bool attention = config.attention_bias, mlp = config.mlp_bias;
  add_matrices(WeightScheme::none, {{LlamaNames::kEmbedding, V, C, Init::normal}});
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const LlamaNames::Layer names(l);
    add_norm(names.input_norm);
    add_linears({{names.q, q, C, Init::normal}, {names.k, kv, C, Init::normal}, {names.v, kv, C, Init::normal}},
                attention);
    add_linears({{names.output, C, q, Init::normal_residual}}, attention);
    add_norm(names.post_norm);
    add_linears({{names.gate, F, C, Init::normal}, {names.up, F, C, Init::normal}}, mlp);
    add_linears({{names.down, C, F, Init::normal_residual}}, mlp);
  }
  add_norm(LlamaNames::kFinalNorm);
  if (!config.tied_embeddings) add_matrices(config.quantization.head, {{LlamaNames::kHead, V, C, Init::normal}});
}

void TensorTable::add_gpt_neox(const ModelConfig& config) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size, V = config.vocab_size;
  const auto add_linear = [&](const std::string& module, std::int64_t out, std::int64_t in, Init init, bool bias) {
    add_matrices(config.quantization.weights, {{module, out, in, init}});
    begin_group();
    if (bias) add(bias_of(module), {out}, Init::zeros, false);
  };
  const auto add_norm = [&](const std::string& module) {
    begin_group();
    add(weight_of(module), {C}, Init::ones, false);
    begin_group();
    add(bias_of(module), {C}, Init::zeros, false);
  };
  add_matrices(WeightScheme::none, {{NeoxNames::kEmbedding, V, C, Init::normal}});
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
  add_matrices(config.quantization.head, {{NeoxNames::kHead, V, C, Init::normal}});
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
  if (table.quantized()) fail(Exit::internal, "%s: a quantised model has no arena of one type", name);
  MemoryPlan plan(name);
  plan.add(checked_mul(static_cast<std::uint64_t>(table.arena_elements()), element_bytes, name));
  return plan;
}

}  // namespace weft
