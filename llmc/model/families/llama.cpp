// Llama (Touvron et al., 2023) and the models that share its architecture: SmolLM2, TinyLlama and others.
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"

namespace weft {

namespace {

BlockNames block_names(std::int64_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  return {prefix + "input_layernorm",
          prefix + "post_attention_layernorm",
          {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
          {attention + "o_proj"},
          {mlp + "gate_proj", mlp + "up_proj"},
          {mlp + "down_proj"}};
}

void set_fixed(ModelConfig& config) {
  config.activation = Activation::swiglu;
  config.qkv_layout = QkvLayout::concatenated;
}

void read(const Json& object, const std::string& source, ModelConfig& config) {
  if (object.contains("activation")) {
    const std::string name = json_string(object, "activation", source);
    if (name != activation_name(Activation::swiglu)) {
      fail(Exit::bad_file, "%s: activation: got %s, expected %s", source.c_str(), escaped(name).c_str(),
           activation_name(Activation::swiglu));
    }
  }
  if (object.contains("mlp_bias")) config.mlp_bias = json_bool(object, "mlp_bias", source);
  if (config.parallel_residual) {
    fail(Exit::bad_file, "%s: llama: parallel_residual does not exist in this family", source.c_str());
  }
}

}  // namespace

constinit const Family kLlama = {
    "llama", {"model.embed_tokens", "model.norm", "lm_head", block_names, false}, DType::bf16, set_fixed, read};

}  // namespace weft
