#include "llmc/model/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/limits.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& source, const std::string& problem) {
  fail(Exit::bad_file, "%s: %s", source.c_str(), problem.c_str());
}

double positive_number(const Json& object, const std::string& key, const std::string& source) {
  const double value = json_number(object, key, source);
  if (!(value > 0)) refuse(source, format("%s: got %g, expected a number above 0", key.c_str(), value));
  return value;
}

constexpr RopeType kRopeTypes[] = {RopeType::standard, RopeType::linear, RopeType::llama3, RopeType::yarn};

RopeType rope_type_from_json(const Json& object, const std::string& source) {
  const std::string name = json_string(object, "type", source);
  for (const RopeType type : kRopeTypes) {
    if (name == rope_type_name(type)) return type;
  }
  refuse(source, format("type: got %s, expected standard, linear, llama3 or yarn", escaped(name).c_str()));
}

void read_yarn(const Json& object, RopeConfig& rope, const std::string& source) {
  rope.beta_fast = positive_number(object, "beta_fast", source);
  rope.beta_slow = positive_number(object, "beta_slow", source);
  rope.truncate = json_bool(object, "truncate", source);
  rope.attention_factor = positive_number(object, "attention_factor", source);
  if (rope.original_max_positions == 0 || rope.beta_fast < rope.beta_slow || rope.theta <= 1) {
    refuse(source, "yarn scaling needs original_max_positions > 0, beta_fast >= beta_slow and theta > 1");
  }
}

RopeConfig rope_from_json(const Json& object, std::int64_t head_dim, const std::string& source) {
  RopeConfig rope;
  rope.type = rope_type_from_json(object, source);
  rope.theta = positive_number(object, "theta", source);
  rope.rotary_dim = json_int(object, "rotary_dim", 2, head_dim, source);
  if (rope.rotary_dim % 2 != 0) {
    refuse(source, format("rotary_dim: got %lld, expected an even number", static_cast<long long>(rope.rotary_dim)));
  }
  rope.factor = positive_number(object, "factor", source);
  rope.low_freq_factor = positive_number(object, "low_freq_factor", source);
  rope.high_freq_factor = positive_number(object, "high_freq_factor", source);
  rope.original_max_positions = json_int(object, "original_max_positions", 0, kMaxPositions, source);
  const bool scaled = rope.type == RopeType::llama3;
  if (scaled && (rope.original_max_positions == 0 || rope.high_freq_factor <= rope.low_freq_factor)) {
    refuse(source, "llama3 scaling needs original_max_positions > 0 and high_freq_factor > low_freq_factor");
  }
  if (rope.type == RopeType::yarn) read_yarn(object, rope, source);
  return rope;
}

std::vector<std::int32_t> ids_from_json(const Json& object, const std::string& key, std::int64_t vocab,
                                        const std::string& source) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array() || found->size() > kMaxEosIds) {
    refuse(source, key + ": expected an array of at most 64 token ids");
  }
  std::vector<std::int32_t> ids;
  for (const Json& value : *found) {
    ids.push_back(static_cast<std::int32_t>(json_int(Json{{key, value}}, key, 0, vocab - 1, source)));
  }
  return ids;
}

std::vector<std::int64_t> windows_from_json(const Json& object, std::int64_t layers, const std::string& source) {
  const auto found = object.find("windows");
  if (found == object.end()) return {};
  if (!found->is_array() || std::ssize(*found) != layers) {
    refuse(source, format("windows: expected an array of num_layers = %lld integers", static_cast<long long>(layers)));
  }
  std::vector<std::int64_t> windows;
  for (const Json& value : *found) {
    windows.push_back(json_int(Json{{"windows", value}}, "windows", 0, kMaxPositions, source));
  }
  const bool any = std::any_of(windows.begin(), windows.end(), [](std::int64_t window) { return window > 0; });
  return any ? windows : std::vector<std::int64_t>{};
}

std::vector<std::int64_t> nope_layers_from_json(const Json& object, std::int64_t layers, const std::string& source) {
  const auto found = object.find("nope_layers");
  if (found == object.end()) return {};
  if (!found->is_array() || std::ssize(*found) > layers) {
    refuse(source, format("nope_layers: expected an array of at most num_layers = %lld integers",
                          static_cast<long long>(layers)));
  }
  std::vector<std::int64_t> nope;
  for (const Json& value : *found) {
    const std::int64_t least = nope.empty() ? 0 : nope.back() + 1;
    nope.push_back(json_int(Json{{"nope_layers", value}}, "nope_layers", least, layers - 1, source));
  }
  return nope;
}

const Family& family_from_json(const Json& object, const std::string& source) {
  const std::string name = json_string(object, "family", source);
  if (const Family* family = find_family(name); family != nullptr) return *family;
  std::string known;
  for (const Family* family : families()) known += (known.empty() ? "" : " or ") + std::string(family->name);
  refuse(source, format("family: got %s, expected %s", escaped(name).c_str(), known.c_str()));
}

NormKind norm_from_json(const Json& object, const std::string& source) {
  const std::string name = json_string(object, "norm", source);
  if (name == norm_kind_name(NormKind::rmsnorm)) return NormKind::rmsnorm;
  if (name == norm_kind_name(NormKind::layernorm)) return NormKind::layernorm;
  refuse(source, format("norm: got %s, expected rmsnorm or layernorm", escaped(name).c_str()));
}

}  // namespace

const char* norm_kind_name(NormKind kind) {
  return kind == NormKind::rmsnorm ? "rmsnorm" : "layernorm";
}
const char* rope_type_name(RopeType type) {
  switch (type) {
    case RopeType::standard:
      return "standard";
    case RopeType::linear:
      return "linear";
    case RopeType::llama3:
      return "llama3";
    case RopeType::yarn:
      return "yarn";
  }
  fail(Exit::internal, "unknown rope type");
}
const char* activation_name(Activation activation) {
  switch (activation) {
    case Activation::swiglu:
      return "silu";
    case Activation::gelu:
      return "gelu";
    case Activation::gelu_tanh:
    case Activation::geglu_tanh:
      return "gelu_pytorch_tanh";
  }
  fail(Exit::internal, "unknown activation");
}

LinearSize linear_size(const ModelConfig& config, BlockLinear linear) {
  const std::int64_t C = config.hidden_size, q = config.q_size(), F = config.ffn_size;
  switch (linear) {
    case BlockLinear::qkv:
      return {C, config.qkv_size()};
    case BlockLinear::output:
      return {q, C};
    case BlockLinear::up:
      return {C, config.gated() ? 2 * F : F};
    case BlockLinear::down:
      return {F, C};
  }
  fail(Exit::internal, "unknown linear layer");
}

std::int64_t widest_input(const ModelConfig& config) {
  return std::max({config.hidden_size, config.q_size(), config.ffn_size});
}

bool ModelConfig::rotates(std::int64_t layer) const {
  return !std::binary_search(nope_layers.begin(), nope_layers.end(), layer);
}

RopeConfig ModelConfig::local_rope() const {
  RopeConfig local;
  local.theta = local_rope_theta;
  local.rotary_dim = rope.rotary_dim;
  return local;
}

float ModelConfig::score_scale() const {
  return attention_scale > 0 ? static_cast<float>(attention_scale) : 1.0f / std::sqrt(static_cast<float>(head_dim));
}

float ModelConfig::embedding_scale(DType storage) const {
  if (!scaled_embedding) return 1;
  const auto scale = static_cast<float>(std::sqrt(static_cast<double>(hidden_size)));
  if (storage == DType::bf16) return bf16_to_f32(f32_to_bf16(scale));
  if (storage == DType::f16) return f16_to_f32(f32_to_f16(scale));
  return scale;
}

std::int64_t ModelConfig::longest_window() const {
  const auto [shortest, longest] = std::minmax_element(windows.begin(), windows.end());
  return windows.empty() || *shortest == 0 ? 0 : *longest;
}

bool has_bias(const ModelConfig& config, BlockLinear linear) {
  switch (linear) {
    case BlockLinear::qkv:
      return config.qkv_bias;
    case BlockLinear::output:
      return config.output_bias;
    case BlockLinear::up:
    case BlockLinear::down:
      return config.mlp_bias;
  }
  fail(Exit::internal, "unknown linear layer");
}

const char* part_without_fused_kernel(const ModelConfig& config) {
  if (config.activation == Activation::geglu_tanh) return "GeGLU";
  if (config.norm_weight_offset != 0) return "norms with 1 + weight";
  if (config.post_norms) return "norms behind attention and MLP";
  if (config.scaled_embedding) return "scaled embeddings";
  if (config.attention_scale > 0) return "another scale of attention's scores";
  if (config.local_rope_theta > 0) return "a RoPE theta of layers with a window";
  return nullptr;
}

ModelConfig config_from_json(const Json& object, const std::string& source) {
  ModelConfig config;
  const Family& family = family_from_json(object, source);
  set_family(config, family.name);
  config.vocab_size = json_int(object, "vocab_size", 1, kMaxVocab, source);
  config.hidden_size = json_int(object, "hidden_size", 1, kMaxWidth, source);
  config.num_layers = json_int(object, "num_layers", 1, kMaxLayers, source);
  config.num_heads = json_int(object, "num_heads", 1, kMaxHeads, source);
  config.num_kv_heads = json_int(object, "num_kv_heads", 1, config.num_heads, source);
  config.head_dim = json_int(object, "head_dim", 2, kMaxHeadDim, source);
  config.ffn_size = json_int(object, "ffn_size", 1, kMaxWidth, source);
  config.max_positions = json_int(object, "max_positions", 1, kMaxPositions, source);
  config.norm_eps = positive_number(object, "norm_eps", source);
  config.norm = norm_from_json(object, source);
  const auto rope = object.find("rope");
  if (rope == object.end()) refuse(source, "rope: missing");
  config.rope = rope_from_json(*rope, config.head_dim, source + ": rope");
  config.tied_embeddings = json_bool(object, "tied_embeddings", source);
  config.parallel_residual = json_bool(object, "parallel_residual", source);
  config.output_bias = json_bool(object, "attention_bias", source);
  config.qkv_bias |= config.output_bias;
  config.windows = windows_from_json(object, config.num_layers, source);
  config.nope_layers = nope_layers_from_json(object, config.num_layers, source);
  if (object.contains("local_rope_theta"))
    config.local_rope_theta = positive_number(object, "local_rope_theta", source);
  if (object.contains("attention_scale")) config.attention_scale = positive_number(object, "attention_scale", source);
  config.tokenizer_vocab = json_int(object, "tokenizer_vocab", 1, config.vocab_size, source);
  config.eos_ids = ids_from_json(object, "eos_ids", config.vocab_size, source);
  const auto bos = object.find("bos_id");
  if (bos != object.end() && !bos->is_null()) {
    config.bos_id = static_cast<std::int32_t>(json_int(object, "bos_id", 0, config.vocab_size - 1, source));
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    refuse(source, format("num_heads: %lld is not a multiple of num_kv_heads %lld",
                          static_cast<long long>(config.num_heads), static_cast<long long>(config.num_kv_heads)));
  }
  family.read(object, source, config);
  return config;
}

Json config_to_json(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  ModelConfig fixed;  // what a family has always is not written
  set_family(fixed, config.family);
  Json object = {
      {"family", config.family},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"num_layers", config.num_layers},
      {"num_heads", config.num_heads},
      {"num_kv_heads", config.num_kv_heads},
      {"head_dim", config.head_dim},
      {"ffn_size", config.ffn_size},
      {"max_positions", config.max_positions},
      {"norm_eps", config.norm_eps},
      {"norm", norm_kind_name(config.norm)},
      {"rope",
       {{"type", rope_type_name(rope.type)},
        {"theta", rope.theta},
        {"rotary_dim", rope.rotary_dim},
        {"factor", rope.factor},
        {"low_freq_factor", rope.low_freq_factor},
        {"high_freq_factor", rope.high_freq_factor},
        {"original_max_positions", rope.original_max_positions},
        {"beta_fast", rope.beta_fast},
        {"beta_slow", rope.beta_slow},
        {"truncate", rope.truncate},
        {"attention_factor", rope.attention_factor}}},
      {"tied_embeddings", config.tied_embeddings},
      {"parallel_residual", config.parallel_residual},
      {"attention_bias", config.output_bias},
      {"mlp_bias", config.mlp_bias && !fixed.mlp_bias},
      {"activation", activation_name(config.activation)},
      {"tokenizer_vocab", config.tokenizer_vocab},
      {"eos_ids", config.eos_ids},
      {"bos_id", config.bos_id ? Json(*config.bos_id) : Json(nullptr)},
  };
  if (!config.windows.empty()) object["windows"] = config.windows;
  if (!config.nope_layers.empty()) object["nope_layers"] = config.nope_layers;
  if (config.local_rope_theta > 0) object["local_rope_theta"] = config.local_rope_theta;
  if (config.attention_scale > 0) object["attention_scale"] = config.attention_scale;
  return object;
}

namespace {

// The dimension that turns `rotations` times within the original positions.
double yarn_dimension(const RopeConfig& rope, double rotations) {
  const double positions = static_cast<double>(rope.original_max_positions);
  return static_cast<double>(rope.rotary_dim) * std::log(positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

std::vector<float> yarn_scaled(std::vector<float> frequencies, const RopeConfig& rope) {
  double low = yarn_dimension(rope, rope.beta_fast), high = yarn_dimension(rope, rope.beta_slow);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rope.rotary_dim - 1));
  if (low == high) high += 0.001;  // as transformers: a ramp has a width
  const float begin = static_cast<float>(low), width = static_cast<float>(high - low);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float scaled = 1.0f / (static_cast<float>(rope.factor) * (1.0f / frequencies[i]));
    const float kept = 1 - std::clamp((static_cast<float>(i) - begin) / width, 0.0f, 1.0f);
    frequencies[i] = scaled * (1 - kept) + frequencies[i] * kept;
  }
  return frequencies;
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const RopeConfig& rope) {
  std::vector<float> frequencies(static_cast<std::size_t>(rope.rotary_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rope.rotary_dim);
    frequencies[i] = 1.0f / static_cast<float>(std::pow(rope.theta, static_cast<double>(exponent)));
  }
  if (rope.type == RopeType::standard) return frequencies;
  if (rope.type == RopeType::yarn) return yarn_scaled(std::move(frequencies), rope);

  const float factor = static_cast<float>(rope.factor);
  if (rope.type == RopeType::linear) {
    for (float& frequency : frequencies) frequency /= factor;
    return frequencies;
  }
  const float original = static_cast<float>(rope.original_max_positions);
  const float low = static_cast<float>(rope.low_freq_factor), high = static_cast<float>(rope.high_freq_factor);
  for (float& frequency : frequencies) {
    const float wavelength = 2 * std::numbers::pi_v<float> / frequency;
    if (wavelength < original / high) continue;  // several rotations within the original context: kept
    if (wavelength > original / low) {
      frequency /= factor;
    } else {
      const float smooth = (original / wavelength - low) / (high - low);
      frequency = (1 - smooth) * frequency / factor + smooth * frequency;
    }
  }
  return frequencies;
}

RopeTable rope_table(const RopeConfig& rope, std::int64_t positions) {
  const std::vector<float> frequencies = rope_inverse_frequencies(rope);
  const float scale = static_cast<float>(rope.attention_factor);
  RopeTable table;
  table.positions = positions;
  table.half = static_cast<std::int64_t>(frequencies.size());
  table.cos.resize(static_cast<std::size_t>(positions) * frequencies.size());
  table.sin.resize(table.cos.size());
  std::size_t entry = 0;
  for (std::int64_t position = 0; position < positions; ++position) {
    for (const float frequency : frequencies) {
      const float angle = static_cast<float>(position) * frequency;  // rounded to fp32 as PyTorch's outer product is
      table.cos[entry] = static_cast<float>(std::cos(static_cast<double>(angle))) * scale;
      table.sin[entry] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale;
      ++entry;
    }
  }
  return table;
}

}  // namespace weft
