// Qwen2 and Qwen2.5 (Yang et al., 2024): a Llama with biases of q, k and v.
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"
#include "llmc/model/limits.h"

namespace weft {

void read_qwen_windows(const HfObject& config, ModelConfig& model) {
  std::int64_t first = 0;
  if (config.flag("use_sliding_window") && !config.has("layer_types"))
    first = config.integer("max_window_layers", 0, kMaxLayers, 28);
  read_layer_windows(
      config, model, [first](std::int64_t l) { return l >= first; }, 4096);
}

namespace {

void set_fixed(ModelConfig& config) {
  set_llama_block(config);
  config.qkv_bias = true;  // no key of config.json says so
}

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model, {.kv_heads = 32});
  read_qwen_windows(config, model);
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  write_layer_windows(model, config);
}

}  // namespace

constinit const Family kQwen2 = {
    .name = "qwen2",
    .set_fixed = set_fixed,
    .hf = {.architecture = "Qwen2ForCausalLM", .from_hf = from_hf, .to_hf = to_hf, .max_positions = 32768},
};

}  // namespace weft
