#include "llmc/model/lora.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/model/tensor_names.h"

namespace weft {

namespace {

constexpr LoraTarget kOfLlama[] = {{"q", BlockLinear::qkv, 0},    {"k", BlockLinear::qkv, 1},
                                   {"v", BlockLinear::qkv, 2},    {"o", BlockLinear::output, 0},
                                   {"gate", BlockLinear::up, 0},  {"up", BlockLinear::up, 1},
                                   {"down", BlockLinear::down, 0}};
constexpr LoraTarget kOfNeox[] = {{"qkv", BlockLinear::qkv, 0},
                                  {"o", BlockLinear::output, 0},
                                  {"up", BlockLinear::up, 0},
                                  {"down", BlockLinear::down, 0}};
constexpr std::int64_t kMaxRank = 1 << 16;

const LoraTarget* find_target(LoraTargets model, std::string_view name) {
  for (const LoraTarget& target : model) {
    if (target.name == name) return &target;
  }
  return nullptr;
}

std::string joined_names(LoraTargets targets, const char* between) {
  std::string names;
  for (const LoraTarget& target : targets) {
    if (!names.empty()) names += between;
    names += target.name;
  }
  return names;
}

// These targets of a model, in its order, each once.
std::vector<LoraTarget> in_order(LoraTargets model, const std::vector<const LoraTarget*>& named) {
  std::vector<LoraTarget> targets;
  for (const LoraTarget& target : model) {
    if (std::find(named.begin(), named.end(), &target) != named.end()) targets.push_back(target);
  }
  return targets;
}

}  // namespace

LoraTargets llama_lora_targets() {
  return kOfLlama;
}

LoraTargets lora_targets(const ModelConfig& config) {
  const bool joined = names_of(config).block(0).qkv.size() == 1;
  return joined ? LoraTargets(kOfNeox) : kOfLlama;
}

std::string LoraConfig::target_names() const {
  const bool all = std::ranges::equal(targets, kOfLlama) || std::ranges::equal(targets, kOfNeox);
  return all ? "all" : joined_names(targets, ",");
}

std::vector<LoraTarget> parse_lora_targets(const std::string& option, const std::string& text, LoraTargets model) {
  if (text == "all") return {model.begin(), model.end()};
  std::vector<const LoraTarget*> named;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    named.push_back(find_target(model, name));
    if (named.back() == nullptr) {
      fail(Exit::usage, "%s: got %s, expected all, or some of %s with commas between them", option.c_str(),
           escaped(name).c_str(), joined_names(model, ", ").c_str());
    }
    begin = end + 1;
  }
  return in_order(model, named);
}

void check_lora_targets(const std::string& option, const std::string& text) {
  std::vector<LoraTarget> all(std::begin(kOfLlama), std::end(kOfLlama));
  all.push_back(kOfNeox[0]);
  parse_lora_targets(option, text, all);
}

std::string lora_unsupported_reason(const LoraConfig& lora, const ModelConfig& config) {
  const LoraTargets model = lora_targets(config);
  for (const LoraTarget& target : lora.targets) {
    if (std::find(model.begin(), model.end(), target) == model.end()) {
      return format("got a target %s of another family, expected some of %s for %s", std::string(target.name).c_str(),
                    joined_names(model, ", ").c_str(), config.family.c_str());
    }
    const std::int64_t in = linear_size(config, target.linear).C;
    const std::int64_t rows = module_rows(config, target.linear, target.module).size();
    if (lora.rank <= std::min(in, rows)) continue;
    return format("rank %lld is more than the smaller side of the model's matrix %s, [%lld, %lld]",
                  static_cast<long long>(lora.rank), std::string(target.name).c_str(), static_cast<long long>(rows),
                  static_cast<long long>(in));
  }
  return {};
}

Json lora_to_json(const LoraConfig& lora) {
  Json names = Json::array();
  for (const LoraTarget& target : lora.targets) names.push_back(target.name);
  return {{"rank", lora.rank}, {"alpha", lora.alpha}, {"targets", names}};
}

LoraConfig lora_from_json(const Json& object, const std::string& source, LoraTargets model) {
  if (!object.is_object()) fail(Exit::bad_file, "%s: expected an object", source.c_str());
  LoraConfig lora;
  lora.rank = json_int(object, "rank", 1, kMaxRank, source);
  lora.alpha = json_number(object, "alpha", source);
  const auto names = object.find("targets");
  if (names == object.end() || !names->is_array() || names->empty()) {
    fail(Exit::bad_file, "%s: targets: expected a list of names", source.c_str());
  }
  std::vector<const LoraTarget*> named;
  for (const Json& name : *names) {
    named.push_back(name.is_string() ? find_target(model, name.get<std::string>()) : nullptr);
    if (named.back() != nullptr) continue;
    fail(Exit::bad_file, "%s: targets: got %s, expected some of %s", source.c_str(), escaped(name.dump()).c_str(),
         joined_names(model, ", ").c_str());
  }
  lora.targets = in_order(model, named);
  if (!std::isfinite(lora.scale()))
    fail(Exit::bad_file, "%s: alpha: got %g, which is too large", source.c_str(), lora.alpha);
  return lora;
}

std::string lora_down_of(const std::string& module) {
  return module + ".lora_A";
}
std::string lora_up_of(const std::string& module) {
  return module + ".lora_B";
}

Range module_rows(const ModelConfig& config, BlockLinear linear, std::size_t module) {
  const auto i = static_cast<std::int64_t>(module);
  const std::int64_t rows = linear_size(config, linear).OC;
  const auto modules = std::ssize(names_of(config).block(0).linear(linear));
  if (linear != BlockLinear::qkv || modules == 1) return {rows / modules * i, rows / modules * (i + 1)};
  const std::int64_t q = config.q_size(), kv = config.kv_size();
  return i == 0 ? Range{0, q} : Range{q + kv * (i - 1), q + kv * i};
}

bool input_gradient_is_read(const std::optional<LoraConfig>& lora, std::int64_t layer, BlockLinear linear) {
  if (!lora || layer > 0) return true;
  const bool in_qkv =
      std::ranges::any_of(lora->targets, [](const LoraTarget& target) { return target.linear == BlockLinear::qkv; });
  return linear != BlockLinear::qkv && (linear != BlockLinear::output || in_qkv);
}

void add_low_rank(float* weight, const float* down, const float* up, std::int64_t rows, std::int64_t in,
                  std::int64_t rank, float scale) {
#pragma omp parallel for schedule(static)
  for (std::int64_t o = 0; o < rows; ++o) {
    for (std::int64_t r = 0; r < rank; ++r) {
      const float factor = scale * up[o * rank + r];
      for (std::int64_t c = 0; c < in; ++c) weight[o * in + c] += factor * down[r * in + c];
    }
  }
}

}  // namespace weft
