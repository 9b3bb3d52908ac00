#include "llmc/model/random_models.h"

#include <algorithm>
#include <string_view>

#include "llmc/base/error.h"

namespace weft {

namespace {

struct Size {
  const char* name;
  std::int64_t layers, hidden, heads, vocab;
};
constexpr Size kSizes[] = {
    {"pythia-14m", 6, 128, 4, 50304},     {"pythia-31m", 6, 256, 8, 50304},     {"pythia-70m", 6, 512, 8, 50304},
    {"pythia-160m", 12, 768, 12, 50304},  {"pythia-410m", 24, 1024, 16, 50304}, {"pythia-1b", 16, 2048, 8, 50304},
    {"pythia-1.4b", 24, 2048, 16, 50304}, {"pythia-2.8b", 32, 2560, 32, 50304}, {"pythia-6.9b", 32, 4096, 32, 50432},
    {"pythia-12b", 36, 5120, 40, 50688},
};

ModelConfig pythia_config(const Size& size) {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = size.vocab;
  config.hidden_size = size.hidden;
  config.num_layers = size.layers;
  config.num_heads = config.num_kv_heads = size.heads;
  config.head_dim = size.hidden / size.heads;
  config.ffn_size = 4 * size.hidden;
  config.max_positions = 2048;
  config.norm_eps = 1e-5;
  config.norm = NormKind::layernorm;
  config.rope.theta = 10000;
  config.rope.rotary_dim = config.head_dim / 4;
  config.parallel_residual = true;
  config.qkv_bias = config.output_bias = true;
  config.tokenizer_vocab = 50277;
  config.eos_ids = {0};
  return config;
}

Quantization quantization_named(const std::string& text, const char* option) {
  constexpr std::string_view kHead = "+head";
  const bool head = text.ends_with(kHead);
  const WeightFormat* const format = find_weight_format(head ? text.substr(0, text.size() - kHead.size()) : text);
  if (format == nullptr) {
    fail(Exit::usage, "%s: got weights in %s, expected %s, and +head for a head in %s", option, escaped(text).c_str(),
         weight_format_names().c_str(), weight_format_names(true).c_str());
  }
  return {format, head ? *std::ranges::find_if(weight_formats(), &WeightFormat::of_head) : nullptr};
}

}  // namespace

ModelConfig random_model_config(const std::string& name, const char* option) {
  if (const std::size_t colon = name.find(':'); colon != std::string::npos) {
    ModelConfig config = random_model_config(name.substr(0, colon), option);
    config.quantization = quantization_named(name.substr(colon + 1), option);
    if (config.quantization.head != nullptr) config.tied_embeddings = false;  // as convert_hf.py has it
    return config;
  }
  for (const Size& size : kSizes) {
    if (name == size.name) return pythia_config(size);
  }
  if (std::ranges::count(preset_names(), name) > 0) return preset_config(name);
  std::string known;
  for (const std::string& each : random_model_names()) known += (known.empty() ? "" : ", ") + each;
  fail(Exit::usage, "%s: got %s, expected one of %s", option, escaped(name).c_str(), known.c_str());
}

std::vector<std::string> random_model_names() {
  std::vector<std::string> names;
  for (const Size& size : kSizes) names.emplace_back(size.name);
  names.insert(names.end(), preset_names().begin(), preset_names().end());
  return names;
}

}  // namespace weft
