#include "llmc/model/quantized_weights.h"

#include "llmc/model/tensor_names.h"

namespace weft {

namespace {

// The quantised matrix that begins with `module`: it may contain neighbouring modules. Empty if `module` is not
// quantised.
QuantizedMatrix find_matrix(const TensorTable& table, const std::byte* arena, const std::string& module) {
  const std::string name = weight_of(module);
  const TensorSpec* spec = table.find(name);
  QuantizedMatrix matrix;
  if (spec == nullptr || spec->kind != ValueKind::quants) return matrix;
  const std::byte* scales = arena + table.at(scales_of(name)).byte_offset;
  matrix.data = arena + spec->byte_offset;
  matrix.dtype = spec->dtype;
  if (spec->dtype == DType::u4) {
    matrix.group_scales = reinterpret_cast<const std::uint16_t*>(scales);
    matrix.zeros = reinterpret_cast<const std::uint8_t*>(arena + table.at(zeros_of(name)).byte_offset);
  } else {
    matrix.row_scales = reinterpret_cast<const float*>(scales);
  }
  return matrix;
}

}  // namespace

QuantizedWeights bind_quantized(const ModelConfig& config, const TensorTable& table, const std::byte* arena) {
  const auto find = [&](const std::string& module) { return find_matrix(table, arena, module); };
  QuantizedWeights weights;
  const bool neox = config.family == Family::gpt_neox;
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    if (neox) {
      const NeoxNames::Layer names(l);
      weights.layers.push_back({find(names.qkv), find(names.dense), find(names.up), find(names.down)});
    } else {
      const LlamaNames::Layer names(l);
      weights.layers.push_back({find(names.q), find(names.output), find(names.gate), find(names.down)});
    }
  }
  weights.head = find(neox ? NeoxNames::kHead : LlamaNames::kHead);
  return weights;
}

}  // namespace weft
