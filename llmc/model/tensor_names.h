// The Hugging Face names of the modules that have parameters, each written once: TensorTable declares the parameters by
// them, and the layouts (llama_layout.h, neox_layout.h) find them again. The parameters of a module are called
// "<module>.weight" and "<module>.bias".
#pragma once

#include <cstdint>
#include <string>

namespace weft {

inline std::string weight_of(const std::string& module) {
  return module + ".weight";
}
inline std::string bias_of(const std::string& module) {
  return module + ".bias";
}

// Of a quantised matrix called `weight`.
inline std::string scales_of(const std::string& weight) {
  return weight + ".scales";
}
inline std::string zeros_of(const std::string& weight) {
  return weight + ".zeros";
}

struct LlamaNames {
  static constexpr const char* kEmbedding = "model.embed_tokens";
  static constexpr const char* kFinalNorm = "model.norm";
  static constexpr const char* kHead = "lm_head";

  // The modules of layer `l`.
  struct Layer {
    explicit Layer(std::int64_t l) : prefix("model.layers." + std::to_string(l) + ".") {}
    const std::string prefix;
    const std::string input_norm = prefix + "input_layernorm", post_norm = prefix + "post_attention_layernorm";
    const std::string q = prefix + "self_attn.q_proj", k = prefix + "self_attn.k_proj", v = prefix + "self_attn.v_proj";
    const std::string output = prefix + "self_attn.o_proj";
    const std::string gate = prefix + "mlp.gate_proj", up = prefix + "mlp.up_proj", down = prefix + "mlp.down_proj";
  };
};

struct NeoxNames {
  static constexpr const char* kEmbedding = "gpt_neox.embed_in";
  static constexpr const char* kFinalNorm = "gpt_neox.final_layer_norm";
  static constexpr const char* kHead = "embed_out";

  struct Layer {
    explicit Layer(std::int64_t l) : prefix("gpt_neox.layers." + std::to_string(l) + ".") {}
    const std::string prefix;
    const std::string input_norm = prefix + "input_layernorm", post_norm = prefix + "post_attention_layernorm";
    const std::string qkv = prefix + "attention.query_key_value", dense = prefix + "attention.dense";
    const std::string up = prefix + "mlp.dense_h_to_4h", down = prefix + "mlp.dense_4h_to_h";
  };
};

}  // namespace weft
