// Mistral (Jiang et al., 2023): a Llama whose positions may see a window of keys alone. Mistral 7B, Nemo, Small, Ministral.
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"
#include "llmc/model/limits.h"

namespace weft {

namespace {

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model, {.kv_heads = 8});
}

std::optional<std::int64_t> window(const HfObject& config, const ModelConfig& /*model*/) {
  if (config.values().contains("sliding_window") && !config.has("sliding_window")) return std::nullopt;
  return config.integer("sliding_window", 1, kMaxPositions, 4096);
}

void to_hf(const ModelConfig& model, Json& config) {
  config["num_key_value_heads"] = model.num_kv_heads;
  config["head_dim"] = model.head_dim;
  config["sliding_window"] = nullptr;
}

}  // namespace

constinit const Family kMistral = {
    .name = "mistral",
    .names = kLlamaNames,
    .published = DType::bf16,
    .set_fixed = set_llama_block,
    .read = read_llama_block,
    .hf = {.architecture = "MistralForCausalLM",
           .activations = kSilu,
           .norm_eps_key = "rms_norm_eps",
           .norm_eps = 1e-6,
           .from_hf = from_hf,
           .to_hf = to_hf,
           .window = window,
           .max_positions = 4096 * 32},
};

}  // namespace weft
