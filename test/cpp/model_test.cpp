// The model room: published sizes, layouts of parameters and activations, configurations through JSON, RoPE frequencies.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/config.h"
#include "llmc/model/formats/formats.h"
#include "llmc/model/model_file.h"
#include "llmc/model/presets.h"
#include "llmc/model/tensor_table.h"
#include "llmc/model/training_activations.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

ModelConfig pythia(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t vocab) {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.norm = NormKind::layernorm;
  config.norm_eps = 1e-5;
  config.num_layers = layers;
  config.hidden_size = hidden;
  config.num_heads = config.num_kv_heads = heads;
  config.head_dim = hidden / heads;
  config.ffn_size = 4 * hidden;
  config.vocab_size = vocab;
  config.tokenizer_vocab = 50277;
  config.max_positions = 2048;
  config.rope.theta = 10000;
  config.rope.rotary_dim = config.head_dim / 4;
  config.parallel_residual = config.qkv_bias = config.output_bias = true;
  return config;
}

// The table's sum is the published parameter count: a shape wrong anywhere shows here.
TEST(TensorTable, PublishedParameterCounts) {
  EXPECT_EQ(TensorTable(preset_config("llama3.2-1b")).parameters(), 1'235'814'400);
  EXPECT_EQ(TensorTable(preset_config("llama3.2-3b")).parameters(), 3'212'749'824);
  EXPECT_EQ(TensorTable(preset_config("llama3.1-8b")).parameters(), 8'030'261'248);
  EXPECT_EQ(TensorTable(preset_config("tinyllama-1.1b")).parameters(), 1'100'048'384);
  EXPECT_EQ(TensorTable(preset_config("smollm2-135m")).parameters(), 134'515'008);
  EXPECT_EQ(TensorTable(preset_config("tiny")).parameters(), 1'967'808);  // weft's own, as d12
  EXPECT_EQ(TensorTable(preset_config("d12")).parameters(), 114'150'144);
  EXPECT_EQ(TensorTable(preset_config("mistral-7b")).parameters(), 7'248'023'552);
  EXPECT_EQ(TensorTable(preset_config("qwen2.5-0.5b")).parameters(), 494'032'768);
  EXPECT_EQ(TensorTable(preset_config("qwen3-0.6b")).parameters(), 596'049'920);
  EXPECT_EQ(TensorTable(preset_config("qwen3-1.7b")).parameters(), 1'720'574'976);
  EXPECT_EQ(TensorTable(preset_config("qwen3-8b")).parameters(), 8'190'735'360);
  EXPECT_EQ(TensorTable(preset_config("smollm3-3b")).parameters(), 3'075'098'624);
  EXPECT_EQ(TensorTable(preset_config("gemma3-1b")).parameters(), 999'885'952);
  EXPECT_EQ(TensorTable(pythia(6, 128, 4, 50304)).parameters(), 14'067'712);
  EXPECT_EQ(TensorTable(pythia(12, 768, 12, 50304)).parameters(), 162'322'944);
  EXPECT_EQ(TensorTable(pythia(16, 2048, 8, 50304)).parameters(), 1'011'781'632);
  EXPECT_EQ(TensorTable(pythia(32, 2560, 32, 50304)).parameters(), 2'775'208'960);
  EXPECT_EQ(TensorTable(pythia(36, 5120, 40, 50688)).parameters(), 11'846'072'320);
}

// What the number of parameters does not show, from the config.json of each published model.
TEST(ModelConfig, PresetsAreThePublishedModels) {
  struct Published {
    const char* name;
    std::int64_t heads, kv_heads, head_dim, positions;
    double theta, factor;
    bool tied;
  };
  for (const Published& p : {Published{"tiny", 6, 2, 32, 512, 10000, 0, true},  // weft's own, as d12
                             {"d12", 12, 4, 64, 8192, 500000, 0, true},
                             {"smollm2-135m", 9, 3, 64, 8192, 100000, 0, true},
                             {"tinyllama-1.1b", 32, 4, 64, 2048, 10000, 0, false},
                             {"llama3.2-1b", 32, 8, 64, 131072, 500000, 32, true},
                             {"llama3.2-3b", 24, 8, 128, 131072, 500000, 32, true},
                             {"llama3.1-8b", 32, 8, 128, 131072, 500000, 8, false}}) {
    const ModelConfig config = preset_config(p.name);
    EXPECT_EQ(config.num_heads, p.heads) << p.name;
    EXPECT_EQ(config.num_kv_heads, p.kv_heads) << p.name;
    EXPECT_EQ(config.head_dim, p.head_dim) << p.name;
    EXPECT_EQ(config.max_positions, p.positions) << p.name;
    EXPECT_EQ(config.tied_embeddings, p.tied) << p.name;
    EXPECT_EQ(config.norm_eps, 1e-5) << p.name;
    const RopeConfig& rope = config.rope;
    EXPECT_EQ(rope.theta, p.theta) << p.name;
    EXPECT_EQ(rope.rotary_dim, p.head_dim) << p.name;
    EXPECT_EQ(rope.type, p.factor > 0 ? RopeType::llama3 : RopeType::standard) << p.name;
    if (p.factor == 0) continue;
    EXPECT_EQ(rope.factor, p.factor) << p.name;
    EXPECT_EQ(rope.low_freq_factor, 1) << p.name;
    EXPECT_EQ(rope.high_freq_factor, 4) << p.name;
    EXPECT_EQ(rope.original_max_positions, 8192) << p.name;
  }
}

// What neither the number of parameters nor the columns of the table show.
TEST(ModelConfig, PresetsHaveTheRulesOfTheirFamilies) {
  const ModelConfig smollm3 = preset_config("smollm3-3b"), gemma3 = preset_config("gemma3-1b");
  EXPECT_EQ(smollm3.nope_layers, (std::vector<std::int64_t>{3, 7, 11, 15, 19, 23, 27, 31, 35}));
  EXPECT_EQ(smollm3.rope.theta, 5e6);
  EXPECT_TRUE(preset_config("qwen3-0.6b").qk_norm);
  EXPECT_TRUE(preset_config("qwen2.5-0.5b").qkv_bias && !preset_config("qwen2.5-0.5b").output_bias);
  EXPECT_EQ(preset_config("mistral-7b").windows, std::vector<std::int64_t>());
  EXPECT_EQ(preset_config("qwen3-8b").norm_eps, 1e-6);
  for (std::int64_t l = 0; l < gemma3.num_layers; ++l) EXPECT_EQ(gemma3.window(l), (l + 1) % 6 == 0 ? 0 : 512) << l;
  EXPECT_EQ(gemma3.local_rope_theta, 1e4);
  EXPECT_EQ(gemma3.attention_scale, 1.0 / 16);
}

TEST(TensorTable, PackedNeighboursHaveNoGap) {
  for (const std::string& name : preset_names()) {
    if (preset_config(name).parallel_residual) continue;  // q, k and v are one matrix
    const TensorTable table(preset_config(name));
    const std::string prefix = "model.layers.1.";
    const auto follows = [&](const std::string& first, const std::string& second) {
      const TensorSpec& a = table.at(prefix + first);
      return a.offset + a.elements == table.at(prefix + second).offset;
    };
    EXPECT_TRUE(follows("self_attn.q_proj.weight", "self_attn.k_proj.weight")) << name;
    EXPECT_TRUE(follows("self_attn.k_proj.weight", "self_attn.v_proj.weight")) << name;
    EXPECT_TRUE(follows("mlp.gate_proj.weight", "mlp.up_proj.weight")) << name;
  }
}

TEST(TensorTable, TensorsDoNotOverlapAndGroupsAreAligned) {
  ModelConfig config = preset_config("tiny");
  config.norm = NormKind::layernorm;
  config.vocab_size = 2041;
  const TensorTable table(config);
  std::int64_t end = 0;
  for (const TensorSpec& spec : table.specs()) {
    EXPECT_GE(spec.offset, end) << spec.name;
    end = spec.offset + spec.elements;
  }
  EXPECT_LE(end, table.arena_elements());
  EXPECT_EQ(table.at("model.norm.bias").offset % 128, 0);
}

// In a Pythia each tensor is a group of its own: also behind those of odd sizes.
TEST(TensorTable, EachTensorOfAPythiaIsAligned) {
  ModelConfig config = random_model_config("pythia-14m");
  config.hidden_size = 4 * 33;
  config.ffn_size = 77;
  config.vocab_size = 1001;
  config.num_heads = config.num_kv_heads = 4;
  config.head_dim = 33;
  const TensorTable table(config);
  EXPECT_GT(table.specs().size(), 20u);
  for (const TensorSpec& spec : table.specs()) EXPECT_EQ(spec.offset % 128, 0) << spec.name;
}

// The parameters' own arena counts bytes, the others count elements: with one type for all tensors both are one layout.
TEST(TensorTable, BytesFollowTheStorageType) {
  ModelConfig config = preset_config("tiny");
  config.norm = NormKind::layernorm;
  config.vocab_size = 2041;
  for (const DType storage : {DType::f32, DType::bf16}) {
    const std::uint64_t element = storage == DType::f32 ? 4 : 2;
    const TensorTable table(config, storage);
    for (const TensorSpec& spec : table.specs()) {
      EXPECT_EQ(spec.dtype, storage);
      EXPECT_EQ(spec.bytes, element * static_cast<std::uint64_t>(spec.elements)) << spec.name;
      EXPECT_EQ(spec.byte_offset, element * static_cast<std::uint64_t>(spec.offset)) << spec.name;
    }
    EXPECT_EQ(table.arena_bytes(), element * static_cast<std::uint64_t>(table.arena_elements()));
    EXPECT_EQ(parameter_plan(table).bytes(), table.arena_bytes());
    EXPECT_EQ(per_parameter_plan("gradients", table, 4).bytes(),
              4u * static_cast<std::uint64_t>(table.arena_elements()));
  }
}

TEST(TensorTable, OnlyMatricesDecay) {
  ModelConfig layernorm = preset_config("tiny");
  layernorm.norm = NormKind::layernorm;
  for (const ModelConfig& config : {pythia(2, 64, 2, 100), preset_config("tiny"), layernorm}) {
    const TensorTable table(config);
    for (const TensorSpec& spec : table.specs()) EXPECT_EQ(spec.decay, spec.shape.size() == 2) << spec.name;
  }
}

// Bound pointers against the names as Hugging Face has them, so that a wrong name or a mix-up of two shows.
TEST(Layout, LlamaPointersAreThoseOfTheNamedTensors) {
  for (const bool tied : {true, false}) {
    for (const NormKind norm : {NormKind::rmsnorm, NormKind::layernorm}) {
      ModelConfig config = preset_config("tiny");
      config.tied_embeddings = tied;
      config.norm = norm;
      const TensorTable table(config);
      std::vector<float> arena(static_cast<std::size_t>(table.arena_elements()));
      const auto at = [&](const std::string& name) -> const float* { return arena.data() + table.at(name).offset; };
      for (const Offsets offsets : {Offsets::bytes, Offsets::elements}) {
        const ModelWeights<float> bound = bind_weights(config, table, arena.data(), offsets);
        EXPECT_EQ(bound.embedding, at("model.embed_tokens.weight"));
        EXPECT_EQ(bound.head.plain, at(tied ? "model.embed_tokens.weight" : "lm_head.weight"));
        EXPECT_EQ(bound.final_norm.weight, at("model.norm.weight"));
        EXPECT_EQ(bound.final_norm.bias, norm == NormKind::layernorm ? at("model.norm.bias") : nullptr);
        ASSERT_EQ(bound.blocks.size(), static_cast<std::size_t>(config.num_layers));
        const BlockWeights<float>& layer = bound.blocks[2];
        EXPECT_EQ(layer.input_norm.weight, at("model.layers.2.input_layernorm.weight"));
        EXPECT_EQ(layer.post_norm.weight, at("model.layers.2.post_attention_layernorm.weight"));
        EXPECT_EQ(layer.qkv.weight.plain, at("model.layers.2.self_attn.q_proj.weight"));
        EXPECT_EQ(layer.output.weight.plain, at("model.layers.2.self_attn.o_proj.weight"));
        EXPECT_EQ(layer.up.weight.plain, at("model.layers.2.mlp.gate_proj.weight"));
        EXPECT_EQ(layer.down.weight.plain, at("model.layers.2.mlp.down_proj.weight"));
      }
    }
  }
}

// q, k and v are one matrix, and so are gate and up: their biases are neighbours as well, in the order of the rows.
TEST(Layout, BiasesOfALlamaAreThoseOfTheNamedTensors) {
  for (const bool attention : {true, false}) {
    for (const bool mlp : {true, false}) {
      ModelConfig config = preset_config("tiny");
      config.qkv_bias = config.output_bias = attention;
      config.mlp_bias = mlp;
      const TensorTable table(config);
      const std::vector<float> arena(static_cast<std::size_t>(table.arena_elements()));
      const ModelWeights<const float> bound = bind_weights(config, table, arena.data(), Offsets::elements);
      const BlockWeights<const float>& layer = bound.blocks[2];
      const std::string prefix = "model.layers.2.";
      const auto at = [&](const std::string& name) -> const float* {
        const TensorSpec* spec = table.find(prefix + name + ".bias");
        return spec != nullptr ? arena.data() + spec->offset : nullptr;
      };
      EXPECT_EQ(layer.linear(BlockLinear::qkv).bias, at("self_attn.q_proj"));
      EXPECT_EQ(layer.linear(BlockLinear::output).bias, at("self_attn.o_proj"));
      EXPECT_EQ(layer.linear(BlockLinear::up).bias, at("mlp.gate_proj"));
      EXPECT_EQ(layer.linear(BlockLinear::down).bias, at("mlp.down_proj"));
      EXPECT_EQ(layer.qkv.bias != nullptr, attention);
      EXPECT_EQ(layer.output.bias != nullptr, attention);
      EXPECT_EQ(layer.up.bias != nullptr, mlp);
      EXPECT_EQ(layer.down.bias != nullptr, mlp);
      if (attention) {
        EXPECT_EQ(at("self_attn.k_proj"), layer.qkv.bias + config.q_size());
        EXPECT_EQ(at("self_attn.v_proj"), layer.qkv.bias + config.q_size() + config.kv_size());
        EXPECT_FALSE(table.at(prefix + "self_attn.k_proj.bias").decay) << "as norms, a bias is not decayed";
      }
      if (mlp) {
        EXPECT_EQ(at("mlp.up_proj"), layer.up.bias + config.ffn_size);
      }
    }
  }
}

TEST(Layout, NeoxPointersAreThoseOfTheNamedTensors) {
  for (const bool bias : {true, false}) {
    ModelConfig config = pythia(3, 64, 2, 100);
    config.qkv_bias = config.output_bias = bias;
    const TensorTable table(config);
    const std::vector<float> arena(static_cast<std::size_t>(table.arena_elements()));
    const auto at = [&](const std::string& name) { return arena.data() + table.at(name).offset; };
    const ModelWeights<const float> bound = bind_weights(config, table, arena.data(), Offsets::elements);
    EXPECT_EQ(bound.embedding, at("gpt_neox.embed_in.weight"));
    EXPECT_EQ(bound.head.plain, at("embed_out.weight"));
    EXPECT_EQ(bound.final_norm.weight, at("gpt_neox.final_layer_norm.weight"));
    EXPECT_EQ(bound.final_norm.bias, at("gpt_neox.final_layer_norm.bias"));
    ASSERT_EQ(bound.blocks.size(), 3u);
    const BlockWeights<const float>& layer = bound.blocks[1];
    const std::string prefix = "gpt_neox.layers.1.";
    EXPECT_EQ(layer.input_norm.bias, at(prefix + "input_layernorm.bias"));
    EXPECT_EQ(layer.post_norm.weight, at(prefix + "post_attention_layernorm.weight"));
    EXPECT_EQ(layer.qkv.weight.plain, at(prefix + "attention.query_key_value.weight"));
    EXPECT_EQ(layer.qkv.bias, bias ? at(prefix + "attention.query_key_value.bias") : nullptr);
    EXPECT_EQ(layer.output.weight.plain, at(prefix + "attention.dense.weight"));
    EXPECT_EQ(layer.output.bias, bias ? at(prefix + "attention.dense.bias") : nullptr);
    EXPECT_EQ(layer.up.weight.plain, at(prefix + "mlp.dense_h_to_4h.weight"));
    EXPECT_EQ(layer.up.bias, at(prefix + "mlp.dense_h_to_4h.bias"));
    EXPECT_EQ(layer.down.weight.plain, at(prefix + "mlp.dense_4h_to_h.weight"));
  }
}

// A model of more layers than the table has would compute with null.
TEST(Layout, AParameterThatTheTableLacksIsNotBound) {
  ModelConfig config = preset_config("tiny");
  const TensorTable table(config);
  std::vector<float> arena(static_cast<std::size_t>(table.arena_elements()));
  ++config.num_layers;
  expect_contains(error_of(Exit::internal, [&] { bind_weights(config, table, arena.data(), Offsets::bytes); }),
                  "no parameter is called 'model.layers.4.input_layernorm.weight'");
}

// A pointer of the wrong size would read a neighbour's bytes.
TEST(Layout, AParameterOfAnotherTypeIsNotBound) {
  const ModelConfig config = preset_config("tiny");
  const TensorTable table(config, DType::bf16);
  std::vector<float> arena(static_cast<std::size_t>(table.arena_elements()));
  EXPECT_NO_THROW(bind_weights(config, table, arena.data(), Offsets::elements));
  expect_contains(error_of(Exit::internal, [&] { bind_weights(config, table, arena.data(), Offsets::bytes); }),
                  "model.embed_tokens.weight: stored as bf16");
}

// Recomputation shares the regions that it computes again, and the logits share theirs with a layer's gradients.
TEST(Layout, RecomputationSharesRegionsOfLayers) {
  const ModelConfig config = preset_config("tiny");
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 48;
  std::uint64_t bytes = std::numeric_limits<std::uint64_t>::max();
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    options.recompute = recompute;
    TrainingActivations<float> acts(config, options, 32);
    EXPECT_LT(acts.plan().bytes(), bytes);
    bytes = acts.plan().bytes();
    const HostArena arena(acts.plan());
    acts.bind(arena);
    const LayerActivations<float>&first = acts.layers.front(), &last = acts.layers.back();
    EXPECT_EQ(last.input_norm == first.input_norm, recompute != Recompute::none);
    EXPECT_EQ(last.swiglu_out == first.swiglu_out, recompute != Recompute::none);
    EXPECT_EQ(last.gate_up == first.gate_up, recompute == Recompute::block);
    EXPECT_EQ(last.rstd2 == first.rstd2, recompute == Recompute::block);
    EXPECT_NE(acts.residual.front(), acts.residual.back());
    EXPECT_EQ(acts.logits, acts.d_qkv);
    EXPECT_GT(acts.d_swiglu_out, acts.d_attention);
  }
}

TEST(ModelConfig, JsonRoundTrip) {
  for (const std::string& name : preset_names()) {
    ModelConfig config = preset_config(name);
    config.eos_ids = {1, 7};
    config.bos_id = 0;
    EXPECT_EQ(config_from_json(config_to_json(config), "test"), config) << name;
  }
  const ModelConfig config = pythia(6, 512, 8, 50304);
  EXPECT_EQ(config_from_json(config_to_json(config), "test"), config);
}

TEST(ModelConfig, WindowsAreOneForEachLayerOrAbsent) {
  ModelConfig config = preset_config("tiny");
  EXPECT_FALSE(config_to_json(config).contains("windows"));
  EXPECT_EQ(config.window(3), 0);
  config.windows = {4096, 0, 1, 0};
  EXPECT_EQ(config.window(0), 4096);
  EXPECT_EQ(config.window(1), 0);
  EXPECT_EQ(config_from_json(config_to_json(config), "test"), config);
  Json json = config_to_json(config);
  json["windows"] = {0, 0, 0, 0};
  EXPECT_EQ(config_from_json(json, "test"), preset_config("tiny"));
  for (const auto& [value, words] : {std::pair<Json, const char*>{{1, 1, 1}, "an array of num_layers = 4 integers"},
                                     {{1, 1, 1, 1, 1}, "num_layers = 4"},
                                     {Json::array(), "num_layers = 4"},
                                     {4096, "num_layers = 4"},
                                     {nullptr, "num_layers = 4"},
                                     {{1, -1, 1, 1}, "windows"},
                                     {{1, 1, (1 << 24) + 1, 1}, "windows"},
                                     {{1, 1.5, 1, 1}, "windows"}}) {
    json["windows"] = value;
    const std::string error = error_of(Exit::bad_file, [&] { config_from_json(json, "file.bin"); });
    expect_contains(error, "file.bin: windows: ");
    expect_contains(error, words);
  }
}

// No key has a default but bos_id, whose absence means that there is none, and those that older files lack.
TEST(ModelConfig, EveryKeyIsNeeded) {
  const Json good = config_to_json(preset_config("llama3.2-1b"));
  const auto expect_missed = [](const Json& config, const std::string& key) {
    expect_contains(error_of(Exit::bad_file, [&] { config_from_json(config, "file.bin"); }), key + ": ");
  };
  for (const auto& [key, value] : good.items()) {
    Json without = good;
    without.erase(key);
    if (key != "bos_id" && key != "mlp_bias" && key != "activation") expect_missed(without, key);
  }
  for (const auto& [key, value] : good["rope"].items()) {
    Json without = good;
    without["rope"].erase(key);
    const bool of_yarn = key == "truncate" || key == "attention_factor" || key.starts_with("beta_");
    if (!of_yarn) expect_missed(without, key);
  }
}

// Each damaged key is refused with exit code 3 and its name.
TEST(ModelConfig, HostileValuesAreRefusedByName) {
  const Json good = config_to_json(preset_config("tiny"));
  const std::vector<std::pair<std::string, Json>> damages = {{"family", "gpt2"},
                                                             {"vocab_size", 0},
                                                             {"vocab_size", 1'000'000'000},
                                                             {"hidden_size", "4096"},
                                                             {"num_layers", 2147483648},
                                                             {"num_layers", -1},
                                                             {"num_heads", 0},
                                                             {"num_kv_heads", 4},
                                                             {"head_dim", 1e30},
                                                             {"norm_eps", 0},
                                                             {"norm", "batchnorm"},
                                                             {"tied_embeddings", 1},
                                                             {"tokenizer_vocab", 4096},
                                                             {"eos_ids", Json{{"a", 1}}},
                                                             {"eos_ids", Json::array({4000000000})},
                                                             {"bos_id", "x"},
                                                             {"rope", 3},
                                                             {"max_positions", 18446744073709551615u}};
  for (const auto& [key, value] : damages) {
    Json bad = good;
    bad[key] = value;
    SCOPED_TRACE(key + " " + value.dump());
    const std::string error = error_of(Exit::bad_file, [&] { config_from_json(bad, "file.bin"); });
    expect_contains(error, "file.bin");
    expect_contains(error, key == "num_kv_heads" ? "num_heads" : key);
  }
  for (const char* key : {"family", "vocab_size", "rope", "eos_ids", "norm_eps"}) {
    Json bad = good;
    bad.erase(key);
    EXPECT_THROW(config_from_json(bad, "file.bin"), Error) << key;
  }
  for (const auto& [key, value] : std::vector<std::pair<std::string, Json>>{
           {"rotary_dim", 7}, {"rotary_dim", 64}, {"theta", 0}, {"type", "yarn"}, {"factor", -8}}) {
    Json bad = good;
    bad["rope"][key] = value;
    EXPECT_THROW(config_from_json(bad, "file.bin"), Error) << key;
  }
}

// Ids of the configuration are ids of the model: the last one of its vocabulary is, the next one is not.
TEST(ModelConfig, LimitsOfItsIds) {
  const ModelConfig tiny = preset_config("tiny");
  const auto config_with = [&](const std::string& key, const Json& value) {
    Json config = config_to_json(tiny);
    config[key] = value;
    return config_from_json(config, "file.bin");
  };
  const std::int64_t last = tiny.vocab_size - 1;
  EXPECT_EQ(config_with("eos_ids", {0, last}).eos_ids, (std::vector<std::int32_t>{0, static_cast<std::int32_t>(last)}));
  EXPECT_EQ(config_with("bos_id", last).bos_id, last);
  EXPECT_EQ(config_with("bos_id", 0).bos_id, 0);
  for (const std::int64_t id : {last + 1, std::int64_t{-1}}) {
    EXPECT_THROW(config_with("eos_ids", Json::array({0, id})), Error) << id;
    EXPECT_THROW(config_with("bos_id", id), Error) << id;
  }
  EXPECT_EQ(config_with("eos_ids", std::vector<int>(64, 7)).eos_ids.size(), 64u);
  EXPECT_THROW(config_with("eos_ids", std::vector<int>(65, 7)), Error);
  EXPECT_TRUE(config_with("eos_ids", Json::array()).eos_ids.empty());
  EXPECT_EQ(config_with("tokenizer_vocab", last + 1).tokenizer_vocab, last + 1);
  EXPECT_EQ(config_with("tokenizer_vocab", 1).tokenizer_vocab, 1);
  for (const std::int64_t size : {std::int64_t{0}, last + 2}) EXPECT_THROW(config_with("tokenizer_vocab", size), Error);
}

TEST(ModelConfig, LimitsOfItsSizes) {
  for (const auto& [key, limit] : std::vector<std::pair<std::string, std::int64_t>>{{"vocab_size", 1'000'000},
                                                                                    {"hidden_size", 1 << 20},
                                                                                    {"num_layers", 1024},
                                                                                    {"ffn_size", 1 << 20},
                                                                                    {"max_positions", 1 << 24}}) {
    Json config = config_to_json(preset_config("tiny"));
    config[key] = limit;
    EXPECT_NO_THROW(config_from_json(config, "file.bin")) << key;
    for (const std::int64_t value : {limit + 1, std::int64_t{0}}) {
      config[key] = value;
      EXPECT_THROW(config_from_json(config, "file.bin"), Error) << key << " " << value;
    }
  }
}

// What the scaling divides by is not zero: the limits themselves are refused, their neighbours are not.
TEST(ModelConfig, LimitsOfTheLlama3Scaling) {
  const Json good = config_to_json(preset_config("llama3.2-1b"));
  const auto accepted = [&](const char* key, const Json& value) {
    Json config = good;
    config["rope"][key] = value;
    return reason_of(Exit::bad_file, [&] { config_from_json(config, "file.bin"); }) == "accepted";
  };
  EXPECT_FALSE(accepted("high_freq_factor", 1)) << "equal to the low one";
  EXPECT_TRUE(accepted("high_freq_factor", 1.001));
  EXPECT_FALSE(accepted("high_freq_factor", 0.999));
  EXPECT_FALSE(accepted("original_max_positions", 0));
  EXPECT_TRUE(accepted("original_max_positions", 1));
  EXPECT_FALSE(accepted("low_freq_factor", 4));
  for (const char* key : {"factor", "theta", "low_freq_factor", "high_freq_factor"}) {
    EXPECT_FALSE(accepted(key, 0)) << key;
    EXPECT_FALSE(accepted(key, -0.5)) << key;
  }
}

// Each key by itself is enough to make a model of another family, or of none.
TEST(ModelConfig, EachKeyThatTheFamilyDoesNotHaveIsRefusedAlone) {
  const Json llama = config_to_json(preset_config("tiny")), neox = config_to_json(pythia(2, 64, 2, 100));
  struct Case {
    const char* key;
    Json value;
    bool in_llama, in_neox;
  };
  for (const Case& c : {Case{"parallel_residual", true, false, true},
                        {"parallel_residual", false, true, true},
                        {"attention_bias", true, true, true},
                        {"attention_bias", false, true, true},
                        {"tied_embeddings", true, true, false},
                        {"norm", "rmsnorm", true, false},
                        {"norm", "layernorm", true, true},
                        {"num_kv_heads", 1, true, false},
                        {"head_dim", 32, true, true},
                        {"head_dim", 34, true, false},
                        {"head_dim", 30, false, false}}) {
    for (const auto& [good, accepted] : {std::pair(&llama, c.in_llama), {&neox, c.in_neox}}) {
      Json config = *good;
      config["tokenizer_vocab"] = 100;
      config[c.key] = c.value;
      const std::string what = (*good)["family"].get<std::string>() + ": " + c.key + " " + c.value.dump();
      const std::string reason = reason_of(Exit::bad_file, [&] { config_from_json(config, "file.bin"); });
      EXPECT_EQ(reason == "accepted", accepted) << what << ": " << reason;
    }
  }
}

// Sizes, heads and rows of the published models.
TEST(ModelConfig, RandomPythiasAreThePublishedOnes) {
  const auto expect = [](const char* name, ModelConfig expected, std::int64_t parameters) {
    expected.tokenizer_vocab = expected.vocab_size;
    const ModelConfig got = random_model_config(name);
    EXPECT_EQ(got, expected) << name;
    EXPECT_EQ(TensorTable(got).parameters(), parameters) << name;
  };
  expect("pythia-14m", pythia(6, 128, 4, 50304), 14'067'712);
  expect("pythia-31m", pythia(6, 256, 8, 50304), 30'494'720);
  expect("pythia-70m", pythia(6, 512, 8, 50304), 70'426'624);
  expect("pythia-160m", pythia(12, 768, 12, 50304), 162'322'944);
  expect("pythia-410m", pythia(24, 1024, 16, 50304), 405'334'016);
  expect("pythia-1b", pythia(16, 2048, 8, 50304), 1'011'781'632);
  expect("pythia-1.4b", pythia(24, 2048, 16, 50304), 1'414'647'808);
  expect("pythia-2.8b", pythia(32, 2560, 32, 50304), 2'775'208'960);
  expect("pythia-6.9b", pythia(32, 4096, 32, 50432), 6'857'302'016);
  expect("pythia-12b", pythia(36, 5120, 40, 50688), 11'846'072'320);
}

TEST(ModelConfig, RandomModelsAreQuantisedByName) {
  const auto quantization_of = [](const char* name) { return random_model_config(name).quantization; };
  EXPECT_EQ(quantization_of("pythia-14m"), Quantization{});
  EXPECT_EQ(quantization_of("pythia-14m:fp8"), (Quantization{&kFp8, nullptr}));
  EXPECT_EQ(quantization_of("pythia-14m:int4+head"), (Quantization{&kInt4, &kInt8}));
  EXPECT_EQ(quantization_of("tiny:int8"), (Quantization{&kInt8, nullptr}));
  for (const std::string& name : preset_names()) {
    const ModelConfig plain = random_model_config(name);
    for (const WeightFormat* scheme : kWeightFormats) {
      for (const bool head : {false, true}) {
        const std::string text = name + ":" + scheme->name + (head ? "+head" : "");
        ModelConfig expected = plain;
        expected.quantization.weights = scheme;
        if (head) {  // which is then not the embedding
          expected.quantization.head = &kInt8;
          expected.tied_embeddings = false;
        }
        EXPECT_EQ(random_model_config(text), expected) << text;
      }
    }
  }
  for (const char* name : {"pythia-14m:", "pythia-14m:none", "pythia-14m:int8+tail", "pythia-14m:+head"}) {
    EXPECT_NE(error_of(Exit::usage, [&] { random_model_config(name); }), "") << name;
  }
}

TEST(Rope, StandardFrequencies) {
  RopeConfig rope;
  rope.theta = 10000;
  rope.rotary_dim = 8;
  const std::vector<float> frequencies = rope_inverse_frequencies(rope);
  ASSERT_EQ(frequencies.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(frequencies[i], std::pow(10.0, -i), 1e-7 * std::pow(10.0, -i));
}

// Llama 3.1's rule: short wavelengths stay, long ones are divided, between them a blend that meets both ends.
TEST(Rope, Llama3ScalingKeepsDividesAndBlends) {
  RopeConfig rope = preset_config("llama3.2-1b").rope;
  RopeConfig plain = rope;
  plain.type = RopeType::standard;
  const std::vector<float> scaled = rope_inverse_frequencies(rope), base = rope_inverse_frequencies(plain);
  bool kept = false, divided = false, blended = false;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const double wavelength = 2 * M_PI / base[i];
    const double ratio = base[i] / scaled[i];
    if (wavelength < 8192.0 / 4) {
      EXPECT_EQ(ratio, 1.0);
      kept = true;
    } else if (wavelength > 8192.0) {
      EXPECT_NEAR(ratio, 32.0, 1e-4);
      divided = true;
    } else {
      const double smooth = (8192.0 / wavelength - 1) / 3;
      EXPECT_NEAR(scaled[i] / base[i], (1 - smooth) / 32 + smooth, 1e-6);
      blended = true;
    }
  }
  EXPECT_TRUE(kept && divided && blended);
}

// Every frequency is divided: position p turns as p / factor did.
TEST(Rope, LinearScalingDividesAll) {
  RopeConfig rope;
  rope.theta = 10000;
  rope.rotary_dim = 16;
  const std::vector<float> base = rope_inverse_frequencies(rope);
  rope.type = RopeType::linear;
  rope.factor = 4;
  const std::vector<float> scaled = rope_inverse_frequencies(rope);
  for (std::size_t i = 0; i < base.size(); ++i) EXPECT_EQ(scaled[i], base[i] / 4);
}

// By the formulas of the paper in double precision, worked out apart from this program: the ramp goes from one dimension to
// another, which are whole ones unless `truncate` is off; with few positions no dimension turns fast enough to be kept.
TEST(Rope, YarnKeepsDividesAndHasARampBetween) {
  struct Case {
    double theta, factor;
    std::int64_t dimensions, positions;
    bool truncate;
    std::vector<double> frequencies;
  };
  const std::vector<Case> cases = {
      {10000,
       4,
       16,
       4096,
       true,
       {1, 0.316227766, 0.1, 0.02569350599, 0.00625, 0.001383496476, 0.00025, 7.90569415e-05}},
      {10000,
       4,
       16,
       4096,
       false,
       {1, 0.316227766, 0.1, 0.02861360881, 0.006556971521, 0.001285632031, 0.00025, 7.90569415e-05}},
      {500, 2, 8, 4, true, {1, 0.1057371263, 0.02236067977, 0.004728708045}}};
  for (const Case& c : cases) {
    RopeConfig rope{.type = RopeType::yarn,
                    .theta = c.theta,
                    .rotary_dim = c.dimensions,
                    .factor = c.factor,
                    .original_max_positions = c.positions,
                    .truncate = c.truncate};
    const std::vector<float> frequencies = rope_inverse_frequencies(rope);
    ASSERT_EQ(frequencies.size(), c.frequencies.size());
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
      EXPECT_NEAR(frequencies[i], c.frequencies[i], 5e-7 * c.frequencies[i]) << i;
    }
  }
}

// What yarn does to the temperature of attention is in the table: scores have the square of the factor.
TEST(Rope, TableIsScaledByTheAttentionFactor) {
  RopeConfig rope{.type = RopeType::yarn, .theta = 10000, .rotary_dim = 8, .factor = 4, .original_max_positions = 64};
  const RopeTable plain = rope_table(rope, 9);
  rope.attention_factor = 1.25;
  const RopeTable table = rope_table(rope, 9);
  for (std::size_t i = 0; i < table.cos.size(); ++i) {
    EXPECT_EQ(table.cos[i], plain.cos[i] * 1.25f);
    EXPECT_EQ(table.sin[i], plain.sin[i] * 1.25f);
  }
}

// Of each type, with every key; and without the keys that older files lack.
TEST(ModelConfig, RopeAndBiasesSurviveAFile) {
  for (const RopeType type : {RopeType::standard, RopeType::linear, RopeType::llama3, RopeType::yarn}) {
    ModelConfig config = preset_config("llama3.2-1b");
    config.rope.type = type;
    config.rope.beta_fast = 16;
    config.rope.beta_slow = 2;
    config.rope.truncate = false;
    config.rope.attention_factor = 1.5;
    config.qkv_bias = config.output_bias = true;
    config.mlp_bias = type == RopeType::linear;
    Json json = config_to_json(config);
    const ModelConfig read = config_from_json(json, "x");
    if (type == RopeType::yarn) {
      EXPECT_TRUE(read == config);
    }
    EXPECT_EQ(read.rope.type, type);
    EXPECT_EQ(read.mlp_bias, config.mlp_bias);
    EXPECT_TRUE(read.qkv_bias && read.output_bias);
    EXPECT_EQ(config_to_json(read)["rope"]["type"], json["rope"]["type"]);
    for (const char* key : {"beta_fast", "beta_slow", "truncate", "attention_factor"}) json["rope"].erase(key);
    json.erase("mlp_bias");
    json.erase("activation");
    if (type == RopeType::yarn) {
      EXPECT_THROW(config_from_json(json, "x"), Error);
    } else {
      EXPECT_EQ(config_from_json(json, "x").mlp_bias, false);
    }
  }
}

TEST(ModelConfig, WhatAYarnNeedsIsChecked) {
  ModelConfig config = preset_config("llama3.2-1b");
  config.rope.type = RopeType::yarn;
  EXPECT_NO_THROW(config_from_json(config_to_json(config), "x"));
  const auto refused = [&](const std::function<void(RopeConfig&)>& change) {
    ModelConfig changed = config;
    change(changed.rope);
    EXPECT_THROW(config_from_json(config_to_json(changed), "x"), Error);
  };
  refused([](RopeConfig& rope) { rope.original_max_positions = 0; });
  refused([](RopeConfig& rope) { rope.beta_fast = 0.5; });
  refused([](RopeConfig& rope) { rope.beta_slow = 0; });
  refused([](RopeConfig& rope) { rope.theta = 1; });
  refused([](RopeConfig& rope) { rope.attention_factor = 0; });
  config.rope.beta_fast = config.rope.beta_slow = 2;
  EXPECT_NO_THROW(config_from_json(config_to_json(config), "x"));
}

TEST(ModelConfig, ActivationsAndBiasesBelongToTheirFamilies) {
  Json llama = config_to_json(preset_config("tiny")), neox = config_to_json(random_model_config("pythia-14m"));
  for (const auto& [activation, tanh] : {std::pair("gelu", false), {"gelu_pytorch_tanh", true}}) {
    neox["activation"] = activation;
    EXPECT_EQ(config_from_json(neox, "x").activation, tanh ? Activation::gelu_tanh : Activation::gelu);
    llama["activation"] = activation;
    EXPECT_THROW(config_from_json(llama, "x"), Error);
  }
  llama["activation"] = "silu";
  EXPECT_NO_THROW(config_from_json(llama, "x"));
  neox["activation"] = "silu";
  EXPECT_THROW(config_from_json(neox, "x"), Error);
  neox["activation"] = "gelu";
  neox["mlp_bias"] = true;
  EXPECT_THROW(config_from_json(neox, "x"), Error);
}

// What a file does not say because the family always has it, and what it has to say.
TEST(ModelConfig, AGemma3HasAThetaOfItsWindowsAndAScale) {
  ModelConfig config = preset_config("tiny");
  set_family(config, "gemma3_text");
  config.windows = {8, 8, 0, 8};
  config.local_rope_theta = 500;
  config.attention_scale = 0.25;
  const Json json = config_to_json(config);
  const ModelConfig again = config_from_json(json, "x");
  EXPECT_EQ(again, config);
  EXPECT_TRUE(again.gated() && again.qk_norm && again.post_norms && again.scaled_embedding);
  EXPECT_EQ(again.norm_weight_offset, 1);
  EXPECT_EQ(again.score_scale(), 0.25f);
  EXPECT_EQ(again.embedding_scale(), std::sqrt(192.0f));
  EXPECT_EQ(again.embedding_scale(DType::bf16), 13.875f);
  EXPECT_EQ(again.embedding_scale(DType::f16), 13.859375f);
  EXPECT_TRUE(again.rotates_locally(0) && !again.rotates_locally(2));
  EXPECT_EQ(again.local_rope().theta, 500);
  EXPECT_EQ(TensorTable(config).at("model.layers.1.post_feedforward_layernorm.weight").init, Init::zeros);
  for (const char* key : {"local_rope_theta", "attention_scale"}) {
    Json without = json, zero = json;
    without.erase(key);
    zero[key] = 0;
    EXPECT_THROW(config_from_json(without, "x"), Error) << key;
    EXPECT_THROW(config_from_json(zero, "x"), Error) << key;
  }
}

TEST(ModelConfig, WhatTrainingHasNotIsRefusedByName) {
  EXPECT_EQ(training_unsupported_reason(preset_config("tiny")), "");
  EXPECT_EQ(training_unsupported_reason(random_model_config("pythia-160m")), "");
  EXPECT_EQ(training_unsupported_reason(preset_config("gemma3-1b")), "");
  ModelConfig config = random_model_config("pythia-160m");
  config.activation = Activation::gelu_tanh;
  expect_contains(training_unsupported_reason(config), "it has GELU by tanh");
}

// Each part that the persistent kernel has not has a name in messages.
TEST(ModelConfig, PartsWithoutAFusedKernelHaveNames) {
  const auto reason = [](const std::function<void(ModelConfig&)>& change) {
    ModelConfig config = preset_config("tiny");
    change(config);
    const char* part = part_without_fused_kernel(config);
    return std::string(part != nullptr ? part : "");
  };
  EXPECT_EQ(reason([](ModelConfig&) {}), "");
  EXPECT_EQ(reason([](ModelConfig& c) { c = random_model_config("pythia-160m"); }), "");
  EXPECT_EQ(reason([](ModelConfig& c) { set_family(c, "gemma3_text"); }), "GeGLU");
  expect_contains(reason([](ModelConfig& c) { c.norm_weight_offset = 1; }), "1 + weight");
  expect_contains(reason([](ModelConfig& c) { c.post_norms = true; }), "norms behind attention");
  expect_contains(reason([](ModelConfig& c) { c.scaled_embedding = true; }), "scaled embeddings");
  expect_contains(reason([](ModelConfig& c) { c.attention_scale = 1; }), "scale of attention");
  expect_contains(reason([](ModelConfig& c) { c.local_rope_theta = 1; }), "RoPE theta");
}

TEST(Rope, TableHoldsCosAndSinOfPositionTimesFrequency) {
  RopeConfig rope;
  rope.theta = 500000;
  rope.rotary_dim = 64;
  const RopeTable table = rope_table(rope, 100);
  const std::vector<float> frequencies = rope_inverse_frequencies(rope);
  for (const std::int64_t position : {0, 1, 99}) {
    for (std::int64_t i = 0; i < table.half; ++i) {
      const float angle = static_cast<float>(position) * frequencies[static_cast<std::size_t>(i)];
      EXPECT_FLOAT_EQ(table.cos[static_cast<std::size_t>(position * table.half + i)], std::cos(angle));
      EXPECT_FLOAT_EQ(table.sin[static_cast<std::size_t>(position * table.half + i)], std::sin(angle));
    }
  }
}

}  // namespace
}  // namespace weft
