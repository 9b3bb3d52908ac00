#include "llmc/cuda/inference/quantized_parameters.h"

#include "llmc/model/tensor_names.h"

namespace weft::cuda {

template <typename S>
QuantizedParameters<S>::QuantizedParameters(const ModelConfig& config)
    : config_(config), table_(config, storage_dtype<S>()), plan_("parameters"), targets_(table_.specs().size()) {
  place_floats();
  const ModelNames& names = names_of(config);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames block = names.block(l);
    for (const BlockLinear linear : kBlockLinears) {
      place_matrix(block.linear(linear), linear == BlockLinear::up && config.gated());
    }
  }
  if (!config.tied_embeddings) place_matrix({names.head}, false);
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
void QuantizedParameters<S>::place_matrix(const std::vector<std::string>& modules, bool gated) {
  const TensorSpec& first = table_.at(weight_of(modules.front()));
  if (first.kind != ValueKind::quants) return;
  std::int64_t rows = 0;
  for (const std::string& module : modules) rows += table_.at(weight_of(module)).shape[0];
  rows = gated ? packed_rows(rows / 2, true) : rows;
  Matrix matrix;
  matrix.dtype = first.dtype;
  matrix.K = first.shape[1];
  matrix.blocks_at = plan_.add(packed_block_bytes(matrix.dtype, rows, matrix.K));
  const std::uint64_t scale_bytes = packed_scale_bytes(matrix.dtype, rows);
  if (scale_bytes > 0) matrix.scales_at = plan_.add(scale_bytes);
  std::int64_t before = 0;
  for (const std::string& module : modules) {
    const std::string name = weight_of(module);
    const PackedPlace::Part part = !gated                      ? PackedPlace::Part::rows
                                   : module == modules.front() ? PackedPlace::Part::gate
                                                               : PackedPlace::Part::up;
    for (const std::string& tensor : {name, scales_of(name), zeros_of(name)}) {
      if (table_.find(tensor) == nullptr) continue;
      Target& target = targets_[table_.index_of(tensor)];
      target.matrix = matrix;
      target.place = {before, part};
    }
    if (!gated) before += table_.at(name).shape[0];
  }
}

template <typename S>
PackedMatrix QuantizedParameters<S>::Matrix::in(std::byte* arena) const {
  PackedMatrix packed;
  if (dtype == DType::f32) return packed;
  packed.blocks = arena + blocks_at;
  packed.row_scales = weight_format(dtype).grouped ? nullptr : reinterpret_cast<float*>(arena + scales_at);
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
const S* QuantizedParameters<S>::Source::floats(std::size_t index) const {
  if (of.table_.specs()[index].kind != ValueKind::floats) return nullptr;
  return reinterpret_cast<const S*>(arena + of.targets_[index].floats_at);
}
template <typename S>
PackedMatrix QuantizedParameters<S>::Source::packed(const std::vector<std::string>& modules) const {
  return of.targets_[of.table_.index_of(weight_of(modules.front()))].matrix.in(arena);
}

template <typename S>
DeviceWeights<S> QuantizedParameters<S>::weights(std::byte* arena) const {
  return bind_weights<const S, PackedMatrix>(config_, Source{*this, arena});
}

template class QuantizedParameters<bf16>;
template class QuantizedParameters<fp16>;

}  // namespace weft::cuda
