// Mistral (Jiang et al., 2023): a Llama whose positions may see a window of keys alone, in all layers, or with layer_types in some.
// Mistral 7B, Nemo, Small, Ministral.
#include <algorithm>
#include <functional>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"

namespace weft {

namespace {

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model, {.kv_heads = 8});
  const std::vector<bool> sliding = sliding_layers(config, model, [](std::int64_t) { return true; });
  read_windows(config, model, sliding, 4096);
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  write_layer_windows(model, config);
  config.erase("use_sliding_window");
  const bool alike =
      std::adjacent_find(model.windows.begin(), model.windows.end(), std::not_equal_to<>()) == model.windows.end();
  if (alike) config.erase("layer_types");
}

}  // namespace

constinit const Family kMistral = {
    .name = "mistral",
    .hf = {.architecture = "MistralForCausalLM", .from_hf = from_hf, .to_hf = to_hf, .max_positions = 4096 * 32},
};

}  // namespace weft
