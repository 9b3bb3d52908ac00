// What the tasks of infer_pythia have in common: the model file and its tokenizer, the device, the size of the K/V
// cache, the prompt.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "llmc/app/decode_device.h"
#include "llmc/base/sampling.h"
#include "llmc/infer/chat.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/options.h"
#include "llmc/infer/requested_rules.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/model_file.h"
#include "llmc/text/tokenizer.h"

namespace weft {

inline constexpr std::uint64_t kMaxPromptBytes = 64 << 20;
inline constexpr std::uint64_t kMaxTextBytes = 4ull << 30;
// Upper bound of the cache's positions if neither the user nor the input says how many are needed. Pythia models are
// made for at most 2,048, but a file may say millions.
inline constexpr std::int64_t kDefaultWindow = 8192;

class DecodeSession {
 public:
  // Opens and checks the model file and its tokenizer, and chooses the device. `settings` must outlive this object.
  explicit DecodeSession(const InferSettings& settings);

  const InferSettings& settings() const { return settings_; }
  const ModelFile& file() const { return file_; }
  const ModelConfig& config() const { return file_.config(); }
  const DecodeDevice& device() const { return device_; }
  // Null if the file has none.
  const Tokenizer* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
  // Exit::bad_file if the file has none.
  const Tokenizer& need_tokenizer() const;
  Tokenizer::Special special() const;
  // Null if the file has no chat format, or no tokenizer.
  const Chat* chat() const { return chat_ ? &*chat_ : nullptr; }
  // Exit::bad_file if the file has none.
  const Chat& need_chat() const;

  // --prompt, --prompt-file or --prompt-ids. `text`: as it was given, or that of the ids; empty without a tokenizer.
  struct Prompt {
    std::vector<std::int32_t> ids;
    std::string text;
  };
  Prompt prompt() const;
  const GenerateOptions& generate_options() const { return generate_; }
  const RequestedRules& requested_rules() const { return rules_; }
  // With --lookup or --draft (else no drafts): where draft tokens come from. `draft`: what load_draft() returned.
  DraftOptions draft_options(InferenceModel* draft) const;
  // The model of --draft for the sequences of `model`; null without it.
  std::unique_ptr<InferenceModel> load_draft(const InferenceModel& model) const;
  // The same for a model of one sequence.
  SequenceDraft load_sequence_draft(const InferenceModel& model) const;
  // Loads the model, with drafts if they are asked for, with a cache of `capacity` positions, and logs one line about it.
  std::unique_ptr<DecodeModel> load_model(std::int64_t capacity) const;
  // Loads the model for many sequences at once (DecodeDevice::load_inference()), and logs one line about it.
  std::unique_ptr<InferenceModel> load_inference(std::uint64_t kv_memory, std::int64_t sequences) const;

 private:
  RequestedRules read_rules() const;
  GenerateOptions make_generate_options() const;

  const InferSettings& settings_;
  DecodeDevice device_;
  ModelFile file_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Chat> chat_;
  std::optional<ModelFile> draft_file_;
  RequestedRules rules_;
  GenerateOptions generate_;
};

// Exit::usage unless both models have the same tokens: those of their tokenizers or, if neither file has a tokenizer,
// as many in their configurations. The vocabularies may be padded differently. `option`: the one that names `other`.
void check_same_tokens(const ModelFile& model, const Tokenizer* tokenizer, const ModelFile& other,
                       const std::string& option);

// The options about sampling. vocab_limit is not set: it depends on the model.
SamplerOptions sampler_options(const InferSettings& settings);
// Positions of the K/V cache: --context if it is given, otherwise `needed`, but at most those that the model was made
// for. A larger --context is Exit::usage.
std::int64_t choose_capacity(const InferSettings& settings, const ModelConfig& config, std::int64_t needed);

// Make the model of --random-model, as load_model() and load_inference() load one, and log one line about it.
std::unique_ptr<DecodeModel> make_random_model(const InferSettings& settings, const DecodeDevice& device,
                                               const ModelConfig& config, std::int64_t capacity);
std::unique_ptr<InferenceModel> make_random_inference(const InferSettings& settings, const DecodeDevice& device,
                                                      const ModelConfig& config, std::int64_t sequences);

}  // namespace weft
