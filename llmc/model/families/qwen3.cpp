// Qwen3 (Yang et al., 2025), the dense models: a Llama with norms of q's and k's heads.
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"

namespace weft {

namespace {

void set_fixed(ModelConfig& config) {
  set_llama_block(config);
  config.qk_norm = true;
}

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model, {.kv_heads = 32, .head_dim = 128});
  model.qkv_bias = model.output_bias = config.flag("attention_bias");
  read_qwen_windows(config, model);
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  config["attention_bias"] = model.output_bias;
  write_layer_windows(model, config);
}

}  // namespace

constinit const Family kQwen3 = {
    .name = "qwen3",
    .set_fixed = set_fixed,
    .hf = {.architecture = "Qwen3ForCausalLM", .from_hf = from_hf, .to_hf = to_hf, .max_positions = 32768},
};

}  // namespace weft
