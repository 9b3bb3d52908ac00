#include "llmc/model/tensor_table.h"

#include "llmc/base/checked.h"
#include "llmc/model/lora.h"
#include "llmc/model/tensor_names.h"

namespace weft {

namespace {

// So that norms begin by multiplying by 1.
Init norm_init(const ModelConfig& config) {
  return config.norm_weight_offset == 0 ? Init::ones : Init::zeros;
}

}  // namespace

TensorTable::TensorTable(const ModelConfig& config, DType storage) : storage_(storage) {
  const ModelNames& names = names_of(config);
  const std::int64_t C = config.hidden_size, V = config.vocab_size;
  add_matrices(nullptr, {{names.embedding, V, C, Init::normal}});
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames block = names.block(l);
    add_norm(config, block.input_norm);
    if (names.norms_first) add_norm(config, block.post_norm);
    add_linear(config, l, BlockLinear::qkv);
    for (const std::string& norm : {block.q_norm, block.k_norm}) {
      if (config.qk_norm) add_vector(weight_of(norm), config.head_dim, norm_init(config));
    }
    add_linear(config, l, BlockLinear::output);
    if (config.post_norms) add_norm(config, block.attention_norm);
    if (!names.norms_first) add_norm(config, block.post_norm);
    add_linear(config, l, BlockLinear::up);
    add_linear(config, l, BlockLinear::down);
    if (config.post_norms) add_norm(config, block.mlp_norm);
  }
  add_norm(config, names.final_norm);
  if (!config.tied_embeddings) add_matrices(config.quantization.head, {{names.head, V, C, Init::normal}});
  begin_group();  // the arenas end on a group boundary too
}

TensorTable::TensorTable(const ModelConfig& config, const LoraConfig& lora, DType storage) : storage_(storage) {
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames block = names_of(config).block(l);
    for (const LoraTarget& target : lora.targets) {
      const std::string& module = block.linear(target.linear)[target.module];
      const std::int64_t in = linear_size(config, target.linear).C;
      const std::int64_t rows = module_rows(config, target.linear, target.module).size();
      add_matrices(nullptr, {{lora_down_of(module), lora.rank, in, Init::uniform}});
      add_matrices(nullptr, {{lora_up_of(module), rows, lora.rank, Init::zeros}});
    }
  }
  for (TensorSpec& spec : specs_) spec.hidden_matrix = true;
  begin_group();
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

// Adds neighbouring matrices, which a GEMM reads as one. `format`: null: floats.
void TensorTable::add_matrices(const WeightFormat* format, const std::vector<Matrix>& matrices) {
  begin_group();
  if (format == nullptr) {
    for (const Matrix& m : matrices) add(weight_of(m.module), {m.out, m.in}, m.init, true);
    return;
  }
  quantized_ = true;
  for (const Matrix& m : matrices) {
    add(weight_of(m.module), {m.out, m.in}, m.init, true, ValueKind::quants, format->dtype);
  }
  const auto of_groups = [](const Matrix& m) { return std::vector<std::int64_t>{m.out, quant_groups(m.in)}; };
  begin_group();
  for (const Matrix& m : matrices) {
    add(scales_of(weight_of(m.module)), format->grouped ? of_groups(m) : std::vector<std::int64_t>{m.out}, Init::ones,
        false, ValueKind::scales, format->scale_dtype());
  }
  begin_group();
  for (const Matrix& m : matrices) {
    if (format->grouped)
      add(zeros_of(weight_of(m.module)), of_groups(m), Init::zeros, false, ValueKind::zeros, DType::u8);
  }
}

void TensorTable::add_vector(std::string name, std::int64_t size, Init init) {
  begin_group();
  add(std::move(name), {size}, init, false);
}

void TensorTable::add_norm(const ModelConfig& config, const std::string& module) {
  add_vector(weight_of(module), config.hidden_size, norm_init(config));
  if (config.norm == NormKind::layernorm) add_vector(bias_of(module), config.hidden_size, Init::zeros);
}

// Neighbouring matrices and, behind them, their biases, which are neighbours too.
void TensorTable::add_linear(const ModelConfig& config, std::int64_t layer, BlockLinear linear) {
  const std::vector<std::string> modules = names_of(config).block(layer).linear(linear);
  const bool writes_residual = linear == BlockLinear::output || linear == BlockLinear::down;
  std::vector<Matrix> matrices;
  for (const std::string& module : modules) {
    matrices.push_back({module, module_rows(config, linear, matrices.size()).size(), linear_size(config, linear).C,
                        writes_residual ? Init::normal_residual : Init::normal});
  }
  const std::size_t first = specs_.size();
  add_matrices(config.quantization.weights, matrices);
  for (std::size_t s = first; s < specs_.size(); ++s) {
    specs_[s].hidden_matrix = specs_[s].kind == ValueKind::floats || specs_[s].kind == ValueKind::quants;
  }
  if (!has_bias(config, linear)) return;
  begin_group();
  for (const Matrix& m : matrices) add(bias_of(m.module), {m.out}, Init::zeros, false);
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
