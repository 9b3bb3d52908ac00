// Llama (Touvron et al., 2023) and the models that share its architecture: SmolLM2, TinyLlama and others.
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"

namespace weft {

BlockNames llama_block_names(std::int64_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  return {prefix + "input_layernorm",
          prefix + "post_attention_layernorm",
          {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
          {attention + "o_proj"},
          {mlp + "gate_proj", mlp + "up_proj"},
          {mlp + "down_proj"},
          attention + "q_norm",
          attention + "k_norm"};
}

void set_llama_block(ModelConfig& config) {
  config.activation = Activation::swiglu;
  config.qkv_layout = QkvLayout::concatenated;
}

void read_llama_block(const Json& object, const std::string& source, ModelConfig& config) {
  if (object.contains("activation")) {
    const std::string name = json_string(object, "activation", source);
    if (name != activation_name(config.activation)) {
      fail(Exit::bad_file, "%s: activation: got %s, expected %s", source.c_str(), escaped(name).c_str(),
           activation_name(config.activation));
    }
  }
  if (object.contains("mlp_bias")) config.mlp_bias = json_bool(object, "mlp_bias", source);
  if (config.parallel_residual) {
    fail(Exit::bad_file, "%s: %s: parallel_residual does not exist in this family", source.c_str(),
         config.family.c_str());
  }
}

namespace {

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model);
  read_biases(config, model);
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  write_biases(model, config);
}

}  // namespace

constinit const Family kLlama = {
    .name = "llama",
    .hf = {.architecture = "LlamaForCausalLM", .from_hf = from_hf, .to_hf = to_hf},
};

}  // namespace weft
