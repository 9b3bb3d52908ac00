// GPT-NeoX (Black et al., 2022): Pythia.
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"

namespace weft {

namespace {

BlockNames block_names(std::int64_t layer) {
  const std::string prefix = "gpt_neox.layers." + std::to_string(layer) + ".";
  return {prefix + "input_layernorm",   prefix + "post_attention_layernorm", {prefix + "attention.query_key_value"},
          {prefix + "attention.dense"}, {prefix + "mlp.dense_h_to_4h"},      {prefix + "mlp.dense_4h_to_h"}};
}

void set_fixed(ModelConfig& config) {
  config.activation = Activation::gelu;
  config.qkv_layout = QkvLayout::per_head;
  config.mlp_bias = true;  // always there: no key of config.json says so
}

void read(const Json& object, const std::string& source, ModelConfig& config) {
  if (object.contains("activation")) {
    const std::string name = json_string(object, "activation", source);
    const std::string erf = activation_name(Activation::gelu), tanh = activation_name(Activation::gelu_tanh);
    if (name != erf && name != tanh) {
      fail(Exit::bad_file, "%s: activation: got %s, expected %s or %s", source.c_str(), escaped(name).c_str(),
           erf.c_str(), tanh.c_str());
    }
    config.activation = name == tanh ? Activation::gelu_tanh : Activation::gelu;
  }
  if (object.contains("mlp_bias") && json_bool(object, "mlp_bias", source)) {
    fail(Exit::bad_file, "%s: gpt_neox: mlp_bias does not exist in this family, whose MLP always has biases",
         source.c_str());
  }
  const bool fits = config.num_kv_heads == config.num_heads && config.q_size() == config.hidden_size &&
                    config.norm == NormKind::layernorm && !config.tied_embeddings;
  if (!fits) {
    fail(Exit::bad_file, "%s: gpt_neox: expected heads x head_dim = hidden_size, no grouped heads, layernorm, untied",
         source.c_str());
  }
}

}  // namespace

constinit const Family kGptNeox = {"gpt_neox",
                                   {"gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", block_names, true},
                                   DType::f16,
                                   set_fixed,
                                   read};

}  // namespace weft
