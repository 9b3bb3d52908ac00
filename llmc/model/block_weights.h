// The weights of a model as pointers, on either device: one description for training, paged inference, the persistent kernel
// and the CPU. T is the storage type, const where nobody writes. Packed is a device's form of a quantised matrix: as the file
// has it (QuantizedMatrix), or as a GPU reads it (cuda::PackedMatrix).
//
// A gradient has the same shape: ModelWeights<float> over the arena of the gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/range.h"
#include "llmc/model/quantization.h"
#include "llmc/model/tensor_names.h"
#include "llmc/model/tensor_table.h"

namespace weft {

template <typename T>
struct NormWeights {
  T* weight = nullptr;  // [C]; of heads [HS]
  T* bias = nullptr;    // [C]; null with RMSNorm
};

// A matrix [out, in], row-major: plain or packed.
template <typename T, typename Packed = QuantizedMatrix>
struct Weight {
  T* plain = nullptr;  // null where it is packed
  Packed packed = {};  // empty where it is plain
};

// What an adapter (lora.h) adds to some outputs of a linear layer: y[:, rows] += scale (x down^T) up^T. Rank and scale are those
// of the adapter.
template <typename T>
struct LowRank {
  T* down = nullptr;  // [rank, in]
  T* up = nullptr;    // [rows.size(), rank]
  Range rows;         // of one module
};

template <typename T, typename Packed = QuantizedMatrix>
struct Linear {
  Weight<T, Packed> weight;  // [out, in]
  T* bias = nullptr;         // [out]; null where the layer has none
  std::vector<LowRank<T>> low_rank = {};
};

template <typename T, typename Packed = QuantizedMatrix>
struct BlockWeights {
  NormWeights<T> input_norm, post_norm;
  Linear<T, Packed> qkv;                              // [q + 2 kv, C]; the order of its rows is ModelConfig::qkv_layout
  Linear<T, Packed> output;                           // [C, q]
  Linear<T, Packed> up;                               // [F, C]; with SwiGLU [2 F, C]: gate, then up
  Linear<T, Packed> down;                             // [C, F]
  NormWeights<T> q_norm = {}, k_norm = {};            // of each head; null without ModelConfig::qk_norm
  NormWeights<T> attention_norm = {}, mlp_norm = {};  // null without ModelConfig::post_norms

  Linear<T, Packed>& linear(BlockLinear which) {
    return const_cast<Linear<T, Packed>&>(std::as_const(*this).linear(which));
  }
  const Linear<T, Packed>& linear(BlockLinear which) const {
    switch (which) {
      case BlockLinear::qkv:
        return qkv;
      case BlockLinear::output:
        return output;
      case BlockLinear::up:
        return up;
      case BlockLinear::down:
        return down;
    }
    fail(Exit::internal, "unknown linear layer");
  }
};

template <typename T, typename Packed = QuantizedMatrix>
struct ModelWeights {
  T* embedding = nullptr;  // [V, C]
  std::vector<BlockWeights<T, Packed>> blocks;
  NormWeights<T> final_norm;
  Weight<T, Packed> head;  // [V, C]; the embedding where tied

  // For sections (parameter_sections()) that lie in places of their own (SectionBuffers): moves the pointers into section s by
  // by[s] elements.
  void move_sections(std::span<const std::int64_t> by) {
    const auto move = [](std::int64_t elements, std::initializer_list<T**> pointers) {
      for (T** pointer : pointers) {
        if (*pointer != nullptr) *pointer += elements;
      }
    };
    for (std::size_t l = 0; l < blocks.size(); ++l) {
      BlockWeights<T, Packed>& block = blocks[l];
      for (NormWeights<T>* norm : {&block.input_norm, &block.post_norm, &block.q_norm, &block.k_norm,
                                   &block.attention_norm, &block.mlp_norm}) {
        move(by[1 + l], {&norm->weight, &norm->bias});
      }
      for (Linear<T, Packed>* linear : {&block.qkv, &block.output, &block.up, &block.down}) {
        move(by[1 + l], {&linear->weight.plain, &linear->bias});
      }
    }
    move(by[blocks.size()], {&final_norm.weight, &final_norm.bias});
    move(by.front(), {&embedding});
    const bool tied = by.size() == 1 + blocks.size();
    move(tied ? by.front() : by.back(), {&head.plain});
  }
};

// The weights of a model whose tensors `source` finds:
//   T* source.weight(module)      null where it is quantised; Exit::internal where there is none
//   T* source.bias(module)        null where there is none
//   Packed source.packed(modules) the quantised matrix of modules that are neighbours; empty where they are floats
template <typename T, typename Packed, typename Source>
ModelWeights<T, Packed> bind_weights(const ModelConfig& config, const Source& source) {
  const ModelNames& names = names_of(config);
  const auto norm = [&](const std::string& module) {
    return NormWeights<T>{source.weight(module), source.bias(module)};
  };
  const auto linear = [&](const std::vector<std::string>& modules) {
    return Linear<T, Packed>{{source.weight(modules.front()), source.packed(modules)}, source.bias(modules.front())};
  };
  ModelWeights<T, Packed> weights;
  weights.embedding = source.weight(names.embedding);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames block = names.block(l);
    weights.blocks.push_back({norm(block.input_norm), norm(block.post_norm), linear(block.qkv), linear(block.output),
                              linear(block.up), linear(block.down)});
    BlockWeights<T, Packed>& bound = weights.blocks.back();
    if (config.qk_norm) bound.q_norm = norm(block.q_norm), bound.k_norm = norm(block.k_norm);
    if (config.post_norms) bound.attention_norm = norm(block.attention_norm), bound.mlp_norm = norm(block.mlp_norm);
  }
  weights.final_norm = norm(names.final_norm);
  weights.head = config.tied_embeddings ? Weight<T, Packed>{weights.embedding, {}} : linear({names.head}).weight;
  return weights;
}

// Which of the two positions of a TensorSpec an arena goes by.
enum class Offsets {
  bytes,     // each tensor lies in the dtype of its spec: the parameters of a model
  elements,  // one type for all tensors: gradients, moments, parameters that were read into one type
};

// Finds tensors in an arena of the table's layout. Exit::internal where the table has a tensor in a type of another size than
// T. Quantised matrices are found in an arena by bytes.
template <typename T>
class ArenaSource {
 public:
  ArenaSource(const TensorTable& table, T* arena, Offsets offsets) : table_(table), arena_(arena), offsets_(offsets) {}

  T* weight(const std::string& module) const { return floats(table_.at(weight_of(module))); }
  T* bias(const std::string& module) const {
    const TensorSpec* spec = table_.find(bias_of(module));
    return spec != nullptr ? floats(*spec) : nullptr;
  }
  QuantizedMatrix packed(const std::vector<std::string>& modules) const {
    const std::string name = weight_of(modules.front());
    const TensorSpec& spec = table_.at(name);
    if (spec.kind != ValueKind::quants) return {};
    if (offsets_ != Offsets::bytes) fail(Exit::internal, "%s: quantised, in an arena of one type", name.c_str());
    const WeightFormat& format = weight_format(spec.dtype);
    return format.matrix(bytes(spec), bytes(table_.at(scales_of(name))),
                         format.grouped ? bytes(table_.at(zeros_of(name))) : nullptr);
  }

 private:
  T* floats(const TensorSpec& spec) const {
    if (spec.kind != ValueKind::floats) return nullptr;
    if (offsets_ == Offsets::elements) return arena_ + spec.offset;
    if (dtype_bytes(spec.dtype) != sizeof(T)) {
      fail(Exit::internal, "%s: stored as %s, bound as a type of %zu bytes", spec.name.c_str(), dtype_name(spec.dtype),
           sizeof(T));
    }
    return reinterpret_cast<T*>(bytes(spec));
  }
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  Byte* bytes(const TensorSpec& spec) const { return reinterpret_cast<Byte*>(arena_) + spec.byte_offset; }

  const TensorTable& table_;
  T* arena_;
  Offsets offsets_;
};

// The weights in an arena of the layout of `table`, which is that of `config`.
template <typename T>
ModelWeights<T> bind_weights(const ModelConfig& config, const TensorTable& table, T* arena, Offsets offsets) {
  return bind_weights<T, QuantizedMatrix>(config, ArenaSource<T>(table, arena, offsets));
}

}  // namespace weft
