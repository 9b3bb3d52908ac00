// Mistral (Jiang et al., 2023): a Llama whose positions may see a window of keys alone. Mistral 7B, Nemo, Small, Ministral.
#include "llmc/base/json.h"
#include "llmc/model/families/family.h"
#include "llmc/model/families/hf_config.h"

namespace weft {

namespace {

void from_hf(const HfObject& config, ModelConfig& model) {
  read_grouped_heads(config, model, {.kv_heads = 8});
  read_windows(
      config, model, [](std::int64_t) { return true; }, 4096);
}

void to_hf(const ModelConfig& model, Json& config) {
  write_grouped_heads(model, config);
  config["sliding_window"] = model.windows.empty() ? Json(nullptr) : Json(model.windows.front());
}

}  // namespace

constinit const Family kMistral = {
    .name = "mistral",
    .hf = {.architecture = "MistralForCausalLM", .from_hf = from_hf, .to_hf = to_hf, .max_positions = 4096 * 32},
};

}  // namespace weft
