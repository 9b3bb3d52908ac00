// The model room: sizes that the world publishes, configurations through JSON, RoPE frequencies.
#include <gtest/gtest.h>

#include <cmath>

#include "llmc/base/error.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_table.h"

namespace weft {
namespace {

ModelConfig pythia(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t vocab) {
  ModelConfig config;
  config.family = Family::gpt_neox;
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
  config.parallel_residual = config.attention_bias = true;
  return config;
}

// The table's sum is the published parameter count: a shape wrong anywhere shows here.
TEST(TensorTable, PublishedParameterCounts) {
  EXPECT_EQ(TensorTable(preset_config("llama3.2-1b")).parameters(), 1'235'814'400);
  EXPECT_EQ(TensorTable(preset_config("llama3.2-3b")).parameters(), 3'212'749'824);
  EXPECT_EQ(TensorTable(preset_config("llama3.1-8b")).parameters(), 8'030'261'248);
  EXPECT_EQ(TensorTable(preset_config("tinyllama-1.1b")).parameters(), 1'100'048'384);
  EXPECT_EQ(TensorTable(preset_config("smollm2-135m")).parameters(), 134'515'008);
  EXPECT_EQ(TensorTable(pythia(6, 128, 4, 50304)).parameters(), 14'067'712);
  EXPECT_EQ(TensorTable(pythia(12, 768, 12, 50304)).parameters(), 162'322'944);
  EXPECT_EQ(TensorTable(pythia(16, 2048, 8, 50304)).parameters(), 1'011'781'632);
  EXPECT_EQ(TensorTable(pythia(32, 2560, 32, 50304)).parameters(), 2'775'208'960);
  EXPECT_EQ(TensorTable(pythia(36, 5120, 40, 50688)).parameters(), 11'846'072'320);
}

TEST(TensorTable, PackedNeighboursHaveNoGap) {
  for (const std::string& name : preset_names()) {
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

TEST(TensorTable, OnlyMatricesDecay) {
  ModelConfig layernorm = preset_config("tiny");
  layernorm.norm = NormKind::layernorm;
  for (const ModelConfig& config : {pythia(2, 64, 2, 100), preset_config("tiny"), layernorm}) {
    const TensorTable table(config);
    for (const TensorSpec& spec : table.specs()) EXPECT_EQ(spec.decay, spec.shape.size() == 2) << spec.name;
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

// No key has a default but bos_id, whose absence means that there is none.
TEST(ModelConfig, EveryKeyIsNeeded) {
  const Json good = config_to_json(preset_config("llama3.2-1b"));
  const auto expect_missed = [](const Json& config, const std::string& key) {
    try {
      config_from_json(config, "file.bin");
      ADD_FAILURE() << "a configuration without " << key << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::bad_file);
      EXPECT_NE(std::string(error.what()).find(key + ": "), std::string::npos) << error.what();
    }
  };
  for (const auto& [key, value] : good.items()) {
    Json without = good;
    without.erase(key);
    if (key != "bos_id") expect_missed(without, key);
  }
  for (const auto& [key, value] : good["rope"].items()) {
    Json without = good;
    without["rope"].erase(key);
    expect_missed(without, key);
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
    try {
      config_from_json(bad, "file.bin");
      ADD_FAILURE() << key << " " << value << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::bad_file);
      EXPECT_NE(std::string(error.what()).find("file.bin"), std::string::npos) << error.what();
      const std::string word = key == "num_kv_heads" ? "num_heads" : key;
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
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

TEST(ModelConfig, UnknownPresetListsTheKnownOnes) {
  try {
    preset_config("llama4");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::usage);
    EXPECT_NE(std::string(error.what()).find("llama3.2-1b"), std::string::npos);
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
