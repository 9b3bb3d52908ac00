// Random models for the tests of inference: configurations of any shape, and their files.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/file/tensor_file.h"
#include "llmc/model/model_file.h"
#include "llmc/model/tensor_names.h"
#include "test/cpp/test_files.h"

namespace weft::test {

struct NeoxShape {
  std::string name;
  std::int64_t heads, head_dim, layers, ffn;
  bool parallel = true, bias = true;
  std::int64_t vocab = 515, positions = 2048;  // odd on purpose
};

inline ModelConfig neox_config(const NeoxShape& shape) {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = shape.vocab;
  config.hidden_size = shape.heads * shape.head_dim;
  config.num_layers = shape.layers;
  config.num_heads = config.num_kv_heads = shape.heads;
  config.head_dim = shape.head_dim;
  config.ffn_size = shape.ffn;
  config.max_positions = shape.positions;
  config.norm_eps = 1e-5;
  config.norm = NormKind::layernorm;
  config.rope.theta = 10000;
  config.rope.rotary_dim = shape.head_dim / 4;
  config.parallel_residual = shape.parallel;
  config.qkv_bias = config.output_bias = shape.bias;
  config.tokenizer_vocab = shape.vocab - 13;  // 13 rows of padding
  config.eos_ids = {0};
  return config;
}

// Small shapes of every head dimension, both residuals, with and without biases.
inline std::vector<NeoxShape> small_shapes() {
  return {{"hs32", 5, 32, 3, 640},
          {"hs32 sequential", 4, 32, 2, 264, false},
          {"hs64 nobias", 3, 64, 2, 768, true, false},
          {"hs80", 2, 80, 2, 640},
          {"hs128 sequential nobias", 2, 128, 2, 1024, false, false},
          {"hs256", 2, 256, 2, 2048}};
}
// A layer of Pythia-2.8B, twice.
inline NeoxShape shape_2_8b() {
  return {"2.8B x 2", 32, 80, 2, 10240, true, true, 1003};
}

struct LlamaShape {
  std::string name;
  std::int64_t heads, kv_heads, head_dim, layers, hidden, ffn;
  bool tied = false, llama3 = false;
  std::int64_t vocab = 515, positions = 2048;
};

inline ModelConfig llama_config(const LlamaShape& shape) {
  ModelConfig config;
  config.vocab_size = shape.vocab;
  config.hidden_size = shape.hidden;
  config.num_layers = shape.layers;
  config.num_heads = shape.heads;
  config.num_kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.ffn_size = shape.ffn;
  config.max_positions = shape.positions;
  config.norm_eps = 1e-5;
  config.norm = NormKind::rmsnorm;
  config.rope.theta = 10000;
  config.rope.rotary_dim = shape.head_dim;
  if (shape.llama3) {
    config.rope.type = RopeType::llama3;
    config.rope.factor = 8;
    config.rope.low_freq_factor = 1;
    config.rope.high_freq_factor = 4;
    config.rope.original_max_positions = 64;
  }
  config.tied_embeddings = shape.tied;
  config.tokenizer_vocab = shape.vocab - 13;
  config.eos_ids = {0};
  return config;
}

// One, two, three and four queries a key, tied or not, both kinds of RoPE, hidden sizes that are not those of the heads.
inline std::vector<LlamaShape> small_llamas() {
  return {{"hs64", 3, 3, 64, 2, 192, 512},
          {"hs64 gqa2 tied", 4, 2, 64, 3, 256, 520, true},
          {"hs128 gqa4 llama3", 8, 2, 128, 2, 320, 640, false, true},
          {"hs32 gqa3", 6, 2, 32, 2, 72, 200, false, false, 1003}};
}

struct NamedConfig {
  std::string name;
  ModelConfig config;
};

// What other families have beside a Llama: biases of q, k and v; norms of the heads; both, and a bias of the output projection.
inline std::vector<NamedConfig> small_qwens() {
  const auto of = [](const std::string& family, const LlamaShape& shape) {
    ModelConfig config = llama_config(shape);
    set_family(config, family);
    return NamedConfig{family + " " + shape.name, config};
  };
  std::vector<NamedConfig> all = {of("qwen2", {"hs64 gqa3", 6, 2, 64, 2, 192, 512}),
                                  of("qwen3", {"hs128 gqa2 tied", 4, 2, 128, 2, 256, 520, true}),
                                  of("qwen3", {"hs32 biases", 6, 3, 32, 3, 72, 200, false, false, 1003})};
  all.back().config.qkv_bias = all.back().config.output_bias = true;
  return all;
}

// Gemma 3: norms behind attention and MLP, GeGLU, layers with and without a window, and their two thetas. One key/value head of
// 256, tied; grouped heads with biases, whose last layer has a window.
inline std::vector<NamedConfig> small_gemmas() {
  const auto of = [](const LlamaShape& shape, const std::vector<std::int64_t>& windows, double attention_scale) {
    ModelConfig config = llama_config(shape);
    set_family(config, "gemma3_text");
    config.windows = windows;
    config.rope.theta = 1e6;
    config.local_rope_theta = 100;
    config.attention_scale = attention_scale;
    return NamedConfig{"gemma3 " + shape.name, config};
  };
  std::vector<NamedConfig> all = {of({"hs256 mqa tied", 3, 1, 256, 3, 320, 520, true}, {17, 0, 40}, 0.05),
                                  of({"hs64 gqa2 biases", 4, 2, 64, 3, 72, 200, false, false, 1003}, {0, 33, 5}, 0.1)};
  all.back().config.qkv_bias = all.back().config.output_bias = true;
  return all;
}

// Of all families.
inline std::vector<NamedConfig> small_models() {
  std::vector<NamedConfig> all;
  for (const NeoxShape& shape : small_shapes()) all.push_back({shape.name, neox_config(shape)});
  for (const LlamaShape& shape : small_llamas()) all.push_back({shape.name, llama_config(shape)});
  for (const NamedConfig& gemma : small_gemmas()) all.push_back(gemma);
  for (const NamedConfig& qwen : small_qwens()) all.push_back(qwen);
  return all;
}

// Changes the values of one tensor before they are written.
using Edit = std::function<void(const TensorSpec& spec, std::vector<float>& values)>;

// Weights as large as those of trained models: activations of order 1 in every layer, so that attention is not uniform and
// a wrong operator shows in the logits. The rows of padding in the head are far ahead of every token.
inline void write_random_model(const std::string& path, const ModelConfig& config, DType dtype, unsigned seed,
                               const Edit& edit = nullptr) {
  TensorFileWriter writer(path, FileKind::model, Json{{"model", config_to_json(config)}});
  const TensorTable table(config);
  for (const TensorSpec& spec : table.specs()) writer.declare(spec.name, dtype, spec.shape);
  std::mt19937 generator(seed);
  for (const TensorSpec& spec : table.specs()) {
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    // Uniform numbers: many times faster than normal ones, and the sums are normal anyway.
    const bool matrix = spec.shape.size() == 2, embedding = spec.name == weight_of(names_of(config).embedding);
    const float width = embedding ? 0.5f / config.embedding_scale()
                        : matrix  ? 2.0f / std::sqrt(static_cast<float>(spec.shape[1]))
                                  : 0.5f;
    for (float& value : values) {
      value = width * (static_cast<float>(generator()) * 0x1p-31f - 1.0f);
      if (!matrix && spec.init == Init::ones) value += 1.0f;
    }
    if (spec.name == weight_of(names_of(config).head)) {
      const auto padding = static_cast<std::ptrdiff_t>(config.tokenizer_vocab * config.hidden_size);
      for (auto value = values.begin() + padding; value != values.end(); ++value) *value *= 8;
    }
    if (edit) edit(spec, values);
    writer.write_f32(values.data(), values.size());
  }
  writer.publish();
}

inline std::vector<std::int32_t> random_tokens(std::size_t count, std::int64_t vocab, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::int32_t> ids(count);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(generator() % static_cast<unsigned>(vocab));
  return ids;
}

}  // namespace weft::test
