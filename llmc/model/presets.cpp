#include "llmc/model/presets.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/model/families/hf_config.h"

namespace weft {

namespace {

// A preset is a config.json: its columns are the keys that all of them have, and `more` is the rest.
struct Preset {
  const char *name, *model_type;
  std::int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, positions;
  bool tied;
  double rope_theta;
  const char* more;
};

constexpr const char* kLlama31 =
    R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192})";
constexpr const char* kLlama32 =
    R"("rope_scaling": {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192})";
constexpr const char* kPythia = R"("rotary_pct": 0.25, "use_parallel_residual": true, "layer_norm_eps": 1e-5)";
constexpr const char* kSmallEps = R"("rms_norm_eps": 1e-6)";
constexpr const char* kGemma3 =
    R"("rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000)";

constexpr Preset kPresets[] = {
    //                               L   C     NH  NKV HS   F      V       positions tied   theta    more
    {"tiny", "llama", 4, 192, 6, 2, 32, 512, 2048, 512, true, 1e4, ""},
    {"d12", "llama", 12, 768, 12, 4, 64, 2048, 50304, 8192, true, 5e5, ""},
    {"smollm2-135m", "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, true, 1e5, ""},
    {"tinyllama-1.1b", "llama", 22, 2048, 32, 4, 64, 5632, 32000, 2048, false, 1e4, ""},
    {"llama3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, true, 5e5, kLlama32},
    {"llama3.2-3b", "llama", 28, 3072, 24, 8, 128, 8192, 128256, 131072, true, 5e5, kLlama32},
    {"llama3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, false, 5e5, kLlama31},
    {"mistral-7b", "mistral", 32, 4096, 32, 8, 128, 14336, 32768, 32768, false, 1e6, R"("sliding_window": null)"},
    {"qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, true, 1e6, kSmallEps},
    {"qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 32768, true, 1e6, kSmallEps},
    {"qwen3-1.7b", "qwen3", 28, 2048, 16, 8, 128, 6144, 151936, 32768, true, 1e6, kSmallEps},
    {"qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 32768, false, 1e6, kSmallEps},
    {"smollm3-3b", "smollm3", 36, 2048, 16, 4, 128, 11008, 128256, 65536, true, 5e6, kSmallEps},
    {"gemma3-1b", "gemma3_text", 26, 1152, 4, 1, 256, 6912, 262144, 32768, true, 1e6, kGemma3},
    {"pythia-14m", "gpt_neox", 6, 128, 4, 4, 32, 512, 50304, 2048, false, 1e4, kPythia},
    {"pythia-31m", "gpt_neox", 6, 256, 8, 8, 32, 1024, 50304, 2048, false, 1e4, kPythia},
    {"pythia-70m", "gpt_neox", 6, 512, 8, 8, 64, 2048, 50304, 2048, false, 1e4, kPythia},
    {"pythia-160m", "gpt_neox", 12, 768, 12, 12, 64, 3072, 50304, 2048, false, 1e4, kPythia},
    {"pythia-410m", "gpt_neox", 24, 1024, 16, 16, 64, 4096, 50304, 2048, false, 1e4, kPythia},
    {"pythia-1b", "gpt_neox", 16, 2048, 8, 8, 256, 8192, 50304, 2048, false, 1e4, kPythia},
    {"pythia-1.4b", "gpt_neox", 24, 2048, 16, 16, 128, 8192, 50304, 2048, false, 1e4, kPythia},
    {"pythia-2.8b", "gpt_neox", 32, 2560, 32, 32, 80, 10240, 50304, 2048, false, 1e4, kPythia},
    {"pythia-6.9b", "gpt_neox", 32, 4096, 32, 32, 128, 16384, 50432, 2048, false, 1e4, kPythia},
    {"pythia-12b", "gpt_neox", 36, 5120, 40, 40, 128, 20480, 50688, 2048, false, 1e4, kPythia},
};

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

ModelConfig preset_config(const std::string& name, const char* option) {
  const Preset* const preset = std::ranges::find_if(kPresets, [&](const Preset& each) { return each.name == name; });
  if (preset == std::end(kPresets)) {
    fail(Exit::usage, "%s: got %s, expected one of %s", option, escaped(name).c_str(), preset_list().c_str());
  }
  HfConfig hf;
  hf.source = preset->name;
  hf.config = {{"model_type", preset->model_type},
               {"num_hidden_layers", preset->layers},
               {"hidden_size", preset->hidden},
               {"num_attention_heads", preset->heads},
               {"num_key_value_heads", preset->kv_heads},
               {"head_dim", preset->head_dim},
               {"intermediate_size", preset->ffn},
               {"vocab_size", preset->vocab},
               {"max_position_embeddings", preset->positions},
               {"tie_word_embeddings", preset->tied},
               {"rope_theta", preset->rope_theta},
               {"rms_norm_eps", 1e-5}};
  hf.config.update(parse_json(format("{%s}", preset->more), preset->name));
  std::vector<std::string> defaults;  // of keys that are absent
  return model_from_hf(hf, defaults).config;
}

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Preset& preset : kPresets) all.emplace_back(preset.name);
    return all;
  }();
  return names;
}

std::string preset_list() {
  std::string list;
  for (const std::string& name : preset_names()) {
    if (!list.empty()) list += name == preset_names().back() ? " or " : ", ";
    list += name;
  }
  return list;
}

bool names_config_file(const std::string& name) {
  return name.ends_with(".json") || name.find('/') != std::string::npos;
}

ModelConfig config_of_file(const std::string& path) {
  std::vector<std::string> warnings;
  ModelConfig config = model_from_hf(read_hf_config(path, warnings), warnings).config;
  for (const std::string& warning : warnings) log_warning("%s", warning.c_str());
  config.eos_ids.clear();
  config.bos_id.reset();
  return config;
}

ModelConfig random_model_config(const std::string& text, const char* option) {
  const std::size_t slash = text.rfind('/');
  const std::size_t colon = text.find(':', slash == std::string::npos ? 0 : slash);
  const std::string name = text.substr(0, colon);
  ModelConfig config = names_config_file(name) ? config_of_file(name) : preset_config(name, option);
  if (colon == std::string::npos) return config;
  config.quantization = quantization_named(text.substr(colon + 1), option);
  if (config.quantization.head != nullptr) config.tied_embeddings = false;  // as convert_hf.py has it
  return config;
}

}  // namespace weft
