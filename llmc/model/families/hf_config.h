// Hugging Face's config.json: read as a ModelConfig, and written from one. What families share is here; what one has of
// its own is in its file (HfRules, from_hf(), to_hf()).
//
// It may have the keys of transformers 4, of transformers 5, or both if they agree. A size has no default. What else is
// absent and changes the arithmetic has the default of transformers, which a warning tells, as it does what is left
// out. What weft does not compute is refused with its key: Exit::bad_file. Keys that change neither a logit nor an id
// are ignored.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/model/config.h"

namespace weft {

struct HfConfig {
  Json config;
  Json generation = nullptr;  // generation_config.json, whose token ids take precedence; null: there is none
  std::string source = {}, generation_source = {};  // the names of both in messages
  std::optional<double> rope_theta = {};            // the user's, for a config.json that has none
};

// The files of a Hugging Face directory, or a config.json alone. Exit::bad_file.
HfConfig read_hf_config(const std::string& path, std::vector<std::string>& warnings);

struct HfModel {
  ModelConfig config;
  bool ties_head;  // the checkpoint's head is its embedding, also where weft stores it a second time
};
HfModel model_from_hf(const HfConfig& hf, std::vector<std::string>& warnings);

// The config.json of a model, which transformers 4 and 5 read alike: of `original`, where that is an object, the keys
// that do not describe the model are kept. null, with the `problem`, if no config.json describes it. `source` names the
// model in errors.
Json hf_from_model(const ModelConfig& model, const Json& original, const std::string& source, std::string& problem);

// ---- for families ---------------------------------------------------------------------------------------------------

// One object of the file, whose values are asked for by key and type. Absent and null are the same. What is wrong is
// refused with its key, what was got and what was expected.
class HfObject {
 public:
  HfObject(const Json& values, std::string source, std::vector<std::string>& warnings, std::string prefix = {})
      : values_(values), source_(std::move(source)), prefix_(std::move(prefix)), warnings_(&warnings) {}

  const Json& operator[](const std::string& key) const;
  bool has(const std::string& key) const { return !(*this)[key].is_null(); }
  bool says_null(const std::string& key) const { return !has(key) && values_.contains(key); }
  // `fallback`: what a value that is absent is taken for, with a warning; null: it has to be there.
  std::int64_t integer(const std::string& key, std::int64_t low, std::int64_t high,
                       const Json& fallback = nullptr) const;
  double positive(const std::string& key, const Json& fallback = nullptr) const;
  std::string text(const std::string& key, const Json& fallback = nullptr) const;
  bool flag(const std::string& key, bool fallback = false) const;  // without a warning
  HfObject object(const std::string& key) const;                   // empty where it is absent

  const Json& values() const { return values_; }
  std::string name(const std::string& key) const { return prefix_ + key; }
  void warn(const std::string& key, const std::string& text) const;
  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const;
  // refuse() with what the value is: "got ..., expected ...".
  [[noreturn]] void expected(const std::string& key, const std::string& what) const;

 private:
  Json with_default(const std::string& key, const Json& fallback) const;

  const Json& values_;
  std::string source_, prefix_;
  std::vector<std::string>* warnings_;
};

// What a family's classes take for keys that are absent; 0: what they do where the key is null.
struct HeadDefaults {
  std::int64_t kv_heads = 0, head_dim = 0;
};
// num_key_value_heads, if null as many as heads; head_dim, if null divided_head_dim().
void read_grouped_heads(const HfObject& config, ModelConfig& model, HeadDefaults absent = {});
void write_grouped_heads(const ModelConfig& model, Json& config);
// attention_bias, of q, k, v and o; mlp_bias, of gate, up and down.
void read_biases(const HfObject& config, ModelConfig& model);
void write_biases(const ModelConfig& model, Json& config);
// hidden_size / num_attention_heads.
std::int64_t divided_head_dim(const HfObject& config, const ModelConfig& model);
// Gives model.windows the window of the layers that `sliding` names: sliding_window, if it is not null. `absent`: what it is
// taken for where it is absent; 0: none. A window that all positions fit in is none, unless its layers rotate otherwise.
void read_windows(const HfObject& config, ModelConfig& model, const std::vector<bool>& sliding,
                  std::int64_t absent = 0);
// Whether a layer has a window, by layer_types; where there are none, by `slides`.
std::vector<bool> sliding_layers(const HfObject& config, const ModelConfig& model,
                                 const std::function<bool(std::int64_t layer)>& slides);
// read_windows() by use_sliding_window and sliding_layers().
void read_layer_windows(const HfObject& config, ModelConfig& model,
                        const std::function<bool(std::int64_t layer)>& slides, std::int64_t absent = 0);
// sliding_window, use_sliding_window and layer_types.
void write_layer_windows(const ModelConfig& model, Json& config);

}  // namespace weft
