// Gemma 3 (Gemma Team, 2025), the text model: a Llama with GeGLU, norms of q's and k's heads and of what a branch gives, and
// windows in five of six layers, which rotate with a theta of their own. Norms multiply by 1 + weight.
#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"
#include "llmc/model/limits.h"

namespace weft {

namespace {

constexpr HfActivation kActivations[] = {{"gelu_pytorch_tanh", Activation::geglu_tanh}};

BlockNames block_names(std::int64_t layer) {
  BlockNames names = llama_block_names(layer);
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  names.attention_norm = prefix + "post_attention_layernorm";
  names.post_norm = prefix + "pre_feedforward_layernorm";
  names.mlp_norm = prefix + "post_feedforward_layernorm";
  return names;
}

void set_fixed(ModelConfig& config) {
  set_llama_block(config);
  config.activation = Activation::geglu_tanh;
  config.qk_norm = config.post_norms = config.scaled_embedding = true;
  config.norm_weight_offset = 1;
}

void read(const Json& object, const std::string& source, ModelConfig& config) {
  read_llama_block(object, source, config);
  for (const char* key : {"local_rope_theta", "attention_scale"}) {
    if (!object.contains(key)) fail(Exit::bad_file, "%s: %s: missing", source.c_str(), key);
  }
}

// sliding_window_pattern: every so many layers one sees all positions. transformers writes _sliding_window_pattern, too, beside
// layer_types, and does not read it.
void read_gemma_windows(const HfObject& config, ModelConfig& model) {
  const std::int64_t pattern =
      config.has("sliding_window_pattern") ? config.integer("sliding_window_pattern", 1, kMaxLayers) : 6;
  const std::vector<bool> sliding =
      sliding_layers(config, model, [&](std::int64_t l) { return (l + 1) % pattern != 0; });
  if (config.says_null("sliding_window") && std::find(sliding.begin(), sliding.end(), true) != sliding.end()) {
    config.expected("sliding_window", "the window of the layers that have one");
  }
  read_windows(config, model, sliding, 4096);
}

void from_hf(const HfObject& config, ModelConfig& model) {
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (config.has(key)) config.expected(key, "null: scores and logits are not capped");
  }
  if (config.flag("use_bidirectional_attention")) {
    config.expected("use_bidirectional_attention", "false: positions see those before them alone");
  }
  read_grouped_heads(config, model, {.kv_heads = 4, .head_dim = 256});
  model.qkv_bias = model.output_bias = config.flag("attention_bias");
  const std::int64_t scalar = config.integer("query_pre_attn_scalar", 1, kMaxWidth, 256);
  model.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  read_gemma_windows(config, model);
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  config["attention_bias"] = model.output_bias;
  config["query_pre_attn_scalar"] = std::llround(1 / (model.attention_scale * model.attention_scale));
  write_layer_windows(model, config);
  for (const char* key : {"use_sliding_window", "sliding_window_pattern", "_sliding_window_pattern"}) config.erase(key);
}

}  // namespace

constinit const Family kGemma3 = {
    .name = "gemma3_text",
    .names = {"model.embed_tokens", "model.norm", "lm_head", block_names, false},
    .set_fixed = set_fixed,
    .read = read,
    .hf = {.architecture = "Gemma3ForCausalLM",
           .activations = kActivations,
           .activation_key = "hidden_activation",
           .from_hf = from_hf,
           .to_hf = to_hf,
           .tied = true,
           .max_positions = 131072,
           .vocab_size = 262208,
           .num_heads = 8,
           .rope_theta = 1000000,
           .local_rope_theta = 10000,
           .multimodal = "gemma3"},
};

}  // namespace weft
