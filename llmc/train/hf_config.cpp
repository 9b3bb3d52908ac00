#include "llmc/train/hf_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <string_view>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"

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
  std::vector<std::string>* warnings = nullptr;

  void warn(const std::string& key, const std::string& text) const {
    warnings->push_back(source + ": " + key + ": " + text);
  }
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
  bool flag(const std::string& key, bool fallback = false) const {
    return has(key) ? json_bool(values, key, source) : fallback;
  }
  std::string text(const std::string& key) const { return json_string(values, key, source); }
  // The object itself where it has `key`; otherwise one whose `key` is what transformers takes it for.
  Object with_default(const std::string& key, const Json& value) const {
    if (has(key)) return *this;
    warn(key, "absent, taken for " + value.dump() + " as transformers does");
    return {Json{{key, value}}, source, warnings};
  }
  Object object(const std::string& key) const {
    if (!has(key)) return {Json::object(), source + ": " + key, warnings};
    if (!values[key].is_object()) refuse(key, "expected an object or null");
    return {values[key], source + ": " + key, warnings};
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

// Whether a name of transformers' classes is that of a Llama with some head, or none.
bool is_llama_class(const Json& name) {
  std::string lower = name.get<std::string>();
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower.starts_with("llama");
}

void check_architecture(const Object& config) {
  if (const std::string type = config.text("model_type"); type != "llama") {
    config.refuse("model_type", "got " + escaped(type) + ", expected llama");
  }
  if (!config.has("architectures")) return;
  const Json& names = config.values["architectures"];
  const auto is_text = [](const Json& name) { return name.is_string(); };
  if (!names.is_array() || !std::all_of(names.begin(), names.end(), is_text)) {
    config.refuse("architectures", "expected a list of names");
  }
  if (names.empty() || std::find(names.begin(), names.end(), Json("LlamaForCausalLM")) != names.end()) return;
  if (!std::any_of(names.begin(), names.end(), is_llama_class)) {
    config.refuse("architectures",
                  "expected LlamaForCausalLM. If the model is one all the same, as model_type says, correct the name");
  }
  config.warn("architectures", "got " + escaped(names.dump()) + ", read as LlamaForCausalLM");
}

void check_weights(const Object& config) {
  const std::string activation = config.with_default("hidden_act", "silu").text("hidden_act");
  if (activation != "silu" && activation != "swish") {
    config.refuse("hidden_act", "got " + escaped(activation) + ", expected silu or swish");
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
  constexpr std::string_view kKnown[] = {"default", "linear", "dynamic", "llama3", "yarn"};
  const std::string known = "expected default, linear, dynamic, llama3 or yarn";
  for (const Object* nested : {&scaling, &parameters}) {
    for (const auto& [key, value] : nested->values.items()) {
      if (value.is_object()) nested->refuse(escaped(key), "expected one set of rope parameters for all layers");
      const bool typed = nested->has("rope_type") || nested->has("type");
      if (!typed && key != "rope_theta" && key != "partial_rotary_factor") {
        nested->refuse("rope_type", "missing, " + known + ". Add the type that the model was trained with");
      }
    }
  }
  const std::vector<Location> locations = {
      {&parameters, "rope_type"}, {&parameters, "type"}, {&scaling, "rope_type"}, {&scaling, "type"}};
  const Location* location = agreed(locations);
  if (location == nullptr) return "default";
  const std::string type = location->object->text(location->key);
  if (std::find(std::begin(kKnown), std::end(kKnown), type) == std::end(kKnown)) {
    location->object->refuse(location->key, "got " + escaped(type) + ", " + known);
  }
  return type;
}

// The scaling that rope_scaling or rope_parameters describe.
class Scaling {
 public:
  Scaling(const Object& config, const Object& scaling, const Object& parameters)
      : config_(config), scaling_(scaling), parameters_(parameters) {}

  // Which object has `key`: for an error about a missing key, one that might.
  const Object& owner(const std::string& key, bool anywhere = false) const {
    std::vector<Location> locations = {{&parameters_, key}, {&scaling_, key}};
    if (anywhere) locations.push_back({&config_, key});
    const Location* location = agreed(locations);
    return location != nullptr ? *location->object : home();
  }
  const Object& home() const { return scaling_.values.empty() ? parameters_ : scaling_; }
  double positive(const std::string& key) const { return owner(key).positive(key); }
  double positive(const std::string& key, double fallback) const {
    return owner(key).has(key) ? positive(key) : fallback;
  }
  // As transformers reads some keys: 0 counts as absent.
  bool is_set(const std::string& key) const {
    return owner(key).has(key) && owner(key).values[key] != 0 && owner(key).values[key] != false;
  }
  std::int64_t original_positions(std::int64_t max_positions) const {
    const std::string key = "original_max_position_embeddings";
    const Object& object = owner(key, true);
    if (object.has(key)) return object.integer(key, kMaxPositions);
    home().warn(key, format("absent, taken for max_position_embeddings = %lld as transformers does",
                            static_cast<long long>(max_positions)));
    return max_positions;
  }

 private:
  const Object &config_, &scaling_, &parameters_;
};

void read_llama3(const Scaling& scaling, std::int64_t max_positions, RopeConfig& rope) {
  rope.factor = scaling.positive("factor");
  rope.low_freq_factor = scaling.positive("low_freq_factor");
  rope.high_freq_factor = scaling.positive("high_freq_factor");
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.home().refuse("high_freq_factor", format("got %g, expected more than low_freq_factor = %g",
                                                     rope.high_freq_factor, rope.low_freq_factor));
  }
  rope.original_max_positions = scaling.original_positions(max_positions);
}

// With the defaults of transformers (modeling_rope_utils.py).
void read_yarn(const Scaling& scaling, std::int64_t max_positions, RopeConfig& rope) {
  rope.original_max_positions = scaling.original_positions(max_positions);
  const auto ratio = [&] {
    return static_cast<double>(max_positions) / static_cast<double>(rope.original_max_positions);
  };
  const bool says_factor = rope.original_max_positions == max_positions || scaling.owner("factor").has("factor");
  rope.factor = says_factor ? scaling.positive("factor") : ratio();
  const auto mscale = [&](double scale) { return rope.factor <= 1 ? 1.0 : 0.1 * scale * std::log(rope.factor) + 1.0; };
  double attention = mscale(1);
  if (scaling.is_set("mscale") && scaling.is_set("mscale_all_dim")) {
    attention = mscale(scaling.positive("mscale")) / mscale(scaling.positive("mscale_all_dim"));
  }
  rope.attention_factor = scaling.positive("attention_factor", attention);
  if (scaling.is_set("beta_fast")) rope.beta_fast = scaling.positive("beta_fast");
  if (scaling.is_set("beta_slow")) rope.beta_slow = scaling.positive("beta_slow");
  if (rope.beta_fast < rope.beta_slow) {
    scaling.owner("beta_fast")
        .refuse("beta_fast", format("got %g, expected at least beta_slow = %g", rope.beta_fast, rope.beta_slow));
  }
  if (rope.theta <= 1) {
    scaling.home().refuse("rope_theta", format("got %g, expected more than 1 for yarn", rope.theta));
  }
  rope.truncate = scaling.owner("truncate").flag("truncate", true);
}

RopeConfig rope_of(const Object& config, std::int64_t head_dim, std::int64_t max_positions) {
  const Object old = config.object("rope_scaling"), parameters = config.object("rope_parameters");
  RopeConfig rope;
  rope.rotary_dim = head_dim;
  const std::string type = rope_type_of(old, parameters);
  const std::vector<Location> bases = {{&config, "rope_theta"}, {&parameters, "rope_theta"}, {&old, "rope_theta"}};
  const Location* base = agreed(bases);
  rope.theta = base != nullptr ? base->object->positive(base->key)
                               : config.with_default("rope_theta", 10000.0).positive("rope_theta");
  const std::vector<Location> fractions = {
      {&config, "partial_rotary_factor"}, {&parameters, "partial_rotary_factor"}, {&old, "partial_rotary_factor"}};
  if (const Location* location = agreed(fractions);
      location != nullptr && location->object->positive(location->key) != 1) {
    location->object->refuse(location->key, "expected 1: Llama models rotate whole heads");
  }
  if (type == "default") return rope;
  const Scaling scaling(config, old, parameters);
  if (type == "dynamic") {
    scaling.positive("factor");
    scaling.home().warn("factor", format("left out: dynamic scaling begins behind max_position_embeddings = %lld, "
                                         "where weft ends",
                                         static_cast<long long>(max_positions)));
    return rope;
  }
  rope.type = type == "linear" ? RopeType::linear : type == "yarn" ? RopeType::yarn : RopeType::llama3;
  if (type == "linear") rope.factor = scaling.positive("factor");
  if (type == "llama3") read_llama3(scaling, max_positions, rope);
  if (type == "yarn") read_yarn(scaling, max_positions, rope);
  return rope;
}

}  // namespace

ModelConfig llama_from_hf_config(const Json& json, const std::string& source, std::vector<std::string>& warnings) {
  if (!json.is_object()) fail(Exit::bad_file, "%s: expected a JSON object", source.c_str());
  const Object config{json, source, &warnings};
  check_architecture(config);
  check_weights(config);
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
  model.max_positions =
      config.with_default("max_position_embeddings", 2048).integer("max_position_embeddings", kMaxPositions);
  model.norm_eps = config.with_default("rms_norm_eps", 1e-6).positive("rms_norm_eps");
  model.tied_embeddings = config.flag("tie_word_embeddings");
  model.attention_bias = config.flag("attention_bias");
  model.mlp_bias = config.flag("mlp_bias");
  model.rope = rope_of(config, model.head_dim, model.max_positions);
  return config_from_json(config_to_json(model), source);  // weft's own checks, as of any configuration
}

ModelConfig read_hf_config(const std::string& path) {
  const std::string source = escaped(path);
  std::vector<std::string> warnings;
  const Json json = parse_json(read_text_file(path, kMaxBytes), source,
                               {.bytes = kMaxBytes, .values = kMaxConfigValues, .tolerated = &warnings});
  const ModelConfig config = llama_from_hf_config(json, source, warnings);
  for (const std::string& warning : warnings) log_warning("%s", warning.c_str());
  return config;
}

}  // namespace weft
