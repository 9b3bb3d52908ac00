#include "llmc/model/families/hf_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/model/families/family.h"
#include "llmc/model/limits.h"

namespace weft {

namespace {

constexpr std::size_t kMaxBytes = 8 << 20;  // of a config.json, as in scripts/hf_config.py

// A value for a message: a text in quotes, anything else as JSON.
std::string shown(const Json& value) {
  if (value.is_null()) return "nothing";
  if (value.is_string()) return escaped(value.get<std::string>());
  const std::string quoted = escaped(value.dump(-1, ' ', true, Json::error_handler_t::replace));
  return quoted.substr(1, quoted.size() - 2);
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// ---- places of a value ----------------------------------------------------------------------------------------------

// A key, and an object that may hold it.
struct Place {
  const HfObject* object;
  std::string key;
};

// The first of the places that holds a value; the others that hold one must agree with it. Empty: none does.
std::optional<Place> agreed(const std::vector<Place>& places) {
  std::optional<Place> first;
  for (const Place& place : places) {
    if (!place.object->has(place.key)) continue;
    if (!first) {
      first = place;
      continue;
    }
    const Json &value = (*place.object)[place.key], &other = (*first->object)[first->key];
    if (value == other) continue;
    place.object->refuse(place.key,
                         format("got %s, but %s is %s: they disagree. Remove the wrong one", shown(value).c_str(),
                                first->object->name(first->key).c_str(), shown(other).c_str()));
  }
  return first;
}

// ---- rotary embedding -----------------------------------------------------------------------------------------------

// Reads rope_scaling (transformers 4), rope_parameters (transformers 5), and the keys beside them.
class RopeReader {
 public:
  RopeReader(const HfObject& config, const HfRules& rules)
      : config_(config),
        rules_(rules),
        scaling_(config.object("rope_scaling")),
        parameters_(rules.local_rope_theta > 0 ? of_layer_type(config, "full_attention")
                                               : config.object("rope_parameters")) {}

  // Of rope_parameters, where it has an object for each type of layer.
  static HfObject of_layer_type(const HfObject& config, const char* type) {
    const HfObject all = config.object("rope_parameters");
    for (const auto& [key, value] : all.values().items()) {
      if (key == "full_attention" || key == "sliding_attention") continue;
      all.refuse(escaped(key),
                 "expected an object for full_attention and one for sliding_attention, as of this family");
    }
    return all.object(type);
  }

  RopeConfig read(const ModelConfig& model, std::optional<double> user_theta) const {
    const std::string type = read_type();
    RopeConfig rope;
    rope.theta = theta(user_theta);
    rope.rotary_dim = rotary_dim(model.head_dim);
    if (type == "dynamic") {
      number("factor");
      home().warn("factor", "left out: dynamic scaling begins behind max_position_embeddings = " +
                                std::to_string(model.max_positions) + ", where weft ends");
    }
    if (type == "linear") {
      rope.type = RopeType::linear;
      rope.factor = number("factor");
    }
    if (type == "llama3") read_llama3(model.max_positions, rope);
    if (type == "yarn") read_yarn(model.max_positions, rope);
    return rope;
  }

 private:
  std::string read_type() const {
    const std::string known = "default, linear, dynamic, llama3 or yarn";
    for (const HfObject* nested : {&scaling_, &parameters_}) {
      const bool typed = nested->has("rope_type") || nested->has("type");
      for (const auto& [key, value] : nested->values().items()) {
        if (value.is_object()) {
          nested->refuse(escaped(key), "got an object, expected one set of rope parameters for all layers");
        }
        if (typed || key == "rope_theta" || key == "partial_rotary_factor") continue;
        nested->expected("rope_type", known + ". Add the type that the model was trained with");
      }
    }
    const auto place =
        agreed({{&parameters_, "rope_type"}, {&parameters_, "type"}, {&scaling_, "rope_type"}, {&scaling_, "type"}});
    if (!place) return "default";
    const std::string type = place->object->text(place->key);
    for (const char* name : {"default", "linear", "dynamic", "llama3", "yarn"}) {
      if (type == name) return type;
    }
    place->object->expected(place->key, known + ". No other scaling of positions is supported");
  }

  // transformers 5 reads a top-level key by the family's own name alone.
  void warn_of_other_name(const Place& place, const char* own) const {
    if (own == nullptr || place.object != &config_ || config_.has(own) || parameters_.has(place.key)) return;
    config_.warn(place.key, std::string("taken for ") + own + ", which is missing; transformers 5 leaves it out");
  }

  double theta(std::optional<double> user) const {
    std::vector<Place> places = {{&config_, "rope_theta"}};
    if (rules_.rope_theta_key != nullptr) places.push_back({&config_, rules_.rope_theta_key});
    places.insert(places.end(), {{&parameters_, "rope_theta"}, {&scaling_, "rope_theta"}});
    const std::optional<Place> place = agreed(places);
    if (!place) return user ? *user : config_.positive("rope_theta", rules_.rope_theta);
    warn_of_other_name(*place, rules_.rope_theta_key);
    const double value = place->object->positive(place->key);
    if (user && *user != value) {
      place->object->refuse(place->key,
                            format("got %g, but --rope-theta is %g: they disagree. Leave --rope-theta away or "
                                   "correct config.json",
                                   value, *user));
    }
    return value;
  }

  std::int64_t rotary_dim(std::int64_t head_dim) const {
    const std::string key = "partial_rotary_factor";
    std::vector<Place> places = {{&config_, key}, {&parameters_, key}, {&scaling_, key}};
    Place place = {&config_, "head_dim"};
    if (rules_.rotary_fraction_key != nullptr) {
      place.key = rules_.rotary_fraction_key;
      places.insert(places.begin(), place);
    }
    const std::optional<Place> found = agreed(places);
    if (found) {
      place = *found;
      warn_of_other_name(place, rules_.rotary_fraction_key);
    }
    const double fraction =
        found || rules_.rotary_fraction_key != nullptr ? place.object->positive(place.key, rules_.rotary_fraction) : 1;
    if (fraction > 1) place.object->expected(place.key, "at most 1");
    if (fraction != 1 && rules_.rotary_fraction_key == nullptr) {
      place.object->expected(place.key, "1: models of this family rotate whole heads");
    }
    const auto dims =
        static_cast<std::int64_t>(static_cast<double>(head_dim) * fraction);  // truncated, as transformers does
    if (dims < 2 || dims % 2 != 0) {
      place.object->refuse(place.key, "got " + std::to_string(dims) + " rotary dimensions of " +
                                          std::to_string(head_dim) + " in a head, expected an even number, at least 2");
    }
    return dims;
  }

  void read_llama3(std::int64_t max_positions, RopeConfig& rope) const {
    rope.type = RopeType::llama3;
    rope.factor = number("factor");
    rope.low_freq_factor = number("low_freq_factor");
    rope.high_freq_factor = number("high_freq_factor");
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      home().refuse("high_freq_factor", format("got %g, expected more than low_freq_factor = %g", rope.high_freq_factor,
                                               rope.low_freq_factor));
    }
    rope.original_max_positions = original_positions(max_positions);
  }

  // With the defaults of transformers (modeling_rope_utils.py). The factor of attention's scores is worked out here, so
  // that a model file has it as a number.
  void read_yarn(std::int64_t max_positions, RopeConfig& rope) const {
    rope.type = RopeType::yarn;
    rope.original_max_positions = original_positions(max_positions);
    const bool says_factor = rope.original_max_positions == max_positions || owner("factor").has("factor");
    rope.factor = says_factor ? number("factor")
                              : static_cast<double>(max_positions) / static_cast<double>(rope.original_max_positions);
    const auto mscale = [&](double scale) {
      return rope.factor <= 1 ? 1.0 : 0.1 * scale * std::log(rope.factor) + 1.0;
    };
    double attention = mscale(1);
    if (is_set("mscale") && is_set("mscale_all_dim")) {
      attention = mscale(number("mscale")) / mscale(number("mscale_all_dim"));
    }
    rope.attention_factor = owner("attention_factor").has("attention_factor") ? number("attention_factor") : attention;
    if (is_set("beta_fast")) rope.beta_fast = number("beta_fast");
    if (is_set("beta_slow")) rope.beta_slow = number("beta_slow");
    if (rope.beta_fast < rope.beta_slow) {
      owner("beta_fast")
          .refuse("beta_fast", format("got %g, expected at least beta_slow = %g", rope.beta_fast, rope.beta_slow));
    }
    if (rope.theta <= 1) {
      owner("rope_theta").refuse("rope_theta", format("got %g, expected more than 1 for yarn", rope.theta));
    }
    rope.truncate = owner("truncate").flag("truncate", true);
  }

  // Which object has a value of the scaling; where none has, the one that might, for the error.
  const HfObject& owner(const std::string& key, bool anywhere = false) const {
    std::vector<Place> places = {{&parameters_, key}, {&scaling_, key}};
    if (anywhere) places.push_back({&config_, key});
    const std::optional<Place> place = agreed(places);
    return place ? *place->object : home();
  }
  const HfObject& home() const { return scaling_.values().empty() ? parameters_ : scaling_; }
  double number(const std::string& key) const { return owner(key).positive(key); }
  // As transformers reads some keys: 0 counts as absent.
  bool is_set(const std::string& key) const {
    const Json& value = owner(key)[key];
    return !value.is_null() && value != 0 && value != false;
  }
  std::int64_t original_positions(std::int64_t max_positions) const {
    const std::string key = "original_max_position_embeddings";
    const HfObject& object = owner(key, true);
    if (object.has(key)) return object.integer(key, 1, kMaxPositions);
    home().warn(
        key, "absent, taken for max_position_embeddings = " + std::to_string(max_positions) + " as transformers does");
    return max_positions;
  }

  const HfObject& config_;
  const HfRules& rules_;
  const HfObject scaling_, parameters_;
};

// Of the layers with a window: rope_local_base_freq (transformers 4), or their part of rope_parameters (transformers 5).
double read_local_theta(const HfObject& config, const HfRules& rules) {
  const HfObject local = RopeReader::of_layer_type(config, "sliding_attention");
  for (const char* key : {"rope_type", "type"}) {
    if (local.has(key) && local[key] != "default") {
      local.expected(key, "default: layers with a window rotate without scaling");
    }
  }
  const std::optional<Place> place = agreed({{&config, "rope_local_base_freq"}, {&local, "rope_theta"}});
  return place ? place->object->positive(place->key) : config.positive("rope_local_base_freq", rules.local_rope_theta);
}

// ---- what all families have -----------------------------------------------------------------------------------------

// A model of several modalities has the configuration of its text model in text_config: this one, with what the model's own
// head and generation go by. Others are as they are.
Json text_config(const Json& config) {
  const Json type = config.value("model_type", Json()), text = config.value("text_config", Json());
  for (const Family* family : families()) {
    if (family->hf.multimodal == nullptr || type != family->hf.multimodal || !text.is_object()) continue;
    Json merged = text;
    merged["model_type"] = text.value("model_type", Json(family->name));
    for (const char* key : {"tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config"}) {
      if (const Json own = config.value(key, Json()); !own.is_null()) merged[key] = own;
    }
    return merged;
  }
  return config;
}

const Family& read_family(const HfObject& config) {
  const Family* const family = find_family(config.text("model_type"));
  if (family == nullptr) {
    std::vector<std::string> known;
    for (const Family* each : families()) known.emplace_back(each->name);
    config.expected("model_type", "one of " + join(known) + ". No other architecture is supported");
  }
  const Json& names = config["architectures"];
  if (names.is_null()) return *family;
  const auto is_text = [](const Json& name) { return name.is_string(); };
  if (!names.is_array() || !std::all_of(names.begin(), names.end(), is_text)) {
    config.expected("architectures", "a list of names");
  }
  const std::string own = family->hf.architecture;
  if (names.empty() || std::find(names.begin(), names.end(), Json(own)) != names.end()) return *family;
  // A model of the same family with another head, or none: LlamaModel, LLaMAForCausalLM,
  // GPTNeoXForSequenceClassification
  const auto lower = [](std::string text) {
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return text;
  };
  const std::string stem = lower(own.substr(0, own.find("ForCausalLM")));
  if (std::none_of(names.begin(), names.end(),
                   [&](const Json& name) { return lower(name.get<std::string>()).starts_with(stem); })) {
    config.expected("architectures", own + ". If the model is one all the same, as model_type says, correct the name");
  }
  config.warn("architectures", "got " + shown(names) + ", read as " + own);
  return *family;
}

Activation read_activation(const HfObject& config, const HfRules& rules) {
  const std::string name = config.text(rules.activation_key, rules.activations.front().name);
  std::vector<std::string> known;
  for (const HfActivation& each : rules.activations) {
    if (name == each.name) return each.activation;
    known.push_back(escaped(each.name));
  }
  config.expected(rules.activation_key, "one of " + join(known) + ". No other activation of this family is supported");
}

// The token ids of `key` in the generation config if it has some, otherwise in the config. Those that the model cannot
// know are left out.
std::vector<std::int32_t> read_ids(const HfObject& config, const HfObject& generation, const std::string& key,
                                   std::int64_t vocab, std::size_t most) {
  const HfObject& owner = generation.has(key) ? generation : config;
  const Json& given = owner[key];
  const bool list = given.is_array() && most > 1;
  if (list && given.size() > most) {
    owner.refuse(key, format("got %zu ids, expected at most %zu", given.size(), most));
  }
  std::vector<std::int32_t> ids;
  for (const Json& value : given.is_null() ? Json::array() : list ? given : Json::array({given})) {
    if (!value.is_number_integer()) owner.refuse(key, "got " + shown(value) + ", expected a token id");
    const std::int64_t id = json_integer(value).value_or(-1);
    if (id < 0 || id >= vocab) {
      owner.warn(
          key, "got " + shown(value) + ", left out: the model has the ids below vocab_size = " + std::to_string(vocab));
    } else if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
      ids.push_back(static_cast<std::int32_t>(id));
    }
  }
  return ids;
}

Json parse(const std::string& path, std::vector<std::string>& warnings) {
  return parse_json(read_text_file(path, kMaxBytes), escaped(path),
                    {.bytes = kMaxBytes, .values = kMaxConfigValues, .tolerated = &warnings});
}

// ---- writing --------------------------------------------------------------------------------------------------------

// rope_scaling; empty without scaling.
Json scaling_of(const RopeConfig& rope) {
  if (rope.type == RopeType::standard) return Json::object();
  Json scaling = {{"rope_type", rope_type_name(rope.type)}, {"factor", rope.factor}};
  if (rope.type != RopeType::linear) scaling["original_max_position_embeddings"] = rope.original_max_positions;
  if (rope.type == RopeType::llama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == RopeType::yarn) {
    scaling["beta_fast"] = rope.beta_fast;
    scaling["beta_slow"] = rope.beta_slow;
    scaling["truncate"] = rope.truncate;
    scaling["attention_factor"] = rope.attention_factor;
  }
  return scaling;
}

// The fraction f for which the integer part of head_dim f, which is what transformers computes, is rotary_dim.
double rotary_fraction(const ModelConfig& model) {
  const auto head_dim = static_cast<double>(model.head_dim), rotary = static_cast<double>(model.rope.rotary_dim);
  const double fraction = rotary / head_dim;
  return std::floor(head_dim * fraction) == rotary ? fraction : std::nextafter(fraction, 1.0);
}

void write_rope(const ModelConfig& model, const HfRules& rules, Json& config) {
  // Also keys that only other families know: they would be stale.
  for (const char* key : {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "rotary_pct",
                          "rotary_emb_base", "partial_rotary_factor", "original_max_position_embeddings"}) {
    config.erase(key);
  }
  const Json scaling = scaling_of(model.rope);
  Json parameters = {{"rope_type", "default"}};
  parameters.update(scaling);
  parameters["rope_theta"] = config["rope_theta"] = model.rope.theta;
  if (rules.rope_theta_key != nullptr) config[rules.rope_theta_key] = model.rope.theta;
  if (rules.rotary_fraction_key != nullptr) {
    const double fraction = rotary_fraction(model);
    config[rules.rotary_fraction_key] = fraction;
    config["partial_rotary_factor"] = parameters["partial_rotary_factor"] = fraction;
  }
  config["rope_scaling"] = scaling.empty() ? Json(nullptr) : scaling;
  if (rules.local_rope_theta > 0) {
    config["rope_local_base_freq"] = model.local_rope_theta;
    const Json local = {{"rope_type", "default"}, {"rope_theta", model.local_rope_theta}};
    parameters = {{"full_attention", parameters}, {"sliding_attention", local}};
  }
  config["rope_parameters"] = parameters;
}

}  // namespace

// ---- one object -----------------------------------------------------------------------------------------------------

const Json& HfObject::operator[](const std::string& key) const {
  static const Json kNothing;
  const auto found = values_.is_object() ? values_.find(key) : values_.end();
  return found == values_.end() ? kNothing : *found;
}

void HfObject::warn(const std::string& key, const std::string& text) const {
  warnings_->push_back(source_ + ": " + name(key) + ": " + text);
}

void HfObject::refuse(const std::string& key, const std::string& problem) const {
  fail(Exit::bad_file, "%s: %s: %s", source_.c_str(), name(key).c_str(), problem.c_str());
}

void HfObject::expected(const std::string& key, const std::string& what) const {
  refuse(key, "got " + shown((*this)[key]) + ", expected " + what);
}

Json HfObject::with_default(const std::string& key, const Json& fallback) const {
  if (has(key) || fallback.is_null()) return (*this)[key];
  warn(key, "absent, taken for " + shown(fallback) + " as transformers does");
  return fallback;
}

std::int64_t HfObject::integer(const std::string& key, std::int64_t low, std::int64_t high,
                               const Json& fallback) const {
  const std::optional<std::int64_t> value = json_integer(with_default(key, fallback));
  if (!value || *value < low || *value > high) {
    expected(key, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return *value;
}

double HfObject::positive(const std::string& key, const Json& fallback) const {
  const Json value = with_default(key, fallback);
  if (!value.is_number() || !(value.get<double>() > 0 && value.get<double>() < 1e300)) {
    expected(key, "a number above 0");
  }
  return value.get<double>();
}

std::string HfObject::text(const std::string& key, const Json& fallback) const {
  const Json value = with_default(key, fallback);
  if (!value.is_string()) expected(key, "a string");
  return value.get<std::string>();
}

bool HfObject::flag(const std::string& key, bool fallback) const {
  if (has(key) && !(*this)[key].is_boolean()) expected(key, "true or false");
  return has(key) ? (*this)[key].get<bool>() : fallback;
}

HfObject HfObject::object(const std::string& key) const {
  static const Json kEmpty = Json::object();
  const Json& value = (*this)[key];
  if (!value.is_null() && !value.is_object()) expected(key, "an object or null");
  return {value.is_null() ? kEmpty : value, source_, *warnings_, name(key) + "."};
}

// ---- for families ---------------------------------------------------------------------------------------------------

std::int64_t divided_head_dim(const HfObject& config, const ModelConfig& model) {
  if (model.hidden_size % model.num_heads != 0) {
    config.expected("hidden_size", "a multiple of num_attention_heads = " + std::to_string(model.num_heads));
  }
  const std::int64_t size = model.hidden_size / model.num_heads;
  if (size < 2 || size > kMaxHeadDim) {
    config.refuse("num_attention_heads", "got " + std::to_string(model.num_heads) + ", which makes heads of " +
                                             std::to_string(size) + ", expected from 2 to " +
                                             std::to_string(kMaxHeadDim));
  }
  return size;
}

void read_grouped_heads(const HfObject& config, ModelConfig& model, HeadDefaults absent) {
  const auto size = [&](const char* key, std::int64_t low, std::int64_t high, std::int64_t default_of_absent) {
    if (!config.has(key) && (config.says_null(key) || default_of_absent == 0)) return std::int64_t{0};
    return config.integer(key, low, high, default_of_absent);
  };
  model.head_dim = size("head_dim", 2, kMaxHeadDim, absent.head_dim);
  if (model.head_dim == 0) model.head_dim = divided_head_dim(config, model);
  model.num_kv_heads = size("num_key_value_heads", 1, model.num_heads, absent.kv_heads);
  if (model.num_kv_heads == 0) model.num_kv_heads = model.num_heads;
  if (model.num_heads % model.num_kv_heads != 0) {
    config.expected("num_key_value_heads", "a divisor of num_attention_heads = " + std::to_string(model.num_heads));
  }
}

void read_biases(const HfObject& config, ModelConfig& model) {
  model.qkv_bias = model.output_bias = config.flag("attention_bias");
  model.mlp_bias = config.flag("mlp_bias");
}

void write_biases(const ModelConfig& model, Json& config) {
  config["attention_bias"] = model.output_bias;
  config["mlp_bias"] = model.mlp_bias;
}

void write_grouped_heads(const ModelConfig& model, Json& config) {
  config["num_key_value_heads"] = model.num_kv_heads;
  config["head_dim"] = model.head_dim;
}

void read_windows(const HfObject& config, ModelConfig& model, const std::vector<bool>& sliding, std::int64_t absent) {
  if (config.says_null("sliding_window") || (!config.has("sliding_window") && absent == 0)) return;
  const std::int64_t window = config.integer("sliding_window", 1, kMaxPositions, absent);
  if (window >= model.max_positions && model.local_rope_theta == 0) return;
  for (const bool slides : sliding) model.windows.push_back(slides ? window : 0);
}

std::vector<bool> sliding_layers(const HfObject& config, const ModelConfig& model,
                                 const std::function<bool(std::int64_t layer)>& slides) {
  const Json& types = config["layer_types"];
  if (!types.is_null()) {
    const bool all_layers = types.is_array() && std::ssize(types) == model.num_layers;
    const auto known = [](const Json& type) { return type == "full_attention" || type == "sliding_attention"; };
    if (!all_layers || !std::all_of(types.begin(), types.end(), known)) {
      config.refuse("layer_types", "expected full_attention or sliding_attention for each of " +
                                       std::to_string(model.num_layers) + " layers");
    }
  }
  std::vector<bool> sliding;
  for (std::int64_t l = 0; l < model.num_layers; ++l) {
    sliding.push_back(types.is_null() ? slides(l) : types[static_cast<std::size_t>(l)] == "sliding_attention");
  }
  return sliding;
}

void read_layer_windows(const HfObject& config, ModelConfig& model,
                        const std::function<bool(std::int64_t layer)>& slides, std::int64_t absent) {
  const std::vector<bool> sliding = sliding_layers(config, model, slides);
  if (!config.flag("use_sliding_window")) {
    if (config.has("layer_types") && std::find(sliding.begin(), sliding.end(), true) != sliding.end()) {
      config.refuse("layer_types",
                    "got sliding_attention, but use_sliding_window is not true: they disagree. Correct one");
    }
    return;
  }
  read_windows(config, model, sliding, absent);
}

void write_layer_windows(const ModelConfig& model, Json& config) {
  for (const char* key : {"layer_types", "max_window_layers"}) config.erase(key);
  config["use_sliding_window"] = !model.windows.empty();
  config["sliding_window"] = nullptr;
  for (std::int64_t l = 0; l < model.num_layers; ++l) {
    if (model.window(l) > 0) config["sliding_window"] = model.window(l);
    config["layer_types"].push_back(model.window(l) > 0 ? "sliding_attention" : "full_attention");
  }
}

// ---- the whole ------------------------------------------------------------------------------------------------------

HfConfig read_hf_config(const std::string& path, std::vector<std::string>& warnings) {
  std::error_code error;
  const bool directory = std::filesystem::is_directory(path, error);
  HfConfig hf;
  hf.source = escaped(directory ? path + "/config.json" : path);
  hf.config = parse(directory ? path + "/config.json" : path, warnings);
  const std::string generation = path + "/generation_config.json";
  if (directory && std::filesystem::exists(generation, error)) {
    hf.generation_source = escaped(generation);
    hf.generation = parse(generation, warnings);
  }
  return hf;
}

HfModel model_from_hf(const HfConfig& hf, std::vector<std::string>& warnings) {
  for (const auto& [json, source] :
       {std::pair(&hf.config, &hf.source), std::pair(&hf.generation, &hf.generation_source)}) {
    if (json->is_object() || (json == &hf.generation && json->is_null())) continue;
    fail(Exit::bad_file, "%s: got a JSON %s, expected an object", source->c_str(), json->type_name());
  }
  const Json text = text_config(hf.config);
  const HfObject config(text, hf.source, warnings, text == hf.config ? "" : "text_config."),
      generation(hf.generation, hf.generation_source, warnings);
  const Family& family = read_family(config);
  const HfRules& rules = family.hf;
  if (!config.flag("is_causal", true)) {
    config.expected("is_causal", "true: positions see those before them alone");
  }
  if (config.has("quantization_config")) {
    config.refuse("quantization_config", "got a quantized model, expected float weights. Take the original checkpoint");
  }
  ModelConfig model;
  set_family(model, family.name);
  const auto size = [](std::int64_t absent) { return absent > 0 ? Json(absent) : Json(nullptr); };
  model.vocab_size = model.tokenizer_vocab = config.integer("vocab_size", 1, kMaxVocab, size(rules.vocab_size));
  model.hidden_size = config.integer("hidden_size", 1, kMaxWidth);
  model.num_layers = config.integer("num_hidden_layers", 1, kMaxLayers);
  model.num_heads = model.num_kv_heads = config.integer("num_attention_heads", 1, kMaxHeads, size(rules.num_heads));
  model.ffn_size = config.integer("intermediate_size", 1, kMaxWidth);
  model.max_positions = config.integer("max_position_embeddings", 1, kMaxPositions, rules.max_positions);
  model.activation = read_activation(config, rules);
  model.norm_eps = config.positive(rules.norm_eps_key, rules.norm_eps);
  model.tied_embeddings = config.flag("tie_word_embeddings", rules.tied);
  const bool ties_head = model.tied_embeddings;
  if (rules.local_rope_theta > 0) model.local_rope_theta = read_local_theta(config, rules);
  rules.from_hf(config, model);
  model.rope = RopeReader(config, rules).read(model, hf.rope_theta);
  model.eos_ids = read_ids(config, generation, "eos_token_id", model.vocab_size, kMaxEosIds);
  const std::vector<std::int32_t> bos = read_ids(config, generation, "bos_token_id", model.vocab_size, 1);
  if (!bos.empty()) model.bos_id = bos.front();
  return {config_from_json(config_to_json(model), hf.source), ties_head};  // weft's own checks, as of any configuration
}

Json hf_from_model(const ModelConfig& model, const Json& original, const std::string& source, std::string& problem) {
  const Family& family = family_of(model);
  HfConfig hf;
  hf.source = source;
  hf.config = original.is_object() ? text_config(original) : Json::object();
  hf.config.erase("quantization_config");
  hf.config.erase("head_dim");
  hf.config.update({
      {"architectures", Json::array({family.hf.architecture})},
      {"model_type", family.name},
      {family.hf.activation_key, activation_name(model.activation)},
      {"vocab_size", model.vocab_size},
      {"hidden_size", model.hidden_size},
      {"intermediate_size", model.ffn_size},
      {"num_hidden_layers", model.num_layers},
      {"num_attention_heads", model.num_heads},
      {"max_position_embeddings", model.max_positions},
      {family.hf.norm_eps_key, model.norm_eps},
      {"tie_word_embeddings", model.tied_embeddings},
      {"bos_token_id", model.bos_id ? Json(*model.bos_id) : Json(nullptr)},
      {"eos_token_id", model.eos_ids.empty()       ? Json(nullptr)
                       : model.eos_ids.size() == 1 ? Json(model.eos_ids.front())
                                                   : Json(model.eos_ids)},
  });
  write_rope(model, family.hf, hf.config);
  family.hf.to_hf(model, hf.config);

  // It describes the model if reading it gives the model.
  std::vector<std::string> ignored;
  ModelConfig again = model_from_hf(hf, ignored).config;
  again.tokenizer_vocab = model.tokenizer_vocab;
  again.eos_ids = model.eos_ids;  // a file may have one twice
  const Json want = config_to_json(model), got = config_to_json(again);
  for (const auto& [key, value] : want.items()) {
    if (got.contains(key) && value == got[key]) continue;
    problem = format("model.%s: got %s, which no Hugging Face configuration of a %s model describes", key.c_str(),
                     shown(value).c_str(), family.name);
    return nullptr;
  }
  return hf.config;
}

}  // namespace weft
