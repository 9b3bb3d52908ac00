#include "llmc/infer/generate.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/text_stream.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

// Picks ids on the host.
class HostSampling {
 public:
  HostSampling(const GenerateOptions& options, std::span<const std::int32_t> prompt)
      : sampler_(options.sampler), rules_(begun_rules(options.rules, options.earlier, prompt)) {}
  std::int32_t next(std::span<const float> logits, std::int64_t position, std::span<const std::int32_t> generated) {
    if (!rules_) return sampler_.sample(logits, position);
    changed_.assign(logits.begin(), logits.end());
    apply(rules_->row(generated), kUnknownId, changed_);
    return sampler_.sample(changed_, position);
  }

 private:
  Sampler sampler_;
  std::optional<LogitRules> rules_;
  std::vector<float> changed_;
};

}  // namespace

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::end_of_text:
    case FinishReason::stop_text:
      return "stop";
    case FinishReason::max_tokens:
    case FinishReason::context_full:
      return "length";
    case FinishReason::interrupted:
      return "interrupted";
  }
  return "?";
}

const char* finish_reason_text(FinishReason reason) {
  switch (reason) {
    case FinishReason::end_of_text:
      return "the end of the text";
    case FinishReason::stop_text:
      return "a stop text";
    case FinishReason::max_tokens:
      return "--max-tokens";
    case FinishReason::context_full:
      return "the end of the context: --max-tokens asked for more";
    case FinishReason::interrupted:
      return "a signal: interrupted";
  }
  return "?";
}

double GenerateTimes::tokens_per_second() const {
  if (inter_token_ms.empty()) return std::numeric_limits<double>::quiet_NaN();
  const double total_ms = std::accumulate(inter_token_ms.begin(), inter_token_ms.end(), 0.0);
  return static_cast<double>(inter_token_ms.size()) / total_ms * 1e3;
}

GenerateResult generate(DecodeModel& model, const Tokenizer* tokenizer, std::span<const std::int32_t> prompt,
                        const GenerateOptions& options, const GenerateHooks& hooks) {
  check_prompt_fits(prompt.size(), model.length(), model.capacity());
  if (tokenizer == nullptr && !options.stop_texts.empty()) {
    fail(Exit::usage, "a stop text needs a tokenizer, and the model file has none");
  }
  GenerateResult result;
  check_logit_rules(options.rules, model.config().vocab_size, options.sampler.vocab_limit);
  TextStream text(tokenizer, prompt, options.stop_texts, options.hide_special, options.rules.min_tokens);
  const auto emit = [&](const std::string& piece) {
    if (piece.empty()) return;
    result.text += piece;
    if (hooks.on_text) hooks.on_text(piece);
  };
  // Positions that the prompt leaves in the context. The last id needs one, too, although it is not put into the cache.
  const std::int64_t room = model.capacity() - model.length() - static_cast<std::int64_t>(prompt.size());
  const std::int64_t max_ids = std::min(options.max_tokens, room);
  const auto is_stop_id = [&](std::int32_t id) {
    return std::find(options.stop_ids.begin(), options.stop_ids.end(), id) != options.stop_ids.end();
  };

  const Clock::time_point start = Clock::now();
  const auto sampled_seconds = [&model] {
    return model.samples() ? model.sampled_seconds() : in_seconds(Clock::now().time_since_epoch());
  };
  double before = 0;  // when the last id was sampled
  // Records the next id and returns whether to generate another one. finish_reason is set before each check that may
  // end the generation.
  const auto take = [&](std::int32_t id) {
    const Clock::time_point now = Clock::now();
    const double sampled = sampled_seconds();
    if (result.ids.empty()) {
      result.times.first_token_ms = in_milliseconds(now - start);
    } else {
      result.times.inter_token_ms.push_back(1e3 * (sampled - before));
    }
    before = sampled;
    result.ids.push_back(id);

    if (hooks.on_id) hooks.on_id();
    result.finish_reason = FinishReason::end_of_text;
    if (is_stop_id(id)) return false;
    emit(text.push(id));
    result.finish_reason = FinishReason::stop_text;
    if (text.stopped()) return false;
    result.finish_reason = room < options.max_tokens ? FinishReason::context_full : FinishReason::max_tokens;
    if (static_cast<std::int64_t>(result.ids.size()) >= max_ids) return false;
    result.finish_reason = FinishReason::interrupted;
    return !(hooks.interrupted && hooks.interrupted());
  };
  if (model.samples()) {
    model.generate_ids(
        prompt, {sampling_plan(options.sampler), options.stop_ids, max_ids, options.rules, options.earlier}, take);
    result.drafts = model.draft_counts();
  } else {
    HostSampling sampling(options, prompt);
    std::span<const float> logits = model.prefill(prompt);
    while (take(sampling.next(logits, model.length(), result.ids))) logits = model.decode(result.ids.back());
  }
  emit(text.finish());
  if (text.stopped()) result.finish_reason = FinishReason::stop_text;
  result.context = model.length();
  return result;
}

}  // namespace weft
