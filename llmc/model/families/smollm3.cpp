// SmolLM3 (Bakouch et al., 2025): a Llama of which every fourth layer does not rotate q and k.
#include <algorithm>

#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"
#include "llmc/model/limits.h"

namespace weft {

namespace {

// no_rope_layers has 1 for a layer that rotates.
void read_nope_layers(const HfObject& config, ModelConfig& model) {
  const Json& layers = config["no_rope_layers"];
  if (layers.is_null()) {
    const std::int64_t interval = config.integer("no_rope_layer_interval", 1, kMaxLayers, 4);
    for (std::int64_t l = interval - 1; l < model.num_layers; l += interval) model.nope_layers.push_back(l);
    return;
  }
  const auto known = [](const Json& value) { return value == 0 || value == 1; };
  if (!layers.is_array() || std::ssize(layers) < model.num_layers || !std::all_of(layers.begin(), layers.end(), known))
    config.refuse("no_rope_layers", "expected 0 or 1 for each of " + std::to_string(model.num_layers) + " layers");
  for (std::int64_t l = 0; l < model.num_layers; ++l) {
    if (layers[static_cast<std::size_t>(l)] == 0) model.nope_layers.push_back(l);
  }
}

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model, {.kv_heads = 4});
  read_biases(config, model);
  read_nope_layers(config, model);
  read_layer_windows(config, model, [&](std::int64_t l) { return !model.rotates(l); });
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  write_biases(model, config);
  config.erase("no_rope_layer_interval");
  config["no_rope_layers"] = Json::array();
  for (std::int64_t l = 0; l < model.num_layers; ++l) config["no_rope_layers"].push_back(model.rotates(l) ? 1 : 0);
  write_layer_windows(model, config);
  if (!config.contains("pad_token_id"))
    config["pad_token_id"] = nullptr;  // else 128004, which a small vocabulary has not
}

}  // namespace

constinit const Family kSmolLm3 = {
    .name = "smollm3",
    .hf = {.architecture = "SmolLM3ForCausalLM",
           .from_hf = from_hf,
           .to_hf = to_hf,
           .tied = true,
           .max_positions = 32768,
           .rope_theta = 2000000},
};

}  // namespace weft
