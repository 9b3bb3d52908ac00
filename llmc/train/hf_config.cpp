#include "llmc/train/hf_config.h"

#include <algorithm>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

constexpr std::size_t kMaxBytes = 8 << 20;  // the limit of scripts/hf_config.py
// The limits of SECURITY.md. config_from_json() checks them as well, but its messages have weft's names of the keys.
constexpr std::int64_t kMaxVocab = 1'000'000, kMaxLayers = 1024, kMaxWidth = 1 << 20, kMaxHeads = 1024,
                       kMaxHeadDim = 1024, kMaxPositions = 1 << 24;

// One object of the file, with the path that names its keys in errors. Absent and null are the same.
struct Object {
  Json values = Json::object();
  std::string source;

  bool has(const std::string& key) const { return values.contains(key) && !values[key].is_null(); }
  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const {
    fail(Exit::bad_file, "%s: %s: %s", source.c_str(), key.c_str(), problem.c_str());
  }
  std::int64_t integer(const std::string& key, std::int64_t high) const {
    return json_int(values, key, 1, high, source);
  }
  double positive(const std::string& key) const {
    const double value = json_number(values, key, source);
    if (!(value > 0)) refuse(key, format("got %g, expected a number above 0", value));
    return value;
  }
  bool flag(const std::string& key) const { return has(key) && json_bool(values, key, source); }
  std::string text(const std::string& key) const { return json_string(values, key, source); }
  Object object(const std::string& key) const {
    if (!has(key)) return {Json::object(), source + ": " + key};
    if (!values[key].is_object()) refuse(key, "expected an object or null");
    return {values[key], source + ": " + key};
  }
};

// A key, and an object that may hold it.
struct Location {
  const Object* object;
  std::string key;
};

// The first of the locations that holds a value; the others that hold one must agree with it. Null: none does.
const Location* agreed(const std::vector<Location>& locations) {
  const Location* first = nullptr;
  for (const Location& location : locations) {
    if (!location.object->has(location.key)) continue;
    if (first == nullptr) {
      first = &location;
    } else if (location.object->values[location.key] != first->object->values[first->key]) {
      location.object->refuse(location.key, "disagrees with " + first->object->source + ": " + first->key);
    }
  }
  return first;
}

void check_arithmetic(const Object& config) {
  if (const std::string type = config.text("model_type"); type != "llama") {
    config.refuse("model_type", "got " + escaped(type) + ", expected llama");
  }
  if (config.has("architectures")) {
    const Json& names = config.values["architectures"];
    const bool fits = names.is_array() &&
                      (names.empty() || std::find(names.begin(), names.end(), Json("LlamaForCausalLM")) != names.end());
    if (!fits) config.refuse("architectures", "expected LlamaForCausalLM");
  }
  if (const std::string activation = config.text("hidden_act"); activation != "silu") {
    config.refuse("hidden_act", "got " + escaped(activation) + ", expected silu");
  }
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (config.flag(key)) config.refuse(key, "got true, expected false: Llama models with biases are not supported");
  }
  if (config.has("quantization_config")) config.refuse("quantization_config", "a quantized model cannot be trained");
}

std::int64_t head_dim_of(const Object& config, std::int64_t hidden, std::int64_t heads) {
  if (config.has("head_dim")) return json_int(config.values, "head_dim", 2, kMaxHeadDim, config.source);
  if (hidden % heads != 0) {
    config.refuse("hidden_size",
                  format("got %lld, expected a multiple of num_attention_heads = %lld (head_dim is absent)",
                         static_cast<long long>(hidden), static_cast<long long>(heads)));
  }
  const std::int64_t size = hidden / heads;
  if (size < 2 || size > kMaxHeadDim) {
    config.refuse("num_attention_heads", format("makes heads of %lld, expected 2 to %lld", static_cast<long long>(size),
                                                static_cast<long long>(kMaxHeadDim)));
  }
  return size;
}

std::string rope_type_of(const Object& scaling, const Object& parameters) {
  for (const Object* nested : {&scaling, &parameters}) {
    for (const auto& [key, value] : nested->values.items()) {
      if (value.is_structured()) nested->refuse(escaped(key), "expected one set of rope parameters for all layers");
      const bool typed = nested->has("rope_type") || nested->has("type");
      if (!typed && key != "rope_theta" && key != "partial_rotary_factor") {
        nested->refuse("rope_type", "missing, expected default or llama3");
      }
    }
  }
  const std::vector<Location> locations = {
      {&parameters, "rope_type"}, {&parameters, "type"}, {&scaling, "rope_type"}, {&scaling, "type"}};
  const Location* location = agreed(locations);
  if (location == nullptr) return "default";
  const std::string type = location->object->text(location->key);
  if (type != "default" && type != "llama3") {
    location->object->refuse(location->key, "got " + escaped(type) + ", expected default or llama3");
  }
  return type;
}

RopeConfig rope_of(const Object& config, std::int64_t head_dim) {
  const Object scaling = config.object("rope_scaling"), parameters = config.object("rope_parameters");
  RopeConfig rope;
  rope.rotary_dim = head_dim;
  const std::vector<Location> bases = {{&config, "rope_theta"}, {&parameters, "rope_theta"}, {&scaling, "rope_theta"}};
  const Location* base = agreed(bases);
  if (base == nullptr) config.refuse("rope_theta", "missing, expected a number above 0");
  rope.theta = base->object->positive(base->key);
  const std::vector<Location> fractions = {
      {&config, "partial_rotary_factor"}, {&parameters, "partial_rotary_factor"}, {&scaling, "partial_rotary_factor"}};
  if (const Location* location = agreed(fractions);
      location != nullptr && location->object->positive(location->key) != 1) {
    location->object->refuse(location->key, "expected 1: Llama models rotate whole heads");
  }
  if (rope_type_of(scaling, parameters) == "default") return rope;
  rope.type = RopeType::llama3;
  const Object& home = scaling.values.empty() ? parameters : scaling;  // named in errors about missing keys
  const auto owner = [&](const std::string& key, const Object& more) -> const Object& {
    const std::vector<Location> locations = {{&parameters, key}, {&scaling, key}, {&more, key}};
    const Location* location = agreed(locations);
    return location != nullptr ? *location->object : home;
  };
  rope.factor = owner("factor", parameters).positive("factor");
  rope.low_freq_factor = owner("low_freq_factor", parameters).positive("low_freq_factor");
  rope.high_freq_factor = owner("high_freq_factor", parameters).positive("high_freq_factor");
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    home.refuse("high_freq_factor",
                format("got %g, expected more than low_freq_factor = %g", rope.high_freq_factor, rope.low_freq_factor));
  }
  const std::string original = "original_max_position_embeddings";
  rope.original_max_positions = owner(original, config).integer(original, kMaxPositions);
  return rope;
}

}  // namespace

ModelConfig llama_from_hf_config(const Json& json, const std::string& source) {
  if (!json.is_object()) fail(Exit::bad_file, "%s: expected a JSON object", source.c_str());
  const Object config{json, source};
  check_arithmetic(config);
  ModelConfig model;
  model.vocab_size = model.tokenizer_vocab = config.integer("vocab_size", kMaxVocab);
  model.hidden_size = config.integer("hidden_size", kMaxWidth);
  model.num_layers = config.integer("num_hidden_layers", kMaxLayers);
  model.num_heads = config.integer("num_attention_heads", kMaxHeads);
  model.num_kv_heads =
      config.has("num_key_value_heads") ? config.integer("num_key_value_heads", model.num_heads) : model.num_heads;
  if (model.num_heads % model.num_kv_heads != 0) {
    config.refuse("num_key_value_heads",
                  format("got %lld, expected a divisor of num_attention_heads = %lld",
                         static_cast<long long>(model.num_kv_heads), static_cast<long long>(model.num_heads)));
  }
  model.head_dim = head_dim_of(config, model.hidden_size, model.num_heads);
  if (model.head_dim % 2 != 0) config.refuse("head_dim", "expected an even number: rotary embedding turns pairs");
  model.ffn_size = config.integer("intermediate_size", kMaxWidth);
  model.max_positions = config.integer("max_position_embeddings", kMaxPositions);
  model.norm_eps = config.positive("rms_norm_eps");
  model.tied_embeddings = config.flag("tie_word_embeddings");
  model.rope = rope_of(config, model.head_dim);
  return config_from_json(config_to_json(model), source);  // weft's own checks, as of any configuration
}

ModelConfig read_hf_config(const std::string& path) {
  const std::string source = escaped(path);
  return llama_from_hf_config(
      parse_json(read_text_file(path, kMaxBytes), source, {.bytes = kMaxBytes, .values = kMaxConfigValues}), source);
}

}  // namespace weft
