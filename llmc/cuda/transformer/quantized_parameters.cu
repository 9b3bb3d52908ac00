#include "llmc/cuda/transformer/quantized_parameters.cuh"

#include "llmc/model/tensor_names.h"

namespace weft::cuda {

template <typename S>
QuantizedParameters<S>::QuantizedParameters(const ModelConfig& config)
    : config_(config), table_(config, storage_dtype<S>()), plan_("parameters"), targets_(table_.specs().size()) {
  using enum PackedPlace::Part;
  place_floats();
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    Layer layer;
    if (config.family == Family::gpt_neox) {
      const NeoxNames::Layer names(l);
      layer = {place_matrix({{names.qkv}}), place_matrix({{names.dense}}), place_matrix({{names.up}}),
               place_matrix({{names.down}})};
    } else {
      const LlamaNames::Layer names(l);
      layer = {place_matrix({{names.q}, {names.k}, {names.v}}), place_matrix({{names.output}}),
               place_matrix({{names.gate, gate}, {names.up, up}}), place_matrix({{names.down}})};
    }
    layers_.push_back(layer);
  }
  if (!config.tied_embeddings)
    head_ = place_matrix({{config.family == Family::gpt_neox ? NeoxNames::kHead : LlamaNames::kHead}});
}

// Tensors that are contiguous in the table's arena stay contiguous: q, k and v are read as one matrix.
template <typename S>
void QuantizedParameters<S>::place_floats() {
  const std::span<const TensorSpec> specs = table_.specs();
  for (std::size_t first = 0, end = 0; first < specs.size(); first = end) {
    end = first + 1;
    if (specs[first].kind != ValueKind::floats) continue;
    std::uint64_t bytes = specs[first].bytes;
    for (; end < specs.size() && specs[end].kind == ValueKind::floats &&
           specs[end].byte_offset == specs[first].byte_offset + bytes;
         ++end)
      bytes += specs[end].bytes;
    const std::uint64_t at = plan_.add(bytes);
    for (std::size_t i = first; i < end; ++i)
      targets_[i].floats_at = at + specs[i].byte_offset - specs[first].byte_offset;
  }
}

template <typename S>
typename QuantizedParameters<S>::Matrix QuantizedParameters<S>::place_matrix(const std::vector<Part>& parts) {
  Matrix matrix;
  const TensorSpec& first = table_.at(weight_of(parts[0].module));
  if (first.kind != ValueKind::quants) return matrix;
  const bool swiglu = parts[0].part != PackedPlace::Part::rows;
  std::int64_t rows = 0;
  for (const Part& part : parts) rows += table_.at(weight_of(part.module)).shape[0];
  rows = swiglu ? packed_rows(rows / 2, true) : rows;
  matrix.dtype = first.dtype;
  matrix.K = first.shape[1];
  matrix.blocks_at = plan_.add(packed_block_bytes(matrix.dtype, rows, matrix.K));
  if (matrix.dtype != DType::u4) matrix.scales_at = plan_.add(packed_scale_bytes(matrix.dtype, rows));
  std::int64_t before = 0;
  for (const Part& part : parts) {
    const std::string name = weight_of(part.module);
    for (const std::string& tensor : {name, scales_of(name), zeros_of(name)}) {
      if (table_.find(tensor) == nullptr) continue;
      Target& target = targets_[table_.index_of(tensor)];
      target.matrix = matrix;
      target.place = {before, part.part};
    }
    if (!swiglu) before += table_.at(name).shape[0];
  }
  return matrix;
}

template <typename S>
PackedMatrix QuantizedParameters<S>::Matrix::in(std::byte* arena) const {
  PackedMatrix packed;
  if (dtype == DType::f32) return packed;
  packed.blocks = arena + blocks_at;
  packed.row_scales = dtype == DType::u4 ? nullptr : reinterpret_cast<float*>(arena + scales_at);
  packed.dtype = dtype;
  return packed;
}

template <typename S>
std::vector<ParameterTarget<S>> QuantizedParameters<S>::targets(std::byte* arena) const {
  std::vector<ParameterTarget<S>> targets;
  for (const Target& target : targets_) {
    targets.push_back(
        {reinterpret_cast<S*>(arena + target.floats_at), target.matrix.in(arena), target.place, target.matrix.K});
  }
  return targets;
}

template <typename S>
const S* QuantizedParameters<S>::floats(std::byte* arena, const std::string& name) const {
  const TensorSpec* spec = table_.find(name);
  if (spec == nullptr || spec->kind != ValueKind::floats) return nullptr;
  return reinterpret_cast<const S*>(arena + targets_[table_.index_of(name)].floats_at);
}
template <typename S>
Norm<S> QuantizedParameters<S>::norm(std::byte* arena, const std::string& module) const {
  return {floats(arena, weight_of(module)), floats(arena, bias_of(module))};
}
template <typename S>
InferenceLinear<S> QuantizedParameters<S>::linear(std::byte* arena, const std::string& module,
                                                  const Matrix& matrix) const {
  return {floats(arena, weight_of(module)), floats(arena, bias_of(module)), matrix.in(arena)};
}

template <typename S>
InferenceWeights<S> QuantizedParameters<S>::weights(std::byte* arena) const {
  InferenceWeights<S> weights;
  const auto bind = [&](const auto& names, const std::string& qkv, const std::string& output, const std::string& up,
                        const Layer& layer) {
    weights.layers.push_back({norm(arena, names.input_norm), norm(arena, names.post_norm),
                              linear(arena, qkv, layer.qkv), linear(arena, output, layer.output),
                              linear(arena, up, layer.up), linear(arena, names.down, layer.down)});
  };
  const bool neox = config_.family == Family::gpt_neox;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    if (neox) {
      const NeoxNames::Layer names(static_cast<std::int64_t>(l));
      bind(names, names.qkv, names.dense, names.up, layers_[l]);
    } else {
      const LlamaNames::Layer names(static_cast<std::int64_t>(l));
      bind(names, names.q, names.output, names.gate, layers_[l]);
    }
  }
  weights.embedding = floats(arena, weight_of(neox ? NeoxNames::kEmbedding : LlamaNames::kEmbedding));
  weights.final_norm = norm(arena, neox ? NeoxNames::kFinalNorm : LlamaNames::kFinalNorm);
  weights.head = config_.tied_embeddings ? InferenceLinear<S>{weights.embedding, nullptr, {}}
                                         : linear(arena, neox ? NeoxNames::kHead : LlamaNames::kHead, head_);
  return weights;
}

template class QuantizedParameters<bf16>;
template class QuantizedParameters<fp16>;

}  // namespace weft::cuda
