// LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021): a frozen model, and beside chosen matrices of its
// blocks two small ones that are trained, y = W x + (alpha / rank) B (A x). A and B of all layers are an adapter: a file of
// its own, in which they are called as PEFT calls them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/base/range.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/config.h"

namespace weft {

// A matrix of every block that an adapter may have a part for, by its short name.
struct LoraTarget {
  std::string_view name;
  BlockLinear linear;
  std::size_t module;  // which of BlockNames::linear(linear)

  bool operator==(const LoraTarget&) const = default;
};
using LoraTargets = std::span<const LoraTarget>;

// Those of a Llama and its like: q, k, v, o, gate, up, down. Of a GPT-NeoX, whose q, k and v are one matrix and whose MLP has no
// gate: qkv, o, up, down.
LoraTargets llama_lora_targets();
LoraTargets lora_targets(const ModelConfig& config);

struct LoraConfig {
  std::int64_t rank = 0;
  double alpha = 0;
  std::vector<LoraTarget> targets;  // some of the model's lora_targets(), in their order, at least one

  float scale() const { return static_cast<float>(alpha / static_cast<double>(rank)); }
  std::string target_names() const;  // "q,v"; "all" where it has all of the model's
  bool operator==(const LoraConfig&) const = default;
};

// "q,v" or "all" of a model's targets. Exit::usage with `option` for another name, or none.
std::vector<LoraTarget> parse_lora_targets(const std::string& option, const std::string& text, LoraTargets model);
// Exit::usage for what is wrong whatever the model is.
void check_lora_targets(const std::string& option, const std::string& text);

// Why a model of this configuration cannot have the adapter: a matrix is smaller than its rank, or it is that of another family.
// Empty: it can.
std::string lora_unsupported_reason(const LoraConfig& lora, const ModelConfig& config);

// The object "lora" of an adapter file: rank, alpha, targets. from_json: Exit::bad_file, also for a target that the model has not.
Json lora_to_json(const LoraConfig& lora);
LoraConfig lora_from_json(const Json& object, const std::string& source, LoraTargets model);

// The two modules of an adapter beside `module`: PEFT's names.
std::string lora_down_of(const std::string& module);  // "<module>.lora_A"
std::string lora_up_of(const std::string& module);    // "<module>.lora_B"

// The rows of a block's linear layer that its module number `module` gives.
Range module_rows(const ModelConfig& config, BlockLinear linear, std::size_t module);

// Sets Linear::low_rank of all blocks of `weights` from an arena of the layout of `table`, which is that of the adapter.
template <typename T>
void bind_adapter(const ModelConfig& config, const LoraConfig& lora, const TensorTable& table, T* arena,
                  Offsets offsets, ModelWeights<T>& weights) {
  const ArenaSource<T> source(table, arena, offsets);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames block = names_of(config).block(l);
    for (const LoraTarget& target : lora.targets) {
      const std::string& module = block.linear(target.linear)[target.module];
      weights.blocks[static_cast<std::size_t>(l)]
          .linear(target.linear)
          .low_rank.push_back({source.weight(lora_down_of(module)), source.weight(lora_up_of(module)),
                               module_rows(config, target.linear, target.module)});
    }
  }
}

// Whether a backward pass computes the gradient of this linear layer's input. Beside an adapter nothing below the first layer is
// trained, nor between the embedding and what the adapter has of that layer's attention.
bool input_gradient_is_read(const std::optional<LoraConfig>& lora, std::int64_t layer, BlockLinear linear);

// weight [rows, in] += scale up [rows, rank] down [rank, in], each sum in the order of the ranks' rows: the same bits for any
// number of threads.
void add_low_rank(float* weight, const float* down, const float* up, std::int64_t rows, std::int64_t in,
                  std::int64_t rank, float scale);

}  // namespace weft
