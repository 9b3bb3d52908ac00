// GPT-NeoX (Black et al., 2022): Pythia.
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"
#include "llmc/model/limits.h"

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

constexpr HfActivation kActivations[] = {{"gelu", Activation::gelu},
                                         {"gelu_python", Activation::gelu},
                                         {"gelu_new", Activation::gelu_tanh},
                                         {"gelu_fast", Activation::gelu_tanh},
                                         {"gelu_pytorch_tanh", Activation::gelu_tanh},
                                         {"gelu_python_tanh", Activation::gelu_tanh},
                                         {"gelu_accurate", Activation::gelu_tanh}};

void from_hf(const HfObject& config, ModelConfig& model) {
  model.head_dim = divided_head_dim(config, model);
  if (config.has("head_dim") && config.integer("head_dim", 2, kMaxHeadDim) != model.head_dim) {
    config.expected("head_dim", "hidden_size / num_attention_heads = " + std::to_string(model.head_dim));
  }
  model.norm = NormKind::layernorm;
  model.tied_embeddings = false;  // weft stores a head of its own
  model.parallel_residual = config.flag("use_parallel_residual", true);
  model.qkv_bias = model.output_bias = config.flag("attention_bias", true);
}

void to_hf(const ModelConfig& model, Json& config) {
  config["use_parallel_residual"] = model.parallel_residual;
  config["attention_bias"] = model.output_bias;
}

}  // namespace

constinit const Family kGptNeox = {
    .name = "gpt_neox",
    .names = {"gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", block_names, true},
    .published = DType::f16,
    .set_fixed = set_fixed,
    .read = read,
    .hf = {.architecture = "GPTNeoXForCausalLM",
           .activations = kActivations,
           .norm_eps_key = "layer_norm_eps",
           .norm_eps = 1e-5,
           .from_hf = from_hf,
           .to_hf = to_hf,
           .rope_theta_key = "rotary_emb_base",
           .rotary_fraction_key = "rotary_pct",
           .rotary_fraction = 0.25},
};

}  // namespace weft
