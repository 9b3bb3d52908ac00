#include "llmc/cuda/inference/quantized_parameters.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/model/tensor_names.h"

namespace weft::cuda {

template <typename S>
QuantizedParameters<S>::QuantizedParameters(const ModelConfig& config, const std::optional<LoraConfig>& lora,
                                            bool fp8_activations)
    : config_(config),
      table_(config, storage_dtype<S>()),
      plan_("parameters"),
      targets_(table_.specs().size()),
      lora_(lora) {
  place_floats();
  const ModelNames& names = names_of(config);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames block = names.block(l);
    for (const BlockLinear linear : kBlockLinears) {
      const bool gated = linear == BlockLinear::up && config.gated() && low_rank_hidden(lora, linear) == 0;
      place_matrix(block.linear(linear), gated && !fp8_activations, fp8_activations);
    }
  }
  if (!config.tied_embeddings) place_matrix({names.head}, false);
  place_adapter();
}

template <typename S>
void QuantizedParameters<S>::place_adapter() {
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    for (const BlockLinear linear : kBlockLinears) {
      const std::int64_t hidden = low_rank_hidden(lora_, linear);
      if (hidden == 0) continue;
      const LinearSize size = linear_size(config_, linear);
      const auto bytes = [&](std::int64_t rows) { return static_cast<std::uint64_t>(rows * hidden) * sizeof(S); };
      LowRankPart part{static_cast<std::size_t>(l), linear, hidden};
      part.down_at = plan_.add(bytes(size.C));
      part.up_at = plan_.add(bytes(size.OC));
      low_rank_.push_back(part);
    }
  }
}

template <typename S>
void QuantizedParameters<S>::load_adapter(const ModelFile& adapter, std::byte* arena) const {
  const auto copy = [&](const std::vector<float>& values, std::uint64_t at) {
    const auto fits = [](float value) { return !std::is_same_v<S, fp16> || std::abs(value) <= 65504; };
    if (!std::all_of(values.begin(), values.end(), fits)) {
      fail(Exit::bad_file, "%s: a value does not fit in f16. Use --dtype bf16", escaped(adapter.file().path()).c_str());
    }
    std::vector<S> stored(values.size());
    convert_from_f32(values.data(), storage_dtype<S>(), stored.data(), stored.size());
    check(cudaMemcpy(arena + at, stored.data(), stored.size() * sizeof(S), cudaMemcpyHostToDevice),
          "loading an adapter");
    check(cudaDeviceSynchronize(), "loading an adapter");  // the model's streams do not wait for this copy
  };
  const auto read = [&](const std::string& module) {
    const TensorSpec& spec = adapter.table().at(weight_of(module));
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    adapter.read_parameter(spec, values.data());
    return values;
  };
  const std::int64_t rank = lora_->rank;
  for (const LowRankPart& part : low_rank_) {
    const LinearSize size = linear_size(config_, part.linear);
    std::vector<float> down(static_cast<std::size_t>(part.hidden * size.C)),
        up(static_cast<std::size_t>(size.OC * part.hidden));
    std::int64_t first = 0;  // of the module's ranks
    for (const LoraTarget& target : lora_->targets) {
      if (target.linear != part.linear) continue;
      const std::string module =
          names_of(config_).block(static_cast<std::int64_t>(part.block)).linear(part.linear)[target.module];
      const std::vector<float> a = read(lora_down_of(module)), b = read(lora_up_of(module));
      std::copy(a.begin(), a.end(), down.begin() + first * size.C);
      const Range rows = module_rows(config_, part.linear, target.module);
      for (std::int64_t o = 0; o < rows.size(); ++o) {
        for (std::int64_t r = 0; r < rank; ++r) {
          up[static_cast<std::size_t>((rows.begin + o) * part.hidden + first + r)] =
              lora_->scale() * b[static_cast<std::size_t>(o * rank + r)];
        }
      }
      first += rank;
    }
    copy(down, part.down_at);
    copy(up, part.up_at);
  }
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
void QuantizedParameters<S>::place_matrix(const std::vector<std::string>& modules, bool gated, bool in_rows) {
  const TensorSpec& first = table_.at(weight_of(modules.front()));
  if (first.kind != ValueKind::quants) return;
  std::int64_t rows = 0;
  for (const std::string& module : modules) rows += table_.at(weight_of(module)).shape[0];
  rows = gated ? packed_rows(rows / 2, true) : rows;
  Matrix matrix;
  matrix.dtype = first.dtype;
  matrix.K = first.shape[1];
  matrix.in_rows = in_rows;
  matrix.blocks_at = plan_.add(in_rows ? static_cast<std::uint64_t>(rows * matrix.K)
                                       : packed_block_bytes(matrix.dtype, rows, matrix.K));
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
  packed.in_rows = in_rows;
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
  DeviceWeights<S> weights = bind_weights<const S, PackedMatrix>(config_, Source{*this, arena});
  for (const LowRankPart& part : low_rank_) {
    const auto at = [&](std::uint64_t offset) { return reinterpret_cast<const S*>(arena + offset); };
    weights.blocks[part.block].linear(part.linear).low_rank = {
        {at(part.down_at), at(part.up_at), {0, linear_size(config_, part.linear).OC}}};
  }
  return weights;
}

template class QuantizedParameters<bf16>;
template class QuantizedParameters<fp16>;

}  // namespace weft::cuda
