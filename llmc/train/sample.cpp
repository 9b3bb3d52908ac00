#include "llmc/train/sample.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/base/philox.h"
#include "llmc/base/signals.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/prompt.h"

namespace weft {

SampleWriter::SampleWriter(const TrainSettings& settings, const std::string& tokenizer_json, const ModelConfig& config)
    : settings_(settings), tokenizer_(Tokenizer::from_json(tokenizer_json, "tokenizer.json")) {
  prompt_ = start_ids(tokenizer_.encode(settings.sample_prompt, true), config);
  const auto wanted = static_cast<std::int64_t>(prompt_.size()) + settings.sample_tokens;
  positions_ = std::min(wanted, config.max_positions);
  if (static_cast<std::int64_t>(prompt_.size()) >= positions_) {
    fail(Exit::usage, "--sample-prompt: %zu tokens leave no place in the model's %lld positions", prompt_.size(),
         static_cast<long long>(config.max_positions));
  }
}

SampleWriter::~SampleWriter() = default;

std::string SampleWriter::write(std::int64_t step) {
  GenerateOptions options;
  options.max_tokens = decoder_->capacity() - static_cast<std::int64_t>(prompt_.size());
  options.sampler.temperature = settings_.temperature;
  options.sampler.vocab_limit = std::min(tokenizer_.vocab_size(), decoder_->config().vocab_size);
  options.stop_ids = decoder_->config().eos_ids;
  // Another seed for each step: with one seed every sample would draw the same random numbers.
  const PhiloxWords words = philox(static_cast<std::uint64_t>(settings_.seed), static_cast<std::uint64_t>(step),
                                   static_cast<std::uint64_t>(RandomStream::sampling));
  options.sampler.seed = static_cast<std::uint64_t>(words.word[1]) << 32 | words.word[0];
  GenerateHooks hooks;
  hooks.interrupted = [] { return stop_signal() != 0; };
  decoder_->reset();
  const GenerateResult result = generate(*decoder_, &tokenizer_, prompt_, options, hooks);
  return settings_.sample_prompt + result.text;
}

}  // namespace weft
