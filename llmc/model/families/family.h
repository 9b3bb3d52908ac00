// A family of models is data: what Hugging Face calls it and its modules, and which capabilities its configurations
// have. This folder is the only place, beside the converter, that knows a family by its name.
#pragma once

#include <span>
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/base/json_fwd.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_names.h"

namespace weft {

class HfObject;  // hf_config.h

// A name of transformers' activations (ACT2FN), and what it is.
struct HfActivation {
  const char* name;
  Activation activation;
};

// Of the families whose blocks are Llama's, which are the defaults below: sequential, with RMSNorm, SwiGLU, q, k and v in matrices of their own.
BlockNames llama_block_names(std::int64_t layer);
void set_llama_block(ModelConfig& config);
void read_llama_block(const Json& object, const std::string& source, ModelConfig& config);
inline constexpr ModelNames kLlamaNames = {"model.embed_tokens", "model.norm", "lm_head", llama_block_names, false};
inline constexpr HfActivation kSilu[] = {{"silu", Activation::swiglu}, {"swish", Activation::swiglu}};

// The windows of Qwen2 and Qwen3: of the layers from max_window_layers on, where layer_types does not say.
void read_qwen_windows(const HfObject& config, ModelConfig& model);

// What a family's config.json has of its own. The values are those that transformers takes for absent keys.
struct HfRules {
  const char* architecture;                           // of its models with a head: "LlamaForCausalLM"
  std::span<const HfActivation> activations = kSilu;  // that it may have; the first where none is named
  const char* activation_key = "hidden_act";
  const char* norm_eps_key = "rms_norm_eps";
  double norm_eps = 1e-6;
  // Reads what is in no other family, or not in all of them: heads, biases, norms.
  void (*from_hf)(const HfObject& config, ModelConfig& model);
  void (*to_hf)(const ModelConfig& model, Json& config);  // writes the same keys
  bool tied = false;                                      // tie_word_embeddings
  std::int64_t max_positions = 2048;
  std::int64_t vocab_size = 0, num_heads = 0;  // 0: they have to be there
  double rope_theta = 10000;
  const char* rope_theta_key = nullptr;       // another name of rope_theta
  const char* rotary_fraction_key = nullptr;  // another name of partial_rotary_factor; null: whole heads rotate
  double rotary_fraction = 1;
  // rope_parameters has an object for each type of layer_types, and the layers with a window have this theta where none is
  // given; 0: one for all layers.
  double local_rope_theta = 0;
  const char* multimodal = nullptr;  // model_type of a config.json whose text_config is a model of the family
};

struct Family {
  const char* name;  // model_type of config.json, and the family of a model file
  ModelNames names = kLlamaNames;
  DType published = DType::bf16;  // the type of its checkpoints, in which programs compute unless they are told another
  // Sets the capabilities that all its models have.
  void (*set_fixed)(ModelConfig& config) = set_llama_block;
  // Reads what configurations of this family alone have, from the object "model" of a model file, and checks all of it:
  // Exit::bad_file.
  void (*read)(const Json& object, const std::string& source, ModelConfig& config) = read_llama_block;
  HfRules hf;
};

extern const Family kLlama, kMistral, kQwen2, kQwen3, kSmolLm3, kGemma3, kGptNeox;

std::span<const Family* const> families();
// Null: there is none of this name.
const Family* find_family(const std::string& name);
const Family& family_of(const ModelConfig& config);

}  // namespace weft
