// Hugging Face's config.json, read and written, and what train_llama makes of it (--config FILE).
#include "llmc/model/families/hf_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/infer/describe.h"
#include "llmc/model/presets.h"
#include "llmc/train/inputs.h"
#include "llmc/train/rank_fields.h"
#include "llmc/train/report.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

// What transformers 4 writes for Llama 3.2 1B.
Json llama_1b() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_act", "silu"},
          {"vocab_size", 128256},
          {"hidden_size", 2048},
          {"intermediate_size", 8192},
          {"num_hidden_layers", 16},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 8},
          {"head_dim", 64},
          {"max_position_embeddings", 131072},
          {"rms_norm_eps", 1e-5},
          {"tie_word_embeddings", true},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"bos_token_id", 128000},
          {"eos_token_id", {128001, 128008}},
          {"rope_theta", 500000.0},
          {"rope_scaling",
           {{"rope_type", "llama3"},
            {"factor", 32.0},
            {"low_freq_factor", 1.0},
            {"high_freq_factor", 4.0},
            {"original_max_position_embeddings", 8192}}}};
}

ModelConfig parsed(const Json& config) {
  std::vector<std::string> warnings;
  return model_from_hf({.config = config, .source = "x.json"}, warnings).config;
}

// Without its special ids, which presets have not.
ModelConfig shape(const Json& config) {
  ModelConfig model = parsed(config);
  model.eos_ids.clear();
  model.bos_id.reset();
  return model;
}

Json written(const ModelConfig& model, const Json& original = nullptr) {
  std::string problem;
  Json config = hf_from_model(model, original, "x.bin", problem);
  EXPECT_EQ(problem, "");
  return config;
}

TEST(HfConfig, IsThePresetOfTheSameModel) {
  EXPECT_TRUE(shape(llama_1b()) == preset_config("llama3.2-1b"));
  Json tiny_llama = llama_1b();  // TinyLlama, as transformers 4 writes it: no head_dim, no scaling
  tiny_llama.update({{"vocab_size", 32000},
                     {"intermediate_size", 5632},
                     {"num_hidden_layers", 22},
                     {"num_key_value_heads", 4},
                     {"max_position_embeddings", 2048},
                     {"tie_word_embeddings", false},
                     {"rope_theta", 10000.0},
                     {"rope_scaling", nullptr}});
  tiny_llama.erase("head_dim");
  EXPECT_TRUE(shape(tiny_llama) == preset_config("tinyllama-1.1b"));
}

// What is written has both spellings: each alone is the same model.
TEST(HfConfig, APublishedModelIsTheSameInEitherSpelling) {
  for (const std::string& name : preset_names()) {
    ModelConfig model = random_model_config(name);
    model.tokenizer_vocab = model.vocab_size;
    const Json both = written(model);
    Json old = both, newer = both;
    old.erase("rope_parameters");
    for (const char* key : {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"}) {
      newer.erase(key);
    }
    for (const Json& config : {both, old, newer}) EXPECT_TRUE(parsed(config) == model) << name;
  }
}

// Each case is read, and what is accepted is written again: that describes the same model, without a warning.
TEST(HfConfig, Cases) {
  const Json vectors = parse_json(read_text_file("test/fixtures/hf_config/cases.json", 1 << 20), "cases.json");
  for (const Json& test : vectors["cases"]) {
    const std::string family = test["family"], name = family + ", " + test["name"].get<std::string>();
    SCOPED_TRACE(name);
    Json config = vectors["bases"][family];
    config.update(test.value("set", Json::object()));
    const Json removed = test.value("remove", Json::array());
    for (const Json& key : removed) config.erase(key.get<std::string>());
    const std::string text = test.value("before", "") + "{" + test.value("members", "") + config.dump().substr(1);
    std::vector<std::string> warnings;
    const auto read = [&] {
      HfConfig hf{parse_json(text, "x.json", {.tolerated = &warnings}),
                  test.value("generation", Json()),
                  "x.json",
                  "generation.json",
                  {}};
      if (test.contains("rope_theta")) hf.rope_theta = test["rope_theta"].get<double>();
      return model_from_hf(hf, warnings);
    };
    if (test.contains("refused")) {
      const std::string error = error_of(Exit::bad_file, read);
      for (const Json& word : test["refused"]) expect_contains(error, word.get<std::string>());
      continue;
    }
    const ModelConfig model = read().config;
    const Json json = config_to_json(model);
    for (const auto& [path, want] : test["model"].items()) {
      const std::size_t dot = path.find('.');
      const Json& got = dot == std::string::npos ? json[path] : json[path.substr(0, dot)][path.substr(dot + 1)];
      if (want.is_number()) {
        EXPECT_NEAR(got.get<double>(), want.get<double>(), 1e-15 * std::abs(want.get<double>())) << path;
      } else {
        EXPECT_EQ(got, want) << path;
      }
    }
    ASSERT_EQ(warnings.size(), test["warns"].size());
    for (std::size_t i = 0; i < warnings.size(); ++i) expect_contains(warnings[i], test["warns"][i].get<std::string>());
    for (const Json& again : {written(model), written(model, config)}) {
      EXPECT_TRUE(model_from_hf({.config = again, .source = "again"}, warnings).config == model);
    }
    EXPECT_EQ(warnings.size(), test["warns"].size());
  }
}

// The model's own keys win; stale ones that would change it go; the others stay.
TEST(HfConfig, WhatIsWrittenKeepsTheKeysThatDescribeNoModel) {
  for (const char* name : {"llama3.2-1b", "pythia-160m"}) {
    const ModelConfig model = random_model_config(name);
    const Json alone = written(model);
    Json stale = {{"some_key", {1}}, {"quantization_config", {{"bits", 4}}}, {"original_max_position_embeddings", 5}};
    for (const char* key : {"head_dim", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"}) stale[key] = 3;
    for (const auto& [key, value] : alone.items()) stale[key] = "stale";
    Json want = alone;
    want["some_key"] = {1};
    EXPECT_EQ(written(model, stale), want);
    EXPECT_EQ(written(model, Json::array()), alone);
  }
}

TEST(HfConfig, SomeModelsHaveNone) {
  const auto problem_of = [](auto change) {
    ModelConfig model = preset_config("tiny");
    change(model);
    std::string problem;
    EXPECT_TRUE(hf_from_model(model, nullptr, "x.bin", problem).is_null());
    return problem;
  };
  EXPECT_EQ(problem_of([](ModelConfig& model) { model.norm = NormKind::layernorm; }),
            "model.norm: got 'layernorm', which no Hugging Face configuration of a llama model describes");
  expect_contains(problem_of([](ModelConfig& model) { model.rope.rotary_dim = 16; }), "model.rope: got {");
}

// For some parts of heads of these sizes the fraction, times the size, falls short of the part in floating point.
TEST(HfConfig, ARotaryFractionIsExact) {
  ModelConfig model = random_model_config("pythia-14m");
  for (std::int64_t head_dim = 44; head_dim <= 49; ++head_dim) {
    model.head_dim = head_dim;
    model.hidden_size = head_dim * model.num_heads;
    for (model.rope.rotary_dim = 2; model.rope.rotary_dim <= head_dim; model.rope.rotary_dim += 2) {
      ASSERT_EQ(parsed(written(model)).rope.rotary_dim, model.rope.rotary_dim) << "of " << head_dim;
    }
  }
}

// Each size at its limits and one beyond, where nothing else of the file stands in the way.
TEST(HfConfig, SizesHaveLimits) {
  const std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> limits = {
      {"vocab_size", 1, 1'000'000},      {"hidden_size", 1, 1 << 20},
      {"num_hidden_layers", 1, 1024},    {"num_attention_heads", 1, 1024},
      {"num_key_value_heads", 1, 32},    {"head_dim", 2, 1024},
      {"intermediate_size", 1, 1 << 20}, {"max_position_embeddings", 1, 1 << 24}};
  for (const auto& [key, low, high] : limits) {
    Json config = llama_1b();
    for (const char* id : {"bos_token_id", "eos_token_id"}) config.erase(id);
    if (key == "num_attention_heads") config.erase("num_key_value_heads");
    for (const std::int64_t value : {low, high}) {
      config[key] = value;
      EXPECT_EQ(written(parsed(config))[key], value);
    }
    for (const std::int64_t value : {low - 1, high + 1}) {
      config[key] = value;
      EXPECT_EQ(error_of(Exit::bad_file, [&] { parsed(config); }),
                format("x.json: %s: got %lld, expected an integer from %lld to %lld", key.c_str(),
                       static_cast<long long>(value), static_cast<long long>(low), static_cast<long long>(high)));
    }
  }
}

// Each key of both families, in another type.
TEST(HfConfig, OtherTypesAreRefused) {
  for (const char* name : {"llama3.1-8b", "pythia-160m"}) {
    const Json whole = written(random_model_config(name));
    for (const auto& [key, value] : whole.items()) {
      if (key == "architectures" || key.ends_with("token_id")) continue;
      for (const Json& wrong :
           {Json::array({4096}), Json{{"a", {{"b", 1}}}}, Json("4096"), Json(!value.is_boolean())}) {
        if (value.is_boolean() && wrong.is_boolean()) continue;
        Json config = whole;
        config[key] = wrong;
        expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), key);
      }
    }
  }
}

TEST(HfConfig, Utf16IsNamed) {
  for (const char* mark : {"\xff\xfe", "\xfe\xff"}) {
    expect_contains(error_of(Exit::bad_file, [&] { parse_json(std::string(mark) + "{", "x.json"); }), "UTF-16");
  }
}

// null is what transformers writes for a value that a model does not have: each key alone, also of the inner object.
TEST(HfConfig, NullIsAbsent) {
  const auto outcome = [](const Json& config) -> std::string {
    try {
      return config_to_json(parsed(config)).dump();
    } catch (const Error&) {
      return "refused";  // the words differ: missing, or null where a number belongs
    }
  };
  const Json whole = llama_1b();
  for (const auto& [key, value] : whole.items()) {
    Json absent = whole, null = whole;
    absent.erase(key);
    null[key] = nullptr;
    EXPECT_EQ(outcome(null), outcome(absent)) << key;
  }
  for (const auto& [key, value] : whole["rope_scaling"].items()) {
    Json absent = whole, null = whole;
    absent["rope_scaling"].erase(key);
    null["rope_scaling"][key] = nullptr;
    EXPECT_EQ(outcome(null), outcome(absent)) << key;
  }
}

// Each key alone: out of range or of another type. What is absent and what weft has not is in AgreesWithTheConverter's vectors.
TEST(HfConfig, WhatItCannotBeIsRefusedByItsKey) {
  const std::vector<std::pair<std::string, Json>> bad = {
      {"vocab_size", 1'000'001},
      {"vocab_size", "32000"},
      {"vocab_size", 0},
      {"hidden_size", (1 << 20) + 1},
      {"hidden_size", 2048.5},
      {"intermediate_size", 0},
      {"num_hidden_layers", 1025},
      {"num_attention_heads", 1025},
      {"num_key_value_heads", 33},
      {"num_key_value_heads", 3},
      {"head_dim", 1025},
      {"head_dim", 1026},
      {"head_dim", 0},
      {"head_dim", 1},
      {"head_dim", 63},
      {"max_position_embeddings", (1 << 24) + 1},
      {"rms_norm_eps", 0},
      {"rope_theta", -1},
      {"partial_rotary_factor", 0.5},
  };
  // Whatever stands beside it, also where the file has nothing that it need not have, or null in its place.
  Json shortest = llama_1b(), nulls = llama_1b();
  for (const char* key : {"architectures", "attention_bias", "mlp_bias", "head_dim", "num_key_value_heads",
                          "tie_word_embeddings", "bos_token_id", "eos_token_id", "rope_scaling"}) {
    shortest.erase(key);
    nulls[key] = nullptr;
  }
  EXPECT_TRUE(parsed(shortest) == parsed(nulls));
  for (const Json& beside : {llama_1b(), shortest, nulls}) {
    for (const auto& [key, value] : bad) {
      Json config = beside;
      config[key] = value;
      expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), key);
    }
  }
  for (const char* key :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_type"}) {
    Json config = llama_1b();
    config["rope_scaling"].erase(key);
    if (std::string(key) != "original_max_position_embeddings") {
      expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), key);
    }
    config = llama_1b();
    config["rope_scaling"][key] = Json::array();
    expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), key);
  }
  // At the top level, where older files have it; both places have to agree.
  Json older = llama_1b();
  older["rope_scaling"].erase("original_max_position_embeddings");
  older["original_max_position_embeddings"] = 8192;
  EXPECT_TRUE(shape(older) == preset_config("llama3.2-1b"));
  older["rope_scaling"]["original_max_position_embeddings"] = 4096;
  expect_contains(error_of(Exit::bad_file, [&] { parsed(older); }),
                  "original_max_position_embeddings is 4096: they disagree");
  // Wherever it may stand: a part of each head is not what these models rotate.
  for (const char* home : {"rope_scaling", "rope_parameters"}) {
    Json partial = llama_1b();
    partial[home] = partial["rope_scaling"];
    partial[home]["partial_rotary_factor"] = 0.5;
    expect_contains(error_of(Exit::bad_file, [&] { parsed(partial); }), "partial_rotary_factor");
    partial[home]["partial_rotary_factor"] = 1.0;
    EXPECT_TRUE(shape(partial) == preset_config("llama3.2-1b")) << home;
    partial[home]["high_freq_factor"] = partial[home]["low_freq_factor"];
    expect_contains(error_of(Exit::bad_file, [&] { parsed(partial); }), "high_freq_factor");
  }
  // Head sizes that follow from the others have the same limits as those that are given.
  for (const auto& [hidden, accepted] :
       {std::pair(32 * 2, true), {32 * 1, false}, {32 * 1024, true}, {32 * 1026, false}}) {
    Json follows = llama_1b();
    follows.erase("head_dim");
    follows["hidden_size"] = hidden;
    if (accepted) {
      EXPECT_EQ(parsed(follows).head_dim, hidden / 32);
      follows["head_dim"] = hidden / 32;
      EXPECT_EQ(parsed(follows).head_dim, hidden / 32);
    } else {
      expect_contains(error_of(Exit::bad_file, [&] { parsed(follows); }), "expected from 2 to 1024");
    }
  }
  Json uneven = llama_1b();
  uneven.erase("head_dim");
  uneven["hidden_size"] = 2047;
  expect_contains(error_of(Exit::bad_file, [&] { parsed(uneven); }), "hidden_size");
  expect_contains(error_of(Exit::bad_file, [&] { parsed(Json::array()); }), "object");
}

// What need not be there, and what says no more than its absence.
TEST(HfConfig, WordsThatChangeNothingAreAccepted) {
  Json plain = llama_1b();
  plain.erase("rope_scaling");
  const ModelConfig expected = parsed(plain);
  EXPECT_EQ(expected.rope.type, RopeType::standard);
  const std::vector<std::pair<std::string, Json>> words = {
      {"architectures", Json::array()},
      {"rope_scaling", Json::object()},
      {"rope_scaling", {{"rope_type", "default"}}},
      {"rope_scaling", {{"type", "default"}}},
      {"rope_parameters", {{"rope_theta", 500000.0}}},
      {"rope_parameters", {{"partial_rotary_factor", 1}}},
      {"rope_parameters", {{"rope_theta", 500000.0}, {"partial_rotary_factor", 1.0}}},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500000.0}}},
      {"partial_rotary_factor", 1},
      {"quantization_config", nullptr},
      {"torch_dtype", "bfloat16"}};
  for (const auto& [key, value] : words) {
    Json config = plain;
    config[key] = value;
    EXPECT_TRUE(parsed(config) == expected) << key << ": " << value;
  }
}

// The frequencies of llama3's scaling are two, to the bit.
TEST(HfConfig, TheHighFrequencyIsAboveTheLowOne) {
  Json config = llama_1b();
  for (const auto& [low, high, accepted] :
       {std::tuple(4.0, 4.0, false), {4.0, std::nextafter(4.0, 5.0), true}, {4.0, 3.0, false}}) {
    config["rope_scaling"]["low_freq_factor"] = low;
    config["rope_scaling"]["high_freq_factor"] = high;
    if (accepted) {
      EXPECT_EQ(parsed(config).rope.high_freq_factor, high);
    } else {
      expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), "rope_scaling.high_freq_factor: got ");
    }
  }
}

// What may stand in several places must be the same in all that have it, whichever two they are.
TEST(HfConfig, AllPlacesOfAValueHaveToAgree) {
  Json everywhere = llama_1b();
  everywhere["partial_rotary_factor"] = 1.0;
  for (const char* key : {"rope_theta", "partial_rotary_factor"}) everywhere["rope_scaling"][key] = everywhere[key];
  everywhere["rope_scaling"]["type"] = "llama3";
  everywhere["rope_parameters"] = everywhere["rope_scaling"];
  everywhere["original_max_position_embeddings"] = 8192;
  EXPECT_TRUE(shape(everywhere) == preset_config("llama3.2-1b"));
  const std::vector<std::pair<std::vector<std::string>, Json>> others = {
      {{"/rope_theta", "/rope_parameters/rope_theta", "/rope_scaling/rope_theta"}, 10000.0},
      {{"/partial_rotary_factor", "/rope_parameters/partial_rotary_factor", "/rope_scaling/partial_rotary_factor"},
       0.5},
      {{"/original_max_position_embeddings", "/rope_parameters/original_max_position_embeddings",
        "/rope_scaling/original_max_position_embeddings"},
       4096},
      {{"/rope_parameters/factor", "/rope_scaling/factor"}, 8.0},
      {{"/rope_parameters/low_freq_factor", "/rope_scaling/low_freq_factor"}, 2.0},
      {{"/rope_parameters/high_freq_factor", "/rope_scaling/high_freq_factor"}, 8.0},
      {{"/rope_parameters/rope_type", "/rope_parameters/type", "/rope_scaling/rope_type", "/rope_scaling/type"},
       "default"}};
  for (const auto& [places, other] : others) {
    for (const std::string& one : places) {
      Json config = everywhere;
      config[Json::json_pointer(one)] = other;
      expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), ": they disagree");
      for (const std::string& two : places) {
        if (one == two || other.is_string()) continue;  // an object without its type is refused
        for (const std::string& place : places) config[Json::json_pointer(place)] = nullptr;
        config[Json::json_pointer(one)] = other;
        config[Json::json_pointer(two)] = everywhere[Json::json_pointer(two)];
        expect_contains(error_of(Exit::bad_file, [&] { parsed(config); }), ": they disagree");
        config[Json::json_pointer(one)] = nullptr;
        EXPECT_TRUE(shape(config) == preset_config("llama3.2-1b")) << "in " << two << " alone";
      }
    }
  }
}

// A model file with this tokenizer, or another tensor of bytes; "": without one.
void write_model(const std::string& path, const ModelConfig& config, const std::string& tokenizer,
                 const Json& more = Json::object(), const char* name = kTokenizerTensor) {
  Json configuration = {{"model", config_to_json(config)}};
  configuration.update(more);
  TensorFileWriter writer(path, FileKind::model, configuration);
  const TensorTable table(config);
  for (const TensorSpec& spec : table.specs()) writer.declare(spec.name, DType::f32, spec.shape);
  if (!tokenizer.empty()) writer.declare(name, DType::u8, {std::ssize(tokenizer)});
  for (const TensorSpec& spec : table.specs()) {
    const std::vector<float> values(static_cast<std::size_t>(spec.elements), 0.5f);
    writer.write_f32(values.data(), values.size());
  }
  writer.write(tokenizer.data(), tokenizer.size());
  writer.publish();
}

Json described(const std::string& path, const std::string& input = "") {
  std::istringstream stream(input);
  std::vector<std::string> warnings;
  return describe_model(path, stream, warnings);
}

// A directory, its config.json, a model file and a request on stdin, of the same model.
TEST(Describe, TakesEveryFormOfAModel) {
  const TemporaryDirectory directory;
  const ModelConfig model = micro_config();
  const Json config = written(model, {{"some_key", 1}});
  write_bytes(directory.file("config.json"), config.dump());
  write_bytes(directory.file("generation_config.json"), R"({"eos_token_id": [4, 5]})");
  write_bytes(directory.file("broken.json"), "[]");
  write_model(directory.file("model.bin"), model, "", {{"hf_config", config}});
  const TensorTable table(model);

  const Json of_config = described(directory.file("config.json"));
  EXPECT_EQ(of_config["model"], config_to_json(model));
  EXPECT_EQ(of_config["hf_config"], config);
  EXPECT_EQ(of_config["embedding"], "model.embed_tokens.weight");
  EXPECT_EQ(of_config["head"], "lm_head.weight");
  EXPECT_EQ(of_config["linears"],
            parse_json(R"({"qkv": ["q_proj", "k_proj", "v_proj"], "output": ["o_proj"], "up": ["gate_proj", "up_proj"],
                           "down": ["down_proj"]})",
                       "linears"));
  EXPECT_EQ(of_config["trainable"], true);
  EXPECT_EQ(of_config["ties_head"], model.tied_embeddings);
  ASSERT_EQ(of_config["tensors"].size(), table.specs().size());
  for (std::size_t i = 0; i < table.specs().size(); ++i) {
    const TensorSpec& spec = table.specs()[i];
    EXPECT_EQ(of_config["tensors"][i],
              (Json{{"name", spec.name}, {"shape", spec.shape}, {"begins_as_zeros", spec.init == Init::zeros}}));
  }
  EXPECT_EQ(described("-", Json{{"config", config}}.dump()), of_config);
  EXPECT_EQ(described("-", Json{{"model", config_to_json(model)}, {"hf_config", config}}.dump()), of_config);
  Json of_file = described(directory.file("model.bin"));
  EXPECT_EQ(of_file["hf_config"]["dtype"], "float32");
  EXPECT_EQ(of_file["hf_config"]["torch_dtype"], "float32");
  for (const char* key : {"dtype", "torch_dtype"}) of_file["hf_config"].erase(key);
  EXPECT_EQ(of_file, of_config);
  EXPECT_EQ(described(directory.file(""))["model"]["eos_ids"], Json({4, 5}));

  const Json base = {{"config", config}, {"source", "a/b.json"}};
  Json request = base;
  request["config"].erase("vocab_size");
  EXPECT_EQ(error_of(Exit::bad_file, [&] { described("-", request.dump()); }),
            "'a/b.json': vocab_size: got nothing, expected an integer from 1 to 1000000");
  request = base;
  request["rope_theta"] = 77;
  expect_contains(error_of(Exit::bad_file, [&] { described("-", request.dump()); }), "--rope-theta is 77");
  Json tied = written(random_model_config("pythia-14m"));
  tied["tie_word_embeddings"] = true;
  const Json of_neox = described("-", Json{{"config", tied}}.dump());
  EXPECT_EQ(of_neox["ties_head"], true);
  EXPECT_EQ(of_neox["model"]["tied_embeddings"], false);
  EXPECT_EQ(of_neox["trainable"], true);
  for (const char* bad : {"", "[]", "{}", "{\"config\": 3}", "{\"model\": {}}"}) {
    error_of(Exit::bad_file, [&] { described("-", bad); });
  }
  for (const char* bad : {"broken.json", "missing.json"}) {
    expect_contains(error_of(Exit::bad_file, [&] { described(directory.file(bad)); }), bad);
  }
}

// As many positions as the model has, and no more.
TEST(Inputs, ASequenceMayHaveAllPositionsOfTheModel) {
  const TemporaryDirectory directory;
  TrainSettings settings = micro_settings();
  settings.config = "tiny";
  settings.seq_len = preset_config("tiny").max_positions;
  write_shard(directory.file("x.bin"), patterned_tokens(static_cast<std::size_t>(settings.seq_len) + 2), 32);
  settings.train = directory.file("x.bin");
  EXPECT_EQ(open_inputs(settings).train->windows(), 1u);
  ++settings.seq_len;
  expect_contains(error_of(Exit::usage, [&] { open_inputs(settings); }), "--seq-len: got ");
}

// The vocabulary of a new model is that of its data, in steps of 128; what is given explicitly is taken as it is.
TEST(Inputs, TheVocabularyOfANewModelIsThatOfItsShards) {
  const TemporaryDirectory directory;
  const auto vocabulary = [&](std::uint64_t of_shards, std::int64_t given) {
    write_shard(directory.file("x.bin"), patterned_tokens(100), of_shards);
    TrainSettings settings = micro_settings();
    settings.config = "tiny";
    settings.vocab_size = given;
    settings.train = directory.file("x.bin");
    const ModelConfig config = open_inputs(settings).config;
    EXPECT_EQ(config.tokenizer_vocab, static_cast<std::int64_t>(of_shards));
    return config.vocab_size;
  };
  EXPECT_EQ(vocabulary(32, 0), 128);
  EXPECT_EQ(vocabulary(128, 0), 128);
  EXPECT_EQ(vocabulary(129, 0), 256);
  EXPECT_EQ(vocabulary(2048, 0), preset_config("tiny").vocab_size) << "that of the tokenizer of README's demo";
  EXPECT_EQ(vocabulary(50'254, 0), preset_config("d12").vocab_size) << "NeoX's";
  EXPECT_EQ(vocabulary(65'536, 0), 65'536);
  EXPECT_EQ(vocabulary(999'936, 0), 999'936);
  EXPECT_EQ(vocabulary(999'937, 0), 1'000'000) << "no more than a model may have";
  EXPECT_EQ(vocabulary(1'000'000, 0), 1'000'000);
  EXPECT_EQ(vocabulary(32, 33), 33);
  EXPECT_EQ(vocabulary(32, 2048), 2048);
  expect_contains(error_of(Exit::usage, [&] { vocabulary(32, 31); }), "--vocab-size");
}

// A model that exists keeps its own vocabulary and its own tokens, whatever its new data has.
TEST(Inputs, AModelKeepsItsVocabularyAndItsTokens) {
  const TemporaryDirectory directory;
  ModelConfig config = micro_config();
  config.tokenizer_vocab = 30;
  config.bos_id = 3;
  config.eos_ids = {4, 5};
  write_model(directory.file("model.bin"), config, "");
  write_model(directory.file("more.bin"), config, "1", Json::object(), "model.layers.1.bias");
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open(directory.file("more.bin")); }),
                  "tensor 'model.layers.1.bias' does not belong to a llama model of this configuration");
  write_shard(directory.file("x.bin"), patterned_tokens(100), 32);
  TrainSettings settings = micro_settings();
  settings.config.clear();
  settings.model = directory.file("model.bin");
  settings.train = directory.file("x.bin");
  settings.out = directory.file("out");
  const TrainInputs inputs = open_inputs(settings);
  EXPECT_EQ(config_to_json(inputs.config), config_to_json(config));
  EXPECT_EQ(inputs.began_from,
            format("%016llx", static_cast<unsigned long long>(inputs.weights->file().header_hash())));
}

// A tokenizer of so many tokens, each of which begins with `name`.
std::string tokenizer_text(const std::string& name, std::int64_t tokens) {
  Json document = {{"model", {{"type", "BPE"}, {"merges", Json::array()}, {"vocab", Json::object()}}},
                   {"added_tokens", Json::array()},
                   {"decoder", {{"type", "Fuse"}}}};
  for (std::int64_t id = 0; id < tokens; ++id) document["model"]["vocab"][name + std::to_string(id)] = id;
  return document.dump();
}

// Shards, a model and tokenizers in directories of their own.
struct InputFiles {
  InputFiles() {
    for (const char* name : {"data", "val", "models", "other"}) std::filesystem::create_directory(file(name));
    write_shard(file("data/x.bin"), patterned_tokens(100), 32, xxh3_64(text));
    write_shard(file("val/v.bin"), patterned_tokens(100), 32, xxh3_64(text));
    write_bytes(file("other/tokenizer.json"), text);
    write_model(file("models/plain.bin"), micro_config(), "");
    write_model(file("models/own.bin"), micro_config(), text);
    write_model(file("models/another.bin"), micro_config(), another);
  }
  std::string file(const std::string& name) const { return directory.file(name); }
  // Settings to train a new model, or to go on from `model`.
  TrainSettings settings(const std::string& model = "") const {
    TrainSettings result = micro_settings();
    result.config = model.empty() ? "tiny" : "";
    if (!model.empty()) result.model = file("models/" + model);
    result.train = file("data/x.bin");
    return result;
  }

  const std::string text = tokenizer_text("a", 32), another = tokenizer_text("b", 32);
  const TemporaryDirectory directory;
};

// The option comes before the model's own, and that before the file beside the shards.
TEST(Inputs, TheTokenizerIsTheFirstThatThereIs) {
  const InputFiles files;
  const std::string given = files.file("other/tokenizer.json"), beside = files.file("data/tokenizer.json"),
                    beside_val = files.file("val/tokenizer.json");
  const auto expect_source = [&](const TrainSettings& settings, const std::string& source) {
    const TrainInputs inputs = open_inputs(settings);
    EXPECT_EQ(inputs.tokenizer_source, source);
    EXPECT_EQ(inputs.tokenizer, source.empty() ? "" : files.text);
  };
  const auto with = [&](TrainSettings settings) {
    settings.tokenizer = given;
    return settings;
  };
  for (const bool is_beside : {false, true}) {
    if (is_beside) write_bytes(beside, files.text);
    for (const char* model : {"", "plain.bin"}) {
      expect_source(files.settings(model), is_beside ? beside : "");
      expect_source(with(files.settings(model)), given);
    }
    expect_source(files.settings("own.bin"), files.file("models/own.bin"));
    expect_source(with(files.settings("own.bin")), given);
    expect_source(with(files.settings("another.bin")), given);
    EXPECT_EQ(error_of(Exit::bad_file, [&] { open_inputs(files.settings("another.bin")); }),
              "--train: " + escaped(files.file("data/x.bin")) + " was made with another tokenizer than that of " +
                  escaped(files.file("models/another.bin")));
  }
  TrainSettings missing = files.settings("own.bin");
  missing.tokenizer = files.file("none.json");
  expect_contains(error_of(Exit::bad_file, [&] { open_inputs(missing); }), "none.json");

  // Beside the shards of --train; those of --val count where they are all there is. Without shards there is no place.
  write_bytes(beside_val, files.another);
  TrainSettings both = files.settings();
  both.val = files.file("val/v.bin");
  expect_source(both, beside);
  write_bytes(beside_val, files.text);
  TrainSettings eval = files.settings("plain.bin");
  eval.eval = true;
  eval.train.clear();
  eval.val = files.file("val/v.bin");
  expect_source(eval, beside_val);
  eval.model = files.file("models/own.bin");
  expect_source(eval, eval.model);
  TrainSettings no_shards = files.settings();
  no_shards.train.clear();
  expect_source(no_shards, "");
  std::filesystem::remove(beside);  // a link to nothing is there, and cannot be read
  std::filesystem::create_symlink(files.file("nowhere"), beside);
  error_of(Exit::bad_file, [&] { open_inputs(files.settings()); });
}

// The chat format of the training shards comes before the model's own, whose template then no longer belongs to it.
TEST(Inputs, TheChatFormatIsThatOfTheConversations) {
  const InputFiles files;
  const std::string beside = files.file("data/chat_format.json");
  const auto format_that_ends = [](const char* end) {
    return Json{{"version", 1},
                {"order", "any"},
                {"kinds", Json::array()},
                {"rules", Json::array()},
                {"refusals", Json::array()},
                {"end", {end}}};
  };
  const Json own = format_that_ends("<own>"), other = format_that_ends("<other>");
  const Json learned = {
      {"chat_format", own}, {"chat_template", "{{ messages }}"}, {"chat_tokens", {{"bos_token", "a0"}}}};
  write_model(files.file("models/chats.bin"), micro_config(), files.text, learned);
  TrainSettings eval = files.settings("chats.bin");  // as train_llama --eval: there are no training shards
  eval.val = eval.train;
  eval.eval = true;
  eval.train.clear();
  const auto chat = [&](const char* model) { return open_inputs(files.settings(model)).chat; };

  for (const char* model : {"", "plain.bin"}) EXPECT_EQ(chat(model), Json::object());
  EXPECT_EQ(chat("chats.bin"), learned);
  write_bytes(beside, own.dump(1));
  for (const char* model : {"", "plain.bin"}) EXPECT_EQ(chat(model), Json({{"chat_format", own}}));
  EXPECT_EQ(chat("chats.bin"), learned);
  write_bytes(beside, other.dump());
  EXPECT_EQ(chat("chats.bin"), Json({{"chat_format", other}}));
  EXPECT_EQ(open_inputs(eval).chat, learned);

  for (const auto& [text, words] :
       {std::pair{"{}", "version"}, std::pair{"{", "JSON"}, std::pair{"[1]", "expected an object"}}) {
    write_bytes(beside, text);
    const std::string error = error_of(Exit::bad_file, [&] { open_inputs(files.settings()); });
    expect_contains(error, escaped(beside));
    expect_contains(error, words);
  }
  write_bytes(beside, std::string((1 << 20) + 1, ' '));
  expect_contains(error_of(Exit::bad_file, [&] { open_inputs(files.settings()); }), "1048576");
  std::filesystem::remove(beside);
  std::filesystem::create_symlink(files.file("nowhere"), beside);
  error_of(Exit::bad_file, [&] { open_inputs(files.settings()); });
}

// Shards of both options: their vocabulary and their tokenizer.
TEST(Inputs, ShardsFitTheModelAndOneAnother) {
  const InputFiles files;
  const std::string train = files.file("data/x.bin"), val = files.file("val/v.bin");
  const auto expect_outcome = [&](const TrainSettings& settings, Exit code, const std::string& words) {
    expect_contains(reason_of(code, [&] { open_inputs(settings); }), code == Exit::ok ? "accepted" : words);
  };
  TrainSettings settings = files.settings("plain.bin"), eval = settings, from_scratch = files.settings();
  for (TrainSettings* each : {&settings, &eval, &from_scratch}) each->val = val;
  eval.eval = true;
  eval.train.clear();
  const std::uint64_t hash = xxh3_64(files.text), other_hash = xxh3_64(files.another);
  const auto write = [&](const std::string& path, std::uint64_t vocabulary, std::uint64_t tokenizer) {
    write_shard(path, patterned_tokens(100), vocabulary, tokenizer);
  };
  const auto name = [](const char* option, const std::string& path) { return option + escaped(path); };
  for (const TrainSettings& each : {settings, eval, from_scratch}) expect_outcome(each, Exit::ok, "");

  const std::string wide = " has a vocabulary of 33, the model one of 32. Choose another model or tokenizer";
  write(val, 33, hash);
  for (const TrainSettings& each : {settings, eval}) expect_outcome(each, Exit::usage, name("--val: ", val) + wide);
  expect_outcome(from_scratch, Exit::ok, "");  // its vocabulary is padded
  from_scratch.vocab_size = 32;
  expect_outcome(from_scratch, Exit::usage, "the model one of 32. Choose another --vocab-size or tokenizer");
  write(val, 32, hash);
  write(train, 33, hash);
  expect_outcome(settings, Exit::usage, name("--train: ", train) + wide);
  expect_outcome(eval, Exit::ok, "");

  write(train, 32, hash);
  write(val, 32, other_hash);
  expect_outcome(settings, Exit::bad_file,
                 name("--val: ", val) + " was made with another tokenizer than the shards of --train");
  expect_outcome(eval, Exit::ok, "");
  eval.tokenizer = files.file("other/tokenizer.json");
  expect_outcome(eval, Exit::bad_file,
                 name("--val: ", val) + " was made with another tokenizer than that of " + escaped(eval.tokenizer));
  settings.val.clear();
  settings.tokenizer = files.file("other/tokenizer.json");
  expect_outcome(settings, Exit::ok, "");
  write(train, 32, other_hash);
  expect_outcome(settings, Exit::bad_file,
                 name("--train: ", train) + " was made with another tokenizer than that of " + escaped(eval.tokenizer));

  // --val is opened only by who measures on it: training and --eval.
  settings.tokenizer.clear();
  settings.val = files.file("val/none.bin");
  expect_outcome(settings, Exit::bad_file, "none.bin");
  settings.train.clear();
  expect_outcome(settings, Exit::ok, "");
  settings.eval = true;
  expect_outcome(settings, Exit::bad_file, "none.bin");
}

TEST(Inputs, ATokenizerFitsTheModel) {
  const InputFiles files;
  const std::string path = files.file("other/tokenizer.json");
  TrainSettings settings = files.settings("plain.bin"), from_scratch = files.settings();
  settings.train.clear();
  settings.tokenizer = from_scratch.tokenizer = path;
  open_inputs(settings);
  const std::string large = tokenizer_text("c", 33);
  write_bytes(path, large);
  EXPECT_EQ(error_of(Exit::usage, [&] { open_inputs(settings); }),
            "--tokenizer: " + escaped(path) + " has 33 tokens, the model 32");
  write_shard(files.file("data/x.bin"), patterned_tokens(100), 32, xxh3_64(large));
  EXPECT_EQ(open_inputs(from_scratch).config.vocab_size, 128);
  from_scratch.vocab_size = 32;
  expect_contains(error_of(Exit::usage, [&] { open_inputs(from_scratch); }), "has 33 tokens, the model 32");
}

TEST(Inputs, ARunHasADirectoryOfItsOwn) {
  const InputFiles files;
  TrainSettings settings = files.settings("plain.bin");
  settings.val = files.file("val/v.bin");
  for (const char* read_from : {"data", "val", "models", "other/../data"}) {
    settings.out = files.file(read_from);
    EXPECT_EQ(error_of(Exit::usage, [&] { open_inputs(settings); }),
              "--out: " + escaped(settings.out) + " holds the input files. Choose a directory of its own for the run");
  }
  settings.out = files.file("data/x.bin");
  EXPECT_EQ(error_of(Exit::usage, [&] { open_inputs(settings); }),
            "--out: " + escaped(settings.out) + " is not a directory");
  for (const char* free : {"other", "none", "data/run"}) {
    settings.out = files.file(free);
    EXPECT_NO_THROW(open_inputs(settings)) << free;
  }
}

// The norms of a model that exists are its own; a given kind has to be the same. --compare leaves the length to the dump.
TEST(Inputs, WhatIsGivenBesideAModelIsWhatTheModelHas) {
  const InputFiles files;
  TrainSettings settings = files.settings("plain.bin");
  settings.norm = "layernorm";
  settings.norm_given = true;
  EXPECT_EQ(error_of(Exit::usage, [&] { open_inputs(settings); }),
            "--norm: got layernorm, but " + escaped(settings.model) + " has rmsnorm");
  settings.norm_given = false;
  EXPECT_EQ(open_inputs(settings).config.norm, NormKind::rmsnorm);
  settings.norm = "rmsnorm";
  settings.norm_given = true;
  EXPECT_EQ(open_inputs(settings).config.norm, NormKind::rmsnorm);

  settings.train.clear();
  settings.seq_len = 32;
  EXPECT_NO_THROW(open_inputs(settings));
  settings.seq_len = 33;
  EXPECT_EQ(error_of(Exit::usage, [&] { open_inputs(settings); }),
            "--seq-len: got 33, expected at most the 32 positions of the model");
  settings.compare = "a dump";
  EXPECT_NO_THROW(open_inputs(settings));

  TrainSettings from_scratch = files.settings();
  for (const auto& [name, kind] : {std::pair("layernorm", NormKind::layernorm), {"rmsnorm", NormKind::rmsnorm}}) {
    from_scratch.norm = name;
    EXPECT_EQ(open_inputs(from_scratch).config.norm, kind);
  }
  write_bytes(files.file("shape.json"), llama_1b().dump());
  from_scratch.config = files.file("shape.json");
  const ModelConfig from_file = open_inputs(from_scratch).config;
  EXPECT_EQ(from_file.num_layers, 16);
  EXPECT_TRUE(from_file.eos_ids.empty() && !from_file.bos_id) << "those of the data's tokenizer";
  Json neox = written(random_model_config("pythia-14m"));
  write_bytes(files.file("shape.json"), neox.dump());
  EXPECT_EQ(open_inputs(from_scratch).config.norm, NormKind::layernorm) << "rmsnorm is the default of others";
  from_scratch.norm_given = true;
  EXPECT_EQ(error_of(Exit::usage, [&] { open_inputs(from_scratch); }),
            "--norm: got rmsnorm, but " + escaped(from_scratch.config) + " has layernorm");
  from_scratch.norm_given = false;
  neox["hidden_act"] = "gelu_new";
  write_bytes(files.file("shape.json"), neox.dump());
  expect_contains(error_of(Exit::bad_file, [&] { open_inputs(from_scratch); }), "it has GELU by tanh");
}

// Data that is damaged, also that of --val, and in whichever of its shards.
TEST(Inputs, DamagedShardsAreRefusedBeforeAnythingElse) {
  const TemporaryDirectory directory;
  TrainSettings settings = micro_settings();
  settings.config = "tiny";
  settings.train = directory.file("train_*.bin");
  settings.val = directory.file("val_*.bin");
  const std::vector<std::string> names = {"train_0.bin", "train_1.bin", "val_0.bin", "val_1.bin"};
  for (const std::string& name : names) write_shard(directory.file(name), patterned_tokens(50), 32);
  for (const bool dry_run : {false, true}) {
    settings.dry_run = dry_run;
    EXPECT_EQ(open_inputs(settings).val->shards().size(), 2u);
    for (const std::string& name : names) {
      std::string bytes = read_bytes(directory.file(name));
      bytes.back() ^= 1;  // another token or one that is no token
      write_bytes(directory.file(name), bytes);
      expect_contains(error_of(Exit::bad_file, [&] { open_inputs(settings); }), name);
      bytes.back() ^= 1;
      write_bytes(directory.file(name), bytes);
    }
  }
}

// What ranks may not have different: all options but these, the model, the tokenizer and the data, whatever the names of the
// files.
TEST(RankFields, AreAllThatDecidesNumbersOrCalls) {
  const TemporaryDirectory directory;
  const auto fields_of = [](const TrainSettings& settings, const TrainInputs& inputs) {
    std::map<std::string, std::string> fields;
    for (const RankField& field : rank_fields(settings, inputs)) {
      EXPECT_TRUE(fields.emplace(field.name, field.value).second) << field.name << " twice";
    }
    return fields;
  };
  const char* words[] = {"train_llama", "--config", "tiny", "--print-config"};
  TrainSettings settings = *parse_train_options(static_cast<int>(std::size(words)), words, "test");
  const auto make_inputs = [] {
    TrainInputs inputs;
    inputs.config = micro_config();
    inputs.config.bos_id = 1;
    inputs.tokenizer = "{}";
    inputs.began_from = "0123456789abcdef";
    return inputs;
  };
  const TrainInputs inputs = make_inputs();
  const auto before = fields_of(settings, inputs);
  const std::set<std::string> own = {"config", "model",       "train",        "val",    "tokenizer",
                                     "out",    "gpus",        "threads",      "color",  "debug-inject",
                                     "json",   "max-minutes", "comm-timeout", "verbose"};
  std::size_t options = 0, of_own = 0;
  for (std::size_t i = 0; i < settings.effective.size(); ++i) {
    TrainSettings other = settings;
    auto& [name, value] = other.effective[i];
    auto expected = before;
    if (own.contains(name)) {
      ++of_own;
    } else {
      ++options;
      EXPECT_EQ(expected.at("--" + name), value);
      expected["--" + name] = value + "x";
    }
    value += "x";
    EXPECT_EQ(fields_of(other, inputs), expected) << name;
  }
  EXPECT_EQ(of_own, own.size());
  const Json model = config_to_json(inputs.config);
  EXPECT_EQ(before.size(), options + model.size() + 4) << "and the model file, the tokenizer, two counts of shards";
  for (const auto& [key, value] : model.items()) EXPECT_EQ(before.at("model, " + key), value.dump());
  EXPECT_EQ(before.at("--model, header hash"), inputs.began_from);
  EXPECT_EQ(before.at("--train, number of shards"), "0");
  EXPECT_EQ(before.at("--val, number of shards"), "0");

  const auto differing = [&](const std::function<void(TrainInputs&)>& change) {
    TrainInputs other = make_inputs();
    change(other);
    std::vector<std::string> names;
    for (const auto& [name, value] : fields_of(settings, other)) {
      if (!before.contains(name) || before.at(name) != value) names.push_back(name);
    }
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(differing([](TrainInputs& other) { other.tokenizer = "[]"; }), Names{"tokenizer, hash"});
  EXPECT_EQ(differing([](TrainInputs& other) { other.began_from = ""; }), Names{"--model, header hash"});
  EXPECT_EQ(differing([](TrainInputs& other) { other.config.eos_ids = {3}; }), Names{"model, eos_ids"});
  EXPECT_EQ(differing([](TrainInputs& other) { other.config.norm_eps *= 2; }), Names{"model, norm_eps"});
  write_shard(directory.file("x_0.bin"), patterned_tokens(50), 32);
  write_shard(directory.file("x_1.bin"), patterned_tokens(60), 32);
  const auto of = [&](const char* pattern) { return TokenDataset(directory.file(pattern), 8); };
  EXPECT_EQ(differing([&](TrainInputs& other) { other.train.emplace(of("x_*.bin")); }),
            (Names{"--train, number of shards", "--train, shard 1", "--train, shard 2"}));
  EXPECT_EQ(differing([&](TrainInputs& other) { other.val.emplace(of("x_1.bin")); }),
            (Names{"--val, number of shards", "--val, shard 1"}));
  TrainInputs with_data = make_inputs();
  with_data.train.emplace(of("x_*.bin"));
  const auto shards = fields_of(settings, with_data);
  write_shard(directory.file("x_1.bin"), patterned_tokens(60, 1), 32);
  with_data.train.emplace(of("x_*.bin"));
  const auto other_shards = fields_of(settings, with_data);
  EXPECT_EQ(shards.at("--train, shard 1"), other_shards.at("--train, shard 1"));
  EXPECT_NE(shards.at("--train, shard 2"), other_shards.at("--train, shard 2")) << "other tokens, the same number";
}

// A new model with this tokenizer and shards of its ids.
TrainSettings new_model(const TemporaryDirectory& directory, const Json& tokenizer) {
  const std::string text = tokenizer.dump();
  write_bytes(directory.file("tokenizer.json"), text);
  write_shard(directory.file("x.bin"), patterned_tokens(100), 32, xxh3_64(text));
  TrainSettings settings = micro_settings();
  settings.config = "tiny";
  settings.train = directory.file("x.bin");
  return settings;
}

// What the tokenizer puts in front of a text is the first token of a new model; a model that is there keeps its own.
TEST(Inputs, ANewModelBeginsWithTheTokenOfItsTokenizer) {
  const TemporaryDirectory directory;
  for (const bool begins : {true, false}) {
    Json document = {{"model", {{"type", "BPE"}, {"merges", Json::array()}, {"vocab", {{"a", 0}, {"b", 1}}}}},
                     {"added_tokens", {{{"id", 2}, {"content", "<s>"}, {"special", true}}}},
                     {"decoder", {{"type", "Fuse"}}}};
    if (begins) document["post_processor"] = token_in_front("<s>", 2);
    TrainSettings settings = new_model(directory, document);
    EXPECT_EQ(open_inputs(settings).config.bos_id, begins ? std::optional<std::int32_t>(2) : std::nullopt);
    settings.config.clear();
    settings.model = directory.file("model");
    write_model(settings.model, micro_config(), "");
    EXPECT_EQ(open_inputs(settings).config.bos_id, micro_config().bos_id);
  }
}

// The ends of a document under all the names that tokenizers of these families have for it, and under no other.
TEST(Inputs, ANewModelStopsAtTheEndTokensOfItsTokenizer) {
  const TemporaryDirectory directory;
  const auto ends = [&](const std::vector<std::string>& names) {
    Json document = {{"model", {{"type", "BPE"}, {"merges", Json::array()}, {"vocab", {{"a", 0}, {"b", 1}}}}},
                     {"added_tokens", Json::array()},
                     {"decoder", {{"type", "Fuse"}}}};
    for (const std::string& name : names) {
      document["added_tokens"].push_back(
          {{"id", 2 + document["added_tokens"].size()}, {"content", name}, {"special", true}});
    }
    return open_inputs(new_model(directory, document)).config.eos_ids;
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(ends({"<|endoftext|>"}), Ids{2});
  EXPECT_EQ(ends({"<s>", "<|end_of_text|>"}), Ids{3});
  EXPECT_EQ(ends({"<unk>", "<s>", "</s>"}), Ids{4});
  EXPECT_EQ(ends({"</s>", "<|endoftext|>"}), (Ids{3, 2}));
  EXPECT_EQ(ends({"<s>", "<|eot_id|>", "<pad>"}), Ids{});
}

}  // namespace
}  // namespace weft
